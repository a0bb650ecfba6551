"""Counter-based randomness: every draw is a hash of what it is for, never a state that moves.

A stream is named by (seed, client, round, purpose, stream, ...). Two programs that ask for the same name get the
same bits, whatever else they drew before and however clients are batched, so results do not depend on the engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Word = int | str | Tensor

_GOLDEN = -7046029254386353131  # 2^64 / golden ratio as a signed integer: spreads consecutive counters
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_WRAP = 1 << 64


def _mix(h: Any) -> Any:
    """The splitmix64 finaliser on int64 tensors or arrays (products wrap; shifts are made logical by masking)."""
    h = (h ^ ((h >> 30) & ((1 << 34) - 1))) * _MIX_1
    h = (h ^ ((h >> 27) & ((1 << 37) - 1))) * _MIX_2
    return h ^ ((h >> 31) & ((1 << 33) - 1))


def _number(word: Word) -> int | Tensor:
    if isinstance(word, str):
        return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "big", signed=True)
    return signed(word) if isinstance(word, int) else word


def signed(number: int) -> int:
    """Any whole number as the int64 with the same last 64 bits, which stands for it in a key."""
    return (number + (_WRAP >> 1)) % _WRAP - (_WRAP >> 1)


def key(*words: Word) -> Tensor:
    """The int64 key of a stream; tensor words broadcast, so one call gives the keys of many clients."""
    tensors = [word for word in words if isinstance(word, Tensor)]
    if torch._C._functorch.peek_interpreter_stack() is not None or any(t.device.type != "cpu" for t in tensors):
        h = torch.zeros((), dtype=torch.int64, device=tensors[0].device if tensors else None)
        for word in words:
            h = _mix(h * 3 + _number(word) + _GOLDEN)
        return h
    state = np.zeros(1, dtype=np.int64)  # NumPy's small operations cost a tenth of PyTorch's
    for word in words:
        number = _number(word)
        state = _mix(state * 3 + (number.numpy() if isinstance(number, Tensor) else number) + _GOLDEN)
    return torch.from_numpy(state).view(np.broadcast_shapes(*(tuple(t.shape) for t in tensors)))


def integer(*words: Word) -> int:
    """One non-negative 62-bit number of a stream, e.g. to seed a generator of NumPy or PyTorch."""
    return int(key(*words).item()) & ((1 << 62) - 1)


def integers(word: Word, names: Sequence[str]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """`integer(word, name)` for every name, `[names]`, in one go."""
    numbers = torch.tensor([_number(name) for name in names], dtype=torch.int64)
    return (key(word, numbers) & ((1 << 62) - 1)).numpy()


def uniform(stream: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Uniform numbers on [0, 1) for one key (0-d) and any shape; only tensor operations, so it works under vmap."""
    count = 1
    for side in shape:
        count *= side
    counter = torch.arange(count, device=stream.device)
    bits: Tensor = _mix(stream + _GOLDEN * (counter + 1))
    return ((bits >> 40) & ((1 << 24) - 1)).to(dtype).mul(2.0**-24).reshape(shape)


def chance(
    seed: int, names: np.ndarray[tuple[int, ...], np.dtype[np.int64]], t: int, purpose: str
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A uniform number on [0, 1) for each client, by its name's number `[c]`, in round t."""
    bits = key(seed, torch.from_numpy(names), t, purpose).numpy()
    return (bits & ((1 << 53) - 1)) / float(1 << 53)
