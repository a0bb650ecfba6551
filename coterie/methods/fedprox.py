"""FedProx: FedAvg whose clients are held near the model they received."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coterie.cohort import Cohort
from coterie.methods.fedavg import FedAvg
from coterie.net import Given
from coterie.records import Model, Record, Upload


@dataclass(frozen=True)
class FedProx(FedAvg):
    """Clients minimise L_i(w) + mu/2 |w - theta|^2: every step adds mu (w - theta) to the gradient."""

    mu: float = 0.01

    cite = "Li et al., Federated optimization in heterogeneous networks, MLSys 2020"

    def local(self, cohort: Cohort, payload: Model, mine: Record) -> tuple[Upload, Record]:
        trained = cohort.train(payload.row, {"anchor": payload.row}, correct=self.pull)
        return Upload(update=trained - payload.row), mine

    def pull(self, gradient: Tensor, row: Tensor, given: Given) -> Tensor:
        return gradient + self.mu * (row - given.anchor)
