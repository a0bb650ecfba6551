"""What one experiment asks of every site: method, model, training. It travels with every message, as plain values."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from coterie import registry
from coterie.contract.net import Task
from coterie.data import Federation
from coterie.errors import CoterieError
from coterie.evaluation.measures import Measures
from coterie.running.spec import TEXTS, RunSpec

MOST = 10**12
"""Largest number of classes, or of features along one side of a sample, that is read at all."""
LONGEST = 2000
"""Characters that a text among a job's values may have."""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


RESERVED = frozenset({"accepted", "shown", "flwr"})
"""What a site's home holds beside the experiments' folders."""


def fresh_id() -> str:
    """A new experiment's id."""
    return secrets.token_hex(8)


def checked_name(kind: str, name: str) -> str:
    """A name that is also that of a folder: letters, digits, `_`, `-` and `.`, at most 64, no dot first."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise CoterieError(f"'{name}' cannot be the name of {kind}; use 1 to 64 letters, digits, '_', '-' or '.'.")
    if kind == "an experiment" and (name.lower() in RESERVED or name.lower().endswith((".log", ".json", ".jsonl"))):
        raise CoterieError(f"'{name}' cannot be the name of an experiment: a site keeps something else under it.")
    return name


@dataclass(frozen=True, kw_only=True)
class Job(RunSpec):
    """One experiment: what a run is, for sites. Server and sites build the same method, model and layout from it."""

    experiment: str
    """An id, new for every experiment; sites keep their states under it."""
    scores: Literal["values", "full"] | bool = "values"
    """What sites tell the server of their models: the `values` of loss, accuracy and the chosen metrics and how many
    test samples they have; `full` also what these are made of, confusion counts and histograms of scores, which hold
    label counts; false nothing. true is `values`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_types()
        checked_name("an experiment", self.experiment)
        if self.scores is True:  # as earlier versions said it
            object.__setattr__(self, "scores", "values")
        if self.scores not in (False, "values", "full"):
            raise CoterieError(f"scores must be \"values\", \"full\" or false, not {self.scores!r}.")
        method, _, values = self.method.partition("=")  # an optimizer may stand among the values
        named = [("method", method), ("model", self.model), ("optimizer", values)]
        named += [("optimizer", getattr(self.training, option)) for option in registry.OPTIMIZERS]
        named += [("metric", spec) for spec in self.training.metrics]
        for kind, text in named:
            if ".py:" in text:
                raise CoterieError(
                    f"the {kind} {text} lies in a file, which is not sent to sites; put it into coterie/{kind}s on the "
                    "server and at every site and give its name."
                )
        if self.loss:
            raise CoterieError(
                f"the loss {self.loss} lies in a file, which is not sent to sites; leave it out, and they train the "
                "cross entropy, or the squared error for regression."
            )
        self.chosen().training_in(self.training).require(self.classes, self.shape)
        self._try_out()
        for name in ("dropouts", "stragglers"):
            if getattr(self.training, name):
                raise CoterieError(f"{name} are played by the simulation only; real sites fail by themselves: use 0.")

    def _try_out(self) -> None:
        """Raise if the job's metrics cannot score its samples, by scoring a few."""
        self.measures()

    def _check_types(self) -> None:
        """Raise where a value is none that a job can have: it may come from anybody."""
        for name in TEXTS:
            if len(getattr(self, name) or "") > LONGEST:
                raise CoterieError(f"the experiment's {name} has more than {LONGEST} characters.")
        for name, value in (("classes", self.classes), ("outputs", self.outputs), *(("shape", n) for n in self.shape)):
            least = 0 if name == "classes" else 1
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST:
                raise CoterieError(f"the experiment's {name} must be whole numbers from {least} to {MOST}.")
        if not all(isinstance(name, str) for name in self.class_names):
            raise CoterieError("the experiment's class_names must be texts.")
        if self.class_names and len(self.class_names) != self.classes:
            raise CoterieError(f"the experiment has {self.classes} classes and {len(self.class_names)} names for them.")
        for name in ("encoding", "unit"):
            if not isinstance(getattr(self, name), Mapping | None):
                raise CoterieError(f"the experiment's {name} must be a table of values.")

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str = "the experiment's settings") -> Job:
        """From plain values, as they arrive or stand in a file."""
        training = values.get("training", {}) if isinstance(values, Mapping) else None
        if not isinstance(training, Mapping):
            raise CoterieError(f"{where} cannot be read (they are no table of values).")
        shape = values.get("shape")
        if shape is not None and not (isinstance(shape, list | tuple) and all(type(n) is int for n in shape)):
            raise CoterieError(f"{where} cannot be read (shape must be a list of whole numbers).")
        for option, value in training.items():
            if len(option) > LONGEST or len(str(value)) > LONGEST:
                raise CoterieError(f"{where} cannot be read ({option[:40]} is too long).")
            if ".py:" in str(value):  # making the options would run that file
                raise CoterieError(f"{where} cannot be read ({option} lies in a file, which is not sent to sites).")
        return cls(**cls.arguments(values, where))

    @property
    def digest(self) -> str:
        """A fingerprint of all that is asked of a site, 40 hex digits; the same for the same experiment started anew.

        It covers every value of the job and every option of its method, defaults too. The experiment's id is left out,
        and so is the device, which each site chooses itself.
        """
        values = self.values()
        training = {name: value for name, value in values["training"].items() if name != "device"}
        asked = {**values, "training": training, "options": repr(self.chosen())}
        del asked["experiment"]
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:40]

    @classmethod
    def for_data(cls, federation: Federation, **values: Any) -> Job:
        """For sites whose samples look like this federation's."""
        return cls(**cls.form_of(federation), **values)

    @property
    def task(self) -> Task:
        return Task.of(self.classes)

    @property
    def targets(self) -> tuple[int, ...]:
        """The shape of one target of a regression."""
        return (self.outputs,) if not self.classes and self.outputs > 1 else ()

    def measures(self) -> Measures:
        """What sites are scored by; raises where a metric cannot score such data."""
        robust = self.chosen().aggregator.robust
        return Measures.of(self.training.metric, self.training.watch, self.task, self.targets, robust)

    def made_up(self, population: int) -> Federation:
        """Clients with a few samples of the right form and no meaning, to try out what the job asks of sites."""
        x = self.blank_samples(2 * max(self.classes, 2), 1)
        y = torch.arange(len(x)) % self.classes if self.classes else torch.zeros(len(x), self.outputs).squeeze(1)
        return Federation.from_clients([(x, y)] * population, classes=self.classes)


class AnnouncedJob(Job):
    """A job as a server announces it, before anybody has approved it: read, and nothing of it tried out."""

    def _try_out(self) -> None:
        return
