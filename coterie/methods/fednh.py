"""FedNH: class prototypes, spread evenly at the start and smoothed over rounds, instead of a trained head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.contract import sent
from coterie.contract.cohort import Cohort, Init
from coterie.contract.heads import require_scores, with_head
from coterie.contract.method import Uploads
from coterie.contract.net import Batch, Given, Net
from coterie.contract.objectives import by_class
from coterie.contract.records import Model, Record, Upload
from coterie.methods.fedavg import FedAvg
from coterie.options import Positive, Share


@dataclass(frozen=True)
class FedNH(FedAvg):
    """Scores are s <z/|z|, W_c>; clients train phi (and s) with W fixed; phi <- sum_i p_i phi_i, and
    W_c <- unit(rho W_c + (1 - rho) unit(sum_i n_ic m_ic)), m_ic = unit(mean of z/|z| over class c of client i).

    W starts with orthonormal rows (unit rows, where there are more classes than features); a class that no
    participant has keeps its prototype. `scale` is s at the start, which `learn_scale` trains. `uniform` weighs
    clients alike. rho = 1 keeps W as it started. With a robust aggregator the sums are over the clients that it keeps,
    and nobody counts for more samples than the median client.
    """

    rho: Share = 0.9
    """Share of the old prototype in the new one; 1 keeps those of the start."""
    scale: Positive = 1.0
    """The factor s of the scores, at the start; the paper takes 1 for its CNN and 20 for a ResNet."""
    learn_scale: bool = True
    """Whether s is trained."""
    uniform: bool = False
    """Whether clients count alike, as in the released program; false counts them by their samples, as FedAvg does."""

    family = "prototypes"
    shared = "the body and class prototypes"
    up = "1 + class features"
    uploads = sent.fields(update=sent.Vectors(), means=sent.Directions(), counts=sent.Counts())
    newcomer = "the shared model"
    cite = "Dai et al., Tackling data heterogeneity in federated learning with class prototypes, AAAI 2023"
    per_token = False
    presets = ("official",)

    @classmethod
    def official(cls) -> FedNH:
        """The released program: clients count alike whatever their size."""
        return cls(uniform=True, validation=False)

    def wrap(self, module: nn.Module) -> nn.Module:
        return with_head(module, lambda head: Prototypes(head, self.scale, self.learn_scale), "prototypes", self.name)

    def start(self, init: Init) -> Record:
        require_scores(init, self.name, "prototypes")
        unit = F.normalize(init.layout.cut(init.row, "prototypes").view(init.classes, -1), dim=1)
        return Model(init.layout.put(init.row, "prototypes", unit.flatten()))

    def local(self, cohort: Cohort, payload: Model, mine: Record) -> tuple[Upload, Record]:
        row = cohort.train(payload.row)
        means = F.normalize(cohort.total(directions, row), dim=2)  # [C, classes, d]
        return Upload(update=row - payload.row, means=means, counts=cohort.histogram.to(row.dtype)), mine

    def merge(self, server: Model, up: Uploads) -> Record:
        weights = up.even if self.uniform else up.share
        row = server.row + self.aggregate(up.update, weights, up.layout)
        old = up.layout.cut(server.row, "prototypes").view_as(up.means[0])
        mean, _ = self.class_sums(up.counts[:, :, None] * up.means, up.counts, up)
        new = F.normalize(self.rho * old + (1 - self.rho) * F.normalize(mean, dim=1), dim=1)
        seen = mean.square().sum(1, keepdim=True) > 0
        return Model(up.layout.put(row, "prototypes", torch.where(seen, new, old).flatten()))


class Prototypes(nn.Module):
    """`[B, d] -> [B, classes]`: the scaled cosine of features and fixed prototypes."""

    in_row = ("prototypes", "scale")

    def __init__(self, head: nn.Linear, scale: float, learn_scale: bool) -> None:
        super().__init__()
        self.prototypes = nn.Parameter(nn.init.orthogonal_(torch.empty_like(head.weight)), requires_grad=False)
        self.scale = nn.Parameter(torch.full((1,), float(scale)), requires_grad=learn_scale)

    def forward(self, z: Tensor) -> Tensor:
        return self.scale * F.linear(F.normalize(z, dim=-1), self.prototypes)


def directions(net: Net, row: Tensor, batch: Batch, given: Given) -> Tensor:
    """Sums of unit features by class, `[classes, d]`."""
    return by_class(net, batch, F.normalize(net.features(row, batch.x), dim=1))
