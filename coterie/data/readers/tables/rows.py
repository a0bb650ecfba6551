"""Rows of csv and parquet files, a block at a time. A block's columns are numbers, texts or arrays."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from coterie.data.readers.pieces import Array, names
from coterie.data.readers.refusals import Problems, reading
from coterie.errors import CoterieError

CELLS, CHARACTERS = 1 << 15, 1 << 21
"""A block of rows ends when it has so many cells, or so much text."""
WHOLE = re.compile(r"[+-]?[0-9]+")
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
    decimals: Set[str] = frozenset()  # columns of numbers whose file keeps them as floats, whatever their values

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))


Reading = Callable[[Problems | None], Iterator[Rows]]
"""Reads a table from its beginning; only the first reading is given the problems to fill."""


def header(path: Path) -> list[str]:
    """The columns of a csv file."""
    with reading(path, "a csv file"), path.open(newline="", encoding="utf-8-sig") as file:
        return next(csv.reader(file, delimiter="\t" if path.suffix == ".tsv" else ","), [])


@dataclass
class Kinds:
    """The columns of a csv file with a value that is no number, and with a number written as no whole one."""

    texts: set[str] = field(default_factory=set)
    decimals: set[str] = field(default_factory=set)


def csv_rows(path: Path, known: dict[Path, Kinds]) -> Iterator[Rows]:
    """A csv file some rows at a time. A column is one of numbers if all of its values in the file are."""
    kinds = known[path] if path in known else known.setdefault(path, _kinds(path))
    for first, columns, lines in _lines(path):
        held = {}
        for k, column in enumerate(columns):
            said = [line[k].strip() for line in lines]
            said_missing: list[str | None] = [None if s.lower() in MISSING else s for s in said]
            held[column] = names(said_missing) if column in kinds.texts else np.array(
                [np.nan if s is None else float(s) for s in said_missing])
        yield Rows(path.name, first, held, kinds.decimals)


def _kinds(path: Path) -> Kinds:
    found = Kinds()
    for _, columns, lines in _lines(path):
        for k, column in enumerate(columns):
            if column in found.texts:
                continue
            said = [text for line in lines if (text := line[k].strip()).lower() not in MISSING]
            if any(parsed(text) is None for text in said):
                found.texts.add(column)
            elif column not in found.decimals and not all(WHOLE.fullmatch(text) for text in said):
                found.decimals.add(column)
    return found


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


def parquet_rows(path: Path) -> Iterator[Rows]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise CoterieError(LIBRARY) from error
    with reading(path, "a parquet file"), parquet.ParquetFile(path, memory_map=True) as file:
        first = 1
        for batch in file.iter_batches(batch_size=_rows(file.metadata), use_threads=False):
            batch.validate(full=True)
            named = dict(zip(batch.schema.names, batch.columns, strict=True))
            decimals = {name for name, column in named.items() if is_decimal(column.type)}
            yield Rows(path.name, first, {name: arrow(column, name) for name, column in named.items()}, decimals)
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
