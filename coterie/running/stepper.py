"""The server's optimizer: it turns what a round did to the averaged models into a step, and remembers the past."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from coterie import registry
from coterie.contract.layout import Layout
from coterie.contract.local import LocalOptions
from coterie.contract.method import Method
from coterie.contract.optimizer import Optimizer
from coterie.contract.records import Record
from coterie.errors import CoterieError

COUNT = "count"
"""Beside an optimizer's own memory: the steps that each tensor of each model has taken, `[..., tensors]`."""


class Stepper:
    """w <- step(w, g) with g = w - w', w' being what the method's `merge` made of the model w: Reddi et al. 2021.

    The server's memory is 0 at first, v_0 included. Only trained parameters are stepped, each model `[K, d]` by its own
    past; running statistics, counters and whatever else the merge gives stay as it gave them. A tensor that the round
    did not move at all, as in a cluster without participants, keeps its place and its memory: nobody's momentum does
    not move it.
    """

    def __init__(self, optimizer: Optimizer, memory: Mapping[str, Mapping[str, Tensor]] | None = None) -> None:
        """`memory` is what it remembers of each averaged field, by slot."""
        self.optimizer, self.memory = optimizer, dict(memory or {})
        self.slots = () if optimizer.plain else optimizer.slots

    @classmethod
    def of(cls, method: Method, training: LocalOptions) -> Self | None:
        """The one that a run's options ask for, or none where the merge is taken as it is; raises if it cannot be."""
        optimizer = registry.optimizer(training.server, server=True)
        if optimizer.plain and optimizer.lr == 1:
            return None
        if method.up == "0" and "server" not in dict(method.training):
            return None  # a run's baseline without a server, in which there is nothing to change
        if method.unsteppable:
            raise CoterieError(
                f"server={training.server} does not fit {method.name}: {method.unsteppable}; {method.name}:server=sgd "
                "leaves it as it is."
            )
        return cls(optimizer)

    def check(self, method: Method, averaged: Mapping[str, Layout]) -> None:
        """Raise if the method does not say what is stepped."""
        if not averaged:
            raise CoterieError(
                f"{method.name} does not say which of its server's tensors are averaged models, so no server optimizer "
                f"can step them: it has to write `averaged`; {method.name}:server=sgd leaves it as it is."
            )

    def step(self, old: Record, new: Record, averaged: Mapping[str, Layout]) -> Record:
        """The server's state after the round: `new` is what the merge made of `old`."""
        before, after = old.tensors(), new.tensors()
        stepped = {name: self._step(name, before[name], after[name], layout) for name, layout in averaged.items()}
        return replace(new, **stepped)

    def _step(self, name: str, old: Tensor, new: Tensor, layout: Layout) -> Tensor:
        """One field's models `[d]` or `[K, d]`."""
        memory = self.memory.get(name) or {
            **{slot: torch.zeros_like(old) for slot in self.slots},
            COUNT: torch.zeros(*old.shape[:-1], len(layout.entries), dtype=torch.int64, device=old.device),
        }
        if old.shape != new.shape or memory[COUNT].shape[:-1] != old.shape[:-1]:
            raise CoterieError(f"server={self.optimizer.name} steps the server's models, and their number changed.")
        if not layout.entries:
            return new
        move = new - old
        moved = torch.stack(
            [move[..., e.start : e.stop].ne(0).any(-1) & e.trainable for e in layout.entries], -1
        )  # [..., tensors]
        sizes = torch.tensor([entry.size for entry in layout.entries], device=old.device)
        count = memory[COUNT] + moved
        columns, steps = (t.repeat_interleave(sizes, -1, output_size=layout.size) for t in (moved, count))
        row, state = old.clone(), {slot: memory[slot].clone() for slot in self.slots}
        assert self.optimizer.lr is not None
        self.optimizer.step(row, -move, state, self.optimizer.lr, steps.clamp(min=1).to(old.dtype))
        kept = {slot: torch.where(columns, t, memory[slot]) for slot, t in state.items()}
        self.memory[name] = {**kept, COUNT: count}
        return torch.where(columns, row, new)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """What it remembers, by field and slot: `row.velocity`, `row.count`."""
        return {f"{name}.{slot}": t for name, slots in self.memory.items() for slot, t in slots.items()}

    def remembering(self, tensors: Mapping[str, Tensor]) -> Stepper:
        """The same optimizer with the memory that `tensors` gave."""
        memory: dict[str, dict[str, Tensor]] = {}
        for whole, t in tensors.items():
            name, _, slot = whole.rpartition(".")
            memory.setdefault(name, {})[slot] = t
        for name, slots in memory.items():
            wrong = sorted(slots.keys() ^ {*self.slots, COUNT})
            if wrong:
                lost = ", ".join(f"{name}.{slot}" for slot in wrong)
                raise CoterieError(f"the checkpoint does not fit server={self.optimizer.name}: {lost} is missing or "
                                   "too much.")
        return Stepper(self.optimizer, memory)
