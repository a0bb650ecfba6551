"""How good a newcomer's model will be: cross-validation, whether to adapt, and the estimate with its intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from coterie.contract.metric import Scale
from coterie.contract.net import Net, PerSample
from coterie.data import groups
from coterie.data.partition import Ints
from coterie.evaluation import intervals
from coterie.evaluation.reading import shortly, unit
from coterie.metrics.accuracy import Accuracy, right
from coterie.metrics.regression import MAE, MSE
from coterie.running.untrained import EXACT, slack

FOLDS = 10
"""Of the cross-validation behind the estimate; as many as samples where those are fewer."""
REPLICAS = 3
"""Models a fold makes, with other orders of batches and other validation samples: one of them is counted, all of them
show how far a model that is made again differs."""
INNER = 5
"""Folds of the comparison that decides whether to adapt."""

Array = np.ndarray[Any, np.dtype[np.float64]]
Adapt = Literal["auto", "yes", "no"]
Fold = tuple[Ints, Ints]
"""Sample numbers kept for everything that makes a model, and those held out to score it."""


def cut(samples: Ints, folds: int, rng: np.random.Generator, group: Ints | None = None) -> list[Fold]:
    """The folds of a cross-validation; no fold is empty, and a `group` of samples is in one, if there are several."""
    pieces = np.array_split(rng.permutation(samples), min(folds, len(samples)))
    if group is not None and len(np.unique(group[samples])) > 1:
        pieces = groups.folds(samples, group, folds, rng)
    return [
        (np.concatenate([piece for j, piece in enumerate(pieces) if j != k]), held) for k, held in enumerate(pieces)
    ]


def held_out(net: Net, row: Tensor, x: Tensor, y: Tensor) -> Held:
    """Samples by the model of a row `[D]`."""
    with torch.no_grad():
        outputs = net(row, x)
        loss = net.task.told(outputs, y)
    correct = right(outputs, y) if net.task.classes else torch.zeros(len(x))
    answer = outputs.argmax(-1) if net.task.classes else torch.zeros(len(x), dtype=torch.int64)
    answer[outputs.flatten(1).isnan().any(1)] = -1
    return Held(correct.double().cpu().numpy(), loss.double().cpu().numpy(), answer.cpu().numpy())


@dataclass(frozen=True)
class Held:
    """Held-out samples: whether each was predicted correctly (0 or 1), its loss, and the class answered, -1 where the
    outputs are no numbers, `[h]`."""

    right: Array
    loss: Array
    answer: Ints

    @classmethod
    def of(cls, parts: Iterable[Held]) -> Held:
        """All of them together."""
        right, loss, answer = zip(*((part.right, part.loss, part.answer) for part in parts), strict=True)
        return cls(np.concatenate(right), np.concatenate(loss), np.concatenate(answer))

    @property
    def rank(self) -> tuple[float, float]:
        """Higher is better: correct samples, then the loss."""
        return float(self.right.sum()), -float(self.loss.sum())

    def facts(self) -> dict[str, Any]:
        loss = float(self.loss.mean())  # null where it diverged: json has no NaN
        return {"n": len(self.loss), "correct": int(self.right.sum()), "loss": loss if math.isfinite(loss) else None}


@dataclass(frozen=True)
class Decision:
    """Whether to adapt, and the cross-validation that says so: served and adapted; none where it was not asked."""

    adapt: bool
    served: Held | None = None
    adapted: Held | None = None


def decide(folds: Sequence[tuple[Held, Held]], adapt: Adapt) -> Decision:
    """To adapt where that gives more correct held-out samples, or as many and a smaller loss."""
    if not folds:
        return Decision(adapt == "yes")
    served, adapted = (Held.of(both[stage] for both in folds) for stage in (0, 1))
    return Decision(adapted.rank > served.rank, served, adapted)


@dataclass(frozen=True)
class Estimate:
    """What the model scores on samples it has not seen, counted by cross-validation on the newcomer's `n` samples."""

    scale: Scale  # of accuracy, or of the run's loss where it predicts numbers
    value: float
    interval: tuple[float, float]  # for the metric on `future` further samples of this client, at intervals.LEVEL
    future: int
    confidence: tuple[float, float]  # for the metric on endlessly many
    n: int
    folds: int
    drift: float  # standard deviation between models made again from samples like these

    @property
    def metric(self) -> str:
        """Its name."""
        return self.scale.name


def drift(folds: Sequence[Array]) -> float:
    """tau^2: how much the mean of a model's scores varies when it is made again, beyond what each sample does alone.

    `folds` hold the scores `[replicas, h]` of a fold's held-out samples. tau^2 is the mean covariance, over replicas,
    of two different samples of a fold (never below 0): Var(sum) = sum of variances + sum of covariances.
    """
    found = pairs = 0.0
    for scores in folds:
        found += float(scores.sum(1).var(ddof=1) - scores.var(0, ddof=1).sum())
        pairs += scores.shape[1] * (scores.shape[1] - 1)
    return max(found / pairs, 0.0) if pairs else 0.0


