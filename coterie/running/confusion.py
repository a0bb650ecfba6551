"""Confusion matrices of a run: which class is taken for which, client by client, at the rounds that are reported.

A line of confusion.jsonl is one stage of one evaluation. It is written when the evaluation is the best so far on
validation data, and at the end of the run, so the chosen and the last round are always there; most cells are 0, so
only the others are listed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.errors import CoterieError

FILE = "confusion.jsonl"

Counts = NDArray[np.int64]


class Confusion(NamedTuple):
    """The matrices of one stage, in the order of the clients in the scores of that stage and round."""

    counts: Counts
    """`[clients, classes, classes]`: test samples by label (row) and answer (column)."""
    classes: tuple[str, ...]
    """The classes' names; their numbers where they have none."""
    round: int


def class_names(recipe: Mapping[str, Any], classes: int) -> tuple[str, ...]:
    """The names that a federation's recipe holds, or numbers."""
    named = tuple(str(name) for name in recipe.get("classes") or ())
    return named if len(named) == classes else tuple(str(k) for k in range(classes))


def line(stage: str, t: int, counts: Counts) -> str:
    """One stage of the evaluation after t rounds, as it is written."""
    flat = counts.reshape(-1)
    cells = np.flatnonzero(flat)
    record = {"round": t, "stage": stage, "shape": list(counts.shape), "cells": cells.tolist(),
              "counts": flat[cells].tolist()}
    return json.dumps(record) + "\n"


def read(path: Path, stage: str, t: int, clients: int, classes: Sequence[str]) -> Confusion | None:
    """The matrices of a stage after t rounds; None where the file does not hold them."""
    if not path.is_file():
        return None
    try:
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(text)
            except ValueError:
                break  # a killed run may have left half a line
            if (record["round"], record["stage"]) != (t, stage):
                continue
            shape = tuple(int(n) for n in record["shape"])
            if shape != (clients, len(classes), len(classes)):
                raise ValueError(f"counts of shape {shape}, not {(clients, len(classes), len(classes))}")
            counts = np.zeros(shape, dtype=np.int64)
            np.add.at(counts.reshape(-1), np.array(record["cells"], dtype=np.int64), record["counts"])
            return Confusion(counts, tuple(classes), t)
    except OSError as reason:
        raise CoterieError(f"{path} cannot be read: {reason.strerror}.") from reason
    except (LookupError, TypeError, ValueError, ArithmeticError, RecursionError) as reason:
        raise CoterieError(f"{path} is damaged: {type(reason).__name__}: {reason}.") from reason
    return None
