"""HetLoRA: adapters of unequal ranks, which clients cut by themselves and whose mean counts large products more."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from coterie.contract.cohort import Cohort
from coterie.contract.layout import Layout
from coterie.contract.low_rank import factors, sizes
from coterie.contract.method import Uploads, enrol
from coterie.contract.net import Batch, Given, Net, Row
from coterie.contract.ranks import Cut, Truncated, within
from coterie.contract.records import Record, Upload
from coterie.options import Count, NonNegative, Range


@dataclass(frozen=True)
class HetLoRA(Truncated):
    """A <- sum_i w_i A_i, B <- sum_i w_i B_i, zeros in ranks above r_i; w_i = |B_i A_i| / sum_j |B_j A_j|.

    |B A| is the Frobenius norm of s B A over all layers together. A client minimises its loss plus lam times the sum
    over layers of |tail of B| |tail of A|, the tail being the ranks above g = floor(gamma r_i). Where that sum is
    smaller after training than before, the client drops its tail for good, and g is its rank. The head is averaged with
    the same weights. A rank that no participant has stays as it is; zeros in both factors would never train again. With
    a robust aggregator clients count alike.
    """

    gamma: Annotated[float, Range(above=0, at_most=1)] = 0.99
    """What a client may keep of its rank in one round, rounded down; 1 cuts nothing."""
    lam: NonNegative = 0.01
    """How strongly the tail is held down; 0 does not."""
    smallest: Count = 1
    """The rank below which nobody cuts."""
    weigh: Literal["norm", "samples"] = "norm"
    """What clients count by: the norm of their product, or their samples."""

    family = "low-rank adapters"
    shared = "the adapters and the head"
    newcomer = "the shared model, cut to its rank"
    cite = "Cho et al., Heterogeneous LoRA for federated fine-tuning of on-device foundation models, EMNLP 2024"
    presets: ClassVar[tuple[str, ...]] = ("padding",)

    @classmethod
    def padding(cls) -> HetLoRA:
        """Zero padding, the naive way: means of the padded factors by n_i, nothing is cut. A rank that few clients have
        shrinks in every round by the square of their share."""
        return cls(gamma=1.0, lam=0.0, weigh="samples")

    @property
    def unequal(self) -> bool:
        """Ranks become so, however they begin."""
        return True

    def local(self, cohort: Cohort, payload: Any, mine: Record) -> tuple[Upload, Record]:
        begun = self.deploy(cohort, payload, mine)
        shorter = (self.gamma * payload.rank.double()).long().clamp(min=self.smallest).minimum(payload.rank)
        tail = (within(payload.rank, cohort.layout) & ~within(shorter, cohort.layout)).to(begun.dtype)
        objective = self.objective if self.lam else None
        row = cohort.train(begun, {"tail": tail} if self.lam else None, objective=objective)
        falls = self.product(row * tail, cohort.layout) < self.product(begun * tail, cohort.layout)
        rank = torch.where(falls[:, None], shorter, payload.rank)
        return Upload(update=torch.where(within(rank, cohort.layout), row - begun, 0), rank=rank), mine

    def objective(self, net: Net, row: Row, batch: Batch, given: Given) -> Tensor:
        held, tail = net.tensors(row), net.tensors(given.tail)
        norms = [[(held[e.name] * tail[e.name]).norm() for e in (pair.a, pair.b)] for pair in net.layout.pairs]
        return net.loss(row, batch) + self.lam * sum((a * b for a, b in norms), torch.zeros(()).to(norms[0][0]))

    def product(self, rows: Tensor, layout: Layout) -> Tensor:
        """`[C, D] -> [C]`: sum over layers of |B| |A|."""
        return torch.stack([b.flatten(1).norm(dim=1) * a.flatten(1).norm(dim=1)
                            for b, a in (factors(rows, pair) for pair in layout.pairs)]).sum(0)

    def merge(self, server: Cut, up: Uploads) -> Record:
        weights, norms = up.share, sizes(self.padded(server, up, up.update), up.layout).to(up.share.dtype)
        norms = torch.where(up.finite, norms, 0)
        if self.weigh == "norm" and not self.aggregator.robust and norms.any():
            weights = norms / norms.sum()
        assert server.rank is not None
        row = server.row + self.aggregate(self.moved(server, up), weights, up.layout)
        return replace(server, row=row, rank=enrol(server.rank, up.ids, up.rank))
