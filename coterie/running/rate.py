"""A learning rate that makes the loss explode is said in the first rounds, with a smaller one that was tried aside.

A `Watch` looks at how large the clients' rows become, in the first rounds only and where they are computed. Where they
are not finite, or far larger than at the start, the clients' losses are looked at: explosion is a loss that is not
finite, or more than FAR times both that before training and a constant answer's. The run is then repeated aside up to
the first round that explodes, and that round is done again with smaller rates until one does not. The run itself goes
on as it was: the copy has its engine, which keeps no state, and nothing else of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie import memory
from coterie.contract.engine import FloatArray
from coterie.contract.net import cross_entropy, squared_error
from coterie.contract.units import Unit
from coterie.errors import counted
from coterie.evaluation.score import Evaluation
from coterie.evaluation.stages import SERVED
from coterie.running.simulation import Simulation

FIRST = 5
"""Rounds in which the rows are looked at; later it is only seen where an evaluation finds a loss that is not finite."""
LARGE = 5.0
"""Times the largest initial parameter (at least 1): rows beyond that are suspicious, and the losses are looked at."""
LOOKS = 2
"""How often they are, at most, without anything being wrong."""
FAR = 10.0
"""Times the loss before training, or a constant answer's: beyond that it has exploded."""
PARTS = (3, 10, 30, 100, 1e3, 1e4, 1e6, 1e8)
"""A rate is divided by these, one after another, until a round does not explode."""
SECONDS = 30.0
"""That all of this may take, about."""


