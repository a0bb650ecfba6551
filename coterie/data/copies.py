"""Exact copies among samples: who has trained on one knows the label of the other."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie import memory
from coterie.data.partition import Ints

FEW, FEWEST = 0.05, 3
"""Share of a client's samples, and their number, up to which copies are passed over."""
TIMES = 10
"""How many times as frequent copies must be as samples that are equal by half."""
ROWS, COLUMNS = 4096, 256
"""Different samples, and numbers of each, by which chance is judged at most."""
WAY = "leave the copies out of the data, or keep them on one side with group=COLUMN"

Hashes = NDArray[np.uint64]


def digests(x: Tensor, y: Tensor) -> Hashes:
    """A number for each sample with its label, `[N]`: equal ones have the same, others another one."""
    made: Hashes = np.empty(len(x), dtype=np.uint64)
    labels = y.detach().cpu().numpy()
    size = max(1, memory.BLOCK // max(x[0].numel(), 1)) if len(x) else 1  # the samples may be larger than memory
    for first in range(0, len(x), size):
        block = x[first : first + size].detach().cpu().contiguous().numpy()
        for k, sample in enumerate(block, first):
            hashed = blake2b(sample.data, digest_size=8)
            hashed.update(labels[k].tobytes())
            made[k] = int.from_bytes(hashed.digest(), "little")
    return made


def notes(x: Tensor, y: Tensor, bounds: Ints, names: Sequence[str]) -> list[str]:
    """A note where clients hold out what somebody trains on; samples are in client order, as `bounds [clients, 4]`."""
    hashes = digests(x, y)
    trained = np.unique(np.concatenate([hashes[b0:b1] for b0, b1, _, _ in bounds]))
    held = [hashes[b1:b3] for _, b1, _, b3 in bounds]
    copies = [int(np.isin(mine, trained).sum()) for mine in held]
    chance = _chance(x, hashes) if any(_many(n, len(mine)) for n, mine in zip(copies, held, strict=True)) else 1.0
    found = [(name, n, len(mine)) for name, n, mine in zip(names, copies, held, strict=True)
             if _many(n, len(mine)) and n > TIMES * chance * len(mine)]
    if not found:
        return []
    some = ", ".join(f"{name}: {n} of {total}" for name, n, total in found[:4])
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    copied, total = sum(n for _, n, _ in found), sum(total for _, _, total in found)
    return [f"{copied} of {total} samples held out for validation and testing are exact copies of training samples "
            f"(client {some}{more}), so scores may come out too high; {WAY}"]


def among(x: Tensor, y: Tensor, group: NDArray[np.generic] | None = None) -> list[str]:
    """A note on one client's samples before they are split: those of which another group, or sample, is a copy."""
    hashes = digests(x, y)
    _, kind, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    if group is not None:
        pairs = np.unique(np.stack([kind, np.unique(group.astype(str), return_inverse=True)[1]]), axis=1)
        counts = np.bincount(pairs[0], minlength=len(counts))
    copies = int((counts[kind] > 1).sum())
    if not _many(copies, len(x)) or copies <= TIMES * _chance(x, hashes) * len(x):
        return []
    return [f"{copies} of {len(x)} samples are exact copies of another; copies may be trained and tested on, which "
            f"makes the estimate too good and its intervals too narrow; {WAY}"]


def _many(copies: int, samples: int) -> bool:
    return copies >= FEWEST and copies > FEW * samples


def _chance(x: Tensor, hashes: Hashes) -> float:
    """How ready samples are to be equal by chance, from 0 to 1: few numbers of few values meet again and again.

    It is the share of different samples that equal another one in half of their numbers, of the two halves the one that
    tells more. Columns that hang together are in it as they are, and a measured one keeps all samples apart.
    """
    first = np.sort(np.unique(hashes, return_index=True)[1])
    rows = first[:: -(-len(first) // ROWS)]
    every = -(-x[0].numel() // COLUMNS)
    values = torch.stack([x[row].reshape(-1)[::every].cpu() for row in rows.tolist()]).numpy()  # [rows, columns]
    values = np.unique(values[:, (values != values[:1]).any(0)], axis=0)  # without constant columns, and labels
    if values.shape[1] < 2:
        return 1.0
    met = []
    for half in np.array_split(values, 2, axis=1):
        counts = np.unique(half, axis=0, return_counts=True)[1]
        met.append(counts[counts > 1].sum() / len(values))
    return min(1.0, float(min(met)) * len(first) / len(rows))
