"""The catalogue of methods, aggregators, optimizers and options: the list, one entry's page, and both as Markdown."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Literal, get_args, get_origin

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from coterie import registry
from coterie.aggregators.fedmgdaplus import FedMGDAPlus
from coterie.contract.aggregator import FAR, Aggregator
from coterie.contract.local import LocalOptions
from coterie.contract.mean import Mean
from coterie.contract.method import Method
from coterie.contract.optimizer import Optimizer
from coterie.errors import unknown
from coterie.options import in_words, options, spelled
from coterie.report import notation
from coterie.report.table import markdown_table
from coterie.running.experiment import Experiment
from coterie.running.training import Training

Entry = Method | Aggregator | Optimizer

WIDTH = 118
COLUMNS = ("method", "shared", "client keeps", "down", "up", "an unseen client gets")
COMMON = tuple(options(Method))
TRAFFIC = "down and up are in models per client and round"
COMMAND = "coterie methods --markdown > docs/methods.md"
OPTIONS_COMMAND = "coterie options --markdown > docs/options.md"


def find(spec: str) -> Entry:
    """A method, an aggregator or an optimizer from its spelling; an unknown name suggests the nearest of all."""
    name = re.split(r"[:+(]", spec)[0].lower()
    if name in registry.aggregators():
        return registry.method(f"fedavg+{spec}").aggregator
    if name in registry.optimizers():
        return registry.optimizer(spec)
    if ".py:" not in spec and name not in registry.methods():
        known = {*registry.methods(), *registry.aggregators(), *registry.optimizers()}
        raise unknown("method, aggregator or optimizer", name, known)
    return registry.method(spec)


def families() -> dict[str, list[type[Method]]]:
    """The methods of each family, both in alphabetical order."""
    ordered = sorted(registry.methods().values(), key=lambda cls: (cls.family, cls.name))
    return {family: list(group) for family, group in itertools.groupby(ordered, key=lambda cls: cls.family)}


def plugs() -> list[type[Aggregator]]:
    """The aggregators in alphabetical order."""
    return [cls for _, cls in sorted(registry.aggregators().items())]


# -- what an entry says of itself ------------------------------------------------------------------------------------


def headline(cls: type[Entry]) -> tuple[str, str]:
    """The name as people write it and what it is in a line: its file begins with `Name: what it is.`"""
    first = (sys.modules[cls.__module__].__doc__ or "").strip().partition("\n")[0]
    title, colon, line = first.partition(": ")
    return (title, line) if colon else (cls.__name__, first)


def explained(cls: type[Any]) -> dict[str, str]:
    """Option -> the string that stands under its field, where one does; the nearest class has the last word."""
    found: dict[str, str] = {}
    for one in filter(is_dataclass, reversed(cls.__mro__)):
        tree = ast.parse(textwrap.dedent(inspect.getsource(one))).body[0]
        assert isinstance(tree, ast.ClassDef)
        for field, below in itertools.pairwise(tree.body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                match below:
                    case ast.Expr(ast.Constant(str(text))):
                        found[field.target.id] = " ".join(text.split())
    return {name: found[name] for name in options(cls) if name in found}


def own_options(entry: Entry) -> dict[str, str]:
    """The options beyond those of every method, with their values as the command line spells them."""
    return {name: _spelled(getattr(entry, name)) for name in options(type(entry)) if name not in COMMON}


def presets(cls: type[Entry]) -> list[tuple[str, str, list[str]]]:
    """Name, description and what it sets otherwise than the defaults, for each named variant; optimizers have none."""
    build = {name: getattr(cls, name) for name in getattr(cls, "presets", ())}
    return [(name, " ".join((make.__doc__ or "").split()), _changed(make())) for name, make in build.items()]


def _changed(entry: Entry) -> list[str]:
    """The options that are not at their defaults; `printed` is a mark, not an option to set."""
    cls = type(entry)
    values = {name: (getattr(entry, name), getattr(cls(), name)) for name in options(cls) if name != "printed"}
    return [f"{name}={_spelled(value)}" for name, (value, default) in values.items() if value != default]


def _spelled(value: Any) -> str:
    if isinstance(value, Aggregator):
        changed = ",".join(_changed(value))
        return f"{value.name}:{changed}" if changed else value.name
    return spelled(value) or "-"


def _defaults(cls: type[Entry]) -> str:
    return ", ".join(f"{name}={value}" for name, value in own_options(cls()).items()) or "-"


def _choices(cls: type[Any], name: str) -> list[str]:
    """What an option can be set to, where that is one of a few words."""
    hint = options(cls)[name]
    return list(map(str, get_args(hint))) if get_origin(hint) is Literal else []


def _values(cls: type[Any], name: str, mark: str = "") -> str:
    """What an option can be set to, as a phrase: `one of paper, pfllib`, `above 0, or none`; `mark` is round words."""
    choices = ", ".join(f"{mark}{choice}{mark}" for choice in _choices(cls, name))
    return f"one of {choices}" if choices else in_words(cls, name)


def _sentence(phrase: str) -> str:
    """The phrase as a sentence before another one; nothing of nothing."""
    return f"{phrase[:1].upper()}{phrase[1:]}. " if phrase else ""


def _facts(entry: Entry) -> list[tuple[str, str]]:
    cls = type(entry)
    if isinstance(entry, Aggregator):
        own = [("protects", entry.protects), ("fewest clients", str(entry.minimum)), ("weights", _weights(entry)),
               ("not for", _refusing(entry)),
               ("server's sums", "leave out whom it does not keep" if entry.robust else ""),
               ("use", f"fedavg+{entry.name}")]
    elif isinstance(entry, Optimizer):
        use = f"optimizer={entry.name} or server={entry.name}, for one method fedavg:optimizer={entry.name}"
        own = [("at the server", at_server(cls)), ("use", use)]
    else:
        plain, why = registry.spelling(type(entry)()), entry.unsteppable
        own = [
            ("family", entry.family), ("shared", entry.shared), ("client keeps", entry.keeps),
            ("traffic", f"{entry.down} down, {entry.up} up (models per client and round)"),
            ("unseen client", entry.newcomer),
            ("aggregators", _aggregators(entry, plain)), ("not protected", entry.unprotected),
            ("client steps", _client_steps(entry, plain)),
            ("server steps", f"by none, for {why}" if why else f"by any, as in {plain}:server=adam"),
        ]
    return [(name, text) for name, text in [*own, ("citation", cls.cite)] if text]


def _aggregators(entry: Method, plain: str) -> str:
    """Which aggregators a method takes."""
    if not entry.averages:
        return "none, for it averages nothing"
    if entry.running_mean or entry.products:
        return f"the mean and robust ones, as in {plain}+median"
    if not entry.soft:
        return f"any, as in {plain}+confree"
    known = ", ".join(registry.keeping())
    return f"those that keep to clients' weights, as in {plain}+median: {known}; under others its models would be one"


def _weights(entry: Aggregator) -> str:
    """What it makes of clients' weights."""
    if entry.private:
        return ""
    soft = ", ".join(name for name, cls in registry.methods().items() if cls.soft)
    return "kept to" if entry.weighs else f"not kept to, so it is not for {soft}"


