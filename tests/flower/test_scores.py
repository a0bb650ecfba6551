"""What sites tell of their scores: the values of the stacked engine, label counts only where the job says so."""

from __future__ import annotations

import copy
import json
import logging
from dataclasses import replace

import numpy as np
import pytest
import sites as toy

from coterie.contract.metric import sums_of, tallied
from coterie.errors import CoterieError
from coterie.flower.checks import Inspector
from coterie.flower.job import Job
from coterie.flower.loopback import Loopback
from coterie.running.folder import Folder

WATCH = ("f1", "weighted_f1", "recall", "top_k(k=2)", "auroc", "average_precision", "nll", "ece")
COUNTS = {"places", "values", "histogram", "labels", "counts"}


def job(data, scores="values", **training):
    return replace(toy.job(data, "fedper", metric="balanced_accuracy", watch=WATCH, **training), scores=scores)


def same(mine, theirs):
    assert mine.keys() == theirs.keys()
    for name, values in mine.items():
        np.testing.assert_allclose(values, theirs[name], rtol=1e-9, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("scores", ["values", "full"])
def test_sites_tell_what_the_stacked_engine_finds(tmp_path, scores):
    """Every metric of every site, which may lack validation data or classes, and the server's record of them."""
    data = toy.federation(test=(30, 4, 0, 5))
    one = job(data, scores)
    (rounds,), _ = toy.run(data, [one], tmp_path / "homes", folder=tmp_path / "run")
    expected = toy.stacked(data, one).evaluate().stages
    for stage, found in rounds.history[-1].stages.items():
        same(found.test, expected[stage].test)
        same(found.val, expected[stage].val)
        assert found.scale == expected[stage].scale
    read = Folder(tmp_path / "run").result()
    assert read.at("served", "last").metric == "balanced_accuracy"
    matrices = read.confusion("served", "last")
    assert (matrices is None) == (scores == "values")
    if matrices is not None:
        np.testing.assert_array_equal(matrices.counts, expected["served"].confusion)
    sent = (tmp_path / "homes" / "berlin" / "sent.jsonl").read_text()
    assert any(f'"{word}"' in sent for word in COUNTS) == (scores == "full")


def test_full_scores_give_the_metrics_of_all_samples_together(tmp_path):
    """As if the sites' test samples were one client's: by hand, from the outputs of their models."""
    data = toy.federation(test=(30, 4, 2, 5))
    one = job(data, "full", rounds=1)
    toy.run(data, [one], tmp_path / "homes", folder=tmp_path / "run")
    sim = toy.stacked(data, one)
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    told = [line for line in lines if line["kind"] == "evaluation"][-1]["pooled"]["served"]
    total = {}
    for client in range(4):
        module = sim.layout.load(copy.deepcopy(sim.init.module).double(), sim.row(client)).eval()
        x, y = data.client(client, "test")
        for name, t in tallied(sim.measures.further, module(x).detach(), y, y.new_ones(len(y)).double()).items():
            total[name] = total.get(name, 0) + t
    for metric in sim.measures.further:
        value = metric.value(sums_of(metric, total)).numpy()
        np.testing.assert_allclose(np.array(told[metric.label], dtype=float), value, rtol=1e-9)


class Liar(Loopback):
    """One site's scores are changed on their way."""

    def __init__(self, sites, change):
        super().__init__(sites)
        self.change = change

    def deliver(self, name, parcels):
        answers = super().deliver(name, parcels)
        for parcel in answers:
            if name == "oslo" and "scores" in parcel.meta:
                self.change(parcel.meta)
        return answers


def told(meta, name, change):
    """Every value of a sum changed."""
    listed = meta["sums"]["served"][name]
    listed["values"] = [change(value) for value in listed["values"]]


def put(meta, name, value, whole=None):
    """A sum that is nothing but a value, in the first place, or where another sum has fewest."""
    place = 0
    if whole is not None:
        place = min(set(range(3)) & set(whole["places"]), key=lambda k: whole["values"][whole["places"].index(k)])
    meta["sums"]["served"][name] = {"places": [place], "values": [value]}


@pytest.mark.parametrize(("change", "said"), [
    (lambda meta: meta["scores"]["served"]["test"].update(f1="good"), "f1 of served, test must be a number or null"),
    (lambda meta: meta["scores"]["served"]["test"].update(f1=1e308), "f1 of served, test must be a number"),
    (lambda meta: meta["scores"]["served"]["val"].update(accuracy=1.5), "accuracy of served, val must be a number"),
    (lambda meta: meta["scores"]["served"]["val"].update(loss=-0.1), "loss of served, val must be a number"),
    (lambda meta: meta["scores"].update(samples=10**40), "on how many samples"),
    (lambda meta: meta["scores"].update(more=1), "the scores hold samples, validated"),
    (lambda meta: meta.update(scores={}), "on how many samples"),
    (lambda meta: meta["scores"]["served"]["val"].update(recall=[1.0]), "recall of served, val must be 3 numbers"),
    (lambda meta: meta["scores"]["adapted"]["test"].pop("auroc"), "the metrics of adapted, test must be"),
    (lambda meta: meta["scores"].pop("adapted"), "the scores hold samples, validated"),
    (lambda meta: meta["scores"].update(samples=-1), "on how many samples"),
    (lambda meta: meta.update(scores=[1]), "on how many samples"),
    (lambda meta: meta.pop("sums"), "missing in the answer's header: sums"),
    (lambda meta: meta.update(sums={}), "the sums hold served, adapted, not"),
    (lambda meta: meta["sums"]["served"]["confusion.counts"].update(places=[999], values=[1]), "no list of places"),
    (lambda meta: meta["sums"]["served"]["confusion.counts"].update(places=["x"], values=[1]), "no list of places"),
    (lambda meta: meta["sums"]["served"]["confusion.counts"].update(places=[0, 1], values=[1]), "no list of places"),
    (lambda meta: meta["sums"]["served"]["confusion.counts"].update(places=[0], values=[0.5]), "are no counts"),
    (lambda meta: meta["sums"]["served"]["confusion.counts"].update(places=[0], values=[-1]), "are no counts"),
    (lambda meta: told(meta, "confusion.counts", lambda v: 1e9 * v), "confusion.counts of served counts 2e+09, and 2"),
    (lambda meta: told(meta, "confusion.counts", lambda v: 0 * v), "counts 0, and 2 samples make 2"),
    (lambda meta: told(meta, "classes.labels", lambda v: 1e9 * v), "classes.labels of served counts 2e+09, and 2"),
    (lambda meta: told(meta, "classes.answers", lambda v: -v), "classes.answers of served are no counts"),
    (lambda meta: put(meta, "classes.right", 3), "classes.right of served counts 3, and 2 samples make at most 2"),
    (lambda meta: told(meta, "ranks.histogram", lambda v: 2 * v), "histogram of served counts 12, and 2 samples"),
    (lambda meta: put(meta, "classes.right", 2, meta["sums"]["served"]["classes.labels"]), "by the sums of served"),
    (lambda meta: told(meta, "ece.excess", lambda v: 9 * v + 9), "ece.excess of served counts"),
], ids=range(27))
def test_wrong_scores_cost_a_site_the_round_and_a_strike(tmp_path, caplog, change, said):
    data = toy.federation()
    caplog.set_level(logging.WARNING, "coterie.server")
    inspector = Inspector()
    line = Liar(toy.sites(data, tmp_path), change)
    (rounds,), _ = toy.run(data, [job(data, "full", rounds=1)], tmp_path, line, check=inspector)
    assert rounds.history[-1].stages["served"].clients.tolist() == [0, 1, 3]
    (refused,) = rounds.rounds[0]["report"]["refused"].items()
    assert refused[0] == "oslo"
    assert refused[1]["field"].startswith(("scores", "sums"))
    assert said in refused[1]["reason"]
    assert inspector.quarantine.strikes == {"oslo": 2}  # in the round, and at the end


@pytest.mark.parametrize("classes", [3, 0])
def test_one_site_does_not_choose_the_round_that_all_are_handed(tmp_path, classes):
    """A site that praises the untrained model and damns all later ones, within what a score can be.

    Of five sites four tell the truth, so with a robust aggregator the median lies between two of theirs: the round is
    one that training reached, and every site's model is of that round. By the mean of losses it is round 0.
    """
    names, sizes = tuple("abcde"), (30, 40, 35, 30, 40)
    full = toy.federation(names=names, sizes=sizes, val=sizes, test=sizes)
    y = full.x[:, :3].argmax(1) if classes else 3 * full.x[:, 0] + 1
    data = type(full)(full.x, y, full.bounds, full.clients, classes, full.names, full.recipe)

    class Chooser(Loopback):
        def deliver(self, name, parcels):
            answers = super().deliver(name, parcels)
            for task, parcel in zip(parcels, answers, strict=True):
                if name == "e" and "scores" in parcel.meta:
                    untrained = task.meta["round"] == 0
                    lie = {"loss": 0.0 if untrained else 1e30, "accuracy": float(untrained)}
                    for stage in ("served", "adapted"):
                        told = parcel.meta["scores"][stage]["val"]
                        told |= {name: lie[name] for name in told}
            return answers

    chosen = {}
    for method in ("fedavg", "fedavg+median"):
        home = tmp_path / method
        line, policy = Chooser(toy.sites(data, home)), replace(toy.POLICY, sites=5)
        (rounds,), _ = toy.run(data, [toy.job(data, method, rounds=6, evaluate_every=2)], home, line, policy=policy)
        chosen[method] = rounds.handed_out
        truth = {e.round: np.median(e.stages["served"].val["loss"][:4]) for e in rounds.history}
        assert truth[6] < 0.8 * truth[0]
    assert classes or chosen["fedavg"] == 0
    assert truth[chosen["fedavg+median"]] < 0.8 * truth[0]
    for name in names:
        held = json.loads(next((tmp_path / "fedavg+median" / name).glob("*/model.json")).read_text())
        assert held["round"] == chosen["fedavg+median"]


def test_a_job_says_values_full_or_nothing_and_the_older_spelling_is_read():
    data = toy.federation()
    one = toy.job(data, "fedavg")
    assert one.scores == "values"
    for told, read in ((True, "values"), (False, False), ("full", "full")):
        assert Job.of({**one.values(), "scores": told}).scores == read
    older = {name: v for name, v in one.values()["training"].items() if name not in ("metric", "watch")}
    assert Job.of({**one.values(), "scores": True, "training": older}) == one
    with pytest.raises(CoterieError, match='scores must be "values", "full" or false, not \'all\''):
        replace(one, scores="all")


@pytest.mark.parametrize(("training", "said"), [
    ({"metric": "mine.py:Gmean"}, "lies in a file, which is not sent to sites; put it into coterie/metrics"),
    ({"watch": ("f1", "mine.py:Gmean(p=2)")}, "lies in a file, which is not sent to sites"),
    ({"metric": "r2"}, "r2 scores numbers"),
])
def test_a_metric_that_sites_cannot_compute_is_refused_before_anything_is_sent(training, said):
    with pytest.raises(CoterieError, match=said):
        toy.job(toy.federation(), "fedavg", **training)
