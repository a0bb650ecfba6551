"""What all readers share: they yield pieces of data, and `collect` checks, encodes and stores them.

A piece is some samples of one file or table. `collect` looks at every piece once and keeps its samples in memory, or,
when they are more than a quarter of what is free, in a file of the temporary folder (TMPDIR). What is wrong with
samples, labels and clients is gathered into one error; labels that cannot be read at all end the reading at once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie import memory
from coterie.data.features import Feature
from coterie.data.labels import alike, are_targets, name_of, written
from coterie.data.readers.refusals import EXAMPLES, MINUS_ONE, UNLABELLED, Problems
from coterie.data.readers.samples import Pile
from coterie.errors import CoterieError, counted

Array = NDArray[Any]

TRAIN, VAL, TEST = 0, 1, 2
SPLIT_WORDS = {"train": TRAIN, "training": TRAIN, "val": VAL, "valid": VAL, "validation": VAL, "dev": VAL,
               "test": TEST, "testing": TEST}
LARGEST_LABEL = 9999
MOST_WHOLE = 100
"""Most different whole numbers kept as floats that could have been meant as classes."""


@dataclass(frozen=True, eq=False)
class Source:
    """Samples before they are dealt to clients."""

    x: Tensor  # [N, ...]; lies in a file when the samples are many
    y: Tensor  # [N] or [N, k]; with a vocabulary [N, L]
    client: Array | None  # [N] ids (numbers or strings) when the data come with natural clients
    name: str
    split: Array | None = None  # [N] 0 train, 1 val, 2 test, when the data come split
    classes: tuple[str, ...] | None = None  # names of the classes, when the labels were names
    notes: tuple[str, ...] = ()  # what was left out or filled in, or should be looked at
    encoding: dict[str, Any] | None = None  # how a table became numbers: what its schema file would hold
    group: Array | None = None  # [N] ids of what must stay on one side of a split: patients, lesions, speakers
    features: tuple[Feature, ...] | None = None  # the columns that became x, where they have names
    vocabulary: int = 0  # the classes of a token, where y [N, L] has one for each


@dataclass(frozen=True)
class Places:
    """Where samples stand in a file, as an editor or numpy counts them: `line 7 of patients.csv`."""

    where: str
    unit: str  # line, row, or index where the first one is 0
    numbers: Sequence[int] | Array

    def __call__(self, k: int) -> str:
        return f"{self.unit} {int(self.numbers[k])} of {self.where}"

    def only(self, rows: Array) -> Places:
        """Those of some samples: a mask, or their numbers."""
        return Places(self.where, self.unit, np.asarray(self.numbers)[rows])


@dataclass
class Piece:
    """Some samples of one file: x [n, ...], y [n] or [n, k] of numbers or of names."""

    x: Array
    y: Array
    where: str
    client: Array | str | None = None  # [n] of names, or one for all
    split: Array | int | None = None  # [n] of TRAIN, VAL, TEST, or one for all
    group: Array | None = None  # [n] of ids
    places: Places | None = None  # where each sample stands; without it, `where` is all that is known


def collect(
    pieces: Iterable[Piece], name: str, problems: Problems, *, skip: bool = False,
    classes: str | Sequence[str] | None = None, clients: Iterable[str] = (), shape: str | None = None,
    regression: bool | None = None, notes: Sequence[str] = (),
) -> Source:
    """Check, encode and store the pieces of a data set.

    x become what `features` makes of them, and y what `encode_labels` makes of them. `clients` are names that must hold
    samples. With `skip` the samples that cannot be used are left out, and the notes say so.
    """
    pile, found = Pile(), _Found(problems, skip)
    wanted = _shape(shape)
    try:
        for piece in pieces:
            block = found.take(piece, wanted)
            if block is not None and len(block):
                pile.add(block)
        for client in clients:
            if client not in found.names:
                problems.add("clients have no samples", client)
        if not found.ys:
            said = [*problems.sentences(), *dict.fromkeys(problems.remedies)]
            raise problems.error(f"{name} holds no samples" + (f": {'; '.join(said)}." if said else "."))
        source = found.source(pile, name, classes, regression)
    finally:
        pile.close()
    notes = [*notes, *([] if regression else _explained(source.y)), *_spelled(source.classes or ())]
    return replace(source, notes=(*notes, *problems.settle(skip, name)))


def _spelled(classes: Sequence[str]) -> list[str]:
    """A note where classes differ in case or blanks alone."""
    pairs = [" and ".join(f"'{name}'" for name in each) for each in alike(classes)]
    return [f"labels that differ in case or blanks alone are different classes: {'; '.join(pairs[:4])}; write them "
            "alike if they are one"] if pairs else []


def _explained(y: Tensor) -> list[str]:
    """A note where numbers to predict could have been meant as classes."""
    if not y.is_floating_point() or y.ndim > 1 or not bool((y == y.floor()).all()):
        return []
    found = torch.unique(y)
    if not 1 < len(found) <= MOST_WHOLE:
        return []
    first, last = written(float(found[0])), written(float(found[-1]))
    return [f"the labels are whole numbers kept as floats ({len(found)} different ones, from {first} to {last}), so "
            "they are numbers to predict; regression=false makes them classes"]


class _Found:
    """What is known of the samples so far, beside their features."""

    def __init__(self, problems: Problems, skip: bool) -> None:
        self.problems, self.skip = problems, skip
        self.like: tuple[tuple[int, ...], torch.dtype] | None = None
        self.names: dict[str, int] = {}
        self.ys: list[Array] = []
        self.owners: list[Array] = []
        self.splits: list[Array] = []
        self.groups: list[Array] = []
        self.places: list[Places | None] = []
        self.stops: list[int] = []  # how many samples there are up to the end of each piece
        self.named = self.split = self.grouped = False

    def take(self, piece: Piece, shape: tuple[int, ...] | None) -> Tensor | None:
        """The features of the samples that can be used, `[n, ...]`; their labels, owners and splits are kept."""
        x, y, n, problems = piece.x, piece.y, len(piece.x), self.problems
        if len(y) != n:
            problems.add("files have unequal numbers of samples and labels", piece.where, _one(piece.client),
                         f"{n} samples, {len(y)} labels")
            return None
        if n == 0:
            return None
        problems.totals["samples"] += n
        good = np.ones(n, dtype=bool)
        try:
            block = features(x, shape)
        except CoterieError as error:
            problems.add("files have unusable samples", piece.where, _one(piece.client), str(error))
            return None
        if self.like is None:
            self.like = (tuple(block.shape[1:]), block.dtype)
        if (tuple(block.shape[1:]), block.dtype) != self.like:
            there, here = _described(self.like), _described((tuple(block.shape[1:]), block.dtype))
            problems.add("samples have another shape", piece.where, _one(piece.client), f"{here} instead of {there}", n)
            return None
        if block.is_floating_point() and x.dtype != np.uint8:
            finite = torch.isfinite(block).flatten(1).all(1).numpy()
            self._strike(good, finite, piece, "samples hold NaN or infinite values")
        if y.dtype.kind == "f":
            self._strike(good, np.asarray(~np.isinf(y).reshape(n, -1).any(1)), piece, "samples have an infinite label")
        self._strike(good, _labelled(y), piece, UNLABELLED)
        if piece.group is not None and piece.group.dtype.kind in "OU":
            told = np.array([value is not None and str(value).strip() != "" for value in piece.group], dtype=bool)
            self._strike(good, told, piece, "samples have no group")
        owners = self._owners(piece, n)
        if piece.split is not None:
            self.split = True
        split = np.broadcast_to(np.asarray(TRAIN if piece.split is None else piece.split, dtype=np.int8), n)
        self.grouped |= piece.group is not None
        group = np.zeros(n, np.int8) if piece.group is None else np.asarray(piece.group)
        places = piece.places
        if not good.all():
            block, y, owners, split = block[torch.from_numpy(good)], y[good], owners[good], split[good]
            group, places = group[good], None if places is None else places.only(good)
        if not len(y):
            return None
        self.groups.append(group)
        self.places.append(places)
        self.stops.append((self.stops[-1] if self.stops else 0) + len(y))
        self.ys.append(np.asarray(y))
        self.owners.append(owners)
        self.splits.append(split.copy())
        return block

    def _strike(self, good: Array, fine: Array, piece: Piece, kind: str) -> None:
        bad = np.flatnonzero(~fine)
        if not len(bad):
            return
        good[bad] = False
        if piece.places is not None:
            several = piece.client[bad].tolist() if isinstance(piece.client, np.ndarray) else [piece.client] * len(bad)
            owners = Counter(None if owner is None else str(owner) for owner in several)
            self.problems.add_counted(kind, owners, [piece.places(k) for k in bad[:EXAMPLES].tolist()])
        elif isinstance(piece.client, np.ndarray):
            for client, count in Counter(str(c) for c in piece.client[bad]).items():
                self.problems.add(kind, piece.where, client, count=count)
        else:
            self.problems.add(kind, piece.where, piece.client, count=len(bad))

    def _owners(self, piece: Piece, n: int) -> Array:
        if piece.client is None:
            return np.full(n, -1, dtype=np.int64)
        self.named = True
        if isinstance(piece.client, str):
            return np.full(n, self.names.setdefault(piece.client, len(self.names)), dtype=np.int64)
        if piece.client.dtype.kind == "O":  # as an array of texts, each would take the room of the longest
            said = [str(name) for name in piece.client]
            for name in sorted(set(said)):
                self.names.setdefault(name, len(self.names))
            return np.array([self.names[name] for name in said], dtype=np.int64)
        distinct, inverse = np.unique(np.asarray(piece.client).astype(str), return_inverse=True)
        codes = np.array([self.names.setdefault(str(name), len(self.names)) for name in distinct], dtype=np.int64)
        return codes[inverse]

    def source(
        self, pile: Pile, name: str, classes: str | Sequence[str] | None, regression: bool | None
    ) -> Source:
        """All of it; the notes are still to come."""
        owner, split, group = np.concatenate(self.owners), np.concatenate(self.splits), np.concatenate(self.groups)
        if self.named and (owner < 0).any():
            self.problems.add("samples belong to no client", count=int((owner < 0).sum()))
        y, names, known = encode_labels(self.ys, classes, regression, self.problems, self._said(owner), self._at)
        good = known & ((owner >= 0) if self.named else True)
        if self.split and not (good & (split == TRAIN)).any():
            raise CoterieError("; ".join([f"{name} holds no training samples", *self.problems.sentences()]) + ".")
        if self.split:
            good &= self._checked_split(y, owner, split, y.dtype.kind == "i", good, names)
        x = pile.tensor()
        if not good.all():
            if not self.skip:
                self.problems.settle(False, name)
            rows = torch.from_numpy(np.flatnonzero(good))
            if not len(rows):
                raise self.problems.error(f"{name} holds no usable samples: {'; '.join(self.problems.sentences())}.")
            x, y, owner, split, group = memory.taken(x, rows), y[good], owner[good], split[good], group[good]
        client = None
        if self.named:
            client = _ids(list(self.names))[owner]
        return Source(x, torch.from_numpy(y), client, name, split if self.split else None, names,
                      group=group if self.grouped else None)

    def _at(self, row: int) -> str:
        """Where a sample stands; nothing where that is not known."""
        k = bisect_right(self.stops, row)
        places = self.places[k]
        return "" if places is None else places(row - (self.stops[k - 1] if k else 0))

    def _said(self, owner: Array) -> Callable[[int], str | None]:
        names = list(self.names)
        return lambda row: names[owner[row]] if owner[row] >= 0 else None

    def _checked_split(
        self, y: Array, owner: Array, split: Array, labels: bool, good: Array, called: Sequence[str] | None
    ) -> Array:
        """Which samples a given split leaves usable: each client trains, and no class is met in testing alone."""
        fine: Array = np.ones(len(y), dtype=bool)
        if self.named:
            names = list(self.names)
            trains = np.bincount(owner[good & (split == TRAIN)], minlength=len(names))
            for lacking in np.flatnonzero(trains == 0):
                held = int((owner == lacking).sum())
                if held:
                    self.problems.add("clients have no training samples", names[lacking], why=f"{held} others")
                    fine[owner == lacking] = False
        if labels:
            seen = np.unique(y[good & fine & (split == TRAIN)])
            strange = ~np.isin(y, seen) & good & fine
            for row in np.flatnonzero(strange).tolist():
                name = called[y[row]] if called else y[row]
                self.problems.add("samples have a class that no training sample has", self._at(row),
                                  self._said(owner)(row), f"class {name}")
            fine &= ~strange
        return fine


def features(x: Array, shape: tuple[int, ...] | None = None) -> Tensor:
    """Samples as tensors `[n, ...]`, reshaped where `shape` is given.

    uint8 are pixels and become float32 from -1 to 1: images `[n, H, W, C]` or `[n, H, W]` channels first, flat ones
    `[n, F]` as they lie. Other whole numbers are tokens (int64); floats become float32 or, from 8 bytes on, float64.
    """
    if x.dtype == np.uint8:
        pixels = torch.from_numpy(x if x.flags.writeable else x.copy())
        if x.ndim == 3:
            pixels = pixels.unsqueeze(1)  # [n, 1, H, W]
        elif x.ndim == 4:
            if x.shape[3] > 4:
                raise CoterieError(f"uint8 images must be [N, H, W, C] with at most 4 channels, got {list(x.shape)}")
            pixels = pixels.permute(0, 3, 1, 2)  # [n, C, H, W]
        # In place, so that a large image set is held once.
        block = from_pixels(pixels.to(torch.float32, memory_format=torch.contiguous_format), 255)
    else:
        block = numbers(x, "x")
    if block.ndim < 2:
        block = block.unsqueeze(1)
    if shape is not None:
        if block[0].numel() != int(np.prod(shape)):
            raise CoterieError(f"a sample has {block[0].numel()} values, which is no shape {list(shape)}")
        block = block.reshape(len(block), *shape)
    return block


def from_pixels(values: Tensor, top: int) -> Tensor:
    """Pixels from 0 to `top`, as float32, brought to -1 to 1 in place."""
    return values.div_(top).sub_(0.5).div_(0.5)


def numbers(array: Array, what: str) -> Tensor:
    """Whole numbers as int64, floats as float32 or, from 8 bytes on, as float64."""
    if array.dtype.kind in "biu":
        return torch.from_numpy(array.astype(np.int64))
    if array.dtype.kind != "f":
        raise CoterieError(f"{what} must hold numbers, got {array.dtype}")
    return torch.from_numpy(array.astype(np.float64 if array.dtype.itemsize >= 8 else np.float32))


def encode_labels(
    pieces: Sequence[Array], classes: str | Sequence[str] | None, regression: bool | None, problems: Problems,
    client: Callable[[int], str | None] = lambda row: None, at: Callable[[int], str] = lambda row: "",
) -> tuple[Array, tuple[str, ...] | None, Array]:
    """Labels as numbers, the classes' names if they had names, and which of them are known.

    Whole numbers from 0 stay as they are, and -1 stands for none. What are targets, `are_targets` says; `classes` and
    `regression=False` name labels as such. Names are numbered in sorted order, or in the order of `classes`; without
    `classes`, names that are whole numbers are taken as such.
    """
    if classes and regression:
        raise CoterieError("classes names labels and regression=true makes targets of them; leave one of them out.")
    numeric = all(piece.dtype.kind in "biuf" for piece in pieces)
    if len({piece.shape[1:] for piece in pieces}) > 1:
        raise CoterieError("labels have unequal shapes: "
                           + ", ".join(str(list(s)) for s in sorted({piece.shape[1:] for piece in pieces})))
    floating = numeric and any(piece.dtype.kind == "f" for piece in pieces)
    several = any(piece.ndim > 1 for piece in pieces)
    if numeric and are_targets(floating, several, False if classes else regression):
        y = np.concatenate(pieces)
        return y.astype(np.float64 if y.dtype.itemsize >= 8 else np.float32), None, np.ones(len(y), dtype=bool)
    if numeric and not classes and not floating and not several:
        y = np.concatenate(pieces).astype(np.int64)
        known = (y >= 0) & (y <= LARGEST_LABEL)
        if len(none := np.flatnonzero(y == -1).tolist()):
            problems.add_counted(MINUS_ONE, Counter(client(row) for row in none), list(filter(None, map(at, none[:4]))))
        for row in np.flatnonzero(~known & (y != -1)).tolist():
            problems.add(f"samples have a label outside 0 to {LARGEST_LABEL}", at(row), client(row), str(y[row]))
        return y, None, known
    if regression:
        raise CoterieError("regression needs labels that are numbers.")
    if several:
        raise CoterieError("labels that are names must be one a sample.")
    said = np.concatenate([_texts(piece) for piece in pieces])
    given = tuple(class_list(classes) or sorted(set(said)))
    if len(set(given)) != len(given):
        raise CoterieError(f"classes names one class twice: {', '.join(given)}.")
    if not classes and all(_is_whole(label) and int(label) <= LARGEST_LABEL for label in given):
        return said.astype(np.int64), None, np.ones(len(said), dtype=bool)
    if len(given) > LARGEST_LABEL + 1:
        raise CoterieError(f"the labels are {len(given)} different names, e.g. '{given[0]}'; is this the label?")
    place = {label: k for k, label in enumerate(given)}
    y = np.array([place.get(label, -1) for label in said], dtype=np.int64)
    for row in np.flatnonzero(y < 0).tolist():
        problems.add("samples have a class that is not in classes", at(row), client(row), f"class {said[row]}")
    return np.maximum(y, 0), given, y >= 0


def class_list(classes: str | Sequence[str] | None) -> list[str] | None:
    """The names that the option `classes` gives; None without any."""
    if not classes:
        return None
    return [part.strip() for part in classes.split(",")] if isinstance(classes, str) else list(classes)


def listed_names(given: Any) -> list[str]:
    """The names that an option lists, as text with commas or as a list."""
    names = given.split(",") if isinstance(given, str) else given
    if not isinstance(names, (list, tuple)) or not names or not all(str(word).strip() for word in names):
        raise CoterieError(f"class_names must be names with commas between, not '{given}'.")
    return [str(word).strip() for word in names]


def with_class_names(source: Source, names: Sequence[str], where: str) -> Source:
    """The source whose classes are called so: those that its labels number, in their order.

    Labels that are names keep them: another order of these is what `classes` says.
    """
    if source.y.is_floating_point():
        raise CoterieError(f"{where} has {counted(len(names), 'class name')}, but the labels are targets of a "
                           "regression.")
    if len(set(names)) != len(names):
        raise CoterieError(f"class_names names one class twice: {', '.join(names)}.")
    if source.classes is not None and not all(_is_whole(name) for name in source.classes):
        raise CoterieError(f"the labels in {where} are names already ({', '.join(source.classes[:4])}); "
                           f"classes={','.join(source.classes[:4])},... fixes their order.")
    there = int(source.y.max()) + 1 if source.classes is None else len(source.classes)
    counted_from_0 = source.classes is None or source.classes == tuple(str(k) for k in range(there))
    if there > len(names) or not counted_from_0:  # a newcomer's numbers are looked up by the same rule, from 0
        last = source.classes[-1] if source.classes is not None else there - 1
        raise CoterieError(f"class_names has {counted(len(names), 'name')}, for the labels 0 to {len(names) - 1}, but "
                           f"the labels in {where} go up to {last}; write names in place of the numbers, or give "
                           "a name for every number from 0 on.")
    return replace(source, classes=tuple(names))


def cut(n: int, values: int) -> Iterator[slice]:
    """Slices of n samples of so many values each, a block at a time."""
    rows = max(1, memory.BLOCK // max(values, 1))
    return (slice(first, min(first + rows, n)) for first in range(0, n, rows))


def names(values: Sequence[str | None]) -> Array:
    """An array of names that share their text."""
    made = np.empty(len(values), dtype=object)
    made[:] = values
    return made


def has_texts(values: Any) -> bool:
    """Whether texts are among nested values: numpy's array of them would have room for the longest one everywhere."""
    if isinstance(values, np.ndarray):
        return values.dtype.kind in "SU" or (values.dtype.kind == "O" and has_texts(values.tolist()))
    if not isinstance(values, (list, tuple)):
        return False
    kinds = set(map(type, values))
    return bool(kinds & {str, bytes}) or (bool(kinds & {list, tuple, np.ndarray}) and any(map(has_texts, values)))


