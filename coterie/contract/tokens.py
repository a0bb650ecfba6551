"""Targets of one class a token: texts whose every position has an answer of its own, or is not asked for one.

A sample is a text then: y are `[B, L]` whole numbers beside outputs `[B, L, classes]`, and a position with `IGNORED`
counts nowhere. What is averaged is averaged over tokens, not over texts: a text's loss is the mean over its counted
tokens, and it counts as often as it has such tokens, so that

    sum_b t_b l_b / sum_b t_b = sum over counted tokens of the loss of each / their number,

with t_b the counted tokens of text b and l_b their mean loss. `Batch.weight` and n of a client are these t.
"""

from __future__ import annotations

import torch
from torch import Tensor

IGNORED = -100
"""The target of a position that is not asked for; what PyTorch's cross entropy ignores."""


def per_token(y: Tensor) -> bool:
    """Whether targets `[B, ...]` are classes, one a token."""
    return y.ndim > 1 and not y.is_floating_point()


def counted(y: Tensor) -> Tensor:
    """How often each sample counts `[..., L] -> [...]`: its tokens that are asked for."""
    return (y != IGNORED).sum(-1)


def mean_over_tokens(values: Tensor, y: Tensor) -> Tensor:
    """The mean over each text's counted tokens, `[B, L], [B, L] -> [B]`; 0 for a text without any."""
    there = y != IGNORED
    return torch.where(there, values, 0.0).sum(-1) / there.sum(-1).clamp(min=1)


def one_by_one(outputs: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens as samples: `[B, L, classes], [B, L], [B]` -> `[B L, classes], [B L], [B L]`; others stay as they are.

    A token counts once, or not at all where it is ignored or its text is padding; its target is a class in any case.
    """
    if not per_token(y):
        return outputs, y, weight
    there = (y != IGNORED) & (weight > 0)[:, None]
    return outputs.flatten(0, 1), y.clamp(min=0).flatten(), there.to(weight.dtype).flatten()
