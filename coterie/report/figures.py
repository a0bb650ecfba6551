"""The report's charts as files: PNG for documents, SVG for print, drawn from the same values as the page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from coterie.contract.metric import Scale
from coterie.errors import counted, shortened
from coterie.evaluation.reading import measured, scaled
from coterie.evaluation.stages import SEEN, SERVED, title, unseen
from coterie.report.bubbles import INK, NAME, SEEN_COLOUR, UNSEEN_COLOUR, label_classes, label_clients, write_figure
from coterie.report.plots import COLOURS, LABEL, dress, grey, new_figure, placed, plain_log, stroke
from coterie.report.series import Floats, thinned
from coterie.report.table import human_bytes, human_seconds
from coterie.running.runs import ALWAYS

Data = dict[str, Any]

GAIN, LOSS, SAME = COLOURS[0], COLOURS[1], "#9aa3ab"
TITLE = 120
"""Letters above a chart."""
MOST_CLIENTS = 200
"""Clients drawn against classes, at most."""


def draw(data: Data, folder: Path) -> list[Path]:
    """Write every figure that the data allow as NAME.png and NAME.svg; returns the paths."""
    written = []
    for name, figure in figures(data):
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # the layout is found; finding it again for each file is what takes long
        for kind in ("png", "svg"):
            path = folder / f"{name}.{kind}"
            with matplotlib.rc_context({"svg.hashsalt": "coterie", "svg.fonttype": "none"}):  # same runs, same file
                write_figure(figure, path, metadata={"Date": None} if kind == "svg" else None)
            written.append(path)
    return written


def figures(data: Data) -> Iterator[tuple[str, Figure]]:
    """Name and figure, in the order of the page."""
    method, stage = focus(data)
    base = _named(data, "fedavg")
    if base is method and stage == SERVED:
        base = _named(data, "local")
    if base is not None and (base is not method or stage != SERVED):
        yield "clients", _clients(data, method, stage, base)
    stages = [s for s in SEEN if any(s in m["values"] for m in data["methods"])]
    yield "distribution", _strips(data, stages, seen=True)
    yield "convergence", _convergence(data, stages)
    if any("newcomers" in m for m in data["methods"]):
        yield "newcomers", _newcomers(data, stages, method)
    if data["classes"] and any(c["classes"] for c in data["clients"]):
        yield "classes", _classes(data)
    if matrices := method["confusion"].get(stage):
        yield "confusion", _confusion(data, method, stage, matrices)
    if data["recalled"]["classes"] and _recalling(data, stages):
        yield "recall", _recall(data, stages)
    for one in data["methods"]:
        if one["few"] and one["few"]["end"]:
            yield f"models-{_slug(one['name'])}", _few(data, one)
    if any(m["conflicts"] for m in data["methods"]):
        yield "conflicts", _conflicts(data)
    if all(c["train"] is not None for c in data["clients"]):
        baselines = [_named(data, name) for name in reversed(ALWAYS)]
        against = [m for m in baselines if m is not None and (m is not method or stage != SERVED)]
        if against:
            yield "size", _size(data, method, stage, against)
    later = [s for s in stages if any(unseen(s) in m["values"] for m in data["methods"])]
    if later:
        yield "unseen", _strips(data, later, seen=False)


def focus(data: Data) -> tuple[Data, str]:
    """The method and stage that the headline names, with which the page opens, too."""
    name, stage = data["answer"].get("mean", (data["methods"][0]["name"], SERVED))
    return next(m for m in data["methods"] if m["name"] == name), stage


def scale_of(data: Data) -> Scale:
    """Of the metric that decides."""
    return Scale(**data["metrics"][0])


# -- one function a figure ---------------------------------------------------------------------------------------------


def _clients(data: Data, method: Data, stage: str, base: Data) -> Figure:
    before, after = _values(base, SERVED), _values(method, stage)
    gain = (after - before) * scale_of(data).sign
    order = [i for i in np.argsort(-gain, kind="stable") if np.isfinite(gain[i])]
    figure = new_figure(9, 4)
    axes = figure.add_subplot()
    axes.set_xlim(-0.6, max(0, len(order) - 1) + 0.6)
    tint = [GAIN if gain[i] > 0 else LOSS if gain[i] < 0 else SAME for i in order]
    x = np.arange(len(order))
    axes.vlines(x, _scaled(data, before[order]), _scaled(data, after[order]), color=tint, linewidth=1.5)
    axes.scatter(x, _scaled(data, before[order]), s=18, facecolors="white", edgecolors=tint, zorder=3)
    axes.scatter(x, _scaled(data, after[order]), s=20, color=tint, zorder=4)
    better, worse = int((gain[order] > 0).sum()), int((gain[order] < 0).sum())
    _title(axes, f"{base['label']} (served, open) to {_label(method, stage)} (filled): {better} gain, {worse} lose")
    dress(axes)
    label_clients(axes, [data["clients"][i]["name"] for i in order], 8.2)
    axes.set_xlabel("clients, by gain", fontsize=9, color=INK)
    axes.set_ylabel(_what(data), fontsize=9, color=INK)
    return figure


def _strips(data: Data, stages: Sequence[str], seen: bool) -> Figure:
    shown = [m for m in data["methods"] if all(_key(s, seen) in m["values"] for s in stages)]
    figure = new_figure(4.6 * len(stages) + 1.6, 0.9 + 0.42 * len(shown))
    grid = figure.subplots(1, len(stages), sharey=True, squeeze=False)[0]
    for axes, stage in zip(grid, stages):
        for line, method in enumerate(shown):
            values = np.sort(_there(_values(method, _key(stage, seen))))
            shift = 0.5 * ((np.arange(len(values)) * 0.618034 + 0.5) % 1 - 0.5)
            tint = _colour(data, method)
            axes.scatter(_scaled(data, values), line + shift, s=12, color=tint, alpha=0.55, linewidths=0)
            if len(values):
                axes.vlines(_scaled(data, values).mean(), line - 0.35, line + 0.35, color=INK, linewidth=1.8)
        _title(axes, title(_key(stage, seen)))
        axes.set_xlabel(_what(data), fontsize=9, color=INK)
        dress(axes)
    grid[0].set_yticks(range(len(shown)), [shortened(m["label"], LABEL) for m in shown])
    grid[0].invert_yaxis()
    return figure


def _convergence(data: Data, stages: Sequence[str]) -> Figure:
    axis: dict[str, Callable[[float], str]] = {"rounds": str, "bytes": human_bytes, "seconds": human_seconds}
    figure = new_figure(11.5, 0.8 + 2.7 * len(stages))
    grid = figure.subplots(len(stages), 3, sharey="row", squeeze=False)
    for row, stage in zip(grid, stages):
        for axes, (name, form) in zip(row, axis.items()):
            for method in (m for m in data["methods"] if stage in m["curve"]):
                means = _scaled(data, _floats(method["curve"][stage]["mean"]))
                axes.plot(method["spent"][name], means, marker=_lonely(means), markersize=4, **_look(data, method))
            if not any(_there(line.get_ydata()).size for line in axes.lines):
                _say(axes, "no round has a finite mean")
            dress(axes)
            axes.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=name == "rounds"))
            if name != "rounds":
                axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _, form=form: form(max(v, 0.0))))
            _title(axes, f"{stage}, by {name.rstrip('s') if name == 'rounds' else name}")
        row[0].set_ylabel(f"mean {_what(data)}", fontsize=9, color=INK)
    _legend(data, figure, grid[0][0])
    return figure


def _newcomers(data: Data, stages: Sequence[str], chosen: Data) -> Figure:
    figure = new_figure(4.8 * len(stages) + 0.6, 3.8)
    grid = figure.subplots(1, len(stages), sharey=True, squeeze=False)[0]
    for axes, stage in zip(grid, stages):
        for method in (m for m in data["methods"] if stage in m.get("newcomers", {})):
            found = method["newcomers"][stage]
            marker = "o" if method["name"] in _places(data) else ""
            means = _scaled(data, _floats(found["mean"]))
            axes.plot(found["age"], means, marker=marker, markersize=3, **_look(data, method))
        beside = chosen.get("newcomers", {}).get(stage)
        if beside is not None:
            axes.plot(
                beside["age"], _scaled(data, _floats(beside["start"])), color=SAME, linewidth=1.2, linestyle=":",
                label=f"clients from the start at the same time, {shortened(chosen['label'], LABEL)}",
            )
        dress(axes)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.set_xlabel("rounds since arrival", fontsize=9, color=INK)
        _title(axes, f"clients that arrived during training, {stage}")
    grid[0].set_ylabel(f"mean {_what(data)}", fontsize=9, color=INK)
    _legend(data, figure, grid[0])
    return figure


def _classes(data: Data) -> Figure:
    held = [c for c in data["clients"] if c["classes"]]
    held = [held[i] for i in thinned(len(held), MOST_CLIENTS)]
    counts = np.array([c["classes"] for c in held])
    width, height = np.clip(1.8 + 0.3 * len(held), 5.6, 13), np.clip(1.6 + 0.3 * data["classes"], 3, 9)
    figure = new_figure(float(width), float(height))
    axes = figure.add_subplot()
    place, label = np.nonzero(counts)
    tint = np.where([held[p]["seen"] for p in place], SEEN_COLOUR, UNSEEN_COLOUR)
    axes.scatter(place, label, s=160 * counts[place, label] / counts.max(), c=tint, alpha=0.8, linewidths=0, zorder=3)
    _title(axes, f"who holds which class; the largest bubble is {counted(counts.max(), 'sample')}")
    dress(axes)
    label_clients(axes, [c["name"] for c in held], float(width) - 1)
    axes.set_xlabel("client" + ("" if all(c["seen"] for c in held) else " (orange: unseen)"), fontsize=9, color=INK)
    axes.set_ylabel("class", fontsize=9, color=INK)
    axes.set_ylim(-0.7, data["classes"] - 0.3)
    label_classes(axes, data["classes"], data["labels"])
    return figure


def _confusion(data: Data, method: Data, stage: str, found: Data) -> Figure:
    """Samples by true class and answer: of the client served worst, and of all that train."""
    worst = found["clients"][0]
    who = shortened(data["clients"][worst["client"]]["name"], NAME)
    shown = {f"served worst: {who}": worst, "all clients": found["all"]}
    size = [float(np.clip(1.2 + 0.42 * len(one["classes"]), 3.2, 9)) for one in shown.values()]
    figure = new_figure(sum(size) + 1.6, max(size) + 0.9)
    grid = figure.subplots(1, len(shown), squeeze=False, width_ratios=size)[0]
    for axes, (who, one) in zip(grid, shown.items()):
        counts = np.array(one["counts"])
        share = counts / np.maximum(np.array(one["held"]), 1)[:, None]
        right = np.eye(len(counts), dtype=bool)
        axes.imshow(np.where(right, share, -share), cmap="RdBu", vmin=-2, vmax=2)  # pale enough to read the numbers
        for a, b in np.argwhere(counts) if len(counts) <= 24 else ():
            axes.text(b, a, counts[a, b], ha="center", va="center", fontsize=7, color=INK)
        dress(axes)
        axes.grid(False)
        _name_columns(data, axes, one["classes"])
        axes.set_yticks(range(len(counts)), [_class(data, k) for k in one["classes"]])
        axes.set_xlabel("answered", fontsize=9, color=INK)
        _title(axes, who)
    grid[0].set_ylabel(f"true class, {_label(method, stage)}", fontsize=9, color=INK)
    return figure


def _recalling(data: Data, stages: Sequence[str]) -> list[Data]:
    """The methods with matrices of all stages."""
    return [m for m in data["methods"] if all(stage in m["confusion"] for stage in stages)]


def _recall(data: Data, stages: Sequence[str]) -> Figure:
    """The share of each class's samples that a method finds, all clients together."""
    classes = data["recalled"]["classes"]
    having = _recalling(data, stages)
    figure = new_figure(2.6 + len(stages) * (0.4 + 0.42 * len(classes)), 1.8 + 0.34 * len(having))
    grid = figure.subplots(1, len(stages), sharey=True, squeeze=False)[0]
    for axes, stage in zip(grid, stages):
        lines = [m["confusion"][stage]["recall"] for m in having]
        share = np.array([[np.nan if one is None else one[0] / one[1] for one in line] for line in lines])
        axes.imshow(1 - share, cmap="Oranges", vmin=0, vmax=1.4, aspect="auto")
        for a, b in np.argwhere(np.isfinite(share)) if len(classes) <= 24 else ():
            axes.text(b, a, f"{100 * share[a, b]:.0f}", ha="center", va="center", fontsize=7, color=INK)
        dress(axes)
        axes.grid(False)
        _name_columns(data, axes, classes)
        axes.set_yticks(range(len(having)), [shortened(m["label"], LABEL) for m in having])
        _title(axes, f"recall by class in %, {stage}")
    return figure


