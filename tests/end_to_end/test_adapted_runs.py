"""A run with low-rank adapters, from the command to the models that are handed out and to real sites' messages."""

from __future__ import annotations

import json

import pytest
import torch
from commands import exit_code
from safetensors.torch import load_file

import coterie
from coterie.data import Federation, digits, partition
from coterie.errors import CoterieError
from coterie.models import model
from coterie.models.lora import adapted, merged
from coterie.running import checkpoint
from coterie.running.experiment import Experiment
from coterie.running.saved import Saved
from coterie.serving import export, portable
from coterie.serving.newcomers import personalize

ASKED = {"data": "digits", "clients": 4, "model": "mlp:hidden=12", "adapter": "lora:rank=3", "methods": ["fedper"],
         "training": {"rounds": 3, "device": "cpu", "seed": 5, "checkpoint_every": 2}}
COLUMNS, HEAD, BODY = 3 * (64 + 12), 12 * 10 + 10, 64 * 12 + 12


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapted") / "run"
    asked = Experiment.of(ASKED)
    (result,) = asked.run(folder)
    return asked, folder, result


def test_the_folder_says_what_is_adapted(run):
    """A client sends 4 bytes for each of 3 (64 + 12) numbers. FedPer keeps the head; the body is in no checkpoint."""
    _, folder, result = run
    config = json.loads((folder / "config.json").read_text())
    assert (config["adapter"], config["columns"], config["frozen"]) == ("lora:rank=3", COLUMNS + HEAD, BODY)
    assert result.rounds[0]["up"] == {"update": 4 * COLUMNS}
    tensors, meta = checkpoint.load(folder / "checkpoint.safetensors")
    assert tensors["server.row"].shape == (COLUMNS,)
    assert meta["layout"].endswith(config["frozen_sha256"])


def test_models_that_leave_the_run_are_whole_and_can_be_merged(run, tmp_path):
    """The file holds backbone and adapters under the module's own names, and answers as the client's model does; so
    does a plain model without adapters that is loaded with the merged weights."""
    _, folder, result = run
    saved, name = Saved.open(folder), result.names[0]
    expected, x = result.model_for(name), digits()[0][:7]
    assert export.write(portable.of_run(saved, name, None, False), tmp_path / "m.safetensors", "safetensors") == 0
    held = load_file(tmp_path / "m.safetensors")
    assert held.keys() == expected.state_dict().keys()
    assert sorted(name for name in held if ".lora." in name) == ["base.1.lora.A", "base.1.lora.B"]
    again = portable.read_model(tmp_path / "m.safetensors")
    assert torch.equal(again.loaded()(x), expected(x))
    plain = model("mlp", (1, 8, 8), 10, hidden=12)()
    plain.load_state_dict(merged(expected).state_dict())
    torch.testing.assert_close(plain(x), expected(x), rtol=1e-5, atol=1e-5)
    assert expected.get_submodule("base.1.lora").B.any()
    xs, ys = digits()
    found = personalize(saved, (xs[-20:], ys[-20:]))
    assert torch.equal(found.module().get_submodule("base.1.base").weight, expected.get_submodule("base.1.base").weight)


def test_a_run_goes_on_with_its_adapters_and_no_others(run, tmp_path, monkeypatch, capsys):
    """Stopped after 2 of 3 rounds and resumed it is bit for bit the run that went through."""
    _, folder, _ = run

    class Stopped(Exception):  # noqa: N818
        pass

    def stop(progress):
        if progress.round == 2 and progress.record is not None:
            raise Stopped

    with pytest.raises(Stopped):
        Experiment.of(ASKED).run(tmp_path / "run", watch=stop)
    assert exit_code(monkeypatch, "resume", str(tmp_path / "run")) == 0
    ends = [json.loads((place / "result.json").read_text())["rows_sha256"] for place in (folder, tmp_path / "run")]
    assert ends[0] == ends[1]
    capsys.readouterr()
    data = Experiment.of(ASKED).federation()
    with pytest.raises(CoterieError, match="the checkpoint holds another model"):
        coterie.run("fedper", model("mlp", (1, 8, 8), 10, hidden=12), data, adapter="lora:rank=2", resume=True,
                    folder=tmp_path / "run", rounds=3, device="cpu", seed=5, checkpoint_every=2)


def test_from_python_from_toml_and_by_the_command(tmp_path, monkeypatch, capsys):
    """The same words everywhere, and the same rows; a model that was adapted beforehand is the same, too."""
    (tmp_path / "a.toml").write_text(
        'clients = 4\nmodel = "mlp:hidden=8"\nadapter = "lora:rank=2"\nmethods = ["fedavg"]\n'
        '[training]\nrounds = 2\ndevice = "cpu"\n'
    )
    (one,) = coterie.experiment(tmp_path / "a.toml").run()
    x, y = digits()
    data = Federation.from_assignment(x, y, partition("dirichlet", y.numpy(), 4, alpha=0.5, seed=0))
    build = model("mlp", (1, 8, 8), 10, hidden=8)
    two = coterie.run("fedavg", build, data, adapter="lora:rank=2", rounds=2, device="cpu")
    three = coterie.run("fedavg", adapted(build, "lora:rank=2"), data, rounds=2, device="cpu")
    rows = [found.simulation.server.state.row for found in (one, two, three)]
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])
    words = ["--clients", "4", "--model", "mlp:hidden=8", "--adapter", "lora:rank=2", "--rounds", "2", "--set",
             "device=cpu", "--out", str(tmp_path / "run")]
    assert exit_code(monkeypatch, "run", "fedavg", *words) == 0
    tensors, _ = checkpoint.load(tmp_path / "run" / "checkpoint.safetensors")
    assert torch.equal(tensors["server.row"], rows[0])
    capsys.readouterr()
    assert exit_code(monkeypatch, "show", str(tmp_path / "run")) == 0
    assert "model mlp:hidden=8, adapter lora:rank=2, 2 rounds" in capsys.readouterr().out


def test_bad_words_end_before_anything_is_written(tmp_path, monkeypatch, capsys):
    bad = {"lora:targets=q": "unknown target of the adapter 'q'", "lora:rank=100": "rank 100 is above",
           "lora:ranks=3": "did you mean 'rank'", "ia3": "unknown adapter 'ia3'"}
    for adapter, said in bad.items():
        words = ["--clients", "4", "--adapter", adapter, "--out", str(tmp_path / "run")]
        assert exit_code(monkeypatch, "run", "fedavg", *words) == 2
        assert said in " ".join(capsys.readouterr().err.split())
        assert not (tmp_path / "run").exists()
