"""What adapted layers stand on: the frozen weights as they were given, or those with a residual R added.

R `[o, q]` of each adapted layer is part of a server's state and of what it sends, see `contract.moving`. A client then
computes with W + R + s B A. W and R are alike for all clients of a run, so R is no column of their rows: a net has one
W + R, whatever the number of clients that stand on it, and of W itself not a bit changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from coterie.contract.frozen import duplicate
from coterie.contract.layout import Layout, Pair

M = TypeVar("M", bound=nn.Module)


def unmoved(layout: Layout, like: Tensor) -> Tensor:
    """R of weights as they were given, of all adapted layers one after another, `[S, 1]`.

    It is a column, so that nobody takes it for a row of S columns.
    """
    return like.new_zeros(sum(_rows(pair) * _columns(pair) for pair in layout.pairs), 1)


def added(residual: Tensor, products: Iterable[Tensor]) -> Tensor:
    """`[S, 1]`, `[o, q]` of each adapted layer `-> [S, 1]`: R with these products added."""
    out, start = residual.clone(), 0
    for product in products:
        out[start : start + product.numel(), 0] += product.flatten()
        start += product.numel()
    return out


def pieces(residual: Tensor, layout: Layout) -> list[tuple[Pair, Tensor]]:
    """`[S, 1]` -> R `[o, q]` of each adapted layer."""
    parts = torch.split(residual.flatten(), [_rows(pair) * _columns(pair) for pair in layout.pairs])
    return [(pair, part.view(_rows(pair), -1)) for pair, part in zip(layout.pairs, parts, strict=True)]


def grounded(module: M, layout: Layout, residual: Tensor | None) -> tuple[M, Layout]:
    """A copy of a module, and its layout, whose frozen weights have R added; as they are where there is none.

    For models that leave their run, as files or as modules.
    """
    if residual is None:
        return module, layout
    made = duplicate(module)
    weights = {f"{name}.base.weight": (p, p.detach() + moved.to(p.device)) for name, p, moved in
               _weights(made, layout, residual)}
    for parameter, value in weights.values():
        parameter.data = value
    named = zip((entry.name for entry in layout.frozen), layout.values, strict=True)
    return made, replace(layout, values=tuple(weights[n][1] if n in weights else value for n, value in named))


class Ground:
    """The weights under a net's adapters. Those that moved lie in memory of their own, always in the same place, so
    that steps captured as CUDA graphs find them."""

    def __init__(self, module: nn.Module, layout: Layout) -> None:
        self.module, self.layout = module, layout
        self.moved = False
        self._given: list[Tensor] = []
        self._shifted: list[Tensor] = []
        self._held: Tensor | None = None  # the R that is in them, and what number of change it has
        self._change = -1

    def stand_on(self, residual: Tensor | None) -> None:
        """Compute with W + R from now on; with W where there is no R."""
        if residual is None and not self.moved:
            return
        found = list(_weights(self.module, self.layout, self._held if residual is None else residual))
        if not self._given:
            self._given = [weight.data for _, weight, _ in found]
            self._shifted = [torch.empty_like(weight) for weight in self._given]
        if residual is not None and not self._holds(residual):
            for (_, _, moved), weight, shifted in zip(found, self._given, self._shifted, strict=True):
                torch.add(weight, moved.to(weight), out=shifted)
            self._held, self._change = residual, residual._version
        self.moved = residual is not None
        for (_, weight, _), value in zip(found, self._shifted if self.moved else self._given, strict=True):
            weight.data = value

    def _holds(self, residual: Tensor) -> bool:
        """Whether it is this R that was added last: the memory is, for as long as it is held here, nobody else's."""
        held = self._held
        return held is not None and (held.data_ptr(), held.shape, self._change) == (
            residual.data_ptr(), residual.shape, residual._version)


def _weights(module: nn.Module, layout: Layout, residual: Tensor | None) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
    """Each adapted layer's name, its own weight, and R in the weight's shape."""
    assert residual is not None
    with torch.no_grad():
        for pair, matrix in pieces(residual, layout):
            adapted = cast("Any", module.get_submodule(pair.name))
            yield pair.name, adapted.base.weight, adapted.lora.as_weight(matrix)


def _rows(pair: Pair) -> int:
    return pair.b.shape[0]


def _columns(pair: Pair) -> int:
    return pair.a.size // pair.rank
