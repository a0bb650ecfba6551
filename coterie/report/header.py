"""What ran, in the head of a report: the line of facts, and where runs shown together were not trained alike."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie.errors import CoterieError, counted
from coterie.report.federations import federation_words
from coterie.report.table import scale_of
from coterie.running.folder import Folder
from coterie.running.result import Result

Read = tuple[Folder, Result]

BESIDE = ("seed", "device", "wave", "state", "engine", "kernels", "capture", "prefix", "together", "checkpoint_every",
          "metric", "watch")
"""Training options that change no row of a model; the metric is said apart."""
NAMED = 6
"""Methods that are named in a sentence on runs trained otherwise, at most."""


def title(paths: Sequence[Path]) -> str:
    """The folders given, by as much of their path as tells them apart."""
    whole = [path.resolve() for path in paths]
    names = [path.name for path in whole]
    told = [n if names.count(n) == 1 else "/".join(path.parts[-2:]) for n, path in zip(names, whole)]
    return ", ".join(told[:3]) + (f" and {len(told) - 3} more" if len(told) > 3 else "")


def facts(
    read: Sequence[Read], experiments: Sequence[Mapping[str, Any]], clients: Sequence[Mapping[str, Any]]
) -> list[str]:
    """The line above the answer. What differs between the runs is said as a range or a list, never as the first's."""
    configs = [folder.config() for folder, _ in read]
    seen = sum(client["seen"] for client in clients)
    found = federation_words(max(configs, key=lambda c: "data" in (c.get("federation") or {})), len(clients), seen)
    models = _distinct(filter(None, (_model(folder, experiments) for folder, _ in read)))
    found += [f"model{'s' if len(models) > 1 else ''} {_listed(models)}"] if models else []
    rounds = sorted({int(config["training"]["rounds"]) for config in configs})
    rates = [f"{rate:g}" for rate in sorted({float(config["training"]["lr"]) for config in configs})]
    rounds_text = counted(rounds[0], "round") if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]} rounds"
    found.append(f"{rounds_text}, learning rate{'s' if len(rates) > 1 else ''} {_listed(rates)}")
    return [*found, _seeds(read), f"judged by {scale_of(read[0][1]).title}"]


def _seeds(read: Sequence[Read]) -> str:
    """Seeds of a method; where methods have other numbers of them, from the fewest to the most."""
    by_method: dict[str, set[int]] = {}
    for _, result in read:
        by_method.setdefault(result.method, set()).add(result.seed)
    counts = sorted({len(seeds) for seeds in by_method.values()})
    return counted(counts[0], "seed") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds a method"


def unlike(read: Sequence[Read], experiments: Sequence[Mapping[str, Any]]) -> str:
    """A sentence on runs that were not trained with the same model and options; empty where all were."""
    settings = [_settings(folder, experiments) for folder, _ in read]
    known = [name for name in settings[0] if all(name in one for one in settings)]  # earlier versions had fewer
    differ = [name for name in known if len({_text(one[name]) for one in settings}) > 1]
    if not differ:
        return ""
    groups: dict[str, list[Read]] = {}
    for run, one in zip(read, settings):
        groups.setdefault(_listed([f"{name} {_spelled(one[name])}" for name in differ]), []).append(run)
    methods = [{result.method for _, result in runs} for runs in groups.values()]
    apart = len(set().union(*methods)) == sum(map(len, methods))  # no method is in two groups
    said = "; ".join(f"{_called(runs, apart)} with {words}" for words, runs in groups.items())
    return (f"These runs were not trained alike: {said}. What sets their numbers apart may be that, and not the "
            "methods.")


def once(read: Sequence[Read]) -> tuple[list[Read], str]:
    """Each method and seed once, and a sentence on what was left out: baselines are in every comparison.

    A run that is there twice with the same scores is shown once; with other scores, nobody can know which is meant.
    """
    kept: dict[tuple[str, int], Read] = {}
    twice: list[str] = []
    for folder, result in read:
        before = kept.setdefault((result.method, result.seed), (folder, result))
        if before[0] is folder:
            continue
        if _scores(before[0]) != _scores(folder):
            raise CoterieError(
                f"{result.method} with seed {result.seed} is in {before[0].path} and in {folder.path}, with other "
                "numbers; a report shows each method and seed once, so give it only one of these folders."
            )
        twice.append(result.method)
    if not twice:
        return list(kept.values()), ""
    names = _distinct(twice)
    there, shown = ("is", "it is shown") if len(names) == 1 else ("are", "they are shown")
    said = f"{_listed(names)} {there} in several of the folders with the same numbers; {shown} once."
    return list(kept.values()), said


# -- small words -------------------------------------------------------------------------------------------------------


def _settings(folder: Folder, experiments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    config = folder.config()
    model = _model(folder, experiments)
    found: dict[str, Any] = {"model": model} if model else {}
    found |= {"loss": config["loss"]} if config.get("loss") else {}
    found |= {name: value for name, value in config["training"].items() if name not in BESIDE}
    if "columns" in config and not model:
        found["parameters"] = config["columns"]
    return found


def _model(folder: Folder, experiments: Sequence[Mapping[str, Any]]) -> str:
    """As it was asked for on the command line or in a server's file; empty for a module handed in from Python."""
    here = folder.path.resolve()
    for one in experiments:
        if here.is_relative_to(Path(one["folder"]).resolve()):
            return str(one["experiment"].get("model", ""))
    job = folder.config().get("job")
    return str(job.get("model", "")) if isinstance(job, dict) else ""


def _called(runs: Sequence[Read], apart: bool) -> str:
    names = [result.method if apart else f"{result.method} (seed {result.seed})" for _, result in runs]
    names = _distinct(names)
    return _listed(names if len(names) <= NAMED else [*names[: NAMED - 1], f"{len(names) - NAMED + 1} more"])


def _scores(folder: Folder) -> bytes:
    """Every client's scores, as the run wrote them."""
    return (folder.path / "clients.csv").read_bytes()


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _distinct(names: Any) -> list[str]:
    return list(dict.fromkeys(names))


def _spelled(value: Any) -> str:
    return "not set" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