class Watch:
    """Watches one run; `again` makes its simulation anew, at its start."""

    def __init__(self, simulation: Simulation, again: Callable[[], Simulation], quiet: bool = False) -> None:
        """`quiet` where the run has said it before it was stopped."""
        self.simulation, self.again, self.quiet = simulation, again, quiet
        self._sizes: list[Tensor] = []
        self._looks, self._most = LOOKS, 0.0

    def begin(self) -> None:
        """Before a round."""
        looking = not self.quiet and self._looks > 0 and self.simulation.rounds_done < FIRST
        self._sizes = []
        self.simulation.noticing = self._notice if looking else None

    def _notice(self, records: Mapping[str, Tensor]) -> None:
        """What clients sent or keep `[C, ...]`: the largest number in their rows `[C]`, without waiting for it."""
        layout = self.simulation.layout
        for t in records.values():
            if t.is_floating_point() and t.ndim > 1 and t.shape[-1] == layout.size and len(t):
                self._sizes.append(layout.cut(t.detach(), "parameters").abs().flatten(1).amax(1))
            elif t.is_floating_point() and t.numel():
                self._sizes.append(torch.where(t.detach().isfinite().all(), 0.0, math.inf)[None])

    def end(self, seconds: float) -> dict[str, Any] | None:
        """After a round, when the device is idle: what is to be noted, if anything. A round takes so many seconds."""
        sizes, self._sizes, self.simulation.noticing = self._sizes, [], None
        if not sizes:
            return None
        initial = self.simulation.layout.cut(self.simulation.init.row, "parameters").abs()
        self._most = self._most or LARGE * max(1.0, float(initial.max()) if initial.numel() else 1.0)
        if not bool((torch.cat([t.float() for t in sizes]) <= self._most).all()):
            self._looks -= 1
            return self._examined(seconds)
        return None

    def evaluated(self, found: Evaluation, seconds: float) -> dict[str, Any] | None:
        """After an evaluation: what is to be noted, if anything."""
        if self.quiet or not found.round or not found.stages[SERVED].diverged.any():
            return None
        return self._examined(seconds)

    def _examined(self, seconds: float) -> dict[str, Any] | None:
        begun, now = time.perf_counter(), self.simulation.losses()
        try:
            note = self._untried(now, "its states are too large") if self._too_large() else self._retried(
                now, begun, seconds)
        except Exception as reason:  # whatever happens aside must not stop the run
            note = self._untried(now, str(reason))
        self.quiet = note is not None
        return note

    def _untried(self, now: FloatArray, why: str) -> dict[str, Any] | None:
        """What can be said without trying anything aside."""
        lost = ~np.isfinite(now)
        return self._worded(self.simulation.rounds_done, now, lost, [], None, why) if lost.any() else None

    def _too_large(self) -> bool:
        """Whether a copy of the states and one to go back to would not fit beside the run."""
        tensors = self.simulation.snapshot(copies=False)[0]
        needed = 3 * sum(t.numel() * t.element_size() for t in tensors.values())
        return needed > min(memory.free(self.simulation.device), memory.free(torch.device("cpu")))

    def _retried(self, now: FloatArray, begun: float, seconds: float) -> dict[str, Any] | None:
        copy = self.again()
        start = copy.losses()
        known = min(len(start), len(now))
        limit = FAR * np.maximum(start[:known], self._constant(known))

        def exploded(losses: FloatArray) -> np.ndarray[Any, np.dtype[np.bool_]]:
            return ~(losses[:known] <= limit) & np.isfinite(start[:known])

        if not np.isfinite(start).all():
            return self._worded(0, start, ~np.isfinite(start), [], None, "")
        if not exploded(now).any():
            return None
        if seconds * self.simulation.rounds_done > SECONDS:
            return self._worded(self.simulation.rounds_done, now, exploded(now), [], None,
                                "too many rounds to repeat them aside")
        while True:  # up to the first round that explodes: the run's own, or one before it that nobody looked at
            before = copy.snapshot()
            copy.round()
            losses = copy.losses()
            if exploded(losses).any() or copy.rounds_done >= self.simulation.rounds_done:
                break
        t, lost = copy.rounds_done, exploded(losses)
        tried: list[float] = []
        took = 0.0
        for part in PARTS:
            if tried and time.perf_counter() - begun + took > SECONDS:
                break
            once = time.perf_counter()
            tried.append(float(f"{self.simulation.training.lr / part:.1g}"))
            copy.restore(*before)
            copy.training = replace(copy.training, lr=tried[-1])
            copy.round()
            if not exploded(copy.losses()).any():
                return self._worded(t, losses, lost, tried, tried[-1], "")
            took = time.perf_counter() - once
        return self._worded(t, losses, lost, tried, None, "")

    def _constant(self, clients: int) -> FloatArray:
        """The loss of a constant answer: log of the classes, or the variance of a client's targets; 0 if not known."""
        task, federation = self.simulation.engine.net.task, self.simulation.federation
        if task.scored is cross_entropy:
            return np.full(clients, math.log(max(federation.classes, 2)))
        if task.scored is squared_error:
            unit = federation.unit or Unit(0.0, 1.0)  # as the loss that clients train on
            targets = [unit.standardised(federation.client(i, "train")[1]) for i in range(clients)]
            return np.array([float(y.var(0, unbiased=False).mean()) if len(y) else 0.0 for y in targets])
        return np.zeros(clients)

    def _worded(
        self, t: int, losses: FloatArray, lost: np.ndarray[Any, np.dtype[np.bool_]], tried: list[float],
        fine: float | None, why: str,
    ) -> dict[str, Any]:
        lr, method = self.simulation.training.lr, self.simulation.method
        infinite = not np.isfinite(losses[: len(lost)][lost]).all()
        said = f"round {t}: the loss of {int(lost.sum())} of {counted(len(lost), 'client')} "
        said += "is not finite" if infinite else f"is more than {FAR:g} times that before training"
        listed = ", ".join(f"{rate:g}" for rate in tried)
        if t == 0:
            said += " before any training: scale the inputs and targets, or look at the model and the loss"
        elif fine is not None:
            asked = f"{method.name}:lr={fine:g}" if "lr" in dict(method.training) else f"--set lr={fine:g}"
            said += f" at lr={lr:g}; the same round at lr={fine:g} is fine (tried {listed}): {asked}"
        elif tried:
            said += f" at lr={lr:g}, and no smaller rate helped in that round (tried {listed}): look at the data"
        else:
            said += f" at lr={lr:g}; no smaller rate was tried ({why}): --set lr={lr / 10:g}"
        return {"round": t, "clients": int(lost.sum()), "of": len(lost), "lr": lr, "tried": tried, "fine": fine,
                "text": f"{said}."}
