"""Small geometry, mostly in float64: inner products, clusters, subspaces, quadratic programs on the simplex."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.errors import CoterieError

_ROOM = 1 << 22  # numbers that a block of columns may hold in float64: 32 MiB
_TIE = 1e-13  # gradients this close, relative to the largest entry of P, are equal


# -- many updates, few numbers -----------------------------------------------------------------------------------------


def blocks(updates: Tensor) -> Iterator[slice]:
    """Slices that cut the columns of `updates [m, d]` into pieces small enough to be copied in float64."""
    width = max(1, _ROOM // max(len(updates), 1))
    return (slice(first, first + width) for first in range(0, updates.shape[1], width))


def gram(updates: Tensor) -> Tensor:
    """`[m, d] -> [m, m]`: all inner products, added up in float64 block by block of columns, on the CPU."""
    total = torch.zeros(len(updates), len(updates), dtype=torch.float64, device=updates.device)
    for columns in blocks(updates):
        piece = updates[:, columns].double()
        total += piece @ piece.T
    return total.cpu()


def lengths(updates: Tensor) -> Tensor:
    """`[m, d] -> [m]`: the norms of updates, summed in float64, on the CPU."""
    found: Tensor = torch.linalg.vector_norm(updates, dim=-1, dtype=torch.float64)
    return found.cpu()


def runaway(rows: Tensor, times: float = 100.0) -> Tensor:
    """`[m, d] -> [m]`: which rows are on their way to NaN: over `times` the middle length, unless that is 0.

    Rows as long as another one are no measure, unless all are: they stand where they started and have not trained.
    """
    length = lengths(rows)
    _, at, count = torch.unique(length, return_inverse=True, return_counts=True)
    trained = count[at] == 1
    middle = (length[trained] if bool(trained.any()) else length).median()
    return ((length > times * middle) & (middle > 0)).to(rows.device)


def norms(products: Tensor) -> Tensor:
    """`[m, m] -> [m]`: the lengths of vectors from their inner products, never the root of a rounding below 0."""
    return products.diagonal().clamp_min(0).sqrt()


def length(products: Tensor, a: Tensor) -> float:
    """The norm of sum_i a_i u_i from the inner products of the u_i."""
    return float((a @ products @ a).clamp_min(0).sqrt())


def distances(products: Tensor) -> Tensor:
    """`[m, m] -> [m, m]`: squared distances of vectors from their inner products; a vector that is not finite is
    infinitely far from all others."""
    square = products.diagonal()
    apart = (square[:, None] + square[None] - 2 * products).clamp_min(0)
    return torch.where(torch.isfinite(apart), apart, torch.inf).fill_diagonal_(0)


def cosines(updates: Tensor, others: Tensor | None = None) -> Tensor:
    """`[m, d] -> [m, m]`, or `[m, d], [n, d] -> [m, n]`: cosines of angles; 0 where there is no direction."""
    if others is not None:
        return cosines(torch.cat([updates, others]))[: len(updates), len(updates) :]
    products = gram(updates)
    sizes = norms(products)
    there = torch.isfinite(sizes) & (sizes > 0)
    both = there[:, None] & there
    return torch.where(both, products / torch.where(both, sizes[:, None] * sizes, 1), 0)


def opposing(cosines: Tensor) -> float:
    """The fraction of pairs of clients whose updates point against each other, among those that have a direction."""
    there = cosines.diagonal() != 0
    pairs = cosines[there][:, there]
    first, second = torch.triu_indices(len(pairs), len(pairs), 1)
    return float((pairs[first, second] < 0).double().mean())


def blend(a: Tensor, updates: Tensor) -> Tensor:
    """sum_i a_i u_i of `updates [m, d]`, in their precision."""
    return a.to(updates.device, updates.dtype) @ updates


# -- clusters ----------------------------------------------------------------------------------------------------------


def between(a: Tensor, b: Tensor) -> Tensor:
    """`[..., m, d], [..., k, d] -> [..., m, k]`: distances, without the cancellation that inner products bring."""
    return torch.cdist(a.double(), b.double(), compute_mode="donot_use_mm_for_euclid_dist")


def nearest(points: Tensor, centres: Tensor) -> Tensor:
    """`[..., m, d], [..., k, d] -> [..., m]`: the centre nearest to each point; one that is not finite to none."""
    return between(points, centres).nan_to_num(torch.inf, torch.inf).argmin(-1)


def seeds(points: Tensor, centres: Tensor, count: int) -> Tensor:
    """Which of `points [m, d]` become further centres until there are `count`: ever the farthest from all so far.

    The first of all is the one nearest to the mean. Nothing is drawn, other than by K-means++, so outliers become
    centres. There are fewer centres where points coincide.
    """
    chosen: list[int] = [] if len(centres) else [int(between(points, points.mean(0, keepdim=True)).argmin())]
    while len(centres) + len(chosen) < count:
        far = between(points, torch.cat([centres, points[chosen]])).amin(1)
        if far.max() == 0:
            break
        chosen.append(int(far.argmax()))
    return torch.tensor(chosen, dtype=torch.int64, device=points.device)


def bipartition(similarity: Tensor) -> tuple[Tensor, float]:
    """`[m, m]` -> the second half as a mask `[m]`, by complete linkage, and the largest similarity across halves."""
    groups = torch.from_numpy(_cut(_tree((1 - similarity).clamp(min=0), "complete"), 2, "maxclust"))
    second = (groups != groups[0]).to(similarity.device)
    across = similarity[~second][:, second]  # empty where all are the same
    return second, float(across.max()) if across.numel() else 1.0


def told_apart(products: Tensor, right: Tensor) -> float:
    """The share of the spread of m vectors about their mean that the means of two halves explain.

    `products [m, m]` are their inner products, `right [m]` is the second half.
    """

    def spread(some: Tensor) -> Tensor:
        within = products[some][:, some]
        return within.diagonal().sum() - within.mean(0).sum()

    whole = spread(torch.ones_like(right))
    return float(1 - (spread(right) + spread(~right)) / whole) if whole > 0 else 0.0


def agglomerate(apart: Tensor, how: str, height: float | None = None, least: float = 0.1) -> Tensor:
    """Distances `[m, m]` -> clusters 0, 1, ... `[m]`: merges (by the linkage `how`) up to a `height`.

    By default that is the middle of the widest gap between two merges. There is always a widest one, in noise too, so
    it counts only if the merge above it is twice as high as the one below and the gap is over `least`; otherwise all
    are merged.
    """
    if len(apart) == 1:
        return torch.zeros(1, dtype=torch.int64, device=apart.device)
    tree = _tree(apart, how)
    cut = tree[-1, 2] if height is None else height
    gaps = np.diff(tree[:, 2])
    if height is None and len(gaps) and gaps.max() > max(least, tree[gaps.argmax(), 2]):
        cut = tree[gaps.argmax(), 2] + gaps.max() / 2
    return torch.from_numpy(_cut(tree, cut, "distance").astype(np.int64) - 1).to(apart.device)


def _tree(apart: Tensor, how: str) -> Any:
    """The merges of an agglomeration as SciPy writes them."""
    from scipy.cluster.hierarchy import linkage  # half a second, which a site's process need not spend

    return linkage(apart.cpu().numpy()[np.triu_indices(len(apart), 1)], how)


def _cut(tree: Any, at: float, criterion: str) -> Any:
    from scipy.cluster.hierarchy import fcluster  # as above

    return fcluster(tree, at, criterion)


def chosen(rates: Tensor, count: int, chance: Tensor) -> Tensor:
    """Weights `[m, K]`: 1 / count for `count` clients of each cluster, 0 for the rest; all of them where m is less.

    A client of rate 0 is never drawn, and a cluster of fewer others is shared by these.

    `chance [m, K]` are uniform numbers: of clocks that ring at `rates [m, K]` the first `count` to ring are drawn one
    after another without replacement, with probabilities proportional to the rates.
    """
    first = (-torch.log1p(-chance) / rates).argsort(0)[:count]
    drawn = torch.zeros_like(rates).scatter(0, first, 1) * (rates > 0)
    return drawn / drawn.sum(0).clamp(min=1)


# -- subspaces ---------------------------------------------------------------------------------------------------------


def leading(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`[n, d] -> [d, count'], [count']`: leading left singular vectors of the samples' matrix, and their values."""
    u, s, _ = torch.linalg.svd(x.T, full_matrices=False)
    u = u * u.gather(0, u.abs().argmax(0, keepdim=True)).sign()  # the sign is free, and devices choose differently
    kept = min(count, int((s > 1e-9 * s[:1].clamp(min=1e-30)).sum()))
    return u[:, :kept], s[:kept]


