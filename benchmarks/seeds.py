"""Seconds a round: one run, several seeds one after another, and the same seeds as one stack, in one process.

    python benchmarks/seeds.py                  # digits, MLP 64-128-10, 20 clients, batch 10, 5 seeds
    python benchmarks/seeds.py --device cuda

Every way runs the same rounds with the same evaluations in between. Before anything is timed, two rounds and
evaluations are run and the states of the seeds alone and of the stack are compared; on a GPU, graphs are captured
there, and the stack tries out once whether runs keep apart. Two ratios are printed: the stack against the seeds one
after another, and the stack against one run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from coterie import registry
from coterie.running.experiment import Experiment
from coterie.running.simulation import Simulation
from coterie.running.together import Course, Settle, Stack, alone
from coterie.running.together_pays import most_clients, step_flop
from coterie.running.training import Training


def working(simulation: Simulation, rounds: int, evaluate_every: int) -> Course[None]:
    """Rounds and evaluations as a run has them, without its files."""
    for _ in range(rounds):
        done = yield from simulation.rounding()
        yield Settle(simulation.device, done.round)
        if simulation.rounds_done % evaluate_every == 0:
            yield from simulation.evaluating()


def built(case: dict[str, Any], seeds: int) -> list[Simulation]:
    """One simulation a seed, on one engine."""
    made: list[Simulation] = []
    for seed in range(seeds):
        training = Training(seed=seed, **case["training"])
        method = registry.method(case["method"])
        made.append(Simulation(method, case["factory"], case["federation"], training, twin=made[0] if made else None))
    return made


def one_by_one(simulations: list[Simulation], rounds: int, evaluate_every: int) -> None:
    for simulation in simulations:
        alone(working(simulation, rounds, evaluate_every))


def as_a_stack(stack: Stack[None], simulations: list[Simulation], rounds: int, evaluate_every: int) -> None:
    stack.run([working(simulation, rounds, evaluate_every) for simulation in simulations])
    if stack.apart:
        raise SystemExit(f"joined work failed: {list(stack.apart.values())}")


def state(simulations: list[Simulation]) -> Tensor:
    held = [t for s in simulations for t in (*s.server.state.tensors().values(), *s.own.tensors().values())]
    return torch.cat([t.flatten().double().cpu() for t in held if t.is_floating_point()])


def best(work: Callable[[], None], times: int) -> float:
    """The least of several times: whatever else runs on the machine only adds to it."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--partition", default="dirichlet:alpha=0.5")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--model", default="mlp:hidden=128")
    parser.add_argument("--methods", nargs="+", default=["fedavg", "fedfew"])
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=20, help="rounds timed at once")
    parser.add_argument("--evaluate-every", type=int, default=10)
    parser.add_argument("--times", type=int, default=3, help="how often each way is timed; the least counts")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="relative distance of states after two rounds")
    options = parser.parse_args()
    experiment = Experiment(
        data=options.data, partition=options.partition, clients=options.clients, model=options.model
    )
    federation = experiment.federation()
    training = {"batch": options.batch, "lr": options.lr, "precision": options.precision, "device": options.device,
                "engine": options.engine}
    print(f"{options.data}, {options.model}, {options.clients} clients, batch {options.batch}, {options.seeds} seeds, "
          f"{options.device}, {options.precision}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    print("method | MFLOP a step | states apart | one run, ms a round | one after another | one stack | "
          "stack / one after another | stack / one run")
    for method in options.methods:
        case = {"method": method, "federation": federation, "factory": experiment.factory(federation),
                "training": training}
        lone, side, pair = built(case, 1), built(case, options.seeds), built(case, options.seeds)
        one_by_one(pair, 2, 1)
        stack = Stack[None](most_clients(side[0]))
        as_a_stack(stack, side, 2, 1)
        apart = float((state(pair) - state(side)).norm() / state(pair).norm())
        if not apart <= options.tolerance:
            raise SystemExit(f"{method}: stack and single runs differ by {apart:.1e}; nothing is timed.")
        one_by_one(lone, 2, 1)
        each = (options.rounds, options.evaluate_every)
        one = best(partial(one_by_one, lone, *each), options.times) / options.rounds
        after = best(partial(one_by_one, pair, *each), options.times) / options.rounds
        joined = best(partial(as_a_stack, stack, side, *each), options.times) / options.rounds
        print(f"{method} | {step_flop(lone[0]) / 1e6:.1f} | {apart:.1e} | {1e3 * one:.2f} | {1e3 * after:.2f} | "
              f"{1e3 * joined:.2f} | {joined / after:.2f} | {joined / one:.2f}", flush=True)


if __name__ == "__main__":
    main()
