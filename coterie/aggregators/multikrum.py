"""Multi-Krum: the mean of the updates that Krum trusts most."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coterie.aggregators.krum import krum_scores
from coterie.contract.aggregator import Aggregator
from coterie.contract.algebra import blend
from coterie.contract.layout import Layout
from coterie.errors import CoterieError


@dataclass(frozen=True)
class MultiKrum(Aggregator):
    """The weighted mean of the `chosen` updates of least Krum score.

    The score, the sum of the squared distances to the N - faulty - 2 nearest updates, does not look at weights.
    """

    faulty: int = 1
    """So many arbitrary clients among at least 2 faulty + 3 cannot draw the choice away."""
    chosen: int | None = None
    """How many updates are averaged; by default N - faulty."""

    robust = True
    protects = "the model, from `faulty` arbitrary clients"
    cite = "Blanchard et al., Machine learning with adversaries: Byzantine tolerant gradient descent, NeurIPS 2017"

    def __post_init__(self) -> None:
        if self.faulty < 0:
            raise CoterieError(f"multikrum's number of faulty clients must be at least 0, not {self.faulty}.")
        if self.chosen is not None and self.chosen < 1:
            raise CoterieError(f"multikrum must choose at least 1 client, not {self.chosen}.")

    @property
    def minimum(self) -> int:
        return max(2 * self.faulty + 3, (self.chosen or 0) + self.faulty)

    def combine(self, updates: Tensor, weights: Tensor, layout: Layout) -> Tensor:
        count = self.chosen or len(updates) - self.faulty
        nearest = krum_scores(updates, self.faulty).argsort(stable=True)[:count].to(updates.device)
        share = weights[nearest]
        return blend(share / share.sum(), updates[nearest])
