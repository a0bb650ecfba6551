"""One run from its first round to its last: train, evaluate, record, checkpoint, tell."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from coterie import registry
from coterie.data import Federation
from coterie.data.churn import NEVER
from coterie.errors import Interrupted
from coterie.evaluation.score import Evaluation
from coterie.evaluation.stages import SERVED
from coterie.evaluation.summary import validation_score
from coterie.running import checkpoint, chosen
from coterie.running.chosen import Keeps, KeptStates, State
from coterie.running.confusion import Matrices, without
from coterie.running.folder import Folder
from coterie.running.rate import Watch
from coterie.running.result import Result
from coterie.running.simulation import Simulation
from coterie.running.spec import RunSpec
from coterie.running.together import Course, News, Settle


@dataclass(frozen=True)
class Progress:
    """What whoever watches is told after every round and evaluation."""

    method: str
    seed: int
    round: int
    rounds: int
    latest: Evaluation
    record: dict[str, Any] | None = None  # of the last round, as in metrics.jsonl; None before the first
    note: str = ""  # what the run has to say of itself, once


class Driver:
    """The rounds of one run: train, evaluate, record, checkpoint, stop early."""

    def __init__(
        self, simulation: Simulation, folder: Folder | None, asked: Mapping[str, Any], resume: bool, restored: bool,
        keep: bool, again: Callable[[], Simulation] | None = None,
    ) -> None:
        """`asked` are `head`, `adapter`, `freeze` and `train`, what was said of the model.

        `resume` goes on with what the folder holds, and the simulation is `restored` where that was a checkpoint.

        `keep` leaves the simulation in the result, and `again` makes it anew, to try aside what it does not do.
        """
        self.simulation, self.training, self.folder = simulation, simulation.training, folder
        self.resume, self.restored, self.asked = resume, restored, asked
        self.spelling = registry.spelling(simulation.method)
        self.kept = simulation if keep else None
        self.again = again
        self.notes: list[dict[str, Any]] = []
        self._held: dict[int, State] = {}  # the states of chosen rounds, of a run without a folder
        self._saved: tuple[Any, ...] = ()  # what the last checkpoint was of

    def require_same(self) -> None:
        """Raise where the folder holds a run with other settings."""
        if self.folder is not None and self.resume:
            self.folder.require_same(_config(self.spelling, self.simulation, self.asked))

    def _open(self) -> None:
        """Begin the records, or read those that a checkpoint goes with."""
        self.history: list[Evaluation] = []
        self.matrices = Matrices(None if self.folder is None else self.folder.append_confusion)
        self.rounds: list[dict[str, Any]] = []
        self.watch = None if self.again is None else Watch(self.simulation, self.again)
        if self.folder is None:
            return
        if not self.resume:
            self.folder.create(_config(self.spelling, self.simulation, self.asked))
            self.folder.describe(self.simulation.federation)
        else:
            self.folder.go_on(_config(self.spelling, self.simulation, self.asked))
            if not self.restored:
                self.folder.restart()
        self.history, self.rounds = self.folder.history(), self.folder.rounds()
        self.notes = self.folder.notes()
        if self.watch is not None:
            self.watch.quiet = bool(self.notes)

    def drive(self, stopped: Callable[[], bool]) -> Course[Result]:
        """The whole run; what its clients compute is asked for by `yield`."""
        simulation = self.simulation
        self._open()
        yield from self._evaluate_when_due()
        if simulation.server.guard is not None and not self.restored:
            self._save()  # whatever happens from here on, a round that is repeated has the same noise
        while simulation.rounds_done < self.training.rounds and not self._patience_is_over():
            yield from self._round()
            yield from self._evaluate_when_due()
            done = simulation.rounds_done == self.training.rounds or self._patience_is_over()
            if done:
                self.matrices.end()
            if done or stopped() or simulation.rounds_done % self.training.checkpoint_every == 0:
                self._save()
            if stopped() and not done:
                raise Interrupted
        if self.history[-1].round != simulation.rounds_done:
            yield from self._evaluate()
        self.matrices.end()
        self._save()
        result = Result(
            self.spelling, self.training.seed, tuple(self.history), tuple(self.rounds),
            sum(r["seconds"] for r in self.rounds), simulation.method.printed, simulation.federation.names,
            self.folder.path if self.folder else None, self.kept, _arrivals(simulation.federation),
            simulation.class_names, self.matrices.held, notes=tuple(self.notes), kept=self._states(),
        )
        if self.folder is not None:
            found = simulation.models()
            if found is not None:
                self.folder.append_models(found)
            rows = checkpoint.digest(simulation.snapshot(copies=False)[0])
            self.folder.finish({"rounds": simulation.rounds_done, "seconds": result.seconds, "rows_sha256": rows})
        return result

    def _round(self) -> Course[None]:
        self._keep()
        if self.watch is not None:
            self.watch.begin()
        start = time.perf_counter()
        done = yield from self.simulation.rounding()
        beside = yield Settle(self.simulation.device, done.round)
        self.rounds.append({**asdict(done), "seconds": round((time.perf_counter() - start) / beside, 6)})
        if self.folder is not None:
            self.folder.append_round(self.rounds[-1])
        yield from self._tell(self._noted(None if self.watch is None else self.watch.end(self._pace())))

    def _evaluate_when_due(self) -> Course[None]:
        t = self.simulation.rounds_done
        due = t % self.training.evaluate_every == 0 or t == self.training.rounds
        if due and not (self.history and self.history[-1].round == t):
            yield from self._evaluate()

    def _evaluate(self) -> Course[None]:
        found = yield from self.simulation.evaluating()
        self.history.append(without(found))
        if self.folder is not None:
            federation = self.simulation.federation
            self.folder.append_evaluation(self.history[-1], _arrivals(federation), names=federation.names)
        self.matrices.keep(found, self.history)
        seen = None if self.watch is None else self.watch.evaluated(self.history[-1], self._pace())
        yield from self._tell(self._noted(seen))

    def _pace(self) -> float:
        """Seconds a round."""
        return float(sum(record["seconds"] for record in self.rounds)) / max(len(self.rounds), 1)

    def _noted(self, note: dict[str, Any] | None) -> str:
        """Write down what the run says of itself, if anything; the words."""
        if note is None:
            return ""
        self.notes.append(note)
        if self.folder is not None:
            self.folder.append_note(note)
        return str(note["text"])

    def _tell(self, note: str) -> Course[None]:
        if self.history:
            last = self.rounds[-1] if self.rounds else None
            yield News(Progress(self.spelling, self.training.seed, self.simulation.rounds_done, self.training.rounds,
                                self.history[-1], last, note))

    def _keep(self) -> None:
        """Keep the state, which is about to change, if it is the best so far on validation data."""
        t = self.simulation.rounds_done
        if self.history[-1].round != t or t not in (best := chosen.wanted(self.history, self._keeps())):
            return
        if self.folder is not None:
            self._save()
        else:
            state = chosen.on_host(self.simulation.snapshot(copies=False))
            self._held = {**chosen.only(best, self._held), t: state}

    def _keeps(self) -> Keeps:
        tensors, private = self.simulation.snapshot(copies=False)[0], self.simulation.method.aggregator.private
        return chosen.keeps(tensors, self.simulation.init.row, private)

    def _states(self) -> KeptStates:
        if self.folder is not None:
            return self.folder.kept()
        states = {t: partial(_as_it_is, state) for t, state in self._held.items()}
        return KeptStates(self.simulation.rounds_done, states, self._keeps())

    def _save(self) -> None:
        """A checkpoint, unless there is one of just this state and these records."""
        if self.folder is None:
            return
        now = (self.simulation.rounds_done, self.folder.lengths())
        if now != self._saved:
            keeps = self._keeps()
            self.folder.save(*self.simulation.snapshot(copies=False), chosen.wanted(self.history, keeps), keeps)
            self._saved = now

    def _patience_is_over(self) -> bool:
        """No better validation score in the last `patience` evaluations."""
        if not self.training.patience:
            return False
        scores = [validation_score(e.stages[SERVED]) for e in self.history]
        best = max(range(len(scores)), key=lambda i: (scores[i], -i))
        return len(scores) - 1 - best >= self.training.patience


def _as_it_is(state: State) -> State:
    return state


def _arrivals(federation: Federation) -> tuple[int, ...]:
    return () if federation.schedule is None else tuple(federation.schedule[:, 0].tolist())


def _config(spelling: str, simulation: Simulation, asked: Mapping[str, Any]) -> dict[str, Any]:
    federation, schedule = simulation.federation, simulation.federation.schedule
    spec = RunSpec.for_data(federation, method=spelling, model="", training=simulation.asked, **asked)
    spec = spec.as_it_was()
    churn = {} if schedule is None else {"churn": [[a, None if b == NEVER else b] for a, b in schedule.tolist()]}
    return {
        **spec.config(), "published": simulation.method.printed, "by_model": simulation.method.by_model,
        "loss": simulation.engine.net.task.name,
        "federation": federation.recipe, "clients": list(federation.names), "population": simulation.population,
        "columns": simulation.layout.size, **simulation.layout.frozen_facts(), "metrics": simulation.measures.record(),
        "choices": simulation.choices, **churn,
    }
