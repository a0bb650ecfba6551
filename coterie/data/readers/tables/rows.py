"""Rows of csv and parquet files, a block at a time. A block's columns are numbers, texts or arrays."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from coterie.data.readers.pieces import Array, Places, names
from coterie.data.readers.refusals import Problems, reading, refuse_bomb
from coterie.data.readers.tables.pages import Pages, pages_of
from coterie.errors import CoterieError, counted, unknown
from coterie.files import opened, refuse_irregular

CELLS, CHARACTERS = 1 << 15, 1 << 21
"""A block of rows ends when it has so many cells, or so much text."""
MOST_COLUMNS = 50_000
"""Each is looked at by itself, which takes some seconds for so many."""
NUMBER = 8
"""Bytes of a cell that became a number."""
REPEATED = 1 << 26
"""Bytes that rows of a parquet file are unpacked to at once where a few of them may be very many."""
HELD = 4
"""Times that a row's numbers are in memory while it is encoded."""
MOST_LETTERS, MOST_WRITTEN = 1 << 24, 1 << 27
"""Bytes of one text; and those of a block of what is neither number, text nor list, and is written out as text."""
WHOLE = re.compile(r"[+-]?[0-9]+")
CODE = re.compile(r"[+-]?(0[0-9]+|[0-9]{16,})")
"""A whole number that is a name where names are: with zeros before it, or with so many digits that others share its
float."""
MISSING = ("", "na", "n/a", "nan", "null", "none", "?")
CSV, PARQUET = (".csv", ".tsv"), (".parquet", ".pq")
PLAIN = (".txt", ".dat", ".data", "")
"""Names that csv files have as well, and others too: such a file is a table where format=table says so."""
LIBRARY = "parquet files need pyarrow; install it with: pip install 'coterie[tables]'"
CLIENT, SPLIT, LABEL = "\0client", "\0split", "\0label"
"""Columns that come from elsewhere than a file's content; no file can have such a column. A schema whose label is LABEL
reads samples without labels."""


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


def unlabelled(block: Rows) -> Rows:
    """With a label of 0 in each row, for samples without labels."""
    return Rows(block.places, {**block.columns, LABEL: np.zeros(len(block))}, block.decimals)


Reading = Callable[[Problems | None], Iterator[Rows]]
"""Reads a table from its beginning; only the first reading is given the problems to fill."""


SEPARATORS = {"comma": ",", "semicolon": ";", "tab": "\t", "bar": "|"}
SNIFFED = 30
"""Rows behind the header that decide which sign separates columns."""
Decimal = Literal["auto", "point", "comma"]
_POINTED = r"[1-9]\d{0,2}(\.\d{3})"
_WITH_COMMA = re.compile(rf"[+-]?({_POINTED}{{2,}}|({_POINTED}+|\d+)?,\d+)([eE][+-]?\d+)?")
"""Points mark thousands beside a decimal comma, or where there are two: 0.119 and 1.234 alone may be decimals."""


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
        return with_comma(text) if self.comma and ("," in text or "." in text) else parsed(text)


def with_comma(text: str) -> float | None:
    """The number with a decimal comma, or with points for thousands, that a text is; None where it is none."""
    return float(text.replace(".", "").replace(",", ".")) if _WITH_COMMA.fullmatch(text) else None


def _widths(path: Path, separator: str) -> list[int]:
    """Values of the header and of the first rows behind it; none where the file cannot be cut so."""
    try:
        with opened(path, newline="", encoding="utf-8-sig") as file:
            lines = (line for line in csv.reader(file, delimiter=separator, strict=True) if line)
            return [len(line) for line in islice(lines, SNIFFED + 1)]
    except (OSError, UnicodeDecodeError, csv.Error):
        return []


def header(path: Path) -> list[str]:
    """The columns of a csv file."""
    with reading(path, "a csv file"), opened(path, newline="", encoding="utf-8-sig") as file:
        return next(csv.reader(file, delimiter=Dialect.of(path).separator), [])


@dataclass
class Kinds:
    """The columns of a csv file with a value that is no number, with a number written as no whole one, and with a whole
    number that has leading zeros or more digits than can be told apart as numbers."""

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
    with reading(path, "a csv file"), opened(path, newline="", encoding="utf-8-sig") as file:
        lines = csv.reader(file, delimiter=dialect.separator, strict=True)
        columns = [column.strip() or f"unnamed {k}" for k, column in enumerate(next(lines, []), 1)]
        if not columns:
            raise ValueError("it is empty")
        _refuse_width(len(columns))
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


