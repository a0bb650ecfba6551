"""What the columns of a table are: the roles that the user gave them, and what a first reading shows of each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coterie.data.labels import written
from coterie.data.readers.pieces import Array
from coterie.data.readers.refusals import Problems
from coterie.data.readers.tables.rows import CLIENT, Reading, Rows, parsed
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


@dataclass
class Column:
    """What is known of a column after the first reading."""

    numeric: bool = True
    categories: set[str] | None = field(default_factory=set)  # None when there are too many
    missing: Counter[str] = field(default_factory=Counter)  # by client
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


def learn(rows: Reading, roles: Roles, problems: Problems) -> tuple[dict[str, Column], int]:
    """Every column by name, and the number of rows."""
    found: dict[str, Column] = {}
    total, spelled = 0, dict[str, str]()
    for block in rows(problems):
        if not len(block):
            continue
        missing = set(found) ^ set(block.columns) if found else set()
        if missing:
            raise CoterieError(f"'{block.where}' and the files before differ in columns: {', '.join(sorted(missing))}.")
        total += len(block)
        owner = clients_of(block, role_of(roles.client, "client", block.columns, CLIENT))
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
            known.decimal |= column in block.decimals
            _look(known, values, owner)
    return found, total


def _look(known: Column, values: Array, owner: Sequence[str]) -> None:
    if values.dtype.kind == "f":
        lost = np.isnan(values).reshape(len(values), -1).any(1)
        fine = values[~np.isnan(values)]
        if values.ndim == 1:
            known.count(fine[np.isfinite(fine)])
        if known.categories is not None and values.ndim == 1:
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
        known.missing.update(owner[k] for k in np.flatnonzero(lost).tolist())


def role_of(given: str | None, usual: str, columns: Mapping[str, Any], made: str = "") -> str | None:
    """The column that plays a role: the one the user named, the one of that name, or one made from file names."""
    if given is not None:
        if given not in columns:
            raise unknown("column", given, [c for c in columns if not c.startswith("\0")])
        return given
    return made if made in columns else usual if usual in columns else None


def clients_of(block: Rows, column: str | None) -> list[str]:
    """The client of each row; empty where it is missing."""
    if column is None:
        return [""] * len(block)
    values = block.columns[column]
    if values.ndim != 1:
        raise CoterieError(f"column '{column}' holds several values a row, so it names no clients.")
    if values.dtype.kind == "f":
        return ["" if np.isnan(v) else written(v) for v in values]
    return ["" if v is None else v for v in values]
