"""From what was typed to an experiment, from an experiment to its runs, and back from a folder."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path

from coterie import presets, registry
from coterie.cli.app import console
from coterie.cli.printing import print_results, say_notes
from coterie.errors import CoterieError
from coterie.report import logs
from coterie.report.progress import Live
from coterie.report.table import by_method, to_csv
from coterie.running import runs, saved
from coterie.running.experiment import Experiment, check_clients, with_settings
from coterie.running.folder import Folder, environment


def either(path: str | None, data: str | None) -> str | None:
    """The data, named with --data or without it."""
    if path is not None and data is not None:
        raise CoterieError(f"'{path}' and --data {data} both name the data; give one of them.")
    return data if path is None else path


def experiment_of(
    config: Path | None, data: str | None, partition: str | None, clients: int | None, unseen: int | None,
    model: str | None, head: str | None, rounds: int | None, settings: list[str], methods: tuple[str, ...],
    default_methods: tuple[str, ...] = (), churn: str | None = None, preset: str | None = None,
    data_dir: str | None = None,
) -> Experiment:
    """The file's or the preset's experiment, overridden by what the command line says."""
    if config is not None and preset is not None:
        raise CoterieError("--config and --preset both name a whole experiment; use one of them.")
    base = Experiment() if config is None else Experiment.read(config)
    base = base if preset is None else presets.load(preset)
    given = {"data": data, "partition": partition, "clients": clients, "unseen": unseen, "model": model, "head": head,
             "churn": churn, "data_dir": data_dir}
    changed = {name: value for name, value in given.items() if value is not None}
    base = Experiment.of({**base.record(), **changed}, "the command line")
    base = replace(base, methods=registry.expand(methods or base.methods or default_methods))
    return with_settings(base, [*([f"rounds={rounds}"] if rounds is not None else []), *settings])


def go_on(
    experiment: Experiment, folder: Path, single: bool, resume: bool, log: Sequence[str] = (),
    clients: int | None = None,
) -> None:
    """Build the parts, run what is left of the experiment, print and draw."""
    for kind in log:
        logs.require_logger(kind)
    chosen = experiment.chosen()
    federation = check_clients(experiment.federation(), clients)
    say_notes(federation)
    factory = experiment.factory(federation)
    training = {f.name: getattr(experiment.training, f.name) for f in fields(experiment.training)}
    if not resume:
        reason = runs.check(chosen, factory, federation, head=experiment.head, **training)
        if reason:
            console.print(f"{reason}. Clients are trained one after another: the same results, slower.", markup=False,
                          highlight=False, soft_wrap=True)
        write_experiment(folder, experiment, single)
    with ExitStack() as open_ones, Live(experiment.count(single)) as live:
        if single:
            started = resume and (folder / "config.json").exists()
            first = Folder(folder).load()[1]["round"] if started and Folder(folder).checkpoint.exists() else 0
            asked = {k: v for k, v in experiment.record().items() if k not in ("training", "methods")} | training
            name = registry.spelling(chosen[0])
            told = [open_ones.enter_context(logs.Log(kind, folder, name, asked, first)) for kind in log]
            results = [
                runs.run(chosen[0], factory, federation, folder=folder, watch=logs.several(live, *told), resume=started,
                         head=experiment.head, **training)
            ]
        else:
            seeds = range(experiment.training.seed, experiment.training.seed + experiment.seeds)
            del training["seed"]
            results = runs.compare(chosen, factory, federation, seeds=list(seeds), folder=folder, watch=live,
                                   resume=resume, head=experiment.head, **training)
    from coterie.report.bubbles import bubbles
    from coterie.report.conflicts import conflicts, opposed
    from coterie.report.plots import newcomers, picture

    print_results(results, experiment.published)
    to_csv(results, folder / "comparison.csv")
    drawn = [picture(results, folder / "picture.png"), bubbles(federation, folder / "clients.png")]
    if any(len(opposed(group)[0]) for group in by_method(results).values()):
        drawn.append(conflicts(results, folder / "conflicts.png"))
    if any(result.arrives for result in results):
        drawn.append(newcomers(results, folder / "newcomers.png"))
    console.print(f"pictures: {', '.join(map(str, drawn))}")
    console.print(f"run folder: {folder}")


def write_experiment(folder: Path, experiment: Experiment, single: bool) -> None:
    if (folder / saved.EXPERIMENT).exists():
        if saved.read_experiment(folder)[0].record() != experiment.record():
            raise CoterieError(f"{folder} already holds a run of another experiment; choose another --out.")
        raise CoterieError(f"{folder} already holds a run; `coterie resume {folder}` goes on, or choose another --out.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        record = {"single": single, "experiment": experiment.record(), "command": ["coterie", *sys.argv[1:]],
                  **saved.keep_model_file(experiment, folder)}
        (folder / saved.EXPERIMENT).write_text(json.dumps({**record, "environment": environment()}, indent=2) + "\n")
    except OSError as reason:
        raise CoterieError(f"the run folder {folder} cannot be written: {reason.strerror}.") from reason


def saved_experiment(folder: Path) -> tuple[Experiment, bool]:
    experiment, single, note = saved.read_experiment(folder)
    if note:
        print(f"coterie: {note}", file=sys.stderr)
    return experiment, single


def opened_run(run: Path, model: str | None) -> saved.Saved:
    opened = saved.Saved.open(run, model)
    if opened.note:
        print(f"coterie: {opened.note}", file=sys.stderr)
    return opened


def fresh_folder(name: str) -> Path:
    return next(p for p in (Path("runs") / f"{name}-{k}" for k in itertools.count(1)) if not p.exists())
