"""FedBABU: a shared body trained under one frozen random head, fine-tuned by every client before use."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coterie.cohort import Cohort, Init
from coterie.layout import Layout
from coterie.method import Method, Uploads
from coterie.records import Model, Record, Upload


@dataclass(frozen=True)
class FedBABU(Method):
    """phi <- sum_i p_i SGD_i(phi) under the initial head h_0, which nobody trains; served: SGD_i(phi, h_0).

    Every client rebuilds h_0 from the seed, so it never travels. The served model is fine-tuned on `part` for
    `finetune_epochs` from the shared body and never written back; with 0 epochs there is a single global model.
    """

    finetune_epochs: int = 5
    part: str = "all"

    family = "decoupled"
    shared = "the body"
    down = up = "body"
    newcomer = "the shared body and the initial head, fine-tuned"
    cite = "Oh, Kim, Yun, FedBABU: toward enhanced representation for federated image classification, ICLR 2022"

    def check(self, population: int, layout: Layout) -> None:
        layout.within("head")
        layout.within(self.part)

    def start(self, init: Init) -> Record:
        return Model(init.layout.cut(init.row, "~head"))

    def local(self, cohort: Cohort, payload: Model, mine: Record) -> tuple[Upload, Record]:
        row = cohort.train(self.whole(cohort, payload), part="~head")
        return Upload(update=cohort.layout.cut(row, "~head") - payload.row), mine

    def merge(self, server: Model, up: Uploads) -> Record:
        return Model(server.row + self.aggregate(up.update, up.share, up.layout.only("~head")))

    def deploy(self, cohort: Cohort, payload: Model, mine: Record) -> Tensor:
        return cohort.train(self.whole(cohort, payload), epochs=self.finetune_epochs, part=self.part)

    def whole(self, cohort: Cohort, payload: Model) -> Tensor:
        """The received body under the initial head, `[C, D]`."""
        return cohort.layout.put(cohort.init.row, "~head", payload.row)
