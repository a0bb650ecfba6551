"""Newcomers: how clients that arrive during training fare by rounds since their arrival, beside the first clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from coterie.report.series import Floats
from coterie.running.result import Result


def schedule(churn: Sequence[Sequence[int | None]], rounds: int) -> dict[str, int]:
    """How many clients were there from the start, arrived later, and left again, within so many rounds."""
    came = [arrives or 0 for arrives, _ in churn]
    return {
        "rounds": rounds, "start": came.count(0), "arrived": sum(0 < a <= rounds for a in came),
        "left": sum(leaves is not None and leaves <= rounds for _, leaves in churn),
    }


def newcomers(group: Sequence[Result], stage: str, points: int) -> dict[str, Any] | None:
    """Lists with an entry for each span of rounds since arrival, rising; None where no newcomer was scored.

    A span is as wide as evaluations are apart, so that it finds every client once, or wider to make at most `points`.
    `low`, `high` and `age` are the lowest, highest and mean rounds since arrival in it, `clients` those found, `mean`
    that of their scores, over evaluations and seeds. `start` is the mean of the clients from the start in the same
    evaluations, each of which counts as often as it has newcomers in the span. `reached` is the place of the first span
    whose newcomers are level with them and stay so, all later spans taken together; None where there is none.
    """
    found = [_scored(run, stage) for run in group]
    age, client, value, start = np.concatenate(found, axis=1) if found else np.zeros((4, 0))
    if not len(age):
        return None
    gaps = [int(np.diff([e.round for e in run.history]).max()) for run in group if len(run.history) > 1]
    width = max(gaps, default=1)
    width *= -(-(int(age.max()) // width + 1) // points)
    spans = [age // width == k for k in np.unique(age // width)]
    sign = group[0].at(stage).scale.sign
    lead = [_known(sign * (value - start)[span]) for span in spans]  # of newcomers, where there is somebody to lead
    return {
        "span": width, "low": [int(age[span].min()) for span in spans],
        "high": [int(age[span].max()) for span in spans], "age": [float(age[span].mean()) for span in spans],
        "clients": [len(np.unique(client[span])) for span in spans],
        "mean": [float(value[span].mean()) for span in spans],
        "start": [_mean(_known(start[span])) for span in spans],
        "reached": next((k for k in range(len(spans)) if _level(lead[k]) and _level(np.concatenate(lead[k:]))), None),
    }


def _scored(run: Result, stage: str) -> Floats:
    """A column for each score of a newcomer: its age, its number, the score, the first clients' mean beside it."""
    when = np.array(run.arrives, dtype=np.int64)
    columns = [np.zeros((4, 0))]
    for evaluation in run.history if len(when) else ():
        scores = evaluation.stages.get(stage)
        if scores is None:
            continue
        values, came = scores.test[scores.metric], when[scores.clients]
        new = (came > 0) & np.isfinite(values)
        start = np.full(new.sum(), _mean(_known(values[came == 0])))
        columns.append(np.stack([evaluation.round - came[new], scores.clients[new], values[new], start]))
    return np.concatenate(columns, axis=1)


def _known(values: Floats) -> Floats:
    return values[np.isfinite(values)]


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else float("nan")


def _level(lead: Floats) -> bool:
    return len(lead) > 0 and _mean(lead) >= -1e-9
