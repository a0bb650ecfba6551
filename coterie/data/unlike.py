"""A client whose numbers look like other units than the others'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from coterie.data.partition import Ints

FAR = 10.0
"""Deviations of the others between their mean of a column and a client's median from which on units are doubted."""
TIMES = 5.0
"""How many times wider than the others', or narrower and nearer to 0, a client's column may be without a word."""
NEAR = 0.5
"""Deviations of the others by which a narrow column must be off as well: where a few huge values make the deviation,
every client without such is narrow."""
QUARTILES = 1.349
"""Between the quartiles of a normal distribution of deviation 1."""
FEWEST = 5
"""Samples from which on the units of a training client are doubted."""
VALUES = 1 << 24
"""Values of all columns and clients together that are looked at; of more, rows at equal distances are."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Shape:
    """What a client's values of one column look like, in their own unit.

    Clients differ: a ward for children has other ages, and everybody's year is narrow. A unit moves all values, far
    away or apart, or brings them together near 0. Quartiles look past a few wrong values; 0 and 1 have no unit.
    """

    n: int
    mean: float
    deviation: float
    quartiles: tuple[float, float, float]
    constant: bool
    binary: bool

    @classmethod
    def of_columns(cls, values: Floats) -> list[Shape]:
        """Of each column of `values [n, columns]`; NaN is left out."""
        lacking = np.isnan(values)
        some = lacking.any(0)
        if some.any():
            whole = iter(cls.of_columns(values[:, ~some]))
            return [cls._of_column(column[~gaps]) if gaps.any() else next(whole)
                    for column, gaps in zip(values.T, lacking.T, strict=True)]
        quartiles = np.quantile(values, (0.25, 0.5, 0.75), axis=0).T.tolist()
        constant = np.asarray((values == values[:1]).all(0))
        binary = np.asarray(np.isin(np.round(values, 4), (0, 1)).all(0))
        facts = zip(values.mean(0).tolist(), values.std(0).tolist(), quartiles, constant, binary, strict=True)
        return [cls(len(values), mean, spread, (low, middle, high), bool(same), bool(two))
                for mean, spread, (low, middle, high), same, two in facts]

    @classmethod
    def _of_column(cls, values: Floats) -> Shape:
        """Of one column; without any value it has no shape of its own, and `n` says so."""
        return cls.of_columns(values[:, None])[0] if len(values) else cls(0, 0.0, 0.0, (0.0, 0.0, 0.0), True, True)

    def away(self, mean: float, deviation: float) -> bool:
        """Whether it lies far from numbers of this mean and deviation, or far apart."""
        low, middle, high = self.quartiles
        far = abs(middle - mean) > FAR * deviation or (high - low) / QUARTILES > TIMES * deviation
        return far and not self.binary

    def together(self, mean: float, deviation: float) -> bool:
        """Whether it lies together near 0 beside numbers of this mean and deviation."""
        narrow = not self.constant and self.deviation < deviation / TIMES and abs(self.mean) < abs(mean) / TIMES
        return narrow and abs(self.mean - mean) > NEAR * deviation and not self.binary

    def __str__(self) -> str:
        return f"{short(self.mean)} ± {short(self.deviation)}"


def short(value: float) -> str:
    """Three digits, and all of them before the point where they are not too many."""
    return f"{value:.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"


# -- a client among the others -----------------------------------------------------------------------------------------


def number_columns(encoding: Mapping[str, Any], width: int) -> dict[str, int]:
    """Where in samples of this width a table's columns of numbers stand; none where they hold something else."""
    places, place = {}, 0
    for name, words in encoding["columns"].items():
        if words is None:
            places[name] = place
        place += 1 if words is None else len(words)
    return places if place == width else {}


