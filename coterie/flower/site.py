"""A site: one client with its own data and a home folder, answering the server's tasks with the method's functions.

    <home>/accepted                           what its operator has approved (`coterie.flower.consent`)
    <home>/sent.jsonl                         everything that left the site, errors too: numbers in full, of tensors
                                              name and shape; written before it leaves
    <home>/site.log                           what the operator is told, and the whole text of errors
    <home>/<experiment>/job.json              the experiment as first met; a message that says otherwise is refused
    <home>/<experiment>/forms.json            what its tasks carry (`coterie.flower.forms`)
    <home>/<experiment>/answered.json         how many payloads it has answered, and a fingerprint of the last
    <home>/<experiment>/state.safetensors     the client's own state, before and after the last round it trained in
    <home>/<experiment>/former.safetensors    that file before it was last replaced (`coterie.flower.own_state`)
    <home>/<experiment>/chosen-12.safetensors the client's own state as it was scored after round 12
    <home>/<experiment>/model.safetensors     the model the site uses, tensor by tensor, once the server sent for it
    <home>/<experiment>/model.json            method, round, scores and layout of that model
    <home>/<experiment>/last.*                the same of the last round, where another one was chosen
    <home>/<experiment>/introduced.json       when it introduced itself, and the training steps that took

The server is not trusted. A task is answered only if its experiment is approved, asks for no more than the site's
limits, and carries what the method's own server would send; otherwise it is refused in a sentence, and nothing is
read, built, trained or kept. It answers about as many payloads of an experiment as that has rounds, whatever rounds the
server says they are of, and counts them on the disk. Sentences that leave the site are made from the task alone. Of any
other error the type leaves and a reference number, under which `site.log` has the text: it may quote the data.

The server says which round of this site it merged last. What was trained and not merged is taken back, so that server
and site never disagree, and a task that arrives twice gives the same answer twice.

It also says which round is the best so far on the sites' validation data. The site keeps its own state of that round,
and of the one it has scored since, until it knows which is better; at the end it makes its model from the chosen one.
"""

from __future__ import annotations

import json
import secrets
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from coterie import registry
from coterie.contract.cohort import Cohort
from coterie.contract.ground import grounded
from coterie.contract.records import Record
from coterie.data import Federation, load_as
from coterie.data.labels import placed
from coterie.data.readers.tables.schema import unit_of
from coterie.errors import CoterieError
from coterie.evaluation.stages import SERVED
from coterie.files import read_json, write_json
from coterie.flower import wire
from coterie.flower.consent import Consent, SiteLimits
from coterie.flower.forms import Form, rehearsed
from coterie.flower.job import AnnouncedJob, Job, checked_name
from coterie.flower.own_state import KeptState, StateFiles, require_finite
from coterie.flower.scores import kept, sums_told, told
from coterie.flower.task import KINDS, Refusal, TaskHeader, patience, refusing
from coterie.flower.wire import Parcel
from coterie.running import checkpoint
from coterie.running.chosen import CHOSEN, LAST, HandedOut
from coterie.running.clients import Clients, Measured, deploy, introduce, join, local, score_rows
from coterie.running.server import record_class
from coterie.serving.portable import write_model

ALONE = np.array([0])
"""The site's place in its own data."""
JOINED = -1
"""The round of a state that has not been trained yet."""
MODEL, LAST_MODEL = "model.safetensors", "last.safetensors"
"""The model that a site uses, and that of the last round where another one was chosen."""
SENT, LOG, JOB, FORMS, ANSWERED = "sent.jsonl", "site.log", "job.json", "forms.json", "answered.json"
LONGEST = 1000
"""Characters of a sentence that leaves the site."""
LONGEST_LOGGED = 20_000
"""Characters of one entry of the site's log."""

Data = Federation | Callable[[Job], Federation]
ONE_LABEL = "sites train on one label a sample, and in these data each token has a class; simulate such a federation."


