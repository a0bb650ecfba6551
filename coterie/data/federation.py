"""The data of all clients in flat arrays, with pointers to who owns what."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from itertools import pairwise
from textwrap import wrap
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from coterie import memory
from coterie.data.partition import Ints, generator
from coterie.errors import CoterieError, counted, unknown

Data = ArrayLike | Tensor
Pair = tuple[Data, Data]

SPLITS = ("train", "val", "test")
MOST_CLASSES = 12
"""Classes that are counted client by client on a screen."""


@dataclass(frozen=True, eq=False, repr=False)
class Federation:
    """Every client's samples, each client contiguous: first its training, then its validation, then its test samples.

    Clients 0..trained-1 take part in training; the others are unseen and only meet the finished models.
    """

    x: Tensor  # [N, ...] float32 or float64 features, or int64 tokens
    y: Tensor  # [N] int64 labels, or float targets [N] or [N, k]
    bounds: Ints  # [clients, 4]: client i trains on [b0, b1), validates on [b1, b2), tests on [b2, b3)
    trained: int
    classes: int  # 0 for regression
    names: tuple[str, ...]
    recipe: dict[str, Any]
    schedule: Ints | None = None  # [trained, 2]: rounds of arrival, rising, and of leaving; None: all are always there

    def __post_init__(self) -> None:
        """Refuse an inconsistent federation, however it was built."""
        if self.bounds.ndim != 2 or self.bounds.shape[1] != 4 or len(self.bounds) == 0:
            raise CoterieError(f"bounds must have shape [clients, 4], got {list(self.bounds.shape)}")
        if len(self.x) != len(self.y):
            raise CoterieError(f"x has {len(self.x)} samples but y has {len(self.y)}")
        if (np.diff(self.bounds, axis=1) < 0).any() or self.bounds.min() < 0 or self.bounds.max() > len(self.x):
            raise CoterieError(f"bounds must rise along each row and stay within the {len(self.x)} samples")
        if len(self.names) != self.clients:
            raise CoterieError(f"{len(self.names)} names were given for {self.clients} clients")
        if not 1 <= self.trained <= self.clients:
            raise CoterieError(f"trained must be between 1 and the {self.clients} clients, got {self.trained}")
        if (empty := np.flatnonzero(self.sizes("train") == 0)).size:
            raise CoterieError(f"client {self.names[empty[0]]} has no training data")
        if self.schedule is not None and self.schedule.shape != (self.trained, 2):
            raise CoterieError(f"the schedule has shape {list(self.schedule.shape)}, expected [{self.trained}, 2]")
        try:
            json.dumps(self.recipe)
        except TypeError as error:
            raise CoterieError(f"the recipe cannot be written as JSON: {error}") from error

    def __repr__(self) -> str:
        """Without the samples, which may be nobody else's business."""
        held = f"{counted(self.clients, 'client')}, {counted(len(self.x), 'sample')}"
        return f"<Federation: {held} {list(self.x.shape[1:])}>"

    # --- constructors -------------------------------------------------------------------------------------------------

    @classmethod
    def from_clients(
        cls,
        clients: Sequence[Pair] | Mapping[str, Pair],
        *,
        val: float = 0.1,
        test: float = 0.25,
        unseen: int = 0,
        seed: int = 0,
        classes: int | None = None,
        names: Sequence[str] | None = None,
        recipe: dict[str, Any] | None = None,
    ) -> Federation:
        """From one (x, y) per client, numpy or torch: a list, with `names` if they have any, or {name: (x, y)}.

        Whole-number y are labels, float y regression targets; `classes=0` reads whole numbers as targets too. `test` is
        the share of a client's samples, `val` the share of what remains. `unseen` clients are drawn at random and
        moved behind the others; names keep the original order's numbers.
        """
        if isinstance(clients, Mapping):
            names, clients = [str(name) for name in clients], list(clients.values())
        names = _names(names, len(clients))
        x, y, sizes = _stack([clients], names)
        stops = sizes[:, 0].cumsum()
        owned = [np.arange(stop - n, stop) for n, stop in zip(sizes[:, 0], stops, strict=True)]
        return cls.from_assignment(
            x, y, owned, val=val, test=test, unseen=unseen, seed=seed, classes=classes, names=names, recipe=recipe
        )

    @classmethod
    def from_assignment(
        cls,
        x: Data,
        y: Data,
        assignment: Sequence[NDArray[np.integer[Any]]],
        *,
        val: float = 0.1,
        test: float = 0.25,
        unseen: int = 0,
        seed: int = 0,
        classes: int | None = None,
        names: Sequence[str] | None = None,
        recipe: dict[str, Any] | None = None,
        given: NDArray[np.integer[Any]] | None = None,
    ) -> Federation:
        """From one pool of samples and the sample indices of each client, as a partition returns them.

        `given [N]` says that sample n is in SPLITS[given[n]] already: test samples stay test samples, nothing is
        drawn for testing, and `val` is drawn from the training samples of clients that have no validation samples.
        """
        names = _names(names, len(assignment))
        _require_share("val", val)
        _require_share("test", test)
        if given is not None and len(given) != len(x):  # type: ignore[arg-type]
            raise CoterieError(f"x has {len(x)} samples but {len(given)} are given a split")  # type: ignore[arg-type]
        parts = [
            deal(np.asarray(indices, dtype=np.int64), val, test, generator(seed, "split", i), given)
            for i, indices in enumerate(assignment)
        ]
        split: dict[str, Any] = {"val": val, "test": test, "unseen": unseen, "seed": seed}
        if given is not None:
            split = {"given": True, "val": val, "unseen": unseen, "seed": seed}
        return cls._arranged(_tensor(x, "x"), _tensor(y, "y"), parts, names, unseen, seed, classes, recipe, split)

    @classmethod
    def from_splits(
        cls,
        train: Sequence[Pair],
        test: Sequence[Pair] | None = None,
        val: Sequence[Pair] | None = None,
        *,
        unseen: int = 0,
        seed: int = 0,
        classes: int | None = None,
        names: Sequence[str] | None = None,
        recipe: dict[str, Any] | None = None,
    ) -> Federation:
        """From data that are split already: one (x, y) per client in each list, order kept, nothing shuffled."""
        names = _names(names, len(train))
        for split, pairs in (("test", test), ("val", val)):
            if pairs is not None and len(pairs) != len(train):
                raise CoterieError(f"{split} has {len(pairs)} clients but train has {len(train)}")
        x, y, sizes = _stack([train, val, test], names)
        cuts = np.concatenate([[0], sizes.ravel().cumsum()])
        pieces = [np.arange(start, stop) for start, stop in pairwise(cuts)]
        parts = [pieces[i : i + 3] for i in range(0, len(pieces), 3)]
        made = {"given": True, "unseen": unseen, "seed": seed}
        return cls._arranged(x, y, parts, names, unseen, seed, classes, recipe, made)

    @classmethod
    def _arranged(
        cls,
        x: Tensor,
        y: Tensor,
        parts: Sequence[Sequence[Ints]],
        names: Sequence[str],
        unseen: int,
        seed: int,
        classes: int | None,
        recipe: dict[str, Any] | None,
        split: dict[str, Any],
    ) -> Federation:
        """Check the samples and bring them into client order; parts[i] = client i's (train, val, test) indices."""
        if len(x) != len(y):
            raise CoterieError(f"x has {len(x)} samples but y has {len(y)}")
        if x.ndim < 2:
            raise CoterieError(f"x must have shape [samples, features...], got {list(x.shape)}; try x[:, None]")
        order = _client_order(len(parts), unseen, seed)
        names = tuple(names[i] for i in order)
        sizes = np.array([[len(piece) for piece in parts[i]] for i in order], dtype=np.int64)  # [clients, 3]
        if (empty := np.flatnonzero(sizes.sum(axis=1) == 0)).size:
            raise CoterieError(f"client {names[empty[0]]} has no samples")
        stops = sizes.ravel().cumsum().reshape(-1, 3)
        bounds = np.column_stack([stops[:, 0] - sizes[:, 0], stops])  # [clients, 4]
        rows = np.concatenate([piece for i in order for piece in parts[i]])
        _check_rows(rows, len(x), bounds, names)
        x, y = memory.taken(x, torch.from_numpy(rows)), y[torch.from_numpy(rows)]
        _check_finite(x, "x", bounds, names)
        _check_finite(y, "y", bounds, names)
        y, classes = _task(x, y, classes)
        if classes:
            _check_labels(y, classes, bounds, names)
        return cls(x, y, bounds, len(parts) - unseen, classes, names, {**(recipe or {}), "split": split})

    # --- who and how much ---------------------------------------------------------------------------------------------

    @property
    def clients(self) -> int:
        """How many clients there are, unseen ones included."""
        return len(self.bounds)

    @property
    def population(self) -> int:
        """How many clients take part in training."""
        return self.trained

    @property
    def outputs(self) -> int:
        """Numbers a model gives for a sample: the classes, or the targets."""
        return self.classes or (1 if self.y.ndim == 1 else int(self.y.shape[1]))

    @property
    def seen(self) -> Ints:
        return np.arange(self.trained)

    @property
    def unseen(self) -> Ints:
        return np.arange(self.trained, self.clients)

    def arrived(self, t: int) -> int:
        """How many training clients have come by round t, whether they are still there or not: the first ones."""
        return self.trained if self.schedule is None else int(np.searchsorted(self.schedule[:, 0], t, side="right"))

    def there(self, t: int) -> Ints:
        """The training clients that are there in round t."""
        if self.schedule is None:
            return self.seen
        return np.flatnonzero((self.schedule[:, 0] <= t) & (t < self.schedule[:, 1]))

    def sizes(self, split: str = "train") -> Ints:
        """Samples per client: [clients]."""
        start, stop = self._edges(split)
        return stop - start

    def histogram(self, split: str = "train") -> Ints:
        """Samples per client and class: [clients, classes]; no columns for regression."""
        start, stop = self._edges(split)
        if self.classes == 0:
            return np.zeros((self.clients, 0), dtype=np.int64)
        n = stop - start
        owner = np.repeat(np.arange(self.clients), n)
        rows = np.arange(n.sum()) + np.repeat(start - (n.cumsum() - n), n)
        cells = owner * self.classes + self.y.cpu().numpy()[rows]
        return np.bincount(cells, minlength=self.clients * self.classes).reshape(self.clients, self.classes)

    def client(self, i: int, split: str = "train") -> tuple[Tensor, Tensor]:
        """Views of one client's x and y."""
        start, stop = self._edges(split)
        if not 0 <= i < self.clients:
            raise CoterieError(f"there is no client {i}; clients are numbered 0 to {self.clients - 1}")
        return self.x[start[i] : stop[i]], self.y[start[i] : stop[i]]

    def without_validation(self) -> Federation:
        """The same samples with validation given back to training; only pointers change."""
        bounds = self.bounds.copy()
        bounds[:, 1] = bounds[:, 2]
        return replace(self, bounds=bounds, recipe={**self.recipe, "validation": "given back to training"})

    def fingerprint(self) -> str:
        """A hex digest that changes with any sample, pointer or the number of trained clients."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        digest = sha256(repr((self.x.shape, self.x.dtype, self.y.shape, self.y.dtype, self.classes)).encode())
        digest.update(repr((self.trained, self.bounds.shape)).encode())
        digest.update(np.ascontiguousarray(self.bounds, dtype="<i8").data)
        if self.schedule is not None:
            digest.update(np.ascontiguousarray(self.schedule, dtype="<i8").data)
        for data in (self.x, self.y):
            digest.update(data.detach().cpu().contiguous().numpy().data)
        return digest.hexdigest()

    def _edges(self, split: str) -> tuple[Ints, Ints]:
        if split not in SPLITS:
            raise unknown("split", split, SPLITS)
        k = SPLITS.index(split)
        return self.bounds[:, k], self.bounds[:, k + 1]

    # --- for people ---------------------------------------------------------------------------------------------------

    def summary(self) -> str:
        """A description that fits one terminal screen (80 columns) however many clients there are."""
        sizes = np.stack([self.sizes(split) for split in SPLITS], axis=1)  # [clients, 3]
        held = sizes.sum(axis=1)
        small = int(held.argmin())
        feature = "x".join(str(n) for n in self.x.shape[1:])
        shown = {key: value for key, value in self.recipe.items() if key not in ("notes", "classes", "encoding")}
        facts = {
            "clients": f"{self.clients} ({self.trained} train, {self.clients - self.trained} unseen)",
            "samples": f"{held.sum()} of shape {feature}, {str(self.x.dtype).removeprefix('torch.')}",
            "splits": ", ".join(f"{split} {n}" for split, n in zip(SPLITS, sizes.sum(axis=0), strict=True)),
            "client size": _spread(held),
            "training size": _spread(sizes[:, 0]),
            "smallest": f"client {self.names[small]}: "
            + ", ".join(f"{split} {n}" for split, n in zip(SPLITS, sizes[small], strict=True)),
            **(self._label_facts() if self.classes else self._target_facts()),
            "recipe": ", ".join(f"{key}={value}" for key, value in _flatten(shown)) or "none",
        }
        lines = []
        for name, fact in facts.items():
            lines += wrap(
                fact, 80, initial_indent=f"{name:<15}", subsequent_indent=" " * 15, max_lines=4, placeholder=" ..."
            )
        return "\n".join(lines)

    def listing(self) -> str:
        """Who holds how much of what: a line for each client, with the samples of each class if these are few."""
        sizes = np.stack([self.sizes(split) for split in SPLITS], axis=1)
        heads, columns = [*SPLITS], [*sizes.T]
        if 0 < self.classes <= MOST_CLASSES:
            counts = np.sum([self.histogram(split) for split in SPLITS], axis=0)
            heads += [str(c)[:12] for c in self.recipe.get("classes") or [f"class {c}" for c in range(self.classes)]]
            columns += [*counts.T]
        names = [f"{name}{'' if i < self.trained else ' (unseen)'}" for i, name in enumerate(self.names)]
        wide = max(len(name) for name in ["client", *names])
        lines = [" ".join([f"{'client':<{wide}}", *(f"{head:>6}" for head in heads)])]
        for i, name in enumerate(names):
            cells = (f"{column[i]:>{max(6, len(head))}}" for head, column in zip(heads, columns, strict=True))
            lines.append(" ".join([f"{name:<{wide}}", *cells]))
        return "\n".join(lines)

    def _label_facts(self) -> dict[str, str]:
        counts = np.sum([self.histogram(split) for split in SPLITS], axis=0)  # [clients, classes]
        distance = label_distance(counts)
        return {
            "task": f"classification, {counted(self.classes, 'class', 'classes')}{self._class_names()}",
            "classes held": f"{_spread((counts > 0).sum(axis=1))} per client",
            "class holders": f"{_spread((counts > 0).sum(axis=0))} per class",
            "heterogeneity": f"mean {distance.mean():.2f}, max {distance.max():.2f} - total-variation distance of a "
            "client's labels to all labels (0 = alike, 1 = nothing shared)",
        }

    def _class_names(self) -> str:
        return f": {', '.join(map(str, names))}" if (names := self.recipe.get("classes")) else ""

    def _target_facts(self) -> dict[str, str]:
        y = self.y.detach().cpu().double().flatten()
        means = torch.stack([self.y[b0:b3].double().mean() for b0, _, _, b3 in self.bounds])
        between = float(means.std(correction=0))
        return {
            "task": f"regression, {counted(self.y[0].numel(), 'target')}",
            "targets": f"mean {float(y.mean()):.3g}, standard deviation {float(y.std(correction=0)):.3g}",
            "heterogeneity": f"{between:.3g} - standard deviation of the clients' mean targets",
        }


def label_distance(counts: Ints) -> NDArray[np.float64]:
    """Total-variation distance of each client's label distribution to the pooled one: [clients], from 0 to 1."""
    own = counts / counts.sum(axis=1, keepdims=True)
    pooled = counts.sum(axis=0) / counts.sum()
    distance: NDArray[np.float64] = 0.5 * np.abs(own - pooled).sum(axis=1)
    return distance


