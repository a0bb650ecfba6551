"""FedRep: personal heads fitted first, then the shared body under them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coterie.cohort import Cohort
from coterie.methods.fedper import FedPer
from coterie.records import Model, Record, Upload


@dataclass(frozen=True)
class FedRep(FedPer):
    """h_i <- SGD_i(h_i) with phi fixed, then phi_i <- SGD_i(phi) with h_i fixed; phi <- sum_i p_i phi_i.

    The head trains for `head_epochs`, the body for `body_epochs` (by default the run's). `personal` names what stays,
    as in FedPer. Both phases use the batches of plain training, so that FedAvg and Local are its special cases;
    running statistics in the body move in both.
    """

    head_epochs: int = 5
    body_epochs: int | None = None

    newcomer = "the shared body and a head fitted to it"
    cite = "Collins et al., Exploiting shared representations for personalized federated learning, ICML 2021"
    presets = ("pfllib",)

    @classmethod
    def pfllib(cls) -> FedRep:
        """The program of PFLlib, with which most published tables were made: one epoch for each part."""
        return cls(head_epochs=1, body_epochs=1, validation=False, published="served")

    def join(self, cohort: Cohort, payload: Model) -> Model:
        row = self.whole(cohort, payload, cohort.layout.cut(cohort.init.row, self.personal))
        if cohort.round > 0:
            row = self.fit_head(cohort, row)
        return Model(cohort.layout.cut(row, self.personal))

    def local(self, cohort: Cohort, payload: Model, mine: Model) -> tuple[Upload, Record]:
        row = self.fit_head(cohort, self.whole(cohort, payload, mine.row))
        row = cohort.train(row, epochs=self.body_epochs, part=f"~{self.personal}")
        body, head = cohort.layout.cut(row, f"~{self.personal}"), cohort.layout.cut(row, self.personal)
        return Upload(update=body - payload.row), Model(head)

    def fit_head(self, cohort: Cohort, row: Tensor) -> Tensor:
        return cohort.train(row, epochs=self.head_epochs, part=self.personal)
