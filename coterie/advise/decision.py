"""From measured numbers to advice: a pure function. It sees validation scores only; test scores are merely quoted.

Candidates are compared by the value they have for the user, a mean over clients. The noise of a difference is its
standard deviation over bootstrap draws of clients and seeds, the same draws for both. The advice is the simplest
candidate within one standard error of the best that none as simple beats; a lead of more than two is beyond noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from coterie.advise.shift import PullClusters, Shift
from coterie.contract.metric import Scale
from coterie.errors import CoterieError
from coterie.evaluation.stages import ADAPTED
from coterie.running.untrained import slack

Array = np.ndarray[Any, np.dtype[np.float64]]
Newcomers = Literal["none", "some", "often"]
Objective = Literal["mean", "worst"]

WEIGHT: dict[str, float] = {"none": 0.0, "some": 0.25, "often": 0.75}
"""How much of a candidate's value is what clients get that took no part in training."""
DRAWS = 1000


@dataclass(frozen=True)
class Candidate:
    """One method in one stage. Scores are validation scores, larger is better; NaN for clients without such data."""

    method: str
    stage: str  # served or adapted
    way: str
    seen: Array  # [seeds, clients]
    new: Array  # [seeds, newcomers], maybe none
    test: float  # mean over clients of the test metric, for people to read
    worst: float  # the worst client's
    new_test: float  # mean over newcomers
    bytes_each_round: float  # per client, both ways
    seconds: float = 0.0
    lost: str = ""  # that it diverged or learned nothing, in words; it is then no candidate

    @property
    def label(self) -> str:
        return f"{self.method} + fine-tune" if self.stage == ADAPTED else self.method


@dataclass(frozen=True)
class Findings:
    """All that the advice depends on. Candidates are ordered from the simplest to the most involved."""

    candidates: tuple[Candidate, ...]
    shift: Shift
    clusters: PullClusters
    clients: int
    newcomers_held_out: int
    samples: tuple[int, int]  # training samples of a client: the least and the median
    metric: Scale  # of what decides
    newcomers: Newcomers
    objective: Objective
    guess: Array | None = None  # [clients]
    """What a constant answer scores on the validation data of each client that trains, larger is better; None where
    that is not known."""
    guessing: str = "always answering the client's most frequent class"
    """The words for it."""
    validation: int | None = None  # validation samples of the median client
    classes: bool = True  # whether the targets are classes
    scaled: bool = False  # whether columns of numbers were scaled when they were read

    @property
    def judged(self) -> bool:
        """Whether any newcomer has a validation score; few samples may leave none for validation."""
        return any(bool((~np.isnan(c.new)).any()) for c in self.candidates)

    @property
    def weight(self) -> float:
        """How much of a candidate's value is what newcomers get."""
        return WEIGHT[self.newcomers] if self.newcomers_held_out and self.judged else 0.0


@dataclass(frozen=True)
class Standing:
    """Where a candidate stands: its value, how far it is behind the best, and the standard error of that."""

    candidate: Candidate
    value: float
    behind: float
    error: float

    @property
    def close(self) -> bool:
        return self.behind <= self.error

    @property
    def noise(self) -> float:
        """What it must be behind by to be so beyond noise."""
        return 2 * self.error

    @property
    def beyond_noise(self) -> bool:
        return self.behind > self.noise


@dataclass(frozen=True)
class Advice:
    """What to take. `standings` are in the candidates' order."""

    chosen: Standing
    best: Standing
    standings: tuple[Standing, ...]
    local: Literal["too small", "as good", "enough"]
    """Local against the best that is shared, for the clients that train, beyond noise: worse, neither, better."""
    for_newcomers: Standing | None
    """The candidate newcomers alone would choose, where that is beyond noise better for them than the chosen one."""
    new_behind: float
    """How far the chosen one is then behind it, for newcomers."""
    learned: bool = True
    """Whether any candidate is better than a constant answer of each client, by a standard error and not by rounding
    alone."""

    @property
    def way(self) -> str:
        return self.chosen.candidate.way


def decide(findings: Findings) -> Advice:
    """The advice, by `_simplest`."""
    if findings.guess is not None and np.isnan(findings.guess).all():  # what a constant answer would score there
        raise CoterieError("no client that trains has a sample for validation, so nothing can be compared; hold out a "
                           "larger share (val=0.3) or bring more samples.")
    standings = _standings(findings.candidates, findings.weight, findings.objective)
    if not standings:
        raise CoterieError("no method of the pilot can be advised: each diverged or was best before its first round; "
                           "lower the learning rate (--set lr=...)"
                           + ("." if findings.scaled else " or scale the inputs (scale=true for tables)."))
    best = max(standings, key=lambda one: one.value)
    chosen = _simplest(standings)
    rival, lag = None, 0.0
    if findings.newcomers_held_out and findings.judged:
        ranked = _standings(findings.candidates, 1.0, findings.objective)
        same = next((one for one in ranked if one.candidate is chosen.candidate), None)
        if same is not None and same.beyond_noise:
            rival, lag = _simplest(ranked), same.behind
    top = max((one.candidate for one in standings), key=mean_seen)
    return Advice(chosen, best, tuple(standings), _alone(findings), rival, lag, _learned(top, findings))


