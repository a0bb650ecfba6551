"""Aggregators against the equations, worked examples, second solvers and the properties they promise."""

from __future__ import annotations

import inspect
import math
from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor

from coterie import registry
from coterie.aggregators.confree import ConFREE, guidance, raw_guidance, slsqp, worst_case
from coterie.aggregators.fedmgdaplus import FedMGDAPlus
from coterie.aggregators.geometricmedian import GeometricMedian
from coterie.aggregators.krum import Krum
from coterie.aggregators.median import Median
from coterie.aggregators.mgda import MGDA
from coterie.aggregators.multikrum import MultiKrum
from coterie.aggregators.normclip import NormClip
from coterie.aggregators.trimmedmean import TrimmedMean
from coterie.contract import algebra
from coterie.contract.aggregator import Aggregator
from coterie.contract.algebra import gram, simplex_qp
from coterie.contract.layout import Entry, Layout
from coterie.contract.mean import Mean
from coterie.contract.method import Method
from coterie.errors import CoterieError

THREE = torch.tensor([[1, 0, 0.5], [-0.6, 0.8, 0.2], [0.2, 0.3, -0.4]], dtype=torch.float64)
ALL = sorted(name for name, cls in registry.aggregators().items() if not cls.private)  # see test_private for the others
ROBUST = ["median", "trimmedmean", "krum", "multikrum", "geometricmedian"]
EXACT = [name for name in ALL if name != "geometricmedian"]  # which ends within its smoothing and its stopping rule


