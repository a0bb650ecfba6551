"""Archives of numpy arrays: `.npz` files with x, y and client, and the per-client files that PFLlib writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import IO, Any
from zipfile import ZipFile

import numpy as np
import torch

from coterie import memory
from coterie.data.features import features_of
from coterie.data.readers import pickles
from coterie.data.readers.array_notes import notes_on_x, notes_on_y
from coterie.data.readers.formats import Format
from coterie.data.readers.pieces import (
    SPLIT_WORDS,
    TEST,
    TRAIN,
    VAL,
    Array,
    Piece,
    Places,
    Source,
    collect,
    cut,
    has_texts,
    listed_names,
    with_class_names,
)
from coterie.data.readers.pieces import names as names_of
from coterie.data.readers.refusals import Problems, reading, refuse_bomb
from coterie.data.readers.tables.suspicious import unused_groups, words_of
from coterie.errors import CoterieError, NoLabels, counted, unknown
from coterie.files import opened_bytes, read_json

KNOWN = ("x", "y", "client", "split")
GROUP = "group"
CLASS_NAMES, CLIENT_NAMES = ("class_names", "label_names", "target_names", "classes"), ("client_names",)
FEATURE_NAMES = ("feature_names", "columns")
"""Arrays of texts that name what stands as a number elsewhere; the first that is there is taken."""
KIND = "an .npz file of plain arrays"
MOST_ARRAYS = 1000


def npz(
    path: str | Path, *, skip: bool = False, classes: str | None = None, shape: str | None = None,
    regression: bool | None = None, group: str | None = None, class_names: str | None = None,
) -> Source:
    """A file with arrays `x`, `y` and optionally `client`, `split` and `group`; other arrays in it are ignored.

    `group` names another array than `group`: samples of one value stay on one side of a split. `class_names` and
    `client_names`, arrays of texts, are the names of the classes and clients that `y` and `client` number from 0.

    uint8 x are images [N, H, W, C] or [N, H, W] (or flat pixels [N, F]): they become channels-first float32 from -1 to
    1. Other whole numbers are tokens and become int64; floats are kept. `split` holds train, val or test, or 0, 1, 2.
    """
    path = Path(path)
    if not path.is_file():
        raise CoterieError(f"there is no file '{path}'")
    with ExitStack() as stack:
        with reading(path, KIND):
            archive = stack.enter_context(_archive(path))
            listed = sorted(name.removesuffix(".npy") for name in archive.namelist())
            if group is not None and group not in listed:
                raise unknown(f"array of '{path}'", group, listed)
            whose = group or GROUP
            members = {name: _Member(archive, name) for name in dict.fromkeys((*KNOWN, whose)) if name in listed}
            called = {kind[0]: next((names for name in kind if (names := _texts(archive, name)) is not None), None)
                      for kind in (CLASS_NAMES, CLIENT_NAMES, FEATURE_NAMES)}
        for key in ("x", "y"):
            if key not in members:
                kind = NoLabels if key == "y" else CoterieError
                raise kind(f"'{path}' has no array '{key}'; it has {', '.join(listed) or 'none'}")
        with reading(path, KIND):
            small = {name: members[name].whole() for name in (*KNOWN[1:], whose) if name in members}
        if small["y"].ndim == 2 and small["y"].shape[1] == 1 and small["y"].dtype.kind in "biuSU":
            small["y"] = small["y"][:, 0]  # labels in a column, as many programs keep them
        x = members["x"]
        for key, array in small.items():
            if array.shape[:1] != x.shape[:1] or array.ndim == 0:
                raise CoterieError(f"'{path}' has x of shape {list(x.shape)} but {key} of shape {list(array.shape)}")
        for key in ("client", "split", whose):
            if key in small and small[key].ndim != 1:
                raise CoterieError(f"'{path}' has {key} of shape {list(small[key].shape)}; expected one a sample")
        if x.dtype.kind not in "biuf":
            raise CoterieError(f"x in '{path}' must hold numbers, got {x.dtype}")
        if x.dtype == np.uint8 and len(x.shape) == 4 and x.shape[3] > 4:
            raise CoterieError(f"uint8 images must be [N, H, W, C] with at most 4 channels, got {list(x.shape)}")
        if x.shape[0] == 0:
            raise CoterieError(f"'{path}' holds no samples")
        split = split_codes(small["split"], str(path)) if "split" in small else None

        def pieces() -> Iterator[Piece]:
            first = 0
            for block in x.blocks(path):
                here = slice(first, first + len(block))
                client = None if owners is None else owners[here]
                yield Piece(block, small["y"][here], path.name, client, None if split is None else split[here],
                            small[whose][here] if whose in small else None,
                            Places(path.name, "index", np.arange(here.start, first + len(block))))
                first += len(block)

        owners = _named(small.get("client"), called["client_names"], path)
        told = called["class_names"] if class_names is None else listed_names(class_names)
        words = small["y"].dtype.kind in "SUO"
        if class_names is None and (regression or classes or small["y"].dtype.kind == "f"):
            told = None  # an array of names beside targets, or where the user named the classes
        source = collect(pieces(), path.stem, Problems(), skip=skip, shape=shape, regression=regression,
                         classes=classes or (told if words else None))
        if whose not in small:
            n = len(small["y"])
            known = (*KNOWN, *CLASS_NAMES, *FEATURE_NAMES)
            more = {name: ids for name in listed if name not in known and (ids := _ids(archive, name, n)) is not None}
            clients = 0 if source.client is None else len(set(source.client.tolist()))
            source = replace(source, notes=(*source.notes, *unused_groups(more, clients)))
        if source.client is None and (like := [name for name in listed if name not in KNOWN and _names_clients(name)]):
            source = replace(source, notes=(*source.notes, f"'{path.name}' has no array 'client', and '{like[0]}' was "
                                            "not read; if it says whose the samples are, call it 'client'"))
        columns = called["feature_names"] or ()
        targets = notes_on_y(small["y"], asked=bool(regression)) if source.y.is_floating_point() else []
        samples = notes_on_x(source.x, x.shape, x.dtype, columns) if shape is None else []
        source = replace(source, notes=(*source.notes, *targets, *samples))
        if columns and source.x.ndim == 2 and len(columns) == source.x.shape[1]:
            source = replace(source, features=features_of(source.x, columns))
        return source if told is None or words else with_class_names(source, told, f"'{path}'")


@contextmanager
def _archive(path: Path) -> Iterator[ZipFile]:
    with opened_bytes(path) as file, ZipFile(file) as archive:
        held = archive.infolist()
        if len(held) > MOST_ARRAYS:
            raise ValueError(f"{len(held)} arrays, at most {MOST_ARRAYS} are read")
        refuse_bomb(os.fstat(file.fileno()).st_size, sum(one.file_size for one in held))
        yield archive


def arrays(path: Path) -> list[str]:
    """The names of the arrays in a file; none where it cannot be read."""
    try:
        with _archive(path) as archive:
            return sorted(name.removesuffix(".npy") for name in archive.namelist())
    except Exception:  # damaged: whoever reads it says so
        return []


def _texts(archive: ZipFile, name: str) -> list[str] | None:
    """An array of texts in one dimension; None where there is no such array, or it is something else."""
    if f"{name}.npy" not in archive.namelist():
        return None
    with archive.open(f"{name}.npy") as file:
        shape, _, dtype = _header(file)
    if len(shape) != 1 or dtype.kind not in "SU" or not shape[0]:
        return None
    whole = _Member(archive, name).whole()
    return [word.decode("utf-8", "replace") if isinstance(word, bytes) else str(word) for word in whole.tolist()]


def _names_clients(name: str) -> bool:
    """Whether an array's name seems to mean the clients."""
    return name not in CLIENT_NAMES and bool({"client", "clients", "site", "sites"} & set(words_of(name)))


