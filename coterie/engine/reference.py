"""The reference engine: a loop over clients and models, a DataLoader, eager autograd, torch.optim.SGD.

It is what programs published with papers do, what benchmarks compare with, and the place to read what an engine
computes. It sees the same batches and draws the same noise as the stacked engine, so both give the same rows up to
rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from coterie import streams
from coterie.contract.engine import Correct, Effort, IntArray, Rate, Split, Step, Sum, Tensors, Until
from coterie.contract.layout import Entry
from coterie.contract.metric import Tally
from coterie.contract.net import Batch, Given, Net, Objective, answer, default_objective
from coterie.contract.optimizer import Optimizer
from coterie.data import Federation
from coterie.engine.arithmetic import Arithmetic
from coterie.engine.capture import identity
from coterie.engine.resident import COUNT, Feeding, Measuring, Resident, clipping, named, remembered, require_state

Samples = list[int]


class Reference(Resident):
    """One client after another, one of its models after another."""

    def __init__(
        self, net: Net, federation: Federation, device: torch.device, arithmetic: Arithmetic,
        feeding: Feeding | None = None,
    ) -> None:
        super().__init__(net, federation, device, arithmetic, feeding=feeding)
        net.stacked = False
        net.place(device, self.dtype)
        held = dict(net.module.named_parameters()) | dict(net.module.named_buffers())
        self.tensors = {entry.name: held[entry.name] for entry in self.layout.entries}
        for tensor in self.tensors.values():  # here the module holds the trained model, in the row's format
            tensor.data = tensor.data.to(self.dtype)
        self.dataset: Any = list(zip(self.x.cpu(), self.y.cpu(), strict=True))

    def measure(
        self, ids: IntArray, rows: Tensor, split: Split, tallies: Sequence[Tally] = ()
    ) -> dict[str, Tensor]:
        return self.total(ids, Measuring(tuple(tallies)), rows, {}, split)

    def total(self, ids: IntArray, fn: Sum, rows: Tensor, given: Tensors, split: Split) -> dict[str, Tensor]:
        identity(fn)  # refuses what the stacked engine refuses
        self.net.mode(training=False)
        found = []
        with self.computing(), torch.no_grad():
            for client, first in enumerate(self.starts(ids, split).tolist()):
                own = slice(first, first + int(self.sizes(ids, split)[client]))
                mine = Given(**_of(given, client))
                found += [self._sum(fn, row, own, mine) for row in rows[client].view(-1, self.layout.size)]
        sums = {name: torch.stack([one[name] for one in found]) for name in found[0]}
        return {name: value.view(*rows.shape[:-1], *value.shape[1:]) for name, value in sums.items()}

    def _sum(self, fn: Sum, row: Tensor, own: slice, given: Given) -> dict[str, Tensor]:
        """One model's sum over a stretch of samples, which are one client's."""
        sums: dict[str, Tensor] = {}
        for first in range(own.start, max(own.stop, own.start + 1), self.evaluation_batch):
            near = slice(first, min(first + self.evaluation_batch, own.stop)) if own.stop > own.start else slice(0, 1)
            batch = self._batch(self.x[near], self.y[near], near)
            with self.net.noise(batch.key):
                out = named(fn(self.net, row, batch, given))
            sums = {name: sums[name] + value if sums else value for name, value in out.items()}
        return sums if own.stop > own.start else {name: torch.zeros_like(value) for name, value in sums.items()}

    def train(
        self, ids: IntArray, rows: Tensor, given: Tensors, effort: Effort, lr: Rate, part: str = "all",
        correct: Correct | None = None, objective: Objective | None = None, clip: float | None = None,
        watch: bool = True, optimizer: Optimizer | None = None, memory: Tensors | None = None,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        identity(objective), identity(correct)
        copies = rows.shape[1] if rows.ndim == 3 else 1
        trained = [entry for entry in self.layout.within(part) if entry.trainable]
        out, losses = rows.reshape(-1, self.layout.size).clone(), rows.new_zeros(len(ids) * copies)
        kept = {name: t.clone() for name, t in remembered(optimizer, out, memory).items()}
        with self.computing(), torch.enable_grad():
            for slot, (visits,), noise, one_pass in self._slots(ids, copies, effort):
                mine, seen = _of(given, slot // copies), []
                rate = float(lr[slot // copies]) if isinstance(lr, Tensor) else lr
                plain = torch.optim.SGD(self._load(out[slot], trained), lr=rate)
                for number, (x, y) in enumerate(DataLoader(self.dataset, batch_sampler=visits)):
                    plain.zero_grad()
                    x, y = x.to(self.device), y.to(self.device)
                    loss = self._loss(x, y, visits[number], objective, mine, noise, number)
                    loss.backward()  # type: ignore[no-untyped-call]
                    if correct is not None or clip is not None:
                        self._correct(trained, correct, clip, mine)
                    if optimizer is None:
                        plain.step()
                    else:
                        self._step_by(optimizer, trained, _of(kept, slot), rate)
                    if watch:
                        seen.append((float(loss.detach()), len(y)))
                out[slot] = self.layout.row(self.net.module, self.dtype)
                if watch:
                    losses[slot] = sum(v * n for v, n in seen[-one_pass:]) / sum(n for _, n in seen[-one_pass:])
        new = {name: t.view(*rows.shape[:-1], *t.shape[1:]) for name, t in kept.items()}
        return out.view(rows.shape), losses.view(rows.shape[:-1]), new

    def _step_by(self, optimizer: Optimizer, trained: list[Entry], memory: Tensors, lr: float) -> None:
        """One step of an optimizer on the module's own tensors; `memory` is one model's, and moves."""
        count = float(memory[COUNT].add_(1))
        views = {name: self.layout.views(memory[name], trained) for name in optimizer.slots}
        for entry in trained:
            tensor, mine = self.tensors[entry.name], {name: of[entry.name] for name, of in views.items()}
            gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            with torch.no_grad():
                optimizer.step(tensor, gradient, mine, lr, count)

    def _loss(
        self, x: Tensor, y: Tensor, chosen: Samples, objective: Objective | None, given: Tensors, noise: Tensor,
        number: int,
    ) -> Tensor:
        """The objective of one batch; the task's loss as a published program computes it, where nothing is drawn."""
        self._mode(len(y))
        if objective is None and self.net.plain and self.augment is None:
            each = self.net.task.loss(answer(self.net.module(x)), y)
            return (each if self.worth is None else each * self.worth[chosen]).mean()
        batch = self._batch(x, y, chosen, streams.key(noise, number))
        with self.net.noise(batch.key):
            return (objective or default_objective)(self.net, self.tensors, batch, Given(**given))

    def _correct(self, trained: list[Entry], correct: Correct | None, clip: float | None, given: Tensors) -> None:
        """The method's hook on every gradient, then all of them scaled to a norm of at most `clip`."""
        for entry in trained:
            tensor = self.tensors[entry.name]
            tensor.grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            if correct is not None:
                near = {name: self.layout.views(t, [entry])[entry.name] if t.shape[-1:] == (self.layout.size,) else t
                        for name, t in given.items()}
                tensor.grad = correct(tensor.grad, tensor.detach(), Given(**near)).detach()
        if clip is not None:
            gradients = [gradient for entry in trained if (gradient := self.tensors[entry.name].grad) is not None]
            length = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
            for gradient in gradients:
                gradient.mul_(clipping(length, clip))

    def loop(
        self, ids: IntArray, step: Step, state: Tensors, given: Tensors, effort: Effort, lr: Rate,
        until: Until | None = None,
    ) -> tuple[dict[str, Tensor], IntArray]:
        identity(step)
        ends, taken = [_of(state, client) for client in range(len(ids))], np.zeros(len(ids), dtype=np.int64)
        rates = lr if isinstance(lr, Tensor) else torch.full((len(ids),), lr, dtype=self.dtype, device=self.device)
        with self.computing(), torch.no_grad():
            for client, visits, noise, one_pass in self._slots(ids, 1, effort):
                mine = Given(**_of(given, client), lr=rates[client])
                for number, chosen in enumerate(zip(*visits, strict=True)):  # one batch of each stream
                    ends[client] = self._step(step, ends[client], chosen, mine, noise, number)
                    taken[client] += 1
                    if until is not None and (number + 1) % one_pass == 0 and until(_alone(ends[client]))[0]:
                        break
        return {name: torch.stack([end[name] for end in ends]) for name in state}, taken

    def _step(
        self, step: Step, state: Tensors, chosen: Sequence[Samples], given: Given, noise: Tensor, number: int
    ) -> dict[str, Tensor]:
        """One inner step; stream 0 draws the noise that plain training would."""
        keys = [streams.key(noise, number, *([stream] if stream else [])) for stream in range(len(chosen))]
        batches = tuple(self._batch(self.x[one], self.y[one], one, key) for one, key in zip(chosen, keys, strict=True))
        now = {name: t.clone() for name, t in state.items()}  # running statistics move in it
        self._mode(len(chosen[0]))
        with self.net.noise(keys[0]):
            new = step(self.net, Given(**now), batches if len(batches) > 1 else batches[0], given)
        require_state(now, new)
        return {name: new[name].detach() for name in now}

    def _slots(
        self, ids: IntArray, copies: int, effort: Effort
    ) -> Iterator[tuple[int, list[list[Samples]], Tensor, int]]:
        """Model after model: its number, its batches by stream, the key of its noise, and the steps of one pass."""
        self.net.mode(training=True)
        of_streams = [self.batches(ids, copies, effort, stream) for stream in range(effort.streams)]
        packed, keys = of_streams[0]
        for place, slot in enumerate(packed.order.tolist()):
            padded = [one.batches(place).tolist() for one, _ in of_streams]
            visits = [[[sample for sample in batch if sample >= 0] for batch in one] for one in padded]
            yield slot, visits, keys[slot].to(self.device), int(packed.passes[place])

    def _load(self, row: Tensor, trained: list[Entry]) -> list[Tensor]:
        """Write a row into the module; the tensors of `trained`, which then ask for gradients."""
        for entry in self.layout.entries:
            self.tensors[entry.name].requires_grad_(entry in trained)
        self.layout.load(self.net.module, row)
        return [self.tensors[entry.name] for entry in trained]

    def _mode(self, samples: int) -> None:
        if self.net.batch_statistics:  # of a single sample they do not exist
            self.net.mode(training=True, single=samples == 1)

    def _batch(self, x: Tensor, y: Tensor, chosen: Samples | slice, key: Tensor | None = None) -> Batch:
        """The `chosen` samples; those of training have a key, and are augmented."""
        if key is not None and self.augment is not None:
            x = self.augment(x, key)
        none = torch.zeros((), dtype=torch.int64, device=self.device)
        once = torch.ones(len(x), dtype=self.dtype, device=self.device)
        weight = once if self.tokens is None else self.tokens[chosen]
        worth = None if self.worth is None else self.worth[chosen]
        return Batch(x, y, weight, none if key is None else key, worth)


def _of(tensors: Tensors, client: int) -> dict[str, Tensor]:
    """One client's slices."""
    return {name: t[client] for name, t in tensors.items()}


def _alone(state: Tensors) -> Given:
    """One client's state as that of a cohort of one."""
    return Given(**{name: t[None] for name, t in state.items()})