def angles(a: Tensor, b: Tensor, measure: str = "principal") -> Tensor:
    """`[m, d, q], [M, d, q] -> [m, M]` in degrees, between the spans of columns; columns of zeros are padding.

    `principal` is arccos sigma_max(A'B), the smallest principal angle, for orthonormal columns; `columns` is the
    smallest angle of any two columns; `matched` is the sum over l of the angles between the lines of both l-th columns,
    90 degrees where only one has it.
    """
    if measure == "matched":
        lines = torch.stack([(basis * b).sum(1).abs() for basis in a]).clamp(max=1)  # [m, M, q]
        either = (a.abs().amax(1) > 0)[:, None] | (b.abs().amax(1) > 0)
        return torch.rad2deg(torch.where(either, torch.arccos(lines), 0).sum(2))
    in_a, in_b = (basis.abs().amax(1) > 0 for basis in (a, b))
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


# -- the samples of a batch, under vmap too ----------------------------------------------------------------------------


def squares(z: Tensor) -> Tensor:
    """`[B, d] -> [B, B]`: squared distances of features, 0 where they are equal up to rounding."""
    square = z.square().sum(1)
    total = square[:, None] + square
    apart = total - 2 * z @ z.T
    return torch.where(apart > 8 * torch.finfo(z.dtype).eps * total, apart, 0)


