"""The command line. Bad input is one sentence and exit code 2; ctrl-C leaves a run that can be resumed."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import coterie
from coterie import registry, runs, saved
from coterie.errors import CoterieError
from coterie.experiment import Experiment, with_settings
from coterie.folder import Folder, environment
from coterie.report import catalogue
from coterie.report.bubbles import bubbles
from coterie.report.conflicts import conflicts, opposed
from coterie.report.plots import picture
from coterie.report.progress import Live
from coterie.report.table import by_method, comparison, to_csv, verdict
from coterie.report.table import markdown as as_markdown
from coterie.result import Result

DEFAULT_METHODS = ("fedprox", "fedper", "ifca", "fedfew")

app = typer.Typer(
    help="Personalized federated learning: compare methods honestly, then deploy the one that fits.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
)
console = Console()


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


DataOption = Annotated[str | None, typer.Option("--data", help="digits, or an .npz file with x, y and maybe client.")]
PartitionOption = Annotated[
    str | None,
    typer.Option("--partition", help="How to deal the data, e.g. dirichlet:alpha=0.1 or iid or natural."),
]
ClientsOption = Annotated[int | None, typer.Option("--clients", help="Clients that train.")]
UnseenOption = Annotated[int | None, typer.Option("--unseen", help="Further clients kept out of training.")]
ModelOption = Annotated[str | None, typer.Option("--model", help="mlp, cnn, ... or file.py:Net; options: mlp:hidden=8")]
HeadOption = Annotated[str | None, typer.Option("--head", help="The layer that makes the scores.")]
RoundsOption = Annotated[int | None, typer.Option("--rounds", help="Communication rounds.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="name=value, repeatable: a training option (lr, ...) or a method's (fedprox.mu)."),
]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="A TOML file with the whole experiment.")]
MarkdownOption = Annotated[bool, typer.Option("--markdown", help="Print Markdown, ready to paste into a document.")]
OutOption = Annotated[Path | None, typer.Option("--out", help="The run folder; by default a new one under runs/.")]


@app.command("run")
def run_command(
    method: Annotated[str | None, typer.Argument(help="fedfew, fedfew:models=5, fedfew:official, my.py:Mine")] = None,
    data: DataOption = None, partition: PartitionOption = None, clients: ClientsOption = None,
    unseen: UnseenOption = None, model: ModelOption = None, head: HeadOption = None, rounds: RoundsOption = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Names every stream of randomness.")] = None,
    settings: SetOption = None, config: ConfigOption = None, out: OutOption = None,
) -> None:
    """Train one method and score every client."""
    extra = [f"seed={seed}"] if seed is not None else []
    experiment = _experiment(config, data, partition, clients, unseen, model, head, rounds, [*extra, *(settings or [])],
                             (method,) if method else ())
    if len(experiment.methods) != 1:
        named = ", ".join(experiment.methods) or "none is named"
        raise CoterieError(f"run trains one method ({named}); `coterie methods` lists them, compare takes several.")
    folder = out or _fresh_folder(registry.method(experiment.methods[0]).name)
    _go_on(experiment, folder, single=True, resume=False)


@app.command("compare")
def compare_command(
    named: Annotated[
        list[str] | None, typer.Argument(metavar="[METHODS]...", help="Methods; Local and FedAvg always take part.")
    ] = None,
    methods: Annotated[
        list[str] | None, typer.Option("--methods", help="A further method, repeatable; all stands for every one.")
    ] = None,
    data: DataOption = None, partition: PartitionOption = None, clients: ClientsOption = None,
    unseen: UnseenOption = None, model: ModelOption = None, head: HeadOption = None, rounds: RoundsOption = None,
    seeds: Annotated[int | None, typer.Option("--seeds", help="Number of seeds.")] = None,
    settings: SetOption = None, config: ConfigOption = None, out: OutOption = None,
) -> None:
    """Train several methods on the same federation and print one table."""
    experiment = _experiment(config, data, partition, clients, unseen, model, head, rounds, settings or [],
                             (*(named or ()), *(methods or ())), DEFAULT_METHODS)
    if seeds is not None:
        experiment = Experiment.of({**experiment.record(), "seeds": seeds})
    _go_on(experiment, out or _fresh_folder("compare"), single=False, resume=False)


@app.command("resume")
def resume_command(run: Annotated[Path, typer.Argument(help="A run folder, or a comparison's.")]) -> None:
    """Go on with a run that was stopped or killed; the result is the same as without the interruption."""
    experiment, single = _saved(run)
    _go_on(experiment, run, single, resume=True)


@app.command("show")
def show_command(
    run: Annotated[Path, typer.Argument(help="A run folder, or a comparison's.")], markdown: MarkdownOption = False
) -> None:
    """Print what a run has found so far."""
    experiment, single = _saved(run)
    folders = _folders(run)
    results = [folder.result() for folder in folders if folder.history()]
    if not results:
        raise CoterieError(f"{run} holds no evaluation yet; resume it.")
    open_ones = [folder.path.name for folder in folders if not folder.finished]
    wanted = 1 if single else len(runs.with_baselines(experiment.chosen())) * experiment.seeds
    if not markdown:
        console.print(f"data {experiment.data}, model {experiment.model}, {experiment.training.rounds} rounds")
    if open_ones or len(folders) < wanted:
        left = wanted - len(folders) + len(open_ones)
        note = f"unfinished: {left} of {wanted} runs; `coterie resume {run}` goes on"
        (Console(stderr=True) if markdown else console).print(note)  # what is pasted holds tables only
    if markdown:
        print(as_markdown(results), end="")
    else:
        _print(results)


@app.command("data")
def data_command(
    data: DataOption = None, partition: PartitionOption = None, clients: ClientsOption = None,
    unseen: UnseenOption = None, config: ConfigOption = None,
    picture: Annotated[Path | None, typer.Option("--picture", help="Draw who holds which class to this file.")] = None,
) -> None:
    """Show how the data lie over the clients."""
    experiment = _experiment(config, data, partition, clients, unseen, None, None, None, [], ())
    federation = experiment.federation()
    console.print(federation.summary(), markup=False, highlight=False)
    if picture is not None:
        console.print(f"picture: {bubbles(federation, picture)}")


@app.command("methods")
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


@app.command("bench")
def bench_command(
    named: Annotated[
        list[str] | None, typer.Argument(metavar="[METHODS]...", help="By default fedavg and fedfew.")
    ] = None,
    data: DataOption = None, partition: PartitionOption = None, clients: ClientsOption = None,
    model: ModelOption = None, settings: SetOption = None,
) -> None:
    """Time a round here against the published way: a loop over clients, a DataLoader, eager SGD."""
    from coterie import bench

    experiment = _experiment(None, data, partition, clients, None, model, None, None, settings or [],
                             tuple(named or ()), ("fedavg", "fedfew:official"))
    federation = experiment.federation().without_validation()
    wide = _wide()
    with wide.status("timing") as shown:
        timings = bench.run(experiment, federation, lambda method: shown.update(f"timing {method}"))
    wide.print(bench.table(timings))


@app.command("textbook")
def textbook_command(
    out: Annotated[Path, typer.Option("--out", help="Where the two pictures go.")] = Path("runs/textbook"),
) -> None:
    """Global, local or personalized? The textbook's table and two exercises, computed by the library itself."""
    from coterie import textbook

    console.print(textbook.show())
    for path in textbook.draw(out):
        console.print(f"picture: {path}")


