"""The stacked engine: all clients of a cohort are computed together, as one batched computation on one device.

Rows come as `[C, D]` or `[C, K, D]`; each (client, model) pair is one slot of the stack. What one step of the slots
does is a program (`programs`); the primitives here choose and feed them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from coterie import memory
from coterie.contract.engine import Correct, Effort, IntArray, Rate, Split, Step, Sum, Tensors, Until
from coterie.contract.metric import Tally
from coterie.contract.net import Batch, Given, Net, Objective, default_objective
from coterie.contract.optimizer import Optimizer
from coterie.data import Federation
from coterie.engine.arithmetic import Arithmetic
from coterie.engine.buckets import by_length, lengths
from coterie.engine.capture import Pool, identity
from coterie.engine.direct import Chain
from coterie.engine.packing import SCORING, Packed, Recent, pack
from coterie.engine.prefix import Prefix
from coterie.engine.programs import Custom, Descent, Direct, Program, Rule, Slots
from coterie.engine.resident import Feeding, named, remembered, scores, summed, tallied_each


class Stacked(Slots):
    """Data on the device, the net, and the primitives of an engine. A net that is not `stacked` runs slot by slot."""

    def __init__(
        self, net: Net, federation: Federation, device: torch.device, arithmetic: Arithmetic,
        chain: Chain | None = None, capture: bool = True, feeding: Feeding | None = None,
        prefix: Prefix | None = None,
    ) -> None:
        super().__init__(net, federation, device, arithmetic, feeding=feeding, prefix=prefix)
        self.chain = chain
        self.lengths = lengths(net.whole, self.x, self.y) if prefix is None else None  # [samples] of texts
        self._chained: Tensor | None = None
        if prefix is None:
            self._ready()
        self._programs: dict[Hashable, Program] = {}
        self._kept: Recent[Packed] = Recent(SCORING)  # batches of whole splits
        # Steps become CUDA graphs; a module that cannot be stacked may ask the host, which a graph cannot.
        self.pool = Pool() if capture and device.type == "cuda" and net.stacked else None
        if device.type == "cpu":
            memory.keep_freed()

    def _ready(self) -> Tensor:
        """The samples as the chain takes them, or else as the net does; computed now, not while steps are captured."""
        if self._chained is None:
            inputs = self.inputs
            self._chained = memory.through(self.chain.samples, inputs) if self.chain is not None else inputs
        return self._chained

    # -- the primitives ---------------------------------------------------------------------------------------------

    def train(
        self, ids: IntArray, rows: Tensor, given: Tensors, effort: Effort, lr: Rate, part: str = "all",
        correct: Correct | None = None, objective: Objective | None = None, clip: float | None = None,
        watch: bool = True, optimizer: Optimizer | None = None, memory: Tensors | None = None,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Local training from `rows [C, (K,) D]`: trained rows, mean loss of the last pass `[C, (K)]`, memory."""
        copies = rows.shape[1] if rows.ndim == 3 else 1
        trained = [entry for entry in self.layout.within(part) if entry.trainable]
        packed, keys = self.batches(ids, copies, effort)
        functions = identity(objective), identity(correct)
        kind = (*functions, clip, part, optimizer, memory is None)
        key = ("train", self.net.ground.moved, *kind, copies, packed.batch, _signature(given), isinstance(lr, Tensor))

        rule = Rule(optimizer, correct, clip, memory is not None)

        def build() -> Program:
            if self.chain is not None and objective is None:
                return Direct(self, self.chain, self._ready(), trained, rule)
            return Descent(self, trained, objective or default_objective, rule)

        program = self._program(key, build, packed)
        slots = rows.reshape(len(ids) * copies, -1)
        state = {"row": slots, **remembered(optimizer, slots, memory)}
        rate = lr.repeat_interleave(copies) if isinstance(lr, Tensor) else lr
        with self.computing():
            (out, *kept), losses = program.run(state, _repeat(given, copies), packed, keys, rate, watch)
        names = [name for name in state if name != "row"]
        new = {name: t.view(*rows.shape[:-1], *t.shape[1:]) for name, t in zip(names, kept, strict=True)}
        return out.view(rows.shape), losses.view(rows.shape[:-1]), new

    def loop(
        self, ids: IntArray, step: Step, state: Tensors, given: Tensors, effort: Effort, lr: Rate,
        until: Until | None = None,
    ) -> tuple[dict[str, Tensor], IntArray]:
        """`state <- step(net, state, batch, given)` on every batch: the state `[C, ...]` and the steps taken `[C]`."""
        if until is not None:
            return self._passes(ids, step, state, given, effort, lr, until)
        return self._loop(ids, step, state, given, effort, lr), self.steps(ids, effort)

    def _loop(
        self, ids: IntArray, step: Step, state: Tensors, given: Tensors, effort: Effort, lr: Rate, first_epoch: int = 0
    ) -> dict[str, Tensor]:
        streams = [self.batches(ids, 1, effort, stream, first_epoch) for stream in range(effort.streams)]
        keys = streams[0][1]
        packed = streams[0][0].beside([other for other, _ in streams[1:]])
        shapes = _signature(given), _signature(state), isinstance(lr, Tensor)
        key = ("loop", self.net.ground.moved, identity(step), effort.streams, packed.batch, *shapes)
        program = self._program(key, lambda: Custom(self, step, effort.streams), packed)
        with self.computing():
            out, _ = program.run(dict(state), given, packed, keys, lr)
        return dict(zip(state, out, strict=True))

    def total(self, ids: IntArray, fn: Sum, rows: Tensor, given: Tensors, split: Split) -> dict[str, Tensor]:
        """The sum over a split of `fn(net, row, batch, given)`, a tensor or a dictionary of such, `[C, (K,) ...]`."""
        identity(fn)

        def sums(row: Tensor, index: Tensor, cut: Tensors, longest: int | None) -> Tensors:
            none = torch.zeros(len(index), dtype=torch.int64, device=self.device)
            batch = self.batch(index, none, training=False, longest=longest)
            return self.each(lambda s, b, g: named(fn(self.net, s["row"], b, g)), {"row": row}, (batch,), cut)

        return self._summed(ids, sums, rows, given, split)

    def measure(
        self, ids: IntArray, rows: Tensor, split: Split, tallies: Sequence[Tally] = ()
    ) -> dict[str, Tensor]:
        """Sums over a split of the task's `loss` and, with classes, of right answers, `accuracy`; each `[C, (K)]`.

        Beside them the sums of `tallies`, float64, by `tally.sum`, `[C, (K,) ...]`.
        """
        answered = self._answered if self.chain is None else self._answered_by_chain

        def sums(row: Tensor, index: Tensor, cut: Tensors, longest: int | None) -> Tensors:
            found, outputs, y, weight = answered(row, index, longest)
            return {**found, **tallied_each(tallies, outputs, y, weight)}

        return self._summed(ids, sums, rows, {}, split)

    def _answered(
        self, row: Tensor, index: Tensor, longest: int | None
    ) -> tuple[Tensors, Tensor, Tensor, Tensor]:
        """Loss and accuracy, summed, outputs, y and weight of one batch of each slot."""
        none = torch.zeros(len(index), dtype=torch.int64, device=self.device)
        batch = self.batch(index, none, training=False, longest=longest)

        def one(state: Tensors, mine: Batch, given: Given) -> Tensors:
            outputs = self.net(state["row"], mine.x)
            return {**summed(self.net, outputs, mine), "outputs": outputs}

        found = self.each(one, {"row": row}, (batch,), {})
        return found, found.pop("outputs"), batch.y, batch.weight

    def _answered_by_chain(
        self, row: Tensor, index: Tensor, longest: int | None
    ) -> tuple[Tensors, Tensor, Tensor, Tensor]:
        """The same where the module is a chain of layers."""
        assert self.chain is not None
        x, y, weight = self.gather(index, self._ready())
        outputs = self.chain.outputs(self.layout.views(row), x)
        found = scores(self.net, outputs.flatten(0, 1), y.flatten(0, 1), weight.flatten())
        return {name: value.view(weight.shape).sum(1) for name, value in found.items()}, outputs, y, weight

    def _summed(
        self, ids: IntArray, sum_of: Callable[[Tensor, Tensor, Tensors, int | None], Tensors], rows: Tensor,
        given: Tensors, split: Split,
    ) -> dict[str, Tensor]:
        """`sum_of(rows, index, given, longest)` of one batch of each slot, added up over a split."""
        copies = rows.shape[1] if rows.ndim == 3 else 1
        packed = self._whole(ids, copies, split)
        flat, passed = rows.reshape(len(ids) * copies, -1).contiguous(), _repeat(given, copies)
        sorted_already = bool((packed.order[1:] > packed.order[:-1]).all())  # as when a batch holds everybody's split
        order = torch.from_numpy(packed.order).to(self.device)
        if not sorted_already:
            flat, passed = flat[order], {name: t[order] for name, t in passed.items()}
        self.net.mode(training=False)
        sums: dict[str, Tensor] = {}
        # Where nobody has a sample, one that does not count tells the shapes of the sums, which are then 0.
        steps = [index for stretch in packed.stretches for index in stretch.index]
        longest = self._longest_texts(steps) or [None] * max(len(steps), 1)
        index = steps or [torch.full((len(flat), 1), -1, device=self.device)]
        with self.computing(), torch.no_grad():
            for here, active, most in zip(index, packed.active() or [len(flat)], longest, strict=True):
                out = sum_of(flat[:active], here[:active], {n: t[:active] for n, t in passed.items()}, most)
                for name, value in out.items():
                    if name not in sums:
                        sums[name] = value.new_zeros(len(flat), *value.shape[1:])
                    if steps:
                        sums[name][:active] += value
        if not sorted_already:
            back = torch.argsort(order)
            sums = {name: value[back] for name, value in sums.items()}
        return {name: value.view(*rows.shape[:-1], *value.shape[1:]) for name, value in sums.items()}

    def _whole(self, ids: IntArray, copies: int, split: Split) -> Packed:
        """Batches of a whole split; those used last are kept."""

        def batches() -> Packed:
            slot = np.repeat(np.arange(len(ids)), copies)
            sizes, starts = self.sizes(ids, split)[slot], self.starts(ids, split)[slot]
            batch = min(self.evaluation_batch, max(int(sizes.max(initial=1)), 1))
            packed = pack(starts, sizes, batch, -(-sizes // batch), None, self.device)
            if self.lengths is None:
                return packed
            everyone = np.arange(len(self.bounds))
            places = by_length(self.lengths, self.starts(everyone, split), self.sizes(everyone, split))
            return packed.through(places)

        return self._kept.get((split, copies, ids.tobytes()), batches)

    def _longest_texts(self, steps: Sequence[Tensor]) -> Sequence[int | None]:
        """How many tokens the longest text of each step's batches has; nothing where texts are not to be cut."""
        if self.lengths is None or not steps:
            return []
        found = [self.lengths[torch.where(index < 0, ~index, index)].amax() for index in steps]
        most: list[int | None] = torch.stack(found).tolist()
        return most

    def _program(self, key: Hashable, build: Callable[[], Program], packed: Packed) -> Program:
        """The program for a key; rebuilt, and recaptured on CUDA, when the stack outgrows it."""
        self._ready()
        steps, slots = packed.length, len(packed.order)
        found = self._programs.get(key)
        if found is None or slots > found.slots or min(steps, found.room(packed)) > found.steps:
            found = build()
            if self.pool is not None:
                found.slots = slots
                found.steps = min(max(steps, self._longest(packed.batch, steps)), found.room(packed))
            self._programs[key] = found
        return found

    def _longest(self, batch: int, steps: int) -> int:
        """Room for the largest client of the federation, so that partial participation does not recapture."""
        sizes = self.bounds[:, 1] - self.bounds[:, 0]
        per_pass = -(-int(sizes.max()) // max(batch, 1))
        return max(steps, per_pass * -(-steps // max(per_pass, 1)))

    def _passes(
        self, ids: IntArray, step: Step, state: Tensors, given: Tensors, effort: Effort, lr: Rate,
        until: Until,
    ) -> tuple[dict[str, Tensor], IntArray]:
        """`loop`, a pass at a time, of those that are not done."""
        current = {name: t.clone() for name, t in state.items()}
        one_pass = replace(effort, epochs=1, steps=None, pace=None)
        per_pass, limit, taken = self.steps(ids, one_pass), self.steps(ids, effort), np.zeros_like(ids)
        left, epoch = np.flatnonzero(limit > 0), 0
        while len(left):
            now = np.minimum(limit[left] - taken[left], per_pass[left])
            share = (now - 0.5) / per_pass[left]  # of a pass; rounded up it is `now` steps again
            one = replace(one_pass, keys=effort.keys[torch.from_numpy(left)], pace=share)
            index = torch.from_numpy(left).to(self.device)
            part = {name: t[index] for name, t in current.items()}
            rate = lr[index] if isinstance(lr, Tensor) else lr
            part = self._loop(ids[left], step, part, {n: t[index] for n, t in given.items()}, one, rate, epoch)
            for name, value in part.items():
                current[name][index] = value
            taken[left] += now
            left = left[~until(Given(**part)).cpu().numpy() & (taken[left] < limit[left])]
            epoch += 1
        return current, taken


def _signature(tensors: Tensors) -> Hashable:
    return tuple((name, tuple(t.shape[1:]), t.dtype) for name, t in tensors.items())


def _repeat(given: Tensors, copies: int) -> dict[str, Tensor]:
    return {name: t.repeat_interleave(copies, 0) if copies > 1 else t for name, t in given.items()}
