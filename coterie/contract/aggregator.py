"""Server-side aggregators are values, orthogonal to methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from coterie.contract.algebra import lengths
from coterie.contract.layout import Layout
from coterie.options import require_ranges

FAR = 5.0
"""How far from the rest, in the median client's distance, a client may be whose values are used one by one."""


@dataclass(frozen=True)
class Aggregator:
    """Base of every aggregator. Subclasses are frozen dataclasses of options in files of `coterie/aggregators`.

    `Method.aggregate` hands over directions only: buffers are averaged there, clients of weight 0 are left out, and
    the weights' sum, the mass, multiplies the result.
    """

    name: ClassVar[str]
    protects: ClassVar[str] = ""
    """What it is for, in a few words."""
    cite: ClassVar[str] = ""
    robust: ClassVar[bool] = False
    """Whether it is made for clients that may send anything: what a server sums leaves out whom it does not keep."""
    private: ClassVar[bool] = False
    """Whether it stands for privacy: `merge` is handed one noisy mean in place of the clients' uploads."""
    presets: ClassVar[tuple[str, ...]] = ()
    """Class methods that build a named variant, e.g. `official`: the program its authors released."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" not in cls.__dict__:
            cls.name = cls.__name__.lower()

    def __post_init__(self) -> None:
        require_ranges(self)

    @property
    def weighs(self) -> bool:
        """Whether it keeps to the clients' weights: one of little weight then has little say, whatever it sends."""
        return False

    @property
    def minimum(self) -> int:
        """The fewest clients it can work with; a federation of fewer is refused, and so is a round of fewer."""
        return 1

    def aggregate(self, updates: Tensor, weights: Tensor, layout: Layout) -> Tensor:
        """`updates [m, d]`, positive `weights [m]` that sum to 1 -> `[d]`; 0 for fewer clients than the minimum.

        That happens where a method has several models and one of them has few takers. d may be 0, where a method
        shares nothing of a model.
        """
        if len(updates) < self.minimum or updates.shape[1] == 0:
            return torch.zeros_like(updates[0])
        return self.combine(updates, weights, layout)

    def keeps(self, values: Tensor, weights: Tensor) -> Tensor:
        """`[m, d], [m] -> [m]`: whose values may be used one by one, where something else than this combines them.

        A robust aggregator keeps those that are finite and at most FAR times as far from what it makes of all values as
        the median client is; nobody, where they are fewer than its minimum. The others keep everybody.
        """
        if not self.robust:
            return torch.ones(len(values), dtype=torch.bool, device=values.device)
        there = torch.isfinite(values).all(1)
        if len(values) < self.minimum or not bool(there.any()):
            return torch.zeros_like(there)
        centre = self.aggregate(values, weights, Layout.flat(values.shape[1]))
        far = lengths(torch.where(there[:, None], values, centre) - centre).to(values.device)
        least = 1e-6 * lengths(centre).to(values.device)  # clients that agree differ by rounding
        return there & (far <= FAR * torch.maximum(far[there].median(), least))

    def combine(self, updates: Tensor, weights: Tensor, layout: Layout) -> Tensor:
        """What an aggregator defines: `aggregate` for at least `minimum` clients."""
        raise NotImplementedError
