"""Accuracy against epsilon: methods with client-level privacy on a federation, as a table and a picture.

    python benchmarks/privacy.py FEDERATION.npz --out docs/privacy.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

import coterie
from coterie.privacy import account
from coterie.report.table import markdown_table
from coterie.running.experiment import Experiment

ENTRIES = {  # a method, what people call it, and its clip: a client's K weighted updates are shorter than one full one
    "fedavg": ("FedAvg", 1.0),
    "fedfew:weigh=client,scale=false,mu=1,server=sgd(lr=3)": ("FedFew, K = 3", 0.6),
}
INK, GRID, COLOURS = "#1c1f24", "#dfe2e6", ("#2563c9", "#d9730d")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", help="an .npz file with x, y and client")
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--delta", type=float, default=1e-4)
    parser.add_argument("--participation", type=float, default=0.25)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--model", default="mlp:hidden=32")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--out", type=Path, help="where to draw the picture")
    given = parser.parse_args()
    experiment = Experiment(data=given.data, model=given.model)
    federation = experiment.federation()
    factory = experiment.factory(federation)
    print(f"{federation.population} clients, delta {given.delta:g}, {given.rounds} rounds", flush=True)

    def accuracy(spec: str) -> tuple[float, float]:
        """In %, of the last round's served models: mean over clients, averaged over seeds, and the seeds' spread."""
        found = [
            coterie.run(
                spec, factory, federation, rounds=given.rounds, participation=given.participation, sampling="poisson",
                lr=given.lr, seed=seed, evaluate_every=given.rounds, device="cpu",
            ).at("served", "last").test["accuracy"].mean()
            for seed in range(given.seeds)
        ]
        return 100 * float(np.mean(found)), 100 * float(np.std(found))

    rows = []
    measured: dict[str, list[tuple[float, float]]] = {spec: [] for spec in ENTRIES}
    for epsilon in [*given.epsilons, None]:
        sigma = None if epsilon is None else account.noise(epsilon, given.participation, given.rounds, given.delta)
        cells = ["without privacy", "-"] if epsilon is None else [f"{epsilon:g}", f"{sigma:g}"]
        for spec, (_, clip) in ENTRIES.items():
            options = f"sigma={sigma},clip={clip},delta={given.delta},epsilon={epsilon}"
            plug = "" if epsilon is None else f"+private:{options}"
            mean, spread = accuracy(spec + plug)
            measured[spec].append((mean, spread))
            cells.append(f"{mean:.1f} ± {spread:.1f}" if given.seeds > 1 else f"{mean:.1f}")
        rows.append(cells)
        print(*cells, sep="  ", flush=True)
    print(markdown_table(["epsilon", "sigma", *(name for name, _ in ENTRIES.values())], rows, "--:"))
    if given.out:
        draw(given.epsilons, measured, federation.population, given)


def draw(
    epsilons: list[float], measured: dict[str, list[tuple[float, float]]], clients: int, given: argparse.Namespace
) -> None:
    plt.rcParams.update({"font.family": "DejaVu Sans", "font.size": 10, "text.color": INK, "axes.labelcolor": INK})
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for colour, (spec, points) in zip(COLOURS, measured.items(), strict=True):
        mean, spread = np.array(points[:-1]).T
        axes.errorbar(epsilons, mean, spread, color=colour, marker="o", capsize=3, label=ENTRIES[spec][0])
        without = f"{ENTRIES[spec][0]} without privacy"
        axes.axhline(points[-1][0], color=colour, linestyle="--", linewidth=1, label=without)
    axes.set_xscale("log", base=2)
    axes.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
    axes.set_xlabel(f"epsilon at delta = {given.delta:g}; to the left: more privacy")
    axes.set_ylabel("test accuracy in %, mean over clients")
    axes.set_title(f"{clients} clients, {given.rounds} rounds, sampled with {given.participation:g}", loc="left")
    axes.grid(color=GRID)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(given.out, dpi=130)
    print(f"picture: {given.out}")


if __name__ == "__main__":
    main()
