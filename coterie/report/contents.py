"""What a report shows, gathered from run folders as plain values: the page and the figures draw nothing else.

Numbers over clients come from the round chosen on validation data and are means over seeds, as in the table. What an
older run did not record is None, and a note says so.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import coterie
from coterie import files
from coterie.contract.metric import Scale
from coterie.errors import CoterieError
from coterie.evaluation.stages import ABOUT, SEEN, SERVED, STAGES, unseen
from coterie.report.arrivals import newcomers, schedule
from coterie.report.conflicts import alike, last_cosines, opposed
from coterie.report.confusion import CELLS, counted_by_client, matrices, recall, weakest
from coterie.report.federations import one_federation
from coterie.report.few_models import few
from coterie.report.header import facts, once, title, unlike
from coterie.report.missing import infinite, missing, over_flower
from coterie.report.plots import means_by_round
from coterie.report.series import Floats, finite, over_seeds, thinned
from coterie.report.table import Line, by_method, label_of, rows, scale_of, without_value
from coterie.report.verdict import answer
from coterie.report.watched import BY_CLASS, others
from coterie.running.experiment import EXPERIMENT, asked_for
from coterie.running.folder import Folder, consistent, edited, edits, inside
from coterie.running.result import Result
from coterie.running.server import NOTES

POINTS = 60
"""Evaluations of a curve that are kept, at most, evenly spaced and with the last one."""
TRACKED = 120_000
"""Numbers kept for the clients' own curves, at most; beyond that they are left out, and the page says so."""
WATCHED = 12
"""Metrics beside the one that decides that the page offers, at most."""
MATRIX = 120
"""Clients of a cosine matrix, at most, evenly spaced."""


def gather(paths: Sequence[Path]) -> dict[str, Any]:
    """Everything the page shows of these runs or comparisons, ready for JSON."""
    with consistent(paths):
        read = [(folder, folder.result()) for folder in runs_of(paths) if evaluated(folder)]
        if not read:
            raise CoterieError(f"{paths[0]} holds no evaluation yet; give it time, or resume it.")
        return told(read, paths)


def told(read: Sequence[tuple[Folder, Result]], paths: Sequence[Path]) -> dict[str, Any]:
    """The same of runs that have been read."""
    begun = len(read)
    one_federation([result for _, result in read])
    read, twice = once(read)
    results = [result for _, result in read]
    groups = by_method(results)
    scales = [scale_of(results[0]), *others(results)]
    lines = {scale.name: rows(results, scale=scale) for scale in scales[: 1 + WATCHED]}
    clients = _clients(read)
    budget = TRACKED // max(1, len(groups) * len(clients) * 2)
    methods = [
        _method(name, group, [folder for folder, result in read if result.method == name], len(clients), budget)
        | _seen_by(scales[0], group, len(clients), lines[scales[0].name])
        | {"watched": {s.name: _seen_by(s, group, len(clients), lines[s.name]) for s in scales[1 : 1 + WATCHED]}}
        for name, group in groups.items()
    ]
    recalled = _confusion(methods, groups, scales[0], len(clients))
    unfinished = sum(not folder.finished for folder, _ in read)
    experiments = list(filter(None, map(_experiment, paths)))
    waiting = _waiting(experiments, begun)
    changed = [f"{one['folder']}/{EXPERIMENT} was edited since the run began." for one in experiments if one["edited"]]
    partly = [said for name in lines if name != scales[0].name and not BY_CLASS.fullmatch(name)
             for said in without_value(lines[name])]
    notes = [*filter(None, [unlike(read, experiments), twice]), *changed, *partly, *_notes(read, budget, scales)]
    return {
        "title": title(paths), "metrics": [asdict(scale) for scale in scales[: 1 + WATCHED]],
        "coterie": coterie.__version__,
        "seeds": max(len(group) for group in groups.values()), "facts": facts(read, experiments, clients),
        **_churn(read),
        "answer": answer(results, unfinished + waiting),
        "stages": [{"name": stage, "unseen": unseen(stage), "about": ABOUT[stage]} for stage in SEEN],
        "clients": clients, "classes": _classes(read), "labels": labels_of(read[0][0].config()), "methods": methods,
        "recalled": recalled, "missing": missing(read),
        "notes": notes, "runs": _runs(read), "reproduce": _reproduce(read, experiments),
        "progress": _progress(read, waiting),
    }


