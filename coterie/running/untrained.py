"""What has learned nothing: no better than a constant answer of each client, or one answer for everybody.

What such an answer scores by a metric follows from the counts of the labels, or was computed from the targets when the
run began: a run folder holds both. Where they are not known, and for a metric of which that is not known, such as a
user's own, nothing is said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie import registry
from coterie.contract.metric import Scale
from coterie.contract.net import cross_entropy, loss_name, squared_error
from coterie.data import SPLITS
from coterie.errors import CoterieError
from coterie.metrics.accuracy import Accuracy
from coterie.metrics.calibration import NLL
from coterie.metrics.regression import MAE, MSE, R2
from coterie.running.folder import Folder
from coterie.running.result import Result
from coterie.running.targets import BY, constants

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

UNTOLD = ("ece",)
"""Metrics by which an answer of label shares is good although it has learned nothing: it is well calibrated."""
EXACT = 1e-6
"""Shares, and other numbers without a unit, are met to the digit."""
ROUNDED = 1e-5
"""Of the constant answer's own score: how far one of float32 may be from it that is the same, whatever its unit."""
MET = 1e-24
"""The mean squared error of targets that are all equal, up to the rounding of their mean in float64."""

SHARES = "answering each client's label shares, whatever the input"


def label_counts(results: Sequence[Result]) -> tuple[Ints, Ints | None] | None:
    """Samples per client and class: of all splits, and of the test split (None for runs of earlier versions)."""
    for result in results:
        if result.folder is not None:
            data = _data(result.folder)
            if data.get("histogram") and data.get("classes"):
                return _read(result.folder, data["histogram"], data.get("tested"))
        elif result.simulation is not None and result.simulation.federation.classes:
            by_split = {split: result.simulation.federation.histogram(split) for split in SPLITS}
            return np.sum(list(by_split.values()), axis=0), by_split["test"]
    return None


def _data(folder: Path) -> dict[str, Any]:
    path = folder / "data.json"
    return _data_at(folder, path.stat().st_mtime_ns) if path.is_file() else {}


@lru_cache(maxsize=8)
def _data_at(folder: Path, written: int) -> dict[str, Any]:
    """Read once, however many lines of a table ask for it."""
    return Folder(folder).data() or {}


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
    """What a constant answer scores by a metric of classes, and the words for such an answer."""

    words: str
    level: Callable[[Ints, Ints], Floats]
    """Of each client's own, from what is known and what is scored [clients, classes]: [clients], NaN without any."""
    alike: Callable[[Ints], Floats]
    """Of one answer for everybody, from the test counts: [clients, answers]."""


def constant_by(scale: Scale) -> Constant | None:
    """What a constant answer scores by this metric of classes; None where that is not known, and nothing is said."""
    if scale == Accuracy().scale:
        return Constant("always answering the client's most frequent class", Accuracy().constant, one_class)
    try:
        metric = registry.metric(scale.name)
    except CoterieError:  # of a file that is elsewhere
        return None
    if metric.kind != "classes" or metric.by_class or scale.name in UNTOLD:
        return None
    return Constant(SHARES, metric.constant, _no_answers)


def _no_answers(tested: Ints) -> Floats:
    return np.zeros((len(tested), 0))


@dataclass(frozen=True)
class Level:
    """What constant answers score on the clients' test data."""

    words: str
    own: Floats  # [clients] of each client's own answer, NaN where it is not known
    alike: Floats  # [clients, answers] of one answer for everybody
    slack: float  # how near a mean may be to that of constant answers to be the same
    equal: bool = False  # targets that a constant answer of each client meets exactly
    blind: bool = False  # test data of one class for every client: a perfect model scores what a constant one does

    @property
    def perfect(self) -> bool:
        """Whether constant answers are always right, so that no model can be better."""
        known = self.own[np.isfinite(self.own)]
        return self.blind and bool(len(known)) and float(known.mean()) >= 1 - EXACT

    def cut(self, clients: int) -> Level:
        """Of the first clients."""
        return Level(self.words, self.own[:clients], self.alike[:clients], self.slack, self.equal, self.blind)


