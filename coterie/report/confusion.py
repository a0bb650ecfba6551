"""Who is confused with whom: confusion matrices of clients, the worst served first, and recall by class.

Counts are test samples by label (row) and answer (column) at the round reported, summed over seeds. A matrix shows the
classes that occur in it as label or as answer, so that a client with few of many classes has a small one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.contract.metric import Scale
from coterie.report.series import Floats
from coterie.running.confusion import MOST_CELLS
from coterie.running.result import Result

Ints = NDArray[np.int64]

CLASSES = 30
"""Classes of a matrix, at most: those most often mistaken."""
CLIENTS = 60
"""Clients whose matrices are kept of a method and stage, at most."""
CELLS = 200_000
"""Cells kept of all matrices of a page, at most."""
RECALLED = 40
"""Classes in the table of recall, at most: those of the lowest recall."""


def counted_by_client(group: Sequence[Result], stage: str, clients: int) -> Ints | None:
    """`[clients, classes, classes]` by client number, over the seeds that recorded it; None where none did."""
    total: Ints | None = None
    for run in group:
        found = run.confusion(stage) if stage in run.stages else None
        if found is None:
            continue
        if clients * len(found.classes) ** 2 > MOST_CELLS:
            continue  # claims of a record; who is scored may be few
        if total is None:
            total = np.zeros((clients, *found.counts.shape[1:]), dtype=np.int64)
        np.add.at(total, run.at(stage).clients, found.counts)
    return total


def worst_first(counts: Ints, values: Floats, scale: Scale) -> list[int]:
    """The clients with test samples from the worst to the best value; those without a value come last."""
    held = np.flatnonzero(counts.sum((1, 2)) > 0)
    order = np.argsort(scale.sign * values[held], kind="stable")  # NaN last
    return [int(client) for client in held[order]]


def matrix(counts: Ints, most: int = CLASSES) -> dict[str, Any]:
    """One matrix `[classes, classes]`: the `classes` shown, their `counts`, the samples `held` of each, all answers
    counted, and `of` how many classes they are."""
    there = np.flatnonzero(counts.sum(0) + counts.sum(1))
    count = len(there)
    if count > most:
        wrong = counts.sum(0) + counts.sum(1) - 2 * counts.diagonal()
        there = np.sort(there[np.argsort(-wrong[there], kind="stable")[:most]])
    return {"classes": there.tolist(), "counts": counts[np.ix_(there, there)].tolist(),
            "held": counts.sum(1)[there].tolist(), "of": count}


def matrices(counts: Ints, values: Floats, scale: Scale, cells: int = CELLS) -> dict[str, Any]:
    """`all` clients together, and `clients` from the worst served on, as many as fit into so many cells, at least one.

    `of` says how many clients have a matrix.
    """
    order = worst_first(counts, values, scale)
    kept: list[dict[str, Any]] = []
    for client in order[:CLIENTS]:
        one = {"client": client, **matrix(counts[client])}
        cells -= len(one["classes"]) ** 2
        if kept and cells < 0:
            break
        kept.append(one)
    return {"all": matrix(counts.sum(0)), "clients": kept, "of": len(order)}


def weakest(counts: Sequence[Ints], most: int = RECALLED) -> list[int]:
    """The classes to show of several methods' counts: all that have samples, or those of the lowest recall."""
    if not counts:
        return []
    total = np.sum([one.sum(0) for one in counts], axis=0)  # [classes, classes]
    held = np.flatnonzero(total.sum(1))
    share = total.diagonal()[held] / total.sum(1)[held]
    return [int(k) for k in np.sort(held[np.argsort(share, kind="stable")[:most]])]


def recall(counts: Ints, classes: Sequence[int]) -> list[list[int] | None]:
    """For each class right samples and samples of all clients, and client, right and samples of its worst client.

    The worst client of a class has the lowest recall; of equal ones it is the one with more samples. None for a class
    without samples.
    """
    found: list[list[int] | None] = []
    for k in classes:
        right, held = counts[:, k, k], counts[:, k].sum(1)
        there = np.flatnonzero(held)
        if not len(there):
            found.append(None)
            continue
        worst = min(there.tolist(), key=lambda i: (right[i] / held[i], -held[i]))
        found.append([int(v) for v in (right.sum(), held.sum(), worst, right[worst], held[worst])])
    return found