def _ids(archive: ZipFile, name: str, samples: int) -> Array | None:
    """An array of whole numbers or texts, one for each sample; None where it is something else."""
    try:
        with archive.open(f"{name}.npy") as file:
            shape, _, dtype = _header(file)
        return _Member(archive, name).whole() if shape == (samples,) and dtype.kind in "iuU" else None
    except Exception:  # nobody asked for this array, so its damage is nobody's business
        return None


def _named(client: Array | None, names: list[str] | None, path: Path) -> Array | None:
    """The clients by the names that an array gives to their numbers."""
    if client is None or names is None or client.dtype.kind not in "iu":
        return client
    if client.size and not (client.min() >= 0 and client.max() < len(names)):
        raise CoterieError(f"'{path}' has {counted(len(names), 'name')} in client_names, but a client "
                           f"{int(client.min() if client.min() < 0 else client.max())}; they are counted from 0.")
    if len(set(names)) != len(names):
        raise CoterieError(f"client_names in '{path}' names one client twice.")
    return names_of(names)[client]  # an array of texts would have room for the longest in each sample


def split_codes(said: Array, where: str) -> Array:
    """Words or numbers as 0 train, 1 val, 2 test."""
    if said.dtype.kind in "biu":
        if len(strange := np.flatnonzero((said < TRAIN) | (said > TEST))):
            raise CoterieError(f"split in {where} must be 0 (train), 1 (val) or 2 (test), got {int(said[strange[0]])} "
                               f"at index {strange[0]}.")
        return said.astype(np.int8)
    words = [str(word).strip().lower() for word in said.tolist()]
    for k, word in enumerate(words):
        if word not in SPLIT_WORDS:
            raise CoterieError(f"split in {where} must be train, val or test, got '{word}' at index {k}.")
    return np.array([SPLIT_WORDS[word] for word in words], dtype=np.int8)


