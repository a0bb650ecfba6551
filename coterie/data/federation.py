"""The data of all clients in flat arrays, with pointers to who owns what."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from coterie import memory
from coterie.contract.tokens import IGNORED, per_token
from coterie.contract.tokens import counted as tokens_of
from coterie.contract.units import Unit
from coterie.data import codings, copies, groups, unlike
from coterie.data.arrays import Data, Pair, stacked, tensor
from coterie.data.checks import client_names, require_finite, require_labels, require_rows, require_share
from coterie.data.labels import doubts, labels_of
from coterie.data.partition import Ints, generator
from coterie.data.splits import SPLITS, client_order, deal, held_out
from coterie.data.summary import described, listed, task_in_words, tokens_in_words
from coterie.errors import CoterieError, counted, unknown


@dataclass(frozen=True, eq=False, repr=False)
class Federation:
    """Every client's samples, each client contiguous: first its training, then its validation, then its test samples.

    Clients 0..trained-1 take part in training; the others are unseen and only meet the finished models.
    """

    x: Tensor  # [N, ...] float32 or float64 features, or int64 tokens
    y: Tensor  # [N] int64 labels, [N, L] int64 with a class or IGNORED a token, or float targets [N] or [N, k]
    bounds: Ints  # [clients, 4]: client i trains on [b0, b1), validates on [b1, b2), tests on [b2, b3)
    trained: int
    classes: int  # 0 for regression
    names: tuple[str, ...]
    recipe: dict[str, Any]
    schedule: Ints | None = None  # [trained, 2]: rounds of arrival, rising, and of leaving; None: all are always there
    group: Ints | None = None  # [N] the group of each sample, where some belong together; None: each is on its own
    unit: Unit | None = None  # of float targets that models train on standardised; y itself is in the user's unit

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
        if self.group is not None and self.group.shape != (len(self.x),):
            raise CoterieError(f"group has shape {list(self.group.shape)}, expected [{len(self.x)}]")
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
        group: Sequence[ArrayLike] | Mapping[str, ArrayLike] | None = None,
    ) -> Federation:
        """From one (x, y) per client, numpy or torch: a list, with `names` if they have any, or {name: (x, y)}.

        Whole-number y are labels, float y regression targets, whatever their values; with `classes`, y `[n, L]` are
        the classes of tokens, -100 where none is asked for. `classes=0` reads whole numbers
        as targets too, `classes=3` says that labels are 0, 1 and 2. Without it the labels that are there are the
        classes, in rising order, and `recipe["classes"]` names them where they are not 0, 1, 2, ... `test` is the share
        of a client's samples, `val` the share of what remains. `unseen` clients are drawn at random and moved behind
        the others; names keep the original order's numbers. `group` has one array of ids per client: samples of one id
        stay on one side of the split.
        """
        if isinstance(clients, Mapping):
            if isinstance(group, Mapping):
                if set(group) != set(clients):
                    raise CoterieError("group must name the same clients as the data do")
                group = [group[name] for name in clients]
            names, clients = [str(name) for name in clients], list(clients.values())
        names = client_names(names, len(clients))
        x, y, sizes = stacked([clients], names)
        stops = sizes[:, 0].cumsum()
        owned = [np.arange(stop - n, stop) for n, stop in zip(sizes[:, 0], stops, strict=True)]
        ids = None
        if group is not None:
            if isinstance(group, Mapping) or [len(np.atleast_1d(one)) for one in group] != sizes[:, 0].tolist():
                raise CoterieError("group must have one array for each client, with one id for each of its samples")
            ids = np.concatenate([np.asarray(one).astype(str) for one in group])
        return cls.from_assignment(
            x, y, owned, val=val, test=test, unseen=unseen, seed=seed, classes=classes, names=names, recipe=recipe,
            group=ids,
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
        group: ArrayLike | None = None,
        unit: Unit | None = None,
    ) -> Federation:
        """From one pool of samples and the sample indices of each client, as a partition returns them.

        `given [N]` says that sample n is in SPLITS[given[n]] already: test samples stay test samples, nothing is
        drawn for testing, and `val` is drawn from the training samples of clients that have no validation samples.
        `group [N]` are ids (numbers or texts): samples of one id stay on one side of what is drawn, whose sizes are as
        near to the shares as that allows.
        `unit` is how float targets are standardised for training; scores stay in their own unit.
        """
        names = client_names(names, len(assignment))
        require_share("val", val)
        require_share("test", test)
        if given is not None and len(given) != len(x):  # type: ignore[arg-type]
            raise CoterieError(f"x has {len(x)} samples but {len(given)} are given a split")  # type: ignore[arg-type]
        whose = None if group is None else groups.coded(group, len(x))  # type: ignore[arg-type]
        owned = [np.asarray(indices, dtype=np.int64) for indices in assignment]
        trained = None if whose is None or given is not None else groups.shared(whose, owned, val, test, held_out)
        parts = [
            deal(indices, val, test, generator(seed, "split", i), given, whose, trained)
            for i, indices in enumerate(owned)
        ]
        split: dict[str, Any] = {"val": val, "test": test, "unseen": unseen, "seed": seed}
        if given is not None:
            split = {"given": True, "val": val, "unseen": unseen, "seed": seed}
        if whose is not None:
            split["groups"] = int(whose.max()) + 1
            said = groups.notes(whose, parts, names, given is not None, trained)
            recipe = {**(recipe or {}), "notes": [*(recipe or {}).get("notes", ()), *said]} if said else recipe
        arrays = tensor(x, "x"), tensor(y, "y")
        return cls._arranged(*arrays, parts, names, unseen, seed, classes, recipe, split, whose, unit)

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
        unit: Unit | None = None,
    ) -> Federation:
        """From data that are split already: one (x, y) per client in each list, order kept, nothing shuffled."""
        names = client_names(names, len(train))
        for split, pairs in (("test", test), ("val", val)):
            if pairs is not None and len(pairs) != len(train):
                raise CoterieError(f"{split} has {counted(len(pairs), 'client')} but train has {len(train)}")
        x, y, sizes = stacked([train, val, test], names)
        cuts = np.concatenate([[0], sizes.ravel().cumsum()])
        pieces = [np.arange(start, stop) for start, stop in pairwise(cuts)]
        parts = [pieces[i : i + 3] for i in range(0, len(pieces), 3)]
        made = {"given": True, "unseen": unseen, "seed": seed}
        return cls._arranged(x, y, parts, names, unseen, seed, classes, recipe, made, unit=unit)

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
        group: Ints | None = None,
        unit: Unit | None = None,
    ) -> Federation:
        """Check the samples and bring them into client order; parts[i] = client i's (train, val, test) indices."""
        if len(x) != len(y):
            raise CoterieError(f"x has {len(x)} samples but y has {len(y)}")
        if x.ndim < 2:
            raise CoterieError(f"x must have shape [samples, features...], got {list(x.shape)}; try x[:, None]")
        order = client_order(len(parts), unseen, seed)
        names = tuple(names[i] for i in order)
        sizes = np.array([[len(piece) for piece in parts[i]] for i in order], dtype=np.int64)  # [clients, 3]
        if (empty := np.flatnonzero(sizes.sum(axis=1) == 0)).size:
            raise CoterieError(f"client {names[empty[0]]} has no samples")
        stops = sizes.ravel().cumsum().reshape(-1, 3)
        bounds = np.column_stack([stops[:, 0] - sizes[:, 0], stops])  # [clients, 4]
        rows = np.concatenate([piece for i in order for piece in parts[i]])
        require_rows(rows, len(x), bounds, names)
        x, y = memory.taken(x, torch.from_numpy(rows)), y[torch.from_numpy(rows)]
        require_finite(x, "x", bounds, names)
        require_finite(y, "y", bounds, names)
        declared = classes
        y, classes, called = labels_of(x, y, declared, exact=unit is not None)
        made = dict(recipe or {})
        if called:
            made["classes"] = list(called)
        if classes:
            require_labels(y, classes, bounds, names)
        if doubt := doubts(y, classes, made.get("classes", ())):
            made["notes"] = [*made.get("notes", ()), doubt]
            if declared is None and "data" not in made:  # made in Python, where nobody prints the notes
                warnings.warn(doubt, stacklevel=3)
        whole = {**made, "split": split}
        return cls(x, y, bounds, len(parts) - unseen, classes, names, whole,
                   group=None if group is None else group[rows], unit=None if classes else unit)

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
    def per_token(self) -> bool:
        """Whether every token has a class of its own."""
        return bool(self.classes) and per_token(self.y)

    @property
    def trained_on(self) -> Tensor:
        """What models learn to answer: y, standardised where the targets have a unit."""
        return self.y if self.unit is None else self.unit.standardised(self.y)

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

    def counted(self, split: str = "train") -> Ints:
        """What a client's means are divided by [clients]: samples or, where each has a class, counted tokens."""
        start, stop = self._edges(split)
        if not self.per_token:
            return stop - start
        ends = np.concatenate([[0], tokens_of(self.y).cumsum(0).cpu().numpy()])
        found: Ints = ends[stop] - ends[start]
        return found

    def histogram(self, split: str = "train") -> Ints:
        """Samples (or counted tokens) per client and class: [clients, classes]; no columns for regression."""
        start, stop = self._edges(split)
        if self.classes == 0:
            return np.zeros((self.clients, 0), dtype=np.int64)
        n = stop - start
        owner = np.repeat(np.arange(self.clients), n)
        rows = np.arange(n.sum()) + np.repeat(start - (n.cumsum() - n), n)
        labels = self.y.cpu().numpy()[rows]
        if self.per_token:
            there = labels != IGNORED
            owner, labels = np.repeat(owner, there.sum(1)), labels[there]
        cells = owner * self.classes + labels
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
        if self.unit is not None:
            digest.update(repr((self.unit.mean, self.unit.deviation)).encode())
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

    def looked_at(self) -> Federation:
        """The same with notes on what shows once samples are dealt: copies on two sides, and a client unlike others."""
        said = copies.notes(self.x, self.y, self.bounds, self.names)
        if not self.per_token:  # whose labels are words, which clients use as they speak
            said += codings.notes(self.x, self.bounds, self._counts(), self.names, self.recipe)
        said += unlike.notes(self.x, self.y, self.bounds, self.names, self.recipe.get("encoding"))
        return replace(self, recipe={**self.recipe, "notes": [*self.recipe.get("notes", ()), *said]}) if said else self

    # --- for people ---------------------------------------------------------------------------------------------------

    @property
    def task(self) -> str:
        """What is predicted, in words: the classes with their names, or the numbers and their unit."""
        if self.per_token:
            return tokens_in_words(self.classes, int(tokens_of(self.y).sum()), self.recipe)
        return task_in_words(self.classes, self.outputs, self.unit, self.recipe)

    def summary(self) -> str:
        """A description that fits one terminal screen (80 columns) however many clients there are."""
        return described(self.x, self.y, self.bounds, self._counts(), self.trained, self.names, self.task, self.recipe,
                         self.group)

    def listing(self) -> str:
        """Who holds how much of what: a line for each client, with the samples of each class if these are few."""
        return listed(self.bounds, self._counts(), self.trained, self.names, self.recipe.get("classes"))

    def _counts(self) -> Ints:
        """Samples per client and class over all splits: [clients, classes]."""
        counts: Ints = np.sum([self.histogram(split) for split in SPLITS], axis=0)
        return counts
