"""How samples are dealt to clients: pure functions from labels to one index array per client.

No function uses a sample twice. The recipes are those of the usual personalized-federated-learning benchmarks; where
one of them can loop for ever, the function here stops with a sentence that says what to change.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any
from zlib import crc32

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from coterie.errors import CoterieError, unknown

Ints = NDArray[np.int64]
Assignment = list[Ints]


def generator(seed: int, *key: int | str) -> np.random.Generator:
    """A random stream of its own for every (seed, key), so that no draw depends on how many came before it."""
    _require_whole("seed", seed, least=0)
    words = [part if isinstance(part, int) else crc32(part.encode()) for part in key]
    return np.random.default_rng([int(seed), *words])


def iid(labels: ArrayLike, clients: int, seed: int = 0) -> Assignment:
    """Shuffle everything and deal it out evenly: sizes differ by at most one. Labels may be anything."""
    samples = len(np.asarray(labels))
    _require_clients(clients, samples)
    return np.array_split(generator(seed, "iid").permutation(samples), clients)


def pathological(
    labels: ArrayLike, clients: int, classes_per_client: int, balanced: bool = True, seed: int = 0
) -> Assignment:
    """Each client holds `classes_per_client` classes; neighbours form groups with identical label sets.

    Classes are served in order, each to the first clients that still lack classes, in dataset order. Once no client
    lacks a class, the remaining classes are discarded, so the result may cover fewer samples than there are. When the
    number of classes is no multiple of `classes_per_client`, the last group can end up with fewer classes.
    `balanced=False` draws uneven sizes; the seed matters only then.
    """
    y = _labels(labels, clients)
    present, class_sizes = np.unique(y, return_counts=True)
    _require_classes(classes_per_client, len(present))
    rng = generator(seed, "pathological")
    # Whole-number ceiling: in floating point 55/100*20 exceeds 11 and would be rounded up to 12 clients.
    per_class = -(-clients * classes_per_client // len(present))
    least = _usual_minimum(len(y), clients) / len(present)
    lacking = np.full(clients, classes_per_client)
    counts = np.zeros((len(present), clients), dtype=np.int64)  # [classes, clients]
    for j, n in enumerate(class_sizes):
        takers = np.flatnonzero(lacking > 0)[:per_class]
        if len(takers) == 0:
            break
        counts[j, takers] = _class_shares(int(n), len(takers), least, None if balanced else rng)
        lacking[takers] -= 1
    _require_samples(counts.sum(axis=0))
    return _deal([np.flatnonzero(y == c) for c in present], counts)


def dirichlet(
    labels: ArrayLike, clients: int, alpha: float, minimum: int | None = None, seed: int = 0, tries: int | None = None
) -> Assignment:
    """Each class is shared by a Dirichlet(alpha) draw among the clients that hold less than the mean size so far.

    Small alpha means unlike clients. Redrawn until every client has `minimum` samples (default: 40, or half the mean
    size if that is less). Every sample is used.
    """
    y = _labels(labels, clients)
    _require_positive("alpha", alpha)
    if minimum is None:
        minimum = _usual_minimum(len(y), clients)
    _require_feasible(minimum, clients, len(y))
    rng = generator(seed, "dirichlet")
    pools = _class_pools(y)
    tries = _patience(tries, clients, len(pools))
    everyone = np.ones((len(pools), clients), dtype=bool)
    return _redrawn(pools, lambda: everyone, alpha, minimum, tries, rng, f"raise alpha ({alpha})")


def extended_dirichlet(
    labels: ArrayLike,
    clients: int,
    classes_per_client: int,
    alpha: float = 100.0,
    minimum: int | None = None,
    seed: int = 0,
    tries: int | None = None,
) -> Assignment:
    """Each client draws `classes_per_client` classes, then each class is shared by Dirichlet(alpha) among its owners.

    A client that has reached the mean size takes no more classes, so a few clients hold less than their full number.
    Redrawn until every client has `minimum` samples (default: 10, or half the mean size if that is less). Every sample
    is used.
    """
    y = _labels(labels, clients)
    _require_positive("alpha", alpha)
    pools = _class_pools(y)
    tries = _patience(tries, clients, len(pools))
    _require_classes(classes_per_client, len(pools))
    if clients * classes_per_client < len(pools):
        raise CoterieError(
            f"{clients} clients with {classes_per_client} classes each cannot own all {len(pools)} classes; "
            "raise classes_per_client or use more clients"
        )
    if minimum is None:
        minimum = min(10, _usual_minimum(len(y), clients))
    _require_feasible(minimum, clients, len(y))
    rng = generator(seed, "extended_dirichlet")
    advice = f"raise alpha ({alpha}) or classes_per_client ({classes_per_client})"

    def owners() -> NDArray[np.bool_]:
        return _draw_owners(len(pools), clients, classes_per_client, rng)

    return _redrawn(pools, owners, alpha, minimum, tries, rng, advice)


def natural(client_ids: ArrayLike, minimum: int = 1) -> tuple[Assignment, tuple[str, ...]]:
    """One client per distinct id, in sorted order, with its name; clients below `minimum` samples are dropped."""
    ids = np.asarray(client_ids)
    if ids.ndim != 1 or len(ids) == 0:
        raise CoterieError(f"client ids must be one id per sample, got an array of shape {list(ids.shape)}")
    _require_whole("minimum", minimum, least=1)
    names, owner, sizes = np.unique(ids, return_inverse=True, return_counts=True)
    groups = np.split(np.argsort(owner, kind="stable"), np.cumsum(sizes)[:-1])
    kept = np.flatnonzero(sizes >= minimum)
    if len(kept) == 0:
        raise CoterieError(f"no client has {minimum} samples, the largest has {sizes.max()}; lower minimum")
    return [groups[i] for i in kept], tuple(str(names[i]) for i in kept)


def permuted_groups(
    y: Tensor, assignment: Sequence[Ints], groups: int, classes: int, seed: int = 0
) -> tuple[Tensor, Ints]:
    """Relabel the classes per group; returns the new labels and the group of each client.

    Client i is in group i % groups and group 0 keeps its labels. Group g moves each class g places along one random
    cycle, so any two groups disagree about every class.
    """
    _require_whole("groups", groups, least=1)
    if groups > classes:
        raise CoterieError(f"{groups} groups cannot disagree about every one of {classes} classes; use fewer groups")
    cycle = torch.from_numpy(generator(seed, "permuted_groups").permutation(classes))
    relabel = torch.empty(groups, classes, dtype=torch.int64)
    for g in range(groups):
        relabel[g, cycle] = cycle.roll(-g)
    group = np.arange(len(assignment)) % groups
    permuted = y.clone()
    for indices, row in zip(assignment, relabel[group], strict=True):
        permuted[indices] = row[y[indices]]
    return permuted, group


def rotated_groups(x: Tensor, assignment: Sequence[Ints], groups: int = 4) -> tuple[Tensor, Ints]:
    """Turn the images [N, C, H, W] of group g by g * 90 degrees; client i is in group i % groups."""
    _require_whole("groups", groups, least=1)
    if groups > 4:
        raise CoterieError(f"images can be turned by 0, 90, 180 or 270 degrees, so at most 4 groups, not {groups}")
    if x.ndim != 4 or x.shape[2] != x.shape[3]:
        raise CoterieError(f"turning needs square images [N, C, H, H], got {list(x.shape)}")
    group = np.arange(len(assignment)) % groups
    turned = x.clone()
    for g, indices in zip(group, assignment, strict=True):
        turned[indices] = torch.rot90(x[indices], int(g), dims=(2, 3))
    return turned, group


PARTITIONS: dict[str, Callable[..., Assignment]] = {
    "iid": iid,
    "pathological": pathological,
    "dirichlet": dirichlet,
    "extended_dirichlet": extended_dirichlet,
}


def partition(name: str, labels: ArrayLike, clients: int, seed: int = 0, **options: Any) -> Assignment:
    """Deal the samples by the recipe called `name`."""
    if name == "natural":
        raise CoterieError("partition 'natural' needs the client id of every sample; call natural(client_ids)")
    require_options(name, options)
    return PARTITIONS[name](labels, clients, seed=seed, **options)


def require_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise where a recipe, `natural` included, has no option of a name, or lacks one."""
    if name not in ("natural", *PARTITIONS):
        raise unknown("partition", name, ("natural", *PARTITIONS))
    parameters = inspect.signature(natural if name == "natural" else PARTITIONS[name]).parameters
    known = {p: spec for p, spec in parameters.items() if p not in ("labels", "client_ids", "clients", "seed")}
    for option in options:
        if option in ("clients", "seed"):
            where = "--clients" if option == "clients" else "data_seed in a file for --config"
            raise CoterieError(f"{option} is no option of partition '{name}'; write {where}.")
        if option not in known:
            if not known:
                raise CoterieError(f"partition '{name}' has no options, got '{option}'")
            raise unknown(f"option of partition '{name}'", option, known)
    for option, spec in known.items():
        if spec.default is inspect.Parameter.empty and option not in options:
            raise CoterieError(f"partition '{name}' needs a value for {option}")