class _Member:
    """One array of an archive, its header read and checked."""

    def __init__(self, archive: ZipFile, name: str, objects: bool = False) -> None:
        self.archive, self.name = archive, f"{name}.npy"
        with archive.open(self.name) as file:
            self.shape, self.fortran, self.dtype = _header(file)
            header = file.tell()
        if self.dtype.kind == "O" and objects:
            return
        if self.dtype.hasobject or self.dtype.kind not in "biufSU":
            raise ValueError(f"{name} holds {self.dtype}")
        there, wanted = archive.getinfo(self.name).file_size - header, prod(self.shape) * self.dtype.itemsize
        if there != wanted:
            raise ValueError(f"{name} of shape {list(self.shape)} needs {wanted} bytes and has {there}")

    def whole(self) -> Array:
        size = prod(self.shape) * self.dtype.itemsize
        if size > memory.free(torch.device("cpu")) // 4:
            raise ValueError(f"{self.name} takes {size} bytes, more than a quarter of the free memory")
        with self.archive.open(self.name) as file:
            _header(file)
            return self._array(file.read(), self.shape)

    def blocks(self, path: Path) -> Iterator[Array]:
        """The array [N, ...] some rows at a time."""
        with self.archive.open(self.name) as file:
            if self.fortran and len(self.shape) > 1:  # a row's values lie apart
                with reading(path, KIND):
                    whole = self.whole()
                yield from (whole[rows] for rows in cut(len(whole), prod(self.shape[1:])))
                return
            _header(file)
            width = prod(self.shape[1:]) * self.dtype.itemsize
            for rows in cut(self.shape[0], prod(self.shape[1:])):
                with reading(path, KIND):
                    n = rows.stop - rows.start
                    block = self._array(file.read(n * width), (n, *self.shape[1:]))
                yield block

    def pickled(self) -> Any:
        with self.archive.open(self.name) as file:
            _header(file)
            return pickles.loads(file.read(), self.archive.getinfo(self.name).compress_size)

    def _array(self, data: bytes, shape: tuple[int, ...]) -> Array:
        flat = np.frombuffer(bytearray(data), self.dtype)
        if self.dtype.kind == "U":
            codes = flat.view(np.dtype(np.uint32).newbyteorder(self.dtype.byteorder))
            if ((codes > 0x10FFFF) | ((codes >= 0xD800) & (codes < 0xE000))).any():
                raise ValueError("a text that is none")
        return flat.reshape(shape, order="F" if self.fortran else "C").astype(self.dtype.newbyteorder("="), copy=False)


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"arrays of format {version} are not known")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"{shape} is no shape")
    return shape, fortran, dtype


# -- PFLlib ------------------------------------------------------------------------------------------------------------


