"""One method on one federation, in memory: the round loop, the clients' own states and the evaluation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from coterie import records, streams
from coterie.algebra import cosines, opposing
from coterie.cohort import Cohort, Init, Local
from coterie.config import Training
from coterie.data import Federation
from coterie.engine import convolution, trial
from coterie.engine.direct import Chain
from coterie.engine.packing import IntArray
from coterie.engine.stacked import Stacked
from coterie.errors import CoterieError
from coterie.evaluate import Evaluation, Scores
from coterie.layout import Layout
from coterie.method import Method, Uploads
from coterie.net import Net, PerSample, Task
from coterie.records import Nothing, Record

ModelLike = nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True)
class Round:
    """What one round did, for the record."""

    round: int
    participants: int
    dropped: int
    down: dict[str, int]  # bytes per client, by payload field
    up: dict[str, int]  # bytes per client, by upload field
    report: dict[str, Any]


class Simulation:
    """A federation of clients on the stacked engine. `round()` trains once, `evaluate()` scores and changes nothing."""

    def __init__(
        self, method: Method, model: ModelLike, federation: Federation, training: Training, head: str | None = None,
        loss: PerSample | None = None, choices: dict[str, Any] | None = None,
    ) -> None:
        self.method, self.training = method, training
        self.federation = federation if method.validation else federation.without_validation()
        self.population = self.federation.population
        self.device = device(training.device)
        self.dtype = torch.float64 if training.precision == "float64" else torch.float32
        _set_precision(training.precision)
        convolution.enabled = training.kernels
        self.init = Init(
            model, method.wrap, training.seed, head, self.dtype, self.device, self.federation.population,
            self.federation.classes,
        )
        self.layout = self.init.layout
        task = Task.of(federation.classes, loss)
        net = Net(self.init.module, self.layout, task, bf16=training.precision == "bf16")
        net.module.to(self.device)
        self.choices = self._choose(net, choices or {})
        chain = Chain.of(net, self.federation.x, self.device, self.dtype) if "direct" in self.choices else None
        self.engine = Stacked(net, self.federation, self.device, self.dtype, chain=chain, capture=training.capture)
        self.check(method, self.population, self.layout)
        names = [streams.integer("client", name) for name in self.federation.names]
        self._names = np.array(names, dtype=np.int64)
        none = np.zeros((len(names), 0), dtype=np.int64)
        self._histogram = self.federation.histogram("train") if federation.classes else none
        self.rounds_done = 0
        self._begin()

    @staticmethod
    def check(method: Method, population: int, layout: Layout) -> None:
        """Raise if the method or its aggregator cannot work with so many clients or this model."""
        method.check(population, layout)
        plugged = method.aggregator
        if population < plugged.minimum:
            raise CoterieError(
                f"the aggregator {plugged.name} needs at least {plugged.minimum} clients; there are {population}."
            )

    @staticmethod
    def layout_of(method: Method, model: ModelLike, head: str | None = None) -> Layout:
        """The layout a method would work on, e.g. to check a comparison before its first run."""
        return Init(model, method.wrap, 0, head).layout

    # -- the life of a run -----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """The server starts; every training client introduces itself, is admitted and joins, at round 0."""
        self.server: Record = self.method.start(self.init)
        self.buffers: Tensor | None = None  # [M, (K,) B], the clients' own, with buffers=local
        ids = np.arange(self.population)
        self.server = self._admitted(self.server, ids)
        joined = [self.method.join(self.cohort(wave), self._payload(self.server, wave)) for wave in self._waves(ids)]
        self.own = type(joined[0]).of(records.concatenate([one.tensors() for one in joined])).map(torch.clone)
        whole = any(t.shape[-1:] == (self.layout.size,) for t in self._payload(self.server, ids[:1]).tensors().values())
        if self.training.buffers == "local" and self.layout.within("buffers") and not whole and self.server.tensors():
            raise CoterieError(
                f"buffers=local needs a method that exchanges whole models; {self.method.name} exchanges a part of it: "
                "leave buffers=average and name the buffers among what stays with the client (personal=head+buffers)."
            )

    def round(self) -> Round:
        """One communication round."""
        t = self.rounds_done
        selected = self.selected(t)
        answering = selected[self._chance(selected, t, "dropout") >= self.training.dropouts]
        work = self._straggling(answering, t)
        report: dict[str, Any] = {}
        down: dict[str, int] = {}
        up: dict[str, int] = {}
        if len(answering) >= self.method.aggregator.minimum:
            uploads, states, left = [], [], []
            for wave in self._waves(answering):
                place = np.searchsorted(answering, wave)
                cohort = self.cohort(wave, None if work is None else work[place])
                payload = self._payload(self.server, wave)
                sent, state = self.method.local(cohort, payload, self._own(wave))
                down, up = self._traffic(payload.tensors(), "down"), self._traffic(sent.tensors(), "up")
                uploads.append(self._without_local_buffers(sent.tensors()))
                states.append(state.tensors())
                left.append(cohort.left)
            self._keep(answering, records.concatenate(states), left)
            n = torch.from_numpy(self.engine.sizes(answering, "train")).to(self.device)
            merged = Uploads(
                records.concatenate(uploads), torch.from_numpy(answering).to(self.device), n, n.double() / n.sum(),
                self.population, t, self.layout,
            )
            report = self._conflicts(merged.tensors, t) | {
                name: value.tolist() for name, value in self.method.report(self.server, merged).items()
            }
            self.server = self.method.merge(self.server, merged)
        elif len(answering):
            plug = self.method.aggregator
            report = {"skipped": f"{plug.name} needs {plug.minimum} clients, {len(answering)} answered"}
        self.rounds_done = t + 1
        return Round(t, len(answering), len(selected) - len(answering), down, up, report)

    def _conflicts(self, sent: Mapping[str, Tensor], t: int) -> dict[str, Any]:
        """In rounds that are evaluated, how many pairs of updates oppose each other; in the last one, all cosines."""
        last = t + 1 == self.training.rounds
        update = sent.get("update")
        if update is None or len(update) < 2 or not (last or (t + 1) % self.training.evaluate_every == 0):
            return {}
        if update.shape[-1] == self.layout.size:
            update = self.layout.cut(update, "parameters")
        angles = cosines(update.flatten(1))
        found: dict[str, Any] = {"opposing": opposing(angles)}
        if found["opposing"] != found["opposing"]:  # fewer than two clients moved
            return {}
        return found | {"cosines": angles.mul(1e4).round().div(1e4).tolist()} if last else found

    def evaluate(self) -> Evaluation:
        """Score all stages of the current state. Server and clients stay as they are."""
        stages = self._stages(self.federation.seen, self.server, self._own, "")
        unseen = self.federation.unseen
        if len(unseen):
            server = self._admitted(self.server, unseen)
            stages |= self._stages(unseen, server, None, "unseen_")
        return Evaluation(self.rounds_done, stages)

    def row(self, client: int, adapted: bool = False) -> Tensor:
        """The row `[D]` that a client uses now; `adapted` trains it for the run's local epochs."""
        ids = np.array([client])
        known = client < self.population
        server = self.server if known else self._admitted(self.server, ids)
        row, _ = self._deployed(ids, server, self._own if known else None, adapted)
        return row[0]

    # -- clients ---------------------------------------------------------------------------------------------------

    def selected(self, t: int) -> IntArray:
        """The clients asked in round t: those with the smallest draws, so the set does not depend on their order."""
        count = max(1, round(self.training.participation * self.population))
        draws = self._chance(np.arange(self.population), t, "participate")
        return np.sort(np.argsort(draws, kind="stable")[:count])

    def _chance(self, ids: IntArray, t: int, purpose: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        bits = streams.key(self.training.seed, torch.from_numpy(self._names[ids]), t, purpose).numpy()
        return (bits & ((1 << 53) - 1)) / float(1 << 53)

    def _straggling(self, ids: IntArray, t: int) -> np.ndarray[Any, np.dtype[np.float64]] | None:
        if not self.training.stragglers:
            return None
        slow = self._chance(ids, t, "straggle") < self.training.stragglers
        return np.where(slow, 0.1 + 0.9 * self._chance(ids, t, "work"), 1.0)

    def _waves(self, ids: IntArray) -> Iterator[IntArray]:
        size = self.training.wave or max(len(ids), 1)
        return (ids[first : first + size] for first in range(0, len(ids), size))

    def cohort(self, ids: IntArray, work: np.ndarray[Any, np.dtype[np.float64]] | None = None) -> Cohort:
        """These clients as a cohort of the current round."""
        t, training = self.rounds_done, self.training
        local = Local(training.batch, training.epochs, training.steps, training.lr_at(t))
        return Cohort(
            self.engine, ids, self.init, training.seed, t, local, self.federation.classes, self._histogram[ids],
            self._names[ids], work, training.buffers == "server",
        )

    def _own(self, ids: IntArray) -> Record:
        index = torch.from_numpy(ids).to(self.device)
        return self.own.map(lambda t: t[index])

    def _keep(self, ids: IntArray, states: dict[str, Tensor], left: list[Tensor | None]) -> None:
        index = torch.from_numpy(ids).to(self.device)
        for name, table in self.own.tensors().items():
            table[index] = states[name]
        if self.training.buffers == "local" and self.layout.within("buffers") and left[0] is not None:
            kept = self.layout.cut(torch.cat([rows for rows in left if rows is not None]), "buffers")
            if self.buffers is None:
                fresh = self.layout.cut(self.init.row, "buffers")
                self.buffers = fresh.expand(self.population, *kept.shape[1:]).clone()
            self.buffers[index] = kept

    # -- what travels ----------------------------------------------------------------------------------------------

    def _admitted(self, server: Record, ids: IntArray) -> Record:
        hello = self.method.hello(server)
        told = [
            self.method.introduce(self.cohort(wave), records.spread(hello, len(wave))) for wave in self._waves(ids)
        ]
        introductions = type(told[0]).of(records.concatenate([one.tensors() for one in told]))
        admitted: Record = self.method.admit(server, torch.from_numpy(ids).to(self.device), introductions)
        return admitted

    def _payload(self, server: Record, ids: IntArray) -> Record:
        sent = self.method.send(server, torch.from_numpy(ids).to(self.device))
        payload = records.spread(sent, len(ids))
        if self.buffers is None or ids.max() >= self.population:
            return payload
        mine = self.buffers[torch.from_numpy(ids).to(self.device)]  # [C, (K,) B]

        def receive(t: Tensor) -> Tensor:
            if t.shape[-1:] != (self.layout.size,):
                return t
            fits = mine if mine.ndim == t.ndim else mine.unsqueeze(1) if mine.ndim < t.ndim else mine[:, 0]
            return self.layout.put(t, "buffers", fits)

        return payload.map(receive)

    def _without_local_buffers(self, sent: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.buffers is None and self.training.buffers != "local":
            return sent
        empty = torch.zeros((), dtype=self.dtype, device=self.device)
        size = len(self.layout.cut(self.init.row, "buffers"))
        zero = empty.expand(size)
        return {
            name: self.layout.put(t, "buffers", zero) if t.shape[-1:] == (self.layout.size,) else t
            for name, t in sent.items()
        }

    def _traffic(self, tensors: dict[str, Tensor], way: str) -> dict[str, int]:
        """Bytes per client and field; buffers that the policy keeps at home do not travel."""
        stays = self.training.buffers == "local" or (self.training.buffers == "server" and way == "up")
        at_home = sum(entry.size for entry in self.layout.within("buffers")) if stays else 0
        travel = {}
        for name, size in records.bytes_each(tensors).items():
            t = tensors[name]
            rows = t[0].numel() // self.layout.size if t.shape[-1:] == (self.layout.size,) else 0
            travel[name] = size - rows * at_home * t.element_size()
        return travel

    # -- evaluation ------------------------------------------------------------------------------------------------

    def _stages(
        self, ids: IntArray, server: Record, own: Callable[[IntArray], Record] | None, prefix: str
    ) -> dict[str, Scores]:
        two = ("served", "adapted")
        return {f"{prefix}{stage}": self._scores(ids, server, own, stage == "adapted") for stage in two}

    def _deployed(
        self, ids: IntArray, server: Record, own: Callable[[IntArray], Record] | None, adapted: bool
    ) -> tuple[Tensor, Cohort]:
        cohort = self.cohort(ids)
        payload = self._payload(server, ids)
        mine = own(ids) if own is not None else self.method.join(cohort, payload)
        row = self.method.deploy(cohort, payload, mine)
        return (cohort.train(row) if adapted else row), cohort

    def _scores(
        self, ids: IntArray, server: Record, own: Callable[[IntArray], Record] | None, adapted: bool
    ) -> Scores:
        test: list[dict[str, Tensor]] = []
        val: list[dict[str, Tensor]] = []
        spent: list[IntArray] = []
        has_val = self.engine.sizes(ids, "val") > 0
        for wave in self._waves(ids):
            row, cohort = self._deployed(wave, server, own, adapted)
            test.append(cohort.measure(row, "test"))
            val.append(cohort.measure(row, "val"))
            spent.append(cohort.spent)
        seen = {name: t.double().cpu().numpy() for name, t in records.concatenate(test).items()}
        chosen = {name: t.double().cpu().numpy() for name, t in records.concatenate(val).items()}
        held = {name: np.where(has_val, t, np.nan) for name, t in chosen.items()}
        return Scores(ids, self.engine.sizes(ids, "test"), np.concatenate(spent), seen, held)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Copies of all tensors that define the state, and what else is needed to go on from it."""
        tensors = {f"server.{name}": t.clone() for name, t in self.server.tensors().items()}
        tensors |= {f"own.{name}": t.clone() for name, t in self.own.tensors().items()}
        if self.buffers is not None:
            tensors["buffers"] = self.buffers.clone()
        meta = {
            "round": self.rounds_done, "server": type(self.server).__name__, "own": type(self.own).__name__,
            "layout": self.layout.digest, "federation": self.federation.fingerprint(), "choices": self.choices,
        }
        return tensors, meta

    def restore(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Go on from a snapshot."""
        if meta["layout"] != self.layout.digest:
            raise CoterieError(
                f"the checkpoint holds another model (layout {meta['layout']}); this one has "
                f"layout {self.layout.digest} and {self.layout.size} columns."
            )
        if meta["federation"] != self.federation.fingerprint():
            raise CoterieError("the checkpoint was made with other data; resume with the data the run started with.")

        def part(prefix: str) -> Record:
            mine = {n[len(prefix) + 1 :]: t for n, t in tensors.items() if n.startswith(prefix + ".")}
            return self._record(meta[prefix]).of({n: t.to(self.device, copy=True) for n, t in mine.items()})

        self.server, self.own = part("server"), part("own")
        self.buffers = tensors["buffers"].to(self.device, copy=True) if "buffers" in tensors else None
        self.rounds_done = int(meta["round"])

    def _record(self, name: str) -> type[Record]:
        """The state class of this name: one the method's own modules define, or one of the common ones."""
        for cls in type(self.method).__mro__:
            found = getattr(sys.modules[cls.__module__], name, None)
            if isinstance(found, type) and issubclass(found, Record):
                return found
        found = getattr(records, name, Nothing)
        if not (isinstance(found, type) and issubclass(found, Record)):
            raise CoterieError(f"the checkpoint names a state '{name}' that {self.method.name} does not define.")
        return found

    def _choose(self, net: Net, choices: dict[str, Any]) -> dict[str, Any]:
        """Stack or loop, decided once and kept with the run."""
        x, y = self._samples(2)
        reason = net.probe(self.init.row, x, y)
        if self.training.engine == "stack" and reason is not None:
            raise CoterieError(f"the model cannot be stacked ({reason}); use engine=loop or engine=auto.")
        chosen: dict[str, Any] = {}
        if "engine" in choices:
            net.stacked = choices["engine"] == "stack"
            chosen |= {name: choices[name] for name in ("milliseconds",) if name in choices}
        elif self.training.engine == "loop":
            net.stacked = False
        elif self.training.engine != "stack" and reason is None and self.device.type == "cpu" and self.population > 1:
            took = trial.times(net, self.init.row, *self._samples(self.training.batch or len(self.federation.x)))
            net.stacked = took["looped"] >= trial.CLEAR * took["stacked"]
            chosen["milliseconds"] = took
        chosen["engine"] = "stack" if net.stacked else "loop"
        if self._directly(net, choices):
            chosen["direct"] = True
        if reason is not None:
            chosen["reason"] = f"the model cannot be stacked: {reason}"
        return chosen

    def _samples(self, count: int) -> tuple[Tensor, Tensor]:
        """The first samples of the data, at most `count`."""
        first = int(self.federation.bounds[0, 0])
        x, y = (t[first : first + count].to(self.device) for t in (self.federation.x, self.federation.y))
        return tuple(t.to(self.dtype) if t.is_floating_point() else t for t in (x, y))  # type: ignore[return-value]

    def _directly(self, net: Net, choices: dict[str, Any]) -> bool:
        """Whether plain training differentiates the model by hand."""
        if choices:
            return bool(choices.get("direct"))
        if self.training.engine in ("stack", "loop"):
            return False
        found = Chain.of(net, self.federation.x, self.device, self.dtype) is not None
        if self.training.engine == "direct" and not found:
            raise CoterieError(
                "engine=direct needs a chain of linear layers, convolutions, ReLU and max pooling (convolutions on a "
                "GPU in tf32 or bf16 only); use engine=auto."
            )
        return found


def device(name: str) -> torch.device:
    """The device of this name; auto takes CUDA where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(name)
    except RuntimeError:
        raise CoterieError(f"unknown device '{name}'; use cpu, cuda, cuda:0, ... or auto.") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise CoterieError("device=cuda was asked for but PyTorch sees no CUDA device; use device=cpu or auto.")
    return found


def _set_precision(precision: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = precision in ("tf32", "bf16")
    torch.backends.cudnn.allow_tf32 = precision in ("tf32", "bf16")


