"""Ditto: FedAvg, and a personal model for each client that is held near the shared one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coterie.contract.cohort import Cohort
from coterie.contract.net import Given
from coterie.contract.records import Model, Record, Upload
from coterie.methods.fedavg import FedAvg
from coterie.options import Count, NonNegative, Positive


@dataclass(frozen=True)
class Ditto(FedAvg):
    """v_i <- v_i - lr (grad + lam (v_i - theta)) stays with its client; theta is FedAvg's and does not depend on v_i.

    theta is the model as it was received. v_i starts at theta and takes `personal_epochs` local epochs a round at the
    learning rate `personal_lr`, both by default the run's. Clients count by n_i in theta, where the paper counts them
    alike.
    """

    lam: NonNegative = 1.0
    """How strongly the personal model is held near the shared one; the paper tunes it between 0.01 and 2."""
    personal_epochs: Count | None = None
    """Local epochs of the personal model a round; none takes the run's."""
    personal_lr: Positive | None = None
    """Learning rate of the personal model; none takes the run's."""

    rates = ("personal_lr",)
    family = "regularised"
    keeps = "its personal model"
    newcomer = "the shared model"
    cite = "Li et al., Ditto: fair and robust federated learning through personalization, ICML 2021"
    hook = "lam (v - theta) is a part of the gradient: momentum and means of squares see the regularised objective"
    presets = ("pfllib",)
    FORMER = (*FedAvg.FORMER, ("epochs", "personal_epochs"))

    @classmethod
    def pfllib(cls) -> Ditto:
        """The program of PFLlib as it comes, with lam = 0 and one epoch: the personal models are Local's."""
        return cls(lam=0.0, personal_epochs=1, validation=False, printed="served")

    def join(self, cohort: Cohort, payload: Model) -> Model:
        return Model(payload.row)

    def local(self, cohort: Cohort, payload: Model, mine: Model) -> tuple[Upload, Record]:
        anchor = {"anchor": payload.row}
        own = cohort.train(mine.row, anchor, epochs=self.personal_epochs, lr=self.personal_lr, correct=self.pull)
        upload, _ = super().local(cohort, payload, mine)
        return upload, Model(own)

    def pull(self, gradient: Tensor, row: Tensor, given: Given) -> Tensor:
        return gradient + self.lam * (row - given.anchor)

    def deploy(self, cohort: Cohort, payload: Model, mine: Model) -> Tensor:
        return mine.row
