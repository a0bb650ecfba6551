"""The shape of methods on low-rank adapters whose server moves the backbone beside the adapters; see `ground`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from coterie.contract.cohort import Cohort
from coterie.contract.layout import Layout, adapters_of
from coterie.contract.method import Method
from coterie.contract.records import Model, Record, Upload
from coterie.errors import CoterieError


@dataclass(frozen=True)
class Moved(Model):
    """`row [d]`, and R of all adapted layers one after another, `residual [S, 1]`."""

    residual: Tensor


@dataclass(frozen=True)
class Moving(Method):
    """Clients train over W + R; the server adds to R, which every client is sent whole. Its state is a `Moved`."""

    moves: ClassVar[bool] = True
    adapters = products = True
    steps_itself = "its server adds to the backbone, too, which a step along how the rows moved would not"

    def wrap(self, module: nn.Module) -> nn.Module:
        named = list(module.named_parameters(remove_duplicate=False))
        for name in adapters_of(module):
            layer = name.rpartition(".")[0]
            weight: nn.Parameter = module.get_submodule(layer).base.weight  # type: ignore[union-attr, assignment]
            if weight.requires_grad:
                raise CoterieError(f"{self.name} adds to the frozen weights of adapted layers, and that of '{layer}' "
                                   "trains itself; leave base=trains out of the adapter.")
            if weight.dtype == torch.bfloat16:
                raise CoterieError(f"{self.name} adds to the frozen weights, and what a round adds is lost where "
                                   "they are rounded to bfloat16; leave backbone=bfloat16 out of the adapter.")
            others = [other for other, p in named if p is weight and other != f"{layer}.base.weight"]
            if others:
                raise CoterieError(f"{self.name} adds to the frozen weight of '{layer}', which is that of "
                                   f"'{others[0]}' as well; leave this layer out of the adapter's targets.")
        return module

    def check(self, population: int, layout: Layout) -> None:
        self.refuse_unpaired(layout)

    def local(self, cohort: Cohort, payload: Any, mine: Record) -> tuple[Upload, Record]:
        before = self.deploy(cohort, payload, mine)
        return Upload(update=cohort.train(before) - before), mine

    def deploy(self, cohort: Cohort, payload: Any, mine: Record) -> Tensor:
        cohort.stand_on(payload.residual)
        return self.begun(cohort, payload)

    def begun(self, cohort: Cohort, payload: Any) -> Tensor:
        """The row from which a client trains `[C, D]`, over W + R; by default the one it received."""
        row: Tensor = payload.row
        return row

    def residual(self, server: Any) -> Tensor | None:
        found: Tensor = server.residual
        return found
