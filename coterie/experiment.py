"""An experiment as text: data, partition, model, methods, training; from a TOML file, a folder or the command line."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from coterie import files, models, registry
from coterie.config import Training, build, options
from coterie.data import Federation, load, natural, partition
from coterie.errors import CoterieError, unknown
from coterie.method import Method

DEFAULT_PARTITION = "dirichlet:alpha=0.5"


@dataclass(frozen=True)
class Experiment:
    """Everything that decides a result. `federation()`, `factory()` and `chosen()` build the parts."""

    data: str = "digits"
    """`digits`, or the path of an .npz file with x, y and, for natural clients, client."""
    partition: str = ""
    """`name:option=value,...`; by default natural where the data name their clients, else dirichlet:alpha=0.5."""
    clients: int = 20
    """Clients that train (a natural partition takes all of them)."""
    unseen: int = 0
    """Further clients kept out of training."""
    val: float = 0.1
    """Fraction of a client's training data held back for validation."""
    test: float = 0.25
    """Fraction of a client's data held back for testing."""
    data_seed: int = 0
    """Seed of partition and splits; it stays the same for all seeds of a comparison."""
    model: str = "mlp"
    """`name:option=value,...`: linear, mlp, cnn, resnet18, textcnn, fasttext, sensor, or `file.py:Net:option=value`."""
    head: str | None = None
    """The layer that makes the scores, when it is not the last linear one."""
    methods: tuple[str, ...] = ()
    seeds: int = 1
    training: Training = field(default_factory=Training)

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str = "the experiment") -> Experiment:
        """From plain values, e.g. a TOML file's; every unknown name suggests the nearest known one."""
        given = dict(values)
        training = build(Training, given.pop("training", {}), "training")
        methods = given.pop("methods", ())
        if isinstance(methods, str) or not all(isinstance(m, str) for m in methods):
            raise CoterieError(f"methods in {where} must be a list of names, not {methods!r}.")
        for name in given:
            if name not in options(cls):
                raise unknown(f"setting in {where}", name, options(cls))
        made = build(cls, given, where)
        if made.seeds < 1 or made.clients < 1 or made.unseen < 0:
            raise CoterieError(f"seeds and clients must be at least 1 and unseen at least 0 in {where}.")
        return replace(made, methods=tuple(methods), training=training)

    @classmethod
    def read(cls, path: Path) -> Experiment:
        """From a TOML file; a relative data path is taken from the file's own folder."""
        try:
            values = tomllib.loads(path.read_text())
        except OSError as reason:
            raise CoterieError(f"{path} cannot be read: {reason.strerror}.") from reason
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as reason:
            raise CoterieError(f"{path} is not valid TOML: {reason}.") from reason
        made = cls.of(values, str(path))
        beside = path.parent / made.data
        made = replace(made, data=str(beside)) if made.data.endswith(".npz") and beside.exists() else made
        near = files.IN_FILE.match(str(path.parent / made.model))
        return replace(made, model=near[0]) if near is not None and Path(near[1]).exists() else made

    def record(self) -> dict[str, Any]:
        """As plain values that `of` reads back."""
        data = str(Path(self.data).resolve()) if self.data.endswith(".npz") else self.data
        return {**asdict(self), "methods": list(self.methods), "data": data, "model": files.resolved(self.model)}

    def federation(self) -> Federation:
        """Load, deal and split the data."""
        source = load(self.data)
        recipe: dict[str, Any] = {"data": self.data}
        shares: dict[str, Any] = {"val": self.val, "test": self.test, "unseen": self.unseen, "seed": self.data_seed}
        name, given = parse_options(self.partition or ("natural" if source.client is not None else DEFAULT_PARTITION))
        recipe |= {"partition": name, **given}
        if name == "natural":
            if source.client is None:
                raise CoterieError(f"{self.data} names no clients, so a natural partition is impossible; use another.")
            assignment, names = natural(source.client, **given)
            return Federation.from_assignment(source.x, source.y, assignment, names=names, recipe=recipe, **shares)
        total = self.clients + self.unseen
        assignment = partition(name, source.y.numpy(), total, seed=self.data_seed, **given)
        return Federation.from_assignment(source.x, source.y, assignment, recipe=recipe, **shares)

    def factory(self, federation: Federation) -> Callable[[], nn.Module]:
        """The model for this federation's samples."""
        name, given = parse_options(self.model)
        return models.model(name, tuple(federation.x.shape[1:]), federation.outputs, **given)

    def chosen(self) -> list[Method]:
        return [registry.method(spec) for spec in self.methods]


def parse_options(text: str) -> tuple[str, dict[str, Any]]:
    """`name:key=value,key=value` -> name and values as numbers where they look like numbers.

    The name of something in a file holds a colon itself: `file.py:Name:key=value`.
    """
    file = files.IN_FILE.match(text)
    name, _, rest = text.partition(":") if file is None else (f"{file[1]}:{file[2]}", ":", file[3] or "")
    found: dict[str, str] = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not equals and found:  # a value that holds commas itself, such as hidden=64,32
            last = next(reversed(found))
            found[last] += f",{item}"
        elif not equals:
            raise CoterieError(f"'{item}' in '{text}' is no option; write name:option=value,option=value.")
        else:
            found[key.strip()] = value.strip()
    return name, {key: _plain(value) for key, value in found.items()}


def _plain(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def with_settings(experiment: Experiment, settings: Iterable[str]) -> Experiment:
    """Apply `name=value` settings: training options, `method.option`, or an option of any chosen method."""
    training: dict[str, Any] = {}
    per_method: dict[str, dict[str, str]] = {spec: {} for spec in experiment.methods}
    classes = {spec: type(registry.method(spec)) for spec in experiment.methods}
    for item in settings:
        name, equals, value = item.partition("=")
        if not equals:
            raise CoterieError(f"--set wants name=value, not '{item}'.")
        if name in options(Training):
            training[name] = value
            continue
        owner, dot, option = name.partition(".")
        if not dot:
            owner, option = "", name
        takers = [s for s, cls in classes.items() if owner in ("", cls.name) and option in options(cls)]
        if not takers:
            known = {*options(Training), *(o for cls in classes.values() for o in options(cls) if o != "aggregator")}
            raise unknown("option", name, known)
        for spec in takers:
            per_method[spec][option] = value
    methods = tuple(
        registry.spelling(registry.method(spec, **values)) if values else spec for spec, values in per_method.items()
    )
    merged = build(Training, {**asdict(experiment.training), **training}, "training")
    return replace(experiment, methods=methods, training=merged)
