"""The server side of an experiment across sites: admission, rounds and the end, over any transport.

`Rounds.work` is the life of one experiment. It yields an `Ask` and is sent the answers, so that `drive` can put the
tasks of many experiments into one message a site: on Flower a message costs seconds, whatever it holds.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from coterie import registry, streams
from coterie.contract import records
from coterie.contract.cohort import Init
from coterie.contract.method import Uploads
from coterie.contract.records import Record, Upload
from coterie.errors import CoterieError, counted
from coterie.evaluation.score import Evaluation, Scores
from coterie.evaluation.stages import PREFIX, SEEN
from coterie.flower import wire
from coterie.flower.checks import Received
from coterie.flower.job import Job
from coterie.flower.site import JOINED
from coterie.flower.wire import Failure, Part
from coterie.privacy.guard import SECRET, Guard
from coterie.running import server as serving
from coterie.running.clients import device
from coterie.running.folder import Folder, write_text
from coterie.running.server import Round, record_class
from coterie.running.simulation import Simulation

log = logging.getLogger("coterie.server")

ATTEMPTS = 3
"""How often an admission is tried before those who did not answer are left out."""
STATUS = "status.json"
"""What the server is doing, in the run's folder."""
SKIPS = 20
"""Rounds in a row without enough answers, after which the run stops with an error; it can be resumed."""


@dataclass(frozen=True)
class Policy:
    """How patient the server is."""

    sites: int = 1
    """Sites that must be there before training begins; they are the population."""
    deadline: float = 600.0
    """Seconds a round waits for answers."""
    minimum: int = 1
    """Answers without which a round is skipped (an aggregator may need more)."""
    target: int = 0
    """Answers after which a round goes on without waiting for the others; 0 waits for all who were asked."""
    wait: float = 3600.0
    """Seconds to wait for enough sites, at the beginning and before every round."""
    poll: float = 0.5
    """Seconds between looks at who is there."""

    def __post_init__(self) -> None:
        for name, lowest in (("sites", 1), ("minimum", 1), ("target", 0)):
            if getattr(self, name) < lowest:
                raise CoterieError(f"{name} must be at least {lowest}, not {getattr(self, name)}.")
        for name in ("deadline", "wait", "poll"):
            if not getattr(self, name) > 0:
                raise CoterieError(f"{name} must be a positive number of seconds, not {getattr(self, name)}.")
        if self.minimum > self.sites:
            raise CoterieError(f"minimum={self.minimum} answers cannot come from {counted(self.sites, 'site')}.")
        if self.target and self.target < self.minimum:
            raise CoterieError(f"target={self.target} is below minimum={self.minimum}.")


class Check(Protocol):
    """What looks at uploads before they are merged."""

    def __call__(self, received: Received) -> Mapping[str, str]:
        """The sites whose upload is to be left out, each with the reason."""
        ...

    def barred(self) -> Iterable[str]:
        """Sites that are not asked at all until an operator says otherwise."""
        ...


class Transport(Protocol):
    """How messages reach sites."""

    def sites(self) -> set[str]:
        """The names of the sites that are there now."""
        ...

    def ask(
        self, messages: Mapping[str, Sequence[Part]], deadline: float, enough: Callable[[set[str]], bool]
    ) -> dict[str, list[Part] | Failure]:
        """Each site's answer, part for part, or why there is none.

        Returns when everybody answered, after `deadline` seconds, or when those who have answered are `enough`.
        """
        ...


Answers = Mapping[str, Part | Failure]


@dataclass(frozen=True)
class Ask:
    """A task for each of some sites, and how many of which answers are enough."""

    parts: Mapping[str, Part]
    counted: frozenset[str]
    wanted: int

    def enough(self, answered: set[str]) -> bool:
        return len(self.counted & answered) >= self.wanted


Work = Generator[Ask, Answers, None]


