"""Metrics of language models: perplexity and bits, from the mean negative log likelihood of a token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from coterie.metrics.calibration import NLL


@dataclass(frozen=True)
class Perplexity(NLL):
    """exp(mean over tokens of -log p_y): as unsure as between so many equally likely tokens."""

    title = "perplexity"
    values = (1.0, math.inf)

    @property
    def tally(self) -> str:
        return NLL().label

    def value(self, sums: Mapping[str, Tensor]) -> Tensor:
        return super().value(sums).exp()


@dataclass(frozen=True)
class Bits(NLL):
    """mean over tokens of -log2 p_y: the bits that a code by the model's probabilities takes for a token."""

    title = "bits per token"

    @property
    def tally(self) -> str:
        return NLL().label

    def value(self, sums: Mapping[str, Tensor]) -> Tensor:
        return super().value(sums) / math.log(2)
