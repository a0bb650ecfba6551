"""FedROD: a generic head for all classes alike and, on the same features, a personal one."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from coterie.contract.cohort import Cohort, Init
from coterie.contract.heads import require_scores, with_head
from coterie.contract.net import Batch, Given, Net, Row
from coterie.contract.objectives import scores
from coterie.contract.records import Model, Record
from coterie.methods.fedper import FedPer
from coterie.options import NonNegative

NOTHING = math.log(1e-30)
"""In place of log 0: so little counts a class that a client has not."""


@dataclass(frozen=True)
class FedROD(FedPer):
    """phi, h_g <- gradient of CE(h_g(z) + gamma log n_i, y); p_i <- that of CE(sg h_g(z) + p_i(sg z), y), z = phi(x).

    The balanced softmax, with n_i the client's samples per class, trains body and generic head as if classes were
    equally frequent; a class that the client has not counts nothing there (for gamma > 0), and labels are not smoothed.
    The personal head p_i corrects its scores and, for the gradient stops (sg), touches nothing else. (phi, h_g) <-
    sum_i p_i (phi_i, h_gi). A client uses h_g(z) + p_i(z); p_i starts as a copy of h_g. The paper's second form, a
    hypernetwork that writes p_i from the class shares, is not built.
    """

    gamma: NonNegative = 1.0
    """How far the generic head is trained as if classes were equally frequent; 0 is plain training."""
    personal: str = field(default="personal", init=False)

    shared = "the model"
    keeps = "a second head"
    down = up = "1"
    newcomer = "the shared model with its generic head"
    cite = "Chen, Chao, On bridging generic and personalized federated learning for image classification, ICLR 2022"

    def wrap(self, module: nn.Module) -> nn.Module:
        return with_head(module, TwoHeads, "personal", self.name)

    def start(self, init: Init) -> Record:
        require_scores(init, self.name)
        return super().start(init)

    def fit(self, cohort: Cohort, rows: Tensor) -> Tensor:
        return cohort.layout.put(rows, self.personal, rows.new_zeros(()))  # the generic head alone

    def fallback(self, server: Model, init: Init, report: Mapping[str, Any]) -> Tensor:
        row = super().fallback(server, init, report)
        return init.layout.put(row, self.personal, row.new_zeros(()))

    def train(self, cohort: Cohort, rows: Tensor) -> Tensor:
        counts = cohort.histogram.to(rows.dtype)  # [C, classes]
        logs = torch.where(counts > 0, self.gamma * counts.clamp(min=1).log(), NOTHING if self.gamma else 0.0)
        return cohort.train(rows, {"logs": logs}, objective=self.both)

    def both(self, net: Net, row: Row, batch: Batch, given: Given) -> Tensor:
        z = net.features(row, batch.x)
        generic, personal = scores(net, row, "generic", z), scores(net, row, "personal", z.detach())
        balanced = net.task.scored(generic + given.logs, batch.y)
        return batch.mean(balanced + net.task.loss(generic.detach() + personal, batch.y))


class TwoHeads(nn.Module):
    """`[B, features] -> [B, classes]`: the sum of a generic and a personal head."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.generic, self.personal = head, copy.deepcopy(head)

    def forward(self, z: Tensor) -> Tensor:
        return self.generic(z) + self.personal(z)  # type: ignore[no-any-return]
