"""The life of one experiment on the server: admission, rounds and the end, for sites behind any transport."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie import registry, streams
from coterie.contract import records
from coterie.contract.cohort import Init
from coterie.contract.method import Uploads
from coterie.contract.net import Task
from coterie.contract.records import Record, Upload
from coterie.engine.arithmetic import Arithmetic
from coterie.errors import CoterieError, counted
from coterie.evaluation.score import Evaluation
from coterie.evaluation.stages import PREFIX, SERVED
from coterie.evaluation.summary import chosen_round, validated
from coterie.files import write_json
from coterie.flower import wire
from coterie.flower.checks import UNUSABLE, UNUSUAL, Check, Expected, Inspector, Limits, Received, refused
from coterie.flower.exchange import Answers, Ask, Exchange, Transport, drive
from coterie.flower.job import Job
from coterie.flower.policy import Policy
from coterie.flower.rehearsal import Rehearsal
from coterie.flower.scores import Listener
from coterie.flower.site import JOINED
from coterie.flower.wire import BLAMED, Failure, Parcel
from coterie.privacy.noise import NEW_SECRET, SECRET, secret
from coterie.running import checkpoint, chosen
from coterie.running.chosen import State
from coterie.running.clients import device
from coterie.running.confusion import Matrices, class_names, without
from coterie.running.folder import Folder
from coterie.running.guard import Guard
from coterie.running.round import Round, travelled
from coterie.running.server import NOTES, Server

log = logging.getLogger("coterie.server")

ATTEMPTS = 3
"""How often a site may fail to introduce itself at the admission; then it is left out, and others are asked anew."""
STATUS = "status.json"
"""What the server is doing, in the run's folder."""
ABSENT = Failure("absent", "the site was not there when the round began; it is asked when it is drawn again.")
BARRED = Failure("barred", "the site is quarantined and is not asked until an operator lifts it.")
SKIPS = 20
"""Rounds in a row without enough answers, after which the run stops with an error; it can be resumed."""


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
        self.left_out: dict[str, str] = {}  # site -> why it is no client: it did not introduce itself properly
        self.merged: dict[str, int] = {}  # site -> the last round in which its upload was merged
        self.joined: set[str] = set()
        self._there: set[str] = set()  # the sites that were there when last looked
        self.served: set[str] = set()  # sites that have the model of the end
        self.handed_out: int | None = None  # at the end, the round whose models sites use; None: the last
        self._held: dict[int, State] = {}  # the state of the chosen round, of a run without a folder
        self._best_of: tuple[int, int | None] = (0, None)  # evaluations so far, and the round they choose
        self.rounds_done = 0
        self.history: list[Evaluation] = []
        self.rounds: list[dict[str, Any]] = []
        self.server: Server
        self.rehearsal: Rehearsal
        self.names = class_names({"classes": job.class_names}, job.classes)
        most = check.limits.most_samples if isinstance(check, Inspector) else Limits.most_samples
        self.listener = Listener(job.measures(), job.task, job.targets, self.names, job.scores == "full", most)
        self.matrices = Matrices(None if folder is None else folder.append_confusion)
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

    def work(self) -> Exchange:
        """Admission, all rounds, and a model for everybody who is there at the end."""
        if not self.population:
            yield from self._admission()
        while self.rounds_done < self.training.rounds:
            yield from self._round()
        yield from self.ending()

    def _init(self, population: int) -> Init:
        dtype = Arithmetic(self.training.precision).dtype
        return self.job.init(self.method, dtype, self.device, population)

    def _rehearse(self, server: Server) -> None:
        """See what sites will send before they do, by a client of made-up samples; raise if privacy would not hold."""
        if server.guard is not None:
            self._require_secrecy()
        fresh = Server(self.method, self._init(server.init.population), self.training, experiment=self.job.experiment)
        self.rehearsal = Rehearsal(self.job, fresh)
        server.nobody = fresh.nobody

    def _require_secrecy(self) -> None:
        if self.job.scores:
            raise CoterieError("private does not protect the sites' scores; set scores = false, and they stay at home.")

    def start(self, population: int) -> Server:
        """The server at its start; raises if the experiment cannot run with so many sites, or not as privately."""
        server = Server(self.method, self._init(population), self.training, experiment=self.job.experiment)
        self._rehearse(server)
        for note in Server.notes(self.method, server.layout, self.training):
            log.warning("%s", note)
        return server

    def _admission(self) -> Exchange:
        """All sites that are there introduce themselves and get numbers in the order of their names.

        Everybody is asked anew until everybody has done so. A site that has failed ATTEMPTS times is left out, as long
        as the others are enough.
        """
        failed, reasons = Counter[str](), dict[str, str]()
        least = max(self.policy.minimum, self.method.aggregator.minimum)
        while True:
            out = {name for name, times in failed.items() if times >= ATTEMPTS}
            names = sorted(self._await(self.policy.sites - len(out), without=out))
            self.numbers = {name: number for number, name in enumerate(names)}
            self.population = len(names)
            self.server = self.start(self.population)
            told, why = yield from self._introduced(names, self.server)
            if len(told) == len(names):
                self.server, why = self._admitted(names, told, self.server)
                if not why:
                    break
            failed.update(name for name in names if name in why)
            reasons |= why
            log.warning("%s: %d of %d sites introduced themselves", self.spelling, len(names) - len(why), len(names))
            self.numbers, self.population = {}, 0
            out = {name for name, times in failed.items() if times >= ATTEMPTS}
            if self.policy.sites - len(out) < least:
                said = "".join(f"; {name}: {reason}" for name, reason in sorted(reasons.items()))
                raise CoterieError(
                    f"in {ATTEMPTS} attempts not every site that was there introduced itself to {self.spelling}, and "
                    f"without them there are fewer than {counted(least, 'site')}{said}"
                )
        self.left_out = {name: reasons[name] for name in sorted(out)}
        for name, reason in self.left_out.items():
            log.warning("%s: %s is left out: %s", self.spelling, name, reason)
        self.server.check_buffers(self.server.payload(self._ids(names[:1])))
        self.merged = dict.fromkeys(names, JOINED)
        if self.folder is not None:
            (self.folder.path / "config.json").unlink(missing_ok=True)  # of a start that did not get as far as this
            self.folder.create(self._config())
        self._save()
        log.info("%s: %d sites admitted: %s", self.spelling, self.population, ", ".join(names))

    def _introduced(
        self, names: Sequence[str], server: Server, **more: Any
    ) -> Generator[Ask, Answers, tuple[dict[str, dict[str, Tensor]], dict[str, str]]]:
        """The introductions of these sites, of those that gave a usable one, and why the others gave none."""
        hello = records.spread(server.hello(), 1)  # all are told the same
        expected = self.rehearsal.introduction(server, int(more.get("round", self.rounds_done)))
        parcels = {name: self._task("introduce", name, hello, expected, **more) for name in names}
        replies, failures = yield from self._ask(parcels, frozenset(names), len(names))
        failures |= self._refused("introduce", replies, expected, failures)
        for name, failure in failures.items():
            log.warning("%s: the introduction of %s is left out: %s", self.spelling, name, failure.reason)
        told = {name: reply.tensors for name, reply in replies.items() if name not in failures}
        return told, {name: failure.reason for name, failure in failures.items()}

    def _admitted(
        self, names: Sequence[str], told: Mapping[str, Mapping[str, Tensor]], server: Server
    ) -> tuple[Server, dict[str, str]]:
        """The server that knows these sites too, but for those whose introductions it cannot take, with the reason."""

        def admit(some: Sequence[str]) -> Server:
            introductions = Upload.of(self._stacked([told[name] for name in some]))
            return _sound(server, server.admitted(self._ids(some), introductions))

        return self._without_culprits(names, admit, server)

    def _round(self) -> Exchange:
        t, start = self.rounds_done, time.perf_counter()
        barred = self._barred()
        there = self._await(max(self.policy.minimum, self.method.aggregator.minimum), among=set(self.clients) - barred)
        clients = self.clients
        drawn = [clients[i] for i in self.server.selected(streams.integers("client", clients), t)]
        training = [name for name in drawn if name in there]
        scored = self.job.scores and self._due(t)
        do = {
            name: [word for word, wanted in (("join", name not in self.joined), ("score", scored),
                                             ("local", name in training)) if wanted]
            for name in clients if name in there
        }
        names = [name for name in do if do[name]]
        parcels = self._payloads(self.server, {name: {"do": do[name]} for name in names})
        wanted = min(self.policy.target or len(training), len(training))
        replies, failures = yield from self._ask(parcels, frozenset(training or names), wanted or len(names))
        self.joined |= set(replies)
        uploads = {name: replies[name] for name in training if name in replies}
        failures |= self._refused("round", uploads, self.rehearsal.upload(self.server, t), failures)
        self._keep_scores({name: reply for name, reply in replies.items() if name not in failures}, "", t)
        self._hold()
        accepted = [name for name in clients if name in uploads and name not in failures]
        needed = self.server.needed(self.policy.minimum)
        asked_for = f"{counted(needed, 'answer')} {'is' if needed == 1 else 'are'} needed"
        report: dict[str, Any] = {"skipped": f"{asked_for}, {len(accepted)} came"}
        if len(accepted) >= needed:
            merged, report, bad = self._merge(accepted, uploads, needed)
            failures |= bad
            accepted = [name for name in accepted if name in merged]
        failures |= {name: BARRED if name in barred else ABSENT for name in drawn if name not in there}
        report |= _said(failures)
        for name, failure in failures.items():
            log.warning("%s, round %d: %s: %s %s", self.spelling, t + 1, name, failure.cause, failure.reason)
        layout, part = self.server.layout, self.method.travels()
        down = travelled(parcels[accepted[0]].tensors, layout, part) if accepted else {}
        up = travelled(uploads[accepted[0]].tensors, layout, part) if accepted else {}
        self.rounds_done = t + 1
        done = Round(t, len(accepted), len(drawn) - len(accepted), down, up, report)
        self.rounds.append({**asdict(done), "seconds": round(time.perf_counter() - start, 6)})
        log.info("%s: round %d of %d, %d of %d answered", self.spelling, t + 1, self.training.rounds, len(accepted),
                 len(drawn))
        if self.folder is not None:
            self.folder.append_round(self.rounds[-1])
        self._save()
        self._not_stuck()

    def _merge(
        self, names: Sequence[str], uploads: Mapping[str, Parcel], needed: int
    ) -> tuple[list[str], dict[str, Any], dict[str, Failure]]:
        """Merge the uploads of these sites: whose were, the round's report, and those that cannot be merged."""
        reports: list[dict[str, Any]] = []

        def merge(some: Sequence[str]) -> Server:
            counts = [1 if self.server.guard else uploads[name].meta["n"] for name in some]
            n, share = self.server.weighed(torch.tensor(counts, dtype=torch.int64, device=self.device))
            stacked = self._stacked([uploads[name].tensors for name in some])
            server = self.server.apart()
            up = Uploads(stacked, self._ids(some), n, share, self.population, self.rounds_done, server.layout)
            reports.append(server.merge(up))
            return _sound(self.server, server)

        server, why = self._without_culprits(names, merge, self.server)
        merged = [name for name in names if name not in why]
        if not merged and server is self.server:
            return [], {"skipped": "no one upload is to blame, but together they cannot be merged"}, {}
        bad = {name: _unusable(reason) for name, reason in why.items()}
        if len(merged) < needed:
            return [], {"skipped": f"{counted(needed, 'answer')} needed, {len(merged)} could be merged"}, bad
        self.server = server
        self.merged |= dict.fromkeys(merged, self.rounds_done)
        return merged, reports[-1], bad

    def _without_culprits(
        self, names: Sequence[str], attempt: Callable[[Sequence[str]], Server], before: Server
    ) -> tuple[Server, dict[str, str]]:
        """What `attempt(names)` makes of the server, without the sites because of which it cannot, and the reasons.

        The last resort, where something passed all checks and cannot be used all the same. To blame are those, however
        many, whose own cannot be used alone either: beside the others each of several may look harmless. Where that
        tells nobody from anybody, as with an aggregator that needs several, it is the one site without which it works.
        If neither finds a culprit, the server stays as it was `before`, and all are to blame.
        """
        try:
            return attempt(names), {}
        except Exception as reason:
            log.exception("%s: what sites sent cannot be used", self.spelling)
            first = reason
        alone: dict[str, Exception] = {}
        for name in names:
            try:
                attempt([name])
            except Exception as reason:
                alone[name] = reason
        for culprits in [alone, *({name: first} for name in names)]:
            rest = [name for name in names if name not in culprits]
            if not rest or not culprits:
                continue
            with suppress(Exception):
                server = attempt(rest)
                why = {name: f"what it sent cannot be used ({wire.plain(f'{type(reason).__name__}: {reason}')})"
                       for name, reason in culprits.items()}
                blamed = {name: _unusable(said) for name, said in why.items()}
                self._refused(UNUSABLE, {}, Expected(), blamed)
                return server, why
        if isinstance(first, CoterieError):
            raise first  # a sentence of the method's own, whoever takes part
        return before, dict.fromkeys(names, f"what it sent cannot be used ({wire.plain(str(first))})")

    def ending(self) -> Exchange:
        """A model for every site that is there and has none yet; late sites by the method's rule for unseen clients."""
        self._there = self.present()
        there = self._there - self._barred() - self.served
        last, score = self.rounds_done, ["score"] if self.job.scores else []
        known = [name for name in self.clients if name in there]
        late = sorted(there - set(self.clients))
        anybody = bool(known or late)
        if known:
            scored = {k for e in self.history if e.round == last and SERVED in e.stages
                      for k in e.stages[SERVED].clients.tolist()}
            do = {name: ["deploy", *([] if self.numbers[name] in scored else score)] for name in known}
            asked = self._payloads(self.server, {name: {"do": do[name], "last": last} for name in known})
            known = sorted((yield from self._deployed(asked, "", last)))
        if self.handed_out is None:
            self.handed_out = self._kept(self._best())
        server, then = self._chosen()
        if self.handed_out is None:
            self.served |= set(known)
        elif known:
            merged = then.get("merged", {})
            more = {name: {"do": ["deploy"], "last": last, "round": self.handed_out, "best": self.handed_out,
                           "merged": merged.get(name, JOINED)} for name in known}
            self.served |= yield from self._deployed(self._payloads(server, more), "", self.handed_out)
        if late:
            t = last if self.handed_out is None else self.handed_out
            at = {"round": t, "best": self.handed_out, "last": last}
            for name in late:
                self.numbers.setdefault(name, len(self.numbers))
            told, _ = yield from self._introduced(late, server, **at)
            admitted = [name for name in late if name in told]
            if admitted:
                server, why = self._admitted(admitted, told, server)  # for these answers only
                admitted = [name for name in admitted if name not in why]
            if admitted:
                do_both = {"do": ["deploy", *score], "newcomer": True, **at}
                asked = self._payloads(server, dict.fromkeys(admitted, do_both))
                self.served |= yield from self._deployed(asked, PREFIX, t)
        if anybody and self.folder is not None:
            self.matrices.end()
            self._save()
            self._tell("finished")
            self.folder.finish({"rounds": self.rounds_done, "seconds": sum(r["seconds"] for r in self.rounds)})

    def _deployed(
        self, parcels: Mapping[str, Parcel], prefix: str, t: int
    ) -> Generator[Ask, Answers, set[str]]:
        """The sites that have their model of round t now, and those that cannot have it and keep the last one."""
        replies, failures = yield from self._ask(parcels, frozenset(parcels), len(parcels))
        self._refused("deploy", {}, self.rehearsal.nothing(self.server), failures)
        done = set(replies)
        for name, failure in failures.items():
            if t == self.handed_out and not prefix and failure.cause == "refused":
                log.warning("%s: %s keeps the model of the last round: %s", self.spelling, name, failure.reason)
                done.add(name)
            else:
                log.warning("%s: %s has no model yet: %s %s", self.spelling, name, failure.cause, failure.reason)
        self._keep_scores(replies, prefix, t)
        return done

    # -- the round that is handed out ------------------------------------------------------------------------------

    def _best(self) -> int | None:
        """The round chosen on the sites' validation data so far; None where they told no such scores."""
        if self._best_of[0] != len(self.history):
            self._best_of = len(self.history), chosen_round(self.history) if validated(self.history) else None
        return self._best_of[1]

    def _kept(self, best: int | None) -> int | None:
        """The chosen round, if its state is there; an earlier version may have done that round."""
        kept = self._held if self.folder is None or best is None else self.folder.kept().states
        if best in (None, self.rounds_done, *kept):
            return best
        log.warning("%s: round %s was chosen on validation data, but %s: sites use the last round's models",
                    self.spelling, best, chosen.EARLIER)
        return None

    def _hold(self) -> None:
        """Before the merge: without a folder the state of the chosen round is held here, and no other."""
        if self.folder is None and self.rounds_done == self._best():
            self._held = {self.rounds_done: chosen.on_host((self.server.tensors(), self._meta()))}

    def _chosen(self) -> tuple[Server, Mapping[str, Any]]:
        """The server of the round that is handed out, and the header of its state."""
        if self.handed_out in (None, self.rounds_done):
            return self.server, self._meta()
        assert self.handed_out is not None
        tensors, meta = self._held[self.handed_out] if self.folder is None else (
            self.folder.kept().states[self.handed_out]())
        return Server.restored(self.method, self._init(self.population), self.training, tensors, meta), meta

    # -- messages --------------------------------------------------------------------------------------------------

    def _task(self, kind: str, name: str, record: Record, expected: Expected, **more: Any) -> Parcel:
        """A task for one site with the tensors of a record, `[1, ...]`, and what its answer holds."""
        return Parcel({
            "protocol": wire.PROTOCOL, "kind": kind, "experiment": self.job.experiment, "job": self.job.values(),
            "method": self.spelling, "options": repr(self.method), "layout": self.server.layout.digest,
            "round": self.rounds_done, "number": self.numbers[name], "population": self.population,
            "record": type(record).__name__, "merged": self.merged.get(name, JOINED), "deadline": self.policy.deadline,
            "best": self._best(), **more,
        }, record.tensors(), expected.schema)

    def _payloads(self, server: Server, more: Mapping[str, dict[str, Any]]) -> dict[str, Parcel]:
        """What the server sends to each of these sites, and what `more` its task says."""
        if not more:
            return {}
        sent = server.payloads(self._ids(list(more)))
        trained, nothing = self.rehearsal.upload(server, self.rounds_done), self.rehearsal.nothing(server)
        return {
            name: self._task("round", name, one, trained if "local" in more[name]["do"] else nothing, **more[name])
            for name, one in zip(more, sent, strict=True)
        }

    def _tell(self, doing: str, asked: Iterable[str] = ()) -> None:
        """What the server is doing now, for `coterie status`."""
        if self.folder is not None and self.folder.path.is_dir():
            now = {"time": time.time(), "pid": os.getpid(), "doing": doing}
            now |= {"there": sorted(self._there), "asked": sorted(asked)}
            write_json(self.folder.path / STATUS, now, indent=None)

    def _ask(
        self, parcels: Mapping[str, Parcel], counted: frozenset[str], wanted: int
    ) -> Generator[Ask, Answers, tuple[dict[str, Parcel], dict[str, Failure]]]:
        """The answers that belong to what was asked, and why the others are missing."""
        if parcels:
            doing = "the end" if self.finished else f"round {self.rounds_done + 1} of {self.training.rounds}"
            self._tell(doing, parcels)
        answers = (yield Ask(parcels, counted, wanted)) if parcels else {}
        replies: dict[str, Parcel] = {}
        failures: dict[str, Failure] = {}
        for name, task in parcels.items():
            answer = answers[name]
            wrong = answer if isinstance(answer, Failure) else self._wrong(task, answer, name)
            if isinstance(answer, Parcel) and wrong is None:
                replies[name] = answer
            elif wrong is not None:
                failures[name] = wrong
                log.info("%s: %s: %s: %s", self.spelling, name, wrong.cause, wrong.reason)
        return replies, failures

    def _wrong(self, task: Parcel, answer: Parcel, name: str) -> Failure | None:
        """What is wrong with the header of an answer, if anything is."""
        do, told = task.meta.get("do", ()), []
        if self.server.guard is None and (task.meta["kind"] == "introduce" or "local" in do):
            told.append("n")
        if "score" in do:
            told += ["scores", "sums"] if self.listener.shapes else ["scores"]
        wrong = wire.check_answer(task.meta, answer, name, told)
        if wrong is None and "score" in do:
            wrong = self.listener.wrong(answer.meta["scores"], answer.meta.get("sums"))
        return wrong

    def _refused(
        self, kind: str, replies: Mapping[str, Parcel], expected: Expected, failures: Mapping[str, Failure]
    ) -> dict[str, Failure]:
        """Answers that are not used, with the reason; what sites are to blame for among the `failures` is noted."""
        wrong = {name: failure for name, failure in failures.items() if failure.cause in BLAMED}
        return refused(self.check, Received(
            self.job.experiment, kind, self.rounds_done, {name: reply.tensors for name, reply in replies.items()},
            {name: reply.meta.get("n") for name, reply in replies.items()}, expected, wrong,
            self.server.guard is not None,
        ))

    def _barred(self) -> set[str]:
        return set(self.check.barred()) if self.check is not None else set()

    def _stacked(self, sent: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return {name: t.to(self.device) for name, t in self.server.stacked(sent).items()}

    def _ids(self, names: Sequence[str]) -> Tensor:
        return torch.tensor([self.numbers[name] for name in names], dtype=torch.int64, device=self.device)

    # -- patience --------------------------------------------------------------------------------------------------

    def _await(self, count: int, among: set[str] | None = None, without: Iterable[str] = ()) -> set[str]:
        """The sites that are there, `among` some and `without` others, once there are so many."""
        end, seen = time.monotonic() + self.policy.wait, None
        while True:
            self._there = self.present()
            found = (self._there if among is None else self._there & among) - set(without)
            if len(found) >= count:
                return found
            if found != seen:
                self._tell(f"waiting for {counted(count, 'site')}")
            seen = found
            if time.monotonic() >= end:
                named = ", ".join(sorted(self._barred() & set(self.clients)))
                raise CoterieError(
                    f"waited {self.policy.wait:g} s for {counted(count, 'site')}; there are {len(found)}: "
                    f"{', '.join(sorted(found)) or 'none'}{f'; quarantined are {named}' if named else ''}."
                )
            time.sleep(self.policy.poll)

    def _not_stuck(self) -> None:
        last = self.rounds[-SKIPS:]
        if len(last) == SKIPS and all("skipped" in r["report"] for r in last):
            out = {name: said["reason"] for r in last for name, said in r["report"].get("refused", {}).items()}
            out |= dict.fromkeys(sorted(self._barred() & set(self.clients)), "quarantined")
            named = "; ".join(f"{name} ({wire.plain(reason)})" for name, reason in out.items())
            raise CoterieError(
                f"{SKIPS} rounds in a row had too few answers (the last: {last[-1]['report']['skipped']})"
                f"{f'; left out were {named}' if named else ''}; see the log, then resume the run."
            )

    # -- records ---------------------------------------------------------------------------------------------------

    def _due(self, t: int) -> bool:
        return t % self.training.evaluate_every == 0 and not any(e.round == t for e in self.history)

    def _keep_scores(self, replies: Mapping[str, Parcel], prefix: str, t: int) -> None:
        """Keep the scores of the sites that sent any."""
        found, sums = {}, {}
        for name, reply in replies.items():
            if "scores" in reply.meta:
                found[self.numbers[name]] = reply.meta["scores"]
                sums[self.numbers[name]] = reply.meta.get("sums")
        if not found:
            return
        made = self.listener.evaluation(t, prefix, found, sums)
        self.history.append(without(made))
        if self.folder is not None:
            names = sorted(self.numbers, key=self.numbers.__getitem__)
            pooled = {f"{prefix}{stage}": values for stage, values in self.listener.pooled(sums).items()}
            self.folder.append_evaluation(self.history[-1], names=names, pooled=pooled)
        self.matrices.keep(made, self.history)

    def _config(self) -> dict[str, Any]:
        said = Server.notes(self.method, self.server.layout, self.training)
        return {
            "method": self.spelling, "published": self.method.printed, "by_model": self.method.by_model,
            "training": asdict(self.training), "federation": self._recipe(), "clients": self.clients,
            "population": self.population,
            "columns": self.server.layout.size, **self.server.layout.frozen_facts(), "head": self.job.head,
            "loss": Task.of(self.job.classes).name, "choices": {NOTES: said} if said else {}, "job": self.job.values(),
            "policy": asdict(self.policy), "metrics": self.listener.measures.record(),
            **({"left_out": self.left_out} if self.left_out else {}),
        }

    def _recipe(self) -> dict[str, Any]:
        named = {"classes": list(self.job.class_names)} if self.job.class_names else {}
        return {"sites": self.clients, **named}

    def _meta(self) -> dict[str, Any]:
        return {
            "round": self.rounds_done, **self.server.meta(), "experiment": self.job.experiment, "numbers": self.numbers,
            "population": self.population, "merged": dict(self.merged), "joined": sorted(self.joined),
            "served": sorted(self.served), "handed_out": self.handed_out,
        }

    def _save(self) -> None:
        if self.folder is not None:
            best = self._best() if self.handed_out is None else self.handed_out
            self.folder.save(self.server.tensors(), self._meta(), () if best is None else (best,))

    def _restore(self) -> None:
        assert self.folder is not None
        Guard.require_noise(self.method, self.training, checkpoint.header(self.folder.checkpoint))
        tensors, meta = self.folder.load()
        if meta["experiment"] != self.job.experiment:
            raise CoterieError(
                f"{self.folder.path} holds experiment {meta['experiment']}, not {self.job.experiment}; give each its "
                "own folder."
            )
        self.numbers, self.population = meta["numbers"], int(meta["population"])
        self.server = Server.restored(self.method, self._init(self.population), self.training, tensors, meta)
        self._rehearse(self.server)
        self.merged, self.joined, self.served = meta["merged"], set(meta["joined"]), set(meta["served"])
        self.handed_out = meta.get("handed_out")
        self.rounds_done = int(meta["round"])
        self.history, self.rounds = self.folder.history(), self.folder.rounds()
        log.info("%s: resumed after round %d of %d", self.spelling, self.rounds_done, self.training.rounds)


def refuse_early(job: Job, policy: Policy) -> None:
    """Raise before anything is started if the experiment cannot run with so many sites, or not as private as asked."""
    Rounds(job, policy, set).start(policy.sites)
    _require_secret(job)


def _require_secret(job: Job) -> None:
    """Raise if the noise of a private run could be found out by its sites."""
    if job.chosen().aggregator.private and secret() is None:
        raise CoterieError(
            f"the sites know the seed and could take the noise off; set {SECRET} on the server to a random text: "
            f"{NEW_SECRET}"
        )


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
    for job in jobs:
        _require_secret(job)

    def place(job: Job) -> Folder | None:
        return None if folder is None else Folder(folder if len(jobs) == 1 else folder / job.experiment)

    experiments = [Rounds(job, policy, transport.sites, place(job), check) for job in jobs]
    drive([one.work() for one in experiments], transport, policy.deadline)
    end = time.monotonic() + linger
    while time.monotonic() < end:
        if any(transport.sites() - one.served for one in experiments):
            drive([one.ending() for one in experiments], transport, policy.deadline)
        time.sleep(policy.poll)
    return experiments


def _unusable(reason: str) -> Failure:
    """What had passed all checks and could not be used."""
    return Failure("rejected", reason, "upload")


def _said(failures: Mapping[str, Failure]) -> dict[str, Any]:
    """What the record of a round says of missing answers: how many for which cause, and who was refused for what."""
    causes = dict(Counter(failure.cause for failure in failures.values()))
    blamed = {name: {"field": failure.field, "reason": failure.reason} for name, failure in failures.items()
              if failure.cause in (*BLAMED, UNUSUAL)}
    return ({"failures": causes} if causes else {}) | ({"refused": blamed} if blamed else {})


def _sound(before: Server, after: Server) -> Server:
    """The server that was made, unless numbers of its state that were finite no longer are, or a running variance is
    negative: models answer NaN then. What sites send are differences, so rounding may take one just below 0."""
    held = before.state.tensors()
    for name, t in after.state.tensors().items():
        was = held.get(name)
        if not bool(torch.isfinite(t).all()) and (was is None or bool(torch.isfinite(was).all())):
            raise ArithmeticError(f"the server's {name} would not be finite")
    for name, layout in after.method.averaged(after.state, after.layout).items():
        for entry in layout.entries:
            if entry.batchnorm and entry.kind == "statistic" and entry.name.endswith("running_var"):
                columns = slice(entry.start, entry.stop)
                was, now = getattr(before.state, name)[..., columns], getattr(after.state, name)[..., columns]
                if bool((now < -1e-5 * (1 + was.abs().amax())).any()):
                    raise ArithmeticError(f"the server's {entry.name} would be negative")
                now.clamp_(min=0)
    return after
