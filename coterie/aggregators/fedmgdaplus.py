"""FedMGDA+: the shortest combination of normalised updates near the usual weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from coterie.contract.aggregator import Aggregator
from coterie.contract.algebra import blend, gram, norms, simplex_qp
from coterie.contract.layout import Layout
from coterie.options import Share


@dataclass(frozen=True)
class FedMGDAPlus(Aggregator):
    """d = r sum_i l_i u_i / |u_i| with l = argmin |sum_i l_i u_i / |u_i||^2 over the simplex, |l_i - w_i| <= epsilon.

    A client that did not move has no direction and is left out, of r too.
    """

    epsilon: Share = 0.1
    """How far l may be from the clients' weights w: 0 is the mean of normalised updates, 1 is MGDA of them; the paper
    tunes it over 0, 0.05, 0.1, 0.5 and 1."""
    rescale: Literal["mean_norm", "median_norm", "none"] = "mean_norm"
    """The length r: the mean or median norm of the updates, or 1 with `none` as in easyFL, which keeps taking steps of
    that length however small the updates have become."""
    weighted: bool = True
    """Whether l is near the clients' weights or, with false, near 1/N."""

    protects = "clients that are few or move little, from those that are many or move far"
    cite = "Hu et al., Federated learning meets multi-objective optimization, IEEE TNSE 2022"
    presets = ("easyfl",)

    @classmethod
    def easyfl(cls) -> FedMGDAPlus:
        """The program easyFL: steps of unit length."""
        return cls(rescale="none")

    @property
    def weighs(self) -> bool:
        return self.weighted and self.epsilon == 0  # many clients of little weight, each moved by epsilon, are a lot

    def combine(self, updates: Tensor, weights: Tensor, layout: Layout) -> Tensor:
        products = gram(updates)
        sizes = norms(products)
        moved = sizes != 0
        if not bool(moved.any()):
            return torch.zeros_like(updates[0])
        usual = torch.where(moved, weights.to("cpu", torch.float64) if self.weighted else torch.ones_like(sizes), 0)
        usual = usual / usual.sum()
        per_size = torch.where(moved, 1 / torch.where(moved, sizes, 1), 0)
        cosines = products * per_size[:, None] * per_size
        lower = torch.where(moved, usual - self.epsilon, 0).clamp_min(0)
        upper = torch.where(moved, usual + self.epsilon, 0).clamp_max(1)
        long = sizes[moved]
        r = {"mean_norm": long.mean(), "median_norm": long.quantile(0.5), "none": torch.ones(())}[self.rescale]
        return blend(r * per_size * simplex_qp(cosines, lower, upper), updates)
