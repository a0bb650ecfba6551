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
