"""Running methods to the end: one method, or a comparison; with a folder a run survives being killed."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coterie import registry
from coterie.contract.method import Method
from coterie.contract.net import PerSample
from coterie.data import Federation
from coterie.data.churn import NEVER
from coterie.errors import CoterieError, Interrupted
from coterie.evaluation.score import Evaluation
from coterie.evaluation.stages import SERVED
from coterie.evaluation.summary import validation_score
from coterie.options import build, respelled
from coterie.running import checkpoint
from coterie.running.folder import Folder
from coterie.running.result import Result
from coterie.running.server import Server
from coterie.running.simulation import ModelLike, Simulation
from coterie.running.spec import RunSpec
from coterie.running.together import Course, News, Settle, Stack, Told, kin, telling
from coterie.running.together_pays import most_clients, pays
from coterie.running.training import Training

ALWAYS = ("local", "fedavg")
"""Methods every comparison holds: Local, and FedAvg, whose `adapted` stage is FedAvg + fine-tune."""


@dataclass(frozen=True)
class Progress:
    """What whoever watches is told after every round and evaluation."""

    method: str
    seed: int
    round: int
    rounds: int
    latest: Evaluation
    record: dict[str, Any] | None = None  # of the last round, as in metrics.jsonl; None before the first


Watch = Callable[[Progress], None]


def run(
    method: Method | str, model: ModelLike, federation: Federation, *, folder: str | Path | None = None,
    head: str | None = None, loss: PerSample | None = None, watch: Watch | None = None, resume: bool = False,
    **training: Any,
) -> Result:
    """Train one method and return its result; further options are those of `Training` (rounds, lr, seed, ...).

    With a `folder` everything is recorded there and the state is checkpointed; `resume` goes on from it.
    """
    made = prepare_run(method, model, federation, folder=folder, head=head, loss=loss, resume=resume, **training)
    return made.go(watch)[0]


def compare(
    methods: Iterable[Method | str], model: ModelLike, federation: Federation, *, seeds: int | Sequence[int] = 1,
    folder: str | Path | None = None, watch: Watch | None = None, resume: bool = False,
    head: str | None = None, loss: PerSample | None = None, **training: Any,
) -> list[Result]:
    """Run every method with every seed on the same federation; Local and FedAvg are always among them."""
    made = prepare_comparison(
        methods, model, federation, seeds=seeds, folder=folder, resume=resume, head=head, loss=loss, **training
    )
    return made.go(watch)


def prepare_run(
    method: Method | str, model: ModelLike, federation: Federation, *, folder: str | Path | None = None,
    resume: bool = False, head: str | None = None, loss: PerSample | None = None, **training: Any,
) -> Prepared:
    """What `run` does before it trains or writes anything."""
    chosen = registry.method(method) if isinstance(method, str) else method
    place = None if folder is None else Folder(folder)
    wanted = _Wanted(chosen, build(Training, training, "training"), place, resume)
    return Prepared([wanted], _Shared(model, federation, head, loss), [chosen])


def prepare_comparison(
    methods: Iterable[Method | str], model: ModelLike, federation: Federation, *, seeds: int | Sequence[int] = 1,
    folder: str | Path | None = None, resume: bool = False, head: str | None = None, loss: PerSample | None = None,
    **training: Any,
) -> Prepared:
    """What `compare` does before it trains or writes anything."""
    named = [registry.method(m) if isinstance(m, str) else m for m in methods]
    numbers = range(seeds) if isinstance(seeds, int) else seeds
    wanted = []
    for one in with_baselines(named):
        place = None if folder is None else _place(Path(folder), registry.spelling(one))
        for seed in numbers:
            inner = Folder(place / f"seed{seed}") if place is not None else None
            again = resume and inner is not None and (inner.path / "config.json").exists()
            wanted.append(_Wanted(one, build(Training, {**training, "seed": seed}, "training"), inner, again, True))
    return Prepared(wanted, _Shared(model, federation, head, loss), named)


def with_baselines(methods: Sequence[Method]) -> list[Method]:
    """The methods in order, each once, behind the baselines that a comparison cannot do without."""
    known = [registry.method(name) for name in ALWAYS]
    return list(dict.fromkeys([*(b for b in known if b not in methods), *methods]))


@dataclass(frozen=True)
class _Shared:
    """What the runs of a comparison have in common."""

    model: ModelLike
    federation: Federation
    head: str | None
    loss: PerSample | None


@dataclass
class _Wanted:
    """One run that is asked for. `among` others, a finished one is not opened again, and none stays in memory that has
    a folder."""

    method: Method
    training: Training
    folder: Folder | None
    resume: bool
    among: bool = False
    built: _Driver | None = None

    @property
    def finished(self) -> bool:
        return self.among and self.resume and self.folder is not None and self.folder.finished

    def build(self, shared: _Shared, twin: Simulation | None = None) -> _Driver:
        """The simulation at its start, or where its folder's checkpoint left it, and who drives it."""
        folder = self.folder
        saved = folder.load() if folder is not None and self.resume and folder.checkpoint.exists() else None
        choices = saved[1].get("choices") if saved else None
        if saved and folder is not None and not isinstance(choices, dict):
            raise CoterieError(f"the checkpoint {folder.checkpoint} is damaged: it does not say how it was computed.")
        simulation = Simulation(
            self.method, shared.model, shared.federation, self.training, shared.head, shared.loss, choices, twin
        )
        if saved:
            simulation.restore(*saved)
        return _Driver(self, simulation, shared.head, saved is not None)