def _few(data: Data, method: Data) -> Figure:
    """Use, mass, w, alpha and similarity of one method's models, as far as they were recorded."""
    few = method["few"]
    end, models = few["end"], few["models"]
    figure = new_figure(11.5, 6.4)
    grid = figure.subplots(2, 3).ravel()
    order = np.argsort(np.array(end["choice"]), kind="stable")
    for k in range(models):
        where = np.flatnonzero(np.array(end["choice"])[order] == k)
        grid[0].scatter(where, np.full(len(where), k + 1), marker="s", s=22, color=_model(k))
    grid[0].set_ylim(models + 0.6, 0.4)
    grid[0].set_yticks(range(1, models + 1))
    grid[0].set_xticks([])
    _title(grid[0], "which client uses which model")
    if few["mass"]:
        share = np.full((len(few["mass"]["share"]), max(map(len, few["mass"]["share"]))), np.nan)
        for line, given in zip(share, few["mass"]["share"]):
            line[: len(given)] = given
        for k, line in enumerate(share.T):
            grid[1].plot(few["mass"]["rounds"], 100 * line, color=_model(k), linewidth=1.5)
        grid[1].set_ylim(-2, 102)
    else:
        _say(grid[1], "not recorded")
    _title(grid[1], "mass per model in %, by round")
    relative = np.array(end["apart"]) / max(float(np.mean(end["moved"])), 1e-12)
    grid[2].imshow(relative, cmap="Blues", vmin=0, vmax=max(1.0, float(relative.max())))
    for a in range(models) if models <= 8 else ():
        for b in range(models):
            dark = relative[a, b] > 0.6 * max(1.0, float(relative.max()))
            grid[2].text(b, a, f"{100 * relative[a, b]:.0f}", ha="center", va="center", fontsize=8,
                         color="white" if dark else INK)
    _title(grid[2], "distance of models in % of the way gone")
    for k in range(min(models, 8)):
        own = [[line[k] if line and k < len(line) else np.nan for line in table] for table in few["w"]]
        for line in np.array(own, dtype=float).T if own else ():
            grid[3].plot(few["rounds"], line, color=_model(k), linewidth=0.8, alpha=0.4)
    if not few["w"]:
        _say(grid[3], "not recorded")
    _title(grid[3], "w of every client in %, by round")
    for line in np.array(few["alpha"], dtype=float).T if few["alpha"] else ():
        grid[4].plot(few["rounds"], 100 * line, color=INK, linewidth=0.8, alpha=0.4)
    if not few["alpha"]:
        _say(grid[4], "this method weighs no clients" if few["w"] else "not recorded")
    _title(grid[4], "alpha of every client in %, by round")
    for axes in grid:
        dress(axes)
    grid[2].grid(False)
    for ticks in (grid[2].set_xticks, grid[2].set_yticks):
        ticks(range(models), range(1, models + 1))
    grid[5].set_axis_off()
    words = re.sub("(.{1,44})(?: |$)", r"\1\n", few["words"])
    name = shortened(method["label"], LABEL)
    grid[5].text(0, 1, f"{name}\n\n{words}", va="top", fontsize=10, color=INK, transform=grid[5].transAxes)
    return figure


