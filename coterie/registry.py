"""Finding methods, aggregators, optimizers and metrics by name: whatever lies in their folders is known."""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import coterie.aggregators
import coterie.methods
import coterie.metrics
import coterie.optimizers
from coterie import files
from coterie.contract.aggregator import Aggregator
from coterie.contract.local import LocalOptions
from coterie.contract.mean import Mean
from coterie.contract.method import Method
from coterie.contract.metric import Metric
from coterie.contract.optimizer import Optimizer
from coterie.errors import CoterieError, unknown
from coterie.options import added, build, convert, current, options, parse_call, pieces, spelled
from coterie.trust import code

V = TypeVar("V")

OF_RUN = "training."
"""Before an option's name: the training option, whatever the method itself calls so."""
OPTIMIZERS = {"optimizer": False, "server": True}
"""Training options that name an optimizer, and whether it is the server's."""


def _defined(module: ModuleType, base: type[V]) -> dict[str, type[V]]:
    """The classes a module defines itself, by their `name`; one that begins with `_` is a base of others."""
    found = [v for v in vars(module).values() if isinstance(v, type) and issubclass(v, base) and v is not base]
    own = [v for v in found if v.__module__ == module.__name__ and not v.__name__.startswith("_")]
    return {v.name: v for v in own}  # type: ignore[attr-defined]


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


def keeping() -> list[str]:
    """The aggregators that, with their defaults, keep to clients' weights; privacy is another matter."""
    return [name for name, cls in aggregators().items() if cls().weighs and not cls.private]


def optimizers() -> dict[str, type[Optimizer]]:
    """Every optimizer by name."""
    return _found(coterie.optimizers, Optimizer)


def metrics() -> dict[str, type[Metric]]:
    """Every metric by name."""
    return _found(coterie.metrics, Metric)


def optimizer(spec: str | Optimizer, server: bool = False) -> Optimizer:
    """An optimizer from its spelling `name(option=value,...)`, or from a file, `mine.py:Lion(beta=0.9)`.

    At the `server` some options have other defaults. Clients step by the run's learning rate, so there `lr` is refused.
    """
    if isinstance(spec, Optimizer):
        cls, given = type(spec), {f.name: getattr(spec, f.name) for f in fields(spec)}
    else:
        cls, given = _called(spec, optimizers(), Optimizer, "optimizer")
    if server and given.get("keep") not in (None, False, "false"):
        raise CoterieError(f"the server's {cls.name} always remembers its past; leave out keep.")
    if not server and given.get("lr") is not None:
        beside = f"lr={given['lr']} beside optimizer={cls.name}"
        raise CoterieError(f"clients step by the run's learning rate; write {beside}.")
    if server and isinstance(spec, str):
        given = {**cls.at_server, **given}
    made = build(cls, given, cls.name)
    if server and made.lr is None:
        raise CoterieError(f"the server's {cls.name} needs a step size of its own; write {cls.name}(lr=0.01).")
    return made


def shortest(spec: str, server: bool = False) -> str:
    """An optimizer's spelling without what is its default; raises as `optimizer` does.

    Where no file may run, one that lies in a file stays as it is spelled.
    """
    if code.runs_nothing() and ".py:" in spec:
        return spec
    made = optimizer(spec, server)
    return called(made, made.at_server if server else None)


def metric(spec: str) -> Metric:
    """A metric from its spelling `name(option=value,...)`, or from a file, `mine.py:Gmean`."""
    cls, given = _called(spec, metrics(), Metric, "metric")
    return build(cls, given, cls.name)


def called(value: Optimizer | Metric, like: Mapping[str, Any] | None = None) -> str:
    """The spelling that builds an optimizer or a metric again; `like` are defaults that differ from the class's."""
    plain = {f.name: f.default for f in fields(value)} | dict(like or {})
    given = [f"{name}={spelled(getattr(value, name))}" for name in plain if getattr(value, name) != plain[name]]
    source = sys.modules[type(value).__module__].__dict__.get("__coterie_file__")
    name = f"{source}:{type(value).__name__}" if source else value.name
    return f"{name}({','.join(given)})" if given else name


def _called(spec: str, known: Mapping[str, type[V]], base: type[V], kind: str) -> tuple[type[V], dict[str, Any]]:
    """The class and the options, as text, of `name(option=value,...)`."""
    name, given = parse_call(spec)
    file = files.in_file(name)
    if file is not None:
        return _from_file(Path(file[0]), file[1], base, kind), dict(given)
    if name.lower() not in known:
        raise unknown(kind, name, known)
    return known[name.lower()], dict(given)


