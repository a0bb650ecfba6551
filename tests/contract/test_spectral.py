"""Clusters of subspaces: distances, groups and their number, by hand and on made-up groups."""

from __future__ import annotations

import torch
from by_hand import assert_close, tensor

from coterie.contract.spectral import apart, closest, followed, grouped, spans, spectral


def test_how_far_apart_spans_are():
    """Equal spans 0 whatever the basis, orthogonal ones 1, planes that share a line 1/2, a line in a plane 1/2; layers
    are averaged."""
    e = torch.eye(4, dtype=torch.float64)
    plane = e[:, :2]
    turned = plane @ tensor([[1.0, 2.0], [3.0, 1.0]])
    other, crossing, line = e[:, 2:], e[:, 1:3], torch.stack([e[:, 0], 0 * e[:, 0]], 1)
    found = apart(*(spans(torch.stack(t)[:, None]) for t in ([plane], [turned, other, crossing, line])))
    assert_close(found, tensor([[0.0, 1.0, 0.5, 0.5]]), atol=1e-12)
    two = spans(torch.stack([torch.stack([plane, plane]), torch.stack([plane, other])]))
    assert_close(apart(two, two), tensor([[0.0, 0.5], [0.5, 0.0]]), atol=1e-12)


def test_spectral_clustering_finds_groups_and_their_number():
    """Three tight groups far from each other: the widest gap is behind the third eigenvalue. Who has no matrix joins
    the largest, and a new one the nearest."""
    generator = torch.Generator().manual_seed(5)
    centres = torch.randn(3, 1, 12, 2, generator=generator, dtype=torch.float64)
    kinds = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 0])
    noise = 0.05 * torch.randn(9, 1, 12, 2, generator=generator, dtype=torch.float64)
    members = centres[kinds] + noise
    found = grouped(members, 6)
    assert len(found.unique()) == 3
    assert all((found[i] == found[j]) == (kinds[i] == kinds[j]) for i in range(9) for j in range(9))
    absent = torch.cat([members, torch.zeros(1, 1, 12, 2, dtype=torch.float64)])
    assert grouped(absent, 6)[-1] == found[0]
    assert closest(centres, members, found).tolist() == [int(found[kinds == k][0]) for k in range(3)]
    assert not grouped(members, 6, count=1).any()
    assert len(grouped(members, 6, count=2).unique()) == 2
    assert not spectral(torch.zeros(5, 5), 4).any()  # nothing tells them apart
    assert grouped(0 * members, 6).tolist() == [0] * 9


def test_running_means_begin_with_the_first_and_leave_out_what_is_not_finite():
    held, new = tensor([[0.0, 0.0], [1.0, 2.0], [1.0, 2.0]]), tensor([[4.0, 2.0], [3.0, 4.0], [float("nan"), 1.0]])
    assert_close(followed(held, new, 0.75), tensor([[4.0, 2.0], [1.5, 2.5], [1.0, 2.0]]))
