"""Every schedule that can be named has its function, and begins at the learning rate."""

from typing import get_args

import pytest

from coterie.contract.schedules import FACTORS, Schedule, factor


def test_every_name_has_its_function():
    assert tuple(FACTORS) == get_args(Schedule)


@pytest.mark.parametrize("name", FACTORS)
def test_the_first_round_has_the_learning_rate_itself(name):
    """decay^0 = 1 and cos 0 = 1."""
    assert FACTORS[name](0, 10, 0.5) == 1
    assert all(0 < FACTORS[name](t, 10, 0.5) <= 1 for t in range(11))


@pytest.mark.parametrize("name", FACTORS)
def test_without_a_warm_up_the_factor_is_the_schedules_to_the_last_bit(name):
    assert [factor(name, t, 7, 0.9, 0) for t in range(8)] == [FACTORS[name](t, 7, 0.9) for t in range(8)]


@pytest.mark.parametrize("name", FACTORS)
def test_a_warm_up_rises_linearly_and_hands_over_at_the_schedules_start(name):
    """Round `warmup` has the schedule's first factor, 1, and every round before it 1 / (warmup + 1) less."""
    assert [factor(name, t, 10, 0.9, 4) for t in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0], rel=1e-15)
    assert factor(name, 7, 10, 0.9, 4) == FACTORS[name](3, 6, 0.9)
