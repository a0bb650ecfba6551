"""Sites whose adapters have unequal ranks: each by its name or number, and messages have one shape for all."""

from __future__ import annotations

import pytest
import sites as toy
import torch


@pytest.mark.parametrize("method", ["raflora", "flexlora:ranks=1+2,dealt=inturn", "hetlora"])
def test_sites_draw_the_ranks_of_the_simulation(tmp_path, method):
    """Both know the same ranks and end with the same model. What a site sends has the whole row's columns, zeros in
    ranks that it has not, and that is what its record counts; the simulation counts its own ranks."""
    data = toy.federation()
    one = toy.job(data, method)
    (rounds,), _ = toy.run(data, [one], tmp_path)
    sim = toy.stacked(data, one)
    assert torch.equal(rounds.server.state.rank, sim.server.state.rank)
    assert set(sim.server.state.rank[:, 0].tolist()) == {1, 2}
    torch.testing.assert_close(rounds.server.state.row, sim.server.state.row, rtol=1e-9, atol=1e-9)
    assert rounds.rounds[0]["up"] == {"update": 8 * sim.layout.size, "rank": 8}
    assert sim.round().up["update"] < 8 * sim.layout.size
