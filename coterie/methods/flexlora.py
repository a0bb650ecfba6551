"""FlexLoRA: the server averages the products B A and hands out their best factors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coterie.contract.layout import Pair
from coterie.contract.low_rank import Factors, best, completed, factors, side_by_side, with_factors
from coterie.contract.method import Uploads
from coterie.contract.ranks import ALL, Cut, Truncated
from coterie.contract.records import Record


@dataclass(frozen=True)
class FlexLoRA(Truncated):
    """D = sum_i p_i B_i A_i; B, A <- U Sigma, V' with U Sigma V' the best approximation of D of the adapter's rank.

    p_i = n_i / n. Models are averaged, not factors; of D is lost what does not fit into the rank. `balanced=true` takes
    B, A = U sqrt(Sigma), sqrt(Sigma) V': the same model, from which training goes on otherwise. Signs are chosen so
    that the largest entry of each row of A is positive; where D is 0, the factors stay. The rest of the row is averaged
    as in FedAvg. With a robust aggregator D is over the clients that it keeps, none further off than the middle one.

    With unequal `ranks` a client gets the r_i largest singular values, and gives nothing back of the others: these
    shrink in each round by the share of clients that have so many ranks. s is the same for all.
    """

    ranks: str = ALL
    """The ranks that clients have, joined by `+`: whole numbers, shares of the adapter's rank such as 1/2, or `all` of
    it. One that stands twice is twice as frequent."""
    balanced: bool = False
    """Whether B and A share the singular values, each taking their roots. In the paper B has them all: where they are
    large, A takes long steps, and the model diverges at learning rates that other methods bear."""

    family = "low-rank adapters"
    shared = "the adapters and the head"
    down = up = "1"
    newcomer = "the shared model"
    cite = ("Bai et al., Federated fine-tuning of large language models under heterogeneous tasks and client "
            "resources, NeurIPS 2024")
    products = True
    steps_itself = "the server writes the factors anew, and a step along how they moved would be none of the model's"

    def merge(self, server: Cut, up: Uploads) -> Record:
        row = server.row + self.aggregate(self.moved(server, up), up.share, up.layout)
        near = self.padded(server, up, self.drawn_in(up.update))
        kept = torch.isfinite(near).all(1)
        if not (kept.any() and torch.isfinite(row).all()):
            return replace(server, row=row)
        near, share, rank = near[kept], up.share[kept] / up.share[kept].sum(), self.held(up)[kept]
        refined = [(pair, self.refined(factors(row, pair), self.product(near, share, rank, pair, server)))
                   for pair in up.layout.pairs]
        return replace(server, row=with_factors(row, refined))

    def product(self, rows: Tensor, share: Tensor, rank: Tensor, pair: Pair, server: Cut) -> Factors:
        """Factors `[o, k], [k, q]` of D in one layer, from the participants' `rows [m, D]`."""
        return side_by_side(share, *factors(rows, pair))

    def refined(self, averaged: Factors, product: Factors) -> Factors:
        """B `[o, r]` and A `[r, q]` to hand out, from their means and from factors `[o, m r], [m r, q]` of D."""
        u, sigma, vt = best(*product, len(averaged[1]))
        if not sigma.any():
            return averaged
        scale = torch.where(sigma > 0, sigma.sqrt() if self.balanced else 1, 1)
        return u * (sigma / scale), scale[:, None] * completed(vt, averaged[1])