def site_at(
    name: str, data: str | Path, home: str | Path, device: str = "auto", val: float = 0.1, test: float = 0.25,
    seed: int = 0, accept: str | Iterable[str] = (), limit: str = "",
) -> Site:
    """The site `name` with the samples of a file, which is spelled as for --data.

    A share of them is held back for validation and for testing; a split that the data bring is kept. Labels are found
    among the job's classes by their names or numbers: a site may hold some of them only. `accept` are digests of
    approved experiments beside those in the home, or `any`; `limit` is what --limit says, `epochs=20,rounds=100`.
    """
    checked_name("a site", name)

    def read(job: Job) -> Federation:
        source = load_as(data, job.classes)
        if source.vocabulary:
            raise Refusal(ONE_LABEL)
        y = placed(source.y, source.classes, job.classes, job.class_names, name)
        return Federation.from_assignment(
            source.x, y, [np.arange(len(source.x))], val=val, test=test, seed=seed, classes=job.classes,
            names=[name], recipe={"data": str(data)}, given=source.split, group=source.group,
            unit=unit_of(source.encoding),
        )

    return Site(name, read, Path(home), device, accept, SiteLimits.of(limit))


class Site:
    """One client. `answer` takes a message's parcels and gives as many back; a parcel that fails spoils no other."""

    def __init__(
        self, name: str, data: Data, home: Path, device: str = "auto", accept: str | Iterable[str] = (),
        limits: SiteLimits | None = None,
    ) -> None:
        """`data` are those of one client, or read them for a job. `device` is the site's own choice.

        `accept` approves experiments by their digests, beside those that the home's file `accepted` lists; `any` all.
        """
        self.name, self.home, self.device = checked_name("a site", name), Path(home), device
        self.consent, self.limits = Consent(self.home, accept), limits if limits is not None else SiteLimits()
        self.error: Exception | None = None
        """The last error whose text did not leave the site."""
        self._data = data
        self._desks: dict[str, _Enrolment] = {}

    def answer(self, parcels: Sequence[Parcel]) -> list[Parcel]:
        return [self._answer(parcel) for parcel in parcels]

    def _answer(self, parcel: Parcel) -> Parcel:
        meta = parcel.meta
        try:
            with refusing():
                wire.check_protocol(meta)
            if meta.get("kind") == "present":
                return self.sent(wire.answer(_echoed(meta), self.name))
            task = TaskHeader.of(meta)
            desk = self._desk(task)
            answer = desk.answer(task, parcel.tensors)
            self._desks[task.experiment] = desk
            return self.sent(answer)
        except Exception as reason:  # whatever goes wrong, the server gets an answer and the site goes on
            return self.failed(meta, reason)

    def patience(self, parcels: Sequence[Parcel]) -> float:
        """Seconds that a message may take: the longest that the server waits for, within the site's own limit."""
        return min(self.limits.seconds, patience([parcel.meta for parcel in parcels]))

    def _desk(self, task: TaskHeader) -> _Enrolment:
        """What the site holds of the task's experiment, if its operator has approved it and it keeps to the limits."""
        try:
            with refusing():
                announced = AnnouncedJob.of(task.job)
                wire.check_same("experiment", task.experiment, announced.experiment, _APART)
            self.consent.require(announced)
        except RecursionError:
            raise Refusal("the task's job is nested too deeply.") from None
        self.limits.require(announced)
        task.require(announced)
        with refusing():
            job = Job.of(task.job)
        held = self._desks.get(job.experiment)
        return held if held is not None and held.fits(job, task) else _Enrolment(self, job, task)

    # -- what leaves, and what is told here ------------------------------------------------------------------------

    def failed(self, meta: Mapping[str, Any], reason: Exception) -> Parcel:
        """The answer to a task that was not done: a refusal in its own words, of other errors type and reference."""
        if isinstance(reason, Refusal):
            cause, text = reason.cause, str(reason)[:LONGEST]
            self.tell(f"refused: {text}" if cause == "refused" else text)
        else:
            self.error, reference = reason, secrets.token_hex(4)
            cause = "refused" if isinstance(reason, CoterieError) else "failed"
            text = f"{type(reason).__name__} at the site; its log says more under reference {reference}."
            details = [] if isinstance(reason, CoterieError) else traceback.format_exception(reason)
            self.tell(f"reference {reference}: {type(reason).__name__}: {reason}", "".join(details))
        return self.sent(wire.answer(_echoed(meta), self.name, error=text, cause=cause))

    def sent(self, answer: Parcel) -> Parcel:
        """Write down what leaves the site before it does; what cannot be written down does not leave."""
        line = {"time": _now(), **answer.meta, "tensors": described(answer.tensors)}
        try:
            self.home.mkdir(parents=True, exist_ok=True)
            with (self.home / SENT).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError:
            unwritten = "the site cannot write down what leaves it, so nothing does."
            return wire.answer(_echoed(answer.meta), self.name, error=unwritten, cause="failed")
        return answer

    def tell(self, text: str, details: str = "") -> None:
        """A line for the operator in the site's log, and details in further ones, which cannot be taken for one."""
        lines = [f"{_now()} {_printable(text)}", *(f"    {_printable(line)}" for line in details.splitlines())]
        try:
            self.home.mkdir(parents=True, exist_ok=True)
            with (self.home / LOG).open("a", encoding="utf-8") as file:
                file.write("\n".join(lines)[:LONGEST_LOGGED] + "\n")
        except OSError:
            return  # a full disk is said by what is to be kept there, and must not hide what went wrong

    def federation(self, job: Job) -> Federation:
        """The site's samples, if they are what the job is about."""
        data = self._data(job) if callable(self._data) else self._data
        if data.clients != 1:
            raise CoterieError(f"a site holds the data of one client, not of {data.clients}.")
        if tuple(data.x.shape[1:]) != job.shape:
            raise Refusal(f"the experiment wants samples of shape {list(job.shape)}; "
                          f"{self.name} has {list(data.x.shape[1:])}.")
        if data.per_token:
            raise Refusal(ONE_LABEL)
        if data.classes != job.classes:
            raise Refusal(f"the experiment has {job.classes} classes; {self.name}'s data have {data.classes}.")
        called, agreed = tuple(data.recipe.get("classes", ())), job.class_names or tuple(map(str, range(job.classes)))
        if called and called != agreed and (job.class_names or all(name.isdecimal() for name in called)):
            raise CoterieError(f"the experiment's classes are {', '.join(agreed)}; those of {self.name} are "
                               f"{', '.join(called)}.")
        return replace(data, names=(self.name,))


