"""FedSVD: B alone is trained and averaged, and the server writes both factors anew by the SVD of their product."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coterie.contract.cohort import Cohort, Init
from coterie.contract.layout import Layout
from coterie.contract.low_rank import DOWN, Split, best, completed, factors, joined, split, with_factors
from coterie.contract.method import Uploads
from coterie.contract.records import Record
from coterie.methods.ffalora import FFALoRA
from coterie.options import CountOrZero


@dataclass(frozen=True)
class FedSVD(FFALoRA):
    """B <- B + sum_i p_i (SGD_i(B) - B) with A fixed; every `every` rounds B, A <- U Sigma, V' with B A = U Sigma V'.

    The product stays what it was, to rounding; A gets orthonormal rows, along which the clients train on. Averages are
    exact, as in FFA-LoRA, which it is at `every=0`. p_i = n_i / n. Where B A is still 0 its SVD says nothing, and A
    stays; signs are chosen so that the largest entry of each row of A is positive.
    """

    every: CountOrZero = 1
    """Rounds from one SVD to the next; 0 makes none."""

    shared = "the adapters and the head"
    down = "1"
    cite = "Lee et al., FedSVD: Adaptive orthogonalization for private federated learning with LoRA, 2025"
    steps_itself = "the server writes the factors anew, and a step along how they moved would be none of the model's"

    def start(self, init: Init) -> Record:
        return split(init.row, init.layout)

    def merge(self, server: Split, up: Uploads) -> Record:
        merged = replace(server, row=server.row + self.aggregate(up.update, up.share, up.layout.only(f"~{DOWN}")))
        due = self.every and (up.round + 1) % self.every == 0
        return split(turned(joined(merged, up.layout), up.layout), up.layout) if due else merged

    def deploy(self, cohort: Cohort, payload: Split, mine: Record) -> Tensor:
        return joined(payload, cohort.layout)

    def fallback(self, server: Split, init: Init, report: Mapping[str, Any]) -> Tensor:
        return joined(server, init.layout)


def turned(row: Tensor, layout: Layout) -> Tensor:
    """The same model `[D]` with B = U Sigma and A = V' in each pair whose product is finite and not 0."""
    found = []
    for pair in layout.pairs:
        b, a = factors(row, pair)
        if bool(torch.isfinite(b @ a).all() & (b @ a != 0).any()):
            u, sigma, vt = best(b, a, pair.rank)
            found.append((pair, (u * sigma, completed(vt, a))))
    return with_factors(row, found)
