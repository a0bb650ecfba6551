"""Rows of csv and parquet files, a block at a time. A block's columns are numbers, texts or arrays."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from coterie.data.readers.pieces import Array, Places, names
from coterie.data.readers.refusals import Problems, reading
from coterie.errors import CoterieError, counted, unknown

CELLS, CHARACTERS = 1 << 15, 1 << 21
"""A block of rows ends when it has so many cells, or so much text."""
WHOLE = re.compile(r"[+-]?[0-9]+")
CODE = re.compile(r"[+-]?0[0-9]+")
MISSING = ("", "na", "n/a", "nan", "null", "none", "?")
CSV, PARQUET = (".csv", ".tsv"), (".parquet", ".pq")
LIBRARY = "parquet files need pyarrow; install it with: pip install 'coterie[tables]'"
CLIENT, SPLIT = "\0client", "\0split"
"""Columns that come from a file's name rather than from its content; no file can have such a column."""


@dataclass
class Rows:
    """Some rows of one file: columns of float64 (NaN is missing), of text (None is missing) or of arrays [n, ...]."""

    places: Places
    columns: dict[str, Array]
    decimals: Set[str] = frozenset()  # columns of numbers whose file keeps them as floats, whatever their values

    @property
    def where(self) -> str:
        return self.places.where

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))


Reading = Callable[[Problems | None], Iterator[Rows]]
"""Reads a table from its beginning; only the first reading is given the problems to fill."""


SEPARATORS = {"comma": ",", "semicolon": ";", "tab": "\t", "bar": "|"}
SNIFFED = 30
"""Rows behind the header that decide which sign separates columns."""
Decimal = Literal["auto", "point", "comma"]
_WITH_COMMA = re.compile(r"[+-]?(\d{1,3}(\.\d{3})+|\d+)?(,\d+)?([eE][+-]?\d+)?")


@dataclass(frozen=True)
class Dialect:
    """How a csv file is written."""

    separator: str
    comma: bool = False  # 3,5 is 3.5
    found: bool = False  # another sign than usual, and nobody said so

    @classmethod
    def of(cls, path: Path, separator: str | None = None, decimal: Decimal = "auto") -> Dialect:
        """As the user says, or as the first rows show: the sign by which all of them have as many columns, 2 at least.

        Of several such signs it is the one that makes most columns; where there is none, it is the usual one, comma or
        tab, unless another makes several columns of the header.
        """
        comma = decimal == "comma"
        if separator is not None:
            sign = SEPARATORS.get(separator.lower(), "\t" if separator == "\\t" else separator)
            if sign not in SEPARATORS.values():
                words = [*SEPARATORS, *(s for s in SEPARATORS.values() if s != "\t")]
                raise unknown("separator", separator, words)
            return cls(sign, comma)
        usual = "\t" if path.suffix.lower() == ".tsv" else ","
        widths = {sign: _widths(path, sign) for sign in (usual, *(s for s in SEPARATORS.values() if s != usual))}
        even = {sign: found[0] for sign, found in widths.items() if found and found[0] > 1 and len(set(found)) == 1}
        heads = {sign: found[0] for sign, found in widths.items() if found and found[0] > 1}
        sign = max(even or heads or {usual: 1}, key=lambda sign: (even or heads).get(sign, 0))
        if not even and usual in heads:
            sign = usual
        return cls(sign, comma, sign != usual)

    @property
    def called(self) -> str:
        return next(word for word, sign in SEPARATORS.items() if sign == self.separator)

    def number(self, text: str) -> float | None:
        """The number that a text is; None where it is none."""
        if self.comma and text and _WITH_COMMA.fullmatch(text):
            text = text.replace(".", "").replace(",", ".")
        elif self.comma and "." in text:
            return None  # 3.5 would be a number of another file
        return parsed(text)


