"""Accuracy: the share of right answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from coterie.contract.metric import Metric


@dataclass(frozen=True)
class Accuracy(Metric):
    """Right answers over samples; the answer is the class of the largest output."""

    percent = True
    kind = "classes"

    def sums(self, outputs: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]:
        return {"right": ((outputs.argmax(-1) == y).to(weight.dtype) * weight).sum(), "samples": weight.sum()}

    def value(self, sums: Mapping[str, Tensor]) -> Tensor:
        return sums["right"] / sums["samples"]