def tensor(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def flat(size: int) -> Layout:
    return Layout((Entry("w", (size,), 0, "parameter", "base", True),))


def equal(m: int) -> Tensor:
    return torch.full((m,), 1 / m, dtype=torch.float64)


def call(aggregator: Aggregator, updates: Tensor, weights: Tensor | None = None) -> Tensor:
    return aggregator.aggregate(updates, equal(len(updates)) if weights is None else weights, flat(updates.shape[1]))


def drawn(seed: int, m: int, d: int, shift: float = 0.0) -> Tensor:
    return torch.randn(m, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + shift


def close(a: Tensor, b: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


federations = st.tuples(st.integers(0, 10_000), st.integers(5, 8), st.integers(1, 12), st.sampled_from([0.0, 0.3, 1.0]))


# -- ConFREE -----------------------------------------------------------------------------------------------------------


def written_out(updates: Tensor) -> Tensor:
    """Equation 3, vector by vector."""
    total = torch.zeros_like(updates[0])
    for i, own in enumerate(updates):
        corrected = own.clone()
        for j, other in enumerate(updates):
            if i != j and own @ other < 0:
                corrected -= own @ other / (other @ other) * other
        total += corrected
    return total / len(updates)


def test_confree_golden():
    """Worked example: only the pair 1-2 conflicts, w = (0, 0, 1), the worst client gains 0.116 -> 0.274."""
    products = gram(THREE)
    g = guidance(products, equal(3)) @ THREE
    close(g, tensor(0.23717949, 0.49487179, 0.19871795), 5e-9)
    close(g, written_out(THREE), 1e-14)
    w = worst_case(products, guidance(products, equal(3)), 0.5)
    assert w is not None
    close(w, tensor(0, 0, 1), 1e-9)
    d = call(ConFREE(c=0.5), THREE)
    close(d, tensor(0.34555957, 0.65744192, -0.01804222), 5e-9)
    assert abs(float((THREE @ g).min()) - 0.11641026) < 5e-9
    assert abs(float((THREE @ d).min()) - 0.27356138) < 5e-9


def test_confree_golden_of_the_released_program():
    """Without the division by |u_j|^2, g = mean + (u_1 + u_2) / 6, as <u_1, u_2> = -1/2; then d / (1 + c^2)."""
    close(raw_guidance(gram(THREE), equal(3)) @ THREE, tensor(0.26666667, 0.5, 0.21666667), 5e-9)
    close(slsqp(gram(THREE), raw_guidance(gram(THREE), equal(3)), 0.5), tensor(0, 0, 1), 1e-6)
    d = call(ConFREE.official(), THREE)
    close(1.25 * d, tensor(0.37932354, 0.66898531, -0.00864708), 5e-8)
    close(d, tensor(0.30345883, 0.53518825, -0.00691766), 5e-8)


def test_confree_released_guidance_is_sequential_and_skips_oneself():
    """Written out vector by vector, clients in the order of their numbers."""
    updates = drawn(3, 5, 4)
    total = torch.zeros(4, dtype=torch.float64)
    for i in range(5):
        v = updates[i].clone()
        for j in range(5):
            if j != i and v @ updates[j] < 0:
                v -= (v @ updates[j]) * updates[j]
        total += v
    close(raw_guidance(gram(updates), equal(5)) @ updates, total / 5, 1e-12)


def test_the_released_program_is_scaled_fedavg_for_small_updates():
    """Below norms of 0.03 its solver, of absolute tolerance, stops at once, at mean(u) (1 + c) / (1 + c^2)."""
    small = 1e-3 * drawn(0, 6, 5)
    close(call(ConFREE.official(), small), 1.2 * small.mean(0), 1e-5)
    d, larger = call(ConFREE.official(), small), call(ConFREE.official(), 1000 * small)
    assert (1000 * d - larger).abs().max() > 1e-3  # so it is not scale equivariant
    assert (call(ConFREE(), small) - 1.2 * small.mean(0)).abs().max() > 1e-5


def test_confree_reduces_conflict_and_promises_no_more() -> None:
    """Six clients in four dimensions, 200 draws: the worst client's <d, u_j> is never below the guidance's, and in some
    draws it is below 0 all the same. What is said of it must not promise otherwise."""
    generator = torch.Generator().manual_seed(0)
    hurt = 0
    for _ in range(200):
        updates = torch.randn(6, 4, dtype=torch.float64, generator=generator)
        share = torch.full((6,), 1 / 6, dtype=torch.float64)
        d = ConFREE().aggregate(updates, share, flat(4))
        g = updates.T @ guidance(updates @ updates.T, share)
        assert (updates @ d).min() >= (updates @ g).min() - 1e-6
        hurt += bool((updates @ d).min() < -1e-6)
    assert 20 < hurt < 100
    said = f"{inspect.getmodule(ConFREE).__doc__} {ConFREE.__doc__} {ConFREE.protects}"
    assert "hurts no client" not in said
    assert "<d, u_j> < 0 occurs" in said
    assert "some may still lose" in ConFREE.protects


@pytest.mark.parametrize(("values", "median", "trimmed"), [
    ([-math.inf, 1.0, 2.0, 3.0, 4.0], 2.0, 2.0),
    ([math.inf, 1.0, 2.0, 3.0, 4.0], 3.0, 3.0),
    ([math.nan, 1.0, 2.0, 3.0, 4.0], 3.0, 3.0),
    ([-math.inf, math.inf, 1.0, 2.0, 3.0], 2.0, 2.0),
    ([-math.inf, math.nan, 1.0, 2.0, 3.0], 2.0, 2.0),
    ([math.nan, math.inf, 1.0, 2.0, 3.0], 3.0, math.inf),
])
def test_what_is_not_finite_has_its_place_in_the_order(values: list[float], median: float, trimmed: float) -> None:
    """-inf below all numbers, +inf above them, NaN above both, as the pages say; a fifth is cut at either end, so that
    of NaN and +inf the latter stays."""
    updates = torch.tensor(values, dtype=torch.float64)[:, None]
    share = torch.full((5,), 0.2, dtype=torch.float64)
    assert Median().aggregate(updates, share, flat(1)).tolist() == [median]
    assert TrimmedMean().aggregate(updates, share, flat(1)).tolist() == pytest.approx([trimmed])
    for cls in (Median, TrimmedMean):
        said = " ".join((cls.__doc__ or "").split())
        assert "-inf is below all numbers, +inf above them, and what is not a number (NaN) above both" in said


def test_confree_without_conflicts():
    """g is the plain mean; with c = 0 that is uniform FedAvg; with c > 0 the result is not a multiple of it."""
    friends = drawn(1, 4, 6).abs()
    close(guidance(gram(friends), equal(4)) @ friends, friends.mean(0), 1e-14)
    close(call(ConFREE(c=0), friends, tensor(0.1, 0.2, 0.3, 0.4)), friends.mean(0), 1e-14)
    d = call(ConFREE(c=0.5), friends)
    assert torch.cosine_similarity(d, friends.mean(0), dim=0) < 1 - 1e-4


@pytest.mark.parametrize("c", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("clients", [1, 4])
def test_confree_of_identical_updates_is_a_longer_step(c, clients):
    same = drawn(0, 1, 5).expand(clients, 5).contiguous()
    close(call(ConFREE(c=c), same), (1 + c) * same[0], 1e-12)
    official = call(ConFREE(c=c, scope="per_tensor", projection="sequential_raw", solver="slsqp", rescale="square"),
                    same)
    close(official, (1 + c) / (1 + c**2) * same[0], 1e-6)
    close(call(ConFREE(c=c, rescale="linear"), same), same[0], 1e-12)


def test_confree_of_orthogonal_updates_weighs_them_alike():
    axes = 3 * torch.eye(4, dtype=torch.float64)
    w = worst_case(gram(axes), guidance(gram(axes), equal(4)), 0.5)
    assert w is not None
    close(w, equal(4), 1e-10)
    close(call(ConFREE(), axes), 1.5 * axes.mean(0), 1e-12)


def test_confree_of_opposite_updates_stands_still():
    u = drawn(2, 1, 5)
    close(call(ConFREE(), torch.cat([u, -u])), torch.zeros(5, dtype=torch.float64), 1e-15)
    close(call(ConFREE(), torch.zeros(3, 5, dtype=torch.float64)), torch.zeros(5, dtype=torch.float64), 0)


def test_confree_returns_the_guidance_where_zero_is_a_mixture():
    """w = (1/2, 1/2, 0) mixes to 0, step 4 would be 0/0."""
    updates = torch.tensor([[1, 0], [-1, 0], [0.5, 1]], dtype=torch.float64)
    assert worst_case(gram(updates), guidance(gram(updates), equal(3)), 0.5) is None
    close(call(ConFREE(), updates), written_out(updates), 1e-14)
    close(slsqp(gram(updates), guidance(gram(updates), equal(3)), 0.5), tensor(0.5, 0.5, 0), 1e-4)


@given(federations, st.sampled_from([0.1, 0.5, 0.9]))
@settings(max_examples=40)
def test_confree_lies_on_its_sphere_and_never_harms_the_worst(drawn_from, c):
    seed, m, d, shift = drawn_from
    updates = drawn(seed, m, d, shift)
    g, found = written_out(updates), call(ConFREE(c=c), updates)
    if worst_case(gram(updates), guidance(gram(updates), equal(m)), c) is None:
        close(found, g, 1e-10)
        return
    assert abs(float((found - g).norm()) - c * float(g.norm())) < 1e-9 * float(g.norm())
    assert (updates @ found).min() >= (updates @ g).min() - 1e-9


@given(st.integers(0, 10_000), st.sampled_from([0.2, 0.5, 0.8]))
@settings(max_examples=15)
def test_confree_is_the_best_of_all_directions_in_the_plane(seed, c):
    """Brute force: every point of the disc around g, on a fine grid of angles and radii."""
    updates = drawn(seed, 4, 2, 0.7)
    g, found = written_out(updates), call(ConFREE(c=c), updates)
    assume(worst_case(gram(updates), guidance(gram(updates), equal(4)), c) is not None)
    angle = torch.linspace(0, 2 * math.pi, 4001, dtype=torch.float64)
    circle = torch.stack([angle.cos(), angle.sin()], 1)
    disc = g + torch.cat([c * g.norm() * r * circle for r in (0.0, 0.5, 0.9, 1.0)])
    best = (disc @ updates.T).amin(1).max()
    reach = float((updates @ found).min())
    assert reach >= float(best) - 1e-10
    assert reach <= float(best) + math.pi / 4000 * c * float(updates.norm(dim=1).max() * g.norm())  # half a step


@pytest.mark.parametrize("seed", range(6))
def test_confree_solves_the_primal_that_a_second_solver_solves(seed):
    """max t with <d, u_j> >= t and |d - g|^2 <= (c |g|)^2, by SLSQP on (d, t)."""
    updates = drawn(seed, 6, 8, 0.4)
    g, U, c = written_out(updates).numpy(), updates.numpy(), 0.5
    radius = c * np.linalg.norm(g)
    limits = [
        {"type": "ineq", "fun": lambda x: U @ x[:-1] - x[-1], "jac": lambda x: np.hstack([U, -np.ones((6, 1))])},
        {"type": "ineq", "fun": lambda x: radius**2 - ((x[:-1] - g) ** 2).sum(),
         "jac": lambda x: np.append(-2 * (x[:-1] - g), 0)},
    ]
    start = np.append(g, (U @ g).min())
    slope = np.append(np.zeros(8), -1.0)
    second = minimize(lambda x: -x[-1], start, jac=lambda x: slope, constraints=limits, method="SLSQP",
                      options={"ftol": 1e-14, "maxiter": 500})
    found = call(ConFREE(c=c), updates)
    assert abs(float((updates @ found).min()) - second.x[-1]) < 1e-7
    close(found, torch.from_numpy(second.x[:-1]), 1e-5)


def test_confree_scopes_are_problems_of_their_own():
    """Tensor by tensor or layer by layer equals calling it on those columns."""
    names = ["one.weight", "one.bias", "two.weight", "two.bias"]
    entries, start = [], 0
    for name, size in zip(names, (6, 2, 4, 1)):
        entries.append(Entry(name, (size,), start, "parameter", "base", True))
        start += size
    layout, updates = Layout(tuple(entries)), drawn(5, 4, 13, 0.3)
    whole = ConFREE().aggregate(updates, equal(4), layout)
    close(whole, call(ConFREE(), updates), 0)
    for scope, cuts in (("per_tensor", (0, 6, 8, 12, 13)), ("per_layer", (0, 8, 13))):
        pieces = [call(ConFREE(), updates[:, a:b]) for a, b in pairwise(cuts)]
        found = ConFREE(scope=scope).aggregate(updates, equal(4), layout)
        close(found, torch.cat(pieces), 1e-12)
        assert (found - whole).abs().max() > 1e-3


@pytest.mark.parametrize("seed", range(3))
def test_confree_without_projection_is_cagrad(seed):
    """g is the mean, conflicts or not; the dual <g, u_w> + c |g| |u_w| over a fine grid of w bounds the worst gain."""
    updates = drawn(seed, 3, 5)
    mean = updates.mean(0)
    close(call(ConFREE(c=0, projection="none"), updates), mean, 1e-14)
    found = call(ConFREE(c=0.5, projection="none"), updates)
    close((found - mean).norm(), 0.5 * mean.norm(), 1e-9)
    ticks = torch.linspace(0, 1, 201, dtype=torch.float64)
    w = torch.stack([torch.stack([a, (1 - a) * b, (1 - a) * (1 - b)]) for a in ticks for b in ticks])
    mixtures = w @ updates
    dual = mixtures @ mean + 0.5 * mean.norm() * mixtures.norm(dim=1)
    gain = (updates @ found).min()
    assert -1e-9 < dual.min() - gain < 1e-3  # no d is better than any w's bound; the best d reaches the best bound


def test_confree_weighted_puts_the_weights_in_place_of_one_over_n():
    friends, weights = drawn(1, 4, 6).abs(), tensor(0.1, 0.2, 0.3, 0.4)
    close(call(ConFREE(c=0, weighted=True), friends, weights), weights @ friends, 1e-14)


# -- MGDA and FedMGDA+ -------------------------------------------------------------------------------------------------


def test_mgda_golden():
    """l_1 = <u_2 - u_1, u_2> / |u_1 - u_2|^2: (1, 2), (2, 0) -> l_1 = 0.4, d = (1.6, 0.8)."""
    updates = torch.tensor([[1, 2], [2, 0]], dtype=torch.float64)
    close(simplex_qp(gram(updates)), tensor(0.4, 0.6), 1e-12)
    close(call(MGDA(), updates), tensor(1.6, 0.8), 1e-12)


@given(st.integers(0, 10_000), st.sampled_from([0.0, 1.0]))
def test_mgda_of_two_has_a_closed_form(seed, shift):
    one, two = drawn(seed, 2, 3, shift)
    first = float(((two - one) @ two / (one - two).square().sum()).clamp(0, 1))
    close(call(MGDA(), torch.stack([one, two])), first * one + (1 - first) * two, 1e-9)


def test_fedmgda_plus_golden():
    """Worked example: the three updates of ConFREE's example normalised, equal weights, epsilon 0, 0.1 and 1."""
    u = THREE / THREE.norm(dim=1, keepdim=True)
    d = {epsilon: call(FedMGDAPlus(epsilon=epsilon, rescale="none"), THREE) for epsilon in (0.0, 0.1, 1.0)}
    close(u @ d[0.0], tensor(0.187157, 0.21143556, 0.3576119), 5e-8)
    close(d[0.1], tensor(0.38924041, 0.37742626, 0.23333333) @ u, 2e-8)
    close(d[1.0], tensor(0.40384055, 0.39358372, 0.20257572) @ u, 2e-8)
    close(u @ d[1.0], tensor(*[0.23124267] * 3), 5e-9)
    close(d[1.0].square().sum(), tensor(0.23124267)[0], 5e-9)


def test_fedmgda_plus_weights_stay_in_the_box():
    u = THREE / THREE.norm(dim=1, keepdim=True)
    usual = tensor(0.7, 0.2, 0.1)
    d = call(FedMGDAPlus(epsilon=0.15, rescale="none"), THREE, usual)
    found = torch.linalg.solve(u.T, d)  # three independent updates: the weights can be read off
    assert abs(float(found.sum()) - 1) < 1e-12
    assert ((found - usual).abs() <= 0.15 + 1e-12).all()
    assert (found >= -1e-12).all()


@given(federations)
@settings(max_examples=40)
def test_fedmgda_plus_is_normalised_fedavg_at_0_and_mgda_at_1(drawn_from):
    """And at 1 no client is hurt: <d, u_i> >= |d|^2, with equality on the support."""
    seed, m, d, shift = drawn_from
    updates = drawn(seed, m, d, shift)
    u = updates / updates.norm(dim=1, keepdim=True)
    weights = torch.softmax(drawn(seed, 1, m)[0], 0)
    close(call(FedMGDAPlus(epsilon=0, rescale="none"), updates, weights), weights @ u, 1e-12)
    step = call(FedMGDAPlus(epsilon=1, rescale="none"), updates, weights)
    close(step, call(MGDA(), u), 1e-7)
    assert (u @ step - step.square().sum()).min() > -1e-9
    support = simplex_qp(gram(u)) > 1e-6
    assert (u @ step - step.square().sum())[support].abs().max() < 1e-8


@pytest.mark.parametrize("aggregator", [MGDA(), FedMGDAPlus(epsilon=1)])
def test_mgda_stops_where_zero_is_a_mixture(aggregator):
    updates = torch.tensor([[1, 0], [-1, 1], [-1, -1]], dtype=torch.float64)
    close(call(aggregator, updates), torch.zeros(2, dtype=torch.float64), 1e-12)


def test_fedmgda_plus_length():
    """mean_norm multiplies the unit-scale direction by the mean norm, median_norm by the median; easyFL by nothing."""
    plain = call(FedMGDAPlus.easyfl(), THREE)
    sizes = THREE.norm(dim=1)
    close(call(FedMGDAPlus(), THREE), sizes.mean() * plain, 1e-14)
    close(call(FedMGDAPlus(rescale="median_norm"), THREE), sizes.sort().values[1] * plain, 1e-14)
    close(call(FedMGDAPlus.easyfl(), 100 * THREE), plain, 1e-12)


def test_fedmgda_plus_near_equal_weights():
    """weighted=false is what equal weights give, whatever the clients' weights; a client that stood still has none."""
    usual, even = tensor(0.7, 0.2, 0.1), tensor(1 / 3, 1 / 3, 1 / 3)
    close(call(FedMGDAPlus(weighted=False), THREE, usual), call(FedMGDAPlus(), THREE, even), 1e-12)
    assert (call(FedMGDAPlus(), THREE, usual) - call(FedMGDAPlus(), THREE, even)).abs().max() > 1e-3
    still = torch.cat([THREE, torch.zeros(1, 3, dtype=torch.float64)])
    close(call(FedMGDAPlus(epsilon=0, weighted=False, rescale="none"), still), even @ (
        THREE / THREE.norm(dim=1, keepdim=True)
    ), 1e-12)


def test_fedmgda_plus_leaves_out_who_did_not_move():
    still = torch.cat([THREE, torch.zeros(1, 3, dtype=torch.float64)])
    close(call(FedMGDAPlus.easyfl(), still), call(FedMGDAPlus.easyfl(), THREE), 1e-12)
    close(call(FedMGDAPlus(), 0 * THREE), torch.zeros(3, dtype=torch.float64), 0)


# -- robust aggregators ------------------------------------------------------------------------------------------------


@given(federations)
@settings(max_examples=30)
def test_median_with_equal_weights_is_numpys(drawn_from):
    seed, m, d, _ = drawn_from
    updates = drawn(seed, m, d)
    close(call(Median(), updates), torch.from_numpy(np.median(updates.numpy(), axis=0)), 0)
    skewed = torch.softmax(drawn(seed, 1, m)[0], 0)
    close(call(Median(weighted=False), updates, skewed), torch.from_numpy(np.median(updates.numpy(), axis=0)), 0)


@given(federations, st.lists(st.integers(1, 4), min_size=8, max_size=8))
@settings(max_examples=30)
def test_a_weight_is_as_good_as_so_many_equal_clients(drawn_from, counts):
    """Weighted median, trimmed mean and geometric median of weights n_i / n are those of n_i copies."""
    seed, m, d, _ = drawn_from
    updates, n = drawn(seed, m, d), torch.tensor(counts[:m])
    copies = updates.repeat_interleave(n, 0)
    for aggregator in (Median(), TrimmedMean()):
        close(call(aggregator, updates, n.double() / n.sum()), call(aggregator, copies), 1e-10)
    one, many = (call(GeometricMedian(), *x) for x in ((updates, n.double() / n.sum()), (copies,)))
    close(one, many, 1e-6)


def test_trimmed_mean_cuts_whole_values_where_it_can():
    updates = tensor(9, -50, 1, 2, 3, 4, 5, 6, 7, 800)[:, None]
    close(call(TrimmedMean(trim=0.2), updates), tensor(2 + 3 + 4 + 5 + 6 + 7) / 6, 1e-12)
    close(call(TrimmedMean(trim=0.1), updates), tensor(1 + 2 + 3 + 4 + 5 + 6 + 7 + 9) / 8, 1e-12)
    close(call(TrimmedMean(trim=0.1), updates.float(), equal(10).float()).double(), tensor(37) / 8, 1e-6)


def test_trimmed_mean_cuts_parts_where_it_must():
    """Five clients, trim 0.3: of the second and the fourth half remains, (0.1 + 0.2 + 0.1) in all."""
    updates = tensor(0, 1, 10, 100, 1000)[:, None]
    close(call(TrimmedMean(trim=0.3), updates), tensor(0.1 * 1 + 0.2 * 10 + 0.1 * 100) / 0.4, 1e-12)


@given(federations)
@settings(max_examples=30)
def test_krum_written_out(drawn_from):
    seed, m, d, shift = drawn_from
    updates = drawn(seed, m, d, shift)
    scores = []
    for i in range(m):
        apart = sorted(float((updates[i] - updates[j]).square().sum()) for j in range(m) if j != i)
        scores.append(sum(apart[: m - 1 - 2]))
    close(call(Krum(), updates), updates[int(np.argmin(scores))], 0)
    for chosen in (None, 2):
        best = np.argsort(scores)[: chosen or m - 1].copy()
        weights = torch.softmax(drawn(seed, 1, m)[0], 0)
        close(call(MultiKrum(chosen=chosen), updates, weights), weights[best] @ updates[best] / weights[best].sum(),
              1e-12)


@given(federations)
@settings(max_examples=25)
def test_geometric_median_has_the_least_sum_of_distances(drawn_from):
    """Against a second solver, BFGS from several points; the smoothing may cost a millionth."""
    seed, m, d, shift = drawn_from
    updates, weights = drawn(seed, m, d, shift), torch.softmax(drawn(seed, 1, m)[0], 0)
    U, w = updates.numpy(), weights.numpy()

    def cost(z):
        return float(w @ np.linalg.norm(U - z, axis=1))

    second = min(cost(minimize(cost, x, method="BFGS").x) for x in (U.mean(0), np.median(U, 0), U[int(w.argmax())]))
    assert cost(call(GeometricMedian(), updates, weights).numpy()) <= min(second, *map(cost, U)) + 3e-6


def test_geometric_median_of_a_majority_is_the_majority():
    updates = torch.cat([drawn(0, 1, 3).expand(3, 3), drawn(1, 2, 3)])
    close(call(GeometricMedian(), updates), updates[0], 1e-5)


@pytest.mark.parametrize("name", ROBUST)
@pytest.mark.parametrize("far", [1e3, 1e9, 1e30, math.nan, math.inf])
def test_one_huge_client_does_not_matter(name, far):
    """Breakdown: whatever one of seven sends, the answer stays within the others, give or take their spread."""
    honest = drawn(4, 6, 9, 1.0)
    outlier = torch.full((1, 9), far, dtype=torch.float64) * drawn(5, 1, 9).sign()
    weights = torch.tensor([0.15] * 6 + [0.10], dtype=torch.float64)
    found = call(registry.aggregators()[name](), torch.cat([honest, outlier]), weights)
    spread = float((honest[:, None] - honest[None]).norm(dim=-1).max())
    assert (honest - found).norm(dim=1).min() <= spread
    assert (call(Mean(), torch.cat([honest, outlier]), weights) - honest).norm(dim=1).min() > spread or far != far


@pytest.mark.parametrize("name", ["median", "trimmedmean"])
def test_coordinates_stay_between_those_of_the_honest(name):
    honest = drawn(4, 6, 9)
    for far in (-1e12, 1e12, math.nan):
        found = call(registry.aggregators()[name](), torch.cat([honest, torch.full((1, 9), far).double()]))
        assert ((found >= honest.amin(0)) & (found <= honest.amax(0))).all()


WITHIN = {  # aggregators with options that matter, and how many of nine clients of equal weight may send anything
    "median": 4, "median:weighted=false": 4, "geometricmedian": 4, "geometricmedian:weighted=false": 4, "krum": 1,
    "krum:faulty=3": 3, "multikrum": 1, "multikrum:faulty=3": 3, "multikrum:faulty=2,chosen=1": 2, "trimmedmean": 1,
    "trimmedmean:trim=0.45": 4, "trimmedmean:trim=0.34,weighted=false": 3,
}


@pytest.mark.parametrize("spec", WITHIN)
@given(st.data())
@settings(max_examples=40)
def test_what_it_protects_holds_whatever_the_faulty_send(spec, data):
    """Any mixture of NaN, infinities and numbers of any size: the answer stays among the honest, give or take
    what the geometric median of a minority is worth: it lies within 2 (1 - f/n) / (1 - 2 f/n) of the farthest honest
    from any point, here their mean (Pillutla et al., and Minsker's lemma)."""
    faulty = data.draw(st.integers(0, WITHIN[spec]))
    width = data.draw(st.integers(1, 5))
    honest = drawn(data.draw(st.integers(0, 999)), 9 - faulty, width, 1.0)
    anything = st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 1e4, -1e4, 1e30, -1e30, 1e300])
    rows = data.draw(st.lists(st.lists(anything, min_size=width, max_size=width), min_size=faulty, max_size=faulty))
    sent = torch.cat([torch.tensor(rows, dtype=torch.float64).view(faulty, width), honest])
    found = call(registry.method(f"fedavg+{spec}").aggregator, sent)
    assert torch.isfinite(found).all()
    far = (honest - honest.mean(0)).norm(dim=1).max()
    share = faulty / 9
    bound = 2 * (1 - share) / (1 - 2 * share) * far if "geometric" in spec else math.sqrt(width) * 2 * far
    if "krum" in spec:
        bound = bound * 9  # Blanchard et al.'s eta(n, f) is below n here
    assert (found - honest.mean(0)).norm() <= bound + 1e-6


def test_krum_is_not_drawn_away_by_colluding_clients():
    honest = drawn(6, 6, 5, 1.0)
    liars = drawn(7, 1, 5, -30.0).expand(2, 5)
    both = torch.cat([liars, honest])
    assert (call(Krum(faulty=2), both) == honest).all(1).any()
    close(call(MultiKrum(faulty=2), both), honest.mean(0), 1e-12)


def test_norm_clip():
    """Each update at most as long as the bound, or as the median; the direction stays."""
    updates = torch.tensor([[3, 4], [0, 1], [0.5, 0]], dtype=torch.float64)  # norms 5, 1, 0.5
    weights = tensor(0.2, 0.3, 0.5)
    fixed = 0.2 * tensor(1.2, 1.6) + 0.3 * tensor(0, 1) + 0.5 * tensor(0.5, 0)
    close(call(NormClip(bound=2), updates, weights), fixed, 1e-14)
    median = 0.2 * tensor(0.6, 0.8) + 0.3 * tensor(0, 1) + 0.5 * tensor(0.5, 0)
    close(call(NormClip(), updates, weights), median, 1e-14)
    close(call(NormClip(bound=10), updates, weights), weights @ updates, 1e-14)
    broken = torch.cat([updates, torch.full((1, 2), math.nan, dtype=torch.float64)])
    assert call(NormClip(bound=2), broken).norm() <= 2


# -- what all of them promise ------------------------------------------------------------------------------------------


def variants() -> list[Aggregator]:
    classes = registry.aggregators()
    return [classes[name]() for name in EXACT] + [ConFREE(weighted=True, scope="per_tensor"), FedMGDAPlus(epsilon=1)]


def label(aggregator: Aggregator) -> str:
    plain = aggregator == type(aggregator)()
    return aggregator.name if plain else f"{aggregator.name} variant"


@pytest.mark.parametrize("aggregator", variants(), ids=label)
@given(federations, st.randoms(use_true_random=False))
@settings(max_examples=15)
def test_the_order_of_clients_does_not_matter(aggregator, drawn_from, random):
    seed, m, d, shift = drawn_from
    updates, weights = drawn(seed, m, d, shift), torch.softmax(drawn(seed, 1, m)[0], 0)
    order = list(range(m))
    random.shuffle(order)
    close(call(aggregator, updates[order], weights[order]), call(aggregator, updates, weights), 1e-7)


@pytest.mark.parametrize("aggregator", variants(), ids=label)
@pytest.mark.parametrize("scale", [1e-6, 3.0, 1e6])
def test_longer_updates_give_a_longer_answer(aggregator, scale):
    for seed in range(4):
        updates = drawn(seed, 6, 7, 0.3)
        close(call(aggregator, scale * updates) / scale, call(aggregator, updates), 1e-7)


def test_the_geometric_median_has_both_properties_up_to_its_smoothing():
    for seed in range(6):
        updates = drawn(seed, 6, 7, 0.3)
        expected = call(GeometricMedian(), updates)
        close(call(GeometricMedian(), updates.flip(0)), expected, 1e-5)
        for scale in (1e-6, 1e6):
            close(call(GeometricMedian(), scale * updates) / scale, expected, 1e-5)


BUFFERED = Layout((
    Entry("bn.running_mean", (2,), 0, "statistic", "base", False), Entry("w", (4,), 2, "parameter", "base", True),
    Entry("bn.num", (), 6, "counter", "base", False), Entry("v", (3,), 7, "parameter", "head", True),
))


@pytest.mark.parametrize("name", ALL)
def test_mass_absent_clients_and_buffers(name):
    """Method.aggregate: the mass multiplies, weight 0 is absence (of NaN, too), no mass no move, buffers averaged."""
    method = Method(aggregator=registry.aggregators()[name]())
    updates = drawn(8, 6, 10, 0.2)
    parts = tensor(0.1, 0.2, 0.15, 0.25, 0.2, 0.1)
    only = BUFFERED.only("parameters")
    direction = method.aggregator.aggregate(BUFFERED.cut(updates, "parameters"), parts, only)
    for mass in (1.0, 0.3, 2.0):
        found = method.aggregate(updates, mass * parts, BUFFERED)
        close(BUFFERED.cut(found, "parameters"), mass * direction, 1e-12)
        close(found[:2], parts @ updates[:, :2], 1e-12)
        close(found[6], updates[:, 6].max(), 0)
    absent = torch.cat([updates, torch.full((2, 10), math.nan, dtype=torch.float64)])
    close(method.aggregate(absent, torch.cat([parts, tensor(0, 0)]), BUFFERED),
          method.aggregate(updates, parts, BUFFERED), 1e-12)
    close(method.aggregate(updates, 0 * parts, BUFFERED), torch.zeros(10, dtype=torch.float64), 0)
    stacked = method.aggregate(torch.stack([updates, 2 * updates], 1), torch.stack([parts, 0 * parts], 1), BUFFERED)
    close(stacked[0], method.aggregate(updates, parts, BUFFERED), 0)
    close(stacked[1], torch.zeros(10, dtype=torch.float64), 0)


@pytest.mark.parametrize("name", ALL)
def test_inputs_stay_as_they_were_and_float32_stays_float32(name):
    aggregator = registry.aggregators()[name]()
    updates, weights = drawn(9, 6, 5, 0.5).float(), equal(6).float()
    before = updates.clone(), weights.clone()
    found = call(aggregator, updates, weights)
    assert found.dtype == torch.float32
    assert torch.equal(updates, before[0])
    assert torch.equal(weights, before[1])
    close(found.double(), call(aggregator, updates.double()), 1e-5)


@pytest.mark.parametrize("name", ALL)
def test_fewer_clients_than_the_minimum_or_no_columns_move_nothing(name):
    aggregator = registry.aggregators()[name]()
    for m in range(1, aggregator.minimum):
        close(call(aggregator, drawn(0, m, 3)), torch.zeros(3, dtype=torch.float64), 0)
    assert torch.isfinite(call(aggregator, drawn(0, aggregator.minimum, 3))).all()
    assert aggregator.aggregate(torch.zeros(6, 0).double(), equal(6), Layout(())).shape == (0,)


def test_minima_follow_the_options():
    assert [Krum(faulty=f).minimum for f in (0, 1, 3)] == [3, 5, 9]
    assert (MultiKrum(faulty=1).minimum, MultiKrum(faulty=1, chosen=7).minimum) == (5, 8)
    assert [TrimmedMean(trim=t).minimum for t in (0.1, 0.2, 0.3, 0.49)] == [10, 5, 4, 3]
    assert ConFREE().minimum == MGDA().minimum == Median().minimum == 1


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("confree:c=1", "c must be at least 0 and below 1"), ("fedmgdaplus:epsilon=2", "from 0 to 1"),
        ("trimmedmean:trim=0.5", "above 0 and below 0.5"), ("krum:faulty=-1", "at least 0"),
        ("multikrum:faulty=-1", "at least 0"), ("multikrum:chosen=0", "at least 1"),
        ("normclip:bound=0", "above 0 or none"), ("geometricmedian:smoothing=0", "above 0, not 0"),
        ("confree:oficial", "did you mean 'official'"),
        ("confree:scope=layer", "per_layer"), ("konfree", "did you mean 'confree'"),
    ],
)
def test_bad_options_are_sentences(spec, words):
    with pytest.raises(CoterieError, match=words):
        registry.method(f"fedavg+{spec}")


