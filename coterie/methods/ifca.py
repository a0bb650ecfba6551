"""IFCA: K cluster models; every client trains the one that fits it best."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.cohort import Cohort, Init
from coterie.layout import Layout
from coterie.method import FewModels, Uploads, pick
from coterie.records import Models, Nothing, Record, Upload


@dataclass(frozen=True)
class IFCA(FewModels):
    """c_i = argmin_k L_i(theta_k) on training data; theta_k <- mean over {c_i = k} of SGD_i(theta_k), weighted by n_i.

    The K models start from independent draws (equal ones would tie); where some model is nobody's choice they are
    drawn anew, up to `redraws` times. An empty cluster keeps its model. A client's choice is the model of least
    training loss, the first on a tie. `clustered` names the part that clusters have of their own, say `head`; the rest
    is averaged over everybody.
    """

    clustered: str = "all"
    redraws: int = 0

    down = "K"
    newcomer = "the model of least loss on its training data"
    cite = "Ghosh et al., An efficient framework for clustered federated learning, NeurIPS 2020"

    def check(self, population: int, layout: Layout) -> None:
        super().check(population, layout)
        layout.within(self.clustered)

    def start(self, init: Init) -> Record:
        rows = init.rows(self.models * (1 + self.redraws))
        return Models(init.layout.put(init.row.expand_as(rows), self.clustered, init.layout.cut(rows, self.clustered)))

    def hello(self, server: Models) -> Record:
        return server if len(server.rows) > self.models else Nothing()

    def introduce(self, cohort: Cohort, hello: Models | Nothing) -> Upload:
        """The choice among the K models of each draw `[C, draws]`, where there are several."""
        if isinstance(hello, Nothing):
            return Upload()
        return Upload(choice=cohort.loss(hello.rows).unflatten(1, (-1, self.models)).argmin(-1))

    def admit(self, server: Models, ids: Tensor, introductions: Upload) -> Record:
        if len(server.rows) == self.models:
            return server
        taken = [len(choice.unique()) for choice in introductions.choice.unbind(1)]
        return Models(server.rows.unflatten(0, (-1, self.models))[taken.index(max(taken))])

    def local(self, cohort: Cohort, payload: Models, mine: Record) -> tuple[Upload, Record]:
        choice = cohort.loss(payload.rows).argmin(-1)  # [C]
        row = pick(payload.rows, choice)
        return Upload(update=cohort.train(row) - row, choice=choice), mine

    def merge(self, server: Models, up: Uploads) -> Record:
        rows = server.rows + self.aggregate(up.update, up.share_in(up.choice, self.models), up.layout)
        if self.clustered == "all":
            return Models(rows)
        common = server.rows[0] + self.aggregate(up.update, up.share, up.layout)
        return Models(up.layout.put(common.expand_as(rows), self.clustered, up.layout.cut(rows, self.clustered)))

    def deploy(self, cohort: Cohort, payload: Models, mine: Record) -> Tensor:
        return pick(payload.rows, cohort.loss(payload.rows).argmin(-1))

    def report(self, server: Models, up: Uploads) -> dict[str, Tensor]:
        return {"clients_per_model": torch.bincount(up.choice, minlength=self.models)}
