"""Running methods to the end: one method, or a comparison; with a folder a run survives being killed."""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import finalize

from coterie import memory, registry
from coterie.contract.method import Method
from coterie.contract.metric import Metric
from coterie.contract.net import PerSample
from coterie.contract.optimizer import Optimizer
from coterie.contract.patterns import partly
from coterie.data import Federation
from coterie.errors import CoterieError
from coterie.models.lora import adapted
from coterie.options import build, pieces
from coterie.running import checkpoint, room
from coterie.running.driver import Driver, Progress
from coterie.running.folder import Folder, place_of
from coterie.running.guard import Guard
from coterie.running.lock import Lock
from coterie.running.result import Result
from coterie.running.server import Server
from coterie.running.simulation import ModelLike, Simulation
from coterie.running.spec import PARTS
from coterie.running.together import Stack, Told, kin, telling
from coterie.running.together_pays import most_clients, pays
from coterie.running.training import Training

ALWAYS = ("local", "fedavg")
"""Methods every comparison holds: Local, and FedAvg, whose `adapted` stage is FedAvg + fine-tune."""


Watch = Callable[[Progress], None]
"""Is told the progress of a run."""
Watched = Watch | str | Sequence[Watch | str] | None
"""What is watched: metrics, by their spellings, that are stored beside the one that decides, and who is told of the
progress; one of these or several."""


def run(
    method: Method | str, model: ModelLike, federation: Federation, *, folder: str | Path | None = None,
    head: str | None = None, adapter: str = "", freeze: str = "", train: str = "", loss: PerSample | None = None,
    watch: Watched = None, resume: bool = False, **training: Any,
) -> Result:
    """Train one method and return its result; further options are those of `Training` (rounds, lr, seed, ...).

    With a `folder` everything is recorded there and the state is checkpointed; `resume` goes on from it. `adapter`
    puts low-rank adapters beside the model's layers, adapter="lora:rank=8", see `models.lora`. `freeze` and `train`
    name what of the model trains, see `contract.patterns`: train="head" freezes all but the head. `watch` names
    metrics, `watch=("f1", "auroc")`, is a function that is told the progress, or both in a list.
    """
    metrics, told = _parted(watch)
    made = prepare_run(
        method, model, federation, folder=folder, head=head, adapter=adapter, freeze=freeze, train=train, loss=loss,
        resume=resume, watch=metrics, **training,
    )
    return made.go(told)[0]


def compare(
    methods: Iterable[Method | str], model: ModelLike, federation: Federation, *, seeds: int | Sequence[int] = 1,
    folder: str | Path | None = None, watch: Watched = None, resume: bool = False,
    head: str | None = None, adapter: str = "", freeze: str = "", train: str = "", loss: PerSample | None = None,
    **training: Any,
) -> list[Result]:
    """Run every method with every seed on the same federation; Local and FedAvg are always among them."""
    metrics, told = _parted(watch)
    made = prepare_comparison(
        methods, model, federation, seeds=seeds, folder=folder, resume=resume, head=head, adapter=adapter,
        freeze=freeze, train=train, loss=loss, watch=metrics, **training,
    )
    return made.go(told)


def _parted(watch: Watched) -> tuple[tuple[str, ...], Watch | None]:
    """The metrics among what is watched, and one function that tells everybody who is to be told."""
    several = [] if watch is None else [watch] if isinstance(watch, str) or callable(watch) else list(watch)
    people = [one for one in several if not isinstance(one, str)]

    def tell(progress: Progress) -> None:
        for one in people:
            one(progress)

    return tuple(name for one in several if isinstance(one, str) for name in pieces(one)), tell if people else None


