"""FedPer: a shared body under personal heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from coterie.contract.cohort import Cohort, Init
from coterie.contract.layout import Layout
from coterie.contract.method import Method, Uploads
from coterie.contract.records import Model, Record, Upload


@dataclass(frozen=True)
class FedPer(Method):
    """(phi_i, h_i) <- SGD_i(phi, h_i) jointly; phi <- sum_i p_i phi_i; the head h_i never leaves its client.

    `personal` names what stays: any part of the model, `none` (then this is FedAvg) or `all` (then it is Local). Where
    that are running statistics, a client that never trained estimates them on its samples. Else a client of the
    federation that was never asked is served what stays as it was drawn; a newcomer trains it for a round first.
    """

    personal: str = "head"
    """The part that stays with its client; none is FedAvg, all is Local."""

    family = "decoupled"
    shared = "all but what is personal; by default the body"
    keeps = "what is personal; by default its head"
    down = up = "body"
    newcomer = "the shared part, and its own trained on it for one round"
    cite = "Arivazhagan et al., Federated learning with personalization layers, 2019"
    presets: ClassVar[tuple[str, ...]] = ("fedsa",)

    @classmethod
    def fedsa(cls) -> FedPer:
        """FedSA-LoRA (Guo et al., Selective aggregation for low-rank adaptation in federated learning, ICLR 2025): the
        factors A are shared, B and the head stay; a newcomer's B is 0 until it has trained for a round."""
        return cls(personal="*.lora.B+head")

    def check(self, population: int, layout: Layout) -> None:
        self.refuse_frozen(layout, self.personal, "keeps with each client")
        self.refuse_frozen(layout, f"~{self.personal}", "shares")

    def travels(self) -> str:
        return f"~{self.personal}"

    def start(self, init: Init) -> Record:
        return Model(init.layout.cut(init.row, f"~{self.personal}"))

    def join(self, cohort: Cohort, payload: Model) -> Record:
        row = cohort.settled(cohort.assemble({f"~{self.personal}": payload.row}))
        if cohort.round > 0:  # a newcomer: the body is trained, a random head on it would be useless
            row = self.fit(cohort, row)
        return Model(cohort.layout.cut(row, self.personal))

    def fit(self, cohort: Cohort, rows: Tensor) -> Tensor:
        """Rows `[C, D]` whose personal part suits the shared one."""
        return cohort.train(rows, part=self.personal)

    def local(self, cohort: Cohort, payload: Model, mine: Model) -> tuple[Upload, Record]:
        row = self.train(cohort, self.assembled(cohort, payload, mine.row))
        body, head = cohort.layout.cut(row, f"~{self.personal}"), cohort.layout.cut(row, self.personal)
        return Upload(update=body - payload.row), Model(head)

    def merge(self, server: Model, up: Uploads) -> Record:
        return Model(server.row + self.aggregate(up.update, up.share, up.layout.only(f"~{self.personal}")))

    def averaged(self, server: Model, layout: Layout) -> dict[str, Layout]:
        return {"row": layout.only(f"~{self.personal}")}

    def deploy(self, cohort: Cohort, payload: Model, mine: Model) -> Tensor:
        return self.assembled(cohort, payload, mine.row)

    def fallback(self, server: Model, init: Init, report: Mapping[str, Any]) -> Tensor:
        """The shared part under the initial head."""
        return init.layout.put(init.row, f"~{self.personal}", server.row)

    def assembled(self, cohort: Cohort, payload: Model, head: Tensor) -> Tensor:
        """Body `[C, d]` and head -> rows `[C, D]`."""
        return cohort.settled(cohort.assemble({f"~{self.personal}": payload.row, self.personal: head}))
