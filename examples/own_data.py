"""A table of several sites: which method serves whom, and who is served worst?

    python examples/own_data.py [FOLDER]

The table is made up here, so that one knows what should come out; replace it by yours. Six clinics measure four things.
What they say about a patient is the same everywhere but in the south, where the device was mounted upside down.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np

import coterie
from coterie.report import page

SITES = ("east", "harbour", "hill", "north", "south", "west")


def write_table(path: Path) -> None:
    """A row for each patient: site, four measurements on scales of their own, and what was found."""
    rng = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["site", "pulse", "pressure", "oxygen", "age", "finding"])
        for site in SITES:
            for _ in range(80):
                z = rng.standard_normal(4)
                ill = (z[0] + z[1] > 0) != (site == "south")
                values = [70 + 10 * z[0], 120 + 15 * z[1], 96 + 2 * z[2], 50 + 18 * z[3]]
                table.writerow([site, *(f"{value:.1f}" for value in values), "ill" if ill else "well"])


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_table(folder / "clinics.csv")

    # `scale=true`: pulse and pressure are large numbers, and models hardly learn from those.
    asked = coterie.experiment({
        "data": f"{folder / 'clinics.csv'}:label=finding,client=site,scale=true",
        "model": "mlp:hidden=16", "methods": ["fedper", "ifca:models=2"], "seeds": 2,
        "training": {"rounds": 20, "lr": 0.1},
    })
    print(asked.federation().summary())

    # Local and FedAvg always take part; without them nobody knows whether personalization pays.
    results = asked.run(folder / "runs")

    # A mean hides the site for whom the model is bad.
    for result in results:
        scores = result.at("served")
        worst = int(scores.test["accuracy"].argmin())
        print(
            f"{result.method}, seed {result.seed}: mean {scores.test['accuracy'].mean():.2f}, "
            f"worst {scores.test['accuracy'][worst]:.2f} at {result.names[scores.clients[worst]]}"
        )

    written, _ = page.write([folder / "runs"], folder / "report.html")
    print(f"the whole answer: {written}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "own-data"))
