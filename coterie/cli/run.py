"""Training: run, compare, resume."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from textwrap import shorten
from typing import Annotated

import typer

from coterie import registry
from coterie.cli.app import command, console
from coterie.cli.arguments import (
    AdapterOption,
    ChurnOption,
    ClientsOption,
    ConfigOption,
    DataDirOption,
    DataOption,
    FreezeOption,
    HeadOption,
    LogOption,
    LossOption,
    MetricOption,
    ModelOption,
    OutOption,
    PartitionOption,
    PresetOption,
    RoundsOption,
    SetOption,
    TrainOption,
    TrustOption,
    UnseenOption,
    WatchOption,
    by_default,
    experiment_of,
)
from coterie.cli.printing import print_results, saved_experiment
from coterie.errors import CoterieError, NoMemory, say
from coterie.report import logs
from coterie.report.progress import Live
from coterie.report.table import to_csv
from coterie.running.experiment import DEFAULT_METHODS, Experiment, check_clients, recorded, with_settings
from coterie.running.folder import fresh
from coterie.running.training import Training


@command("run")
def run_command(
    method: Annotated[str | None, typer.Argument(help="fedfew, fedfew:models=5, fedfew:official, my.py:Mine")] = None,
    data: DataOption = None, partition: PartitionOption = None, clients: ClientsOption = None,
    unseen: UnseenOption = None, model: ModelOption = None, head: HeadOption = None,
    adapter: AdapterOption = None, freeze: FreezeOption = None, train: TrainOption = None, loss: LossOption = None,
    rounds: RoundsOption = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help=by_default("Same seed, same result.", Training, "seed"))
    ] = None,
    metric: MetricOption = None, watch: WatchOption = None, settings: SetOption = None,
    config: ConfigOption = None, preset: PresetOption = None,
    data_dir: DataDirOption = None, churn: ChurnOption = None, out: OutOption = None, log: LogOption = None,
    trust: TrustOption = False,
) -> None:
    """Train one method and score every client."""
    extra = [f"seed={seed}"] if seed is not None else []
    experiment = experiment_of(
        config, data, partition, clients, unseen, model, head, rounds, [*extra, *(settings or [])],
        (method,) if method else (), churn=churn, preset=preset, data_dir=data_dir, freeze=freeze, train=train,
        loss=loss, metric=metric, watch=watch, trust=trust, adapter=adapter,
    )
    if len(experiment.methods) != 1:
        named = ", ".join(experiment.methods) or "none is named"
        raise CoterieError(f"run trains one method ({named}); `coterie methods` lists them, compare takes several.")
    folder = out or fresh(registry.method(experiment.methods[0]).name)
    go_on(experiment, folder, single=True, resume=False, log=log or (), clients=clients)


@command("compare")
def compare_command(
    named: Annotated[
        list[str] | None,
        typer.Argument(metavar="[METHODS]...", help="fedper, fedfew:models=3, ... or all; local and fedavg always take "
                       f"part.  [default: {' '.join(DEFAULT_METHODS)}]"),
    ] = None,
    methods: Annotated[
        list[str] | None, typer.Option("--methods", help="A further method, repeatable; all stands for every one.")
    ] = None,
    data: DataOption = None, partition: PartitionOption = None, clients: ClientsOption = None,
    unseen: UnseenOption = None, model: ModelOption = None, head: HeadOption = None,
    adapter: AdapterOption = None, freeze: FreezeOption = None, train: TrainOption = None, loss: LossOption = None,
    rounds: RoundsOption = None,
    seeds: Annotated[
        int | None, typer.Option("--seeds", help=by_default("Runs of each method.", Experiment, "seeds"))
    ] = None,
    metric: MetricOption = None, watch: WatchOption = None, settings: SetOption = None,
    config: ConfigOption = None, preset: PresetOption = None,
    data_dir: DataDirOption = None, churn: ChurnOption = None, out: OutOption = None, trust: TrustOption = False,
) -> None:
    """Train several methods on the same clients; one table."""
    experiment = experiment_of(config, data, partition, clients, unseen, model, head, rounds, settings or [],
                               (*(named or ()), *(methods or ())), DEFAULT_METHODS, churn=churn, preset=preset,
                               data_dir=data_dir, seeds=seeds, freeze=freeze, train=train, loss=loss, metric=metric,
                               watch=watch, trust=trust, adapter=adapter)
    usual = not named and not methods and config is None and preset is None
    go_on(experiment, out or fresh("compare"), single=False, resume=False, clients=clients, usual=usual)


COMPUTED = ("wave", "together", "prefix", "state")
"""Options that say how a run is computed and not what it computes, but for the last bits of sums."""


@command("resume")
def resume_command(
    run: Annotated[Path, typer.Argument(help="A run folder, or a comparison's.")], log: LogOption = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help=f"{', '.join(COMPUTED)}: what a run computes at once, where "
                                       "memory ran out, e.g. --set wave=8; may be repeated.")
    ] = None,
    trust: TrustOption = False,
) -> None:
    """Go on with a run that was stopped or killed.

    The result is the same as without the interruption.
    """
    for setting in settings or ():
        if setting.partition("=")[0] not in COMPUTED:
            raise CoterieError(f"a run that has begun can change {', '.join(COMPUTED)}, not {setting}; the rest is "
                               "part of its result.")
    if (run / "dissect.json").is_file():
        from coterie.cli import dissect  # late: its own room

        dissect.go_on(run, trust, settings or ())
        return
    experiment, single = saved_experiment(run, trust)
    experiment = with_settings(experiment, settings or ())
    if log and not single:
        raise CoterieError("--log writes one run; `coterie report` and `coterie watch` read a comparison's runs.")
    go_on(experiment, run, single, resume=True, log=log or ())


def _with_command(reason: NoMemory, folder: Path) -> CoterieError:
    """What ran out of memory, and what to type."""
    chosen = "".join(f" --set {setting}" for setting in reason.settings)
    if not chosen:
        return reason
    return CoterieError(f"{reason} " + (f"Start anew with{chosen}." if reason.anew else
                                        f"`coterie resume {folder}{chosen}` goes on."))


def go_on(
    experiment: Experiment, folder: Path, single: bool, resume: bool, log: Sequence[str] = (),
    clients: int | None = None, usual: bool = False,
) -> None:
    """Run what is left of the experiment, print and draw; of the `usual` methods those that its clients can run."""
    for kind in log:
        logs.require_logger(kind)
    federation = check_clients(experiment.federation(recorded(folder) if resume else None), clients)
    say(federation.recipe.get("notes", ()))
    if usual:
        experiment, left_out = experiment.fitting(federation.arrived(0))
        say(left_out)
    task = shorten(federation.task, 150, placeholder=" ...")
    console.print(f"task: {task}", soft_wrap=True)
    prepared = experiment.prepare(federation, folder, single, resume)
    say(prepared.notes)
    if not resume:
        if prepared.reason:
            console.print(f"{prepared.reason}. Clients are trained one after another: the same results, slower.",
                          soft_wrap=True)
        experiment.keep(folder, single, ["coterie", *sys.argv[1:]])
    with ExitStack() as open_ones, Live(experiment.count(single)) as live:
        asked = {k: v for k, v in experiment.record().items() if k not in ("training", "methods")}
        sinks = [
            open_ones.enter_context(
                logs.Log(kind, folder, prepared.spelling, asked | asdict(experiment.training), prepared.rounds_done)
            )
            for kind in log
        ]
        try:
            for progress in prepared:
                live(progress)
                for sink in sinks:
                    sink(progress)
        except NoMemory as reason:
            raise _with_command(reason, folder) from reason
    results = prepared.results
    print_results(results, experiment.published)
    to_csv(results, folder / "comparison.csv")
    from coterie.report.pictures import draw  # late: Matplotlib, which nobody waits for before the training

    console.print(f"pictures: {', '.join(map(str, draw(results, federation, folder)))}")
    console.print(f"run folder: {folder}")
