"""Metrics of probabilities: negative log likelihood and expected calibration error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from coterie.contract.metric import Metric
from coterie.options import Range


@dataclass(frozen=True)
class NLL(Metric):
    """mean over samples of -log p_y, with p the softmax of the outputs; outputs that are no numbers cost infinity."""

    title = "negative log likelihood"
    higher = False
    kind = "classes"
    counts = {"samples": "all"}  # noqa: RUF012

    def sums(self, outputs: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]:
        cost = -outputs.log_softmax(-1).gather(-1, y[:, None])[:, 0]
        cost = cost.nan_to_num(math.inf, math.inf, -math.inf)
        return {"cost": torch.where(weight > 0, cost * weight, 0.0).sum(), "samples": weight.sum()}

    def value(self, sums: Mapping[str, Tensor]) -> Tensor:
        return sums["cost"] / sums["samples"]


@dataclass(frozen=True)
class ECE(Metric):
    """sum over bins b of |right_b - confidence_b| / samples, with confidence_b the sum of the largest probabilities.

    A sample is in bin b of B where its largest probability is above (b - 1) / B and at most b / B. Outputs that are no
    numbers count as full confidence.
    """

    bins: Annotated[int, Range(at_least=1, at_most=10_000)] = 15
    """Bins of equal width between 0 and 1."""

    title = "calibration error"
    higher = False
    percent = True
    kind = "classes"
    counts = {"excess": "signed", "samples": "all"}  # noqa: RUF012

    def sums(self, outputs: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]:
        confidence = outputs.softmax(-1).amax(-1).nan_to_num(1.0)
        right = (outputs.argmax(-1) == y).to(weight.dtype)
        borders = torch.linspace(0, 1, self.bins + 1, dtype=weight.dtype, device=weight.device)[1:-1]
        place = (confidence[:, None] > borders).sum(-1)
        empty = torch.zeros(self.bins, dtype=weight.dtype, device=weight.device)
        excess = empty.scatter_add(0, place, (right - confidence) * weight)
        return {"excess": excess, "samples": weight.sum()}

    def value(self, sums: Mapping[str, Tensor]) -> Tensor:
        return sums["excess"].abs().sum(-1) / sums["samples"]
