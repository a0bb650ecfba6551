"""Runs whose server moves the backbone: every model that leaves them stands on all of what moved."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from coterie.data import digits
from coterie.models import model
from coterie.models.lora import merged
from coterie.running.experiment import Experiment
from coterie.running.saved import Saved
from coterie.serving import export, portable
from coterie.serving.newcomers import personalize

MOVED = "base.1.base.weight"


@pytest.fixture(scope="module", params=["fedexlora", "flora"])
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("moved") / "run"
    asked = Experiment.of({
        "data": "digits", "clients": 4, "model": "mlp:hidden=12", "adapter": "lora:rank=3", "methods": [request.param],
        "training": {"rounds": 3, "device": "cpu", "seed": 5, "lr": 0.1},
    })
    (result,) = asked.run(folder)
    return folder, result


def test_the_models_of_clients_and_server_stand_on_what_moved(run, tmp_path):
    """Module, file and merged copy answer alike; the file's backbone is not the one that the run began with."""
    folder, result = run
    saved, name, x = Saved.open(folder), result.names[0], digits()[0][:7]
    expected, simulation = result.model_for(name), result.simulation
    begun = dict(simulation.init.module.named_parameters())[MOVED]
    after = result._after(result.handed_out().round)
    assert float(after.residual.abs().max()) > 1e-6
    torch.testing.assert_close(expected.get_parameter(MOVED) - begun, after.residual.view(12, 64), rtol=0, atol=1e-6)
    for number, one in enumerate((portable.of_run(saved, name, None, False), portable.of_run(saved, None, 0, False))):
        path = tmp_path / f"{number}.safetensors"
        assert export.write(one, path, "safetensors") == 0
        assert torch.equal(load_file(path)[MOVED], expected.get_parameter(MOVED))
        again = portable.read_model(path).loaded()
        torch.testing.assert_close(again(x), expected(x))
    plain = model("mlp", (1, 8, 8), 10, hidden=12)()
    plain.load_state_dict(merged(expected).state_dict())
    torch.testing.assert_close(plain(x), expected(x))
    assert torch.equal(begun, dict(saved.init().module.named_parameters())[MOVED])


@pytest.mark.parametrize("labelled", [True, False])
def test_a_newcomers_model_stands_on_it_too(run, labelled, tmp_path):
    folder, result = run
    saved, x = Saved.open(folder), digits()[0][:30]
    data = (x, digits()[1][:30]) if labelled else None
    found = personalize(saved, data, adapt="no")
    module, shared = found.module(), result._after(found.round)
    assert found.fallback is not labelled
    moved = module.get_parameter(MOVED) - shared.init.module.get_parameter(MOVED)
    torch.testing.assert_close(moved, shared.residual.view(12, 64), rtol=0, atol=1e-6)
    expected = result.model_for(0)  # one model for all, but for FLoRA's A, beside which B is 0
    torch.testing.assert_close(module(x), expected(x))


MEMORY = """
import torch
from torch import nn
import coterie
from coterie import registry
from coterie.models.lora import adapted
from coterie.running.simulation import Simulation
from coterie.running.training import Training

def peak():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024

def grown(clients):
    pairs = [(torch.randn(4, 1024), torch.arange(4) % 2) for _ in range(clients)]
    data = coterie.Federation.from_splits(pairs, pairs, pairs, classes=2)
    layers = lambda: nn.Sequential(nn.Linear(1024, 1536), nn.ReLU(), nn.Linear(1536, 2))
    training = Training(device="cpu", rounds=2, batch=2, engine="stack")
    sim = Simulation(registry.method(METHOD), adapted(layers, "lora:rank=2"), data, training)
    assert sim.wave == clients
    before = peak()
    for _ in range(2):
        sim.round()
        sim.evaluate()
    assert sim.residual.any()
    return peak() - before

few = grown(4)
print(grown(64))
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="peaks as Linux has them")
@pytest.mark.parametrize("method", ["fedexlora", "flora"])
def test_what_moved_is_held_once_for_all_clients(method):
    """R of 1536 x 1024 numbers is 6.3 MB. A copy for each of 64 clients would be 403 MB more than 4 clients took; their
    rows of 8,194 numbers with activations and copies took about 20 MB with FedAvg."""
    ran = subprocess.run([sys.executable, "-c", MEMORY.replace("METHOD", repr(method))], capture_output=True, text=True,
                         check=True)
    assert float(ran.stdout) < 100
