"""Every schedule that can be named has its function, and begins at the learning rate."""

from typing import get_args

import pytest

from coterie.contract.schedules import FACTORS, Schedule


def test_every_name_has_its_function():
    assert tuple(FACTORS) == get_args(Schedule)


@pytest.mark.parametrize("name", FACTORS)
def test_the_first_round_has_the_learning_rate_itself(name):
    """decay^0 = 1 and cos 0 = 1."""
    assert FACTORS[name](0, 10, 0.5) == 1
    assert all(0 < FACTORS[name](t, 10, 0.5) <= 1 for t in range(11))
