"""Clusters of subspaces: how far apart the spans of some matrices lie, and spectral clustering of such distances."""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.contract.algebra import nearest, seeds

_PASSES = 100  # of K-means, which ends long before


def spans(matrices: Tensor) -> Tensor:
    """`[..., o, r] -> [..., o, r]`: orthonormal bases of the columns' spans, in float64; a direction that is not there,
    as of columns of zeros, is 0."""
    u, sigma, _ = torch.linalg.svd(matrices.double().nan_to_num(0, 0, 0), full_matrices=False)
    least = max(matrices.shape[-2:]) * torch.finfo(matrices.dtype).eps * sigma[..., :1]
    bases: Tensor = u * (sigma > least)[..., None, :]
    return bases


def apart(a: Tensor, b: Tensor) -> Tensor:
    """`[m, L, o, r], [M, L, o, r] -> [m, M]`: 1 - |U_i' U_j|_F^2 / r, the mean over L layers, of bases as from `spans`.

    It is 0 for equal spans and 1 for orthogonal ones; r is the larger of the two dimensions.
    """
    in_a, in_b = (basis.any(-2).sum(-1).double() for basis in (a, b))  # [m, L], [M, L] dimensions
    rows = []
    for basis, held in zip(a, in_a, strict=True):  # all pairs at once would be too large
        overlap = (basis.mT @ b).square().sum((-2, -1))  # [M, L]
        rows.append(1 - (overlap / torch.maximum(held, in_b).clamp(min=1)).mean(1))
    return torch.stack(rows).clamp(min=0)


def followed(held: Tensor, new: Tensor, memory: float) -> Tensor:
    """`[m, ...]`: running means, memory * held + (1 - memory) * new, begun by the first one, where they were 0; what is
    not finite leaves them as they are."""
    def of_each(mask: Tensor) -> Tensor:
        return mask.view(-1, *[1] * (held.ndim - 1))

    begun, finite = held.flatten(1).any(1), torch.isfinite(new).flatten(1).all(1)
    return torch.where(of_each(finite), torch.where(of_each(begun), memory * held + (1 - memory) * new, new), held)


def grouped(matrices: Tensor, most: int, count: int | None = None) -> Tensor:
    """`[M, L, o, r]` -> clusters `[M]` of clients by the spans of their matrices; who has none, zeros, is put into the
    largest."""
    seen = matrices.flatten(1).any(1)
    cluster = torch.zeros(len(matrices), dtype=torch.int64, device=matrices.device)
    if not seen.any():
        return cluster
    bases = spans(matrices[seen])
    found = spectral(apart(bases, bases), most, count)
    return (cluster + torch.bincount(found).argmax()).masked_scatter(seen, found)


def closest(new: Tensor, matrices: Tensor, cluster: Tensor) -> Tensor:
    """`[m, L, o, r], [M, L, o, r], [M] -> [m]`: the cluster whose members' spans are nearest, in the mean over them."""
    seen = matrices.flatten(1).any(1)
    if not seen.any():
        return torch.zeros(len(new), dtype=torch.int64, device=new.device)
    member = torch.nn.functional.one_hot(cluster, int(cluster.max()) + 1)[seen].double()
    far = apart(spans(new), spans(matrices[seen])) @ member / member.sum(0)
    return far.nan_to_num(torch.inf).argmin(1)


def spectral(distances: Tensor, most: int, count: int | None = None) -> Tensor:
    """`[m, m]` -> clusters 0, 1, ... `[m]`, by the normalised cut of the affinities exp(-d^2 / (2 median(d)^2)).

    There are `count`, or else as many, from 2 to `most`, as have the widest gap in the spectrum of the Laplacian behind
    them; one where nothing tells clients apart, or there are fewer than three. Nothing is drawn.
    """
    m, same = len(distances), torch.zeros(len(distances), dtype=torch.int64, device=distances.device)
    others = ~torch.eye(m, dtype=torch.bool, device=distances.device)
    off = distances.double()[others]
    if count == 1 or m < (3 if count is None else 2) or float(off.max()) < 1e-9:
        return same
    width = off.median() if float(off.median()) > 0 else off[off > 0].mean()
    affinity = torch.exp(-distances.double().square() / (2 * width**2)) * others
    root = affinity.sum(1).clamp(min=1e-300).rsqrt()
    values, vectors = torch.linalg.eigh(torch.eye(m, dtype=affinity.dtype, device=affinity.device)
                                        - root[:, None] * affinity * root)
    gaps = values[2 : min(most, m - 1) + 1] - values[1 : min(most, m - 1)]  # behind K = 2, 3, ...
    k = min(count, m) if count is not None else 2 + int(gaps.argmax()) if len(gaps) else 1
    points = torch.nn.functional.normalize(vectors[:, :k], dim=1)
    centres = points[seeds(points, points[:0], k)]
    found = same
    for _ in range(_PASSES):
        now = torch.unique(nearest(points, centres), return_inverse=True)[1]
        if torch.equal(now, found):
            break
        found = now
        centres = torch.stack([points[found == c].mean(0) for c in range(int(found.max()) + 1)])
    return found
