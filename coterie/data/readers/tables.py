"""Tables: csv and parquet files with a label column, and perhaps columns for the client, the split and a text.

A table is read twice, some rows at a time: once to learn what its columns are, once to encode them. Tables of other
origin (Hugging Face data sets) take the same way.
"""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from coterie.data.readers.pieces import SPLIT_WORDS, Array, Piece, Problems, Source, collect, names, reading
from coterie.data.readers.text import LENGTH, WORDS, Tokenizer, tokenizer_of
from coterie.errors import CoterieError, NoLabels, unknown

CELLS, CHARACTERS = 1 << 15, 1 << 21
"""A block of rows ends when it has so many cells, or so much text."""
CATEGORIES = 100
"""Most different values of a column that is encoded by categories."""
MISSING = ("", "na", "n/a", "nan", "null", "none", "?")
CSV, PARQUET = (".csv", ".tsv"), (".parquet", ".pq")
LIBRARY = "parquet files need pyarrow; install it with: pip install 'coterie[tables]'"
CLIENT, SPLIT = "\0client", "\0split"
"""Columns that come from a file's name rather than from its content; no file can have such a column."""


@dataclass
class Rows:
    """Some rows of one file: columns of float64 (NaN is missing), of text (None is missing) or of arrays [n, ...]."""

    where: str
    first: int  # number of the first of them in the file, from 1
    columns: dict[str, Array]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))


Reader = Callable[[Problems | None], Iterator[Rows]]
"""Reads a table from its beginning; only the first reading is given the problems to fill."""
Encoding = dict[str, Any]
"""How a table became numbers, as a schema file holds it: `columns` {name: its categories, or null for numbers},
`label` and `client` (columns, the second perhaps null), `classes` (names, or null); where asked for, `scale` {name:
[mean, deviation]} and `fill` {name: number}."""
LARGE = 10.0
"""Root mean square of a column from which on it is said that columns are not scaled."""


@dataclass(frozen=True)
class Roles:
    """Which column is what, as the user said."""

    label: str | None = None
    client: str | None = None
    split: str | None = None
    text: str | None = None
    x: str | None = None
    ignore: str | None = None


def table(
    path: str | Path, *, label: str | None = None, client: str | None = None, split: str | None = None,
    text: str | None = None, x: str | None = None, ignore: str | None = None, scale: bool = False,
    fill: str | None = None, tokenizer: str | Tokenizer = "words", words: int = WORDS, length: int = LENGTH,
    classes: str | None = None, regression: bool = False, schema: str | Encoding | None = None,
    shape: str | None = None, skip: bool = False,
) -> Source:
    """A csv or parquet file, or a folder of them with one file a client.

    `label`, `client` and `split` name columns (by default those of that name). Columns of numbers are features as they
    are; columns of at most 100 different texts become one 0/1 feature a text. `x=a,b` takes these columns alone,
    `ignore=a,b` all but these. `scale` brings every column of numbers to mean 0 and standard deviation 1 over the rows
    read. With `text`, that column is the sample, and `tokenizer` makes numbers of it. Missing values are reported, or
    replaced by `fill`, a number or mean. `schema=file.json` keeps how columns were encoded: it is written when there is
    no such file, and followed when there is, so that every site encodes alike.
    """
    path = Path(path)
    files = [path] if path.is_file() else table_files(path)
    if not files:
        raise CoterieError(f"there is no table '{path}'")
    problems = Problems()
    problems.totals["files"] = len(files)

    texts: dict[Path, set[str]] = {}

    def rows(told: Problems | None) -> Iterator[Rows]:
        for file in files:
            try:
                for block in _csv(file, texts) if file.suffix in CSV else _parquet(file):
                    if path.is_dir() and client is None:
                        block.columns[CLIENT] = names([file.stem] * len(block))
                    yield block
            except CoterieError as error:
                if len(files) == 1 or "pip install" in str(error):
                    raise
                if told is not None:
                    told.add("files cannot be read", file.name, file.stem if client is None else None,
                             str(error).rpartition(": ")[2])

    roles = Roles(label, client, split, text, x, ignore)
    return encode(rows, path.stem if path.is_file() else path.resolve().name, problems, roles, scale=scale,
                  fill=fill, tokenizer=tokenizer, words=words, length=length, classes=classes, regression=regression,
                  schema=schema, shape=shape, skip=skip,
                  clients=[file.stem for file in files] if path.is_dir() and client is None else ())


