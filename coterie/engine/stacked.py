"""The stacked engine: all clients of a cohort are trained together as one batched computation on one device.

Three primitives carry every method: `train` (local SGD), `loop` (a method's own inner step) and `total` (sums over a
split). Rows come as `[C, D]` or `[C, K, D]`; each (client, model) pair is one slot of the stack.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from coterie import memory, streams
from coterie.contract.layout import Entry, Layout
from coterie.contract.net import Batch, Given, Net, Objective, default_objective
from coterie.data import Federation
from coterie.engine.capture import Pool, Steps, identity
from coterie.engine.direct import Chain, Target
from coterie.engine.packing import IntArray, Plan, pack, steps_of
from coterie.engine.trial import threads
from coterie.errors import CoterieError

Correct = Callable[[Tensor, Tensor, Given], Tensor]
"""Element-wise hook `(gradient, row, given) -> gradient`, called tensor by tensor; rows in `given` are cut alike."""

Step = Callable[[Net, Given, Any, Given], Mapping[str, Tensor]]
Sum = Callable[[Net, Tensor, Batch, Given], Any]
Split = Literal["train", "val", "test"]
Tensors = Mapping[str, Tensor]
Rate = float | Tensor
"""A learning rate: one for all, or one a client `[C]`."""
Short = tuple[int, int] | None
"""(step, samples) where one slot takes an incomplete batch at its true size; None for a step of the whole prefix."""


PLANS_KEPT = 1 << 21
"""Sample numbers (8 bytes each) in the plans for scoring that are kept from one evaluation to the next."""


@dataclass(frozen=True)
class Work:
    """How much local work: epochs or steps of which batch size, from which stream of randomness."""

    batch: int
    epochs: int
    steps: int | None
    keys: Tensor  # [C] int64, on the host
    work: np.ndarray[Any, np.dtype[np.float64]] | None = None  # [C] fraction of the steps a straggler manages
    distinct: bool = False
    fraction: float = 1.0
    streams: int = 1
    first_epoch: int = 0


class Stacked:
    """Data on the device, the net, and the three primitives. A net that is not `stacked` runs slot by slot."""

    def __init__(
        self, net: Net, federation: Federation, device: torch.device, dtype: torch.dtype, evaluation_batch: int = 512,
        chain: Chain | None = None, capture: bool = True,
    ) -> None:
        self.net = net
        self.chain = chain
        self.capture = capture
        self.layout: Layout = net.layout
        self.device = device
        self.dtype = dtype
        self.evaluation_batch = evaluation_batch
        floating = federation.x.is_floating_point()
        # Samples in a file stay there, in their precision; on a GPU all of them have to fit.
        self.x = _placed(federation.x, device, dtype if floating else federation.x.dtype)
        self.y = federation.y.to(device, dtype if federation.y.is_floating_point() else None)
        self.bounds = federation.bounds
        self.samples = memory.through(chain.samples, self.x) if chain is not None else self.x
        self._programs: dict[Hashable, _Program] = {}
        self._plans: dict[Hashable, Plan] = {}  # the one used last comes last
        self._plans_hold = 0
        self._pool = Pool() if device.type == "cuda" else None
        if device.type == "cpu":
            memory.keep_freed()

    @property
    def captures(self) -> bool:
        """Whether steps become CUDA graphs; a module that cannot be stacked may ask the host, which a graph cannot."""
        return self.capture and self.device.type == "cuda" and self.net.stacked

    def sizes(self, ids: IntArray, split: Split) -> IntArray:
        first = ("train", "val", "test").index(split)
        found: IntArray = self.bounds[ids, first + 1] - self.bounds[ids, first]
        return found

    def starts(self, ids: IntArray, split: Split) -> IntArray:
        found: IntArray = self.bounds[ids, ("train", "val", "test").index(split)]
        return found

    def steps(self, ids: IntArray, work: Work) -> IntArray:
        """Local steps each client takes, `[C]`; a straggler manages a part of them, but at least one."""
        sizes = np.ceil(self.sizes(ids, "train") * work.fraction).astype(np.int64)
        steps = steps_of(sizes, work.batch, work.epochs, work.steps)
        if work.work is None:
            return steps
        return np.minimum(steps, np.maximum(np.ceil(steps * work.work), 1)).astype(np.int64)

    # -- the three primitives --------------------------------------------------------------------------------------

    def train(
        self, ids: IntArray, rows: Tensor, given: Tensors, work: Work, lr: Rate, part: str = "all",
        correct: Correct | None = None, objective: Objective | None = None, clip: float | None = None,
        watch: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Local SGD from `rows [C, (K,) D]`; returns trained rows and the mean loss of the last pass `[C, (K)]`."""
        copies = rows.shape[1] if rows.ndim == 3 else 1
        trained = [entry for entry in self.layout.within(part) if entry.trainable]
        plan, keys = self._batches(ids, copies, work)
        each = isinstance(lr, Tensor)
        key = ("train", identity(objective), identity(correct), clip, part, copies, plan.batch, _signature(given), each)

        def build() -> _Program:
            if self.chain is not None and objective is None:
                return _Direct(self, self.chain, trained, correct, clip)
            return _Sgd(self, trained, objective or default_objective, correct, clip)

        program = self._program(key, build, plan)
        slots = rows.reshape(len(ids) * copies, -1)
        rate = lr.repeat_interleave(copies) if isinstance(lr, Tensor) else lr
        (out,), losses = program.run({"row": slots}, _repeat(given, copies), plan, keys, rate, watch)
        return out.view(rows.shape), losses.view(rows.shape[:-1])

    def loop(
        self, ids: IntArray, step: Step, state: Tensors, given: Tensors, work: Work, lr: Rate,
        until: Callable[[Given], Tensor] | None = None,
    ) -> tuple[dict[str, Tensor], IntArray]:
        """`state <- step(net, state, batch, given)` on every batch: the state `[C, ...]` and the steps taken `[C]`."""
        if until is not None:
            return self._passes(ids, step, state, given, work, lr, until)
        plans = [self._batches(ids, 1, work, stream) for stream in range(work.streams)]
        plan, keys = plans[0]
        index = torch.cat([p.index for p, _ in plans], dim=2) if len(plans) > 1 else plan.index
        plan = replace(plan, index=index)
        each = isinstance(lr, Tensor)
        key = ("loop", identity(step), work.streams, plan.batch, _signature(given), _signature(state), each)
        program = self._program(key, lambda: _Custom(self, step, work.streams), plan)
        out, _ = program.run(dict(state), given, plan, keys, lr)
        return dict(zip(state, out, strict=True)), self.steps(ids, work)

    def total(self, ids: IntArray, fn: Sum, rows: Tensor, given: Tensors, split: Split) -> dict[str, Tensor]:
        """The sum over a split of `fn(net, row, batch, given)`, a tensor or a dictionary of such, `[C, (K,) ...]`."""
        identity(fn)

        def sums(row: Tensor, index: Tensor, cut: Tensors) -> Tensors:
            x, y, weight = self.gather(index)
            keys = torch.zeros(len(index), dtype=torch.int64, device=self.device)
            batch = Batch(x, y, weight, keys)
            return self.each(lambda s, b, g: _named(fn(self.net, s["row"], b, g)), {"row": row}, (batch,), cut)

        return self._summed(ids, sums, rows, given, split)

    def measure(self, ids: IntArray, rows: Tensor, split: Split) -> dict[str, Tensor]:
        """Sums over a split of the task's `loss` and, with classes, of right answers, `accuracy`; each `[C, (K)]`."""
        chain = self.chain
        if chain is None:
            return self.total(ids, _measure, rows, {}, split)

        def sums(row: Tensor, index: Tensor, cut: Tensors) -> Tensors:
            x, y, weight = self.gather(index, self.samples)
            outputs = chain.outputs(self.layout.views(row), x).flatten(0, 1)
            found = _scores(self.net, outputs, y.flatten(0, 1), weight.flatten())
            return {name: value.view(weight.shape).sum(1) for name, value in found.items()}

        return self._summed(ids, sums, rows, {}, split)

    def _summed(
        self, ids: IntArray, sum_of: Callable[[Tensor, Tensor, Tensors], Tensors], rows: Tensor, given: Tensors,
        split: Split,
    ) -> dict[str, Tensor]:
        """`sum_of(rows, index, given)` of one batch of each slot, added up over a split."""
        copies = rows.shape[1] if rows.ndim == 3 else 1
        plan = self._split_plan(ids, copies, split)
        flat, passed = rows.reshape(len(ids) * copies, -1).contiguous(), _repeat(given, copies)
        sorted_already = bool((plan.order[1:] > plan.order[:-1]).all())  # as when a batch holds everybody's split
        order = torch.from_numpy(plan.order).to(self.device)
        if not sorted_already:
            flat, passed = flat[order], {name: t[order] for name, t in passed.items()}
        self.net.mode(training=False)
        sums: dict[str, Tensor] = {}
        # Where nobody has a sample, one that does not count tells the shapes of the sums, which are then 0.
        index = plan.index if len(plan.index) else torch.full((1, len(flat), 1), -1, device=self.device)
        with torch.no_grad():
            for step, active in enumerate(plan.active() or [len(flat)]):
                out = sum_of(flat[:active], index[step, :active], {n: t[:active] for n, t in passed.items()})
                for name, value in out.items():
                    if name not in sums:
                        sums[name] = value.new_zeros(len(flat), *value.shape[1:])
                    if len(plan.index):
                        sums[name][:active] += value
        if not sorted_already:
            back = torch.argsort(order)
            sums = {name: value[back] for name, value in sums.items()}
        return {name: value.view(*rows.shape[:-1], *value.shape[1:]) for name, value in sums.items()}

    # -- shared machinery ------------------------------------------------------------------------------------------

    def gather(self, index: Tensor, samples: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """`[slots, B]` sample numbers -> x `[slots, B, ...]`, y `[slots, B, ...]`, weight `[slots, B]`."""
        real = torch.where(index < 0, ~index, index)
        taken = _taken(self.x if samples is None else samples, real.flatten())
        x = taken.view(*real.shape, *taken.shape[1:])
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

    def _batches(self, ids: IntArray, copies: int, work: Work, stream: int = 0) -> tuple[Plan, Tensor]:
        sizes, starts = self.sizes(ids, "train"), self.starts(ids, "train")
        if work.fraction < 1:
            kept = np.ceil(sizes * work.fraction).astype(np.int64)
            offset = streams.key(work.keys, "fraction").numpy() % np.maximum(sizes - kept + 1, 1)
            sizes, starts = kept, starts + offset
        copy = np.tile(np.arange(copies), len(ids)) if work.distinct else 0
        slot = np.repeat(np.arange(len(ids)), copies)
        words = work.keys[torch.from_numpy(slot)]
        keys = streams.key(words, stream, torch.from_numpy(np.broadcast_to(copy, slot.shape).copy()))
        plan = pack(
            starts[slot], sizes[slot], work.batch, self.steps(ids, work)[slot], keys, self.device, work.first_epoch
        )
        return plan, keys

    def _split_plan(self, ids: IntArray, copies: int, split: Split) -> Plan:
        """Batches of a whole split; the plans used last are kept, as many as PLANS_KEPT numbers hold."""
        key = (split, copies, ids.tobytes())
        plan = self._plans.pop(key, None)
        if plan is None:
            slot = np.repeat(np.arange(len(ids)), copies)
            sizes, starts = self.sizes(ids, split)[slot], self.starts(ids, split)[slot]
            batch = min(self.evaluation_batch, max(int(sizes.max(initial=1)), 1))
            plan = pack(starts, sizes, batch, -(-sizes // batch), None, self.device)
            self._plans_hold += plan.numbers
            while self._plans and self._plans_hold > PLANS_KEPT:
                oldest = self._plans.pop(next(iter(self._plans)))
                self._plans_hold -= oldest.numbers
        self._plans[key] = plan
        return plan

    def _program(self, key: Hashable, build: Callable[[], _Program], plan: Plan) -> _Program:
        """The program for a key; rebuilt, and recaptured on CUDA, when the stack outgrows it."""
        steps, slots = plan.index.shape[:2]
        found = self._programs.get(key)
        if found is None or slots > found.slots or steps > found.steps:
            found = build()
            if self.captures:
                found.slots, found.steps = slots, max(steps, self._longest(plan.batch, steps))
            self._programs[key] = found
        return found

    def _longest(self, batch: int, steps: int) -> int:
        """Room for the largest client of the federation, so that partial participation does not recapture."""
        sizes = self.bounds[:, 1] - self.bounds[:, 0]
        per_pass = -(-int(sizes.max()) // max(batch, 1))
        return max(steps, per_pass * -(-steps // max(per_pass, 1)))

    def _passes(
        self, ids: IntArray, step: Step, state: Tensors, given: Tensors, work: Work, lr: Rate,
        until: Callable[[Given], Tensor],
    ) -> tuple[dict[str, Tensor], IntArray]:
        current = {name: t.clone() for name, t in state.items()}
        one_pass = replace(work, epochs=1, steps=None, work=None)
        per_pass, limit, taken = self.steps(ids, one_pass), self.steps(ids, work), np.zeros_like(ids)
        left, epoch = np.flatnonzero(limit > 0), 0
        while len(left):
            now = np.minimum(limit[left] - taken[left], per_pass[left])
            share = (now - 0.5) / per_pass[left]  # of a pass; rounded up it is `now` steps again
            one = replace(one_pass, keys=work.keys[torch.from_numpy(left)], work=share, first_epoch=epoch)
            index = torch.from_numpy(left).to(self.device)
            part = {name: t[index] for name, t in current.items()}
            rate = lr[index] if isinstance(lr, Tensor) else lr
            part, _ = self.loop(ids[left], step, part, {n: t[index] for n, t in given.items()}, one, rate)
            for name, value in part.items():
                current[name][index] = value
            taken[left] += now
            left = left[~until(Given(**part)).cpu().numpy() & (taken[left] < limit[left])]
            epoch += 1
        return current, taken


def _placed(x: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    if device.type == "cpu":
        return x if x.dtype == dtype else memory.through(lambda block: block.to(dtype), x)
    if memory.is_mapped(x) and (needed := x.numel() * dtype.itemsize) > (free := memory.free(device)):
        raise CoterieError(f"the samples take {needed / 1e9:.1f} GB and {device} has {free / 1e9:.1f} GB free; use "
                           "device=cpu, where they are read from a file.")
    return x.to(device, dtype)


def _taken(t: Tensor, index: Tensor) -> Tensor:
    """`t[index]` for an index `[n]`, as a copy; on a host `index_select` copies whole rows and is many times faster."""
    return t.index_select(0, index) if t.device.type == "cpu" else t[index]


def _signature(tensors: Tensors) -> Hashable:
    return tuple((name, tuple(t.shape[1:]), t.dtype) for name, t in tensors.items())


def _repeat(given: Tensors, copies: int) -> dict[str, Tensor]:
    return {name: t.repeat_interleave(copies, 0) if copies > 1 else t for name, t in given.items()}


def _scores(net: Net, outputs: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """Loss and, with classes, 1 for a right answer, of every sample `[B]`; 0 for padding."""
    found = {"loss": net.task.loss(outputs, y) * weight}
    if net.task.classes:
        found["accuracy"] = (outputs.argmax(-1) == y).to(weight.dtype) * weight
    return found


def _measure(net: Net, row: Tensor, batch: Batch, given: Given) -> dict[str, Tensor]:
    found = _scores(net, net(row, batch.x), batch.y, batch.weight)
    return {name: value.sum() for name, value in found.items()}


def _named(out: Any) -> Tensors:
    return out if isinstance(out, Mapping) else {"": out}


class _Program:
    """One kind of step with its static tensors: loaded, run over a plan, read back."""

    slots = 1 << 62  # a program without captured graphs takes any size
    steps = 1 << 62

    def __init__(self, engine: Stacked) -> None:
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
        self, state: dict[str, Tensor], given: Tensors, plan: Plan, keys: Tensor, lr: Rate, watch: bool = False
    ) -> tuple[list[Tensor], Tensor]:
        """Run the plan from `state [slots, ...]`; returns the final state and the slots' mean loss of the last pass, 0
        where nobody watches it."""
        self.watched = watch
        engine = self.engine
        order = torch.from_numpy(plan.order).to(engine.device)
        prefixes = plan.active()
        engine.net.mode(training=True)
        with torch.no_grad():
            rate = lr if isinstance(lr, Tensor) else torch.full((), lr, dtype=engine.dtype, device=engine.device)
            if engine.captures:
                self._load(state, given, plan, keys, rate, order, prefixes)
            else:
                self.state = {name: _taken(t, order) for name, t in state.items()}
                self.given = {name: _taken(t, order) for name, t in given.items()}
                self.index, self.keys = plan.index, keys.to(engine.device)[order]
                self.before = torch.from_numpy(plan.before).to(engine.device)
                self.lr = rate[order] if rate.ndim else rate
                self.losses = torch.zeros(plan.index.shape[:2], dtype=engine.dtype, device=engine.device)
                self.runner = Steps(self.step, len(order), self.counter, captured=False)
            self._go(plan, prefixes)
            back = torch.argsort(order)
            out = [_taken(self.state[name][: len(order)], back) for name in state]
            return out, self._last_pass(plan)[back] if watch else self.losses.new_zeros(len(order))

    def _load(
        self, state: Tensors, given: Tensors, plan: Plan, keys: Tensor, lr: Tensor, order: Tensor, prefixes: list[int]
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
            self.index = torch.zeros(self.steps, self.slots, plan.index.shape[2], dtype=torch.int64, device=device)
            self.keys = torch.zeros(self.slots, dtype=torch.int64, device=device)
            self.before = torch.zeros(self.slots, dtype=torch.int64, device=device)
            self.lr = torch.zeros((self.slots,) if lr.ndim else (), dtype=self.engine.dtype, device=device)
            self.losses = torch.zeros(self.steps, self.slots, dtype=self.engine.dtype, device=device)
            self.runner = Steps(self.step, self.slots, self.counter, captured=True)
        self.index.fill_(0)
        self.runner.prepare(prefixes, self.engine._pool)
        slots = len(order)
        self.index[:, slots:] = -1  # slots beyond this stack are all padding
        self.index[: len(plan.index), :slots].copy_(plan.index)
        for name, tensor in state.items():
            self.state[name][:slots].copy_(tensor[order])
        for name, tensor in given.items():
            self.given[name][:slots].copy_(tensor[order])
        self.keys[:slots].copy_(keys.to(device)[order])
        self.before[:slots].copy_(torch.from_numpy(plan.before))
        if lr.ndim:
            self.lr[:slots].copy_(lr[order])
        else:
            self.lr.copy_(lr)
        self.losses.zero_()

    def _go(self, plan: Plan, prefixes: list[int]) -> None:
        assert self.runner is not None
        if not self.engine.net.batch_statistics:
            self.runner.run(prefixes)
            return
        self.counter.zero_()
        for step, prefix in enumerate(prefixes):
            short = plan.short(step)
            if len(short) < prefix:
                self.runner.one(prefix)
            else:
                self.counter.add_(1)
            for position, samples in short:
                self.engine.net.mode(training=True, single=samples == 1)
                self._advance(slice(position, position + 1), self.index[step, position : position + 1], (step, samples))
            self.engine.net.mode(training=True)

    def _last_pass(self, plan: Plan) -> Tensor:
        steps, slots = plan.index.shape[:2]
        device = self.engine.device
        number = torch.arange(steps, device=device)[:, None]
        end = torch.from_numpy(plan.steps).to(device)
        start = end - torch.from_numpy(plan.passes).to(device)
        seen = (plan.index[:, :, : plan.batch] >= 0).sum(2) * ((number >= start) & (number < end))
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


class _Sgd(_Program):
    """`row <- row - lr * correct(gradient of the objective)`, in place on the views of the trained tensors."""

    def __init__(
        self, engine: Stacked, trained: list[Entry], objective: Objective, correct: Correct | None,
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


class _Direct(_Sgd):
    """The same for the task's mean loss of a chain of layers, which knows its gradient (`direct`)."""

    BLOCK = 1 << 24  # bytes of samples gathered at once on a host
    SMALL = 3e7  # FLOP of a step below which a second thread costs more than it brings

    def __init__(
        self, engine: Stacked, chain: Chain, trained: list[Entry], correct: Correct | None, clip: float | None
    ) -> None:
        super().__init__(engine, trained, default_objective, correct, clip)
        self.chain = chain

    def _go(self, plan: Plan, prefixes: list[int]) -> None:
        if self.engine.captures:
            super()._go(plan, prefixes)
            return
        engine = self.engine
        flop = 6.0 * engine.layout.size * plan.index[0].numel() if len(prefixes) else 0.0
        with threads(1 if flop < self.SMALL else torch.get_num_threads()):
            self._steps(plan, prefixes)

    def _steps(self, plan: Plan, prefixes: list[int]) -> None:
        """All steps from the host; the samples of many steps are gathered at once."""
        engine = self.engine
        one = self.index[:1, :, : plan.batch].numel() * engine.x[0].numel() * engine.x.element_size()
        block = max(1, self.BLOCK // max(one, 1))
        views, active = engine.layout.views(self.state["row"]), len(self.state["row"])
        # Batched products write into contiguous tensors; into views of rows they go model by model.
        whole = tensors = {name: t.contiguous() for name, t in views.items()}
        for first in range(0, len(prefixes), block):
            x, y, weight = engine.gather(self.index[first : first + block, : prefixes[first]], engine.samples)
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
        x, y, weight = self.engine.gather(index, self.engine.samples)
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


class _Custom(_Program):
    """`state <- step(net, state, batch, given)`; `given.lr` is the learning rate, a 0-d tensor."""

    def __init__(self, engine: Stacked, inner: Step, count: int) -> None:
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
        if set(new) != set(state):
            raise CoterieError(f"a step must return the state it was given, {sorted(state)}, not {sorted(new)}.")
        held = {t.untyped_storage().data_ptr() for t in state.values()}
        for name, old in before.items():
            if moving is not None:
                new[name] = torch.where(moving.view(-1, *(1,) * (old.ndim - 1)), new[name], old)
            elif new[name].untyped_storage().data_ptr() in held:  # e.g. the old row, handed on under another name
                new[name] = new[name].clone()
        for name, t in state.items():
            t.copy_(new[name])
