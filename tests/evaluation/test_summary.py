"""What the scores add up to, and which round they choose, in the direction of the chosen metric."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import coterie
from coterie import registry
from coterie.evaluation.score import Evaluation, Scores
from coterie.evaluation.summary import chosen_round, summarise, validation_score
from coterie.models import model

ACCURACY, BALANCED, NLL = (registry.metric(name).scale for name in ("accuracy", "balanced_accuracy", "nll"))


def scores(chosen=None, samples=10, **values):
    """Test and validation scores are the same here; metrics that are not given are 0."""
    clients = len(next(iter(values.values())))
    table = {"loss": np.zeros(clients), **{name: np.array(v, dtype=float) for name, v in values.items()}}
    whole = np.arange(clients)
    return Scores(whole, np.full(clients, samples), np.zeros(clients, dtype=int), table, table, chosen)


def history(*each):
    return [Evaluation(t, {"served": one}) for t, one in enumerate(each)]


def test_the_chosen_metric_decides_the_round():
    """Round 1 is the most accurate, round 2 the best balanced, and round 0 has the least negative log likelihood."""
    values = [
        {"accuracy": [0.5, 0.5], "balanced_accuracy": [0.5, 0.5], "nll": [0.1, 0.2]},
        {"accuracy": [0.9, 0.9], "balanced_accuracy": [0.4, 0.4], "nll": [0.9, 0.9]},
        {"accuracy": [0.8, 0.8], "balanced_accuracy": [0.8, 0.7], "nll": [0.5, 0.5]},
    ]
    for scale, expected in ((ACCURACY, 1), (BALANCED, 2), (NLL, 0)):
        assert chosen_round(history(*(scores(scale, **v) for v in values))) == expected
    assert chosen_round(history(*(scores(None, **v) for v in values))) == 1  # records that do not say: accuracy


def test_equal_ones_are_decided_by_the_loss_then_the_earlier_wins():
    same = {"balanced_accuracy": [0.7, 0.7]}
    rounds = history(*(scores(BALANCED, loss=[loss] * 2, **same) for loss in (0.5, 0.3, 0.3)))
    assert chosen_round(rounds) == 1
    assert validation_score(rounds[1].stages["served"]) == (0.7, -0.3)


def test_clients_that_cannot_say_are_left_out_and_counted():
    """One client of three has a single class, so no AUROC; the mean is over the two others."""
    auroc = registry.metric("auroc").scale
    one = scores(auroc, auroc=[0.6, np.nan, 0.8])
    assert summarise(one).mean == pytest.approx(0.7)
    assert summarise(one).left_out == 1
    assert validation_score(one) == (pytest.approx(0.7), 0)
    nobody = scores(auroc, auroc=[np.nan, np.nan])
    assert summarise(nobody).left_out == 2
    assert np.isnan(summarise(nobody).mean)


def test_where_nobody_can_say_the_loss_decides_alone():
    nll = registry.metric("nll").scale
    rounds = history(*(scores(nll, nll=[np.nan], loss=[loss]) for loss in (0.5, 0.2, 0.4)))
    assert chosen_round(rounds) == 1
    assert chosen_round([*rounds, Evaluation(3, {"served": scores(nll, nll=[9.0], loss=[0.9])})]) == 3


def test_the_worst_client_is_that_of_the_metrics_direction():
    values = [0.1, 0.5, 0.9]
    assert summarise(scores(NLL, nll=values)).worst == 0.9
    assert summarise(scores(BALANCED, balanced_accuracy=values)).worst == 0.1


# -- real runs --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rare():
    """Two classes, one of them rare and hard: at first a model answers the frequent one, then gives some of that up."""
    generator = torch.Generator().manual_seed(2)
    clients = []
    for _ in range(4):
        y = (torch.rand(120, generator=generator) < 0.15).long()
        clients.append((torch.randn(120, 6, generator=generator) + 0.5 * y[:, None], y))
    return coterie.Federation.from_clients(clients, val=0.4)


def trained(data, metric, **options):
    given = {"rounds": 12, "evaluate_every": 1, "lr": 0.3, "device": "cpu", **options}
    return coterie.run("fedavg", model("linear", (6,), 2), data, metric=metric, watch=["accuracy", "balanced_accuracy"],
                       **given)


def best(result, name):
    """The earliest round of the largest mean on validation data, from the history alone; no ties by the metric."""
    means = [float(np.mean(e.stages["served"].val[name])) for e in result.history]
    assert means.count(max(means)) == 1
    return means.index(max(means))


def test_a_run_reports_the_round_that_its_metric_prefers(rare):
    runs = {name: trained(rare, name) for name in ("accuracy", "balanced_accuracy")}
    expected = {name: best(runs["accuracy"], name) for name in runs}
    assert expected["accuracy"] != expected["balanced_accuracy"]
    assert {name: run.round_of("served") for name, run in runs.items()} == expected
    for name, run in runs.items():
        assert run.at("served").metric == name


def test_a_run_stops_early_by_its_metric(rare):
    """patience=2: two evaluations after the best so far, which both metrics see at rounds of their own."""
    ends = {}
    for name in ("accuracy", "balanced_accuracy"):
        whole = [float(np.mean(e.stages["served"].val[name])) for e in trained(rare, name).history]
        running = [max(range(t + 1), key=lambda k: (whole[k], -k)) for t in range(len(whole))]
        over = [t for t, at in enumerate(running) if t - at >= 2]
        ends[name] = over[0] if over else 12
        assert trained(rare, name, patience=2).history[-1].round == ends[name]
    assert ends["accuracy"] != ends["balanced_accuracy"]
