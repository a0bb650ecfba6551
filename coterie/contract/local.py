"""The training options of the local kind: those that one method of a comparison may have of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from coterie.contract.schedules import Schedule
from coterie.errors import CoterieError


@dataclass(frozen=True)
class LocalOptions:
    """How a client trains in a round, and how the server takes what comes back.

    A run has them for all its methods; `fedper:lr=0.1` says what is otherwise for this one. Whatever is a field here
    may stand among a method's options, so no method calls an option of its own by one of these names.
    """

    OTHER_WORDS: ClassVar[Mapping[str, str]] = {
        "learningrate": "lr", "eta": "lr", "stepsize": "lr", "batchsize": "batch", "bs": "batch",
        "localepochs": "epochs", "localsteps": "steps", "scheduler": "schedule", "serveroptimizer": "server",
    }
    """What others call an option, without `_` and `-`."""

    epochs: int = 1
    """Local epochs a round."""
    steps: int | None = None
    """Local steps a round, instead of epochs."""
    batch: int = 10
    """Batch size; 0 takes all samples of a client at once."""
    lr: float = 0.05
    """Learning rate of the local SGD."""
    schedule: Schedule = "constant"
    """How the learning rate changes over rounds: not, times `decay` each round, or as half a cosine to 0."""
    decay: float = 0.99
    """Factor a round for schedule=decay."""
    server: str = "sgd"
    """How the server steps along the averaged update: sgd takes it as it is, others as in adam(lr=0.01)."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch"):
            if getattr(self, name) < 0:
                raise CoterieError(f"{name} must be at least 0, not {getattr(self, name)}.")
        if self.steps is not None and self.steps < 1:
            raise CoterieError(f"steps must be at least 1, not {self.steps}.")
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise CoterieError(f"lr must be a positive number, not {self.lr}.")
