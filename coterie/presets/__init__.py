"""Published experiments as files: one for each column of a paper's table, with the numbers that it printed.

A preset is an experiment file. Its table `released` holds what the paper's released program does otherwise than the
paper says; `NAME-released` takes it over the rest.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from coterie.errors import unknown
from coterie.running.experiment import Experiment, read_toml

FOLDER = Path(__file__).parent
RELEASED = "-released"


@cache
def names() -> tuple[str, ...]:
    """Every preset, `paper/column`, followed by its `-released` variant where the program differs."""
    found = []
    for path in sorted(p for p in FOLDER.glob("*/*.toml") if not p.name.startswith("_")):
        name = f"{path.parent.name}/{path.stem}"
        found += [name, name + RELEASED] if "released" in read_toml(path) else [name]
    return tuple(found)


def load(name: str) -> Experiment:
    """The experiment of this name; an unknown one suggests the nearest."""
    if name not in names():
        raise unknown("preset", name, names())
    return Experiment.read(FOLDER / f"{name.removesuffix(RELEASED)}.toml", released=name.endswith(RELEASED))


def listing() -> list[str]:
    """A line for each preset, with what it is."""
    wide = max(map(len, names()))
    return [f"{name:<{wide}}  {_said(name)}" for name in names()]


def _said(name: str) -> str:
    if not name.endswith(RELEASED):
        return load(name).about
    return f"the released program: {_differs(load(name.removesuffix(RELEASED)), load(name))}"


def text(name: str) -> str:
    """A preset as a whole experiment file: nothing is left to `extends` or to a variant."""
    chosen = load(name)
    default, lines = Experiment(), []
    for key, value in chosen.record().items():
        if key not in ("training", "published", "head") and value != default.record()[key]:
            lines.append(f"{key} = {_toml(value)}")
    changed = {k: v for k, v in chosen.record()["training"].items() if v != default.record()["training"][k]}
    lines += ["", "[training]", *(f"{key} = {_toml(value)}" for key, value in changed.items())]
    lines += ["", "[published]", *(f'"{key}" = {_toml(value)}' for key, value in chosen.published.items())]
    return "\n".join(lines)


def _toml(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def markdown() -> str:
    """The table of docs/presets.md."""
    heads = "| preset | data | partition | clients | model | rounds | batch | lr | released program |"
    lines = [heads, "|---" * 9 + "|"]
    for name in (n for n in names() if not n.endswith(RELEASED)):
        one, training = load(name), load(name).training
        dealt = one.partition or "natural"
        clients = "natural" if dealt == "natural" else str(one.clients)
        if training.participation < 1:
            clients += f", {training.participation:.0%} a round"
        program = _differs(one, load(name + RELEASED)) if name + RELEASED in names() else "as the paper"
        lines.append(
            f"| `{name}` | {one.data} | {dealt} | {clients} | {one.model} | {training.rounds} | {training.batch} | "
            f"{training.lr:g} | {program} |"
        )
    return "\n".join(lines) + "\n"


def _differs(paper: Experiment, released: Experiment) -> str:
    """What differs in words: settings by value, methods by their spelling."""
    mine, theirs = paper.record(), released.record()
    said = [f"{key} {theirs[key]}" for key in ("data", "partition", "val", "test") if mine[key] != theirs[key]]
    said += [f"{k} {v}" for k, v in theirs["training"].items() if v != mine["training"][k]]
    if mine["methods"] != theirs["methods"]:
        said.append("methods as released")
    return "; ".join(said)
