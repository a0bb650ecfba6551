"""Intervals for a share and for a mean, against closed forms, quadrature and sums over all outcomes."""

import numpy as np
import pytest
from scipy import stats

from coterie.evaluation import intervals


def test_the_exact_binomial_interval_of_none_correct():
    """With 0 of n correct the upper end solves (1 - p)^n = 0.025; the ends mirror for n of n."""
    low, high = intervals.clopper_pearson(0, 20)
    assert (low, high) == (0, pytest.approx(1 - 0.025 ** (1 / 20)))
    assert intervals.clopper_pearson(20, 20) == pytest.approx((1 - high, 1))


def test_the_prediction_interval_is_that_of_the_integral():
    """P(j further correct) = integral of Binomial(j; m, p) over the posterior of p, done here by quadrature."""
    k, n, m = 17, 25, 9
    p = (np.arange(200_000) + 0.5) / 200_000
    weight = stats.beta.pdf(p, k + 0.5, n - k + 0.5) / len(p)
    mass = np.array([(stats.binom.pmf(j, m, p) * weight).sum() for j in range(m + 1)]).cumsum()
    expected = [np.searchsorted(mass, tail) / m for tail in (0.025, 0.975)]
    assert intervals.predictive(k, n, m) == pytest.approx(tuple(expected))


@pytest.mark.parametrize(("n", "m"), [(6, 2), (30, 10), (90, 30)])
def test_the_prediction_interval_keeps_its_promise_for_every_accuracy(n, m):
    """By summing over all outcomes: it holds 95 % of the time, and is at most 1.3 times as wide as the exact binomial
    interval for m samples, which does not have to reckon with the estimate being off itself."""
    for p in (0.1, 0.3, 0.5, 0.7, 0.9, 0.98):
        seen, further = stats.binom.pmf(np.arange(n + 1), n, p), stats.binom.pmf(np.arange(m + 1), m, p)
        covered = width = exact = 0.0
        for k in np.flatnonzero(seen > 1e-6):
            low, high = intervals.predictive(int(k), n, m)
            covered += seen[k] * further[round(low * m) : round(high * m) + 1].sum()
            width += seen[k] * (high - low)
            exact += seen[k] * np.subtract(*reversed(intervals.clopper_pearson(k / n * m, m)))
        assert covered > 0.95
        assert width < 1.3 * exact


def exact_predictive(correct, n, future, level=intervals.LEVEL):
    """The frequentist counterpart of `predictive`: all j of `future` that a test does not tell from the data.

    Given correct + j in all, the number among the first n is hypergeometric; j is kept where neither tail is below
    (1 - level) / 2. It covers at least `level` for every p, and is the wider for it.
    """
    tail = (1 - level) / 2
    laws = [stats.hypergeom(n + future, correct + j, n) for j in range(future + 1)]
    kept = [j for j, law in enumerate(laws) if law.cdf(correct) >= tail and law.sf(correct - 1) >= tail]
    return min(kept) / future, max(kept) / future


def test_the_prediction_interval_holds_the_nearest_outcome_and_the_exact_one_is_wider():
    low, high = exact_predictive(17, 25, 9)
    assert low <= intervals.predictive(17, 25, 9)[0] < 17 / 25 < intervals.predictive(17, 25, 9)[1] <= high


def test_students_interval_for_regression():
    """n = 5, s = 2, endlessly many: 3 -+ t(4) 2 / sqrt(5) with t = 2.776; for 5 further ones sqrt(2) times as far."""
    reach = 2.7764451 * 2 / np.sqrt(5)
    assert intervals.mean_predictive(3, 2, 5, 0) == pytest.approx((3 - reach, 3 + reach))
    assert intervals.mean_predictive(3, 2, 5, 5) == pytest.approx((0, 3 + np.sqrt(2) * reach))


def test_an_estimate_with_more_variance_is_worth_fewer_samples():
    """v / w = v / n + extra: with p = 1/2 and n = 99 of variance 1/4 / 99, an extra 1/4 / 99 halves their worth."""
    assert intervals.worth(49.5, 99, 0.0) == pytest.approx(99)
    assert intervals.worth(49.5, 99, 0.25 / 99) == pytest.approx(99 / 2)
