"""Many clients over one frozen body: the memory that takes, and the time of a round.

    python benchmarks/frozen.py
    python benchmarks/frozen.py --device cuda --precision float32

A head of 2,570 numbers trains on a body of ten million. Memory is measured in a process of its own, after a small run
of the same kind has loaded everything: on a CPU the growth of the resident set to its peak, on a GPU the most that
tensors took. It is compared with one body, the rows of a wave (`engine.waves.ROWS` copies each), their activations as
the engine counts them, and the kept outputs of the body; on a GPU also the samples, which have to be there.
A round is timed with these outputs kept, with prefix=off, and for the head alone, trained on features that were
computed beforehand.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from coterie import registry
from coterie.contract.layout import Layout
from coterie.data import Federation
from coterie.engine import waves
from coterie.engine.resident import Resident
from coterie.running.simulation import Simulation
from coterie.running.training import Training

INPUTS, WIDTH, FEATURES, CLASSES = 512, 2048, 256, 10


def body(width: int = WIDTH) -> nn.Module:
    layers = [nn.Linear(INPUTS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width),
              nn.ReLU(), nn.Linear(width, FEATURES), nn.ReLU()]
    return nn.Sequential(*layers).requires_grad_(False)


def whole(width: int = WIDTH) -> nn.Module:
    return nn.Sequential(body(width), nn.Linear(FEATURES, CLASSES))


def head() -> nn.Module:
    return nn.Sequential(nn.Identity(), nn.Linear(FEATURES, CLASSES))


def federation(options: argparse.Namespace, clients: int | None = None) -> Federation:
    generator = torch.Generator().manual_seed(0)
    count = options.clients if clients is None else clients
    x = torch.randn(count * options.samples, INPUTS, generator=generator)
    y = torch.randint(0, CLASSES, (len(x),), generator=generator)
    deal = torch.arange(len(x)).view(count, -1).numpy()
    return Federation.from_assignment(x, y, list(deal), val=0.0, test=0.2, classes=CLASSES)


def simulation(options: argparse.Namespace, model: object, data: Federation, prefix: str) -> Simulation:
    training = Training(device=options.device, precision=options.precision, batch=options.batch, prefix=prefix)  # type: ignore[arg-type]
    return Simulation(registry.method("fedavg"), model, data, training)  # type: ignore[arg-type]


# -- memory ------------------------------------------------------------------------------------------------------------


def resident(name: str) -> int:
    """Bytes of this process: VmRSS now, or VmHWM, the most since it was reset."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) << 10


def remember(options: argparse.Namespace, prefix: str) -> dict[str, float]:
    """The peak of two rounds and an evaluation, and what it consists of, in megabytes."""
    cuda = options.device == "cuda"
    small = simulation(options, lambda: whole(16), federation(options, 4), prefix)
    small.round()
    small.evaluate()
    del small
    data = federation(options)
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
    sim = simulation(options, whole, data, prefix)
    for _ in range(2):
        sim.round()
    sim.evaluate()
    peak = torch.cuda.max_memory_allocated() if cuda else resident("VmHWM")
    engine = sim.engine
    assert isinstance(engine, Resident)
    size = sim.dtype.itemsize
    rows = sim.wave * waves.ROWS * sim.layout.size * size
    parts = {
        "body": sum(entry.size for entry in sim.layout.frozen) * size,
        "rows": rows, "activations": sim.wave * sim.client_bytes(1) - rows,
        "outputs": engine.inputs.nbytes if "prefix" in sim.choices else 0,
        "samples": engine.x.nbytes if cuda else 0,
    }
    return {"peak": (peak - before) / 1e6, **{name: value / 1e6 for name, value in parts.items()}}


# -- time --------------------------------------------------------------------------------------------------------------


def seconds(options: argparse.Namespace) -> dict[str, float]:
    """The median round with the outputs kept, without, and of the head alone, in turn: other work then meets all."""
    torch.manual_seed(0)
    data, made = federation(options), whole()
    with torch.no_grad():
        features: Tensor = torch.cat([made[0](some) for some in torch.split(data.x, 256)])  # type: ignore[index]
    seen = Federation(features, data.y, data.bounds, data.trained, data.classes, data.names, data.recipe)
    built = {
        "kept": simulation(options, made, data, "auto"), "off": simulation(options, made, data, "off"),
        "alone": simulation(options, head(), seen, "auto"),
    }
    took: dict[str, list[float]] = {kind: [] for kind in built}
    for _ in range(options.rounds + 2):
        for kind, sim in built.items():
            start = time.perf_counter()
            sim.round()
            if options.device == "cuda":
                torch.cuda.synchronize()
            took[kind].append(time.perf_counter() - start)
    return {kind: statistics.median(times[2:]) for kind, times in took.items()}


def apart(options: argparse.Namespace, what: str) -> dict[str, float]:
    """What a process of its own measures."""
    words = [sys.executable, __file__, "--worker", what, "--device", options.device, "--precision", options.precision]
    for name in ("clients", "samples", "batch", "rounds"):
        words += [f"--{name}", str(getattr(options, name))]
    # cuBLAS takes 33 MB of workspace on an H200 whatever is multiplied, so it is kept small where memory is counted.
    small = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "16"} if what != "time" else {}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env={**os.environ, **small})
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--samples", type=int, default=50, help="of each client; a fifth is for testing")
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(seconds(options) if options.worker == "time" else remember(options, options.worker)))
        return
    layout = Layout.of(whole())
    frozen = sum(entry.size for entry in layout.frozen)
    print(f"{options.clients} clients, {options.samples} samples each, on {options.device} in {options.precision}: "
          f"{frozen:,} numbers frozen, {layout.size:,} in a row")
    for prefix in ("auto", "off"):
        found = apart(options, prefix)
        peak, total = found.pop("peak"), sum(found.values())
        listed = ", ".join(f"{name} {value:.1f}" for name, value in found.items() if value)
        print(f"prefix={prefix}: peak {peak:.1f} MB; {listed}: {total:.1f} MB; ratio {peak / total:.2f}", flush=True)
    took = apart(options, "time")
    print(f"a round: outputs kept {1e3 * took['kept']:.2f} ms, prefix=off {1e3 * took['off']:.2f} ms, the head alone "
          f"{1e3 * took['alone']:.2f} ms; kept / alone {took['kept'] / took['alone']:.2f}, "
          f"off / kept {took['off'] / took['kept']:.1f}")


if __name__ == "__main__":
    main()
