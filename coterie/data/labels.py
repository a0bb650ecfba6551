"""What y means: classes or numbers to predict, how classes are numbered, and when labels look like something else.

These are the only places that decide it, for arrays in Python and for every format of files alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.contract.tokens import per_token
from coterie.errors import CoterieError, counted

FEWEST = 15
"""Classes below which nobody wonders how few samples each has."""
EACH = 5
"""Samples a class on average, below which labels look like a number or an id: few-shot collections have 20."""
RARE = 2
"""Samples up to which a class is rare; most classes of an id or of a measured number are."""

NUMBER = re.compile(r"[+-]?\d+([.,]\d+)*")
"""A number with points or commas, for decimals or thousands."""


def are_targets(floating: bool, several: bool = False, regression: bool | None = None) -> bool:
    """Whether y are numbers to predict: floats are, whatever their values, and several numbers a sample.

    Whole numbers and names are classes. `regression` is what the user said, None where nothing was said.
    """
    return (floating or several) if regression is None else regression


def written(value: float) -> str:
    """A number as the name of a class: 3.0 is `3`."""
    return str(int(value)) if float(value).is_integer() and abs(value) < 2**53 else repr(float(value))


def name_of(value: float) -> str:
    """A number as a name; raises where its neighbours would have the same one."""
    if abs(value) >= 2**53:
        raise CoterieError(f"{value:.0f} cannot be told from the whole numbers beside it, so it is no name; write such "
                           "names as texts, e.g. with a letter before the digits.")
    return written(value)


def measured(values: Sequence[Any]) -> NDArray[np.float64] | None:
    """Plain numbers, floats among them, with NaN where one is missing; None where they are something else."""
    if not all(value is None or type(value) in (int, float) for value in values):
        return None
    if not any(type(value) is float for value in values):
        return None
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def labels_of(x: Tensor, y: Tensor, classes: int | None, exact: bool = False) -> tuple[Tensor, int, tuple[str, ...]]:
    """y in its final type, the number of classes (0 for regression), and their names where they are not 0, 1, 2, ...

    Without `classes`, the labels that are there are the classes, in rising order: 1, 2, 3 are three. With it, labels
    are the numbers 0 to classes - 1, several a sample where each token has one, or, with 0, targets. Targets take the
    features' precision unless they are kept `exact`.
    """
    if classes is not None and (isinstance(classes, bool) or not isinstance(classes, int)):
        raise CoterieError(f"classes is how many there are, a whole number, not {classes!r}")
    if classes is not None and classes < 0:
        raise CoterieError(f"classes must be positive, or 0 for regression, got {classes}")
    floating = y.is_floating_point()
    if are_targets(floating, regression=None if classes is None else not classes):
        # a loss over two precisions has no backward pass
        return y.to(torch.float64 if exact else x.dtype if x.is_floating_point() else torch.float32), 0, ()
    if y.ndim == 2 and classes is not None and not floating:
        return y, classes, ()  # a class a token
    if y.ndim != 1:
        tokens = "; of classes a token say how many there are, classes=" if y.ndim == 2 and not floating else ""
        raise CoterieError(f"labels must be one number per sample, got y of shape {list(y.shape)}{tokens}")
    if floating:
        if not bool((y == y.floor()).all()):
            raise CoterieError(f"{classes} classes were given but y holds {y.dtype}, such as "
                               f"{float(y[y != y.floor()][0]):g}; labels must be whole numbers")
        y = y.to(torch.int64)
    if classes is not None:
        return y, classes, ()
    found = torch.unique(y)
    if bool((found == torch.arange(len(found))).all()):
        return y, max(len(found), 1), ()
    if int(found[0]) < 0:  # -1 stands for none, and the check of labels names whose it is
        return y, int(found[-1]) + 1, ()
    return torch.searchsorted(found, y), len(found), tuple(str(v) for v in found.tolist())


def placed(y: Tensor, own: Sequence[str] | None, classes: int, names: Sequence[str], who: str) -> Tensor:
    """Labels of somebody's own data as a run with so many `classes`, perhaps with `names`, numbers them: `[N] -> [N]`.

    `own` are the names of the classes in these data, None where labels are whole numbers. Numbers and names are
    looked up in `names`; without those, a whole number is its own place.
    """
    if not classes:
        return y
    if y.is_floating_point():
        if y.ndim != 1 or not bool((y == y.floor()).all()):
            raise CoterieError(f"{who} holds numbers to predict, such as {float(y.flatten()[0]):g}, and the run has "
                               f"{counted(classes, 'class', 'classes')}.")
        y = y.to(torch.int64)
    there = [str(v) for v in torch.unique(y).tolist()] if own is None else list(own)
    known = list(names) or [str(k) for k in range(classes)]
    if own is None and not all(name.isdecimal() for name in known):
        return y  # numbers that stand for the names, in their order
    if not names and not all(name.isdecimal() for name in there):
        if len(there) != classes:
            raise CoterieError(
                f"{who} names {counted(len(there), 'class', 'classes')} and the run has {classes}; name all of them in "
                "the run's order, with the option classes=NAME,NAME,..."
            )
        return y
    place = {name: k for k, name in enumerate(known)}
    strange = [name for name in there if name not in place]
    if strange:
        way = "" if names else "; a server's plan may name others (class_names), and so may classes= of the data"
        raise CoterieError(f"{who} has the label {strange[0]}, which is none of the run's {len(known)} classes: "
                           f"{_some(known)}{way}.")
    if own is None:
        found, inverse = torch.unique(y, return_inverse=True)
        return torch.tensor([place[str(v)] for v in found.tolist()])[inverse]
    return torch.tensor([place[name] for name in own])[y]


def doubts(y: Tensor, classes: int, names: Sequence[str] = ()) -> str:
    """A sentence where nothing can be learned from y, as all of it is equal, or where classes are so many for the
    samples that y looks like a number or an id; else none."""
    if not classes:
        same = len(y) > 1 and bool((y == y[0]).all())
        value = ", ".join(f"{v:g}" for v in y[0].reshape(-1)[:4].tolist()) if same else ""
        return (f"all {len(y)} targets are equal ({value}), so nothing can be learned from them; is this the column to "
                "predict (label=COLUMN names another)?" if same else "")
    if classes == 1:
        called = f" ({names[0]})" if names else ""
        return (f"all {counted(len(y), 'label')} are of one class{called}, so nothing can be learned from them; is "
                "this the column to predict (label=COLUMN names another)?")
    if per_token(y):
        return ""  # most words of a language are rare
    counts = np.unique(y.numpy(), return_counts=True)[1]
    few, rare = len(y) < EACH * len(counts), int((counts <= RARE).sum())
    if len(counts) < FEWEST or not (few or 2 * rare > len(counts)):
        return ""
    numbers = all(name.isdecimal() for name in names)
    how = f", {rare} of them with {RARE} or fewer" if rare else ""
    if numbers:
        return (f"the labels are {len(counts)} different numbers for {len(y)} samples{how}, each taken as a class; "
                "this looks like a number to predict (regression=true, in Python classes=0) or an id (label=COLUMN "
                "names another column)")
    comma = next((name for name in names if "," in name), "")
    if comma and all(NUMBER.fullmatch(name) for name in names):
        return (f"the labels are {len(counts)} different texts for {len(y)} samples{how}, each taken as a class; they "
                f"look like numbers with commas, such as {comma}: take commas that mark thousands out of the file, or "
                "read decimal ones in a csv file with decimal=comma, to predict numbers")
    return (f"the labels are {len(counts)} different names for {len(y)} samples{how}, each taken as a class; this "
            "looks like an id or free text (label=COLUMN names another column)")


def alike(names: Iterable[str]) -> list[list[str]]:
    """Names that differ in case or blanks alone, those that are alike together."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(" ".join(name.casefold().split()), []).append(name)
    return [each for each in found.values() if len(each) > 1]


def _some(names: Sequence[str], most: int = 12) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
