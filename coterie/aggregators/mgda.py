"""MGDA: the shortest convex combination of the updates."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coterie.contract.aggregator import Aggregator
from coterie.contract.algebra import blend, gram, simplex_qp
from coterie.contract.layout import Layout


@dataclass(frozen=True)
class MGDA(Aggregator):
    """d = sum_i l_i u_i with l = argmin |sum_i l_i u_i|^2 over the simplex (FedMGDA).

    <d, u_i> >= |d|^2 for every client: nobody is hurt to first order, and d = 0 where that cannot be avoided. The
    clients' weights do not matter.
    """

    protects = "every client: none is hurt to first order"
    cite = "Désidéri, Multiple-gradient descent algorithm, C. R. Math. 2012; Hu et al., FedMGDA+, IEEE TNSE 2022"

    def combine(self, updates: Tensor, weights: Tensor, layout: Layout) -> Tensor:
        return blend(simplex_qp(gram(updates)), updates)
