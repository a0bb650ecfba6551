"""pFedMe: personal models near a shared one, which follows their Moreau envelope."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.cohort import Cohort, Init
from coterie.method import Method, Uploads
from coterie.net import Batch, Given, Net, Row
from coterie.records import Model, Record, Upload


@dataclass(frozen=True)
class Pair(Record):
    """The state of local training: w `row [C, D]` and the personal model v `own [C, D]`."""

    row: Tensor
    own: Tensor


@dataclass(frozen=True)
class PFedMe(Method):
    """v ~ argmin L(v) + lam/2 |v - w|^2 + nu/2 |v|^2, then w <- w - lr lam (w - v), batch by batch from v = w = theta.

    The inner problem takes `inner` steps of size `inner_lr` on the same batch from the last personal model. The server
    takes theta <- (1 - beta) theta + beta mean w_i; clients count alike, or by their samples with `weighted`. A client
    deploys the inner problem solved anew from theta: `inner` steps on its training batches. Steps are stable for
    inner_lr (lam + nu) < 2.
    """

    lam: float = 15.0
    inner: int = 5
    inner_lr: float = 0.01
    nu: float = 0.0
    beta: float = 1.0
    weighted: bool = False

    family = "regularised"
    shared = "the model"
    newcomer = "the shared model after the inner steps"
    cite = "Dinh, Tran, Nguyen, Personalized federated learning with Moreau envelopes, NeurIPS 2020"

    def start(self, init: Init) -> Record:
        return Model(init.row)

    def local(self, cohort: Cohort, payload: Model, mine: Record) -> tuple[Upload, Record]:
        end = cohort.loop(self.step, Pair(payload.row, payload.row))
        return Upload(update=end.row - payload.row), mine

    def step(self, net: Net, s: Given, batch: Batch, given: Given) -> Mapping[str, Tensor]:
        own, near = s.own, Given(w=s.row)
        for _ in range(self.inner):
            own = own - self.inner_lr * net.grad(own, batch, self.envelope, near)
        return {"row": net.with_buffers(s.row - given.lr * self.lam * (s.row - own), own), "own": own}

    def envelope(self, net: Net, row: Row, batch: Batch, given: Given) -> Tensor:
        """L(v) + lam/2 |v - w|^2 + nu/2 |v|^2 on a batch."""
        v, w = net.tensors(row), net.tensors(given.w)
        names = [entry.name for entry in net.layout.entries if entry.trainable]
        pull = sum((v[name] - w[name]).square().sum() for name in names)
        return net.loss(row, batch) + self.lam / 2 * pull + self.nu / 2 * sum(v[name].square().sum() for name in names)

    def merge(self, server: Model, up: Uploads) -> Record:
        weights = up.share if self.weighted else torch.full_like(up.share, 1 / len(up.share))
        return Model(server.row + self.aggregate(up.update, weights, up.layout, self.beta))

    def deploy(self, cohort: Cohort, payload: Model, mine: Record) -> Tensor:
        near = {"w": payload.row}
        return cohort.train(payload.row, near, steps=self.inner, lr=self.inner_lr, objective=self.envelope)
