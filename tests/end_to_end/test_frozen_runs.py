"""A run whose model is partly frozen, from what was asked for to what is handed out."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import coterie
from coterie.contract.patterns import partly
from coterie.data import Federation, digits, partition
from coterie.errors import CoterieError
from coterie.models import model
from coterie.running import checkpoint
from coterie.running.experiment import Experiment
from coterie.running.saved import Saved
from coterie.serving import export, portable
from coterie.serving.newcomers import personalize

ASKED = {"data": "digits", "clients": 4, "model": "mlp:hidden=8", "train": "head", "methods": ["fedavg"],
         "training": {"rounds": 3, "device": "cpu", "seed": 5, "checkpoint_every": 2}}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """FedAvg on digits of which only the head trains: an experiment, its folder and its result."""
    folder = tmp_path_factory.mktemp("frozen") / "run"
    asked = Experiment.of(ASKED)
    (result,) = asked.run(folder)
    return asked, folder, result


def test_what_travels(tiny):
    """3,003 of 1,069,003 parameters train, so a client sends 4 bytes for each of those and nothing else."""
    body = nn.Linear(1065, 1000)  # 1,066,000
    whole = nn.Sequential(body, nn.Linear(1000, 3))
    generator = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(4, 1065, generator=generator), torch.tensor([0, 1, 2, 0])) for _ in range(3)]
    data = Federation.from_clients(pairs, classes=3, val=0.0, test=0.25)
    result = coterie.run("fedavg", whole, data, freeze="base", rounds=2, device="cpu", batch=2)
    assert [(r["up"], r["down"]) for r in result.rounds] == [({"update": 12_012}, {"row": 12_012})] * 2
    everything = coterie.run("fedavg", whole, data, rounds=1, device="cpu", batch=2)
    assert everything.rounds[0]["up"] == {"update": 4 * 1_069_003}


def test_buffers_are_listed_apart(tiny):
    """The tiny model has 25 numbers, a BatchNorm layer of 10 and 11 in its statistics, and a head of 18."""
    assert tiny.simulation("fedavg", "bn").round().up == {"update": 8 * (25 + 10 + 18), "update buffers": 8 * 11}
    # what FedPer sends is a part of a row: all but the head
    assert tiny.simulation("fedper", "bn").round().up == {"update": 8 * (25 + 10), "update buffers": 8 * 11}
    assert tiny.simulation("fedavg", "bn", buffers="local").round().up == {"update": 8 * (25 + 10 + 18)}


def test_the_folder_says_what_is_frozen(run):
    _, folder, _ = run
    config = json.loads((folder / "config.json").read_text())
    assert (config["train"], config["columns"], config["frozen"]) == ("head", 8 * 10 + 10, 64 * 8 + 8)
    tensors, meta = checkpoint.load(folder / "checkpoint.safetensors")
    assert tensors["server.row"].shape == (90,)
    assert meta["layout"].endswith(config["frozen_sha256"])
    assert config["choices"]["prefix"]["until"] == "base.2"


def test_resumed_runs_stand_on_the_same_weights(run, tmp_path):
    """Stopped after 2 rounds and resumed it is bit for bit the run that went through."""
    asked, folder, _ = run
    short = Experiment.of({**ASKED, "training": {**ASKED["training"], "rounds": 3}})

    class Stopped(Exception):  # noqa: N818
        pass

    def stop(progress):
        if progress.round == 2 and progress.record is not None:
            raise Stopped

    with pytest.raises(Stopped):
        short.run(tmp_path / "run", watch=stop)
    short.run(tmp_path / "run", resume=True)
    ends = [json.loads((place / "result.json").read_text())["rows_sha256"] for place in (folder, tmp_path / "run")]
    assert ends[0] == ends[1]
    assert asked == short


def test_models_that_leave_the_run_are_whole(run, tmp_path):
    """Export and personalize write the frozen tensors too, and give what the client's model gives."""
    _, folder, result = run
    saved = Saved.open(folder)
    name = result.names[0]
    expected = result.model_for(name)
    chosen = portable.of_run(saved, name, None, False)
    assert export.write(chosen, tmp_path / "m.safetensors", "safetensors") == 0
    held = load_file(tmp_path / "m.safetensors")
    assert held.keys() == expected.state_dict().keys()
    x = digits()[0][:7]
    plain = model("mlp", (1, 8, 8), 10, hidden=8)()
    plain.load_state_dict(held)
    assert torch.equal(plain(x), expected(x))
    again = portable.read_model(tmp_path / "m.safetensors")
    assert torch.equal(again.loaded()(x), expected(x))
    assert torch.equal(again.outputs(x), expected(x))
    xs, ys = digits()
    found = personalize(saved, (xs[-20:], ys[-20:]))
    assert found.row.shape == (90,)
    assert torch.equal(found.module().base[1].weight, expected.base[1].weight)


def test_models_of_a_run_share_what_is_frozen(run):
    _, _, result = run
    one, two = result.model_for(0), result.model_for(1)
    assert one.base[1].weight.data_ptr() == two.base[1].weight.data_ptr()
    assert one.head.weight.data_ptr() != two.head.weight.data_ptr()


def test_other_frozen_weights_are_refused(run, tmp_path):
    """The weights are drawn from the run's seed; with another one they are others, and the checkpoint does not fit."""
    _, folder, _ = run
    saved = Saved.open(folder)
    tensors, meta = saved.checkpoint()
    assert saved.server(saved.init(), tensors, meta).state.row.shape == (90,)
    other = Experiment.of({**ASKED, "training": {**ASKED["training"], "seed": 6}})
    federation = other.federation()
    init = other.spec(federation, "fedavg").init(saved.method)
    with pytest.raises(CoterieError, match="frozen weights of this model are not those of the checkpoint"):
        saved.server(init, tensors, meta)


def test_from_python_and_from_toml(tmp_path):
    """The same words everywhere, and the same rows."""
    (tmp_path / "a.toml").write_text(
        'clients = 4\nmodel = "mlp:hidden=8"\nfreeze = "base"\nmethods = ["fedavg"]\n'
        '[training]\nrounds = 2\ndevice = "cpu"\n'
    )
    (one,) = coterie.experiment(tmp_path / "a.toml").run()
    x, y = digits()
    dealt = partition("dirichlet", y.numpy(), 4, alpha=0.5, seed=0)
    data = Federation.from_assignment(x, y, dealt)
    two = coterie.run("fedavg", model("mlp", (1, 8, 8), 10, hidden=8), data, train="head", rounds=2, device="cpu")
    assert torch.equal(one.simulation.server.state.row, two.simulation.server.state.row)
    results = coterie.compare([], model("mlp", (1, 8, 8), 10, hidden=8), data, train="head", rounds=1, device="cpu")
    assert {r.rounds[0]["up"].get("update", 0) for r in results} == {0, 4 * 90}


def test_different_seeds_have_different_bodies_and_do_not_share_an_engine(tiny):
    """A factory draws the frozen body from the run's seed; a module brings it along, and then runs join."""
    chosen = partly(tiny.mlp, train="2")
    first = tiny.simulation("fedavg", chosen, seed=0)
    assert tiny.simulation("fedavg", chosen, seed=1, twin=first).engine is not first.engine
    assert tiny.simulation("fedavg", chosen, seed=0, twin=first).engine is first.engine
    given = chosen()
    first = tiny.simulation("fedavg", given, seed=0)
    assert tiny.simulation("fedavg", given, seed=1, twin=first).engine is first.engine
