"""The picture of a dissection: accuracy against personal bytes, mean and worst client, a column for each stage."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from coterie.dissect.answer import SHARE, Found, answer
from coterie.dissect.measure import Dissection
from coterie.dissect.points import NOTHING
from coterie.dissect.report import SHOWN
from coterie.errors import shortened
from coterie.evaluation.reading import measured, scaled
from coterie.evaluation.stages import title
from coterie.report.bubbles import INK, write_figure
from coterie.report.plots import COLOURS, LABEL, OTHERS, dress, new_figure
from coterie.report.table import human_bytes
from coterie.report.verdict import BEYOND, MEAN, WORST, Measure

MEASURES = {"mean over clients": MEAN, "worst client": WORST}


def picture(made: Dissection, folder: Path) -> list[Path]:
    """dissect.png and dissect.svg; returns their paths."""
    found = made.found()
    stages = [stage for stage in SHOWN if found.get(stage)]
    figure = new_figure(3.4 * len(stages) + 2.7, 6.2)
    grid = figure.subplots(2, len(stages), sharex=True, sharey="row", squeeze=False)
    scale = found[stages[0]][0].case.scale
    least = min((one.personal for one in made.points if one.personal), default=1)
    for row, (what, measure) in zip(grid, MEASURES.items()):
        for axes, stage in zip(row, stages):
            _draw(axes, found[stage], measure, [one.name for one in made.points])
            _bytes_axis(axes, least, max(one.personal for one in made.points))
            axes.set_title(f"{title(stage)}: {what}", loc="left", fontsize=9, color=INK)
            axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
            dress(axes)
        if scale.percent:  # bars are symmetric, and a share has ends
            low, high = row[0].get_ylim()
            row[0].set_ylim(max(low, -4), min(high, 104))
        row[0].set_ylabel(f"test {measured(scale)}", fontsize=9, color=INK)
    for axes in grid[-1]:
        axes.set_xlabel("bytes that a client keeps", fontsize=9, color=INK)
    named = [f"{k}  {shortened(one.name, LABEL)}, {human_bytes(one.personal)}" for k, one in enumerate(made.points, 1)]
    handles = [Line2D([], [], linestyle="", label=name) for name in named]
    handles += [
        Line2D([], [], color=OTHERS, linewidth=1.5, label="nothing personal"),
        Line2D([], [], color=COLOURS[1], linewidth=1, linestyle="--", label=f"{100 * SHARE:g} % of the gain"),
        Line2D([], [], color=COLOURS[0], linewidth=1,
               label=f"{BEYOND:g} standard errors of the\ndifference to nothing"),
    ]
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=8, labelcolor=INK,
                  handlelength=1.2)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    written = []
    for kind in ("png", "svg"):
        with matplotlib.rc_context({"svg.hashsalt": "coterie", "svg.fonttype": "none"}):  # same runs, same file
            written.append(write_figure(figure, folder / f"dissect.{kind}",
                                        metadata={"Date": None} if kind == "svg" else None))
    return written


def _draw(axes: Axes, found: Sequence[Found], measure: Measure, names: Sequence[str]) -> None:
    """Numbered points; the bars are the noise of their difference to nothing personal."""
    base = next((one for one in found if one.point.name == NOTHING), None)
    known = answer(found, measure)
    if base is not None and np.isfinite(measure.of(base.case)):
        start = measure.of(base.case)
        axes.axhline(scaled(base.case.scale, start), color=OTHERS, linewidth=1.5, zorder=1)
        if known.enough and known.gain:
            goal = start + base.case.scale.sign * SHARE * known.gain
            axes.axhline(scaled(base.case.scale, goal), color=COLOURS[1], linewidth=1, linestyle="--", zorder=1)
    for one in found:
        value = scaled(one.case.scale, measure.of(one.case))
        if not np.isfinite(value):
            continue
        noise = 0.0 if base is None or one is base else BEYOND * measure.noise(one.case, base.case)
        reach = scaled(one.case.scale, noise) if np.isfinite(noise) else 0.0
        tint = COLOURS[1] if one.point.name == known.enough else COLOURS[0]
        if not one.case.line.ranked and one is not base:
            tint = OTHERS
        axes.errorbar(one.point.personal, value, yerr=reach, fmt="o", markersize=9, color=tint, elinewidth=1,
                      zorder=3)
        axes.annotate(str(names.index(one.point.name) + 1), (one.point.personal, value), ha="center", va="center",
                      fontsize=6, color="white" if tint != OTHERS else INK, zorder=4)


def _bytes_axis(axes: Axes, least: int, most: int) -> None:
    """Logarithmic, with a place for 0."""
    axes.set_xscale("symlog", linthresh=least, linscale=0.6)
    decades = [10.0**k for k in range(int(np.ceil(np.log10(least))), int(np.floor(np.log10(max(most, 1)))) + 1)]
    axes.xaxis.set_major_locator(FixedLocator([0, *decades]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: human_bytes(value)))
    axes.set_xlim(-0.5 * least, 2.5 * most)
