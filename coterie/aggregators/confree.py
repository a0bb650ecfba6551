"""ConFREE: the direction that serves the worst client best, near a guidance vector with less conflict."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor

from coterie.contract.aggregator import Aggregator
from coterie.contract.algebra import blend, gram, length, lengths, norms, simplex_qp
from coterie.contract.layout import Layout
from coterie.options import BelowOne

_ZERO = 1e-6  # of the updates' mean norm: below it a mixture of them counts as 0
_TINY = 1e-8  # the released program's guard against dividing by 0


@dataclass(frozen=True)
class ConFREE(Aggregator):
    """d = argmax min_j <d, u_j> subject to |d - g| <= c |g|: the worst client gains most, to first order.

    The guidance g = 1/N sum_i [u_i - sum_{j: <u_i, u_j> < 0} <u_i, u_j> / |u_j|^2 u_j] is the mean of the updates, each
    without its components against another client's. With u_w = sum_j w_j u_j the dual is min over the simplex of
    <g, u_w> + c |g| |u_w|, and d = g + c |g| u_w / |u_w|; where u_w = 0 every d is as good for the worst client, and
    d = g. It reduces conflict and promises no more: <d, u_j> < 0 occurs, when no d so near g serves everybody.
    """

    c: BelowOne = 0.5
    """How far d may be from g, as a fraction of |g|; neither paper nor program states a value."""
    scope: Literal["global", "per_layer", "per_tensor"] = "global"
    """One problem for the whole model, or one for each layer or tensor."""
    projection: Literal["simultaneous", "sequential_raw", "none"] = "simultaneous"
    """How g is made: as above, or (`sequential_raw`) by subtracting <v, u_j> u_j, without the division, from the vector
    v corrected so far, in the order of the clients' numbers (the released program draws it), or (`none`) as the mean of
    the updates as they are, which is CAGrad."""
    solver: Literal["exact", "slsqp"] = "exact"
    """`slsqp` stops as the released program does, at an absolute tolerance, which for small updates is at once."""
    rescale: Literal["none", "square", "linear"] = "none"
    """Divides d by 1 + c^2 (`square`) or 1 + c (`linear`)."""
    weighted: bool = False
    """Whether the clients' weights stand in place of 1/N; else all clients count alike."""

    protects = "clients whose updates point against the majority's, as far as that goes: some may still lose"
    cite = "Zheng, Hu, Yang, Zheng, Xu, Wang, ConFREE: conflict-free client update aggregation for personalized " \
        "federated learning, AAAI 2025"
    presets = ("official",)

    @classmethod
    def official(cls) -> ConFREE:
        """The released program: tensor by tensor, projected one after another without division, divided by 1 + c^2."""
        return cls(scope="per_tensor", projection="sequential_raw", solver="slsqp", rescale="square")

    def combine(self, updates: Tensor, weights: Tensor, layout: Layout) -> Tensor:
        out = torch.empty_like(updates[0])
        share = weights.to("cpu", torch.float64)
        share = share if self.weighted else torch.full_like(share, 1 / len(share))
        for columns in self._pieces(layout):
            out[columns] = self._direction(updates[:, columns], share)
        return out / {"none": 1, "square": 1 + self.c**2, "linear": 1 + self.c}[self.rescale]

    def _pieces(self, layout: Layout) -> Iterator[slice]:
        if self.scope == "global":
            yield slice(0, layout.size)
            return
        for _, group in groupby(layout.entries, lambda e: e.name if self.scope == "per_tensor" else _layer(e.name)):
            entries = list(group)
            yield slice(entries[0].start, entries[-1].stop)

    def _direction(self, updates: Tensor, share: Tensor) -> Tensor:
        products = gram(updates)
        if not bool(torch.isfinite(products).all()):
            return blend(share, updates)  # not finite either, as it should be
        project = {"simultaneous": guidance, "sequential_raw": raw_guidance}.get(self.projection)
        towards = project(products, share) if project else share
        g = blend(towards, updates)
        if self.solver == "slsqp":
            w = slsqp(products, towards, self.c)
            mixture = blend(w, updates)
            return g + (self.c * lengths(g) + _TINY) / (lengths(mixture) + _TINY) * mixture
        best = worst_case(products, towards, self.c)
        if best is None:
            return g
        mixture = blend(best, updates)
        return g + self.c * lengths(g) / lengths(mixture) * mixture


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def guidance(products: Tensor, share: Tensor) -> Tensor:
    """The guidance's coefficients `[m]`, from all inner products of the original updates at once."""
    against = torch.where(products < 0, products / products.diagonal().clamp_min(1e-300), 0)  # [i, j]
    return share - share @ against


def raw_guidance(products: Tensor, share: Tensor) -> Tensor:
    """The guidance's coefficients of the released program: one client after another, without division."""
    mixtures = torch.eye(len(products), dtype=torch.float64)  # row i: update i, corrected so far
    for j in range(len(products)):
        dots = (mixtures @ products[:, j]).clamp_max(0)
        dots[j] = 0
        mixtures[:, j] -= dots
    return share @ mixtures


def worst_case(products: Tensor, towards: Tensor, c: float) -> Tensor | None:
    """argmin_w <g, u_w> + c |g| |u_w| on the simplex, or None where it is a mixture u_w = 0 or g = 0.

    For every s > 0, |u_w| <= (|u_w|^2 / s + s) / 2, with equality at s = |u_w|: so w minimises the convex quadratic
    2 s / (c |g|) <g, u_w> + |u_w|^2 for the one s that |u_w(s)| = s, and |u_w(s)| / s falls with s.
    """
    from scipy.optimize import brentq  # slow to import, and a site's process never needs it

    scale = float(norms(products).mean())
    if scale == 0:
        return None
    products = products / scale**2
    slope, radius = products @ towards, c * length(products, towards)
    if radius <= 0.1 * _ZERO * c:
        return None
    w: list[Tensor] = []

    def excess(log_s: float) -> float:
        s = math.exp(log_s)
        linear = s / radius * (slope - slope.mean())
        w[:] = [simplex_qp(products + linear[:, None] + linear[None], start=w[0] if w else None)]
        return length(products, w[0]) / s - 1

    low, high = math.log(_ZERO), math.log(2 * float(norms(products).max()))
    if excess(low) <= 0:
        return None
    excess(brentq(excess, low, high, xtol=1e-13))
    return w[0]


def slsqp(products: Tensor, towards: Tensor, c: float) -> Tensor:
    """The dual as the released program solves it: unscaled, from equal weights, with SciPy's default tolerance."""
    from scipy.optimize import minimize

    G, slope = products.numpy(), (products @ towards).numpy()
    radius = c * length(products, towards) + _TINY
    m = len(G)
    found = minimize(
        lambda w: w @ slope + radius * math.sqrt(max(w @ G @ w, 0) + _TINY), [1 / m] * m, method="SLSQP",
        bounds=[(0, 1)] * m, constraints={"type": "eq", "fun": lambda w: 1 - w.sum()},
    )
    return torch.from_numpy(found.x)