def _refusing(entry: Aggregator) -> str:
    """Methods that take the mean and robust aggregators alone, where it is neither."""
    if entry.private or entry.robust or isinstance(entry, Mean):
        return ""
    return ", ".join(name for name, cls in registry.methods().items() if cls.running_mean or cls.products)


def _client_steps(entry: Method, plain: str) -> str:
    """Which local optimizers a method takes, and what becomes of its hook under them."""
    why = entry.only_plain()
    steps = f"plain SGD alone, for {why}" if why else f"by any optimizer, as in {plain}:optimizer=adam"
    return f"{steps}; {entry.hook}" if entry.hook else steps


def at_server(cls: type[Any]) -> str:
    """The defaults that an optimizer has at the server."""
    return ", ".join(f"{name}={_spelled(value)}" for name, value in cls.at_server.items()) or "-"


def alone() -> str:
    """Which training options a method may have of its own."""
    local = options(LocalOptions)
    own = [f"{cls.name}'s {name}" for cls in registry.methods().values() for name in dict(cls.FORMER) if name in local]
    return (
        f"Training options may stand among a method's, for it alone: {', '.join(local)}. `coterie options` explains "
        f"them. Where a method once called an option of its own so ({', '.join(own)}) that is still what it is read "
        f"as, with a note; there write {registry.OF_RUN}epochs and so on."
    )


