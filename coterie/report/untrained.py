"""Models that have learned nothing: no better than a constant answer of each client, or one answer for everybody.

What such an answer scores by a metric follows from the counts of the labels, which a run folder holds; where they are
not known, or for a metric of which that is not known, nothing is said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie import registry
from coterie.contract.metric import Scale
from coterie.data import SPLITS
from coterie.errors import CoterieError
from coterie.metrics.accuracy import Accuracy
from coterie.report.series import Floats
from coterie.running.folder import Folder
from coterie.running.result import Result

Ints = NDArray[np.int64]

UNTOLD = ("ece",)
"""Metrics by which an answer of label shares is good although it has learned nothing: it is well calibrated."""
EXACT = 1e-6
"""Scores of a constant answer are met to the digit."""


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


def known_and_scored(held: Ints, tested: Ints | None) -> tuple[Ints, Ints]:
    """What a constant answer is taken from, training and validation data, and what it is scored on, test data.

    Without the test counts both are all the client's samples.
    """
    return (held, held) if tested is None else (held - tested, tested)


def one_class(tested: Ints) -> Floats:
    """What answering the same class for everybody scores, class by class: [clients, classes]."""
    share: Floats = tested / np.maximum(tested.sum(1), 1)[:, None]
    return share


@dataclass(frozen=True)
class Constant:
    """What a constant answer scores by a metric, and the words for such an answer."""

    words: str
    level: Callable[[Ints, Ints], Floats]
    """Of each client's own, from what is known and what is scored [clients, classes]: [clients], NaN without any."""
    alike: Callable[[Ints], Floats]
    """Of one answer for everybody, from the test counts: [clients, answers]."""


def constant_by(scale: Scale) -> Constant | None:
    """What a constant answer scores by this metric; None where that is not known, and nothing is said."""
    if scale == Accuracy().scale:
        return Constant("always answering the client's most frequent class", Accuracy().constant, one_class)
    try:
        metric = registry.metric(scale.name)
    except CoterieError:  # of a file that is elsewhere
        return None
    if metric.kind != "classes" or metric.by_class or scale.name in UNTOLD:
        return None
    return Constant("answering each client's label shares, whatever the input", metric.constant, _no_answers)


def _no_answers(tested: Ints) -> Floats:
    return np.zeros((len(tested), 0))


def constant(values: Floats, held: Ints, tested: Ints | None, by: Constant) -> bool:
    """Whether values [seeds, clients] are those of one answer for everybody, or of each client's own constant answer.

    Where every client's test data are of a single class, a perfect model scores the same, so nothing is said.
    """
    if tested is None:
        return False
    values = values[:, : len(tested)]
    there = (tested.sum(1) > 0) & ~np.isnan(values).any(0)
    if not there.any() or of_one_class(tested[there]):
        return False
    answers = np.column_stack([by.alike(tested), by.level(held - tested, tested)])[there]  # [there, answers + 1]
    return all(bool((np.abs(answers - seed[there, None]) < EXACT).all(0).any()) for seed in values)


def of_one_class(counts: Ints) -> bool:
    """Whether no client has samples of two classes."""
    return not bool(((counts > 0).sum(1) > 1).any())