def pfllib(
    path: str | Path, *, skip: bool = False, shape: str | None = None, regression: bool | None = None
) -> Source:
    """The folder that PFLlib writes, `train/0.npz`, `test/0.npz`, ..., `config.json`; or one of its files.

    Each file holds a pickled dictionary of x and y, which is read without running any code. A client is named by its
    number; the given split into train and test is kept. With one client's train file its test file is read too.
    """
    path = Path(path)
    problems = Problems()
    files = _client_files(path, problems)
    if not files:
        raise CoterieError(f"'{path}' has no files train/0.npz, train/1.npz, ... as PFLlib writes them.")
    problems.totals["files"] = len(files)

    def pieces() -> Iterator[Piece]:
        for file, client, split in files:
            where = f"{file.parent.name}/{file.name}"
            try:
                with reading(where, "a file of PFLlib"):
                    x, y = _pair(file)
            except CoterieError as error:
                problems.add("files cannot be read", where, client, str(error).rpartition(": ")[2])
                continue
            if len(x) != len(y):
                problems.add("files have unequal numbers of samples and labels", where, client, f"{len(x)}, {len(y)}")
                continue
            for rows in cut(len(x), x[:1].size):
                yield Piece(x[rows], y[rows], where, client, split,
                            places=Places(where, "index", np.arange(rows.start, rows.stop)))

    expected = sorted({client for _, client, _ in files} | _configured(path), key=lambda c: (len(c), c))
    return collect(pieces(), path.name, problems, skip=skip, clients=expected, shape=shape, regression=regression)


def is_pfllib(path: Path) -> bool:
    """Whether an archive is a client's file of PFLlib."""
    try:
        with _archive(path) as archive:
            return archive.namelist() == ["data.npy"]
    except Exception:  # damaged: the reader of .npz says so
        return False


def _client_files(path: Path, problems: Problems) -> list[tuple[Path, str, int]]:
    """(file, client, split), in the order of the clients' numbers."""
    if path.is_file():
        other = path.parent.parent / "test" / path.name
        beside = [(other, path.stem, TEST)] if path.parent.name == "train" and other.is_file() else []
        return [(path, path.stem, TRAIN), *beside]
    files: list[tuple[Path, str, int]] = []
    for folder, split in (("train", TRAIN), ("val", VAL), ("test", TEST)):
        seen: dict[str, str] = {}
        for file in sorted(path.glob(f"{folder}/*.npz"), key=lambda f: (len(f.stem), f.stem)):
            client = str(int(file.stem)) if file.stem.isascii() and file.stem.isdecimal() else file.stem
            if client in seen:
                problems.add("clients appear twice", client, why=f"{folder}/{seen[client]}, {folder}/{file.name}")
                continue
            seen[client] = file.name
            files.append((file, client, split))
    return files


def _configured(path: Path) -> set[str]:
    """The clients that config.json speaks of."""
    with suppress(CoterieError):
        told = read_json(path / "config.json").get("num_clients")
        if type(told) is int and 0 <= told <= 10**6:
            return {str(i) for i in range(told)}
    return set()


def _pair(file: Path) -> tuple[Array, Array]:
    with _archive(file) as archive:
        if "data.npy" not in archive.namelist():
            raise ValueError(f"no entry 'data'; it has {', '.join(archive.namelist()) or 'none'}")
        member = _Member(archive, "data", objects=True)
        held = member.pickled() if member.dtype.kind == "O" else None
        if isinstance(held, np.ndarray) and held.shape == ():
            held = held.item()
    if not isinstance(held, dict) or not {"x", "y"} <= set(held):
        raise ValueError("'data' is no dictionary of x and y")
    return _features(held["x"]), _labels(held["y"])


def _features(given: Any) -> Array:
    """Arrays as they are; texts, which PFLlib keeps as pairs (tokens, length), as tokens [n, length]."""
    if has_texts(given):
        raise ValueError("x holds texts")
    x: Array = given if isinstance(given, np.ndarray) else np.array(given, dtype=object if _ragged(given) else None)
    if x.dtype.kind == "O":
        rows = [row[0] if len(row) == 2 and isinstance(row[0], (list, np.ndarray)) else row for row in x.tolist()]
        x = np.array(rows)
    if x.dtype.kind not in "biuf" or x.ndim == 0:
        raise ValueError(f"x holds {x.dtype} of shape {list(x.shape)}")
    return x


def _ragged(x: Any) -> bool:
    return bool(x) and isinstance(x[0], tuple)


def _labels(given: Any) -> Array:
    if has_texts(given):
        raise ValueError("y holds texts")
    y: Array = np.asarray(given)
    if y.dtype.kind not in "biuf" or y.ndim == 0:
        raise ValueError(f"y holds {y.dtype} of shape {list(y.shape)}")
    return y


def _is_npz(path: Path) -> bool:
    return path.suffix.lower() == ".npz"


READS = (
    Format(pfllib, 40, file=lambda path: _is_npz(path) and is_pfllib(path),
           folder=lambda path: next(path.glob("train/*.npz"), None) is not None),
    Format(npz, 80, file=_is_npz),
)
