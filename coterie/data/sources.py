"""Where samples come from: bundled data, .npz files and the textbook's synthetic clients."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.errors import CoterieError, unknown


class NoLabels(CoterieError):  # noqa: N818 (named for what it says)
    """Samples without labels: good for nothing but to be told so, except to a newcomer (see `coterie.newcomers`)."""


SOURCES = ("digits", "<file>.npz")


@dataclass(frozen=True, eq=False)
class Source:
    """Samples before they are dealt to clients."""

    x: Tensor  # [N, ...]
    y: Tensor  # [N] or [N, k]
    client: NDArray[Any] | None  # [N] ids (numbers or strings) when the data come with natural clients
    name: str


def load(name_or_path: str | Path) -> Source:
    """A bundled data set by name, or a file by its path."""
    if str(name_or_path) == "digits":
        x, y = digits()
        return Source(x, y, None, "digits")
    if Path(name_or_path).suffix == ".npz":
        return npz(name_or_path)
    raise unknown("dataset", str(name_or_path), SOURCES)


def digits() -> tuple[Tensor, Tensor]:
    """1797 handwritten digits: x [1797, 1, 8, 8] float32 in [0, 1], y [1797]. Needs no download."""
    from sklearn.datasets import load_digits

    bundle = load_digits()
    x = torch.from_numpy(bundle.images).to(torch.float32).unsqueeze(1) / 16  # [1797, 1, 8, 8]
    return x, torch.from_numpy(bundle.target).to(torch.int64)


def npz(path: str | Path) -> Source:
    """A file with arrays `x`, `y` and optionally `client`; other arrays in it are ignored.

    uint8 x are images [N, H, W, C] or [N, H, W] (or flat pixels [N, F]): they become channels-first float32 from -1 to
    1. Other whole numbers are tokens and become int64; floats are kept.
    """
    arrays = _read(Path(path))
    for key in ("x", "y"):
        if key not in arrays:
            kind = NoLabels if key == "y" else CoterieError
            raise kind(f"'{path}' has no array '{key}'; it has {', '.join(sorted(arrays)) or 'none'}")
    x, y, client = arrays["x"], arrays["y"], arrays.get("client")
    for key, array in arrays.items():
        if array.shape[:1] != x.shape[:1] or array.ndim == 0:
            raise CoterieError(f"'{path}' has x of shape {list(x.shape)} but {key} of shape {list(array.shape)}")
    if client is not None and client.ndim != 1:
        raise CoterieError(f"'{path}' has client ids of shape {list(client.shape)}; expected one id per sample")
    if len(x) == 0:
        raise CoterieError(f"'{path}' holds no samples")
    features = _images(x) if x.dtype == np.uint8 else _numbers(x, "x")
    return Source(features, _numbers(y, "y"), client, Path(path).stem)


def textbook_clients(
    n_train: int = 14, seed: int = 7
) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    """Six linear-regression clients that agree except in one weight each: train and test lists of (x, y), float64.

    The order of the random draws is part of the recipe: it is what makes the textbook's numbers come out.
    """
    clients, inputs, n_test = 6, 12, 400
    rng = np.random.default_rng(seed)
    common = 2 * rng.standard_normal(inputs)
    weights = np.tile(common, (clients, 1))  # [clients, inputs]
    for k in range(clients):
        weights[k, k] += 1.5 if k % 2 == 0 else -1.5

    def draw(n: int, w: NDArray[np.float64]) -> tuple[Tensor, Tensor]:
        x = rng.standard_normal((n, inputs))
        y = x @ w + rng.standard_normal(n)
        return torch.from_numpy(x), torch.from_numpy(y)

    train = [draw(n_train, w) for w in weights]
    test = [draw(n_test, w) for w in weights]
    return train, test


def _read(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays this library knows; anything else in the file stays unread."""
    if not path.is_file():
        raise CoterieError(f"there is no file '{path}'")
    try:
        with np.load(path, allow_pickle=False) as file:
            return {key: file[key] for key in ("x", "y", "client") if key in file.files}
    except (OSError, ValueError, EOFError, AttributeError, TypeError, BadZipFile, zlib.error) as error:
        raise CoterieError(f"'{path}' cannot be read as an .npz file of plain arrays: {error}") from error


def _images(x: NDArray[np.uint8]) -> Tensor:
    pixels = torch.from_numpy(x)
    if x.ndim == 3:
        pixels = pixels.unsqueeze(1)  # [N, 1, H, W]
    elif x.ndim == 4:
        if x.shape[3] > 4:
            raise CoterieError(f"uint8 images must be [N, H, W, C] with at most 4 channels, got {list(x.shape)}")
        pixels = pixels.permute(0, 3, 1, 2)  # [N, C, H, W]
    # In place, so that a large image set is held once.
    return pixels.to(torch.float32, memory_format=torch.contiguous_format).div_(255).sub_(0.5).div_(0.5)


def _numbers(array: NDArray[Any], what: str) -> Tensor:
    if array.dtype.kind in "biu":
        return torch.from_numpy(array.astype(np.int64))
    if array.dtype.kind != "f":
        raise CoterieError(f"{what} must hold numbers, got {array.dtype}")
    return torch.from_numpy(array.astype(np.float64 if array.dtype.itemsize >= 8 else np.float32))
