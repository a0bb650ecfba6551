"""Programs: one kind of local step for a whole stack of slots, run over their batches directly or as CUDA graphs.

A slot is one model of one client. Slots are sorted by their number of steps, so that those still at work are always a
prefix of the stack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.func import vmap

from coterie import streams
from coterie.contract.engine import Correct, Rate, Step, Tensors
from coterie.contract.layout import Entry
from coterie.contract.net import Batch, Given, Objective, default_objective
from coterie.contract.optimizer import Number, Optimizer
from coterie.engine.capture import Pool, Steps
from coterie.engine.direct import Chain, Target
from coterie.engine.packing import Packed, Stretch
from coterie.engine.resident import COUNT, Resident, clipping, require_state
from coterie.engine.trial import threads

N = TypeVar("N", Tensor, float, Number)
Short = tuple[int, int] | None
"""(step, samples) where one slot takes an incomplete batch at its true size; None for a step of the whole prefix."""


class Slots(Resident):
    """What programs need of an engine: batches of many slots, and functions of one client called for all of them."""

    pool: Pool | None = None  # the memory of captured steps; None where steps are not captured

    def gather(
        self, index: Tensor, samples: Tensor | None = None, longest: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`[slots, B]` sample numbers -> x `[slots, B, ...]`, y `[slots, B, ...]`, weight `[slots, B]`; of texts the
        `longest` first tokens."""
        real = torch.where(index < 0, ~index, index)
        flat = taken(self.inputs if samples is None else samples, real.flatten())
        x = flat.view(*real.shape, *flat.shape[1:])
        y, weight = self.y[real], (index >= 0).to(self.dtype)
        if self.tokens is not None:
            weight = weight * self.tokens[real]
        if longest is not None:
            x, y = x[..., :longest], y if self.tokens is None else y[..., :longest]
        return x, y, weight

    def worth_of(self, index: Tensor) -> Tensor | None:
        """How many times each sample counts, `[..., B]`; None where each counts once."""
        return None if self.worth is None else self.worth[torch.where(index < 0, ~index, index)]

    def batch(self, index: Tensor, keys: Tensor, training: bool = True, longest: int | None = None) -> Batch:
        """The batches of sample numbers `[slots, B]` with the keys `[slots]` of their noise, augmented in training."""
        x, y, weight = self.gather(index, longest=longest)
        if training and self.augment is not None:
            x = self.augment(x, keys)
        return Batch(x, y, weight, keys, self.worth_of(index))

    def each(
        self, fn: Callable[[Tensors, Any, Given], Tensors], state: Tensors, batches: tuple[Batch, ...], given: Tensors
    ) -> dict[str, Tensor]:
        """Call `fn(state, batch, given)` for every slot, stacked under vmap or one after another."""

        def one(s: Tensors, b: list[tuple[Tensor, ...]], g: Tensors) -> Tensors:
            mine = [Batch(*part) for part in b]
            with self.net.noise(mine[0].key):
                return fn(s, mine[0] if len(mine) == 1 else tuple(mine), Given(**g))

        packed = [tuple(part for part in batch if part is not None) for batch in batches]
        if self.net.stacked:
            return dict(vmap(one)(dict(state), packed, dict(given)))
        found = [
            one(
                {n: t[p] for n, t in state.items()}, [tuple(t[p] for t in batch) for batch in packed],
                {n: t[p] for n, t in given.items()},
            )
            for p in range(len(packed[0][0]))
        ]
        return {name: torch.stack([f[name] for f in found]) for name in found[0]}


def taken(t: Tensor, index: Tensor) -> Tensor:
    """`t[index]` for an index `[n]`, as a copy; on a host `index_select` copies whole rows and is many times faster."""
    return t.index_select(0, index) if t.device.type == "cpu" else t[index]


