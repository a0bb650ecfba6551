"""The picture of who holds what: one bubble per client and class, or one bar per client for regression."""

from __future__ import annotations

import math
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from coterie import files
from coterie.data import SPLITS, Federation
from coterie.errors import counted, shortened
from coterie.report.series import thinned

INK = "#333333"
SEEN_COLOUR = "#2f6f9f"
UNSEEN_COLOUR = "#d1762c"
SHOWN = 200  # beyond this, bubbles are specks: a spread of the clients is drawn instead


def write_figure(figure: Figure, path: str | Path, **options: Any) -> Path:
    """Write a picture in one step, in the format of the file's ending."""
    made = BytesIO()
    figure.savefig(made, format=Path(path).suffix.removeprefix(".") or "png", **options)
    files.write_bytes(Path(path), made.getvalue())
    return Path(path)
NAME = 24
"""Letters of a client's or class's name at an axis."""


class Chart(Figure):
    """A figure that draws without a display and leaves pyplot's global state alone; a $ in it is a $.

    Names come from others, and one such as `$\\frac` would be no formula.
    """

    def __init__(self, width: float, height: float) -> None:
        super().__init__(figsize=(width, height), dpi=150, layout="constrained")
        FigureCanvasAgg(self)

    def draw(self, renderer: RendererBase) -> None:
        with matplotlib.rc_context({"text.parse_math": False, "text.usetex": False}):  # for ticks, made as late as here
            for text in self.findobj(Text):
                text.set_parse_math(False)
                text.set_usetex(False)
            super().draw(renderer)


def bubbles(federation: Federation, path: str | Path) -> Path:
    """Draw clients against classes with bubbles whose area is the number of samples; returns the path written."""
    shown = thinned(federation.clients, SHOWN)  # seen and unseen in their true proportion
    figure = Chart(*_inches(len(shown), federation.classes))
    axes = figure.add_subplot()
    if federation.classes:
        _draw_bubbles(axes, federation, shown)
    else:
        _draw_bars(axes, federation, shown)
    _dress(axes, federation, shown)
    return write_figure(figure, path)


def _inches(clients: int, classes: int) -> tuple[float, float]:
    """Square cells where the page allows it."""
    width = float(np.clip(1.8 + 0.42 * clients, 5.6, 13.0))
    height = float(np.clip(1.5 + 0.36 * classes, 3.2, 9.0)) if classes else 3.6
    return width, height


def _draw_bubbles(axes: Axes, federation: Federation, shown: np.ndarray) -> None:
    counts = np.sum([federation.histogram(split) for split in SPLITS], axis=0)[shown]  # [shown, classes]
    axes.set_xlim(-0.7, len(shown) - 0.3)
    axes.set_ylim(-0.7, federation.classes - 0.3)
    place, label = np.nonzero(counts)
    unseen = shown[place] >= federation.trained
    axes.scatter(
        place,
        label,
        s=_largest_area(len(shown), federation.classes) * counts[place, label] / counts.max(),
        c=np.where(unseen, UNSEEN_COLOUR, SEEN_COLOUR),
        alpha=0.8,
        linewidths=0,
        zorder=3,
    )
    axes.set_ylabel("class", fontsize=9, color=INK)
    label_classes(axes, federation.classes, federation.recipe.get("classes"))
    axes.set_title(f"largest bubble: {counted(counts.max(), 'sample')}", loc="right", fontsize=8, color=INK)


def label_classes(axes: Axes, classes: int, names: Sequence[str] | None) -> None:
    """The classes' names at the y axis, or their numbers where they have none; every second, third, ... beyond 30."""
    if names and len(names) == classes:
        some = range(0, classes, -(-classes // 30))
        axes.set_yticks(some, [shortened(str(names[k]), NAME) for k in some])
    else:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=20, integer=True, steps=[1, 2, 5, 10]))


def label_clients(axes: Axes, names: Sequence[str], inches: float) -> list[int]:
    """The clients' names at the x axis of such a width, slanted where they are long; returns the places labelled.

    All of them, unless they cannot fit: a slanted line of 8 points needs 10 points.
    """
    each = 72 * inches / max(1, len(names))  # points for a client
    level = max(map(len, names), default=0) * 5 + 3 < each
    step = 1 if level else max(1, math.ceil(10 / each))
    places = list(range(0, len(names), step))
    texts = [shortened(names[place], NAME) for place in places]
    axes.set_xticks(places, texts, rotation=0 if level else 60, ha="center" if level else "right",
                    rotation_mode="default" if level else "anchor")
    return places


def _largest_area(clients: int, classes: int) -> float:
    """The bubble area in square points that fills a cell; never a speck, even if neighbours then overlap."""
    width, height = (72 * (side - 0.8) for side in _inches(clients, classes))  # less the labels, in points
    diameter = max(min(width / (clients + 0.4), height / (classes + 0.4)), 9.0)
    return float(0.92 * diameter) ** 2


def _draw_bars(axes: Axes, federation: Federation, shown: np.ndarray) -> None:
    bottom = np.zeros(len(shown), dtype=np.int64)
    for split, strength in zip(SPLITS, (1.0, 0.65, 0.35), strict=True):
        sizes = federation.sizes(split)[shown]
        colours = [_paler(UNSEEN_COLOUR if i >= federation.trained else SEEN_COLOUR, strength) for i in shown]
        if sizes.any():
            axes.bar(range(len(shown)), sizes, bottom=bottom, color=colours, label=split, zorder=3)
        bottom += sizes
    axes.set_xlim(-0.7, len(shown) - 0.3)
    axes.set_ylabel("samples", fontsize=9, color=INK)
    axes.legend(frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 1), fontsize=8, borderaxespad=0.2)


def _paler(colour: str, strength: float) -> tuple[float, ...]:
    """The colour mixed with white; unlike transparency it hides the grid behind it."""
    return tuple(1 - strength * (1 - channel) for channel in to_rgb(colour))


def _dress(axes: Axes, federation: Federation, shown: np.ndarray) -> None:
    inches, _ = _inches(len(shown), federation.classes)
    ticks = label_clients(axes, [federation.names[i] for i in shown], inches - 0.8)
    for tick, label in zip(ticks, axes.get_xticklabels(), strict=True):
        label.set_color(UNSEEN_COLOUR if shown[tick] >= federation.trained else INK)
    axes.set_xlabel("client", fontsize=9, color=INK)
    axes.set_title(_title(federation, shown), loc="left", fontsize=10, color=INK)
    first_unseen = int((shown < federation.trained).sum())
    if first_unseen < len(shown):
        axes.axvspan(first_unseen - 0.5, len(shown) - 0.3, color=UNSEEN_COLOUR, alpha=0.10, linewidth=0, zorder=0)
    axes.grid(color="#e6e6e6", linewidth=0.6, zorder=0, axis="both" if federation.classes else "y")
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=8)
    axes.tick_params(axis="y", labelcolor=INK)
    for side in axes.spines.values():
        side.set_visible(False)


def _title(federation: Federation, shown: np.ndarray) -> str:
    some = "" if len(shown) == federation.clients else f"{len(shown)} of "
    samples = int((federation.bounds[:, 3] - federation.bounds[:, 0]).sum())
    unseen = f" ({federation.clients - federation.trained} unseen, shaded)" if len(federation.unseen) else ""
    return f"{some}{counted(federation.clients, 'client')}{unseen}, {counted(samples, 'sample')}"
