"""Augmentation: what training does to images before a model sees them, drawn anew for every batch.

A new one is a class here and its name in `AUGMENTATIONS`. All of them are tensor code that asks the host nothing, so
that a step can be captured, and every draw is a hash of the step's key and the sample's place in its batch, so that a
sample changes alike however clients are computed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from coterie import streams
from coterie.errors import CoterieError, unknown
from coterie.options import build, split_options

NONE = "none"
"""What is written where images stay as they are."""
_ONE = re.compile(r"(\w+)(?:\(([^()]*)\))?")


class Augmentation(Protocol):
    """One way to change images. Its fields are its options, `name(option=value)`."""

    def require(self, shape: Sequence[int]) -> None:
        """Raise where it cannot be for images of `shape`, [C, H, W]."""
        ...

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        """`images [..., C, H, W]` changed by the draws of their `keys [...]`; the shape stays."""
        ...


@dataclass(frozen=True)
class Flip:
    """Left and right are swapped with probability 1/2."""

    def require(self, shape: Sequence[int]) -> None:
        """Any image can be mirrored."""

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        mirrored = drawn(keys, 2, "flip") == 1
        return torch.where(mirrored[..., None, None, None], images.flip(-1), images)


@dataclass(frozen=True)
class Crop:
    """A border of `pad` zeros on every side, then a piece of the old size from one of the (2 pad + 1)^2 places."""

    pad: int = 4

    def __post_init__(self) -> None:
        if self.pad < 1:
            raise CoterieError(f"crop's pad must be at least 1, not {self.pad}.")

    def require(self, shape: Sequence[int]) -> None:
        if self.pad >= min(shape[1:]):
            raise CoterieError(
                f"crop(pad={self.pad}) could leave nothing of images {list(shape)}; use a pad below {min(shape[1:])}."
            )

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        flat, places = images.flatten(0, -4), keys.flatten()
        rows, row_there = self._places(streams.key(places, "down"), height)  # [N, H]
        columns, column_there = self._places(streams.key(places, "right"), width)  # [N, W]
        number = torch.arange(len(flat), device=images.device)[:, None, None, None]
        channel = torch.arange(flat.shape[1], device=images.device)[:, None, None]
        cut = flat[number, channel, rows[:, None, :, None], columns[:, None, None, :]]
        there = row_there[:, None, :, None] & column_there[:, None, None, :]
        return torch.where(there, cut, torch.zeros((), dtype=cut.dtype, device=cut.device)).view(images.shape)

    def _places(self, keys: Tensor, side: int) -> tuple[Tensor, Tensor]:
        """Where each of `side` pixels comes from, and whether that is inside the image, `[N] -> [N, side]` each."""
        first = drawn(keys, 2 * self.pad + 1, "crop") - self.pad
        place = first[:, None] + torch.arange(side, device=keys.device)
        return place.clamp(0, side - 1), (place >= 0) & (place < side)


AUGMENTATIONS: dict[str, type[Augmentation]] = {"flip": Flip, "crop": Crop}


@dataclass(frozen=True)
class Augment:
    """Augmentations one after another: `flip`, `crop(pad=2)`, `flip+crop`."""

    parts: tuple[Augmentation, ...]

    @classmethod
    def of(cls, text: str) -> Augment:
        """The augmentations that are spelled `name(option=value,...)+name`."""
        parts: dict[str, Augmentation] = {}
        for word in text.split("+"):
            spelled = _ONE.fullmatch(word.strip())
            if spelled is None:
                raise CoterieError(f"augment is spelled flip, crop(pad=4) or flip+crop(pad=4), not '{text}'.")
            name, inside = spelled[1], spelled[2] or ""
            if name not in AUGMENTATIONS:
                raise unknown("augmentation", name, (NONE, *AUGMENTATIONS))
            if name in parts:
                raise CoterieError(f"{name} stands twice in augment={text}; once is enough.")
            parts[name] = build(AUGMENTATIONS[name], split_options(inside, word), name)
        return cls(tuple(parts.values()))

    def require(self, shape: Sequence[int]) -> None:
        """Raise where samples of `shape` are no images [C, H, W], or not of a size that can be changed so."""
        if len(shape) != 3:
            raise CoterieError(
                f"augment changes images [channels, height, width]; these samples have shape {list(shape)}: use "
                f"augment={NONE}, or give the data their shape."
            )
        for part in self.parts:
            part.require(shape)

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        """Batches of images `[..., B, C, H, W]`, changed by the draws of their steps' `keys [...]`."""
        place = torch.arange(images.shape[-4], device=images.device)
        mine = streams.key(keys[..., None], "augment", place)  # [..., B]
        for part in self.parts:
            images = part(images, mine)
        return images


def drawn(keys: Tensor, count: int, purpose: str) -> Tensor:
    """A whole number below `count` for each key, all of them equally likely (up to count / 2^64)."""
    return torch.remainder(streams.key(keys, purpose), count)
