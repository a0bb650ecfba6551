"""Shapes that several methods have: a few models, a model per cluster, a model of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.contract.cohort import Cohort, Init
from coterie.contract.layout import Layout
from coterie.contract.method import Method, Uploads
from coterie.contract.records import Each, Model, Models, Record
from coterie.errors import CoterieError
from coterie.options import Count


@dataclass(frozen=True)
class FewModels(Method):
    """Methods with K = `models` server models, which start from independent draws: equal ones would stay alike."""

    models: Count = 3
    """How many models the server keeps, K."""

    family = "few models"
    shared = "K models"

    def check(self, population: int, layout: Layout) -> None:
        if self.models > population:
            raise CoterieError(f"{self.name} with {self.models} models needs as many clients; there are {population}: "
                               f"write {self.name}:models={population}, or name the other methods without it.")

    def start(self, init: Init) -> Record:
        return Models(init.rows(self.models))

    def few(self, server: Any) -> Tensor | None:
        rows: Tensor = server.rows
        return rows

    def fallback(self, server: Any, init: Init, report: Mapping[str, Any]) -> Tensor:
        """The model that was used most in the last round, by what it reports as `by_model`."""
        used = report.get(self.by_model)  # there is none in a round without answers
        if used is None:
            return super().fallback(server, init, report)
        row: Tensor = server.rows[int(torch.tensor(used).argmax())]
        return row


@dataclass(frozen=True)
class Clustered(Method):
    """Methods whose server has a model per cluster, `rows [K, D]`, and knows the `cluster [M]` of every client."""

    family = "few models"
    shared = "a model per cluster"
    by_model = "clients_per_model"

    def send(self, server: Any, ids: Tensor) -> Record:
        return Model(Each(server.rows[server.cluster[ids]]))  # type: ignore[arg-type]

    def report(self, server: Any, up: Uploads) -> dict[str, Tensor]:
        return {self.by_model: torch.bincount(server.cluster, minlength=len(server.rows))}

    def few(self, server: Any) -> Tensor | None:
        rows: Tensor = server.rows
        return rows

    def uses(self, server: Any, up: Uploads) -> dict[str, Tensor]:
        return {"w": F.one_hot(server.cluster[up.ids], len(server.rows))}

    def clusters(self, server: Any) -> Tensor | None:
        cluster: Tensor = server.cluster
        return cluster

    def fallback(self, server: Any, init: Init, report: Mapping[str, Any]) -> Tensor:
        """The model of the cluster with the most clients."""
        row: Tensor = server.rows[torch.bincount(server.cluster, minlength=len(server.rows)).argmax()]
        return row


@dataclass(frozen=True)
class Personal(Method):
    """Methods in which every client uses a model of its own, `mine.row [C, D]`, at first the initial one."""

    keeps = "its model"

    def join(self, cohort: Cohort, payload: Any) -> Record:
        return Model(cohort.assemble({}))

    def deploy(self, cohort: Cohort, payload: Any, mine: Any) -> Tensor:
        row: Tensor = mine.row
        return row

    def fallback(self, server: Any, init: Init, report: Mapping[str, Any]) -> Tensor:
        """The mean of the models that the server keeps; the initial row where it keeps none."""
        rows = self.whole(server, init.layout)
        return init.row if rows is None else rows.mean(0)
