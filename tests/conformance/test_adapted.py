"""Every method over adapters on a frozen backbone: it runs alike on every engine, and the backbone stays as it was."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from coterie import registry
from coterie.contract.patterns import partly
from coterie.models.lora import adapted

METHODS = sorted(registry.methods())
WAYS = {"stack": {"engine": "stack"}, "loop": {"engine": "loop"}, "one client a wave": {"wave": 1}}


class Attending(nn.Module):
    """A small transformer over four tokens, with dropout in its layer and in the adapters."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(1, 8)
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 6)
        self.norm, self.drop = nn.LayerNorm(6), nn.Dropout(0.2)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        z = self.up(x.flatten(1).unsqueeze(-1))
        weights = torch.softmax(self.q(z) @ self.k(z).transpose(-1, -2) / 8**0.5, -1)
        return self.head(self.drop(self.norm(weights @ self.v(z))).mean(1))


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)),
            "lora:rank=2", 2 * (4 + 6) + 2 * (6 + 5) + 18),
    "transformer": (Attending, "lora:rank=2,alpha=3,targets=q+v(rank=3),dropout=0.1", 2 * 16 + 3 * 14 + 21),
}


def found(tiny, method, model, **options):
    """The run after two rounds of some of the clients, its state, and the losses of all stages then."""
    data = tiny.federation(sizes=(7, 12, 1, 5, 6), unseen=1)
    sim = tiny.simulation(method, model, data=data, participation=0.6, **options)
    for _ in range(2):
        sim.round()
    state = tiny.state(sim)
    for stage, scores in sim.evaluate().stages.items():
        state |= {f"{stage}.test": torch.from_numpy(scores.test["loss"]),
                  f"{stage}.val": torch.from_numpy(np.nan_to_num(scores.val["loss"], nan=-1.0))}
    return sim, state


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_over_adapters(tiny, method, kind):
    """The stack, the plain loop and single clients give the same rows, with dropout drawn by client; of the backbone
    not a bit moves."""
    build, adapter, _ = MODELS[kind]
    model = adapted(build, adapter)
    plain, expected = found(tiny, method, model, engine="reference")
    assert all(torch.isfinite(t).all() for t in expected.values() if t.is_floating_point())
    backbone = dict(zip((entry.name for entry in plain.layout.frozen), plain.layout.values, strict=True))
    before = tiny.simulation(method, model).layout.values
    assert all(torch.equal(a, b) for a, b in zip(backbone.values(), before, strict=True))
    for options in WAYS.values():
        sim, state = found(tiny, method, model, **options)
        tiny.close(state, expected, 1e-12)
        assert all(torch.equal(a, b) for a, b in zip(sim.layout.values, before, strict=True))


@pytest.mark.parametrize("kind", MODELS)
def test_what_travels_is_the_factors_and_the_head(tiny, kind):
    """4 (here 8) bytes for each of r (o + q) numbers of every adapted layer, and for the head's."""
    build, adapter, columns = MODELS[kind]
    done = tiny.simulation("fedavg", adapted(build, adapter)).round()
    assert (done.up, done.down) == ({"update": 8 * columns}, {"row": 8 * columns})
    shared = tiny.simulation("fedper:personal=*.B+head", adapted(build, adapter)).round()  # FedSA-LoRA
    factors = tiny.simulation("fedavg", adapted(build, adapter)).layout.within("*.A")
    assert shared.up == {"update": 8 * sum(entry.size for entry in factors)}


def test_rank_0_is_the_head_alone(tiny):
    """No adapter: bit for bit the run in which all but the head is frozen."""
    build = MODELS["mlp"][0]
    states = [found(tiny, "fedavg", model)[1] for model in (adapted(build, "lora:rank=0"), partly(build, train="head"))]
    assert all(torch.equal(t, states[1][name]) for name, t in states[0].items())
