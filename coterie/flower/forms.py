"""What the tensors of a task must look like, from a rehearsal of the method's own server with a few clients.

A form is a record's name and the type and shape of its tensors, `[1, ...]`. Lengths that change with the number of
clients are left open, and so are how many models a newcomer is told of before it introduces itself, and how long lists
get that are empty at the start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.contract import records
from coterie.contract.records import Record, Upload
from coterie.flower.job import Job
from coterie.flower.task import Refusal
from coterie.running.clients import Clients, introduce
from coterie.running.server import Server

FEW, MORE = 6, 4
"""Clients of the first rehearsal at most, and how many more the second one has."""


@dataclass(frozen=True)
class Form:
    """One record: its name, and of each tensor the type and the shape, None where a length is open."""

    record: str
    tensors: Mapping[str, tuple[str, tuple[int | None, ...]]]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Form:
        """From what `values` gave."""
        tensors = {name: (str(dtype), tuple(shape)) for name, (dtype, shape) in values["tensors"].items()}
        return cls(str(values["record"]), tensors)

    def values(self) -> dict[str, Any]:
        return {"record": self.record, "tensors": {name: [t, list(shape)] for name, (t, shape) in self.tensors.items()}}

    @classmethod
    def between(cls, one: Record, other: Record, open_inside: bool) -> Form:
        """What two records `[1, ...]` of one class have in common; `open_inside`: of their first and last axes."""
        found: dict[str, tuple[str, tuple[int | None, ...]]] = {}
        for name, t in one.tensors().items():
            alike: list[int | None] = [
                a if a == b and not ((open_inside or a == 0) and 0 < k < t.ndim - 1) else None
                for k, (a, b) in enumerate(zip(t.shape, other.tensors()[name].shape, strict=True))
            ]
            found[name] = (_plain(t.dtype), tuple(alike))
        return cls(type(one).__name__, found)

    def require(self, record: str, tensors: Mapping[str, Tensor]) -> None:
        """Refuse tensors of another form, and numbers that are not finite."""
        if record != self.record:
            raise Refusal(f"the task carries a record {record}; here the method expects a {self.record}.")
        if tensors.keys() != self.tensors.keys():
            raise Refusal(f"the task carries the tensors {_listed(tensors)}, not {_listed(self.tensors)}.")
        for name, (dtype, shape) in self.tensors.items():
            t = tensors[name]
            if _plain(t.dtype) != dtype:
                raise Refusal(f"the task's tensor {name} is {_plain(t.dtype)}, not {dtype}.")
            if t.ndim != len(shape) or any(b not in (None, a) for a, b in zip(t.shape, shape, strict=True)):
                wanted = ", ".join("any" if n is None else str(n) for n in shape)
                raise Refusal(f"the task's tensor {name} has shape {list(t.shape)}, not [{wanted}].")
            if not finite(t):
                raise Refusal(f"the task's tensor {name} holds numbers that are not finite.")


def finite(t: Tensor) -> bool:
    """Whether all numbers are finite."""
    return not t.is_floating_point() or bool(torch.isfinite(t).all())


def rehearsed(job: Job, clients: Clients, population: int) -> dict[str, Form]:
    """Kind of task -> what it carries. The site plays all clients; nothing of that leaves it."""
    few = min(population, FEW)
    (hello, payload), (hellos, payloads) = (_sent(job, clients, count) for count in (few, few + MORE))
    return {"introduce": Form.between(hello, hellos, True), "round": Form.between(payload, payloads, False)}


def _sent(job: Job, clients: Clients, population: int) -> tuple[Record, Record]:
    """What a server of so many clients says to one at first contact, and in the first round, `[1, ...]` each."""
    method, alone = clients.method, np.array([0])
    init = job.init(method, clients.dtype, clients.device, population)
    server = Server(method, init, job.training, method.start(init))
    hello = records.spread(server.hello(), 1)
    told = introduce(method, clients.at(0, alone), hello).tensors()
    ids = torch.arange(population, device=clients.device)
    alike = {name: t.expand(population, *t.shape[1:]) for name, t in told.items()}
    return hello, server.admitted(ids, Upload.of(alike)).payload(ids[:1])


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(sorted(name[:40] for name in list(names)[:8])) or "none"
