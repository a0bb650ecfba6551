"""Methods whose server averages the products B A of low-rank adapters, and writes the factors anew from that mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coterie.contract.layout import Pair
from coterie.contract.low_rank import Factors, factors, side_by_side, with_factors
from coterie.contract.method import Uploads
from coterie.contract.ranks import ALL, Cut, Truncated
from coterie.contract.records import Record

REWRITES = "the server writes the factors anew, and a step along how they moved would be none of the model's"
"""Why no server optimizer steps the models of such methods."""


def rewritten(
    row: Tensor, near: Tensor, up: Uploads, refined: Callable[[Factors, Factors], Factors],
    product: Callable[[Tensor, Tensor, Pair], Factors] | None = None,
) -> Tensor:
    """`[D], [m, D] -> [D]`: the averaged `row` with the factors that `refined` makes, layer by layer, of its own and of
    factors of D = sum_i p_i B_i A_i over the clients whose models `near` are finite.

    D is of equal ranks, unless `product` makes it of those who are kept `[m]`, their shares and the pair.
    """
    kept = torch.isfinite(near).all(1)
    if not (kept.any() and torch.isfinite(row).all()):
        return row
    share = up.share[kept] / up.share[kept].sum()

    def mean(pair: Pair) -> Factors:
        return product(kept, share, pair) if product else side_by_side(share, *factors(near[kept], pair))

    return with_factors(row, [(pair, refined(factors(row, pair), mean(pair))) for pair in up.layout.pairs])


@dataclass(frozen=True)
class MeanProducts(Truncated):
    """B, A <- what `refined` makes of the averaged factors and of D = sum_i p_i B_i A_i, layer by layer; p_i = n_i / n.

    The rest of the row is averaged as in FedAvg. With a robust aggregator D is over the clients that it keeps, none
    further off than the middle one.
    """

    ranks: str = ALL
    """The ranks that clients have, joined by `+`: whole numbers, shares of the adapter's rank such as 1/2, or `all` of
    it. One that stands twice is twice as frequent."""

    family = "low-rank adapters"
    shared = "the adapters and the head"
    down = up = "1"
    newcomer = "the shared model"
    products = True
    steps_itself = REWRITES

    def merge(self, server: Cut, up: Uploads) -> Record:
        row = server.row + self.aggregate(self.moved(server, up), up.share, up.layout)
        near, rank = self.padded(server, up, self.drawn_in(up.update)), self.held(up)

        def product(kept: Tensor, share: Tensor, pair: Pair) -> Factors:
            return self.product(near[kept], share, rank[kept], pair, server)

        return replace(server, row=rewritten(row, near, up, self.refined, product))

    def product(self, rows: Tensor, share: Tensor, rank: Tensor, pair: Pair, server: Cut) -> Factors:
        """Factors `[o, k], [k, q]` of D in one layer, from the participants' `rows [m, D]`."""
        return side_by_side(share, *factors(rows, pair))

    def refined(self, averaged: Factors, product: Factors) -> Factors:
        """B `[o, r]` and A `[r, q]` to hand out, from their means and from factors `[o, m r], [m r, q]` of D."""
        raise NotImplementedError
