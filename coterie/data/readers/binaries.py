"""Data sets in the files their authors published: CIFAR-10 and CIFAR-100, and the IDX files of MNIST and EMNIST."""

from __future__ import annotations

import gzip
import os
import re
import struct
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from coterie.data.readers import pickles
from coterie.data.readers.formats import Format
from coterie.data.readers.pieces import TEST, TRAIN, Array, Piece, Source, collect, cut, has_texts
from coterie.data.readers.refusals import Problems, reason, refuse_bomb
from coterie.errors import CoterieError, NoLabels
from coterie.files import opened_bytes
from coterie.memory import BLOCK

Share = Literal["all", "train", "test"]
PIXELS = 3 * 32 * 32
CIFAR_10, CIFAR_100 = "cifar-10", "cifar-100"
FOLDERS = ("cifar-10-batches-py", "cifar-10-batches-bin", "cifar-100-python", "cifar-100-binary")
SETS = {  # the files of a set, by what tells its kind
    "data_batch_1": (CIFAR_10, [f"data_batch_{k}" for k in range(1, 6)], "test_batch"),
    "data_batch_1.bin": (CIFAR_10, [f"data_batch_{k}.bin" for k in range(1, 6)], "test_batch.bin"),
    "train": (CIFAR_100, ["train"], "test"), "train.bin": (CIFAR_100, ["train.bin"], "test.bin"),
}


def cifar(path: str | Path, *, part: Share = "all", coarse: bool = False, skip: bool = False) -> Source:
    """The original folder or one of its files: CIFAR-10 and CIFAR-100, as Python pickles or as binary (.bin).

    x [N, 3, 32, 32] from -1 to 1. The authors' split into train and test is kept with the samples; `part` reads one of
    the two. `coarse` takes CIFAR-100's 20 superclasses.
    """
    path = Path(path)
    kind, files = _cifar_files(path, part)
    problems = Problems()
    problems.totals["files"] = len(files)

    def pieces() -> Iterator[Piece]:
        for file, split in files:
            try:
                yield from _bin(file, kind, coarse, split) if file.suffix == ".bin" else _batch(file, coarse, split)
            except Exception as error:  # damaged bytes make decoders raise anything
                problems.add("files cannot be read", file.name, why=reason(error))

    return collect(pieces(), kind if path.is_dir() else path.stem, problems, skip=skip)


def is_cifar(path: Path) -> bool:
    return any((folder / name).is_file() for folder in _within(path) for name in SETS)


def _within(path: Path) -> list[Path]:
    return [path, *(path / name for name in FOLDERS)]


def _cifar_files(path: Path, part: Share) -> tuple[str, list[tuple[Path, int | None]]]:
    if path.is_file():
        hundred = "100" in path.resolve().parent.name or path.stem in ("train", "test")
        return CIFAR_100 if hundred else CIFAR_10, [(path, None)]
    for folder in _within(path):
        for first, (kind, training, testing) in SETS.items():
            if (folder / first).is_file():
                train: list[tuple[Path, int | None]] = [(folder / name, TRAIN) for name in training]
                test: list[tuple[Path, int | None]] = [(folder / testing, TEST)]
                return kind, train + test if part == "all" else train if part == "train" else [(test[0][0], None)]
    raise CoterieError(f"'{path}' holds none of CIFAR's files: {', '.join(SETS)}.")


def _batch(file: Path, coarse: bool, split: int | None) -> Iterator[Piece]:
    """One Python pickle: a dictionary with data [n, 3072] and labels."""
    with opened_bytes(file) as stream:
        held = pickles.loads(stream.read())
    if not isinstance(held, dict):
        raise ValueError("no dictionary")
    held = {key.decode("latin-1") if isinstance(key, bytes) else key: value for key, value in held.items()}
    labels = next((held[key] for key in ("coarse_labels" if coarse else "fine_labels", "labels") if key in held), None)
    x = held.get("data")
    if not isinstance(x, np.ndarray) or x.dtype != np.uint8 or x.ndim != 2 or x.shape[1] != PIXELS:
        raise ValueError(f"no images [n, {PIXELS}] under 'data'")
    y = np.asarray(None if has_texts(labels) else labels)
    if y.dtype.kind not in "iu" or y.shape != x.shape[:1]:
        raise ValueError(f"{len(x)} images but labels of shape {list(y.shape)}")
    for rows in cut(len(x), PIXELS):
        yield Piece(_channels_last(x[rows]), y[rows].astype(np.int64), file.name, None, split)


