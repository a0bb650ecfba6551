"""Splits keep every sample of every client, train everybody, and are drawn client by client."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from marked import marked, samples

from coterie.data import SPLITS, Federation


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.floats(0, 0.95), st.floats(0, 0.95), st.integers(0, 9))
def test_splits_are_disjoint_complete_and_never_without_training(
    sizes: list[int], val: float, test: float, seed: int
) -> None:
    federation = Federation.from_clients(marked(*sizes), val=val, test=test, seed=seed)
    for i, n in enumerate(sizes):
        parts = [samples(federation, i, split) for split in SPLITS]
        assert [len(p) for p in parts] == [int(federation.sizes(split)[i]) for split in SPLITS]
        assert sum(len(p) for p in parts) == n
        assert set.union(*parts) == {(float(i), float(k)) for k in range(n)}
        assert len(parts[0]) >= 1
        assert len(parts[2]) >= 1 or n < 2 or test == 0
    for name, (x, y) in zip(federation.names, (federation.client(i) for i in range(len(sizes))), strict=True):
        assert set(x[:, 0].tolist()) == {float(name)}
        assert torch.equal(y, x[:, 1].long() % 3), "labels travel with their samples"


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (100, (67, 8, 25)),  # 25 test; the exact half 7.5 rounds to the even 8
        (40, (27, 3, 10)),  # 10 test; round(3.0) = 3 validation of the remaining 30
        (3, (1, 1, 1)),  # round(0.75) = 1 test; round(0.2) = 0 is raised to 1
        (2, (1, 0, 1)),  # one test, and the one that is left must train
        (1, (1, 0, 0)),
    ],
)
def test_split_sizes_by_hand(n: int, expected: tuple[int, int, int]) -> None:
    federation = Federation.from_clients(marked(n), val=0.1, test=0.25)
    assert tuple(int(federation.sizes(split)[0]) for split in SPLITS) == expected


def test_a_clients_split_depends_on_no_other_client() -> None:
    one = Federation.from_clients(marked(20, 5, 30), seed=3)
    other = Federation.from_clients(marked(20, 11, 30, 8), seed=3)
    for i in (0, 2):
        for split in SPLITS:
            assert torch.equal(one.client(i, split)[0], other.client(i, split)[0])


def test_the_seed_decides_the_split() -> None:
    first, again, other = (Federation.from_clients(marked(50, 50), seed=seed) for seed in (1, 1, 2))
    assert first.fingerprint() == again.fingerprint()
    assert samples(first, 0, "test") != samples(other, 0, "test")
    # Two clients of the same size must not share one permutation either.
    assert {k for _, k in samples(first, 0, "test")} != {k for _, k in samples(first, 1, "test")}


# --- unseen clients ---------------------------------------------------------------------------------------------------


def test_unseen_clients_move_to_the_end_and_keep_their_names() -> None:
    sizes = [5, 6, 7, 8, 9, 10]
    federation = Federation.from_clients(marked(*sizes), unseen=2, seed=4)
    assert (federation.clients, federation.population) == (6, 4)
    assert federation.seen.tolist() == [0, 1, 2, 3]
    assert federation.unseen.tolist() == [4, 5]
    assert sorted(federation.names) == ["0", "1", "2", "3", "4", "5"]
    assert list(federation.names[:4]) == sorted(federation.names[:4])
    for i, name in enumerate(federation.names):
        assert samples(federation, i, "train") | samples(federation, i, "val") | samples(federation, i, "test") == {
            (float(name), float(k)) for k in range(sizes[int(name)])
        }


def test_which_clients_are_unseen_is_drawn_by_the_seed_and_does_not_change_their_split() -> None:
    drawn = {Federation.from_clients(marked(*[8] * 6), unseen=2, seed=seed).names[4:] for seed in range(20)}
    assert len(drawn) > 5  # 15 pairs are possible; 20 draws hitting 5 or fewer would be no random choice
    everyone = Federation.from_clients(marked(*[8] * 6), seed=1)
    some = Federation.from_clients(marked(*[8] * 6), unseen=2, seed=1)
    for i, name in enumerate(some.names):
        assert torch.equal(some.client(i)[0], everyone.client(int(name))[0])
