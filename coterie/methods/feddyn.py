"""FedDyn: FedAvg whose clients' objectives are tilted until their minimisers agree."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from coterie.contract import sent
from coterie.contract.cohort import Cohort, Init
from coterie.contract.method import Method, Uploads
from coterie.contract.net import Batch, Given, Net, Row
from coterie.contract.objectives import flat
from coterie.contract.records import Model, Record, Upload
from coterie.options import Positive, Range


@dataclass(frozen=True)
class Tilted(Model):
    """The model `row [D]`, `tilt [D]`, the mean of the clients' linear terms, 0 for buffers, and how many they are.

    With `by_size` also all their training `samples`.
    """

    tilt: Tensor
    clients: Tensor
    samples: Tensor | None = None


@dataclass(frozen=True)
class Sized(Model):
    """The model `row [D]` and the mean number of training samples, n / M, which a client compares its own with."""

    mean: Tensor


@dataclass(frozen=True)
class FedDyn(Method):
    """theta_i ~ argmin_w L_i(w) - <g_i, w> + alpha/2 |w - theta|^2 by SGD; g_i <- g_i - alpha (theta_i - theta).

    Server: s <- s - alpha/M sum_i (theta_i - theta), theta <- mean theta_i - s / alpha, over the participants and
    counting alike, so that s is the mean of all g_i (of g_i alpha / alpha_i with `by_size`, while no client comes or
    goes) whoever takes part. With a robust aggregator clients upload g_i, too, and s <- s + m/M (mean g_i - s), the
    mean over those of the m it keeps, none further from what it makes of them than the median one: the model
    ends near the optimum then, not at it. `gradient_clip` bounds the norm of each step's gradient (the authors' program
    leaves alpha w out of it). What is served is theta; that program scores means of clients' models instead.
    `norm_power=1` takes the norm unsquared, as PFLlib does: a pull of constant strength alpha/2. `norm_power=0` keeps
    of the square only what is linear in w, -alpha <theta, w>, as FL-bench does: nothing holds w near theta. `by_size`
    divides a client's alpha by n_i M / n, as the authors' program and FL-bench do: whoever has more data is held less.
    """

    alpha: Positive = 0.1
    """Strength of the dynamic term that brings clients to a common optimum; the paper takes 0.001 to 0.1 (0.01 for
    CIFAR), of which this is the strongest: with it the results of these pages were made."""
    gradient_clip: Positive | None = 10.0
    """Largest norm of a step's gradient, 10 as in the authors' program and in FL-bench, so that the tilt does not run
    away; none does not clip, as in the paper's equations."""
    norm_power: Annotated[int, Range(at_least=0, at_most=2)] = 2
    """2 as in the paper, 1 as in PFLlib (norm not squared), 0 as in FL-bench (no pull to the shared model)."""
    by_size: bool = False
    """Whether a client's alpha is divided by n_i M / n, as in the authors' program; a client then tells how many
    samples it has."""

    family = "regularised"
    shared = "the model"
    keeps = "its linear term"
    newcomer = "the shared model"
    uploads = sent.fields(update=sent.Vectors(), term=sent.Vectors())
    introduces = sent.fields(samples=sent.Counts())
    unprotected = "the numbers of samples that clients tell on arrival, with by_size=true"
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
        """The program FL-bench, which leaves out the square of w and divides alpha by n_i M / n."""
        return cls(alpha=0.01, norm_power=0, by_size=True, validation=False)

    def start(self, init: Init) -> Record:
        none = torch.zeros((), dtype=torch.int64, device=init.row.device)
        return Tilted(init.row, torch.zeros_like(init.row), none, none if self.by_size else None)

    def introduce(self, cohort: Cohort, hello: Record) -> Upload:
        return Upload(samples=cohort.n) if self.by_size else Upload()

    def admit(self, server: Tilted, ids: Tensor, introductions: Upload) -> Tilted:
        clients = server.clients + len(ids)  # the terms of those who come are 0, which the mean follows
        tilt = server.tilt * (server.clients.double() / clients).to(server.tilt.dtype)
        samples = None if server.samples is None else server.samples + introductions.samples.sum()
        return replace(server, tilt=tilt, clients=clients, samples=samples)

    def send(self, server: Tilted, ids: Tensor) -> Model:
        if server.samples is None:
            return Model(server.row)
        return Sized(server.row, (server.samples.double() / server.clients).to(server.row.dtype))

    def join(self, cohort: Cohort, payload: Model) -> Model:
        return Model(torch.zeros_like(payload.row))  # g_i

    def local(self, cohort: Cohort, payload: Model, mine: Model) -> tuple[Upload, Record]:
        given = {"anchor": payload.row, "tilt": mine.row, "alpha": self.strength(cohort, payload)}
        objective = self.distance if self.norm_power == 1 else None
        row = cohort.train(payload.row, given, correct=self.lean, objective=objective, clip=self.gradient_clip)
        update = row - payload.row
        moved = cohort.layout.put(update, "buffers", update.new_zeros(()))  # which have no gradient
        term = mine.row - given["alpha"][:, None] * moved
        told = {"term": (self.alpha / given["alpha"])[:, None] * term} if self.aggregator.robust else {}
        return Upload(update=update, **told), Model(term)

    def strength(self, cohort: Cohort, payload: Model) -> Tensor:
        """Each client's alpha `[C]`."""
        alpha = payload.row.new_full((cohort.size,), self.alpha)
        return alpha * payload.mean / cohort.n.to(alpha.dtype) if isinstance(payload, Sized) else alpha

    def lean(self, gradient: Tensor, row: Tensor, given: Given) -> Tensor:
        pull = (-given.anchor, torch.zeros_like(row), row - given.anchor)[self.norm_power]
        return gradient - given.tilt + given.alpha * pull

    def distance(self, net: Net, row: Row, batch: Batch, given: Given) -> Tensor:
        """L(w) + alpha/2 |w - theta| on a batch."""
        far: Tensor = torch.linalg.vector_norm(flat(net, row) - flat(net, given.anchor))  # of gradient 0 at w = theta
        return net.loss(row, batch) + given.alpha / 2 * far

    def merge(self, server: Tilted, up: Uploads) -> Record:
        if self.aggregator.robust:
            tilt = self.follow(server.tilt, self.drawn_in(up.term), up)
        else:
            moved = up.layout.put(up.update, "buffers", up.update.new_zeros(()))
            tilt = server.tilt - self.alpha / up.population * moved.sum(0)
        row = server.row + self.aggregate(up.update, up.even, up.layout) - tilt / self.alpha
        return replace(server, row=row, tilt=tilt)
