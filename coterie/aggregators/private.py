"""Private: a clipped, noisy mean that hides whether a client took part."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from coterie.contract.aggregator import Aggregator
from coterie.contract.algebra import blocks, lengths
from coterie.contract.layout import Layout
from coterie.errors import CoterieError
from coterie.options import Positive, Range

Draw = Callable[[str, int, bytes], Tensor]
"""`draw(purpose, count, about)`: independent standard normal numbers `[count]`, float64 on the CPU; others for another
`about`, which holds all that they are added to."""

SLACK = 2.0**-20
"""By how much less than the clip updates are shortened, for what rounding may add."""
ROWS, MOST = 1024, 2**20
"""Updates that are added up at a time, and clients for which the slack is enough."""


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
        total, short = self.clipped_sum(flat, clip)
        of_sum, of_count = self.noise(expected)
        about = repr((self, clip, expected, short)).encode() + total.numpy().tobytes()
        noisy = total + of_sum * clip * draw("sum", len(total), about)
        if self.quantile is not None:
            count = short + of_count * float(draw("count", 1, about))
            share = min(max(count / expected + 0.5, 0.0), 1.0)
            least, most = Range.SIZES
            clip = min(max(clip * math.exp(-self.clip_lr * (share - self.quantile)), least), most)
        return (noisy / expected).to(flat.device, flat.dtype).view(updates.shape[1:]), clip

    def clipped_sum(self, flat: Tensor, clip: float) -> tuple[Tensor, float]:
        """The clipped sum of `flat [m, d]`, `[d]` in float64 on the CPU, and the count that adapts the clip: 1/2 for
        each update within the clip, -1/2 for each other.

        One client more or less moves the sum by at most C, rounding included. With u = 2^-53 a length errs by a factor
        of at most 1 + (d/2 + 1) u, and an addend of the sum, whose chains have 1024 and m / 1024 additions, by one of
        1 + (1024 + m / 1024 + 3) u, in the m addends of either of two sums. Both are below what `SLACK` leaves, for d
        to 2^31 and m to `MOST`: (2^30 + 2^32) u < 2^-20.
        """
        sizes = lengths(flat)
        limit = clip * (1 - SLACK)
        shrink = torch.where(sizes > limit, limit / sizes, 1).to(flat.device)
        there = torch.isfinite(sizes).to(flat.device)[:, None]
        total = torch.zeros(flat.shape[1], dtype=torch.float64, device=flat.device)
        for first in range(0, len(flat), ROWS):
            rows = slice(first, first + ROWS)
            for columns in blocks(flat[rows]):
                total[columns] += shrink[rows] @ torch.where(there[rows], flat[rows, columns].double(), 0)
        return total.cpu(), float(torch.where(sizes <= clip, 0.5, -0.5).sum())

    def combine(self, updates: Tensor, weights: Tensor, layout: Layout) -> Tensor:
        """The one row that stands for all clients, see `running.guard`; clients' rows are never mixed here."""
        if len(updates) != 1:
            raise CoterieError("private takes the clients' noisy mean, and was given the clients' own updates.")
        return updates[0]
