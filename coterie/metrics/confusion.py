"""Metrics of how often a class is right, wrongly given, or missed; and the confusion matrix itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.contract.metric import Metric, Tally
from coterie.metrics.accuracy import right


@dataclass(frozen=True)
class ByLabelAndAnswer(Tally):
    """`counts [classes, classes]`: samples by label (row) and answer (column)."""

    name = "confusion"
    counts = {"counts": "all"}  # noqa: RUF012

    def sums(self, outputs: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]:
        classes = outputs.shape[-1]
        cell = y * classes + outputs.argmax(-1)
        return {"counts": _counted(cell, weight, classes * classes).view(classes, classes)}


@dataclass(frozen=True)
class _OfClasses(Metric):
    """Base of metrics of `right`, `labels` and `answers`, samples by class `[classes]`."""

    percent = True
    kind = "classes"
    counts = {"right": "some", "labels": "all", "answers": "all"}  # noqa: RUF012

    @property
    def tally(self) -> str:
        return "classes"

    def sums(self, outputs: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]:
        answer, classes = outputs.argmax(-1), outputs.shape[-1]
        counts = {"right": (y, weight * right(outputs, y)), "labels": (y, weight), "answers": (answer, weight)}
        return {name: _counted(which, often, classes) for name, (which, often) in counts.items()}

    def _f1(self, sums: Mapping[str, Tensor]) -> Tensor:
        """Of each class `[..., classes]`; NaN where it is neither a label nor an answer."""
        return 2 * sums["right"] / (sums["labels"] + sums["answers"])


@dataclass(frozen=True)
class Recall(_OfClasses):
    """Of each class k, the share of its samples that are answered with it: right_k / labels_k; NaN without any."""

    by_class = True

    def value(self, sums: Mapping[str, Tensor]) -> Tensor:
        return sums["right"] / sums["labels"]


@dataclass(frozen=True)
class BalancedAccuracy(_OfClasses):
    """mean over the classes k that a client's samples have of right_k / labels_k: each class counts the same."""

    name = "balanced_accuracy"

    def value(self, sums: Mapping[str, Tensor]) -> Tensor:
        return (sums["right"] / sums["labels"]).nanmean(-1)


@dataclass(frozen=True)
class F1(_OfClasses):
    """mean over the classes k that are labels or answers of F_k = 2 right_k / (labels_k + answers_k): macro F1."""

    title = "macro F1"

    def value(self, sums: Mapping[str, Tensor]) -> Tensor:
        return self._f1(sums).nanmean(-1)


@dataclass(frozen=True)
class WeightedF1(_OfClasses):
    """sum over classes k of labels_k F_k / sum over k of labels_k: F1, each class by its samples."""

    name = "weighted_f1"
    title = "weighted F1"

    def value(self, sums: Mapping[str, Tensor]) -> Tensor:
        return (self._f1(sums).nan_to_num(0) * sums["labels"]).sum(-1) / sums["labels"].sum(-1)


def _counted(which: Tensor, weight: Tensor, cells: int) -> Tensor:
    """How often each cell was met `[B] -> [cells]`."""
    return torch.zeros(cells, dtype=weight.dtype, device=weight.device).scatter_add(0, which, weight)
