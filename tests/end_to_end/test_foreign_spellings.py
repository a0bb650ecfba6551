"""However somebody else's text spells a code file: whoever cuts it in whatever way, nothing of it runs unasked."""

import contextlib
import json
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import exit_code

import coterie
from coterie import files, options, registry
from coterie.errors import CoterieError
from coterie.running import checkpoint
from coterie.running.experiment import read_experiment
from coterie.running.folder import sealed
from coterie.running.saved import Saved
from coterie.serving.portable import read_model
from coterie.trust import code, digests

EVIL = '''
import pathlib
pathlib.Path({canary!r}).touch()
from dataclasses import dataclass
from coterie.methods.fedavg import FedAvg
from coterie.metrics.accuracy import Accuracy
from coterie.models import Linear
from coterie.optimizers.sgd import SGD
@dataclass(frozen=True)
class M(FedAvg): pass
@dataclass(frozen=True)
class A(Accuracy): pass
@dataclass(frozen=True)
class S(SGD): pass
class N(Linear):
    def __init__(self, inputs, outputs): super().__init__(inputs, outputs)
def f(*given): return [1]
'''
DECOY = '"""A file that this user has trusted."""\n'
NAMES = {"method": "M", "model": "N", "loss": "f", "metric": "A", "watch": "A", "optimizer": "S", "server": "S(lr=1.0)",
         "tokenizer": "f", "method's server": "S(lr=1.0)", "method's optimizer": "S"}
SPELLINGS = [
    "evil.py:{}", "{here}/evil.py:{}", "./evil.py:{}", "x/../evil.py:{}", "{here}//evil.py:{}",
    "good.py:d/evil.py:{}", "good.py:x={here}/evil.py:{}", "good.py:x=/abs/evil.py:{}", "good.py:G,evil.py:{}",
    "good.py:G:x=evil.py:{}", "good.py:G+evil.py:{}", "good.py:G(x=evil.py:{})", "good.py:(evil.py:{}",
    "good.py::evil.py:{}", "evil.py:-{}", "evil.py: {}", " evil.py:{}", "\tevil.py:{}", "evil.py :{}",
    "evil.py:\u00a0{}", "\u2003evil.py:{}",
    "evil.py:{}\n", "good.py:\nevil.py:{}", "good.py\n:evil.py:{}", "evil.py:.py:{}", "evil.py.py:{}",
    ".py:evil.py:{}",
    "evil.py::{}", "evil.py:{}:", "a.b/evil.py:{}", "x=evil.py:{}", "x,y=evil.py:{}", "(evil.py:{}", "+evil.py:{}",
    "fedavg:server=evil.py:{}", "evil.py:G/../evil.py:{}", "link.py:{}", "loop.py:{}", "\0evil.py:{}",
    "good.py:\0evil.py:{}", "file.py:{}" * 3, "good.py:" * 30 + "evil.py:{}", ",evil.py:{}" * 500,
]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Somebody else's folder that one stands in; a user who has trusted one file, which says nothing."""
    monkeypatch.setenv("COTERIE_TRUSTED", str(tmp_path / "conf" / "trusted"))
    for name, empty in (("_copies", {}), ("_ran", {}), ("_foreign", set())):
        monkeypatch.setattr(code, name, empty)
    monkeypatch.setattr(digests, "_unkept", set())
    there = tmp_path / "there"
    there.mkdir()
    monkeypatch.chdir(there)
    Path("good.py").write_text(DECOY)
    code.typed("good.py:G")
    Path("evil.py").write_text(EVIL.format(canary=str(tmp_path / "canary")))
    Path("link.py").symlink_to("evil.py")
    Path("loop.py").symlink_to("loop.py")
    x = np.random.default_rng(0).normal(size=(30, 4)).astype("f4")
    np.savez("data.npz", x=x, y=np.arange(30) % 3, client=np.repeat(list("abc"), 10))
    rows = "".join(f"word {k},{'xy'[k % 2]},{'ab'[k % 4 // 2]}\n" for k in range(40))
    Path("t.csv").write_text(f"said,label,site\n{rows}")
    return there


