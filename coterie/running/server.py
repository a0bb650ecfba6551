"""The server of a run, written once for the simulation, Flower's rounds and whoever opens a checkpoint."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from coterie import registry
from coterie.contract import records
from coterie.contract.cohort import Init
from coterie.contract.engine import IntArray
from coterie.contract.layout import Layout
from coterie.contract.mean import Mean
from coterie.contract.method import Method, Uploads
from coterie.contract.records import Each, Record, Upload
from coterie.contract.shapes import Clustered, FewModels
from coterie.errors import CoterieError
from coterie.running import checkpoint
from coterie.running.guard import PARTICIPATE, PRIVACY, Guard
from coterie.running.round import seen
from coterie.running.stepper import Stepper
from coterie.running.training import Training
from coterie.streams import chance

STATE, CLIP, MEMORY = "server", "privacy.clip", "optimizer"
"""What a checkpoint calls the server's tensors (`server.row`, ...), the clip of a private run, and what the server's
optimizer remembers (`optimizer.row.velocity`, ...)."""

CAP = 3
"""With a robust aggregator and counts=true, a client counts for at most so many times the round's median of samples."""

NOTES = "aggregator"
"""Under which a run's choices hold what `Server.notes` says of it."""


class Server:
    """One run's server: the method's state, and everything that is done to it. It never holds a client's data.

    `Server(...)` starts, and refuses what cannot run. At every arrival clients get `hello`, and `admitted` gives the
    server that knows them too. Each round some are `selected`, receive their `payload` (one by one: `payloads`), and
    what they upload is merged. `tensors` and `meta` are its part of a checkpoint, and `restore` reads it again.

    A checkpoint is enough to serve newcomers and to export the server's models:

        tensors, meta = checkpoint.load(folder.checkpoint)
        server = Server.restored(method, init, training, tensors, meta)
        server.state                               # what the method calls the server, e.g. for few() and fallback()
        arrival.each_alone(server, cohort, number) # the rows of newcomers, see there
    """

    def __init__(
        self, method: Method, init: Init, training: Training, state: Record | None = None, experiment: str = ""
    ) -> None:
        """A new run's server for `init.population` clients, or one that has this state already.

        `experiment` is the run's id where it has one: privacy makes its noise of it, too.
        """
        self.method, self.init, self.training = method, init, method.training_in(training)
        self.layout, self.device = init.layout, init.row.device
        if state is None:
            self.refuse_early(method, init.population, init.layout, training)
        self.guard = Guard.of(method, self.training, init.population)
        if self.guard is not None and state is None:
            self.guard.begin(experiment)
        self.nobody: dict[str, Tensor] = {}  # the uploads of no client `[0, ...]`, with privacy on
        self.state: Record = method.start(init) if state is None else state
        self.stepper = Stepper.of(method, self.training)
        if self.stepper is not None and state is None:
            self.stepper.check(method, method.averaged(self.state, self.layout))

    @staticmethod
    def refuse_early(method: Method, population: int, layout: Layout, training: Training) -> None:
        """Raise if the method, its aggregator and the run's training options cannot work together with so many clients
        or this model; nothing is built."""
        training = method.training_in(training)
        Stepper.of(method, training)
        method.check(population, layout)
        why = method.only_plain()
        if why and not training.plain:
            asked = f"clip={training.clip:g}" if training.clip is not None else f"optimizer={training.optimizer}"
            raise CoterieError(f"{method.name} trains by plain SGD alone: {why}; leave out {asked}.")
        plugged = method.aggregator
        if not method.averages and not isinstance(plugged, Mean):
            raise CoterieError(f"{method.name} averages nothing, so '+{plugged.name}' has no effect on it.")
        mean = isinstance(plugged, Mean) or plugged.private  # which is a mean with noise
        if method.running_mean and not (mean or plugged.robust):
            raise CoterieError(
                f"{method.name}'s server adds up how the clients' models moved, and what {plugged.name} makes of moves "
                f"adds up to no mean of models; leave out +{plugged.name}, or take a robust aggregator, such as "
                f"{method.name}+median."
            )
        if method.products and not (mean or plugged.robust):
            raise CoterieError(
                f"{method.name} averages products of factors, and {plugged.name} combines how whole rows moved; leave "
                f"out +{plugged.name}, or take a robust aggregator, such as {method.name}+median."
            )
        if method.soft and not plugged.weighs:
            raise CoterieError(
                f"{method.name} counts a client in each of its models by its share there, and {plugged.name} as it is "
                "set does not keep to such weights, so that the models would become one; take an aggregator that does "
                f"({', '.join(registry.keeping())}), or a method whose clients count in one model each, such as "
                f"ifca+{plugged.name}."
            )
        if population < plugged.minimum:
            raise CoterieError(
                f"the aggregator {plugged.name} needs at least {plugged.minimum} clients; there are {population}."
            )

    @staticmethod
    def notes(method: Method, layout: Layout, training: Training) -> list[str]:
        """What whoever starts a run should know of its aggregator, and of the method with this model and schedule."""
        plugged, said = method.aggregator, []
        shared = method.travels()
        asked = shared in ("~none", "~all") or method.adapters
        if shared.startswith("~") and not asked:
            kept = shared.removeprefix("~")
            if not layout.within(kept):
                said.append(f"{method.name}: this model has no part {kept}, so all of it is shared, as in fedavg.")
            elif not layout.within(shared):
                said.append(f"{method.name}: this model is nothing but the part {kept}, which does not travel, so "
                            "nothing is shared.")
        if plugged.robust and method.unprotected:
            said.append(f"{method.name}+{plugged.name}: the aggregator does not protect {method.unprotected}.")
        if plugged.minimum > 1 and isinstance(method, FewModels | Clustered):
            said.append(f"{method.name}+{plugged.name}: a model that fewer than {plugged.minimum} clients of a round "
                        "train stays as it is in that round, for the aggregator needs as many.")
        training = method.training_in(training)
        own = [name for name in method.rates if getattr(method, name) is not None]
        if own and (training.schedule != "constant" or training.warmup):
            what = "warmup" if training.schedule == "constant" else f"schedule={training.schedule}"
            said.append(f"{method.name}: {what} changes the run's learning rate alone; {' and '.join(own)} "
                        f"{'stay' if len(own) > 1 else 'stays'} the same in every round.")
        return said

    # -- arrival ---------------------------------------------------------------------------------------------------

    def hello(self) -> Record:
        """What clients are told before they introduce themselves, alike for all."""
        told: Record = self.method.hello(self.state)
        return told

    def admitted(self, ids: Tensor, introductions: Upload) -> Self:
        """The server that knows these clients too; this one stays as it is.

        For clients that take part from now on it takes this one's place; for unseen ones it is used and thrown away.
        """
        if self.guard is not None:
            self.guard.meet(introductions.tensors())
        other = copy.copy(self)
        other.state = self.method.admit(self.state, ids, introductions)
        return other

    def check_buffers(self, payload: Record) -> None:
        """Raise if clients are to keep their own buffers but the `payload` holds no whole models to put them in."""
        if self.training.buffers != "local" or not self.layout.within("buffers") or not self.state.tensors():
            return
        if not any(t.shape[-1:] == (self.layout.size,) for t in payload.tensors().values()):
            raise CoterieError(
                f"buffers=local needs a method that exchanges whole models; {self.method.name} exchanges a part of it: "
                f"leave buffers=average{self._own_buffers()}."
            )

    def _own_buffers(self) -> str:
        """How the buffers stay with clients of a method that exchanges a part of the model; empty if they do."""
        shared = {entry.name for entry in self.layout.within(self.method.travels())}
        if shared.isdisjoint(entry.name for entry in self.layout.within("buffers")):
            return f", with which {self.method.name} keeps them at the clients"
        return " and name the buffers among what stays with the client (personal=head+buffers)"

    def rehearse(self, sent: Mapping[str, Tensor]) -> None:
        """With privacy on, raise if uploads like `sent [c, ...]` would tell the server more than their noisy mean."""
        if self.guard is not None:
            self.guard.rehearse(self.state, sent, self.layout)
            self.nobody = {name: t[:0] for name, t in sent.items()}

    # -- rounds ----------------------------------------------------------------------------------------------------

    def asked(self, clients: int) -> int:
        """How many of so many clients are asked in a round."""
        return max(1, round(self.training.participation * clients))

    def selected(self, names: IntArray, t: int) -> IntArray:
        """Which of the clients, by their names' numbers `[c]`, are asked in round t: places in `names`, rising.

        Those with the smallest draws, so the set does not depend on their order; with sampling=poisson all whose draws
        are below the participation, maybe nobody.
        """
        training = self.training
        if training.sampling == "poisson":
            drawn = (self.guard.chance(names, t) if self.guard is not None else
                     chance(training.seed, names, t, PARTICIPATE))
            return np.nonzero(drawn < training.participation)[0]
        count = self.asked(len(names))
        if count == len(names):
            return np.arange(len(names))
        return np.sort(np.argpartition(chance(training.seed, names, t, PARTICIPATE), count - 1)[:count])

    def payload(self, ids: Tensor) -> Record:
        """What these clients receive, `[C, ...]`; what is alike for all of them is one stride-0 view."""
        return records.spread(self.method.send(self.state, ids), len(ids))

    def payloads(self, ids: Tensor) -> list[Record]:
        """What each of these clients receives, `[1, ...]`; what is alike for all of them is one tensor object."""
        sent = self.method.send(self.state, ids)
        tensors = sent.tensors()
        each = {name for name in tensors if isinstance(getattr(sent, name), Each)}
        shared = {name: t.unsqueeze(0) for name, t in tensors.items() if name not in each}
        return [type(sent).of({**shared, **{n: tensors[n][k : k + 1] for n in each}}) for k in range(len(ids))]

    def needed(self, least: int = 1) -> int:
        """Answers without which a round is skipped; with privacy on no round is, as that would tell who was there."""
        return 0 if self.guard is not None else max(least, self.method.aggregator.minimum)

    def skipped(self, answers: int) -> dict[str, Any]:
        """What is recorded of a round in which too few clients answered for the aggregator."""
        plug = self.method.aggregator
        return {"skipped": f"{plug.name} needs {plug.minimum} clients, {answers} answered"}

    def stacked(self, uploads: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Uploads of several cohorts `[c, ...]` as one `[m, ...]`; of nobody, with privacy on, `[0, ...]`."""
        return records.concatenate(uploads or [self.nobody])

    def weighed(self, n: Tensor) -> tuple[Tensor, Tensor]:
        """The participants' samples `[m]`, as they say -> the counts `[m]` and shares `[m]` that the method sees.

        A robust aggregator is for clients that may say anything, so there all have the median's count, or with
        counts=true at most CAP times that. The shares are n / sum of n, in float64.
        """
        if self.method.aggregator.robust and len(n):
            usual = n.median()
            n = n.clamp(max=CAP * usual) if self.training.counts else usual.repeat(len(n))
        return n, n.double() / n.sum().clamp(min=1)

    def merge(self, up: Uploads) -> dict[str, Any]:
        """Take the uploads in, with a guard only their noisy mean; numbers worth recording."""
        if self.guard is None:
            report = seen(self.method, self.state, up, self.training)
        else:
            up, report = self.guard.pool(up)
        report |= {name: value.tolist() for name, value in self.method.report(self.state, up).items()}
        merged = self.method.merge(self.state, up)
        if self.stepper is not None:
            merged = self.stepper.step(self.state, merged, self.method.averaged(self.state, self.layout))
        self.state = merged
        return report

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors in a checkpoint."""
        found = checkpoint.prefixed(STATE, self.state.tensors())
        if self.guard is not None:
            found[CLIP] = torch.tensor(self.guard.clip, dtype=torch.float64)
        if self.stepper is not None:
            found |= checkpoint.prefixed(MEMORY, self.stepper.tensors())
        return found

    def meta(self) -> dict[str, Any]:
        """What the header of a checkpoint says of it: the class of the state, the model's layout, and with privacy on
        what names its noise."""
        noise = {} if self.guard is None or self.guard.streams is None else {PRIVACY: self.guard.streams.record()}
        return {STATE: type(self.state).__name__, "layout": self.layout.digest, **noise}

    def apart(self) -> Self:
        """A server with the same state that can be restored to another, which leaves this one as it is."""
        other = copy.copy(self)
        other.guard = copy.copy(self.guard)
        other.stepper = None if self.stepper is None else self.stepper.remembering(self.stepper.tensors())
        return other

    def restore(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; where that does not fit, this server stays as it is."""
        self.check_layout(meta)
        read = record_class(self.method, meta[STATE]).of(checkpoint.part(tensors, STATE))
        state = read.map(lambda t: t.to(self.device, copy=True))
        lost = sorted(self.state.tensors().keys() - state.tensors().keys())
        if lost:
            raise CoterieError(f"the checkpoint does not fit this run: {', '.join(lost)} is missing.")
        if self.guard is not None:
            self.guard.restore(float(tensors[CLIP]), meta)
        if self.stepper is not None:
            memory = checkpoint.part(tensors, MEMORY)
            self.stepper = self.stepper.remembering({n: t.to(self.device, copy=True) for n, t in memory.items()})
        self.state = state

    @classmethod
    def restored(
        cls, method: Method, init: Init, training: Training, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]
    ) -> Self:
        """The server of a checkpoint, without a start and without any client; `init` says on which device."""
        made = cls(method, init, training, records.Nothing())
        made.restore(tensors, meta)
        return made

    def check_layout(self, meta: Mapping[str, Any]) -> None:
        """Raise if a checkpoint is of another model."""
        self.layout.refuse(meta["layout"], "the checkpoint")


def record_class(method: Method, name: str) -> type[Record]:
    """The record class that has, or had, this name: one the method's own modules define, or one of the common ones."""
    for module in (*(sys.modules[cls.__module__] for cls in type(method).__mro__), records):
        known = [found for found in vars(module).values() if isinstance(found, type) and issubclass(found, Record)]
        for found in known:
            if found.__name__ == name:
                return found
        for found in known:
            if name in found.former:
                return found
    raise CoterieError(f"a state '{name}' was named that {method.name} does not define.")
