"""FLoRA: every round starts from fresh adapters, and the stack of all that were trained goes into the backbone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.contract.cohort import Cohort, Init
from coterie.contract.ground import added, unmoved
from coterie.contract.layout import Layout
from coterie.contract.low_rank import factors, side_by_side, with_factors
from coterie.contract.method import Uploads
from coterie.contract.moving import Moved, Moving
from coterie.contract.records import Record, Upload

REST = "~adapters"
"""The part of a row that is none of the adapters' factors."""


@dataclass(frozen=True)
class FLoRA(Moving):
    """A_i drawn anew, B_i = 0; train both over W + R; R <- R + s sum_i p_i B_i A_i; p_i = n_i / n.

    The mean of products is that of the side by side factors [p_1 B_1 ...] [A_1; ...], so it is exact whatever the A_i
    are. The backbone W itself stays as it is: R `[o, q]` of each adapted layer is sent whole to whoever takes part or
    arrives, so that one who missed rounds has all of it. Adapters travel up only. The rest of the row is averaged as
    in FedAvg. With a robust aggregator the mean of products is over the clients that it keeps, none further off than
    the middle one.
    """

    fresh: bool = True
    """Whether each client draws its A anew each round, uniform on +-1/sqrt(q); otherwise all rounds start from the A
    of the run's start, alike for all."""

    family = "low-rank adapters"
    shared = "the head and what moves the backbone"
    down = "all but adapters + residual"
    newcomer = "the shared model"
    cite = ("Wang et al., FLoRA: Federated fine-tuning large language models with heterogeneous low-rank adaptations, "
            "NeurIPS 2024")

    def travels(self) -> str:
        return REST

    def start(self, init: Init) -> Record:
        return Moved(init.layout.cut(init.row, REST), unmoved(init.layout, init.row))

    def local(self, cohort: Cohort, payload: Moved, mine: Record) -> tuple[Upload, Record]:
        trained = cohort.train(self.deploy(cohort, payload, mine))
        rest = cohort.layout.cut(trained, REST) - payload.row
        return Upload(update=cohort.layout.put(trained, REST, rest)), mine  # the factors themselves, as B began at 0

    def merge(self, server: Moved, up: Uploads) -> Record:
        row = server.row + up.layout.cut(self.aggregate(up.update, up.share, up.layout), REST)
        near = self.drawn_in(up.update)
        kept = torch.isfinite(near).all(1)
        if not kept.any():
            return Moved(row, server.residual)
        near, share = near[kept], up.share[kept] / up.share[kept].sum()
        stacks = ((pair.scale, *side_by_side(share, *factors(near, pair))) for pair in up.layout.pairs)
        moves = (scale * left.double() @ right.double() for scale, left, right in stacks)
        return Moved(row, added(server.residual, moves))

    def begun(self, cohort: Cohort, payload: Moved) -> Tensor:
        """The rest of the row as received, B = 0 and A drawn; what is 0 from the start, as of padding, stays 0."""
        rows, pairs, begun = cohort.assemble({REST: payload.row}), cohort.layout.pairs, []
        numbers = 2 * cohort.chance("adapters", sum(pair.a.size for pair in pairs)) - 1
        for pair, drawn in zip(pairs, torch.split(numbers, [pair.a.size for pair in pairs], 1), strict=True):
            b, a = factors(rows, pair)
            if self.fresh:
                a = drawn.view_as(a) / a.shape[-1] ** 0.5 * (a != 0)
            begun.append((pair, (torch.zeros_like(b), a)))
        return with_factors(rows, begun)

    def whole(self, server: Moved, layout: Layout) -> Tensor | None:
        return layout.put(server.row.new_zeros(layout.size), REST, server.row)[None]