def median(values: Tensor, counted: Tensor) -> Tensor:
    """The (lower) median of the `counted` values, `[1]`; 1 where there is none."""
    rising = torch.where(counted, values, torch.inf).flatten().sort().values
    middle = rising.gather(0, ((counted.sum() - 1).clamp(min=0) // 2).view(1))
    return torch.where(torch.isfinite(middle), middle, 1)


def deviation(values: Tensor, weight: Tensor) -> Tensor:
    """`[B, c], [B] -> [c]`: the unbiased standard deviation over samples of weight 1; 0 for a single one."""
    n = weight.sum()
    centred = (values - (weight @ values) / n.clamp(min=1)) * weight[:, None]
    variance = centred.square().sum(0) / (n - 1).clamp(min=1)
    some = variance > 0  # the root has no slope at 0
    return torch.where(some, torch.where(some, variance, 1).sqrt(), 0)


def mmd(x: Tensor, y: Tensor, weight: Tensor, widths: tuple[float, ...]) -> Tensor:
    """MMD^2 of the samples of weight 1 in `x [B, d]` and `y [B, d]`, kernel sum_a exp(-|x - y|^2 / (2 a))."""
    pairs = weight[:, None] * weight / weight.sum().clamp(min=1).square()

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        apart = (a.square().sum(1)[:, None] + b.square().sum(1) - 2 * a @ b.T).clamp(min=0)
        return torch.stack([torch.exp(-apart / (2 * width)) for width in widths]).sum(0)

    return (pairs * (kernel(x, x) + kernel(y, y) - 2 * kernel(x, y))).sum()


# -- the simplex -------------------------------------------------------------------------------------------------------


def project_simplex(v: Tensor) -> Tensor:
    """The nearest point of {a >= 0, sum a = 1} to `v [..., m]`: max(v - rho, 0) for the one rho that fits."""
    falling = v.sort(dim=-1, descending=True).values
    count = torch.arange(1, v.shape[-1] + 1, dtype=v.dtype, device=v.device)
    over = (falling.cumsum(-1) - 1) / count
    last = (falling > over).sum(-1, keepdim=True) - 1
    return (v - over.gather(-1, last)).clamp_min(0)


def project_box_simplex(v: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """The nearest point of {lower <= a <= upper, sum a = 1} to `v [m]`: clip(v - rho, lower, upper).

    The sum falls piecewise linearly with rho and bends at v - lower and v - upper, so rho is found exactly.
    """
    _feasible(lower, upper)
    bends = torch.cat([v - lower, v - upper]).sort().values
    sums = (v[None] - bends[:, None]).clamp(lower, upper).sum(1)  # falling
    right = int((sums > 1).sum().clamp(1, len(bends) - 1))
    left = right - 1
    fall = sums[left] - sums[right]
    part = torch.where(fall > 0, (sums[left] - 1) / torch.where(fall > 0, fall, 1), 0)
    return (v - torch.lerp(bends[left], bends[right], part)).clamp(lower, upper)


def simplex_qp(
    P: Tensor, lower: Tensor | None = None, upper: Tensor | None = None, start: Tensor | None = None
) -> Tensor:
    """argmin a'Pa over {lower <= a <= upper, sum a = 1} `[m]`, by default the simplex, for a convex a'Pa.

    Computed on the CPU in float64 (the answer lies where P does): accelerated projected gradient finds out which
    bounds hold, then an active-set method solves for the rest exactly. Only p'Pp for sum p = 0 needs to be >= 0, so a
    linear term b'a is the matrix (b1' + 1b') / 2. `start` is a point to begin with, e.g. the solution of a similar
    problem. Where several points are optimal, one of them; for a P that is not finite, the feasible point nearest to
    equal parts.
    """
    m, device = len(P), P.device
    P = P.detach().to("cpu", torch.float64)
    P = (P + P.T) / 2
    low = torch.zeros(m, dtype=torch.float64) if lower is None else lower.detach().to("cpu", torch.float64)
    high = torch.ones(m, dtype=torch.float64) if upper is None else upper.detach().to("cpu", torch.float64)
    low, high = low.clamp_min(0), high.clamp_max(1)
    a = torch.full((m,), 1 / m, dtype=torch.float64) if start is None else start.detach().to("cpu", torch.float64)
    a = project_box_simplex(a, low, high)
    size = float(P.abs().max())
    if m == 1 or not 0 < size < float("inf") or not bool((high > low).any()):
        return a.to(device)
    P = P / size
    a = _descend(P, low, high, a, steps=300 if start is None else 10)
    return _polish(P, low, high, a).to(device)


def combination(V: Tensor, products: Tensor, target: int, threshold: float = 0.0) -> Tensor:
    """argmin over the simplex of sum_j V_j a_j^2 + |H_t - sum_j a_j H_j|^2 `[m]`; those below `threshold` are cut.

    That is a'(diag V + D)a with D_jl = <H_t - H_j, H_t - H_l>. `products` are the inner products of all H; `V [m]`
    belongs to the last m of them, which the combination is made of.
    """
    own, rest = products[target], slice(len(products) - len(V), None)
    P = torch.diag(V.double().cpu()) + own[target] - own[rest, None] - own[None, rest] + products[rest, rest]
    near = 1 / P.diagonal().clamp(min=1e-300)
    a = simplex_qp(P, start=near / near.sum())
    kept = torch.where(a < threshold, 0, a)
    return kept / kept.sum() if bool(kept.any()) else a


def _feasible(lower: Tensor, upper: Tensor) -> None:
    if bool((lower > upper).any()) or float(lower.sum()) > 1 + 1e-6 or float(upper.sum()) < 1 - 1e-6:
        raise CoterieError(
            f"no weights that sum to 1 lie between bounds that sum to {float(lower.sum()):.6g} and "
            f"{float(upper.sum()):.6g}."
        )


def _descend(P: Tensor, low: Tensor, high: Tensor, a: Tensor, steps: int) -> Tensor:
    """Nesterov's method on a'Pa / 2 with a restart whenever it climbs."""
    step = 1 / float(torch.linalg.eigvalsh(P)[-1].clamp_min(1e-300))
    plain = not bool((low > 0).any()) and not bool((high < 1).any())
    ahead, t = a, 1.0
    for _ in range(steps):
        moved = ahead - step * (P @ ahead)
        new = project_simplex(moved) if plain else project_box_simplex(moved, low, high)
        if float((new - a).abs().max()) < 1e-12:
            return new
        if float((ahead - new) @ (new - a)) > 0:
            ahead, t = new, 1.0
        else:
            later = (1 + (1 + 4 * t * t) ** 0.5) / 2
            ahead, t = new + (t - 1) / later * (new - a), later
        a = new
    return a


def _polish(P: Tensor, low: Tensor, high: Tensor, a: Tensor) -> Tensor:
    """The primal active-set method: solve for the free weights exactly, free or fix one at a time until none helps."""
    near = 1e-9
    a = torch.where(a - low <= near, low, torch.where(high - a <= near, high, a))
    free = (a > low) & (a < high)
    if bool(free.any()):  # what rounding to the bounds took or gave
        a = torch.where(free, a + (1 - a.sum()) / free.sum(), a)
    for _ in range(50 + 5 * len(a)):
        if int(free.sum()) > 1:
            move = torch.zeros_like(a)
            move[free] = _towards_optimum(P[free][:, free], (P @ a)[free])
            room = torch.where(move > 0, (high - a) / move, torch.where(move < 0, (low - a) / move, torch.inf))
            room = torch.where(free, room, torch.inf).nan_to_num(nan=torch.inf, posinf=torch.inf).clamp_min(0)
            fraction, blocking = room.min(0)
            a = a + float(fraction.clamp_max(1)) * move
            if fraction < 1:  # the first weight to reach its bound stays there
                a[blocking] = high[blocking] if move[blocking] > 0 else low[blocking]
                free[blocking] = False
                continue
        slope = P @ a
        down, up = a > low, a < high
        worst, from_ = torch.where(down, slope, -torch.inf).max(0)
        best, to = torch.where(up, slope, torch.inf).min(0)
        if worst - best <= _TIE or (bool(free[from_]) and bool(free[to])):
            break
        free[from_] = free[to] = True
    return project_box_simplex(a, low, high)


def _towards_optimum(P: Tensor, slope: Tensor) -> Tensor:
    """The move p with sum p = 0 to the minimum over the free weights; the shortest one where there are several."""
    n = len(P)
    system = torch.zeros(n + 1, n + 1, dtype=torch.float64)
    system[:n, :n], system[:n, n], system[n, :n] = P, 1, 1
    wanted = torch.cat([-slope, slope.new_zeros(1)])
    solution, info = torch.linalg.solve_ex(system, wanted)
    exact = int(info) == 0 and bool(torch.isfinite(solution).all()) and float(solution[:n].abs().max()) < 1e6
    if not exact or float((system @ solution - wanted).abs().max()) > 1e-12:
        solution = torch.linalg.lstsq(system, wanted[:, None], driver="gelsd").solution[:, 0]
    move: Tensor = solution[:n] - solution[:n].mean()
    return move


def affine(matrix: Tensor, z: Tensor) -> Tensor:
    """`[out, in + 1], [m, in] -> [m, out]`: the last column is the bias."""
    return z @ matrix[:, :-1].T + matrix[:, -1]