def _widths(path: Path, separator: str) -> list[int]:
    """Values of the header and of the first rows behind it; none where the file cannot be cut so."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = (line for line in csv.reader(file, delimiter=separator, strict=True) if line)
            return [len(line) for line in islice(lines, SNIFFED + 1)]
    except (OSError, UnicodeDecodeError, csv.Error):
        return []


def header(path: Path) -> list[str]:
    """The columns of a csv file."""
    with reading(path, "a csv file"), path.open(newline="", encoding="utf-8-sig") as file:
        return next(csv.reader(file, delimiter=Dialect.of(path).separator), [])


@dataclass
class Kinds:
    """The columns of a csv file with a value that is no number, with a number written as no whole one, and with a whole
    number that has leading zeros."""

    texts: set[str] = field(default_factory=set)
    decimals: set[str] = field(default_factory=set)
    codes: set[str] = field(default_factory=set)


def kinds_of(dialects: Mapping[Path, Dialect], named: Iterable[str], label: str | None = None) -> dict[Path, Kinds]:
    """What the columns of csv files are; those that cannot be read are left out.

    01 and 1 are one number and two names. A file's column with leading zeros is one of texts where its values are
    names: where it is one of the columns `named`, or a text in another file, or the `label` without measured numbers.
    """
    made: dict[Path, Kinds] = {}
    for path, dialect in dialects.items():
        with suppress(CoterieError):  # reading its rows says why
            made[path] = _kinds(path, dialect)
    names_in = {*named, *(column for kinds in made.values() for column in kinds.texts)}
    if label is not None and not any(label in kinds.decimals for kinds in made.values()):
        names_in.add(label)
    for kinds in made.values():
        kinds.texts |= kinds.codes & names_in
    return made


def csv_rows(path: Path, known: Mapping[Path, Kinds], dialect: Dialect) -> Iterator[Rows]:
    """A csv file some rows at a time. A column is one of numbers if all of its values in the file are."""
    kinds = known[path] if path in known else _kinds(path, dialect)
    for places, columns, lines in _lines(path, dialect):
        held = {}
        for k, column in enumerate(columns):
            said = [line[k].strip() for line in lines]
            said_missing: list[str | None] = [None if s.lower() in MISSING else s for s in said]
            held[column] = names(said_missing) if column in kinds.texts else np.array(
                [np.nan if s is None else dialect.number(s) for s in said_missing], dtype=np.float64)
        yield Rows(places, held, kinds.decimals)


def _kinds(path: Path, dialect: Dialect) -> Kinds:
    found = Kinds()
    for _, columns, lines in _lines(path, dialect):
        for k, column in enumerate(columns):
            if column in found.texts:
                continue
            said = [text for line in lines if (text := line[k].strip()).lower() not in MISSING]
            if any(dialect.number(text) is None for text in said):
                found.texts.add(column)
            elif column not in found.decimals and not all(WHOLE.fullmatch(text) for text in said):
                found.decimals.add(column)
            if column not in found.codes and any(CODE.fullmatch(text) for text in said):
                found.codes.add(column)
    return found


def _lines(path: Path, dialect: Dialect) -> Iterator[tuple[Places, list[str], list[list[str]]]]:
    """(the lines on which they begin, columns, some rows)."""
    with reading(path, "a csv file"), path.open(newline="", encoding="utf-8-sig") as file:
        lines = csv.reader(file, delimiter=dialect.separator, strict=True)
        columns = [column.strip() or f"unnamed {k}" for k, column in enumerate(next(lines, []), 1)]
        if not columns:
            raise ValueError("it is empty")
        if twice := [column for column, count in Counter(columns).items() if count > 1]:
            raise ValueError(f"two columns are called '{twice[0]}'")
        held: list[list[str]] = []
        numbers: list[int] = []
        size, ended = 0, lines.line_num
        for line in lines:
            begun, ended = ended + 1, lines.line_num  # a quoted value may reach over several lines
            if not line:
                continue
            if len(line) != len(columns):
                raise ValueError(f"line {begun} has {counted(len(line), 'value')}, the header {len(columns)}")
            held.append(line)
            numbers.append(begun)
            size += sum(map(len, line))
            if len(held) * len(columns) >= CELLS or size >= CHARACTERS:
                yield Places(path.name, "line", np.array(numbers)), columns, held
                held, numbers, size = [], [], 0
        if held:
            yield Places(path.name, "line", np.array(numbers)), columns, held


def parquet_rows(path: Path) -> Iterator[Rows]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise CoterieError(LIBRARY) from error
    with reading(path, "a parquet file"), parquet.ParquetFile(path, memory_map=True) as file:
        first = 1
        for batch in file.iter_batches(batch_size=_rows(file.metadata), use_threads=False):
            batch.validate(full=True)
            places = Places(path.name, "row", np.arange(first, first + len(batch)))
            named = dict(zip(batch.schema.names, batch.columns, strict=True))
            decimals = {name for name, column in named.items() if is_decimal(column.type)}
            yield Rows(places, {name: arrow(column, name) for name, column in named.items()}, decimals)
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
        return _stacked(column.to_pylist(), name)
    if pa.types.is_decimal(kind):
        return np.array([np.nan if v is None else float(v) for v in column.to_pylist()])
    return names([None if v is None else str(v) for v in column.to_pylist()])


def is_decimal(kind: Any) -> bool:
    """Whether an arrow type keeps numbers as floats."""
    import pyarrow as pa

    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_floating(kind) or (pa.types.is_decimal(kind) and kind.scale > 0))


def _stacked(values: Sequence[Any], name: str) -> Array:
    """Lists of numbers, one a row, as [n, ...]; a missing list is one of NaN."""
    like = next((v for v in values if v is not None), None)
    if like is None:
        return np.full(len(values), np.nan)
    try:
        shape = np.array(like, dtype=np.float64).shape
        return np.array([np.full(shape, np.nan) if v is None else v for v in values], dtype=np.float64)
    except (ValueError, TypeError) as error:
        raise CoterieError(f"column '{name}' holds lists that are no numbers of one length: {error}") from error


def parsed(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
