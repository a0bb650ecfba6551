"""Text models: token numbers in, scores out. Token 0 is padding; no model takes a softmax at its end."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from coterie.errors import CoterieError

VOCABULARY = 32_000
KERNELS = (3, 4, 5)


class Convolutions(nn.Module):
    """`[B, length]` tokens -> the largest answer of each filter of width 3, 4 and 5, `[B, 3 * filters]`."""

    def __init__(self, vocabulary: int, features: int, filters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, features, padding_idx=0)
        self.convolutions = nn.ModuleList(nn.Conv1d(features, filters, k) for k in KERNELS)

    def forward(self, x: Tensor) -> Tensor:
        words = self.embedding(x.flatten(1)).transpose(1, 2)  # [B, features, length]
        return torch.cat([conv(words).relu().amax(-1) for conv in self.convolutions], 1)


class TextCNN(nn.Module):
    """Embeddings, three parallel convolutions with global max-pooling, dropout, and one linear layer as head.

    For texts of `inputs` tokens. `dropout` is the share that is dropped; published programs drop 0.8.
    """

    def __init__(
        self, inputs: int, outputs: int, vocabulary: int = VOCABULARY, features: int = 512, filters: int = 100,
        dropout: float = 0.8,
    ) -> None:
        super().__init__()
        if inputs < max(KERNELS):
            raise CoterieError(f"the TextCNN needs texts of at least {max(KERNELS)} tokens, got {inputs}")
        if not 0 <= dropout < 1:
            raise CoterieError(f"dropout must be a share from 0 up to but not including 1, got {dropout}")
        self.base = nn.Sequential(Convolutions(vocabulary, features, filters), nn.Dropout(dropout))
        self.head = nn.Linear(len(KERNELS) * filters, outputs)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.base(x))  # [B, outputs]
        return logits


class MeanOverWords(nn.Module):
    """`[B, length]` tokens -> the mean of their embeddings over all positions, padding included, `[B, features]`."""

    def __init__(self, vocabulary: int, features: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, features)

    def forward(self, x: Tensor) -> Tensor:
        words: Tensor = self.embedding(x.flatten(1))
        return words.mean(1)


class FastText(nn.Module):
    """The mean of the embeddings, one linear layer without activation, and another one as head."""

    def __init__(self, inputs: int, outputs: int, vocabulary: int = VOCABULARY, features: int = 512) -> None:
        super().__init__()
        self.base = nn.Sequential(MeanOverWords(vocabulary, features), nn.Linear(features, features))
        self.head = nn.Linear(features, outputs)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.base(x))  # [B, outputs]
        return logits
