"""Logging of a run to TensorBoard or MLflow, as local files in the run's folder."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from coterie.errors import CoterieError, unknown
from coterie.evaluation.summary import summarise
from coterie.report.few_models import words
from coterie.running.driver import Progress
from coterie.running.folder import Folder


class Sink(Protocol):
    """Where numbers go."""

    def write(self, numbers: dict[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in FOLDER/tensorboard; `tensorboard --logdir FOLDER` shows them."""

    def __init__(self, folder: Path, name: str, options: dict[str, Any], first: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=first + 1 if first else None)
        self._writer.add_text("run", f"{name}\n\n" + "\n".join(f"- {key}: {value}" for key, value in options.items()))

    def write(self, numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class MLflow:
    """A file store in FOLDER/mlruns; `mlflow ui --backend-store-uri FOLDER/mlruns` shows it."""

    def __init__(self, folder: Path, name: str, options: dict[str, Any], first: int) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 asks for a database otherwise
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._client = MlflowClient(tracking_uri=(folder / "mlruns").resolve().as_uri())
        found = self._client.get_experiment_by_name("coterie")
        experiment = found.experiment_id if found else self._client.create_experiment("coterie")
        tags = {"mlflow.runName": name, "first_round": str(first)}
        self._run = self._client.create_run(experiment, tags=tags).info.run_id
        self._client.log_batch(self._run, params=[Param(key, str(value)) for key, value in options.items()])

    def write(self, numbers: dict[str, float], step: int) -> None:
        now = int(1000 * time.time())
        metrics = [self._metric(name, value, now, step) for name, value in numbers.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run)


SINKS: dict[str, Callable[[Path, str, dict[str, Any], int], Sink]] = {"tensorboard": TensorBoard, "mlflow": MLflow}


class Log:
    """Writes every round and every evaluation once. Use as a context and hand it to `run` as (a part of) `watch`."""

    def __init__(self, kind: str, folder: Path, name: str, options: dict[str, Any], first: int = 0) -> None:
        """`first` is the round that a resumed run goes on from."""
        require_logger(kind)
        self._folder = Folder(folder)
        self._words: tuple[str, ...] = ()
        self._sink = SINKS[kind](folder, name, options, first)
        self._round, self._evaluated = first, -1

    def __call__(self, state: Progress) -> None:
        numbers: dict[str, float] = {}
        if state.record is not None and state.round > self._round:
            self._words = self._words or words(self._folder)  # config.json is there once a round is over
            numbers |= dict(_of_round(state.record, self._words))
            self._round = state.round
        if state.latest.round > self._evaluated and state.latest.round == state.round:
            for stage, scores in state.latest.stages.items():
                numbers |= {f"{stage}/{name}": value for name, value in asdict(summarise(scores)).items()}
            self._evaluated = state.latest.round
        finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
        if finite:
            self._sink.write(finite, state.round)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *reason: object) -> None:
        self._sink.close()


def require_logger(kind: str) -> None:
    """Raise before anything runs if there is no such logger here."""
    if kind not in SINKS:
        raise unknown("logger", kind, SINKS)
    if find_spec(kind) is None:
        raise CoterieError(f"logging to {kind} needs a package that is not installed: pip install 'coterie[{kind}]'")


def _of_round(record: dict[str, Any], by_model: Sequence[str]) -> Iterator[tuple[str, float]]:
    """Participants, bytes, seconds, and the method's own numbers; those `by_model` are numbered."""
    yield "round/participants", float(record["participants"])
    yield "round/seconds", float(record["seconds"])
    for way in ("down", "up"):
        yield f"round/bytes_{way}", float(sum(record[way].values()))
    for name, value in record["report"].items():
        if isinstance(value, int | float):
            yield f"method/{name}", float(value)
        elif name in by_model:
            for k, one in enumerate(value):
                yield f"method/{name}_{k + 1}", float(one)
