"""A run folder: everything that ran, so that it can be shown, resumed and reproduced.

    config.json              what was asked for, versions, seed, revision
    data.json                every client's samples by split and class
    metrics.jsonl            one line a round, one an evaluation, one on the models of a few-model method, and notes
    clients.csv              every client's scores at every evaluation
    confusion.jsonl          every client's confusion matrix at the rounds that are reported
    checkpoint.safetensors   the state after some round, the last one of a finished run
    chosen-12.safetensors    the state after round 12, which was chosen on validation data for a stage
    result.json              written when the run is finished
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import platform
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from io import StringIO
from pathlib import Path
from traceback import extract_tb
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

import coterie
from coterie import files
from coterie.contract.metric import Scale
from coterie.data import SPLITS, Federation
from coterie.errors import CoterieError, counted
from coterie.evaluation.measures import scale_of
from coterie.evaluation.score import LOSS, Evaluation, Scores, loss_scale
from coterie.evaluation.stages import SEEN, STAGES
from coterie.evaluation.summary import since_arrival, summarise
from coterie.options import build, spelled
from coterie.registry import OPTIMIZERS, respelled
from coterie.running import checkpoint, confusion
from coterie.running.chosen import Keeps, KeptStates, State
from coterie.running.result import Result
from coterie.running.targets import constants
from coterie.running.training import Training
from coterie.trust import code

RECORDS = ("metrics.jsonl", "clients.csv", confusion.FILE)
FIRST = ("round", "stage", "client", "name", "samples", "steps")
"""Columns of clients.csv before those of the metrics; earlier versions wrote no names."""
VAL = "val_"
"""Begins the column of a metric on validation data."""

SEAL = "sha256"
"""Of config.json and experiment.json: the digest of everything else in them."""
CODE = "code"
"""Of config.json: the code files that it names, each with the digest of its content."""
LATER = (
    "rounds", "patience", "checkpoint_every", "device", "wave", "state", "engine", "kernels", "capture", "prefix",
    "together",
)
"""Training options that may change when a run goes on: how long it trains, and how it is computed."""
HOME = str(Path(coterie.__file__).parent)
MOST_SAID = 300
"""Letters of an error's text that are repeated, at most."""
SMALL = 4096
"""Bytes of a file that holds one name, at most."""
MOST_CELLS = 1_000_000
"""Clients times classes whose counts are recorded, at most."""
MOST_ROUNDS = 1 << 40
"""Rounds of a run, at most; pages compute with them in floating point."""
WRONG = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError, csv.Error)
"""What reading a record that somebody edited may raise."""


