"""One method on one federation, in memory: the round loop, the clients' own states and the evaluation."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.contract import records
from coterie.contract.algebra import between
from coterie.contract.cohort import Cohort, Init
from coterie.contract.engine import FloatArray, IntArray
from coterie.contract.layout import Layout
from coterie.contract.method import Method, Uploads
from coterie.contract.net import PerSample
from coterie.contract.records import Models, Record
from coterie.contract.shapes import FewModels
from coterie.data import Federation, churn
from coterie.engine import store, waves
from coterie.engine.store import Store
from coterie.errors import CoterieError
from coterie.evaluation.score import Evaluation, Scores
from coterie.evaluation.stages import PREFIX
from coterie.metrics.confusion import ByLabelAndAnswer
from coterie.running import arrival, checkpoint
from coterie.running.clients import (
    Clients,
    Measured,
    ModelLike,
    deploy,
    join,
    local,
    score,
    score_newcomers,
    settled,
)
from coterie.running.confusion import CONFUSION, MOST_CELLS, class_names
from coterie.running.round import Round, per_client
from coterie.running.server import NOTES, Server, record_class
from coterie.running.together import Call, Course, alone
from coterie.running.training import Training
from coterie.streams import chance

__all__ = ["ModelLike", "Simulation"]

MEMORY = "memory"
"""What a checkpoint calls that which the clients' optimizers remember (`memory.0.velocity`, ...)."""


