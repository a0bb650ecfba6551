"""A task as a site reads it: every field of its header has a type and a range; whatever is wrong is refused by name."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.errors import CoterieError
from coterie.flower.job import Job, checked_name

DO = ("join", "score", "local", "deploy")
"""What a task of kind `round` may ask for; all of it is done with the one payload it carries."""
KINDS = ("introduce", "round")
LONGEST = 2000
"""Characters that a text of a task's header may have."""
MOST = 10**9
"""Clients, or rounds, that a federation may have."""


class Refusal(CoterieError):  # noqa: N818 (named for what it says)
    """A sentence that may leave the site: it says what is wrong with a task, and nothing of the site's data."""

    cause = "refused"


class Diverged(Refusal):
    """The site did what was asked, and the numbers that came of it are not finite."""

    cause = "failed"


@contextmanager
def refusing() -> Iterator[None]:
    """Around checks that see the task and never the site's data: their sentences may leave the site."""
    try:
        yield
    except Refusal:
        raise
    except CoterieError as reason:
        raise Refusal(str(reason)) from reason


@dataclass(frozen=True)
class TaskHeader:
    """The header of a task."""

    kind: str
    experiment: str
    job: Mapping[str, Any]
    method: str
    options: str
    layout: str
    record: str
    round: int
    number: int
    population: int
    do: tuple[str, ...]
    merged: int | None
    best: int | None
    last: int | None
    deadline: float
    """Seconds that the server waits for the answer; infinite where it does not say."""
    newcomer: bool
    says_best: bool
    """Whether it says which round is the best so far, or that none is; servers of earlier versions do not."""

    @property
    def tells(self) -> bool:
        """Whether the answer tells something that is computed from the site's data."""
        return self.kind == "introduce" or "local" in self.do or "score" in self.do

    def mark(self, tensors: Mapping[str, Tensor]) -> str:
        """A fingerprint of all that such an answer depends on: whoever sends the same again learns nothing new."""
        facts = (self.kind, self.round, self.number, self.population, self.merged, self.newcomer)
        found = hashlib.sha256(repr(facts).encode())
        for name, t in sorted(tensors.items()):
            found.update(repr((name, tuple(t.shape), t.dtype)).encode())
            found.update(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return found.hexdigest()

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> TaskHeader:
        """The task, or a refusal that names the field."""
        kind = _text(meta, "kind")
        if kind not in KINDS:
            raise Refusal(f"this site knows no task of kind '{kind[:40]}'; install the server's version of coterie.")
        job, do = meta.get("job"), meta.get("do") or []
        if not isinstance(job, Mapping):
            raise Refusal(f"the task's job must be a table of values, not {_said(job)}.")
        if not isinstance(do, list) or any(word not in DO for word in do) or len(set(do)) != len(do):
            raise Refusal(f"a round may ask for {', '.join(DO)}, each once, not for {_said(do)}.")
        newcomer = meta.get("newcomer", False)
        if not isinstance(newcomer, bool):
            raise Refusal(f"the task's newcomer must be true or false, not {_said(newcomer)}.")
        if newcomer and "local" in do:
            raise Refusal("a site that came after training had begun does not train.")
        with refusing():
            experiment = checked_name("an experiment", _text(meta, "experiment"))
        return cls(
            kind=kind, experiment=experiment, job=job, method=_text(meta, "method"), options=_text(meta, "options"),
            layout=_text(meta, "layout"), record=_text(meta, "record"), round=_whole(meta, "round"),
            number=_whole(meta, "number"), population=_whole(meta, "population", 1), do=tuple(do),
            merged=_maybe(meta, "merged", -1), best=_maybe(meta, "best"), last=_maybe(meta, "last"),
            deadline=_seconds(meta), newcomer=newcomer, says_best="best" in meta,
        )

    def require(self, job: Job) -> None:
        """Refuse what cannot be of this job: rounds after its last one, scores that were not agreed on."""
        for name in ("round", "merged", "best", "last"):
            value = getattr(self, name)
            if value is not None and value > job.training.rounds:
                raise Refusal(f"the task's {name} is {value}, and the experiment has {job.training.rounds} rounds.")
        if "local" in self.do and self.round == job.training.rounds:
            raise Refusal(f"the experiment trains in {job.training.rounds} rounds, and this is one more.")
        if self.kind == "round" and not self.newcomer and self.merged is None:
            raise Refusal("the task does not say which round of this site was merged last.")
        if "local" in self.do and self.merged is not None and self.merged >= self.round:
            raise Refusal(f"the task trains in round {self.round}, and says that round {self.merged} of this site is "
                          "merged already.")
        if "score" in self.do and not job.scores:
            raise Refusal("this experiment was agreed on without scores that leave the site.")


def _seconds(meta: Mapping[str, Any]) -> float:
    value = meta.get("deadline")
    if value is None:
        return math.inf
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= MOST:
        raise Refusal(f"the task's deadline must be seconds, above 0 and at most {MOST}, not {_said(value)}.")
    return float(value)


def patience(metas: Sequence[Mapping[str, Any]]) -> float:
    """Seconds that the server waits for the answers to a message's tasks: the longest that one of them says."""
    found = []
    for meta in metas:
        with suppress(Refusal):  # what is no number of seconds is refused when its task is read
            found.append(_seconds(meta))
    return max((one for one in found if one < math.inf), default=math.inf)


def _text(meta: Mapping[str, Any], name: str) -> str:
    value = meta.get(name)
    if not isinstance(value, str) or len(value) > LONGEST:
        raise Refusal(f"the task's {name} must be a text of at most {LONGEST} characters, not {_said(value)}.")
    return value


def _whole(meta: Mapping[str, Any], name: str, least: int = 0) -> int:
    value = meta.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST:
        raise Refusal(f"the task's {name} must be a whole number from {least} to {MOST}, not {_said(value)}.")
    return value


def _maybe(meta: Mapping[str, Any], name: str, least: int = 0) -> int | None:
    return None if meta.get(name) is None else _whole(meta, name, least)


def _said(value: Any) -> str:
    """A value as a sentence quotes it: numbers and short texts in full, of the rest the type."""
    if value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 10**18):
        return repr(value)
    if isinstance(value, str):
        return repr(value) if len(value) <= 40 else f"a text of {len(value)} characters"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, list | dict) else "")
