"""FedFew: K models for M clients by smooth Tchebycheff set scalarisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from coterie.contract import sent
from coterie.contract.cohort import Cohort, Init
from coterie.contract.layout import Layout
from coterie.contract.mean import Mean
from coterie.contract.method import Uploads, pick
from coterie.contract.records import Models, Record, Upload
from coterie.contract.shapes import FewModels
from coterie.errors import CoterieError
from coterie.options import Positive


def stch_set_weights(losses: Tensor, mu: float) -> tuple[Tensor, Tensor, Tensor]:
    """`[M, K] -> alpha [M], w [M, K], g`, in log space and float64.

    g = mu log sum_i exp(-s_i) with s_i = log sum_k exp(-L_ik / mu) smooths max_i min_k L_ik;
    w_i = softmax_k(-L_ik / mu), alpha = softmax_i(-s_i), and dg/dtheta_k = sum_i alpha_i w_ik dL_i/dtheta_k.
    """
    a = -losses.double() / mu
    s = torch.logsumexp(a, 1)
    z = torch.logsumexp(-s, 0)
    return torch.softmax(-s, 0), torch.softmax(a, 1), mu * z


def full_steps(losses: Tensor, mu: float) -> Tensor:
    """`[M, K]`: alpha_i w_ik / sum_j alpha_j w_jk, or softmax_i(-L_ik / mu - 2 s_i), in float64; 0 for a model that is
    infinitely bad for everybody. A mass may be too small a number to divide by."""
    a = -losses.double() / mu
    full = torch.softmax(a - 2 * torch.logsumexp(a, 1, keepdim=True), 0)
    return torch.where(torch.isneginf(a).all(0), 0, full)


@dataclass(frozen=True)
class FedFew(FewModels):
    """theta_k <- theta_k + sum_i alpha_i w_ik (SGD_i(theta_k) - theta_k): a few models such that each client has one.

    A client takes the model of least loss on its validation data (on its training data where it has none, and in the
    paper). The loss behind the weights is that of the received model (`before`), the running mean of the last local
    epoch, or that of the trained copy (`after`); `scale` multiplies it by n_i / n; `normalise` divides a model's step
    by its mass sum_i alpha_i w_ik, so that every model takes a full step. `start_from` draws the K models
    independently, or equal (`same`, told apart by their batch orders only), or equal up to `noise`. Of a module the
    first independent model is the module as given, and the others are drawn anew; a function that builds the same model
    each time is refused.

    With `weigh=client` a client multiplies its K updates by its own w_ik, no loss is uploaded and all clients count
    alike, alpha_i = 1/m. What falls is then the mean over clients of the smooth minimum over models; the maximum over
    clients, which compares their losses, is gone.
    """

    mu: Positive = 0.01
    """The temperature: towards 0 only the worst client counts, far above the losses all count alike. 0.01 is the
    released program's; the paper's text names none."""
    start_from: Literal["independent", "same", "same+noise"] = "independent"
    """How the K models start: drawn independently, equal as in the released program, whose models long stay alike (for
    ever where a client's samples are one batch), or equal up to `noise`."""
    noise: Positive = 0.01
    """Standard deviation of the difference with start_from=same+noise."""
    loss_at: Literal["before", "running", "after"] = "before"
    """Which loss the weights are made of: the received model's, as in the paper's equations, the running one of the
    last local epoch, as in the released program, or the trained copy's."""
    weigh: Literal["server", "client"] = "server"
    """Who makes the weights: the server, of all clients' losses, or each client, of its own."""
    scale: bool = True
    """Whether a client's loss is multiplied by its share of the samples before weights are made of it."""
    normalise: bool = False
    """Whether every model takes a full step, however little weight it got."""

    down = up = "K"
    uploads = sent.fields(update=sent.Vectors(), loss=sent.Losses())
    by_model = "mass"
    newcomer = "the model of least loss on its validation data"
    cite = "Guo, Zhang, Lin, Li, Tang, Zhang, Few-for-many personalized federated learning, arXiv 2603.11992, 2026"
    presets = ("official",)
    soft = True
    unprotected = (
        "the losses that clients report and that make their weights: one of a very large loss gets all of it, and with "
        "a small mu there is no majority that an aggregator could go by"
    )
    private = "fedfew:weigh=client,scale=false"
    FORMER = (("server_lr", "server=sgd(lr={})"),)

    @classmethod
    def official(cls) -> FedFew:
        """The released program: equal starts, running loss, no validation split; its table printed `adapted`."""
        return cls(start_from="same", loss_at="running", validation=False, printed="adapted")

    def check(self, population: int, layout: Layout) -> None:
        super().check(population, layout)
        if self.weigh == "client" and (self.scale or self.normalise):
            raise CoterieError(
                "fedfew's weigh=client knows neither the other clients' n nor their weights; set scale=false and "
                f"normalise=false (server=sgd(lr={self.models}) makes the steps as large)."
            )

        if self.weigh == "client" and not (isinstance(self.aggregator, Mean) or self.aggregator.private):
            raise CoterieError(
                f"with fedfew's weigh=client an update is multiplied by its weight before it is sent, and "
                f"{self.aggregator.name} would take it for a small one; leave out +{self.aggregator.name}, or set "
                "weigh=server."
            )

        if self.normalise and self.aggregator.robust:
            raise CoterieError(
                "fedfew's normalise=true gives every model a full step however little weight it has, and with "
                f"{self.aggregator.name} all of them would follow the same clients; set normalise=false."
            )

    def start(self, init: Init) -> Record:
        if self.start_from == "independent":
            return Models(init.rows(self.models, otherwise="set start_from=same+noise"))
        rows = init.row.expand(self.models, -1)
        if self.start_from == "same":
            return Models(rows.clone())
        noise = torch.randn(rows.shape, generator=init.noise("fedfew"), dtype=rows.dtype).to(rows.device)
        return Models(init.layout.put(rows, "parameters", init.layout.cut(rows + self.noise * noise, "parameters")))

    def local(self, cohort: Cohort, payload: Models, mine: Record) -> tuple[Upload, Record]:
        trained, loss = cohort.train_watched(payload.rows, distinct=self.start_from == "same")  # [C, K, D], [C, K]
        if self.loss_at != "running":
            loss = cohort.loss(payload.rows if self.loss_at == "before" else trained)
        if self.weigh == "client":
            w = torch.softmax(-loss.double() / self.mu, 1)
            return Upload(update=w.to(trained.dtype)[:, :, None] * (trained - payload.rows)), mine
        return Upload(update=trained - payload.rows, loss=loss), mine

    def losses(self, up: Uploads) -> Tensor:
        """The losses `[m, K]` that weights are made of."""
        return (up.share[:, None] if self.scale else 1.0) * up.loss

    def parts(self, up: Uploads) -> tuple[Tensor, Tensor, Tensor]:
        """alpha `[m]`, w `[m, K]` and the objective g, of clients with finite losses where the aggregator is robust."""
        loss = self.losses(up)
        there = torch.isfinite(loss).all(1) if self.aggregator.robust else slice(None)
        alpha, w = torch.zeros_like(loss[:, 0], dtype=torch.float64), torch.zeros_like(loss, dtype=torch.float64)
        alpha[there], w[there], g = stch_set_weights(loss[there], self.mu)
        return alpha, w, g

    def weights(self, up: Uploads) -> tuple[Tensor, Tensor]:
        """The weight of each update `[m, K]` and the objective g."""
        alpha, w, g = self.parts(up)
        return alpha[:, None] * w, g

    def merge(self, server: Models, up: Uploads) -> Record:
        if self.weigh == "client":
            even = up.even[:, None].expand(-1, self.models)
            return Models(server.rows + self.aggregate(up.update, even, up.layout))
        weights = full_steps(self.losses(up), self.mu) if self.normalise else self.weights(up)[0]
        return Models(server.rows + self.aggregate(up.update, weights, up.layout))

    def deploy(self, cohort: Cohort, payload: Models, mine: Record) -> Tensor:
        return pick(payload.rows, cohort.loss(payload.rows, split="val").argmin(-1))

    def report(self, server: Models, up: Uploads) -> dict[str, Tensor]:
        if self.weigh == "client":
            return {}
        weights, g = self.weights(up)
        return {"g": g, self.by_model: weights.sum(0)}

    def uses(self, server: Models, up: Uploads) -> dict[str, Tensor]:
        if self.weigh == "client":
            return {}
        alpha, w, _ = self.parts(up)
        return {"w": w, "alpha": alpha}
