"""The picture of a comparison: for each method how its clients fare, and how it got there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, NullLocator, ScalarFormatter
from matplotlib.typing import LineStyleType

from coterie.contract.metric import Scale
from coterie.errors import shortened
from coterie.evaluation.reading import measured, scaled
from coterie.evaluation.stages import ADAPTED, SEEN, SERVED
from coterie.evaluation.summary import since_arrival, summarise
from coterie.report.bubbles import INK, Chart, write_figure
from coterie.report.series import Floats, finite, over_seeds
from coterie.report.table import by_method, label_of, scale_of
from coterie.running.result import Result, When

# Ten colours as far apart as was found, for all readers and for red- and green-blind ones, none of them faint on white;
# the page has the same. The second five are dashed, so that lines differ in more than their colour.
COLOURS = (
    "#00439b", "#c83700", "#008564", "#e964a6", "#000b2c", "#169be9", "#900064", "#b19000", "#854ed3", "#593700",
)
LINES = ("-", "--", ":", "-.")
LABEL = 40
"""Letters of a method's name."""


def line_style(number: int) -> str:
    return LINES[number // 5 % len(LINES)]


CROWD, TOP = 8, 5
"""Methods that have a colour each, at most; of more, so many of the best have one, and all others are grey."""


def placed(methods: Sequence[str], best: Sequence[str], always: Sequence[str] = ()) -> dict[str, int]:
    """Method -> its number among those in colour. Of a crowd these are the first of `best` and those `always` named."""
    shown = methods if len(methods) <= CROWD else [*[*best, *methods][:TOP], *always]
    return {name: number for number, name in enumerate(dict.fromkeys(name for name in shown if name in methods))}


def stroke(number: int | None) -> dict[str, Any]:
    """How a line is drawn: with its colour and dashes, or thin and grey below the others."""
    if number is None:
        return {"color": OTHERS, "linewidth": 0.8, "linestyle": "-", "zorder": 1}
    return {"color": COLOURS[number % len(COLOURS)], "linewidth": 1.4, "linestyle": line_style(number), "zorder": 3}


def grey(left: int) -> list[Line2D]:
    """What a legend says of the methods that are not in colour."""
    label = f"{left} other method{'s' if left > 1 else ''}"
    return [Line2D([], [], color=OTHERS, linewidth=1.5, label=label)] if left else []


def best_first(results: Sequence[Result], stage: str = SERVED) -> list[str]:
    """The methods by their mean over clients in a stage, those without one left out."""
    runs = {name: group for name, group in by_method(results).items() if all(stage in run.stages for run in group)}
    means = {name: float(np.mean([summarise(run.at(stage)).mean for run in group])) for name, group in runs.items()}
    known = [name for name, mean in means.items() if not np.isnan(mean)]
    return sorted(known, key=lambda name: scale_of(results[0]).sign * means[name], reverse=True)


STAGE_COLOURS = dict(zip(SEEN, COLOURS))
DASHES: dict[str, LineStyleType] = {SERVED: "-", ADAPTED: (0, (4, 2))}
OTHERS = "#d9d9d9"
GRID = "#e6e6e6"
WIDE = 20  # errors that differ by more than this factor are drawn on a logarithmic axis


def picture(results: Sequence[Result], path: str | Path, when: When = "chosen") -> Path:
    """One row for each method: left every client, right the mean over clients by round; returns the path written."""
    runs = list(by_method(results).values())
    height = float(np.clip(7.8 / len(runs), 0.85, 1.5))
    figure = new_figure(10.5, 1.1 + height * len(runs))
    grid = figure.subplots(len(runs), 2, sharex="col", squeeze=False)
    left, right = list(grid[:, 0]), list(grid[:, 1])
    for axes, group in zip(left, runs):
        _draw_clients(axes, group, when)
    for axes, group in zip(right, runs):
        _draw_convergence(axes, group, [other for other in runs if other is not group])
    _dress_clients(left, runs, when)
    _dress_convergence(right, runs)
    figure.legend(
        handles=_legend(runs), loc="outside upper right", ncols=6, frameon=False, fontsize=8, labelcolor=INK,
        handlelength=2.2, columnspacing=1.4,
    )
    return write_figure(figure, path)


def newcomers(results: Sequence[Result], path: str | Path) -> Path:
    """The mean of clients that arrived during training by rounds since their arrival, a line for each method."""
    runs = by_method(results)
    figure = new_figure(7.5, 3.6)
    axes = figure.subplots()
    places = placed(list(runs), best_first(results))
    for method, group in runs.items():
        age, mean = ages(group, SERVED)
        label = shortened(label_of(method, SERVED), LABEL)
        named: dict[str, Any] = {"label": label, "marker": "o"} if method in places else {}
        axes.plot(age, mean, markersize=3, **stroke(places.get(method)), **named)
    dress(axes)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, steps=[1, 2, 5, 10]))
    what = f"test {measured(scale_of(results[0]))} of clients that arrived during training, as served"
    axes.set_title(what, loc="left", fontsize=9, color=INK)
    axes.set_xlabel("rounds since arrival", fontsize=9, color=INK)
    handles = [*axes.get_legend_handles_labels()[0], *grey(len(runs) - len(places))]
    axes.legend(handles=handles, frameon=False, fontsize=8, labelcolor=INK, loc="best")
    return write_figure(figure, path)


