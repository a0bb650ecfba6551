"""Which samples each client sees at each step, laid out so that the active clients are always a prefix of the stack."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from coterie import streams
from coterie.contract.engine import IntArray


@dataclass(frozen=True)
class Packed:
    """The batches of a stack of slots, longest first.

    `index [steps, slots, B]` points into the flat data; padding is stored as `~sample` (negative), where `sample` is
    the slot's own first one, so that padded arithmetic stays finite whenever the slot's own does.
    """

    index: Tensor
    order: IntArray  # [slots]: position in the stack -> slot
    steps: IntArray  # [slots], in stack order, never increasing
    sizes: IntArray  # [slots], samples of one pass, in stack order
    passes: IntArray  # [slots], steps of one pass, in stack order
    before: IntArray  # [slots], steps that earlier passes took, in stack order
    batch: int  # B

    @property
    def numbers(self) -> int:
        """How many whole numbers it holds."""
        return self.index.numel() + 5 * len(self.order)

    def active(self) -> list[int]:
        """For each step, how many slots still train; they are the first ones."""
        active: list[int] = np.searchsorted(-self.steps, -np.arange(len(self.index))).tolist()
        return active

    def short(self, step: int) -> list[tuple[int, int]]:
        """(position, samples) of the slots whose batch at this step is not full."""
        position = step % np.maximum(self.passes, 1)
        left = self.sizes - position * self.batch
        found = np.flatnonzero((self.steps > step) & (left < self.batch))
        return [(int(p), int(left[p])) for p in found]


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
    frame = _frame(starts.tobytes(), sizes.tobytes(), steps.tobytes(), batch, first_epoch, device)
    sample = frame.number
    if keys is not None and batch:
        of_segment = streams.key(keys.to(device)[frame.slot], frame.epoch)
        bits = streams.key(of_segment[frame.segment], sample) & ((1 << 40) - 1)
        sample = sample[torch.sort(frame.segment << 40 | bits, stable=True).indices]
    table = frame.blank.clone()
    table[frame.cell] = frame.start + sample
    index = table[:-1].view(-1, len(frame.order), frame.width)
    return Packed(
        index, frame.order, frame.steps, frame.sizes, frame.passes, first_epoch * frame.passes, frame.width
    )


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
    blank: Tensor  # the table with padding everywhere, and a spare cell behind it


@lru_cache(maxsize=8)
def _frame(
    starts_of: bytes, sizes_of: bytes, steps_of: bytes, batch: int, first_epoch: int, device: torch.device
) -> _Frame:
    starts, sizes, steps = (np.frombuffer(b, dtype=np.int64) for b in (starts_of, sizes_of, steps_of))
    width = batch or max(int(sizes.max(initial=1)), 1)
    order = np.argsort(-steps, kind="stable")
    starts, sizes, steps = starts[order], sizes[order], steps[order]
    passes = np.maximum(-(-sizes // width), 1)
    epochs = -(-steps // passes)
    total_steps = int(steps.max(initial=0))

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
    padding = ~put(starts)[None, :, None].expand(total_steps, len(order), width).reshape(-1)
    flat = (step * len(order) + position) * width + number % width
    # A sample beyond a slot's last step is written to a spare cell behind the table instead of being filtered out:
    # a boolean filter would make the host wait for the device.
    cell = torch.where(step < last, flat, padding.numel())
    blank = torch.cat([padding, padding.new_zeros(1)])
    return _Frame(
        order, steps, sizes, passes, width, sent[6], sent[7], segment, number, start.contiguous(), cell, blank
    )
