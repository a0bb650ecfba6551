"""Clients whose samples say where they come from, so that tests can follow each one."""

from __future__ import annotations

import numpy as np

from coterie.data import Federation

Pair = tuple[np.ndarray, np.ndarray]


def marked(*sizes: int, classes: int = 3) -> list[Pair]:
    """Clients whose samples say where they come from: x = (client, sample number), y = sample number mod classes."""
    return [
        (np.stack([np.full(n, i), np.arange(n)], axis=1).astype(np.float32), np.arange(n) % classes)
        for i, n in enumerate(sizes)
    ]


def samples(federation: Federation, i: int, split: str) -> set[tuple[float, ...]]:
    return {tuple(row) for row in federation.client(i, split)[0].tolist()}
