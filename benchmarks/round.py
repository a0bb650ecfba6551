"""Seconds per round: the published way against coterie, in one process, on the same federation, model and steps.

    python benchmarks/round.py                                      # digits, an MLP
    python benchmarks/round.py --data cifar10.npz --model cnn --batch 50

The published way is what personalized-learning programs do: a loop over clients and models, a `DataLoader` over a list
of tensors, eager SGD. Here it is an engine like any other (`Published`), so both ways run the same method object with
the same batches. Before anything is timed, both train one round in float32 and their rows are compared; a difference
beyond the tolerance ends the benchmark.

What is printed: seconds of the first round (kernels are compiled and graphs captured there) and of later ones, the
ratio, samples and FLOP per second, the fewest bytes a round could move against the measured copy bandwidth, the floor
that FLOP and bytes set, and peak memory.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from coterie import registry
from coterie.config import Training
from coterie.engine import convolution
from coterie.engine.stacked import Stacked, Work
from coterie.experiment import Experiment
from coterie.net import Batch, Given
from coterie.simulate import Simulation


class Published:
    """Trains slot after slot with a DataLoader and eager SGD; whatever else it is asked for, the real engine does."""

    def __init__(self, engine: Stacked) -> None:
        self.engine = engine
        self.module = copy.deepcopy(engine.net.module).train()
        self.samples = list(zip(engine.x.cpu(), engine.y.cpu(), strict=True))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def train(
        self, ids: Any, rows: Tensor, given: dict[str, Tensor], work: Work, lr: float, part: str = "all",
        correct: Any = None, objective: Any = None, clip: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert clip is None
        copies = rows.shape[1] if rows.ndim == 3 else 1
        plan, _ = self.engine._batches(ids, copies, work)
        orders = {int(slot): plan.index[: plan.steps[p], p].tolist() for p, slot in enumerate(plan.order)}
        out, losses = rows.reshape(-1, rows.shape[-1]).clone(), []
        for slot in range(len(out)):
            mine = {name: t[slot // copies] for name, t in given.items()}
            batches = [[sample for sample in batch if sample >= 0] for batch in orders[slot]]
            losses.append(self.fit(out[slot], batches, mine, lr, part, correct, objective))
        return out.view(rows.shape), torch.tensor(losses, device=rows.device).view(rows.shape[:-1])

    def loop(self, *given: Any) -> Any:
        raise SystemExit("this method trains by steps of its own; the published way here is plain SGD.")

    def fit(
        self, row: Tensor, batches: list[list[int]], given: dict[str, Tensor], lr: float, part: str, correct: Any,
        objective: Any,
    ) -> float:
        """One client's SGD from `row [D]`, in place; returns the mean loss over the batches."""
        layout, module = self.engine.layout, self.module
        trained = {entry.name for entry in layout.within(part) if entry.trainable}
        views = layout.views(row)
        anchors = {name: layout.views(t) for name, t in given.items() if t.shape == row.shape}
        parameters = dict(module.named_parameters())
        with torch.no_grad():
            for name, tensor in module.state_dict().items():
                tensor.copy_(views[name])
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in trained)
        optimizer = torch.optim.SGD([p for p in parameters.values() if p.requires_grad], lr=lr)
        loader = DataLoader(self.samples, batch_sampler=batches)  # type: ignore[arg-type]
        total, count = 0.0, 0
        for x, y in loader:
            x, y = x.to(row.device), y.to(row.device)
            optimizer.zero_grad()
            if objective is None:
                loss = self.engine.net.task.loss(module(x), y).mean()
            else:
                whole = Batch(x, y, torch.ones(len(y), device=row.device), torch.zeros((), dtype=torch.int64))
                loss = objective(self.engine.net, parameters | dict(module.named_buffers()), whole, Given(**given))
            loss.backward()
            if correct is not None:
                for name in trained:
                    near = Given(**{g: v[name] for g, v in anchors.items()})
                    parameters[name].grad = correct(parameters[name].grad, parameters[name].detach(), near)
            optimizer.step()
            total, count = total + loss.item() * len(y), count + len(y)
        with torch.no_grad():
            for name, tensor in module.state_dict().items():
                views[name].copy_(tensor)
        return total / max(count, 1)


def built(case: dict[str, Any], precision: str, device: str, published: bool) -> Simulation:
    training = Training(batch=case["batch"], lr=case["lr"], precision=precision, device=device)  # type: ignore[arg-type]
    simulation = Simulation(registry.method(case["method"]), case["factory"], case["federation"], training)
    if published:
        simulation.engine = Published(simulation.engine)  # type: ignore[assignment]
    return simulation


