"""Local: every client alone."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coterie.cohort import Cohort, Init
from coterie.method import Method, Uploads
from coterie.records import Model, Nothing, Record, Upload


@dataclass(frozen=True)
class Local(Method):
    """Each client trains its own model and nothing travels: theta_i <- SGD_i(theta_i).

    The floor that personalization must beat where data are plenty. A client that is not selected does not train, so
    the work matches FedAvg's.
    """

    family = "baseline"
    shared = "nothing"
    keeps = "its model"
    down = up = "0"
    newcomer = "the initialisation"
    averages = False

    def start(self, init: Init) -> Record:
        return Nothing()

    def join(self, cohort: Cohort, payload: Nothing) -> Model:
        return Model(cohort.init.row.expand(cohort.size, -1))

    def local(self, cohort: Cohort, payload: Nothing, mine: Model) -> tuple[Upload, Record]:
        return Upload(), Model(cohort.train(mine.row))

    def merge(self, server: Nothing, up: Uploads) -> Record:
        return server

    def deploy(self, cohort: Cohort, payload: Nothing, mine: Model) -> Tensor:
        return mine.row