# -- on the terminal -------------------------------------------------------------------------------------------------


def listing(width: int) -> RenderableType:
    """Every method, aggregator and optimizer in tables of at most 118 columns."""
    width = min(width, WIDTH)
    groups = families()
    parts: list[RenderableType] = [Text(f"{len(registry.methods())} methods; {TRAFFIC}", "bold")]
    parts += _blocks(
        COLUMNS, (24, 19, 12, 12, 35), width,
        {f: [(c.name, c.shared, c.keeps, c.down, c.up, c.newcomer) for c in group] for f, group in groups.items()},
    )
    parts.append(Text("defaults and citations of the methods", "bold"))
    parts += _blocks(
        ("method", "defaults", "citation"), (46, 59), width,
        {family: [(c.name, _defaults(c), c.cite or "-") for c in group] for family, group in groups.items()},
    )
    parts.append(Text(f"{len(plugs())} aggregators; plugged in as in fedavg+confree:c=0.3", "bold"))
    parts += _blocks(
        ("aggregator", "what it does", "fewest clients", "defaults", "citation"), (26, 9, 29, 33), width,
        {"": [(c.name, headline(c)[1].rstrip("."), str(c().minimum), _defaults(c), c.cite or "-") for c in plugs()]},
    )
    parts.append(Text(f"{len(registry.optimizers())} optimizers; at the server as in server=adam(lr=0.1)", "bold"))
    parts += _blocks(
        ("optimizer", "what it does", "defaults", "at the server", "citation"), (26, 29, 20, 31), width,
        {"": [(c.name, headline(c)[1].rstrip("."), _defaults(c), at_server(c), c.cite or "-")
              for c in registry.optimizers().values()]},
    )
    parts.append(Text("`coterie methods NAME` explains one; `coterie methods --markdown` prints everything.", "dim"))
    return Group(*parts)


def _blocks(
    heads: Sequence[str], ratios: Sequence[int], width: int, groups: Mapping[str, Sequence[Sequence[str]]]
) -> list[RenderableType]:
    """One table for each group, below its title, all with the same columns; the first column is never wrapped."""
    names = 2 + max(len(row[0]) for rows in groups.values() for row in rows)

    def grid(rows: Sequence[Sequence[str]], style: str = "") -> Table:
        table = _grid((names, *[None] * len(ratios)), rows, style)
        table.width = width
        for column, ratio in zip(table.columns[1:], ratios, strict=True):
            column.ratio = ratio
        return table

    parts: list[RenderableType] = [Text(), grid([heads], "bold")]
    for title, rows in groups.items():
        parts += [Text(title, "italic")] if title else []
        parts.append(grid([(f"  {name}", *cells) for name, *cells in rows]))
    return [*parts, Text()]


def _grid(widths: Sequence[int | None], rows: Iterable[Sequence[str]], style: str = "") -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for place, width in enumerate(widths):
        table.add_column(width=width, no_wrap=place == 0, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style) for cell in row))
    return table


