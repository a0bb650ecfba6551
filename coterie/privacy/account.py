"""What Gaussian noise on a Poisson sample of clients costs: epsilon of the sampled Gaussian mechanism, by two accounts.

In a round each client takes part with probability q, on its own; one client changes the sum by at most 1, and the sum
gets noise N(0, sigma^2). With or without a client, what is seen is then a sample of P = (1 - q) N(0, sigma^2) + q N(1,
sigma^2) or of Q = N(0, sigma^2), up to rotation; clients are added or removed, so both orders count.

`rdp` bounds the Renyi divergence, which adds up over rounds; it is quick and loose. `Account` adds up the privacy loss
log P/Q itself, whose distribution over many rounds is a convolution; its epsilon is an upper bound too, and nearly
the least one.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from coterie.errors import CoterieError, counted

Array = np.ndarray[Any, np.dtype[np.float64]]

ORDERS = np.concatenate([np.arange(1.05, 11, 0.05), np.arange(11, 64, 0.5), np.geomspace(64, 1024, 20)])
"""Renyi orders that are tried."""
_FINE = 20  # points of a grid for the spread of one round's loss: its square is lost, see `Account`
_MOST = 1 << 19  # points of a round's grid; the sum's may have eight times as many
_FAR = 1e-5  # of delta: the probability beyond a round's grid, over all rounds; it counts as an infinite loss
_ROUNDING = 1e-10  # a smaller delta is lost in the rounding of the convolution
_LOUDEST = 1e6  # more noise than any model survives


def require_mechanism(sigma: float, q: float, delta: float) -> None:
    """Raise where there is nothing to account for."""
    if not (sigma > 0 and math.isfinite(sigma)):
        raise CoterieError(f"the noise sigma must be a positive number, not {sigma}.")
    if not 0 < q <= 1:
        raise CoterieError(f"the sampling probability must be above 0 and at most 1, not {q}.")
    if not 0 < delta < 1:
        raise CoterieError(f"delta must lie between 0 and 1, not {delta}.")


# -- Renyi differential privacy ----------------------------------------------------------------------------------------


def rdp(sigma: float, q: float, orders: Array = ORDERS) -> Array:
    """The Renyi divergence of one round, `[orders]`: log E_Q[(P/Q)^a] / (a - 1), by the trapezoid rule.

    The integrand is analytic and falls like a Gaussian on both sides, where the rule's error is exponentially small.
    """
    if q == 1:
        return np.asarray(orders / (2 * sigma**2))
    step = min(sigma, sigma**2) / 16
    found = []
    for order in orders:
        x = np.arange(-13 * sigma, order + 13 * sigma, step * max(1.0, (order + 26 * sigma) / step / 2e5))
        ratio = np.logaddexp(math.log1p(-q), math.log(q) + (2 * x - 1) / (2 * sigma**2))
        density = -0.5 * (x / sigma) ** 2 - math.log(sigma * math.sqrt(2 * math.pi))
        terms = order * ratio + density
        top = terms.max()
        found.append(top + math.log(np.exp(terms - top).sum() * (x[1] - x[0])))
    return np.asarray(np.maximum(found, 0) / (orders - 1), np.float64)


@cache
def _divergence(sigma: float, q: float) -> Array:
    return rdp(sigma, q)


def rdp_epsilon(sigma: float, q: float, rounds: int, delta: float) -> float:
    """min_a of rounds * rdp(a) + log((a - 1) / a) - (log delta + log a) / (a - 1), at least 0."""
    require_mechanism(sigma, q, delta)
    if rounds == 0:
        return 0.0
    a = ORDERS
    found = rounds * _divergence(sigma, q) + np.log1p(-1 / a) - (math.log(delta) + np.log(a)) / (a - 1)
    return max(0.0, float(found.min()))


# -- the privacy loss distribution -------------------------------------------------------------------------------------


class Account:
    """epsilon after each of up to `rounds` rounds.

    The loss of a round is put on a grid such that P's and Q's probability of each interval are kept: the mass of an
    interval goes to its two ends. The curve delta(epsilon) of that loss is linear in e^epsilon between grid points
    and right at them, and so nowhere below the true one, which is convex (Doroshenko et al., Connect the dots: tighter
    discrete approximations of privacy loss distributions, 2022). Rounds are then added by one FFT. What falls off the
    grid is bounded by Chernoff's inequality and added to delta.
    """

    def __init__(self, sigma: float, q: float, rounds: int, delta: float) -> None:
        require_mechanism(sigma, q, delta)
        self.sigma, self.q, self.rounds, self.delta = sigma, q, rounds, delta
        ways = (True,) if q == 1 else (True, False)  # without sampling both orders are alike
        self._both = [_Loss(sigma, q, max(rounds, 1), delta, removed) for removed in ways]

    def epsilon(self, rounds: int) -> float:
        """The epsilon spent in so many rounds, at delta: the larger one of removing and of adding a client."""
        if not 0 <= rounds <= max(self.rounds, 1):
            raise CoterieError(f"this account was made for {counted(self.rounds, 'round')}, not {rounds}.")
        if rounds == 0:
            return 0.0
        if self.delta < _ROUNDING:
            return rdp_epsilon(self.sigma, self.q, rounds, self.delta)
        return max(loss.epsilon(rounds) for loss in self._both)


class _Loss:
    """The loss log P/Q under P (a client removed) or log Q/P under Q (added), on a grid of equal steps."""

    def __init__(self, sigma: float, q: float, rounds: int, delta: float, removed: bool) -> None:
        self.rounds, self.delta = rounds, delta
        from scipy.special import ndtri  # late: it takes a second, and few runs are private

        far = -float(ndtri(_FAR * delta / rounds)) * sigma
        low, high = sorted(float(_loss(np.array(x), sigma, q)) for x in (-far, 1 + far))
        sign = 1 if removed else -1
        low, high = sorted((sign * low, sign * high))
        step = _spread(sigma, q, removed) / _FINE
        step = max(step, (high - low) / _MOST)
        first, last = math.floor(low / step), math.ceil(high / step)
        at = np.arange(first, last + 1, dtype=np.int64)  # the grid, in steps
        p, other = _masses(np.asarray(sign * step * at, np.float64), sigma, q, removed)
        width = -math.expm1(-step)  # 1 - e^-step
        with np.errstate(over="ignore", invalid="ignore"):
            left = (other * np.exp(at[:-1] * step) - p * math.exp(-step)) / width
        left = np.where(np.isfinite(left), np.clip(left, 0, p), 0)  # out of range: all to the right end, a larger loss
        masses = np.append(left, 0.0) + np.append(0.0, p - left)
        self._lost = max(0.0, 1 - math.fsum(masses))
        self._compose(masses, at, step)

    def _compose(self, masses: Array, at: np.ndarray[Any, np.dtype[np.int64]], step: float) -> None:
        """Choose the grid of the sum and transform one round's masses."""
        kept = masses > 0
        masses, at = masses[kept], at[kept]
        self._tail = 1e-3 * self.delta
        losses = np.asarray(step * at, np.float64)
        high, low = (_reach(masses, way * losses, self.rounds, self._tail / 2) for way in (1, -1))
        size = 1 << max(4, math.ceil(math.log2((high + low) / step + 2)))
        if size > 8 * _MOST:
            raise CoterieError("the account of this noise and so many rounds is too large; add noise or take fewer.")
        self.size, self.start = size, -math.ceil(low / step)  # the grid of the sum begins here, in steps
        self._step = step
        self._transform = np.fft.rfft(np.bincount(at % size, masses, size))
        self._grid = np.arange(0, self.start + size) * step  # where losses are not negative

    def epsilon(self, rounds: int) -> float:
        """The least epsilon >= 0 with delta(epsilon) = sum_{l > epsilon} p_l (1 - e^(epsilon - l)) <= delta.

        Between two points of the grid that sum is A - B e^epsilon.
        """
        room = self.delta - self._tail - rounds * self._lost
        if room <= 0:
            return math.inf
        masses = np.fft.irfft(self._transform**rounds, self.size)[: len(self._grid)].clip(0)
        above = np.cumsum(masses[::-1])[::-1]  # A, at and above each point
        from scipy.signal import lfilter

        weighed = lfilter([1.0], [1.0, -math.exp(-self._step)], masses[::-1])[::-1]  # B e^epsilon at each point
        passed = np.nonzero(above - weighed > room)[0]
        if not len(passed):
            return 0.0
        if passed[-1] + 1 == len(self._grid):
            return math.inf
        behind = passed[-1] + 1
        return float(self._grid[behind] + math.log((above[behind] - room) / weighed[behind]))


