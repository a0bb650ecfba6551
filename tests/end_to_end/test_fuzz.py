"""Whatever stands in a configuration, a checkpoint or a run folder: a valid value or a sentence, never a traceback.

Every test changes something valid at random places. An outcome other than a value or a CoterieError fails the test.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import coterie
from coterie import models, presets, registry
from coterie.cli.printing import saved_experiment
from coterie.data import PARTITIONS, Federation, churn, partition
from coterie.errors import CoterieError
from coterie.options import build, parse_options
from coterie.report.table import comparison
from coterie.report.table import newcomers as newcomers_table
from coterie.running import checkpoint, saved
from coterie.running.experiment import Experiment, with_settings
from coterie.running.folder import Folder
from coterie.running.training import Training

ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 50), st.sampled_from([10**30, -(10**30), 2**63]), st.floats(),
    st.sampled_from(["", "0", "1", "-1", "0.5", "nan", "inf", "none", "true", "all", "1e400", "²", "a=b", "\0"]),
    st.text(max_size=6), st.lists(st.integers(0, 3), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def fuzz(cases):
    return settings(max_examples=cases, deadline=None, derandomize=True, database=None,
                    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def survives(call, *given, **named):
    """The value, or None for a sentence; a sentence is one line and says something."""
    try:
        return call(*given, **named)
    except CoterieError as error:
        said = str(error)
    assert said.strip()
    return None


@st.composite
def bent(draw, texts):
    """One of the texts with some pieces taken out, doubled, replaced or put in."""
    text = draw(st.sampled_from(texts))
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        stop = min(len(text), start + draw(st.integers(0, 6)))
        piece = draw(st.one_of(
            st.text(max_size=4), st.just(text[start:stop] * 2),
            st.sampled_from(["=", ":", ",", "+", "nan", "-1", "1e999", "[", "]", '"', "\n", "#", "{}", "", ".", "é"]),
        ))
        text = text[:start] + piece + text[stop:]
    return text


@st.composite
def spoiled(draw, contents):
    """Bytes of a file, cut short, with some bytes changed, or with some put in."""
    data = bytearray(draw(st.sampled_from(contents)))
    if draw(st.booleans()):
        del data[draw(st.integers(0, len(data))) :]
    for _ in range(draw(st.integers(0, 4))):
        if data:
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    place = draw(st.integers(0, len(data)))
    data[place:place] = draw(st.binary(max_size=3))
    return bytes(data)


@st.composite
def edited(draw, value):
    """A json value with one or two places changed: a value replaced, a key taken out or renamed."""
    value = json.loads(json.dumps(value))
    for _ in range(draw(st.integers(1, 2))):
        inner = value
        while isinstance(inner, (dict, list)) and inner:
            keys = sorted(inner) if isinstance(inner, dict) else range(len(inner))
            key = draw(st.sampled_from(keys))
            if isinstance(inner[key], (dict, list)) and inner[key] and draw(st.integers(0, 3)):
                inner = inner[key]
                continue
            how = draw(st.integers(0, 3))
            if how == 0:
                del inner[key]
            elif how == 1 and isinstance(inner, dict):
                inner[draw(st.text(max_size=5))] = inner.pop(key)
            else:
                inner[key] = draw(ODD)
            break
        else:
            return draw(ODD)
    return value


# -- configurations ---------------------------------------------------------------------------------------------------

PRESETS = [presets.text(name) for name in presets.names()[::9]]
VALUES = [presets.load(name).record() for name in presets.names()[::25]]


@fuzz(200)
@given(st.data())
def test_values_of_an_experiment(data):
    values = data.draw(edited(data.draw(st.sampled_from(VALUES))))
    made = survives(Experiment.of, values)
    if made is not None:
        assert Experiment.of(made.record()).record() == made.record() or made.training != made.training


@fuzz(200)
@given(text=bent(PRESETS))
def test_the_text_of_a_preset(tmp_path, text):
    path = tmp_path / "one.toml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    made = survives(Experiment.read, path)
    if made is not None:
        survives(made.chosen)


@fuzz(250)
@given(content=spoiled([text.encode() for text in PRESETS]))
def test_the_bytes_of_an_experiment_file(tmp_path, content):
    (tmp_path / "one.toml").write_bytes(content)
    survives(Experiment.read, tmp_path / "one.toml", released=True)


METHODS = [
    *sorted({m for name in presets.names() for m in presets.load(name).methods}), "pfedhn:pc,hidden=8", "mine.py:Mine",
    "fedavg+private:sigma=1.1,clip=1.0", "ifca:clustered=head", "fedper:personal=head+buffers",
]
WORDS = ["lr=0.1", "rounds=5", "fedprox.mu=0.3", "server_lr=1", "schedule=cosine", "participation=0.5", "mu=0.1"]


@fuzz(400)
@given(spec=bent(METHODS))
def test_spellings_of_methods_and_aggregators(spec):
    made = survives(registry.method, spec)
    if made is not None:
        again = registry.method(registry.spelling(made))
        assert again == made or "nan" in repr(made)


@fuzz(150)
@given(words=st.lists(bent(WORDS), min_size=1, max_size=3))
def test_words_behind_set(words):
    survives(with_settings, Experiment(methods=("fedprox", "fedavg+confree")), words)


@fuzz(500)
@given(name=st.sampled_from([f.name for f in fields(Training)]), value=ODD)
def test_training_options(name, value):
    survives(build, Training, {name: value}, "training")


@fuzz(50)
@given(spec=bent(["mlp:hidden=64,32", "linear:zeros=true", "cnn", "sensor:width=8,hidden=16", "mlp:dropout=0.2",
                  "textcnn:features=8,dropout=0.5", "fasttext:vocabulary=50", "resnet18:norm=group,groups=8"]),
       shape=st.sampled_from([(4,), (3, 32), (1, 16, 16), (3, 20, 20)]))
def test_spellings_of_models(spec, shape):
    parsed = survives(parse_options, spec)
    if parsed is not None and parsed[0] != "resnet18":  # building it takes a second the first time
        survives(models.model, parsed[0], shape, 3, **parsed[1])


@fuzz(250)
@given(spec=bent(["dirichlet:alpha=0.5", "dirichlet:alpha=0.1,minimum=2,tries=20", "iid", "natural",
                  "pathological:classes_per_client=2", "pathological:classes_per_client=3,balanced=false",
                  "extended_dirichlet:classes_per_client=2,alpha=10"]),
       clients=st.integers(-1, 8))
def test_spellings_of_partitions(spec, clients):
    parsed = survives(parse_options, spec)
    if parsed is None or (isinstance(parsed[1].get("tries"), int) and parsed[1]["tries"] > 1000):
        return
    dealt = survives(partition, parsed[0], np.arange(60) % 4, clients, 0, **{"tries": 20, **parsed[1]}
                     if parsed[0] in ("dirichlet", "extended_dirichlet") else parsed[1])
    if dealt is not None:
        assert parsed[0] in PARTITIONS
        assert len(np.unique(np.concatenate(dealt))) == sum(map(len, dealt))  # no sample twice


SCHEDULE = "client,arrives,leaves\n0,,4\n1,2,\n2,1,3\n"
FOUR = Federation.from_clients([(np.zeros((4, 2), dtype=np.float32), np.array([0, 1, 0, 1]))] * 4)


@fuzz(250)
@given(content=st.one_of(spoiled([SCHEDULE.encode()]), bent([SCHEDULE]).map(lambda t: t.encode(errors="replace"))))
def test_churn_files(tmp_path, content):
    path = tmp_path / "churn.csv"
    path.write_bytes(content)
    made = survives(churn.scheduled, FOUR, str(path))
    if made is not None:
        assert len(made.there(0)) > 0
        assert sorted(made.names) == sorted(FOUR.names)


@fuzz(250)
@given(spec=bent(["random:rate=0.1", "random:rate=0.5,leave=0.2,start=0.25,seed=3"]))
def test_churn_recipes(spec):
    if not spec.endswith(".csv"):
        survives(churn.scheduled, FOUR, spec)


# -- checkpoints and run folders --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A small finished run, what it was made of, and the files that it left."""
    place = tmp_path_factory.mktemp("fuzz")
    rng = np.random.default_rng(0)
    pairs = [(rng.standard_normal((8, 3)).astype(np.float32), np.arange(8) % 2) for _ in range(4)]
    federation = Federation.from_clients(pairs, unseen=1)
    options = {"rounds": 2, "evaluate_every": 1, "device": "cpu", "engine": "loop"}
    result = coterie.run("fedper", lambda: nn.Linear(3, 2), federation, folder=place / "run", **options)
    experiment = {"single": True, "experiment": Experiment(methods=("fedper",)).record(), "command": ["coterie"]}
    (place / "run" / saved.EXPERIMENT).write_text(json.dumps(experiment))
    files = {path.name: path.read_bytes() for path in (place / "run").iterdir()}
    return SimpleNamespace(place=place, simulation=result.simulation, files=files)


