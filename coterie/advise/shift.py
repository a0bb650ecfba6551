"""How unlike the clients are: in their labels, in their inputs, and whether they fall into groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.data import Federation, label_distance

Array = np.ndarray[Any, np.dtype[np.float64]]

MOST_FEATURES = 256
MOST_GROUPS = 6
CLOUDS = 20
CLEAR = 4.0
"""Standard deviations above a structureless cloud from which on groups are believed."""


@dataclass(frozen=True)
class Shift:
    """Differences between clients, each from 0 (none) to 1."""

    label: float
    """Classes: mean total-variation distance of a client's labels to all labels. Targets: the share of their variance
    that lies between clients."""
    label_by_chance: float
    """What clients of these sizes would show if all drew from one distribution."""
    feature: float | None
    """The share of the inputs' variance within a class that lies between clients, less what chance gives; None for
    tokens."""


@dataclass(frozen=True)
class PullClusters:
    """Groups among the clients, by the directions in which they pull a shared model."""

    count: int  # 1 where there is nothing but one cloud
    silhouette: float  # of the grouping that stands out most, into 2 to 6
    by_chance: float  # the mean silhouette of as many points from one cloud of the same shape
    lead: float  # how far the first is above the second, in standard deviations of the cloud's
    groups: tuple[int, ...]  # the group of each training client

    @property
    def exist(self) -> bool:
        return self.count > 1


def shift(federation: Federation) -> Shift:
    """From the training data of all clients."""
    labels = federation.histogram("train")
    if federation.classes:
        sizes = labels.sum(1)
        p = labels.sum(0) / labels.sum()
        # A count is nearly normal, and the mean absolute deviation of N(0, s^2) is s sqrt(2 / pi).
        chance = float(np.mean(np.sqrt(2 / np.pi / sizes))) * float(np.sqrt(p * (1 - p)).sum()) / 2
        label = float(label_distance(labels).mean())
    else:
        label, chance = _between(*_rows(federation, federation.y.reshape(len(federation.y), -1).double().numpy())), 0.0
    if not federation.x.is_floating_point():
        return Shift(label, chance, None)
    return Shift(label, chance, _feature_shift(federation))


def _feature_shift(federation: Federation) -> float:
    x = federation.x.reshape(len(federation.x), -1)
    step = -(-x.shape[1] // MOST_FEATURES)
    values, owner = _rows(federation, x[:, ::step].double().numpy())
    if not federation.classes:
        return _between(values, owner)
    y = _rows(federation, federation.y.numpy())[0]
    found, weight = [], []
    for c in np.unique(y):
        here = y == c
        if len(np.unique(owner[here])) > 1:
            found.append(_between(values[here], owner[here]))
            weight.append(int(here.sum()))
    return float(np.average(found, weights=weight)) if found else 0.0


def _rows(federation: Federation, values: np.ndarray[Any, Any]) -> tuple[Any, Any]:
    """The training samples' values and their clients."""
    owner = np.full(len(values), -1)
    for i, (start, stop, _, _) in enumerate(federation.bounds):
        owner[start:stop] = i
    return values[owner >= 0], owner[owner >= 0]


def _between(values: Array, owner: np.ndarray[Any, Any]) -> float:
    """omega^2 = (SSB - (k - 1) MSW) / (SST + MSW) over all features together, at least 0: the part of the variance that
    lies between the k owners, of which chance gives 0 in the mean."""
    names, place, n = np.unique(owner, return_inverse=True, return_counts=True)
    if len(values) <= len(names):
        return 0.0
    spread = values.std(0)
    scaled = (values[:, spread > 0] - values[:, spread > 0].mean(0)) / spread[spread > 0]
    sums = np.zeros((len(names), scaled.shape[1]))
    np.add.at(sums, place, scaled)
    between = float((sums**2 / n[:, None]).sum())
    total = float((scaled**2).sum())
    within = (total - between) / (len(values) - len(names))
    return max(0.0, (between - (len(names) - 1) * within) / (total + within)) if total > 0 else 0.0


def clusters(pulls: Array) -> PullClusters:
    """Groups among rows `[clients, D]`: how each client moves a shared model.

    Their common part is taken off, rows get length 1, and k-means is tried for K = 2 to 6 groups in the K - 1 leading
    principal components, in which the centres of K groups lie. Its silhouette (Rousseeuw 1987) is compared with those
    of 20 normal clouds with the same variances, the null of SigClust (Liu et al. 2008). K is where the lead over the
    cloud is largest, in the cloud's standard deviations; below 4 there is one cloud.
    """
    m = len(pulls)
    found = PullClusters(1, 0.0, 0.0, 0.0, (0,) * m)
    if not np.isfinite(pulls).all():  # the shared model diverged, so its pulls say nothing
        return found
    rows = _unit(pulls - pulls.mean(0))
    rows = rows - rows.mean(0)
    values, vectors = np.linalg.eigh(rows @ rows.T)  # [m], [m, m], rising
    scores = vectors[:, ::-1] * np.sqrt(np.maximum(values[::-1], 0))  # principal components, the leading first
    rank = int((values > 1e-9 * max(values[-1], 1e-30)).sum())
    clouds = np.random.default_rng(0).standard_normal((CLOUDS, m, MOST_GROUPS - 1))

    for k in range(2, min(MOST_GROUPS, m // 3, rank + 1) + 1):
        points = scores[:, : k - 1]
        value, groups = _grouping(points, k)
        null = [_grouping(cloud[:, : k - 1] * points.std(0), k)[0] for cloud in clouds]
        lead = (value - float(np.mean(null))) / max(float(np.std(null)), 1e-6)
        if lead > found.lead:
            clear = lead >= CLEAR
            said = tuple(int(g) for g in groups) if clear else (0,) * m
            found = PullClusters(k if clear else 1, value, float(np.mean(null)), lead, said)
    return found


def _unit(rows: Array) -> Array:
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30))


def _grouping(points: Array, k: int) -> tuple[float, Any]:
    """k-means `[m, d]` with the best of ten starts, each a point and then always the point farthest from those taken:
    its silhouette and the groups `[m]`."""
    apart = np.linalg.norm(points[:, None] - points[None], axis=2)  # [m, m]
    best, found = np.inf, np.zeros(len(points), int)
    for first in np.linspace(0, len(points) - 1, min(10, len(points))).astype(int):
        taken = [int(first)]
        while len(taken) < k:
            taken.append(int(apart[taken].min(0).argmax()))
        centres = points[taken]
        for _ in range(100):
            groups = ((points[:, None] - centres[None]) ** 2).sum(2).argmin(1)
            moved = np.stack([points[groups == g].mean(0) if (groups == g).any() else centres[g] for g in range(k)])
            if np.array_equal(moved, centres):
                break
            centres = moved
        cost = float(((points - centres[groups]) ** 2).sum())
        if cost < best:
            best, found = cost, groups
    return _silhouette(apart, found), found


def _silhouette(apart: Array, groups: np.ndarray[Any, Any]) -> float:
    """Mean of (b - a) / max(a, b): a a point's mean distance to its own group, b to the nearest other; 0 if alone."""
    member = groups[None] == np.unique(groups)[:, None]  # [k, m]
    if len(member) < 2:
        return 0.0
    total = apart @ member.T  # [m, k]
    size = member.sum(1)
    own = member.argmax(0)
    a = total[np.arange(len(groups)), own] / np.maximum(size[own] - 1, 1)
    other = np.where(member.T, np.inf, total / size)
    b = other.min(1)
    return float(np.where(size[own] > 1, (b - a) / np.maximum(np.maximum(a, b), 1e-30), 0.0).mean())
