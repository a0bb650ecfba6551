"""Models that have learned nothing: no better than a client's most frequent class, or one answer for everybody.

What such an answer scores follows from the counts of the labels, which a run folder holds; where they are not known,
nothing is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.data import SPLITS
from coterie.errors import CoterieError
from coterie.metrics.accuracy import Accuracy
from coterie.report.series import Floats
from coterie.report.table import number
from coterie.running.folder import Folder
from coterie.running.result import Result

Ints = NDArray[np.int64]

EXACT = 1e-6
"""Accuracies are counts of test samples, so those of a constant answer are met to the digit."""


def label_counts(results: Sequence[Result]) -> tuple[Ints, Ints | None] | None:
    """Samples per client and class: of all splits, and of the test split (None for runs of earlier versions)."""
    for result in results:
        if result.folder is not None:
            data = Folder(result.folder).data() or {}
            if data.get("histogram") and data.get("classes"):
                return _read(result.folder, data["histogram"], data.get("tested"))
        elif result.simulation is not None and result.simulation.federation.classes:
            by_split = {split: result.simulation.federation.histogram(split) for split in SPLITS}
            return np.sum(list(by_split.values()), axis=0), by_split["test"]
    return None


def _read(folder: Path, histogram: Any, tested: Any) -> tuple[Ints, Ints | None]:
    try:
        held = np.array(histogram, dtype=np.int64)
        test = None if tested is None else np.array(tested, dtype=np.int64)
        if held.ndim != 2 or (test is not None and test.shape != held.shape):
            raise ValueError("its counts are no tables of clients and classes")
    except (ValueError, TypeError, OverflowError) as reason:
        raise CoterieError(f"{folder / 'data.json'} is damaged: {reason}.") from reason
    return held, test


def frequent(held: Ints, tested: Ints | None) -> Floats:
    """What always answering a client's most frequent class scores: [clients], NaN for clients without test samples.

    The class is taken from training and validation data and scored on test data; without the test counts, it is the
    share of the class among all the client's samples.
    """
    return Accuracy().constant(*((held, held) if tested is None else (held - tested, tested)))


def constant(values: Floats, held: Ints, tested: Ints) -> bool:
    """Whether accuracies [seeds, clients] are those of one class for everybody, or of each client's most frequent one.

    Where every client's test data are of a single class, a perfect model scores the same, so nothing is said.
    """
    values, total = values[:, : len(tested)], tested.sum(1)
    there = (total > 0) & ~np.isnan(values).any(0)
    if not there.any() or not ((tested[there] > 0).sum(1) > 1).any():
        return False
    shares = np.column_stack([tested / np.maximum(total, 1)[:, None], frequent(held, tested)])[there]  # [there, K + 1]
    return all(bool((np.abs(shares - seed[there, None]) < EXACT).all(0).any()) for seed in values)


def percent(share: float) -> str:
    return f"{number(100 * share, 1)} %"
