"""Every metric beside scikit-learn, on random clients that may lack classes or have one sample, batch by batch."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from scipy.special import expit, log_softmax, logsumexp, softmax
from sklearn import metrics as sk
from sklearn.calibration import calibration_curve

from coterie import registry
from coterie.contract.metric import sums_of, tallied
from coterie.contract.net import cross_entropy, loss_name, squared_error
from coterie.metrics.confusion import ByLabelAndAnswer
from coterie.metrics.loss import Loss

CASES = 200
EXACT = 1e-9


def drawn(seed, classes=None, calibrated=False, most=400):
    """One client's outputs and labels: few classes or many, often not all of them, sometimes a single sample.

    Calibrated labels are drawn from the softmax of the outputs.
    """
    rng = np.random.default_rng(seed)
    k = classes or int(rng.integers(2, 12))
    n = int(rng.integers(1, most))
    outputs = rng.normal(size=(n, k)) * rng.uniform(0.2, 4)
    if calibrated:
        y = np.array([rng.choice(k, p=p) for p in softmax(outputs, 1)])
    else:
        held = rng.choice(k, size=rng.integers(1, k + 1), replace=False)  # the others are absent
        y = rng.choice(held, size=n)
    return outputs, y


def valued(metric, outputs, y):
    """The metric's value and bound, its sums added up over batches with padding, as an engine adds them."""
    outputs, y = torch.from_numpy(outputs), torch.from_numpy(y)
    total = {}
    for first in range(0, len(y), 64):
        some, labels = outputs[first : first + 64], y[first : first + 64]
        padded = torch.cat([some, some[:1] + 3]), torch.cat([labels, labels[:1]])
        weight = torch.cat([torch.ones(len(some)), torch.zeros(1)])
        for name, t in tallied([metric], *padded, weight).items():
            total[name] = total.get(name, 0) + t
    sums = sums_of(metric, total)
    return metric.value(sums).numpy(), metric.bound(sums).numpy()


def quiet(function, *given, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*given, **options)


def odds(outputs):
    """log(p / (1 - p)) of each class, from the definition, one logsumexp over the other classes each."""
    k = outputs.shape[1]
    return np.stack([outputs[:, i] - logsumexp(np.delete(outputs, i, 1), axis=1) for i in range(k)], 1)


def one_against_rest(score):
    """The mean of scikit-learn's binary score over the classes that are there and not alone; of two classes, of 1."""

    def found(outputs, y):
        z = odds(outputs)
        classes = [1] if z.shape[1] == 2 else range(z.shape[1])
        values = [score(y == k, z[:, k]) for k in classes if 0 < (y == k).sum() < len(y)]
        return np.mean(values) if values else np.nan

    return found


def calibration_error(outputs, y):
    p = softmax(outputs, 1)
    right, confidence = p.argmax(1) == y, p.max(1)
    share, mean = calibration_curve(right, confidence, n_bins=15)
    counts = np.histogram(-confidence, -np.linspace(0, 1, 16)[::-1])[0][::-1]  # borders belong to the lower bin
    return (np.abs(share - mean) * counts[counts > 0]).sum() / len(y)


ON_CLASSES = {
    "accuracy": lambda z, y: sk.accuracy_score(y, z.argmax(1)),
    "balanced_accuracy": lambda z, y: quiet(sk.balanced_accuracy_score, y, z.argmax(1)),
    "f1": lambda z, y: sk.f1_score(y, z.argmax(1), average="macro", zero_division=0),
    "weighted_f1": lambda z, y: sk.f1_score(y, z.argmax(1), average="weighted", zero_division=0),
    "top_k(k=1)": lambda z, y: sk.accuracy_score(y, z.argmax(1)),
    "nll": lambda z, y: sk.log_loss(y, softmax(z, 1), labels=np.arange(z.shape[1])),
    "ece": calibration_error,
}


@pytest.mark.parametrize("spec", ON_CLASSES)
def test_metrics_of_classes_are_scikit_learns(spec):
    metric = registry.metric(spec)
    for seed in range(CASES):
        outputs, y = drawn(seed)
        value, bound = valued(metric, outputs, y)
        assert value == pytest.approx(ON_CLASSES[spec](outputs, y), abs=EXACT), seed
        assert bound == 0


def test_top_k_is_scikit_learns():
    """Without ties, which scikit-learn breaks the other way; ties are in `test_a_constant_answer...` below."""
    for seed in range(CASES):
        outputs, y = drawn(seed, classes=3 + seed % 9)
        k = 1 + seed % (outputs.shape[1] - 1)
        expected = sk.top_k_accuracy_score(y, outputs, k=k, labels=np.arange(outputs.shape[1]))
        assert valued(registry.metric(f"top_k(k={k})"), outputs, y)[0] == pytest.approx(expected, abs=EXACT)


def test_recall_by_class_is_scikit_learns_and_nan_where_a_class_is_absent():
    for seed in range(CASES):
        outputs, y = drawn(seed)
        classes = np.arange(outputs.shape[1])
        expected = sk.recall_score(y, outputs.argmax(1), average=None, labels=classes, zero_division=np.nan)
        np.testing.assert_allclose(valued(registry.metric("recall"), outputs, y)[0], expected, atol=EXACT)


