"""Groups: samples of one patient, lesion or speaker, which stay on one side of a split.

Otherwise a model is tested on what it has trained on. Groups are cut by none of what is drawn here: the parts of a
client, the clients that a partition makes, and the folds of a cross-validation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coterie.data.partition import Assignment, Ints, partition
from coterie.errors import CoterieError, counted

WINDOW = 256
"""Groups among which the nearest sum is looked for; of more, the others are taken in their random order."""


def coded(group: ArrayLike, samples: int) -> Ints:
    """The group of each sample `[N]` as a number, in the sorted order of the ids."""
    ids = np.asarray(group)
    if ids.shape != (samples,):
        raise CoterieError(f"group must name one group for each of the {samples} samples, got an array of shape "
                           f"{list(ids.shape)}")
    if ids.dtype.kind == "f" and np.isnan(ids).any():
        raise CoterieError(f"group must name one group for each sample; {int(np.isnan(ids).sum())} have none")
    found: Ints = np.unique(ids.astype(str) if ids.dtype.kind == "O" else ids, return_inverse=True)[1].astype(np.int64)
    return found


def nearest(sizes: Sequence[int], target: int) -> NDArray[np.bool_]:
    """Groups `[G]` whose sizes add up to as near to the target as any of them do; some are taken, and some are not.

    The first ones are taken where there is a choice, so that the order, drawn by the caller, decides. Of more than
    WINDOW groups the first are taken until the target is near, and the sum is the nearest that the next ones allow.
    """
    total, reached = sum(sizes), np.cumsum(sizes)
    first = 0
    if len(sizes) > WINDOW:
        first = max(0, min(int(np.searchsorted(reached, target)), len(sizes)) - WINDOW // 2)
    before = int(reached[first - 1]) if first else 0
    window = [int(size) for size in sizes[first : first + WINDOW]]
    cap = max(2 * (target - before), min(window)) + 1
    mask = (1 << (cap + 1)) - 1
    sums = [1]  # bit s of sums[k]: s is what some of the last k groups of the window add up to
    for size in reversed(window):
        sums.append((sums[-1] | sums[-1] << size) & mask)
    fits = [s for s in range(cap + 1) if sums[-1] >> s & 1 and 0 < before + s < total]
    left = min(fits, key=lambda s: abs(before + s - target))
    taken = np.zeros(len(sizes), dtype=bool)
    taken[:first] = True
    for k, size in enumerate(window):
        if left >= size and sums[len(window) - k - 1] >> (left - size) & 1:
            taken[first + k] = True
            left -= size
    return taken


Shares = Callable[[int, float], int]
"""How many of n samples a share is."""


def shared(groups: Ints, assignment: Sequence[Ints], val: float, test: float, held_out: Shares) -> Ints:
    """The groups with samples at several clients, which must train wherever they are: then nobody tests on them.

    None of them, where that would leave a client without enough other samples to hold out.
    """
    clients = np.zeros(int(groups.max()) + 1, dtype=np.int64)
    for indices in assignment:
        clients[np.unique(groups[indices])] += 1
    found = np.flatnonzero(clients > 1)
    for indices in assignment:
        own = indices[clients[groups[indices]] == 1]
        tested = held_out(len(indices), test)
        if len(own) < tested + held_out(len(indices) - tested, val) or len(np.unique(groups[own])) < 2:
            return found[:0]
    return found


def deal(
    indices: Ints, groups: Ints, val: float, test: float, rng: np.random.Generator, held_out: Shares,
    trained: Ints | None = None,
) -> list[Ints]:
    """One client's indices cut into train, val and test, each group in one of them; training is never left empty.

    The sizes are as near as groups allow to `held_out(n, share)`, those of a split that knows no groups. Which group
    goes where follows from the random numbers and the groups' sizes, not from the order of the samples. Those of
    `trained` are for training.
    """
    present, mine, sizes = np.unique(groups[indices], return_inverse=True, return_counts=True)
    order = rng.permutation(len(present))
    order = order if trained is None else order[~np.isin(present[order], trained)]
    side = np.zeros(len(present), dtype=np.int64)  # 0 train, 1 val, 2 test
    left, n = order, len(indices)
    for part, share in ((2, test), (1, val)):
        target = held_out(n, share)
        if target and len(left) > 1:
            taken = nearest(sizes[left].tolist(), target)
            side[left[taken]] = part
            n -= int(sizes[left[taken]].sum())
            left = left[~taken]
    mixed = rng.permutation(len(indices))
    return [indices[mixed][side[mine][mixed] == part] for part in range(3)]


def dealt_whole(
    name: str, labels: NDArray[Any], groups: Ints, clients: int, seed: int = 0, **options: Any
) -> Assignment:
    """A partition that gives whole groups to clients: the recipe `name` deals groups, each by its commonest label."""
    count = int(groups.max()) + 1
    if clients > count:
        raise CoterieError(f"{counted(count, 'group')} cannot be dealt to {clients} clients, for a group stays with "
                           "one client; use fewer clients, or leave the groups out.")
    if name == "iid":
        labels = np.zeros(len(groups), dtype=np.int64)  # it asks for none, and votes need some
    if labels.ndim != 1 or labels.dtype.kind not in "biu":
        return partition(name, labels, clients, seed, **options)  # says what is wrong
    names, codes = np.unique(labels, return_inverse=True)
    votes = np.zeros((count, len(names)), dtype=np.int64)  # [groups, classes]
    np.add.at(votes, (groups, codes), 1)
    dealt = partition(name, names[votes.argmax(1)], clients, seed, **options)
    members = np.split(np.argsort(groups, kind="stable"), np.bincount(groups).cumsum()[:-1])
    return [np.concatenate([members[g] for g in mine]) for mine in dealt]


def folds(samples: Ints, groups: Ints, count: int, rng: np.random.Generator) -> list[Ints]:
    """The samples in at most `count` parts of nearly equal size, each group in one of them."""
    present, mine, sizes = np.unique(groups[samples], return_inverse=True, return_counts=True)
    parts: list[list[int]] = [[] for _ in range(min(count, len(present)))]
    held = np.zeros(len(parts), dtype=np.int64)
    drawn = rng.permutation(len(present))
    for g in drawn[np.argsort(-sizes[drawn], kind="stable")].tolist():  # the largest first, into the smallest part
        k = int(held.argmin())
        parts[k].append(g)
        held[k] += sizes[g]
    return [samples[np.isin(mine, part)] for part in parts]


def notes(
    groups: Ints, parts: Sequence[Sequence[Ints]], names: Sequence[str], given: bool, trained: Ints | None = None
) -> list[str]:
    """What a reader of the scores should know: groups at several clients or sides, and clients with a single group."""
    said: list[str] = []
    total = len(np.unique(np.concatenate([groups[piece] for mine in parts for piece in mine])))
    owner = np.full(int(groups.max()) + 1, -1)
    twice: set[int] = set()
    for i, mine in enumerate(parts):
        held = np.unique(np.concatenate([groups[piece] for piece in mine]))
        twice |= set(held[(owner[held] >= 0) & (owner[held] != i)].tolist())
        owner[held] = np.where(owner[held] < 0, i, owner[held])
    if twice and trained is not None and len(trained):
        said.append(f"{len(twice)} of {counted(total, 'group')} have samples at several clients, so they are for "
                    "training alone: nobody validates or tests on what another trains on")
    elif twice:
        said.append(f"{len(twice)} of {counted(total, 'group')} have samples at several clients: each client keeps its "
                    "own part of them on one side, but one client may test on a group that another trains on")
    if given and (torn := sum(_sides(groups, mine)[1] for mine in parts)):
        said.append(f"{counted(torn, 'group')} lie on two sides of the split that the data bring, which is kept")
    alone = [name for name, mine in zip(names, parts, strict=True)
             if len(np.unique(np.concatenate([groups[piece] for piece in mine]))) == 1]
    if alone and not given:
        some = f"{', '.join(alone[:4])}{f' and {len(alone) - 4} more' if len(alone) > 4 else ''}"
        said.append(f"{counted(len(alone), 'client')} ({some}) with a single group, so nothing is held out there: no "
                    "validation and no test samples")
    return said


def _sides(groups: Ints, parts: Sequence[Ints]) -> tuple[list[int], int]:
    """Groups in each part of a client, and how many of them are in more than one."""
    held = [set(groups[piece].tolist()) for piece in parts]
    return [len(one) for one in held], sum(map(len, held)) - len(set().union(*held))


def in_words(groups: Ints, bounds: Ints, splits: Sequence[str]) -> str:
    """How many groups there are in each split, and whether one lies on two sides of a client's."""
    counts, torn = np.zeros(len(splits), dtype=np.int64), 0
    for row in bounds:
        each, more = _sides(groups, [np.arange(a, b) for a, b in pairwise(row.tolist())])
        counts, torn = counts + each, torn + more
    sides = f"{torn} on two sides" if torn else "none on two sides"
    held = len(np.unique(np.concatenate([groups[a:b] for a, b in bounds[:, [0, 3]]])))
    return f"{held}: {', '.join(f'{split} {n}' for split, n in zip(splits, counts, strict=True))}; {sides} of a split"
