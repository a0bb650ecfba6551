"""Somebody else's run folders, model files and TOML files are data: nothing of theirs runs, nothing is written outside.

Each case is a folder as somebody hostile would write it, digests included, and a command on it. A code file that runs
leaves a canary; the folder's surroundings are compared before and after, and every command says what it did.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import pickle
import py_compile
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from types import SimpleNamespace

import numpy as np
import pytest
from commands import exit_code
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from coterie import cli
from coterie.report import watch
from coterie.running.folder import Folder, environment, sealed

CODE = '''
"""A file that says in the canary that it ran."""
import os
from dataclasses import dataclass

if "CANARY" in os.environ:
    with open(os.environ["CANARY"], "a") as file:
        file.write(__name__)

import torch.nn.functional as F

from coterie.methods.fedavg import FedAvg
from coterie.metrics.accuracy import Accuracy
from coterie.models import Linear
from coterie.optimizers.sgd import SGD


@dataclass(frozen=True)
class Mine(FedAvg):
    """FedAvg under another name."""


@dataclass(frozen=True)
class Right(Accuracy):
    """Accuracy under another name."""


@dataclass(frozen=True)
class Steps(SGD):
    """SGD under another name."""


class Net(Linear):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)


def loss(outputs, y):
    return F.cross_entropy(outputs, y, reduction="none")


def tokens(text):
    return [1 + len(word) for word in text.split()]
'''
SMALL = ["--data", "data.npz", "--model", "linear", "--rounds", "1", "--set", "device=cpu"]
EXPORT = ["export", "run", "--model", "0", "-o", "out/model.safetensors"]
PERSONALIZE = ["personalize", "run", "--data", "data.npz", "--client", "a", "-o", "out/model.safetensors"]
COMPUTE = {"resume": ["resume", "run"], "export": EXPORT, "personalize": PERSONALIZE}
LOOK = {"show": ["show", "run"], "markdown": ["show", "run", "--markdown"]}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """An honest run and an honest comparison, and the data that both name."""
    place = tmp_path_factory.mktemp("made")
    x = np.random.default_rng(0).normal(size=(60, 4)).astype("f4")
    np.savez(place / "data.npz", x=x, y=np.arange(60) % 3, client=np.repeat(list("abc"), 20))
    (place / "table.csv").write_text("said,label\n" + "".join(f"word {k},{'xy'[k % 2]}\n" for k in range(40)))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert exit_code(patch, "run", "fedavg", *SMALL, "--out", "run") == 0
        assert exit_code(patch, "compare", "fedavg", *SMALL, "--out", "compared") == 0
    return place


@pytest.fixture
def box(made, tmp_path, monkeypatch, capsys):
    """A home, a folder to work in with copies of both, and something worth protecting beside it."""
    home, here = tmp_path / "home", tmp_path / "work"
    (home / ".config" / "coterie").mkdir(parents=True)
    (home / "precious").write_text("precious\n")
    (home / "documents").mkdir()
    shutil.copytree(made, here)
    for record in here.rglob("experiment.json"):
        record.write_text(record.read_text().replace(str(made), str(here)))
        reseal(record, lambda values: None)
    (here / "out").mkdir()
    canary = tmp_path / "canary"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("COTERIE_TRUSTED")
    monkeypatch.setenv("CANARY", str(canary))
    monkeypatch.chdir(here)
    (here / "run" / "evil.py").write_text(CODE)

    def run(*words):
        """The command: exit code and what it said; a command that waits for ever is a failure."""
        monkeypatch.setattr(sys, "argv", ["coterie", *map(str, words)])
        signal.signal(signal.SIGALRM, _too_long)
        signal.alarm(60)
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        finally:
            signal.alarm(0)
        said = capsys.readouterr()
        return code, said.out, said.err

    return SimpleNamespace(home=home, here=here, canary=canary, run=run, evil=here / "run" / "evil.py")


def _too_long(number, frame):
    raise AssertionError("the command waits for ever")


def reseal(path, change):
    """Edit a record as somebody would who knows of its digest."""
    values = json.loads(path.read_text())
    values.pop("sha256", None)
    change(values)
    path.write_text(json.dumps(sealed(values)))


def held(place):
    """Every file below a place with its content and mode; links as links."""
    found = {}
    for path in sorted(place.rglob("*")):
        if path.is_symlink():
            found[str(path)] = os.readlink(path)
        elif path.is_file():
            found[str(path)] = (path.read_bytes(), path.stat().st_mode)
    return found


def unharmed(box, before):
    """Nothing ran, and nothing changed at home."""
    assert not box.canary.exists(), box.canary.read_text()
    assert held(box.home) == before


# -- code files in a run folder's records ------------------------------------------------------------------------------

KINDS = ("method", "model", "loss", "metric", "watch", "optimizer", "server", "tokenizer")


def name_code(box, kind, folder="run", copied=False):
    """Let the records of a run name a code file of its own, maybe with a copy and a digest as a run would have made."""
    place, path = box.here / folder, str(box.evil)
    kept = {}
    if copied:
        digest = hashlib.sha256(CODE.encode()).hexdigest()
        (place / "code" / digest[:12]).mkdir(parents=True)
        (place / "code" / digest[:12] / "evil.py").write_text(CODE)
        kept = {"code": {path: digest}}

    def of_training(training):
        name = {"metric": "Right", "optimizer": "Steps", "server": "Steps(lr=1.0)"}
        if kind in name:
            training[kind] = f"{path}:{name[kind]}"
        if kind == "watch":
            training["watch"] = [f"{path}:Right"]

    def of_experiment(values):
        asked = values["experiment"]
        if kind == "method":
            asked["methods"] = [f"{path}:Mine"]
        if kind in ("model", "loss"):
            asked[kind] = f"{path}:{'Net' if kind == 'model' else 'loss'}"
        if kind == "tokenizer":
            asked["data"] = f"{box.here / 'table.csv'}:text=said,tokenizer={path}:tokens"
        of_training(asked["training"])
        values.update(kept)

    def of_config(values):
        if kind == "method":
            values["method"] = f"{path}:Mine"
        of_training(values["training"])
        values.update(kept if kind in ("method", "metric", "watch", "optimizer", "server") else {})

    reseal(place / "experiment.json", of_experiment)
    for config in [place / "config.json", place / "fedavg" / "seed0" / "config.json"]:
        if config.exists():
            reseal(config, of_config)
    (place / "result.json").unlink(missing_ok=True)


@pytest.mark.parametrize("copied", [False, True], ids=["by its path", "as a copy"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("words", COMPUTE.values(), ids=COMPUTE)
def test_a_code_file_that_a_folder_names_does_not_run(box, words, kind, copied):
    """Resume, export and personalize end in a sentence with the file, its digest and what to do."""
    name_code(box, kind, copied=copied)
    before = held(box.home)
    code, _, said = box.run(*words)
    unharmed(box, before)
    assert code == 2
    assert "evil.py" in said
    assert hashlib.sha256(CODE.encode()).hexdigest() in said
    assert "--trust" in said
    assert not list((box.here / "out").iterdir())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("words", LOOK.values(), ids=LOOK)
def test_looking_at_a_folder_needs_no_code(box, words, kind):
    """The tables are made of records."""
    name_code(box, kind)
    before = held(box.here) | held(box.home)
    code, shown, _ = box.run(*words)
    assert not box.canary.exists()
    assert held(box.here) | held(box.home) == before
    assert code == 0
    assert "served" in shown or "unfinished" in shown


def watched(folder):
    """The page as `coterie watch` serves it, by one request."""
    with watch.server([folder]) as server:
        answering = threading.Thread(target=server.handle_request)
        answering.start()
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_address[1]}/", timeout=20) as answer:
            text = answer.read().decode()
        answering.join()
    return text


@pytest.mark.parametrize("kind", KINDS)
def test_watching_a_folder_needs_no_code(box, kind):
    """Python reads the folder here, without the command line's rule."""
    name_code(box, kind)
    before = held(box.here) | held(box.home)
    assert "<title>" in watched(box.here / "run")
    assert not box.canary.exists()
    assert held(box.here) | held(box.home) == before