def method(spec: str, **values: Any) -> Method:
    """A method from its spelling `name[:preset][,option=value...][+aggregator[:preset][,option=value...]]`.

    `fedfew`, `fedfew:official`, `fedfew:models=5,mu=0.1`, `fedavg+confree:c=0.3`, or `mine.py:MyMethod` for a
    class in a file. Among the options may be training options, for this method alone: `fedper:lr=0.1`, or
    `training.lr` where the method's own have, or had, that name. Further values override options.
    """
    text, plugged = _unplug(spec)
    cls, rest = _method_class(text)
    preset, given = _parsed(cls, rest, cls.presets, {*options(cls), *options(LocalOptions)} - {"aggregator"})
    own, local = ({**mine, **more} for mine, more in zip(_sorted(cls, given), _sorted(cls, values), strict=True))
    chosen = _value(cls, preset, own)
    if local:
        chosen = replace(chosen, training=_local(cls.name, {**dict(chosen.training), **local}))
    if plugged:
        name, _, rest = plugged.partition(":")
        if name.lower() not in aggregators():
            raise unknown("aggregator", name, aggregators())
        plug = aggregators()[name.lower()]
        if not cls.averages:
            raise CoterieError(f"{cls.name} averages nothing, so '+{name}' has no effect on it.")
        chosen = replace(chosen, aggregator=_value(plug, *_parsed(plug, rest, plug.presets, options(plug))))
    return chosen


def _method_class(text: str) -> tuple[type[Method], str]:
    """The class that a spelling without its aggregator names, and what stands behind the name."""
    name, _, rest = text.partition(":")
    if name.lower() in methods():
        return methods()[name.lower()], rest
    file = files.in_file(text)
    if file is not None:
        return _from_file(Path(file[0]), file[1], Method, "method"), file[2]
    if name.endswith(".py"):
        raise CoterieError(f"which class of {name} is the method? Write {name}:NAME.")
    raise unknown("method", name, methods())


