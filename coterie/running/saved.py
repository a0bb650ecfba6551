"""A run as its folder holds it: what it was asked for, and the server's state and method, without the clients' data."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coterie import files, memory, registry
from coterie.contract.cohort import Init
from coterie.contract.method import Method
from coterie.contract.net import NAMELESS, PerSample, Task
from coterie.data import Federation
from coterie.errors import CoterieError, unknown
from coterie.evaluation.stages import SERVED
from coterie.running.chosen import HandedOut, State
from coterie.running.experiment import EXPERIMENT, Experiment, read_experiment
from coterie.running.folder import Folder
from coterie.running.server import Server
from coterie.running.simulation import Simulation
from coterie.running.spec import RunSpec
from coterie.running.training import Training
from coterie.trust import code


@dataclass(frozen=True)
class Saved:
    """One run's method, model and states. The clients' data are only read where `federation` is called."""

    folder: Folder
    spec: RunSpec  # its model is empty where the run was started from Python and nobody named it
    method: Method  # built once, because a file's classes are new ones whenever it is read
    population: int
    names: tuple[str, ...]
    val: float  # the share of training data that clients hold back for validation
    experiment: Experiment | None
    note: str = ""
    arrivals: tuple[int, ...] = ()  # with churn, the round in which each client arrives, rising
    loss_called: str = ""  # what config.json calls the loss; empty in runs of earlier versions
    grouped: bool = False  # whether the run's split keeps groups of samples together

    @classmethod
    @code.foreign()
    def open(
        cls, folder: str | Path, model: str | None = None, loss: str | None = None, trust: bool = False
    ) -> Saved:
        """The run in a folder; `model` and `loss` are spelled where the folder does not know them.

        Code files that the folder names run if this user has named them before, or with `trust`; those of `model` and
        `loss` are named by that.
        """
        code.typed(model, loss)
        path = Path(folder)
        found = Folder(path)
        config, kept = found.settings(), found.code()
        if not found.checkpoint.is_file():
            raise CoterieError(f"{path} has no checkpoint yet; `coterie resume {path}` goes on with the run.")
        home = next((p for p in (path, *list(path.parents)[:2]) if (p / EXPERIMENT).is_file()), None)
        experiment, _, note = read_experiment(home, trust) if home is not None else (None, True, "")
        try:
            samples = config.get("samples") or _samples(experiment, path)
            named = model or (experiment.model if experiment is not None else "")
            own = loss or (experiment.loss if experiment is not None else "")
            spec = RunSpec.of_config({**config, "samples": samples}, named, own).taken_from(kept, trust)
            method = spec.chosen()
            population, names = int(config["population"]), tuple(config["clients"])
            if not 0 <= population <= len(names):
                raise ValueError(f"{population} of its {len(names)} clients are said to train")
            return cls(
                found, replace(spec, method=registry.spelling(method)), method, population, names,
             float(config["federation"].get("split", {}).get("val", 0.1)), experiment,
                note, tuple(int(arrives) for arrives, _ in config.get("churn", ())),
                str(config.get("loss", "")), "groups" in config["federation"].get("split", {}),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as reason:
            if isinstance(reason, CoterieError):
                raise
            raise CoterieError(f"{path / 'config.json'} is damaged: {reason!r}.") from reason

    @code.foreign()
    def factory(self) -> Callable[[], nn.Module]:
        return self._named().factory()

    @code.foreign()
    def init(self) -> Init:
        """Layout and module; what of it is frozen is the run's, and its other weights are those the run began with."""
        return self._named().init(self.method, population=self.population)

    @code.foreign()
    def loss(self) -> PerSample | None:
        """The loss that somebody wrote for the run; None for the task's usual one."""
        found, called = self.spec.own_loss(), self.loss_called
        named = Task.of(self.spec.classes, found).name
        if called and called != named and not (called == NAMELESS and found is not None):
            other = f"not {named}" if found is not None else "which was given in Python"
            raise CoterieError(
                f"{self.folder.path} trained with the loss {called}, {other}; name its file: --loss file.py:function."
            )
        return found

    def _named(self) -> RunSpec:
        if not self.spec.model:
            raise CoterieError(
                f"{self.folder.path} does not say which model it trained; name it, e.g. --model mlp:hidden=64 or "
                "--model mymodel.py:Net (--net for `coterie export`)."
            )
        if files.in_file(self.spec.model) is None:
            size, free = 4 * self.spec.numbers(self.method), memory.free(torch.device("cpu"))
            if size > free // 2:
                raise CoterieError(
                    f"{self.folder.path} is said to be of {self.spec.model}, which takes {size / 1e9:.1f} GB, more "
                    f"than half of the memory that is free ({free / 1e9:.1f} GB)."
                )
        return self.spec

    def handed_out(self, stage: str = SERVED, when: str = "chosen") -> HandedOut:
        """The round whose state a stage's models are made from: the one that tables report, or the last."""
        return self.folder.kept().hand_out(self.folder.history(), stage, when)

    def checkpoint(self, stage: str = SERVED, when: str = "chosen") -> State:
        """Tensors and header of that state."""
        return self.folder.kept().states[self.handed_out(stage, when).round]()

    @code.foreign()
    def server(self, init: Init, tensors: dict[str, Tensor], meta: dict[str, Any]) -> Server:
        """The server as a checkpoint left it, on the device of `init`, without any client."""
        return Server.restored(self.method, init, anywhere(self.spec.training), tensors, meta)

    def report(self, t: int) -> dict[str, Any]:
        """What the server noted in the last of the first t rounds."""
        rounds = [record for record in self.folder.rounds() if record["round"] < t]
        return dict(rounds[-1].get("report", {})) if rounds else {}

    @code.foreign()
    def federation(self) -> Federation:
        """The run's own data, read again."""
        if self.experiment is None:
            raise CoterieError(f"{self.folder.path} was made in Python and does not know where its data lie.")
        return self.experiment.federation(self.spec)

    @code.foreign()
    def simulation(self, stage: str = SERVED, when: str = "chosen") -> Simulation:
        """The whole run after the round that is handed out, clients and data included."""
        tensors, meta = self.checkpoint(stage, when)
        made = Simulation(self.method, self.factory(), self.federation(), anywhere(self.spec.training),
                          self.spec.head, self.loss(), choices=meta["choices"])
        made.restore(tensors, meta)
        return made

    def arrived(self, t: int) -> int:
        """How many clients the server knows after t rounds."""
        return bisect_right(self.arrivals, t) if self.arrivals else self.population

    def client(self, name: str) -> int:
        """A client's number by its name."""
        if name not in self.names:
            raise unknown(f"client of {self.folder.path}", name, self.names)
        return self.names.index(name)


def anywhere(training: Training) -> Training:
    """The options on whatever device is here: a run on a GPU is also read without one, and without metrics' files."""
    return replace(training, device="auto", metric="auto", watch=())


def _samples(experiment: Experiment | None, path: Path) -> dict[str, Any]:
    """What config.json of an older version does not say."""
    if experiment is None:
        raise CoterieError(f"{path / 'config.json'} is of an older version: it does not say what samples look like.")
    federation = experiment.federation()
    found: dict[str, Any] = RunSpec.for_data(federation, method="", model="").config()["samples"]
    return found
