"""Models that have learned nothing are called that, by numbers worked out from the labels' counts."""

import json
from dataclasses import replace

import numpy as np
import pytest

import coterie
from coterie.contract.metric import Scale
from coterie.evaluation.score import Evaluation, Scores
from coterie.metrics.accuracy import Accuracy
from coterie.metrics.regression import MSE
from coterie.models import model
from coterie.report.verdict import answer, difference, verdict
from coterie.running.folder import Folder
from coterie.running.result import Result
from coterie.running.untrained import constant, constant_by, known_and_scored, label_counts, level

ACCURACY = Accuracy().scale
HELD = np.array([[6, 4, 0], [1, 7, 2], [5, 5, 10]])  # clients x classes, all splits
TESTED = np.array([[2, 2, 0], [1, 2, 2], [3, 1, 1]])
# Training and validation hold [4, 2, 0], [0, 5, 0], [2, 4, 9], so the most frequent classes are 0, 1 and 2, which are
# right for 2 of 4, 2 of 5 and 1 of 5 test samples.
FREQUENT = [0.5, 0.4, 0.2]


def result(name, values, folder, seed=0):
    zero, values = np.zeros(3), np.array(values, dtype=float)
    scores = Scores(np.arange(3), TESTED.sum(1), zero.astype(int), {"loss": zero, "accuracy": values},
                    {"loss": zero, "accuracy": values})
    history = (Evaluation(1, {"served": scores, "adapted": scores}),)
    return Result(name, seed, history, names=("a", "b", "c"), folder=folder)


@pytest.fixture
def folder(tmp_path):
    record = {"trained": 3, "classes": 3, "histogram": HELD.tolist(), "tested": TESTED.tolist()}
    (tmp_path / "data.json").write_text(json.dumps(record))
    return tmp_path


def said_of(values, folder):
    runs = [result(name, v, folder, seed) for name, v in values.items() for seed in (0, 1)]
    assert all(part in verdict(runs) for part in answer(runs)["warnings"])  # page and terminal say the same
    return answer(runs)


def test_the_most_frequent_class_is_that_of_training_scored_on_test_data():
    level = constant_by(ACCURACY).level
    assert level(*known_and_scored(HELD, TESTED)) == pytest.approx(FREQUENT)
    assert level(*known_and_scored(HELD, None)) == pytest.approx([0.6, 0.7, 0.5])  # the largest share of all samples


def test_no_method_better_than_the_most_frequent_class(folder):
    """Mean 36.7 % for the answer without a model; the best method has 35 %."""
    said = said_of({"local": [0.5, 0.35, 0.2], "fedavg": [0.3, 0.3, 0.3]}, folder)
    assert said["headline"] == (
        "No method does better than always answering the client's most frequent class (36.7 %)."
    )
    assert said["sentences"] == []  # nobody is called best
    guess = "always answering the client's most frequent class (36.7 %)"
    assert said["warnings"] == [
        f"local (served), fedavg (served), local (adapted) and fedavg + fine-tune scored worse than {guess}.",
        "Scale the inputs or change the learning rate.",
    ]
    assert said["mean"] == ["local", "served"]  # the page still shows the best


def test_a_method_that_learned_and_one_that_always_says_class_1(folder):
    """FedAvg's 2 of 4, 2 of 5 and 1 of 5 are class 1 for everybody; Local is far beyond."""
    said = said_of({"local": [1.0, 0.8, 1.0], "fedavg": [0.5, 0.4, 0.2]}, folder)
    assert "local" in said["headline"]
    assert said["warnings"] == [
        "fedavg (served) and fedavg + fine-tune learned nothing: always answering the client's most frequent class "
        "(36.7 %) scores as well.",
        "Scale the inputs or change the learning rate.",
    ]
    assert "runner-up" not in " ".join(said["sentences"])  # fedavg is the only other method


def test_a_best_method_within_noise_of_the_most_frequent_class(folder):
    """Differences of 25, -20 and 40 points: 15 on average, with the standard error sqrt(0.0975 / 3) = 0.18."""
    said = said_of({"local": [0.75, 0.2, 0.6], "fedavg": [0.3, 0.3, 0.3]}, folder)
    assert said["warnings"] == [
        "The best, local (served), is within noise between clients of always answering the client's most frequent "
        "class (36.7 %).",
        "fedavg (served) and fedavg + fine-tune scored worse than always answering the client's most frequent class "
        "(36.7 %).",
    ]


def test_nothing_is_said_of_models_that_learned_or_without_counts(folder, tmp_path):
    good, bad = {"local": [1.0, 0.8, 1.0], "fedavg": [0.75, 0.8, 0.8]}, {"local": [0.1, 0.1, 0.1]}
    assert said_of(good, folder)["warnings"] == []
    (folder / "data.json").unlink()  # a run of an earlier version
    assert said_of(bad, folder)["warnings"] == []
    assert "frequent" not in verdict([result("local", [0.1] * 3, folder)])


