"""FedAMP: every client is held near a mixture of the models that resemble its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from coterie.contract.algebra import between, cosines, runaway
from coterie.contract.cohort import Cohort, Init
from coterie.contract.layout import Layout
from coterie.contract.method import Uploads, enrol
from coterie.contract.net import Given
from coterie.contract.records import Each, Model, Models, Record, Upload
from coterie.contract.shapes import Personal
from coterie.errors import CoterieError
from coterie.options import NonNegative, Positive, Share


@dataclass(frozen=True)
class Cloud(Models):
    """The clients' models `rows [M, D]` and the weights `xi [M, M]` of their mixtures."""

    xi: Tensor


def attention(rows: Tensor, alpha: float | None, sigma: float | None) -> Tensor:
    """`[M, d] -> xi [M, M]` in float64: xi_ij = alpha A'(|w_i - w_j|^2) with A(x) = 1 - exp(-x / sigma), rows sum to 1.

    By default sigma is the median squared distance and alpha = sigma / M: equal models are averaged evenly. With an
    alpha and a median of 0, while most models are the initial one, there is no scale, and xi is the identity. No xi_ii
    is negative: others that weigh more than 1 together are divided by their sum.
    """
    clients = len(rows)
    apart = between(rows, rows).square()
    pairs = apart[tuple(torch.triu_indices(clients, clients, 1))]
    scale = (pairs.median() if clients > 1 else pairs.sum()) if sigma is None else pairs.new_tensor(sigma)
    near = torch.exp(-apart / scale.clamp(min=1e-300))  # 1 between equal models, even where all are equal
    xi = near / clients if alpha is None else torch.where(scale > 0, alpha * near / scale, 0)
    xi = xi.fill_diagonal_(0)
    xi = xi / xi.sum(1, keepdim=True).clamp(min=1)
    return xi + torch.diag((1 - xi.sum(1)).clamp(min=0))


def cosine_attention(rows: Tensor, own: float, sigma: float | None) -> Tensor:
    """`[M, d] -> xi [M, M]` in float64: xi_ii = own, and xi_ij ~ exp(sigma cos(w_i, w_j)) shares out the rest of 1.

    By default sigma is 1 / median(1 - cos), so that the usual angle between two clients matters.
    """
    others = ~torch.eye(len(rows), dtype=torch.bool)
    if not others.any():
        return torch.ones(1, 1, dtype=torch.float64, device=rows.device)
    apart = 1 - cosines(rows)
    rate = 1 / apart[others].median().clamp(min=1e-12) if sigma is None else sigma
    xi = (1 - own) * torch.softmax(torch.where(others, -rate * apart, -torch.inf), 1)
    return xi.fill_diagonal_(own).to(rows.device)


