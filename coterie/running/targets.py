"""What a constant answer scores in a regression: each client's training mean, or median, on its test data."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.data import Federation
from coterie.metrics.regression import MAE, MSE, R2

BY = (MSE(), MAE(), R2())
"""The metrics of numbers by which that is known."""


def constants(federation: Federation, scored: str = "test") -> dict[str, NDArray[np.float64]]:
    """By metric and client `[clients]`, in float64; NaN for those who have nothing to take it from or to score it on.

    As for classes, the answer comes from what is not test data: with `scored="val"` from the training data alone.
    """
    known = [
        torch.cat([federation.client(i, split)[1] for split in ("train", "val") if split != scored])
        for i in range(federation.clients)
    ]
    tested = [federation.client(i, scored)[1] for i in range(federation.clients)]
    there = np.array([bool(len(a)) and bool(len(b)) for a, b in zip(known, tested, strict=True)], dtype=bool)
    return {metric.label: np.where(there, metric.constant(known, tested), np.nan) for metric in BY}
