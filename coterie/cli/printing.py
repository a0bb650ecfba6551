"""What is printed after a run and by `coterie show`, and notes on what is read."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from coterie.cli.app import screen
from coterie.report import handed_out, watched
from coterie.report.table import beside_paper, comparison
from coterie.report.table import newcomers as newcomers_table
from coterie.report.verdict import verdict
from coterie.running.experiment import Experiment, read_experiment
from coterie.running.result import Result
from coterie.running.saved import Saved


def say(notes: Iterable[str]) -> None:
    """Notes on what was read and on how it will be computed."""
    for note in notes:
        print(f"coterie: {note}", file=sys.stderr)


def saved_experiment(folder: Path) -> tuple[Experiment, bool]:
    """What a folder's runs were asked for, and whether it is a single run."""
    experiment, single, note = read_experiment(folder)
    if note:
        print(f"coterie: {note}", file=sys.stderr)
    return experiment, single


def opened_run(run: Path, model: str | None, loss: str | None = None) -> Saved:
    opened = Saved.open(run, model, loss)
    if opened.note:
        print(f"coterie: {opened.note}", file=sys.stderr)
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
        wide.print(said, highlight=False, markup=False)
    for line in handed_out.lines(results):
        wide.print(line, highlight=False, markup=False)