def table_files(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if p.suffix in (*CSV, *PARQUET)) if path.is_dir() else []


def header(path: Path) -> list[str]:
    """The columns of a csv file."""
    with reading(path, "a csv file"), path.open(newline="", encoding="utf-8-sig") as file:
        return next(csv.reader(file, delimiter="\t" if path.suffix == ".tsv" else ","), [])


# -- what the columns are ----------------------------------------------------------------------------------------------


@dataclass
class Column:
    """What is known of a column after the first reading."""

    numeric: bool = True
    categories: set[str] | None = field(default_factory=set)  # None when there are too many
    missing: Counter[str] = field(default_factory=Counter)  # by client
    strange: str = ""  # the first value that is no number
    shape: tuple[int, ...] = ()
    whole: bool = True
    n: int = 0  # numbers seen, their mean and the sum of their squared distances to it
    mean: float = 0.0
    squares: float = 0.0

    @property
    def deviation(self) -> float:
        return math.sqrt(self.squares / self.n) if self.n else 0.0

    def count(self, values: Array) -> None:
        """Take in further numbers (Chan, Golub and LeVeque 1979)."""
        if not len(values):
            return
        n = self.n + len(values)
        with np.errstate(over="ignore", invalid="ignore"):  # numbers may be as large as they like
            mean = values.mean()
            step = mean - np.float64(self.mean)
            self.squares += float(((values - mean) ** 2).sum() + step**2 * self.n * len(values) / n)
            self.mean += float(step * len(values) / n)
        self.n = n


def encode(
    rows: Reader, name: str, problems: Problems, roles: Roles, *, scale: bool, fill: str | None,
    tokenizer: str | Tokenizer, words: int, length: int, classes: str | Sequence[str] | None, regression: bool,
    schema: str | Encoding | None, shape: str | None, skip: bool,
    clients: Sequence[str] = (), notes: Sequence[str] = (),
) -> Source:
    """Learn the columns, then encode them."""
    found, total = _learn(rows, roles, problems)
    if not total:
        said = problems.sentences()
        raise CoterieError(f"{name} holds no rows" + (f": {'; '.join(said)}." if said else "."))
    plan = _Plan(name, found, roles, regression, schema if isinstance(schema, dict) else _schema(schema), scale, fill)
    cutter = tokenizer_of(tokenizer, words, length)
    notes = [*notes, *plan.report(problems, total)]
    if isinstance(schema, str) and not Path(schema).exists():
        _write_schema(Path(schema), plan.encoding())

    def pieces() -> Iterator[Piece]:
        for block in rows(None):
            piece = plan.piece(block, cutter, problems)
            if piece is not None:
                yield piece

    source = collect(pieces(), name, problems, skip=skip, classes=classes or plan.classes, regression=regression,
                     shape=shape, clients=clients, notes=notes)
    names = None if source.classes is None else list(source.classes)
    return replace(source, encoding={**plan.encoding(), "classes": names})


def _learn(rows: Reader, roles: Roles, problems: Problems) -> tuple[dict[str, Column], int]:
    found: dict[str, Column] = {}
    total, spelled = 0, dict[str, str]()
    for block in rows(problems):
        if not len(block):
            continue
        missing = set(found) ^ set(block.columns) if found else set()
        if missing:
            raise CoterieError(f"'{block.where}' and the files before differ in columns: {', '.join(sorted(missing))}.")
        total += len(block)
        owner = _clients(block, _role(roles.client, "client", block.columns, CLIENT))
        for client in dict.fromkeys(owner):
            plain = client.strip().lower()
            if client and spelled.setdefault(plain, client) != client:
                problems.add("clients appear twice", client, why=f"also spelled '{spelled[plain]}'")
                spelled[plain] = client
        for column, values in block.columns.items():
            known = found.setdefault(column, Column(shape=values.shape[1:]))
            if values.shape[1:] != known.shape:
                raise CoterieError(f"column '{column}' holds {list(values.shape[1:])} values in '{block.where}' and "
                                   f"{list(known.shape)} before.")
            _look(known, values, owner)
    return found, total


