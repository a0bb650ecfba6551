"""What one hostile site of five, or two that collude of ten, cost the others: by method and aggregator.

    python benchmarks/attacks.py --out attacks.json                # every method, mean and the robust aggregators
    python benchmarks/attacks.py --methods fedavg ditto --aggregators mean krum
    python benchmarks/attacks.py --table attacks.json              # the table of docs/deploy.md

Hostile sites hold data and train like the others. What they send is spoiled on its way to the server, as far as the
server's checks let pass: each spoiled round goes through `coterie.flower.checks.judge`, and one that is refused ends
the benchmark. A pair's figure is the mean accuracy of the honest sites (stage served, last round) under the attack that
is worst for it, beside that of the same method with the mean in a federation that the hostile sites never joined.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie import registry
from coterie.contract import sent
from coterie.contract.method import Method, Uploads
from coterie.data import Federation
from coterie.errors import CoterieError
from coterie.flower.checks import Arrived, Expected, Limits, judge
from coterie.flower.wire import schema_of
from coterie.running.experiment import Experiment
from coterie.running.simulation import Simulation
from coterie.running.training import Training

LIMITS = Limits()
INSIDE = 1 - 1e-6
"""Of each bound an attacker goes so far: the checks compute in another order."""
ROBUST = [name for name, plug in registry.aggregators().items() if plug.robust]
MANY = {"krum": "krum:faulty=2", "multikrum": "multikrum:faulty=2"}
"""How aggregators are told of two hostile sites; the others need not be told."""

MILD = {"flexlora": "flexlora:balanced=true"}
"""What takes the place of a method that diverges at this learning rate although nobody attacks."""


@dataclass(frozen=True)
class Attack:
    """What the last `hostile` of `sites` sites send."""

    name: str
    hostile: int = 1
    sites: int = 5
    length: float = 1.0
    """How long what they send is, in lengths of the round's median."""
    facts: bool = False
    """Losses and other numbers that make weights at their bounds."""
    n: float = 1.0
    """By how much their sample counts are too large."""
    off: float = 0.0
    """Instead of a flipped sign: how far from the others' mean what they send is, opposite to it, in median distances
    of the others. Robust aggregators that keep or leave out whole clients keep what is not far off."""

    def spoil(self, method: Method, up: Uploads, classes: int) -> Uploads:
        """The uploads of a round, the hostile ones changed: signs flipped, alike where there are several."""
        honest = len(up.ids) - self.hostile
        tensors = {name: t.clone() for name, t in up.tensors.items()}
        for name, t in tensors.items():
            told = method.uploads.get(name, sent.Values())
            if self.off and isinstance(told, sent.Vectors):
                t[honest:] = _beside(t[:honest].nan_to_num(), self.off) if told.at_least is None else 0
            elif isinstance(told, sent.Vectors):
                # What cannot be negative is as large as may be or, where facts are at their bounds, 0.
                sign = -1 if told.at_least is None else 0 if self.facts else 1
                own = self.hostile == 1 and bool(torch.isfinite(t[honest:]).all())  # else its own training diverged
                wrong = sign * (t[honest:] if own else t[:honest].nan_to_num().mean(0, keepdim=True))
                usual = _usual(told, t, up.n, honest) * up.n[honest:].double() ** told.grows
                sizes = torch.linalg.vector_norm(wrong.reshape(len(wrong), -1), dim=1, dtype=torch.float64)
                scale = (INSIDE * self.length * usual / sizes.clamp(min=1e-30)).to(t.dtype)
                t[honest:] = wrong * scale.view(-1, *[1] * (t.ndim - 1))
            elif isinstance(told, sent.Directions):
                t[honest:] = -t[honest:]
            elif self.facts and isinstance(told, sent.Losses):
                least = sorted(float(one.min()) for one in t[:honest]) + [math.inf] * self.hostile
                t[honest:] = LIMITS.loss * max(math.log(classes), sent.middle(least)) * INSIDE
            elif self.facts and isinstance(told, sent.Numbers):
                t[honest:] = t[honest:] if told.at_most is None else told.at_most
        return replace(up, tensors=tensors)


