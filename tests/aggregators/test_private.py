"""Private: clipping by hand, noise by its statistics, and a clip that adapts."""

import math

import pytest
import torch
from scipy.stats import kstest

from coterie import registry
from coterie.aggregators.private import Private
from coterie.errors import CoterieError
from coterie.privacy.noise import normal


def silent(purpose, count):
    """No noise, to see the rest."""
    return torch.zeros(count, dtype=torch.float64)


def noisy_mean(updates, expected=2.0, draw=silent, **options):
    plan = Private(**options)
    return plan.noisy_mean(torch.as_tensor(updates, dtype=torch.float64), plan.clip, expected, draw)


# -- clipping ----------------------------------------------------------------------------------------------------------


def test_clip_by_hand():
    """|(3, 4)| = 5 shrinks to length 1, |(0, 0.5)| stays; the sum (0.6, 1.3) is divided by the 2 expected, not by 3."""
    mean, clip = noisy_mean([[3.0, 4.0], [0.0, 0.5], [0.0, 0.0]], clip=1.0)
    torch.testing.assert_close(mean, torch.tensor([0.3, 0.65], dtype=torch.float64))
    assert clip == 1.0


def test_the_clip_is_joint_for_several_models():
    """Models (3, 0) and (0, 4) of one client are one vector of length 5: each shrinks by 5, none to length 1."""
    mean, _ = noisy_mean([[[3.0, 0.0], [0.0, 4.0]]], expected=1.0, clip=1.0)
    torch.testing.assert_close(mean, torch.tensor([[0.6, 0.0], [0.0, 0.8]], dtype=torch.float64))


@pytest.mark.parametrize("clip", [0.1, 2.0])
def test_one_client_moves_the_sum_by_the_clip_at_most(clip):
    """The sensitivity behind sigma: with and without any client, even one that is not finite."""
    updates = 3 * torch.randn(6, 2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    updates[5] = torch.inf
    whole, _ = noisy_mean(updates, expected=1.0, clip=clip)
    moves = [whole - noisy_mean(updates[[j for j in range(6) if j != i]], expected=1.0, clip=clip)[0] for i in range(6)]
    assert all(float(move.norm()) <= clip * (1 + 1e-12) for move in moves)
    assert sum(float(move.norm()) > 0.99 * clip for move in moves) == 5  # all but the last are longer
    assert float(moves[5].norm()) == 0


def test_nobody_is_noise_alone():
    """A round without participants has the same noise, or its absence would tell."""
    ones = lambda purpose, count: torch.ones(count, dtype=torch.float64)  # noqa: E731
    mean, _ = noisy_mean(torch.zeros(0, 2, 3), expected=4.0, sigma=3.0, clip=2.0, draw=ones)
    torch.testing.assert_close(mean, torch.full((2, 3), 1.5, dtype=torch.float64))  # 3 * 2 / 4


# -- noise -------------------------------------------------------------------------------------------------------------


def test_noise_scale():
    """100,000 coordinates of (sigma C / expected) N(0, 1), with sigma 1.5, C 0.4, expected 3: 0.2.

    The sample's mean has deviation 0.2 / sqrt(n), its standard deviation about 0.2 / sqrt(2 n). Bounds of 5 deviations
    fail with probability 1e-6; the streams are fixed, so a pass stays a pass.
    """
    n = 100_000
    mean, _ = noisy_mean(torch.zeros(1, n), expected=3.0, sigma=1.5, clip=0.4, draw=lambda p, c: normal(7, 0, p, c))
    assert abs(float(mean.mean())) < 5 * 0.2 / math.sqrt(n)
    assert abs(float(mean.std()) - 0.2) < 5 * 0.2 / math.sqrt(2 * n)
    assert kstest(mean.numpy() / 0.2, "norm").pvalue > 1e-4


# -- adaptive clip -----------------------------------------------------------------------------------------------------


def test_adaptive_clip_by_hand():
    """Norms 1, 2, 3, 4 under C = 2.5: b = 1/2; towards the quantile 0.9 the clip grows by exp(0.2 * 0.4)."""
    updates = torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert noisy_mean(updates, expected=4.0, clip=2.5, quantile=0.9)[1] == pytest.approx(2.5 * math.exp(0.08))
    assert noisy_mean(updates, expected=4.0, clip=2.5, quantile=0.5)[1] == pytest.approx(2.5)


def test_adaptive_clip_finds_the_quantile():
    """Norms uniform on (0, 10), 400 clients, count noise 20: the clip settles near the 0.3 quantile, 3."""
    plan, clip = Private(quantile=0.3, clip=0.1, sigma=1.0), 0.1
    sizes = torch.rand(400, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 10
    for t in range(150):
        _, clip = plan.noisy_mean(sizes, clip, 400.0, lambda p, n, t=t: normal(0, t, p, n))
    assert 2.4 < clip < 3.6


def test_sum_and_count_together_cost_sigma():
    """Gaussian mechanisms add up as 1 / noise^2: a client moves the sum by C and the count by 1/2."""
    for plan, expected in ((Private(sigma=1.3, quantile=0.5), 100.0), (Private(sigma=0.7, quantile=0.5), 4.0),
                           (Private(sigma=2.0, quantile=0.5, count_sigma=1.5), 10.0)):
        of_sum, of_count = plan.noise(expected)
        assert of_sum**-2 + (0.5 / of_count) ** 2 == pytest.approx(plan.sigma**-2)
        assert of_sum > plan.sigma
    assert Private(sigma=1.3).noise(100.0) == (1.3, 0.0)


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "said"), [
    ("sigma=0", "sigma must be above 0"), ("clip=-1", "clip must be above 0"),
    ("delta=1", "delta must be above 0 and below 1"), ("quantile=0", "quantile must be above 0 and below 1 or none"),
    ("epsilon=0", "epsilon must be above 0"),
    ("quantile=0.5,count_sigma=0.4", "count_sigma must be above sigma / 2"),
])
def test_bad_options(options, said):
    with pytest.raises(CoterieError, match=said):
        registry.method(f"fedavg+private:{options}")
