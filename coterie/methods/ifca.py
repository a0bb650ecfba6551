"""IFCA: K cluster models; every client trains the one that fits it best."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.cohort import Cohort
from coterie.method import FewModels, Uploads, pick
from coterie.records import Models, Record, Upload


@dataclass(frozen=True)
class IFCA(FewModels):
    """c_i = argmin_k L_i(theta_k) on training data; theta_k <- mean over {c_i = k} of SGD_i(theta_k), weighted by n_i.

    The K models start from independent draws (equal ones would tie); an empty cluster keeps its model. A client's
    choice is the model of least training loss, the first on a tie.
    """

    down = "K"
    newcomer = "the model of least loss on its training data"
    cite = "Ghosh et al., An efficient framework for clustered federated learning, NeurIPS 2020"

    def local(self, cohort: Cohort, payload: Models, mine: Record) -> tuple[Upload, Record]:
        choice = cohort.loss(payload.rows).argmin(-1)  # [C]
        row = pick(payload.rows, choice)
        return Upload(update=cohort.train(row) - row, choice=choice), mine

    def merge(self, server: Models, up: Uploads) -> Record:
        return Models(server.rows + self.aggregate(up.update, up.share_in(up.choice, self.models), up.layout))

    def deploy(self, cohort: Cohort, payload: Models, mine: Record) -> Tensor:
        return pick(payload.rows, cohort.loss(payload.rows).argmin(-1))

    def report(self, server: Models, up: Uploads) -> dict[str, Tensor]:
        return {"clients_per_model": torch.bincount(up.choice, minlength=self.models)}
