"""Clients that come and go: who is asked, what newcomers get, and what is recorded of them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import coterie
from coterie import churn, registry
from coterie.data import Federation
from coterie.errors import CoterieError
from coterie.folder import Folder

METHODS = sorted(registry.methods())
TIMES = {"1": (2, churn.NEVER), "2": (0, 3), "3": (2, 4), "5": (3, churn.NEVER)}  # 0, 4 and 6 are always there


def coming(tiny, times=TIMES, **options):
    """Seven clients and one that is unseen, in the order of arrival: 0 2 4 6, 1 3 in round 2, 5 in round 3."""
    data = tiny.federation(sizes=(7, 9, 2, 5, 6, 4, 8), val=(2,), test=(3,), **options)
    unseen = tiny.federation(sizes=(5,), val=(2,), test=(3,), seed=4).client(0)
    splits = [[data.client(i, split) for i in range(7)] + [unseen] for split in ("train", "test", "val")]
    made = Federation.from_splits(*splits, classes=data.classes)
    return churn.with_times(_last_unseen(made), times)


def _last_unseen(made):
    from dataclasses import replace

    return replace(made, trained=7)


def test_who_is_there(tiny):
    data = coming(tiny)
    assert data.names == ("0", "2", "4", "6", "1", "3", "5", "7")
    there = [[data.names[i] for i in data.there(t)] for t in range(5)]
    assert there == [list("0246"), list("0246"), list("024613"), list("046135"), list("04615")]
    assert [data.arrived(t) for t in range(5)] == [4, 4, 6, 7, 7]
    plain = tiny.federation()
    assert (plain.arrived(0), plain.there(9).tolist()) == (4, [0, 1, 2, 3])
    x, y = data.client(4)  # the samples move with the name
    whole = tiny.federation(sizes=(7, 9, 2, 5, 6, 4, 8), val=(2,), test=(3,))
    assert torch.equal(x, whole.client(1)[0])
    assert torch.equal(y, whole.client(1)[1])


def test_only_those_who_are_there_are_asked_and_scored(tiny):
    data = coming(tiny)
    sim = tiny.simulation("fedavg", data=data, rounds=5)
    caught = tiny.seen_clients(sim)
    for t in range(5):
        assert sim.evaluate().stages["served"].clients.tolist() == data.there(t).tolist()
        assert sim.round().participants == len(data.there(t))
    assert [sorted(ids) for ids in caught] == [data.there(t).tolist() for t in range(5)]
    some = tiny.simulation("fedavg", data=data, rounds=5, participation=0.5)
    for t in range(5):
        asked = some.selected(t)
        assert len(asked) == round(0.5 * len(data.there(t)))
        assert set(asked) <= set(data.there(t))


def run(tiny, method, rounds=5, model="mlp", **options):
    sim = tiny.simulation(method, model, data=coming(tiny), rounds=rounds, **options)
    for _ in range(rounds):
        sim.round()
    return sim


@pytest.mark.parametrize("method", METHODS)
def test_every_method_lives_with_churn(tiny, method):
    """Finite models for everybody, also for who left; waves and the loop give the same; a snapshot taken before the
    second arrivals goes on to the same bits; a client that left keeps its own state."""
    sim = tiny.simulation(method, data=coming(tiny), rounds=5, participation=0.75)
    sim.round()
    sim.round()
    tensors, meta = sim.snapshot()
    sim.round()
    gone = {name: t[1].clone() for name, t in sim.own.tensors().items()}  # client 2, which leaves in round 3
    for _ in range(2):
        sim.round()
    expected = tiny.state(sim)
    for name, t in sim.own.tensors().items():
        assert torch.equal(t[1], gone[name])
    assert all(torch.isfinite(sim.row(i)).all() for i in range(8))
    scores = sim.evaluate().stages
    assert np.isfinite(scores["served"].test["loss"]).all()
    assert np.isfinite(scores["unseen_served"].test["loss"]).all()
    again = tiny.simulation(method, data=coming(tiny), rounds=5, participation=0.75, choices=meta["choices"])
    again.restore(tensors, meta)
    for _ in range(3):
        again.round()
    tiny.same(tiny.state(again), expected)
    for options in ({"wave": 2}, {"engine": "loop"}):
        tiny.close(tiny.state(run(tiny, method, participation=0.75, **options)), expected, 1e-11)
