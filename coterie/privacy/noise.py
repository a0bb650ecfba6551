"""The streams of noise and of Poisson sampling. A secret of the server names them together with the seed."""

from __future__ import annotations

import hashlib
import os

import numpy as np
import torch
from torch import Tensor

SECRET = "COTERIE_SECRET"
"""The environment variable whose text names the streams of noise and sampling together with the seed."""


def lot(seed: int) -> int:
    """The number that names the streams of Poisson sampling: the seed, or one made of secret and seed."""
    if SECRET not in os.environ:
        return seed
    return int.from_bytes(hashlib.blake2b(_root(seed).encode(), digest_size=8).digest(), "big")


def normal(seed: int, t: int, purpose: str, count: int) -> Tensor:
    """Standard normal numbers `[count]`, float64, of the stream (secret, seed, round, purpose).

    SHAKE-256 makes the bits, so that nobody without the secret can find them again; 53 of them are a uniform number,
    which the normal quantile function maps.
    """
    name = repr((_root(seed), t, purpose)).encode()
    bits = np.frombuffer(hashlib.shake_256(name).digest(8 * count), dtype="<u8") >> np.uint64(11)
    drawn: Tensor = torch.special.ndtri(torch.from_numpy((bits.astype(np.float64) + 0.5) * 2.0**-53))
    return drawn


def _root(seed: int) -> str:
    return f"{os.environ[SECRET]}/{seed}" if SECRET in os.environ else str(seed)