def ages(runs: Sequence[Result], stage: str) -> tuple[Floats, Floats]:
    """Rounds since arrival [a], rising, and the mean over newcomers, evaluations and seeds there [a]."""
    points = [point for run in runs for e in run.history for point in since_arrival(e, run.arrives).get(stage, [])]
    known = sorted({age for age, _, _ in points})
    sums = [[(n, n * mean) for age, n, mean in points if age == wanted] for wanted in known]
    means = np.array([sum(total for _, total in some) / sum(n for n, _ in some) for some in sums])
    return np.array(known, dtype=np.float64), scaled(scale_of(runs[0]), means)


def new_figure(width: float, height: float) -> Figure:
    """A figure of this many inches, in which names are text."""
    return Chart(width, height)


def dress(axes: Axes) -> None:
    """Light grid, no frame, small labels."""
    axes.grid(color=GRID, linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=8, labelcolor=INK)
    for side in axes.spines.values():
        side.set_visible(False)


# -- what is drawn -----------------------------------------------------------------------------------------------------


def client_values(runs: Sequence[Result], stage: str, when: When = "chosen") -> Floats:
    """Each client's test value, averaged over the seeds that have it: [clients]."""
    scores = [run.at(stage, when) for run in runs]
    ids = np.concatenate([one.clients for one in scores])
    values = np.concatenate([one.test[one.metric] for one in scores])
    there = np.isfinite(values)
    ids, values = ids[there], scaled(scale_of(runs[0]), values[there])
    clients = np.unique(ids)
    return np.array([values[ids == client].mean() for client in clients])


def convergence(runs: Sequence[Result], stage: str) -> tuple[Floats, Floats]:
    """Evaluated rounds [t] and the mean over clients there, seed by seed: [seeds, t]; NaN after a run has stopped."""
    rounds, means = means_by_round(runs, stage, scale_of(runs[0]))
    return rounds, scaled(scale_of(runs[0]), means)


def means_by_round(runs: Sequence[Result], stage: str, scale: Scale) -> tuple[Floats, Floats]:
    """The same by any metric, and as it was recorded."""
    found = [
        {e.round: summarise(e.stages[stage].by(scale)).mean for e in run.history if stage in e.stages} for run in runs
    ]
    rounds = sorted({number for one in found for number in one})
    return np.array(rounds, dtype=np.float64), np.array([[one.get(t, np.nan) for t in rounds] for one in found])


def _stages(runs: Sequence[Result]) -> list[str]:
    return [stage for stage in SEEN if all(stage in run.stages for run in runs)]


# -- drawing -----------------------------------------------------------------------------------------------------------


def _draw_clients(axes: Axes, runs: Sequence[Result], when: When) -> None:
    for strip, stage in enumerate(_stages(runs)):
        values = np.sort(client_values(runs, stage, when))
        # Clients of equal value lie on top of each other without it; the golden ratio spreads neighbours evenly.
        shift = 0.3 * ((np.arange(len(values)) * 0.618034 + 0.5) % 1 - 0.5)
        size, alpha = (26, 0.55) if len(values) <= 40 else (12, 0.4)
        axes.scatter(values, -strip + shift, s=size, color=STAGE_COLOURS[stage], alpha=alpha, linewidths=0, zorder=3)
        if len(values):
            axes.vlines(values.mean(), -strip - 0.3, -strip + 0.3, color=INK, linewidth=1.8, zorder=4)
    axes.set_ylim(-1.55, 0.55)
    axes.set_title(_row_title(runs[0].method), loc="left", fontsize=9, color=INK, pad=3)


def _row_title(method: str) -> str:
    served, adapted = (shortened(label_of(method, stage), LABEL) for stage in SEEN)
    return served if adapted == served else f"{served}  (adapted: {adapted})"


