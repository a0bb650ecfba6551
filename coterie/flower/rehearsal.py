"""What sites will send, seen before they do: the method's own functions, tried on one client of made-up samples.

What comes from sites is compared with this and not with what most of them send. Shapes may follow from the model, the
job and the server's state, never from a client's own data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from coterie.contract import records
from coterie.contract.records import Record, Upload
from coterie.contract.sent import Values
from coterie.flower.checks import Expected
from coterie.flower.job import Job
from coterie.flower.wire import schema_of
from coterie.running.clients import Clients, introduce, join, local
from coterie.running.server import Server

ALONE = np.array([0])
"""The made-up client's place in its data."""


class Rehearsal:
    """One made-up client of a job's population, beside a server of that population."""

    def __init__(self, job: Job, server: Server) -> None:
        """With privacy on, raises if sites would tell the server more than their noisy mean."""
        self.method, self.counted = server.method, server.guard is None
        self.constant = math.log(max(job.classes, 2)) if job.classes else 1.0
        population = max(server.init.population, 1)
        self.clients = Clients(
            self.method, job.factory(), job.made_up(1), replace(job.training, device=str(server.device)), job.head,
            population=population,
        )
        told = self._introduced(server, 0)
        everybody = Upload.of({name: t.expand(population, *t.shape[1:]) for name, t in told.tensors().items()})
        self.known = server.admitted(torch.arange(population, device=server.device), everybody)
        self.sent = {t: self._sent(t) for t in range(self.method.period)}
        server.rehearse(self.sent[0])

    def introduction(self, server: Server, t: int) -> Expected:
        """What a site tells when it introduces itself to this server, after t rounds."""
        return self._expected(server, self._introduced(server, t).tensors(), self.method.introduces)

    def upload(self, server: Server, t: int) -> Expected:
        """What a site sends after it trained in round t, counted from 0."""
        turn = self.method.turn(t)
        if turn not in self.sent:
            self.sent[turn] = self._sent(turn)
        return self._expected(server, self.sent[turn], self.method.uploads)

    def nothing(self, server: Server) -> Expected:
        """What a site sends that was not asked to train."""
        return replace(self._expected(server, {}, {}), counted=False)

    def _expected(self, server: Server, sent: Mapping[str, Tensor], holds: Mapping[str, Values]) -> Expected:
        rows = server.state.tensors().get("rows")
        return Expected(schema_of(sent), holds, 0 if rows is None else len(rows), server.layout.rank, self.counted,
                        self.constant)

    def _introduced(self, server: Server, t: int) -> Upload:
        return introduce(self.method, self.clients.at(t, ALONE), records.spread(server.hello(), 1))

    def _sent(self, t: int) -> dict[str, Tensor]:
        payload: Record = self.known.payload(torch.zeros(1, dtype=torch.int64, device=self.known.device))
        own = join(self.method, self.clients.at(0, ALONE), payload)
        cohort = self.clients.at(t, ALONE)
        cohort = self.clients.at(t, ALONE, local=replace(cohort.members.local, epochs=1, steps=1))
        cohort.memory = {} if self.clients.remembers else None
        upload, _ = local(self.method, cohort, payload, own)
        return self.clients.without_local_buffers(upload.tensors())
