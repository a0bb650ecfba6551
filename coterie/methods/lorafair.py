"""LoRA-FAIR: the averaged factors, with B corrected so that their product is nearer the average product."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from coterie.contract.low_rank import Factors
from coterie.contract.products import MeanProducts
from coterie.options import NonNegative


@dataclass(frozen=True)
class LoRAFAIR(MeanProducts):
    """B, A <- mean B + C, mean A with C = (D - mean B mean A) mean A' (mean A mean A' + lam I)^-1.

    D = sum_i p_i B_i A_i, and means are weighted by p_i = n_i / n. C minimises
    |D - (mean B + C) mean A|^2 + lam |C|^2; the paper takes gradient steps on the cosine of the two for it. With a
    large `lam` this is FedAvg over the factors.
    """

    lam: NonNegative = 0.01
    """How strongly the corrected B is held near the mean of the B_i."""

    cite = ("Bian et al., LoRA-FAIR: Federated LoRA fine-tuning with aggregation and initialization refinement, "
            "ICCV 2025")

    def refined(self, averaged: Factors, product: Factors) -> Factors:
        b, a, left, right = (t.double() for t in (*averaged, *product))
        missing = left @ (right @ a.T) - b @ (a @ a.T)
        return b + missing @ torch.linalg.pinv(a @ a.T + self.lam * torch.eye(len(a)).to(a), hermitian=True), a
