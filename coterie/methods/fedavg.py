"""FedAvg: one averaged model for everybody."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coterie.cohort import Cohort, Init
from coterie.method import Method, Uploads
from coterie.records import Model, Record, Upload


@dataclass(frozen=True)
class FedAvg(Method):
    """theta <- theta + server_lr * sum_i p_i (SGD_i(theta) - theta) with p_i = n_i / n over the participants."""

    server_lr: float = 1.0

    family = "baseline"
    shared = "the model"
    newcomer = "the shared model"
    cite = "McMahan et al., Communication-efficient learning of deep networks from decentralized data, AISTATS 2017"

    def start(self, init: Init) -> Record:
        return Model(init.row)

    def local(self, cohort: Cohort, payload: Model, mine: Record) -> tuple[Upload, Record]:
        return Upload(update=cohort.train(payload.row) - payload.row), mine

    def merge(self, server: Model, up: Uploads) -> Record:
        return Model(server.row + self.aggregate(up.update, up.share, up.layout, self.server_lr))

    def deploy(self, cohort: Cohort, payload: Model, mine: Record) -> Tensor:
        return payload.row
