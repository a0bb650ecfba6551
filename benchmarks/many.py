"""Many clients, few of them a round: what a round, an evaluation and the memory cost at 1,000 and at 10,000 clients.

    python benchmarks/many.py                     # on CUDA where there is one
    python benchmarks/many.py --device cpu

The federation is synthetic: 784 features, 10 classes, 20 to 40 samples a client; clients differ in their classes and in
a shift of their own. First each size runs in a process of its own, a few rounds and an evaluation: device memory is the
peak over these, less the data set and what was there before (on a CPU the peak of the process). Then both sizes are
there and their rounds alternate, so that other work on the machine meets both; the first rounds, in which graphs are
captured, do not count. The median is printed, and the fastest round.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch

from coterie import registry
from coterie.data import Federation
from coterie.models import MLP
from coterie.running.simulation import Simulation
from coterie.running.training import Training

FEATURES, CLASSES = 784, 10


def federation(clients: int, seed: int = 0) -> Federation:
    """Clients of 20 to 40 samples, each with three of the classes and a shift of its own."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(20, 41, clients)
    owner = np.repeat(np.arange(clients), sizes)
    held = rng.integers(0, CLASSES, (clients, 3))
    y = held[owner, rng.integers(0, 3, len(owner))]
    centres = rng.standard_normal((CLASSES, FEATURES), dtype=np.float32)
    noise = rng.standard_normal((4096, FEATURES), dtype=np.float32)  # used again and again: drawing is what takes time
    x = noise[rng.integers(0, len(noise), len(owner))]
    x += centres[y]
    x += 0.3 * noise[rng.integers(0, len(noise), clients)][owner]
    assignment = np.split(np.arange(len(owner)), np.cumsum(sizes)[:-1])
    return Federation.from_assignment(x, y, assignment, classes=CLASSES)


class Case:
    """One method on one federation, stepped round by round."""

    def __init__(self, method: str, clients: int, options: argparse.Namespace) -> None:
        self.device = options.device
        start = time.perf_counter()
        data = federation(clients)
        self.data_seconds = time.perf_counter() - start
        self.before = torch.cuda.memory_allocated() if self.device == "cuda" else 0
        training = Training(
            rounds=10_000, participation=min(options.participants / clients, 1.0), batch=10, lr=0.05,
            device=options.device, precision=options.precision, state=options.state, wave=options.wave,
        )
        start = time.perf_counter()
        self.simulation = Simulation(
            registry.method(method), lambda: MLP(FEATURES, CLASSES, hidden=128), data, training
        )
        self.wait()
        self.start_seconds = time.perf_counter() - start
        engine = self.simulation.engine
        self.data_bytes = engine.x.nbytes + engine.y.nbytes
        self.seconds: list[float] = []
        self.peak = 0

    def round(self) -> None:
        self.seconds.append(self.timed(self.simulation.round))

    def evaluate(self) -> float:
        return self.timed(self.simulation.evaluate)

    def timed(self, work: Any) -> float:
        """Seconds of some work; the peak of memory goes into `peak`."""
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.wait()
        start = time.perf_counter()
        work()
        self.wait()
        seconds = time.perf_counter() - start
        if self.device == "cuda":
            self.peak = max(self.peak, torch.cuda.max_memory_allocated() - self.before - self.data_bytes)
        else:
            self.peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return seconds

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def alone(method: str, clients: int, options: argparse.Namespace) -> int:
    """One size in a process of its own: how long it takes to start and to evaluate, and the peak of memory in bytes."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_alone, method, clients, options).result()


def _alone(method: str, clients: int, options: argparse.Namespace) -> int:
    case = Case(method, clients, options)
    for _ in range(options.warm):
        case.round()
    first, second = case.evaluate(), case.evaluate()
    case.round()
    print(
        f"{method:16} {clients:6} clients: peak {case.peak / 1e6:.1f} MB, evaluation {first:.2f} s and again "
        f"{second:.2f} s; data made in {case.data_seconds:.1f} s, joined in {case.start_seconds:.1f} s, "
        f"{case.simulation.choices}", flush=True,
    )
    return case.peak


def together(method: str, options: argparse.Namespace) -> list[list[float]]:
    """Seconds of the rounds at every size, [sizes][rounds], taken in turn."""
    cases = [Case(method, clients, options) for clients in options.clients]
    for _ in range(options.warm + options.rounds):
        for case in cases:
            case.round()
    return [case.seconds[options.warm :] for case in cases]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["fedfew:models=3", "ditto"])
    parser.add_argument("--clients", nargs="+", type=int, default=[1_000, 10_000])
    parser.add_argument("--participants", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=30, help="rounds timed")
    parser.add_argument("--warm", type=int, default=5, help="rounds before those")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--state", default="auto", help="auto, device, host, disk")
    parser.add_argument("--wave", type=int, default=0)
    options = parser.parse_args()
    print(f"{options.participants} participants a round, {options.device}, {options.precision}, {torch.__version__}")
    for method in options.methods:
        peaks = [alone(method, clients, options) for clients in options.clients]
        rounds = together(method, options)
        for clients, peak, seconds in zip(options.clients, peaks, rounds, strict=True):
            middle, best = statistics.median(seconds), min(seconds)
            ratios = {"median": middle / statistics.median(rounds[0]), "fastest": best / min(rounds[0])}
            if options.device == "cuda":
                ratios["peak memory"] = peak / max(peaks[0], 1)
            print(
                f"{method:16} {clients:6} clients: {1e3 * middle:.2f} ms a round, fastest {1e3 * best:.2f} ms; against "
                f"{options.clients[0]} clients: {', '.join(f'{n} {r:.3f}' for n, r in ratios.items())}", flush=True,
            )


if __name__ == "__main__":
    main()
