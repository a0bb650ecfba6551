"""Median: the weighted median of each coordinate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.contract.aggregator import Aggregator
from coterie.contract.algebra import blocks
from coterie.contract.layout import Layout

_EVEN = 1e-6  # float32 weights sum to 1/2 up to this


@dataclass(frozen=True)
class Median(Aggregator):
    """In each coordinate the value with half of the weight on either side; the middle of two where both halve it.

    -inf is below all numbers, +inf above them, and what is not a number (NaN) above both.
    """

    weighted: bool = True
    """Whether clients count by their weights or, with false, alike."""

    robust = True
    protects = "the model, while less than half of the weight is arbitrary"
    cite = "Yin et al., Byzantine-robust distributed learning: towards optimal statistical rates, ICML 2018"

    @property
    def weighs(self) -> bool:
        return self.weighted

    def combine(self, updates: Tensor, weights: Tensor, layout: Layout) -> Tensor:
        share = weights.double() if self.weighted else torch.full_like(weights, 1 / len(weights), dtype=torch.float64)
        return torch.cat([_medians(updates[:, columns], share) for columns in blocks(updates)])


def _medians(values: Tensor, share: Tensor) -> Tensor:
    """`[m, d], [m] -> [d]`."""
    rising, order = values.sort(dim=0)
    reached = share[order].cumsum(0)
    low = (reached < 0.5 - _EVEN).sum(0, keepdim=True).clamp_max(len(values) - 1)
    high = (reached < 0.5 + _EVEN).sum(0, keepdim=True).clamp_max(len(values) - 1)
    below, above = rising.gather(0, low)[0], rising.gather(0, high)[0]
    return torch.where(low[0] == high[0], below, (below + above) / 2)
