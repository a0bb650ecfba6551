"""FedMTL: a model for each client, all held near their mean."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.contract.cohort import Cohort, Init
from coterie.contract.method import Uploads
from coterie.contract.net import Given
from coterie.contract.records import Model, Models, Record, Upload
from coterie.contract.shapes import Personal
from coterie.options import NonNegative


@dataclass(frozen=True)
class FedMTL(Personal):
    """min sum_i L_i(theta_i) + lam |theta_i - mean|^2: every step adds 2 lam (theta_i - mean) to the gradient.

    The mean is that of all clients, unweighted, as the server knew it when the round began; clients upload how their
    models moved, so it is exact whoever takes part. With `detached`, the penalty has no gradient, as in PFLlib, which
    sends all participants' models to everyone and then trains each client alone.
    """

    lam: NonNegative = 0.1
    """How strongly a client is pulled to the mean of all models; no published value: PFLlib's pull has no gradient."""
    detached: bool = False
    """Whether the pull has no gradient, as in PFLlib; clients then train alone."""

    family = "regularised"
    shared = "the mean of the models"
    newcomer = "the mean of the models"
    cite = "Evgeniou, Pontil, Regularized multi-task learning, KDD 2004; not the MOCHA of Smith et al., NeurIPS 2017"
    presets = ("pfllib",)
    averages = property(lambda self: not self.detached)
    steps_itself = "its server keeps the mean of the clients' own models, which is what it is"

    @classmethod
    def pfllib(cls) -> FedMTL:
        """The program of PFLlib: local training next to a download of m models that changes nothing."""
        return cls(detached=True, validation=False, printed="served")

    def start(self, init: Init) -> Record:
        return Models(init.row.expand(init.population, -1)) if self.detached else Model(init.row)

    def join(self, cohort: Cohort, payload: Model | Models) -> Record:
        return payload if isinstance(payload, Model) else super().join(cohort, payload)

    def local(self, cohort: Cohort, payload: Model | Models, mine: Model) -> tuple[Upload, Record]:
        if isinstance(payload, Models):
            row = cohort.train(mine.row)
            return Upload(row=row), Model(row)
        row = cohort.train(mine.row, {"mean": payload.row}, correct=self.pull)
        statistics = cohort.layout.cut(row - payload.row, "buffers")  # these are averaged over the participants
        return Upload(update=cohort.layout.put(row - mine.row, "buffers", statistics)), Model(row)

    def pull(self, gradient: Tensor, row: Tensor, given: Given) -> Tensor:
        return gradient + 2 * self.lam * (row - given.mean)

    def merge(self, server: Model | Models, up: Uploads) -> Record:
        if isinstance(server, Models):
            return Models(up.row)
        even = torch.full_like(up.share, 1 / up.population)
        return Model(server.row + self.aggregate(up.update, even, up.layout))
