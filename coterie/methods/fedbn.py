"""FedBN: everything is shared but batch normalisation."""

from __future__ import annotations

from dataclasses import dataclass

from coterie.methods.fedper import FedPer


@dataclass(frozen=True)
class FedBN(FedPer):
    """(w_i, b_i) <- SGD_i(w, b_i) with b_i all tensors of the BatchNorm layers; w <- sum_i p_i w_i; b_i stays.

    Scales, shifts, running statistics and counters never travel: a newcomer, and whoever was never asked, estimates its
    statistics on its own samples, and a newcomer then trains scales and shifts for a round. Layers are told by their
    type; a model without BatchNorm gives FedAvg, which is said before the run.
    """

    personal: str = "batchnorm"
    """The part that stays with its client."""

    shared = "all but BatchNorm"
    keeps = "its BatchNorm layers"
    down = up = "all but BatchNorm"
    newcomer = "the shared layers and BatchNorm fitted to its data for one round"
    cite = "Li et al., FedBN: federated learning on non-IID features via local batch normalization, ICLR 2021"