def _beside(others: Tensor, off: float) -> Tensor:
    """`[m, ...] -> [1, ...]`: so many median distances from the mean of the others, away from it towards 0 and on."""
    mean = others.mean(0, keepdim=True)
    usual = torch.linalg.vector_norm((others - mean).flatten(1), dim=1).median()
    return mean * (1 - off * usual / torch.linalg.vector_norm(mean).clamp(min=1e-30))


def _usual(told: sent.Vectors, t: Tensor, n: Tensor, honest: int) -> float:
    """The median size that the server will compute, with sites of any length above it."""
    sizes = sorted(told.size(row, sent.Sender(int(k))) for row, k in zip(t[:honest], n[:honest], strict=True))
    sizes += [math.inf] * (len(t) - honest)
    half = len(sizes) // 2
    return sizes[half] if len(sizes) % 2 else (sizes[half - 1] + sizes[half]) / 2


ATTACKS = (
    Attack("sign flip, 10 times the median's length", length=LIMITS.norm),
    Attack("sign flip, the median's length"),
    Attack("sign flip, 10 times the length, twice the samples", length=LIMITS.norm, n=LIMITS.samples),
    Attack("sign flip, the median's length, losses and shares at their bounds, twice the samples", facts=True,
           n=LIMITS.samples),
    Attack("the others' mean, 3 median distances off", off=3.0),
    Attack("the others' mean, 3 median distances off, losses and shares at their bounds", off=3.0, facts=True),
    Attack("2 of 10 send the others' mean, 3 median distances off", 2, 10, off=3.0),
    Attack("2 of 10 send the others' mean, sign flipped, 10 times the length", 2, 10, LIMITS.norm, n=LIMITS.samples),
    Attack("2 of 10 send the others' mean, sign flipped, the median's length", 2, 10, n=LIMITS.samples),
)


def spoiled(sim: Simulation, attack: Attack) -> Simulation:
    """The simulation, in which from now on the last sites send what the attack says, if the checks let it pass."""
    server, classes = sim.server, sim.federation.classes
    merge, weighed = server.merge, server.weighed

    def seen(n: Tensor) -> tuple[Tensor, Tensor]:
        n = n.clone()
        n[-attack.hostile :] = (n[-attack.hostile :] * attack.n).long()
        return weighed(n)

    def received(up: Uploads) -> dict[str, Any]:
        n = torch.from_numpy(sim.engine.sizes(up.ids.numpy(), "train"))
        up = attack.spoil(server.method, replace(up, n=n), classes)
        answers = {str(i): Arrived(int(n[i]), {name: t[i : i + 1] for name, t in up.tensors.items()})
                   for i in range(len(n))}
        rows = getattr(server.state, "rows", None)
        expected = Expected(schema_of(answers["0"].tensors), server.method.uploads, 0 if rows is None else len(rows),
                            sim.layout.rank, constant=math.log(classes))
        _, refused = judge(answers, expected, LIMITS)
        hostile = {name: why for name, why in refused.items() if int(name) >= len(n) - attack.hostile}
        if len(hostile) == len(refused) > 0:  # where honest sites have diverged, so has what is made of theirs
            raise CoterieError(f"{attack.name}: the checks refuse it: {hostile}.")
        left = torch.tensor([name not in refused for name in answers])  # sites that the attack made diverge are absent
        if not left.any():
            return {}
        counts, share = seen(n[left])
        present = {name: t[left] for name, t in up.tensors.items()}
        return merge(replace(up, tensors=present, ids=up.ids[left], n=counts, share=share))

    server.merge = received
    return sim


def only(whole: Federation, count: int) -> Federation:
    """The first `count` sites, under their names: draws go by names."""
    splits = [[whole.client(i, split) for i in range(count)] for split in ("train", "test", "val")]
    return Federation.from_splits(*splits, classes=whole.classes, names=whole.names[:count])


def accuracy(sim: Simulation, honest: int) -> float:
    """The honest sites' mean test accuracy after the last round."""
    for _ in range(sim.training.rounds):
        sim.round()
    return float(sim.evaluate().stages["served"].test["accuracy"][:honest].mean())


