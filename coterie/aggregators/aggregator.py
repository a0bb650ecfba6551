"""Server-side aggregators are values, orthogonal to methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from coterie.layout import Layout


@dataclass(frozen=True)
class Aggregator:
    """`aggregate(updates [m, d], weights [m]) -> [d]`; weights are positive and sum to 1."""

    name: ClassVar[str]
    minimum: ClassVar[int] = 1
    """The fewest clients it can work with."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" not in cls.__dict__:
            cls.name = cls.__name__.lower()

    def aggregate(self, updates: Tensor, weights: Tensor, layout: Layout) -> Tensor:
        raise NotImplementedError