def _look(known: Column, values: Array, owner: Sequence[str]) -> None:
    if values.dtype.kind == "f":
        lost = np.isnan(values).reshape(len(values), -1).any(1)
        fine = values[~np.isnan(values)]
        known.whole &= bool((fine == np.floor(fine)).all())
        if values.ndim == 1:
            known.count(fine[np.isfinite(fine)])
        if known.categories is not None and values.ndim == 1:
            known.categories |= {_number(v) for v in np.unique(fine)[: CATEGORIES + 1]}
    else:
        lost = np.array([value is None for value in values], dtype=bool)
        known.numeric = False
        if known.categories is not None:
            known.categories |= {value for value in values if value is not None}
            known.strange = known.strange or next((v for v in values if v is not None and _float(v) is None), "")
    if known.categories is not None and len(known.categories) > CATEGORIES:
        known.categories = None
    if lost.any():
        known.missing.update(owner[k] for k in np.flatnonzero(lost).tolist())


def _role(given: str | None, usual: str, columns: Mapping[str, Any], made: str = "") -> str | None:
    """The column that plays a role: the one the user named, the one of that name, or one made from file names."""
    if given is not None:
        if given not in columns:
            raise unknown("column", given, [c for c in columns if not c.startswith("\0")])
        return given
    return made if made in columns else usual if usual in columns else None


def _clients(block: Rows, column: str | None) -> list[str]:
    """The client of each row; empty where it is missing."""
    if column is None:
        return [""] * len(block)
    values = block.columns[column]
    if values.ndim != 1:
        raise CoterieError(f"column '{column}' holds several values a row, so it names no clients.")
    if values.dtype.kind == "f":
        return ["" if np.isnan(v) else _number(v) for v in values]
    return ["" if v is None else v for v in values]


