"""Metrics of the order of scores: AUROC and average precision, from a histogram of the log-odds.

The score of class k is its log-odds against the rest, log(p_k / (1 - p_k)) with p the softmax of the outputs z: of two
classes z_1 - z_0, of more z_k - log sum_(j != k) exp(z_j). Scores are counted in BINS bins, narrow near 0, where most
calibrated scores lie: their borders are equally spaced in asinh(score / 2), and everything beyond -100 and 100 is
in the outermost ones. Whatever the order inside a bin, a bound for the error follows from the counts alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.contract.metric import Metric

BINS = 4096
NARROW = 2.0
"""Up to scores of about this size bins are equally wide, 0.0045; beyond, their width grows with the score."""
REACH = math.asinh(100 / NARROW)


@dataclass(frozen=True)
class _OfRanks(Metric):
    """Base of metrics of `histogram [scores, BINS, 2]`: samples of other classes and of the class, by its log-odds.

    With two classes there is one score, of class 1; with more, one a class against the rest. The value is the mean
    over the classes that a client's samples have, beside another one.
    """

    higher = True
    percent = True
    kind = "classes"
    binned = True
    counts = {"histogram": "all"}  # noqa: RUF012

    @property
    def tally(self) -> str:
        return "ranks"

    def sums(self, outputs: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]:
        score = log_odds(outputs).nan_to_num(-math.inf, math.inf, -math.inf)  # [B, scores]; no number ranks last
        place = (torch.asinh(score / NARROW) / REACH + 1) * (BINS / 2)
        bins = place.clamp(0, BINS - 1).long()
        scores = score.shape[-1]
        number = torch.arange(scores, device=y.device)
        mine = y[:, None] == (number if scores > 1 else number + 1)
        cell = (number * BINS + bins) * 2 + mine
        empty = torch.zeros(scores * BINS * 2, dtype=weight.dtype, device=weight.device)
        often = weight[:, None] * torch.ones_like(score)
        return {"histogram": empty.scatter_add(0, cell.flatten(), often.flatten()).view(scores, BINS, 2)}

    def value(self, sums: Mapping[str, Tensor]) -> Tensor:
        return self._each(sums)[0].nanmean(-1)

    def bound(self, sums: Mapping[str, Tensor]) -> Tensor:
        return self._each(sums)[1].nanmean(-1)

    def _each(self, sums: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Value and bound of each score `[..., scores]`; NaN where its class is absent or alone."""
        other, mine = sums["histogram"].flip(-2).unbind(-1)  # [..., scores, BINS], the largest scores first
        value, bound = self._ranked(mine, other)
        both = (mine.sum(-1) > 0) & (other.sum(-1) > 0)
        return torch.where(both, value, math.nan), torch.where(both, bound, math.nan)

    def _ranked(self, mine: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


@dataclass(frozen=True)
class AUROC(_OfRanks):
    """P(score of a sample of the class > that of another) + P(equal) / 2, those of one bin taken as equal.

    Bound: sum over bins b of pos_b neg_b / (2 pos neg), half the pairs whose order the bins do not know.
    """

    title = "AUROC"

    def _ranked(self, mine: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        pairs = mine.sum(-1) * other.sum(-1)
        below = other.sum(-1, keepdim=True) - other.cumsum(-1)
        unknown = (mine * other).sum(-1) / 2
        return ((mine * below).sum(-1) + unknown) / pairs, unknown / pairs


@dataclass(frozen=True)
class AveragePrecision(_OfRanks):
    """sum over thresholds n of (recall_n - recall_(n-1)) precision_n, one threshold a bin.

    Bound: how far the value moves when the samples inside bins are ordered, or tied, as well or as badly as possible.
    With t and f samples of the class and of others in higher bins, p and q in this one, its p samples contribute at
    most p (t + p) / (t + p + f) and at least sum_(i=1..p) (t + i) / (t + i + f + q), before division by all of the
    class.
    """

    name = "average_precision"

    def _ranked(self, mine: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        taken, wrong = mine.cumsum(-1), other.cumsum(-1)  # t + p and f + q
        before = taken - mine
        alike = mine * taken / (taken + wrong).clamp(min=1)
        best = mine * taken / (taken + wrong - other).clamp(min=1)
        # sum_(i=1..p) (t + i) / (t + i + c) = p - c (psi(t + p + c + 1) - psi(t + c + 1)), with c = f + q
        worst = mine - wrong * (torch.digamma(taken + wrong + 1) - torch.digamma(before + wrong + 1))
        all_of_it = mine.sum(-1)
        value = alike.sum(-1) / all_of_it
        high, low = best.sum(-1) / all_of_it, worst.sum(-1) / all_of_it
        return value, torch.maximum(high - value, value - low).clamp(min=0)


def log_odds(outputs: Tensor) -> Tensor:
    """log(p_k / (1 - p_k)) `[B, classes]` of the softmax p of the outputs; of two classes that of class 1 `[B, 1]`."""
    if outputs.shape[-1] == 2:
        return outputs[:, 1:] - outputs[:, :1]
    largest = outputs.argmax(-1, keepdim=True) == torch.arange(outputs.shape[-1], device=outputs.device)
    rest = torch.where(largest, -math.inf, outputs).logsumexp(-1, keepdim=True)
    share = outputs.log_softmax(-1)
    # 1 - p loses its digits where p is near 1, which the largest output alone can be
    return torch.where(largest, outputs - rest, share - torch.log1p(-share.exp()))
