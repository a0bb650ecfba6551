"""The pilot: one method of each way to serve clients, on the user's own clients, sized to a budget of seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coterie import registry
from coterie.advise.decision import Advice, Array, Candidate, Findings, Newcomers, Objective, decide
from coterie.advise.shift import PullClusters, clusters, shift
from coterie.contract.method import Method
from coterie.contract.metric import Scale
from coterie.contract.net import PerSample
from coterie.contract.shapes import FewModels
from coterie.data import Federation
from coterie.data.readers.tables.schema import scaled
from coterie.errors import CoterieError
from coterie.evaluation.score import Scores
from coterie.evaluation.stages import ADAPTED, SEEN, SERVED, unseen
from coterie.evaluation.summary import summarise
from coterie.metrics.loss import Loss
from coterie.metrics.regression import MSE
from coterie.options import build
from coterie.running import runs
from coterie.running.clients import ModelLike
from coterie.running.outcome import DIVERGED, outcome
from coterie.running.result import Result
from coterie.running.server import Server
from coterie.running.simulation import Simulation
from coterie.running.targets import constants
from coterie.running.training import Training
from coterie.running.untrained import constant_by, of_targets

WAYS = {
    "local": "local", "fedavg": "shared", "feddyn": "shared", "fedper": "decoupling", "perfedavg": "meta-learning",
    "ifca": "clustering", "apfl": "interpolation", "cwfedavg": "class-wise", "confree": "conflict-free",
}
"""The way of each method of the pilot; a shared model that clients train before use is `fine-tuning`."""
FIRST = 5
"""Rounds of FedAvg after which the clients' pulls are looked at for groups."""
LEAST_ROUNDS, MOST_ROUNDS = 10, 40
LEAST_SHARE = 0.5
"""Of the median client's training samples, at least so many are kept: with fewer, the question is another one."""
LABELS_DIFFER = 0.1
"""Label distance beyond chance from which on class-wise averaging is tried, and conflict-free averaging is not."""


@dataclass(frozen=True)
class PilotPlan:
    """What the pilot runs."""

    methods: tuple[str, ...]
    rounds: int
    seeds: int
    samples: int | None  # most training samples of a client; None takes all
    seconds: float | None  # expected, where the pilot sized itself
    left_out: tuple[str, ...] = ()  # why methods of the usual pilot cannot work with this model, where it is frozen


@dataclass(frozen=True)
class Pilot:
    """What the pilot found and what follows from it."""

    findings: Findings
    advice: Advice
    plan: PilotPlan
    seconds: float
    notes: tuple[str, ...] = ()  # on the data, as they were read


