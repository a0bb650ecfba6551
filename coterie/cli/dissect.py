"""What of a model must be personal: dissect."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from click.core import ParameterSource

from coterie.cli.app import command, console, screen
from coterie.cli.arguments import (
    AdapterOption,
    ChurnOption,
    ClientsOption,
    ConfigOption,
    DataDirOption,
    DataOption,
    FreezeOption,
    HeadOption,
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
from coterie.cli.printing import saved_experiment
from coterie.errors import CoterieError, say, unknown
from coterie.evaluation.stages import SERVED, STAGES
from coterie.report.progress import Live
from coterie.running.experiment import EXPERIMENT, Experiment, check_clients, recorded, with_settings
from coterie.running.folder import fresh
from coterie.trust import code

if TYPE_CHECKING:
    from coterie.data import Federation
    from coterie.dissect.measure import Asked

Number = TypeVar("Number", int, float)


@command("dissect")
def dissect_command(
    ctx: typer.Context,
    run: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN]", help="A run or comparison whose data, model and training are taken, or a "
                       "dissection to go on with."),
    ] = None,
    data: DataOption = None, partition: PartitionOption = None, clients: ClientsOption = None,
    unseen: UnseenOption = None, model: ModelOption = None, head: HeadOption = None, adapter: AdapterOption = None,
    freeze: FreezeOption = None, train: TrainOption = None, loss: LossOption = None, rounds: RoundsOption = None,
    seeds: Annotated[
        int | None, typer.Option("--seeds", help=by_default("Runs of each point.", Experiment, "seeds"))
    ] = None,
    ranks: Annotated[
        str | None, typer.Option("--ranks", help="Ranks at which adapters are personal.  [default: 1,2,4,8]")
    ] = None,
    rates: Annotated[
        str | None, typer.Option("--rates", help="Learning rates, 0.01,0.03,0.1: each point takes the best on one "
                                 "seed's validation data.  [default: the run's for all]"),
    ] = None,
    part: Annotated[
        list[str] | None, typer.Option("--part", help="A further part that is tried as personal, repeatable: layer4*")
    ] = None,
    stage: Annotated[
        str, typer.Option("--stage", help=f"Where the gain is measured: {', '.join(STAGES)}.")
    ] = SERVED,
    metric: MetricOption = None, watch: WatchOption = None, settings: SetOption = None, config: ConfigOption = None,
    preset: PresetOption = None, data_dir: DataDirOption = None, churn: ChurnOption = None, out: OutOption = None,
    trust: TrustOption = False,
) -> None:
    """Say how many bytes of the model must be personal.

    Accuracy against the bytes that a client keeps, from nothing to everything; a table, a picture and a sentence.
    """
    from coterie.dissect.measure import DISSECT, Asked
    from coterie.dissect.points import RANKS

    if run is not None and (run / DISSECT).is_file():
        typed = [name for name in ctx.params if ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE]
        if set(typed) - {"run", "trust"}:
            raise CoterieError(f"{run} is a dissection that was begun; `coterie dissect {run}` goes on with what was "
                               "asked for. For another one choose another --out.")
        go_on(run, trust)
        return
    if run is not None and (data or config or preset):
        raise CoterieError(f"{run} names the data already; leave out --data, --config and --preset.")
    if stage not in STAGES:
        raise unknown("stage", stage, STAGES)
    if run is None:
        experiment = experiment_of(
            config, data, partition, clients, unseen, model, head, rounds, settings or [], ("fedavg",), churn=churn,
            preset=preset, data_dir=data_dir, seeds=seeds, freeze=freeze, train=train, loss=loss, metric=metric,
            watch=watch, trust=trust, adapter=adapter,
        )
    else:
        before, _ = saved_experiment(run, trust)
        code.typed(model, loss, metric, *(watch or ()), *(settings or ()))
        flags = {"rounds": rounds, "metric": metric, "watch": ",".join(watch) if watch else None}
        given = [f"{name}={value}" for name, value in flags.items() if value is not None]
        experiment = before.changed(
            ("fedavg",), [*given, *(settings or [])], partition=partition, clients=clients, unseen=unseen,
            model=model, head=head, churn=churn, data_dir=data_dir, seeds=seeds,
            freeze="+".join(freeze) if freeze else None, train="+".join(train) if train else None, loss=loss,
            adapter=adapter,
        )
    asked = Asked(
        experiment, _listed(ranks, int, "--ranks", "1,2,4,8") if ranks else RANKS,
        _listed(rates, float, "--rates", "0.01,0.03,0.1") if rates else (), tuple(part or ()), stage,
    )
    begin(asked, out or fresh("dissect"), clients, held_out=run is None)


def _listed(text: str, kind: Callable[[str], Number], flag: str, example: str) -> tuple[Number, ...]:
    """Numbers joined by commas."""
    try:
        return tuple(kind(piece) for piece in text.split(","))
    except ValueError:
        raise CoterieError(f"{flag} takes numbers joined by commas, such as {example}, not '{text}'.") from None


def begin(asked: Asked, folder: Path, clients: int | None, held_out: bool) -> None:
    """A new dissection; with `held_out` some clients play newcomers where nobody said how many."""
    from coterie.advise.command import held_out as with_newcomers

    if any((folder / name).exists() for name in (EXPERIMENT, "config.json", "dissect.json")):
        raise CoterieError(f"{folder} already holds a run; `coterie resume {folder}` goes on, or choose another --out.")
    if held_out:
        experiment, federation = with_newcomers(asked.experiment, "some", clients)
        asked = replace(asked, experiment=experiment)
    else:
        federation = check_clients(asked.experiment.federation(), clients)
    _measured(asked, federation, folder)


def go_on(folder: Path, trust: bool = False, settings: Sequence[str] = ()) -> None:
    """What is left of a dissection that was stopped."""
    from coterie.dissect.measure import Asked

    asked, note = Asked.before(folder, trust)
    say([note] if note else [])
    asked = replace(asked, experiment=with_settings(asked.experiment, settings))
    _measured(asked, asked.experiment.federation(recorded(folder)), folder)


def _measured(asked: Asked, federation: Federation, folder: Path) -> None:
    """Run, print, draw and write; the answer comes last."""
    from coterie.dissect import report
    from coterie.dissect.measure import measure, runs

    say(federation.recipe.get("notes", ()))
    with Live() as live:
        made = measure(asked, federation, folder, live, say, ["coterie", *sys.argv[1:]],
                       lambda points: setattr(live, "runs", runs(points, asked)))
    wide = screen()
    wide.print(report.table(made))
    for text in report.notes(made):
        wide.print(text, soft_wrap=True)
    from coterie.dissect.picture import picture  # late: Matplotlib, which nobody waits for before the training

    written = [*report.write(made, folder), *picture(made, folder)]
    console.print(f"written: {', '.join(map(str, written))}", soft_wrap=True)
    console.print(report.sentence(made), soft_wrap=True)