def described(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Name -> type and shape, e.g. `float32 [1, 650]`."""
    return {name: f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for name, t in tensors.items()}


_APART = "server and site would compute different things"


def _echoed(meta: Mapping[str, Any]) -> dict[str, Any]:
    """What an answer repeats of a task's header, if that is a number or a short text."""
    found = {name: meta.get(name) for name in wire.ECHOED}
    return {name: v for name, v in found.items() if isinstance(v, int) or (isinstance(v, str) and len(v) <= LONGEST)}


def _printable(text: str) -> str:
    """Text in which line ends, escapes and the like are spelled out."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text[:LONGEST_LOGGED])


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S")


class _Enrolment:
    """What a site holds of one experiment."""

    def __init__(self, site: Site, job: Job, task: TaskHeader) -> None:
        """Reads the data and builds the model; raises before anything is written."""
        self.site, self.job = site, job
        self.number, self.population = task.number, task.population
        self.folder = site.home / job.experiment
        self._refuse_others()
        self.method = job.chosen()
        self._refuse_unlike(task)
        federation = site.federation(job)
        training = replace(job.training, device=site.device)
        samples = int(federation.sizes("train")[0])
        site.limits.require_steps(samples, self.method.training_in(training))
        self.clients = Clients(
            self.method, job.factory(), federation, training, job.head, population=self.population, first=self.number,
        )
        self.sums = kept(self.clients.measures, job.classes) if job.scores == "full" else ()
        self.clients.scored = replace(self.clients.scored, kept=self.sums)
        layout, device = self.clients.layout, self.clients.device
        self.states = StateFiles(self.folder, job.experiment, site.name, job.model, layout, device, site.tell)
        self.forms: dict[str, Form] = {}
        self.begun = False

    def fits(self, job: Job, task: TaskHeader) -> bool:
        return (job, task.number, task.population) == (self.job, self.number, self.population)

    def _refuse_others(self) -> None:
        """Raise if the job is not as first met: the same experiment with another job is a mistake, or worse."""
        path = self.folder / JOB
        if not path.exists():
            self.site.limits.require_room(len(list(self.site.home.glob(f"*/{JOB}"))))
        elif Job.of(read_json(path)) != self.job:
            raise Refusal(
                f"the settings of experiment {self.job.experiment} are not those this site met first; start an "
                "experiment with an id of its own."
            )

    def _refuse_unlike(self, task: TaskHeader) -> None:
        with refusing():
            method = registry.respelled(task.method)
            wire.check_same("method", method, registry.spelling(self.method), _APART)
            wire.check_same("method's options", task.options, repr(self.method), _APART)

    def _form(self, kind: str) -> Form:
        """What a task of this kind carries; found out once for an experiment, and kept with the first task."""
        if not self.forms:
            path = self.folder / FORMS
            held = read_json(path) if path.exists() else {}
            if held.get("population") == self.population:
                self.forms = {name: Form.of(held[name]) for name in KINDS}
            else:
                with self.site.limits.building():
                    self.forms = rehearsed(self.job, self.clients, self.population)
        return self.forms[kind]

    def _begin(self) -> None:
        """Keep the job as first met, and what its tasks carry."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not (self.folder / JOB).exists():
                write_json(self.folder / JOB, self.job.values())
            if not self.begun:
                forms = {name: form.values() for name, form in self.forms.items()}
                write_json(self.folder / FORMS, {"population": self.population, **forms})
            self.begun = True
        except OSError as reason:
            raise CoterieError(f"the site's folder {self.folder} cannot be written ({reason}).") from reason

    # -- tasks -----------------------------------------------------------------------------------------------------

    def answer(self, task: TaskHeader, tensors: Mapping[str, Tensor]) -> Parcel:
        self._refuse_unlike(task)
        with refusing():
            self.clients.layout.refuse(task.layout, "the server", self.job.model)
            cls = record_class(self.method, task.record)
        self.site.limits.require_payload(tensors)
        self._form(task.kind).require(cls.__name__, tensors)
        self._begin()
        if task.tells:
            self._count(task.mark(tensors))
        record = cls.of({name: t.to(self.clients.device) for name, t in tensors.items()})
        return self._introduce(task, record) if task.kind == "introduce" else self._round(task, record)

    def _count(self, mark: str) -> None:
        """Count the payloads that were answered, before this one is; the last one may come again as often as asked."""
        path = self.folder / ANSWERED
        held: Mapping[str, Any] = read_json(path) if path.exists() else {"answers": 0, "last": ""}
        if held["last"] == mark:
            return
        answers = int(held["answers"]) + 1
        self.site.limits.require_answers(answers, self.job.training.rounds)
        write_json(path, {"answers": answers, "last": mark})

    def _said(self, task: TaskHeader, tensors: Mapping[str, Tensor] | None = None, **facts: Any) -> Parcel:
        """The answer to a task."""
        echoed = {name: getattr(task, name) for name in wire.ECHOED if name != "protocol"}
        return wire.answer(echoed, self.site.name, tensors, **facts)

    def _introduce(self, task: TaskHeader, hello: Record) -> Parcel:
        cohort = self.clients.at(task.round, ALONE)
        introduction = introduce(self.method, cohort, hello).tensors()
        require_finite("introduction", introduction)
        write_json(self._introduced, {"round": task.round, "steps": int(cohort.spent[0])})  # another process may score
        return self._said(task, introduction, **self._counted)

    def _round(self, task: TaskHeader, payload: Record) -> Parcel:
        t, do, newcomer = task.round, task.do, task.newcomer
        cohort = self.clients.at(t, ALONE)
        if newcomer and self._introduced.exists():  # a newcomer's steps count from its introduction
            cohort.spent = cohort.spent + int(read_json(self._introduced)["steps"])
        deploys_chosen = do == ("deploy",) and task.best == t
        if newcomer:
            own = self._joined(cohort, payload)
        elif deploys_chosen:
            own = self.states.chosen(t) or self._current(task, cohort, payload)
        else:
            own = self._current(task, cohort, payload)
            if task.says_best and self.states.path.exists():
                self.states.hold(own, task.best, t if "score" in do else None)
        received = payload if own.buffers is None else self.clients.receive(payload, own.buffers)
        facts: dict[str, Any] = {}
        if "score" in do or "deploy" in do:
            cohort = cohort if newcomer else self.clients.at(t, ALONE)
            row = deploy(self.method, cohort, received, self._record(own))
            found = score_rows(cohort, row)
            scores = self._scores(found)
            if "deploy" in do:
                require_finite("model", {"row": row})
                self._write_model(row[0], cohort.residual, scores, task)
            if "score" in do:
                facts["scores"] = scores
                facts |= {"sums": sums_told(found, self.sums)} if self.sums else {}
        sent: dict[str, Tensor] = {}
        if "local" in do:
            sent = self._train(received, own, t)
            facts |= self._counted
        return self._said(task, sent, **facts)

    def _train(self, payload: Record, own: KeptState, t: int) -> dict[str, Tensor]:
        cohort = self.clients.at(t, ALONE)
        cohort.memory = dict(own.memory) if self.clients.remembers else None
        upload, state = local(self.method, cohort, payload, self._record(own))
        kept = self.clients.kept_buffers(cohort)
        buffers = own.buffers if kept is None else kept
        sent = self.clients.without_local_buffers(upload.tensors())
        require_finite("upload", sent)
        self.states.save(own, KeptState(t, state.tensors(), buffers, cohort.memory or {}))
        return sent

    @property
    def _counted(self) -> dict[str, int]:
        """How many training samples the site has; with privacy on it does not say."""
        return {} if self.method.aggregator.private else {"n": int(self.clients.federation.sizes("train")[0])}

    def _scores(self, found: Mapping[str, Measured]) -> dict[str, Any]:
        """The value of each metric by stage; how many samples they were taken on."""
        sizes = self.clients.federation.sizes
        return told(found, int(sizes("test")[0]), bool(sizes("val")[0]), self.sums)

    # -- the client's own state ------------------------------------------------------------------------------------

    @property
    def _introduced(self) -> Path:
        """The round in which the site introduced itself, and the steps that took."""
        return self.folder / "introduced.json"

    def _record(self, own: KeptState) -> Record:
        return record_class(self.method, self.states.type).of(own.tensors)

    def _joined(self, cohort: Cohort, payload: Record) -> KeptState:
        state = join(self.method, cohort, payload)
        require_finite("own state", state.tensors())
        self.states.type = type(state).__name__
        return KeptState(JOINED, state.tensors())

    def _current(self, task: TaskHeader, cohort: Cohort, payload: Record) -> KeptState:
        """The state after the task's round `merged`, the last one of this site that the server has merged.

        A site that is asked for the first time joins. At the end that is for the task's own round only: models of
        several rounds are sent for, and each is to be what joining in that round gives.
        """
        assert task.merged is not None
        if not self.states.path.exists():
            own = self._joined(cohort, payload)
            if task.last is None:
                self.states.save(None, own)
            return own
        before, after = self.states.load()
        if after.round <= task.merged:  # or the site's folder is an older copy: the best it has
            return after
        if before is not None and before.round == task.merged:
            return before
        raise Refusal(
            f"the server knows this site as of round {task.merged}, but the site is at round {after.round}; resume the "
            "server from a newer checkpoint, or remove this experiment's folder at the site to join anew."
        )

    # -- the model that is used ------------------------------------------------------------------------------------

    def _write_model(
        self, row: Tensor, residual: Tensor | None, scores: Mapping[str, Any], task: TaskHeader
    ) -> None:
        """The model of the round that the task is of; one of the last round that another one was chosen over stays."""
        t, path = task.round, self.folder / MODEL
        is_best, is_last = task.best == t, task.last in (None, t)
        unit = self.clients.federation.unit
        facts = {
            "method": self.job.method, "model": self.job.model, "experiment": self.job.experiment,
            "site": self.site.name, **HandedOut(SERVED, t, CHOSEN if is_best else LAST, self._note(task)).facts,
            "last": is_last, "newcomer": task.newcomer, "scores": scores,
            "job": replace(self.job, unit=None if unit is None else unit.facts()).values(),
        }
        for ending in (".safetensors", ".json"):
            other = (self.folder / LAST_MODEL).with_suffix(ending)
            if is_last:
                other.unlink(missing_ok=True)
            elif path.with_suffix(ending).exists() and not task.newcomer and not other.exists():
                checkpoint.link(path.with_suffix(ending), other)
        write_model(path, grounded(self.clients.init.module, self.clients.layout, residual)[1], row, facts)

    def _note(self, task: TaskHeader) -> str:
        """Why it is a model of the last round, where the server said which one is the best so far."""
        if not task.says_best or task.best == task.round:
            return ""
        if task.best is not None:
            return f"It is the last round; round {task.best} had been the best on validation data."
        why = "no site's validation data chose one" if self.job.scores else "this experiment's sites send no scores"
        return f"It is the last round: {why}."
