"""Churn: which clients are there in which rounds. A schedule comes from a csv file or from a recipe with a seed."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from coterie import streams
from coterie.data.federation import Federation
from coterie.errors import CoterieError, unknown
from coterie.files import opened
from coterie.options import build, split_options

NEVER = 2**31 - 1
"""The round in which clients leave that stay to the end."""
COLUMNS = ("client", "arrives", "leaves")

Times = tuple[int, int]


@dataclass(frozen=True)
class Random:
    """`random:rate=0.1,...`: clients arrive and leave by chance, each by a stream of its own."""

    rate: float = 0.1
    """Probability that a client which is not there yet arrives, round by round."""
    leave: float = 0.01
    """Probability that a client which is there leaves after a round; it does not come back."""
    start: float = 0.5
    """Share of the clients that are there from the beginning, at least one."""
    seed: int = 0
    """Names the streams. It is not the run's seed: all seeds of a comparison see the same clients."""

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise CoterieError(f"churn's rate must be above 0 and at most 1, not {self.rate}.")
        if not 0 <= self.leave < 1:
            raise CoterieError(f"churn's leave must be at least 0 and below 1, not {self.leave}.")
        if not 0 < self.start <= 1:
            raise CoterieError(f"churn's start must be above 0 and at most 1, not {self.start}.")

    def times(self, names: Sequence[str]) -> dict[str, Times]:
        """Round of arrival and of leaving by client: both waits are geometric."""
        numbers = torch.from_numpy(streams.integers("client", list(names)))
        first, wait, stay = (_uniform(streams.key(self.seed, numbers, f"churn {what}")) for what in
                             ("start", "arrive", "leave"))
        there = np.argsort(first, kind="stable")[: max(1, round(self.start * len(names)))]
        arrives = 1 + _geometric(wait, self.rate)
        arrives[there] = 0
        leaves = np.minimum(arrives + 1 + _geometric(stay, self.leave), NEVER)
        return {name: (int(a), int(b)) for name, a, b in zip(names, arrives, leaves, strict=True)}


def _uniform(keys: torch.Tensor) -> NDArray[np.float64]:
    """On (0, 1], one for each key."""
    bits: NDArray[np.int64] = keys.numpy()
    return ((bits & ((1 << 53) - 1)) + 1) / float(1 << 53)


def _geometric(chance: NDArray[np.float64], rate: float) -> NDArray[np.int64]:
    """Failures before the first success of probability `rate`: floor(log u / log(1 - rate)), at most NEVER // 2."""
    if rate in (0, 1):
        return np.full(len(chance), NEVER // 2 if rate == 0 else 0, dtype=np.int64)
    return np.minimum(np.floor(np.log(chance) / math.log1p(-rate)), NEVER // 2).astype(np.int64)


def read(path: Path) -> dict[str, Times]:
    """A csv file with the columns client, arrives, leaves: rounds, where nothing means from the start or to the end."""
    try:
        with opened(path, newline="") as file:
            lines = list(csv.reader(file))
    except OSError as reason:
        raise CoterieError(f"the churn file {path} cannot be read: {reason.strerror}.") from reason
    except (UnicodeDecodeError, csv.Error) as reason:
        raise CoterieError(f"the churn file {path} is not a csv file: {reason}.") from reason
    if not lines or tuple(word.strip() for word in lines[0]) != COLUMNS:
        found = ",".join(lines[0])[:80] if lines else "nothing"
        raise CoterieError(f"the churn file {path} must begin with the line {','.join(COLUMNS)}, not '{found}'.")
    times: dict[str, Times] = {}
    for number, line in enumerate(lines[1:], 2):
        if not any(word.strip() for word in line):
            continue
        if len(line) != len(COLUMNS):
            raise CoterieError(f"{path}, line {number}: {len(line)} values, but the columns are {','.join(COLUMNS)}.")
        name, arrives, leaves = (word.strip() for word in line)
        if name in times:
            raise CoterieError(f"{path}, line {number}: client '{name}' is named twice; it comes and goes once.")
        times[name] = (_round(arrives, 0, path, number), _round(leaves, NEVER, path, number))
    return times


def _round(text: str, default: int, path: Path, line: int) -> int:
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and int(text[:12]) <= NEVER and len(text) <= 12):
        raise CoterieError(f"{path}, line {line}: '{text[:40]}' is no round; write a whole number from 0, or nothing.")
    return int(text)


def scheduled(federation: Federation, spec: str) -> Federation:
    """The federation with the schedule that `spec` describes: `random:rate=0.1`, or the path of a csv file.

    Training clients are numbered anew by their arrival, so those that are known at any time are the first ones.
    """
    names = federation.names[: federation.population]
    kind, _, rest = spec.partition(":")
    if kind == "random":
        times = build(Random, split_options(rest, spec), "churn").times(names)
    elif spec.endswith(".csv"):
        times = read(Path(spec))
    else:
        raise unknown("churn", spec, ("random:rate=0.1", "<file>.csv"))
    return with_times(federation, times, {"churn": spec})


def with_times(federation: Federation, times: Mapping[str, Times], recipe: dict[str, Any] | None = None) -> Federation:
    """The federation whose clients, by name, are there from the round `arrives` until before the round `leaves`."""
    names = federation.names[: federation.population]
    for name, (arrives, leaves) in times.items():
        if name not in names:
            if name in federation.names:
                raise CoterieError(f"client '{name}' is unseen, so it neither arrives nor leaves during training.")
            raise unknown("client in the churn", name, names)
        if not 0 <= arrives < leaves:
            raise CoterieError(f"client '{name}' leaves in round {leaves} but arrives in round {arrives}.")
    schedule = np.array([times.get(name, (0, NEVER)) for name in names], dtype=np.int64)  # [population, 2]
    if schedule[:, 0].min() > 0:
        raise CoterieError(f"no client is there at the beginning; the first arrives in round {schedule[:, 0].min()}.")
    order = np.argsort(schedule[:, 0], kind="stable")
    everyone = np.concatenate([order, federation.unseen])
    return replace(
        federation, bounds=federation.bounds[everyone], names=tuple(federation.names[i] for i in everyone),
        schedule=schedule[order], recipe={**federation.recipe, **(recipe or {})},
    )


def require_somebody(federation: Federation, rounds: int) -> None:
    """Raise if a round of training, or the evaluation after it, would find nobody."""
    if federation.schedule is None:
        return
    moments = {0, *federation.schedule[:, 1].tolist()}  # the number of clients falls in these alone
    for t in sorted(m for m in moments if m <= rounds):
        if not len(federation.there(t)):
            raise CoterieError(f"nobody is there in round {t}: the last client has left; let one stay, or train less.")