def prepare_run(
    method: Method | str, model: ModelLike, federation: Federation, *, folder: str | Path | None = None,
    resume: bool = False, head: str | None = None, adapter: str = "", freeze: str = "", train: str = "",
    loss: PerSample | None = None, **training: Any,
) -> Prepared:
    """What `run` does before it trains or writes anything."""
    chosen = _method(method)
    place = None if folder is None else Folder(folder)
    wanted = _Wanted(chosen, _training(training), place, resume)
    shared = _Shared.of(model, federation, head, adapter, freeze, train, loss)
    return Prepared([wanted], shared, [chosen], None if place is None else place.path, resume)


def prepare_comparison(
    methods: Iterable[Method | str], model: ModelLike, federation: Federation, *, seeds: int | Sequence[int] = 1,
    folder: str | Path | None = None, resume: bool = False, head: str | None = None, adapter: str = "",
    freeze: str = "", train: str = "", loss: PerSample | None = None, baselines: bool = True, **training: Any,
) -> Prepared:
    """What `compare` does before it trains or writes anything; without `baselines` for these methods alone."""
    named = [_method(m) for m in methods]
    numbers = range(seeds) if isinstance(seeds, int) else seeds
    wanted = []
    for one in with_baselines(named, baselines):
        place = None if folder is None else place_of(Path(folder), registry.spelling(one))
        for seed in numbers:
            inner = Folder(place / f"seed{seed}") if place is not None else None
            again = resume and inner is not None and (inner.path / "config.json").exists()
            wanted.append(_Wanted(one, _training({**training, "seed": seed}), inner, again, True))
    shared = _Shared.of(model, federation, head, adapter, freeze, train, loss)
    return Prepared(wanted, shared, named, None if folder is None else Path(folder), resume)


def _method(method: Method | str) -> Method:
    """A method by its spelling; what of that is read otherwise than it looks is a warning."""
    if not isinstance(method, str):
        return method
    for said in registry.renamed(method):
        warnings.warn(said, stacklevel=4)
    return registry.method(method)


def _training(values: Mapping[str, Any]) -> Training:
    """The training of these options; optimizers and metrics may come as values, `optimizer=SGD(momentum=0.9)`."""

    def spelled(name: str, value: Any) -> Any:
        if isinstance(value, Optimizer):
            return registry.called(value, value.at_server if registry.OPTIMIZERS.get(name) else None)
        return registry.called(value) if isinstance(value, Metric) else value

    return build(Training, {name: spelled(name, value) for name, value in values.items()}, "training")


def with_baselines(methods: Sequence[Method], wanted: bool = True) -> list[Method]:
    """The methods in order, each once, behind the baselines that a comparison cannot do without, where these are
    `wanted`."""
    known = [registry.method(name) for name in ALWAYS if wanted]
    return list(dict.fromkeys([*(b for b in known if b not in methods), *methods]))


@dataclass(frozen=True)
class _Shared:
    """What the runs of a comparison have in common."""

    model: ModelLike  # of which trains what should
    federation: Federation
    head: str | None
    adapter: str
    freeze: str
    train: str
    loss: PerSample | None

    @classmethod
    def of(
        cls, model: ModelLike, federation: Federation, head: str | None, adapter: str, freeze: str, train: str,
        loss: PerSample | None,
    ) -> _Shared:
        whole = partly(adapted(model, adapter, head), freeze, train, head)
        return cls(whole, federation, head, adapter, freeze, train, loss)

    def simulation(
        self, method: Method, training: Training, choices: dict[str, Any] | None = None, twin: Simulation | None = None
    ) -> Simulation:
        """A run of them at its start."""
        return Simulation(method, self.model, self.federation, training, self.head, self.loss, choices, twin)


