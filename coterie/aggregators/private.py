"""Private: a clipped, noisy mean that hides whether a client took part."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from coterie.contract.aggregator import Aggregator
from coterie.contract.algebra import blend, lengths
from coterie.contract.layout import Layout
from coterie.errors import CoterieError
from coterie.options import Positive, Range

Draw = Callable[[str, int], Tensor]
"""`draw(purpose, count)`: independent standard normal numbers `[count]`, float64 on the CPU."""


@dataclass(frozen=True)
class Private(Aggregator):
    """(sum_i min(1, C / |u_i|) u_i + sigma C N(0, I)) / (q M), with the clip C and q M participants expected.

    u_i is all that client i uploads, for K models its K updates together. Clients count alike, whatever their number
    of samples. The server's `merge` is handed this mean as if one client had sent it, and nothing else. Clients must
    be drawn independently (sampling=poisson). What it protects and what not: docs/privacy.md.
    """

    sigma: Annotated[float, Range(above=0, at_most=1e6)] = 1.0
    """The noise in units of the clip; with delta, q and the number of rounds it decides epsilon."""
    clip: Positive = 1.0
    """The clip C, or where it starts if it adapts."""
    quantile: Annotated[float, Range(above=0, below=1)] | None = None
    """Adapts the clip: C <- C exp(-clip_lr (b - quantile)), b a noisy share of the participants with |u_i| <= C. The
    noise of updates grows to (sigma^-2 - (2 count_sigma)^-2)^(-1/2), so that both together cost what sigma says."""
    clip_lr: Annotated[float, Range(above=0, at_most=10)] = 0.2
    """How fast the clip adapts."""
    count_sigma: Positive | None = None
    """The noise of the count behind b; by default a twentieth of the participants expected, at least sigma."""
    delta: Annotated[float, Range(above=0, below=1)] = 1e-5
    """The probability left outside epsilon's promise; choose it well below 1 / M."""
    epsilon: Positive | None = None
    """The budget: a run whose rounds would spend more is refused."""

    private = True
    protects = "whether a client took part, from whoever sees the models"
    cite = (
        "McMahan et al., Learning differentially private recurrent language models, ICLR 2018; Andrew et al., "
        "Differentially private learning with adaptive clipping, NeurIPS 2021"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.count_sigma is not None and self.quantile is not None and 2 * self.count_sigma <= self.sigma:
            raise CoterieError(
                f"private's count_sigma must be above sigma / 2 = {self.sigma / 2:g}, not {self.count_sigma:g}: the "
                "count alone would cost more than sigma allows."
            )

    @property
    def weighs(self) -> bool:
        return True

    @property
    def minimum(self) -> int:
        """A round without participants has noise too, or its absence would be seen."""
        return 0

    def noise(self, expected: float) -> tuple[float, float]:
        """The noise of the clipped sum, in units of the clip, and that of the count (0 for a fixed clip)."""
        if self.quantile is None:
            return self.sigma, 0.0
        count = self.count_sigma or max(expected / 20, self.sigma)
        return float((self.sigma**-2 - (2 * count) ** -2) ** -0.5), count

    def noisy_mean(self, updates: Tensor, clip: float, expected: float, draw: Draw) -> tuple[Tensor, float]:
        """`updates [m, ...], m >= 0 -> [...]` and the next round's clip. An update that is not finite counts as 0."""
        flat = updates.flatten(1)
        sizes = lengths(flat)
        there = torch.isfinite(sizes)
        if not bool(there.all()):
            flat = torch.where(there.to(flat.device)[:, None], flat, 0)
        shrink = torch.where(sizes > clip, clip / sizes, 1)
        of_sum, of_count = self.noise(expected)
        noise = of_sum * clip * draw("sum", flat.shape[1])
        mean = (blend(shrink, flat) + noise.to(flat.device, flat.dtype)) / expected
        if self.quantile is not None:
            count = float((torch.where(sizes <= clip, 0.5, -0.5)).sum()) + of_count * float(draw("count", 1))
            share = min(max(count / expected + 0.5, 0.0), 1.0)
            clip *= math.exp(-self.clip_lr * (share - self.quantile))
        return mean.view(updates.shape[1:]), clip

    def combine(self, updates: Tensor, weights: Tensor, layout: Layout) -> Tensor:
        """The one row that stands for all clients, see `running.guard`; clients' rows are never mixed here."""
        if len(updates) != 1:
            raise CoterieError("private takes the clients' noisy mean, and was given the clients' own updates.")
        return updates[0]
