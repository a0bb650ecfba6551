"""FedALT: every client has an adapter of its own beside the mean of all others', and a gate that weighs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from coterie.contract import sent
from coterie.contract.cohort import Cohort, Init
from coterie.contract.layout import Layout
from coterie.contract.method import Method, Uploads
from coterie.contract.records import Each, Model, Record, Upload
from coterie.models.several import MINE, OWN, SHARED, Weighed, with_several


@dataclass(frozen=True)
class Adapters(Model):
    """Everybody's last adapter L_k `table [M, e]`, and `row [d]`, what trains beside the adapters and is averaged."""

    table: Tensor


@dataclass(frozen=True)
class World(Model):
    """What is averaged, `row [d]`, and the mean of the others' adapters R_k, `others [m, e]`."""

    others: Tensor


@dataclass(frozen=True)
class FedALT(Method):
    """h = W_0 x + a s B_L A_L x + (1 - a) s B_R A_R x, (a, 1 - a) = softmax(G_k x); R_k = mean of L_j over j != k.

    A client trains its pair L_k and the mixer G_k `[2, inputs]` of every layer from where it left them, never from an
    average, with R_k fixed; factors are averaged as they are, clients counting alike. The server keeps the last L_k of
    everybody, so that R_k is over all others, whoever takes part (the paper asks everybody, always); a client that was
    never asked, or came later, counts there with an untrained one, or the mean. The head, and whatever else trains, is
    averaged as in FedAvg, p_i = n_i / n, unless it is personal. A client whose upload is not finite keeps the last
    finite adapter in the table. G_k starts at 0, so that a = 1/2.
    """

    head: Literal["shared", "personal"] = "shared"
    """Whether the head is averaged, or stays with the client as its adapter does."""

    family = "low-rank adapters"
    shared = "the mean of others' adapters, the head"
    keeps = "its adapter and mixers"
    uploads = sent.fields(own=sent.Vectors(), update=sent.Vectors())  # the latter where anything is averaged
    newcomer = "the mean of all adapters"
    cite = ("Bian et al., FedALT: Federated fine-tuning through adaptive local training with rest-of-world LoRA, "
            "AAAI 2026")
    adapters = True
    averages = property(lambda self: self.head == "shared")
    unprotected = "the adapters, the mean of which over all others every client is sent"
    steps_itself = "of the clients' adapters its server makes no model, but a mean for each client"

    @property
    def stays(self) -> str:
        """The part of a row that is the client's own."""
        return MINE + "+head" * (self.head == "personal")

    @property
    def averaged_part(self) -> str:
        """The part that is averaged."""
        return f"~{SHARED}+{self.stays}"

    def check(self, population: int, layout: Layout) -> None:
        self.refuse_unpaired(layout)

    def travels(self) -> str:
        return self.averaged_part

    def wrap(self, module: nn.Module) -> nn.Module:
        return with_several(module, Weighed)

    def start(self, init: Init) -> Record:
        own = init.layout.cut(init.row, OWN)
        return Adapters(init.layout.cut(init.row, self.averaged_part), own.repeat(init.population, 1))

    def send(self, server: Adapters, ids: Tensor) -> Record:
        table, known = server.table, ids < len(server.table)
        own = torch.where(known[:, None], table[torch.where(known, ids, 0)], 0)
        count = (len(table) - known.to(own.dtype)).clamp(min=1)
        return World(server.row, Each((table.sum(0) - own) / count[:, None]))  # type: ignore[arg-type]

    def join(self, cohort: Cohort, payload: World) -> Record:
        mine = Model(cohort.layout.cut(cohort.assemble({}), self.stays))
        if cohort.round == 0 or self.head == "shared":
            return mine
        row = cohort.train(self.deploy(cohort, payload, mine), part="head")  # a random one would be useless
        return Model(cohort.layout.cut(row, self.stays))

    def local(self, cohort: Cohort, payload: World, mine: Model) -> tuple[Upload, Record]:
        layout, before = cohort.layout, self.deploy(cohort, payload, mine)
        row = cohort.train(before, part=f"~{SHARED}")
        sends = {"own": layout.cut(row, OWN), "update": layout.cut(row - before, self.averaged_part)}
        return Upload(**{name: t for name, t in sends.items() if t.shape[1]}), Model(layout.cut(row, self.stays))

    def merge(self, server: Adapters, up: Uploads) -> Record:
        table, row = server.table, server.row
        if (new := up.population - len(table)) > 0:
            table = torch.cat([table, table.mean(0, keepdim=True).expand(new, -1)])
        table = table.index_copy(0, up.ids, torch.where(up.finite[:, None], up.own, table[up.ids]))
        if len(row):
            row = row + self.aggregate(up.update, up.share, up.layout.only(self.averaged_part))
        return Adapters(row, table)

    def averaged(self, server: Adapters, layout: Layout) -> dict[str, Layout]:
        return {"row": layout.only(self.averaged_part)}

    def deploy(self, cohort: Cohort, payload: World, mine: Model) -> Tensor:
        parts = {self.averaged_part: payload.row, SHARED: payload.others, self.stays: mine.row}
        return cohort.settled(cohort.assemble(parts))

    def fallback(self, server: Adapters, init: Init, report: Mapping[str, Any]) -> Tensor:
        row = init.layout.put(init.row, self.averaged_part, server.row)
        return init.layout.put(row, SHARED, server.table.mean(0))