def plant(place, text):
    """Wherever a text may be cut, the path that ends there has the evil file, unless a trusted one is there."""
    ends = [found.end() for found in re.finditer(r"\.py", text)]
    starts = [0, *(found.end() for found in re.finditer(r"[^\w./]", text))]
    for cut in {text[start:end].strip() for end in ends[:4] for start in starts[:20] if start < end}:
        path = place / cut
        if "\0" not in cut and place in path.parents and ".." not in cut and len(cut) < 200 and not path.exists():
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(place / "evil.py", path)


def texts(place, kind):
    for spelling in SPELLINGS:
        text = spelling.replace("{here}", str(place)).replace("{}", NAMES[kind])
        plant(place, text)
        yield text


def values_of(kind, text):
    """An experiment with this text in the place of a kind."""
    made = {"data": "data.npz", "methods": ["fedavg"], "model": "linear"}
    training = {"rounds": 1, "device": "cpu"}
    if kind in ("model", "loss"):
        made[kind] = text
    elif kind in ("metric", "optimizer", "server"):
        training[kind] = text
    elif kind == "watch":
        training[kind] = [text]
    elif kind == "tokenizer":
        made |= {"data": f"t.csv:text=said,label=label,client=site,tokenizer={text}", "model": "fasttext"}
    else:
        made["methods"] = [text if kind == "method" else f"fedavg:{kind.removeprefix('method')[3:]}={text}"]
    return {**made, "training": training}


def write_toml(path, values):
    training = values.pop("training")
    lines = [f"{name} = {json.dumps(value)}" for name, value in values.items()] + ["[training]"]
    path.write_text("\n".join([*lines, *(f"{name} = {json.dumps(value)}" for name, value in training.items())]) + "\n")
    return path


def quiet(place, before, what, do):
    """`do` runs nothing of the folder's, trusts nothing, and fails with a sentence if at all."""
    with contextlib.suppress(CoterieError):
        do()
    assert not (place.parent / "canary").exists(), what
    assert digests.place().read_text() == before, what


@pytest.mark.parametrize("kind", NAMES)
def test_a_toml_file_in_python(place, kind):
    """`coterie.experiment(file).run()`: the check and the loader once cut `good.py:d/evil.py:M` at two places."""
    before = digests.place().read_text()
    for text in texts(place, kind):
        toml = write_toml(place / "x.toml", values_of(kind, text))
        quiet(place, before, text, lambda toml=toml: coterie.experiment(toml).run())


@pytest.mark.parametrize("kind", NAMES)
def test_a_toml_file_on_the_command_line(place, kind, monkeypatch):
    before = digests.place().read_text()
    for text in texts(place, kind):
        toml = write_toml(place / "x.toml", values_of(kind, text))
        quiet(place, before, text, lambda toml=toml: exit_code(monkeypatch, "run", "--config", toml, "--out", "out"))
        shutil.rmtree("out", ignore_errors=True)


def write_lone(path, kind, text):
    job = {"method": "fedavg", "model": "linear", "shape": [4], "classes": 3, "outputs": 3}
    if kind == "model":
        job["model"] = text
    else:
        job["method"] = text if kind == "method" else f"fedavg:{kind.removeprefix('method')[3:]}={text}"
    checkpoint.save(path, {"w": torch.zeros(15)}, {"job": job, "layout": {"digest": "x"}})


@pytest.mark.parametrize("kind", ["method", "model", "method's server", "method's optimizer"])
def test_a_model_file(place, kind, monkeypatch):
    """Read in Python and by `coterie export`."""
    before, path = digests.place().read_text(), place / "lone.safetensors"
    for text in texts(place, kind):
        write_lone(path, kind, text)
        quiet(place, before, text, lambda: read_model(path))
        quiet(place, before, text, lambda: exit_code(monkeypatch, "export", path, "-o", "lone.pt"))


def rewrite(path, change):
    values = json.loads(path.read_text())
    values.pop("sha256", None)
    change(values)
    path.write_text(json.dumps(sealed(values)))


def name_in_run(run, kind, text):
    asked = values_of(kind, text)
    rewrite(run / "experiment.json", lambda values: values["experiment"].update(
        {name: value for name, value in asked.items() if name != "training"},
        training={**values["experiment"]["training"], **asked["training"]}))
    rewrite(run / "config.json", lambda values: values.update(
        method=asked["methods"][0], training={**values["training"], **asked["training"]}))


