"""Methods with a few models: who uses which, by how much, how far the models are apart, and whether they collapsed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from coterie.contract.metric import Scale
from coterie.report.series import thinned
from coterie.report.watched import scale_named
from coterie.running.folder import Folder
from coterie.running.result import Result

ONE_FOR_ALL = 0.9
"""Collapsed: one model is used by at least this share of the clients."""
ALIKE = 0.1
"""Collapsed: the two models farthest apart differ by at most this part of the way the models have gone."""
BY_MODEL = ("mass", "clients_per_model", "importance")
"""Names of numbers by model in rounds of earlier versions, whose runs do not say their method's `by_model`."""


def few(group: Sequence[Result], folders: Sequence[Folder], clients: int, points: int) -> dict[str, Any] | None:
    """What the runs of one method recorded of their models; details are those of the first seed that collapsed, if any.

    None where the method has one model, or a model per client. `verdict` is `collapsed`, `one` (the clients were never
    split), `healthy`, or `unknown` where the run did not record enough; `words` say it.
    """
    ends = [folder.models() for folder in folders]
    recorded = [_recorded(run) for run in group]
    numbers = [_numbers(run, words(folder)) for run, folder in zip(group, folders)]
    if not any(ends) and not any(len(found["rounds"]) for found in recorded) and not any(numbers):
        return None
    judgements = [judged(end) if end else None for end in ends]
    first = _shown(judgements)
    end, over = ends[first], recorded[first]
    if end and not _finite(end["apart"], end["moved"]):
        end = None  # which of such models is nearest means nothing
    kept = thinned(len(over["w"]), points).tolist()
    found = {
        "seed": group[first].seed, "models": _models(end, over, numbers[first]),
        "rounds": [over["rounds"][i] for i in kept] if over["w"] else [],
        "w": [_table(over["w"][i], over["clients"][i], clients) for i in kept] if over["w"] else [],
        "alpha": [_line(over["alpha"][i], over["clients"][i], clients) for i in kept] if any(over["alpha"]) else [],
        "mass": _mass(numbers[first], points), "apart": _apart([over["apart"][i] for i in kept]),
        "end": None, "verdict": "unknown", "words": "", "worth": None, "unweighed": "",
    }
    if not any(line for i in kept for line in _table(over["w"][i], over["clients"][i], clients)):
        why = _unweighed(over, group[first], folders[first])
        found |= {"rounds": [], "w": [], "alpha": [], "apart": [], "unweighed": why}
    if end:
        scale = scale_named(str(end["metric"]), group)
        found |= {"end": _json(end) | {"scale": asdict(scale)}, "worth": worth(end, scale)}
    told = judgements[first]
    if told is not None:
        found["verdict"], found["words"] = told[0], told[1] + _in_how_many(judgements)
    else:
        found["words"] = f"Which model a client uses is unknown: {_unknown(folders[first])}."
    return found


def _unknown(folder: Folder) -> str:
    """Why a run does not say which model a client uses."""
    if "job" in folder.config():
        return "real sites keep to themselves which one they take"
    return EARLIER if folder.finished else "the run is not finished, and it is recorded at the end"


def _unweighed(over: dict[str, list[Any]], run: Result, folder: Folder) -> str:
    """Why there are no weights of clients to show."""
    if over["w"]:
        why = "none of them is a number, as the training diverged"
    elif math.isfinite(run.epsilon):
        why = "with the aggregator private, the server sees no client's own"
    elif len(run.history) < 2:
        why = "no round was evaluated yet"
    elif "by_model" in folder.config():
        why = "this method's clients weigh for themselves, and the server is not told"
    else:
        why = EARLIER
    return f"There are no weights w and alpha to show: {why}."


EARLIER = "the run was made by an earlier version, which did not record it"


def _finite(*tables: Any) -> bool:
    return all(bool(np.isfinite(np.array(table, dtype=float)).all()) for table in tables)


def words(folder: Folder) -> tuple[str, ...]:
    """The names under which the run's method may report how much each of its models was used; usually one."""
    config = folder.config()
    return (str(config["by_model"]),) if "by_model" in config else BY_MODEL


def judged(end: dict[str, Any]) -> tuple[str, str]:
    """The verdict on one finished run and the words for it."""
    apart, moved = np.array(end["apart"]), np.array(end["moved"])
    models, choice = len(apart), np.array(end["choice"])
    if not _finite(apart, moved):
        return "unknown", f"The {models} models hold values that are no numbers: the training diverged."
    if models == 1:
        return "one", "There is one model only: the clients were never split."
    share = np.bincount(choice, minlength=models) / max(len(choice), 1)
    most = int(share.argmax())
    relative = float(apart.max() / max(moved.mean(), 1e-12))
    if relative <= ALIKE:
        return "collapsed", (
            f"The {models} models have collapsed into one: they are nearly identical. The two farthest apart differ by "
            f"{_percent(relative)} of the way they have gone from their start."
        )
    if share[most] >= ONE_FOR_ALL:
        return "collapsed", (
            f"The {models} models have collapsed into one: model {most + 1} is used by {_percent(share[most])} of the "
            f"clients, the other{'s' if models > 2 else ''} by {'nobody' if share[most] == 1 else 'nearly nobody'}."
        )
    unused = [str(k + 1) for k in range(models) if share[k] == 0]
    idle = f" Model{'s' if len(unused) > 1 else ''} {', '.join(unused)} {'are' if len(unused) > 1 else 'is'} unused."
    return "healthy", (
        f"The {models} models share the clients: the one used most serves {_percent(share[most])} of them, and the two "
        f"farthest apart differ by {_percent(relative)} of the way they have gone." + (idle if unused else "")
    )


