"""The streams of a run's noise and Poisson sampling, and the secret that hides them.

Without a secret the seed names them, so that a simulation can be repeated, and whoever knows the seed can take the
noise off. With one they are named by secret, experiment, run and seed, and noise by what it is added to as well: no
two runs, and no two sums, share noise. All of it but the secret may be known.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import re
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.contract.engine import FloatArray, IntArray
from coterie.errors import CoterieError, counted
from coterie.streams import chance

SECRET = "COTERIE_SECRET"
"""The environment variable that holds the secret of the server."""
NEW_SECRET = 'python -c "import secrets; print(secrets.token_hex(32))"'
"""The command that makes one."""

_FEWEST_BITS = 64  # of a text by its letters' frequencies; random ones have more, but for one in a million
_COMMON = ("password", "passwort", "secret", "changeme", "letmein", "qwerty", "coterie", "example", "abcdef", "123456")
_WORK = {"n": 2**14, "r": 8, "p": 1, "dklen": 32}  # of scrypt: 16 MiB and some 40 ms, once a run


# -- the secret --------------------------------------------------------------------------------------------------------


def secret() -> str | None:
    """The server's secret, None where there is none; raises if it could be guessed."""
    text = os.environ.get(SECRET)
    weak = "" if text is None else _weakness(text)
    if weak:
        raise CoterieError(f"{SECRET} {weak} and could be guessed; make a random one: {NEW_SECRET}")
    return text


def _weakness(text: str) -> str:
    """Why a text is no secret; empty where nothing speaks against it.

    128 bits are 32 hex digits, letters and numbers, or 22 letters of base64; other texts need 32 characters. What is
    not hex has at least three of small letters, capitals, numbers and others.
    """
    hexed, based = re.fullmatch(r"[0-9a-fA-F]*", text), re.fullmatch(r"[A-Za-z0-9+/_-]+={0,2}", text)
    kinds = [any(map(kind, text)) for kind in (str.islower, str.isupper, str.isdigit)] + [not text.isalnum()]
    least, mixed = 22 if based and not hexed else 32, 2 if hexed else 3
    bits = -sum(count * math.log2(count / len(text)) for count in Counter(text).values())
    if len(text) < least:
        return f"has {counted(len(text), 'character')}, fewer than {least},"
    if bits < _FEWEST_BITS or text in (text + text)[1:-1]:
        return "repeats itself"
    if sum(kinds) < mixed:
        return "has characters of too few kinds"
    common = next((word for word in _COMMON if word in text.lower()), None)
    return f"holds the word '{common}'" if common else ""


@lru_cache(maxsize=16)
def _derived(text: str, *salt: str) -> bytes:
    """32 bytes of a secret that tell nothing of it; slow, because a text that people made up can be guessed."""
    return hashlib.scrypt(text.encode("utf-8", "surrogateescape"), salt=repr(salt).encode(), **_WORK)


# -- the streams -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Streams:
    """The random numbers of one run, by round and purpose. A run that is resumed has the same ones again."""

    seed: int
    experiment: str = ""
    nonce: str = ""
    """Random, new for every run with a secret; empty in a run without one."""
    mark: str = ""
    """By which the run knows its secret again; it does not tell what it is."""

    @classmethod
    def fresh(cls, seed: int, experiment: str = "") -> Streams:
        """The streams of a new run; they are open to everybody where there is no secret."""
        text = secret()
        if text is None:
            return cls(seed)
        nonce = secrets.token_hex(16)
        return cls(seed, experiment, nonce, _mark(_derived(text, experiment, nonce, str(seed))))

    @classmethod
    def of(cls, seed: int, record: Mapping[str, Any]) -> Streams:
        """Those of a run that was begun, from its checkpoint."""
        return cls(seed, *(str(record[name]) for name in ("experiment", "nonce", "mark")))

    def record(self) -> dict[str, Any]:
        """What a checkpoint says of them; nothing of it needs to be hidden."""
        return {"experiment": self.experiment, "nonce": self.nonce, "mark": self.mark}

    def key(self) -> bytes | None:
        """What all streams are made of, None in a run without a secret; raises if the secret is not the run's."""
        text = secret()
        if not self.nonce:
            if text is not None:
                raise CoterieError(
                    f"the run began without a secret, so that its noise follows from the seed, and now {SECRET} is "
                    "set; unset it to go on as before, or begin a new run."
                )
            return None
        if text is None:
            raise CoterieError(f"the run's noise is made with the secret that it began with; set {SECRET} to it.")
        key = _derived(text, self.experiment, self.nonce, str(self.seed))
        if not hmac.compare_digest(_mark(key), self.mark):
            raise CoterieError(
                f"{SECRET} is not the secret that the run began with, or its seed or experiment is another; a run goes "
                "on with all three as they were."
            )
        return key

    def normal(self, t: int, purpose: str, count: int, about: bytes = b"") -> Tensor:
        """Standard normal numbers `[count]`, float64, of round t. With a secret they are others for another `about`.

        SHAKE-256 makes the bits, so that nobody without the secret can find them again.
        """
        key = self.key()
        name = repr((str(self.seed), t, purpose)).encode() if key is None else (
            key + repr((t, purpose, hashlib.blake2b(about).hexdigest())).encode()
        )
        return quantiles(np.frombuffer(hashlib.shake_256(name).digest(8 * count), dtype="<u8"))

    def chance(self, names: IntArray, t: int, purpose: str) -> FloatArray:
        """A uniform number on [0, 1) for each client, by its name's number `[c]`, in round t."""
        key = self.key()
        if key is None:
            return chance(self.seed, names, t, purpose)
        of_round = hashlib.blake2b(repr((t, purpose)).encode(), key=key).digest()
        each = [hashlib.blake2b(name.tobytes(), key=of_round, digest_size=8).digest() for name in names.astype("<i8")]
        return (np.frombuffer(b"".join(each), dtype="<u8") >> np.uint64(11)).astype(np.float64) * 2.0**-53


def quantiles(bits: np.ndarray[Any, np.dtype[np.uint64]]) -> Tensor:
    """Standard normal numbers of 64 random bits each: 53 of them are a uniform number, whose quantile is taken.

    The largest would be rounded to 1, whose quantile is infinite.
    """
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    drawn: Tensor = torch.special.ndtri(torch.from_numpy(np.minimum(uniform, 1 - 2.0**-53)))
    return drawn


def _mark(key: bytes) -> str:
    return hmac.new(key, b"the run's secret", "sha256").hexdigest()