def use(run):
    """All that a program does with a run folder."""
    found = Saved.open(run)
    found.init(), found.loss()
    found.federation()
    found.simulation()


@pytest.fixture
def run(place):
    coterie.experiment(values_of("", "") | {"methods": ["fedavg"]}).run("run")
    shutil.copytree("run", "kept")
    return place / "run"


@pytest.mark.parametrize("kind", NAMES)
def test_a_run_folder(place, run, kind, monkeypatch):
    """Opened in Python, with experiment.json and as one that was made in Python has none; and resumed."""
    before = digests.place().read_text()
    for text in texts(place, kind):
        shutil.rmtree(run)
        shutil.copytree("kept", run)
        name_in_run(run, kind, text)
        (run / "result.json").unlink()
        quiet(place, before, text, lambda: use(run))
        quiet(place, before, text, lambda: read_experiment(run)[0].run("other"))
        shutil.rmtree("other", ignore_errors=True)
        quiet(place, before, text, lambda: exit_code(monkeypatch, "resume", run))
        (run / "experiment.json").unlink()
        quiet(place, before, text, lambda: Saved.open(run, "linear").simulation())


@pytest.mark.parametrize("blind", [("require", "mark"), ("mark",), ("_possible", "require_same")], ids=str)
@pytest.mark.parametrize("kind", NAMES)
def test_where_the_check_sees_nothing_still_nothing_runs(place, run, kind, blind, monkeypatch):
    """Should a check and a loader ever differ again: what runs while something foreign is open must be trusted."""
    empty = {"require": None, "mark": [], "_possible": [], "require_same": None}
    for name in blind:
        monkeypatch.setattr(code, name, lambda *args, name=name, **kwargs: empty[name])
    before, text = digests.place().read_text(), f"{place}/evil.py:{NAMES[kind]}"
    name_in_run(run, kind, text)
    toml, lone = write_toml(place / "x.toml", values_of(kind, text)), place / "lone.safetensors"
    write_lone(lone, kind, text)
    for do in (lambda: coterie.experiment(toml).run(), lambda: read_model(lone), lambda: use(run),
               lambda: read_experiment(run)[0].run()):
        quiet(place, before, do, do)


def test_a_trusted_file_does_not_stand_in_for_another(place):
    """`fedavg:server=PATH` is the path of a file, too, where these folders are; the loader takes what is behind =."""
    decoy = place / f"fedavg:server={place}" / "evil.py"
    decoy.parent.mkdir(parents=True)
    decoy.write_text(DECOY)
    write_lone(place / "lone.safetensors", "method's server", f"{place}/evil.py:S(lr=1.0)")
    with pytest.raises(CoterieError, match="which you have not trusted"):
        read_model(place / "lone.safetensors")


def test_a_file_that_comes_later_or_changes_asks_in_python_too(place):
    """What a foreign text names is not what a program types, whoever reads it out and hands it on."""
    toml = write_toml(place / "x.toml", values_of("method", "later.py:M"))
    read = coterie.experiment(toml)
    shutil.copy("evil.py", "later.py")
    before = digests.place().read_text()
    for do in (read.run, lambda: registry.method(read.methods[0]), lambda: coterie.experiment(toml)):
        with pytest.raises(CoterieError, match="which you have not trusted"):
            do()
    assert digests.place().read_text() == before
    assert not (place.parent / "canary").exists()
    Path("later.py").write_text(Path("evil.py").read_text().replace("touch()", "exists()"))
    trusted = coterie.experiment(toml, trust=True)
    assert trusted.chosen()[0].name
    shutil.copy("evil.py", "later.py")  # another content than the one that was trusted
    with pytest.raises(CoterieError, match="which you have not trusted"):
        trusted.run()
    assert not (place.parent / "canary").exists()


