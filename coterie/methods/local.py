"""Local: every client alone."""

from __future__ import annotations

from dataclasses import dataclass

from coterie.contract import sent
from coterie.contract.cohort import Cohort, Init
from coterie.contract.method import Uploads
from coterie.contract.records import Model, Nothing, Record, Upload
from coterie.contract.shapes import Personal


@dataclass(frozen=True)
class Local(Personal):
    """Each client trains its own model and nothing travels: theta_i <- SGD_i(theta_i).

    The floor that personalization must beat where data are plenty. A client that is not selected does not train, so
    the work matches FedAvg's.
    """

    family = "baseline"
    shared = "nothing"
    down = up = "0"
    uploads = sent.fields()
    newcomer = "the initialisation"
    averages = False

    def start(self, init: Init) -> Record:
        return Nothing()

    def local(self, cohort: Cohort, payload: Nothing, mine: Model) -> tuple[Upload, Record]:
        return Upload(), Model(cohort.train(mine.row))

    def merge(self, server: Nothing, up: Uploads) -> Record:
        return server
