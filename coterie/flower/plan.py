"""What a server runs: experiments, patience, limits and folders; from an operator's TOML file, kept as json."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from coterie.errors import CoterieError, unknown
from coterie.files import MOST, read_json, read_text, write_json
from coterie.flower.checks import Limits
from coterie.flower.job import Job, fresh_id
from coterie.flower.policy import Gate, Policy
from coterie.flower.wire import plain
from coterie.options import build
from coterie.registry import method, spelling
from coterie.running.training import Training
from coterie.trust import code

PLAN = "plan.json"
"""The plan in the server's folder."""
JOB = ("method", "model", "shape", "classes", "class_names", "outputs", "dtype", "head", "adapter", "freeze",
       "train", "loss", "scores")
TABLES = ("training", "policy", "limits", "gate")


@dataclass(frozen=True)
class Plan:
    """Experiments that share their messages, and how the server treats sites."""

    jobs: tuple[Job, ...]
    policy: Policy = field(default_factory=Policy)
    limits: Limits = field(default_factory=Limits)
    gate: Gate = field(default_factory=Gate)
    folder: str | None = None
    linger: float = 0.0
    """Seconds after the end in which sites that come late still get their models."""
    nodes: str | None = None
    """The file that says which node has which site's key; without it nodes say their names themselves."""
    messages: str | None = None
    """A folder in which everything that sites sent is kept, to be inspected."""

    @classmethod
    def read(cls, path: Path) -> Plan:
        try:
            values = read_json(path)
            jobs = tuple(Job.of(job) for job in values.pop("jobs"))
            policy = build(Policy, values.pop("policy", {}), "policy")
            limits = build(Limits, values.pop("limits", {}), "limits")
            gate = build(Gate, values.pop("gate", {}), "gate")
            return cls(jobs, policy, limits, gate, **values)
        except (KeyError, TypeError, AttributeError) as reason:
            raise CoterieError(f"the plan {path} cannot be read ({reason}).") from reason

    def write(self, path: Path) -> None:
        values = {name: value for name, value in asdict(self).items() if name != "jobs"}
        write_json(path, {"jobs": [job.values() for job in self.jobs], **values})

    @classmethod
    def configured(cls, path: Path, experiment: str | None = None) -> Plan:
        """From a TOML file: method, model, shape, classes, and the tables [training], [policy], [limits] and [gate].

        The folder is not decided here.
        """
        try:
            values = tomllib.loads(read_text(path, MOST))
        except OSError as reason:
            raise CoterieError(f"{path} cannot be read: {reason.strerror}.") from reason
        except (ValueError, RecursionError) as reason:
            raise CoterieError(f"{path} is not valid TOML: {plain(reason)}.") from reason
        return cls._of(values, str(path), experiment)

    @classmethod
    def _of(cls, values: Mapping[str, Any], where: str, experiment: str | None) -> Plan:
        known = {*JOB, *TABLES, "linger"}
        for name in values:
            if name not in known:
                raise unknown(f"setting in {where}", name, known)
        lacking = [name for name in ("method", "shape", "classes") if name not in values]
        if lacking:
            raise CoterieError(f"{where} lacks {', '.join(lacking)}.")
        tables = {name: values.get(name, {}) for name in TABLES}
        for name, table in tables.items():
            if not isinstance(table, dict):
                raise CoterieError(f"[{name}] in {where} must be a table, not {table!r}.")
        given = {name: values[name] for name in JOB if name in values}
        shape, classes = given["shape"], given["classes"]
        if not (isinstance(shape, list) and shape and all(isinstance(n, int) and n > 0 for n in shape)):
            raise CoterieError(f"shape in {where} is that of one sample, e.g. [1, 28, 28], not {shape!r}.")
        if not isinstance(classes, int) or isinstance(classes, bool) or classes < 0:
            raise CoterieError(f"classes in {where} is a whole number, 0 for regression, not {classes!r}.")
        named = given.pop("class_names", [])
        if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
            raise CoterieError(f"class_names in {where} is a list of texts, e.g. [\"1\", \"2\"], not {named!r}.")
        if named and (len(set(named)) != len(named) or len(named) != classes):
            raise CoterieError(f"class_names in {where} names {len(set(named))} classes, and classes says {classes}.")
        given |= {"class_names": tuple(named)} if named else {}
        linger = values.get("linger", 0.0)
        if not isinstance(linger, int | float) or isinstance(linger, bool) or not 0 <= linger <= 1e9:
            raise CoterieError(f"linger in {where} is a number of seconds of at least 0, not {plain(linger)}.")
        asked = str(given["method"])
        given["method"] = asked if ".py:" in asked else spelling(method(asked))  # one in a file is refused below
        with code.nothing():
            training = build(Training, tables["training"], "training")
        job = Job(**{"experiment": experiment or fresh_id(), "model": "mlp", "outputs": classes or 1, **given,
                     "shape": tuple(shape)}, training=training)
        with torch.device("meta"):  # what is wrong with the model is said now; no memory is taken for it
            job.factory()()
        return cls((job,), build(Policy, tables["policy"], "policy"),
                   build(Limits, tables["limits"], "limits"), build(Gate, tables["gate"], "gate"),
                   linger=float(linger))

    def placed(self, folder: Path) -> Plan:
        """This plan in a folder: a new one is written there, or the experiment that is there goes on.

        Policy, limits and gate may change from one start to the next, the experiment may not.
        """
        path = folder / PLAN
        plan = replace(self, folder=str(folder))
        if path.exists():
            before = Plan.read(path)
            ids = tuple(job.experiment for job in before.jobs)
            plan = replace(plan, jobs=tuple(replace(job, experiment=i) for job, i in zip(self.jobs, ids, strict=False)))
            if plan.jobs != before.jobs:
                raise CoterieError(
                    f"{folder} holds an experiment with other settings; give the new one a folder of its own."
                )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            plan.write(path)
        except OSError as reason:
            raise CoterieError(f"the folder {folder} cannot be written: {reason.strerror}.") from reason
        return plan