def measure(
    experiment: Experiment, training: Training, method: str, aggregators: Sequence[str],
    companies: Sequence[tuple[int, int]] = ((1, 5), (2, 10)),
) -> dict[str, Any]:
    """What the honest sites reach without the others, `alone`, and what each aggregator's runs reach beside that.

    Methods on low-rank adapters have some of rank 4 beside everything else, which trains unless they move it.
    """
    method = MILD.get(method, method)
    chosen = registry.method(method)
    base = "frozen" if chosen.moves else "trains"
    experiment = replace(experiment, adapter=f"lora:rank=4,base={base}" if chosen.adapters else "")
    found: dict[str, Any] = {"alone": {}, **{aggregator: {} for aggregator in aggregators}}
    for hostile, count in companies:  # how many of how many
        honest, whole = count - hostile, replace(experiment, clients=count).federation()
        run = partial(Simulation, model=experiment.factory(whole), training=training)
        alone = accuracy(run(registry.method(method), federation=only(whole, honest)), honest)
        found["alone"][f"{honest} sites"] = alone
        for aggregator, row in found.items():
            if aggregator == "alone" or not (aggregator == "mean" or registry.method(method).averages):
                continue
            plug = MANY.get(aggregator, aggregator) if hostile > 1 else aggregator
            spec = method if aggregator == "mean" else f"{method}+{plug}"
            try:
                row[f"all {count} honest"] = accuracy(run(registry.method(spec), federation=whole), honest) - alone
            except CoterieError as reason:
                row["refused"] = str(reason)
                continue
            for attack in ATTACKS:
                if attack.sites == count:
                    sim = spoiled(run(registry.method(spec), federation=whole), attack)
                    row[attack.name] = accuracy(sim, honest) - alone
    return found


def worst(row: Mapping[str, Any], hostile: int) -> float:
    """The most that an attack of so many hostile sites costs, in points; 0 or less where none costs anything."""
    return -100 * min(row[attack.name] for attack in ATTACKS if attack.hostile == hostile)


def cell(row: Mapping[str, Any]) -> str:
    """Points lost, one of five / two of ten; with a star where 10 are lost although nobody attacks."""
    if "refused" in row or not row:
        return "refused" if row else ""
    honest = {hostile: -100 * row[f"all {5 * hostile} honest"] for hostile in (1, 2)}
    return " / ".join(f"{worst(row, hostile):.0f}".replace("-0", "0") + ("\\*" if honest[hostile] > 10 else "")
                      for hostile in (1, 2))


def table(found: Mapping[str, Any]) -> str:
    """The table of docs/deploy.md: points lost under the worst attack, one of five / two of ten."""
    aggregators = [name for name in next(iter(found.values())) if name != "alone"]
    lines = [f"| method | alone | {' | '.join(name if name == 'mean' else f'`{name}`' for name in aggregators)} |",
             "|---" + "|--:" * (1 + len(aggregators)) + "|"]
    for method, rows in found.items():
        cells = [" / ".join(f"{100 * reached:.0f}" for reached in rows["alone"].values())]
        cells += [cell(rows[name]) for name in aggregators]
        lines.append(f"| `{method}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(registry.methods()))
    parser.add_argument("--aggregators", nargs="+", default=["mean", *ROBUST])
    parser.add_argument("--partition", default="dirichlet:alpha=1")
    parser.add_argument("--model", default="mlp:hidden=32")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--out", type=Path, help="write the figures here, or add to those that are there")
    parser.add_argument("--table", type=Path, help="print the table of figures that --out wrote")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text())))
        return
    torch.set_num_threads(1)
    experiment = Experiment(partition=options.partition, model=options.model)
    training = Training(rounds=options.rounds, batch=options.batch, lr=options.lr, device="cpu")
    found = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    for method in [name for name in options.methods if name not in found]:
        found[method] = measure(experiment, training, method, options.aggregators)
        print(table({method: found[method]}).splitlines()[-1], flush=True)
        if options.out:
            options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