@app.command("personalize")
def personalize_command(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    data: Annotated[str, typer.Option("--data", help="The newcomer's samples, e.g. an .npz file with x and y.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Where the model goes; a json is written beside it.")],
    client: Annotated[str | None, typer.Option("--client", help="Which client, if the file holds several.")] = None,
    adapt: Annotated[str, typer.Option("--adapt", help="auto, yes or no: local training after the method's rule.")]
    = "auto",
    future: Annotated[int | None, typer.Option("--future", help="Further samples the interval is for.")] = None,
    model: ModelOption = None,
    seed: Annotated[int, typer.Option("--seed", help="Names the folds.")] = 0,
    report: Annotated[str, typer.Option("--report", help="text, or json for machines.")] = "text",
) -> None:
    """Give a client that took no part in training its model, and say how good it will be."""
    from coterie import newcomers

    opened = _opened(run, model)
    print(newcomers.hand_out(opened, data, out, client, adapt, future, seed, report))


@app.command("export")
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
    """Write a model for other programs, and check that the file gives the same outputs."""
    from coterie import export

    form = export.format_of(out, form)
    if run.is_dir():
        piece = export.of_run(_opened(run, net), client, model, adapted)
    elif client is not None or model is not None or adapted:
        raise CoterieError(f"{run} holds one model; --client, --model and --adapted choose one of a run folder.")
    else:
        piece = export.read_model(run, net)
    print(export.hand_out(piece, out, form))


