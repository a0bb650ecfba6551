"""Geometric median: the point of least distance to all updates together, by Weiszfeld's iteration."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.contract.aggregator import Aggregator
from coterie.contract.algebra import blend, gram, norms
from coterie.contract.layout import Layout
from coterie.options import Count, Positive


@dataclass(frozen=True)
class GeometricMedian(Aggregator):
    """argmin_z sum_i w_i |z - u_i|, smoothed near the updates (RFA).

    Weiszfeld's z <- sum_i b_i u_i with b_i proportional to w_i / |z - u_i| is carried out on the coefficients b, from
    the inner products alone. An update that is not finite is left out.
    """

    smoothing: Positive = 1e-6
    """Distances below this times the median norm of the updates count as that."""
    iterations: Count = 1000
    """The most steps taken."""
    weighted: bool = True
    """Whether clients count by their weights or, with false, alike."""

    robust = True
    protects = "the model, while less than half of the weight is arbitrary"
    cite = "Pillutla et al., Robust aggregation for federated learning, IEEE TSP 2022"

    @property
    def weighs(self) -> bool:
        return self.weighted

    def combine(self, updates: Tensor, weights: Tensor, layout: Layout) -> Tensor:
        products = gram(updates)
        there = torch.isfinite(products.diagonal())
        if not bool(there.all()):
            if not bool(there.any()):
                return updates[0]
            where = there.to(updates.device)
            updates, weights, products = updates[where], weights[where], products[there][:, there]
        share = weights.to("cpu", torch.float64) if self.weighted else torch.ones(len(updates), dtype=torch.float64)
        return blend(self._coefficients(products, share / share.sum()), updates)

    def _coefficients(self, products: Tensor, share: Tensor) -> Tensor:
        square = products.diagonal()
        sizes = norms(products)
        usual = float(sizes.quantile(0.5))
        least = self.smoothing * usual or 1e-300
        b = share
        for _ in range(self.iterations):
            apart = (square - 2 * (products @ b) + b @ products @ b).clamp_min(0).sqrt()
            new = share / apart.clamp_min(least)
            new = new / new.sum()
            if float((new - b).abs() @ sizes) <= 1e-10 * usual:
                return new
            b = new
        return b