def worth(end: dict[str, Any], scale: Scale) -> float | None:
    """What choosing is worth: the mean test value of the clients' own choices minus that of the best single model.

    Positive is good: where lower is better the sign is turned.
    """
    test = np.array(end["test"], dtype=float)  # [M, K]
    there = np.isfinite(test).all(1)
    if not there.any():
        return None
    own = test[there, np.array(end["choice"])[there]].mean()
    return float(round(scale.sign * own - (scale.sign * test[there].mean(0)).max(), 5)) + 0.0  # never -0


def _shown(judgements: Sequence[tuple[str, str] | None]) -> int:
    """The run whose details are shown: the first that collapsed, else the first that is finished."""
    fallen = [i for i, told in enumerate(judgements) if told and told[0] == "collapsed"]
    return (fallen or [i for i, told in enumerate(judgements) if told] or [0])[0]


def _in_how_many(judgements: Sequence[tuple[str, str] | None]) -> str:
    """In how many seeds the models collapsed; nothing is said where none did, or where there is one seed."""
    finished = [told for told in judgements if told]
    fallen = sum(told[0] == "collapsed" for told in finished)
    if not fallen or len(finished) < 2:
        return ""
    return f" It is so in {'all' if fallen == len(finished) else f'{fallen} of'} {len(finished)} seeds."


def _recorded(run: Result) -> dict[str, list[Any]]:
    """What evaluated rounds recorded, the clients' numbers beside it."""
    reports = [(int(r["round"]) + 1, r["report"]) for r in run.rounds if "w" in r["report"]]
    return {
        "rounds": [t for t, _ in reports], "w": [report["w"] for _, report in reports],
        "alpha": [report.get("alpha") for _, report in reports],
        "apart": [report.get("apart") for _, report in reports],
        "clients": [report.get("clients", range(len(report["w"]))) for _, report in reports],
    }


def _numbers(run: Result, names: Sequence[str]) -> list[tuple[int, list[float]]]:
    """Round by round, how much each model was used, under the first of these names that the round reports."""
    found = [(int(r["round"]) + 1, [r["report"][name] for name in names if name in r["report"]]) for r in run.rounds]
    return [(t, numbers[0]) for t, numbers in found if numbers]


def _models(end: dict[str, Any] | None, over: dict[str, list[Any]], numbers: list[tuple[int, list[float]]]) -> int:
    if end:
        return len(end["apart"])
    if over["w"]:
        return len(over["w"][-1][0])
    return len(numbers[-1][1]) if numbers else 1


def _table(w: list[list[float]], ids: Sequence[int], clients: int) -> list[list[int] | None]:
    """Per cent `[clients][K]`; None for who did not take part."""
    table: list[list[int] | None] = [None] * clients
    for client, line in zip(ids, w):
        table[client] = [round(100 * value) for value in line] if np.isfinite(line).all() else None
    return table


def _line(alpha: list[float] | None, ids: Sequence[int], clients: int) -> list[float | None]:
    line: list[float | None] = [None] * clients
    for client, value in zip(ids, alpha or ()):
        line[client] = float(f"{value:.3g}") if math.isfinite(value) else None
    return line


def _apart(tables: Sequence[Any]) -> list[Any]:
    """The distances between models, round by round; None where they are no numbers."""
    return [table if table and _finite(table) else None for table in tables] if any(tables) else []


def _mass(numbers: list[tuple[int, list[float]]], points: int) -> dict[str, Any] | None:
    """The share of the training that each model got, round by round: of the weights, or of the clients."""
    found = [(t, [round(m / sum(mass), 4) for m in mass]) for t, mass in numbers if 0 < sum(mass) < math.inf]
    if not found:
        return None
    kept = thinned(len(found), 2 * points).tolist()
    return {"rounds": [found[i][0] for i in kept], "share": [found[i][1] for i in kept]}


def _json(end: dict[str, Any]) -> dict[str, Any]:
    test = [[v if math.isfinite(v) else None for v in line] for line in end["test"]]
    return {name: end[name] for name in ("round", "choice", "apart", "moved")} | {"test": test}


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.095 or share == 0 else f"{100 * share:.1f} %"
