"""Unequal ranks: which columns belong to which rank, and which client has which."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from coterie import registry
from coterie.contract.layout import Layout
from coterie.contract.ranks import among, numbers, within
from coterie.errors import CoterieError
from coterie.models.lora import adapted


def net():
    return nn.Sequential(nn.Conv2d(1, 4, 2), nn.Flatten(), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def test_columns_are_numbered_by_rank():
    """Rank j is row j of A and column j of B, in convolutions too; the head belongs to none, so everybody has it."""
    layout = Layout.of(adapted(net, "lora:rank=3,targets=0(rank=2)+2")())
    assert layout.rank == 3
    found = layout.views(numbers(layout)[None])
    for pair in layout.pairs:
        a, b = found[pair.a.name][0], found[pair.b.name][0]
        for j in range(pair.rank):
            assert (a[j] == j).all()
            assert (b[:, j] == j).all()
    assert (layout.cut(numbers(layout), "head") == -1).all()


def test_masks_have_r_times_o_plus_q_columns():
    """A layer of fewer ranks than a client's is trained whole: min(r, r_layer) (o + q) columns, and the head's 21."""
    layout = Layout.of(adapted(net, "lora:rank=3,targets=0(rank=2)+2")())
    sides = {"0": 4 + 4, "2": 6 + 4}
    for rank in (1, 2, 3):
        columns = sum(min(rank, pair.rank) * sides[pair.name] for pair in layout.pairs)
        assert int(within(torch.tensor([[rank]]), layout).sum()) == columns + 21
    first = among(torch.tensor([[1, 1, 0], [0, 0, 1]]), layout)
    assert torch.equal(first[:1], within(torch.tensor([[2]]), layout))
    assert int(first[1].sum()) == sides["2"] + 21  # the convolution has no third rank


def test_everybody_knows_its_rank(tiny):
    """By seed and name alone: beside others, in another order, as a newcomer; and another seed draws others."""
    data = tiny.federation(sizes=(3,) * 40, unseen=8)
    sim = tiny.simulation("raflora:ranks=1+2+2+2", data=data)
    whole = sim.method.rank_of(tiny.cohort(sim, range(40)))
    assert set(whole[:, 0].tolist()) == {1, 2}
    # binomial(40, 1/4), whose deviation is 2.7: within four of them of 10
    assert 0 < int((whole == 1).sum()) < 21
    for ids in ([5], [39, 0, 7]):
        assert torch.equal(sim.method.rank_of(tiny.cohort(sim, ids)), whole[ids])
    assert torch.equal(sim.server.state.rank, whole[:32])
    other = tiny.simulation("raflora:ranks=1+2+2+2", data=data, seed=1)
    assert not torch.equal(other.server.state.rank, whole[:32])
    given = tiny.simulation("raflora:ranks=2+1+1,dealt=inturn", data=data)
    assert given.server.state.rank[:7, 0].tolist() == [2, 1, 1, 2, 1, 1, 2]


def test_shares_of_a_rank_are_rounded_up(tiny):
    layout = Layout.of(adapted(net, "lora:rank=3,targets=2")())
    assert registry.method("hetlora").choice(layout) == [1, 2, 3]  # 3/4, 3/2 and 3
    assert registry.method("hetlora:ranks=1+1/3+2/3+all").choice(layout) == [1, 1, 2, 3]


@pytest.mark.parametrize("ranks", ["0", "2+x", "1.5", "-1", "3/2", "1/0", "0/2", "2++none"])
def test_a_word_that_is_no_rank_is_refused(ranks):
    with pytest.raises(CoterieError, match="a rank is a whole number from 1 on, a share of the adapter's"):
        registry.method(f"flexlora:ranks={ranks}")


def test_no_rank_at_all_is_refused():
    with pytest.raises(CoterieError, match="flexlora's ranks names none; write ranks=2"):
        registry.method("flexlora:ranks=+")


def test_a_rank_above_the_adapters_is_refused_before_the_run(tiny):
    said = r"hetlora's ranks=2\+8 names rank 8, and the model's adapters have rank 2; give smaller ones, or .*rank=8"
    with pytest.raises(CoterieError, match=said):
        tiny.simulation("hetlora:ranks=2+8")


@pytest.mark.parametrize("method", ["ffalora", "rolora", "fedsvd", "fedavg", "ditto"])
def test_methods_of_equal_ranks_name_those_of_unequal_ones(method):
    said = f"in {method} all clients have adapters of one rank; those of unequal ones are for fedplora, flexlora, " \
           "hetlora, lorafair, raflora"
    with pytest.raises(CoterieError, match=said):
        registry.method(f"{method}:ranks=2+4")


def test_draws_of_a_cohort_are_uniform_and_each_clients_own(tiny):
    """1000 clients, 3 numbers each: a mean of 1/2 to four deviations 1 / sqrt(12 n); a new round draws anew."""
    sim = tiny.simulation("fedavg", data=tiny.federation(sizes=(1,) * 1000, val=(0,), test=(1,)))
    cohort = tiny.cohort(sim)
    drawn = cohort.chance("words", 3)
    assert drawn.shape == (1000, 3)
    assert abs(float(drawn.mean()) - 0.5) < 4 / np.sqrt(12 * 3000)
    assert len(drawn.unique()) == 3000
    assert torch.equal(cohort.chance("words", 5)[:, :3], drawn)
    once = cohort.chance("words", once=True)
    sim.round()
    assert not torch.equal(tiny.cohort(sim).chance("words", 3), drawn)
    assert torch.equal(tiny.cohort(sim).chance("words", once=True), once)


def test_a_tensor_of_ranks_is_a_column(tiny):
    """`[C, 1]`, so that no number of clients makes it look like a row."""
    sim = tiny.simulation("raflora")
    assert sim.server.state.rank.shape == (4, 1)
