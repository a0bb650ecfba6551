"""Multi-Krum: the mean of the updates that Krum trusts most."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coterie.aggregators.krum import krum_scores
from coterie.contract.aggregator import Aggregator
from coterie.contract.algebra import blend
from coterie.contract.layout import Layout
from coterie.options import Count, CountOrZero


@dataclass(frozen=True)
class MultiKrum(Aggregator):
    """The weighted mean of the `chosen` updates of least Krum score.

    The score, the sum of the squared distances to the N - faulty - 2 nearest updates, does not look at weights.
    """

    faulty: CountOrZero = 1
    """So many arbitrary clients among at least 2 faulty + 3 cannot draw the choice away."""
    chosen: Count | None = None
    """How many updates are averaged; by default N - faulty."""

    robust = True
    protects = "the model, from `faulty` arbitrary clients"
    cite = "Blanchard et al., Machine learning with adversaries: Byzantine tolerant gradient descent, NeurIPS 2017"

    @property
    def minimum(self) -> int:
        return max(2 * self.faulty + 3, (self.chosen or 0) + self.faulty)

    def combine(self, updates: Tensor, weights: Tensor, layout: Layout) -> Tensor:
        count = self.chosen or len(updates) - self.faulty
        nearest = krum_scores(updates, self.faulty).argsort(stable=True)[:count].to(updates.device)
        share = weights[nearest]
        return blend(share / share.sum(), updates[nearest])