def page(entry: Entry, width: int) -> RenderableType:
    """Everything about one method, aggregator or optimizer, with the values it has."""
    cls, said = type(entry), explained(type(entry))
    title, line = headline(cls)
    parts: list[RenderableType] = [Text(f"{title}: {line}" if line else title, "bold"), Text()]
    parts += [Text(_fitted(inspect.getdoc(cls) or "", width)), Text()]
    parts += [_grid((16, None), [(f"  {name}", text) for name, text in _facts(entry)]), Text()]
    given = own_options(entry)
    if isinstance(entry, Method):
        common = {"aggregator": entry.averages, "validation": True, "printed": bool(entry.printed)}
        given |= {name: _spelled(getattr(entry, name)) for name, wanted in common.items() if wanted}
        given |= {name: _spelled(value) for name, value in entry.training}
        said = {**explained(LocalOptions), **said}
    if given:
        own = options(cls)
        holds = {o: cls if o in own else LocalOptions for o in given}
        rows = [(f"  {o}", value, " | ".join(_choices(holds[o], o)) or in_words(holds[o], o), said.get(o, ""))
                for o, value in given.items()]
        columns = [column for column in zip(*rows, strict=True) if any(column)]
        parts += [Text("options", "bold"), _grid([None] * len(columns), zip(*columns, strict=True)), Text()]
    if isinstance(entry, Method):
        parts += [Text(textwrap.fill(alone(), width), "dim"), Text()]
    variants = [(f"  {entry.name}:{name}", f"{text} {_sets(changed)}") for name, text, changed in presets(cls)]
    if variants:
        parts += [Text("presets", "bold"), _grid((None, None), variants), Text()]
    return Group(*parts[:-1])


def _sets(changed: Sequence[str]) -> str:
    return f"Sets {', '.join(changed)}." if changed else "Sets nothing otherwise."


def _fitted(text: str, width: int) -> str:
    """As it is where it fits, else each paragraph wrapped anew."""
    if max(map(len, text.splitlines()), default=0) <= width:
        return text
    return "\n\n".join(textwrap.fill(" ".join(part.split()), width) for part in text.split("\n\n"))


# -- as Markdown -----------------------------------------------------------------------------------------------------


def markdown() -> str:
    """The whole catalogue: a table for each family, a section for each method, then aggregators and optimizers."""
    text = [f"<!-- Made by `{COMMAND}`; do not edit. -->", "# Methods and aggregators", *_about()]
    text += _tables("#{}")
    text.append("## Method by method")
    text += [section(cls).rstrip() for cls in sorted(registry.methods().values(), key=lambda cls: cls.name)]
    text += ["## Aggregators", *_plugs("#{}")]
    text += [section(cls).rstrip() for cls in plugs()]
    text += ["## Optimizers", *_optimizers("#{}", "optimizers.md")]
    text += [section(cls).rstrip() for cls in registry.optimizers().values()]
    return "\n\n".join(text) + "\n"


def site(traffic: Callable[[type[Method]], str]) -> dict[str, str]:
    """Path -> Markdown for a site: an index of methods, one of aggregators, and a page for each of both and optimizer.

    `traffic` gives the text about a method's bytes, which are measured, so they are no part of the catalogue.
    """
    pages = {
        "methods.md": "\n\n".join(["# Methods", *map(with_formulas, _about()), *_tables("methods/{}.md")]) + "\n",
        "aggregators.md": "\n\n".join(["# Aggregators", *_plugs("aggregators/{}.md")]) + "\n",
    }
    pages |= {f"methods/{name}.md": leaf(cls, traffic(cls)) for name, cls in registry.methods().items()}
    pages |= {f"optimizers/{name}.md": leaf(cls) for name, cls in registry.optimizers().items()}
    return pages | {f"aggregators/{cls.name}.md": leaf(cls) for cls in plugs()}


