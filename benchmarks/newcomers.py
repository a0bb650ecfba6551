"""Does the interval that `coterie personalize` states hold? Newcomers that took no part in training, one by one.

Some clients are held out of a federation; the others train. Each held-out client keeps a quarter of its samples for
testing, is personalized with the rest, and the accuracy of its model on its test samples is compared with the interval
that was stated for so many further samples. Clients of a small data set are held out in turn, `--repeats` times over.

    python benchmarks/newcomers.py --data uci_har.npz --model sensor:width=8,hidden=64 --hold 10 --repeats 2 \
        --set batch=20 --set epochs=2 --set rounds=15 --out har.jsonl
    python benchmarks/newcomers.py --show har.jsonl
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import coterie
from coterie import models
from coterie.data import load, natural
from coterie.data.partition import generator
from coterie.data.splits import deal
from coterie.evaluation import intervals
from coterie.options import parse_options
from coterie.running.saved import Saved
from coterie.serving.export import module_of
from coterie.serving.newcomers import personalize

WAYS = {
    "beta-binomial with drift (stated)": lambda line: line["stated"],
    "beta-binomial without drift": lambda line: intervals.predictive(line["cv"], line["n"], line["m"]),
    "the same, repeated cross-validation": lambda line: intervals.predictive(line["again"], line["n"], line["m"]),
    "exact (hypergeometric) without drift": lambda line: intervals.exact_predictive(line["cv"], line["n"], line["m"]),
    "Clopper-Pearson on the pooled counts": lambda line: intervals.clopper_pearson(line["cv"], line["n"]),
}


def newcomers(options: argparse.Namespace) -> None:
    source = load(options.data)
    dealt, names = natural(source.client, minimum=options.minimum)
    training = dict(item.split("=") for item in options.set)
    Path(options.out).write_text("")
    for repeat in range(options.repeats):
        order = generator(repeat, "hold").permutation(len(dealt))
        for first in range(0, min(len(order), options.most), options.hold):
            held = order[first : first + options.hold]
            kept = np.setdiff1d(order, held)
            federation = coterie.Federation.from_assignment(
                source.x, source.y, [dealt[i] for i in kept], names=[names[i] for i in kept],
                classes=int(source.y.max()) + 1,
            )
            name, given = parse_options(options.model)
            factory = models.model(name, tuple(source.x.shape[1:]), federation.outputs, **given)
            for method in options.methods:
                with tempfile.TemporaryDirectory() as folder:
                    start = time.time()
                    coterie.run(method, factory, federation, folder=folder, seed=repeat, **training)
                    print(f"{method}: trained in {time.time() - start:.0f} s", flush=True)
                    for i in held:
                        start = time.time()
                        saved = Saved.open(Path(folder), options.model)
                        line = judged(saved, source, dealt[i], names[i], repeat, options.cv)
                        line |= {"method": method, "repeat": repeat, "seconds": time.time() - start}
                        with Path(options.out).open("a") as out:
                            print(json.dumps(line), file=out)


def judged(saved: Saved, source, samples, name: str, repeat: int, again: int) -> dict:
    train, _, test = deal(samples, 0.0, 0.25, generator(repeat, "test", str(name)))
    mine = torch.from_numpy(train)
    counts, found = [], None
    for seed in range(again):
        one = personalize(saved, (source.x[mine], source.y[mine]), str(name), future=len(test), seed=seed)
        found = found or one
        counts.append(one.estimate.value * one.estimate.n)
    with torch.no_grad():
        right = module_of(found)(source.x[torch.from_numpy(test)]).argmax(1) == source.y[torch.from_numpy(test)]
    return {
        "client": str(name), "n": len(train), "m": len(test), "cv": round(counts[0]), "again": float(np.mean(counts)),
        "test": int(right.sum()), "adapted": found.adapted, "stated": found.estimate.interval,
        "drift": found.estimate.drift,
    }


def show(path: str) -> None:
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    for method in sorted({line["method"] for line in lines}):
        mine = [line for line in lines if line["method"] == method]
        n, m, cv, test = (np.array([line[key] for line in mine]) for key in ("n", "m", "cv", "test"))
        print(f"\n{method}: {len(mine)} newcomers ({len({line['client'] for line in mine})} different ones), "
              f"n {n.min()} to {n.max()}, m {m.min()} to {m.max()}; estimated {np.mean(cv / n):.3f}, "
              f"on test {np.mean(test / m):.3f}; adapted {sum(line['adapted'] for line in mine)}; "
              f"{np.mean([line['seconds'] for line in mine]):.1f} s each\n")
        print("| interval | covers | mean width | by the exact binomial, m samples | n samples |")
        print("|---|--:|--:|--:|--:|")
        exact = {size: widths([intervals.clopper_pearson(k / a * b, b) for k, a, b in zip(cv, n, many)])
                 for size, many in (("m", m), ("n", n))}
        for way, interval in WAYS.items():
            ends = [interval(line) for line in mine]
            inside = np.mean([low - 1e-9 <= t / k <= high + 1e-9 for (low, high), t, k in zip(ends, test, m)])
            print(f"| {way} | {inside:.1%} | {widths(ends):.3f} | {widths(ends) / exact['m']:.2f} "
                  f"| {widths(ends) / exact['n']:.2f} |")


def widths(ends) -> float:
    return float(np.mean([high - low for low, high in ends]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    parser.add_argument("--model")
    parser.add_argument("--methods", nargs="+", default=["fedavg"])
    parser.add_argument("--hold", type=int, default=10, help="clients held out of one training")
    parser.add_argument("--most", type=int, default=10**9, help="clients held out in all, per repeat")
    parser.add_argument("--minimum", type=int, default=1, help="samples of the smallest client used")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--cv", type=int, default=1, help="cross-validations of which the mean is taken")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--out", default="newcomers.jsonl")
    parser.add_argument("--show")
    given = parser.parse_args()
    torch.set_num_threads(1)
    show(given.show) if given.show else newcomers(given)
