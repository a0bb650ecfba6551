"""IFCA: K cluster models; every client trains the one that fits it best."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.cohort import Cohort, Init
from coterie.errors import CoterieError
from coterie.layout import Layout
from coterie.method import Method, Uploads, pick
from coterie.records import Models, Record, Upload


@dataclass(frozen=True)
class IFCA(Method):
    """c_i = argmin_k L_i(theta_k) on training data; theta_k <- mean over {c_i = k} of SGD_i(theta_k), weighted by n_i.

    The K models start from independent draws (equal ones would tie); an empty cluster keeps its model. A client's
    choice is the model of least training loss, the first on a tie.
    """

    models: int = 3

    family = "few models"
    shared = "K models"
    down = "K"
    newcomer = "the model of least loss on its training data"
    cite = "Ghosh et al., An efficient framework for clustered federated learning, NeurIPS 2020"

    def check(self, population: int, layout: Layout) -> None:
        if not 1 <= self.models <= population:
            raise CoterieError(f"{self.name} with {self.models} models needs as many clients; there are {population}.")

    def start(self, init: Init) -> Record:
        return Models(init.rows(self.models))

    def local(self, cohort: Cohort, payload: Models, mine: Record) -> tuple[Upload, Record]:
        choice = cohort.loss(payload.rows).argmin(-1)  # [C]
        row = pick(payload.rows, choice)
        return Upload(update=cohort.train(row) - row, choice=choice), mine

    def merge(self, server: Models, up: Uploads) -> Record:
        n = up.n[:, None] * torch.nn.functional.one_hot(up.choice, self.models).double()  # [m, K]
        weights = n / n.sum(0).clamp(min=1)
        moves = [self.aggregate(up.update, weights[:, k], up.layout) for k in range(self.models)]
        return Models(server.rows + torch.stack(moves))

    def deploy(self, cohort: Cohort, payload: Models, mine: Record) -> Tensor:
        return pick(payload.rows, cohort.loss(payload.rows).argmin(-1))

    def report(self, server: Models, up: Uploads) -> dict[str, Tensor]:
        return {"clients_per_model": torch.bincount(up.choice, minlength=self.models)}
