"""Measuring and teaching: bench, textbook."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.app import command, console, screen
from coterie.cli.arguments import ClientsOption, DataOption, ModelOption, PartitionOption, SetOption, experiment_of
from coterie.report.screen import plain
from coterie.running.experiment import check_clients


@command("bench")
def bench_command(
    named: Annotated[
        list[str] | None, typer.Argument(metavar="[METHODS]...", help="By default fedavg and fedfew.")
    ] = None,
    data: DataOption = None, partition: PartitionOption = None, clients: ClientsOption = None,
    model: ModelOption = None, settings: SetOption = None,
) -> None:
    """Time a round here against the published way.

    That is a loop over clients, a DataLoader, eager SGD.
    """
    from coterie.presets import bench

    experiment = experiment_of(None, data, partition, clients, None, model, None, None, settings or [],
                               tuple(named or ()), ("fedavg", "fedfew:official"))
    federation = check_clients(experiment.federation(), clients).without_validation()
    wide = screen()
    with wide.status("timing") as shown:
        timings = bench.run(experiment, federation, lambda method: shown.update(plain(f"timing {method}")))
    wide.print(bench.table(timings))


@command("textbook")
def textbook_command(
    out: Annotated[Path, typer.Option("--out", help="Where the two pictures go.")] = Path("runs/textbook"),
) -> None:
    """Global, local or personalized? Six clients by hand.

    The textbook's table and two exercises, computed by the library itself.
    """
    from coterie.presets import textbook

    console.print(textbook.show())
    for path in textbook.draw(out):
        console.print(f"picture: {path}")
