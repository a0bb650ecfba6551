"""FedROD: a generic head for all classes alike and, on the same features, a personal one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor, nn

from coterie.cohort import Cohort, Init
from coterie.errors import CoterieError
from coterie.layout import head_name
from coterie.methods.fedper import FedPer
from coterie.net import Batch, Given, Net, Row
from coterie.records import Model, Record, Upload


@dataclass(frozen=True)
class FedROD(FedPer):
    """phi, h_g <- gradient of CE(h_g(z) + gamma log n_i, y); p_i <- that of CE(sg h_g(z) + p_i(sg z), y), z = phi(x).

    The balanced softmax, with n_i the client's samples per class, trains body and generic head as if classes were
    equally frequent; the personal head p_i corrects its scores and, for the gradient stops (sg), touches nothing
    else. (phi, h_g) <- sum_i p_i (phi_i, h_gi). A client uses h_g(z) + p_i(z); p_i starts as a copy of h_g.
    """

    gamma: float = 1.0
    personal: str = field(default="personal", init=False)

    shared = "the model"
    keeps = "a second head"
    down = up = "1"
    newcomer = "the shared model with its generic head"
    cite = "Chen, Chao, On bridging generic and personalized federated learning for image classification, ICLR 2022"

    def wrap(self, module: nn.Module) -> nn.Module:
        return with_head(module, TwoHeads, "personal", self.name)

    def start(self, init: Init) -> Record:
        require_scores(init, self.name)
        return super().start(init)

    def join(self, cohort: Cohort, payload: Model) -> Model:
        copy_of_generic = cohort.layout.cut(cohort.init.row, self.personal).expand(cohort.size, -1)
        return Model(copy_of_generic if cohort.round == 0 else copy_of_generic * 0)

    def local(self, cohort: Cohort, payload: Model, mine: Model) -> tuple[Upload, Record]:
        logs = self.gamma * cohort.histogram.to(payload.row.dtype).clamp(min=1e-30).log()  # [C, classes]
        row = cohort.train(self.whole(cohort, payload, mine.row), {"logs": logs}, objective=self.both)
        shared, own = cohort.layout.cut(row, f"~{self.personal}"), cohort.layout.cut(row, self.personal)
        return Upload(update=shared - payload.row), Model(own)

    def both(self, net: Net, row: Row, batch: Batch, given: Given) -> Tensor:
        z = net.features(row, batch.x)
        generic, personal = scores(net, row, "generic", z), scores(net, row, "personal", z.detach())
        balanced = net.task.loss(generic + given.logs, batch.y)
        return batch.mean(balanced + net.task.loss(generic.detach() + personal, batch.y))


class TwoHeads(nn.Module):
    """`[B, features] -> [B, classes]`: the sum of a generic and a personal head."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.generic, self.personal = head, copy.deepcopy(head)

    def forward(self, z: Tensor) -> Tensor:
        sum_: Tensor = self.generic(z) + self.personal(z)
        return sum_


def with_head(module: nn.Module, build: Callable[[nn.Linear], nn.Module], inner: str, name: str) -> nn.Module:
    """A copy of the module with `build(head)` for a head; the submodules `inner` ('x+y') of it are parts."""
    module = copy.deepcopy(module)
    place = head_name(module)
    head = None if place is None else module.get_submodule(place)
    if not isinstance(head, nn.Linear):
        raise CoterieError(f"{name} needs a model whose head is a linear layer, not {type(head).__name__}.")
    parts = dict(getattr(module, "parts", {}))
    new = build(head)
    if place:
        module.set_submodule(place, new)
    else:
        module = new
    prefix = f"{place}." if place else ""
    mine = {part: prefix + part for part in inner.split("+")}
    module.parts = {**mine, **parts, "head": place}  # type: ignore[assignment]
    return module


def require_scores(init: Init, name: str, part: str = "head") -> None:
    """Refuse a task without classes, and a head that is not the layer that makes their scores."""
    if not init.classes or init.layout.within(part)[0].shape[0] != init.classes:
        raise CoterieError(f"{name} needs classes and a head with one score for each of them.")


def scores(net: Net, row: Row, layer: str, z: Tensor) -> Tensor:
    """What a linear layer inside the head makes of features `z [B, features]`."""
    tensors, prefix = net.tensors(row), f"{net.layout.head}." if net.layout.head else ""
    weight = tensors[f"{prefix}{layer}.weight"]
    return F.linear(z.to(weight.dtype), weight, tensors.get(f"{prefix}{layer}.bias"))