def test_a_report_needs_no_code(box):
    """All kinds at once; it writes into the folder alone."""
    for kind in KINDS:
        name_code(box, kind)
    before = held(box.home)
    code, shown, _ = box.run("report", "run")
    unharmed(box, before)
    assert code == 0
    assert "report: run/report.html" in shown


@pytest.mark.parametrize("words", [["show", "compared"], ["resume", "compared"]], ids=["show", "resume"])
@pytest.mark.parametrize("kind", ["method", "optimizer"])
def test_a_comparison_that_names_a_code_file(box, words, kind):
    (box.here / "compared" / "evil.py").write_text(CODE)
    name_code(box, kind, "compared")
    before = held(box.home)
    code, _, said = box.run(*words)
    unharmed(box, before)
    assert code == (0 if words[0] == "show" else 2)
    assert words[0] == "show" or "--trust" in said


@pytest.mark.parametrize("command", ["show", "watch"])
def test_the_name_of_a_column_is_no_spelling(box, command):
    """clients.csv names its metrics; one of them is spelled like a metric in a file."""
    path = box.here / "run" / "clients.csv"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0] + f",{box.evil}:Right", *(f"{line},0.5" for line in lines[1:])]) + "\n")
    before = held(box.home)
    assert "evil.py:Right" in (watched(box.here / "run") if command == "watch" else box.run("show", "run")[1])
    unharmed(box, before)


