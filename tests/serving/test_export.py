"""Exported files, opened and run as another program would."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import as_before, exit_code
from safetensors.torch import load_file

import coterie
from coterie.errors import CoterieError
from coterie.models import model
from coterie.running.saved import Saved
from coterie.serving import export, portable
from coterie.serving.personalize import hand_out

ENDINGS = {"safetensors": "safetensors", "torchscript": "pt", "torch-export": "pt2", "onnx": "onnx"}

BATCHY = '''
from torch import nn

class Net(nn.Module):
    """Treats a batch of one otherwise, which a trace of a larger batch does not know."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.head = nn.Linear(inputs, outputs)

    def forward(self, x):
        x = x.flatten(1)
        return self.head(x) if len(x) > 1 else self.head(-x)
'''


NORMED = '''
from torch import nn

class Net(nn.Sequential):
    def __init__(self, inputs, outputs, hidden=4):
        super().__init__(nn.Flatten(), nn.Linear(inputs, hidden), nn.BatchNorm1d(hidden), nn.ReLU(),
                         nn.Linear(hidden, outputs))
'''


BAGGED = '''
from torch import nn

class Net(nn.Sequential):
    def __init__(self, outputs, words=7, width=4):
        super().__init__(nn.EmbeddingBag(words, width, mode="mean"), nn.Linear(width, outputs))
'''

PLACED = '''
import torch
from torch import nn

class Net(nn.Module):
    """Takes real numbers, and looks up where in the sample they stand."""

    def __init__(self, shape, outputs):
        super().__init__()
        self.place = nn.Embedding(shape[0], 2)
        self.head = nn.Linear(3 * shape[0], outputs)

    def forward(self, x):
        places = self.place(torch.arange(x.shape[1])).expand(len(x), -1, -1)
        return self.head(torch.cat([x[..., None], places], 2).flatten(1))
