"""What the columns of a table are: the roles that the user gave them, and what a first reading shows of each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coterie.data.labels import alike, name_of, written
from coterie.data.readers.pieces import Array, Places
from coterie.data.readers.refusals import EXAMPLES, SPELLED, Problems
from coterie.data.readers.tables.rows import CLIENT, SPLIT, Reading, Rows, parsed
from coterie.data.readers.tables.suspicious import KEPT, Signs
from coterie.errors import CoterieError, unknown

CATEGORIES = 100
"""Most different values of a column that is encoded by categories."""


@dataclass(frozen=True)
class Roles:
    """Which column is what, as the user said."""

    label: str | None = None
    client: str | None = None
    split: str | None = None
    text: str | None = None
    x: str | None = None
    ignore: str | None = None
    group: str | None = None


@dataclass
class Column:
    """What is known of a column after the first reading."""

    numeric: bool = True
    categories: set[str] | None = field(default_factory=set)  # None when there are too many
    missing: Counter[str] = field(default_factory=Counter)  # by client
    gaps: list[str] = field(default_factory=list)  # where the first of them are
    signs: Signs = field(default_factory=Signs)
    strange: str = ""  # the first value that is no number
    shape: tuple[int, ...] = ()
    decimal: bool = False  # whether its file keeps the numbers as floats
    n: int = 0  # numbers seen, their mean and the sum of their squared distances to it
    mean: float = 0.0
    squares: float = 0.0

    @property
    def deviation(self) -> float:
        return math.sqrt(self.squares / self.n) if self.n else 0.0

    @property
    def size(self) -> float:
        """The root mean square of its numbers."""
        return math.hypot(self.mean, self.deviation)

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


@dataclass(frozen=True)
class Learned:
    """What a first reading shows."""

    columns: dict[str, Column]
    rows: int
    clients: int
    seen: set[str]  # the columns of all files, also those that some of them lack


def learn(
    rows: Reading, roles: Roles, problems: Problems, followed: Iterable[str] | None = None
) -> Learned:
    """Every column by name, and what is known of the table as a whole.

    Files must have the columns that are asked for, by `roles.x` or the schema that is `followed`, or else all of them
    the same ones, those of `roles.ignore` left out.
    """
    found: dict[str, Column] = {}
    total, clients, first, seen = 0, dict[str, None](), "", set[str]()
    for block in rows(problems):
        if not len(block):
            continue
        first = first or block.where
        seen |= set(block.columns)
        if found and set(found) != set(block.columns):
            _agree(found, block, first, roles, followed)
        total += len(block)
        owner = clients_of(block, role_of(roles.client, "client", block.columns, CLIENT))
        clients |= dict.fromkeys(filter(None, owner))
        for column, values in block.columns.items():
            if column not in found and total > len(block):
                continue  # not in the files before, and not asked for
            known = found.setdefault(column, Column(shape=values.shape[1:]))
            known.signs.room = max(200, KEPT // len(block.columns))
            if values.shape[1:] != known.shape:
                raise CoterieError(f"column '{column}' holds {list(values.shape[1:])} values in '{block.where}' and "
                                   f"{list(known.shape)} before.")
            known.decimal |= column in block.decimals
            _look(known, values, owner, block.places)
    for each in alike(clients):
        problems.add(SPELLED, " and ".join(f"'{name}'" for name in each))
    return Learned(found, total, len(clients), seen)


def _agree(
    found: dict[str, Column], block: Rows, first: str, roles: Roles, followed: Iterable[str] | None
) -> None:
    """Raise where a file lacks a column that is needed, or has one too many; forget those that are not needed."""
    named = [name for name in (roles.label, roles.client, roles.split, roles.group, roles.text) if name is not None]
    usual = [name for name in (CLIENT, SPLIT, "label", "client", "split") if name in found or name in block.columns]
    asked = list(followed) if followed is not None else None
    if roles.x is not None:
        asked = columns_named(roles.x, found, f"'{first}'")
    if roles.text is not None:
        asked = []
    ignored = set(roles.ignore.split(",")) | {roles.ignore} if roles.ignore is not None else set()
    needed = {*asked, *named, *usual} if asked is not None else (set(found) | set(block.columns)) - ignored
    for column in sorted(needed):
        if column in found and column in block.columns:
            continue
        has, lacks = (first, block.where) if column in found else (block.where, first)
        said = column.lstrip("\0")
        both = [c for c in found if c in block.columns and c not in (*named, *usual)]
        some = f"{','.join(both[:6])}{',...' if len(both) > 6 else ''}"
        ways = f"x={some} takes the columns that both have" if both else "the files share no features"
        why = f"'{lacks}' has no column '{said}', which '{has}' has"
        raise CoterieError(f"{why}; it is needed in every file." if asked is not None else f"{why}; {ways}.")
    for column in set(found) - set(block.columns):
        del found[column]


def _look(known: Column, values: Array, owner: Sequence[str], places: Places) -> None:
    if values.ndim == 1:
        known.signs.look(values, places)
    if values.dtype.kind == "f":
        lost = np.isnan(values).reshape(len(values), -1).any(1)
        if values.ndim == 1:
            fine = values[~np.isnan(values)]
            known.count(fine[np.isfinite(fine)])
            if known.categories is not None:
                known.categories |= {written(v) for v in np.unique(fine)[: CATEGORIES + 1]}
    else:
        lost = np.array([value is None for value in values], dtype=bool)
        known.numeric = False
        if known.categories is not None:
            known.categories |= {value for value in values if value is not None}
            known.strange = known.strange or next((v for v in values if v is not None and parsed(v) is None), "")
    if known.categories is not None and len(known.categories) > CATEGORIES:
        known.categories = None
    if lost.any():
        gone = np.flatnonzero(lost).tolist()
        known.missing.update(owner[k] for k in gone)
        known.gaps += [places(k) for k in gone[: EXAMPLES - len(known.gaps)]]


def columns_named(text: str | None, found: Mapping[str, Any], where: str = "") -> list[str]:
    """The columns that an option names; `where` is their file, for the error."""
    if text is None:
        return []
    if text in found:  # a column whose name holds a comma
        return [text]
    named = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for column in named:
        if column not in found:
            raise unknown(f"column of {where}" if where else "column", column,
                          [c for c in found if not c.startswith("\0")])
    return named


def role_of(given: str | None, usual: str, columns: Mapping[str, Any], made: str | None = None) -> str | None:
    """The column that plays a role: the one the user named, the one of that name, or one made from file names."""
    if given is not None:
        if given not in columns:
            raise unknown("column", given, [c for c in columns if not c.startswith("\0")])
        return given
    return made if made in columns else usual if usual in columns else None


def clients_of(block: Rows, column: str | None) -> list[str]:
    """The client of each row, or what else a column names; empty where it is missing."""
    if column is None:
        return [""] * len(block)
    values = block.columns[column]
    if values.ndim != 1:
        raise CoterieError(f"column '{column}' holds several values a row, so it names no client, group or split.")
    if values.dtype.kind == "f":
        return ["" if np.isnan(v) else name_of(v) for v in values]
    return ["" if v is None else v for v in values]
