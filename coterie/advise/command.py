"""`coterie advise`: from what was typed to the pilot, and from the pilot to the screen and the files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path

from rich.table import Table

from coterie.advise import report
from coterie.advise.decision import WEIGHT, Newcomers, Objective
from coterie.advise.pilot import Pilot, advise
from coterie.data import Federation
from coterie.errors import Interrupted
from coterie.options import convert
from coterie.report.screen import Screen, plain
from coterie.running.driver import Progress
from coterie.running.experiment import Experiment, check_clients

VALIDATION = 0.2
"""Share of a client's training data held back: the pilot chooses on it, so it takes more than a run does."""
HELD_OUT = 0.15
"""Share of the clients that play newcomers, from 8 clients on."""


def run(
    experiment: Experiment, settings: list[str], rounds: int | None, seeds: int, budget: float, newcomers: str,
    objective: str, tell: Callable[[str], None] = lambda text: None, clients: int | None = None,
    say: Callable[[Iterable[str]], None] = lambda notes: None, unseen_said: bool = False,
) -> tuple[Pilot, str]:
    """The pilot of an experiment and the command to go on with; `clients` is how many were asked for, and
    `unseen_said` whether the user said how many are kept out of training, be it none.

    `tell` is shown how far the pilot is, and `say` the notes on the data before it begins.
    """
    often: Newcomers = convert(newcomers, Newcomers, "newcomers")
    goal: Objective = convert(objective, Objective, "objective")
    training = {k: v for k, v in asdict(experiment.training).items() if k not in ("rounds", "seed", "evaluate_every")}
    experiment = replace(experiment, val=max(VALIDATION, experiment.val))
    experiment, federation = held_out(experiment, often, clients, unseen_said)
    say(federation.recipe.get("notes", ()))

    def watch(progress: Progress) -> None:
        tell(f"{progress.method}, seed {progress.seed}: round {progress.round} of {progress.rounds}")

    try:
        pilot = advise(
            experiment.factory(federation), federation, newcomers=often, objective=goal, budget=budget, rounds=rounds,
            seeds=seeds, head=experiment.head, loss=experiment.spec(federation).own_loss(), tell=tell,
            watch=[watch, *training.pop("watch")], **training,
        )
    except Interrupted:
        raise KeyboardInterrupt from None  # there is nothing to resume
    own = federation.recipe["partition"] == "natural"
    return pilot, report.command(pilot, experiment, settings, own)


def held_out(
    experiment: Experiment, newcomers: Newcomers, clients: int | None = None, said: bool = False
) -> tuple[Experiment, Federation]:
    """The federation with some clients kept out of training, unless the user `said` how many or none will come."""
    federation = check_clients(experiment.federation(), clients)
    count = round(HELD_OUT * federation.clients) if federation.clients >= 8 else 0
    if said or experiment.unseen or not WEIGHT[newcomers] or not count:
        return experiment, federation
    changed = replace(experiment, unseen=count)
    if federation.recipe["partition"] != "natural":
        changed = replace(changed, clients=experiment.clients - count)
    return changed, changed.federation()


def show(pilot: Pilot, go_on: str, folder: Path, console: Screen) -> None:
    """Print the advice and write it down."""
    first, *rest = report.sentences(pilot)
    console.print(first, style="bold")
    lines = Table.grid(padding=(0, 1, 0, 0))
    for text in rest:
        lines.add_row("-", plain(text))
    console.print(lines)
    console.print()
    console.print(report.table(pilot))
    if pilot.advice.learned:
        console.print()
        console.print("To go on:")
        console.print(f"  {go_on}", soft_wrap=True)
        for text in report.names(pilot):
            console.print(text)
    report.write(pilot, go_on, folder)
    console.print(f"advice: {folder / 'advice.md'}, {folder / 'advice.json'}", soft_wrap=True)
