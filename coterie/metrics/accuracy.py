"""Accuracy: the share of right answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coterie.contract.metric import Metric, Scale
from coterie.errors import CoterieError
from coterie.options import Count


def right(outputs: Tensor, y: Tensor) -> Tensor:
    """Whether the largest output, the first of equal ones, is that of the class: `[B, classes], [B] -> [B]`.

    With a class a token, `[B, L, classes], [B, L] -> [B, L]`: ignored tokens are never right.
    Outputs with one that is no number give no answer, so they are wrong: `argmax` would say the class of the first.
    """
    return (outputs.argmax(-1) == y) & ~outputs.isnan().any(-1)


@dataclass(frozen=True)
class Accuracy(Metric):
    """Right answers over samples; the answer is the class of the largest output, the first of equal ones.

    Outputs that are no numbers are no answer.
    """

    percent = True
    kind = "classes"
    counts = {"right": "some", "samples": "all"}  # noqa: RUF012

    def sums(self, outputs: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]:
        return {"right": (right(outputs, y).to(weight.dtype) * weight).sum(), "samples": weight.sum()}

    def value(self, sums: Mapping[str, Tensor]) -> Tensor:
        return sums["right"] / sums["samples"]


@dataclass(frozen=True)
class TopK(Metric):
    """Samples whose class is among the k largest outputs, over samples; of equal outputs the first counts as larger."""

    k: Count = 5
    """How many answers a model has."""

    name = "top_k"
    percent = True
    kind = "classes"
    counts = {"right": "some", "samples": "all"}  # noqa: RUF012

    @property
    def scale(self) -> Scale:
        return replace(super().scale, title=f"top-{self.k} accuracy")

    def check(self, classes: int) -> None:
        if self.k >= classes:
            raise CoterieError(
                f"top_k's k must be below the {classes} classes of these data, not {self.k}; write "
                f"top_k(k={max(1, classes - 1)})."
            )

    def sums(self, outputs: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]:
        mine = outputs.gather(-1, y[:, None])  # [B, 1]
        earlier = y[:, None] < torch.arange(outputs.shape[-1], device=y.device)
        beaten = (mine > outputs) | ((mine == outputs) & earlier)
        before = outputs.shape[-1] - 1 - beaten.sum(-1)  # outputs that are no numbers are never beaten
        return {"right": ((before < self.k).to(weight.dtype) * weight).sum(), "samples": weight.sum()}

    def value(self, sums: Mapping[str, Tensor]) -> Tensor:
        return sums["right"] / sums["samples"]
