"""PACFL: clients whose data span similar subspaces share a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.contract import sent
from coterie.contract.algebra import agglomerate, angles, leading
from coterie.contract.cohort import Cohort, Init
from coterie.contract.method import Uploads, enrol
from coterie.contract.records import Models, Record, Upload
from coterie.contract.shapes import Clustered
from coterie.options import Count, Range


@dataclass(frozen=True)
class Clusters(Models):
    """One model per cluster `rows [K, D]`, each client's `cluster [M]` and signature `basis [M, d, q]`."""

    cluster: Tensor
    basis: Tensor


@dataclass(frozen=True)
class PACFL(Clustered):
    """FedAvg inside clusters of clients, found once, before training, from the angles between their data.

    A client sends U_i: the `vectors` leading left singular vectors of each label's samples, made orthonormal. A_ij =
    arccos sigma_max(U_i' U_j) is the smallest principal angle of the spans; clusters are merged (`linkage`) up to
    `beta` degrees, or, by default, up to the widest gap between merges, if the merge above it is twice as high as the
    one below and 0.1 degrees higher; otherwise all are merged. So clients with data of one kind stay together, except
    by chance where inputs have few numbers: compare with beta=90, which is FedAvg. Two subspaces of more than half the
    dimensions always meet, so U_i keeps at most half as many vectors, the largest, as an input has numbers.
    `measure=columns` takes the smallest angle of any two vectors as they were found, `matched` the sum of the angles
    between the lines of the l-th vectors. `by_label=false` takes the vectors of all samples together, as in the paper.
    All clusters start from the same model.
    """

    vectors: Count = 3
    """Leading singular vectors taken of the samples of each label, or of all samples with by_label=false; a client
    sends them together, with measure=principal made orthonormal and at most half as many as an input has numbers."""
    beta: Annotated[float, Range(infinite=True)] | None = None
    """Clusters are merged up to this angle in degrees; none cuts at the widest gap between merges if that stands out,
    where the paper's program takes 4.9 for CIFAR-10 of two labels a client: angles depend on the data."""
    linkage: Literal["average", "weighted", "complete", "single"] = "average"
    """How the distance of two clusters follows from those of their members."""
    measure: Literal["principal", "columns", "matched"] = "principal"
    """The angle of two clients: of their spans, of any two vectors, or the sum over matched vectors."""
    by_label: bool = True
    """Whether vectors are taken for each label, as the released program does; false takes those of all samples
    together, as in the paper."""

    newcomer = "the model of the cluster whose data are nearest"
    introduces = sent.fields(basis=sent.Directions(axis=0))
    cite = "Vahidian et al., Efficient distribution similarity identification in clustered FL, AAAI 2023"
    per_token = False
    unprotected = "the vectors by which clients are put into clusters before training"
    presets = ("official",)

    @classmethod
    def official(cls) -> PACFL:
        """The released program: the smallest angle of any two vectors, merged rows averaged alike, CIFAR-10's beta."""
        return cls(beta=4.9, linkage="weighted", measure="columns", validation=False, printed="served")

    def start(self, init: Init) -> Record:
        none = torch.zeros(0, dtype=torch.int64, device=init.row.device)
        return Clusters(init.row[None], none, none.double())

    def introduce(self, cohort: Cohort, hello: Record) -> Upload:
        found = [self.basis(x.reshape(len(x), -1).double(), y, cohort.classes) for x, y in cohort.samples()]
        width = self.vectors * (max(cohort.classes, 1) if self.by_label else 1)
        return Upload(basis=torch.stack([F.pad(u, (0, width - u.shape[1])) for u in found]))  # [C, d, q]

    def basis(self, x: Tensor, y: Tensor, classes: int) -> Tensor:
        """One client's samples `[n, d]` -> its vectors `[d, q]`."""
        groups = [x[y == label] for label in sorted(set(y.tolist()))] if classes and self.by_label else [x]
        found = [leading(group, self.vectors) for group in groups]
        if self.measure != "principal":
            return torch.cat([u for u, _ in found], 1)
        return leading(torch.cat([u * s for u, s in found], 1).T, max(1, x.shape[1] // 2))[0]

    def admit(self, server: Clusters, ids: Tensor, introductions: Upload) -> Record:
        basis = introductions.basis
        if not len(server.cluster):  # first contact: nobody is in a cluster yet
            cluster = agglomerate(angles(basis, basis, self.measure), self.linkage, self.beta)
            return Clusters(server.rows.repeat(int(cluster.max()) + 1, 1), cluster, basis)
        apart = angles(basis, server.basis, self.measure)  # [m, M]
        member = F.one_hot(server.cluster, len(server.rows)).double()
        nearest = (apart @ member / member.sum(0)).argmin(1)
        return replace(
            server, cluster=enrol(server.cluster, ids, nearest), basis=enrol(server.basis, ids, basis)
        )

    def merge(self, server: Clusters, up: Uploads) -> Record:
        weights = up.share_in(server.cluster[up.ids], len(server.rows))
        return replace(server, rows=server.rows + self.aggregate(up.update, weights, up.layout))
