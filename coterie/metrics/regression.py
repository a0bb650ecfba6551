"""Metrics of numbers: squared and absolute error, and the share of the variance that is explained."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.contract.metric import Metric

ROUNDING = 1e-12
"""A variance below this share of the mean square cannot be told from 0."""


@dataclass(frozen=True)
class MSE(Metric):
    """mean over samples of (f(x) - y)^2, of several targets their mean; outputs that are no numbers cost infinity."""

    title = "MSE"
    higher = False
    kind = "numbers"
    counts = {"samples": "all"}  # noqa: RUF012

    def sums(self, outputs: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]:
        answer, target = _paired(outputs, y)
        return {"cost": _summed((answer - target).square(), weight).mean(-1), "samples": weight.sum()}

    def value(self, sums: Mapping[str, Tensor]) -> Tensor:
        return sums["cost"] / sums["samples"]


@dataclass(frozen=True)
class MAE(Metric):
    """mean over samples of |f(x) - y|, of several targets their mean; outputs that are no numbers cost infinity."""

    title = "MAE"
    higher = False
    kind = "numbers"
    counts = {"samples": "all"}  # noqa: RUF012

    def sums(self, outputs: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]:
        answer, target = _paired(outputs, y)
        return {"cost": _summed((answer - target).abs(), weight).mean(-1), "samples": weight.sum()}

    def value(self, sums: Mapping[str, Tensor]) -> Tensor:
        return sums["cost"] / sums["samples"]

    def centre(self, targets: Tensor) -> Tensor:
        """Their median, which has the least absolute error; of an even number the middle between two."""
        ordered, n = targets.sort(0).values, len(targets)
        return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


@dataclass(frozen=True)
class R2(Metric):
    """1 - sum (f(x) - y)^2 / sum (y - mean of y)^2, of several targets the mean; NaN where all targets are equal."""

    title = "R²"
    kind = "numbers"
    counts = {"samples": "all"}  # noqa: RUF012
    values = (-math.inf, 1.0)

    def sums(self, outputs: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]:
        answer, target = _paired(outputs, y)
        return {
            "cost": _summed((answer - target).square(), weight), "sum": _summed(target, weight),
            "squares": _summed(target.square(), weight), "samples": weight.sum(),
        }

    def value(self, sums: Mapping[str, Tensor]) -> Tensor:
        n = sums["samples"][..., None]
        spread = sums["squares"] - sums["sum"].square() / n  # [..., targets]
        known = spread > ROUNDING * sums["squares"]
        return torch.where(known, 1 - sums["cost"] / spread, math.nan).mean(-1)


def _paired(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and targets as float64 `[B, targets]`."""
    target = y.double().flatten(1) if y.ndim > 1 else y.double()[:, None]
    return outputs.double().flatten(1)[:, : target.shape[1]], target


def _summed(values: Tensor, weight: Tensor) -> Tensor:
    """`[B, targets], [B] -> [targets]`."""
    counted = values.nan_to_num(math.inf, math.inf, -math.inf) * weight[:, None]
    return torch.where(weight[:, None] > 0, counted, 0.0).sum(0)
