"""What a constant answer scores: the level that a model must pass to have learned anything."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def guess(known: Ints, scored: Ints) -> NDArray[np.float64]:
    """What always answering the most frequent class of `known` scores on `scored`, both samples `[clients, classes]`.

    `[clients]`, NaN for clients without samples to score.
    """
    right = np.take_along_axis(scored, known.argmax(1)[:, None], 1)[:, 0]
    total = scored.sum(1)
    share: NDArray[np.float64] = np.where(total > 0, right / np.maximum(total, 1), np.nan)
    return share