class _Plan:
    """How each column is encoded."""

    def __init__(
        self, name: str, found: dict[str, Column], roles: Roles, regression: bool, schema: Encoding | None,
        scale: bool, fill: str | None,
    ) -> None:
        self.found = found
        told = (schema or {}).get("label")
        self.label = _role(roles.label, told or "label", found)
        if self.label is None and told is not None:
            raise NoLabels(f"{name} has no column '{told}', which would hold the labels.")
        if self.label is None:
            listed = ", ".join(c for c in found if not c.startswith("\0"))
            raise NoLabels(f"{name} has no column 'label'; say which it is: label=NAME (there are {listed}).")
        self.client = _role(roles.client, (schema or {}).get("client") or "client", found, CLIENT)
        self.split = _role(roles.split, "split", found, SPLIT)
        self.text = _role(roles.text, "\0", found)
        wanted, ignored = _listed(roles.x, found), _listed(roles.ignore, found)
        taken = (self.label, self.client, self.split, CLIENT, SPLIT)
        self.columns = wanted or [c for c in found if c not in taken and c not in ignored]
        self.classes: list[str] | None = None
        self.regression = regression
        label = found[self.label]
        if label.shape:
            raise CoterieError(f"column '{self.label}' holds {list(label.shape)} values a row, so it is no label.")
        self.targets = label.numeric and (regression or not label.whole)
        self.arrays = [c for c in self.columns if found[c].shape]
        if self.text is not None:
            self.columns = [self.text]
            if found[self.text].numeric:
                raise CoterieError(f"column '{self.text}' holds numbers, so it is no text.")
        elif self.arrays and len(self.columns) > 1:
            raise CoterieError(f"column '{self.arrays[0]}' holds arrays; take it alone with x={self.arrays[0]}.")
        self.categories: dict[str, list[str] | None] = {}
        self.followed = schema is not None
        if schema is not None:
            self._follow(schema, name)
        elif self.text is None:
            self._settle()
        if not self.columns:
            raise CoterieError(f"{name} has no columns left for features.")
        self.scale, self.fill = self._scale(schema, scale), self._fill(schema, fill)

    def _numbers(self) -> list[str]:
        """The columns that are one number a row."""
        return [] if self.text is not None else [
            c for c in self.columns if self.categories.get(c) is None and not self.found[c].shape
        ]

    def _scale(self, schema: Encoding | None, wanted: bool) -> dict[str, list[float]] | None:
        """{column: [mean, deviation]}, that of the schema where there is one; a constant column is only centred."""
        if schema is not None:
            return schema.get("scale")
        made = {c: [self.found[c].mean, self.found[c].deviation or 1.0] for c in self._numbers()} if wanted else None
        for column, pair in (made or {}).items():
            if not all(map(math.isfinite, pair)):
                raise CoterieError(f"column '{column}' holds numbers too large to be scaled.")
        return made

    def _fill(self, schema: Encoding | None, wanted: str | None) -> dict[str, float] | None:
        """{column: what stands for a missing number}; a missing text is none of the categories."""
        if wanted is None:
            return schema.get("fill") if schema is not None else None
        if wanted == "mean":
            if self.arrays:
                raise CoterieError(f"fill=mean is for columns of numbers, and '{self.arrays[0]}' holds arrays.")
            known = (schema or {}).get("scale") or {}
            return {c: float(known[c][0] if c in known else self.found[c].mean) for c in self._numbers()}
        number = _float(wanted)
        if number is None or not math.isfinite(number):
            raise CoterieError(f"fill must be a number or mean, not '{wanted}'.")
        return dict.fromkeys(self.columns, number)

    def encoding(self) -> Encoding:
        label = self.found[str(self.label)]
        classes = None if self.targets or label.numeric or not label.categories else sorted(label.categories)
        client = None if self.client == CLIENT else self.client
        made: Encoding = {
            "columns": self.categories, "label": self.label, "client": client, "classes": self.classes or classes,
        }
        return made | {k: v for k, v in (("scale", self.scale), ("fill", self.fill)) if v is not None}

    def _settle(self) -> None:
        for column in self.columns:
            known = self.found[column]
            if not known.numeric and known.categories is None:
                some = f"e.g. '{known.strange[:40]}'" if known.strange else "as text"
                raise CoterieError(
                    f"column '{column}' holds neither numbers nor at most {CATEGORIES} different texts ({some}); leave "
                    f"it out with ignore={column}, or take it as text={column}{_quoted(column)}."
                )
            self.categories[column] = None if known.numeric else sorted(known.categories or ())

    def _follow(self, schema: Encoding, name: str) -> None:
        self.classes = schema["classes"]
        if self.text is not None:
            return
        self.columns, self.categories = list(schema["columns"]), dict(schema["columns"])
        for column in self.columns:
            if column not in self.found:
                raise CoterieError(f"{name} has no column '{column}', which the schema asks for.")
            if self.categories[column] is None and not self.found[column].numeric:
                raise CoterieError(f"column '{column}' of {name} must hold numbers, as the schema says; it holds "
                                   f"'{self.found[column].strange[:40]}'.")

    def report(self, problems: Problems, total: int) -> list[str]:
        """Missing values, by column and client; a note instead where they are filled in, or where scales differ."""
        notes = []
        large = {c: math.hypot(self.found[c].mean, self.found[c].deviation) for c in self._numbers()}
        large = {c: size for c, size in large.items() if size > LARGE}
        if large and self.scale is None:
            first = sorted(large, key=lambda c: -large[c])[:3]
            some = ", ".join(f"'{c}' (about {large[c]:.3g})" for c in first)
            notes.append(f"columns hold large numbers, taken as they are: {some}; models train badly on these, and "
                         "scale=true brings every column to mean 0 and deviation 1")
        problems.totals["rows"] = total
        for column in dict.fromkeys([*self.columns, self.client, self.split]):
            if column is None or not (missing := self.found[column].missing):
                continue
            title = column.lstrip("\0")
            role = column in (self.client, self.split)
            if not role and self.fill is not None and self.text is None:
                what = f"{self.fill.get(column, 0):g}" if self.categories.get(column) is None else "no category"
                notes.append(f"filled in: column '{title}' lacked {missing.total()} of {total} values ({what})")
                continue
            if not role and self.text is None:
                problems.remedies.append("fill the gaps with fill=mean")
            for client, count in missing.items():
                problems.add(f"rows have no value in column '{title}'", client=client or None, count=count)
        return notes

    def piece(self, block: Rows, cutter: Tokenizer, problems: Problems) -> Piece | None:
        good = np.ones(len(block), dtype=bool)
        for column in dict.fromkeys([*self.columns, self.client, self.split]):
            if column is None or (self.fill is not None and self.text is None and column in self.columns):
                continue
            values = block.columns[column]
            good &= ~np.isnan(values).reshape(len(values), -1).any(1) if values.dtype.kind == "f" else np.array(
                [value is not None for value in values], dtype=bool)
        self._known(block, good, problems)
        where = f"{block.where}, rows from {block.first}"
        split = self._split(block, good, problems) if self.split is not None else None
        kept = {column: values[good] for column, values in block.columns.items()}
        n = int(good.sum())
        if not n:
            return None
        client = None
        if self.client is not None:
            client = names(_clients(Rows(where, 0, {self.client: kept[self.client]}), self.client))
        return Piece(self._features(kept, cutter), self._labels(kept[str(self.label)]), where,
                     client, None if split is None else split[good])

    def _known(self, block: Rows, good: Array, problems: Problems) -> None:
        """Strike rows with a category that a schema lacks."""
        for column, known in self.categories.items():
            if known is None or not self.followed:
                continue
            for k, word in enumerate(_words(block.columns[column])):
                if good[k] and word is not None and word not in known:
                    good[k] = False
                    problems.add(f"rows have a value in column '{column}' that the schema lacks",
                                 f"row {block.first + k} of {block.where}", why=f"'{word}'")

    def _split(self, block: Rows, good: Array, problems: Problems) -> Array:
        values = block.columns[str(self.split)]
        words = ["" if v is None else str(v).strip().lower() for v in values.tolist()]
        for k in np.flatnonzero(good):
            if words[k] not in SPLIT_WORDS:
                good[k] = False
                row = f"row {block.first + k} of {block.where}"
                problems.add("rows have an unknown split", row, why=f"'{words[k]}'")
        return np.array([SPLIT_WORDS.get(word, 0) for word in words], dtype=np.int8)

    def _labels(self, values: Array) -> Array:
        if values.dtype.kind != "f":
            return values
        if self.targets:
            return values.astype(np.float32)
        return names([None if np.isnan(v) else _number(v) for v in values])

    def _features(self, kept: Mapping[str, Array], cutter: Tokenizer) -> Array:
        if self.text is not None:
            return np.array([cutter(text) for text in kept[self.text]], dtype=np.int64)
        if self.arrays:
            column = self.columns[0]
            values = kept[column] if self.fill is None else _filled(kept[column], self.fill.get(column, 0.0))
            return values.astype(np.float32)
        parts: list[Array] = []
        for column in self.columns:
            values, known = kept[column], self.categories[column]
            if known is None:
                values = values if self.fill is None else _filled(values, self.fill.get(column, 0.0))
                mean, deviation = (self.scale or {}).get(column, (0.0, 1.0))
                parts.append(((values - mean) / deviation).astype(np.float32)[:, None])
                continue
            place = {word: k for k, word in enumerate(known)}
            one = np.zeros((len(values), len(known)), dtype=np.float32)
            for row, word in enumerate(_words(values)):
                if word is not None:
                    one[row, place[word]] = 1
            parts.append(one)
        return np.concatenate(parts, 1)


