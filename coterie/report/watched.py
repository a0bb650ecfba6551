"""Metrics beside the one that decides: which there are, how they are read, and the same results seen by one of them.

Loss and accuracy are recorded whether anybody asked or not, so they alone are no reason to offer a choice.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from rich import box
from rich.table import Table
from rich.text import Text

from coterie import registry
from coterie.contract.metric import Scale
from coterie.errors import CoterieError
from coterie.evaluation.reading import direction, measured, shortly
from coterie.evaluation.score import LOSS
from coterie.metrics.accuracy import Accuracy
from coterie.report.screen import plain
from coterie.report.table import rows, scale_of, without_value
from coterie.running.folder import Folder
from coterie.running.result import Result
from coterie.trust import code

UNASKED = (Accuracy.name, LOSS.name)
"""Recorded in every run."""
BOUND = "_bound"
"""Ends the name of how far a binned metric may be off, which is no metric itself."""
BY_CLASS = re.compile(r"(.+)\[(.*)\]")
"""A metric of one class: `recall[cat]`."""


def others(results: Sequence[Result]) -> list[Scale]:
    """What was recorded beside the metric that decides, those of one class last; none where nobody asked for more."""
    names = dict.fromkeys(name for result in results for name in result.at(result.stages[0], "last").test)
    if all(name in UNASKED for name in names):
        return []
    chosen = scale_of(results[0])
    kept = [name for name in names if not (name.endswith(BOUND) and name[: -len(BOUND)] in names)]
    scales = [scale_named(name, results) for name in sorted(kept, key=lambda name: bool(BY_CLASS.fullmatch(name)))]
    return [scale for scale in scales if scale.name != chosen.name and not _is_the_loss(scale, chosen, scales)]


def _is_the_loss(scale: Scale, chosen: Scale, scales: Sequence[Scale]) -> bool:
    """Whether this column would repeat another: the squared error is recorded as the loss, and as mse if asked for."""
    if scale.name == LOSS.name:
        return any(one.title == scale.title for one in scales if one.name != LOSS.name)
    return chosen.name == LOSS.name and chosen.title == scale.title


def scale_named(name: str, results: Sequence[Result]) -> Scale:
    """How a recorded metric is read: as the runs say, else as the metric of this name does, else as it is spelled."""
    known = {scale.name: scale for result in results for scale in _scales(result).values()}
    if name in known:
        return known[name]
    one = BY_CLASS.fullmatch(name)
    if one is not None:
        whole = scale_named(one[1], results)
        return replace(whole, name=name, title=f"{whole.title} of {one[2]}")
    try:
        with code.nothing():  # the name stands in a record
            return replace(registry.metric(name).scale, name=name)
    except CoterieError:
        return Scale(name, name.replace("_", " "), higher=True)


def _scales(result: Result) -> dict[str, Scale]:
    scales = {LOSS.name: LOSS} if result.folder is None else Folder(result.folder).scales()
    return scales | {scale_of(result).name: scale_of(result)}


def _directions(scales: Sequence[Scale]) -> str:
    """Which way each of them is better."""
    said = []
    for higher in (True, False):
        titles = [scale.title for scale in scales if scale.higher is higher]
        said += [f"{', '.join(titles)}: {direction(next(s for s in scales if s.higher is higher))}."] if titles else []
    return " ".join(said)


def table(results: Sequence[Result]) -> Table | None:
    """The mean over clients, and the worst client in brackets, by every other metric; None where there is none.

    Metrics of one class are left to the page, which has a section for them.
    """
    scales = [scale for scale in others(results) if not BY_CLASS.fullmatch(scale.name)]
    if not scales:
        return None
    by_metric = [rows(results, scale=scale) for scale in scales]
    notes = [_directions(scales), *(said for lines in by_metric for said in without_value(lines))]
    made = Table(
        title="also watched: mean (worst client), at the same rounds", title_style="bold", title_justify="left",
        caption=Text("\n").join(map(plain, notes)), caption_style="dim", caption_justify="left", box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0), show_edge=False, pad_edge=False,
    )
    made.add_column("method", overflow="fold", min_width=10, max_width=36)
    made.add_column("stage", no_wrap=True)
    for scale in scales:
        made.add_column(plain(measured(scale)), justify="right")
    for lines in zip(*by_metric, strict=True):
        cells = [f"{shortly(line.scale, line.mean)} ({shortly(line.scale, line.worst)})" for line in lines]
        made.add_row(plain(lines[0].label), lines[0].stage, *cells)
    return made
