"""IFCA: K cluster models; every client trains the one that fits it best."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.contract import sent
from coterie.contract.cohort import Cohort, Init
from coterie.contract.layout import Layout
from coterie.contract.method import Uploads, pick
from coterie.contract.records import Models, Record, Upload
from coterie.contract.shapes import FewModels


@dataclass(frozen=True)
class IFCA(FewModels):
    """c_i = argmin_k L_i(theta_k) on training data; theta_k <- mean over {c_i = k} of SGD_i(theta_k), weighted by n_i.

    The K models start from independent draws; of a module the first is the module as given, and the others are drawn
    anew. Equal ones would tie, so a function that builds the same model each time is refused. An empty cluster keeps
    its model. A client's choice is the model of least training loss, the first on a tie. `clustered` names the part
    that clusters have of their own, such as `head`; the rest is one for all and averaged over everybody (the paper's
    weight sharing). The paper knows K, e.g. 2 for CIFAR turned by 0 and 180 degrees; 3 is a guess. Its equations count
    clients alike, for all have as much data there.
    """

    clustered: str = "all"
    """The part that each cluster has of its own, such as head; the rest is one for all. K whole models travel."""

    down = "K"
    uploads = sent.fields(update=sent.Vectors(), choice=sent.Index())
    by_model = "clients_per_model"
    newcomer = "the model of least loss on its training data"
    unprotected = "the clusters that clients choose: in a small one they may be half of it"
    cite = "Ghosh et al., An efficient framework for clustered federated learning, NeurIPS 2020"

    def check(self, population: int, layout: Layout) -> None:
        super().check(population, layout)
        self.refuse_frozen(layout, self.clustered, "clusters")

    def start(self, init: Init) -> Record:
        rows = init.rows(self.models, self.clustered)
        return Models(init.layout.put(rows[0], self.clustered, init.layout.cut(rows, self.clustered)))

    def local(self, cohort: Cohort, payload: Models, mine: Record) -> tuple[Upload, Record]:
        choice = cohort.loss(payload.rows).argmin(-1)  # [C]
        row = pick(payload.rows, choice)
        return Upload(update=cohort.train(row) - row, choice=choice), mine

    def merge(self, server: Models, up: Uploads) -> Record:
        rows = server.rows + self.aggregate(up.update, up.share_in(up.choice, self.models), up.layout)
        if self.clustered == "all":
            return Models(rows)
        common = server.rows[0] + self.aggregate(up.update, up.share, up.layout)
        return Models(up.layout.put(common, self.clustered, up.layout.cut(rows, self.clustered)))

    def deploy(self, cohort: Cohort, payload: Models, mine: Record) -> Tensor:
        return pick(payload.rows, cohort.loss(payload.rows).argmin(-1))

    def report(self, server: Models, up: Uploads) -> dict[str, Tensor]:
        return {self.by_model: torch.bincount(up.choice, minlength=self.models)}

    def uses(self, server: Models, up: Uploads) -> dict[str, Tensor]:
        return {"w": F.one_hot(up.choice, self.models)}
