"""Two versions of coterie side by side: the speed of a round, and whether the same seeds give the same rows.

    git worktree add /tmp/before REVISION
    python benchmarks/versions.py /tmp/before . --methods fedavg fedfew:official
    python benchmarks/versions.py /tmp/before . --data images --model cnn --batch 50 --precision bf16
    python benchmarks/versions.py /tmp/before . --rows fedavg fedfew ditto scaffold perfedavg

Each version has a process of its own, which builds the case of its own benchmarks/round.py, warms up and then waits.
The two are asked in turn, first one and then the other, so that other work on the machine meets both. The ratio is the
first version's seconds over the second's: above 1 the second is faster. A turn counts with the median of its rounds;
the ratio's interval is Student's on the logarithms.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scipy import stats

LEVEL = 0.95


class Version:
    """A process with the package of one folder."""

    def __init__(self, folder: Path, options: argparse.Namespace, method: str) -> None:
        asked = json.dumps({**vars(options), "before": "", "after": "", "out": None, "method": method})
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", str(folder.resolve()), asked], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, bufsize=1,
        )
        self.ready = self.ask("start")

    def ask(self, what: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{what}\n")
        answer = self.process.stdout.readline().strip()
        if not answer:
            raise SystemExit(f"a version's process ended ({self.process.wait()})")
        return answer

    def close(self) -> None:
        self.process.communicate("end\n")


def work(folder: str, options: argparse.Namespace) -> None:
    """The other side: build one case from the package in `folder`, then do as asked until `end`."""
    sys.path[:0] = [folder, str(Path(folder) / "benchmarks")]
    import round as benchmark
    import torch

    data, experiment = benchmark.federation(options)
    case_of = getattr(benchmark, "Contest", None) or benchmark.Case  # the later and the earlier name
    case = case_of(options.method, data, experiment.factory(data), options.batch, options.lr, options.device, {})
    simulation = case.built(options.precision)

    def settled() -> float:
        if options.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    for word in map(str.strip, sys.stdin):
        if word == "end":
            return
        taken = []
        for _ in range(3 if word == "start" else options.rounds):
            start = settled()
            simulation.round()
            taken.append(settled() - start)
        print(statistics.median(taken), flush=True)


def digest(folder: str, method: str, rounds: int) -> str:
    """The rows of a run with the defaults on digits, as a fingerprint of every bit."""
    code = ("import sys, coterie, json; from coterie.data import digits, partition; from coterie.models import model;"
            "x, y = digits(); f = coterie.Federation.from_assignment(x, y, partition('dirichlet', y.numpy(), 10, "
            "alpha=0.5, seed=0), unseen=2);"
            f"r = coterie.run({method!r}, model('mlp', (1, 8, 8), 10, hidden=32), f, rounds={rounds}, device='cpu', "
            "engine='stack', evaluate_every=2, folder=sys.argv[1]);"
            "print(json.load(open(sys.argv[1] + '/result.json'))['rows_sha256'])")
    with tempfile.TemporaryDirectory() as place:
        words = [sys.executable, "-c", code, f"{place}/run"]
        done = subprocess.run(words, env={"PYTHONPATH": folder, "PATH": ""}, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a checkout of the first version")
    parser.add_argument("after", type=Path, help="a checkout of the second version")
    parser.add_argument("--methods", nargs="*", default=["fedavg", "fedfew:official"])
    parser.add_argument("--rows", nargs="*", default=[], help="methods whose rows are compared instead, bit for bit")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--samples", type=int, default=60_000, help="of random data")
    parser.add_argument("--partition", default="dirichlet:alpha=0.5")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--model", default="mlp:hidden=128")
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of one turn")
    parser.add_argument("--turns", type=int, default=10)
    options = parser.parse_args()
    for method in options.rows:
        found = [digest(str(folder.resolve()), method, 4) for folder in (options.before, options.after)]
        said = "equal, bit for bit" if found[0] == found[1] else "DIFFERENT"
        print(f"{method}: rows {said} ({found[1][:12]})", flush=True)
    for method in [] if options.rows else options.methods:
        sides = [Version(folder, options, method) for folder in (options.before, options.after)]
        logs, seconds = [], []
        for turn in range(options.turns):
            order = (0, 1) if turn % 2 == 0 else (1, 0)
            took = {side: float(sides[side].ask("go")) for side in order}
            logs.append(math.log(took[0] / took[1]))
            seconds.append((took[0], took[1]))
        for side in sides:
            side.close()
        middle, spread = sum(logs) / len(logs), stats.tstd(logs) / math.sqrt(len(logs))
        reach = stats.t.ppf(0.5 + LEVEL / 2, len(logs) - 1) * spread
        low, high = math.exp(middle - reach), math.exp(middle + reach)
        first, second = (1e3 * statistics.median(column) for column in zip(*seconds, strict=True))
        print(f"{method} {options.precision} on {options.device}: {first:.2f} and {second:.2f} ms a round, "
              f"ratio {math.exp(middle):.3f} ({low:.3f} to {high:.3f}) over {options.turns} turns", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "--worker":
        work(sys.argv[2], argparse.Namespace(**json.loads(sys.argv[3])))
    else:
        main()
