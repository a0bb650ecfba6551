"""Why a section of the report has nothing to show: the true reason, in a sentence, of these very runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np

from coterie.errors import counted
from coterie.evaluation.stages import SEEN, unseen
from coterie.running.confusion import MOST_CELLS
from coterie.running.folder import Folder
from coterie.running.result import Result, When

Read = tuple[Folder, Result]


def missing(read: Sequence[Read]) -> dict[str, Any]:
    """Sentences by section: `classes`, `sizes`, `conflicts`, `unseen`, and `confusion` by method and stage.

    A section that has something to show has none.
    """
    found: dict[str, Any] = {"classes": _classes(read), "sizes": _sizes(read), "conflicts": _conflicts(read),
                             "unseen": _unseen(read), "confusion": _matrices(read)}
    return {name: why for name, why in found.items() if why}


def over_flower(read: Sequence[Read]) -> bool:
    """Whether real sites trained all of them, whose server is told scores and no more."""
    return all("job" in folder.config() for folder, _ in read)


def _sizes(read: Sequence[Read]) -> str:
    if any(folder.data() is not None for folder, _ in read):
        return ""
    if over_flower(read):
        return "Real sites hold these data: their server is not told how many training samples a site has."
    return "An earlier version made these runs; it did not record how many training samples a client has."


def _classes(read: Sequence[Read]) -> str:
    described = [data for folder, _ in read if (data := folder.data()) is not None]
    if any("histogram" in data or not data.get("classes") for data in described):
        return ""
    if described:
        return f"With {_many(read[0][1], int(described[0]['classes']))}, who holds which class is too much to record."
    if over_flower(read):
        return "Real sites hold these data: their server is not told who holds which class."
    return "An earlier version made these runs; it did not record who holds which class."


def _matrices(read: Sequence[Read]) -> dict[str, dict[str, str]]:
    """Of every method and stage without confusion matrices, for data with classes."""
    by_method: dict[str, list[Read]] = {}
    for folder, result in read:
        by_method.setdefault(result.method, []).append((folder, result))
    found: dict[str, dict[str, str]] = {}
    for name, runs in by_method.items():
        for stage in (stage for stage in SEEN if all(stage in run.stages for _, run in runs)):
            if all(not run.classes or run.confusion(stage) is None for _, run in runs):
                found.setdefault(name, {})[stage] = _no_matrix(runs)
    return found


def _no_matrix(runs: Sequence[Read]) -> str:
    classes = len(runs[0][1].classes)
    if not classes:
        return "The targets are numbers: there are no classes to confuse."
    if len(runs[0][1].names) * classes**2 > MOST_CELLS:
        return f"With {_many(runs[0][1], classes)}, confusion matrices are too much to record."
    if over_flower(runs):
        return 'These sites told their scores alone; scores = "full" in the server\'s file asks for the counts as well.'
    if not all(folder.finished for folder, _ in runs):
        return "The matrices of the last evaluation are recorded when the run ends; it is not finished."
    return "An earlier version made these runs; it recorded no answers."


def _conflicts(read: Sequence[Read]) -> str:
    rounds = [record for _, run in read for record in run.rounds]
    if any(_number(record["report"].get("opposing")) for record in rounds):
        return ""
    results = [run for _, run in read]
    if not rounds or all(len(run.history) < 2 for run in results):
        return "No round was evaluated yet, so no angles between updates were recorded."
    if max(int(record["participants"]) for record in rounds) < 2:
        return "One client takes part in a round: there are no two updates to compare."
    if not any("update" in record["up"] for record in rounds):
        return "None of these methods uploads an update, so there are no angles between updates."
    if all(math.isfinite(run.epsilon) for run in results if any("update" in record["up"] for record in run.rounds)):
        return "With the aggregator private, the server sees a noisy mean and no client's update."
    if any(infinite(run, stage) for run in results for stage in run.stages if stage in SEEN):
        return "The training diverged: the updates are no numbers and have no angles between them."
    return "No round recorded the angles between updates: fewer than two clients moved."


def _unseen(read: Sequence[Read]) -> str:
    names, trained = read[0][1].names, int(read[0][0].config().get("population", len(read[0][1].names)))
    if any(unseen(stage) in run.stages for _, run in read for stage in SEEN):
        return ""
    if len(names) > trained:
        return f"{counted(len(names) - trained, 'client')} kept out of training, and no run was evaluated on them."
    return ("No client was kept out of training; --unseen 4 keeps four, and shows what a client gets that arrives "
            "later.")


def infinite(run: Result, stage: str) -> bool:
    """Whether a client's test loss is no finite number, at the round reported or at the last: the training diverged."""
    found = [run.at(stage, when) for when in get_args(When)]
    return not all(np.isfinite(scores.test["loss"][scores.samples > 0]).all() for scores in found)


def _many(run: Result, classes: int) -> str:
    return f"{counted(len(run.names), 'client')} and {counted(classes, 'class', 'classes')}"


def _number(value: Any) -> bool:
    return value is not None and math.isfinite(value)
