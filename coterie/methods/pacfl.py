"""PACFL: clients whose data span similar subspaces share a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from scipy.cluster.hierarchy import fcluster, linkage
from torch import Tensor

from coterie.cohort import Cohort, Init
from coterie.method import Method, Uploads, enrol
from coterie.records import Each, Model, Record, Upload


@dataclass(frozen=True)
class Clusters(Record):
    """One model per cluster `rows [K, D]`, each client's `cluster [M]` and signature `basis [M, d, q]`."""

    rows: Tensor
    cluster: Tensor
    basis: Tensor


@dataclass(frozen=True)
class Signature(Record):
    """Bases of the clients' data, padded with columns of zeros `[C, d, q]`."""

    basis: Tensor


def leading(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`[n, d] -> [d, count'], [count']`: leading left singular vectors of the samples' matrix, and their values."""
    u, s, _ = torch.linalg.svd(x.T, full_matrices=False)
    u = u * u.gather(0, u.abs().argmax(0, keepdim=True)).sign()  # the sign is free, and devices choose differently
    kept = min(count, int((s > 1e-9 * s[:1].clamp(min=1e-30)).sum()))
    return u[:, :kept], s[:kept]


def angles(a: Tensor, b: Tensor, measure: str) -> Tensor:
    """`[m, d, q], [M, d, q] -> [m, M]` in degrees: the smallest principal angle, or that of any two columns."""
    in_a, in_b = (basis.abs().amax(1) > 0 for basis in (a, b))  # columns that are not padding
    a, b = a[..., : int(in_a.sum(1).max())], b[..., : int(in_b.sum(1).max())]
    cosines = []
    for basis, held in zip(a, in_a[:, : a.shape[2]], strict=True):  # all pairs at once would be too large
        products = basis.T @ b  # [M, q, r]
        if measure == "principal":
            cosines.append(torch.linalg.matrix_norm(products, 2).clamp(0, 1))
        else:
            both = held[None, :, None] & in_b[:, None, : b.shape[2]]
            cosines.append(torch.where(both, products, -1).amax((1, 2)).clamp(-1, 1))
    return torch.rad2deg(torch.arccos(torch.stack(cosines)))


@dataclass(frozen=True)
class PACFL(Method):
    """FedAvg inside clusters of clients, found once, before training, from the angles between their data.

    A client sends U_i: the `vectors` leading left singular vectors of each label's samples, made orthonormal.
    A_ij = arccos sigma_max(U_i' U_j) is the smallest principal angle of the spans; clusters are merged
    (`linkage`) up to `beta` degrees, or, by default, up to the widest gap between merges. Two subspaces of more than
    half the dimensions always meet, so U_i keeps at most half as many vectors, the largest, as an input has numbers.
    All clusters start from the same model.
    """

    vectors: int = 3
    beta: float | None = None
    linkage: Literal["average", "weighted", "complete", "single"] = "average"
    measure: Literal["principal", "columns"] = "principal"

    family = "few models"
    shared = "a model per cluster"
    newcomer = "the model of the cluster whose data are nearest"
    cite = "Vahidian et al., Efficient distribution similarity identification in clustered FL, AAAI 2023"
    presets = ("official",)

    @classmethod
    def official(cls) -> PACFL:
        """The released program: the smallest angle of any two vectors, merged rows averaged alike, CIFAR-10's beta."""
        return cls(beta=4.9, linkage="weighted", measure="columns", validation=False, published="served")

    def start(self, init: Init) -> Record:
        row = init.row
        none = torch.zeros(0, dtype=torch.int64, device=row.device)
        return Clusters(row[None], none, none.double())

    def introduce(self, cohort: Cohort, hello: Record) -> Record:
        found = [self.basis(x.reshape(len(x), -1).double(), y, cohort.classes) for x, y in cohort.samples()]
        width = self.vectors * max(cohort.classes, 1)
        return Signature(torch.stack([torch.nn.functional.pad(u, (0, width - u.shape[1])) for u in found]))

    def basis(self, x: Tensor, y: Tensor, classes: int) -> Tensor:
        """One client's samples `[n, d]` -> its vectors `[d, q]`."""
        groups = [x[y == label] for label in sorted(set(y.tolist()))] if classes else [x]
        found = [leading(group, self.vectors) for group in groups]
        if self.measure == "columns":
            return torch.cat([u for u, _ in found], 1)
        return leading(torch.cat([u * s for u, s in found], 1).T, max(1, x.shape[1] // 2))[0]

    def admit(self, server: Clusters, ids: Tensor, introductions: Signature) -> Record:
        if not len(server.cluster):  # first contact: nobody is in a cluster yet
            basis = introductions.basis
            cluster = self.merged(angles(basis, basis, self.measure))
            return Clusters(server.rows[:1].repeat(int(cluster.max()) + 1, 1), cluster.to(ids.device), basis)
        apart = angles(introductions.basis, server.basis, self.measure)  # [m, M]
        member = torch.nn.functional.one_hot(server.cluster, len(server.rows)).double()
        nearest = (apart @ member / member.sum(0)).argmin(1)
        basis = enrol(server.basis, ids, introductions.basis)
        return replace(server, cluster=enrol(server.cluster, ids, nearest), basis=basis)

    def merged(self, apart: Tensor) -> Tensor:
        """`[M, M]` degrees -> the clusters `[M]`, by agglomeration."""
        if len(apart) == 1:
            return torch.zeros(1, dtype=torch.int64)
        upper = np.triu_indices(len(apart), 1)
        tree = linkage(apart.cpu().numpy()[upper], self.linkage)
        cut = tree[-1, 2] if self.beta is None else self.beta
        gaps = np.diff(tree[:, 2])
        if self.beta is None and len(gaps) and gaps.max() > 1e-3:  # below, angles are rounding errors
            cut = tree[gaps.argmax(), 2] + gaps.max() / 2
        return torch.from_numpy(fcluster(tree, cut, "distance").astype(np.int64) - 1)

    def send(self, server: Clusters, ids: Tensor) -> Record:
        return Model(Each(server.rows[server.cluster[ids]]))  # type: ignore[arg-type]

    def local(self, cohort: Cohort, payload: Model, mine: Record) -> tuple[Upload, Record]:
        return Upload(update=cohort.train(payload.row) - payload.row), mine

    def merge(self, server: Clusters, up: Uploads) -> Record:
        n = up.n[:, None] * torch.nn.functional.one_hot(server.cluster[up.ids], len(server.rows)).double()  # [m, K]
        weights = n / n.sum(0).clamp(min=1)
        moves = [self.aggregate(up.update, weights[:, k], up.layout) for k in range(len(server.rows))]
        return replace(server, rows=server.rows + torch.stack(moves))

    def deploy(self, cohort: Cohort, payload: Model, mine: Record) -> Tensor:
        return payload.row

    def report(self, server: Clusters, up: Uploads) -> dict[str, Tensor]:
        return {"clients_per_model": torch.bincount(server.cluster, minlength=len(server.rows))}