def runs_of(paths: Sequence[Path]) -> list[Folder]:
    """The runs inside all the folders given, each once."""
    found: dict[Path, Folder] = {}
    for path in paths:
        here = inside(path)
        if not here:
            why = "it holds no config.json, nor does METHOD/seedK in it" if path.is_dir() else "it is a file"
            kind = f"is not a run folder: {why}" if path.exists() else "does not exist; give a run folder"
            raise CoterieError(f"{path} {kind}.")
        found |= {folder.path.resolve(): folder for folder in here}
    return list(found.values())


def evaluated(folder: Folder) -> bool:
    """Whether an evaluation was written: a whole line below the header."""
    try:
        with files.opened(folder.path / "clients.csv") as file:
            return file.readline().endswith("\n") and file.readline().endswith("\n")
    except FileNotFoundError:
        return False


# -- clients -----------------------------------------------------------------------------------------------------------


def _data(read: Sequence[tuple[Folder, Result]]) -> dict[str, Any] | None:
    """Who holds what, from the first run that recorded it with a validation split."""
    found = [data for folder, _ in read if (data := folder.data()) is not None]
    return max(found, key=lambda data: sum(data["sizes"]["val"]), default=None)


def _clients(read: Sequence[tuple[Folder, Result]]) -> list[dict[str, Any]]:
    data, result = _data(read), read[0][1]
    config = read[0][0].config()
    names = result.names or tuple(str(i) for i in range(1 + max(s.clients.max() for s in _last(result))))
    trained = int(config.get("population", len(names)))
    tested: dict[int, int] = {}
    for scores in (scores for evaluation in result.history for scores in evaluation.stages.values()):
        tested |= dict(zip(scores.clients.tolist(), scores.samples.tolist()))  # also of who has left since
    times = _times(config)
    return [
        {
            "name": name, "seen": i < trained, "test": tested.get(i, 0),
            "train": data["sizes"]["train"][i] if data else None, "val": data["sizes"]["val"][i] if data else None,
            "classes": data["histogram"][i] if data and "histogram" in data else None,
            **({"arrives": times[i][0], "leaves": times[i][1]} if i < len(times) else {}),
        }
        for i, name in enumerate(names)
    ]


def _times(config: dict[str, Any]) -> list[list[int | None]]:
    """When each client arrives and leaves, with churn; a damaged list is said to be so by `_churn`."""
    times = config.get("churn") or []
    whole = isinstance(times, list) and all(isinstance(one, list) and len(one) == 2 for one in times)
    return times if whole else []


def _last(result: Result) -> list[Any]:
    return list(result.history[-1].stages.values())


def _classes(read: Sequence[tuple[Folder, Result]]) -> int | None:
    data = _data(read)
    return None if data is None else int(data["classes"])


def labels_of(config: dict[str, Any]) -> list[str] | None:
    """The names of the classes, where the data had names for them."""
    names = config.get("federation", {}).get("classes")
    return [str(name) for name in names] if isinstance(names, list) and names else None


# -- methods -----------------------------------------------------------------------------------------------------------


def _method(name: str, group: list[Result], folders: list[Folder], clients: int, budget: int) -> dict[str, Any]:
    first = [stage for stage in STAGES if all(stage in run.stages for run in group)]
    return {
        "name": name, "label": label_of(name, SERVED), "labels": {stage: label_of(name, stage) for stage in SEEN},
        "seeds": [run.seed for run in group], "printed": group[0].printed,
        "spent": _spent(group, first[0]), "tracks": _tracks(group, first, clients, budget),
        "infinite": [stage for stage in first if any(infinite(run, stage) for run in group)],
        "conflicts": _conflicts(group, clients), "few": few(group, folders, clients, POINTS),
        **_newcomers(group, first),
    }


