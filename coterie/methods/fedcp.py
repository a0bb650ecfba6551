"""FedCP: each feature of a sample goes to the shared head, to the personal one, or to both, as a network decides."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.contract.algebra import mmd
from coterie.contract.cohort import Cohort, Init
from coterie.contract.heads import with_head
from coterie.contract.net import Batch, Given, Net, Row
from coterie.contract.objectives import scores
from coterie.contract.records import Model, Record, Upload
from coterie.methods.fedper import FedPer
from coterie.options import NonNegative

WIDTHS = (10.0, 15.0, 20.0, 50.0)  # of the kernels that compare features


@dataclass(frozen=True)
class FedCP(FedPer):
    """o = p_i(r * z) + h(s * z) with (r, s) = softmax(policy(z * v_i)), r + s = 1 and v_i = unit(sum of p_i's rows).

    Clients train body, p_i and policy on CE + lam MMD^2(z, z of the received body), with Gumbel noise in the gate; the
    received body runs in training mode, as in the released program, with dropout of its own; the shared head h is
    fixed. They upload body, policy and (p_i + h) / 2, which the server averages. In use the gate has no noise (the
    released program draws it there, too); v_i is made anew whenever the model arrives, from p_i, which stays and starts
    as a copy of h.
    """

    lam: NonNegative = 5.0
    """How strongly features are held near those of the received body: 5 as in the paper for images, which takes 1 for
    text."""
    personal: str = field(default="personal+context", init=False)

    shared = "the model and a policy network"
    keeps = "a second head"
    down = up = "1 + policy"
    newcomer = "the shared model with its shared head"
    cite = "Zhang et al., FedCP: separating feature information for personalized federated learning, KDD 2023"
    per_token = False

    def wrap(self, module: nn.Module) -> nn.Module:
        return with_head(module, Gated, "personal+context+policy", self.name)

    def join(self, cohort: Cohort, payload: Model) -> Model:
        layout = cohort.layout
        if cohort.round == 0:
            return Model(layout.cut(cohort.assemble({}), "personal"))
        head = layout.cut(cohort.assemble({f"~{self.personal}": payload.row}), "head")
        weights = layout.within("head")[0].size  # without a bias of its own, p_i = h gives h(z) whatever the gate
        return Model(torch.cat([head[:, :weights], torch.zeros_like(head[:, weights:])], 1))

    def fallback(self, server: Model, init: Init, report: Mapping[str, Any]) -> Tensor:
        """p_i = h without h's bias, which gives h(z) whatever the gate."""
        row, layout = super().fallback(server, init, report), init.layout
        weight, head = layout.within("head")[0], layout.cut(row, "head")
        row = layout.put(row, "personal", torch.cat([head[: weight.size], torch.zeros_like(head[weight.size :])]))
        return layout.put(row, "context", F.normalize(head[: weight.size].view(weight.shape).sum(0), dim=0))

    def local(self, cohort: Cohort, payload: Model, mine: Model) -> tuple[Upload, Record]:
        layout, start = cohort.layout, self.deploy(cohort, payload, mine)
        row = cohort.train(start, {"received": start}, part="~head", objective=self.gated)
        personal, head = layout.cut(row, "personal"), layout.cut(row, "head")
        mixed = layout.put(row, "head", (personal + head) / 2)
        return Upload(update=layout.cut(mixed, f"~{self.personal}") - payload.row), Model(personal)

    def gated(self, net: Net, row: Row, batch: Batch, given: Given) -> Tensor:
        z, tensors = net.features(row, batch.x), net.tensors(row)
        names = [entry.name for part in ("context", "policy") for entry in net.layout.within(part)]
        u = net.uniform((len(z), 2, z.shape[1])).to(z.dtype).clamp(min=2.0**-25)
        r, s = gate(z, -torch.log(-torch.log(u)), *(tensors[name] for name in names))
        out = scores(net, row, "personal", r * z) + scores(net, row, "generic", s * z)
        received = net.features(given.received, batch.x).detach()
        return batch.mean(net.task.loss(out, batch.y)) + self.lam * mmd(z, received, batch.weight, WIDTHS)

    def deploy(self, cohort: Cohort, payload: Model, mine: Model) -> Tensor:
        weight = cohort.layout.within("personal")[0]
        rows = mine.row[:, : weight.size].reshape(-1, *weight.shape)  # [C, outputs, d]
        context = F.normalize(rows.sum(1), dim=1)
        return cohort.assemble({f"~{self.personal}": payload.row, "personal": mine.row, "context": context})


class Gated(nn.Module):
    """`[B, d] -> [B, outputs]`: a shared and a personal head, each on its share of the features."""

    in_row = ("context",)

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        d = head.in_features
        self.generic, self.personal = head, copy.deepcopy(head)
        self.context = nn.Parameter(F.normalize(head.weight.detach().sum(0), dim=0), requires_grad=False)
        self.policy = nn.Sequential(nn.Linear(d, 2 * d), nn.LayerNorm(2 * d))

    def forward(self, z: Tensor) -> Tensor:
        r, s = gate(z, torch.zeros_like(z[:, None]), self.context, *self.policy.parameters())
        return self.personal(r * z) + self.generic(s * z)  # type: ignore[no-any-return]


def gate(
    z: Tensor, noise: Tensor, context: Tensor, weight: Tensor, bias: Tensor, gain: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    """The shares r and s = 1 - r `[B, d]` that the policy gives to the personal and the shared head."""
    q = F.linear((z * context).to(weight.dtype), weight, bias)
    pair = F.layer_norm(q.to(gain.dtype), gain.shape, gain, shift).relu()
    r, s = (pair.reshape(len(z), 2, -1) + noise).softmax(1).unbind(1)
    return r, s