class Folder:
    """Writes and reads one run. Lines are appended; a checkpoint remembers how far the files were when it was made."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint.safetensors"

    @property
    def finished(self) -> bool:
        return (self.path / "result.json").is_file()

    def create(self, config: dict[str, Any]) -> None:
        """Make the folder and write what is about to run; refuses a folder that already holds a run."""
        if (self.path / "config.json").exists():
            raise CoterieError(f"{self.path} already holds a run; go on with it (resume=True, or `coterie resume`) or "
                               "choose another folder.")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._write(config, environment())
        except OSError as reason:
            raise CoterieError(f"the run folder {self.path} cannot be written: {reason.strerror}.") from reason
        self.restart()

    def _write(self, config: Mapping[str, Any], made_in: Any) -> None:
        training = config.get("training", {})
        named = [config.get("method", ""), *(training.get(name, "") for name in (*OPTIMIZERS, "metric"))]
        kept = code.keep(self.path, [*named, *training.get("watch", ())])
        record = {**config, **({CODE: kept} if kept else {}), "environment": made_in}
        files.write_json(self.path / "config.json", sealed(record))

    def require_same(self, now: Mapping[str, Any]) -> None:
        """Raise where a run that goes on has settings that are not those it was begun with, apart from LATER."""
        with _reading(self.path / "config.json"):
            changed = different(self.settings(), now)
        if changed:
            raise CoterieError(f"{self.path} was begun with {changed[0]}; go on with the settings it was begun with, "
                               "or choose another folder.")

    def go_on(self, now: Mapping[str, Any]) -> None:
        """Write down the settings that a run goes on with, where they may and do differ from before."""
        before = self.settings()
        asked, had = now["training"], before["training"]
        if any(name in had and had[name] != asked[name] for name in LATER):
            self._write({**{k: v for k, v in before.items() if k not in (SEAL, CODE)}, "training": asked},
                        before.get("environment"))

    def restart(self) -> None:
        """Empty the records: the run was stopped before its first checkpoint."""
        for path in self._chosen().values():
            path.unlink()
        for name in RECORDS:
            files.write_text(self.path / name, "")

    def config(self) -> dict[str, Any]:
        return self._read("config.json")

    def settings(self) -> dict[str, Any]:
        """The same, for those who compute with it: refused where somebody edited it."""
        return unedited(self.config(), self.path / "config.json")

    def code(self) -> code.Copies:
        """The code files that config.json names, and their copies."""
        return code.Copies(self.path, self.config().get(CODE))

    def describe(self, federation: Federation) -> None:
        """Who holds how much of what, for the report; the classes are left out where that would be long."""
        record: dict[str, Any] = {
            "trained": federation.trained, "classes": federation.classes,
            "sizes": {split: federation.sizes(split).tolist() for split in SPLITS},
        }
        if federation.clients * federation.classes <= MOST_CELLS:
            record["histogram"] = np.sum([federation.histogram(split) for split in SPLITS], axis=0).tolist()
            record["tested"] = federation.histogram("test").tolist()
        if not federation.classes:
            found = constants(federation).items()
            record["constant"] = {name: [v if np.isfinite(v) else None for v in each.tolist()] for name, each in found}
        files.write_json(self.path / "data.json", record, indent=None)

    def data(self) -> dict[str, Any] | None:
        """What `describe` wrote; runs of earlier versions have none."""
        if not (self.path / "data.json").is_file():
            return None
        found = self._read("data.json")
        with _reading(self.path / "data.json"):
            sizes = [np.array(found["sizes"][split]) for split in SPLITS] if "sizes" in found else []
            if any(one.shape != sizes[0].shape or one.ndim != 1 or one.dtype.kind != "i" for one in sizes):
                raise ValueError("its sizes are no list of numbers for each split")
            counts = [np.array(found[name]) for name in ("histogram", "tested") if name in found]
            if any(one.ndim != 2 or one.shape[1] != int(found["classes"]) for one in counts):
                raise ValueError("its counts are not of its classes")
        return found

    def append_models(self, record: dict[str, Any]) -> None:
        self._append("metrics.jsonl", json.dumps({"kind": "models", **record}) + "\n")

    def models(self) -> dict[str, Any] | None:
        """What the finished run recorded of its few models, if it has such."""
        return next((record for record in self._lines() if record["kind"] == "models"), None)

    def append_note(self, note: dict[str, Any]) -> None:
        self._append("metrics.jsonl", json.dumps({"kind": "note", **note}) + "\n")

    def notes(self) -> list[dict[str, Any]]:
        """What the run has said of itself, see `running.rate`."""
        with _reading(self.path / "metrics.jsonl"):
            found = [record for record in self._lines() if record["kind"] == "note"]
            return [{**{k: v for k, v in note.items() if k != "kind"}, "text": str(note["text"])} for note in found]

    def append_round(self, record: dict[str, Any]) -> None:
        self._append("metrics.jsonl", json.dumps({"kind": "round", **record}) + "\n")

    def append_evaluation(
        self, evaluation: Evaluation, arrives: Sequence[int] = (), *, names: Sequence[str] = (),
        pooled: Mapping[str, Any] | None = None,
    ) -> None:
        """`arrives` is the round in which each training client arrived, with churn, and `names` are the clients'.

        `pooled` are metrics on all clients' samples together, by stage, where they are known.
        """
        stages = {name: {"metric": s.metric, **asdict(summarise(s))} for name, s in evaluation.stages.items()}
        record: dict[str, Any] = {"kind": "evaluation", "round": evaluation.round, "stages": stages}
        if arrives:
            record["newcomers"] = since_arrival(evaluation, arrives)
        if pooled:
            record["pooled"] = pooled
        self._append("metrics.jsonl", json.dumps(record) + "\n")
        text = StringIO()
        writer = csv.writer(text, lineterminator="\n")
        header = self._header()
        if not header:
            first = next(iter(evaluation.stages.values()))
            header = [*FIRST, *_ordered(first.test), *(f"{VAL}{name}" for name in _ordered(first.val))]
            writer.writerow(header)
        for stage, s in evaluation.stages.items():
            size = len(s.clients)
            known: dict[str, Iterable[Any]] = {
                "round": [evaluation.round] * size, "stage": [stage] * size, "client": s.clients.tolist(),
                "name": [files.csv_text(names[k]) if names else "" for k in s.clients],
                "samples": s.samples.tolist(), "steps": s.steps.tolist(),
                **{name: _written(values) for name, values in s.test.items()},
                **{f"{VAL}{name}": _written(values) for name, values in s.val.items()},
            }
            writer.writerows(zip(*(known.get(column, [""] * size) for column in header), strict=True))
        self._append("clients.csv", text.getvalue())

    def _header(self) -> list[str]:
        """The columns of clients.csv; none while it is empty."""
        with files.opened(self.path / "clients.csv", newline="") as file:
            return next(csv.reader(file), [])

    def append_confusion(self, stage: str, t: int, counts: confusion.Counts) -> None:
        self._append(confusion.FILE, confusion.line(stage, t, counts))

    def save(
        self, tensors: dict[str, Tensor], meta: dict[str, Any], keep: Collection[int] = (), keeps: Keeps = "both"
    ) -> None:
        """A checkpoint that also remembers the length of the files, so that resuming cuts what came after it.

        Of the earlier ones those of the rounds to `keep` stay, under names of their own: the one that is replaced gets
        such a name first, and what nobody needs any more goes last. So whenever the run is killed, the state of every
        round to keep is there, and none is of a later round than the checkpoint. `keeps` says which
        they are, for whoever finds one missing.
        """
        before = int(checkpoint.header(self.checkpoint)["round"]) if self.checkpoint.exists() else None
        if before is not None and before != meta["round"] and before in keep:
            checkpoint.link(self.checkpoint, self._chosen_at(before))
        checkpoint.save(self.checkpoint, tensors, {**meta, "lengths": self.lengths(), "keeps": keeps})
        for t, path in self._chosen().items():
            if t not in keep or t == meta["round"]:
                path.unlink(missing_ok=True)

    def lengths(self) -> dict[str, int]:
        """How long the records are, in bytes."""
        sizes = {name: self.path / name for name in RECORDS}
        return {name: path.stat().st_size for name, path in sizes.items() if path.exists()}

    def _chosen_at(self, t: int) -> Path:
        return self.path / f"chosen-{t}.safetensors"

    def _chosen(self) -> dict[int, Path]:
        """The files of chosen rounds by round."""
        found = {path: re.fullmatch(r"chosen-(\d+)\.safetensors", path.name) for path in self.path.glob("chosen-*")}
        return {int(name[1]): path for path, name in found.items() if name is not None}

    def kept(self) -> KeptStates:
        """The states that models can be made from."""
        with _reading(self.checkpoint):
            meta = checkpoint.header(self.checkpoint)
            last, keeps = int(meta["round"]), meta.get("keeps")
        states = {t: partial(self._state, path, t) for t, path in {**self._chosen(), last: self.checkpoint}.items()}
        return KeptStates(last, states, keeps if keeps in get_args(Keeps) else None)

    def _state(self, path: Path, t: int) -> State:
        tensors, meta = checkpoint.load(path)
        if meta.get("round") != t:
            raise CoterieError(f"{path} holds the state after round {meta.get('round')}, not after round {t}.")
        return tensors, meta

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The checkpoint; lines that were written after it are cut off, because those rounds will be repeated."""
        tensors, meta = checkpoint.load(self.checkpoint)
        lengths = meta["lengths"] if isinstance(meta.get("lengths"), dict) else {}
        # earlier versions wrote no matrices
        there = [name for name in RECORDS if name != confusion.FILE or (self.path / name).exists()]
        lengths = {confusion.FILE: 0, **lengths}
        known = all(isinstance(lengths.get(name), int) and lengths[name] >= 0 for name in there)
        if not known:
            raise CoterieError(f"the checkpoint {self.checkpoint} is damaged: it does not say what belongs to it.")
        for name in there:
            try:
                files.cut(self.path / name, lengths[name])
            except (OSError, OverflowError) as reason:
                raise CoterieError(f"{self.path / name} cannot be cut to {lengths[name]} bytes: {reason}.") from reason
        return tensors, meta

    def finish(self, result: dict[str, Any]) -> None:
        files.write_json(self.path / "result.json", result)

    def rounds(self) -> list[dict[str, Any]]:
        with _reading(self.path / "metrics.jsonl"):
            return [_round(record) for record in self._lines() if record["kind"] == "round"]

    def history(self) -> list[Evaluation]:
        """Every evaluation, read back from clients.csv."""
        by_round: dict[int, dict[str, list[list[str]]]] = {}
        with _reading(self.path / "clients.csv"):
            with files.opened(self.path / "clients.csv", newline="") as file:
                lines = csv.reader(file)
                header = next(lines, [])
                for line in lines:
                    if len(line) == len(header):  # a killed run may have left half a line
                        by_round.setdefault(int(line[0]), {}).setdefault(line[1], []).append(line)
            config = self.config()
            chosen = scale_of(config.get("metrics"))
            written = sum(len(lines) for stages in by_round.values() for lines in stages.values())
            clients = max(len(config.get("clients", ())), written)
            read = {
                t: {name: _scores(header, lines, chosen, clients) for name, lines in stages.items()}
                for t, stages in by_round.items()
            }
            if any(not 0 <= t < MOST_ROUNDS for t in read):
                raise ValueError("an evaluation of no round")
            found = [Evaluation(t, stages) for t, stages in sorted(read.items())]
            if len(found) > 1 and found[0].stages.keys() - found[-1].stages.keys():
                found.pop()  # it was being written when the run was killed
            common = set.intersection(*(set(e.stages) for e in found)) if found else set()
            if common >= set(SEEN):  # sites that came after training were scored once
                found = [replace(e, stages={s: v for s, v in e.stages.items() if s in common}) for e in found]
            if any(e.stages.keys() != found[0].stages.keys() or not e.stages.keys() & set(STAGES) for e in found):
                raise ValueError("evaluations differ in their stages")
            if len({scores.metric for e in found for scores in e.stages.values()}) > 1:
                raise ValueError("some scores are missing")
        return found

    def scales(self) -> dict[str, Scale]:
        """How the metrics are read that the run recorded, by name; earlier versions recorded loss and accuracy only."""
        config, data = self.config(), self.data() or {}
        with _reading(self.path / "config.json"):
            classes = int(config.get("samples", data).get("classes", 0))
            found = {LOSS.name: loss_scale(classes, str(config.get("loss") or ""))}
            recorded = config.get("metrics") or {"chosen": None, "watched": ()}
            for one in filter(None, (recorded["chosen"], *recorded["watched"])):
                name = str(one["name"])
                found[name] = Scale(
                    name, str(one["title"]), bool(one["higher"]), bool(one["percent"]), bool(one.get("by_median"))
                )
        return found

    def result(self) -> Result:
        """What the files hold, finished or not."""
        config, rounds, scales = self.config(), tuple(self.rounds()), self.scales()
        history = tuple(_named(evaluation, scales) for evaluation in self.history())
        if not history:
            raise CoterieError(f"{self.path} holds no evaluation yet.")
        with _reading(self.path / "config.json"):
            seed, method = config["training"]["seed"], config["method"]
            arrives = tuple(int(arrives) for arrives, _ in config.get("churn", ()))
            if not isinstance(method, str) or not isinstance(seed, int) or not method:
                raise ValueError("no method or no seed")
            method = respelled(method)
            seen = [int(s.clients.max()) for e in history for stage, s in e.stages.items() if stage in SEEN]
            if not all(0 <= t < MOST_ROUNDS for t in arrives):
                raise ValueError("somebody arrives in no round")
            if arrives and max(seen, default=0) >= len(arrives):
                raise ValueError(f"clients.csv names clients beyond the {len(arrives)} of the churn")
            printed, names = str(config.get("published", "")), tuple(map(str, config.get("clients", ())))
            samples = config.get("samples") or config.get("job") or {}
            count = int(samples.get("classes", 0))
            several = count if count**2 <= confusion.MOST_CELLS else 0  # of more there is no matrix to name cells of
            classes = confusion.class_names(config.get("federation", {}), several)
        return Result(
            method, seed, history, rounds, sum(record["seconds"] for record in rounds), printed, names, self.path,
            arrives=arrives, classes=classes, finished=self.finished, notes=tuple(self.notes()),
        )

    def _lines(self) -> Iterable[dict[str, Any]]:
        for line in files.read_text(self.path / "metrics.jsonl").splitlines():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):
                return

    def _append(self, name: str, text: str) -> None:
        try:
            files.append_text(self.path / name, text)
        except OSError as reason:
            raise CoterieError(f"{self.path / name} could not be written: {reason.strerror}.") from reason

    def _read(self, name: str) -> dict[str, Any]:
        path = self.path / name
        if not path.is_file():
            inner = sorted(p.parent for p in self.path.glob("*/seed*/config.json"))
            if inner:
                held = counted(len(inner), "run")
                raise CoterieError(f"{self.path} holds {held}; name one of them, e.g. {inner[0]}.")
            raise CoterieError(f"{self.path} is not a run folder: it has no {name}.")
        return files.read_json(path)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Whatever is wrong with a file's content becomes a sentence."""
    try:
        yield
    except CoterieError:
        raise
    except OSError as reason:
        raise CoterieError(f"{path} cannot be read: {reason.strerror}.") from reason
    except WRONG as reason:
        raise CoterieError(f"{path} is damaged: {type(reason).__name__}: {reason}.") from reason


