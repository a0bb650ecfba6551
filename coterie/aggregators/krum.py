"""Krum: the update with the nearest neighbours."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.contract.aggregator import Aggregator
from coterie.contract.algebra import distances, gram
from coterie.contract.layout import Layout
from coterie.options import CountOrZero


def krum_scores(updates: Tensor, faulty: int) -> Tensor:
    """`[m, d] -> [m]`: the sum of the squared distances to the m - faulty - 2 nearest other updates."""
    m = len(updates)
    apart = distances(gram(updates)).fill_diagonal_(torch.inf)
    return apart.sort(dim=1).values[:, : m - faulty - 2].sum(1)


@dataclass(frozen=True)
class Krum(Aggregator):
    """The one update u_i of least sum of squared distances to its N - faulty - 2 nearest, whatever the weights.

    An update that is not finite is infinitely far from all others.
    """

    faulty: CountOrZero = 1
    """So many arbitrary clients among at least 2 faulty + 3 cannot draw the choice away."""

    robust = True
    protects = "the model, from `faulty` arbitrary clients"
    cite = "Blanchard et al., Machine learning with adversaries: Byzantine tolerant gradient descent, NeurIPS 2017"

    @property
    def minimum(self) -> int:
        return 2 * self.faulty + 3

    def combine(self, updates: Tensor, weights: Tensor, layout: Layout) -> Tensor:
        return updates[int(krum_scores(updates, self.faulty).argmin())]
