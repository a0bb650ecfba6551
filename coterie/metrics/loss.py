"""Loss: what training makes small, averaged over samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from coterie.contract.metric import Metric, Scale
from coterie.contract.net import PerSample, cross_entropy, loss_name, squared_error
from coterie.errors import CoterieError


def loss_title(name: str) -> str:
    """How people read the mean of a loss of this name: that of squared errors is the MSE."""
    return "MSE" if name == loss_name(squared_error) else name.replace("_", " ").strip()


@dataclass(frozen=True)
class Loss(Metric):
    """mean over samples of the task's own loss: cross-entropy of classes, squared error of numbers, or a user's."""

    function: PerSample = field(default=cross_entropy, repr=False)
    """The loss of each sample; that of the run, whatever is written."""

    higher = False
    counts = {"samples": "all"}  # noqa: RUF012

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.function):
            raise CoterieError(f"the loss is the run's own and has no options, so '{self.function}' has no place here; "
                               "write loss.")

    @property
    def scale(self) -> Scale:
        return replace(super().scale, title=loss_title(loss_name(self.function)))

    def sums(self, outputs: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]:
        y = y.to(outputs.dtype) if y.is_floating_point() else y
        return {"cost": torch.where(weight > 0, self.function(outputs, y) * weight, 0.0).sum(), "samples": weight.sum()}

    def value(self, sums: Mapping[str, Tensor]) -> Tensor:
        return sums["cost"] / sums["samples"]
