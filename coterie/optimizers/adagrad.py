"""Adagrad: steps measured by all gradients so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from coterie.contract.optimizer import Decay, Number, Optimizer
from coterie.options import Positive


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """v <- v + g^2; w <- w - lr g / (sqrt(v) + eps). At the server g is minus the aggregated update: FedAdagrad."""

    eps: Positive = 1e-10
    """What keeps the divisor from 0; 0.001 at the server."""
    weight_decay: Decay = 0.0
    """How strongly weights are pulled to 0, as a part of the gradient."""

    cite = "Duchi, Hazan, Singer, Adaptive subgradient methods, JMLR 2011; at the server: Reddi et al., Adaptive " \
        "federated optimization, ICLR 2021"
    at_server: ClassVar[Mapping[str, Any]] = {"lr": 0.01, "eps": 1e-3}

    @property
    def slots(self) -> tuple[str, ...]:
        return ("square",)

    def step(self, row: Tensor, gradient: Tensor, state: Mapping[str, Tensor], lr: Number, count: Number) -> None:
        if self.weight_decay:
            gradient.add_(row, alpha=self.weight_decay)
        size = torch.sqrt(state["square"].addcmul_(gradient, gradient)).add_(self.eps)
        row.addcmul_(gradient.div_(size), torch.as_tensor(lr, dtype=row.dtype, device=row.device), value=-1)
