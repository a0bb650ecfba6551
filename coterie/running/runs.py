"""Running methods to the end: one method, or a comparison; with a folder a run survives being killed."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
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
from coterie.running.config import Training
from coterie.running.experiment import with_baselines
from coterie.running.folder import Folder
from coterie.running.joint import Course, Settle, Stack, alone, kin
from coterie.running.pays import most_clients, pays
from coterie.running.result import Result
from coterie.running.server import Server
from coterie.running.simulation import ModelLike, Simulation


@dataclass(frozen=True)
class Progress:
    """What a watcher is told after every round and evaluation."""

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
    chosen = registry.method(method) if isinstance(method, str) else method
    options = build(Training, training, "training")
    driver = _Driver(chosen, options, Folder(Path(folder)) if folder is not None else None, watch, resume)
    driver.build(model, federation, head, loss)
    with _stop_on_ctrl_c() as asked:
        return alone(driver.drive(asked.is_set))


def compare(
    methods: Iterable[Method | str], model: ModelLike, federation: Federation, *, seeds: int | Sequence[int] = 1,
    folder: str | Path | None = None, watch: Watch | None = None, resume: bool = False,
    head: str | None = None, loss: PerSample | None = None, **training: Any,
) -> list[Result]:
    """Run every method with every seed on the same federation; Local and FedAvg are always among them."""
    chosen = with_baselines([registry.method(m) if isinstance(m, str) else m for m in methods])
    numbers = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    check(chosen, model, federation, head=head, loss=loss, **training)
    results: dict[tuple[Method, int], Result] = {}
    families: dict[Hashable, list[_Driver]] = {}
    for one in chosen:
        place = None if folder is None else _place(Path(folder), registry.spelling(one))
        for seed in numbers:
            inner = Folder(place / f"seed{seed}") if place is not None else None
            if inner is not None and resume and inner.finished:
                results[one, seed] = inner.result()
                continue
            again = resume and inner is not None and (inner.path / "config.json").exists()
            options = build(Training, {**training, "seed": seed}, "training")
            families.setdefault(kin(one), []).append(_Driver(one, options, inner, watch, again))
    for drivers in families.values():
        for driver, result in _side_by_side(drivers, lambda d, twin: d.build(model, federation, head, loss, twin)):
            kept = result if folder is None else replace(result, simulation=None)
            results[driver.method, driver.training.seed] = kept
    return [results[one, seed] for one in chosen for seed in numbers]


def _side_by_side(
    drivers: Sequence[_Driver], build: Callable[[_Driver, Simulation | None], Simulation]
) -> Iterator[tuple[_Driver, Result]]:
    """Runs of methods that are kin to their ends: as one stack where that pays, otherwise one after another."""
    left = list(drivers)
    while left:
        first = build(left[0], None)
        size, reason = 1, ""
        if len(drivers) > 1:
            joins, reason = pays(first)
            room = most_clients(first)
            size = max(1, room // max(1, len(first.selected(0)))) if joins else 1
        now, left = left[:size], left[size:]
        for driver in now[1:]:
            build(driver, first)
        for driver in now:
            if reason:
                together = f"{len(now)} runs in one stack" if len(now) > 1 else "alone"
                driver.simulation.choices["join"] = f"{together}: {reason}"
        with _stop_on_ctrl_c() as asked:
            works = [driver.drive(asked.is_set) for driver in now]
            done = Stack[Result](room, asked.set).run(works) if len(works) > 1 else [alone(works[0])]
        yield from zip(now, done, strict=True)
        for driver in now:
            del driver.simulation


def check(
    methods: Sequence[Method], model: ModelLike, federation: Federation, *, head: str | None = None,
    loss: PerSample | None = None, **training: Any,
) -> str:
    """Raise before anything is trained or written if one of the methods cannot run; the first is built whole.

    So are those with privacy, which depends on what they upload. Returns why the model cannot be stacked, if so.
    """
    reason = ""
    for number, one in enumerate(methods):
        if number == 0 or one.aggregator.private:
            built = Simulation(one, model, federation, build(Training, training, "training"), head, loss)
            reason = reason or built.choices.get("reason", "")
        else:
            Server.refuse_early(one, federation.arrived(0), Simulation.layout_of(one, model, head))
    return reason


class _Driver:
    """The rounds of one run: train, evaluate, record, checkpoint, stop early."""

    def __init__(
        self, method: Method, training: Training, folder: Folder | None, watch: Watch | None, resume: bool
    ) -> None:
        self.method, self.training, self.folder, self.watch, self.resume = method, training, folder, watch, resume
        self.spelling = registry.spelling(method)

    def build(
        self, model: ModelLike, federation: Federation, head: str | None, loss: PerSample | None,
        twin: Simulation | None = None,
    ) -> Simulation:
        """The simulation at its start, or where its folder's checkpoint left it."""
        folder, self.head = self.folder, head
        self.saved = folder is not None and self.resume and folder.checkpoint.exists()
        saved = folder.load() if folder is not None and self.saved else None
        choices = saved[1].get("choices") if saved else None
        if saved and folder is not None and not isinstance(choices, dict):
            raise CoterieError(f"the checkpoint {folder.checkpoint} is damaged: it does not say how it was computed.")
        self.simulation = Simulation(self.method, model, federation, self.training, head, loss, choices, twin)
        if saved:
            self.simulation.restore(*saved)
        return self.simulation

    def _open(self) -> None:
        """Begin the records, or read those that a checkpoint goes with."""
        self.history: list[Evaluation] = []
        self.rounds: list[dict[str, Any]] = []
        if self.folder is None:
            return
        if not self.resume:
            self.folder.create(_config(self.method, self.simulation, self.head))
            self.folder.describe(self.simulation.federation)
        elif not self.saved:
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
            self.folder.path if self.folder else None, simulation, _arrivals(simulation.federation),
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
        self._tell()

    def _evaluate_when_due(self) -> Course[None]:
        t = self.simulation.rounds_done
        due = t % self.training.evaluate_every == 0 or t == self.training.rounds
        if due and not (self.history and self.history[-1].round == t):
            yield from self._evaluate()

    def _evaluate(self) -> Course[None]:
        self.history.append((yield from self.simulation.evaluating()))
        if self.folder is not None:
            self.folder.append_evaluation(self.history[-1], _arrivals(self.simulation.federation))
        self._tell()

    def _tell(self) -> None:
        if self.watch is not None and self.history:
            self.watch(
                Progress(
                    self.spelling, self.training.seed, self.simulation.rounds_done, self.training.rounds,
                    self.history[-1], self.rounds[-1] if self.rounds else None,
                )
            )

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


def _config(method: Method, simulation: Simulation, head: str | None) -> dict[str, Any]:
    schedule = simulation.federation.schedule
    churn = {} if schedule is None else {"churn": [[a, None if b == NEVER else b] for a, b in schedule.tolist()]}
    return {
        "method": registry.spelling(method), "published": method.printed, "by_model": method.by_model,
        "training": asdict(simulation.training),
        "federation": simulation.federation.recipe, "clients": list(simulation.federation.names),
        "population": simulation.population, "columns": simulation.layout.size, "head": head,
        "choices": simulation.choices, **churn,
        "samples": {
            "shape": list(simulation.federation.x.shape[1:]), "classes": simulation.federation.classes,
            "outputs": simulation.federation.outputs,
        },
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

