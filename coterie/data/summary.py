"""A federation in words: what fits one screen, who holds what, and how unlike the clients' labels are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.contract.units import Unit
from coterie.data import groups
from coterie.data.partition import Ints
from coterie.data.splits import SPLITS
from coterie.errors import counted, shortened, visible

MOST_CLASSES = 12
"""Classes that are counted client by client on a screen."""
NAME = 60
"""Letters of a client's name that are shown."""


def described(
    x: Tensor, y: Tensor, bounds: Ints, counts: Ints, trained: int, names: Sequence[str], task: str,
    recipe: Mapping[str, Any], group: Ints | None = None,
) -> str:
    """The fields of a federation, its task and its samples of each class, `counts [clients, classes]`, in 80 columns.

    It fits one terminal screen however many clients there are.
    """
    sizes = np.diff(bounds, axis=1)  # [clients, 3]
    held = sizes.sum(axis=1)
    small = int(held.argmin())
    feature = "x".join(str(n) for n in x.shape[1:])
    shown = {key: value for key, value in recipe.items() if key not in ("notes", "classes", "encoding")}
    facts = {
        "clients": f"{len(bounds)} ({trained} train, {len(bounds) - trained} unseen)",
        "samples": f"{held.sum()} of shape {feature}, {str(x.dtype).removeprefix('torch.')}",
        "splits": ", ".join(f"{split} {n}" for split, n in zip(SPLITS, sizes.sum(axis=0), strict=True)),
        **({} if group is None else {"groups": groups.in_words(group, bounds, SPLITS)}),
        "client size": _spread(held),
        "training size": _spread(sizes[:, 0]),
        "smallest": f"client {names[small]}: "
        + ", ".join(f"{split} {n}" for split, n in zip(SPLITS, sizes[small], strict=True)),
        "task": task,
        **(_label_facts(counts) if counts.shape[1] else _target_facts(y, bounds)),
        "recipe": ", ".join(f"{key}={value}" for key, value in _flatten(shown)) or "none",
    }
    lines = []
    for name, fact in facts.items():
        lines += wrap(
            visible(fact), 80, initial_indent=f"{name:<15}", subsequent_indent=" " * 15, max_lines=4, placeholder=" ..."
        )
    return "\n".join(lines)


def listed(
    bounds: Ints, counts: Ints, trained: int, names: Sequence[str], classes: Sequence[object] | None = None
) -> str:
    """Who holds how much of what: a line for each client, with the samples of each class if these are few.

    `classes` are their names, where they have any.
    """
    heads, columns = [*SPLITS], [*np.diff(bounds, axis=1).T]
    if 0 < counts.shape[1] <= MOST_CLASSES:
        heads += [shortened(str(c), 12) for c in classes or [f"class {c}" for c in range(counts.shape[1])]]
        columns += [*counts.T]
    called = [f"{shortened(name, NAME)}{'' if i < trained else ' (unseen)'}" for i, name in enumerate(names)]
    wide = max(len(name) for name in ["client", *called])
    lines = [" ".join([f"{'client':<{wide}}", *(f"{head:>6}" for head in heads)])]
    for i, name in enumerate(called):
        cells = (f"{column[i]:>{max(6, len(head))}}" for head, column in zip(heads, columns, strict=True))
        lines.append(" ".join([f"{name:<{wide}}", *cells]))
    return "\n".join(lines)


def label_distance(counts: Ints) -> NDArray[np.float64]:
    """Total-variation distance of each client's label distribution to the pooled one: [clients], from 0 to 1."""
    own = counts / counts.sum(axis=1, keepdims=True)
    pooled = counts.sum(axis=0) / counts.sum()
    distance: NDArray[np.float64] = 0.5 * np.abs(own - pooled).sum(axis=1)
    return distance


def task_in_words(classes: int, outputs: int, unit: Unit | None, recipe: Mapping[str, Any]) -> str:
    """`classification, 3 classes: 1, 2, 3` or `regression on 'price', ...`."""
    if classes:
        called = recipe.get("classes")
        return f"classification, {counted(classes, 'class', 'classes')}" + (f": {', '.join(called)}" if called else "")
    column = (recipe.get("encoding") or {}).get("label")
    said = f"regression, {counted(outputs, 'target')}" if column is None else f"regression on '{column}'"
    if unit is None:
        return said if column is None else f"{said}, not scaled"
    less = f"{'+' if unit.mean < 0 else '-'} {abs(unit.mean):.4g}"
    return f"{said}, trained as (value {less}) / {unit.deviation:.4g}; scores and answers are in its own unit"


def tokens_in_words(classes: int, tokens: int, recipe: Mapping[str, Any]) -> str:
    """`next token of a vocabulary of 128, 5021 tokens to predict`."""
    task = (recipe.get("encoding") or {}).get("task")
    what = f"{task} token{'s' if task == 'masked' else ''}" if task else "a class a token,"
    return f"{what} of a vocabulary of {classes}, {counted(tokens, 'token')} to predict"


def _label_facts(counts: Ints) -> dict[str, str]:
    distance = label_distance(counts)
    return {
        "classes held": f"{_spread((counts > 0).sum(axis=1))} per client",
        "class holders": f"{_spread((counts > 0).sum(axis=0))} per class",
        "heterogeneity": f"mean {distance.mean():.2f}, max {distance.max():.2f} - total-variation distance of a "
        "client's labels to all labels (0 = alike, 1 = nothing shared)",
    }


def _target_facts(targets: Tensor, bounds: Ints) -> dict[str, str]:
    y = targets.detach().cpu().double().flatten()
    means = torch.stack([targets[b0:b3].double().mean() for b0, _, _, b3 in bounds])
    between = float(means.std(correction=0))
    return {
        "targets": f"mean {float(y.mean()):.3g}, standard deviation {float(y.std(correction=0)):.3g}",
        "heterogeneity": f"{between:.3g} - standard deviation of the clients' mean targets",
    }


def _spread(values: Ints) -> str:
    return f"min {values.min()}, median {np.median(values):g}, max {values.max()}"


def _flatten(record: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs = []
    for key, value in record.items():
        pairs += _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return pairs