class Prepared:
    """Runs that can start: whatever would refuse them has been asked, and nothing is trained or written yet.

    They run while somebody asks for their progress, and then `results` holds what they found, in the order of methods
    and seeds:

        for progress in prepared:
            print(progress.round)
        prepared.results

    `reason` says why the model cannot be stacked, if so.
    """

    def __init__(self, wanted: Sequence[_Wanted], shared: _Shared, named: Sequence[Method]) -> None:
        """`named` are the methods that somebody asked for; `wanted` may hold baselines as well."""
        self._wanted, self._shared = wanted, shared
        self.reason = ""
        self.results: list[Result] = []
        self._refuse_early(named)

    def _refuse_early(self, named: Sequence[Method]) -> None:
        """Raise if one of the methods cannot run; the first that was named is built whole.

        So are those with privacy, which depends on what they upload. What is built here is kept for its run.
        """
        left: dict[Method, _Wanted] = {}
        for one in self._wanted:
            if not one.finished:
                left.setdefault(one.method, one)
        whole = next((method for method in [*named, *left] if method in left), None)
        for method, one in left.items():
            if method == whole or method.aggregator.private:
                one.built = one.build(self._shared)
                self.reason = self.reason or one.built.simulation.choices.get("reason", "")
            else:
                layout = Simulation.layout_of(method, self._shared.model, self._shared.head)
                Server.refuse_early(method, self._shared.federation.arrived(0), layout)

    @property
    def spelling(self) -> str:
        """Of the first run's method."""
        return registry.spelling(self._wanted[0].method)

    @property
    def rounds_done(self) -> int:
        """Of the first run, where it goes on from its checkpoint."""
        built = self._wanted[0].built
        return 0 if built is None else built.simulation.rounds_done

    def __iter__(self) -> Told[None]:
        """Train to the end; the progress of every run as it comes."""
        results: dict[int, Result] = {}
        families: dict[Hashable, list[int]] = {}
        for number, one in enumerate(self._wanted):
            if one.finished and one.folder is not None:
                results[number] = one.folder.result()
            else:
                families.setdefault(kin(one.method), []).append(number)
        for numbers in families.values():
            done = yield from _side_by_side([self._wanted[number] for number in numbers], self._shared)
            results |= zip(numbers, done, strict=True)
        self.results = [results[number] for number in range(len(self._wanted))]

    def go(self, watch: Watch | None = None) -> list[Result]:
        """Train to the end, telling `watch` the progress; what it raises stops the run that it was told of."""
        told = iter(self)
        for progress in told:
            try:
                if watch is not None:
                    watch(progress)
            except Exception as reason:
                told.throw(reason)
        return self.results