def _refuse_width(columns: int) -> None:
    if columns > MOST_COLUMNS:
        raise ValueError(f"{columns} columns, at most {MOST_COLUMNS} are read; an .npz file holds more")


def parquet_rows(path: Path) -> Iterator[Rows]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise CoterieError(LIBRARY) from error
    refuse_irregular(path)
    with reading(path, "a parquet file"), parquet.ParquetFile(path, memory_map=True) as file:
        size, metadata = path.stat().st_size, file.metadata
        _refuse_width(metadata.num_columns)
        refuse_bomb(size, NUMBER * metadata.num_rows * metadata.num_columns)
        rows = _rows(metadata, path)
        first, total = 1, 0
        for batch in file.iter_batches(batch_size=rows, use_threads=False):
            batch.validate(full=True)
            total += sum(map(written_out, batch.columns))
            refuse_bomb(size, total)
            places = Places(path.name, "row", np.arange(first, first + len(batch)))
            named = dict(zip(batch.schema.names, batch.columns, strict=True))
            decimals = {name for name, column in named.items() if is_decimal(column.type)}
            yield Rows(places, {name: arrow(column, name) for name, column in named.items()}, decimals)
            first += len(batch)


def _rows(metadata: Any, path: Path) -> int:
    """How many rows of a parquet file make a block; one that would become very large is refused.

    A dictionary's text is said again by a number, and a text of DELTA_BYTE_ARRAY by its length, so that of the longest
    one there may be as many as rows.
    """
    size, total, listed, rows = path.stat().st_size, 0, 0, CELLS
    for group, k, pages in pages_of(path, metadata):
        column = metadata.schema.column(k)
        numbers = (pages.values + pages.words) * max(NUMBER, column.length or 0)
        if column.max_repetition_level:  # one row may have all of the values
            listed += numbers
            numbers *= HELD
        total += pages.size + numbers
        refuse_bomb(size, total)
        if column.physical_type == "BYTE_ARRAY" and (pages.prefixed or pages.words):
            longest = pages.largest if pages.prefixed else _longest(path, group, column.path, pages)
            total += pages.values * longest if column.max_repetition_level else 0
            refuse_bomb(size, total)
            rows = min(rows, REPEATED // max(longest, 1))
    groups = [metadata.row_group(k) for k in range(metadata.num_row_groups)]
    said = sum(max(0, group.total_byte_size) for group in groups)
    return max(1, min(rows, block_rows(metadata.num_rows, said + listed, metadata.num_columns)))


def _longest(path: Path, group: int, column: str, pages: Pages) -> int:
    """Bytes of the longest text of a dictionary; of the largest page where that cannot be told."""
    import pyarrow as pa
    import pyarrow.compute as compute
    import pyarrow.parquet as parquet

    if pages.largest <= CHARACTERS // CELLS:
        return pages.largest
    with suppress(pa.ArrowException), parquet.ParquetFile(path, memory_map=True, read_dictionary=[column]) as file:
        for batch in file.iter_batches(batch_size=1, row_groups=[group], columns=[column], use_threads=False):
            held = batch.columns[0]
            while _is_list(held.type):
                held = held.values
            if len(batch.columns) == 1 and pa.types.is_dictionary(held.type) and len(held.dictionary) >= pages.words:
                held.dictionary.validate(full=True)
                return int(compute.max(compute.binary_length(held.dictionary)).as_py() or 0)
            break
    return pages.largest


def block_rows(rows: int, size: int, columns: int) -> int:
    """Rows of a block, for a table of so many rows, bytes and columns."""
    return max(1, min(CELLS // max(columns, 1), CHARACTERS * max(rows, 1) // max(size, 1)))


def arrow(column: Any, name: str) -> Array:
    """An arrow column as `Rows` wants it."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_dictionary(kind):
        return _looked_up(column, name)
    if pa.types.is_null(kind):
        return np.full(len(column), np.nan)
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return np.array([np.nan if v is None else float(v) for v in column.to_pylist()]) if column.null_count else (
            np.asarray(column.to_numpy(zero_copy_only=False)).astype(np.float64))
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return names([None if v is None or v.strip() == "" else v.strip() for v in column.to_pylist()])
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind) or pa.types.is_large_list(kind):
        return _stacked(column, name)
    if pa.types.is_decimal(kind):
        return np.array([np.nan if v is None else float(v) for v in column.to_pylist()])
    if written_out(column) > MOST_WRITTEN:
        raise ValueError(f"column '{name}' of type {kind} holds {written_out(column)} bytes, too many to be told apart")
    return names([None if v is None else str(v) for v in column.to_pylist()])


def is_decimal(kind: Any) -> bool:
    """Whether an arrow type keeps numbers as floats."""
    import pyarrow as pa

    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_floating(kind) or (pa.types.is_decimal(kind) and kind.scale > 0))


def written_out(column: Any) -> int:
    """Bytes of an arrow column when each text is written out as often as it is said."""
    import pyarrow as pa
    import pyarrow.compute as compute

    kind = column.type
    if pa.types.is_dictionary(kind):
        words, each = column.dictionary, written_out(column.dictionary)
        if not _is_text(kind.value_type) or "view" in str(kind.value_type):
            return len(column) * (NUMBER if pa.types.is_primitive(kind.value_type) else each)
        sizes = compute.take(compute.cast(compute.binary_length(words), "int64"), column.indices)
        return NUMBER * len(column) + int(compute.sum(sizes).as_py() or 0)
    if _is_text(kind):
        if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):  # 16 bytes each, and the length comes first
            views = np.frombuffer(column.buffers()[1] or b"", np.int32).reshape(-1, 4)
            sizes = pa.array(views[column.offset : column.offset + len(column), 0].astype(np.int64))
        else:
            sizes = compute.cast(compute.binary_length(column), "int64")
        longest = int(compute.max(sizes).as_py() or 0)
        if longest > MOST_LETTERS and "string" in str(kind):
            raise ValueError(f"a text of {longest} bytes, at most {MOST_LETTERS} are read")
        return NUMBER * len(column) + int(compute.sum(sizes).as_py() or 0)
    if pa.types.is_map(kind):
        return NUMBER * len(column) + written_out(column.keys) + written_out(column.items)
    if _is_list(kind):
        return NUMBER * len(column) + written_out(column.flatten())
    if pa.types.is_struct(kind):
        return NUMBER * len(column) + sum(map(written_out, column.flatten()))
    if isinstance(kind, pa.BaseExtensionType):
        return written_out(column.storage)
    if not (pa.types.is_primitive(kind) or pa.types.is_fixed_size_binary(kind) or pa.types.is_decimal(kind)
            or pa.types.is_null(kind)):
        raise ValueError(f"a column of type {kind} is not read")  # runs, and lists that share their values
    return len(column) * max(NUMBER, 0 if pa.types.is_null(kind) else kind.bit_width // 8)


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
                or pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _looked_up(column: Any, name: str) -> Array:
    """A column of numbers of values: each value is made once, and rows that have it share it."""
    if not len(column.dictionary):
        return arrow(column.dictionary_decode(), name)
    lost = np.asarray(column.indices.is_null())
    used, at = np.unique(np.asarray(column.indices.fill_null(0)), return_inverse=True)
    held: Array = arrow(column.dictionary.take(used), name)[at]
    if lost.any():
        held[lost] = None if held.dtype.kind == "O" else np.nan
    return held


def _stacked(column: Any, name: str) -> Array:
    """Lists of numbers, one a row, as [n, ...]; a missing list is one of NaN."""
    import pyarrow.compute as compute

    there = np.asarray(column.is_valid())
    values, shape = column.drop_null(), list[int]()
    if not len(values):
        return np.full(len(column), np.nan)
    try:
        while _is_list(values.type):
            lengths = compute.unique(compute.list_value_length(values)).to_pylist()
            if len(lengths) != 1 or lengths[0] is None:
                found = " and ".join("no" if n is None else str(n) for n in lengths[:2])
                raise ValueError(f"some have {found} values" if lengths else "they are empty")
            shape.append(lengths[0])
            values = values.flatten()
        held = arrow(values, name)
        flat = held if held.dtype.kind == "f" else np.array(held.tolist(), dtype=np.float64)
    except (ValueError, TypeError) as error:
        raise CoterieError(f"column '{name}' holds lists that are no numbers of one length: {error}") from error
    stacked = flat.reshape(int(there.sum()), *shape)
    if there.all():
        return stacked
    whole = np.full((len(column), *shape), np.nan)
    whole[there] = stacked
    return whole


def parsed(text: str) -> float | None:
    """The number that a text is; Python's 1_2 for 12 is a name in everybody else's files."""
    try:
        return None if "_" in text else float(text)
    except ValueError:
        return None