def test_spellings():
    assert registry.method("fedavg+confree:official").aggregator == ConFREE.official()
    assert registry.method("fedavg+confree:official,c=0.3").aggregator.c == 0.3
    assert registry.method("fedper:personal=head+confree:c=0.3").aggregator == ConFREE(c=0.3)
    assert registry.method("fedavg+ConFREE").aggregator == ConFREE()
    for spec in ("fedavg+confree:c=0.3", "fedavg+confree:official", "fedavg+fedmgdaplus:easyfl", "fedavg+normclip"):
        assert registry.method(registry.spelling(registry.method(spec))) == registry.method(spec)
    assert registry.spelling(registry.method("fedavg+confree:official")) == "fedavg+confree:official"
    for cls in registry.aggregators().values():
        assert all(f.name in registry.options(cls) for f in fields(cls))


def test_long_rows_need_little_more_than_themselves(monkeypatch):
    """Column blocks change nothing but the order of sums."""
    updates = drawn(10, 6, 101, 0.3)
    for name in ALL:
        aggregator = registry.aggregators()[name]()
        whole = call(aggregator, updates)
        with monkeypatch.context() as patch:
            patch.setattr(algebra, "_ROOM", 60)
            close(call(aggregator, updates), whole, 1e-9)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("aggregator", [*variants(), GeometricMedian(), ConFREE.official()], ids=label)
def test_on_the_gpu_as_on_the_cpu(aggregator):
    """Directions stay on the device; only the inner products leave it."""
    method = Method(aggregator=aggregator)
    for dtype, tolerance in ((torch.float64, 1e-6), (torch.float32, 1e-4)):
        updates, parts = drawn(8, 6, 10, 0.2).to(dtype), tensor(0.1, 0.2, 0.15, 0.25, 0.2, 0.1)
        found = method.aggregate(updates.cuda(), parts.cuda(), BUFFERED)
        assert found.is_cuda
        close(found.cpu(), method.aggregate(updates, parts, BUFFERED), tolerance)
    assert simplex_qp(gram(drawn(0, 4, 3)).cuda(), tensor(0.1, 0.1, 0.1, 0.1).cuda()).is_cuda
