"""The life of one experiment on the server: admission, rounds and the end, for sites behind any transport."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
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
from coterie.flower.checks import Check, Received, refused
from coterie.flower.exchange import Answers, Ask, Exchange, Transport, drive
from coterie.flower.job import Job
from coterie.flower.policy import Policy
from coterie.flower.scores import Listener
from coterie.flower.site import JOINED
from coterie.flower.wire import Failure, Parcel
from coterie.privacy.noise import SECRET
from coterie.running import chosen
from coterie.running.chosen import State
from coterie.running.clients import device
from coterie.running.confusion import Matrices, class_names, without
from coterie.running.folder import Folder
from coterie.running.round import Round, travelled
from coterie.running.server import NOTES, Server
from coterie.running.simulation import Simulation

log = logging.getLogger("coterie.server")

ATTEMPTS = 3
"""How often an admission is tried. Nobody who is there is left out: if one stays silent, the run ends in an error."""
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
        self.names = class_names({"classes": job.class_names}, job.classes)
        self.listener = Listener(job.measures(), job.task, job.targets, self.names, job.scores == "full")
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
        """Raise if privacy would not hold. Clients of made-up samples show what sites would upload before they do."""
        if server.guard is None:
            return
        if self.job.scores:
            raise CoterieError("private does not protect the sites' scores; set scores = false, and they stay at home.")
        if SECRET not in os.environ:
            raise CoterieError(
                f"the sites know the seed and could take the noise off; set {SECRET} on the server to a random text."
            )
        made_up = Simulation(
            self.method, self.job.factory(), self.job.made_up(server.init.population),
            replace(self.training, device="cpu"), self.job.head,
        )
        server.nobody = {name: t.to(self.device) for name, t in made_up.server.nobody.items()}

    def start(self, population: int) -> Server:
        """The server at its start; raises if the experiment cannot run with so many sites, or not as privately."""
        server = Server(self.method, self._init(population), self.training)
        self._rehearse(server)
        for note in Server.notes(self.method):
            log.warning("%s", note)
        return server

    def _admission(self) -> Exchange:
        """All sites that are there introduce themselves and get numbers in the order of their names."""
        for attempt in range(1, ATTEMPTS + 1):
            names = sorted(self._await(self.policy.sites))
            self.numbers = {name: number for number, name in enumerate(names)}
            self.population = len(names)
            self.server = self.start(self.population)
            told, reasons = yield from self._introduced(names, self.server)
            if len(told) == len(names):
                break
            log.warning("%s: %d of %d sites introduced themselves, attempt %d", self.spelling, len(told), len(names),
                        attempt)
            self.numbers, self.population = {}, 0
        else:
            said = "".join(f"; {name}: {reason}" for name, reason in sorted(reasons.items()))
            raise CoterieError(
                f"in {ATTEMPTS} attempts not every site that was there introduced itself to {self.spelling}{said}"
            )
        self.server = self._admitted(names, told, self.server)
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
        parcels = {name: self._task("introduce", name, hello, **more) for name in names}
        replies, failures = yield from self._ask(parcels, frozenset(names), len(names))
        told = {name: reply.tensors for name, reply in replies.items()}
        reasons = {name: failure.reason for name, failure in failures.items()}
        for name, reason in self._refused("introduce", told, {}).items():
            log.warning("%s: the introduction of %s is left out: %s", self.spelling, name, reason)
            reasons[name] = reason
            del told[name]
        return told, reasons

    def _admitted(self, names: Sequence[str], told: Mapping[str, Mapping[str, Tensor]], server: Server) -> Server:
        """The server that knows these sites too."""
        return server.admitted(self._ids(names), Upload.of(self._stacked([told[name] for name in names])))

    def _round(self) -> Exchange:
        t, start = self.rounds_done, time.perf_counter()
        barred = set(self.check.barred()) if self.check is not None else set()
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
        failures |= {name: BARRED if name in barred else ABSENT for name in drawn if name not in there}
        self.joined |= set(replies)
        self._keep_scores(replies, "", t)
        self._hold()
        uploads = {name: replies[name] for name in training if name in replies}
        n = {name: 1 if self.server.guard else _count(reply.meta.get("n")) for name, reply in uploads.items()}
        wrong = {name: failure.reason for name, failure in failures.items() if failure.cause == "mismatch"}
        bad = self._refused("round", {name: reply.tensors for name, reply in uploads.items()}, n, wrong)
        failures |= {name: Failure("rejected", reason) for name, reason in bad.items()}
        accepted = [name for name in clients if name in uploads and name not in bad]
        needed = self.server.needed(self.policy.minimum)
        asked_for = f"{counted(needed, 'answer')} {'is' if needed == 1 else 'are'} needed"
        report: dict[str, Any] = {"skipped": f"{asked_for}, {len(accepted)} came"}
        if len(accepted) >= needed:
            report = self._merge(accepted, uploads, n)
        if failures:
            report["failures"] = dict(Counter(failure.cause for failure in failures.values()))
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

    def _merge(self, names: Sequence[str], uploads: Mapping[str, Parcel], n: Mapping[str, int]) -> dict[str, Any]:
        stacked = self._stacked([uploads[name].tensors for name in names])
        counts = torch.tensor([n[name] for name in names], dtype=torch.int64, device=self.device)
        up = Uploads(
            stacked, self._ids(names), counts, counts.double() / counts.sum().clamp(min=1), self.population,
            self.rounds_done, self.server.layout,
        )
        report = self.server.merge(up)
        self.merged |= dict.fromkeys(names, self.rounds_done)
        return report

    def ending(self) -> Exchange:
        """A model for every site that is there and has none yet; late sites by the method's rule for unseen clients."""
        barred = set(self.check.barred()) if self.check is not None else set()
        self._there = self.present()
        there = self._there - barred - self.served
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
                server = self._admitted(admitted, told, server)  # for these answers only
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

    def _task(self, kind: str, name: str, record: Record, **more: Any) -> Parcel:
        """A task for one site with the tensors of a record, `[1, ...]`."""
        return Parcel({
            "protocol": wire.PROTOCOL, "kind": kind, "experiment": self.job.experiment, "job": self.job.values(),
            "method": self.spelling, "options": repr(self.method), "layout": self.server.layout.digest,
            "round": self.rounds_done, "number": self.numbers[name], "population": self.population,
            "record": type(record).__name__, "merged": self.merged.get(name, JOINED), "deadline": self.policy.deadline,
            "best": self._best(), **more,
        }, record.tensors())

    def _payloads(self, server: Server, more: Mapping[str, dict[str, Any]]) -> dict[str, Parcel]:
        """What the server sends to each of these sites, and what `more` its task says."""
        if not more:
            return {}
        sent = server.payloads(self._ids(list(more)))
        return {name: self._task("round", name, one, **more[name]) for name, one in zip(more, sent, strict=True)}

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
            wrong = answer if isinstance(answer, Failure) else wire.check_answer(task.meta, answer, name)
            if isinstance(answer, Parcel) and wrong is None:
                replies[name] = answer
            elif wrong is not None:
                failures[name] = wrong
                log.info("%s: %s: %s: %s", self.spelling, name, wrong.cause, wrong.reason)
        return replies, failures

    def _refused(
        self, kind: str, sent: Mapping[str, Mapping[str, Tensor]], n: Mapping[str, int],
        wrong: Mapping[str, str] | None = None,
    ) -> dict[str, str]:
        """Uploads that are not used, with the reason. `wrong` are the sites whose answers belong to something else."""
        private = self.server.guard is not None
        return refused(
            self.check, Received(self.job.experiment, kind, self.rounds_done, sent, n, wrong or {}, private)
        )

    def _stacked(self, sent: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return {name: t.to(self.device) for name, t in self.server.stacked(sent).items()}

    def _ids(self, names: Sequence[str]) -> Tensor:
        return torch.tensor([self.numbers[name] for name in names], dtype=torch.int64, device=self.device)

    # -- patience --------------------------------------------------------------------------------------------------

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

    def _keep_scores(self, replies: Mapping[str, Parcel], prefix: str, t: int) -> None:
        """Keep the scores of the sites that sent any; those that are not what was asked for are left out."""
        found, sums = {}, {}
        for name, reply in replies.items():
            if "scores" not in reply.meta:
                continue
            try:
                self.listener.check(reply.meta["scores"], reply.meta.get("sums"))
            except CoterieError as reason:
                log.warning("%s: the scores of %s are left out: %s", self.spelling, name, reason)
                continue
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
        said = Server.notes(self.method)
        return {
            "method": self.spelling, "published": self.method.printed, "by_model": self.method.by_model,
            "training": asdict(self.training), "federation": self._recipe(), "clients": self.clients,
            "population": self.population,
            "columns": self.server.layout.size, **self.server.layout.frozen_facts(), "head": self.job.head,
            "loss": Task.of(self.job.classes).name, "choices": {NOTES: said} if said else {}, "job": self.job.values(),
            "policy": asdict(self.policy), "metrics": self.listener.measures.record(),
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

    experiments = [Rounds(job, policy, transport.sites, place(job), check) for job in jobs]
    drive([one.work() for one in experiments], transport, policy.deadline)
    end = time.monotonic() + linger
    while time.monotonic() < end:
        if any(transport.sites() - one.served for one in experiments):
            drive([one.ending() for one in experiments], transport, policy.deadline)
        time.sleep(policy.poll)
    return experiments


def _count(n: Any) -> int:
    """A site's number of training samples, 0 if it is none."""
    return n if isinstance(n, int) and not isinstance(n, bool) else 0
