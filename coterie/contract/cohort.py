"""The cohort: the clients that are computed together, and the whole vocabulary a method has on the client side."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from coterie import streams
from coterie.contract.engine import Correct, Effort, Engine, FloatArray, IntArray, Split, Step, Sum, Until
from coterie.contract.frozen import duplicate, in_rows
from coterie.contract.layout import Layout, declare_head
from coterie.contract.metric import Metric, Scored, Tally, sums_of, tallied
from coterie.contract.net import Batch, Given, Net, Objective
from coterie.contract.optimizer import Optimizer
from coterie.contract.patterns import Extended
from coterie.contract.records import Record
from coterie.contract.tokens import per_token
from coterie.contract.units import Cost, InUnit
from coterie.errors import CoterieError

ALWAYS = ("loss", "accuracy")
"""What every engine measures."""
BOUND = "_bound"
"""Ends the name of how far the value of a binned metric may be off."""
MOST_SUMS = 1 << 24
"""Numbers that the sums of metrics may be at once; clients are scored in blocks that keep to it."""

S = TypeVar("S", bound=Record | Mapping[str, Tensor])
GivenLike = Record | Mapping[str, Tensor] | None


class Init:
    """Fresh rows, rebuilt from the seed wherever they are needed, so they never travel.

    With a factory every row is a new draw. With a module, row 0 is the module as it was given (it may be pretrained)
    and further rows re-draw it through `reset_parameters`. What is frozen is that of the first draw for all of them.
    """

    def __init__(
        self, model: nn.Module | Callable[[], nn.Module], wrap: Callable[[nn.Module], nn.Module], seed: int,
        head: str | None = None, dtype: torch.dtype = torch.float32, device: torch.device | None = None,
        population: int = 1, classes: int = 0,
    ) -> None:
        self.population, self.classes = population, classes
        self._model, self._wrap, self._head, self.seed = model, wrap, head, seed
        self._dtype, self._device = dtype, device or torch.device("cpu")
        self.module = self._draw(0)
        self.layout = Layout.of(self.module)
        self._first: Tensor | None = None

    @property
    def row(self) -> Tensor:
        """One fresh row `[D]`."""
        return self.rows(1)[0]

    def rows(self, count: int, part: str = "all", otherwise: str = "") -> Tensor:
        """`count` independent fresh rows `[count, D]`, no two of which are equal in what trains of a part.

        Two that are equal would stay so. They are refused; `otherwise` says what may be set instead.
        """
        if self._first is None:
            self._first = self.layout.row(self.module, self._dtype).to(self._device)
        drawn = [self.layout.row(self._draw(k), self._dtype).to(self._device) for k in range(1, count)]
        rows = torch.stack([self._first, *drawn][:count])
        trained = [slice(entry.start, entry.stop) for entry in self.layout.within(part) if entry.trainable]
        pairs = combinations(rows, 2) if trained else ()
        if any(all(torch.equal(one[columns], other[columns]) for columns in trained) for one, other in pairs):
            raise CoterieError(
                f"{count} models are to be drawn independently, and two of them came out equal"
                f"{'' if part == 'all' else f' in {part}'}; pass a function that draws weights each time it builds the "
                f"model, where it now loads them, sets them or seeds itself{otherwise and f', or {otherwise}'}."
            )
        return rows

    def noise(self, *words: int | str) -> torch.Generator:
        """A host generator of the stream (seed, words), for methods that draw when they start."""
        return torch.Generator().manual_seed(streams.integer(self.seed, *words))

    def _draw(self, number: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(streams.integer(self.seed, "init", number))
            given = self._model.module if isinstance(self._model, Extended) else self._model
            if not isinstance(given, nn.Module):
                return self._wrapped(given())
            # Drawing anew writes into a module, so it must not be one that shares memory.
            module = copy.deepcopy(given) if number else duplicate(given)
            if number:
                held = in_rows(module)
                for name, sub in module.named_modules():
                    own = [id(p) in held for p in sub.parameters(recurse=False)]
                    if own and not any(own):
                        continue  # frozen
                    if hasattr(sub, "reset_parameters"):
                        sub.reset_parameters()
                    elif own:
                        raise CoterieError(
                            f"layer '{name}' ({type(sub).__name__}) cannot be drawn anew for a second model; "
                            "pass a function that builds the model instead of a module."
                        )
            return self._wrapped(self._model.extend(module) if isinstance(self._model, Extended) else module)

    def _wrapped(self, module: nn.Module) -> nn.Module:
        """The method's module around the user's, whose head is declared first: wrapping may rename its layers."""
        if self._head is not None:
            declare_head(module, self._head)
        return self._wrap(module)


@dataclass(frozen=True)
class LocalTraining:
    """What a client does in one round: the training options that reach it."""

    batch: int = 10
    epochs: int = 1
    steps: int | None = None
    lr: float = 0.05
    optimizer: Optimizer | None = None  # None is plain SGD
    clip: float | None = None

    @property
    def plain(self) -> bool:
        """Whether a step is `row - lr * gradient`."""
        return self.optimizer is None and self.clip is None


@dataclass(frozen=True)
class Members:
    """Who is computed together in which round, with which training. `C` clients, of one run or of several."""

    places: IntArray  # [C] where the engine finds their data
    numbers: IntArray  # [C] in their run
    names: IntArray  # [C] the words that name their streams of randomness
    histogram: IntArray  # [C, classes] training samples
    round: int
    local: LocalTraining
    inits: tuple[Init, ...]  # the fresh rows, and with them the seed, of each run
    run: IntArray | None = None  # [C] which of the runs each belongs to; None for one run
    pace: FloatArray | None = None  # [C] fraction of the steps a straggler manages
    frozen_buffers: bool = False
    own_buffers: bool = False  # clients keep their running statistics, and nobody sends any
    scored: Scored = field(default_factory=Scored)

    @property
    def init(self) -> Init:
        """The fresh rows of the one run."""
        if self.run is not None:
            raise CoterieError("the runs of a joined cohort start from rows of their own; use cohort.assemble.")
        return self.inits[0]

    @property
    def seeds(self) -> int | Tensor:
        """The seed of the one run, or each client's `[C]`."""
        if self.run is None:
            return self.inits[0].seed
        return torch.tensor([streams.signed(init.seed) for init in self.inits])[torch.from_numpy(self.run)]

    @property
    def alike(self) -> Hashable:
        """Members with the same value here, on one engine, can be computed together."""
        # in round 0 methods may do what they do never again
        return self.local, self.frozen_buffers, self.own_buffers, self.pace is None, self.round == 0, self.scored

    def fresh(self) -> Tensor:
        """The initial row of each client `[C, D]`."""
        if self.run is None:
            return self.inits[0].row.expand(len(self.places), -1)
        rows = torch.stack([init.row for init in self.inits])
        return rows[torch.from_numpy(self.run).to(rows.device)]

    def only(self, mask: np.ndarray[Any, np.dtype[np.bool_]]) -> Members:
        """Those of a mask `[C]`."""
        return replace(
            self, places=self.places[mask], numbers=self.numbers[mask], names=self.names[mask],
            histogram=self.histogram[mask], run=None if self.run is None else self.run[mask],
            pace=None if self.pace is None else self.pace[mask],
        )

    @classmethod
    def together(cls, parts: Sequence[Members]) -> Members:
        """The members of several runs that are `alike`, one run after another."""
        pace = [part.pace for part in parts if part.pace is not None]
        return replace(
            parts[0], places=np.concatenate([part.places for part in parts]),
            numbers=np.concatenate([part.numbers for part in parts]),
            names=np.concatenate([part.names for part in parts]),
            histogram=np.concatenate([part.histogram for part in parts]),
            inits=tuple(part.init for part in parts),
            run=np.repeat(np.arange(len(parts)), [len(part.places) for part in parts]),
            pace=np.concatenate(pace) if pace else None,
        )


