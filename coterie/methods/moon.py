"""MOON: FedAvg whose clients' features are drawn to the shared model's and away from their own of the last round."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.cohort import Cohort
from coterie.layout import Layout
from coterie.methods.fedavg import FedAvg
from coterie.net import Batch, Given, Net, Row
from coterie.records import Model, Record, Upload


@dataclass(frozen=True)
class MOON(FedAvg):
    """Clients minimise L_i(w) + mu * mean softplus((cos(z, z_p) - cos(z, z_g)) / tau) and theta is their average.

    z are the inputs of the head in the model being trained, z_g in the model received and z_p in the model this client
    trained last (at first the initial one). There is no projection head: the features are compared as they are.
    """

    mu: float = 1.0
    tau: float = 0.5

    family = "regularised"
    keeps = "the model it trained last"
    cite = "Li, He, Song, Model-contrastive federated learning, CVPR 2021"

    def check(self, population: int, layout: Layout) -> None:
        layout.within("head")

    def join(self, cohort: Cohort, payload: Model) -> Model:
        return Model(payload.row)

    def local(self, cohort: Cohort, payload: Model, mine: Model) -> tuple[Upload, Record]:
        given = {"shared": payload.row, "last": mine.row}
        row = cohort.train(payload.row, given, objective=self.contrast)
        return Upload(update=row - payload.row), Model(row)

    def contrast(self, net: Net, row: Row, batch: Batch, given: Given) -> Tensor:
        z = net.features(row, batch.x)
        with net.still():  # the two fixed models do not drop out and keep their statistics
            shared, last = (net.features(fixed, batch.x) for fixed in (given.shared, given.last))
        nearer = cosine(z, last, batch.weight.dtype) - cosine(z, shared, batch.weight.dtype)
        return batch.mean(net.task.loss(net.head(row, z), batch.y) + self.mu * F.softplus(nearer / self.tau))


def cosine(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """`[B, ...], [B, ...] -> [B]`, not in the features' half precision."""
    return F.cosine_similarity(a.flatten(1).to(dtype), b.flatten(1).to(dtype))
