"""Looking: at results (show, report, watch), data, methods, options and presets; check tries a method of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie import presets
from coterie.cli.app import command, console, screen
from coterie.cli.arguments import (
    ClientsOption,
    ConfigOption,
    DataDirOption,
    DataOption,
    MarkdownOption,
    PartitionOption,
    PathArgument,
    PresetOption,
    TrustOption,
    UnseenOption,
    either,
    experiment_of,
)
from coterie.cli.printing import print_results
from coterie.data import features
from coterie.errors import CoterieError, counted, say, tell
from coterie.report import catalogue
from coterie.report.screen import Screen
from coterie.report.table import markdown as as_markdown
from coterie.report.verdict import served_worst
from coterie.running.experiment import EXPERIMENT, asked_for, check_clients
from coterie.running.folder import consistent, edits, inside
from coterie.running.spec import PARTS
from coterie.trust import code

LISTED = 20
"""Clients that `coterie data` lists unasked."""


@command("show")
def show_command(
    run: Annotated[Path, typer.Argument(help="A run folder, or a comparison's.")], markdown: MarkdownOption = False
) -> None:
    """Print what a run has found so far."""
    with consistent([run]):
        _show(run, markdown)


def _show(run: Path, markdown: bool) -> None:
    folders = inside(run)
    if folders and not (run / EXPERIMENT).exists():  # written by Python, or one run of a comparison
        results = [folder.result() for folder in folders]
        say(f"{path} was edited since the run began." for path in edits(run, {}, folders))
        if markdown:
            tell(as_markdown(results), end="")
        else:
            print_results(results, {})
        return
    experiment, single, record = asked_for(run)
    say(f"{path} was edited since the run began." for path in edits(run, record, folders))
    results = [folder.result() for folder in folders if folder.history()]
    if not results:
        raise CoterieError(f"{run} holds no evaluation yet; resume it.")
    open_ones = [folder.path.name for folder in folders if not folder.finished]
    wanted = experiment.count(single)
    if not markdown:
        rounds = counted(experiment.training.rounds, "round")
        parts = "".join(f", {name} {value}" for name in PARTS if (value := getattr(experiment, name)))
        console.print(f"data {experiment.data}, model {experiment.model}{parts}, {rounds}")
    if open_ones or len(folders) < wanted:
        left = wanted - len(folders) + len(open_ones)
        note = f"unfinished: {left} of {counted(wanted, 'run')}; `coterie resume {run}` goes on"
        (Screen(stderr=True) if markdown else console).print(note)  # what is pasted holds tables only
    if markdown:
        tell(as_markdown(results), end="")
    else:
        print_results(results, experiment.published)
        if (worst := served_worst(results)) is not None:
            screen().print("", worst)


@command("report")
def report_command(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or comparisons'.")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="The page; default: RUN/report.html, of several ./report.html.")
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Write one HTML page: which method pays, and for whom.

    Its figures lie beside it as PNG and SVG.
    """
    from coterie.report import page

    out = out or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    before = " (in place of the earlier one)" if out.is_file() else ""
    written, figures = page.write(folders, out)
    console.print(f"report: {written}{before}, figures: {figures}", soft_wrap=True)
    if show:
        typer.launch(written.resolve().as_uri())


@command("watch")
def watch_command(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or comparisons'.")],
    port: Annotated[int, typer.Option("--port", help="Of 127.0.0.1; 0 takes a free one.")] = 0,
    show: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Serve the report on this machine, while a run goes on.

    The page follows the run; of a finished one it shows the result. ctrl-C ends it.
    """
    from coterie.report import watch

    with watch.server(folders, port) as server:
        address = f"http://127.0.0.1:{server.server_address[1]}/"
        tell(f"watching {', '.join(map(str, folders))} at {address} (ctrl-C ends it)")
        if show:
            typer.launch(address)
        server.serve_forever()


@command("data")
def data_command(
    path: PathArgument = None, data: DataOption = None, partition: PartitionOption = None,
    clients: ClientsOption = None, unseen: UnseenOption = None, config: ConfigOption = None,
    preset: PresetOption = None, data_dir: DataDirOption = None, trust: TrustOption = False,
    picture: Annotated[Path | None, typer.Option("--picture", help="Draw who holds which class to this file.")] = None,
    each: Annotated[bool, typer.Option("--each", help=f"List every client and feature, also more than {LISTED} and "
                                            f"{features.MOST}.")] = False,
) -> None:
    """Show the features, and how the data lie over the clients."""
    experiment = experiment_of(config, either(path, data), partition, clients, unseen, None, None, None, [], (),
                               preset=preset, data_dir=data_dir, trust=trust, data_alone=True)
    source = experiment.source()
    federation = check_clients(experiment.dealt(source), clients)
    say(federation.recipe.get("notes", ()))
    listed = federation.listing() if each or federation.clients <= LISTED else "--each lists the clients one by one."
    held = features.listed(source.features or features.features_of(source.x), each)
    tell("\n\n".join([federation.summary(), held, listed]))
    if picture is not None:
        from coterie.report.bubbles import bubbles

        console.print(f"picture: {bubbles(federation, picture)}")


@command("methods")
def methods_command(
    name: Annotated[str | None, typer.Argument(help="Explain this method, aggregator or optimizer.")] = None,
    markdown: MarkdownOption = False,
) -> None:
    """List the methods, aggregators and optimizers, or explain one."""
    code.typed(name)
    if markdown:
        tell(catalogue.markdown() if name is None else catalogue.section(type(catalogue.find(name))), end="")
        return
    wide = screen()
    found = catalogue.listing(wide.width) if name is None else catalogue.page(catalogue.find(name), wide.width)
    wide.print(found)


@command("check")
def check_command(
    method: Annotated[str, typer.Argument(help="mine.py:Mine, or the name of a method.")],
) -> None:
    """Try whether a method of yours keeps the contract."""
    from coterie.running import check

    code.typed(method)
    with console.status("checking"):
        findings = check.examine(method)
    tell("\n".join(check.lines(findings)))
    if any(finding.wrong for finding in findings):
        raise typer.Exit(1)


@command("options")
def options_command(markdown: MarkdownOption = False) -> None:
    """List the training options: default and meaning."""
    if markdown:
        tell(catalogue.option_markdown(), end="")
    else:
        wide = screen()
        wide.print(catalogue.option_listing(wide.width))


@command("presets")
def presets_command(
    preset: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Print this one in full.")] = None,
    markdown: MarkdownOption = False,
) -> None:
    """List the published experiments, or print one.

    It is printed as a file that --config reads.
    """
    if markdown:
        tell(presets.markdown(), end="")
    else:
        tell("\n".join(presets.listing()) if preset is None else presets.text(preset))