class Rounds:
    """One experiment on the server: state, who its clients are, and the record of its rounds."""

    def __init__(
        self, job: Job, policy: Policy, present: Callable[[], set[str]], folder: Folder | None = None,
        check: Check | None = None,
    ) -> None:
        """`present` tells which sites are there now. With a folder the run is recorded and resumed from there."""
        self.job, self.policy, self.present, self.folder, self.check = job, policy, present, folder, check
        self.method, self.training = job.chosen(), job.training
        self.spelling = registry.spelling(self.method)
        self.device = device(self.training.device)
        self.numbers: dict[str, int] = {}  # site -> client number, newcomers after the others
        self.population = 0
        self.merged: dict[str, int] = {}  # site -> the last round in which its upload was merged
        self.joined: set[str] = set()
        self._there: set[str] = set()  # the sites that were there when last looked
        self.served: set[str] = set()  # sites that have the model of the end
        self.rounds_done = 0
        self.history: list[Evaluation] = []
        self.rounds: list[dict[str, Any]] = []
        self.server: Record
        if folder is not None and folder.checkpoint.exists():
            self._restore()

    @property
    def clients(self) -> list[str]:
        """The sites that train, in order of their numbers."""
        return sorted(self.numbers, key=self.numbers.__getitem__)[: self.population]

    @property
    def finished(self) -> bool:
        return bool(self.population) and self.rounds_done >= self.training.rounds

    # -- the life of an experiment ---------------------------------------------------------------------------------

    def work(self) -> Work:
        """Admission, all rounds, and a model for everybody who is there at the end."""
        if not self.population:
            yield from self._admission()
        while self.rounds_done < self.training.rounds:
            yield from self._round()
        yield from self.ending()

    def _begin(self, population: int) -> None:
        dtype = torch.float64 if self.training.precision == "float64" else torch.float32
        self.init = Init(
            self.job.factory(), self.method.wrap, self.training.seed, self.job.head, dtype, self.device, population,
            self.job.classes,
        )
        self.layout = self.init.layout
        self._names = streams.integers("client", self.clients)
        self.guard = Guard.of(self.method, self.training, population)
        if self.guard is not None:
            self._rehearse(population)

    def _rehearse(self, population: int) -> None:
        """Raise if privacy would not hold. Clients of made-up samples show what sites would upload before they do."""
        if self.job.scores:
            raise CoterieError("private does not protect the sites' scores; set scores = false, and they stay at home.")
        if SECRET not in os.environ:
            raise CoterieError(
                f"the sites know the seed and could take the noise off; set {SECRET} on the server to a random text."
            )
        self._nobody = Simulation(
            self.method, self.job.factory(), self.job.made_up(population), replace(self.training, device="cpu"),
            self.job.head,
        ).nobody

    def _admission(self) -> Work:
        """All sites that are there introduce themselves and get numbers in the order of their names."""
        for attempt in range(1, ATTEMPTS + 1):
            names = sorted(self._await(self.policy.sites))
            self.numbers = {name: number for number, name in enumerate(names)}
            self.population = len(names)
            self._begin(self.population)
            serving.check(self.method, self.population, self.layout)
            self.server = self.method.start(self.init)
            told = yield from self._introduced(self.server, names)
            if len(told) == len(names):
                break
            log.warning("%s: %d of %d sites introduced themselves, attempt %d", self.spelling, len(told), len(names),
                        attempt)
            self.numbers, self.population = {}, 0
        else:
            raise CoterieError(
                f"in {ATTEMPTS} attempts not every site that was there introduced itself to {self.spelling}; see the "
                "log for the causes."
            )
        self.server = self._admit(self.server, names, told)
        sample = records.spread(self.method.send(self.server, self._ids(names[:1])), 1)
        serving.check_buffers(self.method, self.server, sample, self.layout, self.training)
        self.merged = dict.fromkeys(names, JOINED)
        if self.folder is not None:
            (self.folder.path / "config.json").unlink(missing_ok=True)  # of a start that did not get as far as this
            self.folder.create(self._config())
        self._save()
        log.info("%s: %d sites admitted: %s", self.spelling, self.population, ", ".join(names))

    def _introduced(
        self, server: Record, names: Sequence[str]
    ) -> Generator[Ask, Answers, dict[str, dict[str, Tensor]]]:
        """The introductions of these sites, of those that gave a usable one."""
        hello = self.method.hello(server)
        spread = records.spread(hello, 1).tensors()  # all are told the same
        parts = {name: self._task("introduce", name, hello, spread) for name in names}
        replies, _ = yield from self._ask(parts, frozenset(names), len(names))
        told = {name: reply.tensors for name, reply in replies.items()}
        for name, reason in self._refused("introduce", told, {}).items():
            log.warning("%s: the introduction of %s is left out: %s", self.spelling, name, reason)
            del told[name]
        return told

    def _admit(self, server: Record, names: Sequence[str], told: Mapping[str, Mapping[str, Tensor]]) -> Record:
        stacked = self._stacked([told[name] for name in names])
        if self.guard is not None:
            self.guard.meet(stacked)
        admitted: Record = self.method.admit(server, self._ids(names), Upload.of(stacked))
        return admitted

    def _round(self) -> Work:
        t, start = self.rounds_done, time.perf_counter()
        barred = set(self.check.barred()) if self.check is not None else set()
        least = max(self.policy.minimum, self.method.aggregator.minimum)
        there = self._await(least, among=set(self.clients) - barred)
        drawn = [self.clients[i] for i in serving.selected(self.training, self._names, t)]
        training = [name for name in drawn if name in there]
        scored = self.job.scores and self._due(t)
        do = {
            name: [word for word, wanted in (("join", name not in self.joined), ("score", scored),
                                             ("local", name in training)) if wanted]
            for name in self.clients if name in there
        }
        names = [name for name in do if do[name]]
        parts = self._payloads(self.server, names, {name: {"do": do[name]} for name in names})
        wanted = min(self.policy.target or len(training), len(training))
        replies, failures = yield from self._ask(parts, frozenset(training or names), wanted or len(names))
        failures |= {name: Failure("barred" if name in barred else "absent", "") for name in drawn if name not in there}
        self.joined |= set(replies)
        self._evaluated({name: reply for name, reply in replies.items() if "scores" in reply.meta}, "", t)
        uploads = {name: replies[name] for name in training if name in replies}
        n = {name: 1 if self.guard else _count(reply.meta.get("n")) for name, reply in uploads.items()}
        wrong = {name: failure.reason for name, failure in failures.items() if failure.cause == "mismatch"}
        refused = self._refused("round", {name: reply.tensors for name, reply in uploads.items()}, n, wrong)
        failures |= {name: Failure("rejected", reason) for name, reason in refused.items()}
        accepted = [name for name in self.clients if name in uploads and name not in refused]
        report: dict[str, Any] = {}
        if len(accepted) >= self._needed:  # with privacy on 0: nobody's absence may be seen
            report = self._merge(accepted, uploads, n)
        else:
            called = f"{counted(self._needed, 'answer')} {'is' if self._needed == 1 else 'are'} needed"
            report = {"skipped": f"{called}, {len(accepted)} came"}
        if failures:
            report["failures"] = dict(Counter(failure.cause for failure in failures.values()))
        for name, failure in failures.items():
            log.warning("%s, round %d: %s: %s %s", self.spelling, t + 1, name, failure.cause, failure.reason)
        down = records.bytes_each(parts[accepted[0]].tensors) if accepted else {}
        up = records.bytes_each(uploads[accepted[0]].tensors) if accepted else {}
        self.rounds_done = t + 1
        done = Round(t, len(accepted), len(drawn) - len(accepted), down, up, report)
        self.rounds.append({**asdict(done), "seconds": round(time.perf_counter() - start, 6)})
        log.info("%s: round %d of %d, %d of %d answered", self.spelling, t + 1, self.training.rounds, len(accepted),
                 len(drawn))
        if self.folder is not None:
            self.folder.append_round(self.rounds[-1])
        self._save()
        self._not_stuck()

    def _merge(self, names: Sequence[str], uploads: Mapping[str, Part], n: Mapping[str, int]) -> dict[str, Any]:
        stacked = self._stacked([uploads[name].tensors for name in names] or [self._nobody])
        counts = torch.tensor([n[name] for name in names], dtype=torch.int64, device=self.device)
        up = Uploads(
            stacked, self._ids(names), counts, counts.double() / counts.sum().clamp(min=1), self.population,
            self.rounds_done, self.layout,
        )
        self.server, report = serving.merge(self.method, self.server, up, self.training, self.guard)
        self.merged |= dict.fromkeys(names, self.rounds_done)
        return report

    def ending(self) -> Work:
        """A model for every site that is there and has none yet; late sites by the method's rule for unseen clients."""
        barred = set(self.check.barred()) if self.check is not None else set()
        self._there = self.present()
        there = self._there - barred - self.served
        do = ["deploy", "score"] if self.job.scores else ["deploy"]
        known = [name for name in self.clients if name in there]
        late = sorted(there - set(self.clients))
        if known:
            parts = self._payloads(self.server, known, {name: {"do": do} for name in known})
            yield from self._deployed(parts, "")
        if late:
            for name in late:
                self.numbers.setdefault(name, len(self.numbers))
            told = yield from self._introduced(self.server, late)
            admitted = [name for name in late if name in told]
            if admitted:
                server = self._admit(self.server, admitted, told)  # for these answers only
                parts = self._payloads(server, admitted, {name: {"do": do, "newcomer": True} for name in admitted})
                yield from self._deployed(parts, PREFIX)
        if (known or late) and self.folder is not None:
            self._save()
            self._tell("finished")
            self.folder.finish({"rounds": self.rounds_done, "seconds": sum(r["seconds"] for r in self.rounds)})

    def _deployed(self, parts: Mapping[str, Part], prefix: str) -> Work:
        replies, failures = yield from self._ask(parts, frozenset(parts), len(parts))
        for name, failure in failures.items():
            log.warning("%s: %s has no model yet: %s %s", self.spelling, name, failure.cause, failure.reason)
        self.served |= set(replies)
        self._evaluated({name: r for name, r in replies.items() if "scores" in r.meta}, prefix, self.rounds_done)

    # -- messages --------------------------------------------------------------------------------------------------

    def _task(self, kind: str, name: str, record: Record, tensors: Mapping[str, Tensor], **more: Any) -> Part:
        return Part({
            "protocol": wire.PROTOCOL, "kind": kind, "experiment": self.job.experiment, "job": self.job.values(),
            "method": self.spelling, "options": repr(self.method), "layout": self.layout.digest,
            "round": self.rounds_done, "number": self.numbers[name], "population": self.population,
            "record": type(record).__name__, "merged": self.merged.get(name, JOINED), "deadline": self.policy.deadline,
            **more,
        }, dict(tensors))

    def _payloads(self, server: Record, names: Sequence[str], more: Mapping[str, dict[str, Any]]) -> dict[str, Part]:
        """What the method sends to each of these sites, `[1, ...]`; what is alike for all is one tensor object."""
        if not names:
            return {}
        sent = self.method.send(server, self._ids(names))
        each = {f for f in sent.tensors() if isinstance(getattr(sent, f), records.Each)}
        shared = {f: t.unsqueeze(0) for f, t in sent.tensors().items() if f not in each}
        return {
            name: self._task("round", name, sent, {
                **shared, **{f: t[k : k + 1] for f, t in sent.tensors().items() if f in each}
            }, **more[name])
            for k, name in enumerate(names)
        }

    def _tell(self, doing: str, asked: Iterable[str] = ()) -> None:
        """What the server is doing now, for `coterie status`."""
        if self.folder is not None and self.folder.path.is_dir():
            now = {"time": time.time(), "pid": os.getpid(), "doing": doing}
            now |= {"there": sorted(self._there), "asked": sorted(asked)}
            write_text(self.folder.path / STATUS, json.dumps(now) + "\n")

    def _ask(
        self, parts: Mapping[str, Part], counted: frozenset[str], wanted: int
    ) -> Generator[Ask, Answers, tuple[dict[str, Part], dict[str, Failure]]]:
        """The answers that belong to what was asked, and why the others are missing."""
        if parts:
            doing = "the end" if self.finished else f"round {self.rounds_done + 1} of {self.training.rounds}"
            self._tell(doing, parts)
        answers = (yield Ask(parts, counted, wanted)) if parts else {}
        replies: dict[str, Part] = {}
        failures: dict[str, Failure] = {}
        for name, task in parts.items():
            answer = answers.get(name, Failure("absent", "no answer came."))
            wrong = answer if isinstance(answer, Failure) else wire.check_answer(task.meta, answer, name)
            if isinstance(answer, Part) and wrong is None:
                replies[name] = answer
            elif wrong is not None:
                failures[name] = wrong
                log.info("%s: %s: %s: %s", self.spelling, name, wrong.cause, wrong.reason)
        return replies, failures

    def _refused(
        self, kind: str, sent: Mapping[str, Mapping[str, Tensor]], n: Mapping[str, int],
        wrong: Mapping[str, str] | None = None,
    ) -> dict[str, str]:
        """Uploads that are not used, with the reason: what the run's check says, then what could not be stacked.

        `wrong` are the sites whose answers belong to something else; the check is told of them too.
        """
        refused: dict[str, str] = {}
        if self.check is not None and (sent or wrong):
            private = self.guard is not None
            said = self.check(Received(self.job.experiment, kind, self.rounds_done, sent, n, wrong or {}, private))
            refused |= {name: reason for name, reason in said.items() if name in sent}
        refused |= {
            name: f"it claims {count} training samples." for name, count in n.items()
            if count < 1 and name not in refused
        }
        return refused | _unlike({name: tensors for name, tensors in sent.items() if name not in refused})

    def _stacked(self, sent: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return {name: t.to(self.device) for name, t in records.concatenate(sent).items()}

    def _ids(self, names: Sequence[str]) -> Tensor:
        return torch.tensor([self.numbers[name] for name in names], dtype=torch.int64, device=self.device)

    # -- patience --------------------------------------------------------------------------------------------------

    @property
    def _needed(self) -> int:
        """Answers without which a round is skipped; with privacy on no round is, as that would tell who was there."""
        return 0 if self.guard is not None else max(self.policy.minimum, self.method.aggregator.minimum)

    def _await(self, count: int, among: set[str] | None = None) -> set[str]:
        """The sites that are there, once there are so many."""
        end, seen = time.monotonic() + self.policy.wait, None
        while True:
            self._there = self.present()
            found = self._there if among is None else self._there & among
            if len(found) >= count:
                return found
            if found != seen:
                self._tell(f"waiting for {counted(count, 'site')}")
            seen = found
            if time.monotonic() >= end:
                raise CoterieError(
                    f"waited {self.policy.wait:g} s for {counted(count, 'site')}; there are {len(found)}: "
                    f"{', '.join(sorted(found)) or 'none'}."
                )
            time.sleep(self.policy.poll)

    def _not_stuck(self) -> None:
        last = self.rounds[-SKIPS:]
        if len(last) == SKIPS and all("skipped" in r["report"] for r in last):
            raise CoterieError(f"{SKIPS} rounds in a row had too few answers; see the log, then resume the run.")

    # -- records ---------------------------------------------------------------------------------------------------

    def _due(self, t: int) -> bool:
        return t % self.training.evaluate_every == 0 and not any(e.round == t for e in self.history)

    def _evaluated(self, replies: Mapping[str, Part], prefix: str, t: int) -> None:
        """Keep the scores of the sites that sent any."""
        found = {name: reply.meta["scores"] for name, reply in replies.items()}
        if not found:
            return
        names = sorted(found, key=self.numbers.__getitem__)
        evaluation = Evaluation(t, {f"{prefix}{stage}": self._scores(names, found, stage)
                                    for stage in SEEN})
        self.history.append(evaluation)
        if self.folder is not None:
            self.folder.append_evaluation(evaluation)

    def _scores(self, names: Sequence[str], found: Mapping[str, Any], stage: str) -> Scores:
        def column(split: str, metric: str) -> np.ndarray[Any, np.dtype[np.float64]]:
            told = [found[name] for name in names]
            kept = [split == "test" or one["validated"] for one in told]
            return np.array([one[stage][split][metric] if k else np.nan for one, k in zip(told, kept, strict=True)])

        metrics = ("accuracy", "loss") if self.job.classes else ("loss",)
        return Scores(
            np.array([self.numbers[name] for name in names]), np.array([found[name]["samples"] for name in names]),
            np.array([found[name][stage]["steps"] for name in names]),
            {m: column("test", m) for m in metrics}, {m: column("val", m) for m in metrics},
        )

    def _config(self) -> dict[str, Any]:
        return {
            "method": self.spelling, "published": self.method.printed, "by_model": self.method.by_model,
            "training": asdict(self.training),
            "federation": {"sites": self.clients}, "clients": self.clients, "population": self.population,
            "columns": self.layout.size, "head": self.job.head, "choices": {}, "job": self.job.values(),
            "policy": asdict(self.policy),
        }

    def _save(self) -> None:
        if self.folder is None:
            return
        meta = {
            "round": self.rounds_done, "server": type(self.server).__name__, "layout": self.layout.digest,
            "experiment": self.job.experiment, "numbers": self.numbers, "population": self.population,
            "merged": self.merged, "joined": sorted(self.joined), "served": sorted(self.served),
        }
        tensors = {f"server.{name}": t for name, t in self.server.tensors().items()}
        if self.guard is not None:
            tensors["privacy.clip"] = torch.tensor(self.guard.clip, dtype=torch.float64)
        self.folder.save(tensors, meta)

    def _restore(self) -> None:
        assert self.folder is not None
        tensors, meta = self.folder.load()
        if meta["experiment"] != self.job.experiment:
            raise CoterieError(
                f"{self.folder.path} holds experiment {meta['experiment']}, not {self.job.experiment}; give each its "
                "own folder."
            )
        self.numbers, self.population = meta["numbers"], int(meta["population"])
        self._begin(self.population)
        if meta["layout"] != self.layout.digest:
            raise CoterieError(f"the checkpoint in {self.folder.path} holds another model (layout {meta['layout']}).")
        held = {name.partition(".")[2]: t.to(self.device) for name, t in tensors.items() if name.startswith("server.")}
        if self.guard is not None:
            self.guard.clip = float(tensors["privacy.clip"])
        self.server = record_class(self.method, meta["server"]).of(held)
        self.merged, self.joined, self.served = meta["merged"], set(meta["joined"]), set(meta["served"])
        self.rounds_done = int(meta["round"])
        self.history, self.rounds = self.folder.history(), self.folder.rounds()
        log.info("%s: resumed after round %d of %d", self.spelling, self.rounds_done, self.training.rounds)


def check(job: Job, policy: Policy) -> None:
    """Raise before anything is started if the experiment cannot run with so many sites, or not as private as asked."""
    rounds = Rounds(job, policy, set)
    rounds._begin(policy.sites)
    serving.check(rounds.method, policy.sites, rounds.layout)


def serve(
    jobs: Sequence[Job], transport: Transport, policy: Policy, folder: Path | None = None, check: Check | None = None,
    linger: float = 0.0,
) -> list[Rounds]:
    """Run experiments to their ends, side by side; started again with the same folder, they go on where they were.

    With one job the folder is its own, with several each has one of its experiment's name inside. For `linger` seconds
    after the end, sites that come late still get their models.
    """
    if len({job.experiment for job in jobs}) != len(jobs):
        raise CoterieError("two jobs have the same experiment id; give each its own.")

    def place(job: Job) -> Folder | None:
        return None if folder is None else Folder(folder if len(jobs) == 1 else folder / job.experiment)

    works = [Rounds(job, policy, transport.sites, place(job), check) for job in jobs]
    drive([one.work() for one in works], transport, policy)
    end = time.monotonic() + linger
    while time.monotonic() < end:
        if any(transport.sites() - one.served for one in works):
            drive([one.ending() for one in works], transport, policy)
        time.sleep(policy.poll)
    return works


def drive(works: Sequence[Work], transport: Transport, policy: Policy) -> None:
    """Let experiments go in step: what they ask for at the same time is one message a site."""
    asks: dict[int, Ask] = {}
    for number, work in enumerate(works):
        _advance(asks, number, work, None)
    while asks:
        order: dict[str, list[int]] = {}
        for number, ask in asks.items():
            for name in ask.parts:
                order.setdefault(name, []).append(number)
        messages = {name: [asks[number].parts[name] for number in numbers] for name, numbers in order.items()}
        now = dict(asks)
        answers = transport.ask(messages, policy.deadline, lambda got: all(a.enough(got) for a in now.values()))  # noqa: B023
        for number in now:
            mine: dict[str, Part | Failure] = {}
            for name in now[number].parts:
                found = answers.get(name, Failure("late", f"no answer within {policy.deadline:g} s."))
                if isinstance(found, Failure):
                    mine[name] = found
                elif len(found) != len(order[name]):
                    mine[name] = Failure("mismatch", f"{len(found)} answers came for {len(order[name])} tasks.")
                else:
                    mine[name] = found[order[name].index(number)]
            del asks[number]
            _advance(asks, number, works[number], mine)


def _advance(asks: dict[int, Ask], number: int, work: Work, answers: Answers | None) -> None:
    with suppress(StopIteration):
        asks[number] = next(work) if answers is None else work.send(answers)


def _count(n: Any) -> int:
    """A site's number of training samples, 0 if it is none."""
    return n if isinstance(n, int) and not isinstance(n, bool) else 0


def _unlike(sent: Mapping[str, Mapping[str, Tensor]]) -> dict[str, str]:
    """Uploads whose names, shapes or types are not those of most: they cannot be stacked with them."""
    forms = {name: tuple(sorted((k, tuple(t.shape), str(t.dtype)) for k, t in tensors.items()))
             for name, tensors in sent.items()}
    if not forms:
        return {}
    usual = Counter(forms.values()).most_common(1)[0][0]
    return {name: f"it holds {list(form)}, most others {list(usual)}." for name, form in forms.items() if form != usual}
