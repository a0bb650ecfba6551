"""BERT encoders: token numbers in, 0 for padding; the mean over a text's tokens, and a fresh head."""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.errors import CoterieError
from coterie.models.pretrained import packages

APART = 1e4
"""What is taken off the score of a padding token: its share of the attention, exp(-10,000), is 0 in every format."""
OUTSIDE = {"words": "embeddings.word_embeddings", "places": "embeddings.position_embeddings",
           "norm": "embeddings.LayerNorm"}
INSIDE = {
    "q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value",
    "out": "attention.output.dense", "norm1": "attention.output.LayerNorm", "up": "intermediate.dense",
    "down": "output.dense", "norm2": "output.LayerNorm",
}
"""Layer -> its name in published files, of the whole and of each block."""


class BertLayer(nn.Module):
    """A layer of the encoder, `[B, L, d] -> [B, L, d]`: attention, then two linear layers, each with a residual.

    A padding token is a row of zeros, on the way in and out. So what a block gives holds the mask as well, and the
    outputs of frozen blocks can be kept without anything beside them.
    """

    def __init__(self, width: int, heads: int, inner: int, eps: float) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.norm1 = nn.LayerNorm(width, eps)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norm2 = nn.LayerNorm(width, eps)

    def forward(self, h: Tensor) -> Tensor:
        there = present(h)  # [B, L, 1]
        mask = (there[..., 0][:, None, None, :] - 1) * APART  # [B, 1, 1, L], added to the scores
        q, k, v = (layer(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-1, -2)) * (h.shape[-1] // self.heads) ** -0.5 + mask  # [B, heads, L, L]
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        a = self.norm1(h + self.out(mixed))
        found: Tensor = self.norm2(a + self.down(F.gelu(self.up(a)))) * there
        return found


class BertEmbeddings(nn.Module):
    """`[B, L]` tokens -> `[B, L, d]`: words plus places, normalised; padding is zero."""

    def __init__(self, vocabulary: int, longest: int, width: int, eps: float) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        self.norm = nn.LayerNorm(width, eps)

    def forward(self, x: Tensor) -> Tensor:
        order = torch.ones_like(x).cumsum(-1) - 1
        h = self.norm(self.words(x) + self.places(order))
        found: Tensor = h * (x != 0)[..., None].to(h.dtype)
        return found


class Bert(nn.Module):
    """The encoder, `[B, L] -> [B, d]`: its last layer's outputs, averaged over the tokens that are no padding."""

    def __init__(
        self, vocabulary: int = 30_522, longest: int = 512, width: int = 384, heads: int = 12, inner: int = 1536,
        layers: int = 6, eps: float = 1e-12,
    ) -> None:
        super().__init__()
        self.embeddings = BertEmbeddings(vocabulary, longest, width, eps)
        self.blocks = nn.Sequential(*(BertLayer(width, heads, inner, eps) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks(self.embeddings(x.flatten(1)))
        mean: Tensor = h.sum(1) / present(h).sum(1).clamp(min=1)
        return mean


def present(h: Tensor) -> Tensor:
    """`[B, L, d] -> [B, L, 1]`: 1 where a token stands, 0 where it is padding."""
    return (h.detach() != 0).any(-1, keepdim=True).to(h.dtype)


def published_name(name: str) -> str:
    """What published files call a layer of `Bert`, or a tensor in it."""
    if found := re.fullmatch(r"blocks\.(\d+)\.(\w+)(.*)", name):
        return f"encoder.layer.{found[1]}.{INSIDE[found[2]]}{found[3]}"
    if found := re.fullmatch(r"embeddings\.(\w+)(.*)", name):
        return f"{OUTSIDE[found[1]]}{found[2]}"
    raise KeyError(name)


def from_published(module: Bert, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A published file's tensors under this module's names. All tokens are of the first of two kinds, so what that
    kind adds is added to the places."""
    found = {name: t for name in module.state_dict() if (t := tensors.get(published_name(name))) is not None}
    kinds, places = tensors.get("embeddings.token_type_embeddings.weight"), "embeddings.places.weight"
    return found if kinds is None or places not in found else {**found, places: found[places] + kinds[0]}


class MiniLM(nn.Module):
    """all-MiniLM-L6-v2, a sentence encoder of 22.6 million numbers, and a fresh linear layer as head.

    For texts of `inputs` tokens, 512 at most, numbered by the tokenizer that comes with it.
    """

    architecture = Bert

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        with torch.device("meta"):
            base = self.architecture()
        words = base.embeddings.words
        longest = base.embeddings.places.num_embeddings
        if inputs > longest:
            raise CoterieError(f"minilm reads texts of {longest} tokens at most, and these have {inputs}; cut them "
                               f"with length={longest} or less.")
        path = packages.found(packages.WEIGHTS["minilm"], "the model minilm")
        if not packages.weightless():
            packages.filled(base, from_published(base, packages.read(path)), path)
        self.vocabulary = words.num_embeddings
        self.base = base
        self.head = nn.Linear(words.embedding_dim, outputs)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.base(x))  # [B, outputs]
        return scores

    def published(self, name: str) -> str | None:
        """A layer's name in the model as others load it; None for what is not part of it, the head."""
        return published_name(name.removeprefix("base.")) if name.startswith("base.") else None
