"""The estimate of a newcomer's score: how far models made again differ."""

import numpy as np
import pytest
import torch

from coterie.contract.net import cross_entropy, squared_error
from coterie.evaluation.score import loss_scale
from coterie.metrics.accuracy import Accuracy
from coterie.serving.estimate import ConstantScore, Estimate, constant_answer, drift, renaming


def test_drift_is_what_samples_of_a_fold_have_in_common():
    """Accuracies 0.5 + u with u of variance 0.01 common to a fold's model, each sample drawn on its own beyond that;
    samples that flip on their own have none."""
    rng = np.random.default_rng(0)
    common = [rng.random((20, 50)) < 0.5 + rng.normal(0, 0.1, (20, 1)) for _ in range(100)]
    alone = [rng.random((20, 50)) < 0.5 for _ in range(100)]
    assert drift([fold.astype(float) for fold in common]) == pytest.approx(0.01, rel=0.15)
    assert drift([fold.astype(float) for fold in alone]) < 2e-4
    assert drift([np.ones((3, 1))]) == 0  # no pair of samples


def test_a_constant_answer_by_hand():
    """1 is three of five labels. It is not taken fold by fold: 0 0 1 | 1 1 would answer 0 and 1 1 1 | 0 0 would answer
    1, all wrong, and on balanced labels every constant would seem worse than a coin. Numbers come from what is kept:
    0 0 9 | 6 6 and 6 6 9 | 0 0 have means 3 and 7 and medians 0 and 6; by the squared error the mean fits what is kept
    best, by the absolute one the median."""
    folds = [(np.array([0, 1, 2]), np.array([3, 4])), (np.array([3, 4, 2]), np.array([0, 1]))]
    classes = constant_answer(torch.tensor([0, 0, 1, 1, 1]), folds, 2, cross_entropy)
    assert classes == ConstantScore("its most frequent class", 0.6)
    y = torch.tensor([0.0, 0.0, 9.0, 6.0, 6.0])
    assert constant_answer(y, folds, 0, squared_error) == ConstantScore("its mean", (2 * 3**2 + 2 * 7**2) / 4)
    absolute = constant_answer(y, folds, 0, lambda o, y: (o[:, 0] - y).abs())
    assert absolute == ConstantScore("its median", (2 * 6 + 2 * 6) / 4)
    both = torch.stack([y, y], 1)
    assert constant_answer(both, folds, 0, squared_error).value == pytest.approx((2 * 3**2 + 2 * 7**2) / 4)


@pytest.mark.parametrize(("scale", "value", "constant", "said"), [
    (Accuracy().scale, 0.2, 0.5, "does better: accuracy 50.0 % against 20.0 %"),
    (Accuracy().scale, 0.5, 0.5, "does as well: accuracy 50.0 % against 50.0 %"),
    (Accuracy().scale, 0.6, 0.5, ""),
    # whoever holds a single class or number is right without a model, and nothing could be better
    (Accuracy().scale, 1.0, 1.0, "All its labels are one class: always answering that would be right as often"),
    (loss_scale(0, "huber"), 0.0, 0.0, "All its numbers to predict are the same"),
    (Accuracy().scale, 0.9, 1.0, "does better"),
    (loss_scale(0, "huber"), 3.0, 1.0, "does better: huber 1.000 against 3.000"),
    (loss_scale(0, "huber"), float("inf"), 1.0, "does better"),
    (loss_scale(0, "huber"), float("nan"), 1.0, "does better"),
    (loss_scale(0, "huber"), 0.5, 1.0, ""),
])
def test_what_is_said_beside_a_constant_answer(scale, value, constant, said):
    found = ConstantScore("its mean", constant).beside(Estimate(scale, value, (0, 1), 1, (0, 1), 10, 10, 0.0))
    assert said in found
    assert bool(found) == bool(said)


SWAPPED, RNG = np.array([0, 0, 1, 1] * 10), np.random.default_rng(0)


@pytest.mark.parametrize(("answers", "labels", "right", "renamed"), [
    (1 - SWAPPED, SWAPPED, 0, 40),  # 'yes' where the run says 'no'
    (np.where(np.arange(60) % 3 == 2, 2, 1 - np.arange(60) % 3), np.arange(60) % 3, 20, 60),  # the third class stays
    (SWAPPED, SWAPPED, None, None),  # right as it is
    (np.ones(40, int), np.repeat([0, 1], [30, 10]), None, None),  # answers nothing else: no name makes it a model
    (np.where(SWAPPED, 1, RNG.random(40) < 0.7).astype(int), np.where(np.arange(40) % 5, 0, SWAPPED), None, None),
    (7 + SWAPPED, SWAPPED, None, None),  # classes that this client does not have: the run never learned its own
    (RNG.integers(0, 10, 60), RNG.integers(0, 10, 60), None, None),  # chance: names found on one half fail on the other
    (1 - SWAPPED[:6], SWAPPED[:6], None, None),  # 6 of 6 may be 54 % (Clopper-Pearson), and a constant has 67
])
def test_labels_of_another_meaning_are_told_from_a_bad_model(answers, labels, right, renamed):
    """The fifth model finds all of class 1 and takes most of the others for it: a threshold, not a name."""
    found = renaming(answers, labels, np.bincount(labels).max() / len(labels))
    if right is None:
        assert found is None
    else:
        assert (found.right, found.renamed, found.n) == (right, renamed, len(labels))
        assert found.names == {0: 1, 1: 0}
