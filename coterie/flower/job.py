"""What one experiment asks of every site: method, model, training. It travels with every message, as plain values."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from coterie import models, registry
from coterie.contract.method import Method
from coterie.data import Federation
from coterie.errors import CoterieError
from coterie.options import build, parse_options
from coterie.running.config import Training

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


def fresh_id() -> str:
    """A new experiment's id."""
    return secrets.token_hex(8)


def checked_name(kind: str, name: str) -> str:
    """A name that is also that of a folder: letters, digits, `_`, `-` and `.`, at most 64, no dot first."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise CoterieError(f"'{name}' cannot be the name of {kind}; use 1 to 64 letters, digits, '_', '-' or '.'.")
    return name


@dataclass(frozen=True)
class Job:
    """One experiment. Server and sites build the same method, model and layout from it."""

    experiment: str
    """An id, new for every experiment; sites keep their states under it."""
    method: str
    """The method's spelling, e.g. fedfew:models=3."""
    model: str
    """The model's spelling, e.g. mlp:hidden=64."""
    shape: tuple[int, ...]
    """Shape of one sample."""
    classes: int
    """Number of classes, 0 for regression."""
    outputs: int
    """Numbers the model gives for a sample: the classes, or the targets."""
    training: Training = field(default_factory=Training)
    head: str | None = None
    scores: bool = True
    """Whether sites tell the server the loss and accuracy of their models, and how many test samples they have."""

    def __post_init__(self) -> None:
        checked_name("an experiment", self.experiment)
        if ".py:" in self.method:
            raise CoterieError(
                f"the method {self.method} lies in a file, which is not sent to sites; put it into coterie/methods on "
                "the server and at every site and give its name."
            )
        if ".py:" in self.model:
            raise CoterieError(
                f"the model {self.model} lies in a file, which is not sent to sites; put it into coterie/models on the "
                "server and at every site and give its name."
            )
        for name in ("dropouts", "stragglers"):
            if getattr(self.training, name):
                raise CoterieError(f"{name} are played by the simulation only; real sites fail by themselves: use 0.")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Job:
        """From plain values, as they arrive or stand in a file."""
        try:
            given = dict(values)
            training = build(Training, given.pop("training"), "training")
            return cls(**{**given, "shape": tuple(int(n) for n in given.pop("shape"))}, training=training)
        except (KeyError, TypeError, ValueError) as reason:
            if isinstance(reason, CoterieError):
                raise
            raise CoterieError(f"the experiment's settings cannot be read ({reason}).") from reason

    @classmethod
    def for_data(cls, federation: Federation, **values: Any) -> Job:
        """A job for sites whose samples look like this federation's."""
        shape = tuple(federation.x.shape[1:])
        return cls(shape=shape, classes=federation.classes, outputs=federation.outputs, **values)

    def values(self) -> dict[str, Any]:
        return {**asdict(self), "shape": list(self.shape)}

    def made_up(self, population: int) -> Federation:
        """Clients with a few samples of the right form and no meaning, to try out what the job asks of sites."""
        shape = (2 * max(self.classes, 2), *self.shape)
        tokens = any(isinstance(part, nn.Embedding | nn.EmbeddingBag) for part in self.factory()().modules())
        x = torch.ones(shape, dtype=torch.int64) if tokens else torch.ones(shape)
        y = torch.arange(len(x)) % self.classes if self.classes else torch.zeros(len(x), self.outputs).squeeze(1)
        return Federation.from_clients([(x, y)] * population, classes=self.classes)

    def chosen(self) -> Method:
        return registry.method(self.method)

    def factory(self) -> Callable[[], nn.Module]:
        name, given = parse_options(self.model)
        return models.model(name, self.shape, self.outputs, **given)
