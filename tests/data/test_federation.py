"""A federation keeps every sample of every client, in the right split, and refuses bad data with a sentence."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.data import SPLITS, Federation, label_distance
from coterie.errors import CoterieError
from coterie.report.bubbles import bubbles

Pair = tuple[np.ndarray, np.ndarray]


def marked(*sizes: int, classes: int = 3) -> list[Pair]:
    """Clients whose samples say where they come from: x = (client, sample number), y = sample number mod classes."""
    return [
        (np.stack([np.full(n, i), np.arange(n)], axis=1).astype(np.float32), np.arange(n) % classes)
        for i, n in enumerate(sizes)
    ]


def samples(federation: Federation, i: int, split: str) -> set[tuple[float, ...]]:
    return {tuple(row) for row in federation.client(i, split)[0].tolist()}


# --- splitting --------------------------------------------------------------------------------------------------------


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


def test_without_validation_only_moves_pointers() -> None:
    federation = Federation.from_clients(marked(20, 9))
    whole = federation.without_validation()
    assert whole.x is federation.x
    assert whole.sizes("val").sum() == 0
    assert torch.equal(whole.client(1, "test")[0], federation.client(1, "test")[0])
    assert samples(whole, 0, "train") == samples(federation, 0, "train") | samples(federation, 0, "val")
    assert whole.fingerprint() != federation.fingerprint()
    assert federation.sizes("val").sum() > 0, "the original is untouched"


def test_views_share_memory() -> None:
    federation = Federation.from_clients(marked(20, 9))
    x, _ = federation.client(1, "test")
    assert x.untyped_storage().data_ptr() == federation.x.untyped_storage().data_ptr()


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


# --- counts -----------------------------------------------------------------------------------------------------------


def test_histogram_counts_labels_one_by_one() -> None:
    federation = Federation.from_clients(marked(17, 30, 4, classes=4), classes=5, unseen=1)
    for split in SPLITS:
        counted = [[int((federation.client(i, split)[1] == c).sum()) for c in range(5)] for i in range(3)]
        assert federation.histogram(split).tolist() == counted
    assert federation.histogram().sum(axis=1).tolist() == federation.sizes("train").tolist()


def test_label_distance_closed_forms() -> None:
    # Two clients with one class each: the pool is (1/2, 1/2), so each is half of |1 - 1/2| + |0 - 1/2| = 1/2 away.
    assert label_distance(np.array([[7, 0], [0, 7]])).tolist() == [0.5, 0.5]
    assert label_distance(np.array([[3, 6], [1, 2]])).tolist() == [0.0, 0.0]


def test_fingerprint_sees_every_part() -> None:
    base = marked(20, 9)
    first = Federation.from_clients(base).fingerprint()
    assert len(first) == 64
    touched = [(x.copy(), y.copy()) for x, y in base]
    touched[1][0][3, 1] += 1e-3
    assert Federation.from_clients(touched).fingerprint() != first
    relabelled = [(x, y if i else (y + 1) % 3) for i, (x, y) in enumerate(base)]
    assert Federation.from_clients(relabelled).fingerprint() != first
    assert Federation.from_clients([(x.astype(np.float64), y) for x, y in base]).fingerprint() != first
    assert Federation.from_clients(base, names=["a", "b"]).fingerprint() == first, "names are no data"


def test_summary_fits_a_screen_with_many_clients() -> None:
    x, y = np.zeros((20000, 2), dtype=np.float32), np.arange(20000) % 7
    assignment = list(np.arange(20000).reshape(10000, 2))
    recipe = {"source": "made up", "notes": "long " * 400}
    federation = Federation.from_assignment(x, y, assignment, unseen=1000, recipe=recipe)
    lines = federation.summary().splitlines()
    assert len(lines) <= 23
    assert max(len(line) for line in lines) <= 80
    assert "10000 (9000 train, 1000 unseen)" in federation.summary()
    # Clients of two samples train on one and test on the other.
    assert "train 10000, val 0, test 10000" in federation.summary()


def test_recipe_is_kept_and_json_able() -> None:
    federation = Federation.from_clients(marked(9), recipe={"source": "mine"}, seed=5, val=0.2)
    written = json.loads(json.dumps(federation.recipe))
    assert written["source"] == "mine"
    assert written["split"] == {"val": 0.2, "test": 0.25, "unseen": 0, "seed": 5}
    with pytest.raises(CoterieError, match="JSON"):
        Federation.from_clients(marked(9), recipe={"x": np.zeros(3)})


# --- kinds of data ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint16, np.int64, bool, ">i4"])
def test_whole_number_targets_are_labels(dtype: object) -> None:
    y = np.array([0, 1, 1, 0, 1]).astype(dtype)
    federation = Federation.from_clients([(np.zeros((5, 2), np.float32), y)])
    assert federation.y.dtype == torch.int64
    assert federation.classes == 2
    assert sum(federation.histogram(split).sum(axis=0) for split in SPLITS).tolist() == [2, 3]


def test_float_targets_are_regression_in_the_features_precision() -> None:
    x = torch.zeros(6, 2)
    federation = Federation.from_clients([(x, torch.arange(12.0).double().reshape(6, 2))])
    assert federation.classes == 0
    assert federation.y.shape == (6, 2)
    assert federation.y.dtype == torch.float32
    assert federation.histogram().shape == (1, 0)
    assert "regression" in federation.summary()
    counted = Federation.from_clients([(x, torch.arange(6))], classes=0)
    assert (counted.classes, counted.y.dtype) == (0, torch.float32)


@pytest.mark.parametrize(
    ("given_dtype", "kept"),
    [
        (np.float16, torch.float32),
        (np.float32, torch.float32),
        (np.float64, torch.float64),
        (np.int32, torch.int64),
        (np.uint8, torch.int64),
    ],
)
def test_feature_types(given_dtype: type, kept: torch.dtype) -> None:
    x = np.arange(12).reshape(6, 2).astype(given_dtype)
    x.flags.writeable = False
    federation = Federation.from_clients([(x, np.zeros(6, int))], test=0, val=0)
    assert federation.x.dtype == kept
    assert sorted(federation.x[:, 0].tolist()) == [0, 2, 4, 6, 8, 10]


def test_torch_and_numpy_clients_are_the_same_federation() -> None:
    numpy = marked(9, 12)
    mixed = [(torch.from_numpy(numpy[0][0]), torch.from_numpy(numpy[0][1])), numpy[1]]
    assert Federation.from_clients(mixed).fingerprint() == Federation.from_clients(numpy).fingerprint()


def test_an_assignment_picks_its_samples_and_leaves_the_rest() -> None:
    x, y = torch.arange(10.0)[:, None], torch.arange(10) % 2
    federation = Federation.from_assignment(x, y, [np.array([9, 0, 4]), np.array([2, 7])], val=0, test=0)
    assert len(federation.x) == 5
    assert sorted(federation.client(0)[0][:, 0].tolist()) == [0, 4, 9]
    assert sorted(federation.client(1)[0][:, 0].tolist()) == [2, 7]


def test_given_splits_keep_their_order() -> None:
    train = [(np.array([[3.0], [1.0], [2.0]]), np.array([3.0, 1.0, 2.0])), (np.array([[9.0]]), np.array([9.0]))]
    test = [(np.array([[5.0], [4.0]]), np.array([5.0, 4.0])), (np.zeros((0, 1)), np.zeros(0))]
    val = [(np.zeros((0, 1)), np.zeros(0)), (np.array([[8.0], [7.0]]), np.array([8.0, 7.0]))]
    federation = Federation.from_splits(train, test, val)
    assert federation.x[:, 0].tolist() == [3, 1, 2, 5, 4, 9, 8, 7]
    assert federation.bounds.tolist() == [[0, 3, 3, 5], [5, 6, 8, 8]]
    assert torch.equal(federation.x[:, 0], federation.y)


# --- refusals ---------------------------------------------------------------------------------------------------------


def broken(i: int, x: object = None, y: object = None) -> list[Pair]:
    clients = marked(6, 6, 6)
    clients[i] = (clients[i][0] if x is None else x, clients[i][1] if y is None else y)  # type: ignore[assignment]
    return clients


NAN = np.zeros((6, 2), np.float32)
NAN[2, 1], NAN[4, 0] = np.nan, np.inf


@pytest.mark.parametrize(
    ("clients", "options", "sentence"),
    [
        ([], {}, "at least one client"),
        (broken(1, np.zeros((0, 2)), np.zeros(0, int)), {}, "client 1 has no samples"),
        (broken(2, y=np.zeros(5, int)), {}, "client 2 has 6 samples in x but 5 in y"),
        (broken(1, np.zeros((6, 3), np.float32)), {}, r"client 1 has features of shape \[3\] .* have \[2\]"),
        (broken(2, NAN), {}, "client 2 has 2 NaN or infinite"),
        (broken(1, y=np.array([0, 1, 2, 7, 1, 0])), {"classes": 3}, "client 1 has label 7 but 3 classes"),
        (broken(0, y=np.array([0, 1, -1, 0, 1, 0])), {}, "client 0 has label -1"),
        (broken(1, y=np.array([0.5] * 6)), {}, "client 1 has torch.float64 targets"),
        (broken(1, y=np.array(["cat"] * 6)), {}, "y of client 1 must hold numbers"),
        (broken(1, y=np.zeros((6, 1), int)), {}, "client 1 has targets of shape"),
        ([(np.zeros((4, 2)), np.zeros(4))], {"classes": 3}, "whole numbers"),
        ([(np.zeros((4, 2)), np.array([0, 1, np.nan, 2]))], {}, "client 0 has 1 NaN"),
        ([(np.zeros((4, 2)), np.zeros((4, 1), int))], {}, "one number per sample"),
        ([(np.zeros(4), np.zeros(4, int))], {}, "features"),
        ([(np.zeros((4, 2)), np.zeros(4, int), 1)], {}, r"client 0 must be a pair"),
        (marked(5, 5), {"unseen": 2}, "unseen"),
        (marked(5, 5), {"test": 1.0}, "test must be a share"),
        (marked(5, 5), {"val": -0.1}, "val must be a share"),
        (marked(5, 5), {"names": ["a"]}, "1 names were given for 2 clients"),
        (marked(5, 5), {"seed": -1}, "seed"),
    ],
)
def test_bad_clients_are_refused_with_a_sentence(clients: list[Pair], options: dict[str, object], sentence: str):
    with pytest.raises(CoterieError, match=sentence):
        Federation.from_clients(clients, **options)  # type: ignore[arg-type]


def test_names_appear_in_refusals_also_when_clients_are_reordered() -> None:
    clients = marked(*[6] * 5)
    clients[3] = (NAN, clients[3][1])
    for seed in range(5):
        with pytest.raises(CoterieError, match="client delta has 2 NaN"):
            Federation.from_clients(clients, unseen=2, seed=seed, names=["alpha", "beta", "gamma", "delta", "epsilon"])


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ([[0, 1], [1, 2]], "sample 1 is assigned twice, to client 0 and to client 1"),
        ([[0, 1], [2, 4]], "client 1 is assigned sample 4 but there are 4"),
        ([[0, 1], []], "client 1 has no samples"),
    ],
)
def test_bad_assignments_are_refused(assignment: list[list[int]], sentence: str) -> None:
    with pytest.raises(CoterieError, match=sentence):
        Federation.from_assignment(np.zeros((4, 1)), np.zeros(4, int), [np.array(a, int) for a in assignment])


def test_bad_splits_are_refused() -> None:
    with pytest.raises(CoterieError, match="test has 1 clients but train has 2"):
        Federation.from_splits(marked(4, 4), marked(4))
    empty = (np.zeros((0, 2), np.float32), np.zeros(0, int))
    with pytest.raises(CoterieError, match="client 1 has no training data"):
        Federation.from_splits([marked(4)[0], empty], marked(4, 4))


def test_bad_questions_are_refused() -> None:
    federation = Federation.from_clients(marked(5, 5))
    with pytest.raises(CoterieError, match="did you mean 'train'"):
        federation.sizes("trian")
    with pytest.raises(CoterieError, match="no client 2"):
        federation.client(2)


# --- picture ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [3, 0])
def test_the_picture_is_a_png(classes: int, tmp_path: object) -> None:
    federation = Federation.from_clients(marked(12, 9, 15), classes=classes, unseen=1)
    path = bubbles(federation, f"{tmp_path}/picture.png")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_clients_by_name_and_no_sample_in_the_description():
    """{name: (x, y)} names the clients; what is printed of a federation never holds a sample."""
    y = torch.arange(8) % 2
    pairs = {"north": (torch.full((8, 2), 4321.0), y), "south": (torch.zeros(8, 2), y)}
    federation = Federation.from_clients(pairs)
    assert federation.names == ("north", "south")
    assert repr(federation) == "<Federation: 2 clients, 16 samples [2]>"
    with pytest.raises(CoterieError, match=r"classes is how many there are, a whole number, not \['a', 'b'\]"):
        Federation.from_clients(pairs, classes=["a", "b"])