def folder_with(finished, tmp_path, name, content):
    """A copy of the run whose file `name` holds something else."""
    folder = tmp_path / "run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for other, data in finished.files.items():
        (folder / other).write_bytes(content if other == name else data)
    return folder


@fuzz(300)
@given(data=st.data())
def test_bytes_of_a_checkpoint(finished, tmp_path, data):
    """Read, and put into the simulation it came from."""
    content = data.draw(spoiled([finished.files["checkpoint.safetensors"]]))
    path = tmp_path / "checkpoint.safetensors"
    path.write_bytes(content)
    found = survives(checkpoint.load, path)
    if found is not None:
        survives(finished.simulation.restore, *found)


@fuzz(150)
@given(data=st.data())
def test_the_header_of_a_checkpoint(finished, data):
    """Valid tensors with an edited header, some of them renamed, left out or of another shape."""
    tensors, meta = checkpoint.load(finished.place / "run" / "checkpoint.safetensors")
    changed = data.draw(edited(meta)) if data.draw(st.booleans()) else meta
    if data.draw(st.booleans()):
        name = data.draw(st.sampled_from(sorted(tensors)))
        t = tensors.pop(name)
        how = data.draw(st.integers(0, 2))
        if how == 1:
            tensors[data.draw(st.sampled_from(["server.", "own.x", "x", "server.rows", "own.head2"]))] = t
        elif how == 2:
            tensors[name] = t.flatten()[: data.draw(st.integers(0, 3))]
    survives(finished.simulation.restore, tensors, changed)


@fuzz(100)
@given(data=st.data())
def test_files_of_a_run_folder(finished, tmp_path, data):
    name = data.draw(st.sampled_from(["config.json", "metrics.jsonl", "clients.csv", "result.json", saved.EXPERIMENT]))
    content = finished.files[name]
    if name.endswith(".json") and data.draw(st.booleans()):
        content = json.dumps(data.draw(edited(json.loads(content)))).encode()
    elif name == "metrics.jsonl" and data.draw(st.booleans()):
        lines = [json.loads(line) for line in content.splitlines()]
        content = "\n".join(json.dumps(line) for line in data.draw(edited(lines)) or []).encode() if lines else b""
    else:
        content = data.draw(spoiled([content]))
    folder = folder_with(finished, tmp_path, name, content)
    survives(saved_experiment, folder)
    result = survives(Folder(folder).result)
    if result is not None:
        survives(comparison, [result])
        survives(newcomers_table, [result])
    if survives(Folder(folder).load) is not None:
        survives(Folder(folder).history)
