"""What is printed after a run and by `coterie show`."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from coterie.cli.app import screen
from coterie.data import Federation
from coterie.report.answer import verdict
from coterie.report.table import beside_paper, comparison
from coterie.report.table import newcomers as newcomers_table
from coterie.running.result import Result


def say_notes(federation: Federation) -> None:
    for note in federation.recipe.get("notes", ()):
        print(f"coterie: {note}", file=sys.stderr)


def print_results(results: list[Result], printed: Mapping[str, str]) -> None:
    wide = screen()
    wide.print(comparison(results))
    if (beside := beside_paper(results, printed)) is not None:
        wide.print(beside)
    if (arrived := newcomers_table(results)) is not None:
        wide.print(arrived)
    if said := verdict(results):
        wide.print(said, highlight=False, markup=False)