@contextmanager
def consistent(paths: Iterable[Path]) -> Iterator[None]:
    """Around what is computed from the records of these folders: edited ones may be readable, and still not fit
    together. The sentence says where that was noticed, because it may also be a mistake of coterie's."""
    try:
        yield
    except CoterieError:
        raise
    except WRONG as reason:
        ours = [frame for frame in extract_tb(reason.__traceback__) if frame.filename.startswith(HOME)]
        place = f"{Path(ours[-1].filename).relative_to(HOME)}:{ours[-1].lineno}" if ours else "coterie"
        raise CoterieError(
            f"the records in {', '.join(map(str, dict.fromkeys(paths)))} do not fit together: {type(reason).__name__}: "
            f"{str(reason)[:MOST_SAID]} (in {place}). If nobody edited them, this is a mistake in coterie."
        ) from reason


def _round(record: dict[str, Any]) -> dict[str, Any]:
    """A round's record with the numbers that reports read, checked."""
    bytes_each = {way: {str(k): float(v) for k, v in record[way].items()} for way in ("down", "up")}
    report = dict(record.get("report", {}))
    for name in ("epsilon", "opposing"):
        if name in report:
            report[name] = float(report[name])
    return {**record, **bytes_each, "round": int(record["round"]), "report": report,
            "seconds": float(record.get("seconds", 0.0))}


