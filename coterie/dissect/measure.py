"""Runs every point with every seed. Points of one adapter are one comparison, with a folder that can be resumed.

    FOLDER                the comparison of the points on the model as it was given, and dissect.json, dissect.csv
    FOLDER/rank-2         that of personal adapters of another rank
    FOLDER/rates/...      the same with one seed and each of several learning rates, from which each point's was chosen
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from coterie import registry
from coterie.data import Federation
from coterie.dissect.answer import Found
from coterie.dissect.points import RANKS, Point, points_of
from coterie.errors import CoterieError
from coterie.evaluation.stages import SERVED, STAGES, basis
from coterie.evaluation.summary import validation_score
from coterie.models.lora import LoRA
from coterie.report.verdict import cases
from coterie.running.driver import Progress
from coterie.running.experiment import EXPERIMENT, Experiment, asked_for, read_experiment
from coterie.running.result import Result
from coterie.running.runs import Watch

DISSECT = "dissect.json"
"""What was asked for, and at the end what was found, in the folder of a dissection."""
RATES = "rates"


@dataclass(frozen=True)
class Asked:
    """What is to be dissected: the experiment's data, model and training; the methods are those of the points."""

    experiment: Experiment
    ranks: tuple[int, ...] = RANKS
    rates: tuple[float, ...] = ()
    """Learning rates from which each point's is chosen; none takes the run's for all."""
    parts: tuple[str, ...] = ()
    """Further parts of the model that are tried as personal."""
    stage: str = SERVED
    """The stage in which the answer is given."""

    @classmethod
    def before(cls, folder: Path, trust: bool = False) -> tuple[Asked, str]:
        """What a folder's dissection goes on with, and a sentence where files are not what they were."""
        experiment, _, note = read_experiment(folder, trust, DISSECT)
        said = asked_for(folder, DISSECT)[2].get("asked")
        try:
            values = dict(said)  # type: ignore[arg-type]
            stage = str(values["stage"])
            return cls(experiment, tuple(map(int, values["ranks"])), tuple(map(float, values["rates"])),
                       tuple(map(str, values["parts"])), stage if stage in STAGES else SERVED), note
        except (KeyError, TypeError, ValueError) as reason:
            raise CoterieError(f"{folder / DISSECT} is damaged: it does not say what was asked for.") from reason

    def keep(self, folder: Path, command: Sequence[str] = ()) -> None:
        """Write down what is about to run, once."""
        if not (folder / DISSECT).exists():
            asked = {"ranks": self.ranks, "rates": self.rates, "parts": self.parts, "stage": self.stage}
            self.experiment.keep(folder, False, command, DISSECT, asked=asked)

    def require(self, federation: Federation) -> None:
        """Raise where it cannot be done."""
        if not self.experiment.adapter and self.ranks != RANKS:
            raise CoterieError("--ranks are those of adapters, and the model has none; add --adapter lora:rank=8.")
        if not self.ranks or min(self.ranks) < 1:
            raise CoterieError("--ranks are whole numbers of at least 1, such as 1,2,4,8.")
        if len(set(self.rates)) != len(self.rates) or any(not np.isfinite(r) or r <= 0 for r in self.rates):
            raise CoterieError("--rates are different learning rates above 0, such as 0.01,0.03,0.1.")
        if self.stage.startswith("unseen") and not len(federation.unseen):
            raise CoterieError(f"no client is kept out of training, so there is no stage {self.stage}; add --unseen 2.")
        if not (federation.sizes("val")[federation.seen] > 0).any() and self.rates:
            raise CoterieError("no client has validation data to choose a learning rate on; leave --rates out, or give "
                               "clients more samples.")


@dataclass(frozen=True)
class Dissection:
    """What was found: every point in every stage, and the runs behind it under the points' names."""

    asked: Asked
    points: tuple[Point, ...]
    left_out: tuple[str, ...]
    rates: Mapping[str, float]  # the learning rate of each point
    results: tuple[Result, ...]
    notes: tuple[str, ...] = ()

    @property
    def stages(self) -> tuple[str, ...]:
        return tuple(stage for stage in STAGES if all(stage in one.stages for one in self.results))

    def found(self) -> dict[str, list[Found]]:
        """The points with a value, by stage, in their order."""
        by = {(case.line.method, case.line.stage): case for case in cases(self.results, self.stages)}
        return {
            stage: [Found(one, by[one.name, stage]) for one in self.points if (one.name, stage) in by]
            for stage in self.stages
        }


