"""Tables: csv and parquet files with a label column, and perhaps columns for the client, the split and a text.

A table is read twice, some rows at a time: once to learn what its columns are, once to encode them. Tables of other
origin (Hugging Face data sets) take the same way.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from coterie.data.readers.formats import Format
from coterie.data.readers.pieces import Source, names
from coterie.data.readers.refusals import Problems
from coterie.data.readers.tables.columns import Roles
from coterie.data.readers.tables.encoding import encode
from coterie.data.readers.tables.rows import (
    CLIENT,
    CSV,
    PARQUET,
    PLAIN,
    Decimal,
    Dialect,
    Rows,
    csv_rows,
    kinds_of,
    parquet_rows,
)
from coterie.data.readers.tables.schema import Encoding, read_schema
from coterie.data.readers.text import LENGTH, WORDS, Tokenizer
from coterie.data.readers.unread import unread
from coterie.errors import CoterieError, counted


def table(
    path: str | Path, *, label: str | None = None, client: str | None = None, split: str | None = None,
    text: str | None = None, x: str | None = None, ignore: str | None = None, scale: bool = False,
    fill: str | None = None, tokenizer: str | Tokenizer = "words", words: int = WORDS, length: int = LENGTH,
    classes: str | None = None, regression: bool | None = None, schema: str | Encoding | None = None,
    shape: str | None = None, skip: bool = False, group: str | None = None, separator: str | None = None,
    decimal: Decimal = "auto", task: str | None = None,
) -> Source:
    """A csv or parquet file, or a folder of them with one file a client. Plain text of another name is read as csv.

    `label`, `client` and `split` name columns (by default those of that name), and so does `group`, whose rows of one
    value stay on one side of a split. Columns of numbers are features as they
    are; columns of at most 100 different texts become one 0/1 feature a text. `x=a,b` takes these columns alone,
    `ignore=a,b` all but these. `scale` brings every column of numbers to mean 0 and standard deviation 1 over the rows
    read. With `text`, that column is the sample, and `tokenizer` makes numbers of it; with `task`, next or masked, its
    tokens are what is predicted, and no label is needed. Missing values are reported, or
    replaced by `fill`, a number or mean. `schema=file.json` keeps how columns were encoded: it is written when there is
    no such file, and followed when there is, so that every site encodes alike. The sign between columns is found, or
    `separator` says it (comma, semicolon, tab or bar); `decimal=comma` reads 3,5 as 3.5.
    """
    path = Path(path)
    files = [path] if path.is_file() else table_files(path)
    if not files:
        raise CoterieError(f"there is no table '{path}'")
    if files[0].suffix.lower() not in (*CSV, *PLAIN, *PARQUET):
        raise CoterieError(f"a table is a file {', '.join((*CSV, *PLAIN[:-1], *PARQUET[:-1]))} or {PARQUET[-1]}, or a "
                           f"folder of csv and parquet files; '{path.name}' is none of them.")
    problems = Problems()
    problems.totals["files"] = len(files)

    roles = Roles(label, client, split, text, x, ignore, group)
    dialects = {file: Dialect.of(file, separator, decimal) for file in files
                if file.suffix.lower() not in PARQUET}
    known = kinds_of(dialects, *_named_by(roles, schema, regression, path.is_dir()))

    def _rows(file: Path) -> Iterator[Rows]:
        return csv_rows(file, known, dialects[file]) if file in dialects else parquet_rows(file)

    def rows(told: Problems | None) -> Iterator[Rows]:
        for file in files:
            try:
                for block in _rows(file):
                    if path.is_dir() and client is None:
                        block.columns[CLIENT] = names([file.stem] * len(block))
                    yield block
            except CoterieError as error:
                if len(files) == 1 or "pip install" in str(error):
                    raise
                if told is not None:
                    told.add("files cannot be read", file.name, file.stem if client is None else None,
                             str(error).rpartition(": ")[2])

    return encode(rows, path.stem if path.is_file() else path.resolve().name, problems, roles, scale=scale,
                  fill=fill, tokenizer=tokenizer, words=words, length=length, classes=classes, regression=regression,
                  schema=schema, shape=shape, skip=skip, task=task,
                  clients=[file.stem for file in files] if path.is_dir() and client is None else (),
                  notes=[*_said(dialects), *_left(path, files, schema)], decimal=decimal)


def _named_by(
    roles: Roles, schema: str | Encoding | None, regression: bool | None = None, folder: bool = False
) -> tuple[list[str], str | None]:
    """The columns whose values are names even where they look like numbers: client, group, categories; and the label,
    None where it is a number to predict."""
    followed = (schema if isinstance(schema, dict) else read_schema(schema)) or {}
    targets = followed.get("regression") if regression is None else regression
    label = roles.label or followed.get("label") or "label"
    client = roles.client or (None if folder else followed.get("client") or "client")
    found = [client, roles.group or followed.get("group")]
    found += [column for column, words in (followed.get("columns") or {}).items() if words is not None]
    return [column for column in found if column is not None], None if targets else label


def _said(dialects: Mapping[Path, Dialect]) -> list[str]:
    """Which sign was found between columns, where it is not the usual one."""
    found = {file: dialect for file, dialect in dialects.items() if dialect.found}
    return [f"{counted(sum(d.called == sign for d in found.values()), 'file')} read with the separator {sign} ("
            f"{next(file.name for file, d in found.items() if d.called == sign)}); separator=comma would read otherwise"
            for sign in dict.fromkeys(d.called for d in found.values())]


def _left(path: Path, files: Sequence[Path], schema: str | Encoding | None) -> list[str]:
    """A note on what else lies in a folder of tables."""
    if not path.is_dir():
        return []
    written = [] if schema is None or isinstance(schema, dict) else [path / os.path.relpath(schema, path)]
    return unread(path, {*files, *written}, f"of a folder of tables, {', '.join((*CSV, *PARQUET[:-1]))} and "
                                            f"{PARQUET[-1]} files are read that lie in it directly")


def table_files(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if p.suffix.lower() in (*CSV, *PARQUET)) if path.is_dir() else []


READS = (
    Format(table, 70, file=lambda path: path.suffix.lower() in (*CSV, *PARQUET),
           folder=lambda path: bool(table_files(path))),
)
