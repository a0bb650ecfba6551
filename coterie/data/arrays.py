"""What people hand over, numpy or torch, as the tensors of a federation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from coterie.data.partition import Ints
from coterie.errors import CoterieError

Data = ArrayLike | Tensor
Pair = tuple[Data, Data]


def tensor(value: Data, what: str) -> Tensor:
    """Whole numbers and booleans as int64, floats as float32 or float64, on the CPU."""
    if not isinstance(value, Tensor):
        value = _from_numpy(value, what)
    value = value.detach().cpu()
    if value.dtype in (torch.float32, torch.float64, torch.int64):
        return value
    if value.is_complex():
        raise CoterieError(f"{what} must hold real numbers, got {value.dtype}")
    return value.to(torch.float32 if value.is_floating_point() else torch.int64)


def _from_numpy(value: ArrayLike, what: str) -> Tensor:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise CoterieError(f"{what} is no regular array: {error}") from error
    if array.dtype.kind not in "biuf":
        raise CoterieError(f"{what} must hold numbers, got {array.dtype}")
    wanted = array.dtype.newbyteorder("=") if array.dtype.kind == "f" else np.dtype(np.int64)
    if wanted not in (np.float16, np.float32, np.float64, np.int64):
        wanted = np.dtype(np.float64)
    array = np.ascontiguousarray(array, dtype=wanted)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def stacked(lists: Sequence[Sequence[Pair] | None], names: Sequence[str]) -> tuple[Tensor, Tensor, Ints]:
    """All samples client by client, and within a client list by list; and the sizes [clients, lists]."""
    xs: list[Tensor] = []
    ys: list[Tensor] = []
    sizes = np.zeros((len(names), len(lists)), dtype=np.int64)
    for i, name in enumerate(names):
        for k, pairs in enumerate(lists):
            if pairs is None:
                continue
            x, y = _pair(pairs[i], name)
            sizes[i, k] = len(x)
            if len(x) == 0:
                continue
            xs.append(x)
            ys.append(y)
            _require_alike(x, xs[0], "features", name)
            _require_alike(y, ys[0], "targets", name)
            if y.is_floating_point() != ys[0].is_floating_point():
                raise CoterieError(f"client {name} has {y.dtype} targets but earlier ones {ys[0].dtype}; use one kind")
        if sizes[i].sum() == 0:
            raise CoterieError(f"client {name} has no samples")
    return torch.cat(xs), torch.cat(ys), sizes


def _pair(pair: Pair, name: str) -> tuple[Tensor, Tensor]:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise CoterieError(f"client {name} must be a pair (x, y)")
    x, y = tensor(pair[0], f"x of client {name}"), tensor(pair[1], f"y of client {name}")
    if x.ndim == 0 or y.ndim == 0:
        raise CoterieError(f"client {name} must have arrays with one row per sample, got a single number")
    if len(x) != len(y):
        raise CoterieError(f"client {name} has {len(x)} samples in x but {len(y)} in y")
    return x, y


def _require_alike(data: Tensor, first: Tensor, what: str, name: str) -> None:
    if data.shape[1:] != first.shape[1:]:
        raise CoterieError(
            f"client {name} has {what} of shape {list(data.shape[1:])} but earlier ones have {list(first.shape[1:])}"
        )