def _loss(x: Array, sigma: float, q: float) -> Array:
    """log P/Q at x."""
    shift = (2 * x - 1) / (2 * sigma**2)
    return np.asarray(shift if q == 1 else np.logaddexp(math.log1p(-q), math.log(q) + shift))


def _where(loss: Array, sigma: float, q: float) -> Array:
    """The x at which log P/Q is this loss; minus infinity where it never falls so low."""
    if q == 1:
        return np.asarray(sigma**2 * loss + 0.5)
    low = math.log1p(-q)
    with np.errstate(divide="ignore", invalid="ignore"):
        inner = loss + np.log(-np.expm1(np.minimum(low - loss, 0))) - math.log(q)  # log((e^loss - (1 - q)) / q)
    return np.asarray(np.where(loss > low, sigma**2 * inner + 0.5, -np.inf))


def _masses(loss: Array, sigma: float, q: float, removed: bool) -> tuple[Array, Array]:
    """Probability of each interval between neighbouring losses under the sampled law, and under the other one."""
    x = _where(loss, sigma, q) / sigma
    x = x if removed else x[::-1]
    plain, moved = _between(x), _between(x - 1 / sigma)
    mixed = (1 - q) * plain + q * moved
    return (mixed, plain) if removed else (plain[::-1], mixed[::-1])