class Simulation(Clients):
    """A federation of clients on one engine. `round()` trains once, `evaluate()` scores and changes nothing."""

    def __init__(
        self, method: Method, model: ModelLike, federation: Federation, training: Training, head: str | None = None,
        loss: PerSample | None = None, choices: dict[str, Any] | None = None, twin: Simulation | None = None,
    ) -> None:
        """`twin` is a simulation of a method kin to this one: its engine serves both where the module is the same."""
        super().__init__(method, model, federation, training, head, loss, choices, twin)
        training = self.training
        self.choices.pop(NOTES, None)  # the twin's
        self.choices |= {NOTES: said} if (said := Server.notes(method, self.layout, training)) else {}
        self.class_names = class_names(self.federation.recipe, self.federation.classes)
        if 0 < self.federation.clients * self.federation.classes**2 <= MOST_CELLS:
            self.scored = replace(self.scored, kept=(ByLabelAndAnswer(),))
        churn.require_somebody(self.federation, training.rounds)
        if method.aggregator.private and self.federation.schedule is not None:
            raise CoterieError("the private aggregator's noise is made for a fixed population; leave out the churn.")
        self.server = Server(method, self.init, training)
        self._selections: dict[int, IntArray] = {}
        self._indices: dict[bytes, tuple[Tensor, Tensor, Tensor]] = {}
        self.rounds_done = 0
        self.noticing: Callable[[dict[str, Tensor]], None] | None = None  # is shown what clients send and keep
        self._begin(None if training.wave else (choices or {}).get("wave"))

    @staticmethod
    def layout_of(method: Method, model: ModelLike, head: str | None = None) -> Layout:
        """The layout a method would work on, e.g. to check a comparison before its first run; a model that is needed
        several times is drawn as often."""
        init = Init(model, method.wrap, 0, head)
        if isinstance(method, FewModels):
            method.start(init)
        return init.layout

    # -- the life of a run -----------------------------------------------------------------------------------------

    def _begin(self, wave: int | None) -> None:
        """Every training client that is there introduces itself, is admitted and joins, at round 0.

        `wave` is how many clients a resumed run computes at once: sums over other waves would differ in the last bits.
        """
        self._statistics: Store | None = None  # the clients' own buffers, with buffers=local
        self._memory: Store | None = None  # what their optimizers remember, with keep=true
        ids = np.arange(self.arrived)
        self.wave = wave or self._wave(1)
        self.server = self.admitted(ids)
        payload = self.payload(ids[:1])
        self.wave = wave or self._wave(self.models_in(payload))
        self.choices["wave"] = self.wave
        self.server.check_buffers(payload)
        for number, part in enumerate(self._waves(ids)):
            joined = join(self.method, self.cohort(part), self.payload(part))
            if number == 0:
                self._own_type = type(joined)
                self._states = Store(self.population, self.device, self._place(joined))
                self._states.open(joined.tensors())
            self._states.put(part, joined.tensors())
        if self.server.guard is not None:
            self._rehearse()

    def _rehearse(self) -> None:
        """One step of one client, thrown away, shows what clients would upload before they do."""
        ids = np.arange(1)
        cohort = self.at(0, ids, local=replace(self.at(0, ids).members.local, epochs=1, steps=1))
        self.server.rehearse(local(self.method, cohort, self.payload(ids), self._own(ids))[0].tensors())

    def round(self) -> Round:
        """One communication round."""
        return alone(self.rounding())

    def rounding(self) -> Course[Round]:
        """One communication round; what its clients compute is asked for by `yield`."""
        t = self.rounds_done
        selected = self.selected(t)
        answering = self._answering(selected, t)
        pace = self._straggling(answering, t)
        report: dict[str, Any] = {}
        down: Counter[str] = Counter()
        up: Counter[str] = Counter()
        if len(answering) >= self.server.needed():
            uploads = []
            parts = self._waves(answering)
            for number, wave in enumerate(parts):
                place = np.searchsorted(answering, wave)
                cohort = self.cohort(wave, None if pace is None else pace[place])
                payload, cohort.memory = self.payload(wave), self._recalled(wave)
                sent, state = yield Call(local, self.method, cohort, (payload, self._own(wave)))
                if self.noticing is not None:
                    self.noticing(sent.tensors())
                    self.noticing(state.tensors())
                down.update(self.traffic(payload.tensors(), "down"))
                up.update(self.traffic(sent.tensors(), "up"))
                uploads.append(self.without_local_buffers(sent.tensors()))
                self._ahead(parts[number + 1 :] or self._first_of_round(t + 1))
                self._keep(wave, state.tensors(), self.kept_buffers(cohort))
                self._remember(wave, cohort.memory)
            ids, n, share = self._weighed(answering)
            stacked = self.server.stacked(uploads)
            report = self.server.merge(Uploads(stacked, ids, n, share, self.arrived, t, self.layout))
        elif len(answering):
            report = self.server.skipped(len(answering))
        before, self.rounds_done = self.arrived, t + 1
        yield from self._welcoming(np.arange(before, self.arrived))
        ways = per_client(down, len(answering)), per_client(up, len(answering))
        return Round(t, len(answering), len(selected) - len(answering), *ways, report)

    def _welcoming(self, ids: IntArray) -> Course[None]:
        """Clients that arrive now are admitted and join, by the method's rule for unseen clients, and stay."""
        if len(ids):
            self.server, _ = yield from self._admitting(ids)
        for wave in self._waves(ids):
            joined = yield Call(join, self.method, self.cohort(wave), (self.payload(wave),))
            self._states.put(wave, joined.tensors())

    def evaluate(self) -> Evaluation:
        """Score all stages of the current state. Server and clients stay as they are."""
        return alone(self.evaluating())

    def evaluating(self) -> Course[Evaluation]:
        """`evaluate`; what its clients compute is asked for by `yield`."""
        stages = yield from self._stages(self.federation.there(self.rounds_done), "")
        unseen = self.federation.unseen
        if len(unseen):
            server, spent = yield from self._admitting(unseen)
            stages |= yield from self._stages(unseen, PREFIX, server, spent)
        return Evaluation(self.rounds_done, stages)

    def row(self, client: int, adapted: bool = False) -> Tensor:
        """The row `[D]` that a client uses now; `adapted` trains it for the run's local epochs."""
        ids = np.array([client])
        server = self.server if client < self.arrived else self.admitted(ids)
        row, cohort = self._deployed(ids, server)
        return cohort.train(row)[0] if adapted else row[0]

    @property
    def residual(self) -> Tensor | None:
        """What is added to the frozen weights that rows stand on; None where they stay as they are."""
        return self.method.residual(self.server.state)

    def losses(self) -> FloatArray:
        """The loss of the model that each training client uses now, on its validation data, else its training data."""
        found = []
        for ids in self._waves(np.arange(self.arrived)):
            row, cohort = self._deployed(ids, self.server)
            found.append(cohort.loss(row, "val").double().cpu().numpy())
        return np.concatenate(found)

    def models(self) -> dict[str, Any] | None:
        """Of a method with a few server models: who uses which, how each would serve every client, how they differ.

        `choice [M]` is the model nearest to the row that a client uses (the row itself where it picks one), `test
        [M, K]` the chosen metric of every model on every client's test data, `apart [K, K]` the distances
        between the models' parameters and `moved [K]` how far each went from its start. M counts the clients that have
        arrived. None for other methods.
        """
        rows = self.method.few(self.server.state)
        if rows is None:
            return None
        points = self.layout.cut(rows, "parameters")
        metric = self.measures.chosen
        choice: list[int] = []
        test: list[list[float]] = []
        for ids in self._waves(np.arange(self.arrived)):
            row, cohort = self._deployed(ids, self.server)
            mine = self.layout.cut(row, "parameters")
            away = torch.stack([torch.linalg.vector_norm(mine - point, dim=1) for point in points], 1)  # [C, K]
            choice += away.argmin(1).tolist()
            held = settled(cohort, self._with_own(Models(rows.expand(len(ids), *rows.shape)), ids))
            test += _short(cohort.score(held.tensors()["rows"], "test", self.measures.further)[metric.label])
        first = self.method.few(self.method.start(self.init))
        start = points[:1] if first is None else self.layout.cut(first, "parameters")
        moved = torch.linalg.vector_norm(points - (start if len(start) == len(points) else start[:1]), dim=1)
        return {
            "round": self.rounds_done, "choice": choice, "metric": metric.label, "test": test,
            "apart": _short(between(points, points)), "moved": _short(moved),
        }

    # -- clients ---------------------------------------------------------------------------------------------------

    def selected(self, t: int) -> IntArray:
        """The clients asked in round t, of those that are there; they do not depend on the clients' order."""
        there = self.federation.there(t)
        if self.server.asked(len(there)) == len(there) and self.training.sampling == "fixed":
            return there
        if t not in self._selections:
            self._selections = {k: ids for k, ids in self._selections.items() if k + 1 >= t}  # this round and the next
            self._selections[t] = there[self.server.selected(self._names[there], t)]
        return self._selections[t]

    @property
    def arrived(self) -> int:
        """How many training clients are known to the server by now; with churn they are numbered by arrival."""
        return self.federation.arrived(self.rounds_done)

    def _answering(self, selected: IntArray, t: int) -> IntArray:
        if not self.training.dropouts:
            return selected
        return selected[self._chance(selected, t, "dropout") >= self.training.dropouts]

    def _chance(self, ids: IntArray, t: int, purpose: str) -> FloatArray:
        return chance(self.training.seed, self._names[ids], t, purpose)

    def _straggling(self, ids: IntArray, t: int) -> FloatArray | None:
        if not self.training.stragglers:
            return None
        slow = self._chance(ids, t, "straggle") < self.training.stragglers
        return np.where(slow, 0.1 + 0.9 * self._chance(ids, t, "work"), 1.0)

    def _first_of_round(self, t: int) -> list[IntArray]:
        """The first wave of a round, where it pays to know it in advance."""
        if not self._states.away or t >= self.training.rounds:
            return []
        return self._waves(self._answering(self.selected(t), t))[:1]

    def cohort(self, ids: IntArray, pace: FloatArray | None = None) -> Cohort:
        """These clients as a cohort of the current round."""
        return self.at(self.rounds_done, ids, pace)

    def _index(self, ids: IntArray) -> Tensor:
        """Client numbers on the device."""
        return self._weighed(ids)[0]

    def _weighed(self, ids: IntArray) -> tuple[Tensor, Tensor, Tensor]:
        """Client numbers, and the counts and shares that the method sees of them, on the device; a few are kept."""
        key = ids.tobytes()
        if key not in self._indices:
            if len(self._indices) > 4:
                self._indices.clear()
            index, n = torch.from_numpy(np.stack([ids, self.engine.counts(ids, "train")])).to(self.device)
            self._indices[key] = (index, *self.server.weighed(n))
        return self._indices[key]

    # -- waves -----------------------------------------------------------------------------------------------------

    def _waves(self, ids: IntArray) -> list[IntArray]:
        return waves.cut(ids, self.wave)

    def _wave(self, models: int) -> int:
        """How many clients are computed at once when each holds so many models; see `coterie.engine.waves`."""
        if self.training.wave:
            return min(self.training.wave, self.population)
        return waves.size(self.fitting(models), self.server.asked(self.population), self.population)

    # -- what clients keep -----------------------------------------------------------------------------------------

    def _place(self, joined: Record) -> store.Place:
        """Where the clients' states are kept; recorded where there are any."""
        each = sum(records.bytes_each(joined.tensors()).values())
        if self.training.buffers == "local":
            each += sum(entry.size for entry in self.layout.within("buffers")) * self.dtype.itemsize
        if self.optimizer is not None and self.optimizer.keep:
            each += len(self.optimizer.slots) * self.layout.size * self.dtype.itemsize
        wanted = self.training.state
        everyone = self.training.participation == 1
        place = store.choose(each * self.population, everyone, self.device) if wanted == "auto" else wanted
        if each:
            self.choices["state"] = place
        return place

    @property
    def own(self) -> Record:
        """The tables `[M, ...]` of the clients' own states, wherever they are kept."""
        return self._own_type.of(self._states.tables)

    @own.setter
    def own(self, states: Record) -> None:
        self._own_type = type(states)
        self._states.replace(states.tensors())

    @property
    def buffers(self) -> Tensor | None:
        """The clients' own buffers `[M, (K,) B]`, with buffers=local and once a client has trained."""
        return None if self._statistics is None else self._statistics.tables["buffers"]

    def _own(self, ids: IntArray) -> Record:
        return self._own_type.of(self._states.take(ids))

    def _keep(self, ids: IntArray, states: dict[str, Tensor], kept: Tensor | None) -> None:
        self._states.put(ids, states)
        if kept is not None:  # [C, (K,) B]
            if self._statistics is None:
                fresh = self.layout.cut(self.init.row, "buffers").cpu()
                self._statistics = Store(self.population, self.device, self._states.place)
                self._statistics.replace({"buffers": fresh.expand(self.population, *kept.shape[1:])})
            self._statistics.put(ids, {"buffers": kept})

    def _recalled(self, ids: IntArray) -> dict[str, Tensor] | None:
        """What these clients' optimizers remember `[C, ...]`; nothing before their first round, None without keep."""
        if not self.remembers:
            return None
        return {} if self._memory is None else self._memory.take(ids)

    def _remember(self, ids: IntArray, memory: dict[str, Tensor] | None) -> None:
        if not memory:
            return
        if self._memory is None:  # of clients that have not trained yet: 0, which is fresh
            self._memory = Store(self.population, self.device, self._states.place)
            self._memory.open(memory)
        self._memory.put(ids, memory)

    def _ahead(self, parts: Sequence[IntArray]) -> None:
        """Bring the states of the first of these waves to the device while it computes."""
        for held in (self._states, self._statistics, self._memory):
            if held is not None and len(parts):
                held.ahead(parts[0])

    # -- what travels ----------------------------------------------------------------------------------------------

    def admitted(self, ids: IntArray) -> Server:
        """The server that knows these clients too; the simulation's own stays as it is."""
        return alone(self._admitting(ids))[0]

    def _admitting(self, ids: IntArray) -> Course[tuple[Server, list[IntArray]]]:
        return arrival.admitting(self.server, self._index(ids), map(self.cohort, self._waves(ids)))

    def payload(self, ids: IntArray, server: Server | None = None) -> Record:
        """What these clients receive `[C, ...]`, with their own buffers in it where they keep such."""
        return self._with_own((server or self.server).payload(self._index(ids)), ids)

    def _with_own(self, payload: Record, ids: IntArray) -> Record:
        """Models `[C, ...]` with these clients' own buffers, where they keep such."""
        if self._statistics is None or ids.max() >= self.population:
            return payload
        return self.receive(payload, self._statistics.take(ids)["buffers"])

    # -- evaluation ------------------------------------------------------------------------------------------------

    def _stages(
        self, ids: IntArray, prefix: str, server: Server | None = None, spent: Sequence[IntArray] = ()
    ) -> Course[dict[str, Scores]]:
        """The stages of these clients; newcomers join first, and each wave of them has `spent` steps `[C]` before."""
        found: list[dict[str, Measured]] = []
        parts = self._waves(ids)
        for number, wave in enumerate(parts):
            cohort, payload = self.cohort(wave), self.payload(wave, server)
            if prefix:
                scored = yield Call(score_newcomers, self.method, cohort, (payload,))
                found.append({stage: (*both, steps + spent[number]) for stage, (*both, steps) in scored.items()})
            else:
                found.append((yield Call(score, self.method, cohort, (payload, self._own(wave)))))
                self._ahead(parts[number + 1 :])
        return {f"{prefix}{stage}": self._scores(ids, [one[stage] for one in found]) for stage in found[0]}

    def _deployed(self, ids: IntArray, server: Server) -> tuple[Tensor, Cohort]:
        """The rows `[C, D]` that these clients use, and the cohort that made them; newcomers join first."""
        cohort = self.cohort(ids)
        payload = self.payload(ids, server)
        mine = self._own(ids) if ids.max() < self.arrived else join(self.method, cohort, payload)
        return deploy(self.method, cohort, payload, mine), cohort

    def _scores(self, ids: IntArray, found: list[Measured]) -> Scores:
        test, val, spent = zip(*found, strict=True)
        seen = {name: t.double().cpu().numpy() for name, t in records.concatenate(test).items()}
        chosen = {name: t.double().cpu().numpy() for name, t in records.concatenate(val).items()}
        counts = seen.pop(CONFUSION, None)
        has_val = self.engine.sizes(ids, "val") > 0
        known = self.measures.columns(chosen, self.class_names)
        held = {name: np.where(has_val, t, np.nan) for name, t in known.items()}
        return Scores(
            ids, self.engine.counts(ids, "test"), np.concatenate(spent), self.measures.columns(seen, self.class_names),
            held, self.measures.scale, None if counts is None else counts.astype(np.int64),
        )

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def snapshot(self, copies: bool = True) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All tensors that define the state, and what else is needed to go on from it.

        Without `copies` they are the tensors in use, good until the next round: many clients' states are large.
        """
        tensors = self.server.tensors() | checkpoint.prefixed("own", self.own.tensors())
        if self.buffers is not None:
            tensors["buffers"] = self.buffers
        if self._memory is not None:
            tensors |= checkpoint.prefixed(MEMORY, self._memory.tables)
        if copies:
            tensors = {name: t.clone() for name, t in tensors.items()}
        meta = {
            "round": self.rounds_done, **self.server.meta(), "own": self._own_type.__name__,
            "federation": self.federation.fingerprint(), "choices": self.choices,
        }
        return tensors, meta

    def restore(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Go on from a snapshot."""
        try:
            self._restore(tensors, meta)
        except CoterieError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as reason:
            raise CoterieError(f"the checkpoint does not fit this run ({type(reason).__name__}: {reason}).") from reason

    def after(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> Simulation:
        """The same clients with the state of a snapshot; this simulation stays as it is, and they share the engine."""
        other = copy.copy(self)
        other.server = self.server.apart()
        other._states = Store(self.population, self.device, self._states.place)
        other._states.open(self._states.tables)
        other.restore(tensors, meta)
        return other

    def _restore(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        self.server.check_layout(meta)
        if meta["federation"] != self.federation.fingerprint():
            raise CoterieError("the data are not those that the run began with; give it those, and of a file that has "
                               "changed since, what it held then.")
        own = record_class(self.method, meta["own"]).of(checkpoint.part(tensors, "own"))
        wrong = sorted(self.own.tensors().keys() ^ own.tensors().keys())
        if wrong:
            raise CoterieError(f"the checkpoint does not fit this run: {', '.join(wrong)} is missing or too much.")
        self.server.restore(tensors, meta)
        self.own = own
        self._statistics = None
        if "buffers" in tensors:
            self._statistics = Store(self.population, self.device, self._states.place)
            self._statistics.replace({"buffers": tensors["buffers"]})
        self._memory = None
        if remembered := checkpoint.part(tensors, MEMORY):
            self._memory = Store(self.population, self.device, self._states.place)
            self._memory.replace(remembered)
        self.rounds_done = int(meta["round"])


def _short(t: Tensor) -> Any:
    """As lists, with the digits that a record needs."""
    return t.double().mul(1e5).round().div(1e5).tolist()
