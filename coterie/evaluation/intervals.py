"""How far an accuracy counted on few samples can be trusted: exact binomial and prediction intervals."""

from __future__ import annotations

import math

from scipy import special, stats

from coterie.contract.metric import Scale

LEVEL = 0.95
"""Of all intervals; half of what is left lies on either side."""
PROPORTIONS = ("accuracy", "top_k")
"""Metrics that count test samples: right ones of n, so that drawing the samples anew is a binomial draw."""


def is_proportion(scale: Scale) -> bool:
    """Whether a client's value is the share of its test samples that are right."""
    return scale.name.partition("(")[0] in PROPORTIONS  # top_k(k=3) has options


def clopper_pearson(correct: float, n: float, level: float = LEVEL) -> tuple[float, float]:
    """The exact binomial confidence interval for the probability of being correct, from `correct` of `n` samples."""
    tail = (1 - level) / 2
    low = special.betaincinv(correct, n - correct + 1, tail) if correct > 0 else 0.0
    high = special.betaincinv(correct + 1, n - correct, 1 - tail) if correct < n else 1.0
    return float(low), float(high)


def worth(correct: float, n: int, extra: float) -> float:
    """How many samples an estimate from `n` is worth whose variance is larger by `extra`: v / (v / n + extra).

    v = p (1 - p) with p = (correct + 1/2) / (n + 1), which is not 0 where all or none are correct.
    """
    p = (correct + 0.5) / (n + 1)
    return p * (1 - p) / (p * (1 - p) / n + extra)


def predictive(correct: float, n: float, future: int, level: float = LEVEL) -> tuple[float, float]:
    """The prediction interval for the accuracy on `future` further samples, from `correct` of `n`.

    p | data ~ Beta(correct + 1/2, n - correct + 1/2) (Jeffreys), further correct ones | p ~ Binomial(future, p). The
    ends are quantiles of that beta-binomial, so at least `level` of it lies between them, ends included.
    """
    tail = (1 - level) / 2
    law = stats.betabinom(future, correct + 0.5, n - correct + 0.5)
    return float(law.ppf(tail)) / future, float(law.ppf(1 - tail)) / future


def mean_predictive(
    mean: float, deviation: float, n: int, future: int, extra: float = 0.0, level: float = LEVEL
) -> tuple[float, float]:
    """Student's prediction interval for the mean of `future` further values.

    mean -+ t sqrt(s^2 (1/n + 1/future) + extra), cut at 0, for squared errors; future = 0 stands for endlessly many.
    """
    variance = deviation**2 * (1 / n + (1 / future if future else 0.0)) + extra
    reach = float(stats.t.ppf(0.5 + level / 2, n - 1)) * math.sqrt(variance)
    return max(mean - reach, 0.0), mean + reach
