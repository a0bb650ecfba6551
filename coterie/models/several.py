"""Several adapters beside one layer, for methods that keep one with each client: their outputs are added, never their
factors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.contract.frozen import duplicate
from coterie.errors import CoterieError
from coterie.models.lora import Adapted, ConvolutionFactors, EmbeddingFactors, Factors

SHARED, OWN, CLUSTER, LEAF = "*.lora", "*.own_lora", "*.cluster_lora", "*.leaf_lora"
"""The parts of a row that hold the pairs of factors of one kind, layer by layer, in the same order for all kinds."""
TRAINED = {SHARED: f"~{CLUSTER}+{LEAF}", CLUSTER: f"~{SHARED}+{LEAF}", LEAF: f"~{SHARED}+{CLUSTER}"}
"""Where root, cluster and leaf are beside each other, what trains with each: its pair, and all that is no adapter."""
MINE = "*.own_*"
"""All that a layer has of the client's own: its pair, and how it is mixed in."""


def with_several(module: nn.Module, build: Callable[[Adapted], Adapted]) -> nn.Module:
    """A copy of the module with `build(layer)` for every adapted layer; without adapters, the module as it is."""
    module = duplicate(module)
    put = {sub: build(sub) for sub in module.modules() if isinstance(sub, Adapted)}
    for sub in list(module.modules()):
        for name, child in sub._modules.items():
            if child in put:
                setattr(sub, name, put[child])
    return module


def another(first: Factors) -> Factors:
    """Factors of the same shapes and scale, drawn anew: A at random, B zero."""
    second = copy.deepcopy(first)
    second.reset_parameters()
    return second


class Several(Adapted):
    """An adapted layer whose adapter `lora` gets others beside it; `lora` itself starts as it would alone."""

    def __init__(self, layer: Adapted) -> None:
        nn.Module.__init__(self)
        self.base, self.lora = layer.base, layer.lora


class Mixed(Several):
    """y = W x + b + (1 - share) s B_g A_g x + share s B_l A_l x: `lora` is the shared pair, `own_lora` the client's.

    `own_share` is a column of the row that no gradient moves, so that a method sets it, client by client; it starts at
    0, where the layer is what it was with one adapter.
    """

    in_row = ("own_share",)

    def __init__(self, layer: Adapted) -> None:
        super().__init__(layer)
        self.own_lora = another(layer.lora)
        self.own_share = nn.Parameter(layer.lora.A.new_zeros(()), requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """The mixture is linear in x, so it is the layer of this weight."""
        both = (1 - self.own_share) * self.lora.product() + self.own_share * self.own_lora.product()
        return cast("Tensor", self.base.weight) + both

    def forward(self, x: Tensor) -> Tensor:
        both = (1 - self.own_share) * self.lora(self.base, x) + self.own_share * self.own_lora(self.base, x)
        return cast("Tensor", self.base(x) + both)


class Weighed(Several):
    """y = W x + b + a s B_l A_l x + (1 - a) s B_g A_g x with (a, 1 - a) = softmax(G x): a weight for each input.

    G `[2, inputs]`, `own_mixer`, starts at 0, so that a = 1/2. In a convolution G is one of the layer's own width, and
    there is a weight for each place; in an embedding it is one for each token.
    """

    def __init__(self, layer: Adapted) -> None:
        super().__init__(layer)
        self.own_lora = another(layer.lora)
        self.own_mixer = nn.Parameter(torch.zeros_like(layer.lora.A[:1]).repeat(2, *(1,) * (layer.lora.A.ndim - 1)))

    @property
    def weight(self) -> Tensor:
        raise CoterieError(
            "a layer whose adapters are weighed by its input has no weight of its own, so nothing can read it and it "
            "cannot be merged; adapt other layers, by targets=..., or take a method that mixes them by a number."
        )

    def forward(self, x: Tensor) -> Tensor:
        a = self._scores(x).softmax(1 - self.own_mixer.ndim)  # of a linear layer the last axis, else that of channels
        own, shared = torch.split(a, 1, 1 - self.own_mixer.ndim)
        return cast("Tensor", self.base(x) + own * self.own_lora(self.base, x) + shared * self.lora(self.base, x))

    def _scores(self, x: Tensor) -> Tensor:
        """G x, with two channels where the layer has its outputs."""
        if isinstance(self.lora, EmbeddingFactors):
            return F.embedding(x, self.own_mixer.T)
        if isinstance(self.lora, ConvolutionFactors):
            scores: Tensor = cast("nn.Conv2d", self.base)._conv_forward(x, self.own_mixer, None)
            return scores
        return F.linear(x, self.own_mixer)


class Summed(Several):
    """y = W x + b + s (B_r A_r + B_c A_c + B_l A_l) x: `lora` is the root's pair, then `cluster_lora`, `leaf_lora`."""

    def __init__(self, layer: Adapted) -> None:
        super().__init__(layer)
        self.cluster_lora, self.leaf_lora = another(layer.lora), another(layer.lora)

    @property
    def weight(self) -> Tensor:
        added: Tensor = self.lora.product() + self.cluster_lora.product() + self.leaf_lora.product()
        return cast("Tensor", self.base.weight) + added

    def forward(self, x: Tensor) -> Tensor:
        pairs = (self.lora, self.cluster_lora, self.leaf_lora)
        return cast("Tensor", self.base(x) + sum(pair(self.base, x) for pair in pairs))
