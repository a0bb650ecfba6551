"""Norm clipping: no update counts for more than its length allows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.contract.aggregator import Aggregator
from coterie.contract.algebra import blend, lengths
from coterie.contract.layout import Layout
from coterie.options import Positive


@dataclass(frozen=True)
class NormClip(Aggregator):
    """sum_i w_i min(1, b / |u_i|) u_i with the bound b.

    An update that is not finite has no direction and counts as 0.
    """

    bound: Positive | None = None
    """The bound b; by default the median of the round's norms, which fits any model, where the paper fixes a number."""

    robust = True
    protects = "the model, from updates that are right or wrong but long"
    cite = "Sun et al., Can you really backdoor federated learning?, 2019"

    @property
    def weighs(self) -> bool:
        return True

    def combine(self, updates: Tensor, weights: Tensor, layout: Layout) -> Tensor:
        sizes = lengths(updates)
        there = torch.isfinite(sizes)
        if not bool(there.all()):
            updates = torch.where(there.to(updates.device)[:, None], updates, 0)
        bound = self.bound if self.bound is not None else torch.where(there, sizes, torch.inf).quantile(0.5)
        shrink = torch.where(sizes > bound, bound / sizes, 1)
        return blend(weights.cpu() * shrink, updates)
