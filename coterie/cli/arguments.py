"""What several commands take: the types of their arguments and options, with the help, and the experiment they name."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie import presets
from coterie.errors import CoterieError, say
from coterie.running.experiment import DEFAULT_PARTITION, Experiment, renamed
from coterie.running.training import Training
from coterie.trust import code


def by_default(text: str, of: type[Any], name: str) -> str:
    """The help of an option whose default is that of a dataclass."""
    return f"{text}  [default: {next(f.default for f in fields(of) if f.name == name)}]"


DataOption = Annotated[
    str | None,
    typer.Option("--data", help=by_default(
        "digits, or a file or folder: photos/, table.csv:label=species,client=site, ...", Experiment, "data")),
]
PathArgument = Annotated[str | None, typer.Argument(metavar="[DATA]", help="The same as --data.")]
PartitionOption = Annotated[
    str | None,
    typer.Option("--partition", help="How to deal the data: dirichlet:alpha=0.1, iid, natural, ...  "
                 f"[default: natural where the data name their clients, else {DEFAULT_PARTITION}]"),
]
ClientsOption = Annotated[
    int | None, typer.Option("--clients", help=by_default("Clients that train.", Experiment, "clients"))
]
ChurnOption = Annotated[
    str | None,
    typer.Option("--churn", help="Clients come and go: random:rate=0.1, or a csv with client,arrives,leaves."),
]
UnseenOption = Annotated[
    int | None,
    typer.Option("--unseen", help=by_default("Further clients kept out of training.", Experiment, "unseen")),
]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", help=by_default("mlp:hidden=8, cnn, ... or file.py:Net", Experiment, "model")),
]
HeadOption = Annotated[
    str | None, typer.Option("--head", help="The layer that makes the scores.  [default: the last linear one]")
]
LossOption = Annotated[
    str | None,
    typer.Option("--loss", help="A loss of your own, file.py:function.  [default: cross entropy, or squared error]"),
]
AdapterOption = Annotated[
    str | None,
    typer.Option("--adapter", help="Low-rank adapters on a frozen model: lora:rank=8,alpha=16,targets=q+v."),
]
FreezeOption = Annotated[
    list[str] | None,
    typer.Option("--freeze", help="Parts, modules or parameters that do not train, repeatable: base, layer1*, ..."),
]
TrainOption = Annotated[
    list[str] | None,
    typer.Option("--train", help="What trains, all else being frozen, repeatable: head, layer4*, ..."),
]
RoundsOption = Annotated[
    int | None, typer.Option("--rounds", help=by_default("Communication rounds.", Training, "rounds"))
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="name=value, repeatable: lr=0.1, ... (`coterie options` lists them) or fedprox.mu=0.1."),
]
MetricOption = Annotated[
    str | None,
    typer.Option("--metric", help="What decides round, early stop and verdict: balanced_accuracy, auroc, ... or "
                 "mine.py:Mine.  [default: accuracy where there are classes, else the loss]"),
]
WatchOption = Annotated[
    list[str] | None,
    typer.Option("--watch", metavar="METRICS", help="Metrics to store beside it: --watch f1 auroc, or repeated."),
]
PresetOption = Annotated[
    str | None, typer.Option("--preset", help="A published experiment, e.g. fedfew/cifar100-dirichlet-20.")
]
DataDirOption = Annotated[
    str | None, typer.Option("--data-dir", help="The folder with the original files of a published data set.")
]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="A TOML file with the whole experiment.")]
MarkdownOption = Annotated[bool, typer.Option("--markdown", help="Print Markdown, ready to paste into a document.")]
LogOption = Annotated[
    list[str] | None,
    typer.Option("--log", help="tensorboard or mlflow, repeatable: also write local files for it into the folder."),
]
RoundOption = Annotated[
    str, typer.Option("--round", help="chosen, on validation data, as the table reports it; or last.")
]
TrustOption = Annotated[
    bool, typer.Option("--trust", help="Run the code files that it names, and trust their content from now on.")
]
OutOption = Annotated[Path | None, typer.Option("--out", help="The run folder.  [default: a new one under runs/]")]


def either(path: str | None, data: str | None) -> str | None:
    """The data, named with --data or without it."""
    if path is not None and data is not None:
        raise CoterieError(f"'{path}' and --data {data} both name the data; give one of them.")
    return data if path is None else path


def experiment_of(
    config: Path | None, data: str | None, partition: str | None, clients: int | None, unseen: int | None,
    model: str | None, head: str | None, rounds: int | None, settings: list[str], methods: tuple[str, ...],
    default_methods: tuple[str, ...] = (), churn: str | None = None, preset: str | None = None,
    data_dir: str | None = None, seeds: int | None = None, freeze: list[str] | None = None,
    train: list[str] | None = None, loss: str | None = None, metric: str | None = None, watch: list[str] | None = None,
    trust: bool = False, data_alone: bool = False, adapter: str | None = None,
) -> Experiment:
    """The file's or the preset's experiment, overridden by what the command line says.

    Code files that were typed are trusted by that; those that a file for --config names only with `trust`. Who looks at
    the `data_alone` needs neither methods nor models, nor their files.
    """
    if config is not None and preset is not None:
        raise CoterieError("--config and --preset both name a whole experiment; use one of them.")
    code.typed(*methods, model, loss, metric, *(watch or ()), *settings, data)
    base = Experiment() if config is None else Experiment.read(config)
    base = base.of_its_data() if data_alone else base
    base = base if config is None else base.allowed(str(config), trust)
    base = base if preset is None else presets.load(preset)
    chosen = methods or base.methods or default_methods
    given = {"rounds": rounds, "metric": metric, "watch": ",".join(watch) if watch else None}
    flags = [f"{name}={value}" for name, value in given.items() if value is not None]
    made = base.changed(
        chosen, [*flags, *settings],
        data=data, partition=partition, clients=clients, unseen=unseen, model=model, head=head, churn=churn,
        data_dir=data_dir, seeds=seeds, freeze="+".join(freeze) if freeze else None,
        train="+".join(train) if train else None, loss=loss, adapter=adapter,
    )
    say(renamed(chosen, settings))
    return made