def leaf(cls: type[Entry], traffic: str = "") -> str:
    """The page of one method, aggregator or optimizer, with its state and traffic, options, presets and citation."""
    title, line = headline(cls)
    equation, _, rest = (inspect.getdoc(cls) or "").partition("\n\n")
    parts = [f"# {title}", _prose(f"{line[:1].upper()}{line[1:]}"), with_formulas(rest)]
    parts.insert(2, "\n".join(["```equation", *notation.clauses(equation), "```"]))
    facts = [(name, with_formulas(text)) for name, text in _facts(cls()) if name != "citation"]
    parts.append("## State and traffic" if issubclass(cls, Method) else "## Use")
    parts += [markdown_table(("", title), facts), traffic]
    given, said = own_options(cls()), explained(cls)
    if given:
        rows = []
        for name, value in given.items():
            meaning = with_formulas(said.get(name, ""))
            rows.append((f"`{name}`", f"`{value}`", f"{_sentence(_values(cls, name, '`'))}{meaning}".strip()))
        parts += ["## Options", markdown_table(("option", "default", "meaning"), rows)]
    variants = [(f"`{cls.name}:{name}`", f"{with_formulas(text)} {_sets([f'`{item}`' for item in changed])}")
                for name, text, changed in presets(cls)]
    if variants:
        parts += ["## Presets", markdown_table(("preset", "what it is"), variants)]
    source = f"`{cls.__module__.replace('.', '/')}.py`"
    cited = f"{_prose(cls.cite)}. " if cls.cite else ""
    parts += ["## Read on", f"{cited}The program is {source}; `coterie methods {cls.name}` prints this page."]
    return "\n\n".join(part for part in parts if part) + "\n"


def _about() -> list[str]:
    validation = explained(Method)["validation"]
    about = [
        f"{len(registry.methods())} methods and {len(plugs())} aggregators, each one file in `coterie/methods` or "
        "`coterie/aggregators`. `coterie methods NAME` explains one. Options are set as in `fedfew:models=5,mu=0.1`, "
        f"presets chosen as in `fedfew:official`. Every method also has the option `validation`, by default true: "
        f"{validation[0].lower()}{validation[1:]} {alone()}",
        "What an option may be stands before its meaning; other values are refused before anything is trained. A "
        "number other than 0 has a size from 1e-30 to 1e30 besides, for rows are kept in float32.",
        f"In the tables, {TRAFFIC}; K is the number of a method's models, M' that of the models a client receives. In "
        "the equations theta is the shared model, phi a body, h a head, SGD_i the local training of client i, n_i its "
        "samples and p_i = n_i / n its share of the participants'.",
    ]
    return [textwrap.fill(paragraph, 120, break_on_hyphens=False) for paragraph in about]


def _tables(link: str) -> list[str]:
    """A heading and a table for each family; `link` makes a name's address."""
    text = []
    for family, group in families().items():
        rows = [(_link(c.name, link), c.shared, c.keeps, c.down, c.up, c.newcomer) for c in group]
        text += [f"## {family.capitalize()}", markdown_table(COLUMNS, rows)]
    return text


