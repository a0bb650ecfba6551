"""Adapters of unequal ranks: every method that takes them computes the same however clients are grouped, and what is
counted is what each client's ranks are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from coterie import registry
from coterie.contract.layout import Layout
from coterie.contract.ranks import Ranked, among, within
from coterie.data import Federation
from coterie.models.lora import adapted


class Attending(nn.Module):
    """A small transformer over four tokens, with dropout in its layer and in the adapters."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(1, 8)
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 6)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(6, 3)

    def forward(self, x):
        z = self.up(x.flatten(1).unsqueeze(-1))
        weights = torch.softmax(self.q(z) @ self.k(z).transpose(-1, -2) / 8**0.5, -1)
        return self.head(self.drop(weights @ self.v(z)).mean(1))


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)),
            "lora:rank=2", 2 * (4 + 6) + 2 * (6 + 5) + 18),
    "transformer": (Attending, "lora:rank=2,alpha=3,targets=q+v(rank=3),dropout=0.1", 2 * 16 + 3 * 14 + 21),
}
WAYS = {"loop": {"engine": "loop"}, "one client a wave": {"wave": 1}, "two": {"wave": 2}}
SPECS = ["flexlora:ranks=1+2", "lorafair:ranks=1+2", "hetlora:ranks=1+2+2,gamma=0.5,lam=0.1", "hetlora:padding",
         "raflora:ranks=1+2", "fedplora:ranks=1+2"]


def found(tiny, method, model, **options):
    """The state after two rounds of some of the clients, and the losses of all stages then."""
    sim = tiny.simulation(method, model, data=tiny.federation(sizes=(7, 12, 1, 5, 6), unseen=1), participation=0.6,
                          **options)
    for _ in range(2):
        sim.round()
    scores = {f"{stage}.test": torch.from_numpy(np.nan_to_num(values.test["loss"], nan=-1.0))
              for stage, values in sim.evaluate().stages.items()}
    return tiny.state(sim) | scores


def test_these_are_all_that_take_unequal_ranks():
    assert {spec.partition(":")[0] for spec in SPECS} == {
        name for name, cls in registry.methods().items() if issubclass(cls, Ranked)
    }


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("spec", SPECS)
def test_the_grouping_of_clients_changes_nothing(tiny, spec, kind):
    """Some of the clients in each round, a newcomer scored beside them: stack, loop and waves agree to rounding of
    float64. The transformer has layers of ranks 2 and 3, and dropout."""
    build, adapter, _ = MODELS[kind]
    model = adapted(build, adapter)
    expected = found(tiny, spec, model, engine="stack")
    assert all(torch.isfinite(t).all() for t in expected.values() if t.is_floating_point())
    for options in WAYS.values():
        tiny.close(found(tiny, spec, model, **options), expected, 1e-12)


@pytest.mark.parametrize("spec", SPECS)
def test_the_order_of_clients_changes_nothing(tiny, spec):
    """Under the same names each draws the same rank, and the server's model is the same; and another run goes on from
    a checkpoint as this one does, bit for bit."""
    build, adapter, _ = MODELS["mlp"]
    data, order = tiny.federation(), [2, 0, 3, 1]
    splits = [[data.client(i, split) for i in order] for split in ("train", "test", "val")]
    moved = Federation.from_splits(*splits, classes=data.classes, names=[data.names[i] for i in order])
    one, other, again = (tiny.simulation(spec, adapted(build, adapter), data=d) for d in (data, moved, data))
    for sim in (one, other):
        for _ in range(3):
            sim.round()
    for place, client in enumerate(order):
        torch.testing.assert_close(other.row(place), one.row(client), rtol=1e-12, atol=1e-12)
    again.restore(*one.snapshot())
    one.round()
    again.round()
    tiny.same(tiny.state(one), tiny.state(again))


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("spec", ["flexlora", "lorafair", "hetlora:padding", "raflora"])
def test_bytes_are_those_of_the_ranks_that_clients_have(tiny, spec, kind):
    """Ranks 1, 2, 1, 2: the mean of 8 (sum over layers of r_i (o + q) + the head), down and up, and a number each."""
    build, adapter, _ = MODELS[kind]
    joint = "," if ":" in spec else ":"
    sim = tiny.simulation(f"{spec}{joint}ranks=1+2,dealt=inturn", adapted(build, adapter))
    sides = [sum(pair.a.shape) - pair.rank + sum(pair.b.shape) - pair.rank for pair in sim.layout.pairs]
    head = sim.layout.size - sum(pair.a.size + pair.b.size for pair in sim.layout.pairs)
    mean = 8 * (1.5 * sum(sides) + head)
    for options in ({}, {"wave": 1}, {"wave": 3}):
        done = tiny.simulation(f"{spec}{joint}ranks=1+2,dealt=inturn", adapted(build, adapter), **options).round()
        assert (done.down, done.up) == ({"row": mean, "rank": 8}, {"update": mean, "rank": 8})


def test_fedplora_sends_up_what_was_trained(tiny):
    """All of the model down; up the drawn modules, of which layers of rank 2 may have fewer than the client's, and the
    head."""
    build, adapter, columns = MODELS["mlp"]
    done = tiny.simulation("fedplora:ranks=1", adapted(build, adapter)).round()
    assert done.down == {"row": 8 * columns}
    assert done.up == {"update": 8 * (columns - (4 + 6) - (6 + 5)), "modules": 8 * 2}


def test_what_masks_count_is_what_a_site_of_that_rank_would_have(tiny):
    """A client of rank 1 sends as many numbers as one whose adapter has rank 1."""
    build = MODELS["mlp"][0]
    layout, small = (Layout.of(adapted(build, f"lora:rank={r}")()) for r in (4, 1))
    assert int(within(torch.tensor([[1]]), layout).sum()) == small.size
    assert int(among(torch.tensor([[0, 0, 1, 0]]), layout).sum()) == small.size
