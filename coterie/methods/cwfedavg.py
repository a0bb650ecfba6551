"""cwFedAvg: one averaged model per class; a client uses the mixture that its label distribution asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from coterie.contract import sent
from coterie.contract.cohort import Cohort, Init
from coterie.contract.heads import require_scores
from coterie.contract.layout import Entry, Layout
from coterie.contract.method import Method, Uploads, enrol
from coterie.contract.net import Batch, Given, Net, Row
from coterie.contract.records import Each, Model, Nothing, Record, Upload
from coterie.errors import CoterieError
from coterie.options import NonNegative


@dataclass(frozen=True)
class PerClass(Record):
    """FedAvg's model `row [D]`, the classes' G `rows [classes, d]` in its `columns [d]`, and pi `mix [M, classes]`."""

    row: Tensor
    rows: Tensor
    columns: Tensor
    mix: Tensor


def norms(weight: Tensor) -> Tensor:
    """pi~_j = |r_j| / sum_l |r_l| for an output layer `[..., classes, features]` with rows r_j."""
    length: Tensor = torch.linalg.vector_norm(weight, dim=-1)
    return length / length.sum(-1, keepdim=True).clamp(min=1e-30)


def output(layout: Layout) -> Entry:
    """The weight of the output layer, without its bias."""
    found = [entry for entry in layout.within("head") if entry.kind == "parameter" and len(entry.shape) > 1]
    if not found:
        raise CoterieError("cwfedavg needs a head with a weight, of one row per class.")
    return found[0]


def class_weights(share: Tensor, mix: Tensor) -> Tensor:
    """`p [m], pi [m, classes] -> q [m, classes]`, q_ij = p_i pi_ij / sum_l p_l pi_lj; 0 where nobody has class j."""
    mass = share[:, None] * mix.double()
    return mass / mass.sum(0).clamp(min=1e-300)


@dataclass(frozen=True)
class CwFedAvg(Method):
    """G_j = sum_i q_ij theta_i with q_ij = p_i pi_ij / sum_l p_l pi_lj; client i starts from sum_j pi_ij G_j.

    `layers` are what is averaged class by class: the `output` layer (the rest is FedAvg's) or `all`. The
    `distribution` pi is the `approx`imation pi~ by the norms of the output layer's rows in a client's last upload, as
    in paper and released program, so that no label count leaves a client; or the `true` one of the training labels,
    which it tells the server once. Clients minimise CE + lam |pi_i - pi~(theta)|_2 with their true pi_i, so that the
    norms follow the labels: without it, or with too little of it for many classes, `approx` is near FedAvg.
    `half_lambda` halves lam, as the released program does. A class that no participant holds keeps its model.
    """

    layers: Literal["output", "all"] = "output"
    """What is averaged class by class; the rest is averaged as by FedAvg."""
    distribution: Literal["true", "approx"] = "approx"
    """Label shares: estimated by the norms of a client's output layer, or the true ones: label counts are then sent."""
    lam: NonNegative = 10.0
    """Strength of the term that makes these norms follow the labels; the paper takes 10 for ten classes, 1000 for
    CIFAR-100 and 2000 for TinyImageNet."""
    half_lambda: bool = False
    """Whether lam is halved, as the released program does."""

    family = "personalized aggregation"
    shared = "a model per class"
    introduces = sent.fields(mix=sent.Shares())
    newcomer = "the mixture of its label distribution, estimated by training FedAvg's model unless distribution=true"
    cite = "Lee, Choi, Class-wise federated averaging for efficient personalization, ICCV 2025"
    soft = True
    unprotected = (
        "the label shares that make clients' weights: told on arrival with distribution=true, else estimated from the "
        "output layer that they upload"
    )
    presets = ("official",)

    @classmethod
    def official(cls) -> CwFedAvg:
        """The released program: estimated label shares, half of lam, no validation split; its lam is held against
        the shares of training and test labels together, which a client here does not look at."""
        return cls(half_lambda=True, validation=False, printed="served")

    @property
    def part(self) -> str:
        """What classes have models of their own of."""
        return "head" if self.layers == "output" else "all"

    def check(self, population: int, layout: Layout) -> None:
        self.refuse_frozen(layout, "head", "averages class by class")
        output(layout)

    def start(self, init: Init) -> Record:
        if not init.classes:
            raise CoterieError(f"{self.name} averages class by class, and these data have no classes.")
        require_scores(init, self.name)
        row, layout = init.row, init.layout
        columns = layout.cut(torch.arange(layout.size, device=row.device), self.part)
        none = torch.zeros(0, init.classes, dtype=torch.float64, device=row.device)
        return PerClass(row, row[columns].repeat(init.classes, 1), columns, none)

    def hello(self, server: PerClass) -> Record:
        return Nothing() if self.distribution == "true" else Model(server.row)

    def introduce(self, cohort: Cohort, hello: Model) -> Upload:
        if self.distribution == "true":
            return Upload(mix=cohort.labels)
        row = hello.row if cohort.round == 0 else self.train(cohort, hello.row)  # a newcomer trains to be estimated
        return Upload(mix=norms(weight(row, cohort.layout)).double())

    def admit(self, server: PerClass, ids: Tensor, introductions: Upload) -> Record:
        return replace(server, mix=enrol(server.mix, ids, introductions.mix))

    def send(self, server: PerClass, ids: Tensor) -> Record:
        return Model(Each(self.personal(server, ids)))  # type: ignore[arg-type]

    def personal(self, server: PerClass, ids: Tensor) -> Tensor:
        """`[m, D]`: sum_j pi_ij G_j in the columns that classes have of their own, FedAvg's elsewhere."""
        rows = server.row.repeat(len(ids), 1)
        rows[:, server.columns] = server.mix[ids].to(rows.dtype) @ server.rows
        return rows

    def fallback(self, server: PerClass, init: Init, report: Mapping[str, Any]) -> Tensor:
        """FedAvg's model."""
        return server.row

    def whole(self, server: PerClass, layout: Layout) -> Tensor | None:
        return server.rows if len(server.columns) == layout.size else None

    def train(self, cohort: Cohort, rows: Tensor) -> Tensor:
        return cohort.train(rows, {"mix": cohort.labels.to(rows.dtype)}, objective=self.objective)

    def objective(self, net: Net, row: Row, batch: Batch, given: Given) -> Tensor:
        weight = net.tensors(row)[output(net.layout).name].flatten(1)
        apart: Tensor = torch.linalg.vector_norm(given.mix - norms(weight))
        return net.loss(row, batch) + (0.5 if self.half_lambda else 1.0) * self.lam * apart

    def merge(self, server: PerClass, up: Uploads) -> Record:
        trained = self.personal(server, up.ids) + up.update
        mix = server.mix
        if self.distribution == "approx":
            told = norms(weight(trained, up.layout)).double()
            mix = enrol(mix, up.ids, torch.where(torch.isfinite(told).all(1, keepdim=True), told, mix[up.ids]))
        q, layout = class_weights(up.share, mix[up.ids]), up.layout.only(self.part)
        rows = self.recentre(server.rows, trained[:, server.columns], q, layout)
        row = server.row + self.aggregate(trained - server.row, up.share, up.layout)
        return PerClass(row, rows, server.columns, mix)

    def averaged(self, server: PerClass, layout: Layout) -> dict[str, Layout]:
        return {"row": layout, "rows": layout.only(self.part)}


def weight(rows: Tensor, layout: Layout) -> Tensor:
    """`[C, D] -> [C, classes, features]`: the weight of the output layer."""
    entry = output(layout)
    return layout.views(rows, [entry])[entry.name].flatten(2)
