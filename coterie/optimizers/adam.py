"""Adam: steps measured by the gradients' own size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from coterie.contract.optimizer import Decay, Number, Optimizer
from coterie.options import BelowOne, Positive


@dataclass(frozen=True)
class Adam(Optimizer):
    """m <- beta1 m + (1 - beta1) g; v <- beta2 v + (1 - beta2) g^2; w <- w - lr m' / (sqrt(v') + eps).

    m' = m / (1 - beta1^t) and v' = v / (1 - beta2^t) at step t where `corrected`, else m and v. `weight_decay` is a
    part of the gradient, g + weight_decay w. At the server g is minus the aggregated update and nothing is corrected:
    FedAdam.
    """

    beta1: BelowOne = 0.9
    """Share of the past in the mean of the gradients."""
    beta2: BelowOne = 0.999
    """Share of the past in the mean of their squares; 0.99 at the server."""
    eps: Positive = 1e-8
    """What keeps the divisor from 0; 0.001 at the server, where it says how large an update counts as large."""
    weight_decay: Decay = 0.0
    """How strongly weights are pulled to 0."""
    corrected: bool = True
    """Whether the means are corrected for their start at 0; false at the server."""

    cite = "Kingma, Ba, Adam: a method for stochastic optimization, ICLR 2015; at the server: Reddi et al., Adaptive " \
        "federated optimization, ICLR 2021"
    fused: ClassVar[Callable[..., Any] | None] = staticmethod(torch._fused_adam_)
    """PyTorch's own step in one pass over memory, for one learning rate on a host; None where a step is another."""
    at_server: ClassVar[Mapping[str, Any]] = {"lr": 0.01, "beta2": 0.99, "eps": 1e-3, "corrected": False}

    @property
    def slots(self) -> tuple[str, ...]:
        return ("mean", "square")

    def step(self, row: Tensor, gradient: Tensor, state: Mapping[str, Tensor], lr: Number, count: Number) -> None:
        alike = not isinstance(lr, Tensor) and not isinstance(count, Tensor) and row.device.type == "cpu"
        whole = alike and all(t.is_contiguous() for t in (row, gradient, *state.values()))
        if self.fused is not None and self.corrected and whole:
            self.fused(
                [row], [gradient], [state["mean"]], [state["square"]], [], [torch.tensor(float(count))], lr=lr,
                beta1=self.beta1, beta2=self.beta2, weight_decay=self.weight_decay, eps=self.eps, amsgrad=False,
                maximize=False,
            )
            return
        if self.weight_decay:
            self.decay(row, gradient, lr)
        mean, square = state["mean"].lerp_(gradient, 1 - self.beta1), state["square"]
        self.grow(square, gradient)
        first: Number = 1 - self.beta1**count if self.corrected else 1.0
        second: Number = 1 - self.beta2**count if self.corrected else 1.0
        size, rate = torch.sqrt(square, out=gradient).div_(second**0.5).add_(self.eps), lr / first
        if isinstance(rate, Tensor):
            row.addcmul_(size.reciprocal_().mul_(mean), rate, value=-1)
        else:
            row.addcdiv_(mean, size, value=-rate)

    def decay(self, row: Tensor, gradient: Tensor, lr: Number) -> None:
        """Weight decay, before the step."""
        gradient.add_(row, alpha=self.weight_decay)

    def grow(self, square: Tensor, gradient: Tensor) -> None:
        """The mean of the squares, with this gradient in it."""
        square.mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
