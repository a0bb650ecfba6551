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


DP_ACCOUNTING = [  # sigma, q, rounds, delta, epsilon
    (2.408, 0.0264, 2, 5.5e-07, 0.110579879),
    (2.801, 0.00228, 421, 0.00019, 0.0336113696),
    (0.565, 0.245, 4, 3e-05, 10.357403),
    (0.768, 1.0, 119, 0.00062, 145.849651),
    (7.674, 0.106, 3, 9.4e-07, 0.0988114002),
    (1.081, 0.613, 8, 6.4e-06, 9.99303017),
    (1.547, 0.00459, 14, 7e-05, 0.0353511852),
    (1.574, 1.0, 109, 8.1e-06, 49.8291296),
    (0.618, 0.159, 105, 0.0001, 26.4325263),
    (0.756, 0.687, 401, 0.00033, 251.748737),
    (7.199, 0.0827, 13, 1.9e-08, 0.20869705),
    (3.469, 1.0, 78, 1.8e-05, 13.1689218),
    (0.509, 0.578, 14, 2.2e-08, 50.2456269),
    (7.764, 0.164, 37, 6.7e-05, 0.393397459),
    (4.628, 0.109, 11, 3.9e-07, 0.369267715),
    (3.201, 1.0, 3, 1e-07, 2.71377271),
    (0.863, 0.0315, 70, 3.3e-06, 3.09713108),
    (4.231, 0.614, 2, 6.4e-08, 1.1223474),
    (4.073, 0.0165, 91, 2.4e-08, 0.189712926),
    (0.739, 1.0, 432, 1.5e-06, 525.960169),
    (0.704, 0.51, 5, 2.5e-08, 16.6907862),
    (2.222, 0.0629, 2, 2.4e-05, 0.20270114),
    (1.153, 0.762, 11, 3.8e-05, 11.8377366),
    (2.846, 1.0, 58, 1.9e-08, 17.756289),
    (4.702, 0.0136, 41, 0.00018, 0.0381775656),
    (3.182, 0.00758, 915, 9.8e-05, 0.199707141),
    (2.083, 0.175, 8, 5.3e-07, 1.49810969),
    (1.677, 1.0, 8, 4.2e-07, 9.26438315),
    (3.154, 0.0343, 7, 1.3e-05, 0.107096641),
    (1.526, 0.0346, 123, 1.4e-05, 1.17550645),
    (7.699, 0.0141, 64, 0.00013, 0.0298483499),
    (1.23, 1.0, 12, 3.9e-06, 15.9605019),
    (6.658, 0.00283, 79, 1.8e-06, 0.011483909),
    (3.599, 0.559, 1, 0.00017, 0.506716491),
    (7.756, 0.0167, 152, 0.00058, 0.0440954259),
    (2.083, 1.0, 10, 0.00097, 5.31785893),
    (1.673, 0.0164, 130, 3e-06, 0.52504254),
    (0.596, 0.00277, 49, 1.5e-06, 2.26611593),
    (3.044, 0.0108, 82, 0.00038, 0.0653436894),
    (0.611, 1.0, 6, 0.00025, 21.2739985),
]
"""Google's dp-accounting 0.6.0 on 40 random settings of NumPy's default_rng(16): sigma log-uniform on 0.5 to 8, q on
0.002 to 0.8 (every fourth is 1, without sampling), rounds on 1 to 1000, delta on 1e-8 to 1e-3. Each value is that of
`PLDAccountant(ADD_OR_REMOVE_ONE, value_discretization_interval=2e-5)` (1e-6 for an epsilon below 0.3) composed of
`PoissonSampledDpEvent(q, GaussianDpEvent(sigma))`, an upper bound too; a grid five times as coarse moves those above
0.3 by less than 6e-6 of their size. It is no dependency: it asks for older packages than others here do."""


@pytest.mark.parametrize("case", DP_ACCOUNTING, ids=str)
def test_against_dp_accounting(case):
    """Clients are added or removed in both. Ours is a bound: never below theirs, and at most 0.1 % above it."""
    *setting, expected = case
    assert expected * (1 - 1e-6) <= account.epsilon(*setting) <= expected * 1.001


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
