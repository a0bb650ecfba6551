"""Which samples each client sees at each step, laid out so that the active clients are always a prefix of the stack."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from coterie import streams
from coterie.contract.engine import IntArray

DENSE = 1 << 22
"""Numbers (8 bytes each) that one table of batches may hold before it is cut where half of its slots have ended."""
SCORING = 1 << 21
"""Numbers in the batches for scoring that are kept from one evaluation to the next."""
SHUFFLING = 1 << 23
"""Numbers in the layouts of training batches that are kept from one round to the next."""


@dataclass(frozen=True)
class Stretch:
    """Some steps of the slots that were at work when it began, the first ones of the stack.

    `index [steps, slots, B]` points into the flat data; padding is stored as `~sample` (negative), where `sample` is
    the slot's own first one, so that padded arithmetic stays finite whenever the slot's own does.
    """

    first: int  # the number of its first step
    index: Tensor

    def __len__(self) -> int:
        return len(self.index)


@dataclass(frozen=True)
class Packed:
    """The batches of a stack of slots, longest first, in stretches of steps: one table of all steps and slots would
    hold as many numbers for every client as for the largest one."""

    stretches: tuple[Stretch, ...]
    order: IntArray  # [slots]: position in the stack -> slot
    steps: IntArray  # [slots], in stack order, never increasing
    sizes: IntArray  # [slots], samples of one pass, in stack order
    passes: IntArray  # [slots], steps of one pass, in stack order
    before: IntArray  # [slots], steps that earlier passes took, in stack order
    batch: int  # B

    @property
    def numbers(self) -> int:
        """How many whole numbers it holds."""
        return sum(stretch.index.numel() for stretch in self.stretches) + 5 * len(self.order)

    @property
    def length(self) -> int:
        """Steps of the slot that has most."""
        return int(self.steps.max(initial=0))

    def active(self) -> list[int]:
        """For each step, how many slots still train; they are the first ones."""
        active: list[int] = _active(self.steps).tolist()
        return active

    def batches(self, position: int) -> Tensor:
        """The batches of the slot at a position of the stack, `[its steps, B]`."""
        steps = int(self.steps[position])
        found = [s.index[: steps - s.first, position] for s in self.stretches if s.first < steps]
        return torch.cat(found) if found else torch.zeros(0, self.batch, dtype=torch.int64)

    def cut(self, most: int) -> Iterator[Stretch]:
        """The stretches, none of more than `most` steps."""
        for stretch in self.stretches:
            for first in range(0, len(stretch), most):
                yield Stretch(stretch.first + first, stretch.index[first : first + most])

    def beside(self, others: Sequence[Packed]) -> Packed:
        """This one with the batches of others of the same clients and steps behind its own, `[steps, slots, k B]`."""
        together = zip(*(packed.stretches for packed in (self, *others)), strict=True)
        joined = (Stretch(same[0].first, torch.cat([s.index for s in same], dim=2)) for same in together)
        return replace(self, stretches=tuple(joined)) if others else self

    def through(self, place: Tensor) -> Packed:
        """With `place[sample]` in the place of every sample."""
        def moved(index: Tensor) -> Tensor:
            return torch.where(index < 0, ~place[torch.where(index < 0, ~index, 0)], place[index.clamp(min=0)])

        return replace(self, stretches=tuple(Stretch(s.first, moved(s.index)) for s in self.stretches))

    def short(self, step: int) -> list[tuple[int, int]]:
        """(position, samples) of the slots whose batch at this step is not full."""
        position = step % np.maximum(self.passes, 1)
        left = self.sizes - position * self.batch
        found = np.flatnonzero((self.steps > step) & (left < self.batch))
        return [(int(p), int(left[p])) for p in found]


def _active(steps: IntArray) -> IntArray:
    """`[slots]`, never increasing, -> `[steps of the first]`: how many slots have not ended at each step."""
    found: IntArray = np.searchsorted(-steps, -np.arange(int(steps.max(initial=0))))
    return found


def _stretches(steps: IntArray, width: int) -> list[tuple[int, int, int]]:
    """(first step, end, slots at work) of each stretch: all steps where a table of them is small, otherwise a new one
    where half of a stretch's slots have ended, so that less than half of any table is padding of slots that ended."""
    active = _active(steps)
    if len(active) * len(steps) * width <= DENSE:
        return [(0, len(active), len(steps))] if len(active) else []
    found, first = [], 0
    while first < len(active):
        end = int(np.searchsorted(-active, -(active[first] // 2), side="left"))
        end = end if active[first] > 1 else len(active)
        found.append((first, end, int(active[first])))
        first = end
    return found


def steps_of(sizes: IntArray, batch: int, epochs: int, steps: int | None) -> IntArray:
    """Steps that E epochs take, incomplete batches kept: E * ceil(n / B); `steps` overrides it, 0 is the full batch."""
    per_pass = np.maximum(-(-sizes // batch), 1) if batch else np.ones_like(sizes)
    return per_pass * epochs if steps is None else np.full_like(sizes, steps)


def pack(
    starts: IntArray, sizes: IntArray, batch: int, steps: IntArray, keys: Tensor | None, device: torch.device,
    first_epoch: int = 0,
) -> Packed:
    """Lay out `steps [slots]` batches of at most `batch` samples from `[start, start + size)` of each slot.

    Every pass over a slot's samples is shuffled by sorting a hash of (key, pass, sample number); without keys, or
    with full batches (`batch` 0), samples keep their order.
    """
    of = (starts.tobytes(), sizes.tobytes(), steps.tobytes(), batch, first_epoch, device)
    frame = _FRAMES.get(of, lambda: _frame(starts, sizes, steps, batch, first_epoch, device))
    sample = frame.number
    if keys is not None and batch:
        of_segment = streams.key(keys.to(device)[frame.slot], frame.epoch)
        bits = streams.key(of_segment[frame.segment], sample) & ((1 << 40) - 1)
        sample = sample[torch.sort(frame.segment << 40 | bits, stable=True).indices]
    table = frame.blank.clone()
    table[frame.cell] = frame.start + sample
    stretches, begin = [], 0
    for first, end, slots in frame.stretches:
        stop = begin + (end - first) * slots * frame.width
        stretches.append(Stretch(first, table[begin:stop].view(end - first, slots, frame.width)))
        begin = stop
    return Packed(
        tuple(stretches), frame.order, frame.steps, frame.sizes, frame.passes, first_epoch * frame.passes, frame.width
    )


class Countable(Protocol):
    """Something that says how many numbers it holds."""

    @property
    def numbers(self) -> int: ...


S = TypeVar("S", bound=Countable)


class Recent(Generic[S]):
    """What was used last, as much of it as `most` numbers hold, and what is larger than that not at all."""

    def __init__(self, most: int) -> None:
        self.most, self.numbers = most, 0
        self._found: dict[Hashable, S] = {}  # those used last come last

    def get(self, key: Hashable, make: Callable[[], S]) -> S:
        found = self._found.pop(key, None)
        if found is None:
            found = make()
            self.numbers += found.numbers
        self._found[key] = found
        while self.numbers > self.most:
            self.numbers -= self._found.pop(next(iter(self._found))).numbers
        return found

    def __len__(self) -> int:
        return len(self._found)


@dataclass(frozen=True)
class _Frame:
    """What does not depend on the shuffle; `[samples]` tensors have an entry for each sample of each pass."""

    order: IntArray
    steps: IntArray
    sizes: IntArray
    passes: IntArray
    width: int
    slot: Tensor  # [segments], a segment being one pass of one slot
    epoch: Tensor  # [segments]
    segment: Tensor  # [samples]
    number: Tensor  # [samples], within its segment
    start: Tensor  # [samples], the first sample of its slot
    cell: Tensor  # [samples], its place in the table
    blank: Tensor  # the tables of all stretches with padding everywhere, and a spare cell behind them
    stretches: list[tuple[int, int, int]]

    @property
    def numbers(self) -> int:
        """How many whole numbers it holds."""
        return self.blank.numel() + 4 * self.number.numel() + 2 * self.slot.numel() + 4 * len(self.order)


_FRAMES: Recent[_Frame] = Recent(SHUFFLING)


def _frame(
    starts: IntArray, sizes: IntArray, steps: IntArray, batch: int, first_epoch: int, device: torch.device
) -> _Frame:
    width = batch or max(int(sizes.max(initial=1)), 1)
    order = np.argsort(-steps, kind="stable")
    starts, sizes, steps = starts[order], sizes[order], steps[order]
    passes = np.maximum(-(-sizes // width), 1)
    epochs = -(-steps // passes)
    stretches = _stretches(steps, width)

    slot = np.repeat(np.arange(len(order)), epochs)
    epoch = np.arange(len(slot)) - np.repeat(np.cumsum(epochs) - epochs, epochs)
    length = sizes[slot]
    first = np.cumsum(length) - length
    count = int(length.sum())

    def put(values: IntArray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    # Everything the device needs is sent at once: on a GPU, many small copies would cost more than the packing.
    sent = put(np.stack([first, epoch * passes[slot], steps[slot], slot, starts[slot], length, order[slot],
                         epoch + first_epoch]))
    segment = torch.repeat_interleave(torch.arange(len(slot), device=device), sent[5], output_size=count)
    begin, past, last, position, start = sent[:5, segment].unbind()
    number = torch.arange(count, device=device) - begin
    step = past + number // width
    padded = ~put(starts)[None, :, None]
    padding = torch.cat([padded[:, :n].expand(end - one, n, width).reshape(-1) for one, end, n in stretches]
                        or [padded.new_zeros(0)])
    rows = np.concatenate([np.full(end - one, n) for one, end, n in stretches] or [steps[:0]])  # of each step
    row = put(np.append(np.cumsum(rows) - rows, 0))[step.clamp(max=len(rows))]
    flat = (row + position) * width + number % width
    # A sample beyond a slot's last step is written to a spare cell behind the table instead of being filtered out:
    # a boolean filter would make the host wait for the device.
    cell = torch.where(step < last, flat, padding.numel())
    blank = torch.cat([padding, padding.new_zeros(1)])
    return _Frame(
        order, steps, sizes, passes, width, sent[6], sent[7], segment, number, start.contiguous(), cell, blank,
        stretches,
    )