class Program:
    """One kind of step with its static tensors: loaded, run over packed batches, read back."""

    slots = 1 << 62  # a program without captured graphs takes any size
    steps = 1 << 62
    TABLE = 1 << 24  # sample numbers that captured graphs find in one place; longer trainings load them by stretches

    def __init__(self, engine: Slots) -> None:
        self.engine = engine
        self.state: dict[str, Tensor] = {}
        self.given: dict[str, Tensor] = {}
        self.index = torch.empty(0)
        self.keys = torch.empty(0)
        self.before = torch.empty(0)
        self.lr = torch.empty(0)
        self.losses = torch.empty(0)
        self.counter = torch.zeros(1, dtype=torch.int64, device=engine.device)
        self.runner: Steps | None = None
        self.watched = False

    def run(
        self, state: dict[str, Tensor], given: Tensors, packed: Packed, keys: Tensor, lr: Rate, watch: bool = False
    ) -> tuple[list[Tensor], Tensor]:
        """From `state [slots, ...]` through all batches: the final state, and the slots' mean loss of the last pass, 0
        where nobody watches it."""
        self.watched = watch
        engine = self.engine
        order = torch.from_numpy(packed.order).to(engine.device)
        prefixes = packed.active()
        engine.net.mode(training=True, single=packed.batch == 1)
        with torch.no_grad():
            rate = lr if isinstance(lr, Tensor) else torch.full((), lr, dtype=engine.dtype, device=engine.device)
            if engine.pool is not None:
                self._load(state, given, packed, keys, rate, order, prefixes)
            else:
                self.state = {name: taken(t, order) for name, t in state.items()}
                self.given = {name: taken(t, order) for name, t in given.items()}
                self.keys = keys.to(engine.device)[order]
                self.lr = rate[order] if rate.ndim else rate
                self.runner = Steps(self.step, len(order), self.counter, captured=False)
            loss, seen = torch.zeros(2, len(order), dtype=engine.dtype, device=engine.device)
            for stretch in packed.cut(self.steps):
                self._enter(stretch, packed)
                self._go(packed, stretch, prefixes[stretch.first : stretch.first + len(stretch)])
                if watch:
                    self._last_pass(packed, stretch, loss, seen)
            back = torch.argsort(order)
            out = [taken(self.state[name][: len(order)], back) for name in state]
            return out, (loss / seen.clamp(min=1))[back]

    def room(self, packed: Packed) -> int:
        """Steps that a table of captured graphs may have."""
        width = packed.stretches[0].index.shape[2] if packed.stretches else packed.batch
        return max(1, self.TABLE // (min(self.slots, 1 << 31) * width)) if self.engine.pool is not None else 1 << 62

    def _enter(self, stretch: Stretch, packed: Packed) -> None:
        """Lay out a stretch of steps; its first one is where the counter is 0."""
        device = self.engine.device
        steps, slots = stretch.index.shape[:2]
        before = torch.from_numpy(packed.before + stretch.first)
        if self.engine.pool is None:
            self.index, self.before = stretch.index, before.to(device)
            self.losses = torch.zeros(steps, slots, dtype=self.engine.dtype, device=device)
            return
        self.index[:, slots:] = -1  # slots beyond this stack are all padding
        ended = packed.stretches[0].index[0, slots:, :1]  # of the stack, at work before this stretch
        self.index[:, slots : slots + len(ended)] = torch.where(ended < 0, ended, ~ended)
        self.index[:steps, :slots].copy_(stretch.index)
        self.before[: len(before)].copy_(before)
        self.losses.zero_()

    def _load(
        self, state: Tensors, given: Tensors, packed: Packed, keys: Tensor, lr: Tensor, order: Tensor,
        prefixes: list[int],
    ) -> None:
        """Fill the static tensors that captured graphs read and write; made and captured on first use."""
        device = self.engine.device
        if self.runner is None:
            self.state = {
                n: torch.zeros(self.slots, *t.shape[1:], dtype=t.dtype, device=device) for n, t in state.items()
            }
            self.given = {
                n: torch.zeros(self.slots, *t.shape[1:], dtype=t.dtype, device=device) for n, t in given.items()
            }
            width = packed.stretches[0].index.shape[2]
            self.index = torch.zeros(self.steps, self.slots, width, dtype=torch.int64, device=device)
            self.keys = torch.zeros(self.slots, dtype=torch.int64, device=device)
            self.before = torch.zeros(self.slots, dtype=torch.int64, device=device)
            self.lr = torch.zeros((self.slots,) if lr.ndim else (), dtype=self.engine.dtype, device=device)
            self.losses = torch.zeros(self.steps, self.slots, dtype=self.engine.dtype, device=device)
            self.runner = Steps(self.step, self.slots, self.counter, captured=True)
        self.index.fill_(0)
        self.runner.prepare(prefixes, self.engine.pool)
        slots = len(order)
        for name, tensor in state.items():
            self.state[name][:slots].copy_(tensor[order])
        for name, tensor in given.items():
            self.given[name][:slots].copy_(tensor[order])
        self.keys[:slots].copy_(keys.to(device)[order])
        if lr.ndim:
            self.lr[:slots].copy_(lr[order])
        else:
            self.lr.copy_(lr)

    def _go(self, packed: Packed, stretch: Stretch, prefixes: list[int]) -> None:
        assert self.runner is not None
        if not self.engine.net.batch_statistics:
            self.runner.run(prefixes)
            return
        self.counter.zero_()
        for step, prefix in enumerate(prefixes):
            short = packed.short(stretch.first + step)
            if len(short) < prefix:
                self.runner.one(prefix)
            else:
                self.counter.add_(1)
            for position, samples in short:
                self.engine.net.mode(training=True, single=samples == 1)
                self._advance(slice(position, position + 1), self.index[step, position : position + 1], (step, samples))
            self.engine.net.mode(training=True, single=packed.batch == 1)

    def _last_pass(self, packed: Packed, stretch: Stretch, loss: Tensor, seen: Tensor) -> None:
        """Add the losses of the last pass's samples in a stretch to `loss [slots]`, and their number to `seen`."""
        steps, slots = stretch.index.shape[:2]
        device = self.engine.device
        number = torch.arange(stretch.first, stretch.first + steps, device=device)[:, None]
        end = torch.from_numpy(packed.steps[:slots]).to(device)
        start = end - torch.from_numpy(packed.passes[:slots]).to(device)
        counted = (stretch.index[:, :, : packed.batch] >= 0).sum(2) * ((number >= start) & (number < end))
        loss[:slots] += (self.losses[:steps, :slots] * counted).sum(0)
        seen[:slots] += counted.sum(0)

    def step(self, prefix: int) -> None:
        """One step of the first `prefix` slots, at the place the counter says."""
        index = self.index.index_select(0, self.counter)[0, :prefix]
        self._advance(slice(0, prefix), index, None)
        self.counter.add_(1)

    def _advance(self, where: slice, index: Tensor, short: Short) -> None:
        raise NotImplementedError

    def _place(self, short: Short) -> Tensor:
        return self.counter if short is None else torch.full_like(self.counter, short[0])

    def _noise(self, where: slice, place: Tensor, *stream: int) -> Tensor:
        """The keys of this step's noise `[slots]`."""
        return streams.key(self.keys[where], self.before[where] + place, *stream)

    def _rate(self, where: slice, moving: Tensor | None = None) -> Tensor:
        """The learning rate, 0 for slots that do not move: a 0-d tensor, or `[slots]` where they differ."""
        lr = self.lr[where] if self.lr.ndim else self.lr
        return lr if moving is None else lr * moving.to(lr.dtype)

    def _moving(self, weight: Tensor, short: Short) -> Tensor | None:
        """Which slots take part in this step `[slots]`; None where the prefix is exact, so all do."""
        full = self.engine.net.batch_statistics and short is None
        if not full and not self.counter.is_cuda:
            return None
        return (weight > 0).all(1) if full else (weight > 0).any(1)


@dataclass(frozen=True)
class Rule:
    """What becomes of a gradient: the method's hook, then the clip, then the optimizer's step, or a plain one."""

    optimizer: Optimizer | None = None
    correct: Correct | None = None
    clip: float | None = None
    keep: bool = False  # whether the optimizer's memory is read afterwards

    @property
    def plain(self) -> bool:
        """Whether a step is `row - lr * gradient` with the gradient as it is."""
        return self.optimizer is None and self.correct is None and self.clip is None

    @property
    def slots(self) -> tuple[str, ...]:
        return () if self.optimizer is None else self.optimizer.slots

    @property
    def running(self) -> tuple[str, float] | None:
        """The memory that gradients can be added to where they are computed, and the share of it that stays."""
        touched = self.correct is not None or self.clip is not None
        return None if self.optimizer is None or touched else self.optimizer.running

    def step(self, row: Tensor, gradient: Tensor, memory: Tensors, lr: Number, count: Number) -> None:
        """Move `row`, and the memory, along a gradient that was corrected and clipped."""
        if self.optimizer is None:
            _along(row, gradient, lr)
        elif row.is_cuda:
            _compiled(self.optimizer)(row, gradient, memory, lr, count)
        else:
            self.optimizer.step(row, gradient, memory, lr, count)


@cache
def _compiled(optimizer: Optimizer) -> Callable[..., None]:
    """An optimizer's step as one kernel: what it reads and writes then passes through memory once.

    Where Triton, which makes such kernels, is not installed, it is the step as it is.
    """
    return torch.compile(optimizer.step, dynamic=True) if find_spec("triton") else optimizer.step


class Descent(Program):
    """One local step along the gradient of an objective, in place on the views of the trained tensors; see `Rule`."""

    def __init__(self, engine: Slots, trained: list[Entry], objective: Objective, rule: Rule) -> None:
        super().__init__(engine)
        self.trained, self.objective, self.rule = trained, objective, rule

    def _advance(self, where: slice, index: Tensor, short: Short) -> None:
        engine, net = self.engine, self.engine.net
        place = self._place(short)
        batch = engine.batch(index if short is None else index[:, : short[1]], self._noise(where, place))
        rows = self.state["row"][where]
        given = {name: t[where] for name, t in self.given.items()}
        tensors = engine.layout.views(rows)
        trainable, fixed = net.split(tensors, self.trained)
        moving = self._moving(batch.weight, short)
        buffers = [e for e in engine.layout.entries if e.kind != "parameter"] if moving is not None else []
        before = {e.name: fixed[e.name].clone() for e in buffers}

        def one(s: Tensors, b: Batch, g: Given) -> Tensors:
            mine = {n: s[n] for n in trainable}
            gradient, loss = net.grad_and_value(self.objective, mine, {n: s[n] for n in fixed}, b, g)
            return {**gradient, "": loss}

        found = engine.each(one, {**trainable, **fixed}, (batch,), given)
        loss = found.pop("")
        self.losses[:, where].index_copy_(0, place, loss.detach()[None].to(self.losses.dtype))
        self._move(trainable, found, where, moving)
        for name, old in before.items():
            assert moving is not None
            fixed[name].copy_(torch.where(_wide(moving, old), fixed[name], old))

    def _move(self, trainable: Tensors, found: Tensors, where: slice, moving: Tensor | None) -> None:
        """One step of the slots along their gradients, by the rule.

        In a stack of which only some are moving, what the optimizer remembers of the others stays as it is.
        """
        found, lr = self._directions(trainable, found, where), self._rate(where, moving)
        rows, mine = self.state["row"][where], {name: self.state[name][where] for name in self.rule.slots}
        guarded = moving if self.rule.keep or self.engine.net.batch_statistics else None
        before = {name: t.clone() for name, t in mine.items()} if guarded is not None else {}
        count = lr
        if COUNT in self.state:  # a slot that has not begun is stepped, at a rate of 0, as if by its first step
            count = self.state[COUNT][where].add_(1 if moving is None else moving).clamp(min=1)
        for columns, gradient in self._stretches(found):
            memory = {name: t[:, columns] for name, t in mine.items()}
            self.rule.step(rows[:, columns], gradient, memory, _wide(lr, rows), _wide(count, rows))
        for name, old in before.items():
            assert guarded is not None
            mine[name].copy_(torch.where(guarded[:, None], mine[name], old))

    def _stretches(self, found: Tensors) -> Iterator[tuple[slice, Tensor]]:
        """Stretches of trained columns and their gradients `[slots, columns]`; few, as each takes a call."""
        for columns in self._columns():
            inside = [found[entry.name] for entry in self.trained if columns.start <= entry.start < columns.stop]
            yield columns, torch.cat([gradient.reshape(len(gradient), -1) for gradient in inside], 1)

    def _columns(self) -> list[slice]:
        """The columns of the trained tensors, in as few stretches as they make."""
        edges = [(entry.start, entry.stop) for entry in self.trained]
        starts = [start for start, _ in edges if start not in {stop for _, stop in edges}]
        stops = [stop for _, stop in edges if stop not in {start for start, _ in edges}]
        return [slice(start, stop) for start, stop in zip(starts, stops, strict=True)]

    def _directions(self, trainable: Tensors, found: Tensors, where: slice) -> Tensors:
        """The gradients after the method's hook, each slot's scaled to a norm of at most `clip`."""
        if self.rule.correct is not None:
            given = {name: t[where] for name, t in self.given.items()}
            found = {e.name: self._corrected(e, found[e.name], trainable[e.name], given) for e in self.trained}
        if self.rule.clip is None:
            return found
        squares = torch.stack([g.flatten(1).square().sum(1) if g.ndim > 1 else g.square() for g in found.values()])
        scale = clipping(squares.sum(0).sqrt(), self.rule.clip)  # [slots]
        return {name: g * _wide(scale, g) for name, g in found.items()}

    def _corrected(self, entry: Entry, gradient: Tensor, value: Tensor, given: Tensors) -> Tensor:
        assert self.rule.correct is not None
        size, correct = self.engine.layout.size, self.rule.correct
        cut = {
            n: self.engine.layout.views(t, [entry])[entry.name] if t.ndim > 1 and t.shape[-1] == size else t
            for n, t in given.items()
        }
        return vmap(lambda g, v, c: correct(g, v, Given(**c)))(gradient, value, cut)


def _wide(each: N, like: Tensor) -> N:
    """One number a slot `[slots]` so that it broadcasts over `like [slots, ...]`; a single number as it is."""
    if not isinstance(each, Tensor) or each.ndim == 0:
        return each
    return each.view(-1, *(1,) * (like.ndim - 1))


def _along(row: Tensor, direction: Tensor, lr: Number) -> None:
    """`row <- row - lr * direction`."""
    if isinstance(lr, Tensor):
        row.addcmul_(direction, _wide(lr, row), value=-1)
    else:
        row.add_(direction, alpha=-lr)


class Direct(Descent):
    """The same for the task's mean loss of a chain of layers, which knows its gradient (`direct`)."""

    BLOCK = 1 << 24  # bytes of samples gathered at once on a host
    SMALL = 3e7  # FLOP of a step below which a second thread costs more than it brings

    def __init__(self, engine: Slots, chain: Chain, samples: Tensor, trained: list[Entry], rule: Rule) -> None:
        """`samples` are the engine's data as the chain takes them."""
        super().__init__(engine, trained, default_objective, rule)
        self.chain, self.samples = chain, samples
        self.gradient = torch.empty(0)  # [slots, D], of the step at work on a GPU

    def _go(self, packed: Packed, stretch: Stretch, prefixes: list[int]) -> None:
        if self.engine.pool is not None:
            super()._go(packed, stretch, prefixes)
            return
        flop = 6.0 * self.engine.layout.size * stretch.index[0].numel()
        with threads(1 if flop < self.SMALL else torch.get_num_threads()):
            self._steps(packed, stretch, prefixes)

    def _steps(self, packed: Packed, stretch: Stretch, prefixes: list[int]) -> None:
        """All steps of a stretch from the host; the samples of many steps are gathered at once."""
        engine = self.engine
        one = self.index[:1, :, : packed.batch].numel() * engine.inputs[0].numel() * engine.inputs.element_size()
        block = max(1, self.BLOCK // max(one, 1))
        stack = _Stack(self, stretch.first)
        for first in range(0, len(prefixes), block):
            index = self.index[first : first + block, : prefixes[first]]
            number = torch.arange(first, first + len(index), device=engine.device)[:, None]
            x, target = self._aimed(index, slice(0, prefixes[first]), number)
            slope = self.chain.scaled(target, -self._rate(slice(0, prefixes[first]))) if self.rule.plain else target
            inputs, values, shares = x.unbind(), slope.value.unbind(), slope.share.unbind()
            outputs: Tensor | None = None
            for step, prefix in enumerate(prefixes[first : first + block]):
                near = slice(0, prefix)
                stack.cut(prefix)
                out = stack.descend(inputs[step][near], Target(values[step][near], shares[step][near]))
                if self.watched:
                    if outputs is None:
                        outputs = out.new_zeros(len(x), *out.shape)
                    outputs[step, near] = out
            if outputs is not None:
                self.losses[first : first + len(x), : prefixes[first]] = self.chain.loss(outputs, target)
        stack.end()

    def _advance(self, where: slice, index: Tensor, short: Short) -> None:
        place = self._place(short)
        x, target = self._aimed(index, where, place)
        moving = self._moving((index >= 0).to(self.engine.dtype), short)
        rows = self.state["row"][where]
        tensors = self.engine.layout.views(rows)
        trainable = {entry.name: tensors[entry.name] for entry in self.trained}
        if self.rule.plain:
            outputs = self.chain.descend(tensors, x, target, -self._rate(where, moving), trainable)
        elif self.rule.running is not None and not self.rule.keep:
            slot, share = self.rule.running
            velocity = self.state[slot][where]
            into = self.engine.layout.views(velocity, self.trained)
            outputs, lr = self.chain.descend(tensors, x, target, None, into, share), self._rate(where, moving)
            for columns in self._columns():
                _along(rows[:, columns], velocity[:, columns], lr)
        else:
            self.gradient = torch.empty_like(rows)
            found = self.engine.layout.views(self.gradient, self.trained)
            outputs = self.chain.descend(tensors, x, target, None, found, 0.0)
            self._move(trainable, found, where, moving)
        loss = self.chain.loss(outputs, target)
        self.losses[:, where].index_copy_(0, place, loss[None].to(self.losses.dtype))

    def _aimed(self, index: Tensor, where: slice, place: Tensor) -> tuple[Tensor, Target]:
        """Samples `[..., slots, B]` of the steps `place` as the chain takes them, and what their outputs should be."""
        engine, augment = self.engine, self.engine.augment
        x, y, weight = engine.gather(index, self.samples if augment is None else None)
        if augment is not None:
            x = augment(x, self._noise(where, place))
            arranged = self.chain.samples(x.flatten(0, index.ndim - 1))
            x = arranged.view(*index.shape, *arranged.shape[1:])
        return x, self.chain.target(y, weight, engine.worth_of(index))

    def _stretches(self, found: Tensors) -> Iterator[tuple[slice, Tensor]]:
        if self.rule.correct is not None or self.rule.clip is not None:
            yield from super()._stretches(found)
        else:  # as they were computed, side by side
            yield from ((columns, self.gradient[:, columns]) for columns in self._columns())


class _Stack:
    """The tensors of a direct program between its steps on a host, and one step of the first of its models.

    Batched products write into contiguous tensors; into views of rows they go model by model. So everything that a
    step touches is `[models, *shape]` here, and the models still at work are a slice of it.
    """

    def __init__(self, program: Direct, first: int) -> None:
        self.program, self.rule, self.steps, self.first = program, program.rule, 0, first
        layout, self.active = program.engine.layout, len(program.state["row"])
        self.views = {name: layout.views(program.state[name], program.trained) for name in ("row", *self.rule.slots)}
        held = {name: {n: t.contiguous() for n, t in views.items()} for name, views in self.views.items()}
        self.fixed = {n: t.contiguous() for n, t in layout.views(program.state["row"]).items() if n not in held["row"]}
        if not self.rule.plain and self.rule.running is None:
            held["gradient"] = {name: torch.empty_like(t) for name, t in held["row"].items()}
        self.whole = self.held = held
        # One number for all models makes steps cheaper: they have begun together, and with one learning rate.
        alike = program.lr.ndim == 0 and not self.rule.keep
        self.lr: Number | None = float(program.lr) if alike and self.rule.optimizer is not None else None
        self._narrow()

    def _narrow(self) -> None:
        self.tensors = {**{name: t[: self.active] for name, t in self.fixed.items()}, **self.held["row"]}

    def cut(self, models: int) -> None:
        """Go on with the first so many."""
        if models != self.active:
            self._counted(slice(models, self.active))
            self.active = models
            self.held = {kind: {name: t[:models] for name, t in of.items()} for kind, of in self.whole.items()}
            self._narrow()

    def end(self) -> None:
        """What was computed is in the program."""
        self._counted(slice(0, self.active))
        for kind, views in self.views.items():
            for name, view in views.items():
                view.copy_(self.whole[kind][name])

    def _counted(self, where: slice) -> None:
        if COUNT in self.program.state:
            self.program.state[COUNT][where] += self.steps

    def descend(self, x: Tensor, target: Target) -> Tensor:
        """One step; the outputs before it. Of plain steps the learning rate is in the target."""
        chain, rule, rows, near = self.program.chain, self.rule, self.held["row"], slice(0, self.active)
        self.steps += 1
        if rule.plain:
            return chain.descend(self.tensors, x, target, None, rows)
        lr = self.program._rate(near) if self.lr is None else self.lr
        if rule.running is not None:
            slot, share = rule.running
            outputs = chain.descend(self.tensors, x, target, None, self.held[slot], share)
            for name, row in rows.items():
                _along(row, self.held[slot][name], lr)
            return outputs
        outputs = chain.descend(self.tensors, x, target, None, self.held["gradient"], 0.0)
        found = self.program._directions(rows, self.held["gradient"], near)
        count: Number = self.first + self.steps
        if self.lr is None and COUNT in self.program.state:
            count = self.program.state[COUNT][near] + self.steps
        for name, row in rows.items():
            memory = {slot: self.held[slot][name] for slot in rule.slots}
            rule.step(row, found[name], memory, _wide(lr, row), _wide(count, row))
        return outputs


class Custom(Program):
    """`state <- step(net, state, batch, given)`; `given.lr` is the learning rate, a 0-d tensor."""

    def __init__(self, engine: Slots, inner: Step, count: int) -> None:
        super().__init__(engine)
        self.inner = inner
        self.count = count

    def _advance(self, where: slice, index: Tensor, short: Short) -> None:
        engine = self.engine
        place = self._place(short)
        width = index.shape[1] // self.count
        batches = []
        for stream in range(self.count):
            first = stream * width
            # stream 0 draws the noise that plain training would
            keys = self._noise(where, place, stream) if stream else self._noise(where, place)
            batches.append(engine.batch(index[:, first : first + (width if short is None else short[1])], keys))
        state = {name: t[where] for name, t in self.state.items()}
        lr = self._rate(where).expand(len(index))
        given = {name: t[where] for name, t in self.given.items()} | {"lr": lr}
        moving = self._moving(batches[0].weight, short)
        in_place = moving is not None and engine.net.batch_statistics  # running statistics move in the state itself
        before = {name: t.clone() for name, t in state.items()} if in_place else state
        new = engine.each(lambda s, b, g: self.inner(engine.net, Given(**s), b, g), state, tuple(batches), given)
        require_state(state, new)
        held = {t.untyped_storage().data_ptr() for t in state.values()}
        for name, old in before.items():
            if moving is not None:
                new[name] = torch.where(moving.view(-1, *(1,) * (old.ndim - 1)), new[name], old)
            elif new[name].untyped_storage().data_ptr() in held:  # e.g. the old row, handed on under another name
                new[name] = new[name].clone()
        for name, t in state.items():
            t.copy_(new[name])
