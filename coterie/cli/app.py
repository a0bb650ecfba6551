"""The command line. Bad input is one sentence and exit code 2; ctrl-C leaves a run that can be resumed."""

from __future__ import annotations

import re
import sys
from functools import partial
from importlib import import_module
from typing import Annotated, Any, get_type_hints

import typer
from click import Command as ClickCommand
from click import Context, HelpFormatter, Option
from typer.core import TyperArgument, TyperCommand, TyperGroup
from typer.main import get_command_from_info

import coterie
from coterie.errors import CoterieError, Interrupted, say, tell, unknown
from coterie.report.screen import Screen
from coterie.trust import code

PLACES = {
    "run": "run", "compare": "run", "show": "show", "report": "show", "watch": "show", "resume": "run",
    "advise": "advise", "dissect": "dissect", "data": "show", "methods": "show", "check": "show", "options": "show",
    "presets": "show", "personalize": "serve", "export": "serve", "keys": "flower", "server": "flower",
    "client": "flower", "status": "flower", "bench": "bench", "textbook": "bench",
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
console = Screen()


class Command(TyperCommand):
    """Puts right what typer 0.20 does with click 8.5: arguments lose their help, and defaults read `\\[default: 2]`."""

    def __init__(self, *words: Any, **options: Any) -> None:
        super().__init__(*words, **options)
        hints = get_type_hints(self.callback, include_extras=True)
        for one in self.params:
            if isinstance(one, TyperArgument) and not one.help:
                one.help = hints[one.name].__metadata__[0].help

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        args = each_watched(args, self.name in TAKE_METHODS) if "--watch" in args else args
        self._refuse_twice(ctx, args)
        return super().parse_args(ctx, args)

    def _refuse_twice(self, ctx: Context, args: list[str]) -> None:
        """Of an option with one value that is given twice, click takes the last one without a word."""
        *_, given = self.make_parser(ctx).parse_args(list(args))
        for one in self.params:
            if isinstance(one, Option) and not one.multiple and not one.is_flag and given.count(one) > 1:
                raise CoterieError(f"{max(one.opts, key=len)} is given twice, and it takes one value; give it once.")

    def format_arguments(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Nothing: typer lists them with the options, and click would list them again."""

    def get_help(self, ctx: Context) -> str:
        return super().get_help(ctx).replace("\\[", "[")


TAKE_METHODS = ("run", "compare")
"""Commands whose words are methods."""


def each_watched(args: list[str], methods: bool) -> list[str]:
    """`--watch f1 auroc` as click reads it, `--watch f1 --watch auroc`: words that follow and name metrics.

    The word behind them is another argument, and where such are `methods`, one that names neither is refused as what it
    may have been meant for.
    """
    from coterie import registry  # late: PyTorch, which `coterie --help` need not wait for

    found: list[str] = []
    for word in args:
        follows = found[-2:-1] == ["--watch"] and not word.startswith("-")
        metric = follows and word.partition("(")[0].lower() in registry.metrics()
        if follows and not metric and methods and ".py" not in word:
            name = re.split(r"[:+(]", word)[0]
            known = {"all", *registry.methods()}
            if name.lower() not in known:
                raise unknown("metric or method", name, {*known, *registry.metrics()})
        found += ["--watch", word] if metric else [word]
    return found


command = partial(app.command, cls=Command)


def _say_version(wanted: bool) -> None:
    if wanted:
        tell(f"coterie {coterie.__version__}")
        raise typer.Exit


@app.callback(help=app.info.help)
def top(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_say_version)
    ] = False,
) -> None:
    ctx.with_resource(code.only_trusted())  # what is typed is trusted; what stands in files only if it was before


def screen() -> Screen:
    """For tables: where output goes to a file or a pipe there is no width to respect."""
    return Screen(least=118)


def main() -> None:
    """Entry point of the `coterie` command."""
    try:
        app()
    except CoterieError as error:
        say([str(error)])
        sys.exit(2)
    except Interrupted:
        say(["stopped after finishing the round; `coterie resume` its folder to go on."])
        sys.exit(130)
    except KeyboardInterrupt:
        say(["stopped."])
        sys.exit(130)
