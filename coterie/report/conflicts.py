"""The picture of conflicts: how many pairs of clients pull the shared model apart, and who they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from scipy.cluster.hierarchy import leaves_list, linkage

from coterie.errors import CoterieError, shortened
from coterie.report.bubbles import INK, write_figure
from coterie.report.plots import LABEL, best_first, dress, grey, new_figure, placed, stroke
from coterie.report.series import Floats
from coterie.report.table import by_method
from coterie.running.result import Result


def conflicts(results: Sequence[Result], path: str | Path) -> Path:
    """Left the opposing pairs by round, right each method's cosines between updates; returns the path written."""
    runs = {name: group for name, group in by_method(results).items() if len(opposed(group)[0])}
    if not runs:
        raise CoterieError("no round recorded the angles between updates; methods that upload no update have none.")
    matrices = {name: found for name, group in runs.items() if (found := last_cosines(group)) is not None}
    columns = min(len(matrices), 4)
    lines = -(-len(matrices) // max(columns, 1))
    figure = new_figure(4.6 + 2.4 * columns, max(3.2, 2.5 * lines))
    spots = figure.add_gridspec(max(lines, 1), 1 + columns, width_ratios=[4.2, *[2.2] * columns])
    _draw_fractions(figure.add_subplot(spots[:, 0]), runs)
    shown = [figure.add_subplot(spots[k // columns, 1 + k % columns]) for k in range(len(matrices))]
    for axes, (name, matrix) in zip(shown, matrices.items()):
        order = alike(matrix)
        image = axes.imshow(matrix[np.ix_(order, order)], cmap="RdBu", vmin=-1, vmax=1, interpolation="nearest")
        axes.set_axis_off()
        axes.set_title(shortened(name, LABEL), loc="left", fontsize=9, color=INK, pad=3)
        if axes is shown[-1]:
            bar = figure.colorbar(image, ax=shown, shrink=0.8, ticks=[-1, 0, 1])
            bar.ax.tick_params(length=0, labelsize=8, labelcolor=INK)
            bar.set_label("cosine between two clients' updates,\nclients ordered by likeness", fontsize=8, color=INK)
    return write_figure(figure, path)


def _draw_fractions(axes: Axes, runs: Mapping[str, Sequence[Result]]) -> None:
    places = placed(list(runs), best_first([run for group in runs.values() for run in group]))
    for name, group in runs.items():
        rounds, fractions = opposed(group)
        named: dict[str, Any] = {"label": shortened(name, LABEL)} if name in places else {}
        marker = "o" if len(rounds) == 1 else ""
        axes.plot(rounds, 100 * fractions, marker=marker, markersize=4, **stroke(places.get(name)), **named)
    axes.set_ylim(-2, 102)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, steps=[1, 2, 5, 10]))
    axes.set_title("pairs of clients with opposing updates in %", loc="left", fontsize=9, color=INK, pad=3)
    axes.set_xlabel("round", fontsize=9, color=INK)
    dress(axes)
    handles = [*axes.get_legend_handles_labels()[0], *grey(len(runs) - len(places))]
    axes.legend(handles=handles, frameon=False, fontsize=8, labelcolor=INK)


def opposed(runs: Sequence[Result]) -> tuple[Floats, Floats]:
    """Rounds [t] that recorded the fraction of opposing pairs, and its mean over seeds [t]."""
    found: dict[int, list[float]] = {}
    for run in runs:
        for record in run.rounds:
            fraction = record["report"].get("opposing")
            if fraction is not None and np.isfinite(fraction):
                found.setdefault(int(record["round"]) + 1, []).append(fraction)
    rounds = sorted(found)
    return np.array(rounds, dtype=np.float64), np.array([np.mean(found[t]) for t in rounds], dtype=np.float64)


def last_cosines(runs: Sequence[Result]) -> Floats | None:
    """The cosine matrix `[m, m]` recorded last by the first of the runs that has one."""
    for run in runs:
        recorded: list[Any] = [r["report"]["cosines"] for r in run.rounds if "cosines" in r["report"]]
        if recorded:
            return np.array(recorded[-1], dtype=np.float64)
    return None


def alike(matrix: Floats) -> NDArray[np.int64]:
    """An order of the clients `[m]` that puts those with like updates next to each other (average linkage)."""
    if len(matrix) < 3:
        return np.arange(len(matrix))
    first, second = np.triu_indices(len(matrix), 1)
    leaves: NDArray[np.int64] = leaves_list(linkage((1 - matrix[first, second]).clip(0), "average")).astype(np.int64)
    return leaves