def guess(known: Ints, scored: Ints) -> NDArray[np.float64]:
    """What always answering the most frequent class of `known` scores on `scored`, both samples `[clients, classes]`.

    `[clients]`, NaN for clients without samples to score.
    """
    right = np.take_along_axis(scored, known.argmax(1)[:, None], 1)[:, 0]
    total = scored.sum(1)
    share: NDArray[np.float64] = np.where(total > 0, right / np.maximum(total, 1), np.nan)
    return share


def _spread(values: Ints) -> str:
    return f"min {values.min()}, median {np.median(values):g}, max {values.max()}"


def _flatten(record: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs = []
    for key, value in record.items():
        pairs += _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return pairs


def _names(names: Sequence[str] | None, clients: int) -> tuple[str, ...]:
    if clients == 0:
        raise CoterieError("a federation needs at least one client, got none")
    if names is None:
        return tuple(str(i) for i in range(clients))
    if len(names) != clients:
        raise CoterieError(f"{len(names)} names were given for {clients} clients")
    return tuple(str(name) for name in names)


def _require_share(what: str, share: float) -> None:
    if not 0 <= share < 1:
        raise CoterieError(f"{what} must be a share from 0 up to but not including 1, got {share}")


def deal(
    indices: Ints, val: float, test: float, rng: np.random.Generator, given: NDArray[np.integer[Any]] | None = None
) -> list[Ints]:
    """One client's indices shuffled and cut into train, val and test; training is never left empty.

    With `given` the test samples are those; so are the validation samples, where there are any.
    """
    if given is not None:
        train, validate, held = (indices[given[indices] == k] for k in range(len(SPLITS)))
        if len(validate):
            return [train, validate, held]
        return [*deal(train, val, 0, rng)[:2], held]
    shuffled = rng.permutation(indices)
    n_test = _held_out(len(shuffled), test)
    n_val = _held_out(len(shuffled) - n_test, val)
    n_train = len(shuffled) - n_test - n_val
    return np.split(shuffled, [n_train, n_train + n_val])


def _held_out(n: int, share: float) -> int:
    if share == 0 or n < 2:
        return 0
    return min(max(round(n * share), 1), n - 1)


def _client_order(clients: int, unseen: int, seed: int) -> Ints:
    """The original numbers of the clients in their new order: the seen ones rising, then the unseen ones rising."""
    if not 0 <= unseen < clients:
        raise CoterieError(f"unseen must leave at least one of the {clients} clients for training, got {unseen}")
    drawn = generator(seed, "unseen").permutation(clients)
    return np.concatenate([np.sort(drawn[unseen:]), np.sort(drawn[:unseen])])


def _tensor(value: Data, what: str) -> Tensor:
    """Whole numbers and booleans as int64, floats as float32 or float64, on the CPU."""
    if not isinstance(value, Tensor):
        value = _from_numpy(value, what)
    value = value.detach().cpu()
    if value.dtype in (torch.float32, torch.float64, torch.int64):
        return value
    if value.is_complex():
        raise CoterieError(f"{what} must hold real numbers, got {value.dtype}")
    return value.to(torch.float32 if value.is_floating_point() else torch.int64)


def _from_numpy(value: ArrayLike, what: str) -> Tensor:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise CoterieError(f"{what} is no regular array: {error}") from error
    if array.dtype.kind not in "biuf":
        raise CoterieError(f"{what} must hold numbers, got {array.dtype}")
    wanted = array.dtype.newbyteorder("=") if array.dtype.kind == "f" else np.dtype(np.int64)
    if wanted not in (np.float16, np.float32, np.float64, np.int64):
        wanted = np.dtype(np.float64)
    array = np.ascontiguousarray(array, dtype=wanted)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _stack(lists: Sequence[Sequence[Pair] | None], names: Sequence[str]) -> tuple[Tensor, Tensor, Ints]:
    """All samples client by client, and within a client list by list; and the sizes [clients, lists]."""
    xs: list[Tensor] = []
    ys: list[Tensor] = []
    sizes = np.zeros((len(names), len(lists)), dtype=np.int64)
    for i, name in enumerate(names):
        for k, pairs in enumerate(lists):
            if pairs is None:
                continue
            x, y = _pair(pairs[i], name)
            sizes[i, k] = len(x)
            if len(x) == 0:
                continue
            xs.append(x)
            ys.append(y)
            _check_alike(x, xs[0], "features", name)
            _check_alike(y, ys[0], "targets", name)
            if y.is_floating_point() != ys[0].is_floating_point():
                raise CoterieError(f"client {name} has {y.dtype} targets but earlier ones {ys[0].dtype}; use one kind")
        if sizes[i].sum() == 0:
            raise CoterieError(f"client {name} has no samples")
    return torch.cat(xs), torch.cat(ys), sizes


def _pair(pair: Pair, name: str) -> tuple[Tensor, Tensor]:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise CoterieError(f"client {name} must be a pair (x, y)")
    x, y = _tensor(pair[0], f"x of client {name}"), _tensor(pair[1], f"y of client {name}")
    if x.ndim == 0 or y.ndim == 0:
        raise CoterieError(f"client {name} must have arrays with one row per sample, got a single number")
    if len(x) != len(y):
        raise CoterieError(f"client {name} has {len(x)} samples in x but {len(y)} in y")
    return x, y


def _check_alike(data: Tensor, first: Tensor, what: str, name: str) -> None:
    if data.shape[1:] != first.shape[1:]:
        raise CoterieError(
            f"client {name} has {what} of shape {list(data.shape[1:])} but earlier ones have {list(first.shape[1:])}"
        )


def _check_rows(rows: Ints, samples: int, bounds: Ints, names: Sequence[str]) -> None:
    outside = np.flatnonzero((rows < 0) | (rows >= samples))
    if outside.size:
        name = names[_owner(bounds, outside[0])]
        raise CoterieError(f"client {name} is assigned sample {rows[outside[0]]} but there are {samples} samples")
    times = np.bincount(rows, minlength=samples)
    if times.max() > 1:
        twice = np.flatnonzero(rows == times.argmax())
        first, second = names[_owner(bounds, twice[0])], names[_owner(bounds, twice[1])]
        raise CoterieError(f"sample {times.argmax()} is assigned twice, to client {first} and to client {second}")


def _check_finite(data: Tensor, what: str, bounds: Ints, names: Sequence[str]) -> None:
    if not data.is_floating_point():
        return
    # Block by block: the mask of a whole image set would be another large array.
    for name, (start, _, _, stop) in zip(names, bounds, strict=True):
        rows = max(1, memory.BLOCK // max(data[0].numel(), 1))
        bad = sum(int((~torch.isfinite(data[k : min(k + rows, stop)])).sum()) for k in range(start, stop, rows))
        if bad:
            raise CoterieError(f"client {name} has {bad} NaN or infinite value(s) in {what}")


def _check_labels(y: Tensor, classes: int, bounds: Ints, names: Sequence[str]) -> None:
    bad = torch.nonzero((y < 0) | (y >= classes))
    if len(bad):
        row = int(bad[0])
        name = names[_owner(bounds, row)]
        raise CoterieError(f"client {name} has label {int(y[row])} but {classes} classes means 0 to {classes - 1}")


def _owner(bounds: Ints, row: int) -> int:
    return int(np.searchsorted(bounds[:, 3], row, side="right"))


def _task(x: Tensor, y: Tensor, classes: int | None) -> tuple[Tensor, int]:
    """The targets in their final type and the number of classes, 0 for regression."""
    if classes is not None and (isinstance(classes, bool) or not isinstance(classes, int)):
        raise CoterieError(f"classes is how many there are, a whole number, not {classes!r}")
    if y.is_floating_point() and classes:
        raise CoterieError(f"{classes} classes were given but y holds {y.dtype}; labels must be whole numbers")
    if y.is_floating_point() or classes == 0:
        # Targets take the features' precision: a loss over two precisions has no backward pass.
        return y.to(x.dtype if x.is_floating_point() else torch.float32), 0
    if y.ndim != 1:
        raise CoterieError(f"labels must be one number per sample, got y of shape {list(y.shape)}")
    if classes is None:
        return y, max(int(y.max()) + 1, 1)
    if classes < 0:
        raise CoterieError(f"classes must be positive, or 0 for regression, got {classes}")
    return y, classes
