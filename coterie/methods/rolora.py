"""RoLoRA: the factors B and A of all adapters are trained and averaged in turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from coterie.contract.cohort import Cohort, Init
from coterie.contract.layout import Layout
from coterie.contract.low_rank import DOWN, UP, Split, joined, split
from coterie.contract.method import Method, Uploads
from coterie.contract.records import Record, Upload


@dataclass(frozen=True)
class RoLoRA(Method):
    """Rounds 1, 3, 5, ...: B <- B + sum_i p_i (SGD_i(B) - B) with A fixed; rounds 2, 4, ...: the same of A, B fixed.

    One factor at a time makes averages exact, and both are learned. It begins with B, which is 0: the gradient of A
    would be 0 too. Whatever else trains, such as the head, is trained and averaged in every round. Both factors are
    sent down, so that whoever missed a round has them; the one that was trained comes back. p_i = n_i / n.
    """

    family = "low-rank adapters"
    shared = "the adapters and the head"
    down, up = "1", "all but A or B"
    newcomer = "the shared model"
    cite = "Chen et al., Robust federated finetuning of LLMs via alternating optimization of LoRA, NeurIPS 2025"
    adapters = True
    period: ClassVar[int] = 2

    def check(self, population: int, layout: Layout) -> None:
        self.refuse_unpaired(layout)

    def travels(self) -> str:
        return f"~{DOWN}"

    def trained(self, t: int) -> str:
        """The part that clients train in round t, counted from 0."""
        return f"~{DOWN if t % 2 == 0 else UP}"

    def start(self, init: Init) -> Record:
        return split(init.row, init.layout)

    def local(self, cohort: Cohort, payload: Split, mine: Record) -> tuple[Upload, Record]:
        before, part = joined(payload, cohort.layout), self.trained(cohort.round)
        return Upload(update=cohort.layout.cut(cohort.train(before, part=part) - before, part)), mine

    def merge(self, server: Split, up: Uploads) -> Record:
        row, part = joined(server, up.layout), self.trained(up.round)
        moved = self.aggregate(up.update, up.share, up.layout.only(part))
        return split(up.layout.put(row, part, up.layout.cut(row, part) + moved), up.layout)

    def averaged(self, server: Split, layout: Layout) -> dict[str, Layout]:
        return {"row": layout.only(f"~{DOWN}"), "down": layout.only(DOWN)}

    def deploy(self, cohort: Cohort, payload: Split, mine: Record) -> Tensor:
        return joined(payload, cohort.layout)

    def whole(self, server: Split, layout: Layout) -> Tensor | None:
        return joined(server, layout)[None]