def advise(
    model: ModelLike, federation: Federation, *, newcomers: Newcomers = "some", objective: Objective = "mean",
    budget: float = 180.0, rounds: int | None = None, seeds: int = 2, head: str | None = None,
    loss: PerSample | None = None, tell: Callable[[str], None] = lambda text: None, watch: runs.Watched = (),
    **training: Any,
) -> Pilot:
    """Run the pilot on a federation and decide. Its unseen clients play the newcomers.

    With `rounds` the pilot is the same on every machine; otherwise it measures its own speed and takes as many rounds,
    seeds and, where even few rounds would not fit, as many samples as the `budget` of seconds allows.
    """
    if budget <= 0 or seeds < 1:
        raise CoterieError(f"budget must be above 0 seconds and seeds at least 1, not {budget} and {seeds}.")
    if not (federation.sizes("val")[federation.seen] > 0).any():
        raise CoterieError("no client has validation data to choose on; give clients more samples.")
    start = time.perf_counter()
    training = {"evaluate_every": 10**9, **training}
    build(Training, {**training, "rounds": rounds or 10**9}, "training")  # how many there will be is not known yet
    tell("looking at the clients")
    measured = shift(federation)
    groups = _groups(model, federation, head, loss, training)
    aside = federation.classes and measured.label - measured.label_by_chance > LABELS_DIFFER
    usual = (
        "local", "fedavg", "feddyn", "fedper", "perfedavg:adapt_steps=none",
        f"ifca:models={_models(groups, federation)}", "apfl", "cwfedavg" if aside else "fedavg+confree",
    )
    methods, left_out = _possible(usual, model, federation, head, training)
    chosen = [registry.method(spec) for spec in methods]
    if rounds is None:
        tell("measuring the speed")
        left = budget - (time.perf_counter() - start)
        plan = _sized(chosen, methods, model, federation, head, loss, training, left, seeds, budget)
    else:
        plan = PilotPlan(methods, rounds, seeds, None, None)
    plan = replace(plan, left_out=left_out)
    data = federation if plan.samples is None else fewer(federation, plan.samples)
    every = max(1, plan.rounds // 4)
    results = runs.compare(
        chosen, model, data, seeds=plan.seeds, head=head, loss=loss, watch=watch,
        **{**_shortened(training, plan.rounds), "evaluate_every": every},
    )
    sizes, scale = federation.sizes("train")[federation.seen], results[0].at(SERVED).scale
    found = Findings(
        candidates(results, data), measured, groups, data.population, len(data.unseen),
        (int(sizes.min()), int(np.median(sizes))), scale, newcomers, objective, constant(data, scale, loss),
        constant_words(data, scale), int(np.median(federation.sizes("val")[federation.seen])), bool(federation.classes),
        scaled(federation.recipe),
    )
    notes = tuple(federation.recipe.get("notes", ()))
    return Pilot(found, decide(found), plan, time.perf_counter() - start, notes)


def _possible(
    methods: tuple[str, ...], model: ModelLike, federation: Federation, head: str | None, training: dict[str, Any]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The methods that can work with this model, what of it trains and the run's optimizer, and why others cannot."""
    kept, left_out = [], []
    run = build(Training, _shortened(training, FIRST), "training")
    for spec in methods:
        method = registry.method(spec)
        try:
            layout = Simulation.layout_of(method, model, head)
        except CoterieError as reason:
            if not isinstance(method, FewModels):
                raise
            left_out.append(f"{method.name} was left out: {reason}")
            continue
        try:
            Server.refuse_early(method, federation.arrived(0), layout, run)
            kept.append(spec)
        except CoterieError as reason:
            if not layout.frozen and run.plain:
                raise
            left_out.append(f"{method.name} was left out: {reason}")
    return tuple(kept), tuple(left_out)


def constant(federation: Federation, scale: Scale, loss: PerSample | None = None) -> Array | None:
    """What a constant answer scores on validation data, larger is better: `[clients]`, for the clients that train.

    None for a metric, or a `loss` of the user's own, of which that is not known.
    """
    if federation.classes:
        by = constant_by(scale)
        levels = None if by is None else by.level(*(federation.histogram(split) for split in ("train", "val")))
    else:
        name = MSE().label if scale.name == Loss.name and loss is None else scale.name
        levels = constants(federation, "val").get(name)
    if levels is None or not np.isfinite(levels[federation.seen]).any():
        return None
    return scale.sign * np.where(np.isfinite(levels), levels, np.nan)[federation.seen]


def constant_words(federation: Federation, scale: Scale) -> str:
    """What such an answer is called."""
    by = constant_by(scale) if federation.classes else None
    return of_targets(scale.name) if by is None else by.words


def candidates(results: Sequence[Result], federation: Federation) -> tuple[Candidate, ...]:
    """Every method in every stage, from the simplest: as ordered, served before adapted."""
    by_method: dict[str, list[Result]] = {}
    for result in results:
        by_method.setdefault(result.method, []).append(result)
    return tuple(
        _candidate(group, stage, federation)
        for spelling, group in by_method.items()
        for stage in SEEN
        if not (stage == ADAPTED and spelling == "local")  # Local goes on training anyway
    )


def _candidate(group: Sequence[Result], stage: str, federation: Federation) -> Candidate:
    spelling = group[0].method
    name = spelling.partition(":")[0]
    way = WAYS["confree" if "confree" in name else name]
    seen = [run.at(stage) for run in group]
    new = [run.at(unseen(stage)) for run in group] if len(federation.unseen) else []
    found = [summarise(scores) for scores in seen]
    became = outcome(group, stage)
    return Candidate(
        method=spelling, stage=stage, way="fine-tuning" if stage == ADAPTED and way == "shared" else way,
        seen=_validation(seen, federation),
        new=_validation(new, federation) if new else np.zeros((len(group), 0)),
        test=float(np.mean([one.mean for one in found])), worst=float(np.mean([one.worst for one in found])),
        new_test=float(np.mean([summarise(scores).mean for scores in new])) if new else float("nan"),
        bytes_each_round=float(np.mean([run.bytes_each_round for run in group])),
        seconds=float(np.mean([run.seconds for run in group])),
        lost=became.words if became.kind == DIVERGED or became.untrained == became.seeds else "",
    )


def _validation(scores: Sequence[Scores], federation: Federation) -> Array:
    """`[seeds, clients]`, larger is better; NaN where a client has no validation samples of its own."""
    rows = np.stack([s.scale.sign * s.counted(s.val) for s in scores])
    return np.where(federation.sizes("val")[scores[0].clients] > 0, rows, np.nan)


def _shortened(training: dict[str, Any], rounds: int) -> dict[str, Any]:
    """The options for so many rounds, which may be fewer than those in which the learning rate is to rise."""
    return {**training, "rounds": rounds, "warmup": min(int(training.get("warmup", 0)), rounds)}


def _groups(
    model: ModelLike, federation: Federation, head: str | None, loss: PerSample | None, training: dict[str, Any]
) -> PullClusters:
    """Whether clients pull a shared model, after a few rounds of FedAvg, in a few clearly different directions."""
    short = build(Training, _shortened(training, FIRST), "training")
    simulation = Simulation(registry.method("fedavg"), model, federation, short, head, loss)
    for _ in range(FIRST):
        simulation.round()
    start = simulation.server.state.tensors()["row"]
    part = simulation.layout.within("parameters")
    moves = []
    for ids in np.array_split(federation.seen, -(-federation.population // simulation.wave)):
        rows = start.expand(len(ids), -1)
        moved = simulation.cohort(ids).train(rows) - rows
        moves.append(simulation.layout.cut(moved, "parameters") if part else moved)
    return clusters(np.concatenate([move.double().cpu().numpy() for move in moves]))


def _models(groups: PullClusters, federation: Federation) -> int:
    return min(groups.count if groups.exist else 2, federation.population)


# -- sizing ------------------------------------------------------------------------------------------------------------


def _sized(
    chosen: Sequence[Method], methods: tuple[str, ...], model: ModelLike, federation: Federation, head: str | None,
    loss: PerSample | None, training: dict[str, Any], left: float, seeds: int, budget: float,
) -> PilotPlan:
    """Rounds, seeds and samples that fit into the seconds `left`."""
    start = time.perf_counter()
    samples: int | None = None
    data = federation
    while True:
        each, once, spent = 0.0, 0.0, time.perf_counter()
        for method in chosen:
            took = _pace(method, model, data, head, loss, training)
            each, once = each + took[0], once + took[1]
            if time.perf_counter() - spent > left / 5:  # already too slow: no need to know how slow exactly
                each *= len(chosen) / (chosen.index(method) + 1)
                once *= len(chosen) / (chosen.index(method) + 1)
                break
        free = 0.8 * (left - (time.perf_counter() - start))
        for tried in range(seeds, 0, -1):
            rounds = int((free / tried - 5 * once) / each)
            if rounds >= LEAST_ROUNDS:
                rounds = min(rounds, MOST_ROUNDS)
                return PilotPlan(methods, rounds, tried, samples, tried * (rounds * each + 5 * once))
        largest = int(data.sizes("train")[data.seen].max())
        fit = 0.8 * free / (LEAST_ROUNDS * each + 5 * once)
        samples = int(min(0.7, fit) * largest)
        if samples < LEAST_SHARE * np.median(federation.sizes("train")[federation.seen]) or free <= 0:
            raise CoterieError(
                f"a pilot of {LEAST_ROUNDS} rounds does not fit into {budget:g} seconds here; give it more (--budget), "
                "a smaller --model, or say how many --rounds it may take however long they last."
            )
        data = fewer(federation, samples)


def _pace(
    method: Method, model: ModelLike, federation: Federation, head: str | None, loss: PerSample | None,
    training: dict[str, Any],
) -> tuple[float, float]:
    """Seconds of a round and of an evaluation; the first round, which also sets things up, counts only if slow."""
    short = build(Training, _shortened(training, 2), "training")
    simulation = Simulation(method, model, federation, short, head, loss)
    took = []
    for work in (simulation.round, simulation.round, simulation.evaluate):
        start = time.perf_counter()
        work()
        took.append(time.perf_counter() - start)
    return took[1], took[2]


def fewer(federation: Federation, samples: int) -> Federation:
    """At most so many training and so many test samples a client, which lie in random order; only pointers move."""
    b0, b1, b2, b3 = federation.bounds.T
    bounds = np.stack([np.maximum(b0, b1 - samples), b1, b2, np.minimum(b3, b2 + samples)], 1)
    return replace(federation, bounds=bounds, recipe={**federation.recipe, "pilot_samples": samples})
