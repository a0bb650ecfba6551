"""Does a round wait for the device? Counts host synchronisations and copies to the host in one profiled round.

    python benchmarks/profile_round.py --data cifar10.npz

A round of S local steps may synchronise a fixed number of times (to read results), never in proportion to S: the
script profiles a round with 1 local epoch and one with 3 and compares the counts.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch.profiler import ProfilerActivity, profile

from coterie import registry
from coterie.running.experiment import Experiment
from coterie.running.simulation import Simulation
from coterie.running.training import Training

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
TO_HOST = "Memcpy DtoH"


def counts(simulation: Simulation) -> dict[str, int]:
    """Host waits, copies to the host, graph launches and kernels of one round (the second: the first one captures)."""
    simulation.round()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as watched:
        simulation.round()
    names = [event.name for event in watched.events()]
    return {
        "steps": int(simulation.cohort(simulation.federation.seen).steps().max()),
        "waits": sum(name in WAITS for name in names),
        "to host": sum(name.startswith(TO_HOST) for name in names),
        "graph launches": sum(name == "cudaGraphLaunch" for name in names),
        "kernel launches": sum(name == "cudaLaunchKernel" for name in names),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--methods", nargs="+", default=["fedavg", "fedper", "ifca", "fedfew", "fedfew:official"])
    parser.add_argument("--precision", default="tf32")
    options = parser.parse_args()
    experiment = Experiment(data=options.data, partition="dirichlet:alpha=0.5", clients=20, model="cnn")
    federation = experiment.federation()
    factory = experiment.factory(federation)
    for name in options.methods:
        for epochs in (1, 3):
            training = Training(batch=50, lr=0.005, epochs=epochs, precision=options.precision, device="cuda")
            simulation = Simulation(registry.method(name), factory, federation, training)
            found = counts(simulation)
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(3):
                simulation.round()
            torch.cuda.synchronize()
            seconds = (time.perf_counter() - start) / 3
            print(f"{name:18s} epochs {epochs}", found, f"{seconds:.3f} s a round", flush=True)
            del simulation
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
