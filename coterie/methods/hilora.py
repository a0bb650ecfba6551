"""HiLoRA: a root adapter for all clients, then one for each cluster, then one for each client, on top of each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from coterie.contract import sent
from coterie.contract.cohort import Cohort, Init
from coterie.contract.layout import Layout
from coterie.contract.low_rank import Factors, best, completed, ups
from coterie.contract.method import Method, Uploads, enrol
from coterie.contract.net import Batch, Given, Net, Row
from coterie.contract.objectives import crossed
from coterie.contract.products import REWRITES, rewritten
from coterie.contract.records import Each, Model, Models, Record, Upload
from coterie.contract.spectral import closest, followed, grouped
from coterie.models.several import CLUSTER, LEAF, SHARED, TRAINED, Summed, with_several
from coterie.options import BelowOne, Count, CountOrZero, NonNegative


@dataclass(frozen=True)
class Hierarchy(Models):
    """The server's: `rows [K, d]`, of the root and then of K clusters the pair and all that is no adapter; every
    client's `cluster [M]`, and its running mean of B `up [M, L, o, r]`; `fresh [e]`, with which clusters start; and
    once there are clusters, the root's pair `root [1, e]` and its row `trunk [1, d]`, of length 0 till then."""

    cluster: Tensor
    up: Tensor
    fresh: Tensor
    root: Tensor
    trunk: Tensor


@dataclass(frozen=True)
class Branch(Model):
    """What a client is sent: the root's row, or once there are clusters, its cluster's and the root's pair `[1, e]`."""

    root: Tensor


