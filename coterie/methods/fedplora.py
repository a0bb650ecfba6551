"""Fed-PLoRA: every client has all ranks of the adapters, and trains some of them, others in each round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.contract import sent
from coterie.contract.cohort import Cohort
from coterie.contract.layout import Layout
from coterie.contract.method import Uploads
from coterie.contract.net import Given
from coterie.contract.ranks import Ranked, among, numbers
from coterie.contract.records import Model, Record, Upload


@dataclass(frozen=True)
class FedPLoRA(Ranked):
    """b_j, a_j <- b_j, a_j + sum_{i: j in K_i} (p_i / p_j) (what SGD_i moved them by), p_j the sum of those p_i.

    b_j and a_j are column j of B and row j of A: an adapter of rank R is R modules of rank 1. In each round a client
    draws a set K_i of r_i of them and trains these and the head; the others count in what it computes and stay as they
    are. A module that nobody trained stays. The head is averaged as in FedAvg, which this is where all r_i are R.
    """

    family = "low-rank adapters"
    shared = "the adapters and the head"
    down, up = "1", "its ranks"
    newcomer = "the shared model"
    cite = "Zhang et al., Heterogeneous federated fine-tuning with parallel one-rank adaptation, ICLR 2026"
    uploads = sent.fields(update=sent.Vectors(), modules=sent.Numbers(at_least=0, at_most=1))
    hook = ("the gradient of modules that a client does not train is 0; what a weight decay does to them meanwhile is "
            "not sent")

    def local(self, cohort: Cohort, payload: Any, mine: Record) -> tuple[Upload, Record]:
        if not self.unequal:
            return super().local(cohort, payload, mine)
        order = cohort.chance("modules", cohort.layout.rank).argsort(1).argsort(1)  # [C, R]
        modules = (order < self.rank_of(cohort)).long()
        mine_to_train = among(modules, cohort.layout)
        row = cohort.train(payload.row, {"trains": mine_to_train.to(payload.row.dtype)}, correct=self.only)
        return Upload(update=torch.where(mine_to_train, row - payload.row, 0), modules=modules), mine

    def only(self, gradient: Tensor, row: Tensor, given: Given) -> Tensor:
        return gradient * given.trains

    def merge(self, server: Model, up: Uploads) -> Record:
        moved = self.aggregate(up.update, up.share, up.layout)
        if self.unequal:
            number = numbers(up.layout).to(moved.device)
            for j in range(up.layout.rank):
                weights, columns = up.share * up.modules[:, j], number == j
                weights = weights / weights.sum() if weights.any() else weights
                flat = Layout.flat(int(columns.sum()))
                moved[columns] = self.aggregate(up.update[:, columns], weights, flat)
        return Model(server.row + moved)

    def columns(self, tensors: Mapping[str, Tensor], layout: Layout) -> Tensor | None:
        return among(tensors["modules"], layout) if "modules" in tensors else None
