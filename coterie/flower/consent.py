"""A site's consent: which experiments its operator has approved, and how much any of them may ask for.

    <home>/accepted              one approval a line: a digest, or `digest:lr,rounds` where these may differ
    <home>/shown/DIGEST.json     the experiment of that digest, as a dry run showed it

Without an approval nothing is read, built or trained.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor

from coterie import memory
from coterie.errors import CoterieError, unknown
from coterie.files import read_json, write_json, write_text
from coterie.flower.job import Job
from coterie.flower.task import Refusal, refusing
from coterie.options import NonNegative, Positive, build, options, require_ranges, split_options
from coterie.running.training import Training

ANY = "any"
"""In place of a digest: every experiment, for trials."""
ACCEPTED, SHOWN = "accepted", "shown"
ENDS = 2
"""Payloads of an experiment beside those of its rounds: at the introduction, and of the models of the end."""
_DIGEST = re.compile(r"[0-9a-f]{40}")


# -- what was approved -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Approval:
    """An experiment by its digest, and the training options in which a later one may differ from it."""

    digest: str
    changes: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str) -> Approval:
        """From `digest` or `digest:lr,rounds`."""
        digest, _, names = text.strip().partition(":")
        if digest != ANY and not _DIGEST.fullmatch(digest):
            raise CoterieError(f"'{digest}' is no digest of an experiment, which has 40 hex digits; "
                               "`coterie client --dry-run CONFIG` prints it.")
        changes = tuple(name.strip() for name in names.split(",") if name.strip())
        known = [f.name for f in fields(Training)]
        for name in changes:
            if name not in known:
                raise unknown("training option", name, known, Training.OTHER_WORDS, Training.LISTED)
        if digest == ANY and changes:
            raise CoterieError("'any' approves every experiment, so that changes need no approval of their own.")
        return cls(digest, changes)

    def __str__(self) -> str:
        return self.digest + (f":{','.join(self.changes)}" if self.changes else "")


class Consent:
    """The approvals of one site: those in its home, which are read anew for every task, and those it was made with."""

    def __init__(self, home: Path, accept: str | Iterable[str] = ()) -> None:
        self.home = home
        self.given = [Approval.of(text) for text in ([accept] if isinstance(accept, str) else accept) if text]

    @property
    def approvals(self) -> list[Approval]:
        path = self.home / ACCEPTED
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [*self.given, *(Approval.of(line) for line in lines if line.strip() and not line.startswith("#"))]

    def require(self, job: Job) -> None:
        """Refuse a job that nobody here has approved."""
        approvals = self.approvals
        exact = any(approval.digest in (ANY, job.digest) for approval in approvals)
        if not exact and not any(self._covers(approval, job) for approval in approvals if approval.changes):
            raise Refusal(
                f"the experiment {job.digest} ({job.method[:200]}, {job.model[:200]}) is not approved at this site; "
                f"its operator looks at it with `coterie client --dry-run CONFIG` and approves it with `coterie client "
                f"--accept {job.digest}`."
            )

    def _covers(self, approval: Approval, job: Job) -> bool:
        """Whether the job is the approved one but for the training options that may differ."""
        shown = self.shown(approval.digest)
        own = {name: getattr(job.training, name) for name in approval.changes}
        try:
            return replace(shown, training=replace(shown.training, **own)).digest == job.digest
        except CoterieError:  # these options do not go together with the approved experiment's
            return False

    def shown(self, digest: str) -> Job:
        """The experiment of this digest, which a dry run has shown here."""
        path = self.home / SHOWN / f"{digest}.json"
        if not path.is_file():
            raise CoterieError(
                f"what may differ from the experiment {digest} cannot be told, because it was not shown here; let "
                f"`coterie client --dry-run CONFIG --home {self.home}` show it first."
            )
        job = Job.of(read_json(path), str(path))
        if job.digest != digest:
            raise CoterieError(f"{path} holds another experiment, of digest {job.digest}; show it anew with --dry-run.")
        return job

    def show(self, job: Job) -> None:
        """Keep an experiment that was shown to the operator."""
        path = self.home / SHOWN / f"{job.digest}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, job.values())

    def accept(self, texts: Iterable[str], changes: str = "") -> list[Approval]:
        """Write approvals down in the home; the new ones."""
        new = [Approval.of(f"{text}:{changes}" if changes else text) for text in texts]
        for approval in new:
            if approval.changes:
                self.shown(approval.digest)
        lines = dict.fromkeys([*map(str, self.approvals), *map(str, new)])
        self.home.mkdir(parents=True, exist_ok=True)
        write_text(self.home / ACCEPTED, "".join(f"{line}\n" for line in lines))
        return new


# -- how much it may ask for -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SiteLimits:
    """The most that an experiment may ask of a site, whoever approved it."""

    parameters: Positive = 1e8
    """Numbers in one model."""
    payload: Positive = 4e9
    """Bytes of all that a task carries."""
    classes: Positive = 1e5
    """Classes, or targets of a regression."""
    experiments: Positive = 1000
    """Experiments that the home holds; the approved one may come again and again under other ids."""
    rounds: Positive = 1e5
    """Rounds of the experiment."""
    epochs: Positive = 100
    """Local epochs a round; and any option of the method that is called so, such as `personal_epochs`."""
    counts: Positive = 1000
    """Any other whole number among the method's options: steps, passes, layers, models."""
    steps: Positive = 1e6
    """Local steps a round, however they are asked for."""
    batch: Positive = 65536
    """Samples of a batch."""
    repeats: NonNegative = 5
    """Payloads of one experiment, beyond one for each of its rounds, that are answered."""
    seconds: Positive = 3600
    """Seconds for all that one message asks for."""

    def __post_init__(self) -> None:
        require_ranges(self)

    @classmethod
    def of(cls, text: str) -> SiteLimits:
        """From `parameters=50e6,epochs=20`; whatever is not named stays at its default."""
        return build(cls, split_options(text, text), "limit")

    def require(self, job: Job) -> None:
        """Refuse a job that asks for more; nothing is built."""
        method = job.chosen()
        training = method.training_in(job.training)
        self._most("classes", max(job.classes, job.outputs))
        if job.classes and job.outputs != job.classes:
            raise Refusal(f"the experiment has {job.classes} classes, and its model {job.outputs} outputs.")
        for name in ("rounds", "epochs", "batch", "steps"):
            self._most(name, getattr(training, name) or 0)
        for option in options(type(method)):  # what each of them means is the method's: all may take time or memory
            asked = getattr(method, option)
            if isinstance(asked, int):
                self._most("epochs" if option.endswith("epochs") else "counts", asked, f"{method.name}:{option}")
        with refusing():
            found = job.numbers(method)
        self._most("parameters", found)

    def require_steps(self, samples: int, training: Training) -> None:
        """Refuse more local steps a round than are allowed, for so many training samples."""
        batches = math.ceil(samples / training.batch) if training.batch else 1
        self._most("steps", training.epochs * batches if training.steps is None else training.steps)

    def require_room(self, held: int) -> None:
        """Refuse a new experiment where the home holds as many as are allowed."""
        self._most("experiments", held + 1)

    def require_answers(self, answers: int, rounds: int) -> None:
        """Refuse an answer too many to the payloads of an experiment, of which this would be the `answers`-th.

        Each of its rounds brings one, the introduction and the end one each. What is computed from a payload tells of
        the data, and the server chooses the payloads: it gets no more of them than were approved, and a few repeats.
        """
        most = rounds + ENDS + self.repeats
        if answers > most:
            raise Refusal(
                f"this site has answered {answers - 1} payloads of this experiment, which has {rounds} rounds: one "
                f"each, {ENDS} at beginning and end, and {self.repeats:.9g} repeats; its operator allows more with "
                f"`coterie client --limit repeats={self.repeats + 10:.9g}`."
            )

    def require_payload(self, tensors: Mapping[str, Tensor]) -> None:
        self._most("payload", sum(t.nbytes for t in tensors.values()))

    @contextmanager
    def building(self) -> Iterator[None]:
        """Around what builds all that a method keeps: its options can make that any size, whatever the model is."""
        room = int(min(2 * self.payload, memory.free(torch.device("cpu")) / 2))
        try:
            with memory.at_most(room):
                yield
        except Exception as reason:
            if not memory.exhausted(reason):
                raise
            raise Refusal(
                f"what the method keeps with these options takes more than {room:.3g} bytes here; the site's operator "
                "allows more with `coterie client --limit payload=BYTES`, if there is as much memory free."
            ) from reason

    def _most(self, name: str, asked: float, what: str = "") -> None:
        limit = getattr(self, name)
        if asked > limit:
            raise Refusal(
                f"the task asks for {what or name}={asked:.9g}, and this site allows {limit:.9g} at most; its operator "
                f"raises that with `coterie client --limit {name}={asked:.9g}`."
            )
