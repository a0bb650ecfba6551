"""FedMTL: a model for each client, all held near their mean."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coterie.contract import sent
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
    models moved, so it is exact whoever takes part. What other aggregators make of moves adds up to no mean of models:
    with a robust one, clients upload how far theirs are from the mean, and it goes m/M of the way to the mean of the
    models that are kept; those that are neither the mean nor robust are refused. With `detached`, the penalty has no
    gradient, as in PFLlib, which sends all participants' models to everyone and then trains each client alone.
    """

    lam: NonNegative = 0.1
    """How strongly a client is pulled to the mean of all models; no published value: PFLlib's pull has no gradient."""
    detached: bool = False
    """Whether the pull has no gradient, as in PFLlib; clients then train alone."""

    family = "regularised"
    shared = "the mean of the models"
    uploads = sent.fields(update=sent.Vectors(), row=sent.Vectors())  # one of them
    newcomer = "the mean of the models"
    cite = "Evgeniou, Pontil, Regularized multi-task learning, KDD 2004; not the MOCHA of Smith et al., NeurIPS 2017"
    presets = ("pfllib",)
    averages = property(lambda self: not self.detached)
    running_mean = True
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
        moved = row - (payload.row if self.aggregator.robust else mine.row)
        statistics = cohort.layout.cut(row - payload.row, "buffers")  # these are averaged over the participants
        return Upload(update=cohort.layout.put(moved, "buffers", statistics)), Model(row)

    def pull(self, gradient: Tensor, row: Tensor, given: Given) -> Tensor:
        return gradient + 2 * self.lam * (row - given.mean)

    def merge(self, server: Model | Models, up: Uploads) -> Record:
        if isinstance(server, Models):
            return Models(up.row)
        if self.aggregator.robust:
            return Model(self.follow(server.row, server.row + up.update, up))
        return Model(server.row + self.aggregate(up.update, up.even * len(up.update) / up.population, up.layout))
