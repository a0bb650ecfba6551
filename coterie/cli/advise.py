"""Which kind of method fits: advise."""

from __future__ import annotations

from typing import Annotated

import typer

from coterie.cli.app import command, console, screen
from coterie.cli.arguments import (
    AdapterOption,
    ClientsOption,
    ConfigOption,
    DataOption,
    FreezeOption,
    HeadOption,
    LossOption,
    MetricOption,
    ModelOption,
    OutOption,
    PartitionOption,
    PathArgument,
    SetOption,
    TrainOption,
    TrustOption,
    WatchOption,
    either,
    experiment_of,
)
from coterie.errors import say
from coterie.report.screen import plain
from coterie.running.folder import fresh


@command("advise")
def advise_command(
    path: PathArgument = None, data: DataOption = None, partition: PartitionOption = None,
    clients: ClientsOption = None,
    unseen: Annotated[
        int | None, typer.Option("--unseen", help="Clients that play newcomers.  [default: some of 8 and more]")
    ] = None,
    model: ModelOption = None, head: HeadOption = None, adapter: AdapterOption = None, freeze: FreezeOption = None,
    train: TrainOption = None, loss: LossOption = None,
    rounds: Annotated[
        int | None, typer.Option("--rounds", help="Rounds of the pilot.  [default: what fits into the budget]")
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", help="Number of seeds.")] = 2,
    budget: Annotated[float, typer.Option("--budget", help="Seconds the pilot may take.")] = 180.0,
    newcomers: Annotated[
        str, typer.Option("--newcomers", help="How often new clients come: often, some or none.")
    ] = "some",
    objective: Annotated[
        str, typer.Option("--objective", help="What counts: the mean client or the worst tenth (worst).")
    ] = "mean",
    metric: MetricOption = None, watch: WatchOption = None, settings: SetOption = None,
    config: ConfigOption = None, out: OutOption = None, trust: TrustOption = False,
) -> None:
    """Say which kind of method fits these clients.

    A short pilot, and advice with the numbers behind it.
    """
    from coterie.advise import command as pilots

    experiment = experiment_of(
        config, either(path, data), partition, clients, unseen, model, head, None, settings or [], (),
        freeze=freeze, train=train, loss=loss, metric=metric, watch=watch, trust=trust, adapter=adapter,
    )
    with console.status("pilot") as shown:
        pilot, go_on = pilots.run(
            experiment, settings or [], rounds, seeds, budget, newcomers, objective,
            lambda text: shown.update(plain(text)) if console.is_terminal else None, clients, say,
            unseen is not None,
        )
    folder = out or fresh("advice")
    pilots.show(pilot, go_on, folder, screen())
