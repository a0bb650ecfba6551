"""Yogi: Adam whose mean of squares moves by a bounded step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coterie.optimizers.adam import Adam


@dataclass(frozen=True)
class Yogi(Adam):
    """Adam with v <- v - (1 - beta2) g^2 sign(v - g^2): v grows as fast as Adam's and falls more slowly.

    At the server it is FedYogi.
    """

    fused = None
    cite = "Zaheer et al., Adaptive methods for nonconvex optimization, NeurIPS 2018; at the server: Reddi et al., " \
        "Adaptive federated optimization, ICLR 2021"

    def grow(self, square: Tensor, gradient: Tensor) -> None:
        new = gradient.square()
        square.sub_((square - new).sign_().mul_(new).mul_(1 - self.beta2))
