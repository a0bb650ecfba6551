"""The command line. Bad input is one sentence and exit code 2; ctrl-C leaves a run that can be resumed."""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from typing import Annotated, Any, get_type_hints

import typer
from click import Command as ClickCommand
from click import Context, HelpFormatter
from rich.console import Console
from typer.core import TyperArgument, TyperCommand, TyperGroup
from typer.main import get_command_from_info

import coterie
from coterie.errors import CoterieError, Interrupted, unknown

PLACES = {
    "run": "run", "compare": "run", "show": "show", "report": "show", "watch": "show", "resume": "run",
    "advise": "advise", "data": "show", "methods": "show", "check": "show", "options": "show", "presets": "show",
    "personalize": "serve", "export": "serve", "keys": "flower", "server": "flower", "client": "flower",
    "status": "flower", "bench": "bench", "textbook": "bench",
}
"""Every command, in the order of --help, and the module of this folder that holds it."""


class Commands(TyperGroup):
    """Imports the module of a command when the command is asked for: `coterie --version` waits for no PyTorch."""

    def list_commands(self, ctx: Context) -> list[str]:
        return list(PLACES)

    def get_command(self, ctx: Context, cmd_name: str) -> ClickCommand:
        if cmd_name not in PLACES:
            raise unknown("command", cmd_name, PLACES, listed="`coterie --help` explains them.")
        import_module(f"coterie.cli.{PLACES[cmd_name]}")
        found = next(info for info in app.registered_commands if info.name == cmd_name)
        return get_command_from_info(
            found, pretty_exceptions_short=app.pretty_exceptions_short, rich_markup_mode=app.rich_markup_mode
        )


app = typer.Typer(
    cls=Commands, help="Personalized federated learning: compare methods honestly, then deploy the one that fits.",
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

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, each_watched(args) if "--watch" in args else args)

    def format_arguments(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Nothing: typer lists them with the options, and click would list them again."""

    def get_help(self, ctx: Context) -> str:
        return super().get_help(ctx).replace("\\[", "[")


def each_watched(args: list[str]) -> list[str]:
    """`--watch f1 auroc` as click reads it, `--watch f1 --watch auroc`: words that follow and name metrics."""
    from coterie.registry import metrics  # late: PyTorch, which `coterie --help` need not wait for

    found: list[str] = []
    for word in args:
        follows = found[-2:-1] == ["--watch"] and word.partition("(")[0].lower() in metrics()
        found += ["--watch", word] if follows else [word]
    return found


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


def screen() -> Console:
    """Where output goes to a file or a pipe there is no width to respect."""
    return console if console.is_terminal else Console(width=max(console.width, 118))


def main() -> None:
    """Entry point of the `coterie` command."""
    try:
        app()
    except CoterieError as error:
        print(f"coterie: {error}", file=sys.stderr)
        sys.exit(2)
    except Interrupted:
        print("coterie: stopped after finishing the round; `coterie resume` its folder to go on.", file=sys.stderr)
        sys.exit(130)
    except KeyboardInterrupt:
        print("coterie: stopped.", file=sys.stderr)
        sys.exit(130)
