"""FeSEM: K-means over the clients' models, one step a round."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.contract import sent
from coterie.contract.algebra import nearest, seeds
from coterie.contract.cohort import Cohort, Init
from coterie.contract.method import Uploads, enrol
from coterie.contract.net import Given
from coterie.contract.records import Models, Record, Upload
from coterie.contract.shapes import Clustered, FewModels
from coterie.options import Count, NonNegative


@dataclass(frozen=True)
class Centres(Models):
    """Centres `rows [k, D]`, each client's `cluster [M]`; `placed` is false while one model is warmed up."""

    cluster: Tensor
    placed: Tensor


@dataclass(frozen=True)
class FeSEM(Clustered, FewModels):
    """r_i = argmin_k |theta_i - W_k|; W_k = mean of {theta_i : r_i = k}; theta_i <- SGD_i(W_{r_i}).

    The centres are placed on the clients' own models, each as far as possible from the others, after `common_rounds`
    of one model. A cluster without participants keeps its centre. `weighted` means count clients by n_i. `lam` adds
    lam / 2 |theta - W_{r_i}|^2 to a client's loss. Distances are those of the parameters, so they also tell how many
    steps a client took: where clients' sizes differ much the largest ones become centres of their own; a run with
    `steps` in place of epochs lets all take as many. Where centres are placed is ours, the paper leaves it open. A
    robust aggregator places them on the models that it keeps only. A client that diverged stays in its cluster and
    counts in no centre.
    """

    common_rounds: Count = 1
    """Rounds of one common model before the centres are placed: the clients' models must differ for that."""
    weighted: bool = False
    """Whether clients count by their samples in a centre; false counts them alike."""
    lam: NonNegative = 0.0
    """How strongly a client is held near its centre."""

    shared = "K centres"
    introduces = sent.fields(cluster=sent.Index())
    newcomer = "the centre nearest to the mean model after a round of training"
    unprotected = "the models by which clients are put into clusters: in a small one they may be half of it"
    cite = "Long et al., Multi-center federated learning, World Wide Web 2023"
    hook = "the pull to the centre is a part of the gradient: momentum and means of squares see both"
    steps_itself = "its centres are the means of the clients next to them, as in K-means"
    FORMER = (("warmup", "common_rounds"),)

    def start(self, init: Init) -> Record:
        none = torch.zeros(0, dtype=torch.int64, device=init.row.device)
        return Centres(init.row[None], none, torch.zeros(1, dtype=torch.bool, device=none.device))

    def hello(self, server: Centres) -> Record:
        centres = server.rows[server.cluster] if len(server.cluster) else server.rows
        whole = torch.isfinite(centres).all(1)
        mean = (centres[whole] if whole.any() else centres).mean(0, keepdim=True)
        return Models(torch.cat([mean, server.rows]))  # the mean of the clients' centres, then the centres

    def introduce(self, cohort: Cohort, hello: Models) -> Upload:
        row = hello.rows[:, 0] if cohort.round == 0 else cohort.train(hello.rows[:, 0])
        point, centres = (cohort.layout.cut(t, "parameters") for t in (row[:, None], hello.rows[:, 1:]))
        return Upload(cluster=nearest(point, centres)[:, 0])

    def admit(self, server: Centres, ids: Tensor, introductions: Upload) -> Record:
        return Centres(server.rows, enrol(server.cluster, ids, introductions.cluster), server.placed)

    def train(self, cohort: Cohort, rows: Tensor) -> Tensor:
        return cohort.train(rows, {"centre": rows}, correct=self.pull if self.lam else None)

    def pull(self, gradient: Tensor, row: Tensor, given: Given) -> Tensor:
        return gradient + self.lam * (row - given.centre)

    def merge(self, server: Centres, up: Uploads) -> Record:
        def point(rows: Tensor) -> Tensor:
            return up.layout.cut(rows, "parameters")

        theta = server.rows[server.cluster[up.ids]] + up.learned
        rows, cluster, placed = server.rows, server.cluster, server.placed | (up.round + 1 >= self.common_rounds)
        if placed:
            kept = rows if server.placed else rows[:0]
            usual = theta[self.kept(point(theta)) & up.finite]
            usual = usual if len(usual) else server.rows
            rows = torch.cat([kept, usual[seeds(point(usual), point(kept), self.models)]])
        if placed and not server.placed:  # clients that were absent are still at the common model
            cluster = nearest(point(server.rows), point(rows)).expand(len(cluster))
        choice = torch.where(up.finite, nearest(point(theta), point(rows)), cluster[up.ids])  # the E-step, the M-step
        counted = torch.where(up.finite, choice, len(rows))
        share = up.share_in(counted, len(rows) + 1, self.weighted)[:, :-1]
        rows = self.recentre(rows, theta, share, up.layout)
        return Centres(rows, enrol(cluster, up.ids, choice), placed)
