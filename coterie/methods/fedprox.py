"""FedProx: FedAvg whose clients are held near the model they received."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coterie.contract.cohort import Cohort
from coterie.contract.net import Given
from coterie.methods.fedavg import FedAvg
from coterie.options import NonNegative


@dataclass(frozen=True)
class FedProx(FedAvg):
    """Clients minimise L_i(w) + mu/2 |w - theta|^2: every step adds mu (w - theta) to the gradient.

    Clients count by n_i; the paper draws them by n_i and counts those drawn alike. Its partial work of slow clients is
    the run's `stragglers`.
    """

    mu: NonNegative = 0.01
    """How strongly clients are held near the received model; 0 is FedAvg. The paper tunes it over 0.001, 0.01, 0.1 and
    1."""

    cite = "Li et al., Federated optimization in heterogeneous networks, MLSys 2020"
    hook = "mu (w - theta) is a part of the gradient: momentum and means of squares see the regularised objective"
    presets = ("pfllib",)

    @classmethod
    def pfllib(cls) -> FedProx:
        """The program of PFLlib as it comes, with mu = 0: it is FedAvg."""
        return cls(mu=0.0, validation=False, printed="served")

    def train(self, cohort: Cohort, rows: Tensor) -> Tensor:
        return cohort.train(rows, {"anchor": rows}, correct=self.pull)

    def pull(self, gradient: Tensor, row: Tensor, given: Given) -> Tensor:
        return gradient + self.mu * (row - given.anchor)
