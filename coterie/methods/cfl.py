"""CFL: one model that is split in two, again and again, where clients pull in different directions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from coterie.contract.algebra import bipartition, cosines
from coterie.contract.cohort import Cohort, Init
from coterie.contract.method import Uploads, enrol
from coterie.contract.records import Models, Record, Upload
from coterie.contract.shapes import Clustered
from coterie.options import Count, CountOrZero, NonNegative, Range


@dataclass(frozen=True)
class Tree(Models):
    """Leaf models `rows [L, D]`; each client's leaf `cluster [M]` and last update `moves [M, P]`; `peak`, the longest.

    Split s was made at model `splits[s]` and turned leaf `parent[s]` into itself and leaf s + 1. Its members' updates
    are `cached [N, P]`: those of `side` 2s stayed, those of side 2s + 1 went to the new leaf.
    """

    cluster: Tensor
    moves: Tensor
    peak: Tensor
    splits: Tensor
    parent: Tensor
    cached: Tensor
    side: Tensor


@dataclass(frozen=True)
class CFL(Clustered):
    """theta_c <- theta_c + sum_{i in c} n_i / n_c Delta_i; a cluster c that stands still while its clients move splits.

    It does when |sum_i n_i / n_c Delta_i| < eps1 and max_i |Delta_i| > eps2, c has more than `smallest` clients and
    `split_after` rounds are over: c is cut in two such that the largest cosine of two updates across the cut is small
    (complete linkage), if that cosine is below 1 - 2 gamma^2. With `relative`, eps1 and eps2 are fractions of the
    longest update of any client so far. Clients that did not take part are placed by their last update.
    `weighted=False` counts clients alike. Norms and cosines are those of the parameters.
    """

    eps1: Annotated[float, Range(at_least=0, infinite=True)] = 0.4
    """A cluster may split when its mean update is shorter than this."""
    eps2: Annotated[float, Range(at_least=0, infinite=True)] = 0.6
    """It splits only if some client's update is longer than this."""
    relative: bool = True
    """Whether eps1 and eps2 are fractions of the longest update so far."""
    split_after: CountOrZero = 0
    """Rounds before the first split."""
    smallest: Count = 2
    """Clusters of at most so many clients are not split."""
    gamma: NonNegative = 0.0
    """A split needs a cosine across the cut below 1 - 2 gamma^2; larger values split less."""
    weighted: bool = True
    """Whether clients count by their samples; false counts them alike."""

    newcomer = "the leaf it descends to by the cosines of its updates with those of the members"
    cite = "Sattler, Müller, Samek, Clustered federated learning, IEEE TNNLS 2021"
    unprotected = "the updates by which clusters are split"
    presets = ("official",)
    steps_itself = "its models split as it goes, and what an optimizer remembers would fit neither half"
    FORMER = (("warmup", "split_after"),)

    @classmethod
    def official(cls) -> CFL:
        """The authors' notebook (EMNIST): absolute thresholds after 20 rounds, clients count alike, no validation."""
        return cls(eps2=1.6, relative=False, split_after=20, weighted=False, validation=False, printed="served")

    def start(self, init: Init) -> Record:
        row, none = init.row, torch.zeros(0, dtype=torch.int64, device=init.row.device)
        moves = row.new_zeros(init.population, init.layout.only("parameters").size)
        return Tree(row[None], none, moves, row.new_zeros(()).double(), row[None][:0], none, moves[:0], none)

    def hello(self, server: Tree) -> Record:
        return Models(server.splits)

    def introduce(self, cohort: Cohort, hello: Models) -> Upload:
        """A newcomer's updates at the models where clusters were split `[C, S, P]`; there are none at the beginning."""
        moves = cohort.train(hello.rows) - hello.rows if hello.rows.shape[1] else hello.rows
        return Upload(moves=cohort.layout.cut(moves, "parameters"))

    def admit(self, server: Tree, ids: Tensor, introductions: Upload) -> Record:
        leaf = torch.zeros_like(ids)
        for s, parent in enumerate(server.parent.tolist()):
            sides = [server.cached[server.side == side] for side in (2 * s, 2 * s + 1)]
            stay, go = (cosines(introductions.moves[:, s], side).amax(1).to(ids.device) for side in sides)
            leaf = torch.where((leaf == parent) & (go > stay), s + 1, leaf)
        none = server.moves.new_zeros(len(ids), server.moves.shape[1])
        return replace(server, cluster=enrol(server.cluster, ids, leaf), moves=enrol(server.moves, ids, none))

    def merge(self, server: Tree, up: Uploads) -> Record:
        leaf, leaves = server.cluster[up.ids], len(server.rows)
        steps = self.aggregate(up.update, up.share_in(leaf, leaves, self.weighted), up.layout)
        moves, means = (up.layout.cut(rows, "parameters") for rows in (up.update, steps))
        length, mean_length = (torch.linalg.vector_norm(rows.double(), dim=1) for rows in (moves, means))
        peak = torch.maximum(server.peak, length.max())
        unit = peak if self.relative else torch.ones_like(peak)
        tree = replace(server, rows=server.rows + steps, moves=server.moves.index_copy(0, up.ids, moves), peak=peak)
        for c in range(leaves) if up.round >= self.split_after else []:
            if mean_length[c] < self.eps1 * unit and (length * (leaf == c)).max() > self.eps2 * unit:
                tree = self.split(tree, c, server.rows[c])
        return tree

    def split(self, tree: Tree, c: int, at: Tensor) -> Tree:
        """The tree with leaf c cut in two, `at` being the model that its members' updates started from."""
        members = torch.nonzero(tree.cluster == c).flatten()
        if len(members) <= self.smallest:
            return tree
        moves, new = tree.moves[members], len(tree.rows)
        right, across = bipartition(cosines(moves).to(moves.device))
        if 1 - across <= max(2 * self.gamma**2, 1e-9):
            return tree
        return replace(
            tree,
            rows=torch.cat([tree.rows, tree.rows[c : c + 1]]),
            cluster=tree.cluster.index_fill(0, members[right], new),
            splits=torch.cat([tree.splits, at[None]]),
            parent=torch.cat([tree.parent, tree.parent.new_tensor([c])]),
            cached=torch.cat([tree.cached, moves]),
            side=torch.cat([tree.side, 2 * (new - 1) + right.long()]),
        )
