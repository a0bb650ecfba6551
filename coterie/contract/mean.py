"""Mean: the weighted mean of the updates."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coterie.contract.aggregator import Aggregator
from coterie.contract.layout import Layout


@dataclass(frozen=True)
class Mean(Aggregator):
    """sum_i w_i u_i, the averaging of FedAvg."""

    protects = "nothing: each client counts as much as its weight"
    cite = "McMahan et al., Communication-efficient learning of deep networks from decentralized data, AISTATS 2017"

    @property
    def weighs(self) -> bool:
        return True

    def combine(self, updates: Tensor, weights: Tensor, layout: Layout) -> Tensor:
        return weights @ updates
