"""CFL: one model that is split in two, again and again, where clients pull in different directions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Self

import torch
from torch import Tensor

from coterie.contract import sent
from coterie.contract.algebra import bipartition, cosines, lengths, told_apart
from coterie.contract.cohort import Cohort, Init
from coterie.contract.method import Uploads, enrol
from coterie.contract.records import Models, Record, Upload
from coterie.contract.shapes import Clustered
from coterie.errors import CoterieError
from coterie.options import Count, CountOrZero, NonNegative, Range


@dataclass(frozen=True)
class Tree(Models):
    """Leaf models `rows [L, D]`; each client's leaf `cluster [M]` and last finite update `moves [M, P]`.

    `early [2]` are the sum of the norms of the first rounds' mean updates, and how many these are. Split s was made at
    model `splits[s]` and turned leaf `parent[s]` into itself and leaf s + 1. Its members' updates are `cached [N, P]`:
    those of `side` 2s stayed, those of side 2s + 1 went to the new leaf.
    """

    cluster: Tensor
    moves: Tensor
    early: Tensor
    splits: Tensor
    parent: Tensor
    cached: Tensor
    side: Tensor

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """The tree; one that split by the length of the longest update, `peak`, can be used but not grown: NaN."""
        now = {name: t for name, t in tensors.items() if name != "peak"}
        return super().of(now | {"early": tensors["peak"].new_full((2,), torch.nan)} if "peak" in tensors else now)


@dataclass(frozen=True)
class CFL(Clustered):
    """theta_c <- theta_c + sum_{i in c} n_i / n_c Delta_i; a cluster c that stands still while its clients move splits.

    It does when |sum_i n_i / n_c Delta_i| < eps1 and max_i |Delta_i| > eps2, c has more than `smallest` clients and
    `split_after` rounds are over (a shorter run is FedAvg): c is cut in two such that the largest cosine of two updates
    across the cut is small (complete linkage), and the halves take that round's means of their own. With `relative`,
    eps1 and eps2 are fractions of the mean of |sum_i n_i / n Delta_i| over the rounds before `split_after`, at least
    the first that anybody answered. A cut is refused if that cosine is 1 - 2 gamma^2 or more, or if the halves' means
    do not explain more than `explained` + 2 / (m - 1) of the spread of the m members' directions: any cut of unrelated
    updates explains 1 / (m - 1), and clients with data of one kind, who differ by chance, stay together. Of three
    clients, or four that are no two tight pairs, that cannot be told. Clients that did not take part are placed by
    their last update; who has none stays. No half has fewer clients than the aggregator needs. Norms and cosines are
    those of the parameters.

    An update that is not finite takes part in its cluster's mean, as in FedAvg, and in nothing else: a mean that is not
    finite never splits, and where a robust aggregator keeps it finite its client is placed by its last finite update.

    Clients whose labels are distributed differently pull apart as well: label skew alone makes plain updates cluster,
    and what is found then are groups of labels, not of tasks.
    """

    eps1: Annotated[float, Range(at_least=0, infinite=True)] = 0.7
    """A cluster may split when the norm of its mean update is below this, or with relative this part of that of the
    first rounds; the authors take 0.4, not relative, for EMNIST, which fits no other model or learning rate."""
    eps2: Annotated[float, Range(at_least=0, infinite=True)] = 1.0
    """It splits only if the norm of some member's own update is above this, or with relative this many times the mean
    update's in the first rounds; the authors take 1.6, not relative."""
    relative: bool = True
    """Whether eps1 and eps2 are fractions of the mean update's norm in the first rounds; false takes them as norms."""
    split_after: CountOrZero = 10
    """Rounds before the first split; the authors take 20, of longer runs."""
    smallest: Count = 2
    """Clusters of at most so many clients are not split."""
    gamma: NonNegative = 0.0
    """A split needs a cosine across the cut below 1 - 2 gamma^2, the paper's test for updates with noise of at most
    gamma; larger values split less."""
    explained: NonNegative | None = 0.2
    """How much more than chance the halves must explain, see above; none does not ask, as in the paper, where clients
    with the same kind of data split in the end."""
    weighted: bool = True
    """Whether clients count by their samples; false counts them alike, as in the authors' notebook."""

    newcomer = "the leaf it descends to by the cosines of its updates with those of the members"
    introduces = sent.fields(moves=sent.Vectors())
    cite = "Sattler, Müller, Samek, Clustered federated learning, IEEE TNNLS 2021"
    unprotected = "the updates by which clusters are split"
    presets = ("official",)
    steps_itself = "its models split as it goes, and what an optimizer remembers would fit neither half"
    FORMER = (("warmup", "split_after"),)

    @classmethod
    def official(cls) -> CFL:
        """The authors' notebook (EMNIST): absolute thresholds after 20 rounds, clients count alike, no validation."""
        return cls(eps1=0.4, eps2=1.6, relative=False, split_after=20, explained=None, weighted=False,
                   validation=False, printed="served")

    def start(self, init: Init) -> Record:
        row, none = init.row, torch.zeros(0, dtype=torch.int64, device=init.row.device)
        moves = row.new_zeros(init.population, init.layout.only("parameters").size)
        return Tree(row[None], none, moves, row.new_zeros(2).double(), row[None][:0], none, moves[:0], none)

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
        if server.early.isnan().any():
            raise CoterieError("this run of cfl was begun by an earlier version, which split clusters by another rule; "
                               "its models can be used and exported, but it cannot be continued: start it anew.")
        leaf, leaves = server.cluster[up.ids], len(server.rows)
        moves, means = up.layout.cut(up.update, "parameters"), self.means(up, leaf, leaves)
        length = lengths(moves).to(moves.device)
        finite = torch.isfinite(length)
        still = lengths(up.layout.cut(means, "parameters")).to(moves.device)
        early = server.early
        if (up.round < self.split_after or not early[1]) and torch.isfinite(still[0]):  # there is one leaf as yet
            early = early + torch.stack([still[0], torch.ones_like(still[0])])
        unit = early[0] / early[1] if self.relative else torch.ones_like(early[0])
        known = server.moves.index_copy(0, up.ids[finite], moves[finite])
        tree = replace(server, moves=known, early=early)
        for c in range(leaves) if up.round >= self.split_after else []:
            longest = torch.where(finite & (leaf == c), length, 0).max()
            longest = longest * bool((leaf == c).sum() >= self.aggregator.minimum)  # else its mean is 0, and not still
            if still[c] < self.eps1 * unit and longest > self.eps2 * unit:
                tree = self.split(tree, c)
        if len(tree.rows) > leaves:
            means = self.means(up, tree.cluster[up.ids], len(tree.rows))  # the halves' own
        return replace(tree, rows=tree.rows + means)

    def means(self, up: Uploads, leaf: Tensor, leaves: int) -> Tensor:
        """The mean update of each leaf `[L, D]`."""
        return self.aggregate(up.update, up.share_in(leaf, leaves, self.weighted), up.layout)

    def split(self, tree: Tree, c: int) -> Tree:
        """The tree with leaf c cut in two, both halves being at the model that their members' updates started from."""
        members = torch.nonzero((tree.cluster == c) & (tree.moves.abs().amax(1) > 0)).flatten()
        if len(members) <= self.smallest:
            return tree
        moves, new, at = tree.moves[members], len(tree.rows), tree.rows[c : c + 1]
        angles = cosines(moves)
        right, across = bipartition(angles)
        apart = self.explained is None or told_apart(angles, right) > self.explained + 2 / (len(members) - 1)
        frozen = min(int(right.sum()), int((~right).sum())) < self.aggregator.minimum
        if 1 - across <= max(2 * self.gamma**2, 1e-9) or not apart or frozen:
            return tree
        right = right.to(moves.device)
        return replace(
            tree,
            rows=torch.cat([tree.rows, at]),
            cluster=tree.cluster.index_fill(0, members[right], new),
            splits=torch.cat([tree.splits, at]),
            parent=torch.cat([tree.parent, tree.parent.new_tensor([c])]),
            cached=torch.cat([tree.cached, moves]),
            side=torch.cat([tree.side, 2 * (new - 1) + right.long()]),
        )
