"""What is faster on a host: small models stacked, large ones one after another (tried out); and how many threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.func import vmap

from coterie import streams
from coterie.contract.net import Batch, Net

CLEAR = 0.8  # one after another must take less than this share of the stack's time to be chosen
_known: dict[Hashable, dict[str, float]] = {}


def times(net: Net, row: Tensor, x: Tensor, y: Tensor) -> dict[str, float]:
    """Milliseconds that the gradients of `models` models on `x [B, ...]`, `y [B, ...]` take `stacked` and `looped`.

    Measured once a process for each model, batch and number of threads.
    """
    key = (net.layout.digest, net.module is net.whole, tuple(x.shape), x.dtype, torch.get_num_threads())
    if key not in _known:
        net.mode(training=True, single=len(x) == 1)
        weight, word = torch.ones(len(x), dtype=row.dtype), streams.key("trial", torch.zeros((), dtype=torch.int64))

        def gradient(one: Tensor, xs: Tensor, ys: Tensor) -> Tensor:
            return net.grad(one, Batch(xs, ys, weight, word))

        def looped(models: int) -> Callable[[], object]:
            return lambda: [gradient(row.clone(), x, y) for _ in range(models)]

        def stacked(models: int) -> Callable[[], object]:
            given = tuple(t.expand(models, *t.shape).contiguous() for t in (row, x, y))
            return lambda: vmap(gradient)(given[0].clone(), *given[1:])

        before, net.stacked = net.stacked, False
        models = 8 if _best(looped(1), 2) < 0.02 else 2  # of a large model few calls tell enough
        alone = _best(looped(models), 3)
        net.stacked = True
        together = _best(stacked(models), 3)
        net.stacked = before
        _known[key] = {"models": models, "stacked": round(together * 1e3, 3), "looped": round(alone * 1e3, 3)}
    return _known[key]


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads for PyTorch's operations until the block ends."""
    before = torch.get_num_threads()
    if count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count != before:
            torch.set_num_threads(before)


def _best(call: Callable[[], object], tries: int) -> float:
    """The shortest of so many tries, after one that counts for nothing."""
    call()
    found = []
    for _ in range(tries):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)
