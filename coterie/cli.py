"""The command line. Bad input is one sentence and exit code 2; ctrl-C leaves a run that can be resumed."""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from click import Context, HelpFormatter
from rich.console import Console
from rich.live import Live as Refreshed
from typer.core import TyperArgument, TyperCommand

import coterie
from coterie import presets, registry
from coterie.data import Federation
from coterie.errors import CoterieError
from coterie.report import catalogue, logs
from coterie.report.answer import served_worst, verdict
from coterie.report.progress import Live
from coterie.report.table import beside_paper, by_method, comparison, to_csv
from coterie.report.table import markdown as as_markdown
from coterie.report.table import newcomers as newcomers_table
from coterie.running import runs, saved
from coterie.running.config import Training
from coterie.running.experiment import DEFAULT_PARTITION, Experiment, check_clients, with_settings
from coterie.running.folder import Folder, environment, inside
from coterie.running.result import Result

DEFAULT_METHODS = ("fedprox", "fedper", "ifca", "fedfew")
LISTED = 20
"""Clients that `coterie data` lists unasked."""

app = typer.Typer(
    help="Personalized federated learning: compare methods honestly, then deploy the one that fits.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
)
console = Console()


class Command(TyperCommand):
    """Puts right what typer 0.20 does with click 8.5: arguments lose their help, and defaults read `\\[default: 2]`."""

    def __init__(self, *words: Any, **options: Any) -> None:
        super().__init__(*words, **options)
        hints = get_type_hints(self.callback, include_extras=True)
        for one in self.params:
            if isinstance(one, TyperArgument) and not one.help:
                one.help = hints[one.name].__metadata__[0].help

    def format_arguments(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Nothing: typer lists them with the options, and click would list them again."""

    def get_help(self, ctx: Context) -> str:
        return super().get_help(ctx).replace("\\[", "[")


command = partial(app.command, cls=Command)


def _say_version(wanted: bool) -> None:
    if wanted:
        print(f"coterie {coterie.__version__}")
        raise typer.Exit


@app.callback(help=app.info.help)
def top(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_say_version)
    ] = False,
) -> None:
    pass


def _by_default(text: str, of: type[Any], name: str) -> str:
    """The help of an option whose default is that of a dataclass."""
    return f"{text}  [default: {next(f.default for f in fields(of) if f.name == name)}]"


DataOption = Annotated[
    str | None,
    typer.Option("--data", help=_by_default(
        "digits, or a file or folder: photos/, table.csv:label=species,client=site, ...", Experiment, "data")),
]
PathArgument = Annotated[str | None, typer.Argument(metavar="[DATA]", help="The same as --data.")]
PartitionOption = Annotated[
    str | None,
    typer.Option("--partition", help="How to deal the data: dirichlet:alpha=0.1, iid, natural, ...  "
                 f"[default: natural where the data name their clients, else {DEFAULT_PARTITION}]"),
]
ClientsOption = Annotated[
    int | None, typer.Option("--clients", help=_by_default("Clients that train.", Experiment, "clients"))
]
ChurnOption = Annotated[
    str | None,
    typer.Option("--churn", help="Clients come and go: random:rate=0.1, or a csv with client,arrives,leaves."),
]
UnseenOption = Annotated[
    int | None,
    typer.Option("--unseen", help=_by_default("Further clients kept out of training.", Experiment, "unseen")),
]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", help=_by_default("mlp:hidden=8, cnn, ... or file.py:Net", Experiment, "model")),
]
HeadOption = Annotated[
    str | None, typer.Option("--head", help="The layer that makes the scores.  [default: the last linear one]")
]
RoundsOption = Annotated[
    int | None, typer.Option("--rounds", help=_by_default("Communication rounds.", Training, "rounds"))
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="name=value, repeatable: lr=0.1, ... (`coterie options` lists them) or fedprox.mu=0.1."),
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
OutOption = Annotated[Path | None, typer.Option("--out", help="The run folder.  [default: a new one under runs/]")]


@command("run")
def run_command(
    method: Annotated[str | None, typer.Argument(help="fedfew, fedfew:models=5, fedfew:official, my.py:Mine")] = None,
    data: DataOption = None, partition: PartitionOption = None, clients: ClientsOption = None,
    unseen: UnseenOption = None, model: ModelOption = None, head: HeadOption = None, rounds: RoundsOption = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help=_by_default("Same seed, same result.", Training, "seed"))
    ] = None,
    settings: SetOption = None, config: ConfigOption = None, preset: PresetOption = None,
    data_dir: DataDirOption = None, churn: ChurnOption = None, out: OutOption = None, log: LogOption = None,
) -> None:
    """Train one method and score every client."""
    extra = [f"seed={seed}"] if seed is not None else []
    experiment = _experiment(config, data, partition, clients, unseen, model, head, rounds, [*extra, *(settings or [])],
                             (method,) if method else (), churn=churn, preset=preset, data_dir=data_dir)
    if len(experiment.methods) != 1:
        named = ", ".join(experiment.methods) or "none is named"
        raise CoterieError(f"run trains one method ({named}); `coterie methods` lists them, compare takes several.")
    folder = out or _fresh_folder(registry.method(experiment.methods[0]).name)
    _go_on(experiment, folder, single=True, resume=False, log=log or (), clients=clients)


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
    unseen: UnseenOption = None, model: ModelOption = None, head: HeadOption = None, rounds: RoundsOption = None,
    seeds: Annotated[
        int | None, typer.Option("--seeds", help=_by_default("Runs of each method.", Experiment, "seeds"))
    ] = None,
    settings: SetOption = None, config: ConfigOption = None, preset: PresetOption = None,
    data_dir: DataDirOption = None, churn: ChurnOption = None, out: OutOption = None,
) -> None:
    """Train several methods on the same clients; one table."""
    experiment = _experiment(config, data, partition, clients, unseen, model, head, rounds, settings or [],
                             (*(named or ()), *(methods or ())), DEFAULT_METHODS, churn=churn, preset=preset,
                             data_dir=data_dir)
    if seeds is not None:
        experiment = Experiment.of({**experiment.record(), "seeds": seeds})
    _go_on(experiment, out or _fresh_folder("compare"), single=False, resume=False, clients=clients)


@command("show")
def show_command(
    run: Annotated[Path, typer.Argument(help="A run folder, or a comparison's.")], markdown: MarkdownOption = False
) -> None:
    """Print what a run has found so far."""
    folders = inside(run)
    if folders and not (run / saved.EXPERIMENT).exists():  # written by Python, or one run of a comparison
        results = [folder.result() for folder in folders]
        if markdown:
            print(as_markdown(results), end="")
        else:
            _print(results, {})
        return
    experiment, single = _saved(run)
    results = [folder.result() for folder in folders if folder.history()]
    if not results:
        raise CoterieError(f"{run} holds no evaluation yet; resume it.")
    open_ones = [folder.path.name for folder in folders if not folder.finished]
    wanted = experiment.count(single)
    if not markdown:
        console.print(f"data {experiment.data}, model {experiment.model}, {experiment.training.rounds} rounds")
    if open_ones or len(folders) < wanted:
        left = wanted - len(folders) + len(open_ones)
        note = f"unfinished: {left} of {wanted} runs; `coterie resume {run}` goes on"
        (Console(stderr=True) if markdown else console).print(note)  # what is pasted holds tables only
    if markdown:
        print(as_markdown(results), end="")
    else:
        _print(results, experiment.published)
        if (worst := served_worst(results)) is not None:
            _wide().print("", worst)


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
    console.print(f"report: {written}{before}, figures: {figures}", highlight=False, soft_wrap=True, markup=False)
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
        print(f"watching {', '.join(map(str, folders))} at {address} (ctrl-C ends it)", flush=True)
        if show:
            typer.launch(address)
        server.serve_forever()


@command("resume")
def resume_command(
    run: Annotated[Path, typer.Argument(help="A run folder, or a comparison's.")], log: LogOption = None
) -> None:
    """Go on with a run that was stopped or killed.

    The result is the same as without the interruption.
    """
    experiment, single = _saved(run)
    if log and not single:
        raise CoterieError("--log writes one run; `coterie report` and `coterie watch` read a comparison's runs.")
    _go_on(experiment, run, single, resume=True, log=log or ())


@command("advise")
def advise_command(
    path: PathArgument = None, data: DataOption = None, partition: PartitionOption = None,
    clients: ClientsOption = None,
    unseen: Annotated[
        int | None, typer.Option("--unseen", help="Clients that play newcomers.  [default: some of 8 and more]")
    ] = None,
    model: ModelOption = None, head: HeadOption = None,
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
    settings: SetOption = None, config: ConfigOption = None, out: OutOption = None,
) -> None:
    """Say which kind of method fits these clients.

    A short pilot, and advice with the numbers behind it.
    """
    from coterie.advise import command as pilots

    experiment = _experiment(config, _either(path, data), partition, clients, unseen, model, head, None, settings or [],
                             ())
    with console.status("pilot") as shown:
        pilot, go_on = pilots.run(
            experiment, settings or [], rounds, seeds, budget, newcomers, objective,
            lambda text: shown.update(text) if console.is_terminal else None, clients,
        )
    folder = out or _fresh_folder("advice")
    pilots.show(pilot, go_on, folder, _wide())


@command("data")
def data_command(
    path: PathArgument = None, data: DataOption = None, partition: PartitionOption = None,
    clients: ClientsOption = None, unseen: UnseenOption = None, config: ConfigOption = None,
    preset: PresetOption = None, data_dir: DataDirOption = None,
    picture: Annotated[Path | None, typer.Option("--picture", help="Draw who holds which class to this file.")] = None,
    each: Annotated[bool, typer.Option("--each", help=f"List every client, also more than {LISTED}.")] = False,
) -> None:
    """Show how the data lie over the clients."""
    experiment = _experiment(config, _either(path, data), partition, clients, unseen, None, None, None, [], (),
                             preset=preset, data_dir=data_dir)
    federation = check_clients(experiment.federation(), clients)
    _say_notes(federation)
    listed = federation.listing() if each or federation.clients <= LISTED else "--each lists the clients one by one."
    console.print(federation.summary(), listed, sep="\n\n", markup=False, highlight=False, soft_wrap=True)
    if picture is not None:
        from coterie.report.bubbles import bubbles

        console.print(f"picture: {bubbles(federation, picture)}")


@command("methods")
def methods_command(
    name: Annotated[str | None, typer.Argument(help="Explain this method or aggregator.")] = None,
    markdown: MarkdownOption = False,
) -> None:
    """List the methods and aggregators, or explain one."""
    if markdown:
        print(catalogue.markdown() if name is None else catalogue.section(type(catalogue.find(name))), end="")
        return
    wide = _wide()
    found = catalogue.listing(wide.width) if name is None else catalogue.page(catalogue.find(name), wide.width)
    wide.print(found, highlight=False)


@command("check")
def check_command(
    method: Annotated[str, typer.Argument(help="mine.py:Mine, or the name of a method.")],
) -> None:
    """Try whether a method of yours keeps the contract."""
    from coterie.running import check

    with console.status("checking"):
        findings = check.check(method)
    print("\n".join(check.lines(findings)))
    if any(finding.wrong for finding in findings):
        raise typer.Exit(1)


@command("options")
def options_command(markdown: MarkdownOption = False) -> None:
    """List the training options: default and meaning."""
    if markdown:
        print(catalogue.option_markdown(), end="")
    else:
        wide = _wide()
        wide.print(catalogue.option_listing(wide.width), highlight=False)


@command("presets")
def presets_command(
    preset: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Print this one in full.")] = None,
    markdown: MarkdownOption = False,
) -> None:
    """List the published experiments, or print one.

    It is printed as a file that --config reads.
    """
    if markdown:
        print(presets.markdown(), end="")
    else:
        print("\n".join(presets.listing()) if preset is None else presets.text(preset))


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
    seed: Annotated[int, typer.Option("--seed", help="Names the folds.")] = 0,
    report: Annotated[str, typer.Option("--report", help="text, or json for machines.")] = "text",
) -> None:
    """Give a client that took no part in training its model.

    Also says how good it will be.
    """
    from coterie.serving import handout

    opened = _opened(run, model)
    print(handout.hand_out(opened, data, out, client, adapt, future, seed, report))


@command("export")
def export_command(
    run: Annotated[Path, typer.Argument(help="A run folder, or a model.safetensors that coterie wrote.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The file to write.")],
    client: Annotated[str | None, typer.Option("--client", help="The model this client of the run uses.")] = None,
    model: Annotated[int | None, typer.Option("--model", help="The server's model of this number, from 0.")] = None,
    adapted: Annotated[bool, typer.Option("--adapted", help="The client's model after local training.")] = False,
    form: Annotated[
        str | None, typer.Option("--format", help="safetensors, torchscript, torch-export or onnx; else by the ending.")
    ] = None,
    net: Annotated[
        str | None, typer.Option("--net", help="How the model is spelled, where the run or file does not know it.")
    ] = None,
) -> None:
    """Write a model for other programs.

    The file is read back and must give the same outputs.
    """
    from coterie.serving import export, portable

    form = export.format_of(out, form)
    if run.is_dir():
        chosen = portable.of_run(_opened(run, net), client, model, adapted)
    elif client is not None or model is not None or adapted:
        raise CoterieError(f"{run} holds one model; --client, --model and --adapted choose one of a run folder.")
    else:
        chosen = portable.read_model(run, net)
    print(export.hand_out(chosen, out, form))


@command("keys")
def keys_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the folders of CA, server and clients lie.")],
    more: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Further clients.")] = None,
    server: Annotated[
        list[str] | None, typer.Option("--server", metavar="HOST[,HOST...]", help="Names and addresses of the server.")
    ] = None,
    clients: Annotated[
        list[str] | None, typer.Option("--clients", metavar="NAME[,NAME...]", help="Sites that get a key.")
    ] = None,
    renew: Annotated[
        str | None, typer.Option("--renew", metavar="server|NAME", help="Replace what the server or a client has.")
    ] = None,
) -> None:
    """Flower: make keys for a server and its sites.

    Certificates and keys, and what goes to whom.
    """
    from coterie.flower import keys

    if more and not clients:
        raise CoterieError(f"clients are named after --clients: coterie keys {folder} --clients {' '.join(more)}")
    hosts, names = keys.listed(server or ()), keys.listed([*(clients or ()), *(more or ())])
    if renew is not None and names:
        raise CoterieError("--renew replaces one key; --clients makes new ones. Use one at a time.")
    said = keys.make(folder, hosts, names) if renew is None else keys.renew(folder, renew, hosts)
    print("\n".join(said))


@command("server")
def server_command(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file: method, model, shape, classes, ...")],
    out: Annotated[Path, typer.Option("--out", help="The run's folder; started on it again, the run goes on.")],
    listen: Annotated[str, typer.Option("--listen", metavar="HOST:PORT", help="Where sites connect.")] = "0.0.0.0:8000",
    keys: Annotated[Path | None, typer.Option("--keys", help="The folder `server` of `coterie keys`.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS, no keys: for trials on one machine.")] = False,
    keep_messages: Annotated[
        bool, typer.Option("--keep-messages", help="Keep everything that sites send in OUT/messages.")
    ] = False,
) -> None:
    """Flower: train across real sites, as the server.

    Starts the server, admits the sites' keys, and runs the experiment to its end.
    """
    from coterie.flower import operator

    operator.serve(config, out, listen, keys, insecure, keep_messages)


@command("client")
def client_command(
    data: Annotated[str, typer.Option("--data", help="The site's samples; they stay where they are.")],
    server: Annotated[str | None, typer.Option("--server", metavar="HOST:PORT", help="Where to connect.")] = None,
    keys: Annotated[Path | None, typer.Option("--keys", help="The site's folder of `coterie keys`.")] = None,
    home: Annotated[Path, typer.Option("--home", help="Where the site keeps its state and its model.")] = Path("site"),
    name: Annotated[str | None, typer.Option("--name", help="The site's name, where no key gives it.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS, no keys: for trials on one machine.")] = False,
    dry_run: Annotated[
        Path | None, typer.Option("--dry-run", metavar="CONFIG", help="Print what would be sent in this experiment.")
    ] = None,
    predict: Annotated[bool, typer.Option("--predict", help="Apply the site's model to --data instead.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Where --predict writes its csv file.")] = None,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda or auto.")] = "auto",
    val: Annotated[float, typer.Option("--val", help="Share of the training samples held back for validation.")] = 0.1,
    test: Annotated[float, typer.Option("--test", help="Share of the samples held back for testing.")] = 0.25,
    seed: Annotated[int, typer.Option("--seed", help="Seed of that split.")] = 0,
) -> None:
    """Flower: take part in a training, as a site.

    Or show what would be sent (--dry-run), or use the site's model (--predict).
    """
    from coterie.flower import operator

    settings = {"device": device, "val": val, "test": test, "seed": seed}
    if predict:
        path, accuracy = operator.predict(home, data, out)
        print(f"{path}" + ("" if accuracy is None else f": accuracy {100 * accuracy:.1f} % of the labels in {data}"))
    elif dry_run is not None:
        with tempfile.TemporaryDirectory() as folder:
            parts = operator.rehearse(dry_run, data, Path(folder), name or "this-site", settings)
        _wide().print(operator.sending(parts))
    elif server is None:
        raise CoterieError("where is the server? Give --server HOST:PORT (or --dry-run CONFIG, or --predict).")
    else:
        operator.connect(server, data, home, keys, insecure, name, settings)


@command("status")
def status_command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of `coterie server --out`.")],
    follow: Annotated[bool, typer.Option("--follow", help="Go on showing it, until ctrl-C.")] = False,
    lift: Annotated[str | None, typer.Option("--lift", metavar="SITE", help="End a site's quarantine.")] = None,
) -> None:
    """Flower: say how far the server's run is.

    Who is connected, who answered, and who is quarantined.
    """
    from coterie.flower import operator

    if lift is not None:
        operator.lift(folder, lift)
        print(f"{lift} takes part again from the next round on")
        return
    wide = _wide()
    if not follow:
        wide.print(operator.status(folder))
        return
    with Refreshed(operator.status(folder), console=wide, auto_refresh=False) as shown:
        while True:
            time.sleep(1)
            shown.update(operator.status(folder), refresh=True)


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

    experiment = _experiment(None, data, partition, clients, None, model, None, None, settings or [],
                             tuple(named or ()), ("fedavg", "fedfew:official"))
    federation = check_clients(experiment.federation(), clients).without_validation()
    wide = _wide()
    with wide.status("timing") as shown:
        timings = bench.run(experiment, federation, lambda method: shown.update(f"timing {method}"))
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


# -- building and running --------------------------------------------------------------------------------------------


def _either(path: str | None, data: str | None) -> str | None:
    """The data, named with --data or without it."""
    if path is not None and data is not None:
        raise CoterieError(f"'{path}' and --data {data} both name the data; give one of them.")
    return data if path is None else path


def _experiment(
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


def _say_notes(federation: Federation) -> None:
    for note in federation.recipe.get("notes", ()):
        print(f"coterie: {note}", file=sys.stderr)


def _go_on(
    experiment: Experiment, folder: Path, single: bool, resume: bool, log: Sequence[str] = (),
    clients: int | None = None,
) -> None:
    """Build the parts, run what is left of the experiment, print and draw."""
    for kind in log:
        logs.check(kind)
    chosen = experiment.chosen()
    federation = check_clients(experiment.federation(), clients)
    _say_notes(federation)
    factory = experiment.factory(federation)
    training = {f.name: getattr(experiment.training, f.name) for f in fields(experiment.training)}
    if not resume:
        reason = runs.check(chosen, factory, federation, head=experiment.head, **training)
        if reason:
            console.print(f"{reason}. Clients are trained one after another: the same results, slower.", markup=False,
                          highlight=False, soft_wrap=True)
        _write_experiment(folder, experiment, single)
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

    _print(results, experiment.published)
    to_csv(results, folder / "comparison.csv")
    drawn = [picture(results, folder / "picture.png"), bubbles(federation, folder / "clients.png")]
    if any(len(opposed(group)[0]) for group in by_method(results).values()):
        drawn.append(conflicts(results, folder / "conflicts.png"))
    if any(result.arrives for result in results):
        drawn.append(newcomers(results, folder / "newcomers.png"))
    console.print(f"pictures: {', '.join(map(str, drawn))}")
    console.print(f"run folder: {folder}")


def _write_experiment(folder: Path, experiment: Experiment, single: bool) -> None:
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


def _saved(folder: Path) -> tuple[Experiment, bool]:
    experiment, single, note = saved.read_experiment(folder)
    if note:
        print(f"coterie: {note}", file=sys.stderr)
    return experiment, single


def _opened(run: Path, model: str | None) -> saved.Saved:
    opened = saved.Saved.open(run, model)
    if opened.note:
        print(f"coterie: {opened.note}", file=sys.stderr)
    return opened


def _fresh_folder(name: str) -> Path:
    return next(p for p in (Path("runs") / f"{name}-{k}" for k in itertools.count(1)) if not p.exists())


# -- printing --------------------------------------------------------------------------------------------------------


def _wide() -> Console:
    """Where output goes to a file or a pipe there is no width to respect."""
    return console if console.is_terminal else Console(width=max(console.width, 118))


def _print(results: list[Result], printed: Mapping[str, str]) -> None:
    wide = _wide()
    wide.print(comparison(results))
    if (beside := beside_paper(results, printed)) is not None:
        wide.print(beside)
    if (arrived := newcomers_table(results)) is not None:
        wide.print(arrived)
    if said := verdict(results):
        wide.print(said, highlight=False, markup=False)


def main() -> None:
    """Entry point of the `coterie` command."""
    try:
        app()
    except CoterieError as error:
        print(f"coterie: {error}", file=sys.stderr)
        sys.exit(2)
    except runs.Interrupted:
        print("coterie: stopped after finishing the round; `coterie resume` its folder to go on.", file=sys.stderr)
        sys.exit(130)
    except KeyboardInterrupt:
        print("coterie: stopped.", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
