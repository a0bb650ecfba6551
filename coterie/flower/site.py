"""A site: one client with its own data and a home folder, answering the server's tasks with the method's functions.

    <home>/<experiment>/job.json              the experiment as first met; a message that says otherwise is refused
    <home>/<experiment>/state.safetensors     the client's own state, before and after the last round it trained in
    <home>/<experiment>/chosen-12.safetensors the client's own state as it was scored after round 12
    <home>/<experiment>/model.safetensors     the model the site uses, tensor by tensor, once the server sent for it
    <home>/<experiment>/model.json            method, round, scores and layout of that model
    <home>/<experiment>/last.*                the same of the last round, where another one was chosen
    <home>/<experiment>/introduced.json       when it introduced itself, and the training steps that took
    <home>/<experiment>/sent.jsonl            everything that left the site: numbers in full, of tensors name and shape

The server says which round of this site it merged last. What was trained and not merged is taken back, so that server
and site never disagree, and a task that arrives twice gives the same answer twice.

It also says which round is the best so far on the sites' validation data. The site keeps its own state of that round,
and of the one it has scored since, until it knows which is better; at the end it makes its model from the chosen one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from coterie import registry
from coterie.contract.cohort import Cohort
from coterie.contract.records import Record
from coterie.data import Federation, load_as
from coterie.data.labels import placed
from coterie.data.readers.tables.schema import unit_of
from coterie.errors import CoterieError
from coterie.evaluation.stages import SERVED
from coterie.files import read_json, write_json
from coterie.flower import wire
from coterie.flower.job import Job, checked_name
from coterie.flower.scores import kept, sums_told, told
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
DO = ("join", "score", "local", "deploy")
"""What a task of kind `round` may ask for; all of it is done with the one payload it carries."""

Data = Federation | Callable[[Job], Federation]


def site_at(
    name: str, data: str | Path, home: str | Path, device: str = "auto", val: float = 0.1, test: float = 0.25,
    seed: int = 0,
) -> Site:
    """The site `name` with the samples of a file, which is spelled as for --data.

    A share of them is held back for validation and for testing; a split that the data bring is kept. Labels are found
    among the job's classes by their names or numbers: a site may hold some of them only.
    """
    checked_name("a site", name)

    def read(job: Job) -> Federation:
        source = load_as(data, job.classes)
        y = placed(source.y, source.classes, job.classes, job.class_names, name)
        return Federation.from_assignment(
            source.x, y, [np.arange(len(source.x))], val=val, test=test, seed=seed, classes=job.classes,
            names=[name], recipe={"data": str(data)}, given=source.split, group=source.group,
            unit=unit_of(source.encoding),
        )

    return Site(name, read, Path(home), device)


class Site:
    """One client. `answer` takes a message's parcels and gives as many back; a parcel that fails spoils no other."""

    def __init__(self, name: str, data: Data, home: Path, device: str = "auto") -> None:
        """`data` are those of one client, or read them for a job. `device` is the site's own choice."""
        self.name, self.home, self.device = checked_name("a site", name), Path(home), device
        self._data = data
        self._desks: dict[str, _Enrolment] = {}

    def answer(self, parcels: Sequence[Parcel]) -> list[Parcel]:
        return [self._answer(parcel) for parcel in parcels]

    def _answer(self, parcel: Parcel) -> Parcel:
        try:
            wire.check_protocol(parcel.meta)
            if parcel.meta.get("kind") == "present":
                return wire.answer(parcel.meta, self.name)
            desk = self._desk(parcel.meta)
            answer = desk.answer(parcel)
            desk.note(answer)
            return answer
        except CoterieError as reason:
            return wire.answer(parcel.meta, self.name, error=str(reason), cause="refused")
        except Exception as reason:  # whatever goes wrong in a method, the server learns it in one line
            return wire.answer(parcel.meta, self.name, error=f"{type(reason).__name__}: {reason}", cause="failed")

    def _desk(self, meta: Mapping[str, Any]) -> _Enrolment:
        job = Job.of(meta.get("job") or {})
        held = self._desks.get(job.experiment)
        known = held is not None and held.fits(job, meta)
        if held is None or not known:
            held = self._desks[job.experiment] = _Enrolment(self, job, meta)
        return held

    def federation(self, job: Job) -> Federation:
        """The site's samples, if they are what the job is about."""
        data = self._data(job) if callable(self._data) else self._data
        if data.clients != 1:
            raise CoterieError(f"a site holds the data of one client, not of {data.clients}.")
        if tuple(data.x.shape[1:]) != job.shape:
            raise CoterieError(f"the experiment wants samples of shape {list(job.shape)}; "
                               f"{self.name} has {list(data.x.shape[1:])}.")
        if data.classes != job.classes:
            raise CoterieError(f"the experiment has {job.classes} classes; {self.name}'s data have {data.classes}.")
        called, agreed = tuple(data.recipe.get("classes", ())), job.class_names or tuple(map(str, range(job.classes)))
        if called and called != agreed and (job.class_names or all(name.isdecimal() for name in called)):
            raise CoterieError(f"the experiment's classes are {', '.join(agreed)}; those of {self.name} are "
                               f"{', '.join(called)}.")
        return replace(data, names=(self.name,))