def _seen_by(scale: Scale, group: Sequence[Result], clients: int, lines: Sequence[Line]) -> dict[str, Any]:
    """A method by one metric: every client's value, the curves of the mean, and its lines of the table."""
    stages = [stage for stage in STAGES if all(stage in run.stages for run in group)]
    return {
        "values": {stage: _short(_values(group, stage, clients, scale), 6) for stage in stages},
        "curve": _curve(group, stages, scale),
        "lines": [_plain(line.record()) for line in lines if line.method == group[0].method],
    }


def _values(group: Sequence[Result], stage: str, clients: int, scale: Scale) -> Floats:
    """Each client's test value at the round reported, mean over seeds, by client number; NaN where it has none."""
    table = np.full((len(group), clients), np.nan)
    for line, run in zip(table, group):
        scores = run.at(stage).by(scale)
        line[scores.clients] = scores.test[scale.name]
    return over_seeds(finite(table))


def _curve(group: Sequence[Result], stages: Sequence[str], scale: Scale) -> dict[str, Any]:
    """The mean over clients by evaluated round, as mean over seeds, and its range over several seeds."""
    curve: dict[str, Any] = {}
    for stage in stages:
        rounds, means = means_by_round(group, stage, scale)
        means = means[:, thinned(len(rounds), POINTS)]
        curve[stage] = {"mean": _short(over_seeds(finite(means)), 6)}
        if len(group) > 1:
            curve[stage] |= {"low": _short(_low(means)), "high": _short(_high(means))}
    return curve


def _spent(group: Sequence[Result], stage: str) -> dict[str, Any]:
    """The rounds of the curves, and what had been sent and spent by then, as means over seeds."""
    rounds, _ = means_by_round(group, stage, scale_of(group[0]))
    rounds = rounds[thinned(len(rounds), POINTS)]
    bytes_by = np.array([_until(run, rounds, _sent) for run in group]).mean(0)
    seconds = np.array([_until(run, rounds, lambda r: float(r.get("seconds", 0))) for run in group]).mean(0)
    return {"rounds": rounds.astype(int).tolist(), "bytes": _short(bytes_by, 6), "seconds": _short(seconds)}


def _sent(record: dict[str, Any]) -> float:
    """Bytes of a round, all participants and both ways."""
    return float(record["participants"] * (sum(record["down"].values()) + sum(record["up"].values())))


def _until(run: Result, rounds: Floats, of: Callable[[dict[str, Any]], float]) -> Floats:
    """The sum over all rounds before each of `rounds`."""
    total = np.concatenate([[0.0], np.cumsum([of(record) for record in run.rounds])])
    found: Floats = total[np.minimum(rounds.astype(int), len(total) - 1)]
    return found


def _tracks(group: Sequence[Result], stages: Sequence[str], clients: int, budget: int) -> dict[str, Any] | None:
    """Every client's own curve, mean over seeds, at so many evaluations as the budget allows."""
    if budget < 2:
        return None
    rounds = [evaluation.round for evaluation in group[0].history]
    kept = [rounds[i] for i in thinned(len(rounds), min(budget, POINTS))]
    found: dict[str, Any] = {"rounds": kept}
    for stage in (stage for stage in stages if stage in SEEN):
        table = np.full((len(group), len(kept), clients), np.nan)
        for one, run in zip(table, group):
            for evaluation in run.history:
                if evaluation.round in kept and stage in evaluation.stages:
                    scores = evaluation.stages[stage]
                    one[kept.index(evaluation.round), scores.clients] = scores.test[scores.metric]
        found[stage] = [_short(line, 3) for line in over_seeds(finite(table)).T]
    apart = {unseen(stage): found[stage] for stage in SEEN if stage in found and unseen(stage) in stages}
    for stage, lines in apart.items():  # unseen clients have numbers of their own, so both fit one table
        for evaluation in group[0].history:
            if evaluation.round in kept and stage in evaluation.stages:
                scores = evaluation.stages[stage]
                for client, value in zip(scores.clients.tolist(), scores.test[scores.metric].tolist()):
                    lines[client][kept.index(evaluation.round)] = _short([value], 3)[0]
    return found


