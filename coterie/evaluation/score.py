"""What an evaluation found: the scores of every client, stage by stage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coterie.contract.metric import Scale
from coterie.metrics.accuracy import Accuracy
from coterie.metrics.loss import loss_title

Array = np.ndarray[Any, np.dtype[np.float64]]


LOSS = Scale("loss", "loss", higher=False)
"""How a loss of no particular name is read."""


def loss_scale(classes: int, name: str = "") -> Scale:
    """How a run's loss is read: by its name; where nobody wrote that down, that of targets (0 classes) is their MSE."""
    return replace(LOSS, title=loss_title(name) if name else LOSS.title if classes else "MSE")


@dataclass(frozen=True)
class Scores:
    """One stage of one evaluation, per client: metrics on test and on validation data, and which of them is read."""

    clients: np.ndarray[Any, np.dtype[np.int64]]  # [c]
    samples: np.ndarray[Any, np.dtype[np.int64]]  # [c] test samples; tokens of them, where each has a class
    steps: np.ndarray[Any, np.dtype[np.int64]]  # [c] local steps spent to make the model that was scored
    test: dict[str, Array]  # metric -> [c], NaN for clients without test data
    val: dict[str, Array]
    chosen: Scale | None = None  # the metric that decides; None in records that do not say
    confusion: np.ndarray[Any, np.dtype[np.int64]] | None = None  # [c, classes, classes] test samples by label, answer

    @property
    def scale(self) -> Scale:
        """The metric people read; where nobody chose one, accuracy if there is such, else the loss."""
        return self.chosen or (Accuracy().scale if "accuracy" in self.test else LOSS)

    @property
    def metric(self) -> str:
        """Its name."""
        return self.scale.name

    @property
    def diverged(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which clients' models `[c]` diverged: their loss, or the metric that is read, is infinite on test or on
        validation data. A loss that is not a number counts as infinite; NaN is for clients without data."""
        found = [split[name] for split in (self.test, self.val) for name in ("loss", self.metric) if name in split]
        return np.asarray(np.isinf(np.stack(found)).any(0))

    def counted(self, split: dict[str, Array]) -> Array:
        """The metric that is read on `test` or `val` `[c]`, where a model that diverged has the worst value there is: 0
        of a share, infinity elsewhere. Whatever its outputs happened to score, it gives no answers."""
        values = split[self.metric]
        return np.where(np.isinf(split.get("loss", values)), _worst(self.scale), values)

    def by(self, scale: Scale) -> Scores:
        """The same scores with another metric to be read; NaN where it was not recorded."""
        test = {scale.name: np.full(len(self.clients), np.nan), **self.test}
        return replace(self, test=test, chosen=scale)


def _worst(scale: Scale) -> float:
    """The worst value of a metric."""
    if scale.percent:
        return 0.0 if scale.higher else 1.0
    return -scale.sign * np.inf


@dataclass(frozen=True)
class Evaluation:
    """All stages of the state after `round` aggregations."""

    round: int
    stages: dict[str, Scores]
