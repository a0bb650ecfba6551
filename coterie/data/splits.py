"""How a client's samples are cut into train, val and test, and which clients stay unseen."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.data import groups
from coterie.data.partition import Ints, generator
from coterie.errors import CoterieError

SPLITS = ("train", "val", "test")


def deal(
    indices: Ints, val: float, test: float, rng: np.random.Generator, given: NDArray[np.integer[Any]] | None = None,
    group: Ints | None = None, trained: Ints | None = None,
) -> list[Ints]:
    """One client's indices shuffled and cut into train, val and test; training is never left empty.

    With `given` the test samples are those; so are the validation samples, where there are any. Samples of one `group`
    stay together in what is drawn, and the groups `trained` train.
    """
    if given is not None:
        train, validate, held = (indices[given[indices] == k] for k in range(len(SPLITS)))
        if len(validate):
            return [train, validate, held]
        return [*deal(train, val, 0, rng, group=group, trained=trained)[:2], held]
    if group is not None:
        return groups.deal(indices, group, val, test, rng, held_out, trained)
    shuffled = rng.permutation(indices)
    n_test = held_out(len(shuffled), test)
    n_val = held_out(len(shuffled) - n_test, val)
    n_train = len(shuffled) - n_test - n_val
    return np.split(shuffled, [n_train, n_train + n_val])


def held_out(n: int, share: float) -> int:
    """How many of n samples a share is: of 2 and more at least one, and never all."""
    if share == 0 or n < 2:
        return 0
    return min(max(round(n * share), 1), n - 1)


def client_order(clients: int, unseen: int, seed: int) -> Ints:
    """The original numbers of the clients in their new order: the seen ones rising, then the unseen ones rising."""
    if not 0 <= unseen < clients:
        raise CoterieError(f"unseen must leave at least one of the {clients} clients for training, got {unseen}")
    drawn = generator(seed, "unseen").permutation(clients)
    return np.concatenate([np.sort(drawn[unseen:]), np.sort(drawn[:unseen])])
