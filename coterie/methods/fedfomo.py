"""FedFomo: a client mixes in the models of others as far as they lower its own validation loss."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coterie import streams
from coterie.contract import sent
from coterie.contract.cohort import Cohort, Init
from coterie.contract.method import Uploads
from coterie.contract.records import Each, Model, Models, Record, Upload
from coterie.contract.shapes import Personal
from coterie.options import Count, Share


@dataclass(frozen=True)
class Affinity(Models):
    """The clients' models `rows [M, D]`, how much client i gained from j `gain [M, M]`, and the key of the draws."""

    gain: Tensor
    key: Tensor


@dataclass(frozen=True)
class Offer(Models):
    """Models of others `rows [m, M', D]` and whose they are `who [m, M']`."""

    who: Tensor


def worth(old: Tensor, losses: Tensor, distances: Tensor) -> Tensor:
    """omega_n = (L_i(theta_i) - L_i(theta_n)) / (|theta_n - theta_i| + 1e-5), `[C], [C, M'], [C, M'] -> [C, M']`."""
    return (old[:, None] - losses) / (distances + 1e-5)


def normalised(omega: Tensor) -> Tensor:
    """max(omega, 0), divided by its sum where that is positive."""
    positive = omega.clamp(min=0)
    total = positive.sum(-1, keepdim=True)
    return positive / torch.where(total > 0, total, 1)


@dataclass(frozen=True)
class FedFomo(Personal):
    """theta_i <- SGD_i(theta_i + sum_n w_n (theta_n - theta_i)) with w = max(omega, 0) normalised over n.

    omega_n = (L_i(theta_i) - L_i(theta_n)) / |theta_n - theta_i| on validation data (on training data where there
    are none); theta_i is the client's model after its last round. The server adds up the raw omega a client reports
    and sends it the models of the `received` clients it gained most from, or, with probability `explore`, of
    random ones. Distances are those of the parameters. Where no model helps, a client goes on from its own. Of a client
    that diverged the server keeps the last finite model. In the paper theta_i is the model before the last training
    and the trained one is among the theta_n; here the trained one is what others are compared with, so that where one
    of them helps nothing of it is kept but what training adds again.
    """

    received: Count = 5
    """Models of other clients that a client receives."""
    explore: Share = 0.0
    """Probability, drawn anew for each client and round, that all models it receives are random ones instead of those
    that helped most. The paper takes 0.3 and lowers it; 0 is as in PFLlib, which never draws: of many clients each is
    then offered the first in order until they have hurt it, so draw where there are more than a few beyond
    `received`."""

    family = "personalized aggregation"
    shared = "the models of other clients"
    down = "M'"
    # omega is a difference of losses over a distance of at least 1e-5
    uploads = sent.fields(row=sent.Vectors(), omega=sent.Numbers(-1e7, 1e7), who=sent.Index())
    newcomer = "the mean of the models it receives, mixed towards those that help"
    cite = "Zhang et al., Personalized federated learning with first order model optimization, ICLR 2021"
    averages = False

    def start(self, init: Init) -> Record:
        rows = init.row.repeat(init.population, 1)
        gain = torch.zeros(init.population, init.population, dtype=torch.float64, device=rows.device)
        return Affinity(rows, gain, streams.key(init.seed, "fedfomo").to(rows.device))

    def send(self, server: Affinity, ids: Tensor) -> Record:
        clients = len(server.rows)
        others, known = torch.arange(clients, device=ids.device), ids < clients
        gain = torch.where(known[:, None], server.gain[torch.where(known, ids, 0)], server.gain.mean(0))  # [m, M]
        if self.explore:
            chance = streams.key(server.key, ids[:, None], torch.arange(clients + 1, device=ids.device))
            chance = (chance & ((1 << 53) - 1)).double() / float(1 << 53)
            gain = torch.where(chance[:, :1] < self.explore, chance[:, 1:], gain)
        gain = gain.masked_fill(ids[:, None] == others, -torch.inf)  # the own model is no news
        who = gain.sort(dim=1, descending=True, stable=True).indices[:, : max(1, min(self.received, clients - 1))]
        return Offer(Each(server.rows[who]), Each(who))  # type: ignore[arg-type]

    def join(self, cohort: Cohort, payload: Offer) -> Record:
        if cohort.round == 0:
            return super().join(cohort, payload)
        return Model(self.mix(cohort, payload, payload.rows.mean(1))[0])

    def mix(self, cohort: Cohort, payload: Offer, row: Tensor) -> tuple[Tensor, Tensor]:
        """The mixed rows `[C, D]` and the raw omega `[C, M']`."""
        apart = payload.rows - row[:, None]
        distance = torch.linalg.vector_norm(cohort.layout.cut(apart, "parameters"), dim=-1)
        omega = worth(cohort.loss(row, "val"), cohort.loss(payload.rows, "val"), distance)
        omega = torch.where(torch.isfinite(omega), omega, 0)  # a model that diverged is no help
        w = normalised(omega)
        return row + torch.einsum("ck,ckd->cd", w, torch.where(w[..., None] > 0, apart, 0)), omega

    def local(self, cohort: Cohort, payload: Offer, mine: Model) -> tuple[Upload, Record]:
        row, omega = self.mix(cohort, payload, mine.row)
        row = cohort.train(row)
        return Upload(row=row, omega=omega, who=payload.who), Model(row)

    def merge(self, server: Affinity, up: Uploads) -> Record:
        rows, gain = server.rows, server.gain
        if (new := up.population - len(rows)) > 0:  # their first rounds: what they were sent by, and the mean till then
            rows = torch.cat([rows, rows.mean(0, keepdim=True).expand(new, -1)])
            gain = torch.nn.functional.pad(torch.cat([gain, gain.mean(0, keepdim=True).expand(new, -1)]), (0, new))
        rows = rows.index_copy(0, up.ids, torch.where(up.finite[:, None], up.row, rows[up.ids]))
        gain = gain.index_put((up.ids[:, None], up.who), torch.where(torch.isfinite(up.omega), up.omega, 0).double(),
                              accumulate=True)
        return replace(server, rows=rows, gain=gain, key=streams.key(server.key, "next"))
