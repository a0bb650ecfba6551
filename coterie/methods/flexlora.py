"""FlexLoRA: the server averages the products B A and hands out their best factors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from coterie.contract.layout import Layout
from coterie.contract.low_rank import Factors, best, completed, factors, side_by_side, with_factors
from coterie.contract.method import Uploads
from coterie.contract.records import Model, Record
from coterie.methods.fedavg import FedAvg


@dataclass(frozen=True)
class FlexLoRA(FedAvg):
    """D = sum_i p_i B_i A_i; B, A <- U Sigma, V' with U Sigma V' the best approximation of D of the adapter's rank.

    p_i = n_i / n. Models are averaged, not factors; of D is lost what does not fit into the rank. `balanced=true` takes
    B, A = U sqrt(Sigma), sqrt(Sigma) V': the same model, from which training goes on otherwise. Signs are chosen so
    that the largest entry of each row of A is positive; where D is 0, the factors stay. The rest of the row is averaged
    as in FedAvg. With a robust aggregator D is over the clients that it keeps, none further off than the middle one.
    """

    balanced: bool = False
    """Whether B and A share the singular values, each taking their roots. In the paper B has them all: where they are
    large, A takes long steps, and the model diverges at learning rates that other methods bear."""

    family = "low-rank adapters"
    shared = "the adapters and the head"
    cite = ("Bai et al., Federated fine-tuning of large language models under heterogeneous tasks and client "
            "resources, NeurIPS 2024")
    adapters = products = True
    steps_itself = "the server writes the factors anew, and a step along how they moved would be none of the model's"

    def check(self, population: int, layout: Layout) -> None:
        self.refuse_unpaired(layout)

    def merge(self, server: Model, up: Uploads) -> Record:
        row, near = server.row + self.aggregate(up.update, up.share, up.layout), server.row + self.drawn_in(up.update)
        kept = torch.isfinite(near).all(1)
        if not (kept.any() and torch.isfinite(row).all()):
            return Model(row)
        near, share = near[kept], up.share[kept] / up.share[kept].sum()
        refined = [(pair, self.refined(factors(row, pair), side_by_side(share, *factors(near, pair))))
                   for pair in up.layout.pairs]
        return Model(with_factors(row, refined))

    def refined(self, averaged: Factors, product: Factors) -> Factors:
        """B `[o, r]` and A `[r, q]` to hand out, from their means and from factors `[o, m r], [m r, q]` of D."""
        u, sigma, vt = best(*product, len(averaged[1]))
        if not sigma.any():
            return averaged
        scale = torch.where(sigma > 0, sigma.sqrt() if self.balanced else 1, 1)
        return u * (sigma / scale), scale[:, None] * completed(vt, averaged[1])