def without_filled(values: Floats, columns: Sequence[str], encoding: Mapping[str, Any]) -> Floats:
    """`values [n, columns]` of samples, with NaN for what was filled in.

    A gap filled with the run's mean lies as far from a client's numbers in another unit as the run does, and a single
    one would make them as wide. Who happens to have measured the very same number is left out with it.
    """
    fill: Mapping[str, float] = encoding.get("fill") or {}
    scale: Mapping[str, Sequence[float]] = encoding.get("scale") or {}
    marks = [(fill[name] - scale.get(name, (0.0, 1.0))[0]) / scale.get(name, (0.0, 1.0))[1] if name in fill else np.nan
             for name in columns]
    return np.where(values == np.array(marks, dtype=np.float32), np.nan, values) if fill else values


def notes(x: Tensor, y: Tensor, bounds: Ints, names: Sequence[str], encoding: Mapping[str, Any] | None) -> list[str]:
    """A note for each column of numbers, and for a number to predict, that looks like another unit at a client.

    Samples are in client order. Only tables, which have an `encoding`, are looked at.
    """
    if not encoding or len(names) < 2:
        return []
    places = number_columns(encoding, x.shape[1]) if x.ndim == 2 else {}
    target = [str(encoding.get("label"))] if y.is_floating_point() and y.ndim == 1 else []
    scale: Mapping[str, Any] = encoding.get("scale") or {}
    mean, deviation = np.array([scale.get(name, (0.0, 1.0)) for name in places]).reshape(-1, 2).T
    every = max(1, x.numel() // VALUES)
    shapes: list[list[Shape]] = []  # [clients][columns]
    for b0, _, _, b3 in bounds.tolist():
        values = x[b0:b3:every][:, list(places.values())].double().cpu().numpy() if places else np.empty((0, 0))
        values = without_filled(values, list(places), encoding)
        own = Shape.of_columns(mean + deviation * values) if places else []
        own += Shape.of_columns(y[b0:b3:every, None].double().cpu().numpy()) if target else []
        shapes.append(own)
    said = []
    for k, name in enumerate([*places, *target]):
        for i, there in _odd([each[k] for each in shapes]):
            what = f"the number to predict, '{name}'," if name in target else f"column '{name}'"
            way = "" if name in target else f", or leave the column out with ignore={name}"
            said.append(f"{what} is {shapes[i][k]} at client {names[i]} and {there} at the others (mean ± deviation): "
                        f"other units? Write it in one unit at all clients{way}")
    return said


def _odd(clients: Sequence[Shape]) -> list[tuple[int, str]]:
    """Clients of another unit than the others, by number, each with what the others are; none where these are many.

    One whose values are far away makes all others narrow, so it is looked for first, and left out.
    """
    facts = np.array([(each.n, each.mean, each.deviation) for each in clients])  # [clients, 3]
    left, found = np.ones(len(clients), dtype=bool), list[int]()
    most = max(1, len(clients) // 4)  # if more, clients differ in this column, whatever its unit
    while len(found) <= most:
        beside: dict[int, tuple[float, float]] = {}
        for i in np.flatnonzero(left & (facts[:, 0] >= FEWEST)).tolist():
            left[i] = False
            if facts[left, 0].sum() >= FEWEST and (pooled := _pooled(facts[left]))[1] > 0:
                beside[i] = pooled
            left[i] = True
        away = {i: abs(clients[i].quartiles[1] - mean) / deviation for i, (mean, deviation) in beside.items()
                if clients[i].away(mean, deviation)}
        if not away:
            found += [i for i, others in beside.items() if clients[i].together(*others)]
            break
        found.append(max(away, key=lambda i: away[i]))
        left[found[-1]] = False
    if not found or len(found) > most:
        return []
    there = " ± ".join(map(short, _pooled(np.delete(facts, found, axis=0))))
    return [(i, there) for i in found]


def _pooled(facts: Floats) -> tuple[float, float]:
    """Mean and deviation of all together, from (n, mean, deviation) of each (Chan, Golub and LeVeque 1979)."""
    n, means, deviations = facts.T
    mean = float((n * means).sum() / n.sum())
    return mean, float(np.sqrt((n * (deviations**2 + (means - mean) ** 2)).sum() / n.sum()))
