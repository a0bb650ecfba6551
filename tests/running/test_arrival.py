"""Arrival within a process: newcomers that are computed together know nothing of each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from coterie.running import arrival
from coterie.running.clients import Clients
from coterie.running.server import Server
from coterie.running.together import alone

METHODS = ["fedavg", "fedfew:models=2", "ifca:models=2", "pacfl", "cfl", "ditto", "fedrep", "pfedhn", "fedala", "fesem"]


def with_unseen(tiny, unseen):
    data = tiny.federation(sizes=(4, 3, 2, 3, 5, 4, 6), val=(1,), test=(2,))
    return type(data)(data.x, data.y, data.bounds, 7 - unseen, data.classes, data.names, data.recipe)


def only(data, clients):
    """These clients as a federation of their own."""
    splits = [[data.client(i, split) for i in clients] for split in ("train", "test", "val")]
    return type(data).from_splits(*splits, classes=data.classes, names=[data.names[i] for i in clients])


@pytest.mark.parametrize("method", METHODS)
def test_newcomers_together_get_what_each_gets_alone(tiny, method):
    """Three unseen clients arrive at the server of a checkpoint, where no data of the run are. Each gets the row that
    the run's evaluator gives it when it is the only one: admitted as the first client after those of the run."""
    data = with_unseen(tiny, 3)
    sim = tiny.simulation(method, data=data)
    sim.round()
    tensors, meta = sim.snapshot()
    newcomers = Clients(
        sim.method, tiny.mlp, only(data, [4, 5, 6]), sim.training, population=sim.population, first=sim.population
    )
    server = Server.restored(sim.method, newcomers.init, sim.training, tensors, meta)
    cohort = newcomers.at(sim.rounds_done, np.arange(3))
    found = arrival.each_alone(server, cohort, sim.population)
    for place, client in enumerate((4, 5, 6)):
        first = only(data, [0, 1, 2, 3, client])
        one = tiny.simulation(method, data=type(data)(
            first.x, first.y, first.bounds, 4, first.classes, first.names, first.recipe
        ))
        one.round()
        torch.testing.assert_close(found.rows[place], one.row(4), rtol=1e-9, atol=1e-9)
    assert torch.equal(server.payload(torch.arange(1)).tensors().popitem()[1],
                       sim.server.payload(torch.arange(1)).tensors().popitem()[1])  # the server is as it was


def test_all_introduce_themselves_before_any_is_admitted(tiny):
    """PACFL clusters by everybody's introductions: in whatever waves they come, the admitted server is the same."""
    data = with_unseen(tiny, 3)
    sim = tiny.simulation("pacfl", data=data)
    ids = torch.arange(4, 7)
    waves = ([np.array([4, 5, 6])], [np.array([4]), np.array([5, 6])])
    one, other = (alone(arrival.admitting(sim.server, ids, map(sim.cohort, parts)))[0] for parts in waves)
    assert one.state.cluster.tolist() == other.state.cluster.tolist()
    assert len(one.state.cluster) == 7
    torch.testing.assert_close(one.state.basis, other.state.basis)
