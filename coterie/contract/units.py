"""The unit of numbers that are predicted: models train on standardised targets, people read their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from coterie.contract.metric import Tally


@dataclass(frozen=True)
class Unit:
    """Models train on (y - mean) / deviation; what one answers is mean + deviation * its output, in the unit of y."""

    mean: float
    deviation: float

    def standardised(self, y: Tensor) -> Tensor:
        """Targets as models train on them, in float64: those far from 0 would lose their digits in float32."""
        return (y.double() - self.mean) / self.deviation

    def back(self, values: Tensor) -> Tensor:
        """Outputs, or standardised targets, in the user's unit."""
        return self.mean + self.deviation * values

    def facts(self) -> dict[str, float]:
        """What `Unit.of` reads back."""
        return asdict(self)

    @classmethod
    def of(cls, facts: Mapping[str, Any] | None) -> Unit | None:
        return None if facts is None else cls(float(facts["mean"]), float(facts["deviation"]))


class Answering(nn.Module):
    """A module that ends with the map back: mean + deviation * module(x)."""

    def __init__(self, module: nn.Module, unit: Unit) -> None:
        super().__init__()
        self.module, self.mean, self.deviation = module, unit.mean, unit.deviation

    def forward(self, x: Tensor) -> Tensor:
        out = self.module(x)
        answer: Tensor = out if isinstance(out, Tensor) else out.logits
        return self.mean + self.deviation * answer


def answering(module: nn.Module, unit: Unit | None) -> nn.Module:
    """The module as it is handed out: it answers in the user's unit."""
    return module if unit is None else Answering(module, unit).train(module.training)


@dataclass(frozen=True)
class InUnit(Tally):
    """Another tally's sums, of outputs and targets in the user's unit."""

    of: Tally
    unit: Unit

    @property
    def tally(self) -> str:
        return self.of.tally

    def sums(self, outputs: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]:
        return self.of.sums(self.unit.back(outputs), self.unit.back(y.to(outputs.dtype)), weight)


@dataclass(frozen=True)
class Cost(Tally):
    """The sum of a loss, and of the samples it was taken on; a loss that is no number is infinite."""

    function: Callable[[Tensor, Tensor], Tensor]

    @property
    def tally(self) -> str:
        return "loss in its unit"  # no metric is called so: their names are those of classes

    def sums(self, outputs: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]:
        each = self.function(outputs, y).nan_to_num(math.inf, math.inf, -math.inf)
        return {"cost": torch.where(weight > 0, each * weight, 0.0).sum(), "samples": weight.sum()}
