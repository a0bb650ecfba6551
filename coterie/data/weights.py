"""How much each training sample counts in its client's loss."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from coterie.data.federation import Federation


def balanced(federation: Federation) -> Tensor:
    """How many times each sample counts so that the classes of a client weigh alike, `[samples]` in float64.

    A training sample of class c of client i counts w_ic = n_i / (C_i n_ic) times, with n_ic the client's training
    samples of c, n_i all of them and C_i the number of classes among them. Each class of a client then has the weight
    n_i / C_i, and its samples' weights average to 1. Samples of other splits count once.
    """
    counts = federation.histogram("train").astype(np.float64)  # [clients, classes]
    held = (counts > 0).sum(1, keepdims=True)
    each = counts.sum(1, keepdims=True) / np.maximum(held * counts, 1)  # 0 for a class that the client does not hold
    found = torch.ones(len(federation.y), dtype=torch.float64)
    labels = federation.y.cpu()
    for client, (start, stop) in enumerate(federation.bounds[:, :2].tolist()):
        found[start:stop] = torch.from_numpy(each[client])[labels[start:stop]]
    return found
