"""What a federation refuses, with the name of the client whose data are wrong.

Samples are in client order here: client i holds the rows `bounds[i, 0]` up to `bounds[i, 3]`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from coterie import memory
from coterie.contract.tokens import IGNORED, per_token
from coterie.contract.tokens import counted as counted_tokens
from coterie.data.partition import Ints
from coterie.errors import CoterieError, counted, shortened


def client_names(names: Sequence[str] | None, clients: int) -> tuple[str, ...]:
    if clients == 0:
        raise CoterieError("a federation needs at least one client, got none")
    if names is None:
        return tuple(str(i) for i in range(clients))
    if len(names) != clients:
        raise CoterieError(f"{len(names)} names were given for {clients} clients")
    found = tuple(str(name) for name in names)
    for name in found:
        if any("\ud800" <= sign <= "\udfff" for sign in name):  # json can write one; no file can keep it
            raise CoterieError(f"'{shortened(name, 60)}' cannot be a client's name: it holds half a character.")
    return found


def require_share(what: str, share: float) -> None:
    if not 0 <= share < 1:
        raise CoterieError(f"{what} must be a share from 0 up to but not including 1, got {share}")


def require_rows(rows: Ints, samples: int, bounds: Ints, names: Sequence[str]) -> None:
    outside = np.flatnonzero((rows < 0) | (rows >= samples))
    if outside.size:
        name = names[_owner(bounds, outside[0])]
        raise CoterieError(f"client {name} is assigned sample {rows[outside[0]]} but there are {samples} samples")
    times = np.bincount(rows, minlength=samples)
    if times.max() > 1:
        twice = np.flatnonzero(rows == times.argmax())
        first, second = names[_owner(bounds, twice[0])], names[_owner(bounds, twice[1])]
        raise CoterieError(f"sample {times.argmax()} is assigned twice, to client {first} and to client {second}")


def require_finite(data: Tensor, what: str, bounds: Ints, names: Sequence[str]) -> None:
    if not data.is_floating_point():
        return
    # Block by block: the mask of a whole image set would be another large array.
    for name, (start, _, _, stop) in zip(names, bounds, strict=True):
        rows = max(1, memory.BLOCK // max(data[0].numel(), 1))
        bad = sum(int((~torch.isfinite(data[k : min(k + rows, stop)])).sum()) for k in range(start, stop, rows))
        if bad:
            raise CoterieError(f"client {name} has {counted(bad, 'NaN or infinite value')} in {what}")


def require_labels(y: Tensor, classes: int, bounds: Ints, names: Sequence[str]) -> None:
    tokens = per_token(y)
    wrong = (y < 0) | (y >= classes)
    bad = torch.nonzero(wrong & (y != IGNORED) if tokens else wrong)
    if len(bad):
        name, found = names[_owner(bounds, int(bad[0, 0]))], int(y[tuple(bad[0])])
        more = f", or {IGNORED} for a token without a label" if tokens else ""
        raise CoterieError(f"client {name} has label {found} but {classes} classes means 0 to {classes - 1}{more}")
    if tokens and len(empty := torch.nonzero(counted_tokens(y) == 0)):
        name = names[_owner(bounds, int(empty[0]))]
        raise CoterieError(f"client {name} has a sample with no token to predict: all of its y are {IGNORED}; leave "
                           "it out")


def _owner(bounds: Ints, row: int) -> int:
    return int(np.searchsorted(bounds[:, 3], row, side="right"))
