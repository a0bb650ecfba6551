"""A run's privacy on the server: it turns the clients' uploads into one noisy mean before anything else sees them.

A `Server` holds it: `Guard.of` and `begin` before the first round, `meet` at every admission, `rehearse` with one
upload, then each round `pool`. The `clip` and what names the noise are its state and belong into the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from coterie.aggregators.private import MOST, Private
from coterie.contract.aggregator import Aggregator
from coterie.contract.engine import FloatArray, IntArray
from coterie.contract.layout import Layout
from coterie.contract.mean import Mean
from coterie.contract.method import Method, Pooled, Uploads
from coterie.contract.records import Record
from coterie.errors import CoterieError, counted
from coterie.privacy import account
from coterie.privacy.noise import Streams
from coterie.running.training import Training

PRIVACY = "privacy"
"""Under which a checkpoint's header says what names the run's noise, see `privacy.noise`."""
PARTICIPATE = "participate"
"""The purpose of the draws that decide who takes part."""

_accounts = cache(account.Account)


@dataclass(frozen=True)
class _Rehearsed(Aggregator):
    """The mean in private's place, for `rehearse`."""

    private = True

    def combine(self, updates: Tensor, weights: Tensor, layout: Layout) -> Tensor:
        return weights @ updates


class Guard:
    """Privacy of one run: who may run, what `merge` sees, and what it has cost."""

    def __init__(self, method: Method, plan: Private, training: Training, population: int) -> None:
        self.method, self.plan, self.training, self.population = method, plan, training, population
        self.expected = training.participation * population
        self.clip = plan.clip
        self.streams: Streams | None = None  # until the run begins, and in a run of an earlier version
        self._check()

    @classmethod
    def of(cls, method: Method, training: Training, population: int) -> Guard | None:
        """The guard of a run with the aggregator `private`; none without it. Raises where a run must not begin."""
        plan = method.aggregator
        return cls(method, plan, training, population) if isinstance(plan, Private) else None

    def _check(self) -> None:
        plan, training = self.plan, self.training
        if self.population < 2:
            raise CoterieError("private hides a client among others; there is only one.")
        if self.population > MOST:
            raise CoterieError(f"private's clip is exact for up to {MOST} clients; there are {self.population}.")
        if training.sampling != "poisson" and training.participation < 1:
            raise CoterieError(
                "private accounts for clients that are drawn independently of each other; set sampling=poisson."
            )
        if training.patience:
            raise CoterieError(
                "patience stops by the clients' validation scores, which private does not protect; set patience=0."
            )
        if plan.epsilon is not None and self.spent(training.rounds) > plan.epsilon:
            q, rounds = training.participation, training.rounds
            enough = account.noise(plan.epsilon, q, rounds, plan.delta)
            fitting = next(t for t in range(rounds, -1, -1) if t == 0 or self.spent(t) <= plan.epsilon)
            few = f"rounds={fitting} or " if fitting else ""
            raise CoterieError(
                f"{counted(rounds, 'round')} would spend epsilon {self.spent(rounds):.3f}, more than the budget of "
                f"{plan.epsilon:g}; set {few}private's sigma={enough:g}."
            )

    def spent(self, rounds: int) -> float:
        """The epsilon of so many rounds."""
        plan, planned = self.plan, self.training.rounds
        return _accounts(plan.sigma, self.training.participation, max(rounds, planned), plan.delta).epsilon(rounds)

    # -- noise -----------------------------------------------------------------------------------------------------

    def begin(self, experiment: str) -> None:
        """Streams of noise and sampling that no other run has, where there is a secret."""
        self.streams = Streams.fresh(self.training.seed, experiment)

    def restore(self, clip: float, meta: Mapping[str, Any]) -> None:
        """Go on from a checkpoint with this header; noise is another matter, see `require_noise`."""
        self.clip = clip
        self.streams = _named(self.training.seed, meta)

    @staticmethod
    def require_noise(method: Method, training: Training, meta: Mapping[str, Any]) -> None:
        """Raise if a private run cannot go on from a checkpoint with this header, because its noise would differ."""
        done = meta.get("round")
        finished = isinstance(done, int) and done >= training.rounds
        if method.aggregator.private and not finished:
            _known(_named(training.seed, meta)).key()

    def chance(self, names: IntArray, t: int) -> FloatArray:
        """A uniform number on [0, 1) for each client, by its name's number `[c]`, that decides on round t."""
        return _known(self.streams).chance(names, t, PARTICIPATE)

    # -- what merge may see ----------------------------------------------------------------------------------------

    def meet(self, introductions: Iterable[str]) -> None:
        """Raise if clients introduce themselves: what they tell is not protected."""
        told = sorted(introductions)
        if told:
            raise CoterieError(
                f"{self.method.name} asks clients to introduce themselves by {_listed(told)}, which private does not "
                "protect; use another method."
            )

    def rehearse(self, server: Record, sent: Mapping[str, Tensor], layout: Layout) -> None:
        """Raise if `merge` takes more from uploads like `sent [c, ...]` than their mean.

        Two invented updates must move the server as their mean does, and in a model with running statistics these
        must not be among what moves.
        """
        self._fields(sent)
        shape, like = sent["update"].shape[1:], sent["update"]
        made = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(like)
        half = torch.full((2,), 0.5, dtype=torch.float64, device=like.device)
        ids = torch.arange(2, device=like.device)
        apart = Uploads({"update": made}, ids, torch.ones_like(ids), half, self.population, 0, layout)
        plain = replace(self.method, aggregator=_Rehearsed())
        moved = plain.merge(server, apart)
        try:
            together = plain.merge(server, self._pooled(made.mean(0), apart))
        except (CoterieError, RuntimeError, ValueError, IndexError) as reason:
            raise CoterieError(f"{self.method.name} cannot be private: {reason}") from reason
        if not _alike(moved, together):
            raise CoterieError(
                f"{self.method.name} cannot be private: its server takes more from the updates than their mean."
            )
        if self.training.buffers == "average" and layout.within("buffers"):
            averaged = replace(self.method, aggregator=Mean()).merge(server, apart)
            if not _alike(moved, averaged):
                raise CoterieError(
                    "private does not protect running statistics, which would be averaged; set buffers=local or "
                    "buffers=server, or take a model without them."
                )

    def pool(self, up: Uploads) -> tuple[Uploads, dict[str, Any]]:
        """What `merge` and `report` see of a round's uploads, and numbers for the record. The clip moves on."""
        self._fields(up.tensors)
        streams, clients = _known(self.streams), len(set(up.ids.tolist()))
        if not len(up.update) == len(up.ids) == clients:
            raise CoterieError(
                f"private takes one update from each client, and was given {len(up.update)} from "
                f"{counted(clients, 'client')}."
            )
        spent = self.spent(up.round + 1)
        if self.plan.epsilon is not None and spent > self.plan.epsilon:
            raise CoterieError(f"round {up.round + 1} would exceed the budget of epsilon {self.plan.epsilon:g}.")
        said = {"epsilon": round(spent, 6), **({} if self.plan.quantile is None else {"clip": self.clip})}
        mean, self.clip = self.plan.noisy_mean(
            up.update, self.clip, self.expected, partial(streams.normal, up.round)
        )
        return self._pooled(mean, up), said

    def _fields(self, sent: Mapping[str, Tensor]) -> None:
        """Raise if anything but `update` is uploaded."""
        more = sorted(set(sent) - {"update"})
        if more or "update" not in sent:
            instead = f"use {self.method.private}" if self.method.private else "use another method"
            what = _listed(more) if more else "nothing to average"
            raise CoterieError(
                f"{self.method.name} uploads {what}, which private does not protect: it takes the clients' updates "
                f"alone; {instead}."
            )

    def _pooled(self, mean: Tensor, up: Uploads) -> Pooled:
        one = torch.ones(1, dtype=torch.float64, device=mean.device)
        return Pooled({"update": mean[None]}, up.ids, up.n, one, up.population, up.round, up.layout)


def _named(seed: int, meta: Mapping[str, Any]) -> Streams | None:
    """What names the noise of a run with such a checkpoint; None in one of an earlier version."""
    try:
        return Streams.of(seed, meta[PRIVACY]) if PRIVACY in meta else None
    except (LookupError, TypeError) as reason:
        raise CoterieError("the checkpoint is damaged: it does not say what names the run's noise.") from reason


def _known(streams: Streams | None) -> Streams:
    if streams is None:
        raise CoterieError(
            "the run was begun by an earlier version, whose noise was named otherwise and whose clip was less exact: "
            "it cannot go on, begin a new run. What it holds can still be shown, reported and exported."
        )
    return streams


def _alike(one: Record, other: Record) -> bool:
    """Whether two states are equal up to rounding."""
    a, b = one.tensors(), other.tensors()
    return a.keys() == b.keys() and all(
        a[n].shape == b[n].shape and torch.allclose(a[n].double(), b[n].double(), rtol=1e-4, atol=1e-4) for n in a
    )


def _listed(names: list[str]) -> str:
    quoted = [f"'{name}'" for name in names]
    return "".join(quoted) if len(quoted) < 2 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"
