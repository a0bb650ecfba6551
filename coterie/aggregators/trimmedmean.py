"""Trimmed mean: the weighted mean of each coordinate without its extremes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from coterie.contract.aggregator import Aggregator
from coterie.contract.algebra import blocks
from coterie.contract.layout import Layout
from coterie.options import Range


@dataclass(frozen=True)
class TrimmedMean(Aggregator):
    """In each coordinate the weighted mean without the smallest and the largest values, `trim` of the weight each.

    With equal weights and trim * N whole that leaves out trim * N values at either end; else the last value cut
    keeps a part of its weight. -inf is below all numbers, +inf above them, and what is not a number (NaN) above both.
    Refused where not even one of equally weighted clients would be cut.
    """

    trim: Annotated[float, Range(above=0, below=0.5)] = 0.2
    """The part of the weight that is cut off at either end."""
    weighted: bool = True
    """Whether clients count by their weights or, with false, alike."""

    robust = True
    protects = "the model, from arbitrary clients of at most `trim` of the weight together"
    cite = "Yin et al., Byzantine-robust distributed learning: towards optimal statistical rates, ICML 2018"

    @property
    def weighs(self) -> bool:
        return self.weighted

    @property
    def minimum(self) -> int:
        return math.ceil(1 / self.trim - 1e-9)

    def combine(self, updates: Tensor, weights: Tensor, layout: Layout) -> Tensor:
        share = weights.double() if self.weighted else torch.full_like(weights, 1 / len(weights), dtype=torch.float64)
        return torch.cat([self._means(updates[:, columns], share) for columns in blocks(updates)])

    def _means(self, values: Tensor, share: Tensor) -> Tensor:
        rising, order = values.sort(dim=0)
        to = share[order].cumsum(0)
        kept = to.clamp(self.trim, 1 - self.trim) - (to - share[order]).clamp(self.trim, 1 - self.trim)
        kept = torch.where(kept > 1e-6, kept, 0)  # what float32 weights leave of a value cut
        inner = torch.where(kept > 0, rising, 0)  # 0 times a diverged client's NaN would not be 0
        return ((kept / kept.sum(0)).to(values.dtype) * inner).sum(0)