def _filled(values: Array, number: float) -> Array:
    return np.where(np.isnan(values), number, values)


def _quoted(column: str) -> str:
    return " (in quotes on a command line: --data 'FILE:...')" if " " in column else ""


def _words(values: Array) -> list[str | None]:
    if values.dtype.kind == "f":
        return [None if np.isnan(v) else _number(v) for v in values]
    return list(values)


def _listed(text: str | None, found: Mapping[str, Any]) -> list[str]:
    if text is None:
        return []
    if text in found:  # a column whose name holds a comma
        return [text]
    listed = [part.strip() for part in text.split(",")]
    for column in listed:
        if column not in found:
            raise unknown("column", column, [c for c in found if not c.startswith("\0")])
    return listed


def _schema(path: str | None) -> Encoding | None:
    if path is None or not Path(path).exists():
        return None
    with reading(path, "a schema"):
        held = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(held, dict) or not isinstance(held.get("columns"), dict) or "classes" not in held:
            raise ValueError("columns and classes are expected")
        if not all(isinstance(held.get(role, ""), str | None) for role in ("label", "client")):
            raise ValueError("label and client are names of columns")
        for words in (held["classes"], *held["columns"].values()):
            if words is not None and not (isinstance(words, list) and all(isinstance(word, str) for word in words)):
                raise ValueError("categories are lists of texts")
        if not all(isinstance(held.get(name), dict | None) for name in ("scale", "fill")):
            raise ValueError("scale and fill name columns")
        for column, pair in (held.get("scale") or {}).items():
            if not (isinstance(pair, list) and len(pair) == 2 and all(_finite(v) for v in pair) and pair[1] > 0):
                raise ValueError(f"the scale of '{column[:40]}' is a mean and a deviation above 0")
        if not all(_finite(value) for value in (held.get("fill") or {}).values()):
            raise ValueError("what fills gaps are numbers")
        return held