@dataclass(frozen=True)
class HiLoRA(Method):
    """h = W_0 x + s (B_r A_r + B_c A_c + B_l A_l) x: root, cluster and leaf are trained one after another, then fixed.

    Root, `root_rounds`: D = sum_i p_i B_i A_i over all clients, and B_r, A_r <- U, Sigma V' with U Sigma V' the best
    approximation of D of the adapter's rank; ranks that D has not get B = 0 and a row of A. Cluster, `cluster_rounds`:
    the same with B_c, A_c of each cluster over its members. Leaf, all rounds after that: a client trains B_l, A_l and
    sends nothing. Losses have the terms gamma_c (|B_r' B_c|^2 + |B_r' B_l|^2) + gamma_l |B_c' B_l|^2 beside them, of
    which those of later stages are 0. The head, and whatever else trains, goes with the stage: it is averaged over all,
    then over the cluster, then stays with the client. A shorter run never comes to the later stages.

    Clusters are made when the root is done, on d_ij = 1 - |U_i' U_j|^2 / r with U_i the left singular vectors of a
    running mean of client i's B in the root's rounds (mean over layers): affinities exp(-d^2 / (2 median(d)^2)),
    spectral clustering, K by the widest gap in the spectrum. Who was never asked by then joins the largest cluster.
    Shares are p_i = n_i / n, within a cluster n_i / n_k. That products are averaged in a cluster as at the root is
    ours, as is the head's way. From then on the root's adapter is sent beside the cluster's, so that whoever missed a
    round has it.
    """

    root_rounds: Count = 15
    """Rounds of the root adapter, which all clients train; the paper's runs have 50 rounds in all."""
    cluster_rounds: CountOrZero = 20
    """Rounds of the clusters' adapters, before every client trains its own."""
    clusters_wanted: Count | None = None
    """How many clusters there are; none takes as many as the spectrum tells, at least 2 of three clients or more."""
    most: Count = 10
    """The most clusters that the spectrum may tell."""
    memory: BelowOne = 0.9
    """Weight of the earlier rounds in the running mean of a client's B."""
    gamma_c: NonNegative = 0.1
    """How strongly a cluster's and a leaf's B are held orthogonal to the root's."""
    gamma_l: NonNegative = 0.1
    """How strongly a leaf's B is held orthogonal to its cluster's."""
    probe: Count | None = None
    """Local epochs in which a newcomer trains the root's adapter to find its cluster; none takes the run's."""

    family = "low-rank adapters"
    adapters = products = True
    steps_itself = REWRITES
    shared = "root and cluster adapters"
    keeps = "a leaf adapter"
    introduces = sent.fields(up=sent.Vectors())
    newcomer = "the root and its nearest cluster"
    cite = "Peng et al., HiLoRA: Hierarchical low-rank adaptation for personalized federated learning, CVPR 2026"
    unprotected = "the factors by which clients are put into clusters"

    def check(self, population: int, layout: Layout) -> None:
        self.refuse_unpaired(layout)

    def wrap(self, module: nn.Module) -> nn.Module:
        return with_several(module, Summed)

    def travels(self) -> str:
        return TRAINED[SHARED]

    def turn(self, t: int) -> int:
        done = self.root_rounds + self.cluster_rounds
        return 0 if t < done else done

    def pair(self, t: int, roots: int) -> str:
        """The adapter that trains in round t, counted from 0, where so many roots are done: 0 or 1."""
        return LEAF if self.turn(t) else CLUSTER if roots else SHARED

    def start(self, init: Init) -> Record:
        row, fresh = (init.layout.cut(init.row, part) for part in (TRAINED[SHARED], CLUSTER))
        nobody = torch.zeros(0, dtype=torch.int64, device=row.device)
        return Hierarchy(row[None], nobody, ups(init.row, init.layout)[None][:0], fresh, fresh[None][:0], row[None][:0])

    def hello(self, server: Hierarchy) -> Record:
        return Models(server.trunk)

    def introduce(self, cohort: Cohort, hello: Models) -> Upload:
        """A newcomer's B after training the root's `[C, 1, L, o, r]`; there is none before there are clusters."""
        row = cohort.assemble({})
        if hello.rows.shape[1]:
            row = cohort.assemble({TRAINED[SHARED]: hello.rows[:, 0]})
            row = cohort.train(row, epochs=self.probe, part=TRAINED[SHARED])
        return Upload(up=ups(row, cohort.layout)[:, None][:, : hello.rows.shape[1]])

    def admit(self, server: Hierarchy, ids: Tensor, introductions: Upload) -> Record:
        up, cluster = introductions.up.sum(1), closest(introductions.up.sum(1), server.up, server.cluster)
        return replace(server, cluster=enrol(server.cluster, ids, cluster), up=enrol(server.up, ids, up))

    def send(self, server: Hierarchy, ids: Tensor) -> Record:
        return Branch(Each(server.rows[server.cluster[ids]]), server.root)  # type: ignore[arg-type]

    def merge(self, server: Any, up: Uploads) -> Record:
        rows, pair = server.rows.clone(), self.pair(up.round, len(server.root))
        layout, cluster = up.layout.only(TRAINED[pair]), server.cluster[up.ids]
        if pair == SHARED:
            b = followed(server.up[up.ids], ups(rows[cluster] + up.update, layout), self.memory)
            server = replace(server, up=server.up.index_copy(0, up.ids, b))
        for k in torch.unique(cluster).tolist() if pair != LEAF else []:
            if int((cluster == k).sum()) >= self.aggregator.minimum:
                theirs = replace(up.of(cluster == k), layout=layout)
                row, near = rows[k] + self.aggregate(theirs.update, theirs.share, layout), self.drawn_in(theirs.update)
                rows[k] = rewritten(row, rows[k] + near, theirs, self.refined)
        if len(server.root) or up.round + 1 < self.root_rounds:
            return replace(server, rows=rows)  # type: ignore[no-any-return]
        cluster = grouped(server.up, self.most, self.clusters_wanted)  # the root is done
        layout = up.layout.only(TRAINED[SHARED])
        begun = layout.put(rows, SHARED, server.fresh).repeat(int(cluster.max()) + 1, 1)
        return Hierarchy(begun, cluster, server.up, server.fresh, layout.cut(rows, SHARED), rows)

    def refined(self, averaged: Factors, product: Factors) -> Factors:
        """B `[o, r]` and A `[r, q]` of a stage, from their means and from factors of D."""
        u, sigma, vt = best(*product, len(averaged[1]))
        scale = torch.where(sigma > 0, sigma, 1)
        return (u, scale[:, None] * completed(vt, averaged[1])) if sigma.any() else averaged

    def averaged(self, server: Any, layout: Layout) -> dict[str, Layout]:
        return {"rows": layout.only(TRAINED[SHARED])}

    def report(self, server: Hierarchy, up: Uploads) -> dict[str, Tensor]:
        return {"clients_per_cluster": torch.bincount(server.cluster, minlength=len(server.rows))}

    def fallback(self, server: Hierarchy, init: Init, report: Mapping[str, Any]) -> Tensor:
        row = server.rows[int(torch.bincount(server.cluster, minlength=len(server.rows)).argmax())]
        if not len(server.root):
            return init.layout.put(init.row, TRAINED[SHARED], row)
        return init.layout.put(init.layout.put(init.row, TRAINED[CLUSTER], row), SHARED, server.root[0])

    def join(self, cohort: Cohort, payload: Branch) -> Record:
        return Model(torch.zeros_like(payload.row))  # how far leaf and head have moved; all pairs are of one size

    def local(self, cohort: Cohort, payload: Branch, mine: Model) -> tuple[Upload, Record]:
        pair, before = self.pair(cohort.round, payload.root.shape[1]), self.deploy(cohort, payload, mine)
        row = cohort.train(before, part=TRAINED[pair], objective=None if pair == SHARED else self.beside)
        moved = cohort.layout.cut(row - before, TRAINED[pair])
        return (Upload(), Model(mine.row + moved)) if pair == LEAF else (Upload(update=moved), mine)

    def beside(self, net: Net, row: Row, batch: Batch, given: Given) -> Tensor:
        root, cluster, leaf = (f"{pair}.B" for pair in (SHARED, CLUSTER, LEAF))
        at_root = crossed(net, row, root, cluster) + crossed(net, row, root, leaf)
        return net.loss(row, batch) + self.gamma_c * at_root + self.gamma_l * crossed(net, row, cluster, leaf)

    def deploy(self, cohort: Cohort, payload: Branch, mine: Model) -> Tensor:
        rows = cohort.assemble({TRAINED[SHARED]: payload.row} if not payload.root.shape[1] else
                               {TRAINED[CLUSTER]: payload.row, SHARED: payload.root[:, 0]})
        return cohort.layout.put(rows, TRAINED[LEAF], cohort.layout.cut(rows, TRAINED[LEAF]) + mine.row)