def measure(
    asked: Asked, federation: Federation, folder: Path, watch: Watch | None = None,
    say: Callable[[Sequence[str]], None] = lambda notes: None, command: Sequence[str] = (),
    planned: Callable[[Sequence[Point]], None] = lambda points: None,
) -> Dissection:
    """Run what is left to run in the folder, telling `watch` the progress under the points' names; what is `planned` is
    told first."""
    asked.require(federation)
    points, left_out = points_of(asked.experiment, federation, asked.ranks, asked.parts)
    say(left_out)
    planned(points)
    work = _Work(asked.experiment, federation, folder, watch, say, command, lambda: asked.keep(folder, command))
    rates = {one.name: asked.experiment.training.lr for one in points}
    notes: list[str] = []
    if asked.rates:
        rates = _chosen(work, points, asked)
        notes = _at_an_end(rates, asked.rates)
        points = [replace(one, method=_at(one.method, rates[one.name])) for one in points]
    results = work.compared(points)
    return Dissection(asked, tuple(points), tuple(left_out), rates, tuple(results), tuple(notes))


@dataclass(frozen=True)
class _Work:
    """Comparisons of points in a folder."""

    experiment: Experiment
    federation: Federation
    folder: Path
    watch: Watch | None
    say: Callable[[Sequence[str]], None]
    command: Sequence[str]
    begin: Callable[[], None]
    """Writes down what was asked, when it is known that it can run."""

    def compared(self, points: Sequence[Point]) -> list[Result]:
        """Every run of these points under their names, in the points' order."""
        done: dict[str, list[Result]] = {}
        for adapter, group in _by_adapter(points):
            one = replace(self.experiment, methods=tuple(point.method for point in group), adapter=adapter,
                          baselines=False)
            place = self.folder if adapter == self.experiment.adapter else self.folder / _place(adapter)
            names = {point.method: point.name for point in group}
            for result in self._run(one, place, names):
                done.setdefault(names[result.method], []).append(replace(result, method=names[result.method]))
        return [result for point in points for result in done[point.name]]

    def _run(self, experiment: Experiment, place: Path, names: Mapping[str, str]) -> list[Result]:
        begun = (place / EXPERIMENT).exists()
        prepared = experiment.prepare(self.federation, place, False, begun)
        self.say(prepared.notes)
        self.begin()
        if not begun:
            experiment.keep(place, False, self.command)

        def told(progress: Progress) -> None:
            if self.watch is not None:
                self.watch(replace(progress, method=names.get(progress.method, progress.method)))

        return prepared.go(told)


def runs(points: Sequence[Point], asked: Asked) -> int:
    """How many runs that makes."""
    return len(points) * (asked.experiment.seeds + len(asked.rates))


def _by_adapter(points: Sequence[Point]) -> Iterator[tuple[str, list[Point]]]:
    for adapter in dict.fromkeys(point.adapter for point in points):
        yield adapter, [point for point in points if point.adapter == adapter]


def _place(adapter: str) -> str:
    return f"rank-{LoRA.of(adapter).rank}"


def _at(method: str, rate: float) -> str:
    """The method's spelling with a learning rate of its own."""
    return registry.spelling(registry.method(method, lr=rate))


def _chosen(work: _Work, points: Sequence[Point], asked: Asked) -> dict[str, float]:
    """Each point's learning rate: the best of the grid on the first seed's validation data, the first of equals."""
    tried = {
        f"{one.name}, lr={rate:g}": (one.name, rate, replace(one, name=f"{one.name}, lr={rate:g}",
                                                             method=_at(one.method, rate)))
        for one in points for rate in asked.rates
    }
    single = replace(work, experiment=replace(asked.experiment, seeds=1), folder=work.folder / RATES)
    scores: dict[str, list[tuple[tuple[float, float], float]]] = {}
    for result in single.compared([point for _, _, point in tried.values()]):
        name, rate, _ = tried[result.method]
        value = validation_score(result.at(basis(asked.stage)))
        comparable: Any = tuple(-np.inf if np.isnan(part) else part for part in value)
        scores.setdefault(name, []).append((comparable, rate))
    return {name: max(known, key=lambda pair: pair[0])[1] for name, known in scores.items()}


def _at_an_end(rates: Mapping[str, float], grid: Sequence[float]) -> list[str]:
    """Where a wider grid might have changed a point's numbers."""
    ends = [name for name, rate in rates.items() if len(grid) > 1 and rate in (min(grid), max(grid))]
    return [f"The best learning rate lay at an end of the grid for {', '.join(ends)}; a wider --rates may change "
            "the answer."] if ends else []