@pytest.mark.parametrize("path", ["../evil.py", "{run}/../run/evil.py", "evil.py", "~/evil.py"])
def test_paths_of_any_form_are_not_run(box, path, monkeypatch):
    """Relative to where one stands, with dots, at home: the rule is the content's digest."""
    for place in (box.here, box.here.parent, box.home):
        (place / "evil.py").write_text(CODE)
    spelled = path.format(run=box.here / "run")
    for name, key in (("experiment.json", "experiment"), ("config.json", "")):
        def change(values, key=key):
            if key:
                values["experiment"]["methods"] = [f"{spelled}:Mine"]
            else:
                values["method"] = f"{spelled}:Mine"
        reseal(box.here / "run" / name, change)
    before = held(box.home)
    for words in COMPUTE.values():
        code, _, said = box.run(*words)
        unharmed(box, before)
        assert code == 2
        assert "evil.py" in said


@pytest.mark.parametrize("table", [
    {"/x/evil.py": "../../../evil"}, {"/x/evil.py": 7}, {"evil.py": "0" * 64}, {"/x/evil.txt": "0" * 64}, ["evil.py"],
    {"/x/evil.py": "0" * 64},
], ids=["a path for a digest", "a number", "a relative path", "no code", "a list", "no copy"])
def test_a_table_of_copies_that_is_none(box, table):
    """Where copies lie is not taken from the record, so a table cannot lead elsewhere."""
    reseal(box.here / "run" / "experiment.json", lambda values: values.update(code=table))
    before = held(box.home)
    code, _, said = box.run("resume", "run")
    unharmed(box, before)
    assert code == 2
    assert "is damaged" in said or "is not the copy" in said


def test_a_copy_with_another_content_than_its_digest(box):
    """The record names a content that this user trusts; the copy is another."""
    name_code(box, "method", copied=True)
    digest = hashlib.sha256(CODE.encode()).hexdigest()
    (box.home / ".config/coterie/trusted").write_text(f"{digest}  evil.py\n")
    (box.home / ".config/coterie/trusted").chmod(0o600)
    (box.here / "run" / "code" / digest[:12] / "evil.py").write_text(CODE + "\n# other\n")
    box.evil.write_text(CODE + "\n# other\n")
    before = held(box.home)
    code, _, said = box.run("resume", "run")
    unharmed(box, before)
    assert code == 2
    assert "is not the copy the run made of it" in said


