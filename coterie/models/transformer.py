"""Transformers for texts: token numbers in, 0 is padding; a score for every next token, or for every class.

Queries, keys, values and what they are put together by are linear layers of their own (`q`, `k`, `v`, `out`), so that
adapters can be set on any of them: `--adapter lora:targets=q+v`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.errors import CoterieError
from coterie.models.text import VOCABULARY

LOW = -1e9
"""A score whose softmax is 0 wherever another one is there."""


class Attention(nn.Module):
    """softmax(q k^T / sqrt(width / heads) + mask) v, put together by `out`: `[B, L, width] -> [B, L, width]`."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, width = x.shape

        def parted(whole: Tensor) -> Tensor:
            return whole.reshape(batch, length, self.heads, width // self.heads).transpose(1, 2)

        q, k, v = parted(self.q(x)), parted(self.k(x)), parted(self.v(x))  # [B, heads, L, width / heads]
        scores = q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5 + mask  # [B, heads, L, L]
        mixed = (self.dropout(scores.softmax(-1)) @ v).transpose(1, 2).reshape(batch, length, width)
        found: Tensor = self.out(mixed)
        return found


class AttentionBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with GELU: pre-LN."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.before(x), mask))
        found: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.between(x)))))
        return found


class Blocks(nn.Module):
    """Embeddings of tokens and of their places, blocks, and a last norm: `[B, L] -> [B, L, width]`.

    Padding is seen by nobody; with `causal`, a token sees itself and what stands before it.
    """

    def __init__(
        self, vocabulary: int, length: int, layers: int, width: int, heads: int, dropout: float, causal: bool
    ) -> None:
        super().__init__()
        self.length, self.causal = length, causal
        self.embedding, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        for table in (self.embedding, self.places):
            nn.init.normal_(table.weight, std=0.02)
        self.blocks = nn.ModuleList(AttentionBlock(width, heads, dropout) for _ in range(layers))
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if length > self.length:
            raise ValueError(f"a text has {length} tokens, and the model takes {self.length}")
        place = torch.arange(length, device=x.device)
        there = (x != 0)[:, None, None, :]  # [B, 1, 1, L]
        if self.causal:
            there = there & (place[:, None] >= place)  # [B, 1, L, L]
        hidden = self.embedding(x) + self.places(place)
        mask = torch.where(there, 0.0, LOW).to(hidden.dtype)
        hidden = self.dropout(hidden)
        for block in self.blocks:
            hidden = block(hidden, mask)
        found: Tensor = self.norm(hidden)
        return found


class Causal(nn.Module):
    """A decoder-only transformer: of every token's place the scores of the next token, from what stands up to it.

    `length` tokens at most, those of the data where nothing is said; `outputs` is the vocabulary of the scores, and
    `vocabulary` that of the input where it is another one.
    """

    any_length = True
    """Whether padding at the end changes no other output, so that texts may be cut to the longest one."""

    def __init__(
        self, inputs: int, outputs: int, layers: int = 2, width: int = 128, heads: int = 4, dropout: float = 0.1,
        vocabulary: int = 0, length: int = 0,
    ) -> None:
        super().__init__()
        _require(inputs, layers, width, heads, dropout, length)
        self.base = Blocks(vocabulary or outputs, length or inputs, layers, width, heads, dropout, causal=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.base(x))  # [B, L, outputs]
        return scores


class TextEncoder(nn.Module):
    """A transformer whose tokens see each other; classes from the mean over all that is no padding.

    With `tokens`, every token has scores of its own, for targets of one class a token.
    """

    any_length = True
    """As in `Causal`."""

    def __init__(
        self, inputs: int, outputs: int, layers: int = 2, width: int = 128, heads: int = 4, dropout: float = 0.1,
        vocabulary: int = VOCABULARY, length: int = 0, tokens: bool = False,
    ) -> None:
        super().__init__()
        _require(inputs, layers, width, heads, dropout, length)
        self.tokens = tokens
        known = max(vocabulary, outputs) if tokens else vocabulary  # what is answered for a token may stand in a text
        self.base = Blocks(known, length or inputs, layers, width, heads, dropout, causal=False)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.base(x)
        if not self.tokens:
            there = (x != 0).to(hidden.dtype)[..., None]
            hidden = (hidden * there).sum(1) / there.sum(1).clamp(min=1)  # [B, width]
        scores: Tensor = self.head(hidden)
        return scores


def _require(inputs: int, layers: int, width: int, heads: int, dropout: float, length: int) -> None:
    for name, value in (("layers", layers), ("width", width), ("heads", heads)):
        if value < 1:
            raise CoterieError(f"a transformer's {name} must be at least 1, got {value}")
    if width % heads:
        raise CoterieError(f"a transformer's width must be a multiple of its heads, got width={width}, heads={heads}")
    if not 0 <= dropout < 1:
        raise CoterieError(f"dropout must be a share from 0 up to but not including 1, got {dropout}")
    if length and inputs > length:
        raise CoterieError(
            f"the transformer takes texts of at most length={length} tokens, and those of the data have {inputs}; read "
            f"them with length={length}, or set the model's length={inputs}"
        )