def _plugs(link: str) -> list[str]:
    """What aggregators are, and their table."""
    lines = [(_link(c.name, link), headline(c)[1].rstrip("."), c.protects, str(c().minimum), _code(c)) for c in plugs()]
    soft = [cls.name for cls in registry.methods().values() if cls.soft]
    return [
        "They plug into methods that average, whose entries say which they take: `fedrep+confree`, "
        "`fedrep+confree:c=0.3`.",
        markdown_table(("aggregator", "what it does", "protects", "fewest clients", "defaults"), lines),
        *(textwrap.fill(text, 120, break_on_hyphens=False) for text in (
            f"**Shares.** In {', '.join(f'`{name}`' for name in soft)} a client counts in every model, by its share in "
            "it. An aggregator that treats clients of any weight alike would make one model of them, so such a pair is "
            "refused before the first round:",
        )),
        markdown_table(("aggregator", *(f"`{name}`" for name in soft)), [
            (f"`{spec}`", *("allowed" if value.weighs else "refused" for _ in soft)) for spec, value in _ways()
        ]),
        *(textwrap.fill(text, 120, break_on_hyphens=False) for text in (
            "`fedfew:weigh=client` takes the mean and `private` alone: there the updates themselves are multiplied by "
            "the shares. `fedfew:normalise=true` takes no robust aggregator: a model of little weight would follow "
            "whoever has most of it. `fedmtl` takes the mean and robust aggregators alone: what others make of moves "
            "adds up to no mean of models.",
            "**Servers that keep more than models.** Under "
            f"{', '.join(f'`{cls.name}`' for cls in plugs() if cls.robust)}, which are made for clients that may send "
            "anything, whatever else the server takes from clients is taken from those the aggregator keeps: the "
            "linear terms of `feddyn`, the control variates of `scaffold`, the features, statistics and heads of "
            "`fedpac`, the prototypes of `fednh`, the models on which `fesem` places its centres and of which `fedmtl` "
            "keeps the mean, and running statistics. For each of these it keeps the clients whose values are finite "
            f"and at most {FAR:g} times as far from what the aggregator makes of all of them as the median client's. "
            "Under other aggregators these are sums over everybody. What a method takes from clients that no "
            "aggregator protects is said on its page, and when a run begins.",
        )),
    ]


def _ways() -> list[tuple[str, Aggregator]]:
    """Every aggregator but private, with its defaults and with the options that decide whether it keeps to weights."""
    ways = []
    for cls in plugs():
        specs = [cls.name] if not cls.private else []
        weighted = getattr(cls(), "weighted", None)
        specs += [f"{cls.name}:weighted={spelled(not weighted)}"] if weighted is not None else []
        specs += [f"{cls.name}:epsilon=0"] if cls is FedMGDAPlus else []
        ways += [(spec, registry.method(f"fedavg+{spec}").aggregator) for spec in specs]
    return ways


def _optimizers(link: str, page: str) -> list[str]:
    """What optimizers are, and their table; `page` tells more."""
    lines = [(_link(c.name, link), headline(c)[1].rstrip("."), _code(c), f"`{at_server(c)}`")
             for c in registry.optimizers().values()]
    return [
        f"How steps are made of gradients, for clients and at the server: `server=adam(lr=0.1)`; "
        f"[optimizers]({page}) says more.",
        markdown_table(("optimizer", "what it does", "defaults", "at the server"), lines),
    ]


def section(cls: type[Entry]) -> str:
    """One method, aggregator or optimizer: equation, explanation, options, presets, citation."""
    title, line = headline(cls)
    equation, _, rest = (inspect.getdoc(cls) or "").partition("\n\n")
    parts = [f"### {cls.name}", f"{title}: {_prose(line)}" if line else title, f"```text\n{equation}\n```"]
    parts += [_prose(rest)] if rest else []
    items = [f"Defaults: {_code(cls)}.", *_meanings(cls)]
    items += [f"At the server: `{at_server(cls)}`."] if issubclass(cls, Optimizer) else []
    for name, text, changed in presets(cls):
        items.append(f"Preset `{cls.name}:{name}`: {_prose(text)} {_sets([f'`{item}`' for item in changed])}")
    if issubclass(cls, Method) and cls.soft:
        items.append(f"Aggregators: {_prose(_aggregators(cls(), cls.name))}.")
    if issubclass(cls, Method) and cls.unprotected:
        items.append(f"Not protected by a robust aggregator: {_prose(cls.unprotected)}.")
    items += [f"Citation: {_prose(cls.cite)}."] if cls.cite else []
    return "\n\n".join([*parts, "\n".join(f"- {item}" for item in items)]) + "\n"


def _meanings(cls: type[Entry]) -> list[str]:
    """An item for each option that is explained, has a few choices or a range."""
    said, items = explained(cls), []
    for name in own_options(cls()):
        values = _values(cls, name, "`")
        known = [text for text in (f"{values}." if values else "", _prose(said.get(name, ""))) if text]
        items += [f"`{name}`: {' '.join(known)}"] if known else []
    return items


