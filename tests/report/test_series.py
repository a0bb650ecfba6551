"""Means over seeds and the thinning of long series, by hand."""

import numpy as np

from coterie.report.series import finite, over_seeds, thinned

INF, NAN = float("inf"), float("nan")


def test_the_mean_over_seeds_is_over_those_that_have_a_value():
    """(1 + 3) / 2, then 4 alone, then nobody; a model that diverged in one seed has diverged on average."""
    values = np.array([[1.0, NAN, NAN, 1.0], [3.0, 4.0, NAN, INF]])
    np.testing.assert_array_equal(over_seeds(values), [2.0, 4.0, NAN, INF])


def test_what_cannot_be_drawn_is_left_out_of_the_mean():
    np.testing.assert_array_equal(over_seeds(finite(np.array([[1.0, INF], [INF, INF]]))), [1.0, NAN])


def test_a_long_series_keeps_its_ends_and_even_steps():
    """Four of ten: the places 0, 3, 6, 9; what is short enough stays whole."""
    assert thinned(10, 4).tolist() == [0, 3, 6, 9]
    assert thinned(3, 4).tolist() == [0, 1, 2]
    assert thinned(0, 4).tolist() == []