'''


def fresh(place):
    """The run's module with other weights."""
    return model(f"{place / 'normed.py'}:Net", (1, 8, 8), 10, hidden=8)()


def opened(form, path, net):
    """The file by its own program: x -> outputs."""
    if form == "safetensors":
        net.load_state_dict(load_file(path))
        return net.eval()
    if form == "torchscript":
        return torch.jit.load(str(path))
    if form == "torch-export":
        return torch.export.load(str(path)).module()
    onnxruntime = pytest.importorskip("onnxruntime", reason="pip install 'coterie[export]'")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(None, {"x": x.numpy()})[0])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Four clients with a head each, and BatchNorm, whose running statistics must travel with the weights."""
    place = tmp_path_factory.mktemp("export")
    patch = pytest.MonkeyPatch()
    patch.chdir(place)
    (place / "normed.py").write_text(NORMED)
    words = ["--clients", 4, "--model", "normed.py:Net:hidden=8", "--rounds", 2, "--set", "device=cpu", "--out", "run"]
    assert exit_code(patch, "run", "fedper", *words) == 0
    patch.undo()
    return place


def asked(place, monkeypatch, capsys, *words):
    monkeypatch.chdir(place)
    return exit_code(monkeypatch, "export", *words), *capsys.readouterr()


@pytest.mark.parametrize("form", ENDINGS)
def test_the_file_answers_as_the_client_does(run, form, monkeypatch, capsys):
    """Against the simulation's own row, on test samples of the client, for the whole batch and for one sample."""
    if form == "onnx":
        pytest.importorskip("onnxscript", reason="pip install 'coterie[export]'")
    path = run / f"client.{ENDINGS[form]}"
    words = ["run", "--client", "2", "--adapted", "-o", path.name]
    code, text, errors = asked(run, monkeypatch, capsys, *words)
    assert code == 0, errors
    assert "the same outputs on" in text
    sim = Saved.open(run / "run").simulation()
    x = sim.federation.client(2, "test")[0]
    expected = sim.layout.load(sim.init.module, sim.row(2, adapted=True)).eval()
    answer = opened(form, path, fresh(run))
    with torch.no_grad():
        for some in (x, x[:1]):
            torch.testing.assert_close(answer(some), expected(some), rtol=1e-5, atol=1e-5)
    assert not list(run.glob("*.tmp*"))


@pytest.mark.parametrize("form", ["safetensors", "torchscript"])
def test_what_personalize_wrote_can_be_exported(run, form, monkeypatch, capsys):
    """From the file alone: neither the run nor its data are needed."""
    x, y = coterie.data.digits()
    np.savez(run / "new.npz", x=x[:30].numpy(), y=y[:30].numpy())
    hand_out(Saved.open(run / "run"), str(run / "new.npz"), run / "new.safetensors", None, "yes", None, 0, "text")
    path = run / f"again.{ENDINGS[form]}"
    code, _, errors = asked(run, monkeypatch, capsys, "new.safetensors", "-o", path.name)
    assert code == 0, errors
    net = fresh(run)
    net.load_state_dict(load_file(run / "new.safetensors"))
    net.eval()
    with torch.no_grad():
        torch.testing.assert_close(opened(form, path, fresh(run))(x[:30]), net(x[:30]), rtol=1e-5, atol=1e-5)


def test_the_servers_models(tmp_path):
    """Model k is row k of the server's state."""
    data = coterie.Federation.from_clients([(torch.randn(20, 4), torch.arange(20) % 3) for _ in range(3)])
    result = coterie.run("ifca:models=2", model("linear", (4,), 3), data, folder=tmp_path / "r", rounds=1, device="cpu")
    saved = Saved.open(tmp_path / "r", "linear")
    for k in range(2):
        assert torch.equal(portable.of_run(saved, None, k, False, "last").row, result.simulation.server.state.rows[k])
    with pytest.raises(CoterieError, match="keeps 2 model"):
        portable.of_run(saved, None, 2, False)


def test_a_file_that_answers_otherwise_is_an_error_and_not_left_behind(tmp_path):
    """The trace holds the branch of the batch it saw; a single sample then gives -x's scores, not x's."""
    (tmp_path / "batchy.py").write_text(BATCHY)
    spec = f"{tmp_path / 'batchy.py'}:Net"
    data = coterie.Federation.from_clients([(torch.randn(20, 4), torch.arange(20) % 3) for _ in range(3)])
    coterie.run("fedavg", model(spec, (4,), 3), data, folder=tmp_path / "r", rounds=1, device="cpu")
    piece = portable.of_run(Saved.open(tmp_path / "r", spec), None, 0, False)
    with pytest.raises(CoterieError, match="gives other outputs than the model"):
        export.export_model(piece, tmp_path / "net.pt", "torchscript")
    assert {p.name for p in tmp_path.iterdir()} - {"__pycache__"} == {"batchy.py", "r"}


def test_parity_is_the_largest_difference_relative_to_the_largest_output():
    one, other = torch.tensor([[4.0, -8.0]]), torch.tensor([[4.0, -7.0]])
    assert export.parity(one, other) == 1 / 8
    assert export.parity(one, other[:, :1]) == float("inf")
    assert export.parity(one, torch.full_like(one, float("nan"))) == float("inf")


@pytest.mark.parametrize(("words", "sentence"), [
    (["run", "-o", "a.pt"], "name one model: --client NAME"),
    (["run", "--client", "2", "--model", "0", "-o", "a.pt"], "name one model"),
    (["run", "--client", "22", "-o", "a.pt"], "unknown client of run '22'"),
    (["run", "--model", "0", "-o", "a.pt"], "keeps no whole model"),
    (["run", "--client", "2", "-o", "a.bin"], "the ending of a.bin stands for no format"),
    (["run", "--client", "2", "-o", "a.pt", "--format", "onx"], "did you mean 'onnx'"),
    (["run", "--client", "2", "-o", "no/a.pt"], "cannot be written"),
    (["run/checkpoint.safetensors", "-o", "a.pt"], "holds no model written by coterie"),
    (["gone", "--client", "2", "-o", "a.pt"], "there is no run folder or model file gone."),
    (["gone.safetensors", "-o", "a.pt"], "there is no run folder or model file gone.safetensors"),
])
def test_mistakes_get_a_sentence(run, monkeypatch, capsys, words, sentence):
    code, _, errors = asked(run, monkeypatch, capsys, *words)
    assert (code, sentence in errors) == (2, True), errors
    assert not (run / "a.pt").exists()


def test_a_client_s_model_needs_the_data_as_they_were(tmp_path, monkeypatch, capsys):
    """The run holds its state, and the samples to compare on are read from the file, which lacks a row by now."""
    monkeypatch.chdir(tmp_path)
    rows = [f"{k / 10},{'ab'[k % 2]},{k // 2 % 2}" for k in range(40)]
    (tmp_path / "t.csv").write_text("\n".join(["dose,client,label", *rows]) + "\n")
    words = ["--data", "t.csv", "--model", "linear", "--rounds", 1, "--set", "device=cpu", "--out", "run"]
    assert exit_code(monkeypatch, "run", "fedavg", *words) == 0
    (tmp_path / "t.csv").write_text("\n".join(["dose,client,label", *rows[:-1]]) + "\n")
    code, _, errors = asked(tmp_path, monkeypatch, capsys, "run", "--client", "a", "-o", "a.pt")
    assert (code, "not those that the run began with; give it those" in errors) == (2, True), errors
    assert "resume" not in errors


def test_without_the_extra_there_is_a_sentence(run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "onnxscript", None)  # what Python does for a package that is not there
    code, _, errors = asked(run, monkeypatch, capsys, "run", "--client", "2", "-o", "a.onnx")
    assert (code, "pip install 'coterie[export]'" in errors) == (2, True), errors
    assert not Path(run / "a.onnx").exists()


def test_safetensors_say_what_they_are(run, monkeypatch, capsys):
    asked(run, monkeypatch, capsys, "run", "--client", "1", "-o", "one.safetensors")
    facts = json.loads((run / "one.json").read_text())
    assert (facts["client"], facts["adapted"], facts["newcomer"]) == ("1", False, False)
    assert facts["job"]["model"] == f"{run / 'normed.py'}:Net:hidden=8"


def served(place):
    """The server's model, cut from its row by hand: 7 x 4 numbers of the bag, 3 x 4 and 3 of the head."""
    row = load_file(place / "run" / "checkpoint.safetensors")["server.row"]
    bag, weight, bias = row.split([28, 12, 3])
    return {"0.weight": bag.reshape(7, 4), "1.weight": weight.reshape(3, 4), "1.bias": bias}


@pytest.fixture
def bagged(tmp_path, monkeypatch):
    """A run of the command line whose model looks its tokens up in an EmbeddingBag, and unlabelled tokens."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bagged.py").write_text(BAGGED)
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "words.npz", x=rng.integers(0, 7, (60, 5)), y=np.arange(60) % 3, client=np.arange(60) % 4)
    np.savez(tmp_path / "new.npz", x=rng.integers(0, 7, (9, 5)))
    words = ["--data", "words.npz", "--model", "bagged.py:Net", "--rounds", 1, "--set", "device=cpu", "--out", "run"]
    assert exit_code(monkeypatch, "run", "fedavg", *words) == 0
    return tmp_path


@pytest.mark.parametrize("old", [False, True], ids=["dtype", "older"])
@pytest.mark.parametrize("form", ["safetensors", "torchscript"])
def test_a_model_with_an_embedding_bag_is_exported(bagged, form, old, monkeypatch, capsys):
    """It takes tokens although it has no `nn.Embedding`, which was the rule: real numbers cannot be looked up.

    Runs of older versions do not say what type samples have; then the model itself does.
    """
    config = json.loads((bagged / "run" / "config.json").read_text())
    assert config["samples"]["dtype"] == "int64"
    if old:
        as_before(bagged / "run" / "config.json", lambda values: values["samples"].pop("dtype"))
    path = f"net.{ENDINGS[form]}"
    code, _, errors = asked(bagged, monkeypatch, capsys, "run", "--model", "0", "-o", path)
    assert code == 0, errors
    net = model("bagged.py:Net", (5,), 3)()
    net.load_state_dict(served(bagged))
    x = torch.tensor([[0, 1, 2, 3, 6], [6, 6, 6, 6, 6]])
    with torch.no_grad():
        torch.testing.assert_close(opened(form, path, model("bagged.py:Net", (5,), 3)())(x), net.eval()(x))


@pytest.mark.parametrize("old", [False, True], ids=["dtype", "older"])
def test_a_newcomer_without_labels_gets_the_fallback_of_an_embedding_bag(bagged, old, monkeypatch, capsys):
    """The fallback is made without the newcomer's samples, of blank ones, which have to be tokens as well. What was
    handed out can be exported from the file alone."""
    if old:
        as_before(bagged / "run" / "config.json", lambda values: values["samples"].pop("dtype"))
    code = exit_code(monkeypatch, "personalize", "run", "--data", "new.npz", "-o", "new.safetensors")
    assert code == 0, capsys.readouterr().err
    facts = json.loads((bagged / "new.json").read_text())
    assert facts["fallback"]
    assert facts["job"].get("dtype") == (None if old else "int64")
    code, _, errors = asked(bagged, monkeypatch, capsys, "new.safetensors", "-o", "new.pt")
    assert code == 0, errors


def test_real_numbers_stay_real_numbers_beside_an_embedding(tmp_path, monkeypatch, capsys):
    """An embedding of places alone does not make tokens of the samples: what was recorded of them decides."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "placed.py").write_text(PLACED)
    data = coterie.Federation.from_clients([(torch.randn(20, 4), torch.arange(20) % 3) for _ in range(3)])
    coterie.run("fedavg", model("placed.py:Net", (4,), 3), data, folder="run", rounds=1, device="cpu")
    words = ["run", "--model", "0", "--net", "placed.py:Net", "-o", "net.safetensors"]
    for said in (words, ["net.safetensors", "-o", "again.safetensors"]):
        code, _, errors = asked(tmp_path, monkeypatch, capsys, *said)
        assert code == 0, errors
    assert json.loads((tmp_path / "net.json").read_text())["job"]["dtype"] == "float32"
