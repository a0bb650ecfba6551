"""A newcomer's samples from a file, encoded as those of the run were."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.data import Source, load, load_as, spelled
from coterie.data.labels import placed
from coterie.data.readers import find
from coterie.data.readers.npz import arrays
from coterie.errors import CoterieError, NoLabels, unknown
from coterie.running.saved import Saved

INHERITED = ("text", "tokenizer", "words", "length", "regression", "shape")
"""Options of the run's data that a newcomer's table takes over where it does not say otherwise."""

FAR = 10.0
"""Deviations of the run between its mean of a column and a newcomer's median from which on the units are doubted."""
TIMES = 5.0
"""How many times wider than the run's, or narrower and nearer to 0, a newcomer's column may be without a word."""
NEAR = 0.5
"""Deviations of the run by which a narrow column must be off as well: where a few huge values make the run's deviation,
every client without such is narrow."""
QUARTILES = 1.349
"""Between the quartiles of a normal distribution of deviation 1."""


def read(
    path: str, client: str | None = None, saved: Saved | None = None
) -> tuple[tuple[Tensor, Tensor], str, NDArray[Any] | None, tuple[str, ...]]:
    """One client's labelled samples from a file, spelled as for --data, its name, the samples' groups if they have any,
    and what was filled in for missing values; NoLabels where there are no labels.

    A table is encoded as the run's was: columns, categories, scale and classes. Labels are found among the run's
    classes by their names or numbers; one that is not there is refused.
    """
    place, options = spelled(path)
    given: dict[str, Any] = {**_as_in_the_run(place, saved), **options}
    try:
        source = _loaded(place, given, saved)
    except NoLabels:
        # leaves out samples without a label, and nothing else is wrong
        source = _loaded(place, {**given, "skip": True}, saved)
    x, y, filled = source.x, source.y, tuple(note for note in source.notes if note.startswith("filled in"))
    if saved is not None:
        y = placed(y, source.classes, saved.spec.classes, saved.spec.class_names, path)
    if source.client is not None:
        names = sorted({str(c) for c in source.client})
        if client is None and len(names) > 1:
            raise CoterieError(f"{path} holds the samples of {len(names)} clients; name the newcomer with --client.")
        if client is not None and client not in names:
            raise unknown(f"client in {path}", client, names)
        name = client or names[0]
        mine = torch.from_numpy(np.array([str(c) == name for c in source.client]))
        return (x[mine], y[mine]), name, None if source.group is None else source.group[mine.numpy()], filled
    if client is not None:
        raise CoterieError(f"{path} names no clients; leave --client out.")
    return (x, y), Path(place).stem, source.group, filled


def _loaded(place: str, given: Mapping[str, Any], saved: Saved | None) -> Source:
    return load(place, **given) if saved is None else load_as(place, saved.spec.classes, **given)


def _as_in_the_run(place: str, saved: Saved | None) -> dict[str, Any]:
    """How the run read its table, for one more: its encoding, and how it made samples of texts."""
    if saved is None or saved.experiment is None:
        return {}
    asked, kind = spelled(saved.experiment.data)[1], find(place)
    if kind == "npz" and asked.get("group") in arrays(Path(place)):
        return {"group": asked["group"]}
    if saved.spec.encoding is None or kind != "table":
        return {}
    return {"schema": saved.spec.encoding, **{name: asked[name] for name in INHERITED if name in asked}}


# -- units -------------------------------------------------------------------------------------------------------------


def other_units(encoding: Mapping[str, Any] | None, x: Tensor, y: Tensor) -> dict[str, str]:
    """Columns that lie so far from the run's that they look like other units, each with a sentence.

    `x [n, ...]` is encoded as the run's table was, and `y` is in the user's unit. Only scaled columns, and a number to
    predict that was scaled, have a mean and a deviation to compare with.
    """
    scale: Mapping[str, Any] = (encoding or {}).get("scale") or {}
    if encoding is None or not scale or not len(x):
        return {}
    columns: dict[str, NDArray[np.float64]] = {}  # as the run standardised them
    flat, place = x.flatten(1).double().cpu().numpy(), 0
    widths = {name: 1 if words is None else len(words) for name, words in encoding["columns"].items()}
    if sum(widths.values()) == flat.shape[1]:
        for name, width in widths.items():
            if name in scale and encoding["columns"][name] is None:
                columns[name] = flat[:, place]
            place += width
    label = str(encoding.get("label"))
    if encoding.get("regression") and label in scale and y.ndim == 1:
        columns[label] = (y.double().cpu().numpy() - scale[label][0]) / scale[label][1]
    found = {}
    for name, values in columns.items():
        mean, deviation = map(float, scale[name])
        own = mean + deviation * values
        if _unlike(values, own, mean):
            here, there = (f"{_short(centre)} ± {_short(spread)}"
                           for centre, spread in ((own.mean(), own.std()), (mean, deviation)))
            found[name] = f"'{name}' is {here} here and {there} in the run (mean ± deviation): other units?"
    return found


def _short(value: float) -> str:
    """Three digits, and all of them before the point where they are not too many."""
    return f"{value:.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"


def _unlike(standardised: NDArray[np.float64], own: NDArray[np.float64], mean: float) -> bool:
    """Whether a newcomer's values, of which the run's have mean 0 and deviation 1, are hardly of the same unit.

    Clients differ: a ward for children has other ages, and everybody's year is narrow. A unit moves all values, far
    away or apart, or brings them together near 0. Quartiles look past a few wrong values, and 0 and 1 have no unit.
    """
    if np.isin(np.round(own, 4), (0, 1)).all():
        return False
    low, middle, high = np.quantile(standardised, (0.25, 0.5, 0.75))
    narrow = np.ptp(standardised) > 0 and standardised.std() < 1 / TIMES and abs(own.mean()) < abs(mean) / TIMES
    return bool(
        abs(middle) > FAR or (high - low) / QUARTILES > TIMES or (narrow and abs(standardised.mean()) > NEAR)
    )
