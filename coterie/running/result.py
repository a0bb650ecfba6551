"""What a run found: the evaluations, what travelled, and each client's model."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

from torch import Tensor, nn

from coterie.contract.cohort import Init
from coterie.contract.engine import Engine
from coterie.contract.frozen import duplicate
from coterie.contract.ground import grounded
from coterie.contract.layout import Layout
from coterie.contract.units import answering
from coterie.data import Federation
from coterie.errors import CoterieError, unknown
from coterie.evaluation.score import Evaluation, Scores
from coterie.evaluation.stages import ADAPTED, SERVED, basis
from coterie.evaluation.summary import chosen_round, validated
from coterie.running import confusion
from coterie.running.chosen import HandedOut, KeptStates, State, When
from coterie.running.confusion import Confusion, Counts

__all__ = ["InMemory", "Result", "When"]


class InMemory(Protocol):
    """A run whose clients are still at hand, as far as their models need it; see `running.simulation`."""

    federation: Federation
    layout: Layout
    init: Init
    engine: Engine
    rounds_done: int

    def after(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> Self:
        """The same clients with another state, e.g. that of an earlier round."""
        ...

    def row(self, client: int, adapted: bool = False) -> Tensor:
        """The row `[D]` that a client uses."""
        ...

    @property
    def residual(self) -> Tensor | None:
        """What is added to the frozen weights that rows stand on."""
        ...


@dataclass(frozen=True)
class Result:
    """One method with one seed. `history` holds every evaluation; `at` finds the one to report."""

    method: str  # its spelling, e.g. fedfew:models=5
    seed: int
    history: tuple[Evaluation, ...]
    rounds: tuple[dict[str, Any], ...] = ()  # one record a round: participants, bytes, the method's own numbers
    seconds: float = 0.0  # time spent training, without evaluation
    printed: str = ""  # the stage the method's paper printed, for presets that reproduce its program
    names: tuple[str, ...] = ()  # client names, seen first
    folder: Path | None = None
    simulation: InMemory | None = field(default=None, repr=False, compare=False)
    arrives: tuple[int, ...] = ()  # with churn, the round in which each training client arrived, 0 at the start
    classes: tuple[str, ...] = ()  # their names, or numbers; none for regression
    matrices: Mapping[tuple[str, int], Counts] = field(default_factory=dict, repr=False, compare=False)
    """Of a run without a folder: the confusion counts by stage and round."""
    finished: bool = True  # of a run that goes on, its rounds so far
    notes: tuple[dict[str, Any], ...] = ()  # what the run said of itself while it went on, see `running.rate`
    kept: KeptStates | None = field(default=None, repr=False, compare=False)
    """The states beside the last one, of a run that is in memory."""
    _views: dict[int, InMemory] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def stages(self) -> tuple[str, ...]:
        return tuple(self.history[-1].stages)

    @property
    def reached(self) -> int:
        """The last round that was evaluated."""
        return self.history[-1].round

    def round_of(self, stage: str, when: When = "chosen") -> int:
        """The round reported: the last one, or the one chosen on validation data (for newcomers: as for the seen)."""
        return self.reached if when == "last" else chosen_round(self.history, basis(stage))

    def at(self, stage: str = SERVED, when: When = "chosen") -> Scores:
        """The clients' scores in a stage."""
        if stage not in self.stages:
            raise unknown("stage", stage, self.stages)
        wanted = self.round_of(stage, when)
        return next(e.stages[stage] for e in self.history if e.round == wanted)

    def confusion(self, stage: str = SERVED, when: When = "chosen") -> Confusion | None:
        """Each client's test samples by label and answer: `counts [clients, classes, classes]`, classes and round.

        Clients are those of `at(stage, when)`, in the same order. None where there is no such record: for regression,
        where clients and classes are very many, in runs of earlier versions, and of the last round until a run ends.
        """
        clients, t = len(self.at(stage, when).clients), self.round_of(stage, when)
        if (stage, t) in self.matrices:
            return Confusion(self.matrices[stage, t], self.classes, t)
        if self.folder is None or not self.classes:
            return None
        return confusion.read(self.folder / confusion.FILE, stage, t, clients, self.classes)

    @property
    def bytes_each_round(self) -> float:
        """Mean bytes per participating client and round, down and up together."""
        active = [r for r in self.rounds if r["down"] or r["up"]]
        return float(sum(sum(r["down"].values()) + sum(r["up"].values()) for r in active) / max(len(active), 1))

    @property
    def epsilon(self) -> float:
        """What all rounds together have cost in privacy; NaN where the aggregator is not `private`."""
        return float(self.rounds[-1].get("report", {}).get("epsilon", "nan")) if self.rounds else float("nan")

    def handed_out(self, stage: str = SERVED, when: When = "chosen") -> HandedOut:
        """The round whose models `model_for` gives: the one that `at(stage, when)` scored, as long as it is kept."""
        return self._in_memory()[1].hand_out(self.history, stage, when)

    def _in_memory(self) -> tuple[InMemory, KeptStates]:
        if self.simulation is None:
            raise CoterieError("this result was read from files without its data; resume the run to get its models.")
        return self.simulation, self.kept or KeptStates(self.simulation.rounds_done)

    def model_for(self, client: int | str, adapted: bool = False, when: When = "chosen") -> nn.Module:
        """The model a client deploys (`adapted`: after local training), ready for inference.

        It is the one that the table scored, of the round chosen on validation data, or of the last one.

        Where targets were scaled it ends with the map back, so that it answers in their own unit. The models
        of a run share the memory of frozen parameters; `copy.deepcopy` gives one that may be changed.
        """
        simulation, kept = self._in_memory()
        names = simulation.federation.names
        number = names.index(client) if isinstance(client, str) and client in names else client
        if not isinstance(number, int) or not 0 <= number < len(names):
            raise unknown("client", str(client), names)
        taken = kept.hand_out(self.history, ADAPTED if adapted else SERVED, when)
        if taken.note and validated(self.history, taken.stage):
            warnings.warn(taken.note, stacklevel=2)
        after = self._after(taken.round)
        row = after.row(number, adapted).cpu()
        module, layout = grounded(duplicate(simulation.init.module).to(row.dtype), simulation.layout, after.residual)
        return answering(layout.load(module, row).eval(), simulation.federation.unit)

    def _after(self, t: int) -> InMemory:
        """The clients after round t, one of those that are kept."""
        simulation, kept = self._in_memory()
        if t == simulation.rounds_done:
            return simulation
        if t not in self._views:
            state: State = kept.states[t]()
            self._views[t] = simulation.after(*state)
        return self._views[t]
