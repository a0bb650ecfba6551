"""Texts of about the same length are scored together, each batch cut to the longest of its texts.

Only for models that say `any_length`: padding behind a text changes none of its other outputs. Training draws its noise
for texts as long as they are given, so that a client's result does not depend on how long others' texts are.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from coterie.contract.engine import IntArray
from coterie.contract.tokens import IGNORED, per_token


def lengths(module: nn.Module, x: Tensor, y: Tensor) -> Tensor | None:
    """The place behind the last token of each text that is no padding, `[samples]`; None where nothing may be cut."""
    tokens = per_token(y)
    if x.ndim != 2 or x.is_floating_point() or (tokens and y.shape != x.shape):
        return None
    if not any(getattr(part, "any_length", False) for part in module.modules()):
        return None
    used = (x != 0) | (y != IGNORED) if tokens else x != 0
    places = torch.arange(1, x.shape[1] + 1, device=x.device)
    return (used * places).amax(1).clamp(min=1)


def by_length(found: Tensor, starts: IntArray, sizes: IntArray) -> Tensor:
    """`[samples]` sample -> the sample that takes its place where each stretch is sorted, the longest text first."""
    owner = np.repeat(np.arange(len(starts)), sizes)
    rows = np.arange(sizes.sum()) + np.repeat(starts - (sizes.cumsum() - sizes), sizes)
    order = np.lexsort((-found.cpu().numpy()[rows], owner))
    place = np.arange(len(found))
    place[rows] = rows[order]
    return torch.from_numpy(place).to(found.device)
