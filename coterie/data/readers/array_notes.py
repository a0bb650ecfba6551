"""Arrays that are probably not what a reader takes them for: one-hot labels, masks, channels last, large numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.data.readers.pieces import Array, cut
from coterie.data.readers.tables.encoding import LARGE, LARGE_TARGET

CHANNELS = (1, 3, 4)
"""Sizes of a last axis that is one of colours."""
TOP = 255
"""The brightest pixel of images that nobody scaled."""


def notes_on_x(x: Tensor, shape: Sequence[int], dtype: np.dtype[Any], names: Sequence[str]) -> list[str]:
    """Sentences on samples `[N, ...]` as read from an array of this shape and type; `names` are of its columns."""
    if not x.numel():
        return []
    if dtype == np.uint8:
        one = 2 / TOP - 1  # what a 1 becomes among pixels
        return ["x is uint8 with nothing but 0 and 1 in it; as pixels from 0 to 255 these become -1 and -0.99, too "
                "near to each other to learn from: save x * 255"] if abs(float(x.max()) - one) < 1e-4 else []
    if dtype.kind != "f":
        return []
    size, low, high = _sizes(x)
    said = []
    if len(shape) == 4 and shape[3] in CHANNELS and min(shape[1:3]) > max(CHANNELS):
        said.append(f"x holds floats of shape {list(shape)}, read as {shape[1]} channels of {shape[2]} x {shape[3]}; "
                    "if these are images with their channels last, save x.transpose(0, 3, 1, 2), as floats must be "
                    "[N, C, H, W]")
    if len(large := np.flatnonzero(size > LARGE)):
        pixels = x.ndim == 4 and low >= 0 and high <= TOP
        ways = "x / 255" if pixels else "(x - x.mean(0)) / (x.std(0) + 1e-8)" if x.ndim == 2 else \
            "(x - x.mean()) / x.std()"
        first = large[np.argsort(-size[large], kind="stable")][:3].tolist()
        called = [names[k] if len(names) == len(size) else f"x[{k}]" if x.ndim == 2 else f"channel {k}" for k in first]
        some = ", ".join(f"{name} (about {size[k]:.3g})" for name, k in zip(called, first, strict=True))
        said.append(f"x holds large numbers, taken as they are: {some}; models train badly on these: save {ways}")
    return said


def notes_on_y(y: Array, asked: bool) -> list[str]:
    """Sentences on numbers to predict as an array holds them; `asked` says that the user called them so."""
    if not asked and y.ndim == 2 and y.shape[1] > 1:
        ones = y == 1
        if (ones.sum(1) == 1).all() and not y[~ones].any():
            classes = y.shape[1]
            return [f"y of shape {list(y.shape)} has a single 1 in every row, as classes are written one-hot, and is "
                    f"taken as {classes} numbers to predict; for {classes} classes, save y.argmax(1), the numbers 0 to "
                    f"{classes - 1}"]
    with np.errstate(over="ignore", invalid="ignore"):  # numbers may be as large as they like
        mean, deviation = np.nanmean(y, 0, dtype=np.float64), np.nanstd(y, 0, dtype=np.float64)
    if np.maximum(np.abs(mean), deviation).max(initial=0) > LARGE_TARGET:
        size = np.hypot(mean, deviation).max()
        return [f"y holds large numbers to predict, taken as they are (about {size:.3g}); models train badly on these: "
                "save (y - y.mean(0)) / y.std(0)"]
    return []


def _sizes(x: Tensor) -> tuple[Array, float, float]:
    """The root mean square of each feature or channel, and the least and the largest number; some rows at a time."""
    squares = torch.zeros(x.shape[1], dtype=torch.float64)
    low, high = np.inf, -np.inf
    others = [0, *range(2, x.ndim)]
    for rows in cut(len(x), 16 * x[0].numel()):  # small ones: copied in float64, beside data that fill the memory
        block = x[rows].double()
        squares += block.square().sum(others)
        low, high = min(low, float(block.min())), max(high, float(block.max()))
    return (squares * x.shape[1] / x.numel()).sqrt().numpy(), low, high
