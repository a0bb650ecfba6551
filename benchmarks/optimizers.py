"""What an optimizer costs: seconds a round beside plain SGD, in one process, each in turn.

    python benchmarks/optimizers.py                                                       # digits, an MLP, this CPU
    python benchmarks/optimizers.py --data images --model cnn --batch 50 --device cuda --precisions float32 tf32 bf16

The optimizers take their turns one after another, so that other work on the machine meets all of them; the ratio is
that of the medians over all turns, and of each turn's the least and the largest.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from round import federation

from coterie.presets.bench import Contest, timed

COMPARED = ("sgd", "sgd(momentum=0.9)", "sgd(momentum=0.9,nesterov=true,weight_decay=1e-4)", "adam", "adamw")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--samples", type=int, default=60_000, help="of random data")
    parser.add_argument("--partition", default="dirichlet:alpha=0.5")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--model", default="mlp:hidden=128")
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precisions", nargs="+", default=["float32"])
    parser.add_argument("--optimizers", nargs="+", default=list(COMPARED))
    parser.add_argument("--rounds", type=int, default=10, help="of a turn; their median counts")
    parser.add_argument("--turns", type=int, default=9)
    options = parser.parse_args()
    data, experiment = federation(options)
    print(f"{options.data}, {options.model}, {options.method}, {options.clients} clients, batch {options.batch}, "
          f"{options.device}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    for precision in options.precisions:
        runs = {}
        for name in options.optimizers:
            contest = Contest(options.method, data, experiment.factory(data), options.batch, options.lr, options.device,
                              {"optimizer": name})
            runs[name] = contest.built(precision)
            timed(runs[name].round, options.device, 3)
        turns = [{name: timed(run.round, options.device, options.rounds) for name, run in runs.items()}
                 for _ in range(options.turns)]
        plain = statistics.median(turn["sgd"] for turn in turns)
        for name in runs:
            ratios = [turn[name] / turn["sgd"] for turn in turns]
            middle = statistics.median(turn[name] for turn in turns)
            print(f"{precision} {name}: {1e3 * middle:.3f} ms a round, {middle / plain:.3f} of plain SGD "
                  f"({min(ratios):.3f} to {max(ratios):.3f})", flush=True)


if __name__ == "__main__":
    main()
