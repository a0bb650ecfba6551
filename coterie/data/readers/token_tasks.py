"""Targets that a text has by itself: the next token, or tokens that were masked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie import streams
from coterie.contract.tokens import IGNORED
from coterie.data.readers.pieces import Source
from coterie.data.readers.text import Cutter
from coterie.errors import counted, unknown

TASKS = ("next", "masked")
SHARE = 0.15
"""Of a text's tokens, those that are to be predicted where tokens are masked."""
HIDDEN, EXCHANGED = 0.8, 0.1
"""Of these, how many are masked and how many become another token; the rest stay as they are (Devlin et al. 2019)."""

Ints = NDArray[np.int64]


@dataclass
class TokenTask:
    """`next`: x are windows of a text and y_t = x_(t+1). `masked`: y are the tokens that were drawn, x without them.

    Nothing else is predicted: padding, and with masked tokens all that was not drawn, is `IGNORED`.
    """

    name: str
    short: int = 0  # texts left out, as they have no token to predict

    def __post_init__(self) -> None:
        if self.name not in TASKS:
            raise unknown("task", self.name, TASKS)

    def samples(self, texts: Sequence[str], cutter: Cutter) -> tuple[Ints, Ints]:
        """Tokens of samples `[n, L + 1]` (next) or `[n, L]` (masked), and which text each is of `[n]`."""
        found: list[list[int]] = []
        whose: list[int] = []
        for k, text in enumerate(texts):
            windows = cutter.windows(text) if self.name == "next" else [cutter(text)]
            if self.name == "masked" and not any(_open(np.array([windows[0]]), cutter)[0]):
                windows = []
            self.short += not windows
            found += windows
            whose += [k] * len(windows)
        width = cutter.length + (self.name == "next")
        return np.array(found, dtype=np.int64).reshape(-1, width), np.array(whose, dtype=np.int64)

    def vocabulary(self, cutter: Cutter) -> int:
        """Classes of a token: the words, and a mask where the tokenizer has none."""
        return cutter.words + (self.name == "masked" and cutter.mask is None)

    def finished(self, source: Source, cutter: Cutter) -> Source:
        """The source whose x are what `samples` gave, with the task's x and y."""
        tokens = source.x
        if self.name == "next":
            x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].clone()
            y[y == 0] = IGNORED
        else:
            x, y = masked(tokens, cutter)
        why = "fewer than two tokens, so nothing follows" if self.name == "next" else "no token to mask"
        notes = [f"{counted(self.short, 'text')} left out: {why}"] if self.short else []
        encoding = {**(source.encoding or {}), "task": self.name, "classes": None, "regression": False}
        return replace(source, x=x, y=y, vocabulary=self.vocabulary(cutter), encoding=encoding,
                       notes=(*source.notes, *notes))


def masked(tokens: Tensor, cutter: Cutter) -> tuple[Tensor, Tensor]:
    """x and y `[n, L]` of tokens `[n, L]`: of each text's words `SHARE` are drawn, one at least.

    The draw is a hash of the text's own tokens, so a text has the same masks wherever it stands, in every round.
    """
    each = torch.tensor([crc32(row.tobytes()) for row in tokens.numpy()], dtype=torch.int64)
    place = torch.arange(tokens.shape[1])

    def drawn(purpose: str) -> Tensor:
        bits = streams.key("masked", purpose, each[:, None], place[None, :])  # [n, L]
        return (bits & ((1 << 53) - 1)).double() / float(1 << 53)

    there = torch.from_numpy(_open(tokens.numpy(), cutter))
    which = drawn("which").masked_fill(~there, 2.0)
    chosen = (which < SHARE) | ((which == which.amin(1, keepdim=True)) & there)
    how, other = drawn("how"), 1 + (drawn("other") * (cutter.words - 1)).long()
    mask = cutter.words if cutter.mask is None else cutter.mask
    put = torch.where(how < HIDDEN, mask, torch.where(how < HIDDEN + EXCHANGED, other, tokens))
    return torch.where(chosen, put, tokens), torch.where(chosen, tokens, IGNORED)


def _open(tokens: Ints, cutter: Cutter) -> NDArray[np.bool_]:
    """Which tokens may be masked: words, neither padding nor special."""
    free: NDArray[np.bool_] = (tokens != 0) & ~np.isin(tokens, sorted(cutter.special))
    return free
