"""FedBABU: a shared body trained under one frozen random head, fine-tuned by every client before use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from coterie.contract.cohort import Cohort
from coterie.contract.layout import Layout
from coterie.contract.records import Model, Nothing, Record, Upload
from coterie.methods.fedper import FedPer
from coterie.options import CountOrZero


@dataclass(frozen=True)
class FedBABU(FedPer):
    """phi <- sum_i p_i SGD_i(phi) under the initial head h_0, which nobody trains; served: SGD_i(phi, h_0).

    Every client rebuilds h_0 from the seed, so it never travels. The served model is fine-tuned on `part` for
    `finetune_epochs` from the shared body and never written back; with 0 epochs there is a single global model. With
    `finetune_from=own` it starts from the body that this client trained last.
    """

    finetune_epochs: CountOrZero = 5
    """Local epochs of fine-tuning before use, 5 as in the paper (10 in PFLlib); 0 uses the shared model."""
    part: str = "all"
    """The part of the model that is fine-tuned."""
    finetune_from: Literal["shared", "own"] = "shared"
    """The body it starts from: the shared one, or the one this client trained last (the initial one, if never)."""
    personal: str = field(default="head", init=False)

    keeps = "nothing"
    newcomer = "the shared body and the initial head, fine-tuned"
    cite = "Oh, Kim, Yun, FedBABU: toward enhanced representation for federated image classification, ICLR 2022"
    presets = ("pfllib",)

    @classmethod
    def pfllib(cls) -> FedBABU:
        """The program of PFLlib with full participation: ten epochs from the client's own body, as nothing is sent
        after the last round. (With less, it sends each round's body to all, so whoever is absent starts there.)"""
        return cls(finetune_epochs=10, finetune_from="own", validation=False, printed="served")

    def check(self, population: int, layout: Layout) -> None:
        super().check(population, layout)
        self.refuse_frozen(layout, self.part, "fine-tunes")

    def join(self, cohort: Cohort, payload: Model) -> Record:
        return payload if self.finetune_from == "own" else Nothing()

    def local(self, cohort: Cohort, payload: Model, mine: Record) -> tuple[Upload, Record]:
        body = cohort.layout.cut(cohort.train(cohort.assemble({"~head": payload.row}), part="~head"), "~head")
        return Upload(update=body - payload.row), Model(body) if self.finetune_from == "own" else mine

    def deploy(self, cohort: Cohort, payload: Model, mine: Record) -> Tensor:
        body = mine.row if isinstance(mine, Model) else payload.row
        return cohort.train(cohort.assemble({"~head": body}), epochs=self.finetune_epochs, part=self.part)