def test_a_compiled_file_beside_the_copy_is_not_what_runs(box):
    """Python would take __pycache__ for the source; the digest is the source's."""
    name_code(box, "model", copied=True)
    digest = hashlib.sha256(CODE.encode()).hexdigest()
    (box.home / ".config/coterie/trusted").write_text(f"{digest}  evil.py\n")
    (box.home / ".config/coterie/trusted").chmod(0o600)
    copy = box.here / "run" / "code" / digest[:12] / "evil.py"
    other = copy.with_name("other.py")
    other.write_text(CODE.replace("file.write(__name__)", "file.write('compiled')"))
    cached = importlib.util.cache_from_source(str(copy))
    py_compile.compile(str(other), cached, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    assert box.run("resume", "run")[0] in (0, 2)
    assert "compiled" not in box.canary.read_text()


# -- a lone model file -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["model", "method"])
def test_a_lone_model_file_whose_header_names_code(box, field):
    """`coterie export model.safetensors -o model.pt` builds the module that the header names."""
    assert box.run(*EXPORT)[0] == 0
    path = box.here / "out" / "model.safetensors"
    with safe_open(path, "pt") as file:
        meta = json.loads(file.metadata()["coterie"])
    meta["job"][field] = f"{box.evil}:{'Net' if field == 'model' else 'Mine'}"
    save_file(load_file(path), box.here / "lone.safetensors", metadata={"coterie": json.dumps(meta)})
    before = held(box.home)
    code, _, said = box.run("export", "lone.safetensors", "-o", "out/lone.pt")
    unharmed(box, before)
    assert code == 2
    assert "evil.py" in said
    assert "--trust" in said
    code, _, said = box.run("export", "lone.safetensors", "-o", "out/lone.pt", "--trust")
    assert code == 0, said
    assert box.canary.exists()
    assert (box.here / "out" / "lone.pt").exists()


# -- TOML files --------------------------------------------------------------------------------------------------------

TOML = {
    "method": 'methods = ["evil.py:Mine"]\n',
    "model": 'methods = ["fedavg"]\nmodel = "evil.py:Net"\n',
    "loss": 'methods = ["fedavg"]\nloss = "evil.py:loss"\n',
    "metric": 'methods = ["fedavg"]\n[training]\nmetric = "evil.py:Right"\n',
    "optimizer": 'methods = ["fedavg"]\n[training]\noptimizer = "evil.py:Steps"\n',
    "method's optimizer": 'methods = ["fedavg:server=evil.py:Steps(lr=1.0)"]\n',
    "extended": 'extends = "base.toml"\n',
}


@pytest.mark.parametrize("kind", TOML)
def test_a_toml_file_that_names_code(box, kind):
    """`run --config` asks; `data --config` looks at the data without it."""
    (box.here / "run" / "their.toml").write_text('data = "../data.npz"\n' + TOML[kind])
    (box.here / "run" / "base.toml").write_text(TOML["method"])
    before = held(box.home)
    code, _, said = box.run("run", "--config", "run/their.toml", "--rounds", "1", "--out", "out/new")
    unharmed(box, before)
    assert code == 2
    assert "evil.py" in said
    assert "--trust" in said
    assert not (box.here / "out" / "new").exists()
    code, shown, _ = box.run("data", "--config", "run/their.toml")
    unharmed(box, before)
    assert code == 0
    assert "3 train, 0 unseen" in shown


def test_a_toml_file_whose_data_need_code(box):
    (box.here / "run" / "their.toml").write_text('data = "../table.csv:text=said,tokenizer=evil.py:tokens"\n')
    before = held(box.home)
    code, _, said = box.run("data", "--config", "run/their.toml")
    unharmed(box, before)
    assert code == 2
    assert "--trust" in said


@pytest.mark.parametrize("words", [["resume", "run"], ["data", "--config", "their.toml"]], ids=["record", "toml"])
def test_a_schema_is_not_written_where_somebody_else_says(box, words):
    """A table's spelling may ask for a new file with its encoding."""
    data = f"{box.here / 'table.csv'}:text=said,schema={box.home / 'documents' / 'new.json'}"
    reseal(box.here / "run" / "experiment.json", lambda values: values["experiment"].update(data=data))
    (box.here / "their.toml").write_text(f'data = "{data}"\n')
    before = held(box.home)
    code, _, said = box.run(*words)
    unharmed(box, before)
    assert code == 2
    assert "new.json" in said


# -- pickles -----------------------------------------------------------------------------------------------------------


class Bomb:
    def __reduce__(self):
        return open, (os.environ["CANARY"], "w")


@pytest.mark.parametrize("words", [*COMPUTE.values(), LOOK["show"]], ids=[*COMPUTE, "show"])
def test_a_pickle_in_place_of_the_checkpoint(box, words):
    (box.here / "run" / "checkpoint.safetensors").write_bytes(pickle.dumps(Bomb()))
    (box.here / "run" / "result.json").unlink()
    before = held(box.home)
    code, _, said = box.run(*words)
    unharmed(box, before)
    assert code == (0 if words[0] == "show" else 2)
    assert words[0] == "show" or "damaged or not one of coterie's" in said


def test_pickled_arrays_in_the_data_of_a_run(box):
    np.savez(box.here / "data.npz", x=np.array([Bomb()], dtype=object), y=np.zeros(1))
    box.canary.unlink(missing_ok=True)
    (box.here / "run" / "result.json").unlink()
    before = held(box.home)
    code, _, said = box.run("resume", "run")
    unharmed(box, before)
    assert code == 2
    assert "data.npz" in said


# -- links -------------------------------------------------------------------------------------------------------------

WRITTEN = ("metrics.jsonl", "clients.csv", "confusion.jsonl", "config.json", "checkpoint.safetensors", "result.json",
           "comparison.csv", "picture.png", "lock.json", "checkpoint.safetensors.tmp", "code")


@pytest.mark.parametrize("name", WRITTEN)
def test_a_run_does_not_write_through_a_link(box, name):
    """A symbolic link in place of whatever a resumed run writes."""
    path = box.here / "run" / name
    target = box.home / ("documents" if name == "code" else "precious")
    (box.here / "run" / "result.json").unlink()
    path.unlink(missing_ok=True)
    path.symlink_to(target)
    before = held(box.home)
    code, _, said = box.run("resume", "run")
    unharmed(box, before)
    assert code == 2
    assert said.strip()
    assert len(said.strip().splitlines()) == 1


def test_a_run_of_a_comparison_that_lies_elsewhere(box):
    """METHOD/seed0 is a link: its records would be written there."""
    inner = box.here / "compared" / "fedavg"
    shutil.move(inner, box.home / "documents" / "fedavg")
    (box.home / "documents" / "fedavg" / "seed0" / "result.json").unlink()
    inner.symlink_to(box.home / "documents" / "fedavg")
    before = held(box.home)
    code, _, said = box.run("resume", "compared")
    unharmed(box, before)
    assert code == 2
    assert "is a symbolic link" in said


def test_the_folder_itself_may_be_a_link(box):
    """Whoever typed its name knows where it leads."""
    shutil.move(box.here / "run", box.here / "moved")
    (box.here / "run").symlink_to(box.here / "moved")
    (box.here / "moved" / "result.json").unlink()
    assert box.run("resume", "run")[0] == 0
    assert (box.here / "moved" / "result.json").exists()


@pytest.mark.parametrize("name", ["report.html", "report.html.tmp"])
def test_a_report_takes_the_place_of_a_link(box, name):
    (box.here / "run" / name).symlink_to(box.home / "precious")
    before = held(box.home)
    code, _, _ = box.run("report", "run")
    unharmed(box, before)
    assert code == 0
    assert not (box.here / "run" / "report.html").is_symlink()
    assert "<title>" in (box.here / "run" / "report.html").read_text()


def test_the_figures_of_a_report_do_not_go_elsewhere(box):
    (box.here / "run" / "report-figures").symlink_to(box.home / "documents")
    before = held(box.home)
    code, _, said = box.run("report", "run")
    unharmed(box, before)
    assert code == 2
    assert "report-figures is a symbolic link; nothing is written through it" in said


@pytest.mark.parametrize("name", ["model.safetensors", "model.tmp.safetensors", "model.json"])
def test_an_export_takes_the_place_of_a_link(box, name):
    (box.here / "out" / name).symlink_to(box.home / "precious")
    before = held(box.home)
    assert box.run(*EXPORT)[0] == 0
    unharmed(box, before)
    assert not (box.here / "out" / "model.safetensors").is_symlink()
    assert not (box.here / "out" / "model.json").is_symlink()


def test_records_with_another_name_are_not_added_to(box):
    """A hard link leads to a file elsewhere as well as a symbolic one."""
    path = box.here / "run" / "metrics.jsonl"
    shutil.move(path, box.home / "documents" / "metrics.jsonl")
    os.link(box.home / "documents" / "metrics.jsonl", path)
    (box.here / "run" / "result.json").unlink()
    before = held(box.home)
    code, _, said = box.run("resume", "run")
    unharmed(box, before)
    assert code == 2
    assert "has another name elsewhere" in said


# -- what is no file, or too much of one -------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [LOOK["show"], *COMPUTE.values()], ids=["show", *COMPUTE])
@pytest.mark.parametrize("name", ["config.json", "experiment.json", "metrics.jsonl", "clients.csv", "confusion.jsonl",
                                  "data.json", "checkpoint.safetensors"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(box, name, words):
    path = box.here / "run" / name
    path.unlink()
    os.mkfifo(path)
    (box.here / "run" / "result.json").unlink()
    before = held(box.home)
    code, shown, said = box.run(*words)
    unharmed(box, before)
    assert code in (0, 2)
    assert (shown if code == 0 else said).strip()


def test_a_pipe_in_place_of_a_toml_file(box):
    os.mkfifo(box.here / "their.toml")
    code, _, said = box.run("data", "--config", "their.toml")
    assert code == 2
    assert "is no regular file" in said


@pytest.mark.parametrize("words", [LOOK["show"], COMPUTE["resume"]], ids=["show", "resume"])
@pytest.mark.parametrize("name", ["config.json", "experiment.json"])
@pytest.mark.parametrize("form", ["huge", "deep", "not a number"])
def test_settings_of_any_size_and_depth(box, words, name, form):
    path = box.here / "run" / name
    (box.here / "run" / "result.json").unlink()
    if form == "huge":
        with path.open("r+b") as file:
            file.truncate(1 << 33)
    elif form == "deep":
        path.write_text('{"experiment":' * 100_000)
    else:
        def change(values):
            values.get("experiment", values)["training"].update(rounds=float("nan"), lr=float("nan"))
        reseal(path, change)
    before = held(box.home)
    code, shown, said = box.run(*words)
    unharmed(box, before)
    assert code in (0, 2)
    assert (shown if code == 0 else said).strip()
    assert form == "not a number" or code == 2


def test_claims_take_no_memory(box):
    """Ten thousand million classes, and a model of 17 GB: neither is counted out or built."""
    def classes(values):
        values["samples"].update(classes=10**10)
    reseal(box.here / "run" / "config.json", classes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert box.run("show", "run")[0] == 0
    assert Folder(box.here / "run").result().classes == ()

    def model(values):
        values["experiment"].update(model="mlp:hidden=65536,65536,65536,65536")
    reseal(box.here / "run" / "experiment.json", model)
    code, _, said = box.run(*EXPORT)
    assert (code, "GB" in said) == (2, True), said
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kilobytes


@pytest.mark.parametrize(("change", "said"), [
    ({"model": "mlp:hidden=200000000"}, "and is said to be mlp:hidden=200000000 with 1600000"),
    ({"shape": [10**9]}, "with 3000000003; it is damaged"), ({"outputs": 10**8, "classes": 10**8}, "with "),
    ({"head": 3}, "head must be text, not a int"), ({"model": ["mlp"]}, "model must be text, not a list"),
], ids=["model", "shape", "classes", "head", "list"])
def test_a_lone_model_file_is_not_built_larger_than_it_is(box, change, said):
    assert box.run(*EXPORT)[0] == 0
    path = box.here / "out" / "model.safetensors"
    with safe_open(path, "pt") as file:
        meta = json.loads(file.metadata()["coterie"])
    meta["job"] |= change
    save_file(load_file(path), box.here / "lone.safetensors", metadata={"coterie": json.dumps(meta)})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    code, _, told = box.run("export", "lone.safetensors", "-o", "out/lone.pt")
    assert code == 2
    assert said in " ".join(told.split())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kilobytes


# -- where one stands --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["methods", "fedavg"], ["methods", "evil"], ["check", "evil"]],
                         ids=["methods", "an unknown method", "check"])
def test_files_in_the_current_folder_are_not_looked_at(box, words):
    """A name without `.py:` is never a file."""
    for name in ("fedavg.py", "evil.py"):
        (box.here / name).write_text(CODE)
    before = held(box.home)
    code, shown, said = box.run(*words)
    unharmed(box, before)
    assert code == (0 if words[1] == "fedavg" else 2)
    assert (shown if code == 0 else said).strip()


def git(place, *words):
    named = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *named, *words], cwd=place, check=True, capture_output=True, text=True).stdout.strip()


def test_a_repository_that_one_stands_in_runs_nothing(box):
    """`git describe --dirty`, which told the revision, runs the program that core.fsmonitor names."""
    git(box.here, "init", "-q")
    git(box.here, "add", "data.npz")
    git(box.here, "commit", "-qm", "data")
    program = box.here / "monitor.sh"
    program.write_text(f"#!/bin/sh\ntouch {box.canary}\n")
    program.chmod(0o755)
    commit = git(box.here, "rev-parse", "HEAD")
    git(box.here, "config", "core.fsmonitor", str(program))
    before = held(box.home)
    assert box.run("run", "fedavg", *SMALL, "--out", "out/new")[0] == 0
    unharmed(box, before)
    for packed in (False, True):
        if packed:
            git(box.here, "-c", "core.fsmonitor=false", "pack-refs", "--all")
        assert environment()["revision"] == commit[:12]
    git(box.here, "-c", "core.fsmonitor=false", "worktree", "add", "-q", "tree")
    os.chdir(box.here / "tree")
    assert environment()["revision"] == commit[:12]


# -- the user's own flow -----------------------------------------------------------------------------------------------

OWN = ["run", "mine.py:Mine", "--data", "data.npz", "--model", "mine.py:Net", "--loss", "mine.py:loss", "--metric",
       "mine.py:Right", "--set", "optimizer=mine.py:Steps(momentum=0.5)", "--set", "device=cpu", "--rounds", "2"]


def rows(place):
    return json.loads((place / "result.json").read_text())["rows_sha256"]


def test_what_was_typed_today_goes_on_tomorrow(box, monkeypatch):
    """Run, resumed from another folder in which another mine.py lies, exported and personalized; without --trust."""
    (box.here / "mine.py").write_text(CODE)
    assert box.run(*OWN, "--out", "own")[0] == 0
    listed = (box.home / ".config/coterie/trusted")
    assert listed.read_text() == f"{hashlib.sha256(CODE.encode()).hexdigest()}  {box.here / 'mine.py'}\n"
    assert listed.stat().st_mode & 0o777 == 0o600
    ended = rows(box.here / "own")
    (box.here / "own" / "result.json").unlink()
    (box.here / "own" / "checkpoint.safetensors").unlink()  # from the start, that all of the code is needed
    elsewhere = box.here / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine.py").write_text("raise SystemExit('the wrong file')\n")
    monkeypatch.chdir(elsewhere)
    code, _, said = box.run("resume", "../own")
    assert (code, said.strip()) == (0, "")
    assert rows(box.here / "own") == ended
    for words in (["export", "../own"], ["personalize", "../own", "--data", "../data.npz"]):
        code, _, said = box.run(*words, "--client", "a", "-o", "model.safetensors")
        assert (code, said.strip()) == (0, "")
    facts = json.loads((elsewhere / "model.json").read_text())
    assert facts["job"]["method"] == f"{box.here / 'mine.py'}:Mine"
    assert facts["code"] == {str(box.here / "mine.py"): hashlib.sha256(CODE.encode()).hexdigest()}
    assert box.run("export", "model.safetensors", "-o", "model.pt")[0] == 0


def test_a_changed_file_is_said_and_the_copy_is_used(box):
    """The result is that of the file as it was; the changed one would not even import."""
    (box.here / "mine.py").write_text(CODE)
    assert box.run(*OWN, "--out", "own")[0] == 0
    ended = rows(box.here / "own")
    for name in ("result.json", "checkpoint.safetensors"):
        (box.here / "own" / name).unlink()
    (box.here / "mine.py").write_text("raise RuntimeError\n")
    code, _, said = box.run("resume", "own")
    assert code == 0
    assert re.search(r"mine\.py has changed since the run began; the run goes on with its copy own/code/\w+/mine\.py",
                     said)
    assert rows(box.here / "own") == ended
    (box.here / "mine.py").unlink()
    (box.here / "own" / "result.json").unlink()
    code, _, said = box.run("resume", "own")
    assert code == 0
    assert "mine.py is gone; the run goes on with its copy" in said


def test_somebody_elses_folder_runs_with_trust_once_and_is_known_then(box):
    """Another user: refused, then with --trust, then without."""
    (box.here / "mine.py").write_text(CODE)
    assert box.run(*OWN, "--out", "own")[0] == 0
    (box.home / ".config/coterie/trusted").unlink()
    (box.here / "own" / "result.json").unlink()
    box.canary.unlink()
    code, _, said = box.run("resume", "own")
    assert (code, "--trust" in said, box.canary.exists()) == (2, True, False)
    assert box.run("resume", "own", "--trust")[0] == 0
    (box.here / "own" / "result.json").unlink()
    assert box.run("resume", "own")[0] == 0


def test_a_file_beside_the_method_is_not_taken_from_where_one_stands(box, monkeypatch):
    """It is not copied; the resumed run says so instead of taking whatever lies in the current folder."""
    (box.here / "mine.py").write_text("import beside_mine\n" + CODE)
    (box.here / "beside_mine.py").write_text("")
    monkeypatch.syspath_prepend(str(box.here))  # as `python -m coterie` does
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert box.run(*OWN, "--out", "own")[0] == 0
    (box.here / "own" / "result.json").unlink()
    monkeypatch.delitem(sys.modules, "beside_mine")
    code, _, said = box.run("resume", "own")
    assert code == 2
    assert "No module named 'beside_mine'" in said
    assert "put their folder into PYTHONPATH" in said
    monkeypatch.setenv("PYTHONPATH", str(box.here))
    assert box.run("resume", "own")[0] == 0


# -- settings that were edited -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["experiment.json", "config.json"])
def test_edited_settings_are_refused_as_a_whole_and_said(box, name):
    """The learning rate of a begun run: resume used one file, personalize and export the other."""
    path = box.here / "run" / name
    path.write_text(path.read_text().replace('"lr": 0.05', '"lr": 0.5').replace('"lr": 0.01', '"lr": 0.5'))
    assert '"lr": 0.5' in path.read_text()
    (box.here / "run" / "result.json").unlink()
    for words in COMPUTE.values():
        code, _, said = box.run(*words)
        assert code == 2
        assert f"run/{name} was edited since the run began" in said
    code, _, said = box.run("show", "run")
    assert code == 0
    assert f"run/{name} was edited since the run began." in said


@pytest.mark.parametrize("change", [{"lr": 0.5}, {"seed": 3}, {"batch": 7}], ids=["lr", "seed", "batch"])
def test_records_that_contradict_each_other_are_refused(box, change):
    """Both digests are right, and the run was begun with other settings than it is to go on with."""
    reseal(box.here / "run" / "experiment.json", lambda values: values["experiment"]["training"].update(change))
    (box.here / "run" / "result.json").unlink()
    code, _, said = box.run("resume", "run")
    assert code == 2
    name, value = next(iter(change.items()))
    assert f"was begun with {name}=" in said
    assert f"not {value}" in said


def test_a_longer_run_is_written_down(box):
    """Rounds may change; then config.json says so as well, and its digest is that of what it says now."""
    reseal(box.here / "run" / "experiment.json", lambda values: values["experiment"]["training"].update(rounds=3))
    (box.here / "run" / "result.json").unlink()
    assert box.run("resume", "run")[0] == 0
    assert json.loads((box.here / "run" / "config.json").read_text())["training"]["rounds"] == 3
    assert json.loads((box.here / "run" / "result.json").read_text())["rounds"] == 3
    assert box.run("show", "run")[2].strip() == ""