def _draw_convergence(axes: Axes, runs: Sequence[Result], others: Iterable[Sequence[Result]]) -> None:
    for other in others:
        for stage in _stages(other):
            rounds, means = convergence(other, stage)
            axes.plot(rounds, over_seeds(finite(means)), color=OTHERS, linewidth=0.6, zorder=1)
    for stage in _stages(runs):
        rounds, means = convergence(runs, stage)
        colour = STAGE_COLOURS[stage]
        if len(means) > 1:
            axes.fill_between(
                rounds, np.fmin.reduce(means), np.fmax.reduce(means), color=colour, alpha=0.2, linewidth=0, zorder=2
            )
        marker = "o" if len(rounds) == 1 else ""
        axes.plot(
            rounds, over_seeds(finite(means)), color=colour, linewidth=1.5, linestyle=DASHES[stage], marker=marker,
            markersize=4, zorder=3,
        )


def _dress_clients(column: Sequence[Axes], runs: Sequence[Sequence[Result]], when: When) -> None:
    values = np.concatenate([client_values(group, stage, when) for group in runs for stage in _stages(group)])
    low, high = _limits(values, runs[0])
    for axes in column:
        if _is_wide(values, runs[0]):
            axes.set_xscale("log")
            plain_log(axes, "x")
        else:
            axes.xaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10]))
        axes.set_xlim(low, high)
        dress(axes)
        axes.set_yticks([])
    scale = scale_of(runs[0][0])
    what = f"{scale.title} of a client{' in %' if scale.percent else ''}"
    at = "round chosen on validation data" if when == "chosen" else "last round"
    column[-1].set_xlabel(f"test {what} ({at})", fontsize=9, color=INK)


def _dress_convergence(column: Sequence[Axes], runs: Sequence[Sequence[Result]]) -> None:
    curves = [convergence(group, stage) for group in runs for stage in _stages(group)]
    values = np.concatenate([means.ravel() for _, means in curves])
    low, high = _limits(values, runs[0])
    if scale_of(runs[0][0]).higher:
        # The way up from a fresh model would flatten what matters; the second half of every curve stays in view.
        settled = np.concatenate([means[:, means.shape[1] // 2 :].ravel() for _, means in curves])
        later, _ = _limits(settled, runs[0])
        low = max(low, later - 0.6 * (high - later))
    last = max(float(rounds[-1]) for rounds, _ in curves)
    for axes in column:
        if _is_wide(values, runs[0]):
            axes.set_yscale("log")
            plain_log(axes, "y")
        else:
            axes.yaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 5, 10]))
        axes.set_ylim(low, high)
        axes.set_xlim(-0.02 * max(last, 1), 1.02 * max(last, 1))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, steps=[1, 2, 5, 10]))
        dress(axes)
    what = measured(scale_of(runs[0][0]))
    column[0].set_title(f"mean test {what} over clients", loc="left", fontsize=9, color=INK, pad=3)
    column[-1].set_xlabel("round", fontsize=9, color=INK)


def _is_wide(values: Floats, runs: Sequence[Result]) -> bool:
    scale, values = scale_of(runs[0]), values[np.isfinite(values)]
    errors = not scale.higher and not scale.percent
    return bool(errors and len(values) and values.min() > 0 and values.max() > WIDE * values.min())


def _limits(values: Floats, runs: Sequence[Result]) -> tuple[float, float]:
    """All finite values with a little air around them."""
    values = values[np.isfinite(values)]
    if not len(values):
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    if _is_wide(values, runs):
        return low / 1.2, high * 1.2
    air = 0.05 * (high - low) or max(0.05 * abs(high), 1e-3)
    return low - air, high + air


def plain_log(axes: Axes, side: str) -> None:
    """Ticks 1, 2, 5, 10, ... written out, as exponents are hard to read for numbers this small."""
    axis = axes.xaxis if side == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=8))
    axis.set_major_formatter(ScalarFormatter())
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def _legend(runs: Sequence[Sequence[Result]]) -> list[Line2D | Patch]:
    present = [stage for stage in SEEN if any(stage in _stages(group) for group in runs)]
    handles: list[Line2D | Patch] = [
        Line2D([], [], color=STAGE_COLOURS[stage], linestyle=DASHES[stage], marker="o", markersize=4, label=stage)
        for stage in present
    ]
    handles.append(
        Line2D([], [], color=INK, marker="|", markersize=10, markeredgewidth=2, linestyle="", label="mean of clients")
    )
    if any(len(group) > 1 for group in runs):
        handles.append(Patch(color=COLOURS[0], alpha=0.2, linewidth=0, label="range over seeds"))
    if len(runs) > 1:
        handles.append(Line2D([], [], color=OTHERS, linewidth=1.5, label="other methods"))
    return handles