def _conflicts(group: Sequence[Result], clients: int) -> dict[str, Any] | None:
    """The share of opposing pairs by round, and the last recorded cosines with the clients they belong to, ordered."""
    rounds, fractions = opposed(group)
    if not len(rounds):
        return None
    matrix = last_cosines(group)
    found: dict[str, Any] = {"rounds": rounds.astype(int).tolist(), "opposing": _short(fractions), "cosines": None}
    if matrix is not None:
        record = next(r["report"] for run in group for r in reversed(run.rounds) if "cosines" in r["report"])
        ids = np.array(record.get("clients", range(len(matrix))))
        named = "clients" in record or len(matrix) == clients or len(group[0].at(SERVED).clients) == len(matrix)
        kept = thinned(len(matrix), MATRIX)
        matrix, ids = np.nan_to_num(matrix[np.ix_(kept, kept)]), ids[kept]
        order = alike(matrix)
        found["cosines"] = np.round(100 * matrix[np.ix_(order, order)]).astype(int).tolist()
        found["clients"] = ids[order].tolist() if named else None
    return found


def _confusion(
    methods: Sequence[dict[str, Any]], groups: Mapping[str, Sequence[Result]], scale: Scale, clients: int
) -> dict[str, Any]:
    """Add the matrices and the recall by class to every method, by stage; returns the classes that recall is shown of.

    Unseen clients are left out, as their stages are others.
    """
    counts = {
        (name, stage): found
        for name, group in groups.items() for stage in SEEN
        if (found := counted_by_client(group, stage, clients)) is not None
    }
    classes = weakest(list(counts.values()))
    for method in methods:
        method["confusion"] = {
            stage: {
                **matrices(found, _values(groups[name], stage, clients, scale), scale, CELLS // len(counts)),
                "recall": recall(found, classes),
            }
            for (name, stage), found in counts.items() if name == method["name"]
        }
    return {"classes": classes, "of": max((int((c.sum((0, 2)) > 0).sum()) for c in counts.values()), default=0)}


def _newcomers(group: Sequence[Result], stages: Sequence[str]) -> dict[str, Any]:
    """By stage, how newcomers fare by rounds since arrival; no key where nobody arrived."""
    read = {stage: newcomers(group, stage, POINTS) for stage in SEEN if stage in stages}
    short = {
        stage: {**one, **{name: _short(one[name], 6) for name in ("age", "mean", "start")}}
        for stage, one in read.items() if one is not None
    }
    return {"newcomers": short} if short else {}


def _churn(read: Sequence[tuple[Folder, Result]]) -> dict[str, Any]:
    """How many came and went in the rounds done, by the first run with churn; no key without one."""
    done = max(result.history[-1].round for _, result in read)
    folder = next((folder for folder, _ in read if folder.config().get("churn")), None)
    if folder is None:
        return {}
    try:
        return {"churn": schedule(folder.config()["churn"], done)}
    except (TypeError, ValueError) as reason:
        raise CoterieError(f"{folder.path / 'config.json'} is damaged: its churn is no list of rounds.") from reason


# -- what ran ----------------------------------------------------------------------------------------------------------


def _experiment(path: Path) -> dict[str, Any] | None:
    """What experiment.json holds, the folder, and how many runs were asked for; None for runs started from Python."""
    if not (path / EXPERIMENT).is_file():
        return None
    experiment, single, record = asked_for(path)
    return {**record, "folder": str(path), "wanted": experiment.count(single), "edited": edited(record)}


def _waiting(experiments: Sequence[dict[str, Any]], begun: int) -> int:
    """How many of the runs asked for have nothing to show yet."""
    return max(0, sum(int(experiment["wanted"]) for experiment in experiments) - begun)


def _progress(read: Sequence[tuple[Folder, Result]], waiting: int) -> dict[str, Any]:
    """Rounds done and asked for over all runs, also those that have not begun."""
    rounds = [int(folder.config()["training"]["rounds"]) for folder, _ in read]
    done = [asked if folder.finished else len(result.rounds) for (folder, result), asked in zip(read, rounds)]
    return {
        "runs": len(read) + waiting, "finished": sum(folder.finished for folder, _ in read),
        "rounds": sum(rounds) + waiting * max(rounds), "done": sum(done),
    }


def _notes(read: Sequence[tuple[Folder, Result]], budget: int, scales: Sequence[Scale]) -> list[str]:
    notes = [f"{path} was edited since the run began." for path in edits(Path(), {}, [folder for folder, _ in read])]
    if left := scales[1 + WATCHED :]:
        notes.append(f"Of the watched metrics, {WATCHED} can be looked at on this page; left out: "
                     f"{', '.join(scale.title for scale in left)}.")
    if _data(read) is None and not over_flower(read):
        notes.append("These runs were made by an earlier version, which did not record who holds which class.")
    if len({json.dumps(folder.config().get("churn")) for folder, _ in read}) > 1:
        notes.append("These runs differ in which clients are there in which rounds.")
    said = [note for folder, _ in read for note in (folder.config().get("federation") or {}).get("notes", ())]
    said += [note for folder, _ in read for note in folder.config().get("choices", {}).get(NOTES, ())]
    notes += [note[:1].upper() + note[1:] for note in dict.fromkeys(said)]
    if budget < 2:
        notes.append("There are so many clients that their own curves are left out of this page.")
    return notes


def _runs(read: Sequence[tuple[Folder, Result]]) -> list[dict[str, Any]]:
    return [
        {
            "method": result.method, "seed": result.seed, "folder": str(folder.path), "finished": folder.finished,
            "rounds": len(result.rounds), "seconds": round(result.seconds, 2),
        }
        for folder, result in read
    ]


def _reproduce(read: Sequence[tuple[Folder, Result]], experiments: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The commands as they were given, and the versions and machines they ran with."""
    environments = [folder.config().get("environment", {}) for folder, _ in read]
    environments = list({json.dumps(e, sort_keys=True): e for e in environments}.values())
    configs = []
    if not experiments:
        configs = [
            _set({key: folder.config()[key] for key in ("method", "training", "federation") if key in folder.config()})
            for folder, _ in read[:10]
        ]
    found = {
        "commands": [shlex.join(e["command"]) for e in experiments if "command" in e],
        "experiments": [{"folder": e["folder"], **_set(e["experiment"])} for e in experiments],
        "environments": environments, "configs": configs,
        "started": "by the server of real sites" if over_flower(read) else "from Python",
    }
    return {name: _numbers_spelled(value) for name, value in found.items()}


def _numbers_spelled(value: Any) -> Any:
    """The same with words for what JSON has no number for: `nan`, `inf`."""
    if isinstance(value, dict):
        return {name: _numbers_spelled(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_numbers_spelled(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _set(options: dict[str, Any]) -> dict[str, Any]:
    """Without options that nobody set, and without how a table was read, which is no option."""
    kept = {name: value for name, value in options.items() if value is not None and name != "encoding"}
    return {name: _set(value) if isinstance(value, dict) else value for name, value in kept.items()}


# -- numbers -----------------------------------------------------------------------------------------------------------


def _low(values: Floats) -> Floats:
    lowest: Floats = np.where(np.isfinite(values), values, np.inf).min(0)
    return lowest


def _high(values: Floats) -> Floats:
    highest: Floats = np.where(np.isfinite(values), values, -np.inf).max(0)
    return highest


def _short(values: Any, digits: int = 4) -> list[Any]:
    """As a list with so many significant digits; None for what is not a number, which JSON does not know."""
    return [None if not math.isfinite(v) else float(f"{v:.{digits}g}") for v in np.asarray(values, float).tolist()]


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
