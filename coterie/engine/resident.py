"""Clients' samples on one device, and which of them a client sees at each step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from coterie import memory, streams
from coterie.contract.engine import Effort, IntArray, Split, Tensors
from coterie.contract.layout import Layout
from coterie.contract.metric import Tally, tallied
from coterie.contract.net import Batch, Given, Net
from coterie.contract.optimizer import Optimizer
from coterie.contract.tokens import counted, mean_over_tokens, per_token
from coterie.data import SPLITS, Federation
from coterie.data.augment import Augment
from coterie.engine.arithmetic import Arithmetic
from coterie.engine.packing import Packed, pack, steps_of
from coterie.engine.prefix import Prefix
from coterie.errors import CoterieError
from coterie.metrics.accuracy import right

SCORED = 1 << 22
"""Outputs of one client's texts that are scored at once at most, where every token has a score for every class."""


@dataclass(frozen=True)
class Feeding:
    """What training does with samples beyond reading them."""

    worth: Tensor | None = None  # [samples] how many times each counts; None: once
    augment: Augment | None = None  # how images are changed; None: not at all


class Resident:
    """What engines that hold all samples share: the data, the net, the arithmetic, and the order of the batches."""

    def __init__(
        self, net: Net, federation: Federation, device: torch.device, arithmetic: Arithmetic,
        evaluation_batch: int = 512, feeding: Feeding | None = None, prefix: Prefix | None = None,
    ) -> None:
        """The net takes what the `prefix` makes of the samples, where there is one."""
        self.net, self.arithmetic, self._prefix = net, arithmetic, prefix
        self._inputs: Tensor | None = None
        self.layout: Layout = net.layout
        self.device, self.dtype = device, arithmetic.dtype
        self.evaluation_batch = evaluation_batch
        floating = federation.x.is_floating_point()
        # Samples in a file stay there, in their precision; on a GPU all of them have to fit.
        self.x = _placed(federation.x, device, self.dtype if floating else federation.x.dtype)
        self.y = federation.trained_on.to(device, self.dtype if federation.y.is_floating_point() else None)
        self.bounds = federation.bounds
        self.tokens: Tensor | None = None  # [samples] how often each counts; None: once
        if per_token(self.y):
            self.tokens = counted(self.y).to(self.dtype)
            self.evaluation_batch = max(1, min(evaluation_batch, SCORED // (self.y.shape[1] * net.task.classes)))
        self._counted = federation.counted
        fed = feeding or Feeding()
        self.worth = None if fed.worth is None else fed.worth.to(device, self.dtype)
        self.augment = fed.augment

    @property
    def inputs(self) -> Tensor:
        """What the net takes, `[samples, ...]`: the samples, or what their prefix makes of them, computed when first
        asked for."""
        if self._prefix is None:
            return self.x
        if self._inputs is None:
            with self.computing():
                self._inputs = self._prefix.outputs(self.x, self.dtype, self.arithmetic.bf16)
        return self._inputs

    def example(self) -> Tensor:
        """What the net takes of one sample, `[1, ...]`."""
        if self._prefix is None or self._inputs is not None:
            return self.inputs[:1]
        return self._prefix.outputs(self.x[:1], self.dtype, self.arithmetic.bf16)

    @property
    def pending(self) -> int:
        """Bytes that `inputs` will still take."""
        return 0 if self._prefix is None or self._inputs is not None else len(self.x) * self.example().nbytes

    def computing(self) -> AbstractContextManager[None]:
        """The engine's own arithmetic, for a while."""
        return self.arithmetic.set()

    def sizes(self, ids: IntArray, split: Split) -> IntArray:
        """Samples of each client in a split `[C]`."""
        first = SPLITS.index(split)
        found: IntArray = self.bounds[ids, first + 1] - self.bounds[ids, first]
        return found

    def counts(self, ids: IntArray, split: Split) -> IntArray:
        """Samples of each client in a split, or their counted tokens, `[C]`."""
        found: IntArray = self._counted(split)[ids]
        return found

    def starts(self, ids: IntArray, split: Split) -> IntArray:
        """Where each client's samples of a split begin `[C]`."""
        found: IntArray = self.bounds[ids, SPLITS.index(split)]
        return found

    def samples(self, ids: IntArray, split: Split, raw: bool = True) -> Iterator[tuple[Tensor, Tensor]]:
        """Raw `(x, y)` of a split, client by client; not `raw`, x is what the net takes."""
        x = self.x if raw else self.inputs
        for start, size in zip(self.starts(ids, split), self.sizes(ids, split), strict=True):
            yield x[start : start + size], self.y[start : start + size]

    def steps(self, ids: IntArray, effort: Effort) -> IntArray:
        """Local steps each client takes, `[C]`; a straggler manages a part of them, but at least one."""
        sizes = np.ceil(self.sizes(ids, "train") * effort.fraction).astype(np.int64)
        steps = steps_of(sizes, effort.batch, effort.epochs, effort.steps)
        if effort.pace is None:
            return steps
        return np.minimum(steps, np.maximum(np.ceil(steps * effort.pace), 1)).astype(np.int64)

    def batches(
        self, ids: IntArray, copies: int, effort: Effort, stream: int = 0, first_epoch: int = 0
    ) -> tuple[Packed, Tensor]:
        """The batches of `copies` models of each client from a pass on, and the keys of their noise `[C * copies]`."""
        sizes, starts = self.sizes(ids, "train"), self.starts(ids, "train")
        if effort.fraction < 1:
            kept = np.ceil(sizes * effort.fraction).astype(np.int64)
            offset = streams.key(effort.keys, "fraction").numpy() % np.maximum(sizes - kept + 1, 1)
            sizes, starts = kept, starts + offset
        copy = np.tile(np.arange(copies), len(ids)) if effort.distinct else 0
        slot = np.repeat(np.arange(len(ids)), copies)
        words = effort.keys[torch.from_numpy(slot)]
        keys = streams.key(words, stream, torch.from_numpy(np.broadcast_to(copy, slot.shape).copy()))
        packed = pack(
            starts[slot], sizes[slot], effort.batch, self.steps(ids, effort)[slot], keys, self.device, first_epoch
        )
        return packed, keys


COUNT = "count"
"""The number of steps that an optimizer has taken, among what it remembers."""


def remembered(optimizer: Optimizer | None, rows: Tensor, memory: Tensors | None) -> dict[str, Tensor]:
    """What an optimizer remembers of `rows [slots, D]`: each of its slots `[slots, D]` and the `count [slots]`."""
    if optimizer is None:
        return {}
    fresh = {**dict.fromkeys(optimizer.slots, rows), COUNT: rows[:, 0]}
    if not memory:
        return {name: torch.zeros_like(t) for name, t in fresh.items()}
    return {name: memory[name].reshape(t.shape) for name, t in fresh.items()}


def clipping(length: Tensor, most: float) -> Tensor:
    """The factor, at most 1, that brings gradients of this norm to a norm of at most `most`, as PyTorch's clipping."""
    return (most / (length + 1e-6)).clamp(max=1)


def scores(net: Net, outputs: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """Loss and, with classes, 1 for a right answer, of every sample `[B]`, as often as it counts; 0 for padding."""
    found = {"loss": net.task.scored(outputs, y) * weight}
    if net.task.classes:
        correct = right(outputs, y).to(weight.dtype)
        found["accuracy"] = (mean_over_tokens(correct, y) if per_token(y) else correct) * weight
    return found


@dataclass(frozen=True)
class Measuring:
    """The sums of one client's batch that `measure` adds up, those of some tallies among them."""

    tallies: tuple[Tally, ...] = ()

    def __call__(self, net: Net, row: Tensor, batch: Batch, given: Given) -> Tensors:
        outputs = net(row, batch.x)
        return {**summed(net, outputs, batch), **tallied(self.tallies, outputs, batch.y, batch.weight)}


def summed(net: Net, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
    """Loss and accuracy, summed over one client's batch."""
    return {name: value.sum() for name, value in scores(net, outputs, batch.y, batch.weight).items()}


def tallied_each(tallies: Iterable[Tally], outputs: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """The sums of every slot's batch: outputs and y `[slots, B, ...]`, weight `[slots, B]` -> `[slots, ...]`."""
    found: dict[str, Tensor] = {}
    for tally in tallies:
        if any(name.startswith(f"{tally.tally}.") for name in found):
            continue

        def one(o: Tensor, t: Tensor, w: Tensor, of: Tally = tally) -> dict[str, Tensor]:
            return tallied((of,), o, t, w)

        if _stacks(tally, tuple(outputs.shape[2:]), tuple(y.shape[2:]), y.dtype):
            found |= vmap(one)(outputs, y, weight)
        else:
            each = [one(*slot) for slot in zip(outputs, y, weight, strict=True)]
            found |= {name: torch.stack([sums[name] for sums in each]) for name in each[0]}
    return found


@cache
def _stacks(tally: Tally, outputs: tuple[int, ...], y: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether a tally can be summed for many slots at once; one that picks samples by a mask, say, cannot."""
    blank = torch.zeros(1, 2, *outputs), torch.zeros(1, 2, *y, dtype=dtype), torch.ones(1, 2)
    try:
        vmap(lambda o, t, w: tallied((tally,), o, t, w))(*blank)
    except Exception:
        return False
    return True


def named(out: Tensors | Tensor) -> Tensors:
    """What a `Sum` returned, by name."""
    return {"": out} if isinstance(out, Tensor) else out


def require_state(state: Tensors, new: Tensors) -> None:
    """An inner step returns the names it was given."""
    if set(new) != set(state):
        raise CoterieError(f"a step must return the state it was given, {sorted(state)}, not {sorted(new)}.")


def _placed(x: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    if device.type == "cpu":
        return x if x.dtype == dtype else memory.through(lambda block: block.to(dtype), x)
    if memory.is_mapped(x) and (needed := x.numel() * dtype.itemsize) > (free := memory.free(device)):
        raise CoterieError(f"the samples take {needed / 1e9:.1f} GB and {device} has {free / 1e9:.1f} GB free; use "
                           "device=cpu, where they are read from a file.")
    return x.to(device, dtype)
