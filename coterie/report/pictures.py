"""The pictures that lie in the folder of a finished run or comparison."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from coterie.data import Federation
from coterie.report.bubbles import bubbles
from coterie.report.conflicts import conflicts, opposed
from coterie.report.plots import newcomers, picture
from coterie.report.table import by_method
from coterie.running.result import Result


def draw(results: Sequence[Result], federation: Federation, folder: Path) -> list[Path]:
    """Draw what there is to see; conflicts and newcomers only where some were recorded."""
    drawn = [picture(results, folder / "picture.png"), bubbles(federation, folder / "clients.png")]
    if any(len(opposed(group)[0]) for group in by_method(results).values()):
        drawn.append(conflicts(results, folder / "conflicts.png"))
    if any(result.arrives for result in results):
        drawn.append(newcomers(results, folder / "newcomers.png"))
    return drawn
