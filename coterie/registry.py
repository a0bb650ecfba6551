"""Finding methods and aggregators by name: whatever lies in `coterie/methods` and `coterie/aggregators` is known."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterable
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import coterie.aggregators
import coterie.methods
from coterie import files
from coterie.contract.aggregator import Aggregator
from coterie.contract.mean import Mean
from coterie.contract.method import Method
from coterie.errors import CoterieError, unknown
from coterie.options import build, convert, options, spelled

V = TypeVar("V")


def _defined(module: ModuleType, base: type[V]) -> dict[str, type[V]]:
    """The classes a module defines itself, by their `name`."""
    found = [v for v in vars(module).values() if isinstance(v, type) and issubclass(v, base) and v is not base]
    return {v.name: v for v in found if v.__module__ == module.__name__}  # type: ignore[attr-defined]


@cache
def _found(package: ModuleType, base: type[V]) -> dict[str, type[V]]:
    classes: dict[str, type[V]] = {}
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda info: info.name):
        classes |= _defined(importlib.import_module(f"{package.__name__}.{info.name}"), base)
    return classes


def methods() -> dict[str, type[Method]]:
    """Every method by name."""
    return _found(coterie.methods, Method)


def aggregators() -> dict[str, type[Aggregator]]:
    """Every aggregator by name; the mean, which methods use by default, is part of the contract."""
    found: dict[str, type[Aggregator]] = {Mean.name: Mean, **_found(coterie.aggregators, Aggregator)}
    return dict(sorted(found.items()))


def method(spec: str, **values: Any) -> Method:
    """A method from its spelling `name[:preset][,option=value...][+aggregator[:preset][,option=value...]]`.

    `fedfew`, `fedfew:official`, `fedfew:models=5,mu=0.1`, `fedavg+confree:c=0.3`, or `mine.py:MyMethod` for a
    class in a file. Further values override options.
    """
    text, plugged = _unplug(spec)
    file = files.IN_FILE.match(text)
    if file:
        cls, rest = _from_file(Path(file[1]), file[2]), file[3] or ""
    else:
        name, _, rest = text.partition(":")
        if name.endswith(".py"):
            raise CoterieError(f"which class of {name} is the method? Write {name}:NAME.")
        if name.lower() not in methods():
            raise unknown("method", name, methods())
        cls = methods()[name.lower()]
    chosen = _value(cls, rest, cls.name, cls.presets, values)
    if plugged:
        name, _, rest = plugged.partition(":")
        if name.lower() not in aggregators():
            raise unknown("aggregator", name, aggregators())
        plug = aggregators()[name.lower()]
        if not cls.averages:
            raise CoterieError(f"{cls.name} averages nothing, so '+{name}' has no effect on it.")
        chosen = replace(chosen, aggregator=_value(plug, rest, plug.name, plug.presets, {}))
    return chosen


def expand(specs: Iterable[str]) -> tuple[str, ...]:
    """Spellings in their order, each once, with every known method in place of the word `all`."""
    return tuple(dict.fromkeys(name for spec in specs for name in (methods() if spec.lower() == "all" else [spec])))


def _unplug(spec: str) -> tuple[str, str]:
    """`fedrep+confree:c=0.3` -> method and aggregator; a plus inside an option's value belongs to the value."""
    text, plus, plugged = spec.rpartition("+")
    if not plus:
        return spec, ""
    last = text.replace(":", ",").rpartition(",")[2]
    inside_value = "=" in last and plugged.partition(":")[0].lower() not in aggregators()
    return (spec, "") if inside_value else (text, plugged)


def spelling(chosen: Method) -> str:
    """The spelling that builds this method again: name, preset if one is nearest, and every option that differs."""
    source = sys.modules[type(chosen).__module__].__dict__.get("__coterie_file__")
    text = _spelled(f"{source}:{type(chosen).__name__}" if source else chosen.name, chosen)
    plugged = chosen.aggregator
    return text if plugged == Mean() else f"{text}+{_spelled(plugged.name, plugged)}"


def _spelled(name: str, value: Any) -> str:
    """`name:preset,option=value`, from whichever of the default and the presets leaves the least to say."""
    plain = [f.name for f in fields(value) if f.name not in ("aggregator", "printed")]
    ways = []
    for preset in ("", *getattr(value, "presets", ())):
        base = getattr(type(value), preset)() if preset else type(value)()
        if getattr(base, "printed", "") == getattr(value, "printed", ""):  # a preset's mark is no option
            mine = {n: getattr(value, n) for n in plain if getattr(value, n) != getattr(base, n)}
            different = [f"{n}={spelled(v)}" for n, v in mine.items()]
            ways.append([preset, *different] if preset else different)
    items = min(ways, key=len, default=[])
    return f"{name}:{','.join(items)}" if items else name


def _value(cls: type[V], rest: str, kind: str, presets: tuple[str, ...], values: dict[str, Any]) -> V:
    base: V | None = None
    given: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        name, equals, text = item.partition("=")
        if equals:
            given[name.strip()] = text.strip()
        elif name in presets:
            base = getattr(cls, name)()
        else:
            raise unknown(f"preset or option of {kind}", name, {*presets, *(f"{o}=..." for o in options(cls))})
    given |= values
    if base is None:
        return build(cls, given, kind)
    build(cls, given, kind)  # for its errors
    known = options(cls)
    return replace(base, **{n: convert(v, known[n], f"{kind}'s {n}") for n, v in given.items()})  # type: ignore[type-var]


def _from_file(path: Path, name: str) -> type[Method]:
    classes = {cls.__name__: cls for cls in _defined(files.module(path, f"the method {name}"), Method).values()}
    if name not in classes:
        raise unknown(f"method in {path}", name, classes)
    cls = classes[name]
    if vars(cls).get("__annotations__") and "__dataclass_fields__" not in vars(cls):
        raise CoterieError(f"{name} in {path} has options but is no dataclass; write @dataclass(frozen=True) above it.")
    return cls
