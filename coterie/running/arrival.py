"""How clients arrive where server and clients share a process: hello, introduce, admit, send, join, deploy.

Across a wire the server's half is `flower.rounds` and the client's `flower.site`; they call the same words of `Server`
and of `running.clients`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.contract import records
from coterie.contract.cohort import Cohort
from coterie.contract.engine import IntArray
from coterie.contract.records import Record, Upload
from coterie.running.clients import deploy, introduce, join
from coterie.running.server import Server
from coterie.running.together import Call, Course


def admitting(server: Server, ids: Tensor, cohorts: Iterable[Cohort]) -> Course[tuple[Server, list[IntArray]]]:
    """The server that knows the clients of these numbers too, once all their cohorts have introduced themselves.

    Beside it the steps that they took to do so, `[C]` of each cohort: they are steps before use.
    """
    hello = server.hello()
    told: list[Upload] = []
    spent: list[IntArray] = []
    for cohort in cohorts:
        told.append((yield Call(introduce, server.method, cohort, (records.spread(hello, cohort.size),))))
        spent.append(cohort.spent)
    return server.admitted(ids, type(told[0]).of(records.concatenate([one.tensors() for one in told]))), spent


@dataclass(frozen=True)
class Arrival:
    """What passed between newcomers and the server, and the rows that came of it; the newcomers are the first axis."""

    told: Upload
    server: Server  # as the first of them was admitted to it
    payload: Record
    mine: Record
    rows: Tensor  # [C, D], as served


def each_alone(server: Server, cohort: Cohort, number: int) -> Arrival:
    """The arrival of newcomers of whom none knows of another; they are computed together.

    Each is admitted, as the client of this number, to a copy of the server of its own.
    """
    method = server.method
    told = introduce(method, cohort, records.spread(server.hello(), cohort.size))
    ids = torch.tensor([number], device=server.device)
    first: Server | None = None
    sent = []
    for i in range(cohort.size):
        alone = type(told).of({name: t[i : i + 1] for name, t in told.tensors().items()})
        copy = server.admitted(ids, alone)
        first = first or copy  # the others' states are as large, and nobody asks for them
        sent.append(copy.payload(ids))
    assert first is not None
    payload = type(sent[0]).of(records.concatenate([one.tensors() for one in sent]))
    mine = join(method, cohort, payload)
    return Arrival(told, first, payload, mine, deploy(method, cohort, payload, mine))
