"""What became of a run, stage by stage: it learned something, it learned nothing, it diverged, or it goes on.

Tables, sentences, the page, advice and exports all ask here.

    diverged                      the loss of some client's model is not finite at the round that is reported, or round
                                  0 is reported and later ones diverged
    not finished                  the run goes on, and nothing but round 0 was evaluated, or others are further
    learned nothing               the models before training were the best on validation data, or the mean over clients
                                  is what a constant answer of each client scores
    worse than a constant answer  the mean over clients is worse than that

Several seeds are diverged, or not finished, where one of them is; otherwise their mean decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from coterie.errors import counted
from coterie.evaluation.reading import shortly, unit
from coterie.evaluation.score import Scores
from coterie.evaluation.stages import SEEN
from coterie.running.folder import Folder
from coterie.running.result import Result, When
from coterie.running.untrained import Floats, Level, constant, level

Kind = Literal["", "diverged", "not finished", "learned nothing", "worse than a constant answer"]
"""Empty where there is nothing to say."""
FINE: Kind
DIVERGED: Kind
UNFINISHED: Kind
NOTHING: Kind
WORSE: Kind
FINE, DIVERGED, UNFINISHED, NOTHING, WORSE = get_args(Kind)


@dataclass(frozen=True)
class Outcome:
    """What became of the runs of one method in one stage, one run a seed."""

    kind: Kind = FINE
    seeds: int = 1
    hit: int = 0  # seeds that diverged, at the round reported or later
    clients: int = 0  # whose loss is not finite: the most of a seed
    of: int = 0
    since: int = 0  # the first evaluated round that found such
    later: bool = False  # whether the round that is reported lies before it in every seed
    untrained: int = 0  # seeds of which round 0 is reported, without a single step of training
    early: int = 0  # seeds of which round 0 is reported after local training
    behind: int = 0  # seeds that are not finished, and of which only round 0 was evaluated or others are further
    reached: int = 0  # the round of the furthest of these
    furthest: int = 0  # and that of all runs that it is compared with
    beaten: str = ""  # the constant answer that is not beaten, with its score

    @property
    def words(self) -> str:
        """A clause that follows the name of the method, empty where there is nothing to say."""
        if self.kind == UNFINISHED:
            some = f" in {self.behind} of {self.seeds} seeds" if self.seeds > 1 else ""
            if not self.reached:
                return f"did no round of training so far{some}: only round 0 was evaluated"
            return f"reached round {self.reached} so far{some}, and others round {self.furthest}"
        if self.kind == DIVERGED or self.later:
            lost = f"the loss of {self.clients} of {counted(self.of, 'client')} is not finite since round {self.since}"
            some = f" in {self.hit} of {self.seeds} seeds" if self.seeds > 1 else ""
            first = self.untrained + self.early == self.seeds
            shown = "round 0, before the first round of training" if first else "an earlier round"
            return f"diverged{some}: {lost}" + (f"; its numbers are of {shown}" if self.later else "")
        if self.untrained:
            some = f" in {self.untrained} of {self.seeds} seeds" if self.seeds > 1 else ""
            return f"learned nothing{some}: the models before training, round 0, were the best on validation data"
        if self.kind == NOTHING:
            return f"learned nothing: {self.beaten} scores as well"
        if self.kind == WORSE:
            return f"scored worse than {self.beaten}"
        if self.early:
            some = f" in {self.early} of {self.seeds} seeds" if self.seeds > 1 else ""
            all_agree = ": the rounds taught nothing that local training alone did not"
            return f"did best at round 0 on validation data{some}{all_agree if self.early == self.seeds else ''}"
        return ""


def outcome(
    runs: Sequence[Result], stage: str, when: When = "chosen", against: Level | None = None, furthest: int = 0
) -> Outcome:
    """Of the runs of one method, one a seed; `against` is what constant answers score, if that is known already, and
    `furthest` the last round evaluated of the runs that they are compared with."""
    against = against or level(runs, runs[0].at(stage, when).scale)
    each = [_course(run, stage, when) for run in runs]
    values = _over_seeds([run.at(stage, when) for run in runs])
    furthest = max(furthest, *(run.reached for run in runs))
    behind = [run.reached for run in runs if not run.finished and run.reached < max(furthest, 1)]
    found = Outcome(
        seeds=len(runs), hit=sum(one.hit for one in each), clients=max(one.clients for one in each),
        of=max(one.of for one in each), since=min((one.since for one in each if one.hit), default=0),
        later=any(one.hit for one in each) and all(one.later for one in each if one.hit),
        untrained=sum(one.untrained for one in each), early=sum(one.early for one in each),
        behind=len(behind), reached=max(behind, default=0), furthest=furthest,
    )
    if found.hit and (not found.later or found.untrained or found.early):
        return replace(found, kind=DIVERGED)
    if found.behind:
        return replace(found, kind=UNFINISHED)
    if found.untrained == found.seeds:
        return replace(found, kind=NOTHING)
    kind, beaten = _beside(values, against, runs[0].at(stage, when))
    return replace(found, kind=kind, beaten=beaten)


def diverged(result: Result) -> bool:
    """Whether a run is called diverged: in some stage, at the round chosen or at the last one, the loss of some client
    is not finite."""
    return any(bool(result.at(stage, when).diverged.any()) for stage in result.stages for when in get_args(When))


def _course(run: Result, stage: str, when: When) -> Outcome:
    """Of one seed, as far as no constant answer is needed for it."""
    t, shown = run.round_of(stage, when), run.at(stage, when)
    now, last = shown.diverged, run.at(stage, "last").diverged
    worst = now if now.any() else last
    since = next((e.round for e in run.history if stage in e.stages and e.stages[stage].diverged.any()), 0)
    steps = bool((shown.steps > 0).any())
    return Outcome(
        hit=int(worst.any()), clients=int(worst.sum()), of=len(worst), since=since,
        later=bool(worst.any() and not now.any()), untrained=int(t == 0 and not steps), early=int(t == 0 and steps),
    )


def _over_seeds(scores: Sequence[Scores]) -> Floats:
    """The metric `[seeds, clients]` by the clients' numbers, NaN where there is none."""
    table = np.full((len(scores), 1 + max(int(one.clients.max(initial=-1)) for one in scores)), np.nan)
    for line, one in zip(table, scores, strict=True):
        line[one.clients] = one.counted(one.test)
    return table