def _sorted(cls: type[Method], values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A method's own options, under the names they have now, and training options that stand among them."""
    own: dict[str, Any] = {}
    local: dict[str, Any] = {}
    for given, value in values.items():
        name, what = (given, value) if given.startswith(OF_RUN) else next(iter(current(cls, {given: value}).items()))
        plain = name.removeprefix(OF_RUN)
        into, key = (own, name) if name in options(cls) else (local, plain)
        if into is local and plain not in options(LocalOptions):
            known = {*options(cls), *options(LocalOptions)} - {"aggregator"}
            words = {**LocalOptions.OTHER_WORDS, **LocalOptions.of_the_run(), **_ranks(cls)}
            raise unknown(f"option of {cls.name}", given, known, words, value=spelled(value))
        if key in into:
            raise CoterieError(f"{key} is given twice for {cls.name}, {spelled(into[key])} and {spelled(what)}.")
        into[key] = what
    return own, local


def _ranks(cls: type[Method]) -> dict[str, str]:
    """For `unknown`: which methods take unequal ranks, where this one does not."""
    able = [name for name, other in methods().items() if "ranks" in options(other)]
    equal = f"in {cls.name} all clients have adapters of one rank; those of unequal ones are for {', '.join(able)}"
    words = {"ranks": equal, "rank": "it belongs to the model: --adapter lora:rank={}"}
    return {} if cls.name in able else words


def takes(cls: type[Method], option: str) -> bool:
    """Whether an option of this name may stand in a method's spelling: its own, a former name, or a training option."""
    return option in {*options(cls), *dict(cls.FORMER)} or option.removeprefix(OF_RUN) in options(LocalOptions)


def _local(kind: str, values: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Training options of one method, checked as a run's are, in their order, optimizers in their shortest spelling."""
    known = options(LocalOptions).items()
    found = {name: convert(values[name], hint, f"{kind}'s {name}") for name, hint in known if name in values}
    try:
        LocalOptions(**found)
        for name, server in OPTIMIZERS.items():
            if name in found:
                found[name] = shortest(found[name], server)
    except CoterieError as reason:
        raise CoterieError(f"{kind}: {reason}") from reason
    return tuple(found.items())


def renamed(spec: str, **values: Any) -> list[str]:
    """A sentence for each option of this spelling that is called otherwise now, and how it was read."""
    cls, rest = _method_class(_unplug(spec)[0])
    given = {**_parsed(cls, rest, cls.presets, options(cls))[1], **values}
    former, notes = dict(cls.FORMER), []
    for name, value in given.items():
        if name in former and name not in options(cls):
            now = former[name].format(value)
            alone = f"; to set the run's {name} for {cls.name} alone, write {OF_RUN}{name}={value}"
            more = alone if name in options(LocalOptions) else ""
            notes.append(f"{cls.name}'s {name} is {now} now and was read as that{more}.")
    return notes


def expand(specs: Iterable[str], adapters: bool = False, frozen: bool = True) -> tuple[str, ...]:
    """Spellings in their order, each once, with every known method in place of the word `all`: those that work on low-
    rank adapters are among them where the model has some (`adapters`), and those that move the backbone where that is
    `frozen` otherwise."""
    every = [name for name, cls in methods().items() if (adapters or not cls.adapters) and (frozen or not cls.moves)]
    return tuple(dict.fromkeys(name for spec in specs for name in (every if spec.lower() == "all" else [spec])))


def _unplug(spec: str) -> tuple[str, str]:
    """`fedrep+confree:c=0.3` -> method and aggregator; a plus inside an option's value belongs to the value."""
    at = len(spec)
    while (at := spec.rfind("+", 0, at)) >= 0:
        text, plugged = spec[:at], spec[at + 1 :]
        last = text.replace(":", ",").rpartition(",")[2]
        if "=" not in last or plugged.partition(":")[0].lower() in aggregators():
            return text, plugged
    return spec, ""


def spelling(chosen: Method) -> str:
    """The spelling that builds this method again: name, preset if one is nearest, and every option that differs.

    One that came from a run's copy of its file is called by the file, as it was when the run began.
    """
    source = sys.modules[type(chosen).__module__].__dict__.get("__coterie_file__")
    text = _spelled(f"{source}:{type(chosen).__name__}" if source else chosen.name, chosen)
    plugged = chosen.aggregator
    return code.original(text if plugged == Mean() else f"{text}+{_spelled(plugged.name, plugged)}")


def respelled(text: str) -> str:
    """A method's spelling as it is written now: older runs have `=True` and `=False`, and options by former names.

    A method in a file is not read for that, and one that is not known here stays as it is.
    """
    text = re.sub(r"=(?:True|False)(?=[,+]|$)", lambda found: found[0].lower(), text)
    if ".py:" in text:
        return text
    try:
        return spelling(method(text))
    except CoterieError:
        return text


def _spelled(name: str, value: Any) -> str:
    """`name:preset,option=value`, from whichever of the default and the presets leaves the least to say."""
    plain = [f.name for f in fields(value) if f.init and f.name not in ("aggregator", "printed", "training")]
    ways = []
    for preset in ("", *getattr(value, "presets", ())):
        base = getattr(type(value), preset)() if preset else type(value)()
        if getattr(base, "printed", "") == getattr(value, "printed", ""):  # a preset's mark is no option
            mine = {n: getattr(value, n) for n in plain if getattr(value, n) != getattr(base, n)}
            different = [f"{n}={spelled(v)}" for n, v in mine.items()]
            ways.append([preset, *different] if preset else different)
    items = min(ways, key=len, default=[])
    if isinstance(value, Method):
        other = {*dict(value.FORMER), *plain}  # what these names mean without `training.`
        items += [f"{OF_RUN if n in other else ''}{n}={spelled(v)}" for n, v in value.training]
    return f"{name}:{','.join(items)}" if items else name


def _parsed(
    cls: type[Any], rest: str, presets: tuple[str, ...], known: Iterable[str]
) -> tuple[str, dict[str, str]]:
    """The preset, if one is named, and the options, as text, of `preset,option=value,...`."""
    preset: str = ""
    given: dict[str, str] = {}
    for item in pieces(rest):
        name, equals, text = item.partition("=")
        if equals:
            added(given, name.strip(), text.strip(), f"{cls.name}:{rest}")
        elif name in presets and preset:
            raise CoterieError(f"{cls.name} can have one preset, not {preset} and {name}.")
        elif name in presets:
            preset = name
        else:
            raise unknown(f"preset or option of {cls.name}", name, {*presets, *(f"{o}=..." for o in known)})
    return preset, given


def _value(cls: type[V], preset: str, given: Mapping[str, Any]) -> V:
    """The default, or the preset, with these options."""
    kind: str = cls.name  # type: ignore[attr-defined]
    made = build(cls, given, kind)  # for its errors, where there is a preset
    if not preset:
        return made
    known = options(cls)
    base: Any = getattr(cls, preset)()
    changed: V = replace(base, **{n: convert(v, known[n], f"{kind}'s {n}") for n, v in given.items()})
    return changed


def _from_file(path: Path, name: str, base: type[V], kind: str) -> type[V]:
    classes = {cls.__name__: cls for cls in _defined(code.module(path, f"the {kind} {name}"), base).values()}
    if name not in classes:
        raise unknown(f"{kind} in {path}", name, classes)
    cls = classes[name]
    if vars(cls).get("__annotations__") and "__dataclass_fields__" not in vars(cls):
        raise CoterieError(f"{name} in {path} has options but is no dataclass; write @dataclass(frozen=True) above it.")
    return cls
