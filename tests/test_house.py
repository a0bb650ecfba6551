"""The house keeps its order: few doors, imports one way, one meaning for a name, tests beside what they test."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "coterie"
SOURCES = {path.relative_to(ROOT): ast.parse(path.read_text("utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
ROOMS = sorted(path.parent for path in SOURCES if path.name == "__init__.py")

DEFERRED = {
    "coterie.engine.kernels": "needs triton",
    "coterie.flower.keys": "needs cryptography, which flwr brings",
    "coterie.flower.processes": "needs cryptography, which flwr brings",
}
"""Modules that functions may import, because a package of theirs is optional."""
OF_ALL = {"conformance": "every method and aggregator", "end_to_end": "the whole"}
"""Folders of tests that belong to no single room."""
WHOLE = {
    "": "test_docs test_examples test_house test_walk",
    "advise/": "test_advise",
    "aggregators/": "test_aggregators",
    "data/readers/": "test_fuzz test_large",
    "engine/": "test_cuda",
    "flower/": "test_conformance test_faults test_frozen test_hostile test_hostile_real test_old_folders test_ranks "
    "test_real",
    "optimizers/": "test_optimizers",
    "metrics/": "test_metrics",
    "methods/": "test_aggregation test_decoupled test_low_rank test_moving test_personal_adapters test_ranks "
    "test_reductions test_regularised test_size test_words",
    "models/": "test_models test_more_models test_user_models",
    "presets/": "test_presets",
    "report/": "test_browser test_colours test_names test_report",
}
"""Files of tests that belong to a room rather than to one of its modules."""


def linted(root):
    """What the import check says about a package that lies in `root`."""
    lint = Path(sys.executable).parent / "lint-imports"
    command = [lint, "--no-cache", "--no-logo", "--config", ROOT / "pyproject.toml"]
    return subprocess.run(command, cwd=root, env={"PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("file", "line", "said"),
    [
        ("errors.py", "", "0 broken"),
        ("contract/records.py", "import coterie.engine", "coterie.contract is not allowed to import coterie.engine"),
        ("data/partition.py", "from coterie import Result", "coterie.data is not allowed to import coterie.running"),
        ("evaluation/score.py", "import coterie.evaluation.summary", "No cycles are allowed in coterie.evaluation"),
    ],
)
def test_a_forbidden_import_is_found(file, line, said, tmp_path):
    """One line in a copy of the package. `Result` lies in running, so even the public name is too high for data."""
    shutil.copytree(PACKAGE, tmp_path / "coterie", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "coterie" / file).open("a") as source:
        source.write(f"\n{line}\n")
    done = linted(tmp_path)
    assert said in " ".join(done.stdout.split()), done.stdout + done.stderr
    assert (done.returncode == 0) == (not line)


def test_at_most_eight_modules_lie_beside_the_rooms():
    assert len(list(PACKAGE.glob("*.py"))) <= 8


def test_no_two_classes_have_one_name():
    places = defaultdict(list)
    for path, tree in SOURCES.items():
        for one in ast.walk(tree):
            if isinstance(one, ast.ClassDef):
                places[one.name].append(str(path))
    assert not {name: found for name, found in places.items() if len(found) > 1}


def imported(function):
    """The modules of the package that a function imports: `from coterie import data` may mean coterie.data."""
    for one in ast.walk(function):
        if isinstance(one, ast.Import):
            yield from (alias.name for alias in one.names if alias.name.split(".")[0] == "coterie")
        elif isinstance(one, ast.ImportFrom) and (one.level or (one.module or "").split(".")[0] == "coterie"):
            inside = [f"{one.module}.{alias.name}" for alias in one.names]
            modules = [name for name in inside if (ROOT / name.replace(".", "/")).with_suffix(".py").exists()]
            yield from modules or [one.module]


def test_no_function_imports_what_the_top_of_its_file_could():
    """Not to dodge a circle, that is. The command line may: a start of one command does not pay for the others."""
    found = [
        f"{path}: {name}"
        for path, tree in SOURCES.items() if path.parts[1] != "cli"
        for function in ast.walk(tree) if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for name in imported(function) if name not in DEFERRED
    ]
    assert not found


@pytest.mark.parametrize("room", ROOMS, ids=str)
def test_a_room_says_in_a_sentence_what_it_is_for(room):
    said = ast.get_docstring(SOURCES[room / "__init__.py"])
    assert said
    sentence = said.splitlines()[0]
    assert sentence.endswith(".")
    assert len(sentence.split()) >= 4


def test_every_folder_of_tests_is_that_of_a_room():
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    rooms = {room.relative_to("coterie") for room in ROOMS}
    assert folders - rooms - {Path(name) for name in OF_ALL} == set()


ONE_PLACE = {
    "json in files": (r"json\.load\(|json\.loads\(.*read_(text|bytes)|write_text\(json\.dumps", {"files.py"}),
    "running a file": (r"exec_module|\bexec\(|\bcompile\(c|runpy|SourceFileLoader", {"trust/code.py"}),
    "writing a picture": (r"\.savefig\(", {"report/bubbles.py"}),
    "PyTorch's switches": (r"allow_tf32", {"engine/arithmetic.py"}),
    "what a server's tensors are called": (r"[\"']server\.(?!key|crt)", set()),
    "what a server tells and admits": (r"method\.(hello|admit)\(", {"running/server.py"}),
    "how a client arrives": (r"method\.(introduce|join)\(", {"running/clients.py"}),
    "layers that take tokens": (r"nn\.EmbeddingBag|isinstance\(.*nn\.Embedding", {"running/spec.py"}),
    "baselines": (r"\((\"local\", \"fedavg\"|\"fedavg\", \"local\")\)", {"running/runs.py"}),
    "thinning": (r"np\.unique\(np\.linspace|linspace\(.*\.round\(\)", {"report/series.py"}),
    "numbers by model": (r"\"clients_per_model\"", {"contract/shapes.py", "methods/ifca.py", "report/few_models.py"}),
    "the type of rows": (r"float64 if .*precision", {"engine/arithmetic.py"}),
    "how a metric is read": (r"== [\"'](accuracy|MSE)[\"']|(accuracy|MSE)[\"'] ==", set()),
}
"""What has one rule: how a copy of it would begin, and where the rule stands."""


@pytest.mark.parametrize("what", ONE_PLACE)
def test_a_rule_stands_in_one_place(what):
    """Each of these had copies, and some of the copies disagreed."""
    copy, places = ONE_PLACE[what]
    lines = [
        (path.relative_to("coterie").as_posix(), line)
        for path in SOURCES for line in (ROOT / path).read_text("utf-8").splitlines() if re.search(copy, line)
    ]
    assert {path for path, _ in lines} == places, lines


PRINTING = {"print", "Console", "input", "typer.echo", "typer.secho", "click.echo", "click.secho", "rich.print",
            "sys.stdout.write", "sys.stderr.write", "Text.from_markup", "logging.Formatter"}


def prints(call):
    """Whether a call brings text to a terminal or a log by itself."""
    name, options = ast.unparse(call.func), {one.arg for one in call.keywords}
    return name in PRINTING or (name == "logging.basicConfig" and "handlers" not in options) or (
        name == "TextColumn" and isinstance(call.args[0], ast.Constant) and "{" in call.args[0].value
        and "markup" not in options)


def test_nothing_is_printed_but_by_the_screen():
    """Text from others would steer the terminal; `errors.tell` and `report.screen` are where that is looked after."""
    found = {
        path.relative_to("coterie").as_posix() for path, tree in SOURCES.items()
        for one in ast.walk(tree) if isinstance(one, ast.Call) and prints(one)
    }
    assert found == {"errors.py"}


def test_every_file_of_tests_is_that_of_a_module():
    """Or of its whole room, which is listed here, so that a module that moves takes its tests along."""
    found = {
        path.relative_to(ROOT / "tests").as_posix() for path in (ROOT / "tests").rglob("test_*.py")
        if path.parent.name not in OF_ALL
    }
    modules = {path.relative_to("coterie") for path in SOURCES} | {room.relative_to("coterie") for room in ROOMS}
    theirs = {(one.parent / f"test_{one.stem.strip('_')}.py").as_posix() for one in modules}
    assert found - theirs == {f"{room}{name}.py" for room, names in WHOLE.items() for name in names.split()}


def test_every_benchmark_is_explained():
    page = (ROOT / "benchmarks" / "README.md").read_text("utf-8")
    listed = re.findall(r"^\| \[(\w+)\.py\]\((\w+)\.py\) \|", page, re.MULTILINE)
    assert sorted(listed) == [(path.stem, path.stem) for path in sorted((ROOT / "benchmarks").glob("*.py"))]


def test_the_floor_plan_is_the_house():
    """Every room stands in CONTRIBUTING's plan and every file of its table exists."""
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    plan = page.partition("```text\ncoterie/\n")[2].partition("\ntests/")[0]
    rooms = set(re.findall(r"^  (\w+)/ ", plan, re.MULTILINE))
    assert rooms == {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    alone = {"__init__", "__main__", *re.search(r"^  ((?:\w+ )+)  ", plan, re.MULTILINE)[1].split(), "registry"}
    assert alone == {path.stem for path in PACKAGE.glob("*.py")}
    named = {name for name in re.findall(r"`(coterie/[\w/]+\.py)`", page) if not re.search("NAME|GROUP|mix", name)}
    assert not {name for name in named if not (ROOT / name).exists()}
