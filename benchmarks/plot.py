"""Draws docs/performance.png from the timings that `benchmarks/round.py --out timings.json` wrote.

    python benchmarks/plot.py timings.json docs/performance.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {"float32": "#9bb8d3", "tf32": "#5b8db8", "bf16": "#1f4e79"}


def draw(timings: list[dict[str, Any]], path: Path) -> None:
    """One panel per device and model: how many times faster than the published way, by method and precision."""
    panels: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for timing in timings:
        panels.setdefault((timing["device"], timing["model"]), []).append(timing)
    heights = [len({t["method"] for t in group}) for group in panels.values()]
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(8, 0.9 * len(panels) + 0.42 * sum(heights)), squeeze=False, height_ratios=heights,
        layout="constrained",
    )
    for axis, ((device, model), group) in zip(axes[:, 0], panels.items(), strict=True):
        methods = list(dict.fromkeys(t["method"] for t in group))[::-1]
        kinds = [kind for kind in COLOURS if any(t["precision"] == kind for t in group)]
        wide = 0.8 / len(kinds)
        for k, kind in enumerate(kinds):
            mine = {t["method"]: t["reference"] / t["seconds"] for t in group if t["precision"] == kind}
            places = [methods.index(m) + 0.4 - wide * (k + 0.5) for m in mine]
            bars = axis.barh(places, list(mine.values()), wide, color=COLOURS[kind], label=kind)
            axis.bar_label(bars, fmt="%.1f", fontsize=7, padding=2)
        axis.set_yticks(range(len(methods)), methods, fontsize=8)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_title(f"{model} on {device.upper()}: times faster than a loop over clients", fontsize=9, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.1)
        if len(kinds) > 1:
            axis.legend(fontsize=7, frameon=False, loc="lower right", bbox_to_anchor=(1, 0.98), ncols=len(kinds))
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