@app.command("keys")
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
    """Make certificates and keys for a server and its clients, and say what goes to whom."""
    from coterie.flower import keys

    if more and not clients:
        raise CoterieError(f"clients are named after --clients: coterie keys {folder} --clients {' '.join(more)}")
    hosts, names = keys.listed(server or ()), keys.listed([*(clients or ()), *(more or ())])
    if renew is not None and names:
        raise CoterieError("--renew replaces one key; --clients makes new ones. Use one at a time.")
    said = keys.make(folder, hosts, names) if renew is None else keys.renew(folder, renew, hosts)
    print("\n".join(said))


# -- building and running --------------------------------------------------------------------------------------------


def _experiment(
    config: Path | None, data: str | None, partition: str | None, clients: int | None, unseen: int | None,
    model: str | None, head: str | None, rounds: int | None, settings: list[str], methods: tuple[str, ...],
    default_methods: tuple[str, ...] = (),
) -> Experiment:
    """The file's experiment, overridden by what the command line says."""
    base = Experiment.read(config) if config is not None else Experiment()
    given = {"data": data, "partition": partition, "clients": clients, "unseen": unseen, "model": model, "head": head}
    changed = {name: value for name, value in given.items() if value is not None}
    base = Experiment.of({**base.record(), **changed}, "the command line")
    base = replace(base, methods=registry.expand(methods or base.methods or default_methods))
    return with_settings(base, [*([f"rounds={rounds}"] if rounds is not None else []), *settings])


def _go_on(experiment: Experiment, folder: Path, single: bool, resume: bool) -> None:
    """Build the parts, run what is left of the experiment, print and draw."""
    chosen = experiment.chosen()
    federation = experiment.federation()
    factory = experiment.factory(federation)
    training = {f.name: getattr(experiment.training, f.name) for f in fields(experiment.training)}
    if not resume:
        reason = runs.check(chosen, factory, federation, head=experiment.head, **training)
        if reason:
            console.print(f"{reason}. Clients are trained one after another: the same results, slower.", markup=False,
                          highlight=False, soft_wrap=True)
        _write_experiment(folder, experiment, single)
    count = 1 if single else len(runs.with_baselines(chosen)) * experiment.seeds
    with Live(count) as live:
        if single:
            started = resume and (folder / "config.json").exists()
            results = [
                runs.run(chosen[0], factory, federation, folder=folder, watch=live, resume=started,
                         head=experiment.head, **training)
            ]
        else:
            seeds = range(experiment.training.seed, experiment.training.seed + experiment.seeds)
            del training["seed"]
            results = runs.compare(chosen, factory, federation, seeds=list(seeds), folder=folder, watch=live,
                                   resume=resume, head=experiment.head, **training)
    _print(results)
    to_csv(results, folder / "comparison.csv")
    drawn = [picture(results, folder / "picture.png"), bubbles(federation, folder / "clients.png")]
    if any(len(opposed(group)[0]) for group in by_method(results).values()):
        drawn.append(conflicts(results, folder / "conflicts.png"))
    console.print(f"pictures: {', '.join(map(str, drawn))}")
    console.print(f"run folder: {folder}")


def _write_experiment(folder: Path, experiment: Experiment, single: bool) -> None:
    if (folder / saved.EXPERIMENT).exists():
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


def _folders(folder: Path) -> list[Folder]:
    """The runs inside, in the order they were started."""
    found = [folder / "config.json", *folder.glob("*/seed*/config.json")]
    return [Folder(p.parent) for p in sorted((p for p in found if p.is_file()), key=lambda p: p.stat().st_mtime_ns)]


def _fresh_folder(name: str) -> Path:
    return next(p for p in (Path("runs") / f"{name}-{k}" for k in itertools.count(1)) if not p.exists())


# -- printing --------------------------------------------------------------------------------------------------------


def _wide() -> Console:
    """Where output goes to a file or a pipe there is no width to respect."""
    return console if console.is_terminal else Console(width=max(console.width, 118))


def _print(results: list[Result]) -> None:
    wide = _wide()
    wide.print(comparison(results))
    if len({result.method for result in results}) > 1:
        wide.print(verdict(results), highlight=False)


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
