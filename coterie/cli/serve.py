"""Handing out models: personalize, export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.app import command
from coterie.cli.arguments import RoundOption, TrustOption
from coterie.cli.printing import opened_run
from coterie.errors import CoterieError, tell
from coterie.trust import code


@command("personalize")
def personalize_command(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    data: Annotated[str, typer.Option("--data", help="The newcomer's samples, e.g. an .npz file with x and y.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Where the model goes; a json is written beside it.")],
    client: Annotated[str | None, typer.Option("--client", help="Which client, if the file holds several.")] = None,
    adapt: Annotated[str, typer.Option("--adapt", help="auto, yes or no: local training after the method's rule.")]
    = "auto",
    future: Annotated[int | None, typer.Option("--future", help="Further samples the interval is for.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="How the model is spelled, where the run does not know it.")
    ] = None,
    loss: Annotated[
        str | None, typer.Option("--loss", help="The run's own loss, file.py:function, where the run does not know it.")
    ] = None,
    when: RoundOption = "chosen", trust: TrustOption = False,
    seed: Annotated[int, typer.Option("--seed", help="Names the folds.")] = 0,
    report: Annotated[str, typer.Option("--report", help="text, or json for machines.")] = "text",
) -> None:
    """Give a client that took no part in training its model.

    Also says how good it will be.
    """
    from coterie.serving import personalize

    code.typed(data)
    opened = opened_run(run, model, loss, trust)
    tell(personalize.hand_out(opened, data, out, client, adapt, future, seed, report, when))


@command("export")
def export_command(
    run: Annotated[Path, typer.Argument(help="A run folder, or a model.safetensors that coterie wrote.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The file to write; a folder with peft.")],
    client: Annotated[str | None, typer.Option("--client", help="The model this client of the run uses.")] = None,
    model: Annotated[int | None, typer.Option("--model", help="The server's model of this number, from 0.")] = None,
    adapted: Annotated[bool, typer.Option("--adapted", help="The client's model after local training.")] = False,
    form: Annotated[
        str | None,
        typer.Option("--format", help="safetensors, torchscript, torch-export, onnx or peft; else by the ending."),
    ] = None,
    merged: Annotated[bool, typer.Option("--merged", help="With the adapters merged into plain layers.")] = False,
    when: RoundOption = "chosen", trust: TrustOption = False,
    net: Annotated[
        str | None, typer.Option("--net", help="How the model is spelled, where the run or file does not know it.")
    ] = None,
) -> None:
    """Write a model for other programs.

    The file is read back and must give the same outputs.
    """
    from coterie.serving import adapter, export, portable

    form = export.format_of(out, form)
    if merged and form == adapter.PEFT:
        raise CoterieError("PEFT's format holds the adapter alone, and --merged leaves none; give one of the two.")
    if run.is_dir():
        chosen = portable.of_run(opened_run(run, net, trust=trust), client, model, adapted, when)
    elif run.exists() and (client is not None or model is not None or adapted or when != "chosen"):
        raise CoterieError(
            f"{run} holds one model; --client, --model, --adapted and --round choose one of a run folder."
        )
    else:
        chosen = portable.read_model(run, net, trust)
    chosen = adapter.merged(chosen) if merged else chosen
    tell(adapter.export_peft(chosen, out) if form == adapter.PEFT else export.export_model(chosen, out, form))