def _ordered(metrics: Iterable[str]) -> list[str]:
    """Accuracy first, as ever, then the others as they come."""
    return sorted(metrics, key=lambda name: name != "accuracy")


def _written(values: np.ndarray[Any, np.dtype[np.float64]]) -> list[str]:
    """Every digit, and nothing where there is no number."""
    return ["" if v != v else repr(v) for v in values.tolist()]


def _scores(header: Sequence[str], lines: list[list[str]], chosen: Scale | None, clients: int) -> Scores:
    """One stage of one evaluation, from its lines under this header; of so many `clients`, as tables by their numbers
    are as long as the largest number says."""

    def column(name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        place = header.index(name)
        return np.array([float(line[place]) if line[place] else np.nan for line in lines])

    whole = [np.array([int(line[header.index(name)]) for line in lines]) for name in ("client", "samples", "steps")]
    if not ((whole[0] >= 0) & (whole[0] < clients)).all():
        raise ValueError(f"a client's number is not one of {counted(clients, 'client')}")
    metrics = [name for name in header if name not in FIRST and not name.startswith(VAL)]
    found = {name: column(name) for name in metrics}
    if "loss" in found:  # earlier versions wrote nothing where a model's loss was not a number
        found["loss"] = np.where(np.isnan(found["loss"]) & (whole[1] > 0), np.inf, found["loss"])
    test = {name: values for name, values in found.items() if name != "accuracy" or not np.isnan(values).all()}
    val = {name: column(f"{VAL}{name}") for name in test if f"{VAL}{name}" in header}
    for name in ("loss", *([chosen.name] if chosen is not None else [])):
        if name not in test or name not in val:
            raise ValueError(f"no column {name}")
    return Scores(whole[0], whole[1], whole[2], test, val, chosen)


def _named(evaluation: Evaluation, scales: Mapping[str, Scale]) -> Evaluation:
    """Scores that do not say which metric decides, with the run's own word for theirs."""
    stages = {name: replace(s, chosen=scales.get(s.metric, s.scale)) for name, s in evaluation.stages.items()}
    return replace(evaluation, stages=stages)


# -- settings: written once, and refused where they were edited --------------------------------------------------------


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with the digest of what it says."""
    return {**record, SEAL: _digest(record)}


def edited(record: Mapping[str, Any]) -> bool:
    """Whether a record says something else than when it was written; earlier versions wrote no digest."""
    return SEAL in record and record[SEAL] != _digest({k: v for k, v in record.items() if k != SEAL})


def edits(path: Path, record: Mapping[str, Any], runs: Sequence[Folder]) -> list[Path]:
    """The files of a folder's settings that were edited: its experiment's, with this record, and its runs'."""
    whole = [path / "experiment.json"] if edited(record) else []
    return whole + [run.path / "config.json" for run in runs if edited(run.config())]


def unedited(record: dict[str, Any], path: Path) -> dict[str, Any]:
    """The record of a file, unless it was edited."""
    if edited(record):
        raise CoterieError(f"{path} was edited since the run began. A begun run keeps its settings: undo the edit, or "
                           "start another run with the new ones.")
    return record


def _digest(record: Mapping[str, Any]) -> str:
    plain = json.loads(json.dumps(record))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def different(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What a run was begun with and is not to go on with, in words; settings that an earlier version did not write
    down are not compared."""
    plain = json.loads(json.dumps(now))
    found = []
    with code.nothing():
        had = asdict(build(Training, before["training"], "training"))
    kept = {name: _spelled_now(value) for name, value in had.items()}
    asked = {name: _spelled_now(value) for name, value in plain["training"].items()}
    turns = asked["rounds"] != kept["rounds"] and (kept["schedule"] != "constant" or kept["warmup"])
    later = [name for name in LATER if name != "rounds" or not turns]
    found += [f"{name}={spelled(kept[name])}, not {spelled(asked[name])}"
              for name in asked if name not in later and kept[name] != asked[name]]
    if respelled(str(before.get("method"))) != plain["method"]:
        found.append(f"the method {before.get('method')}, not {plain['method']}")
    for name in ("head", "adapter", "freeze", "train", "loss", "population", "columns", "frozen_sha256", "churn"):
        if name in before and before[name] != plain.get(name):
            found.append(f"{name} {before[name]}, not {plain.get(name)}")
    if before.get("clients", plain["clients"]) != plain["clients"]:
        found.append("other clients")
    return found


def _spelled_now(value: Any) -> Any:
    several = isinstance(value, list | tuple)
    return [_spelled_now(v) for v in value] if several else code.original(value) if isinstance(value, str) else value


def inside(path: Path) -> list[Folder]:
    """The runs of a run folder or of a comparison's, in the order they were started."""
    found = [path / "config.json", *path.glob("*/seed*/config.json")]
    return [Folder(p.parent) for p in sorted((p for p in found if p.is_file()), key=lambda p: p.stat().st_mtime_ns)]


def place_of(folder: Path, spelling: str) -> Path:
    """A method's folder in a comparison's: named by its spelling, or by that of an older version if it made it."""
    place = folder / _slug(spelling)
    if not place.exists():
        for config in sorted(folder.glob("*/seed*/config.json")):
            if respelled(str(Folder(config.parent).config().get("method"))) == spelling:
                return config.parents[1]
    return place


def _slug(spelling: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in spelling.rpartition("/")[2])


def fresh(name: str) -> Path:
    """A folder under runs/ that is not there yet."""
    return next(p for p in (Path("runs") / f"{name}-{k}" for k in itertools.count(1)) if not p.exists())


def environment() -> dict[str, Any]:
    """Versions, machine and revision, as far as they can be known."""
    names = ("torch", "numpy", "scipy", "scikit-learn", "safetensors")
    versions = {}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "?"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "coterie": coterie.__version__, "python": platform.python_version(), "platform": platform.platform(),
        "versions": versions, "threads": torch.get_num_threads(), "gpu": gpu, "revision": _revision(),
    }


def _revision() -> str | None:
    """The commit of the repository one stands in, read from its files.

    `git` itself runs programs that the repository's own settings name, and the repository may be anybody's.
    """
    here = Path.cwd()
    try:
        found = next((place / ".git" for place in (here, *here.parents) if (place / ".git").exists()), None)
        if found is None:
            return None
        if found.is_file():  # of a worktree or a submodule
            found = found.parent / files.read_text(found, SMALL).removeprefix("gitdir:").strip()
        common = found / "commondir"
        shared = found / files.read_text(common, SMALL).strip() if common.is_file() else found
        head = files.read_text(found / "HEAD", SMALL).strip()
        name = head.removeprefix("ref:").strip()
        if name != head:
            loose = next((place / name for place in (found, shared) if (place / name).is_file()), None)
            packed = shared / "packed-refs"
            lines = files.read_text(packed, files.MOST).splitlines() if packed.is_file() else []
            kept = next((line.partition(" ")[0] for line in lines if line.endswith(f" {name}")), "")
            head = files.read_text(loose, SMALL).strip() if loose is not None else kept
    except (OSError, ValueError):
        return None
    return head[:12] if re.fullmatch("[0-9a-f]{40,64}", head) else None
