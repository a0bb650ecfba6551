"""The accountant: published numbers, closed forms, a second accountant, and how epsilon must move."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.special import comb, ndtr

from coterie.errors import CoterieError
from coterie.privacy import account

SETTING = (1.1, 0.01, 1000, 1e-5)  # sigma, q, rounds, delta
OPACUS_RDP, OPACUS_PRV = 1.7117700912, 1.5254726498  # opacus 1.6.0; its PRV epsilon is an upper bound with error 0.01
CASES = [SETTING, (0.8, 0.2, 100, 1e-3), (4.0, 0.5, 200, 1e-5), (1.0, 0.001, 10000, 1e-6), (2.0, 1.0, 30, 1e-5)]


def test_the_golden_setting():
    """opacus' accountants for sigma 1.1, q 0.01, 1000 rounds, delta 1e-5: RDP within 0.1 %, the tight one in 2 %."""
    assert account.rdp_epsilon(*SETTING) == pytest.approx(OPACUS_RDP, rel=1e-3)
    assert account.epsilon(*SETTING) == pytest.approx(OPACUS_PRV, rel=0.02)
    assert OPACUS_PRV - 0.02 < account.epsilon(*SETTING) < OPACUS_PRV  # opacus' lower and upper bound


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # opacus divides by 1 - q
def test_against_opacus(case):
    """Where opacus is installed. Its orders end at 63 and are coarser, so that its RDP epsilon may be larger."""
    accountants = pytest.importorskip("opacus.accountants")
    sigma, q, rounds, delta = case
    found = {}
    for name in ("RDPAccountant", "PRVAccountant"):
        other = getattr(accountants, name)()
        other.history = [(sigma, q, rounds)]
        found[name] = other.get_epsilon(delta=delta)
    assert account.rdp_epsilon(*case) <= found["RDPAccountant"] * (1 + 1e-3)
    assert account.rdp_epsilon(*case) == pytest.approx(found["RDPAccountant"], rel=5e-3)
    assert account.epsilon(*case) == pytest.approx(found["PRVAccountant"], rel=0.02)


@pytest.mark.parametrize(("sigma", "q"), [(1.1, 0.01), (0.7, 0.3), (3.0, 0.9)])
@pytest.mark.parametrize("order", [2, 3, 8])
def test_divergence_of_whole_orders(sigma, q, order):
    """Binomial theorem: for whole a, E_Q[(P/Q)^a] = sum_k C(a, k) (1 - q)^(a - k) q^k exp(k (k - 1) / (2 sigma^2))."""
    terms = [comb(order, k) * (1 - q) ** (order - k) * q**k * math.exp(k * (k - 1) / (2 * sigma**2))
             for k in range(order + 1)]
    expected = math.log(sum(terms)) / (order - 1)
    assert account.rdp(sigma, q, np.array([float(order)]))[0] == pytest.approx(expected, rel=1e-9)


def gaussian(sigma, rounds, delta):
    """Without sampling, rounds of noise sigma are one of sigma / sqrt(rounds), whose curve Balle and Wang give."""
    z = sigma / math.sqrt(rounds)
    curve = lambda e: ndtr(0.5 / z - e * z) - math.exp(e) * ndtr(-0.5 / z - e * z) - delta  # noqa: E731
    return brentq(curve, 0, 500)


@pytest.mark.parametrize(("sigma", "rounds", "delta"), [(1.0, 1, 1e-5), (2.0, 30, 1e-5), (5.0, 10, 1e-3)])
def test_without_sampling_the_closed_form(sigma, rounds, delta):
    """An upper bound, and within 0.1 %."""
    exact = gaussian(sigma, rounds, delta)
    assert exact <= account.epsilon(sigma, 1.0, rounds, delta) <= exact * 1.001


@pytest.mark.parametrize(("sigma", "q", "delta"), [(1.0, 0.1, 1e-3), (0.6, 0.3, 1e-4), (0.3, 0.01, 1e-5)])
def test_one_round_by_integration(sigma, q, delta):
    """One round: delta(epsilon) integrates (P - e^epsilon Q)+, and (Q - e^epsilon P)+ for an added client."""
    x = np.linspace(-12 * sigma, 1 + 12 * sigma, 400_001)
    plain, moved = (np.exp(-0.5 * ((x - mean) / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi)) for mean in (0, 1))
    mixed = (1 - q) * plain + q * moved

    def curve(epsilon, removed):
        excess = (mixed - math.exp(epsilon) * plain) if removed else (plain - math.exp(epsilon) * mixed)
        return excess.clip(0).sum() * (x[1] - x[0])

    exact = max(brentq(lambda e, r=r: curve(e, r) - delta, 0, 60, xtol=1e-6) for r in (True, False))
    assert exact * (1 - 1e-5) <= account.epsilon(sigma, q, 1, delta) <= exact * 1.002


