"""Who is computed together: parts of a cohort, and the cohorts of several runs as one."""

import numpy as np
import pytest
import torch

from coterie import streams
from coterie.contract.cohort import LocalTraining, Members
from coterie.errors import CoterieError


def members(tiny, seed=0, pace=None, method="fedavg"):
    sim = tiny.simulation(method, seed=seed)
    return sim, sim.cohort(np.array([3, 0, 2]), pace).members


def test_some_members_keep_everything_that_is_theirs(tiny):
    _, all_three = members(tiny, pace=np.array([0.1, 0.2, 0.3]))
    some = all_three.only(np.array([True, False, True]))
    assert some.places.tolist() == some.numbers.tolist() == [3, 2]
    assert some.pace.tolist() == [0.1, 0.3]
    assert np.array_equal(some.names, all_three.names[[0, 2]])
    assert np.array_equal(some.histogram, all_three.histogram[[0, 2]])
    assert some.alike == all_three.alike


def test_members_of_several_runs_have_the_seeds_and_fresh_rows_of_their_own(tiny):
    """Also where only some of them are looked at: the mask goes across the runs."""
    (one, first), (other, second) = members(tiny, 4), members(tiny, 9)
    both = Members.together([first, second])
    assert both.places.tolist() == [3, 0, 2, 3, 0, 2]
    assert both.seeds.tolist() == [4, 4, 4, 9, 9, 9]
    assert torch.equal(both.fresh(), torch.stack([one.init.row] * 3 + [other.init.row] * 3))
    some = both.only(np.array([False, False, True, True, False, False]))
    assert some.seeds.tolist() == [4, 9]
    assert torch.equal(some.fresh(), torch.stack([one.init.row, other.init.row]))
    with pytest.raises(CoterieError, match="rows of their own"):
        assert both.init


def test_seeds_beyond_64_bits_name_the_same_streams_alone_and_together(tiny):
    (_, first), (_, second) = members(tiny, 2**70 + 5), members(tiny, 1)
    both, words = Members.together([first, second]), torch.from_numpy(first.names)
    assert torch.equal(streams.key(both.seeds[:3], words), streams.key(first.seeds, words))


def test_what_can_be_computed_together_is_alike(tiny):
    """Seeds may differ; the training, stragglers, and being the first round may not."""
    sim, first = members(tiny)
    assert members(tiny, 5)[1].alike == first.alike
    ids = np.arange(2)
    assert sim.at(0, ids, local=LocalTraining(steps=1)).members.alike != first.alike
    assert sim.at(0, ids, np.ones(2)).members.alike != first.alike
    assert sim.at(1, ids).members.alike != first.alike
    assert sim.at(2, ids).members.alike == sim.at(1, ids).members.alike