def timed(work: Callable[[], Any], device: str, times: int) -> float:
    """Mean seconds of `work`, the device idle before and after."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        work()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / times


def rows_of(simulation: Simulation) -> Tensor:
    """What the server and the clients hold after a round, as one vector."""
    held = [*simulation.server.tensors().values(), *simulation.own.tensors().values()]
    return torch.cat([t.flatten().double().cpu() for t in held if t.is_floating_point()])


def apart(case: dict[str, Any], device: str) -> float:
    """The relative distance of the two ways' states after one round in float32."""
    ends = []
    for published in (False, True):
        simulation = built(case, "float32", device, published)
        simulation.round()
        ends.append(rows_of(simulation))
    return float((ends[0] - ends[1]).norm() / ends[1].norm())


def work_of(case: dict[str, Any], device: str) -> dict[str, float]:
    """Samples, FLOP and the fewest bytes of a round: weights read twice and written once a step, and every layer's
    output written and read once forward and once backward."""
    simulation = built(case, "float32", device, False)
    seen: list[tuple[int, int]] = []  # (slots * batches, samples) of every training call
    engine = simulation.engine
    inner = engine._batches

    def counted(ids: Any, copies: int, work: Work, stream: int = 0) -> Any:
        plan, keys = inner(ids, copies, work, stream)
        seen.append((int(plan.steps.sum()), int((plan.index >= 0).sum())))
        return plan, keys

    engine._batches = counted  # type: ignore[method-assign]
    simulation.round()
    module = copy.deepcopy(simulation.engine.net.module).train()
    x = simulation.engine.x[: case["batch"]]
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
        "samples": samples, "steps": steps, "flop": flop * samples,
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


def measure(case: dict[str, Any], options: argparse.Namespace, rates: tuple[float, float]) -> list[dict[str, Any]]:
    """Check, then time one case in every precision asked for."""
    device = options.device
    distance = apart(case, device)
    if not distance <= options.tolerance:
        raise SystemExit(f"{case['method']}: the two ways differ by {distance:.1e} after a round; nothing is timed.")
    load = work_of(case, device)
    floor = max(load["flop"] / rates[1], load["bytes"] / rates[0])
    slow = built(case, "float32", device, True)
    slow.round()
    base = timed(slow.round, device, options.published_rounds)
    del slow
    found = []
    for precision in options.precisions:
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        fast = built(case, precision, device, False)
        first = timed(fast.round, device, 1)
        seconds = timed(fast.round, device, options.rounds)
        found.append({
            "method": case["method"], "precision": precision, "apart": distance, "published": base, "first": first,
            "seconds": seconds, "ratio": base / seconds, "samples/s": load["samples"] / seconds,
            "TFLOP/s": load["flop"] / seconds / 1e12, "bandwidth": load["bytes"] / seconds / rates[0],
            "over floor": seconds / floor,
            "GB": torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else float("nan"),
        })
        print(" | ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in found[-1].values()), flush=True)
        del fast
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--partition", default="dirichlet:alpha=0.5")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--model", default="mlp:hidden=128")
    parser.add_argument("--methods", nargs="+", default=["fedavg", "fedrep:pfllib", "ditto", "fedfew:official,models=1",
                                                         "fedfew:official", "fedfew:official,models=10", "cwfedavg",
                                                         "fedavg+confree"])
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precisions", nargs="+", default=None, help="float32, tf32, bf16")
    parser.add_argument("--rounds", type=int, default=5, help="rounds timed of coterie")
    parser.add_argument("--published-rounds", type=int, default=1, help="rounds timed of the published way")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="relative distance of rows after a round")
    parser.add_argument("--no-kernels", action="store_true", help="without coterie's own convolutions")
    options = parser.parse_args()
    options.precisions = options.precisions or (
        ["float32", "tf32", "bf16"] if options.device == "cuda" else ["float32"]
    )
    convolution.enabled = not options.no_kernels
    experiment = Experiment(
        data=options.data, partition=options.partition, clients=options.clients, model=options.model, val=0.0
    )
    federation = experiment.federation()
    case = {"federation": federation, "factory": experiment.factory(federation), "batch": options.batch,
            "lr": options.lr}
    rates = ceilings(options.device)
    print(f"{options.data}, {options.model}, {options.clients} clients, batch {options.batch}, {options.device}, "
          f"torch {torch.__version__}; copy {rates[0] / 1e9:.0f} GB/s, product {rates[1] / 1e12:.2f} TFLOP/s")
    print("method | precision | rows apart | published s | first s | coterie s | ratio | samples/s | TFLOP/s | "
          "of the bandwidth | times the floor | GB")
    for method in options.methods:
        measure({**case, "method": method}, options, rates)


if __name__ == "__main__":
    main()
