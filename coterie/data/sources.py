"""Where samples come from: bundled data, files and folders (see `coterie.data.readers`), and the textbook's clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.data.readers import READERS, Source, find, read, spelled, takes
from coterie.data.readers.npz import npz
from coterie.errors import CoterieError, unknown

SOURCES = ("digits",)

__all__ = ["READERS", "SOURCES", "Source", "digits", "load", "load_as", "npz", "spelled", "textbook_clients"]


def load(data: Any, **options: Any) -> Source:
    """A bundled data set by name; a file or folder by its path, with options; or a Hugging Face data set.

    `load("table.csv", label="species")` and `load("table.csv:label=species")` are the same. The format is found by
    itself, unless `format=` names it, one of `READERS`.
    """
    if isinstance(data, (str, Path)):
        path, written = spelled(str(data))
        if path == "digits":
            if written or options:
                raise CoterieError("digits has no options.")
            x, y = digits()
            return Source(x, y, None, "digits")
        if not Path(path).exists() and not Path(path).suffix and "/" not in path:
            raise unknown("dataset", path, SOURCES)
        return read(Path(path), {**written, **options})
    return read(data, options)


def load_as(data: Any, classes: int, **options: Any) -> Source:
    """`load`, with y read as what a run predicts: so many classes or (0) numbers, whatever they look like themselves.

    What the data's own spelling says goes first, and formats that do not ask keep to what they are.
    """
    if isinstance(data, (str, Path)):
        path, written = spelled(str(data))
        asked = {**written, **options}
        known = "" if path == "digits" or not Path(path).exists() else str(asked.get("format") or find(path))
        if known in READERS and takes(known, "regression") and not {"regression", "classes"} & asked.keys():
            options = {**options, "regression": not classes}
    return load(data, **options)


def digits() -> tuple[Tensor, Tensor]:
    """1797 handwritten digits: x [1797, 1, 8, 8] float32 in [0, 1], y [1797]. Needs no download."""
    from sklearn.datasets import load_digits

    bundle = load_digits()
    x = torch.from_numpy(bundle.images).to(torch.float32).unsqueeze(1) / 16  # [1797, 1, 8, 8]
    return x, torch.from_numpy(bundle.target).to(torch.int64)


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
