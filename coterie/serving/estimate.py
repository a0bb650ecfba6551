"""How good a newcomer's model will be: cross-validation, whether to adapt, and the estimate with its intervals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from coterie.contract.metric import Scale
from coterie.contract.net import Net
from coterie.data import groups
from coterie.data.partition import Ints
from coterie.evaluation import intervals
from coterie.metrics.accuracy import Accuracy, right

FOLDS = 10
"""Of the cross-validation behind the estimate; as many as samples where those are fewer."""
REPLICAS = 3
"""Models a fold makes, with other orders of batches and other validation samples: one of them is counted, all of them
show how far a model that is made again differs."""
INNER = 5
"""Folds of the comparison that decides whether to adapt."""

Array = np.ndarray[Any, np.dtype[np.float64]]
Adapt = Literal["auto", "yes", "no"]
Fold = tuple[Ints, Ints]
"""Sample numbers kept for everything that makes a model, and those held out to score it."""


def cut(samples: Ints, folds: int, rng: np.random.Generator, group: Ints | None = None) -> list[Fold]:
    """The folds of a cross-validation; no fold is empty, and a `group` of samples is in one, if there are several."""
    pieces = np.array_split(rng.permutation(samples), min(folds, len(samples)))
    if group is not None and len(np.unique(group[samples])) > 1:
        pieces = groups.folds(samples, group, folds, rng)
    return [
        (np.concatenate([piece for j, piece in enumerate(pieces) if j != k]), held) for k, held in enumerate(pieces)
    ]


def held_out(net: Net, row: Tensor, x: Tensor, y: Tensor) -> Held:
    """Samples by the model of a row `[D]`."""
    with torch.no_grad():
        outputs = net(row, x)
        loss = net.task.told(outputs, y)
    correct = right(outputs, y) if net.task.classes else torch.zeros(len(x))
    return Held(correct.double().cpu().numpy(), loss.double().cpu().numpy())


@dataclass(frozen=True)
class Held:
    """Held-out samples: whether each was predicted correctly (0 or 1) and its loss, `[h]`."""

    right: Array
    loss: Array

    @classmethod
    def of(cls, parts: Iterable[Held]) -> Held:
        """All of them together."""
        right, loss = zip(*((part.right, part.loss) for part in parts), strict=True)
        return cls(np.concatenate(right), np.concatenate(loss))

    @property
    def rank(self) -> tuple[float, float]:
        """Higher is better: correct samples, then the loss."""
        return float(self.right.sum()), -float(self.loss.sum())

    def facts(self) -> dict[str, Any]:
        return {"n": len(self.loss), "correct": int(self.right.sum()), "loss": float(self.loss.mean())}


@dataclass(frozen=True)
class Decision:
    """Whether to adapt, and the cross-validation that says so: served and adapted; none where it was not asked."""

    adapt: bool
    served: Held | None = None
    adapted: Held | None = None


def decide(folds: Sequence[tuple[Held, Held]], adapt: Adapt) -> Decision:
    """To adapt where that gives more correct held-out samples, or as many and a smaller loss."""
    if not folds:
        return Decision(adapt == "yes")
    served, adapted = (Held.of(both[stage] for both in folds) for stage in (0, 1))
    return Decision(adapted.rank > served.rank, served, adapted)


@dataclass(frozen=True)
class Estimate:
    """What the model scores on samples it has not seen, counted by cross-validation on the newcomer's `n` samples."""

    scale: Scale  # of accuracy, or of the run's loss where it predicts numbers
    value: float
    interval: tuple[float, float]  # for the metric on `future` further samples of this client, at intervals.LEVEL
    future: int
    confidence: tuple[float, float]  # for the metric on endlessly many
    n: int
    folds: int
    drift: float  # standard deviation between models made again from samples like these

    @property
    def metric(self) -> str:
        """Its name."""
        return self.scale.name


def drift(folds: Sequence[Array]) -> float:
    """tau^2: how much the mean of a model's scores varies when it is made again, beyond what each sample does alone.

    `folds` hold the scores `[replicas, h]` of a fold's held-out samples. tau^2 is the mean covariance, over replicas,
    of two different samples of a fold (never below 0): Var(sum) = sum of variances + sum of covariances.
    """
    found = pairs = 0.0
    for scores in folds:
        found += float(scores.sum(1).var(ddof=1) - scores.var(0, ddof=1).sum())
        pairs += scores.shape[1] * (scores.shape[1] - 1)
    return max(found / pairs, 0.0) if pairs else 0.0


def estimated(folds: Sequence[Sequence[Held]], future: int, classes: bool, loss: Scale) -> Estimate:
    """From every fold's replicas: the first ones are counted, all of them give tau^2; `loss` is how a loss is read.

    The model handed out is one more draw, and the estimate the mean of as many draws as folds: tau^2 (1 + 1 / folds).
    """
    counted = Held.of(replicas[0] for replicas in folds)
    n = len(counted.loss)
    stacked = [np.stack([one.right if classes else one.loss for one in replicas]) for replicas in folds]
    extra = drift(stacked) * (1 + 1 / len(folds))
    if classes:
        correct = int(counted.right.sum())
        worth = intervals.worth(correct, n, extra)
        k = correct * worth / n
        interval, confidence = intervals.predictive(k, worth, future), intervals.clopper_pearson(k, worth)
        return Estimate(Accuracy().scale, correct / n, interval, future, confidence, n, len(folds), extra**0.5)
    mean, deviation = float(counted.loss.mean()), float(counted.loss.std(ddof=1))
    interval, endless = (intervals.mean_predictive(mean, deviation, n, m, extra) for m in (future, 0))
    return Estimate(loss, mean, interval, future, endless, n, len(folds), extra**0.5)
