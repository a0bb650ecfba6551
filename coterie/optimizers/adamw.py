"""AdamW: Adam whose weight decay is no part of the gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.contract.optimizer import Decay, Number
from coterie.optimizers.adam import Adam


@dataclass(frozen=True)
class AdamW(Adam):
    """w <- (1 - lr weight_decay) w, then Adam's step without decay."""

    weight_decay: Decay = 0.01
    """How strongly weights are pulled to 0, in units of the learning rate."""

    fused = staticmethod(torch._fused_adamw_)
    cite = "Loshchilov, Hutter, Decoupled weight decay regularization, ICLR 2019"

    def decay(self, row: Tensor, gradient: Tensor, lr: Number) -> None:
        row.mul_(1 - lr * self.weight_decay)
