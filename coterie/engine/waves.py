"""How many clients are computed at once: as many as memory allows, up to where a larger stack is no faster."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from coterie.contract.engine import IntArray
from coterie.contract.net import Net

MOST = 256
"""Clients of a wave at most, however much memory is free; so 10,000 clients need no more than 1,000."""
ROWS = 16
"""Row copies a slot needs: state and given of two programs (4), their copies in stack order (2), the gradient and its
correction (2), the row received and the one trained (2), the upload and the sum over waves (2), the client's own state
as taken, as fetched ahead, as trained and on its way back (4)."""


def activations(net: Net, row: Tensor, x: Tensor) -> tuple[int, int]:
    """Numbers that one sample `x [1, ...]` leaves in the layers: the sum over all layers' outputs, and the largest."""
    found: list[int] = []

    def note(module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor):
            found.append(output.numel())

    hooks = [m.register_forward_hook(note) for m in net.module.modules() if not list(m.children())]
    try:
        net.mode(training=False)
        with torch.no_grad():
            out = net(row, x)
    finally:
        for hook in hooks:
            hook.remove()
    found = found or [out.numel()]
    return sum(found), max(found)


def slot_bytes(columns: int, inputs: int, outputs: tuple[int, int], batch: int, scored: int, itemsize: int) -> int:
    """Bytes of one model of one client in a stack: `ROWS` row copies, and the larger of training and scoring.

    Training holds for each of `batch` samples the input, and every layer's output three times (the value, what a
    function makes of it, the gradient). Scoring holds for each of `scored` samples the input, and the largest output
    twice (one layer's value and the next one's).
    """
    training, scoring = batch * (inputs + 3 * outputs[0]), scored * (inputs + 2 * outputs[1])
    return itemsize * (ROWS * columns + max(training, scoring))


def fitting(each: int, free: int) -> int:
    """Clients of `each` bytes that half of the free memory holds: MOST, or MOST halved until they fit, at least 1.

    Halving makes the number, and with it the last bits of a run, depend little on what else is in memory.
    """
    most = MOST
    while most > 1 and most * each > free // 2:
        most //= 2
    return most


def size(fit: int, asked: int, population: int) -> int:
    """Clients of a wave where `fit` fit in memory and a round asks `asked` of the population.

    A round's waves are equal; those of an evaluation are 1, 2, 4 or 8 times as large. Training steps captured for
    the larger stack then have a bucket of exactly the smaller one's size.
    """
    wave = -(-asked // -(-asked // fit))
    for _ in range(3):
        if 2 * wave <= fit and wave < population:
            wave *= 2
    return min(wave, population)


def cut(ids: IntArray, most: int) -> list[IntArray]:
    """The clients in waves of at most `most`, the sizes of which differ by at most one, larger ones first."""
    return np.array_split(ids, -(-len(ids) // most)) if len(ids) else []
