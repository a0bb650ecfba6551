"""Frozen layers whose weights are stored in bfloat16, half the memory, and compute in the format of rows.

Rounding to 8 significant bits changes a weight by at most 2^-8 of itself, once, before the run; nothing is rounded
after that. A weight is widened where its layer is called, so that no more than one is held twice.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STORED = torch.bfloat16


class _Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.to(input.dtype), _widened(self.bias, input))


class _Embedding(nn.Embedding):
    computes = torch.float32
    """The format of rows, which token numbers do not tell."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).to(self.computes)


class _Conv1d(nn.Conv1d):
    def forward(self, input: Tensor) -> Tensor:
        found: Tensor = self._conv_forward(input, self.weight.to(input.dtype), _widened(self.bias, input))
        return found


class _Conv2d(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        found: Tensor = self._conv_forward(input, self.weight.to(input.dtype), _widened(self.bias, input))
        return found


class _Conv3d(nn.Conv3d):
    def forward(self, input: Tensor) -> Tensor:
        found: Tensor = self._conv_forward(input, self.weight.to(input.dtype), _widened(self.bias, input))
        return found


KINDS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: _Linear, nn.Embedding: _Embedding, nn.Conv1d: _Conv1d, nn.Conv2d: _Conv2d, nn.Conv3d: _Conv3d,
}
"""Layers that can be stored so; all others, such as normalisation, hold little and stay as they are."""
PLAIN = {stored: plain for plain, stored in KINDS.items()}


def _widened(bias: Tensor | None, like: Tensor) -> Tensor | None:
    return None if bias is None else bias.to(like.dtype)


def store(module: nn.Module) -> nn.Module:
    """The same module, with the weights of its frozen layers in bfloat16."""
    for sub in module.modules():
        own = list(sub.parameters(recurse=False))
        if type(sub) in KINDS and not any(p.requires_grad for p in own):
            sub.__class__ = KINDS[type(sub)]
            for parameter in own:
                parameter.data = parameter.data.to(STORED)
    return module


def widen(layer: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same layer as one of the usual kind, its weights in this format."""
    if type(layer) in PLAIN:
        layer.__class__ = PLAIN[type(layer)]
        layer.to(dtype)
    return layer


def place(module: nn.Module, dtype: torch.dtype) -> set[int]:
    """Tell stored layers the format of rows; the identities of the parameters that stay as they are stored."""
    stored = [sub for sub in module.modules() if type(sub) in PLAIN]
    for sub in stored:
        if isinstance(sub, _Embedding):
            sub.computes = dtype
    return {id(p) for sub in stored for p in sub.parameters(recurse=False)}


def is_stored(module: nn.Module) -> bool:
    """Whether a layer is of such a kind."""
    return type(module) in PLAIN
