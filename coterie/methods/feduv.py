"""FedUV: FedAvg whose clients keep their scores varied and their features spread."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.contract.algebra import deviation, median, squares
from coterie.contract.cohort import Cohort, Init
from coterie.contract.heads import require_scores
from coterie.contract.layout import Layout
from coterie.contract.net import Batch, Given, Net, Row
from coterie.contract.records import Record
from coterie.methods.fedavg import FedAvg
from coterie.options import NonNegative


@dataclass(frozen=True)
class FedUV(FedAvg):
    """Clients minimise CE + variance * V + uniformity * U over each batch.

    V = mean_c max(0, 1/sqrt(C) - std of softmax(scores)_c), whose bound is what one sample of each class would have;
    U = mean over pairs of exp(-|z_a - z_b|^2 / s2), s2 the median of their non-zero squares, taken as a constant.
    The released program differentiates s2, too. A single sample has neither variance nor pairs.
    """

    variance: NonNegative = 2.5
    """Strength of the term that keeps the classes' scores varied."""
    uniformity: NonNegative = 0.5
    """Strength of the term that spreads the features."""

    family = "regularised"
    cite = "Son et al., FedUV: uniformity and variance for heterogeneous federated learning, CVPR 2024"
    per_token = False

    def check(self, population: int, layout: Layout) -> None:
        if self.uniformity:
            self.refuse_frozen(layout, "~head", "spreads the features of, with uniformity other than 0,")

    def start(self, init: Init) -> Record:
        require_scores(init, self.name)
        return super().start(init)

    def train(self, cohort: Cohort, rows: Tensor) -> Tensor:
        return cohort.train(rows, objective=self.spread)

    def spread(self, net: Net, row: Row, batch: Batch, given: Given) -> Tensor:
        z = net.features(row, batch.x)
        scores = net.head(row, z)
        loss = batch.mean(net.task.loss(scores, batch.y))
        flat = lacking_variance(scores.softmax(-1), batch.weight)
        return loss + self.variance * flat + self.uniformity * crowding(z, batch.weight)


def lacking_variance(p: Tensor, weight: Tensor) -> Tensor:
    """V of `p [B, classes]` over the samples of weight 1, with the unbiased standard deviation."""
    return (1 / math.sqrt(p.shape[1]) - deviation(p, weight)).clamp(min=0).mean()


def crowding(z: Tensor, weight: Tensor) -> Tensor:
    """U of `z [B, d]` over the pairs of samples of weight 1; 0 where there is no pair."""
    pairs = torch.ones(len(z), len(z), dtype=torch.bool, device=z.device).triu(1) & (weight[:, None] * weight > 0)
    apart = squares(z)
    scale = median(apart.detach(), pairs & (apart > 0))
    return torch.where(pairs, torch.exp(-apart / scale), 0).sum() / pairs.sum().clamp(min=1)
