"""Live progress: rounds, time left, and how the mean and the worst client are served right now."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from coterie.errors import tell, visible
from coterie.evaluation.reading import shortly, unit
from coterie.evaluation.stages import SERVED
from coterie.evaluation.summary import summarise
from coterie.report.screen import Screen
from coterie.running.driver import Progress as State

QUIET_SECONDS = 15.0
"""How often a line is printed where there is no terminal to draw a bar on."""


class Live:
    """Shows a bar on a terminal and sparse lines elsewhere. Use as a context and hand it to `run` as `watch`."""

    def __init__(self, runs: int = 1, console: Screen | None = None) -> None:
        self.console = console or Screen(stderr=True)
        self.runs = runs
        self._bar = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TextColumn("left"),
            TimeRemainingColumn(), TextColumn("{task.fields[clients]}", markup=False), console=self.console,
            transient=True,
        )
        self._task: TaskID | None = None
        self._done: dict[tuple[str, int], int] = {}  # rounds of each run that was heard of; several may take turns
        self._printed = time.monotonic()

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, state: State) -> None:
        self._done[state.method, state.seed] = state.round
        if state.note:
            self.console.print(f"coterie: {state.method}, seed {state.seed}, {state.note}", soft_wrap=True)
        scores = state.latest.stages[SERVED]
        served, scale = summarise(scores), scores.scale
        mean, worst = (f"{shortly(scale, v)}{unit(scale)}" for v in (served.mean, served.worst))
        clients = f"mean {mean}  worst {worst}"
        number = list(self._done).index((state.method, state.seed)) + 1
        name = f"{number}/{self.runs} {state.method} seed {state.seed}"
        total, done = self.runs * state.rounds, sum(self._done.values())
        if self.console.is_terminal:
            if self._task is None:
                self._task = self._bar.add_task(name, total=total, clients=clients)
            self._bar.update(self._task, completed=done, description=name, clients=clients)
        elif time.monotonic() - self._printed > QUIET_SECONDS:
            self._printed = time.monotonic()
            tell(visible(f"{name}: round {state.round} of {state.rounds}, {clients}"), stderr=True)
