"""FlexLoRA: the server averages the products B A and hands out their best factors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from coterie.contract.low_rank import Factors, best, completed
from coterie.contract.products import MeanProducts


@dataclass(frozen=True)
class FlexLoRA(MeanProducts):
    """D = sum_i p_i B_i A_i; B, A <- U Sigma, V' with U Sigma V' the best approximation of D of the adapter's rank.

    p_i = n_i / n. Models are averaged, not factors; of D is lost what does not fit into the rank. `balanced=true` takes
    B, A = U sqrt(Sigma), sqrt(Sigma) V': the same model, from which training goes on otherwise. Signs are chosen so
    that the largest entry of each row of A is positive; where D is 0, the factors stay. The rest of the row is averaged
    as in FedAvg. With a robust aggregator D is over the clients that it keeps, none further off than the middle one.

    With unequal `ranks` a client gets the r_i largest singular values, and gives nothing back of the others: these
    shrink in each round by the share of clients that have so many ranks. s is the same for all.
    """

    balanced: bool = False
    """Whether B and A share the singular values, each taking their roots. In the paper B has them all: where they are
    large, A takes long steps, and the model diverges at learning rates that other methods bear."""

    cite = ("Bai et al., Federated fine-tuning of large language models under heterogeneous tasks and client "
            "resources, NeurIPS 2024")

    def refined(self, averaged: Factors, product: Factors) -> Factors:
        u, sigma, vt = best(*product, len(averaged[1]))
        if not sigma.any():
            return averaged
        scale = torch.where(sigma > 0, sigma.sqrt() if self.balanced else 1, 1)
        return u * (sigma / scale), scale[:, None] * completed(vt, averaged[1])
