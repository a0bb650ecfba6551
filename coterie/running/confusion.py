"""Confusion matrices of a run: which class is taken for which, client by client, at the rounds that are reported.

A line of confusion.jsonl is one stage of one evaluation. It is written when the evaluation is the best so far on
validation data, and at the end of the run, so the chosen and the last round are always there; most cells are 0, so
only the others are listed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie import files
from coterie.errors import CoterieError
from coterie.evaluation.score import Evaluation
from coterie.evaluation.stages import basis
from coterie.evaluation.summary import chosen_round
from coterie.metrics.confusion import ByLabelAndAnswer

FILE = "confusion.jsonl"
CONFUSION = f"{ByLabelAndAnswer().tally}.counts"
"""What the counts are called among the sums of a stage."""
MOST_CELLS = 1_000_000
"""Clients times classes times classes that are counted, at most; a run with more has no matrices."""

Counts = NDArray[np.int64]


class Confusion(NamedTuple):
    """The matrices of one stage, in the order of the clients in the scores of that stage and round."""

    counts: Counts
    """`[clients, classes, classes]`: test samples by label (row) and answer (column)."""
    classes: tuple[str, ...]
    """The classes' names; their numbers where they have none."""
    round: int


class Matrices:
    """Those of a run that goes on: of the evaluation that is best so far on validation data, and of the last one."""

    def __init__(self, write: Callable[[str, int, Counts], None] | None = None) -> None:
        """`write(stage, t, counts)` appends to a run folder's record; what it took is not held here."""
        self._write = write
        self.held: dict[tuple[str, int], Counts] = {}

    def keep(self, found: Evaluation, history: Sequence[Evaluation]) -> None:
        """The counts of an evaluation, the last of the history; earlier ones go unless they are the best."""
        best = {stage: chosen_round(history, basis(stage)) for stage in found.stages}
        self.held = {key: counts for key, counts in self.held.items() if best.get(key[0], key[1]) == key[1]}
        for stage, scores in found.stages.items():
            if scores.confusion is None:
                continue
            if self._write is not None and best[stage] == found.round:
                self._write(stage, found.round, scores.confusion)
            else:
                self.held[stage, found.round] = scores.confusion

    def end(self) -> None:
        """Write those of the last evaluation where they were not the best; before a checkpoint that counts them."""
        if self._write is not None:
            for (stage, t), counts in self.held.items():
                self._write(stage, t, counts)
            self.held = {}


def without(found: Evaluation) -> Evaluation:
    """The evaluation without its matrices, which would fill the memory of a long run."""
    return replace(found, stages={stage: replace(scores, confusion=None) for stage, scores in found.stages.items()})


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
    """The matrices of a stage after t rounds; None where the file does not hold them, or they are too many."""
    if not path.is_file() or clients * len(classes) ** 2 > MOST_CELLS:
        return None
    try:
        for text in files.read_text(path).splitlines():
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
