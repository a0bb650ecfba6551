"""Seconds per round: the published way against coterie, in one process, on the same federation, model and steps.

The published way is what personalized-learning programs do: a loop over clients and models, a `DataLoader` over a list
of tensors, eager SGD. Here it is an engine like any other (`engine=reference`), so both ways run the same method object
with the same batches. Before anything is timed, both train one round in float32 and their rows are compared; a
difference beyond the tolerance ends the benchmark.
"""

from __future__ import annotations

import copy
import resource
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from coterie import registry
from coterie.data import Federation
from coterie.engine.packing import Packed
from coterie.engine.resident import Resident
from coterie.errors import CoterieError
from coterie.running.clients import device
from coterie.running.experiment import Experiment
from coterie.running.simulation import Simulation
from coterie.running.training import Training

METHODS = ("fedavg", "fedrep:pfllib", "ditto", "fedfew:official,models=1", "fedfew:official",
           "fedfew:official,models=10", "cwfedavg", "fedavg+confree")
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Contest:
    """What is timed: one method on one federation and model."""

    method: str
    federation: Federation
    factory: Callable[[], nn.Module]
    batch: int
    lr: float
    device: str
    options: dict[str, Any]  # further options of Training, e.g. engine or kernels

    def built(self, precision: str, reference: bool = False) -> Simulation:
        """A simulation of the contest, the published way or coterie's."""
        further = {**self.options, "engine": "reference"} if reference else self.options
        training = Training(batch=self.batch, lr=self.lr, precision=precision, device=self.device, **further)  # type: ignore[arg-type]
        return Simulation(registry.method(self.method), self.factory, self.federation, training)


@dataclass(frozen=True)
class Timing:
    """Both ways in one precision. Times in seconds a round; `first` has compiling and capturing in it."""

    method: str
    precision: str
    apart: float  # relative distance of the rows after one round in float32
    reference: float  # of the published way
    first: float
    seconds: float
    samples: float  # a second
    flop: float  # a second
    bandwidth: float  # share of the measured copy bandwidth, for the fewest bytes a round could move
    floor: float  # times the floor that FLOP and bytes set
    memory: float  # peak bytes: of the device, or of the process

    @property
    def ratio(self) -> float:
        return self.reference / self.seconds

    def over(self, rounds: int) -> float:
        """The ratio of a run of so many rounds, the first one's extra time counted."""
        return rounds * self.reference / (self.first + (rounds - 1) * self.seconds)


def median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def timed(work: Callable[[], Any], device: str, times: int) -> float:
    """The median of so many times of `work` in seconds, the device idle before and after each."""
    taken = []
    for _ in range(times):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return median(taken)


def rows_of(simulation: Simulation) -> Tensor:
    """What the server and the clients hold after a round, as one vector."""
    held = simulation.snapshot()[0].values()
    return torch.cat([t.flatten().double().cpu() for t in held if t.is_floating_point()])


def apart(contest: Contest) -> float:
    """The relative distance of the two ways' states after one round in float32."""
    ends = []
    for reference in (False, True):
        simulation = contest.built("float32", reference)
        simulation.round()
        ends.append(rows_of(simulation))
    return float((ends[0] - ends[1]).norm() / ends[1].norm())


def work_of(contest: Contest) -> dict[str, float]:
    """Samples, FLOP and the fewest bytes of a round: weights read twice and written once a step, and every layer's
    output written and read once forward and once backward."""
    simulation = contest.built("float32")
    seen: list[tuple[int, int]] = []  # (slots * batches, samples) of every training call
    engine = simulation.engine
    assert isinstance(engine, Resident)
    inner = engine.batches

    def counted(*given: Any, **options: Any) -> tuple[Packed, Tensor]:
        packed, keys = inner(*given, **options)
        seen.append((int(packed.steps.sum()), sum(int((stretch.index >= 0).sum()) for stretch in packed.stretches)))
        return packed, keys

    engine.batches = counted  # type: ignore[method-assign]
    simulation.round()
    module = copy.deepcopy(engine.net.module).train()
    x = engine.inputs[: contest.batch or len(engine.inputs)]
    outputs: list[int] = []
    hooks = [m.register_forward_hook(lambda _, __, out: outputs.append(out.numel()))
             for m in module.modules() if not list(m.children())]
    with FlopCounterMode(display=False) as counter:
        module(x).sum().backward()
    for hook in hooks:
        hook.remove()
    flop, activations = counter.get_total_flops() / len(x), sum(outputs) / len(x)
    samples, steps = sum(s for _, s in seen), sum(s for s, _ in seen)
    return {
        "samples": samples, "flop": flop * samples,
        "bytes": 4 * (3 * simulation.layout.size * steps + 4 * activations * samples),
    }