def test_nothing_is_said_by_a_metric_of_which_a_constant_answers_score_is_not_known(folder):
    """The same poor numbers of a metric from somebody's file."""
    mine = Scale("mine", "mine", higher=True)
    runs = [result(name, [0.1, 0.1, 0.1], folder) for name in ("local", "fedavg")]
    runs = [
        replace(run, history=tuple(
            replace(e, stages={name: replace(s, test={**s.test, "mine": s.test["accuracy"]},
                                             val={**s.val, "mine": s.val["accuracy"]}, chosen=mine)
                               for name, s in e.stages.items()})
            for e in run.history
        ))
        for run in runs
    ]
    assert answer(runs)["warnings"] == []
    assert "frequent" not in answer(runs)["headline"]


def test_clients_of_one_class_are_no_reason_to_blame_the_models(folder):
    held = np.array([[8, 0, 0], [0, 8, 0], [0, 0, 8]])
    tested = held // 4
    record = {"trained": 3, "classes": 3, "histogram": held.tolist(), "tested": tested.tolist()}
    (folder / "data.json").write_text(json.dumps(record))
    perfect = result("local", [1.0, 1.0, 1.0], folder)
    assert not constant(np.ones((1, 3)), level([perfect], ACCURACY))
    said = said_of({"local": [1.0, 1.0, 1.0], "fedavg": [0.5, 0.5, 0.5]}, folder)
    assert said["headline"] == (
        "Every client's test data are of one class, its most frequent one: they cannot tell methods apart."
    )
    assert said["sentences"] == []
    assert said["warnings"] == ["fedavg (served) and fedavg + fine-tune scored worse than always answering the "
                                "client's most frequent class (100.0 %)."]


def test_a_real_run_with_a_learning_rate_far_too_high(sites, tmp_path):
    """Whatever steps of 10^6 leave, it has learned nothing; the counts come from the folder or from the simulation."""
    options = {"rounds": 1, "lr": 1e6, "device": "cpu"}
    factory = model("mlp", (3,), 3, hidden=8)
    run = coterie.run("fedavg", factory, sites, folder=tmp_path / "run", **options)
    kept = Folder(tmp_path / "run").result()
    direct = replace(run, folder=None)
    for one in (kept, direct):
        held, tested = label_counts([one])
        assert tested.tolist() == sites.histogram("test").tolist()
        assert (held - tested).tolist() == (sites.histogram("train") + sites.histogram("val")).tolist()
        assert verdict([one]).startswith(("No stage does better", "No stage learned", "Every stage diverged"))


@pytest.mark.parametrize("scale", [True, False])
def test_who_scaled_the_inputs_is_not_told_to_scale_them(tmp_path, scale):
    """Labels that nothing explains, 4 of 5 alike, and a learning rate that moves nothing: no model is better than the
    most frequent class. Of the two usual reasons, one is out of the question for a table with scale=true."""
    rng = np.random.default_rng(0)
    rows = "\n".join(f"{rng.normal():.3f},{'ns'[k % 2]},{k // 2 % 5 // 4}" for k in range(100))
    (tmp_path / "t.csv").write_text(f"a,site,label\n{rows}\n")
    asked = {"data": f"{tmp_path / 't.csv'}:client=site,scale={str(scale).lower()}", "methods": ["local", "fedavg"],
             "model": "linear", "training": {"rounds": 1, "lr": 1e-9}}
    runs = coterie.experiment(asked).run(folder=tmp_path / "kept")
    for found in (runs, [Folder(run.folder).result() for run in runs], coterie.experiment(asked).run()):
        said = " ".join(answer(found)["warnings"])
        assert ("Change the learning rate, or allow more rounds." in said) is scale
        assert ("Scale the inputs or change the learning rate." in said) is not scale


@pytest.mark.parametrize("metric", ["mse", "mae"])
@pytest.mark.parametrize("scale", ["true", "false"])
def test_targets_that_are_all_equal_get_no_advice_on_scaling(tmp_path, metric, scale):
    rows = "\n".join(f"{k % 7},{'ns'[k % 2]},30.1" for k in range(40))
    (tmp_path / "t.csv").write_text(f"a,site,label\n{rows}\n")
    runs = coterie.experiment({
        "data": f"{tmp_path / 't.csv'}:client=site,scale={scale}", "methods": ["local", "fedavg"], "model": "linear",
        "training": {"rounds": 2, "lr": 0.001, "metric": metric},
    }).run()
    said = verdict(runs)
    assert said.startswith("Every client's test targets are the mean of its training targets, as where all targets are")
    assert "inputs" not in said
    assert answer(runs)["headline"] in said


@pytest.mark.parametrize(("a", "b", "apart"), [
    (3.44e8, 3.43e8, "1.00e+06"),
    (1.234e5, 1.224e5, "1.00e+03"),  # 1.23e+05 and 1.22e+05, as the table has them
    (3.44e8, 3.441e8, "0"),  # both are shown as 3.44e+08
    (99_999.0, 3.0, "99996.000"),
    (0.5, 0.25, "0.250"),
])
def test_a_difference_is_written_as_the_numbers_it_is_of(a, b, apart):
    assert difference(MSE().scale, a, b) == apart
