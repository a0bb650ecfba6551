"""FFA-LoRA: the factors A of all adapters stay as they were drawn, and B alone is trained and averaged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from coterie.contract.cohort import Cohort, Init
from coterie.contract.layout import Layout
from coterie.contract.low_rank import DOWN
from coterie.contract.method import Method, Uploads
from coterie.contract.records import Model, Record, Upload


@dataclass(frozen=True)
class FFALoRA(Method):
    """B <- B + sum_i p_i (SGD_i(B) - B), with A as it was drawn from the seed; p_i = n_i / n.

    s B A is linear in B, so the average model is the average of the clients' models, where FedAvg over adapters
    averages B and A each by itself. A never travels: every client draws the same. Whatever else trains, such as the
    head, is trained and averaged with B.
    """

    family = "low-rank adapters"
    shared = "the factors B and the head"
    down = up = "all but A"
    newcomer = "the shared model"
    cite = "Sun et al., Improving LoRA in privacy-preserving federated learning, ICLR 2024"
    adapters = True

    def check(self, population: int, layout: Layout) -> None:
        self.refuse_unpaired(layout)

    def travels(self) -> str:
        return f"~{DOWN}"

    def start(self, init: Init) -> Record:
        return Model(init.layout.cut(init.row, f"~{DOWN}"))

    def local(self, cohort: Cohort, payload: Any, mine: Record) -> tuple[Upload, Record]:
        row = cohort.train(self.deploy(cohort, payload, mine), part=f"~{DOWN}")
        return Upload(update=cohort.layout.cut(row, f"~{DOWN}") - payload.row), mine

    def merge(self, server: Any, up: Uploads) -> Record:
        return Model(server.row + self.aggregate(up.update, up.share, up.layout.only(f"~{DOWN}")))

    def averaged(self, server: Any, layout: Layout) -> dict[str, Layout]:
        return {"row": layout.only(f"~{DOWN}")}

    def deploy(self, cohort: Cohort, payload: Any, mine: Record) -> Tensor:
        return cohort.assemble({f"~{DOWN}": payload.row})

    def fallback(self, server: Any, init: Init, report: Mapping[str, Any]) -> Tensor:
        return init.layout.put(init.row, f"~{DOWN}", server.row)
