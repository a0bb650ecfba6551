"""Bad data are refused with a sentence that names the client."""

from __future__ import annotations

import numpy as np
import pytest
from marked import Pair, marked

from coterie.data import Federation
from coterie.errors import CoterieError


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
        ([(np.zeros((4, 2)), np.full(4, 0.5))], {"classes": 3}, "whole numbers"),
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
    with pytest.raises(CoterieError, match="test has 1 client but train has 2"):
        Federation.from_splits(marked(4, 4), marked(4))
    empty = (np.zeros((0, 2), np.float32), np.zeros(0, int))
    with pytest.raises(CoterieError, match="client 1 has no training data"):
        Federation.from_splits([marked(4)[0], empty], marked(4, 4))