def _beside(values: Floats, against: Level | None, scores: Scores) -> tuple[Kind, str]:
    """The kind, and the constant answer that is not beaten, of values `[seeds, clients]`."""
    scale = scores.scale
    found = gap(values, against, scale.sign) if against is not None else None
    if found is None or against is None:
        return FINE, ""
    ahead, guess = found
    said = f"{against.words} ({shortly(scale, guess)}{unit(scale)})"
    if ahead < -against.slack:
        return WORSE, said
    if not against.perfect and (ahead <= against.slack or constant(values, against)):
        return NOTHING, said
    return FINE, ""


def gap(values: Floats, against: Level, sign: int) -> tuple[float, float] | None:
    """How far the mean over seeds and clients is ahead of constant answers, and what these score.

    Over the clients of which both are known; None where there is none.
    """
    clients = min(values.shape[1], len(against.own))
    with np.errstate(invalid="ignore"):
        means = np.array([line[~np.isnan(line)].mean() if (~np.isnan(line)).any() else np.nan
                          for line in values[:, :clients].T])
    guess = against.own[:clients]
    both = np.isfinite(guess) & np.isfinite(means)
    if not both.any():
        return None
    return float(sign * (means[both] - guess[both]).mean()), float(guess[both].mean())


def warnings_of(folder: Folder, stages: Sequence[str] = SEEN, when: When = "chosen") -> list[str]:
    """The same of a run folder; nothing before its first evaluation."""
    return said_of(folder.result(), stages, when) if folder.history() else []


def said_of(result: Result, stages: Sequence[str] = SEEN, when: When = "chosen") -> list[str]:
    """A sentence for each of these stages of one run of which there is something to say, at that round."""
    found = {stage: outcome([result], stage, when) for stage in stages if stage in result.stages}
    texts = {stage: one.words for stage, one in found.items() if one.kind or one.later}
    if len(set(texts.values())) == 1 and len(texts) > 1:
        return [f"{result.method} {next(iter(texts.values()))}."]
    return [f"{result.method} ({stage}) {text}." for stage, text in texts.items()]