def _simplest(standings: Sequence[Standing]) -> Standing:
    """The first within one standard error of the best that nothing before it and nothing of its own way beats.

    Without the second half much noise would be an advantage: who is far behind and noisy is still within one error.
    """
    def beaten(place: int, one: Standing) -> bool:
        return any(other.value > one.value and (k < place or other.candidate.way == one.candidate.way)
                   for k, other in enumerate(standings))

    return next(one for k, one in enumerate(standings) if one.close and not beaten(k, one))


def mean_seen(candidate: Candidate) -> float:
    """Its validation score, mean over seeds and the clients that train."""
    return float(np.nanmean(candidate.seen))


def apart(one: Candidate, other: Candidate) -> Standing:
    """The worse of two for the clients that train: how far it is behind the other, and the standard error of that."""
    return max(_standings([one, other], 0.0, "mean"), key=lambda standing: standing.behind)


def _standings(candidates: Sequence[Candidate], weight: float, objective: Objective) -> list[Standing]:
    """Candidates with finite scores that learned something, against the best of them, in the order given."""
    fine = [c for c in candidates if not c.lost and _finite(c.seen) and (not weight or _finite(c.new))]
    if not fine:
        return []
    seeds = np.arange(len(fine[0].seen))
    clients, newcomers = _scored([c.seen for c in fine]), _scored([c.new for c in fine])
    rng = np.random.default_rng(0)
    drawn = [among[rng.integers(0, len(among), (DRAWS, len(among)))] if len(among) else np.zeros((DRAWS, 0), int)
             for among in (seeds, clients, newcomers)]
    exact = [among[None] for among in (seeds, clients, newcomers)]

    def values(c: Candidate, rows: list[np.ndarray[Any, np.dtype[np.int64]]]) -> Array:
        total = (1 - weight) * _over_clients(c.seen, rows[0], rows[1], objective) if weight < 1 else 0.0
        if weight:
            total = total + weight * _over_clients(c.new, rows[0], rows[2], objective)
        return np.asarray(total)

    found = [(c, float(values(c, exact)[0])) for c in fine]
    top, high = max(found, key=lambda one: one[1])
    reference = values(top, drawn)
    return [
        Standing(c, value, high - value, 0.0 if c is top else float(np.nanstd(reference - values(c, drawn))))
        for c, value in found
    ]


def _scored(scores: Sequence[Array]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The clients that have a score of every candidate in every seed, from `[S, m]` of each; where nobody has, those
    that have any. Draws are made among them: one of clients without scores alone would have no mean."""
    held = ~np.isnan(np.stack(scores))  # [candidates, S, m]
    always = np.flatnonzero(held.all((0, 1)))
    return always if len(always) else np.flatnonzero(held.any((0, 1)))


def _finite(scores: Array) -> bool:
    """Whether a mean over clients can be taken: somebody has a score, and nobody an infinite one."""
    return bool((~np.isnan(scores)).any() and not np.isinf(scores).any())


def _over_clients(
    scores: Array, seeds: np.ndarray[Any, Any], clients: np.ndarray[Any, Any], objective: Objective
) -> Array:
    """`[S, m]`, draws of seeds `[B, S]` and of clients `[B, n]` -> `[B]`: mean, or mean of the worst tenth, of the
    clients' means over the seeds in which they have a score."""
    count = np.stack([(seeds == s).sum(1) for s in range(len(scores))], 1).astype(float)  # [B, S]
    held = ~np.isnan(scores)
    times = count @ held
    means = np.where(times > 0, count @ np.where(held, scores, 0) / np.maximum(times, 1), np.nan)  # [B, m]
    each = np.sort(np.take_along_axis(means, clients, 1), 1)  # NaN last
    there = (~np.isnan(each)).sum(1)
    least = there if objective == "mean" else np.minimum(there, max(1, clients.shape[1] // 10))
    counted = np.arange(each.shape[1]) < least[:, None]
    return np.asarray(np.where(counted, each, 0).sum(1) / np.where(least, least, np.nan))


def _learned(top: Candidate, findings: Findings) -> bool:
    """Whether the best for the clients that train is more than noise, and than the rounding of float32, above a
    constant answer for each of them."""
    guess = findings.guess
    if guess is None:
        return True
    constant = replace(top, method="guess", seen=np.broadcast_to(guess, top.seen.shape))
    least = slack(findings.metric, guess)
    standings = _standings([constant, top], 0.0, "mean")
    return any(one.candidate is constant and one.behind > max(one.error, least) for one in standings)


def _alone(findings: Findings) -> Literal["too small", "as good", "enough"]:
    """Whether clients have enough data to learn alone, judged by the clients that trained."""
    fine = [c for c in findings.candidates if not c.lost and _finite(c.seen)]
    local, others = [c for c in fine if c.way == "local"], [c for c in fine if c.way != "local"]
    if not local or not others:
        return "as good"
    better = max(others, key=mean_seen)
    ranked = _standings([*local, better], 0.0, "mean")
    for one in ranked:
        if one.beyond_noise:
            return "too small" if one.candidate.way == "local" else "enough"
    return "as good"