def _between(x: Array) -> Array:
    """The standard normal's probability between neighbours of a rising x, from the side where it is exact."""
    right = x[:-1] > 0
    from scipy.special import ndtr

    return np.asarray(np.where(right, ndtr(-x[:-1]) - ndtr(-x[1:]), ndtr(x[1:]) - ndtr(x[:-1])))


@cache
def _spread(sigma: float, q: float, removed: bool) -> float:
    """The standard deviation of a round's loss under the law it is taken."""
    z = np.linspace(-10, 10, 4001)
    weight = np.exp(-0.5 * z**2) / np.exp(-0.5 * z**2).sum()
    if removed:
        x, weight = np.append(sigma * z, sigma * z + 1), np.append((1 - q) * weight, q * weight)
    else:
        x = sigma * z
    loss = _loss(x, sigma, q)
    return float(np.sqrt(weight @ (loss - weight @ loss) ** 2))


def _reach(masses: Array, losses: Array, rounds: int, tail: float) -> float:
    """b with P(sum of up to `rounds` losses > b) <= tail: min over t of (rounds K(t) - log tail) / t, by Chernoff."""
    scale = 1 / math.sqrt(rounds * float(masses @ losses**2))
    top, found = float(losses.max()), []
    for t in scale * np.geomspace(1e-3, 30, 40):
        K = math.log(masses @ np.exp(t * (losses - top))) + t * top
        found.append((rounds * max(0.0, K) - math.log(tail)) / t)
    return float(max(min(found), 0.0))


# -- the other way round -----------------------------------------------------------------------------------------------


def epsilon(sigma: float, q: float, rounds: int, delta: float) -> float:
    """The epsilon of so many rounds at delta."""
    return Account(sigma, q, rounds, delta).epsilon(rounds)


def noise(target: float, q: float, rounds: int, delta: float) -> float:
    """The least sigma, to three decimals and rounded up, whose epsilon is at most the target."""
    require_mechanism(1.0, q, delta)
    if not target > 0:
        raise CoterieError(f"epsilon must be positive, not {target}.")
    if rounds == 0:
        return 0.0
    low, high = 0.0, 1.0
    while epsilon(high, q, rounds, delta) > target:
        low, high = high, 2 * high
        if high > _LOUDEST:  # of a delta below _ROUNDING some epsilon is left whatever the noise
            raise CoterieError(
                f"no noise keeps {counted(rounds, 'round')} within epsilon={target:g} at delta={delta:g}; allow a "
                "larger epsilon or delta."
            )
    while high - low > 5e-4 and high > 0.05:
        middle = (low + high) / 2
        low, high = (middle, high) if epsilon(middle, q, rounds, delta) > target else (low, middle)
    return math.ceil(1000 * high) / 1000