def _conflicts(data: Data) -> Figure:
    having = [m for m in data["methods"] if m["conflicts"]]
    matrices = [m for m in having if m["conflicts"]["cosines"]]
    columns = min(len(matrices), 4)
    lines = max(1, -(-len(matrices) // max(columns, 1)))
    figure = new_figure(4.6 + 2.4 * columns, max(3.2, 2.5 * lines))
    spots = figure.add_gridspec(lines, 1 + columns, width_ratios=[4.2, *[2.2] * columns])
    first = figure.add_subplot(spots[:, 0])
    for method in having:
        found = method["conflicts"]
        marker = "o" if len(found["rounds"]) == 1 else ""
        first.plot(found["rounds"], 100 * _floats(found["opposing"]), marker=marker, markersize=4,
                   **_look(data, method))
    first.set_ylim(-2, 102)
    _title(first, "pairs of clients with opposing updates in %, by round")
    dress(first)
    handles = [*first.get_legend_handles_labels()[0], *grey(sum(m["name"] not in _places(data) for m in having))]
    first.legend(handles=handles, frameon=False, fontsize=7, labelcolor=INK)
    for k, method in enumerate(matrices):
        axes = figure.add_subplot(spots[k // columns, 1 + k % columns])
        cosines = np.array(method["conflicts"]["cosines"]) / 100
        axes.imshow(cosines, cmap="RdBu", vmin=-1, vmax=1, interpolation="nearest")
        axes.set_axis_off()
        _title(axes, method["label"])
    return figure


def _size(data: Data, method: Data, stage: str, against: Sequence[Data]) -> Figure:
    figure = new_figure(4.8 * len(against) + 0.6, 3.6)
    grid = figure.subplots(1, len(against), squeeze=False)[0]
    n = np.array([c["train"] for c in data["clients"]], dtype=float)
    for axes, base in zip(grid, against):
        gain = (_values(method, stage) - _values(base, SERVED)) * scale_of(data).sign
        there = np.isfinite(gain) & (n > 0)
        tint = np.select([gain[there] > 0, gain[there] < 0], [GAIN, LOSS], SAME)
        axes.scatter(n[there], _scaled(data, gain[there]), c=tint, s=22, alpha=0.75, linewidths=0, zorder=3)
        axes.axhline(0, color=SAME, linewidth=0.8)
        axes.set_xscale("log")
        plain_log(axes, "x")
        _title(axes, f"gain of {_label(method, stage)} over {base['label']} (served)")
        dress(axes)
        axes.set_xlabel("training samples of the client", fontsize=9, color=INK)
    return figure


# -- small words -------------------------------------------------------------------------------------------------------


def _named(data: Data, name: str) -> Data | None:
    exact = [m for m in data["methods"] if m["name"] == name]
    return next(iter(exact or [m for m in data["methods"] if re.split("[:+]", m["name"])[0] == name]), None)


def _label(method: Data, stage: str) -> str:
    found = str(method["labels"][stage])
    return found if found != method["label"] else f"{found} ({stage})"


def _key(stage: str, seen: bool) -> str:
    return stage if seen else unseen(stage)


def _values(method: Data, stage: str) -> Floats:
    return _floats(method["values"][stage])


def _floats(values: Sequence[float | None]) -> Floats:
    return np.array([np.nan if v is None else v for v in values], dtype=np.float64)


def _there(values: Floats) -> Floats:
    return values[np.isfinite(values)]


def _scaled(data: Data, values: Floats) -> Floats:
    return scaled(scale_of(data), values)


def _what(data: Data) -> str:
    return f"test {measured(scale_of(data))}"


def _places(data: Data) -> dict[str, int]:
    """The methods in colour: all, or of a crowd the best, the one in focus and FedAvg, as on the page that opens."""
    method, stage = focus(data)
    means = {m["name"]: line["mean"] for m in data["methods"] for line in m["lines"] if line["stage"] == stage}
    known = [name for name, mean in means.items() if mean is not None]
    best = sorted(known, key=lambda name: scale_of(data).sign * means[name], reverse=True)
    base = _named(data, "fedavg")
    return placed([m["name"] for m in data["methods"]], best, [method["name"], *([base["name"]] if base else [])])


def _look(data: Data, method: Data) -> Data:
    """How a method's line is drawn, with its name where it has a colour."""
    number = _places(data).get(method["name"])
    return stroke(number) | ({} if number is None else {"label": shortened(method["label"], LABEL)})


def _colour(data: Data, method: Data) -> str:
    number = _places(data).get(method["name"])
    return SAME if number is None else COLOURS[number % len(COLOURS)]


def _legend(data: Data, figure: Figure, axes: Axes) -> None:
    handles = [*axes.get_legend_handles_labels()[0], *grey(len(data["methods"]) - len(_places(data)))]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8, labelcolor=INK)


def _lonely(values: Floats) -> str:
    """A mark for a curve of one point, which no line leads to."""
    return "o" if np.isfinite(values).sum() == 1 else ""


def _say(axes: Axes, words: str) -> None:
    """A sentence in the middle of a chart that has nothing else to show."""
    axes.text(0.5, 0.5, words, ha="center", va="center", fontsize=9, color=INK, transform=axes.transAxes)


def _model(k: int) -> str:
    return COLOURS[k % len(COLOURS)]


def _name_columns(data: Data, axes: Axes, classes: Sequence[int]) -> None:
    """A class below each column, slanted where the names are long."""
    names = [_class(data, k) for k in classes]
    slanted = max(map(len, names)) > 3
    axes.set_xticks(range(len(names)), names, rotation=55 if slanted else 0, ha="right" if slanted else "center",
                    rotation_mode="anchor" if slanted else "default")


def _class(data: Data, k: int) -> str:
    named = data["labels"] is not None and k < len(data["labels"])
    return shortened(str(data["labels"][k]), NAME) if named else str(k)


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name.rpartition("/")[2])[:100]


def _title(axes: Axes, text: str) -> None:
    axes.set_title(shortened(text, TITLE), loc="left", fontsize=9, color=INK, pad=4)
