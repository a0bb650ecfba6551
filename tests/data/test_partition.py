"""Every recipe deals each sample at most once, has the structure its paper describes, and always comes to an end."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import ks_2samp  # type: ignore[import-untyped]

from coterie.data import (
    PARTITIONS,
    dirichlet,
    extended_dirichlet,
    iid,
    natural,
    partition,
    pathological,
    permuted_groups,
    rotated_groups,
)
from coterie.data.partition import Assignment, _dirichlet_counts, _draw_owners
from coterie.errors import CoterieError


def labels(classes: int, each: int) -> np.ndarray:
    """`each` samples of every class, in an order that is not sorted by class."""
    return np.tile(np.arange(classes), each)


def label_sets(y: np.ndarray, assignment: Assignment) -> list[frozenset[int]]:
    return [frozenset(y[indices].tolist()) for indices in assignment]


# --- what all recipes promise -----------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, object]] = {
    "iid": {},
    "pathological": {"classes_per_client": 2},
    "dirichlet": {"alpha": 0.5, "minimum": 1},
    "extended_dirichlet": {"classes_per_client": 2, "minimum": 1},
}


def test_every_recipe_is_tested_here() -> None:
    assert OPTIONS.keys() == PARTITIONS.keys()


@pytest.mark.parametrize("name", OPTIONS)
@settings(max_examples=40)
@given(
    y=st.lists(st.integers(0, 5), min_size=30, max_size=200), clients=st.integers(1, 8), seed=st.integers(0, 1000)
)
def test_no_sample_is_dealt_twice_and_all_but_pathological_use_all(
    name: str, y: list[int], clients: int, seed: int
) -> None:
    assume(len(set(y)) >= 2)
    try:
        dealt = partition(name, y, clients, seed=seed, **OPTIONS[name])
    except CoterieError:
        assume(False)
    used = np.concatenate(dealt)
    assert len(dealt) == clients
    assert all(len(indices) > 0 for indices in dealt)
    assert len(np.unique(used)) == len(used)
    assert set(used.tolist()) <= set(range(len(y)))
    if name != "pathological":
        assert len(used) == len(y)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_seed_decides(name: str) -> None:
    y = labels(10, 60)
    options = OPTIONS[name] | ({"balanced": False} if name == "pathological" else {})
    first, again, other = (partition(name, y, 10, seed=seed, **options) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_torch_labels_are_welcome() -> None:
    y = labels(5, 20)
    for a, b in zip(dirichlet(y, 4, 0.5), dirichlet(torch.from_numpy(y), 4, 0.5), strict=True):
        assert np.array_equal(a, b)


# --- iid --------------------------------------------------------------------------------------------------------------


def test_iid_sizes_differ_by_at_most_one() -> None:
    sizes = [len(indices) for indices in iid(labels(10, 10), 7)]
    assert sorted(sizes) == [14, 14, 14, 14, 14, 15, 15]  # 100 = 5 * 14 + 2 * 15


# --- pathological -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("classes", "clients", "cpc", "groups", "members"),
    # The published structures: CIFAR-10, CIFAR-100 and Tiny-ImageNet as the benchmarks deal them.
    [(10, 20, 2, 5, 4), (10, 10, 2, 5, 2), (100, 20, 10, 10, 2), (100, 10, 10, 10, 1), (100, 60, 10, 10, 6),
     (200, 10, 20, 10, 1), (200, 20, 20, 10, 2)],
)  # fmt: skip
def test_pathological_groups_share_identical_label_sets(
    classes: int, clients: int, cpc: int, groups: int, members: int
) -> None:
    y = labels(classes, 60)
    dealt = pathological(y, clients, cpc)
    sets = label_sets(y, dealt)
    assert all(len(held) == cpc for held in sets)
    assert sorted(sets.count(held) for held in set(sets)) == [members] * groups
    # Each class of 60 is cut into equal shares, so all clients hold cpc * 60 / members.
    assert {len(indices) for indices in dealt} == {cpc * 60 // members}


def test_pathological_discards_the_classes_nobody_lacks() -> None:
    y = labels(102, 12)
    dealt = pathological(y, 20, 10)
    # ceil(20 * 10 / 102) = 2 clients per class: 10 groups of 2 are served after 100 classes.
    assert set.union(*map(set, label_sets(y, dealt))) == set(range(100))
    assert sum(len(indices) for indices in dealt) == 100 * 12


def test_pathological_counts_clients_per_class_without_rounding_error() -> None:
    # 55 clients * 20 / 100 is exactly 11 per class: 5 groups of 11. Floating point makes it 12 and leaves 7 over.
    y = labels(100, 60)
    sets = label_sets(y, pathological(y, 55, 20))
    assert sorted(sets.count(held) for held in set(sets)) == [11] * 5


def test_pathological_remainder_goes_to_the_last_client_in_dataset_order() -> None:
    y = np.array([0] * 7 + [1] * 5)
    dealt = pathological(y, 2, 2)
    # 7 = 3 + 4 and 5 = 2 + 3, cut in dataset order.
    assert [indices.tolist() for indices in dealt] == [[0, 1, 2, 7, 8], [3, 4, 5, 6, 9, 10, 11]]


def test_pathological_unbalanced_sizes_stay_in_the_recipes_range() -> None:
    y = labels(10, 600)
    dealt = pathological(y, 20, 2, balanced=False, seed=3)
    # Four clients share each class of 600; the first three get from max(600/40, 40/10) = 15 up to below 150 each.
    for first in range(0, 20, 4):
        for client in range(first, first + 3):
            counts = np.bincount(y[dealt[client]])
            assert all(15 <= n < 150 for n in counts[counts > 0])
    assert sum(len(indices) for indices in dealt) == 6000
    assert len({len(indices) for indices in dealt}) > 10


def test_pathological_refusals() -> None:
    with pytest.raises(CoterieError, match="only 3 classes"):
        pathological(labels(3, 10), 4, 5)
    with pytest.raises(CoterieError, match="no samples"):
        pathological(np.array([0, 0, 0, 1, 1, 1]), 5, 2)  # both classes are cut in 5 shares of 3 // 5 = 0


# --- dirichlet --------------------------------------------------------------------------------------------------------


def test_dirichlet_keeps_the_minimum_and_the_default_minimum() -> None:
    y = labels(10, 500)
    for seed in range(5):
        assert min(map(len, dirichlet(y, 20, 0.5, minimum=77, seed=seed))) >= 77
        assert min(map(len, dirichlet(y, 20, 0.3, seed=seed))) >= 40
    # 100 samples for 10 clients: half the mean size, 5, is less than 40.
    assert min(map(len, dirichlet(labels(10, 10), 10, 1.0))) >= 5


def test_dirichlet_first_class_has_the_laws_mean_and_variance() -> None:
    # The first class meets no full client, so its shares are plain Dirichlet(a 1_M): mean 1/M,
    # variance (M - 1) / (M^2 (M a + 1)).
    m, a, n, draws = 4, 0.5, 100_000, 4000
    rng = np.random.default_rng(0)
    share = np.array([_dirichlet_counts([n], np.ones((1, m), dtype=bool), a, rng)[0] / n for _ in range(draws)])
    variance = (m - 1) / (m**2 * (m * a + 1))
    np.testing.assert_allclose(share.mean(axis=0), 1 / m, atol=4 * np.sqrt(variance / draws))
    np.testing.assert_allclose(share.var(axis=0), variance, rtol=0.1)


def test_drawing_for_the_takers_alone_has_the_law_of_zeroing_and_renormalising() -> None:
    m, a, n, draws = 5, 0.4, 1_000_000, 3000
    takers = np.array([True, False, True, True, False])
    rng = np.random.default_rng(1)
    ours = [_dirichlet_counts([n], takers[None], a, rng)[0, 0] / n for _ in range(draws)]
    naive = rng.dirichlet(np.full(m, a), size=draws) * takers
    naive /= naive.sum(axis=1, keepdims=True)
    assert ks_2samp(ours, naive[:, 0]).pvalue > 0.01


def test_a_full_client_takes_no_further_class() -> None:
    rng = np.random.default_rng(2)
    for _ in range(50):
        counts = _dirichlet_counts([100] * 6, np.ones((6, 5), dtype=bool), 0.2, rng)
        before = counts.cumsum(axis=0) - counts
        assert not counts[before >= 600 / 5].any()
        assert counts.sum(axis=1).tolist() == [100] * 6


@pytest.mark.parametrize("alpha", [1e-9, 1e-3, 1e9])
def test_dirichlet_survives_extreme_alpha(alpha: float) -> None:
    y = labels(10, 50)
    dealt = dirichlet(y, 10, alpha, minimum=0)
    assert sorted(np.concatenate(dealt).tolist()) == list(range(500))
    if alpha == 1e9:
        # All shares are 1/10, so every client gets 5 of each class, give or take the rounding down of the cuts.
        assert all(abs(np.bincount(y[indices], minlength=10) - 5).max() <= 1 for indices in dealt)


def test_small_alpha_makes_clients_unlike() -> None:
    y = labels(10, 300)

    def mean_classes(alpha: float) -> float:
        return float(np.mean([len(held) for held in label_sets(y, dirichlet(y, 10, alpha, minimum=1))]))

    assert mean_classes(0.05) < mean_classes(0.5) < mean_classes(50.0)


def test_dirichlet_scales_to_many_clients() -> None:
    dealt = dirichlet(labels(10, 6000), 10_000, 5.0, minimum=0)
    assert sorted(np.concatenate(dealt).tolist()) == list(range(60_000))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"alpha": 0.1, "minimum": 11}, "10 clients with at least 11 samples need 110 samples, there are 100"),
        ({"alpha": 0.01, "minimum": 9, "tries": 20}, "after 20 tries .* of the minimum 9 samples: raise alpha"),
        ({"alpha": 0.0}, "alpha must be a number above 0"),
        ({"alpha": float("nan")}, "alpha must be a number above 0"),
        ({"alpha": "0.1"}, "alpha must be a number above 0"),
        ({"alpha": 0.1, "tries": 0}, "tries must be"),
    ],
)
def test_dirichlet_refusals(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(CoterieError, match=sentence):
        partition("dirichlet", labels(10, 10), 10, **options)


# --- extended dirichlet -----------------------------------------------------------------------------------------------


def test_extended_dirichlet_gives_few_classes_and_near_equal_shares() -> None:
    y = labels(10, 300)
    dealt = extended_dirichlet(y, 20, 3)
    assert all(1 <= len(held) <= 3 for held in label_sets(y, dealt))
    assert set.union(*map(set, label_sets(y, dealt))) == set(range(10))
    assert min(map(len, dealt)) >= 10


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12), st.integers(0, 99))
def test_owners_are_as_many_as_asked_and_enough_per_class(classes: int, clients: int, cpc: int, seed: int) -> None:
    assume(cpc <= classes <= cpc * clients)
    owners = _draw_owners(classes, clients, cpc, np.random.default_rng(seed))
    assert (owners.sum(axis=0) == cpc).all()
    assert owners.sum(axis=1).min() >= max(cpc * clients // classes // 2, 1)


def test_extended_dirichlet_ends_where_redrawing_would_not() -> None:
    # 10 clients of 10 among 100 classes must be exactly disjoint: a random draw is that with probability ~ 1e-40.
    y = labels(100, 20)
    sets = label_sets(y, extended_dirichlet(y, 10, 10))
    assert all(len(held) == 10 for held in sets)
    assert len(frozenset.union(*sets)) == 100


def test_extended_dirichlet_refusals() -> None:
    with pytest.raises(CoterieError, match="cannot own all 10 classes"):
        extended_dirichlet(labels(10, 10), 3, 3)


# --- natural ----------------------------------------------------------------------------------------------------------


def test_natural_clients_are_sorted_and_small_ones_dropped() -> None:
    dealt, names = natural(np.array(["b", "a", "c", "a", "b", "a"]), minimum=2)
    assert names == ("a", "b")
    assert [indices.tolist() for indices in dealt] == [[1, 3, 5], [0, 4]]
    dealt, names = natural([10, 9, 10])
    assert names == ("9", "10")  # numbers sort as numbers
    with pytest.raises(CoterieError, match="the largest has 2"):
        natural([1, 1, 2], minimum=3)


# --- groups -----------------------------------------------------------------------------------------------------------


def test_permuted_groups_disagree_about_every_class() -> None:
    y = torch.from_numpy(labels(6, 8))
    assignment = np.split(np.arange(48), 8)  # each client holds every class once
    permuted, group = permuted_groups(y, assignment, groups=4, classes=6, seed=2)
    assert group.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    maps = np.full((4, 6), -1)
    for g, indices in zip(group, assignment, strict=True):
        for old, new in zip(y[indices].tolist(), permuted[indices].tolist(), strict=True):
            assert maps[g, old] in (-1, new), "one group has one relabelling"
            maps[g, old] = new
    assert maps[0].tolist() == list(range(6))
    assert all(sorted(row) == list(range(6)) for row in maps.tolist())
    assert all(len(set(column)) == 4 for column in maps.T.tolist())


def test_rotated_groups_turn_by_quarter_turns() -> None:
    x = torch.arange(2 * 2 * 3 * 3.0).reshape(2, 2, 3, 3).repeat(2, 1, 1, 1)
    turned, group = rotated_groups(x, [np.array([i]) for i in range(4)], groups=4)
    assert group.tolist() == [0, 1, 2, 3]
    assert torch.equal(turned[0], x[0])
    # Counter-clockwise by 90 degrees: the last column becomes the first row.
    assert torch.equal(turned[1, :, 0], x[1, :, :, -1])
    assert torch.equal(turned[2], x[2].flip(1, 2))
    assert torch.equal(torch.rot90(turned[3], 1, (1, 2)), x[3]), "270 and another 90 degrees make a full turn"


def test_group_refusals() -> None:
    with pytest.raises(CoterieError, match="fewer groups"):
        permuted_groups(torch.zeros(4, dtype=torch.int64), [np.arange(4)], groups=3, classes=2)
    with pytest.raises(CoterieError, match="at most 4 groups"):
        rotated_groups(torch.zeros(4, 1, 2, 2), [np.arange(4)], groups=5)
    with pytest.raises(CoterieError, match="square"):
        rotated_groups(torch.zeros(4, 1, 2, 3), [np.arange(4)])


# --- by name ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("dirichelt", {}, "did you mean 'dirichlet'"),
        ("dirichlet", {}, "needs a value for alpha"),
        ("dirichlet", {"alhpa": 0.1}, "did you mean 'alpha'"),
        ("iid", {"alpha": 0.1}, "has no options"),
        ("natural", {}, "client id"),
    ],
)
def test_bad_names_and_options(name: str, options: dict[str, object], sentence: str) -> None:
    with pytest.raises(CoterieError, match=sentence):
        partition(name, labels(3, 10), 3, **options)


def test_iid_deals_numbers_to_predict_as_it_deals_labels() -> None:
    """It looks at nothing but how many samples there are, so the same seed deals both alike."""
    for targets in (np.linspace(0, 1, 10), np.zeros((10, 3)), labels(2, 5)):
        dealt = iid(targets, 3, seed=4)
        assert [part.tolist() for part in dealt] == [part.tolist() for part in iid(np.zeros(10, int), 3, seed=4)]


def test_bad_labels_and_counts() -> None:
    with pytest.raises(CoterieError, match=r"whole-number label.* --partition iid"):
        dirichlet(np.zeros(5), 2, 0.5)
    with pytest.raises(CoterieError, match="5 samples cannot be dealt to 6"):
        iid(np.zeros(5, int), 6)
    with pytest.raises(CoterieError, match="clients must be"):
        iid(np.zeros(5, int), 0)


@pytest.mark.parametrize("recipe", [
    lambda: dirichlet(labels(3, 10), 3, 0.5, seed=1),
    lambda: extended_dirichlet(labels(3, 10), 3, 2, 0.5, seed=1),
], ids=["dirichlet", "extended"])
def test_both_recipes_redraw_in_the_same_loop(recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each had a loop of its own."""
    asked = []
    module = sys.modules[dirichlet.__module__]
    loop = module._redrawn
    monkeypatch.setattr(module, "_redrawn", lambda *given: asked.append(given) or loop(*given))
    recipe()
    assert len(asked) == 1
