"""FedSoft: K cluster models, and personal models held near those that explain a client's samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from coterie import streams
from coterie.contract import sent
from coterie.contract.algebra import chosen
from coterie.contract.cohort import Cohort, Init
from coterie.contract.method import Uploads
from coterie.contract.net import Batch, Given, Net
from coterie.contract.records import Models, Record, Upload
from coterie.contract.shapes import FewModels, Personal
from coterie.options import Count, NonNegative, Range


@dataclass(frozen=True)
class Membership(Record):
    """The client's model `row [C, D]` and how much each cluster matters to it `u [C, K]`."""

    row: Tensor
    u: Tensor

    former = ("Own",)


@dataclass(frozen=True)
class Drawing(Models):
    """The cluster models `rows [K, D]` and the key of the draws."""

    key: Tensor


def wins(net: Net, row: Tensor, batch: Batch, given: Given) -> Tensor:
    """How many samples of the batch each of `given.rows [K, D]` has the least loss on, `[K]`."""
    losses = torch.stack([net.task.scored(net(one, batch.x), batch.y) for one in given.rows.unbind()])  # [K, B]
    best = losses.argmin(0, keepdim=True) == torch.arange(len(losses), device=losses.device)[:, None]
    return (best.to(losses.dtype) * batch.weight).sum(1)


def shares(u: Tensor, n: Tensor) -> Tensor:
    """v_is = u_is n_i / sum_j u_js n_j, `[m, K], [m] -> [m, K]` in float64; 0 in a cluster in which nobody has u_is."""
    mass = u.double() * n[:, None]
    return mass / mass.sum(0).clamp(min=1e-300)


def blend(u: Tensor, rows: Tensor) -> Tensor:
    """`[C, K], [C, K, D] -> [C, D]`: the mean of the cluster models, weighted by u."""
    return torch.einsum("ck,ckd->cd", u / u.sum(-1, keepdim=True), rows)


@dataclass(frozen=True)
class FedSoft(FewModels, Personal):
    """w_i <- SGD from w_i on L_i(w) + lam / 2 sum_s u_is |w - c_s|^2; c_s = sum_i v_is w_i, v_is ~ u_is n_i.

    u_is = max(n_is / n_i, sigma) with n_is the samples of client i on which cluster model s has the least loss,
    counted anew in every `every`-th round. The cluster models start from independent draws, every client's model as the
    first of them; of a module that is the module as given, and the others are drawn anew. A function that builds the
    same model each time is refused. All participants take part in every cluster; with `selected`, c_s is instead the
    plain mean of so many of them, drawn with probabilities v_is; those not drawn train all the same, which in the
    authors' program they do not.
    """

    lam: NonNegative = 0.1
    """How strongly a client is held near the cluster models it belongs to; the authors take 0.1 for MNIST, 0.01 for
    CIFAR and 1 for linear models."""
    sigma: Annotated[float, Range(above=0, at_most=1)] = 1e-4
    """Least share of a cluster in a client."""
    every: Count = 1
    """Rounds between two counts of who belongs where; who is not asked in such a round keeps the count it has."""
    selected: Count | None = None
    """Participants drawn for each cluster's mean, 15 to 30 of many in the paper; none takes all, weighted, which
    needs no draw and suits fewer clients."""

    down = "K"
    uploads = sent.fields(offset=sent.Vectors(), u=sent.Numbers(above=0, at_most=1))
    by_model = "importance"
    newcomer = "the mixture of the cluster models by its samples, trained for a round near them"
    unprotected = "the shares of clusters that clients report and that make their weights"
    cite = "Ruan, Joe-Wong, FedSoft: soft clustered federated learning with proximal local updating, AAAI 2022"
    soft = True
    hook = "the pull to the cluster models is a part of the gradient: momentum and means of squares see both"

    def start(self, init: Init) -> Record:
        rows = init.rows(self.models)
        return Drawing(rows, streams.key(init.seed, "fedsoft").to(rows.device))

    def send(self, server: Drawing, ids: Tensor) -> Record:
        return Models(server.rows)

    def join(self, cohort: Cohort, payload: Models) -> Membership:
        u = self.importance(cohort, payload)
        if cohort.round == 0:
            return Membership(cohort.assemble({}), u)
        return Membership(self.solve(cohort, payload, blend(u, payload.rows), u), u)

    def importance(self, cohort: Cohort, payload: Models) -> Tensor:
        won = cohort.total(wins, payload.rows[:, 0], {"rows": payload.rows})
        share: Tensor = won / cohort.n[:, None]
        return share.clamp(min=self.sigma)

    def solve(self, cohort: Cohort, payload: Models, row: Tensor, u: Tensor) -> Tensor:
        """sum_s u_s |w - c_s|^2 has the gradient of (sum_s u_s) |w - c|^2, c being the u-weighted mean of the c_s."""
        return cohort.train(row, {"mean": blend(u, payload.rows), "mass": u.sum(-1)}, correct=self.pull)

    def pull(self, gradient: Tensor, row: Tensor, given: Given) -> Tensor:
        return gradient + self.lam * given.mass * (row - given.mean)

    def local(self, cohort: Cohort, payload: Models, mine: Membership) -> tuple[Upload, Record]:
        u = mine.u if cohort.round % self.every else self.importance(cohort, payload)
        row = self.solve(cohort, payload, mine.row, u)
        return Upload(offset=row - blend(u, payload.rows), u=u), Membership(row, u)

    def merge(self, server: Drawing, up: Uploads) -> Record:
        w = blend(up.u, server.rows.expand(len(up.u), -1, -1)) + up.offset
        v = shares(up.u.nan_to_num(0).clamp(0, 1), up.n)  # a share above 1 would count for others'
        if self.selected is not None:
            chance = streams.uniform(server.key, (up.population, self.models), torch.float64)
            v = chosen(v, self.selected, chance[up.ids])
        return Drawing(self.recentre(server.rows, w, v, up.layout), streams.key(server.key, "next"))

    def report(self, server: Drawing, up: Uploads) -> dict[str, Tensor]:
        return {self.by_model: up.u.mean(0)}

    def uses(self, server: Drawing, up: Uploads) -> dict[str, Tensor]:
        return {"w": up.u / up.u.sum(1, keepdim=True)}
