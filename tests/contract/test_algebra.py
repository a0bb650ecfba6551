"""The geometry that methods and aggregators share, against definitions, second computations and known cases."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.cluster.hierarchy import fcluster, linkage

from coterie.contract import algebra
from coterie.contract.algebra import (
    agglomerate,
    angles,
    between,
    bipartition,
    combination,
    cosines,
    deviation,
    gram,
    leading,
    lengths,
    median,
    mmd,
    opposing,
    project_box_simplex,
    project_simplex,
    seeds,
    simplex_qp,
    squares,
)
from coterie.errors import CoterieError


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def drawn(seed, *shape, shift=0.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + shift


def close(found, expected, tolerance=1e-12):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


federations = st.tuples(st.integers(0, 10_000), st.integers(5, 8), st.integers(1, 12), st.sampled_from([0.0, 0.3, 1.0]))


# -- many updates, few numbers -----------------------------------------------------------------------------------------


def test_the_gram_matrix_adds_up_over_blocks_of_columns(monkeypatch):
    updates = drawn(0, 4, 103)
    monkeypatch.setattr(algebra, "_ROOM", 40)  # ten columns a block
    assert len(list(algebra.blocks(updates))) == 11
    close(gram(updates), updates @ updates.T, 1e-13)
    assert gram(updates.float()).dtype == torch.float64


def test_cosines_and_opposing_pairs():
    """Of (1, 0), (-2, 1), (0, 3) and a client that did not move, one pair of the three that moved is opposed."""
    updates = tensor([[1, 0], [-2, 1], [0, 3], [0, 0]])
    a = 1 / math.sqrt(5)
    expected = [[1, -2 * a, 0, 0], [-2 * a, 1, a, 0], [0, a, 1, 0], [0, 0, 0, 0]]
    close(cosines(updates), tensor(expected), 1e-14)
    close(cosines(updates[:1], 5 * updates[1:]), tensor(expected)[:1, 1:], 1e-14)
    assert opposing(cosines(updates)) == pytest.approx(1 / 3)
    assert opposing(cosines(1e-3 * updates.float())) == pytest.approx(1 / 3)
    assert math.isnan(opposing(cosines(updates[:1])))
    broken = torch.cat([updates, torch.full((1, 2), math.nan, dtype=torch.float64)])
    close(cosines(broken)[:4, :4], cosines(updates), 0)
    assert opposing(cosines(broken)) == pytest.approx(1 / 3)


def test_lengths_survive_the_range_of_float32():
    close(lengths(torch.full((1, 4), 1e30)), tensor([2e30]), 1e-6)
    close(lengths(torch.full((1, 4), 1e-30)) * 1e30, tensor([2]), 1e-6)


# -- clusters ----------------------------------------------------------------------------------------------------------


def test_distances_are_those_of_inner_products():
    """|a - b|^2 = |a|^2 + |b|^2 - 2 <a, b>; and equal points are at 0, which that formula would miss."""
    a, b = drawn(0, 4, 6), drawn(1, 3, 6)
    squared = a.square().sum(1)[:, None] + b.square().sum(1)[None] - 2 * a @ b.T
    close(between(a, b).square(), squared)
    far = drawn(2, 2, 6) + 1e8
    assert between(far, far).diagonal().tolist() == [0, 0]


def test_seeds_are_far_apart():
    """The point nearest the mean, then ever the farthest; fewer where points coincide."""
    points = tensor([[0, 0], [0.1, 0], [10, 0], [0, 4]])
    none = points[:0]
    assert seeds(points, none, 3).tolist() == [1, 2, 3]  # nearest to (2.5, 1); 9.9 away from it; 4 away from both
    assert seeds(points, points[[2]], 2).tolist() == [3]  # sqrt(116) away, the others at most 10
    assert seeds(points[:1].expand(3, -1), none, 3).tolist() == [0]


@pytest.mark.parametrize("seed", range(5))
def test_bipartition_minimises_the_largest_similarity_across(seed):
    """Against all cuts in two of up to 7 vectors around two separate directions."""
    centre = torch.where(torch.arange(7) % 3 == 0, 1.0, -1.0)[:, None] * drawn(seed, 5)
    unit = F.normalize(centre + 0.2 * drawn(seed + 9, 7, 5), dim=1)
    similarity = unit @ unit.T
    cuts = [torch.tensor([False, *cut]) for cut in itertools.product([False, True], repeat=6) if any(cut)]
    best = min(similarity[~cut][:, cut].max().item() for cut in cuts)
    second, across = bipartition(similarity)
    assert across == pytest.approx(best)
    assert similarity[~second][:, second].max().item() == pytest.approx(best)


def test_bipartition_of_equal_vectors_says_so():
    """Whatever the cut, the similarity across is 1; one cluster has no other side."""
    assert bipartition(torch.ones(3, 3, dtype=torch.float64))[1] == 1


LINE = tensor([0, 1, 2, 10, 11, 30])  # merges of single linkage: 1, 1, 1, then 8 and 19


def test_agglomeration_stops_at_its_height_or_in_the_widest_gap():
    apart = (LINE[:, None] - LINE).abs()
    assert agglomerate(apart, "single", 1.5).tolist() == [0, 0, 0, 1, 1, 2]
    assert agglomerate(apart, "single", 8.5).tolist() == [0, 0, 0, 0, 0, 1]
    assert agglomerate(apart, "single").tolist() == [0, 0, 0, 0, 0, 1]  # the gap from 8 to 19
    assert agglomerate(apart, "single", 30.0).tolist() == [0] * 6
    assert len(set(agglomerate(apart, "single", -1.0).tolist())) == 6
    assert agglomerate(apart[:1, :1], "single").tolist() == [0]
    alike = 1e-3 * apart
    assert agglomerate(alike, "single").tolist() == [0] * 6  # its widest gap is 0.011
    even = tensor([0, 1, 2.1, 3.3, 5, 6.4])  # merges at 1, 1.1, 1.2, 1.4 and 1.7: the widest gap is no jump
    assert agglomerate((even[:, None] - even).abs(), "single").tolist() == [0] * 6
    twice = tensor([0, 1, 3.01])  # merges at 1 and 2.01, and at 1 and 1.99
    assert agglomerate((twice[:, None] - twice).abs(), "single").tolist() == [0, 0, 1]
    twice[2] = 2.99
    assert agglomerate((twice[:, None] - twice).abs(), "single").tolist() == [0] * 3


@pytest.mark.parametrize("how", ["average", "weighted", "complete", "single"])
def test_agglomeration_is_scipys(how):
    """The same groups as SciPy makes of the points themselves."""
    points = drawn(4, 9, 2)
    expected = fcluster(linkage(points.numpy(), how), 1.0, "distance")
    found = agglomerate(between(points, points), how, 1.0)
    assert (np.equal.outer(found.numpy(), found.numpy()) == np.equal.outer(expected, expected)).all()
    assert sorted(set(found.tolist())) == list(range(len(set(expected))))


# -- subspaces ---------------------------------------------------------------------------------------------------------


def test_leading_vectors_span_the_best_approximation():
    """Orthonormal, and what they leave of the samples are the tail singular values (Eckart and Young)."""
    x = drawn(0, 7, 4)
    u, s = leading(x, 2)
    tail = torch.linalg.svdvals(x)[2:]
    close(u.T @ u, torch.eye(2, dtype=torch.float64))
    close((x - x @ u @ u.T).norm(), tail.norm())
    close(s, torch.linalg.svdvals(x)[:2])
    assert leading(x[:1].expand(5, -1), 3)[0].shape == (4, 1)  # samples on a line have one direction


def test_angles_between_known_subspaces():
    """0 with oneself, symmetric, 90 degrees where orthogonal, 30 between lines at 30 degrees, 0 where spans meet."""
    e = torch.eye(4, dtype=torch.float64)
    line = math.cos(math.pi / 6) * e[0] + math.sin(math.pi / 6) * e[2]
    zero = torch.zeros(4, dtype=torch.float64)
    spans = torch.stack([
        torch.stack(pair, 1) for pair in ((e[0], e[1]), (e[2], e[3]), (line, zero), ((e[0] + e[1]) / 2**0.5, zero))
    ])
    found = angles(spans, spans, "principal")
    expected = tensor([[0, 90, 30, 0], [90, 0, 60, 90], [30, 60, 0, 0], [0, 90, 0, 0]])
    expected[2, 3] = expected[3, 2] = math.degrees(math.acos(math.cos(math.pi / 6) / 2**0.5))
    close(found, expected, 3e-6)  # arccos near 1 halves the digits
    close(found, found.T)
    columns = angles(spans, spans, "columns")
    assert columns[0, 3].item() == pytest.approx(45)
    assert angles(-spans[2:3], spans[2:3], "columns").item() == pytest.approx(180)


# -- the samples of a batch --------------------------------------------------------------------------------------------


def test_squares_are_exactly_0_for_equal_features_and_right_for_others():
    z = drawn(0, 5, 3) + 100
    z[3] = z[1]
    close(squares(z), between(z, z).square(), 1e-9)
    assert squares(z)[1, 3] == 0
    assert squares(z.float())[1, 3] == 0


def test_the_median_of_some():
    """The lower middle of the counted values; 1 where none is counted."""
    values = tensor([[5, 1], [9, 3]])
    assert median(values, torch.tensor([[True, True], [False, True]])).tolist() == [3]
    assert median(values, values > 0).tolist() == [3]  # of 1, 3, 5, 9
    assert median(values, values > 10).tolist() == [1]


def test_the_deviation_is_pytorchs_over_the_samples_that_count():
    values, weight = drawn(0, 6, 3), tensor([1, 0, 1, 1, 0, 1])
    close(deviation(values, weight), values[weight > 0].std(0))
    alone = values[:1].clone().requires_grad_()
    found = deviation(alone, tensor([1]))
    assert found.tolist() == [0, 0, 0]
    (slope,) = torch.autograd.grad(found.sum(), alone)
    assert slope.tolist() == [[0, 0, 0]]  # not the infinite slope of a root at 0


def test_mmd_by_its_definition():
    """Every pair of kernels written out; 0 between equal samples; samples of weight 0 do not count."""
    x, y, ones = drawn(0, 4, 3), drawn(1, 4, 3) + 1, torch.ones(4, dtype=torch.float64)
    widths = (10.0, 15.0, 20.0, 50.0)

    def k(a, b):
        return sum(math.exp(-(a - b).square().sum() / (2 * width)) for width in widths)

    expected = sum(k(a, b) + k(c, d) - 2 * k(a, d) for a, c in zip(x, y) for b, d in zip(x, y)) / 16
    assert mmd(x, y, ones, widths).item() == pytest.approx(expected, rel=1e-12)
    assert mmd(x, x, ones, widths).item() == 0
    longer_x, longer_y = torch.cat([x, drawn(2, 2, 3)]), torch.cat([y, drawn(3, 2, 3)])
    padded = mmd(longer_x, longer_y, tensor([1, 1, 1, 1, 0, 0]), widths)
    assert padded.item() == pytest.approx(expected, rel=1e-12)


# -- the simplex -------------------------------------------------------------------------------------------------------


@given(federations)
@settings(max_examples=40)
def test_projections_are_nearest_points(drawn_from):
    """The projection a of v satisfies <v - a, b - a> <= 0 for every feasible b; with loose bounds both agree."""
    seed, m, _, _ = drawn_from
    v, vertices = drawn(seed, 2, m), torch.eye(m, dtype=torch.float64)
    a = project_simplex(v)
    close(a.sum(-1), torch.ones(2, dtype=torch.float64), 1e-12)
    assert (a >= 0).all()
    for k in range(2):
        assert ((vertices - a[k]) @ (v[k] - a[k])).max() < 1e-12
        close(project_box_simplex(v[k], torch.zeros(m).double(), torch.ones(m).double()), a[k], 1e-12)
    low, high = torch.full((m,), 0.5 / m).double(), torch.full((m,), 1.5 / m).double()
    inside = project_box_simplex(v[0], low, high)
    close(inside.sum(), torch.ones((), dtype=torch.float64), 1e-12)
    assert (inside >= low).all()
    assert (inside <= high).all()
    others = [project_box_simplex(row, low, high) for row in drawn(seed + 1, 20, m)]
    assert max(float((v[0] - inside) @ (other - inside)) for other in others) < 1e-12


@given(federations, st.booleans(), st.booleans())
@settings(max_examples=60)
def test_the_quadratic_program_meets_its_optimality_conditions(drawn_from, doubled, boxed):
    """The slope is one number on all weights that can still move either way, singular matrices included."""
    seed, m, d, shift = drawn_from
    updates = drawn(seed, m, d, shift=shift)
    if doubled:
        updates[m // 2 :] = updates[: m - m // 2].clone()
    P = gram(updates) * 10.0 ** (seed % 9 - 4)
    low = torch.full((m,), 0.4 / m if boxed else 0.0, dtype=torch.float64)
    high = torch.full((m,), 2 / m if boxed else 1.0, dtype=torch.float64)
    a = simplex_qp(P, low, high) if boxed else simplex_qp(P)
    assert abs(float(a.sum()) - 1) < 1e-12
    assert ((a >= low) & (a <= high)).all()
    slope = P @ a / P.abs().max()
    assert slope[a > low + 1e-14].max() - slope[a < high - 1e-14].min() < 1e-10


def test_the_quadratic_program_of_a_hundred_clients_meets_its_optimality_conditions():
    for d in (20, 150):
        P = gram(drawn(d, 100, d, shift=0.2))
        a = simplex_qp(P)
        slope = P @ a / P.abs().max()
        assert slope[a > 0].max() - slope.min() < 1e-10


def test_hopeless_bounds_are_named():
    with pytest.raises(CoterieError, match=r"sum to 1\.2 and 1\.6"):
        simplex_qp(torch.eye(2), tensor([0.6, 0.6]), tensor([0.8, 0.8]))


def mix(V, H, target, threshold=0.0):
    return combination(tensor(V), gram(tensor(H)), target, threshold)


def test_fedpac_golden_combinations():
    """Worked example: V = (.1, .2, .3) and three heads' statistics; the matrix written out gives the same."""
    V, H = [0.1, 0.2, 0.3], [[1.0, 0.0], [0.8, 0.1], [0.0, 1.0]]
    golden = [[0.71428571, 0.28571429, 0], [0.58823529, 0.29411765, 0.11764706], [0, 0.15384615, 0.84615385]]
    for target in range(3):
        close(mix(V, H, target), tensor(golden[target]), 1e-8)
        apart = tensor(H)[target] - tensor(H)
        close(simplex_qp(torch.diag(tensor(V)) + apart @ apart.T), tensor(golden[target]), 1e-8)


