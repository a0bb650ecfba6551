"""FedRep: personal heads fitted first, then the shared body under them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coterie.contract.cohort import Cohort
from coterie.methods.fedper import FedPer
from coterie.options import CountOrZero


@dataclass(frozen=True)
class FedRep(FedPer):
    """h_i <- SGD_i(h_i) with phi fixed, then phi_i <- SGD_i(phi) with h_i fixed; phi <- sum_i p_i phi_i.

    The head trains for `head_epochs`, the body for `body_epochs` (`none`: the run's). `personal` names what stays, as
    in FedPer. Both phases use the batches of plain training, so that FedAvg and Local are its special cases; running
    statistics in the body move in both. p_i = n_i / n, where the paper counts clients alike.
    """

    head_epochs: CountOrZero = 5
    """Local epochs of the head a round, before the body's; the paper takes 10, at twice the time."""
    body_epochs: CountOrZero | None = 1
    """Local epochs of the body a round; none takes the run's."""

    newcomer = "the shared body and a head fitted to it"
    cite = "Collins et al., Exploiting shared representations for personalized federated learning, ICML 2021"
    presets = ("pfllib", "fedlora")

    @classmethod
    def pfllib(cls) -> FedRep:
        """The program of PFLlib, with which most published tables were made: one epoch for each part."""
        return cls(head_epochs=1, body_epochs=1, validation=False, printed="served")

    @classmethod
    def fedlora(cls) -> FedRep:
        """FedLoRA (Wu et al., 2023): a shared model of full rank, trained from scratch, and a personal adapter of low
        rank beside it; the adapter is trained first, then the model (--adapter lora:rank=8,base=trains)."""
        return cls(personal="adapters", head_epochs=1, body_epochs=1)

    def fit(self, cohort: Cohort, rows: Tensor) -> Tensor:
        return cohort.train(rows, epochs=self.head_epochs, part=self.personal)

    def train(self, cohort: Cohort, rows: Tensor) -> Tensor:
        return cohort.train(self.fit(cohort, rows), epochs=self.body_epochs, part=f"~{self.personal}")
