"""What clients send: the values that each uploaded tensor may have, declared beside the method that uploads it.

    uploads = sent.fields(update=sent.Vectors(), choice=sent.Index())
    introduces = sent.fields(mix=sent.Shares())

A server that takes uploads from elsewhere looks at them before it uses them. Names, shapes and types it knows from a
rehearsal of the method's own functions; what a number may be, only the method can say. Every value must be finite and
at most MOST in size, declared or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

MOST = 1e30
"""No number that is sent may be larger: rows are float32, and sums of larger ones are infinite."""
ROUNDING = 1e-3
"""What shares may lack of 1, and directions have beyond it."""


@dataclass(frozen=True)
class Sender:
    """What a server knows when it looks at one client's tensors."""

    n: int | None = None
    """The client's training samples; None where it does not tell."""
    rows: int = 0
    """The models in the server's state `rows [K, ...]`, of which a client may name one."""
    rank: int = 0
    """The rank of the model's largest adapter, of which a client may have a part."""


@dataclass(frozen=True)
class Values:
    """Base of what a tensor may hold: any number that is finite and at most MOST in size."""

    compared: ClassVar[bool] = False
    """Whether a client's `size` may be at most a few times the median of its round's."""
    floor: ClassVar[bool] = False
    """Whether a size up to a few times the constant answer's loss is fine, whatever the others'."""

    def wrong(self, t: Tensor, sender: Sender) -> str:
        """What is wrong with one client's tensor `[...]`, empty where nothing is: `holds 2 numbers below 0`."""
        if not (t.is_floating_point() or t.is_complex()):
            return self.outside(t, sender)
        finite = torch.isfinite(t)
        if bad := int((~finite).sum()):
            return f"holds {bad} number{'s' * (bad > 1)} that {'are' if bad > 1 else 'is'} not finite"
        if bool((t.abs() > MOST).any()):
            return f"holds numbers above {MOST:g}"
        return self.outside(t, sender)

    def outside(self, t: Tensor, sender: Sender) -> str:
        """The same of finite numbers."""
        return ""

    def size(self, t: Tensor, sender: Sender) -> float:
        """What is compared with others'."""
        return 0.0

    def stretch(self, times: float) -> float:
        """How many times the usual bound the size of a client with `times` the median's samples may have."""
        return 1.0


@dataclass(frozen=True)
class Vectors(Values):
    """Models, parts of them, how they moved, features: of a length that is compared with the other clients'.

    Lengths grow like n^`grows` with the samples: 1 for sums over samples, -1 for the variance of a mean.
    """

    grows: int = 0
    at_least: float | None = None

    compared = True

    def outside(self, t: Tensor, sender: Sender) -> str:
        return below(t, self.at_least)

    def size(self, t: Tensor, sender: Sender) -> float:
        length = float(torch.linalg.vector_norm(t, dtype=torch.float64))
        return length * float(max(sender.n or 1, 1)) ** -self.grows

    def stretch(self, times: float) -> float:
        """Twenty times the samples are twenty times the steps; what `grows` by a known power is compared without n."""
        return max(1.0, times) if self.grows == 0 else 1.0


@dataclass(frozen=True)
class Numbers(Values):
    """Numbers from `at_least` to `at_most`; above `above`."""

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None

    def outside(self, t: Tensor, sender: Sender) -> str:
        if self.above is not None and bool((t <= self.above).any()):
            return f"holds numbers that are not above {self.above:g}"
        return below(t, self.at_least) or beyond(t, self.at_most)


@dataclass(frozen=True)
class Losses(Values):
    """Losses of one or several models, of at least 0; the least of them is compared with the other clients'."""

    compared = floor = True

    def outside(self, t: Tensor, sender: Sender) -> str:
        return below(t, 0)

    def size(self, t: Tensor, sender: Sender) -> float:
        return float(t.min()) if t.numel() else 0.0


@dataclass(frozen=True)
class Index(Values):
    """Whole numbers that each name one of the models in the server's `rows`, from 0."""

    def outside(self, t: Tensor, sender: Sender) -> str:
        if t.is_floating_point() or t.dtype == torch.bool:
            return "is no whole number"
        return below(t, 0) or beyond(t, sender.rows - 1)


@dataclass(frozen=True)
class Ranks(Values):
    """Whole numbers from 1 to the rank of the model's largest adapter."""

    def outside(self, t: Tensor, sender: Sender) -> str:
        if t.is_floating_point() or t.dtype == torch.bool:
            return "is no whole number"
        return below(t, 1) or beyond(t, sender.rank)


@dataclass(frozen=True)
class Counts(Values):
    """Whole numbers of samples, together as many as the client has."""

    def outside(self, t: Tensor, sender: Sender) -> str:
        if wrong := below(t, 0):
            return wrong
        if t.is_floating_point() and bool((t != t.round()).any()):
            return "holds counts that are no whole numbers"
        total = float(t.double().sum())
        return "" if sender.n is None or total == sender.n else f"counts {total:g} samples in all, not {sender.n}"


@dataclass(frozen=True)
class Shares(Values):
    """Shares of a whole: at least 0, and 1 in all along the last axis."""

    def outside(self, t: Tensor, sender: Sender) -> str:
        whole = (t.double().sum(-1) - 1).abs().max() if t.numel() else torch.zeros(())
        return below(t, 0) or ("" if float(whole) <= ROUNDING else "holds shares that do not sum to 1")


@dataclass(frozen=True)
class Directions(Values):
    """Vectors along an axis of one client's tensor, each of length at most 1."""

    axis: int = -1

    def outside(self, t: Tensor, sender: Sender) -> str:
        lengths = torch.linalg.vector_norm(t, dim=self.axis, dtype=torch.float64)
        return "holds vectors longer than 1" if bool((lengths > 1 + ROUNDING).any()) else ""


def fields(**each: Values) -> Mapping[str, Values]:
    """What each tensor of an upload may hold, by the names that `Upload(...)` gives them."""
    return MappingProxyType(each)


def below(t: Tensor, least: float | None) -> str:
    """What is wrong with numbers below the least that may be."""
    return "" if least is None or not bool((t < least).any()) else f"holds numbers below {least:g}"


def beyond(t: Tensor, most: float | None) -> str:
    """What is wrong with numbers above the most that may be."""
    return "" if most is None or not bool((t > most).any()) else f"holds numbers above {most:g}"


def middle(values: Sequence[float]) -> float:
    """The median; of an even number the lower one of the two, so that one of two cannot make itself the measure."""
    return sorted(values)[(len(values) - 1) // 2]
