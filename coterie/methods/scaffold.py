"""SCAFFOLD: FedAvg whose clients correct their drift by control variates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from coterie.contract import sent
from coterie.contract.cohort import Cohort, Init
from coterie.contract.method import Uploads
from coterie.contract.net import Given
from coterie.contract.records import Model, Record, Upload
from coterie.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Steered(Model):
    """The model `row [D]` and the mean `control [D]` of the clients' control variates, 0 for buffers."""

    control: Tensor


@dataclass(frozen=True)
class SCAFFOLD(FedAvg):
    """y <- y - lr (grad - c_i + c) from y = theta; theta <- theta + mean (y_i - theta); c is the mean c_i.

    A client's new control variate is the mean gradient along its `path` of tau steps, c_i - c + (theta - y) / (tau lr),
    or the full `gradient` at theta. Clients count alike, as in the paper, or by their samples with `weighted`; c moves
    by the participants' changes over M, so it is the mean over all clients whoever takes part. With a robust aggregator
    c <- c + m/M mean (c_i - c) over those of m it keeps, none further from what it makes of them than the median one,
    and clients upload c_i - c in place of the change: c is then not quite the mean c_i, and the model ends near the
    optimum, not at it.
    """

    variate: Literal["path", "gradient"] = "path"
    """How a client's correction is made: from its path of steps, or as the full gradient."""
    weighted: bool = False
    """Whether clients count by their samples; false counts them alike."""

    shared = "the model and a control variate"
    keeps = "its control variate"
    down = up = "2"
    uploads = sent.fields(update=sent.Vectors(), control=sent.Vectors())
    cite = "Karimireddy et al., SCAFFOLD: stochastic controlled averaging for federated learning, ICML 2020"
    hook = "c - c_i is added to the gradient before the optimizer sees it; with variate=path only plain SGD is taken"

    def only_plain(self) -> str:
        return "" if self.variate == "gradient" else "variate=path reads the mean gradient off the way a model went"

    def start(self, init: Init) -> Record:
        return Steered(init.row, torch.zeros_like(init.row))

    def join(self, cohort: Cohort, payload: Steered) -> Model:
        return Model(payload.control)  # c_i: 0 at the start, and later what leaves c the mean over all clients

    def local(self, cohort: Cohort, payload: Steered, mine: Model) -> tuple[Upload, Record]:
        drift = payload.control - mine.row
        row = cohort.train(payload.row, {"drift": drift}, correct=self.steer)
        control = cohort.grad(payload.row) if self.variate == "gradient" else cohort.descent(payload.row, row) - drift
        since = payload.control if self.aggregator.robust else mine.row
        return Upload(update=row - payload.row, control=control - since), Model(control)

    def steer(self, gradient: Tensor, row: Tensor, given: Given) -> Tensor:
        return gradient + given.drift

    def merge(self, server: Steered, up: Uploads) -> Record:  # type: ignore[override]
        move = self.aggregate(up.update, up.share if self.weighted else up.even, up.layout)
        if self.aggregator.robust:
            control = self.drawn_in(server.control + up.control)
            return Steered(server.row + move, self.follow(server.control, control, up))
        return Steered(server.row + move, server.control + up.control.sum(0) / up.population)