def _labelled(y: Array) -> Array:
    if y.dtype.kind == "f":
        return np.asarray(~np.isnan(y).reshape(len(y), -1).any(1))
    if y.dtype.kind == "O":
        return np.array([v is not None and v == v and str(v).strip() != "" for v in y], dtype=bool)
    return np.ones(len(y), dtype=bool) if y.dtype.kind != "U" else np.char.strip(y) != ""


def _texts(piece: Array) -> Array:
    if piece.dtype.kind == "f":
        return names([name_of(v) for v in piece.tolist()])
    return names([str(v).strip() for v in piece.tolist()])


def _is_whole(text: str) -> bool:
    return text.isascii() and text.isdecimal() and str(int(text)) == text


def _ids(given: list[str]) -> Array:
    """Client names as numbers where all of them are, so that 2 comes before 10."""
    if all(_is_whole(name) and len(name) < 18 for name in given):
        return np.array([int(name) for name in given], dtype=np.int64)
    return names(given)


def _shape(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = text.replace("x", ",").split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise CoterieError(f"shape must be whole numbers such as 1,28,28, not '{text}'.")
    return tuple(int(part) for part in parts)


def _described(like: tuple[tuple[int, ...], torch.dtype]) -> str:
    return f"{list(like[0])} {str(like[1]).removeprefix('torch.')}"


def _one(client: Array | str | None) -> str | None:
    return client if isinstance(client, str) else None
