"""The client side of a run: the module, the engine with the clients' data, and what clients compute.

A simulation has all clients here, a site on Flower exactly one; both call the same functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from coterie import memory, registry, streams
from coterie.contract.cohort import BOUND, Cohort, Init, LocalTraining, Members
from coterie.contract.engine import Engine, FloatArray, IntArray
from coterie.contract.method import Method
from coterie.contract.metric import Scored
from coterie.contract.net import PerSample, Task
from coterie.contract.records import Record, Upload
from coterie.data import Federation
from coterie.data.augment import NONE, Augment
from coterie.data.weights import balanced
from coterie.engine import choose, waves
from coterie.engine.arithmetic import Arithmetic
from coterie.engine.resident import Feeding
from coterie.errors import CoterieError
from coterie.evaluation.measures import Measures
from coterie.evaluation.stages import ADAPTED, SEEN
from coterie.running.round import travelled
from coterie.running.training import Training

ModelLike = nn.Module | Callable[[], nn.Module]


class Clients:
    """Clients with their data on one device. They keep no state here: rows and records come in and go out."""

    def __init__(
        self, method: Method, model: ModelLike, federation: Federation, training: Training, head: str | None = None,
        loss: PerSample | None = None, choices: dict[str, Any] | None = None, twin: Clients | None = None,
        population: int | None = None, first: int = 0,
    ) -> None:
        """`twin` holds clients of a method kin to this one: its engine serves both where the module is the same.

        `population` is how many clients the run has, if more than are here, and `first` the number of the first here.
        """
        self.method, self.first = method, first
        self.asked = training  # the run's, for the record; the method may have options of its own
        self.training = training = method.training_in(training)
        training.require(
            federation.classes, tuple(federation.x.shape[1:]), own_loss=loss is not None, per_token=federation.per_token
        )
        if federation.per_token and not method.per_token:
            raise CoterieError(
                f"{method.name} looks at the features or the class of a whole sample, and in these data each token has "
                "a class; use a method that does not, such as fedavg, fedper or ditto."
            )
        self.federation = federation if method.validation else federation.without_validation()
        self.population = self.federation.population if population is None else population
        self.device = device(training.device)
        self.dtype = Arithmetic(training.precision).dtype
        self.init = Init(
            model, method.wrap, training.seed, head, self.dtype, self.device,
            self.federation.arrived(0) if population is None else population, self.federation.classes,
        )
        self.layout = self.init.layout
        self.engine: Engine
        self.choices: dict[str, Any]
        if twin is not None and self._like(twin, choices or {}):
            self.choices, self.engine = dict(twin.choices), twin.engine
        else:
            self.engine, self.choices = choose.build(
                self.init, self._task(loss), self.federation, self.device,
                engine=training.engine, precision=training.precision, kernels=training.kernels,
                capture=training.capture, batch=training.batch, prefix=training.prefix, several=self.population > 1,
                earlier=choices, feeding=self._feeding(),
            )
        chosen = registry.optimizer(training.optimizer)
        self.optimizer = None if chosen.plain else chosen
        task = self.engine.net.task
        self.measures = Measures.of(training.metric, training.watch, task, tuple(self.federation.y.shape[1:]),
                                    method.aggregator.robust)
        self.scored = Scored(self.measures.further)
        self._names = streams.integers("client", self.federation.names)
        self._histogram = self.federation.histogram("train")  # [clients, classes]

    def _task(self, loss: PerSample | None) -> Task:
        federation = self.federation
        return Task.of(federation.classes, loss, self.training.label_smoothing, federation.unit)

    def _feeding(self) -> Feeding:
        """What the run's training does with samples beyond reading them."""
        training = self.training
        return Feeding(
            balanced(self.federation) if training.class_weights == "balanced" else None,
            Augment.of(training.augment) if training.augment != NONE else None,
        )

    def _like(self, twin: Clients, choices: dict[str, Any]) -> bool:
        """Whether a twin's engine computes what this run's would, and as it did before the run was stopped."""
        kept = all(choices[name] == twin.choices.get(name) for name in ("engine", "direct") if name in choices)
        kept = kept and (not choices or ("prefix" in choices) == ("prefix" in twin.choices))
        fed = all(getattr(self.training, name) == getattr(twin.training, name) for name in Training.FED)
        return kept and fed and twin.engine.net.fits(self.init.module)

    # -- memory ------------------------------------------------------------------------------------------------------

    def fitting(self, models: int) -> int:
        """How many clients with so many models each memory holds at once; see `coterie.engine.waves`."""
        return waves.fitting(self.client_bytes(models), max(0, memory.free(self.device) - self.engine.pending))

    def client_bytes(self, models: int) -> int:
        """What one client with so many models takes in a stack."""
        x, training = self.engine.example(), self.training
        outputs = waves.activations(self.engine.net, self.init.row, x)
        largest = int(np.diff(self.federation.bounds, axis=1).max())
        batch = min(training.batch, largest) if training.batch else largest
        scored = min(self.engine.evaluation_batch, largest)
        size = self.layout.size
        return models * waves.slot_bytes(size, x[0].numel(), outputs, batch, scored, self.dtype.itemsize)

    def models_in(self, payload: Record) -> int:
        """Models that each client receives in a payload `[C, ...]`."""
        rows = [t for t in payload.tensors().values() if t.shape[-1:] == (self.layout.size,)]
        return max((t[0].numel() // self.layout.size for t in rows), default=1)

    # -- cohorts and what travels ---------------------------------------------------------------------------------

    def at(
        self, t: int, ids: IntArray, pace: FloatArray | None = None, local: LocalTraining | None = None
    ) -> Cohort:
        """These clients as a cohort of round t; `local` is what they do there, unless it is the run's training."""
        training = self.training
        planned = LocalTraining(
            training.batch, training.epochs, training.steps, training.lr_at(t), self.optimizer, training.clip
        )
        return Cohort(self.engine, Members(
            places=ids, numbers=ids + self.first, names=self._names[ids], histogram=self._histogram[ids], round=t,
            local=local or planned, inits=(self.init,), pace=pace, frozen_buffers=training.buffers == "server",
            own_buffers=training.buffers == "local", scored=self.scored,
        ))

    @property
    def remembers(self) -> bool:
        """Whether clients keep what their optimizer remembers from round to round."""
        return self.optimizer is not None and self.optimizer.keep

    def receive(self, payload: Record, own: Tensor) -> Record:
        """A payload `[C, ...]` whose models have the clients' own buffers `[C, (K,) B]`, with buffers=local."""

        def put(t: Tensor) -> Tensor:
            if t.shape[-1:] != (self.layout.size,):
                return t
            fits = own if own.ndim == t.ndim else own.unsqueeze(1) if own.ndim < t.ndim else own[:, 0]
            return self.layout.put(t, "buffers", fits)

        return payload.map(put)

    def kept_buffers(self, cohort: Cohort) -> Tensor | None:
        """The buffers `[C, (K,) B]` that a cohort's clients keep after training, with buffers=local."""
        if self.training.buffers != "local" or not self.layout.within("buffers") or cohort.left is None:
            return None
        return self.layout.cut(cohort.left, "buffers")

    def without_local_buffers(self, sent: dict[str, Tensor]) -> dict[str, Tensor]:
        """What is sent, `[C, ...]`, with zeros where the policy keeps buffers at home."""
        if self.training.buffers != "local":
            return sent
        empty = torch.zeros((), dtype=self.dtype, device=self.device)
        size = len(self.layout.cut(self.init.row, "buffers"))
        zero = empty.expand(size)
        return {
            name: self.layout.put(t, "buffers", zero) if t.shape[-1:] == (self.layout.size,) else t
            for name, t in sent.items()
        }

    def traffic(self, tensors: dict[str, Tensor], way: str) -> dict[str, int]:
        """Bytes of all clients by field; buffers that the policy keeps at home do not travel."""
        stay = self.training.buffers == "local" or (self.training.buffers == "server" and way == "up")
        chosen = self.method.columns(tensors, self.layout)
        return travelled(tensors, self.layout, self.method.travels(), not stay, chosen)


# -- what clients compute: `function(method, cohort, *records)`, see `running.together` -------------------------------

Measured = tuple[dict[str, Tensor], dict[str, Tensor], IntArray]
"""One stage of some clients: metrics `[C]` on test and on validation data, and the steps spent on the model `[C]`.

With the former are the sums that the cohort's `scored` says to keep.
"""


def introduce(method: Method, cohort: Cohort, hello: Record) -> Upload:
    return method.introduce(cohort, hello)


def settled(cohort: Cohort, payload: Record) -> Record:
    """What clients received, `[C, ...]`, in models that have no running statistics of theirs yet with statistics of
    their own training samples: with buffers=local nobody sends any, and those of the start fit no trained model."""
    if not cohort.members.own_buffers:
        return payload
    return payload.map(lambda t: cohort.settled(t) if t.shape[-1:] == (cohort.layout.size,) else t)


def join(method: Method, cohort: Cohort, payload: Record) -> Record:
    return method.join(cohort, settled(cohort, payload))


def local(method: Method, cohort: Cohort, payload: Record, mine: Record) -> tuple[Upload, Record]:
    found = method.local(cohort, settled(cohort, payload), mine)
    both = isinstance(found, tuple) and len(found) == 2
    if not (both and isinstance(found[0], Upload) and isinstance(found[1], Record)):
        raise CoterieError(f"{type(method).__name__}.local must return an Upload and a Record, not {_said(found)}.")
    return found


def deploy(method: Method, cohort: Cohort, payload: Record, mine: Record) -> Tensor:
    """The rows `[C, D]` that clients use."""
    rows = method.deploy(cohort, settled(cohort, payload), mine)
    if not isinstance(rows, Tensor) or tuple(rows.shape) != (cohort.size, cohort.layout.size):
        expected = f"[{cohort.size}, {cohort.layout.size}], a row for each client"
        raise CoterieError(f"{type(method).__name__}.deploy must return a tensor {expected}, not {_said(rows)}.")
    return rows


def _said(value: object) -> str:
    return f"one {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def score(method: Method, cohort: Cohort, payload: Record, mine: Record) -> dict[str, Measured]:
    return score_rows(cohort, deploy(method, cohort, payload, mine))


def score_rows(cohort: Cohort, row: Tensor) -> dict[str, Measured]:
    """The stages `served` and `adapted` of the rows `[C, D]` that clients use."""
    found: dict[str, Measured] = {}
    scored = cohort.members.scored
    for stage in SEEN:
        row = cohort.train(row) if stage == ADAPTED else row
        test = cohort.score(row, "test", scored.metrics, scored.kept)
        val = cohort.score(row, "val", scored.metrics)
        found[stage] = (test, {n: t for n, t in val.items() if not n.endswith(BOUND)}, cohort.spent)
    return found


def score_newcomers(method: Method, cohort: Cohort, payload: Record) -> dict[str, Measured]:
    payload = settled(cohort, payload)
    return score(method, cohort, payload, method.join(cohort, payload))


def device(name: str) -> torch.device:
    """The device of this name; auto takes CUDA where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(name)
    except RuntimeError:
        raise CoterieError(f"unknown device '{name}'; use cpu, cuda, cuda:0, ... or auto.") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise CoterieError("device=cuda was asked for but PyTorch sees no CUDA device; use device=cpu or auto.")
    return found