def estimated(folds: Sequence[Sequence[Held]], future: int, classes: bool, loss: Scale) -> Estimate:
    """From every fold's replicas: the first ones are counted, all of them give tau^2; `loss` is how a loss is read.

    The model handed out is one more draw, and the estimate the mean of as many draws as folds: tau^2 (1 + 1 / folds).
    """
    counted = Held.of(replicas[0] for replicas in folds)
    n = len(counted.loss)
    stacked = [np.stack([one.right if classes else one.loss for one in replicas]) for replicas in folds]
    extra = drift(stacked) * (1 + 1 / len(folds))
    if classes:
        correct = int(counted.right.sum())
        worth = intervals.worth(correct, n, extra)
        k = correct * worth / n
        interval, confidence = intervals.predictive(k, worth, future), intervals.clopper_pearson(k, worth)
        return Estimate(Accuracy().scale, correct / n, interval, future, confidence, n, len(folds), extra**0.5)
    mean, deviation = float(counted.loss.mean()), float(counted.loss.std(ddof=1))
    interval, endless = (intervals.mean_predictive(mean, deviation, n, m, extra) for m in (future, 0))
    return Estimate(loss, mean, interval, future, endless, n, len(folds), extra**0.5)


# -- beside a constant answer ------------------------------------------------------------------------------------------


CENTRES = {"mean": MSE(), "median": MAE()}
"""Constant answers for numbers, by the metric that likes each best."""


@dataclass(frozen=True)
class ConstantScore:
    """What answering without a look at the input scores on the samples of the estimate, and the words for it."""

    words: str
    value: float

    def beside(self, estimate: Estimate) -> str:
        """A sentence where the model is not better than that, which it may be where all labels are the same."""
        scale = estimate.scale
        ahead = scale.sign * (estimate.value - self.value)
        near = slack(scale, np.array([self.value]))
        perfect = self.value >= 1 - EXACT if scale.percent else self.value == 0
        if ahead > near:
            return ""
        if perfect and abs(ahead) <= near:
            if scale.percent:
                return ("All its labels are one class: always answering that would be right as often, so the estimate "
                        "does not say whether the model tells classes apart.")
            return ("All its numbers to predict are the same: always answering that would be as good, so the estimate "
                    "does not say how well the model tells others.")
        does = "as well" if abs(ahead) <= near else "better"
        mine, other = (f"{shortly(scale, value)}{unit(scale)}" for value in (estimate.value, self.value))
        return (f"A constant answer ({self.words}) does {does}: {scale.title} {other} against {mine} on the same "
                "held-out samples, so this model is of no use to it as it is.")


def constant_answer(y: Tensor, folds: Sequence[Fold], classes: int, scored: PerSample) -> ConstantScore:
    """That of targets `y [n, ...]`.

    Of classes it is the most frequent one of all samples, by accuracy: fold by fold, of balanced classes the one that
    is held out would be the rarer among those kept, and the answer worse than any constant. Of numbers it is their
    mean or their median, whichever has the smaller loss on the samples kept, summed over the folds, scored on those
    held out.
    """
    if classes:
        counts = np.bincount(y.cpu().numpy(), minlength=classes)
        return ConstantScore("its most frequent class", float(counts.max() / counts.sum()))
    totals = {word: np.zeros(2) for word in CENTRES}  # loss on samples kept, and on those held out
    for part in folds:
        known = y[torch.from_numpy(part[0])].double()
        for word, metric in CENTRES.items():
            centre = metric.centre(known)
            for side, samples in enumerate(part):
                targets = y[torch.from_numpy(samples)].double()
                answers = centre.expand(len(targets), *(centre.shape or (1,)))
                totals[word][side] += float(scored(answers, targets).sum())
    best = min(CENTRES, key=lambda word: totals[word][0])
    return ConstantScore(f"its {best}", float(totals[best][1] / sum(len(held) for _, held in folds)))


# -- under other names -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Renaming:
    """How many of n samples a model is right about, and would be if the classes it answers had the names of others."""

    right: int
    renamed: int
    n: int
    names: dict[int, int]  # the class answered, and the label that stands for it

    def said(self, class_names: Sequence[str], most: int = 3) -> str:
        """A sentence with the classes as the run calls them."""
        def called(number: int) -> str:
            return f"'{class_names[number]}'" if class_names else str(number)

        pairs = [f"{called(label)} where the run says {called(answer)}" for answer, label in self.names.items()]
        more = [f"{len(pairs) - most} more"] if len(pairs) > most else []
        return (f"The run's model is right about {self.right} of its {self.n} samples as they are labelled, and about "
                f"{self.renamed} if it has {', '.join([*pairs[:most], *more])}: labels of another meaning?")


def renaming(answers: Ints, labels: Ints, constant: float) -> Renaming | None:
    """Where answers `[n]` are right no more often than a `constant` one, a share, but under other names of the classes
    more often than that by more than noise.

    A class answered gets the name of the most frequent label there, if the client has samples of that class at all. For
    the count, each half of the samples takes the names that the other half says.
    """
    held, halves = set(labels.tolist()), (slice(0, None, 2), slice(1, None, 2))
    n, right = len(labels), int((answers == labels).sum())
    renamed = 0
    for mine, known in (halves, halves[::-1]):
        names = _names(answers[known], labels[known], held)
        renamed += sum(names.get(a) == label for a, label in zip(answers[mine].tolist(), labels[mine].tolist()))
    if right > constant * n or intervals.clopper_pearson(renamed, n)[0] <= constant:
        return None
    moved = {answer: label for answer, label in _names(answers, labels, held).items() if answer != label}
    return Renaming(right, renamed, n, moved)


def _names(answers: Ints, labels: Ints, held: set[int]) -> dict[int, int]:
    """Each class of `held` that is answered, and its most frequent label."""
    return {int(a): int(np.bincount(labels[answers == a]).argmax()) for a in np.unique(answers) if int(a) in held}
