"""Numbers before they are shown: means over seeds, and which of many points are kept."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def over_seeds(values: Floats) -> Floats:
    """The mean over the first axis of what is there; NaN where nothing is."""
    there = ~np.isnan(values)
    total = np.where(there, values, 0).sum(0)
    return np.where(there.any(0), total / np.maximum(there.sum(0), 1), np.nan)


def finite(values: Floats) -> Floats:
    """NaN in place of what cannot be drawn: the infinite loss of a model that diverged."""
    return np.where(np.isfinite(values), values, np.nan)


def thinned(count: int, most: int) -> NDArray[np.int64]:
    """At most so many places of `count` in a row, evenly spaced, with the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))