@dataclass(frozen=True)
class FedAMP(Personal):
    """w_i <- SGD from w_i on L_i(w) + lam / (2 alpha) |w - u_i|^2 with u_i = sum_j xi_ij w_j.

    xi_ij = alpha exp(-|w_i - w_j|^2 / sigma) / sigma for j != i, and xi_ii is what is left of 1. Distances grow with
    the size of a model, so by default sigma is the median squared distance of two clients and alpha is sigma / M in xi
    and 1 in the pull. An alpha of one's own with that sigma starts as Local, all models being equal; should the others
    come to weigh more than 1 they are divided by their sum, so that no client is pushed away from its own model. An
    alpha above sigma / (M - 1), both given, is refused. Distances are those of the parameters. Clients upload w_i less
    u_i. Of one that diverged (not finite, or a hundred times the middle length) the server keeps the model before,
    until it is back. PFLlib's program, where the pull has no gradient, is the preset `pfllib`; it is Local. With
    `by=cosine` (HeurFedAMP) xi_ii is `own` and xi_ij for j != i is proportional to exp(sigma cos(w_i, w_j)), by default
    with sigma = 1 / median(1 - cos).
    """

    lam: NonNegative = 1.0
    """How strongly a client is pulled to its mixture of similar models."""
    alpha: Positive | None = None
    """Step size of the mixture, at most sigma / (M - 1); none takes sigma / M in it and 1 in the pull. PFLlib takes
    1, and 1 for sigma, whatever the size of the model."""
    sigma: Positive | None = None
    """By distance: the squared distance within which models count as similar; none takes the median of two clients'. By
    cosine: the rate that multiplies the cosine, larger being sharper; none takes 1 / median(1 - cos)."""
    by: Literal["distance", "cosine"] = "distance"
    """What makes two models similar: their distance, or the cosine between them (HeurFedAMP)."""
    own: Share = 0.5
    """With by=cosine, the share of a client's own model in its mixture."""

    family = "personalized aggregation"
    shared = "a mixture of similar clients' models"
    newcomer = "the mean of the clients' models"
    cite = "Huang et al., Personalized cross-silo federated learning on non-IID data, AAAI 2021"
    hook = "the pull to the mixture is a part of the gradient: momentum and means of squares see the " \
        "regularised objective"
    averages = False
    presets = ("pfllib", "heur")

    @classmethod
    def pfllib(cls) -> FedAMP:
        """PFLlib's program: the proximal term is detached, so nothing pulls; no validation split."""
        return cls(lam=0.0, alpha=1.0, sigma=1.0, validation=False, printed="served")

    @classmethod
    def heur(cls) -> FedAMP:
        """HeurFedAMP: models are compared by their angles, which suits deep networks."""
        return cls(by="cosine")

    def check(self, population: int, layout: Layout) -> None:
        if self.by == "distance" and self.lam and self.alpha is not None and self.sigma is not None:
            others = self.alpha * (population - 1) / self.sigma
            if others > 1:
                raise CoterieError(
                    f"fedamp:alpha={self.alpha:g},sigma={self.sigma:g} gives the others of {population} clients "
                    f"alpha (M - 1) / sigma = {others:.4g} of a mixture while models are alike, so that a client's own "
                    f"would weigh {1 - others:.4g}; take an alpha of at most {self.sigma / (population - 1):.4g}, or "
                    "leave it out."
                )

    def start(self, init: Init) -> Record:
        rows = init.row.repeat(init.population, 1)  # all alike, and so is every mixture of them
        return Cloud(rows, torch.eye(len(rows), dtype=torch.float64, device=rows.device))

    def mixtures(self, rows: Tensor) -> Tensor:
        """The clients' parameters `[M, d] -> xi [M, M]`."""
        if self.by == "cosine":
            return cosine_attention(rows, self.own, self.sigma)
        return attention(rows, self.alpha, self.sigma)

    def admit(self, server: Cloud, ids: Tensor, introductions: Upload) -> Record:
        new, clients = ids[ids >= len(server.rows)], len(server.rows)
        if not len(new):
            return server
        mean = torch.full_like(server.xi[:1], 1 / clients)  # a newcomer starts from the mean of the models
        rows = enrol(server.rows, new, (mean.to(server.rows.dtype) @ server.rows).expand(len(new), -1))
        xi = enrol(server.xi, new, mean.expand(len(new), -1))
        return Cloud(rows, torch.nn.functional.pad(xi, (0, len(rows) - clients)))

    def mixture(self, server: Cloud, ids: Tensor) -> Tensor:
        """u_i of these clients `[m, D]`."""
        return server.xi[ids].to(server.rows.dtype) @ server.rows

    def send(self, server: Cloud, ids: Tensor) -> Record:
        return Model(Each(self.mixture(server, ids)))  # type: ignore[arg-type]

    def join(self, cohort: Cohort, payload: Model) -> Record:
        return payload

    def local(self, cohort: Cohort, payload: Model, mine: Model) -> tuple[Upload, Record]:
        row = cohort.train(mine.row, {"u": payload.row}, correct=self.pull)
        return Upload(update=row - payload.row), Model(row)

    def pull(self, gradient: Tensor, row: Tensor, given: Given) -> Tensor:
        return gradient + self.lam / (self.alpha or 1.0) * (row - given.u)

    def merge(self, server: Cloud, up: Uploads) -> Record:
        rows, _ = self.known(server, up)
        return Cloud(rows, self.mixtures(up.layout.cut(rows, "parameters")))

    def known(self, server: Cloud, up: Uploads) -> tuple[Tensor, Tensor]:
        """The models `[M, D]` after a round, and whose of the participants stayed as it was since it diverged `[m]`.

        What a client has follows from what it was sent, not from what the server kept of it, which may be older.
        """
        new = torch.where(up.finite[:, None], self.mixture(server, up.ids) + up.learned, server.rows[up.ids])
        rows = server.rows.index_copy(0, up.ids, new)
        out = runaway(up.layout.cut(rows, "parameters"))
        return torch.where(out[:, None], server.rows, rows), ~up.finite | out[up.ids]

    def report(self, server: Cloud, up: Uploads) -> dict[str, Tensor]:
        return {"left_out": self.known(server, up)[1].sum()}
