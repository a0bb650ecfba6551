"""FedBABU: a shared body trained under one frozen random head, fine-tuned by every client before use."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from coterie.cohort import Cohort
from coterie.layout import Layout
from coterie.methods.fedper import FedPer
from coterie.records import Model, Nothing, Record, Upload


@dataclass(frozen=True)
class FedBABU(FedPer):
    """phi <- sum_i p_i SGD_i(phi) under the initial head h_0, which nobody trains; served: SGD_i(phi, h_0).

    Every client rebuilds h_0 from the seed, so it never travels. The served model is fine-tuned on `part` for
    `finetune_epochs` from the shared body and never written back; with 0 epochs there is a single global model.
    """

    finetune_epochs: int = 5
    part: str = "all"
    personal: str = field(default="head", init=False)

    keeps = "nothing"
    newcomer = "the shared body and the initial head, fine-tuned"
    cite = "Oh, Kim, Yun, FedBABU: toward enhanced representation for federated image classification, ICLR 2022"

    def check(self, population: int, layout: Layout) -> None:
        super().check(population, layout)
        layout.within(self.part)

    def join(self, cohort: Cohort, payload: Model) -> Record:
        return Nothing()

    def local(self, cohort: Cohort, payload: Model, mine: Record) -> tuple[Upload, Record]:
        row = cohort.train(cohort.assemble({"~head": payload.row}), part="~head")
        return Upload(update=cohort.layout.cut(row, "~head") - payload.row), mine

    def deploy(self, cohort: Cohort, payload: Model, mine: Record) -> Tensor:
        return cohort.train(cohort.assemble({"~head": payload.row}), epochs=self.finetune_epochs, part=self.part)