@dataclass
class _Wanted:
    """One run that is asked for. `among` others, a finished one is not opened again, and none stays in memory that has
    a folder."""

    method: Method
    training: Training
    folder: Folder | None
    resume: bool
    among: bool = False
    built: Driver | None = None

    @property
    def finished(self) -> bool:
        return self.among and self.resume and self.folder is not None and self.folder.finished

    def build(self, shared: _Shared, twin: Simulation | None = None) -> Driver:
        """The simulation at its start, or where its folder's checkpoint left it, and who drives it."""
        folder = self.folder
        begun = folder is not None and self.resume and folder.checkpoint.exists()
        if folder is not None and begun:
            Guard.require_noise(self.method, self.training, checkpoint.header(folder.checkpoint))
        saved = folder.load() if folder is not None and begun else None
        choices = saved[1].get("choices") if saved else None
        if saved and folder is not None and not isinstance(choices, dict):
            raise CoterieError(f"the checkpoint {folder.checkpoint} is damaged: it does not say how it was computed.")
        simulation = shared.simulation(self.method, self.training, choices, twin)
        if saved:
            simulation.restore(*saved)
        keep = folder is None or not self.among
        asked = {"head": shared.head, **{name: getattr(shared, name) for name in PARTS}}

        def again() -> Simulation:
            return shared.simulation(self.method, self.training, dict(simulation.choices), simulation)

        made = Driver(simulation, folder, asked, self.resume, saved is not None, keep, again)
        made.require_same()
        return made


class Prepared:
    """Runs that can start: whatever would refuse them has been asked, and nothing is trained or written yet.

    They run while somebody asks for their progress, and then `results` holds what they found, in the order of methods
    and seeds:

        for progress in prepared:
            print(progress.round)
        prepared.results

    `reason` says why the model cannot be stacked, if so; `notes` are sentences on how it will be computed.
    """

    def __init__(
        self, wanted: Sequence[_Wanted], shared: _Shared, named: Sequence[Method], folder: Path | None = None,
        resume: bool = False,
    ) -> None:
        """`named` are the methods that somebody asked for; `wanted` may hold baselines as well.

        Nobody else writes to the `folder` until they have run; one that is not there yet is made and locked then.
        """
        self._wanted, self._shared, self._folder = wanted, shared, folder
        self._lock: Lock | None = None
        if folder is not None and resume and folder.is_dir():
            self._take()  # what is built below cuts records back to their checkpoints
        self.reason = ""
        self.notes: list[str] = []
        self.results: list[Result] = []
        try:
            self._refuse_early(named)
        except BaseException:
            self._let_go()
            raise

    def _take(self) -> None:
        if self._folder is not None and self._lock is None:
            self._lock = Lock(self._folder)
            self._free = finalize(self, self._lock.release)  # also of runs that nobody starts

    def _let_go(self) -> None:
        if self._lock is not None:
            self._free()
            self._lock = None

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
                with _saying_what_fits(one.training):
                    one.built = one.build(self._shared)
                self.notes += Server.notes(method, one.built.simulation.layout, one.training)
                choices = one.built.simulation.choices
                self.reason = self.reason or choices.get("reason", "")
                self.notes += [note for note in choices.get("notes", ()) if note not in self.notes]
            else:
                layout = Simulation.layout_of(method, self._shared.model, self._shared.head)
                Server.refuse_early(method, self._shared.federation.arrived(0), layout, one.training)
                self.notes += Server.notes(method, layout, one.training)

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
        self._take()
        try:
            yield from self._train()
        finally:
            self._let_go()

    def _train(self) -> Told[None]:
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
        with _stop_on_ctrl_c() as asked, _saying_what_fits(first.training, first.simulation.wave, len(now)):
            courses = [driver.drive(asked.is_set) for driver in drivers]
            if len(courses) > 1:
                results += yield from Stack[Result](room, asked.set).telling(courses)
            else:
                results.append((yield from telling(courses[0])))
        del first, drivers, driver, courses  # the next runs need the memory
    return results


@contextmanager
def _saying_what_fits(training: Training, wave: int = 0, runs: int = 1) -> Iterator[None]:
    """Where memory runs out, a sentence on what to try instead."""
    try:
        yield
    except Exception as reason:
        if not memory.exhausted(reason):
            raise
        raise room.refusal(training, wave, runs) from reason


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

