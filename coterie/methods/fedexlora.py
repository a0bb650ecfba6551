"""FedEx-LoRA: factors are averaged, and what their average misses of the mean model goes into the backbone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.contract.cohort import Init
from coterie.contract.ground import added, unmoved
from coterie.contract.layout import Layout
from coterie.contract.low_rank import Factors, factors, side_by_side
from coterie.contract.method import Uploads
from coterie.contract.moving import Moved, Moving
from coterie.contract.records import Record
from coterie.errors import CoterieError


@dataclass(frozen=True)
class FedExLoRA(Moving):
    """B, A <- mean B, mean A as in FedAvg, and R <- R + s (sum_i p_i B_i A_i - mean B mean A); p_i = n_i / n.

    Clients compute with W + R + s B A, so that the model they get is the mean of theirs, exactly. The backbone W itself
    stays as it is: R `[o, q]` of each adapted layer is sent whole to whoever takes part or arrives, so that one who
    missed rounds has all of it. The rest of the row is averaged as in FedAvg. With a robust aggregator the mean of
    products is over the clients that it keeps, none further off than the middle one.
    """

    transposed: bool = False
    """Whether R takes the transpose of what is missing, as the released program does where it trains RoBERTa."""
    weighted: bool = True
    """Whether clients count by their samples; otherwise all alike."""

    family = "low-rank adapters"
    shared = "the adapters, the head and what moves the backbone"
    down = "1 + residual"
    newcomer = "the shared model"
    cite = "Singhal et al., FedEx-LoRA: Exact aggregation for federated and efficient fine-tuning of LLMs, ACL 2025"
    presets = ("official",)

    @classmethod
    def official(cls) -> FedExLoRA:
        """The released program where it trains RoBERTa, with its defect: what it adds to a linear layer's weight is
        transposed, which goes unseen where layers are square. Clients count alike; no validation split."""
        return cls(transposed=True, weighted=False, validation=False)

    def check(self, population: int, layout: Layout) -> None:
        super().check(population, layout)
        for pair in layout.pairs if self.transposed else ():
            o, q = pair.b.shape[0], pair.a.size // pair.rank
            if o != q:
                raise CoterieError(f"fedexlora's transposed=true, a defect of the released program, fits square layers "
                                   f"alone, and '{pair.name}' is {o} x {q}; leave it out.")

    def start(self, init: Init) -> Record:
        return Moved(init.row, unmoved(init.layout, init.row))

    def merge(self, server: Moved, up: Uploads) -> Record:
        p = up.share if self.weighted else up.even
        row, near = server.row + self.aggregate(up.update, p, up.layout), server.row + self.drawn_in(up.update)
        kept = torch.isfinite(near).all(1)
        if not (kept.any() and torch.isfinite(row).all()):
            return Moved(row, server.residual)
        near, p = near[kept], p[kept] / p[kept].sum()
        missing = (pair.scale * self.missing(factors(row, pair), side_by_side(p, *factors(near, pair)))
                   for pair in up.layout.pairs)
        return Moved(row, added(server.residual, missing))

    def missing(self, averaged: Factors, product: Factors) -> Tensor:
        """`[o, q]`: the mean product, from its factors `[o, m r], [m r, q]`, less that of the averaged factors."""
        b, a, left, right = (t.double() for t in (*averaged, *product))
        found = torch.cat([left, -b], 1) @ torch.cat([right, a])
        return found.T if self.transposed else found
