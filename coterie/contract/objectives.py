"""What the objectives and inner steps of several methods have in common, written for one client."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.contract.net import Batch, Given, Net, Row, default_objective


def flat(net: Net, row: Row) -> Tensor:
    """The trainable tensors of a row as one vector `[P]`."""
    tensors = net.tensors(row)
    return torch.cat([tensors[entry.name].flatten() for entry in net.layout.entries if entry.trainable])


def hessian_times(net: Net, row: Tensor, batch: Batch, direction: Tensor) -> Tensor:
    """H g at `row [D]` on a batch, for g = `direction [D]`: the gradient of <grad L(row), g>."""
    return net.grad(row.clone(), batch, _slope, Given(direction=direction))


def _slope(net: Net, row: Row, batch: Batch, given: Given) -> Tensor:
    """<grad L(row), direction>. Both derivatives go backwards: where the first one went forwards, PyTorch 2.11 to 2.13
    gave wrong second derivatives of layers that normalise."""
    direction = net.tensors(given.direction)
    moving, still = net.split(dict(net.tensors(row)), [entry for entry in net.layout.entries if entry.trainable])
    copies = {name: t.clone() for name, t in still.items()}  # statistics move in copies
    gradient, _ = net.grad_and_value(default_objective, moving, copies, batch, Given())
    return torch.stack([(slope * direction[name]).sum() for name, slope in gradient.items()]).sum()


def by_class(net: Net, batch: Batch, z: Tensor) -> Tensor:
    """Sums of `z [B, d]` over the samples of each class, `[classes, d]`."""
    member = batch.y[:, None] == torch.arange(net.task.classes, device=z.device)  # [B, classes]
    return (member.to(z.dtype) * batch.weight[:, None]).T @ z


def cosine(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Cosines of features, `[B, ...], [B, ...] -> [B]`, not in their half precision."""
    return F.cosine_similarity(a.flatten(1).to(dtype), b.flatten(1).to(dtype))


def scores(net: Net, row: Row, layer: str, z: Tensor) -> Tensor:
    """What a linear layer inside the head makes of features `z [B, features]`."""
    tensors, prefix = net.tensors(row), f"{net.layout.head}." if net.layout.head else ""
    weight = tensors[f"{prefix}{layer}.weight"]
    return F.linear(z.to(weight.dtype), weight, tensors.get(f"{prefix}{layer}.bias"))


def crossed(net: Net, row: Row, one: str, other: str) -> Tensor:
    """sum over layers of |B' C|_F^2 with B and C the tensors of two parts, as matrices: how far their columns are from
    orthogonal."""
    tensors, pairs = net.tensors(row), zip(net.layout.within(one), net.layout.within(other), strict=True)
    products = [tensors[b.name].flatten(1).T @ tensors[c.name].flatten(1) for b, c in pairs]
    return torch.stack([product.square().sum() for product in products]).sum()
