"""What is recorded of how clients' updates lie to each other."""

from __future__ import annotations

import pytest
import torch

from coterie import registry
from coterie.contract.algebra import cosines, opposing
from coterie.running.round import conflicts
from coterie.running.training import Training


@pytest.mark.parametrize("method", ["fedavg", "fedper", "fedbn", "fedrod", "fedpac", "lgfedavg", "pfedhn:pc"])
def test_opposing_updates_are_those_of_the_parameters(tiny, method):
    """Updates that agree in the parameters and whose running statistics and counters fly apart, a thousand times as
    far: nobody opposes anybody, whatever part of a model a method shares."""
    sim = tiny.simulation(method, "bn")
    columns = sim.layout.only(sim.method.travels())
    generator = torch.Generator().manual_seed(0)
    update = torch.rand(4, columns.size, dtype=torch.float64, generator=generator) + 0.1
    apart = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]], dtype=torch.float64) * 1000
    update = columns.put(update, "buffers", apart.expand(-1, sum(e.size for e in columns.within("buffers"))))
    found = conflicts({"update": update}, sim.layout, sim.method.travels(), Training(rounds=1), 0)
    expected = cosines(columns.cut(update, "parameters"))
    assert found["opposing"] == 0 == opposing(expected)
    torch.testing.assert_close(torch.tensor(found["cosines"], dtype=torch.float64), expected, rtol=0, atol=1e-4)


def test_columns_that_nobody_knows_are_not_compared(tiny):
    """Of an upload that is neither a row nor the part that travels nobody can tell the statistics; without any, all
    columns are parameters."""
    update = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    once = Training(rounds=1)
    assert conflicts({"update": update}, tiny.simulation("fedavg", "bn").layout, "all", once, 0) == {}
    assert conflicts({"update": update}, tiny.simulation("fedavg", "mlp").layout, "all", once, 0)["opposing"] == 1


@pytest.mark.parametrize("method", sorted(registry.methods()))
def test_a_run_records_the_cosines_of_what_clients_upload(tiny, method):
    """The matrix in the record of the last round is that of the parameters' columns of the uploads."""
    sim = tiny.simulation(method, "bn", rounds=1)
    caught = []
    merge = sim.server.merge
    sim.server.merge = lambda up: caught.append(up) or merge(up)
    report = sim.round().report
    update = caught[0].tensors.get("update") if caught else None
    if update is None:
        assert "cosines" not in report
        return
    shared = sim.layout if update.shape[-1] == sim.layout.size else sim.layout.only(sim.method.travels())
    expected = cosines(shared.cut(update, "parameters").flatten(1))
    torch.testing.assert_close(torch.tensor(report["cosines"], dtype=torch.float64), expected, rtol=0, atol=1e-4)
