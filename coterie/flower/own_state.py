"""A client's own state on its site's disk: the last two generations, and those of rounds that may be chosen.

    state.safetensors         its state before and after the last round it trained in
    former.safetensors        the same file as it was before it was last replaced
    chosen-12.safetensors     its state as it was scored after round 12

What is written holds finite numbers alone. A file that is damaged, or holds others, gives way to the former one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.contract.layout import Layout
from coterie.errors import CoterieError
from coterie.flower.forms import finite
from coterie.flower.task import Diverged, Refusal
from coterie.running import checkpoint

STATE, FORMER = "state.safetensors", "former.safetensors"


@dataclass(frozen=True)
class KeptState:
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


@dataclass
class StateFiles:
    """The files of one experiment at one site. `say` tells the operator."""

    folder: Path
    experiment: str
    client: str
    model: str
    layout: Layout
    device: torch.device
    say: Callable[[str], None]
    type: str = ""
    """The class of the state's record, once one was made or read."""

    @property
    def path(self) -> Path:
        return self.folder / STATE

    @property
    def former(self) -> Path:
        return self.folder / FORMER

    # -- two generations -------------------------------------------------------------------------------------------

    def save(self, before: KeptState | None, after: KeptState) -> None:
        """Put a new state in the place of the last one, which stays as the former one; unless it is not finite."""
        tensors: dict[str, Tensor] = {}
        for word, own in (("before", before), ("after", after)):
            if own is not None:
                tensors |= checkpoint.prefixed(word, own.tensors)
                tensors |= {} if own.buffers is None else {f"buffers.{word}": own.buffers}
                tensors |= checkpoint.prefixed(f"memory.{word}", own.memory)
        require_finite("own state", tensors)
        rounds = {"before": None if before is None else before.round, "after": after.round}
        if self.path.exists():
            checkpoint.link(self.path, self.former)
        checkpoint.save(self.path, tensors, {**self._whose(), **rounds})

    def load(self) -> tuple[KeptState | None, KeptState]:
        """The state before and after the last round it trained in."""
        try:
            return self._read(self.path)
        except _DamagedError as reason:
            if not self.former.exists():
                self.say(f"{reason} There is no former one; remove it to join anew.")
                raise Refusal("this site's own state is damaged; its operator has been told.") from reason
            self.say(f"{reason} The site goes on from {self.former}.")
        try:
            found = self._read(self.former)
        except _DamagedError as reason:
            self.say(f"{reason} Remove both to join anew.")
            raise Refusal("this site's own state is damaged; its operator has been told.") from reason
        checkpoint.link(self.former, self.path)  # or the next save would keep the damaged one as the former
        return found

    def _read(self, path: Path) -> tuple[KeptState | None, KeptState]:
        tensors, meta = self._checked(path)
        try:
            before = None if meta["before"] is None else self._part(tensors, meta, "before")
            return before, self._part(tensors, meta, "after")
        except (KeyError, TypeError, ValueError) as reason:
            raise _DamagedError(f"{path} is damaged: its header lacks {reason}.") from reason

    def _part(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], word: str) -> KeptState:
        return KeptState(int(meta[word]), checkpoint.part(tensors, word), tensors.get(f"buffers.{word}"),
                         checkpoint.part(tensors, f"memory.{word}"))

    def _checked(self, path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and header of a state of this client; raises _DamagedError where it cannot be used."""
        try:
            tensors, meta = checkpoint.load(path)
            whose, layout, self.type = meta["client"], meta["layout"], str(meta["type"])
        except CoterieError as reason:
            raise _DamagedError(str(reason)) from reason
        except KeyError as reason:
            raise _DamagedError(f"{path} is damaged: its header lacks {reason}.") from reason
        if whose != self.client:
            raise CoterieError(f"{path} holds the state of client {whose}; give every site a home of its own.")
        self.layout.refuse(layout, str(path), self.model)
        if not all(map(finite, tensors.values())):
            raise _DamagedError(f"{path} holds numbers that are not finite.")
        return {name: t.to(self.device) for name, t in tensors.items()}, meta

    def _whose(self) -> dict[str, Any]:
        """What the headers of the site's states say."""
        return {"experiment": self.experiment, "client": self.client, "type": self.type, "layout": self.layout.digest}

    # -- the state of the chosen round -----------------------------------------------------------------------------

    def _chosen_path(self, t: int) -> Path:
        return self.folder / f"chosen-{t}.safetensors"

    def hold(self, own: KeptState, best: int | None, scored: int | None) -> None:
        """Keep the state of round `best`, and that of the round `scored` now, of which nobody knows yet how good it is.

        A site that was not asked in round `best` and has not trained since is still as it was then.
        """
        if own.nothing:
            return
        wanted = {t for t in (best, scored) if t is not None}
        for t in wanted:
            if t == scored or (own.round < t and not self._chosen_path(t).exists()):
                tensors = checkpoint.prefixed("own", own.tensors)
                tensors |= {} if own.buffers is None else {"buffers": own.buffers}
                checkpoint.save(self._chosen_path(t), tensors, {**self._whose(), "round": t, "trained": own.round})
        for path in self.folder.glob("chosen-*.safetensors"):
            if path.name not in {self._chosen_path(t).name for t in wanted}:
                path.unlink(missing_ok=True)

    def chosen(self, t: int) -> KeptState | None:
        """What was kept of round t; the states of clients that keep nothing are alike in all rounds."""
        if not self._chosen_path(t).exists():
            after = self.load()[1] if self.path.exists() else None
            return after if after is not None and after.nothing else None
        try:
            tensors, meta = self._checked(self._chosen_path(t))
            return KeptState(int(meta["trained"]), checkpoint.part(tensors, "own"), tensors.get("buffers"))
        except (_DamagedError, KeyError, TypeError) as reason:
            self.say(f"{reason} The state of round {t} is lost.")
            return None


class _DamagedError(Exception):
    """A file that is there and cannot be used, in a sentence."""


def require_finite(what: str, tensors: Mapping[str, Tensor]) -> None:
    """Refuse to keep or to send numbers that are not finite."""
    for name, t in tensors.items():
        if not finite(t):
            raise Diverged(f"training at the site gave numbers that are not finite ({what}, {name}); it goes on from "
                           "its last finite state.")