def _usual_minimum(samples: int, clients: int) -> int:
    """The least client size of the benchmark recipes; never 0, for a client without samples is none."""
    return max(1, min(40, samples // (2 * clients)))


def _patience(tries: int | None, clients: int, classes: int) -> int:
    """How often to redraw: a few seconds' worth unless the caller says otherwise."""
    if tries is None:
        return max(100, 2_000_000 // (clients * classes))
    _require_whole("tries", tries, least=1)
    return tries


def _class_pools(y: Ints) -> list[Ints]:
    return [np.flatnonzero(y == c) for c in np.unique(y)]


def _class_shares(samples: int, takers: int, least: float, rng: np.random.Generator | None) -> Ints:
    """Sizes [takers] that sum to `samples`: equal without a generator, else uneven; the last takes the remainder."""
    mean = samples // takers
    sizes = np.full(takers, mean, dtype=np.int64)
    low = int(max(samples / (10 * takers), least))
    if rng is not None and low < mean:
        sizes = rng.integers(low, mean, size=takers)
    sizes[-1] = samples - sizes[:-1].sum()
    return sizes


def _dirichlet_counts(
    class_sizes: Sequence[int], owners: NDArray[np.bool_], alpha: float, rng: np.random.Generator
) -> Ints:
    """How many samples of each class go to each client: [classes, clients], zero where `owners` is false."""
    classes, clients = owners.shape
    total = sum(class_sizes)
    held = np.zeros(clients, dtype=np.int64)
    counts = np.zeros((classes, clients), dtype=np.int64)
    for j, n in enumerate(class_sizes):
        takers = np.flatnonzero(owners[j] & (held * clients < total))
        if len(takers) == 0:
            # Only possible when every owner of the class is full: the cap yields, ownership does not.
            takers = np.flatnonzero(owners[j])
        # Zeroing the other clients' shares of a Dirichlet draw and renormalising gives a Dirichlet over the rest, so
        # drawing for the takers alone has the same law and never divides 0 by 0.
        share = rng.dirichlet(np.full(len(takers), float(alpha)))
        cuts = np.floor(np.cumsum(share)[:-1] * n).astype(np.int64)
        counts[j, takers] = np.diff(np.clip(cuts, 0, n), prepend=0, append=n)
        held += counts[j]
    return counts


def _redrawn(
    pools: list[Ints], owners: Callable[[], NDArray[np.bool_]], alpha: float, minimum: int, tries: int,
    rng: np.random.Generator, advice: str,
) -> Assignment:
    """Draw who owns which class and how much of it, [classes, clients], until every client has `minimum` samples."""
    smallest = 0
    for _ in range(tries):
        counts = _dirichlet_counts([len(p) for p in pools], owners(), alpha, rng)
        least = int(counts.sum(axis=0).min())
        if least >= minimum:
            return _deal([rng.permutation(p) for p in pools], counts)
        smallest = max(smallest, least)
    raise CoterieError(
        f"after {tries} tries the smallest client still had {smallest} of the minimum {minimum} samples: {advice}, "
        "lower minimum or use fewer clients"
    )


def _draw_owners(
    classes: int, clients: int, classes_per_client: int, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """Which client owns which class: [classes, clients], `classes_per_client` per client, enough owners per class.

    The benchmark recipe redraws everything until each class has enough owners, which may take for ever (100 classes,
    20 clients of 10); here a class short of owners takes a place from the class with most. Such a place always exists:
    the places suffice for all classes, so some class has one to spare, and one of its owners lacks the short class.
    """
    drawn = rng.random((clients, classes)).argsort(axis=1)[:, :classes_per_client]  # [clients, classes_per_client]
    owners = np.zeros((classes, clients), dtype=bool)
    owners[drawn.T, np.arange(clients)] = True
    enough = max(classes_per_client * clients // classes // 2, 1)
    while (held_by := owners.sum(axis=1)).min() < enough:  # [classes]
        short, spare = held_by.argmin(), held_by.argmax()
        giver = rng.choice(np.flatnonzero(owners[spare] & ~owners[short]))
        owners[spare, giver], owners[short, giver] = False, True
    return owners


def _deal(pools: list[Ints], counts: Ints) -> Assignment:
    """Cut each class's index list by its row of `counts` [classes, clients] and collect the pieces per client."""
    clients = counts.shape[1]
    owner = np.concatenate([np.repeat(np.arange(clients), row) for row in counts])
    dealt = np.concatenate([pool[: row.sum()] for pool, row in zip(pools, counts, strict=True)])
    return np.split(dealt[np.argsort(owner, kind="stable")], np.cumsum(counts.sum(axis=0))[:-1])


def _labels(labels: ArrayLike, clients: int) -> Ints:
    y = np.asarray(labels)
    if y.ndim != 1 or y.dtype.kind not in "biu":
        raise CoterieError(f"this partition deals classes, so it needs one whole-number label per sample, got "
                           f"{y.dtype} {list(y.shape)}; deal numbers to predict with --partition iid, or name a column "
                           "of clients (client=COLUMN)")
    _require_clients(clients, len(y))
    return y.astype(np.int64)


def _require_clients(clients: int, samples: int) -> None:
    _require_whole("clients", clients, least=1)
    if clients > samples:
        raise CoterieError(f"{samples} samples cannot be dealt to {clients} clients; use fewer clients")


def _require_whole(what: str, value: object, least: int) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise CoterieError(f"{what} must be a whole number of at least {least}, got {value!r}")


def _require_positive(what: str, value: object) -> None:
    if not isinstance(value, Real) or isinstance(value, bool) or not 0 < float(value) < float("inf"):
        raise CoterieError(f"{what} must be a number above 0, got {value!r}")


def _require_classes(classes_per_client: int, classes: int) -> None:
    _require_whole("classes_per_client", classes_per_client, least=1)
    if classes_per_client > classes:
        raise CoterieError(f"classes_per_client is {classes_per_client} but the labels hold only {classes} classes")


def _require_feasible(minimum: int, clients: int, samples: int) -> None:
    _require_whole("minimum", minimum, least=0)
    if minimum * clients > samples:
        raise CoterieError(
            f"{clients} clients with at least {minimum} samples need {minimum * clients} samples, there are {samples}; "
            "lower minimum or use fewer clients"
        )


def _require_samples(sizes: Ints) -> None:
    if (sizes == 0).any():
        raise CoterieError(
            f"client {int(sizes.argmin())} would get no samples because a class is too small for the clients that "
            "share it; use fewer clients"
        )
