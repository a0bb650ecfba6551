"""What is recorded of a round: who took part, what travelled, and how the uploads and the server's models lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.contract.algebra import between, cosines, opposing
from coterie.contract.layout import Layout
from coterie.contract.method import Method, Uploads
from coterie.contract.records import Record
from coterie.running.training import Training

COMPARED = 256
"""Participants of a round whose updates are compared pair by pair, at most."""


@dataclass(frozen=True)
class Round:
    """What one round did, for the record."""

    round: int
    participants: int
    dropped: int
    down: Mapping[str, float]  # bytes per client, by payload field
    up: Mapping[str, float]  # bytes per client, by upload field
    report: dict[str, Any]


def travelled(
    tensors: Mapping[str, Tensor], layout: Layout, part: str, buffers: bool = True, chosen: Tensor | None = None
) -> dict[str, int]:
    """Bytes of tensors `[C, ...]` by name, of all clients; those of running statistics and counters apart, `NAME
    buffers`.

    Tensors hold whole rows or the columns of `part`. Without `buffers`, those of whole rows stay where they are;
    `chosen [C, D]` are the columns of whole rows that travel, where these are not all.
    """
    found: dict[str, int] = {}
    inside = {sum(e.size for e in columns): sum(e.size for e in columns if e.kind != "parameter")
              for columns in (layout.within(part), layout.entries)}
    kept = 0 if chosen is None else int((~chosen).sum())  # of one row of each client
    for name, t in tensors.items():
        width = t.shape[-1] if t.ndim > 1 else 0
        copies = t[0].numel() // width if width and len(t) else 0
        apart = len(t) * copies * inside.get(width, 0) * t.element_size()
        found[name] = (t.numel() - (copies * kept if width == layout.size else 0)) * t.element_size() - apart
        if apart and (buffers or width != layout.size):
            found[f"{name} buffers"] = apart
    return found


def per_client(total: Mapping[str, int], clients: int) -> dict[str, float]:
    """Bytes per client, from those of so many together: their mean where clients send unequally much."""
    return {name: count // clients if count % clients == 0 else count / clients for name, count in total.items()}


def seen(method: Method, server: Record, up: Uploads, training: Training) -> dict[str, Any]:
    """What the uploads show before they are merged, and of which clients where not all took part."""
    part = method.travels()
    report = conflicts(up.tensors, up.layout, part, training, up.round) | few(method, server, up, training)
    if len(up.ids) < up.population and not report.keys().isdisjoint(("cosines", "w")):
        report["clients"] = compared(up.ids).tolist()
    return report


def conflicts(sent: Mapping[str, Tensor], layout: Layout, part: str, training: Training, t: int) -> dict[str, Any]:
    """In rounds that are evaluated, how many pairs of updates oppose each other; in the last one, all cosines.

    They are those of the parameters: running statistics and counters are no directions. Updates hold whole rows or the
    columns of `part`; of others nobody knows which columns are statistics, and they are compared only where there are
    none. Of more than COMPARED participants, so many evenly spaced ones are looked at.
    """
    last = t + 1 == training.rounds
    update = sent.get("update")
    if update is None or len(update) < 2 or not evaluated(training, t):
        return {}
    known = [columns for columns in (layout, layout.only(part)) if columns.size == update.shape[-1]]
    if not known and layout.within("buffers"):
        return {}
    update = compared(update)
    angles = cosines((known[0].cut(update, "parameters") if known else update).flatten(1))
    found: dict[str, Any] = {"opposing": opposing(angles)}
    if found["opposing"] != found["opposing"]:  # fewer than two clients moved
        return {}
    return found | {"cosines": angles.mul(1e4).round().div(1e4).tolist()} if last else found


def few(method: Method, server: Record, up: Uploads, training: Training) -> dict[str, Any]:
    """In rounds that are evaluated, how the participants share the server's models and how far these are apart.

    `w [m, K]`, `alpha [m]` where clients count unequally (at most COMPARED of them), and the distances `apart [K, K]`
    between the models' parameters that the clients received.
    """
    if not evaluated(training, up.round):
        return {}
    rows = method.few(server)
    found = {name: compared(t) for name, t in method.uses(server, up).items()}
    if rows is not None:
        found["apart"] = between(*[up.layout.cut(rows, "parameters")] * 2)
    return {name: t.double().mul(1e4).round().div(1e4).tolist() for name, t in found.items()}


def evaluated(training: Training, t: int) -> bool:
    """Whether the state after round t is evaluated, and what the round did is therefore recorded in full."""
    return t + 1 == training.rounds or (t + 1) % training.evaluate_every == 0


def compared(values: Tensor) -> Tensor:
    """`[m, ...]` of all participants, or of COMPARED evenly spaced ones where there are more."""
    if len(values) <= COMPARED:
        return values
    return values[torch.linspace(0, len(values) - 1, COMPARED).long().to(values.device)]
