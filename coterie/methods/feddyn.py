"""FedDyn: FedAvg whose clients' objectives are tilted until their minimisers agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from coterie.contract.cohort import Cohort, Init
from coterie.contract.method import Method, Uploads
from coterie.contract.net import Batch, Given, Net, Row
from coterie.contract.objectives import flat
from coterie.contract.records import Model, Record, Upload
from coterie.options import Positive, Range


@dataclass(frozen=True)
class Tilted(Model):
    """The model `row [D]`, `tilt [D]`, the mean of the clients' linear terms, 0 for buffers, and how many they are."""

    tilt: Tensor
    clients: Tensor


@dataclass(frozen=True)
class FedDyn(Method):
    """theta_i ~ argmin_w L_i(w) - <g_i, w> + alpha/2 |w - theta|^2 by SGD; g_i <- g_i - alpha (theta_i - theta).

    Server: s <- s - alpha/M sum_i (theta_i - theta), theta <- mean theta_i - s / alpha, over the participants and
    counting alike, so that s is the mean of all g_i whoever takes part. With a robust aggregator clients upload g_i,
    too, and s <- s + m/M (mean g_i - s), the mean over those of the m it keeps. `gradient_clip` bounds the norm of each
    step's gradient. `norm_power=1` takes the norm unsquared, as PFLlib does: a pull of constant strength alpha/2.
    `norm_power=0` keeps of the square only what is linear in w, -alpha <theta, w>, as FL-bench does: nothing holds w
    near theta.
    """

    alpha: Positive = 0.1
    """Strength of the dynamic term that brings clients to a common optimum."""
    gradient_clip: Positive | None = 10.0
    """Largest norm of a step's gradient; none does not clip."""
    norm_power: Annotated[int, Range(at_least=0, at_most=2)] = 2
    """2 as in the paper, 1 as in PFLlib (norm not squared), 0 as in FL-bench (no pull to the shared model)."""

    family = "regularised"
    shared = "the model"
    keeps = "its linear term"
    newcomer = "the shared model"
    cite = "Acar et al., Federated learning based on dynamic regularization, ICLR 2021"
    hook = "the dynamic terms are a part of the gradient; g_i moves by where training ended, whatever led there"
    presets = ("pfllib", "flbench")
    steps_itself = "its server takes the mean less a tilt, which is what brings the clients to one optimum"
    FORMER = (("clip", "gradient_clip"),)

    @classmethod
    def pfllib(cls) -> FedDyn:
        """The program of PFLlib: a strong pull of unsquared norm, no clipping."""
        return cls(alpha=1.0, gradient_clip=None, norm_power=1, validation=False, printed="served")

    @classmethod
    def flbench(cls) -> FedDyn:
        """The program FL-bench, which leaves out the square of w."""
        return cls(norm_power=0, validation=False)

    def start(self, init: Init) -> Record:
        return Tilted(init.row, torch.zeros_like(init.row), torch.zeros((), dtype=torch.int64, device=init.row.device))

    def admit(self, server: Tilted, ids: Tensor, introductions: Upload) -> Tilted:
        clients = server.clients + len(ids)  # the terms of those who come are 0, which the mean follows
        return Tilted(server.row, server.tilt * (server.clients.double() / clients).to(server.tilt.dtype), clients)

    def send(self, server: Tilted, ids: Tensor) -> Model:
        return Model(server.row)

    def join(self, cohort: Cohort, payload: Model) -> Model:
        return Model(torch.zeros_like(payload.row))  # g_i

    def local(self, cohort: Cohort, payload: Model, mine: Model) -> tuple[Upload, Record]:
        given = {"anchor": payload.row, "tilt": mine.row}
        objective = self.distance if self.norm_power == 1 else None
        row = cohort.train(payload.row, given, correct=self.lean, objective=objective, clip=self.gradient_clip)
        update = row - payload.row
        moved = cohort.layout.put(update, "buffers", update.new_zeros(()))  # which have no gradient
        term = mine.row - self.alpha * moved
        return Upload(update=update, **({"term": term} if self.aggregator.robust else {})), Model(term)

    def lean(self, gradient: Tensor, row: Tensor, given: Given) -> Tensor:
        pull = (-given.anchor, torch.zeros_like(row), row - given.anchor)[self.norm_power]
        return gradient - given.tilt + self.alpha * pull

    def distance(self, net: Net, row: Row, batch: Batch, given: Given) -> Tensor:
        """L(w) + alpha/2 |w - theta| on a batch."""
        far: Tensor = torch.linalg.vector_norm(flat(net, row) - flat(net, given.anchor))  # of gradient 0 at w = theta
        return net.loss(row, batch) + self.alpha / 2 * far

    def merge(self, server: Tilted, up: Uploads) -> Record:
        if self.aggregator.robust:
            tilt = self.follow(server.tilt, up.term, up)
        else:
            moved = up.layout.put(up.update, "buffers", up.update.new_zeros(()))
            tilt = server.tilt - self.alpha / up.population * moved.sum(0)
        row = server.row + self.aggregate(up.update, up.even, up.layout) - tilt / self.alpha
        return Tilted(row, tilt, server.clients)
