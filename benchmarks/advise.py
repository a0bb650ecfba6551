"""`coterie advise` on real data, beside the best of docs/results.

    python benchmarks/advise.py .data                     # HAR, MNIST writers, HAM10000 sites, 180 s each
    python benchmarks/advise.py .data --only har --rounds 14 --seeds 1

Expected are `uci_har.npz`, `mnist_writers.npz` and `ham10000_32.npz` (docs/results/ham10000.md says how it is made) in
the folder. The best lines are read from the tables in docs/results: the best mean of either stage, and every line
within twice the standard error between seeds of it.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from pathlib import Path

from coterie.advise import command, report
from coterie.advise.pilot import WAYS
from coterie.running.experiment import Experiment, with_settings

RESULTS = Path(__file__).parents[1] / "docs" / "results"
CASES = {
    "har": ("uci_har.npz", "", 5, "sensor:width=8,hidden=64", ["batch=20", "lr=0.05", "epochs=2"], "har.md"),
    "mnist": ("mnist_writers.npz", "natural:minimum=120", 28, "mlp:hidden=64", ["batch=50", "lr=0.05", "epochs=5"],
              "mnist-writers.md"),
    # An MLP in place of the table's CNN, of which a pilot within three minutes on two cores would be too short.
    "ham": ("ham10000_32.npz", "", 0, "mlp:hidden=64", ["batch=32", "lr=0.05"], "ham10000.md"),
}
LIKE = {
    **WAYS, "ditto": "interpolation", "fedrep": "decoupling", "fedbabu": "decoupling", "lgfedavg": "decoupling",
    "fedrod": "decoupling", "fedpac": "decoupling", "cfl": "clustering", "fesem": "clustering", "fedsoft": "clustering",
    "pacfl": "clustering", "fedfew": "clustering", "fedprox": "shared", "scaffold": "shared", "moon": "shared",
    "fedavgft": "fine-tuning",
}
LINE = re.compile(r"^\| ([\w+]+)[^|]*\| \**([\d.]+) ± ([\d.]+)\** \|", re.MULTILINE)


def best_ways(page: str, seeds: int = 2) -> tuple[str, set[str]]:
    """The best line of a page's two tables in words, and the ways of all lines within seed noise of it."""
    served, adapted = (RESULTS / page).read_text().split("**adapted**")
    lines = [
        (float(mean), float(spread), method, stage)
        for stage, text in (("served", served), ("adapted", adapted.partition("What one sees")[0]))
        for method, mean, spread in LINE.findall(text)
    ]
    top = max(lines)
    near = [x for x in lines if top[0] - x[0] <= 2 * math.sqrt((top[1] ** 2 + x[1] ** 2) / seeds)]
    return f"{top[2]}, {top[3]}: {top[0]} ± {top[1]}", {way(x[2], x[3]) for x in near}


def way(method: str, stage: str) -> str:
    found = LIKE.get(method.partition("+")[2] or method, method)
    return "fine-tuning" if stage == "adapted" and found == "shared" else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=CASES, action="append")
    parser.add_argument("--budget", type=float, default=180.0)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--newcomers", default="none", help="none: tables rank by the clients that train")
    options = parser.parse_args()
    for name in options.only or CASES:
        data, partition, unseen, model, settings, page = CASES[name]
        experiment = with_settings(
            Experiment(data=str(options.folder / data), partition=partition, unseen=unseen, model=model),
            [*settings, "device=cpu"],
        )
        start, work = time.perf_counter(), time.process_time()
        pilot, go_on = command.run(
            experiment, settings, options.rounds, options.seeds, options.budget, options.newcomers, "mean"
        )
        best, near = best_ways(page)
        print(f"## {name}: {time.perf_counter() - start:.0f} s, {time.process_time() - work:.0f} s of processor time")
        print(report.markdown(pilot, go_on))
        verdict = "within seed noise of the best" if pilot.advice.way in near else "NOT among the best"
        print(f"docs/results: {best}; ways within seed noise: {', '.join(sorted(near))}")
        print(f"advice: {pilot.advice.way}, {verdict}\n", flush=True)


if __name__ == "__main__":
    main()
