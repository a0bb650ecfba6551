"""Running methods to the end: one method, or a comparison; with a folder a run survives being killed."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from coterie import checkpoint, registry
from coterie.config import Training, build
from coterie.data import Federation
from coterie.evaluate import Evaluation, validation_score
from coterie.folder import Folder
from coterie.method import Method
from coterie.net import PerSample
from coterie.result import Result
from coterie.simulate import ModelLike, Simulation

ALWAYS = ("local", "fedavg")
"""Methods every comparison holds: Local, and FedAvg, whose `adapted` stage is FedAvg + fine-tune."""


@dataclass(frozen=True)
class Progress:
    """What a watcher is told after every round and evaluation."""

    method: str
    seed: int
    round: int
    rounds: int
    latest: Evaluation


Watch = Callable[[Progress], None]


class Interrupted(Exception):  # noqa: N818 (not an error)
    """ctrl-C: the round was finished and the state saved."""


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
    place = Folder(Path(folder)) if folder is not None else None
    saved = place.load() if place is not None and resume and place.checkpoint.exists() else None
    choices = saved[1]["choices"] if saved else None
    simulation = Simulation(chosen, model, federation, options, head, loss, choices)
    if saved:
        simulation.restore(*saved)
    elif place is not None and not resume:
        place.create(_config(chosen, simulation, head))
    elif place is not None:
        place.restart()
    return _Driver(simulation, place, watch).drive()


def compare(
    methods: Iterable[Method | str], model: ModelLike, federation: Federation, *, seeds: int | Sequence[int] = 1,
    folder: str | Path | None = None, watch: Watch | None = None, resume: bool = False,
    head: str | None = None, loss: PerSample | None = None, **training: Any,
) -> list[Result]:
    """Run every method with every seed on the same federation; Local and FedAvg are always among them."""
    chosen = with_baselines([registry.method(m) if isinstance(m, str) else m for m in methods])
    numbers = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    results = []
    check(chosen, model, federation, head=head, loss=loss, **training)
    for one in chosen:
        for seed in numbers:
            inner = Path(folder) / _slug(registry.spelling(one)) / f"seed{seed}" if folder is not None else None
            options = {**training, "seed": seed}
            if inner is not None and resume and Folder(inner).finished:
                results.append(Folder(inner).result())
                continue
            again = resume and inner is not None and (inner / "config.json").exists()
            result = run(
                one, model, federation, folder=inner, head=head, loss=loss, watch=watch, resume=again,
                **options,
            )
            results.append(result if folder is None else replace(result, simulation=None))
    return results


def check(
    methods: Sequence[Method], model: ModelLike, federation: Federation, *, head: str | None = None,
    loss: PerSample | None = None, **training: Any,
) -> None:
    """Raise before anything is trained or written if one of the methods cannot run; the first is built whole."""
    Simulation(methods[0], model, federation, build(Training, training, "training"), head, loss)
    for one in methods[1:]:
        Simulation.check(one, federation.population, Simulation.layout_of(one, model, head))


def with_baselines(methods: Sequence[Method]) -> list[Method]:
    """The methods in order, each once, behind the baselines that a comparison cannot do without."""
    known = [registry.method(name) for name in ALWAYS]
    return list(dict.fromkeys([*(b for b in known if b not in methods), *methods]))


class _Driver:
    """The rounds of one run: train, evaluate, record, checkpoint, stop early."""

    def __init__(self, simulation: Simulation, folder: Folder | None, watch: Watch | None) -> None:
        self.simulation, self.folder, self.watch = simulation, folder, watch
        self.training = simulation.training
        self.spelling = registry.spelling(simulation.method)
        self.history: list[Evaluation] = folder.history() if folder is not None else []
        self.rounds: list[dict[str, Any]] = folder.rounds() if folder is not None else []

    def drive(self) -> Result:
        simulation = self.simulation
        with _stop_on_ctrl_c() as stopped:
            self._evaluate_when_due()
            while simulation.rounds_done < self.training.rounds and not self._patience_is_over():
                self._round()
                self._evaluate_when_due()
                done = simulation.rounds_done == self.training.rounds or self._patience_is_over()
                if done or stopped() or simulation.rounds_done % self.training.checkpoint_every == 0:
                    self._save()
                if stopped() and not done:
                    raise Interrupted
        if self.history[-1].round != simulation.rounds_done:
            self._evaluate()
        self._save()
        result = Result(
            self.spelling, self.training.seed, tuple(self.history), tuple(self.rounds),
            sum(r["seconds"] for r in self.rounds), simulation.method.published, simulation.federation.names,
            self.folder.path if self.folder else None, simulation,
        )
        if self.folder is not None:
            rows = checkpoint.digest(simulation.snapshot(copies=False)[0])
            self.folder.finish({"rounds": simulation.rounds_done, "seconds": result.seconds, "rows_sha256": rows})
        return result

    def _round(self) -> None:
        start = time.perf_counter()
        done = self.simulation.round()
        if self.simulation.device.type == "cuda":
            torch.cuda.synchronize()
        self.rounds.append({**asdict(done), "seconds": round(time.perf_counter() - start, 6)})
        if self.folder is not None:
            self.folder.append_round(self.rounds[-1])
        self._tell()

    def _evaluate_when_due(self) -> None:
        t = self.simulation.rounds_done
        due = t % self.training.evaluate_every == 0 or t == self.training.rounds
        if due and not (self.history and self.history[-1].round == t):
            self._evaluate()

    def _evaluate(self) -> None:
        self.history.append(self.simulation.evaluate())
        if self.folder is not None:
            self.folder.append_evaluation(self.history[-1])
        self._tell()

    def _tell(self) -> None:
        if self.watch is not None and self.history:
            self.watch(
                Progress(
                    self.spelling, self.training.seed, self.simulation.rounds_done, self.training.rounds,
                    self.history[-1],
                )
            )

    def _save(self) -> None:
        if self.folder is not None:
            self.folder.save(*self.simulation.snapshot(copies=False))

    def _patience_is_over(self) -> bool:
        """No better validation score in the last `patience` evaluations."""
        if not self.training.patience:
            return False
        scores = [validation_score(e.stages["served"]) for e in self.history]
        best = max(range(len(scores)), key=lambda i: (scores[i], -i))
        return len(scores) - 1 - best >= self.training.patience


def _config(method: Method, simulation: Simulation, head: str | None) -> dict[str, Any]:
    return {
        "method": registry.spelling(method), "published": method.published, "training": asdict(simulation.training),
        "federation": simulation.federation.recipe, "clients": list(simulation.federation.names),
        "population": simulation.population, "columns": simulation.layout.size, "head": head,
        "choices": simulation.choices,
    }


def _slug(spelling: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in spelling.rpartition("/")[2])


@contextmanager
def _stop_on_ctrl_c() -> Iterator[Callable[[], bool]]:
    """The first ctrl-C lets the round finish; a second one stops at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def ask(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)

