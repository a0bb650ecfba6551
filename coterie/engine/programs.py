"""Programs: one kind of local step for a whole stack of slots, run over their batches directly or as CUDA graphs.

A slot is one model of one client. Slots are sorted by their number of steps, so that those still at work are always a
prefix of the stack.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from coterie import streams
from coterie.contract.engine import Correct, Rate, Step, Tensors
from coterie.contract.layout import Entry
from coterie.contract.net import Batch, Given, Objective, default_objective
from coterie.engine.capture import Pool, Steps
from coterie.engine.direct import Chain, Target
from coterie.engine.packing import Packed
from coterie.engine.resident import Resident, require_state
from coterie.engine.trial import threads

Short = tuple[int, int] | None
"""(step, samples) where one slot takes an incomplete batch at its true size; None for a step of the whole prefix."""


class Slots(Resident):
    """What programs need of an engine: batches of many slots, and functions of one client called for all of them."""

    pool: Pool | None = None  # the memory of captured steps; None where steps are not captured

    def gather(self, index: Tensor, samples: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """`[slots, B]` sample numbers -> x `[slots, B, ...]`, y `[slots, B, ...]`, weight `[slots, B]`."""
        real = torch.where(index < 0, ~index, index)
        flat = taken(self.inputs if samples is None else samples, real.flatten())
        x = flat.view(*real.shape, *flat.shape[1:])
        return x, self.y[real], (index >= 0).to(self.dtype)

    def each(
        self, fn: Callable[[Tensors, Any, Given], Tensors], state: Tensors, batches: tuple[Batch, ...], given: Tensors
    ) -> dict[str, Tensor]:
        """Call `fn(state, batch, given)` for every slot, stacked under vmap or one after another."""

        def one(s: Tensors, b: list[tuple[Tensor, ...]], g: Tensors) -> Tensors:
            mine = [Batch(*part) for part in b]
            with self.net.noise(mine[0].key):
                return fn(s, mine[0] if len(mine) == 1 else tuple(mine), Given(**g))

        packed = [tuple(batch) for batch in batches]
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
        engine.net.mode(training=True)
        with torch.no_grad():
            rate = lr if isinstance(lr, Tensor) else torch.full((), lr, dtype=engine.dtype, device=engine.device)
            if engine.pool is not None:
                self._load(state, given, packed, keys, rate, order, prefixes)
            else:
                self.state = {name: taken(t, order) for name, t in state.items()}
                self.given = {name: taken(t, order) for name, t in given.items()}
                self.index, self.keys = packed.index, keys.to(engine.device)[order]
                self.before = torch.from_numpy(packed.before).to(engine.device)
                self.lr = rate[order] if rate.ndim else rate
                self.losses = torch.zeros(packed.index.shape[:2], dtype=engine.dtype, device=engine.device)
                self.runner = Steps(self.step, len(order), self.counter, captured=False)
            self._go(packed, prefixes)
            back = torch.argsort(order)
            out = [taken(self.state[name][: len(order)], back) for name in state]
            return out, self._last_pass(packed)[back] if watch else self.losses.new_zeros(len(order))

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
            self.index = torch.zeros(self.steps, self.slots, packed.index.shape[2], dtype=torch.int64, device=device)
            self.keys = torch.zeros(self.slots, dtype=torch.int64, device=device)
            self.before = torch.zeros(self.slots, dtype=torch.int64, device=device)
            self.lr = torch.zeros((self.slots,) if lr.ndim else (), dtype=self.engine.dtype, device=device)
            self.losses = torch.zeros(self.steps, self.slots, dtype=self.engine.dtype, device=device)
            self.runner = Steps(self.step, self.slots, self.counter, captured=True)
        self.index.fill_(0)
        self.runner.prepare(prefixes, self.engine.pool)
        slots = len(order)
        self.index[:, slots:] = -1  # slots beyond this stack are all padding
        self.index[: len(packed.index), :slots].copy_(packed.index)
        for name, tensor in state.items():
            self.state[name][:slots].copy_(tensor[order])
        for name, tensor in given.items():
            self.given[name][:slots].copy_(tensor[order])
        self.keys[:slots].copy_(keys.to(device)[order])
        self.before[:slots].copy_(torch.from_numpy(packed.before))
        if lr.ndim:
            self.lr[:slots].copy_(lr[order])
        else:
            self.lr.copy_(lr)
        self.losses.zero_()

    def _go(self, packed: Packed, prefixes: list[int]) -> None:
        assert self.runner is not None
        if not self.engine.net.batch_statistics:
            self.runner.run(prefixes)
            return
        self.counter.zero_()
        for step, prefix in enumerate(prefixes):
            short = packed.short(step)
            if len(short) < prefix:
                self.runner.one(prefix)
            else:
                self.counter.add_(1)
            for position, samples in short:
                self.engine.net.mode(training=True, single=samples == 1)
                self._advance(slice(position, position + 1), self.index[step, position : position + 1], (step, samples))
            self.engine.net.mode(training=True)

    def _last_pass(self, packed: Packed) -> Tensor:
        steps, slots = packed.index.shape[:2]
        device = self.engine.device
        number = torch.arange(steps, device=device)[:, None]
        end = torch.from_numpy(packed.steps).to(device)
        start = end - torch.from_numpy(packed.passes).to(device)
        seen = (packed.index[:, :, : packed.batch] >= 0).sum(2) * ((number >= start) & (number < end))
        return (self.losses[:steps, :slots] * seen).sum(0) / seen.sum(0).clamp(min=1)

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
        return weight.sum(1) == weight.shape[1] if full else weight.sum(1) > 0


class Sgd(Program):
    """`row <- row - lr * correct(gradient of the objective)`, in place on the views of the trained tensors."""

    def __init__(
        self, engine: Slots, trained: list[Entry], objective: Objective, correct: Correct | None,
        clip: float | None = None,
    ) -> None:
        super().__init__(engine)
        self.trained = trained
        self.objective = objective
        self.correct = correct
        self.clip = clip

    def _advance(self, where: slice, index: Tensor, short: Short) -> None:
        engine, net = self.engine, self.engine.net
        x, y, weight = engine.gather(index if short is None else index[:, : short[1]])
        rows = self.state["row"][where]
        given = {name: t[where] for name, t in self.given.items()}
        tensors = engine.layout.views(rows)
        trainable, fixed = net.split(tensors, self.trained)
        moving = self._moving(weight, short)
        buffers = [e for e in engine.layout.entries if e.kind != "parameter"] if moving is not None else []
        before = {e.name: fixed[e.name].clone() for e in buffers}
        place = self._place(short)
        keys = self._noise(where, place)

        def one(s: Tensors, batch: Batch, g: Given) -> Tensors:
            mine = {n: s[n] for n in trainable}
            gradient, loss = net.grad_and_value(self.objective, mine, {n: s[n] for n in fixed}, batch, g)
            return {**gradient, "": loss}

        found = engine.each(one, {**trainable, **fixed}, (Batch(x, y, weight, keys),), given)
        loss = found.pop("")
        self.losses[:, where].index_copy_(0, place, loss.detach()[None].to(self.losses.dtype))
        self._move(trainable, found, given, self._rate(where, moving))
        for name, old in before.items():
            assert moving is not None
            fixed[name].copy_(torch.where(moving.view(-1, *(1,) * (old.ndim - 1)), fixed[name], old))

    def _move(self, trainable: Tensors, found: Tensors, given: Tensors, lr: Tensor) -> None:
        """`row <- row - lr * correct(gradient)`, clipped; `lr` is one number or one per slot `[slots]`."""
        gradients = [self._corrected(e, found[e.name], trainable[e.name], given) for e in self.trained]
        if self.clip is not None:
            squares = torch.stack([g.flatten(1).square().sum(1) if g.ndim > 1 else g.square() for g in gradients])
            lr = lr * (self.clip / squares.sum(0).sqrt().clamp(min=1e-12)).clamp(max=1)  # [slots]
        for entry, gradient in zip(self.trained, gradients, strict=True):
            scale = lr if lr.ndim == 0 else lr.view(-1, *(1,) * len(entry.shape))
            trainable[entry.name].addcmul_(gradient, scale, value=-1)

    def _corrected(self, entry: Entry, gradient: Tensor, value: Tensor, given: Tensors) -> Tensor:
        if self.correct is None:
            return gradient
        size, correct = self.engine.layout.size, self.correct
        cut = {
            n: self.engine.layout.views(t, [entry])[entry.name] if t.ndim > 1 and t.shape[-1] == size else t
            for n, t in given.items()
        }
        return vmap(lambda g, v, c: correct(g, v, Given(**c)))(gradient, value, cut)


class Direct(Sgd):
    """The same for the task's mean loss of a chain of layers, which knows its gradient (`direct`)."""

    BLOCK = 1 << 24  # bytes of samples gathered at once on a host
    SMALL = 3e7  # FLOP of a step below which a second thread costs more than it brings

    def __init__(
        self, engine: Slots, chain: Chain, samples: Tensor, trained: list[Entry], correct: Correct | None,
        clip: float | None,
    ) -> None:
        """`samples` are the engine's data as the chain takes them."""
        super().__init__(engine, trained, default_objective, correct, clip)
        self.chain, self.samples = chain, samples

    def _go(self, packed: Packed, prefixes: list[int]) -> None:
        if self.engine.pool is not None:
            super()._go(packed, prefixes)
            return
        engine = self.engine
        flop = 6.0 * engine.layout.size * packed.index[0].numel() if len(prefixes) else 0.0
        with threads(1 if flop < self.SMALL else torch.get_num_threads()):
            self._steps(packed, prefixes)

    def _steps(self, packed: Packed, prefixes: list[int]) -> None:
        """All steps from the host; the samples of many steps are gathered at once."""
        engine = self.engine
        one = self.index[:1, :, : packed.batch].numel() * engine.inputs[0].numel() * engine.inputs.element_size()
        block = max(1, self.BLOCK // max(one, 1))
        views, active = engine.layout.views(self.state["row"]), len(self.state["row"])
        # Batched products write into contiguous tensors; into views of rows they go model by model.
        whole = tensors = {name: t.contiguous() for name, t in views.items()}
        for first in range(0, len(prefixes), block):
            x, y, weight = engine.gather(self.index[first : first + block, : prefixes[first]], self.samples)
            target, plain = self.chain.target(y, weight), self.correct is None and self.clip is None
            slope = self.chain.scaled(target, -self._rate(slice(0, prefixes[first]))) if plain else target
            inputs, values, shares = x.unbind(), slope.value.unbind(), slope.share.unbind()
            outputs: Tensor | None = None
            for step, prefix in enumerate(prefixes[first : first + block]):
                near = slice(0, prefix)
                if prefix != active:
                    tensors, active = {name: t[near] for name, t in whole.items()}, prefix
                aim = Target(values[step][near], shares[step][near])
                out = self._descend(tensors, near, inputs[step][near], aim, None if plain else self._rate(near))
                if self.watched:
                    if outputs is None:
                        outputs = out.new_zeros(len(x), *out.shape)
                    outputs[step, near] = out
            if outputs is not None:
                self.losses[first : first + len(x), : prefixes[first]] = self.chain.loss(outputs, target)
        for entry in self.trained:
            views[entry.name].copy_(whole[entry.name])

    def _advance(self, where: slice, index: Tensor, short: Short) -> None:
        x, y, weight = self.engine.gather(index, self.samples)
        moving = self._moving(weight, short)
        lr = self._rate(where, moving)
        tensors = self.engine.layout.views(self.state["row"][where])
        target = self.chain.target(y, weight)
        loss = self.chain.loss(self._descend(tensors, where, x, target, lr), target)
        self.losses[:, where].index_copy_(0, self._place(short), loss[None].to(self.losses.dtype))

    def _descend(self, tensors: Tensors, where: slice, x: Tensor, target: Target, lr: Tensor | None) -> Tensor:
        """One step of the slots with these tensors; returns the outputs before it. Without `lr` it is in the target."""
        trainable = {entry.name: tensors[entry.name] for entry in self.trained}
        if self.correct is None and self.clip is None:
            return self.chain.descend(tensors, x, target, None if lr is None else -lr, trainable)
        assert lr is not None
        found = {name: torch.empty_like(t, memory_format=torch.contiguous_format) for name, t in trainable.items()}
        outputs = self.chain.descend(tensors, x, target, None, found, keep=False)
        self._move(trainable, found, {name: t[where] for name, t in self.given.items()}, lr)
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
            x, y, weight = engine.gather(index[:, first : first + (width if short is None else short[1])])
            # stream 0 draws the noise that plain training would
            keys = self._noise(where, place, stream) if stream else self._noise(where, place)
            batches.append(Batch(x, y, weight, keys))
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