@given(federations)
@settings(max_examples=30)
def test_a_combination_is_a_mean_that_no_other_beats(drawn_from):
    """Weights are at least 0 and sum to 1; the error V'a^2 + |H_t - H'a|^2 is not larger than that of 30 others."""
    seed, m, d, shift = drawn_from
    H, V = drawn(seed, m, d, shift=shift), drawn(seed + 1, m).abs()
    a = combination(V, gram(H), 0)
    assert (a >= 0).all()
    assert float(a.sum()) == pytest.approx(1, abs=1e-12)
    others = torch.softmax(3 * drawn(seed + 2, 30, m), 1)

    def error(a):
        return a.square() @ V + (H[0] - a @ H).square().sum(-1)

    assert error(a) <= error(others).min() + 1e-12


def test_fedpac_alike_clients_share_equally_and_a_certain_one_keeps_its_head():
    close(mix([0.2] * 4, [[1.0, 2.0]] * 4, 1), tensor([0.25] * 4))
    close(mix([0.1, 0.0, 0.3], [[1.0, 0.0], [0.8, 0.1], [0.0, 1.0]], 1), tensor([0, 1, 0]))
    close(mix([0.3], [[1.0, 2.0]], 0), tensor([1]))
    # golden a_2 without its weight of 0.1176: what remains is 2 : 1
    cut = mix([0.1, 0.2, 0.3], [[1.0, 0.0], [0.8, 0.1], [0.0, 1.0]], 1, threshold=0.2)
    close(cut, tensor([2 / 3, 1 / 3, 0]))
    # where all weights are small, none is cut
    close(mix([0.2] * 4, [[1.0, 2.0]] * 4, 1, threshold=0.3), tensor([0.25] * 4))