class Cohort:
    """Clients computed together: all participants of a wave in a simulation, exactly one on a Flower client.

    Tensors have the clients as first axis, `C`. Rows are `[C, D]`, or `[C, K, D]` for K models a client. What runs
    per sample is written for one client: `objective(net, row, batch, given)`, `step(net, state, batch, given)`,
    `correct(gradient, row, given)`; whatever it needs comes in through `state` and `given`.
    """

    def __init__(self, engine: Engine, members: Members) -> None:
        self.engine, self.members = engine, members  # for whoever computes cohorts; methods use the words below
        self.left: Tensor | None = None  # rows as the last plain training left them, for the policy of local buffers
        self.spent = np.zeros(self.size, dtype=np.int64)  # local steps taken so far, for the evaluator
        self.memory: dict[str, Tensor] | None = None  # what optimizers remember, `[C, ...]`; None: nothing is kept
        self._trainings = 0  # so far in this cohort, each of which has a memory of its own
        self.residual: Tensor | None = None  # what is added to the frozen weights, `[S, 1]`; None: nothing

    # -- facts -----------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        return len(self.members.places)

    @property
    def ids(self) -> Tensor:
        """Client numbers `[C]`."""
        return torch.from_numpy(self.members.numbers).to(self.engine.device)

    @property
    def n(self) -> Tensor:
        """Training samples `[C]`; where each token has a class, the tokens that count."""
        return torch.from_numpy(self.engine.counts(self.members.places, "train")).to(self.engine.device)

    @property
    def histogram(self) -> Tensor:
        """Training samples per class `[C, classes]`."""
        return torch.from_numpy(self.members.histogram).to(self.engine.device)

    @property
    def labels(self) -> Tensor:
        """The distribution of the training labels `[C, classes]`, float64."""
        return self.histogram.double() / self.n[:, None]

    @property
    def classes(self) -> int:
        """How many classes there are; 0 for regression."""
        return self.members.inits[0].classes

    @property
    def init(self) -> Init:
        """The run's fresh rows."""
        return self.members.init

    @property
    def layout(self) -> Layout:
        return self.engine.layout

    @property
    def round(self) -> int:
        """The number of this round, from 0."""
        return self.members.round

    @property
    def lr(self) -> float:
        """This round's learning rate."""
        return self.members.local.lr

    @property
    def epochs(self) -> int:
        return self.members.local.epochs

    def steps(self, epochs: int | None = None) -> Tensor:
        """Local SGD steps each client takes `[C]`."""
        effort = self.effort(epochs, None, "train")
        return torch.from_numpy(self.engine.steps(self.members.places, effort)).to(self.engine.device)

    def descent(self, start: Tensor, end: Tensor) -> Tensor:
        """(start - end) / (tau lr) `[C, D]`: the mean gradient along this round's tau steps of SGD; 0 for buffers.

        That is so for plain steps only; with another optimizer or a clip it raises.
        """
        if not self.members.local.plain:
            raise CoterieError("the way that a model went tells its mean gradient for plain steps only; set "
                               "optimizer=sgd and clip=none.")
        tau = self.steps().clamp(min=1).to(end.dtype)[:, None]
        return self.layout.put((start - end) / (tau * self.lr), "buffers", end.new_zeros(()))

    def assemble(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Rows `[C, D]` with these columns in the parts named, one after another, and the initial ones elsewhere."""
        rows = self.members.fresh()
        for part, columns in parts.items():
            rows = self.layout.put(rows, part, columns)
        return rows

    def chance(self, purpose: str, count: int = 1, once: bool = False) -> Tensor:
        """Uniform numbers on [0, 1) of each client's own, `[C, count]`: of this round, or the same in all (`once`)."""
        members, seeds = self.members, self.members.seeds
        seeds = seeds[:, None] if isinstance(seeds, Tensor) else seeds
        when = () if once else (members.round,)
        bits = streams.key(seeds, torch.from_numpy(members.names)[:, None], *when, purpose, torch.arange(count))
        return ((bits & ((1 << 53) - 1)).double() / (1 << 53)).to(self.engine.device)
    def stand_on(self, residual: Tensor) -> None:
        """From here on everything is computed over the frozen weights with R added, which all clients are sent alike:
        `residual [C, S, 1]`, as a payload has it. See `ground`."""
        self.residual = residual[0]

    # -- looking ---------------------------------------------------------------------------------------------------

    def loss(self, rows: Tensor, split: Split = "train") -> Tensor:
        """Mean loss on a split, as it is scored, `[C, (K,) D] -> [C, (K)]`: without class weights and smoothed labels.

        Clients without validation data use their training data.
        """
        return self.measure(rows, split)["loss"]

    def accuracy(self, rows: Tensor, split: Split = "train") -> Tensor:
        """Fraction of correct classes on a split, `[C, (K,) D] -> [C, (K)]`."""
        return self.measure(rows, split)["accuracy"]

    def measure(self, rows: Tensor, split: Split = "train", tallies: Sequence[Tally] = ()) -> dict[str, Tensor]:
        """Loss, and accuracy where there are classes, on a split; NaN for clients that have no sample in it, and for
        them alone: a loss that is not a number, of a model that diverged, is infinite.

        Beside them the sums of `tallies` by `tally.sum`, `[C, (K,) ...]`, 0 for such clients.
        """
        wanted = self.engine.sizes(self.members.places, split) > 0
        if split == "val" and not wanted.all():
            if not wanted.any():
                return self.measure(rows, "train", tallies)
            with_val, without = (self._only(mask) for mask in (wanted, ~wanted))
            place = torch.from_numpy(np.argsort(np.concatenate([np.flatnonzero(wanted), np.flatnonzero(~wanted)])))
            seen = with_val.measure(rows[wanted], "val", tallies)
            rest = without.measure(rows[~wanted], "train", tallies)
            return {name: torch.cat([seen[name], rest[name]])[place.to(rows.device)] for name in seen}
        sums = self._grounded.measure(self.members.places, rows, split, tallies)
        count = torch.from_numpy(self.engine.counts(self.members.places, split)).to(rows.device, rows.dtype)
        count = count.view(-1, *(1,) * (rows.ndim - 2))
        found = {name: value / count if name in ALWAYS else value for name, value in sums.items()}
        return {**found, "loss": found["loss"].masked_fill(sums["loss"].isnan(), torch.inf)}

    def score(
        self, rows: Tensor, split: Split, metrics: Sequence[Metric], kept: Sequence[Tally] = ()
    ) -> dict[str, Tensor]:
        """Loss, accuracy and these metrics on a split, by their labels, `[C, (K)]` (or `[C, (K,) classes]`).

        Of a binned metric also its bound, `label_bound`, and of tallies to be `kept` the sums. All of it is in the
        user's unit, also where models train on standardised targets.
        """
        tallies: list[Tally] = [*metrics, *kept]
        if (unit := self.engine.net.task.unit) is not None:
            tallies = [InUnit(tally, unit) for tally in (*tallies, Cost(self.engine.net.task.scored))]
        room = MOST_SUMS // max(1, self._cells(tallies) * rows[0].numel() // self.layout.size)
        blocks = np.array_split(np.arange(self.size), -(-self.size // max(room, 1)) if tallies else 1)
        found = [self._valued(rows, split, metrics, tallies, kept, block) for block in blocks]
        return {name: torch.cat([one[name] for one in found]) for name in found[0]} if len(found) > 1 else found[0]

    def _valued(
        self, rows: Tensor, split: Split, metrics: Sequence[Metric], tallies: Sequence[Tally], kept: Sequence[Tally],
        block: IntArray,
    ) -> dict[str, Tensor]:
        """`score` of some of the clients, by their places in the cohort."""
        some = len(block) < self.size
        part = self._only(np.isin(np.arange(self.size), block)) if some else self
        sums = part.measure(rows[block[0] : block[-1] + 1] if some else rows, split, tallies)
        found = {name: value for name, value in sums.items() if name in ALWAYS}
        if self.engine.net.task.unit is not None:
            cost = sums_of(Cost(self.engine.net.task.scored), sums)
            found["loss"] = cost["cost"] / cost["samples"]
        for metric in metrics:
            mine = sums_of(metric, sums)
            found[metric.label] = metric.value(mine)
            if metric.binned:
                found[f"{metric.label}{BOUND}"] = metric.bound(mine)
        return found | {f"{t.tally}.{name}": value for t in kept for name, value in sums_of(t, sums).items()}

    def _cells(self, tallies: Sequence[Tally]) -> int:
        """How many numbers the sums of one model are."""
        if not tallies:
            return 0
        y = self.engine.y[:1].cpu()
        y = y[:, :1] if per_token(y) else y  # sums do not depend on how many tokens there are
        outputs = torch.zeros(*(y.shape if self.classes else (1,)), self.classes or y.numel(), dtype=torch.float64)
        return sum(t.numel() for t in tallied(tallies, outputs, y, torch.ones(1)).values())

    def total(self, fn: Sum, rows: Tensor, given: GivenLike = None, split: Split = "train") -> Any:
        """The sum over a split of `fn(net, row, batch, given)`: a tensor `[C, ...]` or a dictionary of such."""
        sums = self._grounded.total(self.members.places, fn, rows, _tensors(given), split)
        return sums[""] if set(sums) == {""} else sums

    def grad(
        self, rows: Tensor, given: GivenLike = None, objective: Objective | None = None, split: Split = "train",
        counted: bool = False,
    ) -> Tensor:
        """The gradient of the mean objective over a whole split, `[C, (K,) D]`; dropout and augmentation are off.

        The objective is what is trained, class weights and smoothed labels included. Where the method makes a step of
        it that fits something to the client, it is to be `counted` as one.
        """
        self.spent = self.spent + int(counted)
        summed = _Gradient(objective)
        total = self._grounded.total(self.members.places, summed, rows, _tensors(given), split)[""]
        count = torch.from_numpy(self.engine.counts(self.members.places, split)).to(rows.device, rows.dtype)
        return total / count.clamp(min=1).view(-1, *(1,) * (rows.ndim - 1))

    def samples(self, split: Split = "train") -> Iterator[tuple[Tensor, Tensor]]:
        """Raw `(x, y)` client by client, for introductions only."""
        return self.engine.samples(self.members.places, split)

    # -- training --------------------------------------------------------------------------------------------------

    def train(
        self, rows: Tensor, given: GivenLike = None, *, epochs: int | None = None, steps: int | None = None,
        lr: float | None = None, part: str = "all", correct: Correct | None = None,
        objective: Objective | None = None, clip: float | None = None, distinct: bool = False, purpose: str = "train",
    ) -> Tensor:
        """Local training from `rows [C, (K,) D]`: E epochs (or `steps`) on the trainable tensors of `part`.

        The K models of a client see the same batches (`distinct` gives each its own order) and the same `given`. Steps
        are those of the run's optimizer along `correct(gradient)`. `clip` bounds the norm of that in each step, beside
        the run's own clip.
        """
        return self.train_watched(
            rows, given, epochs=epochs, steps=steps, lr=lr, part=part, correct=correct, objective=objective,
            clip=clip, distinct=distinct, purpose=purpose, watch=False,
        )[0]

    def train_watched(
        self, rows: Tensor, given: GivenLike = None, *, epochs: int | None = None, steps: int | None = None,
        lr: float | None = None, part: str = "all", correct: Correct | None = None,
        objective: Objective | None = None, clip: float | None = None, distinct: bool = False, purpose: str = "train",
        watch: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """`train`, and the running loss of the last epoch `[C, (K)]`: each batch before its step, in training mode.

        Without `watch` the loss is not computed, and 0.
        """
        effort = self.effort(epochs, steps, purpose, distinct=distinct)
        still = effort.epochs == 0 if effort.steps is None else effort.steps == 0
        if still or not any(entry.trainable for entry in self.layout.within(part)):
            return rows.clone(), self.loss(rows) if watch else rows.new_zeros(rows.shape[:-1])
        models = rows.shape[1] if rows.ndim == 3 else 1
        self.spent = self.spent + models * self.engine.steps(self.members.places, effort)
        local = self.members.local
        chosen = local.lr if lr is None else lr
        bounds = [bound for bound in (clip, local.clip) if bound is not None]
        new, loss, memory = self._grounded.train(
            self.members.places, rows, _tensors(given), effort, chosen, part, correct, objective,
            min(bounds, default=None), watch, local.optimizer, self._recall(),
        )
        self._keep(memory)
        if self.members.frozen_buffers:
            new = self.layout.put(new, "buffers", self.layout.cut(rows, "buffers"))
        if purpose == "train":
            self.left = new
        return new, loss

    def loop(
        self, step: Step, state: S, given: GivenLike = None, *, epochs: int | None = None, steps: int | None = None,
        lr: float | None = None, streams: int = 1, fraction: float = 1.0,
        until: Until | None = None, purpose: str = "train", counted: bool | Tensor = True,
    ) -> S:
        """A method's own inner step on every batch: `state <- step(net, state, batch, given)`, written for one client.

        The state is a record or a dictionary of tensors `[C, ...]`, and so is what comes back. `streams` independent
        batches a step come as a tuple (stream 0 is the one plain training would use); `fraction` uses a part of the
        samples; `until(state) -> [C]` is asked after each pass which clients are done. `given.lr` is the learning
        rate. A state named `row` is the model whose running statistics a client keeps under the policy of local
        buffers. What a method's own step does is no optimizer's to say: as plain training (`purpose`) it is refused
        unless the run's steps are plain. Where a step only draws or looks it is not to be `counted` as training; a mask
        `[C]` says for whom it is.
        """
        if purpose == "train" and not self.members.local.plain:
            raise CoterieError("inner steps of a method's own are plain ones; set optimizer=sgd and clip=none.")
        effort = self.effort(epochs, steps, purpose, fraction=fraction, streams=streams)
        chosen, begun = self.members.local.lr if lr is None else lr, _tensors(state)
        out, taken = self._grounded.loop(self.members.places, step, begun, _tensors(given), effort, chosen, until)
        trained = counted.cpu().numpy() if isinstance(counted, Tensor) else counted
        self.spent = self.spent + np.where(trained, taken, 0)
        if self.members.frozen_buffers:
            rows = [name for name, t in begun.items() if t.ndim > 1 and t.shape[-1] == self.layout.size]
            out |= {n: self.layout.put(out[n], "buffers", self.layout.cut(begun[n], "buffers")) for n in rows}
        if purpose == "train" and "row" in out and out["row"].shape[-1] == self.layout.size:
            self.left = out["row"]
        return type(state).of(out) if isinstance(state, Record) else out  # type: ignore[return-value]

    def settled(self, rows: Tensor) -> Tensor:
        """Rows `[C, (K,) D]` in which batch normalisation that has seen no batch has statistics of the clients' own.

        They are the mean (weighted as training weighs batches) of the statistics of the batches in one pass over a
        client's training samples; nothing else changes, and it is no training. A row that has seen batches stays as it
        is, as does one whose client has a single sample, and in round 0 all do: nobody has been trained.
        """
        columns, counters = self.layout.normalisation(rows.device)
        if self.round == 0 or not len(counters) or bool((rows[..., counters] > 0).all()):
            return rows
        if rows.ndim == 3:
            return torch.stack([self.settled(row) for row in rows.unbind(1)], 1)
        # A pass takes statistics from b to a b + c: passes from 0 and from 1 tell a and c, and c / (1 - a) is theirs.
        from_0, from_1 = (rows.index_fill(1, columns, start).index_fill(1, counters, 0) for start in (0, 1))
        end = self.loop(_pass, {"from_0": from_0, "from_1": from_1}, epochs=1, purpose="statistics", counted=False)
        seen, left = end["from_0"][:, columns], 1 - (end["from_1"] - end["from_0"])[:, columns]
        found = torch.where(left > 1e-6, seen / left, rows[:, columns])
        settled = rows.index_copy(1, columns, found).index_copy(1, counters, end["from_0"][:, counters])
        return torch.where((rows[:, counters] > 0).all(1, keepdim=True), rows, settled)

    # -- inside ----------------------------------------------------------------------------------------------------

    @property
    def _grounded(self) -> Engine:
        """The engine, its net on what this cohort stands on; other cohorts may have used it since."""
        self.engine.net.ground.stand_on(self.residual)
        return self.engine

    def _only(self, mask: np.ndarray[Any, np.dtype[np.bool_]]) -> Cohort:
        """Those of a mask `[C]`."""
        part = Cohort(self.engine, self.members.only(mask))
        part.residual = self.residual
        return part

    def _recall(self) -> dict[str, Tensor] | None:
        """What the optimizer of this training remembers of the last round; nothing yet, or None where none is kept."""
        if self.memory is None:
            return None
        word = f"{self._trainings}."
        return {name.removeprefix(word): t for name, t in self.memory.items() if name.startswith(word)}

    def _keep(self, memory: Mapping[str, Tensor]) -> None:
        if self.memory is not None:
            self.memory |= {f"{self._trainings}.{name}": t for name, t in memory.items()}
        self._trainings += 1

    def effort(self, epochs: int | None, steps: int | None, purpose: str, **options: Any) -> Effort:
        """What is asked of an engine; without epochs and steps, this round's training."""
        members, own = self.members, epochs is None and steps is None
        return Effort(
            batch=members.local.batch,
            epochs=members.local.epochs if epochs is None else epochs,
            steps=members.local.steps if own else steps,
            keys=streams.key(members.seeds, torch.from_numpy(members.names), members.round, purpose),
            pace=members.pace,
            **options,
        )


def _tensors(given: GivenLike) -> dict[str, Tensor]:
    return {} if given is None else given.tensors() if isinstance(given, Record) else dict(given)


def _pass(net: Net, state: Given, batch: Batch, given: Given) -> dict[str, Tensor]:
    """A forward pass in training moves the running statistics of each row, and nothing else."""
    for row in (state.from_0, state.from_1):
        net.grad(row, batch)
    return {"from_0": state.from_0, "from_1": state.from_1}


@dataclass(frozen=True)
class _Gradient:
    """Sums the gradient over batches, so that dividing by n gives the gradient of the mean."""

    objective: Objective | None

    def __call__(self, net: Net, row: Tensor, batch: Batch, given: Given) -> Tensor:
        return net.grad(row, batch, self.objective, given) * batch.weight.sum()