def _side_by_side(wanted: Sequence[_Wanted], shared: _Shared) -> Told[list[Result]]:
    """Runs of methods that are kin to their ends: as one stack where that pays, otherwise one after another."""
    left, results = list(wanted), []
    while left:
        first = left[0].built or left[0].build(shared)
        size, reason = 1, ""
        if len(wanted) > 1:
            better, reason = pays(first.simulation)
            room = most_clients(first.simulation)
            size = max(1, room // max(1, len(first.simulation.selected(0)))) if better else 1
        now, left = left[:size], left[size:]
        for one in now:
            one.built = None
        drivers = [first, *(one.build(shared, first.simulation) for one in now[1:])]
        for driver in drivers:
            if reason:
                together = f"{len(now)} runs in one stack" if len(now) > 1 else "alone"
                driver.simulation.choices["together"] = f"{together}: {reason}"
        with _stop_on_ctrl_c() as asked:
            courses = [driver.drive(asked.is_set) for driver in drivers]
            if len(courses) > 1:
                results += yield from Stack[Result](room, asked.set).telling(courses)
            else:
                results.append((yield from telling(courses[0])))
        del first, drivers, driver, courses  # the next runs need the memory
    return results


class _Driver:
    """The rounds of one run: train, evaluate, record, checkpoint, stop early."""

    def __init__(self, wanted: _Wanted, simulation: Simulation, head: str | None, restored: bool) -> None:
        self.simulation, self.training, self.folder = simulation, wanted.training, wanted.folder
        self.resume, self.restored, self.head = wanted.resume, restored, head
        self.spelling = registry.spelling(wanted.method)
        self.kept = simulation if self.folder is None or not wanted.among else None

    def _open(self) -> None:
        """Begin the records, or read those that a checkpoint goes with."""
        self.history: list[Evaluation] = []
        self.rounds: list[dict[str, Any]] = []
        if self.folder is None:
            return
        if not self.resume:
            self.folder.create(_config(self.spelling, self.simulation, self.head))
            self.folder.describe(self.simulation.federation)
        elif not self.restored:
            self.folder.restart()
        self.history, self.rounds = self.folder.history(), self.folder.rounds()

    def drive(self, stopped: Callable[[], bool]) -> Course[Result]:
        """The whole run; what its clients compute is asked for by `yield`."""
        simulation = self.simulation
        self._open()
        yield from self._evaluate_when_due()
        while simulation.rounds_done < self.training.rounds and not self._patience_is_over():
            yield from self._round()
            yield from self._evaluate_when_due()
            done = simulation.rounds_done == self.training.rounds or self._patience_is_over()
            if done or stopped() or simulation.rounds_done % self.training.checkpoint_every == 0:
                self._save()
            if stopped() and not done:
                raise Interrupted
        if self.history[-1].round != simulation.rounds_done:
            yield from self._evaluate()
        self._save()
        result = Result(
            self.spelling, self.training.seed, tuple(self.history), tuple(self.rounds),
            sum(r["seconds"] for r in self.rounds), simulation.method.printed, simulation.federation.names,
            self.folder.path if self.folder else None, self.kept, _arrivals(simulation.federation),
        )
        if self.folder is not None:
            found = simulation.models()
            if found is not None:
                self.folder.append_models(found)
            rows = checkpoint.digest(simulation.snapshot(copies=False)[0])
            self.folder.finish({"rounds": simulation.rounds_done, "seconds": result.seconds, "rows_sha256": rows})
        return result

    def _round(self) -> Course[None]:
        start = time.perf_counter()
        done = yield from self.simulation.rounding()
        beside = yield Settle(self.simulation.device, done.round)
        self.rounds.append({**asdict(done), "seconds": round((time.perf_counter() - start) / beside, 6)})
        if self.folder is not None:
            self.folder.append_round(self.rounds[-1])
        yield from self._tell()

    def _evaluate_when_due(self) -> Course[None]:
        t = self.simulation.rounds_done
        due = t % self.training.evaluate_every == 0 or t == self.training.rounds
        if due and not (self.history and self.history[-1].round == t):
            yield from self._evaluate()

    def _evaluate(self) -> Course[None]:
        self.history.append((yield from self.simulation.evaluating()))
        if self.folder is not None:
            self.folder.append_evaluation(self.history[-1], _arrivals(self.simulation.federation))
        yield from self._tell()

    def _tell(self) -> Course[None]:
        if self.history:
            last = self.rounds[-1] if self.rounds else None
            yield News(Progress(self.spelling, self.training.seed, self.simulation.rounds_done, self.training.rounds,
                                self.history[-1], last))

    def _save(self) -> None:
        if self.folder is not None:
            self.folder.save(*self.simulation.snapshot(copies=False))

    def _patience_is_over(self) -> bool:
        """No better validation score in the last `patience` evaluations."""
        if not self.training.patience:
            return False
        scores = [validation_score(e.stages[SERVED]) for e in self.history]
        best = max(range(len(scores)), key=lambda i: (scores[i], -i))
        return len(scores) - 1 - best >= self.training.patience


def _arrivals(federation: Federation) -> tuple[int, ...]:
    return () if federation.schedule is None else tuple(federation.schedule[:, 0].tolist())


def _config(spelling: str, simulation: Simulation, head: str | None) -> dict[str, Any]:
    federation, schedule = simulation.federation, simulation.federation.schedule
    spec = RunSpec.for_data(federation, method=spelling, model="", training=simulation.training, head=head)
    churn = {} if schedule is None else {"churn": [[a, None if b == NEVER else b] for a, b in schedule.tolist()]}
    return {
        **spec.config(), "published": simulation.method.printed, "by_model": simulation.method.by_model,
        "federation": federation.recipe, "clients": list(federation.names), "population": simulation.population,
        "columns": simulation.layout.size,
        "choices": simulation.choices, **churn,
    }


def _place(folder: Path, spelling: str) -> Path:
    """A method's folder in a comparison's: named by its spelling, or by that of an older version if it made it."""
    place = folder / _slug(spelling)
    if not place.exists():
        for config in sorted(folder.glob("*/seed*/config.json")):
            if respelled(str(Folder(config.parent).config().get("method"))) == spelling:
                return config.parents[1]
    return place


def _slug(spelling: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in spelling.rpartition("/")[2])


@contextmanager
def _stop_on_ctrl_c() -> Iterator[threading.Event]:
    """The first ctrl-C sets the event, which lets the round finish; a second one stops at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)

