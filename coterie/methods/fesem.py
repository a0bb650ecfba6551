"""FeSEM: K-means over the clients' models, one step a round."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.cohort import Cohort, Init
from coterie.errors import CoterieError
from coterie.layout import Layout
from coterie.method import Method, Uploads, enrol
from coterie.net import Given
from coterie.records import Each, Model, Record, Upload


@dataclass(frozen=True)
class Centres(Record):
    """Centres `rows [k, D]`, each client's `cluster [M]`; `placed` is false while one model is warmed up."""

    rows: Tensor
    cluster: Tensor
    placed: Tensor


@dataclass(frozen=True)
class Start(Record):
    """What a newcomer is told: the mean of the clients' centres, and the centres."""

    row: Tensor
    rows: Tensor


@dataclass(frozen=True)
class Choice(Record):
    """The centre nearest to each client `[C]`."""

    cluster: Tensor


def distances(rows: Tensor, centres: Tensor) -> Tensor:
    """`[..., m, d], [..., k, d] -> [..., m, k]`, without the cancellation that inner products would bring."""
    return torch.cdist(rows.double(), centres.double(), compute_mode="donot_use_mm_for_euclid_dist")


def seeds(rows: Tensor, centres: Tensor, count: int) -> Tensor:
    """Which of `rows [m, d]` become further centres until there are `count`: ever the farthest from all so far.

    The first of all is the one nearest to the mean. This is the greedy form of K-means++, which draws nothing.
    """
    chosen: list[int] = [] if len(centres) else [int(distances(rows, rows.mean(0, keepdim=True)).argmin())]
    while len(centres) + len(chosen) < count:
        far = distances(rows, torch.cat([centres, rows[chosen]])).amin(1)
        if far.max() == 0:
            break
        chosen.append(int(far.argmax()))
    return torch.tensor(chosen, dtype=torch.int64, device=rows.device)


@dataclass(frozen=True)
class FeSEM(Method):
    """r_i = argmin_k |theta_i - W_k|; W_k = mean of {theta_i : r_i = k}; theta_i <- SGD_i(W_{r_i}).

    The centres are placed on the clients' own models, each as far as possible from the others, after `warmup` rounds
    of one common model. A cluster without participants keeps its centre. `weighted` means count clients by n_i.
    `lam` adds lam / 2 |theta - W_{r_i}|^2 to a client's loss. Distances are those of the parameters.
    """

    models: int = 3
    warmup: int = 1
    weighted: bool = False
    lam: float = 0.0

    family = "few models"
    shared = "K centres"
    newcomer = "the centre nearest to the mean model after a round of training"
    cite = "Long et al., Multi-center federated learning, World Wide Web 2023"

    def check(self, population: int, layout: Layout) -> None:
        if not 1 <= self.models <= population:
            raise CoterieError(f"{self.name} with {self.models} models needs as many clients; there are {population}.")

    def start(self, init: Init) -> Record:
        none = torch.zeros(0, dtype=torch.int64, device=init.row.device)
        return Centres(init.row[None], none, torch.zeros(1, dtype=torch.bool, device=none.device))

    def hello(self, server: Centres) -> Record:
        return Start(server.rows[server.cluster].mean(0) if len(server.cluster) else server.rows[0], server.rows)

    def introduce(self, cohort: Cohort, hello: Start) -> Record:
        row = hello.row if cohort.round == 0 else cohort.train(hello.row)
        apart = distances(*(cohort.layout.cut(t, "parameters") for t in (row[:, None], hello.rows)))  # [C, 1, k]
        return Choice(apart[:, 0].argmin(1))

    def admit(self, server: Centres, ids: Tensor, introductions: Choice) -> Record:
        return Centres(server.rows, enrol(server.cluster, ids, introductions.cluster), server.placed)

    def send(self, server: Centres, ids: Tensor) -> Record:
        return Model(Each(server.rows[server.cluster[ids]]))  # type: ignore[arg-type]

    def local(self, cohort: Cohort, payload: Model, mine: Record) -> tuple[Upload, Record]:
        row = cohort.train(payload.row, {"centre": payload.row}, correct=self.pull if self.lam else None)
        return Upload(update=row - payload.row), mine

    def pull(self, gradient: Tensor, row: Tensor, given: Given) -> Tensor:
        return gradient + self.lam * (row - given.centre)

    def merge(self, server: Centres, up: Uploads) -> Record:
        theta = server.rows[server.cluster[up.ids]] + up.update
        rows, cluster, placed = server.rows, server.cluster, server.placed | (up.round + 1 >= self.warmup)
        point = up.layout.cut(theta, "parameters")
        if placed:
            kept = rows if server.placed else rows[:0]
            rows = torch.cat([kept, theta[seeds(point, up.layout.cut(kept, "parameters"), self.models)]])
        centres = up.layout.cut(rows, "parameters")
        if placed and not server.placed:  # clients that were absent are still at the common model
            common = distances(up.layout.cut(server.rows, "parameters"), centres).argmin(1)
            cluster = common.expand(len(cluster))
        choice = distances(point, centres).argmin(1)  # the E-step, then the M-step
        mass = torch.nn.functional.one_hot(choice, len(rows)).double() * (up.n[:, None] if self.weighted else 1)
        weights = mass / mass.sum(0).clamp(min=1)
        means = [old + self.aggregate(theta - old, weights[:, k], up.layout) for k, old in enumerate(rows)]
        return Centres(torch.stack(means), enrol(cluster, up.ids, choice), placed)

    def deploy(self, cohort: Cohort, payload: Model, mine: Record) -> Tensor:
        return payload.row

    def report(self, server: Centres, up: Uploads) -> dict[str, Tensor]:
        return {"clients_per_model": torch.bincount(server.cluster, minlength=len(server.rows))}