def ceilings(device: str) -> tuple[float, float]:
    """Measured bytes per second of a large copy (read and written) and FLOP per second of a large product."""
    size = 1 << (28 if device == "cuda" else 25)
    source = torch.randn(size, device=device)
    target = torch.empty_like(source)
    side = 8192 if device == "cuda" else 2048
    low = torch.bfloat16 if device == "cuda" else torch.float32
    left = torch.randn(side, side, device=device, dtype=low)
    for _ in range(3):
        target.copy_(source)
        left @ left
    copying = timed(lambda: target.copy_(source), device, 10)
    product = timed(lambda: left @ left, device, 10)
    return 8 * size / copying, 2 * side**3 / product


def measure(
    contest: Contest, precisions: Sequence[str], rates: tuple[float, float], rounds: int = 5, reference_rounds: int = 1
) -> Iterable[Timing]:
    """Check that both ways agree, then time one contest in every precision."""
    distance = apart(contest)
    if not distance <= TOLERANCE:
        raise CoterieError(f"{contest.method}: the two ways differ by {distance:.1e} after a round; nothing is timed.")
    load = work_of(contest)
    floor = max(load["flop"] / rates[1], load["bytes"] / rates[0])
    slow = contest.built("float32", reference=True)  # `apart` has warmed it up
    for precision in precisions:
        if contest.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        fast = contest.built(precision)
        first = timed(fast.round, contest.device, 1)
        base, mine = [], []
        for turn in range(reference_rounds):  # in turn, so that other work on the machine meets both
            base.append(timed(slow.round, contest.device, 1))
            mine += [timed(fast.round, contest.device, 1) for _ in range(turn, rounds, reference_rounds)]
        seconds = median(mine)
        yield Timing(
            registry.spelling(registry.method(contest.method)), precision, distance, median(base), first, seconds,
            load["samples"] / seconds, load["flop"] / seconds, load["bytes"] / seconds / rates[0], seconds / floor,
            torch.cuda.max_memory_allocated() if contest.device == "cuda" else _resident(),
        )


def run(experiment: Experiment, federation: Federation, watch: Callable[[str], None]) -> list[Timing]:
    """Time the experiment's methods with its training options; on a GPU in every precision."""
    training = experiment.training
    kind = device(training.device).type
    precisions = ["float32", "tf32", "bf16"] if kind == "cuda" else ["float32"]
    rates = ceilings(kind)
    factory = experiment.factory(federation)
    further = {"engine": training.engine, "kernels": training.kernels, "capture": training.capture}
    found: list[Timing] = []
    for method in experiment.methods:
        watch(method)
        contest = Contest(method, federation, factory, training.batch, training.lr, kind, further)
        found += measure(contest, precisions, rates, rounds=10, reference_rounds=3)
    return found


def table(timings: Sequence[Timing]) -> Table:
    """The timings for people to read."""
    made = Table(box=box.SIMPLE_HEAD, caption_justify="left", caption=(
        "seconds a round; ratio: published / coterie, and over 100 rounds with the first one's compilation. "
        f"Both ways reached the same rows (relative distance at most {max(t.apart for t in timings):.0e})."
    ))
    for name in ("method", "precision", "published", "coterie", "ratio", "in 100 rounds", "samples/s", "over floor"):
        made.add_column(name, justify="left" if name in ("method", "precision") else "right")
    for t in timings:
        made.add_row(t.method, t.precision, f"{t.reference:.4f}", f"{t.seconds:.4f}", f"{t.ratio:.1f}",
                     f"{t.over(100):.1f}", f"{t.samples:,.0f}", f"{t.floor:.0f}")
    return made


def _resident() -> float:
    """The most memory this process has had, in bytes."""
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
