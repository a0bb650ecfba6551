"""A federation keeps every sample of every client, and knows who holds what."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from marked import marked, samples

from coterie.data import SPLITS, Federation
from coterie.errors import CoterieError


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


def test_clients_by_name_and_no_sample_in_the_description():
    """{name: (x, y)} names the clients; what is printed of a federation never holds a sample."""
    y = torch.arange(8) % 2
    pairs = {"north": (torch.full((8, 2), 4321.0), y), "south": (torch.zeros(8, 2), y)}
    federation = Federation.from_clients(pairs)
    assert federation.names == ("north", "south")
    assert repr(federation) == "<Federation: 2 clients, 16 samples [2]>"
    with pytest.raises(CoterieError, match=r"classes is how many there are, a whole number, not \['a', 'b'\]"):
        Federation.from_clients(pairs, classes=["a", "b"])


def test_histogram_counts_labels_one_by_one() -> None:
    federation = Federation.from_clients(marked(17, 30, 4, classes=4), classes=5, unseen=1)
    for split in SPLITS:
        counted = [[int((federation.client(i, split)[1] == c).sum()) for c in range(5)] for i in range(3)]
        assert federation.histogram(split).tolist() == counted
    assert federation.histogram().sum(axis=1).tolist() == federation.sizes("train").tolist()


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


def test_recipe_is_kept_and_json_able() -> None:
    federation = Federation.from_clients(marked(9), recipe={"source": "mine"}, seed=5, val=0.2)
    written = json.loads(json.dumps(federation.recipe))
    assert written["source"] == "mine"
    assert written["split"] == {"val": 0.2, "test": 0.25, "unseen": 0, "seed": 5}
    with pytest.raises(CoterieError, match="JSON"):
        Federation.from_clients(marked(9), recipe={"x": np.zeros(3)})


def test_bad_questions_are_refused() -> None:
    federation = Federation.from_clients(marked(5, 5))
    with pytest.raises(CoterieError, match="did you mean 'train'"):
        federation.sizes("trian")
    with pytest.raises(CoterieError, match="no client 2"):
        federation.client(2)
