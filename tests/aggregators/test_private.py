"""Private: clipping by hand, noise by its statistics, and a clip that adapts."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest

from coterie import registry
from coterie.aggregators.private import SLACK, Private
from coterie.errors import CoterieError
from coterie.privacy.noise import Streams


def silent(purpose, count, about):
    """No noise, to see the rest."""
    return torch.zeros(count, dtype=torch.float64)


def noisy_mean(updates, expected=2.0, draw=silent, **options):
    plan = Private(**options)
    return plan.noisy_mean(torch.as_tensor(updates, dtype=torch.float64), plan.clip, expected, draw)


# -- clipping ----------------------------------------------------------------------------------------------------------


def test_clip_by_hand():
    """|(3, 4)| = 5 shrinks to length 1 - 2^-20, |(0, 0.5)| stays; the sum, about (0.6, 1.3), is divided by the 2
    expected, not by 3."""
    mean, clip = noisy_mean([[3.0, 4.0], [0.0, 0.5], [0.0, 0.0]], clip=1.0)
    near = 1 - 2**-20
    torch.testing.assert_close(mean, torch.tensor([0.6 * near, 0.8 * near + 0.5], dtype=torch.float64) / 2)
    assert clip == 1.0


def test_the_clip_is_joint_for_several_models():
    """Models (3, 0) and (0, 4) of one client are one vector of length 5: each shrinks by 5, none to length 1."""
    mean, _ = noisy_mean([[[3.0, 0.0], [0.0, 4.0]]], expected=1.0, clip=1.0)
    expected = torch.tensor([[0.6, 0.0], [0.0, 0.8]], dtype=torch.float64) * (1 - SLACK)
    torch.testing.assert_close(mean, expected)


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
    ones = lambda purpose, count, about: torch.ones(count, dtype=torch.float64)  # noqa: E731
    mean, _ = noisy_mean(torch.zeros(0, 2, 3), expected=4.0, sigma=3.0, clip=2.0, draw=ones)
    torch.testing.assert_close(mean, torch.full((2, 3), 1.5, dtype=torch.float64))  # 3 * 2 / 4


# -- what one client can do to the sum, rounding included --------------------------------------------------------------


def length(t):
    """In long double, whose own rounding, 2^-64 an addition, is far below the 2^-53 that is looked for."""
    return float(np.sqrt((t.double().numpy().astype(np.longdouble) ** 2).sum()))


dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
sizes = st.sampled_from([1, 2, 3, 17, 1000, 30_000])
powers = st.floats(-44, 37)


@settings(max_examples=60)
@given(st.integers(0, 2**30), dtypes, sizes, powers, st.floats(-30, 30))
def test_a_clipped_update_is_never_longer_than_the_clip(seed, dtype, d, scale, clip):
    """Not by a bit: of its float64 numbers, and of the float32 ones that they are rounded to, denormals included.

    In earlier versions 1.000013 C was seen. The scale runs from denormal to nearly infinite float32 numbers, and the
    clip over what options allow.
    """
    generator = torch.Generator().manual_seed(seed)
    u = torch.randn(1, d, generator=generator, dtype=torch.float64) * 10.0**scale
    u *= 10 ** (3 * torch.randn(1, d, generator=generator, dtype=torch.float64).clamp(-2, 2))  # coordinates differ
    C = 10.0**clip
    total, _ = Private(clip=C).clipped_sum(u.to(dtype), C)
    assert length(total) <= C
    assert length(total.float()) <= C
    mean, _ = Private(clip=C).noisy_mean(u.to(dtype), C, 1.0, silent)
    assert mean.dtype == dtype
    if dtype == torch.float32:
        assert length(mean) <= C


@settings(max_examples=25)
@given(st.integers(0, 2**30), st.sampled_from([torch.float32, torch.float64]), st.integers(1, 3000), sizes,
       st.floats(-30, 30))
def test_with_and_without_a_client_the_computed_sums_differ_by_the_clip_at_most(seed, dtype, m, d, clip):
    """Adding up rounds, too, and one addend more changes how all others are rounded: all of it is within the slack."""
    d = min(d, 200_000 // m + 1)
    generator = torch.Generator().manual_seed(seed)
    C = 10.0**clip
    u = torch.randn(m, d, generator=generator, dtype=torch.float64)
    u *= 2 * C / u.norm(dim=1, keepdim=True)  # all are clipped, and all point the same way as far as that goes
    u = u.abs().to(dtype)
    drop = seed % m
    whole, _ = Private(clip=C).clipped_sum(u, C)
    rest, _ = Private(clip=C).clipped_sum(torch.cat([u[:drop], u[drop + 1 :]]), C)
    assert (1 - 2 * SLACK) * C < length(whole - rest) <= C


def test_the_sum_is_that_of_float64_whatever_the_waves():
    """2,500 float32 updates in three pieces of rows: against NumPy's long double, to the last of float64's digits."""
    u = torch.randn(2500, 7, generator=torch.Generator().manual_seed(0))
    total, _ = Private(clip=1e9).clipped_sum(u, 1e9)
    exact = u.double().numpy().astype(np.longdouble).sum(0)
    np.testing.assert_allclose(total.numpy(), exact.astype(np.float64), rtol=1e-13, atol=1e-12)


# -- noise -------------------------------------------------------------------------------------------------------------


def test_noise_scale():
    """100,000 coordinates of (sigma C / expected) N(0, 1), with sigma 1.5, C 0.4, expected 3: 0.2.

    The sample's mean has deviation 0.2 / sqrt(n), its standard deviation about 0.2 / sqrt(2 n). Bounds of 5 deviations
    fail with probability 1e-6; the streams are fixed, so a pass stays a pass.
    """
    n = 100_000
    mean, _ = noisy_mean(torch.zeros(1, n), expected=3.0, sigma=1.5, clip=0.4, draw=partial(Streams(7).normal, 0))
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
        _, clip = plan.noisy_mean(sizes, clip, 400.0, partial(Streams(0).normal, t))
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