def level(results: Sequence[Result], scale: Scale) -> Level | None:
    """What constant answers score by this metric in runs on the same clients; None where that is not known."""
    counts = label_counts(results)
    if counts is None:
        return _of_targets(results, scale)
    by = _entropy(results) if scale.name == "loss" else constant_by(scale)
    if by is None:
        return None
    held, tested = counts
    own = by.level(*known_and_scored(held, tested))
    seen = held if tested is None else tested
    alike = np.zeros((len(own), 0)) if tested is None else by.alike(tested)
    return Level(by.words, own, alike, slack(scale, own), blind=of_one_class(seen))


def _entropy(results: Sequence[Result]) -> Constant | None:
    """The loss of classes, where it is the cross entropy."""
    return Constant(SHARES, NLL().constant, _no_answers) if _loss(results) == loss_name(cross_entropy) else None


def _of_targets(results: Sequence[Result], scale: Scale) -> Level | None:
    name = scale.name
    if name == "loss" and _loss(results) == loss_name(squared_error):
        name = MSE().label
    recorded = {metric.label for metric in BY}
    found = next(filter(None, map(_targets, results)), None) if name in recorded else None
    if found is None or name not in found:
        return None
    own = found[name]
    errors = found.get(MSE().label, own[:0])
    errors = errors[np.isfinite(errors)]
    equal = bool(len(errors)) and float(errors.max()) <= MET
    return Level(of_targets(name), own, np.zeros((len(own), 0)), slack(scale, own), equal)


def slack(scale: Scale, own: Floats) -> float:
    """How near a mean may be to that of constant answers, which score `own [clients]`, to be the same: EXACT for shares
    and R2, ROUNDED of the answers' own mean for others."""
    known = own[np.isfinite(own)]
    bounded = scale.percent or scale.name == R2().label
    return EXACT if bounded or not len(known) else ROUNDED * float(np.abs(known).mean())


def of_targets(name: str) -> str:
    """The words for a constant answer by a metric of numbers."""
    return f"always answering the {'median' if name == MAE().label else 'mean'} of the client's training targets"


def _targets(result: Result) -> dict[str, Floats] | None:
    """What `running.targets` says of a run's clients, by metric; None for classes and runs of earlier versions."""
    if result.folder is not None:
        data = _data(result.folder)
        try:
            return {str(name): np.array([np.nan if v is None else float(v) for v in each])
                    for name, each in data["constant"].items()} if data.get("constant") else None
        except (TypeError, ValueError, AttributeError) as reason:
            raise CoterieError(f"{result.folder / 'data.json'} is damaged: {reason}.") from reason
    if result.simulation is None or result.simulation.federation.classes:
        return None
    return constants(result.simulation.federation)


def _loss(results: Sequence[Result]) -> str:
    """What the runs' loss is called: by the library's own names only where it is the library's own."""
    first = results[0]
    if first.folder is not None:
        return str(Folder(first.folder).config().get("loss", ""))
    return "" if first.simulation is None else first.simulation.engine.net.task.name


def constant(values: Floats, level: Level) -> bool:
    """Whether values [seeds, clients] are those of one answer for everybody, or of each client's own constant answer.

    Where every client's test data are of a single class, a perfect model scores the same, so nothing is said.
    """
    clients = min(values.shape[1], len(level.own))
    values, level = values[:, :clients], level.cut(clients)
    there = np.isfinite(level.own) & np.isfinite(values).all(0)
    if not there.any() or level.blind:
        return False
    answers = np.column_stack([level.alike, level.own])[there]  # [there, answers + 1]
    return all(bool((np.abs(answers - seed[there, None]) < level.slack).all(0).any()) for seed in values)


def of_one_class(counts: Ints) -> bool:
    """Whether no client has samples of two classes."""
    return not bool(((counts > 0).sum(1) > 1).any())