def test_the_confusion_counts_are_scikit_learns():
    for seed in range(CASES):
        outputs, y = drawn(seed)
        tally, weight = ByLabelAndAnswer(), torch.ones(len(y), dtype=torch.float64)
        found = tally.sums(torch.from_numpy(outputs), torch.from_numpy(y), weight)["counts"]
        expected = sk.confusion_matrix(y, outputs.argmax(1), labels=np.arange(outputs.shape[1]))
        np.testing.assert_array_equal(found.numpy(), expected)


RANKED = {
    "auroc": one_against_rest(sk.roc_auc_score), "average_precision": one_against_rest(sk.average_precision_score),
}


@pytest.mark.parametrize("spec", RANKED)
def test_metrics_of_ranks_are_scikit_learns_within_their_bound(spec):
    """Any scores and labels, ties among them; a client whose samples are all of one class has no value in either."""
    metric, missing = registry.metric(spec), 0
    for seed in range(CASES):
        outputs, y = drawn(seed, classes=2 if seed % 2 else None)
        outputs = outputs.round(1) if seed % 3 == 0 else outputs
        expected = RANKED[spec](outputs, y)
        value, bound = valued(metric, outputs, y)
        assert np.isnan(value) == np.isnan(expected)
        missing += np.isnan(expected)
        assert np.isnan(expected) or abs(value - expected) <= bound + EXACT, seed
    assert 0 < missing < CASES / 2


@pytest.mark.parametrize("spec", RANKED)
def test_metrics_of_ranks_of_calibrated_scores_are_within_two_thousandths(spec):
    metric, bounds = registry.metric(spec), []
    for seed in range(CASES):
        outputs, y = drawn(1000 + seed, classes=2 if seed % 2 else None, calibrated=True, most=3000)
        value, bound = valued(metric, outputs, y)
        expected = RANKED[spec](outputs, y)
        assert np.isnan(value) == np.isnan(expected)
        if not np.isnan(expected):
            assert abs(value - expected) <= min(bound + EXACT, 2e-3), seed
            bounds.append(bound)
    assert np.median(bounds) < 0.002  # the bound says something


@pytest.mark.parametrize(("spec", "least"), [("auroc", 0.5), ("average_precision", 0.4)])
def test_scores_in_one_bin_are_owned_up_to_by_the_bound(spec, least):
    """All scores within 1e-4: whatever their true order, it is inside value -+ bound, which is nearly everything."""
    rng = np.random.default_rng(0)
    y = np.repeat([0, 1], 50)
    outputs = np.stack([np.zeros(100), 0.005 + 1e-5 * y + 1e-6 * rng.random(100)], 1)
    value, bound = valued(registry.metric(spec), outputs, y)
    assert value == pytest.approx(0.5)  # as if all scores were equal; with them, both classes are as frequent
    assert bound >= least
    assert value + bound == pytest.approx(1)  # and they are in fact in order


def test_log_odds_keep_their_digits_where_a_probability_rounds_to_one():
    """p = 1 / (1 + e^-60) is 1 in float64; the ranks of such scores must not be lost."""
    outputs = np.array([[60.0 + i, 0.0, -1.0] for i in range(8)] + [[50.0, 0.0, -1.0]])
    y = np.array([0] * 8 + [1])
    assert valued(registry.metric("auroc"), outputs, y)[0] > 0.99
    assert (expit(odds(outputs)[:, 0]) == 1).all()


ON_NUMBERS = {"mse": sk.mean_squared_error, "mae": sk.mean_absolute_error, "r2": sk.r2_score}


@pytest.mark.parametrize("spec", ON_NUMBERS)
@pytest.mark.parametrize("targets", [(), (3,)])
def test_metrics_of_numbers_are_scikit_learns(spec, targets):
    for seed in range(CASES):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(1, 300))
        y = rng.normal(rng.uniform(-5, 5), rng.uniform(0.1, 3), size=(n, *targets))
        outputs = (y + rng.normal(size=y.shape)).reshape(n, -1)
        value, _ = valued(registry.metric(spec), outputs, y)
        if spec == "r2" and n == 1:  # a single target has no variance; scikit-learn says the same with a warning
            assert np.isnan(value)
            assert np.isnan(quiet(sk.r2_score, y, outputs))
        else:
            assert value == pytest.approx(ON_NUMBERS[spec](y, outputs), rel=EXACT, abs=EXACT)


def test_the_loss_is_the_tasks_own_and_called_by_its_name():
    outputs, y = drawn(3)
    nll = -log_softmax(outputs, 1)[np.arange(len(y)), y].mean()
    assert valued(Loss(cross_entropy), outputs, y)[0] == pytest.approx(nll, abs=EXACT)
    assert Loss(squared_error).scale.title == "MSE"
    assert Loss(cross_entropy).scale.title == "cross entropy"

    def huber_loss(outputs, y):
        return torch.nn.functional.huber_loss(outputs[:, 0], y, reduction="none")

    assert (loss_name(huber_loss), Loss(huber_loss).scale.title) == ("huber_loss", "huber loss")
    assert Loss(huber_loss).scale.name == "loss"


