"""raFLoRA: FlexLoRA in which each rank is averaged over the clients that have it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.contract.layout import Pair
from coterie.contract.low_rank import Factors, factors, side_by_side
from coterie.contract.ranks import Cut
from coterie.methods.flexlora import FlexLoRA


@dataclass(frozen=True)
class RaFLoRA(FlexLoRA):
    """D = sum_j sum_{i: r_i >= j} (p_i / p_j) b_ij a_ij with p_j the sum of the p_i of those clients; then an SVD.

    b_ij and a_ij are the j-th column of B_i and the j-th row of A_i. So what only clients of high rank know does not
    shrink because the others, which could not learn it, are averaged in. A rank that no participant has stays as it is;
    the paper drops it for that round. With a robust aggregator clients that lack a rank stand for leaving it as it is,
    or one that has it alone would decide on it. With equal ranks this is FlexLoRA, with `balanced=true`.
    """

    ranks: str = "1/4+1/2+all"
    """The ranks that clients have, joined by `+`: whole numbers, shares of the adapter's rank such as 1/2, or `all` of
    it. One that stands twice is twice as frequent."""
    balanced: bool = True
    """Whether B and A share the singular values, each taking their roots, or B has them all."""

    down = up = "its ranks"
    newcomer = "the shared model, cut to its rank"
    cite = "Wu et al., Preventing rank collapse in federated low-rank adaptation with client heterogeneity, 2026"

    def product(self, rows: Tensor, share: Tensor, rank: Tensor, pair: Pair, server: Cut) -> Factors:
        own = [torch.cat([all_of, one[None]]) for all_of, one in
               zip(factors(rows, pair), factors(server.row, pair), strict=True)]
        has = torch.arange(pair.rank, device=rank.device) < rank  # [m, r]
        weights = share[:, None] * has
        if not self.aggregator.robust:
            weights = weights / torch.where(has.any(0), weights.sum(0), 1)
        return side_by_side(torch.cat([weights, (1 - weights.sum(0, keepdim=True)).clamp(min=0)]), *own)
