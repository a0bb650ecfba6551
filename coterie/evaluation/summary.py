"""What the clients' scores add up to: summaries, the round to report, and how newcomers fare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.evaluation.score import Array, Evaluation, Scores
from coterie.evaluation.stages import SEEN, SERVED


@dataclass(frozen=True)
class Summary:
    """What the clients' values add up to. `worst` and `lowest` are the badly served side of the metric.

    `left_out` counts the clients without a value, e.g. those that have no test data or a single class of them, and
    `diverged` those whose model has an infinite loss: they are in every number, with the worst value there is.
    """

    mean: float
    pooled: float
    std: float
    worst: float
    lowest: float
    best: float
    jain: float
    left_out: int
    diverged: int = 0


def summary(values: Array, samples: np.ndarray[Any, Any], higher_is_better: bool, diverged: int = 0) -> Summary:
    """Unweighted mean, mean over pooled samples, spread over clients, worst client, mean of the worst 10 % of the
    clients (at least one), best client, and Jain's index (sum x)^2 / (m sum x^2), which is 1 when all are equal."""
    there = ~np.isnan(values)
    x, n = values[there], samples[there]
    if not len(x):
        nothing = dict.fromkeys(("mean", "pooled", "std", "worst", "lowest", "best", "jain"), float("nan"))
        return Summary(**nothing, left_out=len(values), diverged=diverged)
    ordered = np.sort(x) if higher_is_better else np.sort(x)[::-1]
    tenth = max(1, len(x) // 10)
    # a diverged client has an infinite loss; its spread is then not a number, and squares of huge ones are infinite
    with np.errstate(invalid="ignore", over="ignore"):
        squares = float((x**2).sum())
        return Summary(
            mean=float(x.mean()),
            pooled=float((x * n).sum() / max(n.sum(), 1)),
            std=float(x.std()),
            worst=float(ordered[0]),
            lowest=float(ordered[:tenth].mean()),
            best=float(ordered[-1]),
            jain=float(np.divide(x.sum() ** 2, len(x) * squares)) if squares > 0 else 1.0,
            left_out=int(len(values) - len(x)),
            diverged=diverged,
        )


def summarise(scores: Scores) -> Summary:
    """The summary of a stage's test metric."""
    return summary(scores.counted(scores.test), scores.samples, scores.scale.higher, int(scores.diverged.sum()))


def validation_score(scores: Scores) -> tuple[float, float]:
    """What decides between rounds, larger is better: the mean validation metric in its direction, then minus the mean
    validation loss. Where no client's validation data can say what the metric is, the loss decides alone. A client
    whose model diverged counts with the worst value there is.

    With a robust aggregator it is the median over clients in place of the mean: what one client says of itself must not
    choose the round that all are handed."""
    middle = _median if scores.scale.by_median else _mean
    chosen, loss = middle(scores.counted(scores.val)), middle(scores.val["loss"])
    if np.isnan(loss):
        return (float("nan"), float("nan"))
    return (-np.inf if np.isnan(chosen) else scores.scale.sign * chosen, -loss)


def _mean(values: Array) -> float:
    """Over the clients that have a value."""
    return float("nan") if np.isnan(values).all() else float(np.nanmean(values))


def _median(values: Array) -> float:
    """Over the clients that have a value."""
    return float("nan") if np.isnan(values).all() else float(np.nanmedian(values))


def chosen_round(history: Sequence[Evaluation], stage: str = SERVED) -> int:
    """The evaluated round to report: best on validation data, the earliest of equals; the last one without them."""
    scored = [(validation_score(e.stages[stage]), -e.round) for e in history if stage in e.stages]
    scored = [item for item in scored if not np.isnan(item[0][1])]
    return -max(scored)[1] if scored else history[-1].round


def validated(history: Sequence[Evaluation], stage: str = SERVED) -> bool:
    """Whether validation data choose the round of a stage; without them `chosen_round` is the last one."""
    return any(not np.isnan(validation_score(e.stages[stage])[1]) for e in history if stage in e.stages)


def since_arrival(evaluation: Evaluation, arrives: Sequence[int]) -> dict[str, list[tuple[int, int, float]]]:
    """Stage -> (rounds since arrival, clients, mean of their test metric), for clients that arrived after the start.

    `arrives[i]` is the round in which client i arrived; clients without test data are left out.
    """
    when = np.asarray(arrives, dtype=np.int64)
    found: dict[str, list[tuple[int, int, float]]] = {}
    for stage in SEEN:
        scores = evaluation.stages.get(stage)
        if scores is None or not len(when):
            continue
        came, values = when[scores.clients], scores.test[scores.metric]
        kept = (came > 0) & ~np.isnan(values)
        age, values = evaluation.round - came[kept], values[kept]
        found[stage] = [(int(a), int((age == a).sum()), float(values[age == a].mean())) for a in np.unique(age)]
    return found