def _bin(file: Path, kind: str, coarse: bool, split: int | None) -> Iterator[Piece]:
    """Records of one label (CIFAR-100: coarse and fine) and 3072 pixels, one byte each."""
    labels = 2 if kind == CIFAR_100 else 1
    with opened_bytes(file) as stream:
        width, size = labels + PIXELS, os.fstat(stream.fileno()).st_size
        if size % width or not size:
            raise ValueError(f"{size} bytes are no whole number of records of {width}")
        for rows in cut(size // width, PIXELS):
            n = rows.stop - rows.start
            block = np.frombuffer(stream.read(n * width), np.uint8).reshape(n, width)
            y = block[:, 0 if coarse or labels == 1 else 1].astype(np.int64)
            yield Piece(_channels_last(block[:, labels:]), y, file.name, None, split)


def _channels_last(flat: Array) -> Array:
    return np.ascontiguousarray(flat.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


# -- IDX ---------------------------------------------------------------------------------------------------------------

IMAGES = re.compile(r"(?P<set>.*?)[-_.]?images[-.]idx[13]-ubyte(\.gz)?$")
IDX_TYPES = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


def idx(
    path: str | Path, *, part: Share = "all", turned: bool = False, skip: bool = False, labels: str | None = None
) -> Source:
    """MNIST's and EMNIST's original files, compressed (.gz) or not: a folder of them, or one file of images.

    Files belong together by name: `train-images-idx3-ubyte` and `train-labels-idx1-ubyte`; t10k and test are the test
    split. A folder must hold one set; of several (EMNIST's byclass, digits, ...) name one set's file. x [N, 1, H, W]
    from -1 to 1. `turned` swaps rows and columns, which is how EMNIST's images are stored. `labels` names another file
    of labels.
    """
    path = Path(path)
    pairs = _idx_pairs(path, part, labels)
    problems = Problems()
    problems.totals["files"] = 2 * len(pairs)

    def pieces() -> Iterator[Piece]:
        for images, targets, split in pairs:
            place = targets
            try:
                y = _idx_whole(targets)
                place = images
                yield from _idx_images(images, y, turned, split)
            except Exception as error:  # damaged bytes make decoders raise anything
                problems.add("files cannot be read", place.name, why=reason(error))

    return collect(pieces(), path.stem if path.is_file() else path.resolve().name, problems, skip=skip)


def is_idx(path: Path) -> bool:
    return any(IMAGES.match(file.name) for file in path.iterdir())


def _idx_pairs(path: Path, part: Share, labels: str | None) -> list[tuple[Path, Path, int | None]]:
    if path.is_file():
        found = [path]
    elif path.is_dir():
        found = sorted(file for file in path.iterdir() if IMAGES.match(file.name))
    else:
        raise CoterieError(f"there is no file or folder '{path}'")
    sets: dict[str, list[Path]] = {}
    for file in found:
        name = IMAGES.match(file.name)
        word = name["set"] if name else file.name
        if word in sets:
            continue  # the same file, compressed as well
        if not labels and not name:
            raise CoterieError(f"'{file}' is not named like train-images-idx3-ubyte; name its labels: labels=FILE.")
        sets[word] = [file]
        told = [Path(labels)] if labels else [
            file.with_name(re.sub(r"images([-.])idx[13]", r"labels\1idx1", file.name).removesuffix(".gz") + end)
            for end in ("", ".gz")
        ]
        there = [p for p in told if p.is_file()]
        if not there:
            raise NoLabels(f"'{file}' has no labels beside it: {told[0].name} is missing.")
        sets[word].append(there[0])
    pairs: list[tuple[Path, Path, int | None]] = []
    for word, (images, targets) in sets.items():
        tests = word.startswith("t10k") or word.endswith("test")
        if part == "all" or (part == "test") == tests:
            pairs.append((images, targets, TEST if tests else TRAIN))
    if len({split for *_, split in pairs}) < len(pairs):
        raise CoterieError(f"'{path}' holds several sets ({', '.join(sets)}); name one file of images.")
    if len(pairs) == 1:
        return [(pairs[0][0], pairs[0][1], None)]
    if not pairs:
        raise CoterieError(f"'{path}' holds no files such as train-images-idx3-ubyte"
                           + (f" of part {part}." if part != "all" else "."))
    return sorted(pairs, key=lambda pair: pair[2] or 0)


def _stream(file: Path) -> IO[bytes]:
    plain = opened_bytes(file)
    packed = plain.read(2) == b"\x1f\x8b"
    plain.seek(0)
    return gzip.open(plain, "rb") if packed else plain  # type: ignore[return-value]


def _idx_header(stream: IO[bytes]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    zeros, code, dimensions = struct.unpack(">HBB", stream.read(4))
    if zeros or code not in IDX_TYPES or not 1 <= dimensions <= 4:
        raise ValueError("no IDX header")
    return np.dtype(IDX_TYPES[code]), struct.unpack(f">{dimensions}I", stream.read(4 * dimensions))


def _idx_whole(file: Path) -> Array:
    with _stream(file) as stream:
        dtype, shape = _idx_header(stream)
        if len(shape) != 1 or dtype.kind not in "iu":
            raise ValueError(f"no labels: {dtype} of shape {list(shape)}")
        refuse_bomb(file.stat().st_size, shape[0] * dtype.itemsize)
        data = bytearray()
        while len(data) <= shape[0] * dtype.itemsize and (more := stream.read(BLOCK)):
            data += more
    if len(data) != shape[0] * dtype.itemsize:
        raise ValueError(f"{shape[0]} labels are announced, {len(data) // dtype.itemsize} are there")
    return np.frombuffer(data, dtype).astype(np.int64)


def _idx_images(file: Path, y: Array, turned: bool, split: int | None) -> Iterator[Piece]:
    with _stream(file) as stream:
        dtype, shape = _idx_header(stream)
        if shape[0] != len(y):
            raise ValueError(f"{shape[0]} images but {len(y)} labels")
        if prod(shape[1:]) > 10**8 or 0 in shape[1:]:
            raise ValueError(f"images of shape {list(shape[1:])}")
        width = prod(shape[1:]) * dtype.itemsize
        refuse_bomb(file.stat().st_size, shape[0] * width)
        for rows in cut(shape[0], prod(shape[1:])):
            n = rows.stop - rows.start
            data = stream.read(n * width)
            if len(data) != n * width:
                raise ValueError(f"{shape[0]} images are announced, {rows.start + len(data) // width} are there")
            block = np.frombuffer(data, dtype).reshape(n, *shape[1:]).astype(dtype.newbyteorder("="))
            if turned and block.ndim == 3:
                block = np.ascontiguousarray(block.transpose(0, 2, 1))
            yield Piece(block, y[rows], file.name, None, split)
        if stream.read(1):
            raise ValueError(f"more than the {shape[0]} images that are announced")


def _is_batch(path: Path) -> bool:
    by_name = path.name in ("train", "test", "test_batch") or path.name.startswith("data_batch")
    return by_name or path.suffix.lower() == ".bin"


READS = (
    Format(cifar, 20, folder=is_cifar), Format(idx, 30, folder=is_idx),
    Format(idx, 90, file=lambda path: "-ubyte" in path.name), Format(cifar, 95, file=_is_batch),
)