def test_outputs_that_are_no_numbers_never_pass_for_good_ones():
    """A diverged model: left out of no mean by being NaN, it ranks, costs and answers as badly as can be."""
    outputs, y = np.full((6, 4), np.nan), np.array([1, 2, 3, 1, 2, 3])
    found = {spec: float(valued(registry.metric(spec), outputs, y)[0]) for spec in
             ("accuracy", "balanced_accuracy", "f1", "top_k(k=2)", "auroc", "nll", "ece")}
    assert found == {"accuracy": 0, "balanced_accuracy": 0, "f1": 0, "top_k(k=2)": 0, "auroc": 0.5, "nll": np.inf,
                     "ece": 1}
    y = np.array([1.0, 2.0])
    assert valued(registry.metric("mse"), np.full((2, 1), np.nan), y)[0] == np.inf
    assert valued(registry.metric("r2"), np.full((2, 1), np.nan), y)[0] == -np.inf


# -- a constant answer ------------------------------------------------------------------------------------------------

KNOWN = np.array([[5, 3, 2], [0, 4, 4], [1, 0, 9], [3, 3, 3]])
SCORED = np.array([[2, 6, 2], [1, 2, 5], [4, 0, 0], [0, 0, 0]])


def test_what_a_constant_answer_scores():
    """By hand: client 0 answers class 0 (2 of 10), client 1 the first of two equally frequent classes, 1 (2 of 8);
    client 2 answers 2, which it never meets; client 3 has nothing to score."""
    shares = KNOWN / KNOWN.sum(1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        cross = -(SCORED * np.where(SCORED > 0, np.log(shares), 0)).sum(1) / SCORED.sum(1)
    none = np.nan
    expected = {
        "accuracy": [0.2, 0.25, 0, none],
        "balanced_accuracy": [1 / 3, 1 / 3, 0, none],  # right on one of three classes; client 2's one class is missed
        "f1": [2 * 2 / 12 / 3, 2 * 2 / 10 / 3, 0, none],  # 2 right / (labels + answers), over three classes
        "weighted_f1": [2 * 2 / 12 * 0.2, 2 * 2 / 10 * 0.25, 0, none],
        "top_k(k=2)": [0.8, 7 / 8, 1, none],  # classes 0 and 1; 1 and 2; 2 and 0
        "auroc": [0.5, 0.5, none, none],
        "average_precision": [1 / 3, 1 / 3, none, none],  # the mean prevalence of three classes
        "nll": [cross[0], np.inf, cross[2], none],  # client 1 meets a class that it held impossible
        "ece": [0.5 - 0.2, 0.5 - 0.25, 0.9, none],  # the most frequent class's share, beside how often it is right
        "loss": [cross[0], np.inf, cross[2], none],
    }
    for spec, values in expected.items():
        np.testing.assert_allclose(registry.metric(spec).constant(KNOWN, SCORED), values, atol=1e-12, err_msg=spec)
    recall = registry.metric("recall").constant(KNOWN, SCORED)
    np.testing.assert_array_equal(recall[:2], [[1, 0, 0], [0, 1, 0]])


def test_what_the_mean_target_scores():
    known = [torch.tensor([1.0, 3.0]), torch.tensor([0.0])]
    scored = [torch.tensor([2.0, 4.0, 6.0]), torch.tensor([])]
    # the mean 2 is 0, 2 and 4 away; about its own mean 4 the variance is 8 / 3
    for spec, value in {"mse": 20 / 3, "mae": 2, "r2": 1 - 20 / 8}.items():
        np.testing.assert_allclose(registry.metric(spec).constant(known, scored), [value, np.nan])
    assert Loss(squared_error).constant(known, scored)[0] == pytest.approx(20 / 3)
    two = [torch.tensor([[0.0, 1.0], [2.0, 3.0]])], [torch.tensor([[1.0, 0.0]])]
    assert registry.metric("mse").constant(*two) == pytest.approx([(0 + 4) / 2])


# -- names and directions ---------------------------------------------------------------------------------------------


def test_metrics_know_their_direction_and_are_spelled_as_they_are_stored():
    assert set(registry.metrics()) == {
        "accuracy", "auroc", "average_precision", "balanced_accuracy", "bits", "ece", "f1", "loss", "mae", "mse", "nll",
        "perplexity", "r2", "recall", "top_k", "weighted_f1",
    }
    lower = {name for name, cls in registry.metrics().items() if not cls.higher}
    assert lower == {"bits", "ece", "loss", "mae", "mse", "nll", "perplexity"}
    for spec in ("top_k(k=3)", "ece(bins=10)", "balanced_accuracy"):
        metric = registry.metric(spec)
        assert metric.scale.name == metric.label == registry.called(metric) == spec
    assert registry.metric("top_k(k=5)").label == "top_k"
    assert registry.metric("top_k(k=3)").scale.title == "top-3 accuracy"


def test_no_metric_is_named_like_a_method():
    """On the command line, words after --watch that name metrics are metrics, and others may be methods."""
    assert not set(registry.metrics()) & set(registry.methods())
