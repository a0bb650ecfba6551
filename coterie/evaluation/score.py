"""What an evaluation found: the scores of every client, stage by stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Scores:
    """One stage of one evaluation, per client: `loss`, `accuracy` (classification) on test and on validation data."""

    clients: np.ndarray[Any, np.dtype[np.int64]]  # [c]
    samples: np.ndarray[Any, np.dtype[np.int64]]  # [c] test samples
    steps: np.ndarray[Any, np.dtype[np.int64]]  # [c] local steps spent to make the model that was scored
    test: dict[str, Array]  # metric -> [c], NaN for clients without test data
    val: dict[str, Array]

    @property
    def metric(self) -> str:
        """The metric people read: accuracy where there are classes, else the loss (mean squared error)."""
        return "accuracy" if "accuracy" in self.test else "loss"


@dataclass(frozen=True)
class Evaluation:
    """All stages of the state after `round` aggregations."""

    round: int
    stages: dict[str, Scores]