def _write_schema(path: Path, encoding: Encoding) -> None:
    try:
        path.write_text(json.dumps(encoding, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise CoterieError(f"the schema {path} cannot be written: {error.strerror}.") from error


# -- files -------------------------------------------------------------------------------------------------------------


def _csv(path: Path, known: dict[Path, set[str]]) -> Iterator[Rows]:
    """A csv file some rows at a time. A column is one of numbers if all of its values in the file are."""
    texts = known[path] if path in known else known.setdefault(path, _text_columns(path))
    for first, columns, lines in _lines(path):
        held = {}
        for k, column in enumerate(columns):
            said = [line[k].strip() for line in lines]
            said_missing: list[str | None] = [None if s.lower() in MISSING else s for s in said]
            held[column] = names(said_missing) if column in texts else np.array(
                [np.nan if s is None else float(s) for s in said_missing])
        yield Rows(path.name, first, held)


def _text_columns(path: Path) -> set[str]:
    """The columns with a value that is no number."""
    texts: set[str] = set()
    for _, columns, lines in _lines(path):
        for k, column in enumerate(columns):
            if column not in texts and any(
                line[k].strip().lower() not in MISSING and _float(line[k]) is None for line in lines
            ):
                texts.add(column)
    return texts


def _lines(path: Path) -> Iterator[tuple[int, list[str], list[list[str]]]]:
    """(number of the first row, columns, some rows)."""
    with reading(path, "a csv file"), path.open(newline="", encoding="utf-8-sig") as file:
        lines = csv.reader(file, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
        columns = [column.strip() for column in next(lines, [])]
        if not columns:
            raise ValueError("it is empty")
        if twice := [column for column, count in Counter(columns).items() if count > 1]:
            raise ValueError(f"two columns are called '{twice[0]}'")
        held: list[list[str]] = []
        first = number = size = 0
        for line in lines:
            if not line:
                continue
            number += 1
            if len(line) != len(columns):
                raise ValueError(f"row {number} has {len(line)} values, the header {len(columns)}")
            held.append(line)
            size += sum(map(len, line))
            if len(held) * len(columns) >= CELLS or size >= CHARACTERS:
                yield first + 1, columns, held
                first, held, size = number, [], 0
        if held:
            yield first + 1, columns, held


def _parquet(path: Path) -> Iterator[Rows]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise CoterieError(LIBRARY) from error
    with reading(path, "a parquet file"), parquet.ParquetFile(path, memory_map=True) as file:
        first = 1
        for batch in file.iter_batches(batch_size=_rows(file.metadata), use_threads=False):
            batch.validate(full=True)
            yield Rows(path.name, first, {n: arrow(c, n) for n, c in zip(batch.schema.names, batch.columns)})
            first += len(batch)


def _rows(metadata: Any) -> int:
    """How many rows of a parquet file make a block."""
    groups = [metadata.row_group(k) for k in range(metadata.num_row_groups)]
    total, size = sum(g.num_rows for g in groups), sum(g.total_byte_size for g in groups)
    return block_rows(total, size, metadata.num_columns)


def block_rows(rows: int, size: int, columns: int) -> int:
    """Rows of a block, for a table of so many rows, bytes and columns."""
    return max(1, min(CELLS // max(columns, 1), CHARACTERS * max(rows, 1) // max(size, 1)))


def arrow(column: Any, name: str) -> Array:
    """An arrow column as `Rows` wants it."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_dictionary(kind):
        column, kind = column.dictionary_decode(), kind.value_type
    if pa.types.is_null(kind):
        return np.full(len(column), np.nan)
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return np.array([np.nan if v is None else float(v) for v in column.to_pylist()]) if column.null_count else (
            np.asarray(column.to_numpy(zero_copy_only=False)).astype(np.float64))
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return names([None if v is None or v.strip() == "" else v.strip() for v in column.to_pylist()])
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind) or pa.types.is_large_list(kind):
        return stacked(column.to_pylist(), name)
    if pa.types.is_decimal(kind):
        return np.array([np.nan if v is None else float(v) for v in column.to_pylist()])
    return names([None if v is None else str(v) for v in column.to_pylist()])


def stacked(values: Sequence[Any], name: str) -> Array:
    """Lists of numbers, one a row, as [n, ...]; a missing list is one of NaN."""
    like = next((v for v in values if v is not None), None)
    if like is None:
        return np.full(len(values), np.nan)
    try:
        shape = np.array(like, dtype=np.float64).shape
        return np.array([np.full(shape, np.nan) if v is None else v for v in values], dtype=np.float64)
    except (ValueError, TypeError) as error:
        raise CoterieError(f"column '{name}' holds lists that are no numbers of one length: {error}") from error


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 2**53 else repr(float(value))
