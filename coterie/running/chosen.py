"""Which states of a run are kept beside the last one, and which of them is handed out.

Tables report, stage by stage, the round chosen on validation data (`evaluation.summary.chosen_round`). The states of
those rounds are kept, so that the models which leave a run are those whose scores were printed. A folder keeps them as
`chosen-ROUND.safetensors` (see `running.folder`), a run without one in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from coterie import memory
from coterie.errors import CoterieError
from coterie.evaluation.score import Evaluation
from coterie.evaluation.stages import SEEN, SERVED, basis
from coterie.evaluation.summary import chosen_round, validated

When = Literal["chosen", "last"]
State = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors and header of a checkpoint."""

CHOSEN, LAST = "chosen on validation data", "last"
"""What is said of the round of a model that was handed out."""
LARGE, MANY, CROWD = 1 << 24, 100, 1000
"""A state is large above so many bytes, if these are so many models of the run's size, or above so many models."""

EARLIER = "an earlier version of coterie kept the state of the last round alone"
ALONE = "the clients' states are large, so the run keeps that of the last round and the one chosen for served"
PRIVATE = "The table's round was chosen by the clients' scores, which private does not protect: it is the last one, {}."

Keeps = Literal["both", "served", "none"]
"""Of which stages a run keeps the chosen state: where states are large of served alone, with privacy of none."""


def keeps(tensors: Mapping[str, Tensor], row: Tensor, private: bool) -> Keeps:
    """What a run with such a state keeps; one model of it is `row [D]`."""
    if private:
        return "none"
    most = min(max(LARGE, MANY * row.nbytes), CROWD * row.nbytes)
    return "served" if sum(t.nbytes for t in tensors.values()) > most else "both"


def wanted(history: Sequence[Evaluation], keeps: Keeps = "both") -> tuple[int, ...]:
    """The rounds whose states are kept, those chosen for these stages; none without validation data."""
    stages = {"both": SEEN, "served": (SERVED,), "none": ()}[keeps]
    return tuple(sorted({chosen_round(history, stage) for stage in stages if validated(history, stage)}))


def on_host(state: State) -> State:
    """A copy in host memory that later rounds leave alone; what lies in files, as many clients' states, stays there."""

    def copied(t: Tensor) -> Tensor:
        if memory.is_mapped(t):
            return memory.mapped(tuple(t.shape), t.dtype, "the states of the chosen round").copy_(t)
        return t.detach().to(torch.device("cpu"), copy=True)

    return {name: copied(t) for name, t in state[0].items()}, dict(state[1])


@dataclass(frozen=True)
class HandedOut:
    """The round whose state a stage's models are made from."""

    stage: str
    round: int
    when: str  # CHOSEN or LAST
    note: str = ""  # a sentence where it is not the round that tables report, or nothing could choose one

    @property
    def scored(self) -> When:
        """Which of a run's scores speak of it."""
        return "last" if self.when == LAST else "chosen"

    @property
    def facts(self) -> dict[str, Any]:
        """For the header of a model's file."""
        found = {"round": self.round, "stage": self.stage, "when": self.when}
        return {**found, "note": self.note} if self.note else found


@dataclass(frozen=True)
class KeptStates:
    """The states of a run that models can be made from, by round; each is read when it is asked for."""

    last: int  # the round of the last state, which is always there
    states: Mapping[int, Callable[[], State]] = field(default_factory=dict)
    keeps: Keeps | None = None  # None: a run of an earlier version, which kept the last state alone

    def hand_out(self, history: Sequence[Evaluation], stage: str = SERVED, when: str = "chosen") -> HandedOut:
        """Which of them a stage takes; raises where the chosen one is not there because the run was stopped."""
        stage, last = basis(stage), self.last
        if when not in get_args(When):
            raise CoterieError(f"a run keeps the state of the round that tables report and that of the last one; "
                               f"name 'chosen' or 'last', not '{when}'.")
        if when == "last":
            return HandedOut(stage, last, LAST)
        if not validated(history, stage):
            return HandedOut(stage, last, LAST, f"No validation data chose a round, so it is the last one, {last}.")
        if self.keeps == "none":
            return HandedOut(stage, last, LAST, PRIVATE.format(last))
        best = chosen_round(history, stage)
        if best == last or best in self.states:
            return HandedOut(stage, best, CHOSEN)
        if best > last:
            raise CoterieError(
                f"round {best} was chosen on validation data, and the run was stopped before its state was written: "
                f"resume the run, or take that of round {last}, with 'last' for the round."
            )
        there = [e for e in history if e.round == last or e.round in self.states]
        found = chosen_round(there, stage) if there else last
        why = ALONE if self.keeps == "served" else EARLIER
        said = "the last one" if found == last else "the best of those that are there"
        note = f"Round {best} was chosen on validation data, but {why}: it is round {found}, {said}."
        return HandedOut(stage, found, LAST if found == last else CHOSEN, note)


def only(rounds: Collection[int], states: Mapping[int, State]) -> dict[int, State]:
    """The states of these rounds."""
    return {t: state for t, state in states.items() if t in rounds}