def _link(name: str, address: str) -> str:
    return f"[{name}]({address.format(name)})"


def _code(cls: type[Entry]) -> str:
    return ", ".join(f"`{name}={value}`" for name, value in own_options(cls()).items()) or "none"


def with_formulas(text: str) -> str:
    """Text for the site, which typesets what stands in `\\( \\)`."""
    return "".join(f"\\({part}\\)" if formula else _prose(part) for formula, part in notation.split(text))


def _prose(text: str) -> str:
    """Text whose formulas Markdown would take for markup; what stands between backticks is left alone.

    Not every reader of Markdown lets a backslash stand before `<`, `~` and `=`, so these become entities.
    """
    marks, entities = r"`[^`]*`|[<*~]|(?<!\w)_|^[-+=#]", {"<": "&lt;", "~": "&#126;", "=": "&#61;"}

    def plain(found: re.Match[str]) -> str:
        return found[0] if found[0][0] == "`" else entities.get(found[0], f"\\{found[0]}")

    return re.sub(marks, plain, text, flags=re.MULTILINE)


# -- the options of a run --------------------------------------------------------------------------------------------

ABOUT_OPTIONS = {
    "Training options": (Training, "How clients are trained: `--set lr=0.1` on the command line, repeatable; the table "
                                   "`[training]` of a file; or arguments of `coterie.run` and `coterie.compare`."),
    "Settings of a file": (Experiment, "What is trained on what: the names in a file for `--config`. Most have a flag "
                                       "of their own, such as `--clients`."),
}
ABOUT_METHODS = ("A method's own options are on its page, `coterie methods NAME`. They belong to its spelling, "
                 "`fedprox:mu=0.1`, or are set for it, `--set fedprox.mu=0.1`. Training options that say how clients "
                 "train and what the server makes of it may stand there too and hold for this method alone, "
                 f"`fedper:lr=0.1`: {', '.join(f'`{name}`' for name in options(LocalOptions))}.")


def option_rows(cls: type[Any]) -> list[tuple[str, str, str]]:
    """Name, default and meaning of each option that a dataclass explains."""
    said, values = explained(cls), {f.name: getattr(cls(), f.name) for f in fields(cls)}
    return [(name, "-" if value in ("", (), {}) else _spelled(value), said[name])
            for name, value in values.items() if name in said]


def option_listing(width: int) -> RenderableType:
    """Every training option and every setting of an experiment in tables of at most 118 columns."""
    width = min(width, WIDTH)
    parts: list[RenderableType] = []
    for title, (cls, about) in ABOUT_OPTIONS.items():
        rows = [(f"  {name}", default, f"{_sentence(_values(cls, name))}{text}")
                for name, default, text in option_rows(cls)]
        table = _grid((18, 9, None), rows)
        table.width = width
        table.columns[2].ratio = 1
        parts += [Text(title, "bold"), Text(textwrap.fill(about, width)), Text(), table, Text()]
    return Group(*parts, Text(textwrap.fill(ABOUT_METHODS, width), "dim"))


def option_markdown() -> str:
    """The same as a page."""
    text = [f"<!-- Made by `{OPTIONS_COMMAND}`; do not edit. -->", "# Options"]
    for title, (cls, about) in ABOUT_OPTIONS.items():
        rows = [(f"`{name}`", f"`{default}`", f"{_sentence(_values(cls, name, '`'))}{_prose(text)}")
                for name, default, text in option_rows(cls)]
        text += [f"## {title}", textwrap.fill(about, 120), markdown_table(("option", "default", "meaning"), rows)]
    text += ["## Options of methods", textwrap.fill(f"{ABOUT_METHODS} [Methods](methods.md) has them all.", 120)]
    return "\n\n".join(text) + "\n"