def test_what_a_program_types_still_runs(place, run):
    """Beside a foreign folder; also as the model or the loss of one, which it names itself."""
    name_in_run(run, "metric", f"{place}/evil.py:A")
    Path("mine.py").write_text(Path("evil.py").read_text() + "\n# mine\n")
    with pytest.raises(CoterieError, match="which you have not trusted"):
        Saved.open(run)
    assert not (place.parent / "canary").exists()
    (run / "experiment.json").unlink()
    opened = Saved.open(run, "mine.py:N", "mine.py:f")  # its metric is not needed
    assert opened.init().module is not None
    assert registry.method("mine.py:M").name
    with pytest.raises(CoterieError, match="which you have not trusted"):
        registry.metric(f"{place}/evil.py:A")


@pytest.mark.parametrize(("text", "parts"), [
    ("mine.py:M", ("mine.py", "M", "")), ("a,b=c/mine.py:M:x=1", ("a,b=c/mine.py", "M", "x=1")),
    ("mine.py:M:server=lion.py:Lion", ("mine.py", "M", "server=lion.py:Lion")),
    ("good.py:d/evil.py:M", None), ("good.py:x=/evil.py:M", None), ("evil.py:-f", None), ("evil.py: f", None),
    ("mine.py", None), (".py:M", None), ("mine.py:", None), ("fedavg", None), ("mine.py:M\n", None),
])
def test_the_path_ends_at_the_first_py_and_colon(text, parts):
    """By hand; whoever loads a file takes its path from here."""
    assert files.in_file(text) == parts
    if parts is not None:
        assert code._possible(text)[0][0] == parts[0]
        assert options.parse_options(f"{parts[0]}:{parts[1]}")[0] == f"{parts[0]}:{parts[1]}"


# -- long ones ---------------------------------------------------------------------------------------------------------

LONG = {
    "layers": ("model", "mlp:hidden=" + ",".join(["1"] * 20_000)), "letters": ("method", "a" * 1_000_000),
    "a name too long for a file": ("method", "a.py:b" * 600), "such a model": ("model", "a.py:b" * 600),
    "many files": ("method", ",a.py:b" * 20_000), "targets": ("adapter", "lora:targets=" + "*+" * 250_000),
    "patterns": ("train", "*+" * 250_000), "a head": ("head", "h" * 1_000_000),
    "few letters, many layers": ("model", "mlp:hidden=" + ",".join(["1"] * 1900)),
    "few letters, many targets": ("adapter", "lora:targets=" + "*+" * 1900),
    "few letters, many patterns": ("freeze", "*+" * 1900),
}


@pytest.mark.parametrize(("field", "text"), LONG.values(), ids=LONG)
def test_long_texts_of_a_model_file_or_a_toml_file_are_a_sentence(place, field, text):
    """20,000 layers or 250,000 patterns took half a minute, 100,000 layers 0.6 GB, and a long name was a traceback."""
    job = {"method": "fedavg", "model": "mlp:hidden=2", "shape": [4], "classes": 3, "outputs": 3, field: text}
    path = place / "lone.safetensors"
    checkpoint.save(path, {"w": torch.zeros(30)}, {"job": job, "layout": {"digest": "x"}})
    values = values_of("model", "mlp:hidden=2") | ({"methods": [text]} if field == "method" else {field: text})
    toml = write_toml(place / "x.toml", values)
    for do in (lambda: read_model(path), lambda: coterie.experiment(toml).run()):
        with timed(10), pytest.raises(CoterieError, match=r"(at most \d+ are read|is no spelling|unknown|no file)"):
            do()


@contextlib.contextmanager
def timed(most):
    """Seconds of this process's own work, at most: the machine is shared."""
    before = time.process_time()
    yield
    assert time.process_time() - before < most


def test_honest_texts_are_short_enough(place):
    """300 layers, 300 patterns, and a table whose columns are listed; of three hundred thousand letters none."""
    made = coterie.experiment({"model": "mlp:hidden=" + ",".join(["2"] * 300), "freeze": "base+" * 299 + "base",
                               "data": "t.csv:ignore=" + ",".join(f"column{k}" for k in range(5000))})
    assert made.model.count("2") == 300
    federation = coterie.experiment(values_of("", "")).federation()
    assert sum(1 for _ in made.factory(federation)().parameters()) == 2 * 301
    with pytest.raises(CoterieError, match="data of the experiment has 300013 characters; at most 64000 are read"):
        coterie.experiment({"data": "t.csv:ignore=" + "c" * 300_000})