noises, chances = st.floats(0.6, 8), st.floats(0.005, 1)
counts, deltas = st.integers(1, 300), st.floats(1e-7, 1e-2)


@settings(max_examples=15)
@given(noises, chances, counts, deltas)
def test_epsilon_moves_the_right_way(sigma, q, rounds, delta):
    """More noise, fewer clients asked, fewer rounds and a larger delta cost less; the Renyi bound costs more.

    Both are upper bounds within 0.1 % of the truth, hence the factor.
    """
    spent = account.epsilon(sigma, q, rounds, delta)
    assert 0 <= spent <= account.rdp_epsilon(sigma, q, rounds, delta) * 1.001 + 1e-9
    cheaper = [(1.2 * sigma, q, rounds, delta), (sigma, q / 1.2, rounds, delta), (sigma, q, rounds - 1, delta),
               (sigma, q, rounds, 1.5 * delta)]
    for case in cheaper:
        assert account.epsilon(*case) <= spent * 1.001 + 1e-9


def test_one_account_serves_every_round():
    """An account for 200 rounds says of the first 50 what one for 50 says, up to its grid."""
    long = account.Account(1.0, 0.1, 200, 1e-5)
    assert long.epsilon(0) == 0
    assert long.epsilon(50) == pytest.approx(account.epsilon(1.0, 0.1, 50, 1e-5), rel=1e-3)
    assert long.epsilon(200) > long.epsilon(199) > long.epsilon(50)
    with pytest.raises(CoterieError, match="made for 200 rounds, not 201"):
        long.epsilon(201)


def test_little_noise_costs_what_it_must():
    """With sigma 0.01 a client is plainly seen: T rounds of loss (2 x - 1) / (2 sigma^2), x near 1, are that T times.

    Of 50 rounds with q = 1/2 a client takes part in 15 or more with probability 0.999.
    """
    assert account.epsilon(0.01, 1.0, 10, 1e-3) > 10 / (2 * 0.01**2)
    assert account.epsilon(0.01, 0.5, 50, 1e-3) > 15 / (2 * 0.01**2)


def test_a_tiny_delta_is_left_to_renyi():
    """Below 1e-10 the convolution's rounding would be felt."""
    assert account.epsilon(1.0, 0.1, 10, 1e-14) == account.rdp_epsilon(1.0, 0.1, 10, 1e-14)


@pytest.mark.parametrize("target", [0.5, 2.0, 8.0])
def test_noise_for_a_target(target):
    """The least sigma to three decimals: it keeps the budget, and one hundredth less does not."""
    sigma = account.noise(target, 0.2, 60, 1e-4)
    assert account.epsilon(sigma, 0.2, 60, 1e-4) <= target < account.epsilon(sigma - 0.01, 0.2, 60, 1e-4)


@pytest.mark.parametrize(("case", "said"), [
    ((0.0, 0.1, 1, 1e-5), "sigma must be a positive number"), ((1.0, 0.0, 1, 1e-5), "sampling probability must be"),
    ((1.0, 1.1, 1, 1e-5), "sampling probability"), ((1.0, 0.1, 1, 0.0), "delta must lie between 0 and 1"),
])
def test_bad_numbers(case, said):
    with pytest.raises(CoterieError, match=said):
        account.epsilon(*case)
    with pytest.raises(CoterieError, match=said):
        account.rdp_epsilon(*case)


def test_bad_targets():
    with pytest.raises(CoterieError, match="epsilon must be positive"):
        account.noise(0.0, 0.1, 10, 1e-5)


def test_a_target_that_no_noise_reaches_is_a_sentence():
    """For so small a delta the bound is Renyi's, and of it log((a - 1) / a) - (log delta + log a) / (a - 1) is left at
    its largest order, a = 1024, however large sigma is: 0.0238."""
    left = np.log(1023 / 1024) - (np.log(1e-14) + np.log(1024)) / 1023
    assert left == pytest.approx(0.0238, abs=1e-4)
    with pytest.raises(CoterieError, match=r"no noise keeps 2 rounds within epsilon=0\.02 at delta=1e-14"):
        account.noise(0.02, 1.0, 2, 1e-14)
    assert account.noise(0.03, 1.0, 2, 1e-14) > 0
