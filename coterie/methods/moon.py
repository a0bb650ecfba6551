"""MOON: FedAvg whose clients' features are drawn to the shared model's and away from their own of the last round."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from coterie.contract.cohort import Cohort
from coterie.contract.heads import projected
from coterie.contract.layout import Layout
from coterie.contract.net import Batch, Given, Net, Row
from coterie.contract.objectives import cosine
from coterie.contract.records import Model, Record, Upload
from coterie.methods.fedavg import FedAvg
from coterie.options import CountOrZero, NonNegative, Positive


@dataclass(frozen=True)
class MOON(FedAvg):
    """Clients minimise L_i(w) + mu * mean softplus((cos(z, z_p) - cos(z, z_g)) / tau) and theta is their average.

    z are the inputs of the head in the model being trained, z_g in the model received and z_p in the model this client
    trained last (at first the one it received when it arrived). `projection_head` puts d -> d -> so many features (256
    in the paper), with a ReLU between, under the head; by default the model stays as it is.
    """

    mu: NonNegative = 1.0
    """Strength of the contrastive term; 0 is FedAvg. The paper tunes it over 0.1, 1, 5 and 10."""
    tau: Positive = 0.5
    """Temperature of the contrastive term."""
    projection_head: CountOrZero = 0
    """Features of a projection under the head (256 in the paper); 0 leaves the model as it is, so that methods are
    compared with the same model."""

    family = "regularised"
    keeps = "the model it trained last"
    cite = "Li, He, Song, Model-contrastive federated learning, CVPR 2021"
    per_token = False
    presets = ("pfllib",)

    @classmethod
    def pfllib(cls) -> MOON:
        """The program of PFLlib as it comes, with mu = 0: it is FedAvg."""
        return cls(mu=0.0, tau=1.0, validation=False, printed="served")

    def wrap(self, module: nn.Module) -> nn.Module:
        return projected(module, self.projection_head, self.name) if self.projection_head else module

    def check(self, population: int, layout: Layout) -> None:
        layout.within("head")
        self.refuse_frozen(layout, "~head", "takes features from")

    def join(self, cohort: Cohort, payload: Model) -> Model:
        return Model(payload.row)

    def local(self, cohort: Cohort, payload: Model, mine: Model) -> tuple[Upload, Record]:
        row = cohort.train(payload.row, {"shared": payload.row, "last": mine.row}, objective=self.contrast)
        return Upload(update=row - payload.row), Model(row)

    def contrast(self, net: Net, row: Row, batch: Batch, given: Given) -> Tensor:
        z = net.features(row, batch.x)
        with net.still():  # the two fixed models do not drop out and keep their statistics
            shared, last = (net.features(fixed, batch.x) for fixed in (given.shared, given.last))
        nearer = cosine(z, last, batch.weight.dtype) - cosine(z, shared, batch.weight.dtype)
        return batch.mean(net.task.loss(net.head(row, z), batch.y) + self.mu * F.softplus(nearer / self.tau))
