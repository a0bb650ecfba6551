"""SGD: steps along the gradient, with momentum, Nesterov's look-ahead and weight decay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from coterie.contract.optimizer import Decay, Number, Optimizer
from coterie.errors import CoterieError
from coterie.options import BelowOne


@dataclass(frozen=True)
class SGD(Optimizer):
    """g <- g + weight_decay w; v <- momentum v + g; w <- w - lr v, or w - lr (g + momentum v) with nesterov.

    At the server g is minus the aggregated update, so that lr = 1 without momentum is FedAvg, and momentum FedAvgM.
    """

    momentum: BelowOne = 0.0
    """Share of the last step's direction in this one's."""
    nesterov: bool = False
    """Whether the step looks ahead along the momentum."""
    weight_decay: Decay = 0.0
    """How strongly weights are pulled to 0, as a part of the gradient."""

    cite = "Sutskever et al., On the importance of initialization and momentum in deep learning, ICML 2013; at the " \
        "server: Hsu, Qi, Brown, Measuring the effects of non-identical data distribution, 2019"
    at_server: ClassVar[Mapping[str, Any]] = {"lr": 1.0}

    @property
    def slots(self) -> tuple[str, ...]:
        return ("velocity",) if self.momentum else ()

    @property
    def running(self) -> tuple[str, float] | None:
        return None if self.plain or self.nesterov or self.weight_decay else ("velocity", self.momentum)

    @property
    def plain(self) -> bool:
        return not (self.momentum or self.weight_decay)

    def check(self) -> None:
        if self.nesterov and not self.momentum:
            raise CoterieError("sgd's nesterov looks ahead along the momentum; give it one, e.g. momentum=0.9.")

    def step(self, row: Tensor, gradient: Tensor, state: Mapping[str, Tensor], lr: Number, count: Number) -> None:
        if self.weight_decay:
            gradient.add_(row, alpha=self.weight_decay)
        if self.momentum:
            velocity = state["velocity"].mul_(self.momentum).add_(gradient)
            gradient = gradient.add_(velocity, alpha=self.momentum) if self.nesterov else velocity
        if isinstance(lr, Tensor):
            row.addcmul_(gradient, lr, value=-1)
        else:
            torch.add(row, gradient, alpha=-lr, out=row)