def described(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Name -> type and shape, e.g. `float32 [1, 650]`."""
    return {name: f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for name, t in tensors.items()}


@dataclass(frozen=True)
class _KeptState:
    """A client's own state and, with buffers=local, its buffers, after its round `round`.

    `memory` is what its optimizer remembers, with keep=true.
    """

    round: int
    tensors: dict[str, Tensor]
    buffers: Tensor | None = None
    memory: dict[str, Tensor] = field(default_factory=dict)

    @property
    def nothing(self) -> bool:
        """Whether it holds nothing that a model is made from."""
        return not self.tensors and self.buffers is None


class _Enrolment:
    """What a site holds of one experiment."""

    def __init__(self, site: Site, job: Job, meta: Mapping[str, Any]) -> None:
        self.site, self.job = site, job
        self.number, self.population = int(meta["number"]), int(meta["population"])
        self.folder = site.home / job.experiment
        self._pin()
        self.method = job.chosen()
        training = replace(job.training, device=site.device)
        self.clients = Clients(
            self.method, job.factory(), site.federation(job), training, job.head, population=self.population,
            first=self.number,
        )
        self.sums = kept(self.clients.measures, job.classes) if job.scores == "full" else ()
        self.clients.scored = replace(self.clients.scored, kept=self.sums)

    def fits(self, job: Job, meta: Mapping[str, Any]) -> bool:
        return (job, meta.get("number"), meta.get("population")) == (self.job, self.number, self.population)

    def _pin(self) -> None:
        """Keep the job as first met; the same experiment with another job is a mistake, or worse."""
        path = self.folder / "job.json"
        if not path.exists():
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                write_json(path, self.job.values())
            except OSError as reason:
                raise CoterieError(f"the site's folder {self.folder} cannot be written ({reason}).") from reason
        elif Job.of(read_json(path)) != self.job:
            raise CoterieError(
                f"the settings of experiment {self.job.experiment} are not those this site met first; start an "
                "experiment with an id of its own."
            )

    def note(self, answer: Parcel) -> None:
        """Write down what leaves the site before it does."""
        line = {"time": time.strftime("%Y-%m-%dT%H:%M:%S"), **answer.meta, "tensors": described(answer.tensors)}
        with (self.folder / "sent.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    # -- tasks -----------------------------------------------------------------------------------------------------

    def answer(self, parcel: Parcel) -> Parcel:
        meta, kind = parcel.meta, parcel.meta.get("kind")
        apart = "server and site would compute different things"
        wire.check_same("experiment", meta.get("experiment"), self.job.experiment, apart)
        wire.check_same("method", registry.respelled(str(meta.get("method"))), registry.spelling(self.method), apart)
        wire.check_same("method's options", meta.get("options"), repr(self.method), apart)
        self.clients.layout.refuse(meta.get("layout"), "the server", self.job.model)
        record = record_class(self.method, str(meta.get("record"))).of(
            {name: t.to(self.clients.device) for name, t in parcel.tensors.items()}
        )
        t = int(meta["round"])
        if kind == "introduce":
            cohort = self.clients.at(t, ALONE)
            introduction = introduce(self.method, cohort, record)
            write_json(self._introduced, {"round": t, "steps": int(cohort.spent[0])})  # another process may score
            return wire.answer(meta, self.site.name, introduction.tensors())
        if kind == "round":
            return self._round(meta, record, t)
        raise CoterieError(f"this site knows no task of kind '{kind}'; install the server's version of coterie.")

    def _round(self, meta: Mapping[str, Any], payload: Record, t: int) -> Parcel:
        do = meta.get("do") or []
        if any(word not in DO for word in do):
            raise CoterieError(f"a round may ask for {', '.join(DO)}, not for {do}.")
        if "score" in do and not self.job.scores:
            raise CoterieError("this experiment was agreed on without scores that leave the site.")
        newcomer = bool(meta.get("newcomer"))
        if newcomer and "local" in do:
            raise CoterieError("a site that came after training had begun does not train.")
        cohort = self.clients.at(t, ALONE)
        if newcomer and self._introduced.exists():  # a newcomer's steps count from its introduction
            cohort.spent = cohort.spent + int(read_json(self._introduced)["steps"])
        best = meta.get("best")  # servers of earlier versions do not say
        deploys_chosen = do == ["deploy"] and best == t
        if newcomer:
            own = self._joined(cohort, payload)
        elif deploys_chosen:
            own = self._chosen_state(t) or self._current(meta, cohort, payload)
        else:
            own = self._current(meta, cohort, payload)
            if "best" in meta and self._path.exists():
                self._hold(own, best, t if "score" in do else None)
        received = payload if own.buffers is None else self.clients.receive(payload, own.buffers)
        facts: dict[str, Any] = {}
        if "score" in do or "deploy" in do:
            cohort = cohort if newcomer else self.clients.at(t, ALONE)
            row = deploy(self.method, cohort, received, self._record(own))
            found = score_rows(cohort, row)
            scores = self._scores(found)
            if "deploy" in do:
                self._write_model(row[0], scores, meta, newcomer)
            if "score" in do:
                facts["scores"] = scores
                facts |= {"sums": sums_told(found, self.sums)} if self.sums else {}
        sent: dict[str, Tensor] = {}
        if "local" in do:
            sent = self._train(received, own, t)
            facts |= {} if self.method.aggregator.private else {"n": self._n}
        return wire.answer(meta, self.site.name, sent, **facts)

    def _train(self, payload: Record, own: _KeptState, t: int) -> dict[str, Tensor]:
        cohort = self.clients.at(t, ALONE)
        cohort.memory = dict(own.memory) if self.clients.remembers else None
        upload, state = local(self.method, cohort, payload, self._record(own))
        kept = self.clients.kept_buffers(cohort)
        buffers = own.buffers if kept is None else kept
        self._save(own, _KeptState(t, state.tensors(), buffers, cohort.memory or {}))
        return self.clients.without_local_buffers(upload.tensors())

    @property
    def _n(self) -> int:
        return int(self.clients.federation.sizes("train")[0])

    def _scores(self, found: Mapping[str, Measured]) -> dict[str, Any]:
        """The value of each metric by stage; how many samples they were taken on."""
        sizes = self.clients.federation.sizes
        return told(found, int(sizes("test")[0]), bool(sizes("val")[0]), self.sums)

    # -- the client's own state ------------------------------------------------------------------------------------

    @property
    def _introduced(self) -> Path:
        """The round in which the site introduced itself, and the steps that took."""
        return self.folder / "introduced.json"

    @property
    def _path(self) -> Path:
        return self.folder / "state.safetensors"

    def _record(self, own: _KeptState) -> Record:
        return record_class(self.method, self._type).of(own.tensors)

    def _joined(self, cohort: Cohort, payload: Record) -> _KeptState:
        state = join(self.method, cohort, payload)
        self._type = type(state).__name__
        return _KeptState(JOINED, state.tensors())

    def _current(self, meta: Mapping[str, Any], cohort: Cohort, payload: Record) -> _KeptState:
        """The state after the task's round `merged`, the last one of this site that the server has merged.

        A site that is asked for the first time joins. At the end that is for the task's own round only: models of
        several rounds are sent for, and each is to be what joining in that round gives.
        """
        merged = int(meta["merged"])
        if not self._path.exists():
            own = self._joined(cohort, payload)
            if "last" not in meta:
                self._save(None, own)
            return own
        before, after = self._load()
        if after.round <= merged:  # or the site's folder is an older copy: the best it has
            return after
        if before is not None and before.round == merged:
            return before
        raise CoterieError(
            f"the server knows this site as of round {merged}, but the site is at round {after.round}; resume the "
            f"server from a newer checkpoint, or remove {self.folder} to join anew."
        )

    def _save(self, before: _KeptState | None, after: _KeptState) -> None:
        tensors: dict[str, Tensor] = {}
        for word, own in (("before", before), ("after", after)):
            if own is not None:
                tensors |= checkpoint.prefixed(word, own.tensors)
                tensors |= {} if own.buffers is None else {f"buffers.{word}": own.buffers}
                tensors |= checkpoint.prefixed(f"memory.{word}", own.memory)
        rounds = {"before": None if before is None else before.round, "after": after.round}
        checkpoint.save(self._path, tensors, {**self._whose(), **rounds})

    def _whose(self) -> dict[str, Any]:
        """What the headers of the site's states say."""
        return {
            "experiment": self.job.experiment, "client": self.site.name, "type": self._type,
            "layout": self.clients.layout.digest,
        }

    def _refuse_others(self, meta: Mapping[str, Any], path: Path) -> None:
        """Raise if a state is not this client's, or of another model."""
        if meta["client"] != self.site.name:
            raise CoterieError(f"{path} holds the state of client {meta['client']}; give every site a home of its own.")
        self.clients.layout.refuse(meta["layout"], str(path), self.job.model)
        self._type = meta["type"]

    def _load(self) -> tuple[_KeptState | None, _KeptState]:
        tensors, meta = checkpoint.load(self._path)
        self._refuse_others(meta, self._path)
        device = self.clients.device

        def own(word: str) -> _KeptState:
            mine = {name: t.to(device) for name, t in checkpoint.part(tensors, word).items()}
            memory = {name: t.to(device) for name, t in checkpoint.part(tensors, f"memory.{word}").items()}
            buffers = tensors.get(f"buffers.{word}")
            return _KeptState(int(meta[word]), mine, None if buffers is None else buffers.to(device), memory)

        return None if meta["before"] is None else own("before"), own("after")

    # -- its state of the chosen round -----------------------------------------------------------------------------

    def _chosen_path(self, t: int) -> Path:
        return self.folder / f"chosen-{t}.safetensors"

    def _hold(self, own: _KeptState, best: Any, scored: int | None) -> None:
        """Keep the state of round `best`, and that of the round `scored` now, of which nobody knows yet how good it is.

        A site that was not asked in round `best` and has not trained since is still as it was then.
        """
        if own.nothing:
            return
        wanted = {t for t in (best, scored) if isinstance(t, int)}
        for t in wanted:
            if t == scored or (own.round < t and not self._chosen_path(t).exists()):
                tensors = checkpoint.prefixed("own", own.tensors)
                tensors |= {} if own.buffers is None else {"buffers": own.buffers}
                checkpoint.save(self._chosen_path(t), tensors, {**self._whose(), "round": t, "trained": own.round})
        for path in self.folder.glob("chosen-*.safetensors"):
            if path.name not in {self._chosen_path(t).name for t in wanted}:
                path.unlink(missing_ok=True)

    def _chosen_state(self, t: int) -> _KeptState | None:
        """What was kept of round t; the states of clients that keep nothing are alike in all rounds."""
        if not self._chosen_path(t).exists():
            after = self._load()[1] if self._path.exists() else None
            return after if after is not None and after.nothing else None
        tensors, meta = checkpoint.load(self._chosen_path(t))
        self._refuse_others(meta, self._chosen_path(t))
        here = {name: tensor.to(self.clients.device) for name, tensor in tensors.items()}
        return _KeptState(int(meta["trained"]), checkpoint.part(here, "own"), here.get("buffers"))

    # -- the model that is used ------------------------------------------------------------------------------------

    def _write_model(self, row: Tensor, scores: Mapping[str, Any], meta: Mapping[str, Any], newcomer: bool) -> None:
        """The model of the round that the task is of; one of the last round that another one was chosen over stays."""
        t, path = int(meta["round"]), self.folder / MODEL
        is_best, is_last = meta.get("best") == t, t == meta.get("last", t)
        unit = self.clients.federation.unit
        facts = {
            "method": self.job.method, "model": self.job.model, "experiment": self.job.experiment,
            "site": self.site.name, **HandedOut(SERVED, t, CHOSEN if is_best else LAST, self._note(meta)).facts,
            "last": is_last, "newcomer": newcomer, "scores": scores,
            "job": replace(self.job, unit=None if unit is None else unit.facts()).values(),
        }
        for ending in (".safetensors", ".json"):
            other = (self.folder / LAST_MODEL).with_suffix(ending)
            if is_last:
                other.unlink(missing_ok=True)
            elif path.with_suffix(ending).exists() and not newcomer and not other.exists():
                checkpoint.link(path.with_suffix(ending), other)
        write_model(path, self.clients.layout, row, facts)

    def _note(self, meta: Mapping[str, Any]) -> str:
        """Why it is a model of the last round, where the server said which one is the best so far."""
        best = meta.get("best")
        if "best" not in meta or best == meta["round"]:
            return ""
        if best is not None:
            return f"It is the last round; round {best} had been the best on validation data."
        why = "no site's validation data chose one" if self.job.scores else "this experiment's sites send no scores"
        return f"It is the last round: {why}."
