"""LEAF's json files: `{"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y": [...]}}}`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from coterie.data.labels import measured
from coterie.data.readers.formats import Format
from coterie.data.readers.pieces import TEST, TRAIN, VAL, Array, Piece, Places, Source, collect, cut, has_texts, names
from coterie.data.readers.refusals import Problems, reason
from coterie.data.readers.text import LENGTH, WORDS, Cutter, Tokenizer
from coterie.errors import CoterieError
from coterie.files import opened

FOLDERS = (("train", TRAIN), ("val", VAL), ("test", TEST))


def leaf(
    path: str | Path, *, tokenizer: str | Tokenizer = "words", words: int = WORDS, length: int = LENGTH,
    field: int | None = None, tokens: bool = False, shape: str | None = None, classes: str | None = None,
    regression: bool | None = None, skip: bool = False,
) -> Source:
    """A folder with train/*.json and test/*.json, with all_data/*.json, or with *.json; or one such file.

    A user is a client; given train and test files are a split. x are numbers (`shape=1,28,28` makes images of flat
    ones) or texts, which the tokenizer turns into numbers; of samples that are lists of texts, `field` says which.
    `tokens` takes numbers as those of words. A file is read user by user, so only one user has to fit into memory.
    """
    path = Path(path)
    problems = Problems()
    files = leaf_files(path)
    if not files:
        raise CoterieError(f"'{path}' holds no json files in LEAF's folders train, test or all_data.")
    problems.totals["files"] = len(files)
    expected: dict[str, None] = {}
    cutter = Cutter(tokenizer, words, length)

    def features(rows: list[Any]) -> Array:
        return _features(rows, cutter, field, tokens)

    def pieces() -> Iterator[Piece]:
        seen: dict[tuple[str, int | None], str] = {}
        sizes: dict[str, int]
        for file, split in files:
            where = f"{file.parent.name}/{file.name}"
            told, sizes = dict[str, Any](), {}
            try:
                for user, data in _users(file, told):
                    if (user, split) in seen:
                        problems.add("clients appear twice", user, why=f"{seen[user, split]} and {where}")
                        continue
                    seen[user, split] = where
                    expected[user] = None
                    sizes[user] = len(data["y"]) if isinstance(data, dict) and isinstance(data.get("y"), list) else 0
                    yield from _pieces(user, data, where, split, features, problems)
                _check(told, where, sizes, problems)
            except Exception as error:  # damaged text makes parsers raise anything
                problems.add("files cannot be read", where, why=reason(error))

    name = path.stem if path.is_file() else path.resolve().name
    source = collect(pieces(), name, problems, skip=skip, classes=classes, regression=regression,
                     clients=expected, shape=shape)
    return replace(source, notes=(*source.notes, *cutter.notes()))


def leaf_files(path: Path) -> list[tuple[Path, int | None]]:
    if path.is_file():
        return [(path, None)]
    for root in (path, path / "data"):
        split = [(file, code) for folder, code in FOLDERS for file in sorted(root.glob(f"{folder}/*.json"))]
        if split:
            return list(split)
        for folder in (root / "all_data", root):
            if files := sorted(folder.glob("*.json")):
                return [(file, None) for file in files]
    return []


def _pieces(
    user: str, data: Any, where: str, split: int | None, features: Callable[[list[Any]], Array], problems: Problems
) -> Iterator[Piece]:
    if not isinstance(data, dict) or not isinstance(data.get("x"), list) or not isinstance(data.get("y"), list):
        problems.add("clients have no lists x and y", user, user, where)
        return
    if len(data["x"]) != len(data["y"]):
        problems.add("clients have unequal numbers of samples and labels", user, user,
                     f"{where}: {len(data['x'])} samples, {len(data['y'])} labels")
        return
    try:
        x, y = features(data["x"]), _labels(data["y"])
    except (ValueError, TypeError, OverflowError) as error:
        problems.add("clients have unusable samples", user, user, f"{where}: {reason(error)}")
        return
    for rows in cut(len(x), x[:1].size):
        yield Piece(x[rows], y[rows], f"{where}, client {user}", user, split,
                    places=Places(f"{where}, client {user}", "index", np.arange(rows.start, rows.stop)))


def _features(rows: list[Any], cutter: Tokenizer, field: int | None, tokens: bool) -> Array:
    if field is not None:
        rows = [row[field] if isinstance(row, list) and len(row) > field else None for row in rows]
    if rows and all(isinstance(row, str) for row in rows):
        return np.array([cutter(row) for row in rows], dtype=np.int64)
    x = np.array([] if has_texts(rows) else rows)
    if len(rows) and (x.dtype.kind not in "biuf" or len(x) != len(rows)):
        raise ValueError("samples are neither numbers of one shape nor texts"
                         + ("; say which field" if isinstance(rows[0], list) else ""))
    return x.astype(np.int64 if tokens else np.float32)


def _labels(values: list[Any]) -> Array:
    numbers = measured(values)
    if numbers is not None:
        return numbers
    y = np.array(values) if all(isinstance(v, (int, float)) for v in values) else names([_said(v) for v in values])
    return y.astype(np.int64) if y.dtype.kind == "b" else y


def _said(value: Any) -> Any:
    return None if value is None else value if isinstance(value, str) else json.dumps(value)


def _check(told: dict[str, Any], where: str, found: dict[str, int], problems: Problems) -> None:
    """What a file says of its users against what it holds."""
    users, sizes = told.get("users"), told.get("num_samples")
    if users is None:
        return
    if not isinstance(users, list) or not all(isinstance(user, str) for user in users):
        raise ValueError("users is no list of names")
    for user, times in Counter(users).items():
        if user not in found:
            problems.add("clients have no samples", user, why=f"listed in {where}")
        if times > 1:
            problems.add("clients appear twice", user, why=f"users of {where}")
    if not isinstance(sizes, list):
        return
    if len(sizes) != len(users):
        raise ValueError(f"{len(users)} users but {len(sizes)} num_samples")
    for user, size in zip(users, sizes, strict=True):
        if user in found and size != found[user]:
            problems.add("clients have another number of samples than announced", user, user,
                         f"{where}: {found[user]} instead of {size}")


# -- a json file, user by user -----------------------------------------------------------------------------------------


def _users(file: Path, told: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each user's data in turn; the other top-level values go into `told`."""
    with opened(file) as stream:
        text = _Text(stream)
        text.expect("{")
        found = False
        while not text.follows("}"):
            key = text.value()
            if not isinstance(key, str):
                raise ValueError("a name is expected")
            text.expect(":")
            if key == "user_data":
                found = True
                text.expect("{")
                while not text.follows("}"):
                    user = text.value()
                    if not isinstance(user, str):
                        raise ValueError("a user's name is expected")
                    text.expect(":")
                    yield user, text.value()
                    if not text.follows(","):
                        text.expect("}")
                        break
            else:
                told[key] = text.value()
            if not text.follows(","):
                text.expect("}")
                break
        if not found:
            raise ValueError("no user_data")


class _Text:
    """A window on a json text that moves on value by value."""

    STEP = 1 << 20

    def __init__(self, stream: IO[str]) -> None:
        self._stream, self._held, self._at, self._ended = stream, "", 0, False
        self._decoder = json.JSONDecoder()

    def value(self) -> Any:
        """The next value. It is tried on what is there, and again when twice as much has been read."""
        self._skip()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._held, self._at)
                if end < len(self._held) or self._ended:
                    self._at = end
                    return value
            except json.JSONDecodeError:
                if self._ended:
                    raise
            self._read(max(self.STEP, len(self._held) - self._at))

    def follows(self, sign: str) -> bool:
        """Whether this sign comes next; if so it is passed."""
        self._skip()
        there = self._held.startswith(sign, self._at)
        self._at += there
        return there

    def expect(self, sign: str) -> None:
        if not self.follows(sign):
            there = self._held[self._at : self._at + 1]
            raise ValueError(f"'{sign}' is expected, not '{there}'" if there else f"the file ends before '{sign}'")

    def _skip(self) -> None:
        while True:
            while self._at < len(self._held) and self._held[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._held) or self._ended:
                return
            self._read(self.STEP)

    def _read(self, count: int) -> None:
        more = self._stream.read(count)
        self._held, self._at, self._ended = self._held[self._at :] + more, 0, not more


READS = (
    Format(leaf, 60, file=lambda path: path.suffix.lower() == ".json", folder=lambda path: bool(leaf_files(path))),
)
