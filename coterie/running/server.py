"""The server side of a run, written once for the simulation and for Flower: who is asked, and what a merge does."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie import streams
from coterie.contract import records
from coterie.contract.algebra import between, cosines, opposing
from coterie.contract.engine import IntArray
from coterie.contract.layout import Layout
from coterie.contract.method import Method, Uploads
from coterie.contract.records import Nothing, Record
from coterie.errors import CoterieError
from coterie.privacy.guard import Guard, lot
from coterie.running.config import Training

COMPARED = 256
"""Participants of a round whose updates are compared pair by pair, at most."""


@dataclass(frozen=True)
class Round:
    """What one round did, for the record."""

    round: int
    participants: int
    dropped: int
    down: dict[str, int]  # bytes per client, by payload field
    up: dict[str, int]  # bytes per client, by upload field
    report: dict[str, Any]


def check(method: Method, population: int, layout: Layout) -> None:
    """Raise if the method or its aggregator cannot work with so many clients or this model."""
    method.check(population, layout)
    plugged = method.aggregator
    if population < plugged.minimum:
        raise CoterieError(
            f"the aggregator {plugged.name} needs at least {plugged.minimum} clients; there are {population}."
        )


def check_buffers(method: Method, server: Record, payload: Record, layout: Layout, training: Training) -> None:
    """Raise if clients are to keep their own buffers but the `payload` holds no whole models to put them in."""
    if training.buffers != "local" or not layout.within("buffers") or not server.tensors():
        return
    if not any(t.shape[-1:] == (layout.size,) for t in payload.tensors().values()):
        raise CoterieError(
            f"buffers=local needs a method that exchanges whole models; {method.name} exchanges a part of it: "
            "leave buffers=average and name the buffers among what stays with the client (personal=head+buffers)."
        )


def asked(training: Training, population: int) -> int:
    """How many clients are asked in a round."""
    return max(1, round(training.participation * population))


def chance(seed: int, names: IntArray, t: int, purpose: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A uniform number on [0, 1) for each client, by its name's number `[c]`, in round t."""
    bits = streams.key(seed, torch.from_numpy(names), t, purpose).numpy()
    return (bits & ((1 << 53) - 1)) / float(1 << 53)


def selected(training: Training, names: IntArray, t: int) -> IntArray:
    """The clients asked in round t: those with the smallest draws, so the set does not depend on their order.

    With sampling=poisson all whose draws are below the participation, maybe nobody.
    """
    if training.sampling == "poisson":
        return np.nonzero(chance(lot(training.seed), names, t, "participate") < training.participation)[0]
    count = asked(training, len(names))
    if count == len(names):
        return np.arange(len(names))
    return np.sort(np.argpartition(chance(training.seed, names, t, "participate"), count - 1)[:count])


def merge(
    method: Method, server: Record, up: Uploads, training: Training, guard: Guard | None = None
) -> tuple[Record, dict[str, Any]]:
    """The new server state, and numbers worth recording; with a guard only of the noisy mean."""
    if guard is None:
        report = conflicts(up.tensors, up.layout, training, up.round) | few(method, server, up, training)
        if len(up.ids) < up.population and not report.keys().isdisjoint(("cosines", "w")):
            report["clients"] = compared(up.ids).tolist()
    else:
        up, report = guard.pool(up)
    report |= {name: value.tolist() for name, value in method.report(server, up).items()}
    return method.merge(server, up), report


def skipped(method: Method, answers: int) -> dict[str, Any]:
    """What is recorded of a round in which too few clients answered."""
    plug = method.aggregator
    return {"skipped": f"{plug.name} needs {plug.minimum} clients, {answers} answered"}


def conflicts(sent: Mapping[str, Tensor], layout: Layout, training: Training, t: int) -> dict[str, Any]:
    """In rounds that are evaluated, how many pairs of updates oppose each other; in the last one, all cosines.

    Of more than COMPARED participants, so many evenly spaced ones are looked at.
    """
    last = t + 1 == training.rounds
    update = sent.get("update")
    if update is None or len(update) < 2 or not evaluated(training, t):
        return {}
    update = compared(update)
    if update.shape[-1] == layout.size:
        update = layout.cut(update, "parameters")
    angles = cosines(update.flatten(1))
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


def record_class(method: Method, name: str) -> type[Record]:
    """The record class of this name: one the method's own modules define, or one of the common ones."""
    for cls in type(method).__mro__:
        found = getattr(sys.modules[cls.__module__], name, None)
        if isinstance(found, type) and issubclass(found, Record):
            return found
    found = getattr(records, name, Nothing)
    if not (isinstance(found, type) and issubclass(found, Record)):
        raise CoterieError(f"a state '{name}' was named that {method.name} does not define.")
    return found
