"""Words on low-rank adapters, for servers: the two factors in a row, and the best factors of a given rank.

An adapted layer's weight is W + s B A with B `[o, r]` and A `[r, q]`; a convolution's and an embedding's factors are
read as such matrices. Means of A and of B are not the factors of the mean product: what is missing is the covariance,
sum_i p_i (B_i - mean B) (A_i - mean A).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from coterie.contract.layout import Entry, Layout, Pair
from coterie.contract.records import Record

DOWN, UP = "*.lora.A", "*.lora.B"
"""The parts of a row that hold all adapters' factors A, which lead down to r numbers, and B, which lead up again."""
Factors = tuple[Tensor, Tensor]
"""B `[..., o, r]` and A `[..., r, q]` of one layer."""


@dataclass(frozen=True)
class Split(Record):
    """A model in two pieces: `row [d]` is all but the factors A, which are `down [e]`."""

    row: Tensor
    down: Tensor


def split(rows: Tensor, layout: Layout) -> Split:
    """`[..., D]` in two pieces."""
    return Split(layout.cut(rows, f"~{DOWN}"), layout.cut(rows, DOWN))


def joined(model: Split, layout: Layout) -> Tensor:
    """The rows `[..., D]` of two pieces."""
    empty = model.row.new_empty(*model.row.shape[:-1], layout.size)
    return layout.put(layout.put(empty, f"~{DOWN}", model.row), DOWN, model.down)


def factors(rows: Tensor, pair: Pair) -> Factors:
    """`[..., D] -> [..., o, r], [..., r, q]`: B and A of one layer."""
    return _matrix(rows, pair.b), _matrix(rows, pair.a)


def with_factors(rows: Tensor, found: Iterable[tuple[Pair, Factors]]) -> Tensor:
    """A copy of `rows [..., D]` with these B and A in the places of theirs."""
    out = rows.clone()
    for pair, both in found:
        for entry, matrix in zip((pair.b, pair.a), both, strict=True):
            out[..., entry.start : entry.stop] = matrix.flatten(-2).to(rows.dtype)
    return out


def side_by_side(weights: Tensor, b: Tensor, a: Tensor) -> Factors:
    """`[m], [m, o, r], [m, r, q] -> [o, m r], [m r, q]`: factors of sum_i w_i B_i A_i; or, with weights `[m, r]`, of
    sum_ij w_ij b_ij a_ij over the columns b of B and the rows a of A."""
    weighed = weights.to(b.dtype).view(len(b), 1, -1) * b
    return weighed.transpose(0, 1).flatten(1), a.flatten(0, 1)


def sizes(rows: Tensor, layout: Layout) -> Tensor:
    """`[m, D] -> [m]`: sqrt(sum over layers of |s B A|^2), by tr(B'B A A'): no product is written down."""
    total = rows.new_zeros(len(rows))
    for pair in layout.pairs:
        b, a = factors(rows, pair)
        total = total + pair.scale**2 * ((b.mT @ b) * (a @ a.mT)).sum((-2, -1))
    return total.clamp(min=0).sqrt()


def best(b: Tensor, a: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """`[o, k], [k, q] -> [o, rank], [rank], [rank, q]`: U, sigma and V' of the best approximation of B A of this rank.

    In float64, by QR of the thin sides and an SVD of what lies between them: B A itself is never written down. The
    largest entry of every row of V' is positive, so that signs do not depend on the library that found them. What is
    nothing but rounding, as in ranks that B A does not have, is 0 in all three.
    """
    left, right = torch.linalg.qr(b.double()), torch.linalg.qr(a.double().T)
    u, sigma, vt = torch.linalg.svd(left.R @ right.R.T, full_matrices=False)
    u, vt = left.Q @ u, vt @ right.Q.T
    sign = vt.gather(1, vt.abs().argmax(1, keepdim=True)).sign()
    short = max(0, rank - len(sigma))
    sigma = pad(sigma[:rank], (0, short))
    there = sigma > max(len(b), a.shape[1]) * torch.finfo(a.dtype).eps * sigma[0]
    u, vt = pad((u * sign.T)[:, :rank], (0, short)), pad((vt * sign)[:rank], (0, 0, 0, short))
    return u * there, sigma * there, vt * there[:, None]


def completed(vt: Tensor, a: Tensor) -> Tensor:
    """`[r, q], [r, q] -> [r, q]`: V' with orthonormal rows, where those that are 0 are filled by A's beyond the others.

    A rank whose A and B are both 0 would never be trained again.
    """
    there = vt.any(1)
    missing, k = int((~there).sum()), int(there.sum())
    if not missing:
        return vt
    found = torch.linalg.qr(torch.cat([vt[there], a.to(vt)]).T)
    new = found.R.diagonal()[k:]
    chosen = new.abs().topk(missing).indices.sort().values
    out = vt.clone()
    out[~there] = found.Q[:, k + chosen].T * new[chosen].sign()[:, None]
    return out


def _matrix(rows: Tensor, entry: Entry) -> Tensor:
    columns = rows[..., entry.start : entry.stop]
    return columns.view(*columns.shape[:-1], entry.shape[0], -1)


def ups(rows: Tensor, layout: Layout, part: str = UP) -> Tensor:
    """`[..., D] -> [..., L, o, r]`: the factors B of a part, each in the corner of a block of zeros."""
    named = {entry.name for entry in layout.within(part)}
    found = [factors(rows, pair)[0] for pair in layout.pairs if pair.b.name in named]
    o, r = (max(b.shape[axis] for b in found) for axis in (-2, -1))
    return torch.stack([pad(b, (0, r - b.shape[-1], 0, o - b.shape[-2])) for b in found], -3)
