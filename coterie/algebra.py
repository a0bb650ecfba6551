"""Small convex geometry in float64: inner products of updates, projections and quadratic programs on the simplex."""

from __future__ import annotations

from collections.abc import Iterator

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


def cosines(updates: Tensor) -> Tensor:
    """`[m, d] -> [m, m]`: the cosines of the angles between updates; 0 for those without a direction."""
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
