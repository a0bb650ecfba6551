"""What clients are scored by: the same values on every engine, and a sentence where a metric cannot score the data."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

from coterie import registry
from coterie.contract import cohort
from coterie.contract.metric import Metric, sums_of, tallied
from coterie.contract.net import Task
from coterie.errors import CoterieError
from coterie.evaluation.measures import Measures, scale_of

OF_CLASSES = (
    "balanced_accuracy", "f1", "weighted_f1", "recall", "top_k(k=2)", "auroc", "average_precision", "nll", "ece",
)
OF_NUMBERS = ("mse", "mae", "r2")
ENGINES = [
    {"engine": "direct"}, {"engine": "stack"}, {"engine": "loop"}, {"engine": "reference"}, {"wave": 1},
    {"wave": 2, "engine": "stack"},
]


def chain():
    """What the direct engine differentiates by hand."""
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def by_hand(sim, stage, split):
    """Each client's values, from its module's own outputs, one call a client."""
    found = {}
    for client in range(sim.population):
        module = sim.layout.load(copy.deepcopy(sim.init.module).double(), sim.row(client, stage == "adapted")).eval()
        x, y = sim.federation.client(client, split)
        with torch.no_grad():
            outputs = module(x) if len(x) else torch.zeros(0, sim.federation.outputs, dtype=torch.float64)
        for metric in sim.measures.further:
            sums = tallied([metric], outputs, y, torch.ones(len(y)))
            value = metric.value(sums_of(metric, sums)).numpy()
            found.setdefault(metric.label, []).append(value)
    return sim.measures.columns({name: np.array(values) for name, values in found.items()}, sim.class_names)


def agrees(sim):
    for stage, scores in sim.evaluate().stages.items():
        for split, table in (("test", scores.test), ("val", scores.val)):
            expected = by_hand(sim, stage, split)
            assert set(expected) <= set(table)
            for name, values in expected.items():
                np.testing.assert_allclose(table[name], values, rtol=1e-9, atol=1e-12, err_msg=f"{stage} {name}")


@pytest.mark.parametrize("options", ENGINES, ids=str)
def test_every_engine_gives_the_values_of_each_clients_own_outputs(tiny, options):
    """Clients without test data, without validation data and without some classes are among them."""
    data = tiny.federation(test=(30, 0, 2, 5), val=(4, 3, 0, 1))
    sim = tiny.simulation("fedper", chain, data=data, metric="auroc", watch=OF_CLASSES, evaluate_every=1, **options)
    sim.round()
    agrees(sim)
    served = sim.evaluate().stages["served"]
    assert np.isnan(served.test["auroc"][1])
    assert np.isnan(served.val["f1"][2])


@pytest.mark.parametrize("options", ENGINES[1:4], ids=str)
def test_numbers_too(tiny, options):
    sim = tiny.simulation("fedavg", "regression", metric="r2", watch=OF_NUMBERS, **options)
    sim.round()
    agrees(sim)


def test_joined_runs_have_the_values_they_have_alone(tiny):
    apart, joined, stack = tiny.side_by_side(["fedavg"], seeds=(0, 5, 9), metric="auroc", watch=OF_CLASSES)
    tiny.agree(apart, joined)
    for (_, alone), (_, together) in zip(apart, joined, strict=True):
        for stage, scores in alone.stages.items():
            np.testing.assert_array_equal(scores.confusion, together.stages[stage].confusion)
    assert not stack.apart
    assert stack.joined > 0


def test_sums_that_would_fill_the_memory_are_taken_in_blocks(tiny, monkeypatch):
    whole = tiny.simulation("fedavg", metric="auroc").evaluate()
    monkeypatch.setattr(cohort, "MOST_SUMS", 1)
    blocks = tiny.simulation("fedavg", metric="auroc").evaluate()
    for stage, scores in whole.stages.items():
        np.testing.assert_array_equal(scores.test["auroc"], blocks.stages[stage].test["auroc"])
        np.testing.assert_array_equal(scores.confusion, blocks.stages[stage].confusion)


def test_watching_changes_neither_rows_nor_the_scores_that_are_always_there(tiny):
    plain, watched = (tiny.simulation("fedavg", **given) for given in ({}, {"metric": "f1", "watch": OF_CLASSES}))
    for sim in (plain, watched):
        sim.round()
    tiny.same(tiny.state(plain), tiny.state(watched))
    for stage, scores in plain.evaluate().stages.items():
        other = watched.evaluate().stages[stage]
        for name in ("loss", "accuracy"):
            np.testing.assert_array_equal(scores.test[name], other.test[name])


@dataclass(frozen=True)
class Missed(Metric):
    """Picks samples by a mask, which cannot be stacked."""

    higher = False
    kind = "classes"

    def sums(self, outputs, y, weight):
        wrong = outputs.argmax(-1) != y
        return {"wrong": weight[wrong].sum(), "samples": weight.sum()}

    def value(self, sums):
        return sums["wrong"] / sums["samples"]


def test_a_metric_that_cannot_be_stacked_is_taken_client_by_client(tiny, monkeypatch):
    known = registry.metric
    monkeypatch.setattr(registry, "metric", lambda spec: Missed() if spec == "missed" else known(spec))
    for options in ENGINES[:4]:
        sim = tiny.simulation("fedavg", chain, metric="missed", **options)
        for scores in sim.evaluate().stages.values():
            np.testing.assert_allclose(scores.test["missed"], 1 - scores.test["accuracy"], atol=1e-12)


def test_the_few_models_of_a_method_are_scored_by_the_chosen_metric(tiny):
    """With every model the same, each is worth what the client is served."""
    sim = tiny.simulation("ifca:models=2", metric="balanced_accuracy")
    rows = sim.method.few(sim.server.state)
    found = sim.models()
    assert found["metric"] == "balanced_accuracy"
    scores = tiny.cohort(sim).score(rows.expand(sim.population, *rows.shape), "test", sim.measures.further)
    np.testing.assert_allclose(found["test"], scores["balanced_accuracy"], atol=1e-5)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("metric", "watch", "classes", "said"), [
    ("auroc", (), 0, "auroc scores classes, but the labels of these data are numbers; choose one of loss, mae, mse"),
    ("r2", (), 3, "r2 scores numbers, but the labels of these data are 3 classes; choose one of accuracy, auroc"),
    ("auto", ("top_k",), 5, r"top_k's k must be below the 5 classes of these data, not 5; write "
                            r"top_k\(k=4\)"),
    ("top_k(k=0)", (), 5, "k must be at least 1, not 0"),
    ("ece(bins=0)", (), 5, "bins must be from 1 to 10000, not 0"),
    ("recall", (), 3, "number of each class, so it cannot decide between rounds; watch it"),
    ("balanced", (), 3, "unknown metric 'balanced'; did you mean 'balanced_accuracy'"),
    ("accuracy(k=3)", (), 3, "unknown option of accuracy 'k'"),
    ("loss(function=x)", (), 3, "the run's own and has no options"),
])
def test_what_cannot_score_the_data_is_refused_in_a_sentence(metric, watch, classes, said):
    with pytest.raises(CoterieError, match=said):
        Measures.of(metric, watch, Task.of(classes))


def own(**functions):
    """A metric that counts samples, except for what is said."""
    def sums(self, outputs, y, weight):
        return {"n": weight.sum()}

    def value(self, sums):
        return sums["n"]

    return dataclass(frozen=True)(type("Own", (Metric,), {"sums": sums, "value": value, **functions}))()


@pytest.mark.parametrize(("metric", "said"), [
    (own(sums=lambda self, o, y, w: {"n": torch.ones_like(w).sum()}), "own counts padding"),
    (own(sums=lambda self, o, y, w: {"n": w.mean()}), "own counts padding"),
    (own(sums=lambda self, o, y, w: {"n": w.sum().clamp(min=3)}), "does not add up over batches"),
    (own(value=lambda self, sums: sums["n"].sum()), r"has the shape \[\], not \[2\]"),
    (own(sums=lambda self, o, y, w: {"n": o[:, 7]}), "own cannot score such data: IndexError"),
])
def test_a_metric_that_does_not_keep_its_contract_is_refused(metric, said, monkeypatch):
    monkeypatch.setattr(registry, "metric", lambda spec: metric)
    with pytest.raises(CoterieError, match=said):
        Measures.of("own", (), Task.of(3))


def test_a_metric_may_not_take_the_name_of_another(monkeypatch):
    mine = own(name="loss")
    monkeypatch.setattr(registry, "metric", lambda spec: mine)
    with pytest.raises(CoterieError, match="two metrics would be called loss"):
        Measures.of("mine.py:Loss", (), Task.of(3))


def test_auto_is_accuracy_or_the_loss_and_what_is_named_twice_is_taken_once():
    assert Measures.of("auto", (), Task.of(3)).scale.name == "accuracy"
    numbers = Measures.of("auto", ("loss", "mse"), Task.of(0))
    assert (numbers.scale.name, numbers.scale.title, numbers.scale.higher) == ("loss", "MSE", False)
    assert [metric.label for metric in numbers.further] == ["mse"]
    found = Measures.of("f1", ("f1", "auroc", "auroc"), Task.of(3))
    assert [metric.label for metric in found.further] == ["f1", "auroc"]
    assert scale_of(found.record()) == found.scale
    assert replace(found.scale, title="x") != found.scale
