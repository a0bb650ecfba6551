"""Seconds per round: the published way against coterie (see `coterie/presets/bench.py`), for any data and model.

    python benchmarks/round.py                                            # digits, an MLP
    python benchmarks/round.py --data cifar10.npz --model cnn --batch 50
    python benchmarks/round.py --data images --model resnet18:norm=group --batch 50 --methods fedavg
    python benchmarks/round.py --data words --model textcnn:dropout=0,vocabulary=5000,features=128 --batch 50

`images` and `words` are random data of CIFAR-10's and of a news corpus' shape: they time as the real ones do. The
result can be written as JSON (`--out`), from which `benchmarks/plot.py` draws docs/performance.png.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from coterie.data import Federation, partition
from coterie.options import build
from coterie.presets.bench import METHODS, Contest, ceilings, measure
from coterie.running.experiment import Experiment
from coterie.running.training import Training


def federation(options: argparse.Namespace) -> tuple[Federation, Experiment]:
    """The data dealt out, without a validation split, as published programs do it."""
    experiment = Experiment(
        data=options.data, partition=options.partition, clients=options.clients, model=options.model, val=0.0
    )
    if options.data not in ("images", "words"):
        return experiment.federation(), experiment
    rng, count = np.random.default_rng(0), options.samples
    y = rng.integers(0, 10, count)
    x = (rng.standard_normal((count, 3, 32, 32), dtype=np.float32) if options.data == "images"
         else rng.integers(1, 5000, (count, 64)))
    name, _, alpha = options.partition.partition(":alpha=")
    dealt = partition(name, y, options.clients, seed=0, **({"alpha": float(alpha)} if alpha else {}))
    return Federation.from_assignment(x, y, dealt, val=0.0), experiment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--samples", type=int, default=60_000, help="of random data")
    parser.add_argument("--partition", default="dirichlet:alpha=0.5")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--model", default="mlp:hidden=128")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precisions", nargs="+", default=None, help="float32, tf32, bf16")
    parser.add_argument("--rounds", type=int, default=5, help="rounds timed of coterie; the median counts")
    parser.add_argument("--reference-rounds", type=int, default=1, help="rounds timed of the published way")
    parser.add_argument("--set", nargs="*", default=[], help="options of the training, e.g. engine=stack kernels=false")
    parser.add_argument("--out", type=Path, help="append the timings to this JSON file")
    options = parser.parse_args()
    precisions = options.precisions or (["float32", "tf32", "bf16"] if options.device == "cuda" else ["float32"])
    data, experiment = federation(options)
    given = dict(item.split("=", 1) for item in options.set)
    checked = build(Training, given, "--set")
    further = {name: getattr(checked, name) for name in given}
    rates = ceilings(options.device)
    print(f"{options.data}, {options.model}, {options.clients} clients, batch {options.batch}, {options.device}, "
          f"torch {torch.__version__}; copy {rates[0] / 1e9:.0f} GB/s, product {rates[1] / 1e12:.2f} TFLOP/s; "
          f"{int(data.sizes('train').sum())} training samples")
    print("method | precision | rows apart | published s | first s | coterie s | ratio | in 100 rounds | samples/s | "
          "TFLOP/s | of the bandwidth | times the floor | GB")
    found = []
    for method in options.methods:
        contest = Contest(method, data, experiment.factory(data), options.batch, options.lr, options.device, further)
        for t in measure(contest, precisions, rates, options.rounds, options.reference_rounds):
            print(f"{t.method} | {t.precision} | {t.apart:.1e} | {t.reference:.4g} | {t.first:.3g} | {t.seconds:.4g} | "
                  f"{t.ratio:.1f} | {t.over(100):.1f} | {t.samples:.4g} | {t.flop / 1e12:.3g} | {t.bandwidth:.3g} | "
                  f"{t.floor:.1f} | {t.memory / 1e9:.2f}", flush=True)
            found.append({"data": options.data, "model": options.model, "device": options.device,
                          "batch": options.batch, **asdict(t)})
    if options.out:
        before = json.loads(options.out.read_text()) if options.out.exists() else []
        options.out.write_text(json.dumps([*before, *found], indent=1) + "\n")


if __name__ == "__main__":
    main()
