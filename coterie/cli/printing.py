"""What is printed after a run and by `coterie show`, and notes on what is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.text import Text

from coterie.cli.app import screen
from coterie.errors import say
from coterie.report import handed_out, watched
from coterie.report.table import beside_paper, comparison
from coterie.report.table import newcomers as newcomers_table
from coterie.report.verdict import verdict
from coterie.running.experiment import Experiment, read_experiment
from coterie.running.result import Result
from coterie.running.saved import Saved


def saved_experiment(folder: Path, trust: bool = False) -> tuple[Experiment, bool]:
    """What a folder's runs go on with, and whether it is a single run."""
    experiment, single, note = read_experiment(folder, trust)
    if note:
        say([note])
    return experiment, single


def opened_run(run: Path, model: str | None, loss: str | None = None, trust: bool = False) -> Saved:
    opened = Saved.open(run, model, loss, trust)
    if opened.note:
        say([opened.note])
    return opened


def print_results(results: list[Result], printed: Mapping[str, str]) -> None:
    wide = screen()
    wide.print(comparison(results))
    if (beside := beside_paper(results, printed)) is not None:
        wide.print(beside)
    if (beside := watched.table(results)) is not None:
        wide.print(beside)
    if (arrived := newcomers_table(results)) is not None:
        wide.print(arrived)
    if said := verdict(results):
        wide.print(Text(said))
    for line in handed_out.lines(results):
        wide.print(line)
