"""CFL: one model that is split in two, again and again, where clients pull in different directions."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from scipy.cluster.hierarchy import fcluster, linkage
from torch import Tensor

from coterie.cohort import Cohort, Init
from coterie.method import Method, Uploads, enrol
from coterie.records import Each, Model, Models, Record, Upload


@dataclass(frozen=True)
class Tree(Record):
    """Leaf models `rows [L, D]`; each client's `leaf [M]` and last update `moves [M, P]`; `peak`, the longest of all.

    Split s was made at model `splits[s]` and turned leaf `parent[s]` into itself and leaf s + 1; its members' updates
    are the `cached [N, P]` with `of_split == s`, and `right` marks those that went to the new leaf.
    """

    rows: Tensor
    leaf: Tensor
    moves: Tensor
    peak: Tensor
    splits: Tensor
    parent: Tensor
    cached: Tensor
    of_split: Tensor
    right: Tensor


def cosines(a: Tensor, b: Tensor) -> Tensor:
    """`[m, d], [n, d] -> [m, n]` in float64; 0 for a vector of zeros."""
    one, two = (torch.nn.functional.normalize(t.double(), dim=1) for t in (a, b))
    return one @ two.T


def bipartition(similarity: Tensor) -> tuple[Tensor, float]:
    """`[m, m]` -> the second half as a mask `[m]`, by complete linkage, and the largest similarity across halves."""
    m = len(similarity)
    apart = (1 - similarity).clamp(min=0).cpu()
    tree = linkage(apart[tuple(torch.triu_indices(m, m, 1))].numpy(), "complete")
    groups = torch.from_numpy(fcluster(tree, 2, "maxclust"))
    second = (groups != groups[0]).to(similarity.device)
    across = similarity[~second][:, second]  # empty where all updates are the same
    return second, float(across.max()) if across.numel() else 1.0


@dataclass(frozen=True)
class CFL(Method):
    """theta_c <- theta_c + sum_{i in c} n_i / n_c Delta_i; a cluster c that stands still while its clients move splits.

    It does when |sum_i n_i / n_c Delta_i| < eps1 and max_i |Delta_i| > eps2, c has more than `smallest` clients and
    `warmup` rounds are over: c is cut in two such that the largest cosine of two updates across the cut is small
    (complete linkage), if that cosine is below 1 - 2 gamma^2. With `relative`, eps1 and eps2 are fractions of the
    longest update of any client so far. Clients that did not take part are placed by their last update.
    `weighted=False` counts clients alike. Norms and cosines are those of the parameters.
    """

    eps1: float = 0.4
    eps2: float = 0.6
    relative: bool = True
    warmup: int = 0
    smallest: int = 2
    gamma: float = 0.0
    weighted: bool = True

    family = "few models"
    shared = "a model per cluster"
    newcomer = "the leaf it descends to by the cosines of its updates with those of the members"
    cite = "Sattler, Müller, Samek, Clustered federated learning, IEEE TNNLS 2021"
    presets = ("official",)

    @classmethod
    def official(cls) -> CFL:
        """The authors' notebook (EMNIST): absolute thresholds after 20 rounds, clients count alike, no validation."""
        return cls(eps2=1.6, relative=False, warmup=20, weighted=False, validation=False, published="served")

    def start(self, init: Init) -> Record:
        row = init.row
        none, empty = torch.zeros(0, dtype=torch.int64, device=row.device), init.layout.cut(row, "parameters")[None][:0]
        moves = empty.new_zeros(init.population, empty.shape[1])
        return Tree(row[None], none, moves, empty.new_zeros(()).double(), row[None][:0], none, empty, none, none > 0)

    def hello(self, server: Tree) -> Record:
        return Models(server.splits)

    def introduce(self, cohort: Cohort, hello: Models) -> Record:
        """A newcomer's updates at the models where clusters were split `[C, S, P]`; there are none at the beginning."""
        moves = cohort.train(hello.rows) - hello.rows if hello.rows.shape[1] else hello.rows
        return Models(cohort.layout.cut(moves, "parameters"))

    def admit(self, server: Tree, ids: Tensor, introductions: Models) -> Record:
        leaf = torch.zeros_like(ids)
        for s, parent in enumerate(server.parent.tolist()):
            here = server.of_split == s
            near, right = cosines(introductions.rows[:, s], server.cached[here]), server.right[here]
            goes = (leaf == parent) & (near[:, right].amax(1) > near[:, ~right].amax(1))
            leaf = torch.where(goes, s + 1, leaf)
        return replace(server, leaf=enrol(server.leaf, ids, leaf))

    def send(self, server: Tree, ids: Tensor) -> Record:
        return Model(Each(server.rows[server.leaf[ids]]))  # type: ignore[arg-type]

    def local(self, cohort: Cohort, payload: Model, mine: Record) -> tuple[Upload, Record]:
        return Upload(update=cohort.train(payload.row) - payload.row), mine

    def merge(self, server: Tree, up: Uploads) -> Record:
        member = torch.nn.functional.one_hot(server.leaf[up.ids], len(server.rows)).double()  # [m, L]
        mass = member * (up.n[:, None] if self.weighted else 1)
        weights = mass / mass.sum(0).clamp(min=1)
        steps = torch.stack([self.aggregate(up.update, weights[:, c], up.layout) for c in range(len(server.rows))])
        moves = up.layout.cut(up.update, "parameters")
        length = torch.linalg.vector_norm(moves.double(), dim=1)
        peak = torch.maximum(server.peak, length.max())
        unit = peak if self.relative else torch.ones_like(peak)
        still = torch.linalg.vector_norm(up.layout.cut(steps, "parameters").double(), dim=1) < self.eps1 * unit
        moving = (member * length[:, None]).amax(0) > self.eps2 * unit
        tree = replace(
            server, rows=server.rows + steps, moves=server.moves.index_copy(0, up.ids, moves), peak=peak
        )
        for c in torch.nonzero(still & moving).flatten().tolist() if up.round >= self.warmup else []:
            tree = self.split(tree, c, server.rows[c])
        return tree

    def split(self, tree: Tree, c: int, at: Tensor) -> Tree:
        """The tree with leaf c cut in two, `at` being the model that its members' updates started from."""
        members = torch.nonzero(tree.leaf == c).flatten()
        if len(members) <= self.smallest:
            return tree
        moves, new = tree.moves[members], len(tree.rows)
        right, across = bipartition(cosines(moves, moves))
        if 1 - across <= max(2 * self.gamma**2, 1e-9):
            return tree
        return Tree(
            rows=torch.cat([tree.rows, tree.rows[c : c + 1]]),
            leaf=tree.leaf.index_fill(0, members[right], new),
            moves=tree.moves,
            peak=tree.peak,
            splits=torch.cat([tree.splits, at[None]]),
            parent=torch.cat([tree.parent, tree.parent.new_tensor([c])]),
            cached=torch.cat([tree.cached, moves]),
            of_split=torch.cat([tree.of_split, torch.full_like(members, new - 1)]),
            right=torch.cat([tree.right, right]),
        )

    def deploy(self, cohort: Cohort, payload: Model, mine: Record) -> Tensor:
        return payload.row

    def report(self, server: Tree, up: Uploads) -> dict[str, Tensor]:
        return {"clients_per_model": torch.bincount(server.leaf, minlength=len(server.rows))}
