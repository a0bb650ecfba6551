"""FedPAC: features aligned over clients, and for each client the best combination of all heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coterie.contract import sent
from coterie.contract.algebra import combination, gram
from coterie.contract.cohort import Cohort, Init
from coterie.contract.heads import require_scores
from coterie.contract.layout import Layout
from coterie.contract.method import Method, Uploads, enrol
from coterie.contract.net import Batch, Given, Net, Row
from coterie.contract.objectives import by_class
from coterie.contract.records import Each, Model, Record, Upload
from coterie.options import BelowOne, Count, NonNegative, Positive


@dataclass(frozen=True)
class Sent(Record):
    """Body, prototypes c `[classes, d]`, which of them are known `[classes]`, and the client's combined head."""

    body: Tensor
    prototypes: Tensor
    known: Tensor
    head: Tensor


@dataclass(frozen=True)
class Collaboration(Sent):
    """What is sent, `head [M, h]` of all clients; and the last uploaded head, V and H of those that are `met`."""

    uploaded: Tensor
    V: Tensor
    H: Tensor
    met: Tensor

    former = ("Server",)


@dataclass(frozen=True)
class FedPAC(Method):
    """h_i <- SGD_i(h_i), then phi_i <- SGD_i of CE + lam/d |z - c_y|^2; phi <- sum_i p_i phi_i, h_i <- sum_j a_ij h_j.

    c_k in R^d is the mean feature of class k under the trained bodies of the participants that had the class, in the
    last round in which any had; a class nobody has had does not pull (the released program pulls to a client's own).
    With H_i[k] = (1/n_i) sum of z over class k and V_i = (mean |z|^2 - |H_i|^2) / n_i under the received body, a_i
    minimises the error sum_j a_j^2 V_j + |H_i - sum_j a_j H_j|^2 on the simplex; weights below `threshold` are dropped.
    Of one sample no V can be estimated, and the formula's 0 would make that client's head certain: there V = |z|^2. A
    round's combinations are of its participants' heads, a newcomer's of all heads ever sent, with the H of the round
    that each was sent in. The head trains for `head_epochs` at `head_lr` (by default the run's), the body for the run's
    epochs (5 in the paper). A robust aggregator leaves out of the c_k, and of what heads are combined of, whom it does
    not keep, and in the c_k nobody counts for more samples than the median client; no V counts as less than the round's
    median, and no head lies further from what the aggregator makes of them than the median one: V and H, which make a
    head's weight in others', are each client's own word.
    """

    lam: NonNegative = 1.0
    """How strongly features are pulled to the mean feature of their class."""
    head_epochs: Count = 1
    """Local epochs of the head a round."""
    head_lr: Positive | None = None
    """Learning rate of the head; none takes the run's, which suits the data; the paper takes 0.1 for the head and 0.01
    for the body."""
    threshold: BelowOne = 1e-3
    """Heads, a client's own too, whose weight in its combination is below this are left out, and the other weights
    scaled to sum to 1 again; none is, where all are."""

    family = "decoupled"
    shared = "the body, class prototypes and heads"
    down = "1 + prototypes"
    up = "1 + 2 class features"
    uploads = sent.fields(update=sent.Vectors(), head=sent.Vectors(), H=sent.Vectors(), counts=sent.Counts(),
                          V=sent.Vectors(grows=-1, at_least=0), features=sent.Vectors(grows=1))
    introduces = sent.fields(H=sent.Vectors())
    newcomer = "the shared body and a combined head"
    rates = ("head_lr",)
    cite = "Xu et al., Personalized federated learning with feature alignment and classifier collaboration, ICLR 2023"
    per_token = False

    def travels(self) -> str:
        return "~head"

    def check(self, population: int, layout: Layout) -> None:
        if self.lam:
            self.refuse_frozen(layout, "~head", "aligns the features of, with lam other than 0,")

    def start(self, init: Init) -> Record:
        require_scores(init, self.name)
        row, head = init.row, init.layout.cut(init.row, "head")[None]
        prototypes, none = row.new_zeros(init.classes, init.layout.within("head")[0].shape[1]), row.new_zeros(0)
        body, known = init.layout.cut(row, "~head"), row.new_zeros(init.classes)
        return Collaboration(body, prototypes, known, head, head[:0], none, prototypes[None][:0], none.bool())

    def hello(self, server: Collaboration) -> Record:
        return Model(server.body)

    def introduce(self, cohort: Cohort, hello: Model) -> Upload:
        return Upload(H=self.facts(cohort, cohort.assemble({"~head": hello.row}))[1])

    def admit(self, server: Collaboration, ids: Tensor, introductions: Upload) -> Record:
        heads = server.head[:1].expand(len(ids), -1)  # until somebody uploads, all are the initial one
        if server.met.any():
            pool = torch.cat([introductions.H, server.H[server.met]])
            heads = self.combined(server.V[server.met], pool, server.uploaded[server.met])[: len(ids)]
        return replace(server, head=enrol(server.head, ids, heads))

    def send(self, server: Collaboration, ids: Tensor) -> Record:
        return Sent(server.body, server.prototypes, server.known, Each(server.head[ids]))  # type: ignore[arg-type]

    def local(self, cohort: Cohort, payload: Sent, mine: Record) -> tuple[Upload, Record]:
        row = self.deploy(cohort, payload, mine)
        V, H = self.facts(cohort, row)
        row = cohort.train(row, epochs=self.head_epochs, lr=self.head_lr, part="head")
        given = {"prototypes": payload.prototypes, "known": payload.known}
        row = cohort.train(row, given, part="~head", objective=self.aligned)
        body, head = cohort.layout.cut(row, "~head"), cohort.layout.cut(row, "head")
        features, counts = cohort.total(moments, row)["features"], cohort.histogram.to(row.dtype)
        return Upload(update=body - payload.body, head=head, V=V, H=H, features=features, counts=counts), mine

    def aligned(self, net: Net, row: Row, batch: Batch, given: Given) -> Tensor:
        z = net.features(row, batch.x)
        apart = (z - given.prototypes[batch.y]).square().mean(1) * given.known[batch.y]
        return batch.mean(net.task.loss(net.head(row, z), batch.y) + self.lam * apart)

    def facts(self, cohort: Cohort, row: Tensor) -> tuple[Tensor, Tensor]:
        """V `[C]` and H `[C, classes, d]` of the clients under a model."""
        sums, n = cohort.total(moments, row), cohort.n.to(row.dtype)
        H = sums["features"] / n[:, None, None]
        return ((sums["squares"] / n - H.square().sum((1, 2)) * (n > 1)) / n).clamp(min=0), H

    def combined(self, V: Tensor, H: Tensor, heads: Tensor) -> Tensor:
        """The head of each client with features `H [t, classes, d]`, made of the last m clients' `heads [m, h]`."""
        products = gram(H.flatten(1))
        a = torch.stack([combination(V, products, target, self.threshold) for target in range(len(H))])
        return a.to(heads.device, heads.dtype) @ heads

    def merge(self, server: Collaboration, up: Uploads) -> Record:
        sums, counts = self.class_sums(up.features, up.counts, up)
        seen, kept = counts > 0, self.kept(up.head, up.H) & (up.V.nan_to_num(-1, -1, -1) >= 0)
        V = up.V[kept]
        if self.aggregator.robust and len(V):
            V = V.clamp(min=V.median())  # nobody's word makes a head surer than those of half the clients
        head = self.drawn_in(up.head)[kept]
        pool, met = up.H if bool(kept.all()) else torch.cat([up.H.nan_to_num(0, 0, 0), up.H[kept]]), up.ids[kept]
        heads = self.combined(V, pool, head)[: len(up.ids)] if len(met) else server.head[up.ids]
        return replace(
            server, body=server.body + self.aggregate(up.update, up.share, up.layout.only("~head")),
            prototypes=torch.where(seen[:, None], sums / torch.where(seen, counts, 1)[:, None], server.prototypes),
            known=torch.maximum(server.known, seen.to(server.known.dtype)),
            head=enrol(server.head, up.ids, heads), uploaded=enrol(server.uploaded, met, head),
            V=enrol(server.V, met, V), H=enrol(server.H, met, up.H[kept]), met=enrol(server.met, met, met >= 0)
        )

    def averaged(self, server: Collaboration, layout: Layout) -> dict[str, Layout]:
        return {"body": layout.only("~head")}

    def deploy(self, cohort: Cohort, payload: Sent, mine: Record) -> Tensor:
        return cohort.assemble({"~head": payload.body, "head": payload.head})

    def fallback(self, server: Collaboration, init: Init, report: Mapping[str, Any]) -> Tensor:
        """The shared body under the mean of the heads that clients have uploaded."""
        head = server.uploaded[server.met].mean(0) if server.met.any() else server.head[0]
        return init.layout.put(init.layout.put(init.row, "~head", server.body), "head", head)


def moments(net: Net, row: Tensor, batch: Batch, given: Given) -> dict[str, Tensor]:
    """Sums over samples: features by class `[classes, d]`, and their squared norms."""
    z = net.features(row, batch.x)
    return {"features": by_class(net, batch, z), "squares": (z.square().sum(1) * batch.weight).sum()}
