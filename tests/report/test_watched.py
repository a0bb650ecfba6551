"""Metrics beside the one that decides: which are offered, how they are read, and what the terminal says of them."""

from dataclasses import replace

import numpy as np
import pytest
from rescored import BALANCED, BRIER, F1, balanced_accuracy, made_up_answers

from coterie.contract.metric import Scale
from coterie.errors import CoterieError
from coterie.evaluation.score import Evaluation, Scores
from coterie.report import watched
from coterie.report.contents import told
from coterie.report.table import rows
from coterie.running.folder import Folder
from coterie.running.result import Result


def result(test, chosen=None):
    ids = np.arange(2)
    values = {name: np.array(v, dtype=float) for name, v in {**test, "loss": test.get("loss", [0, 0])}.items()}
    scores = Scores(ids, ids + 5, ids, values, values, chosen)
    return Result("local", 0, (Evaluation(0, {"served": scores, "adapted": scores}),))


def test_loss_and_accuracy_alone_are_no_choice():
    assert watched.others([result({"accuracy": [1, 1], "loss": [0, 0]})]) == []
    assert watched.table([result({"accuracy": [1, 1], "loss": [0, 0]})]) is None


def test_whatever_else_was_recorded_is_offered_but_not_what_decides(balanced):
    runs = [run for _, run in balanced]
    assert [scale.name for scale in watched.others(runs)] == ["accuracy", "f1", "brier", "loss"]


@pytest.mark.parametrize(("chosen", "named"), [
    (Scale("loss", "MSE", False), ["mae"]),  # no metric was asked for, and mse watched
    (Scale("mse", "MSE", False), ["mae"]),  # mse was asked for, and the loss is recorded in any case
    (Scale("mae", "MAE", False), ["mse"]),
])
def test_the_squared_error_has_one_column_whatever_it_was_asked_for_as(chosen, named, monkeypatch):
    """mse is the loss of a regression: two columns called MSE would hold the same numbers."""
    monkeypatch.setattr(watched, "LOSS", Scale("loss", "MSE", False))
    runs = [result({"loss": [1, 2], "mse": [1, 2], "mae": [1, 1]}, chosen)]
    assert [scale.name for scale in watched.others(runs)] == named


def test_how_a_metric_is_read_is_what_the_run_said(balanced):
    """Also of one that this version does not know: Brier scores are better when lower."""
    runs = [run for _, run in balanced]
    assert watched.scale_named("brier", runs) == BRIER
    assert watched.scale_named("f1", runs) == F1
    assert watched.scale_named("balanced_accuracy", runs) == BALANCED
    assert watched.scale_named("loss", runs).higher is False


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("accuracy", Scale("accuracy", "accuracy", True, True)),  # a metric of this version
        ("accuracy[cat]", Scale("accuracy[cat]", "accuracy of cat", True, True)),  # of one class
        ("loss", Scale("loss", "loss", False)),
        ("quite_new", Scale("quite_new", "quite new", True)),  # nobody knows it
    ],
)
def test_without_a_record_a_metric_is_read_as_this_version_does(name, scale):
    chosen = Scale("mine", "mine", True)
    assert watched.scale_named(name, [result({"mine": [1, 1], name: [1, 1]}, chosen)]) == scale


def test_a_record_that_says_nothing_useful_is_a_sentence(balanced, tmp_path):
    (tmp_path / "config.json").write_text('{"metrics": {"chosen": {"name": "f1"}, "watched": []}}')
    with pytest.raises(CoterieError, match=r"config\.json is damaged"):
        Folder(tmp_path).scales()


def test_the_table_has_mean_and_worst_client_of_every_other_metric(balanced):
    """Recomputed from the answers; the Brier score here is 1 minus the balanced accuracy, F1 its square."""
    table = watched.table([run for _, run in balanced])
    heads = [str(column.header) for column in table.columns]
    assert heads == ["method", "stage", "accuracy in %", "macro F1 in %", "Brier score", "cross entropy"]
    cells = dict(zip(heads, ([str(cell) for cell in column.cells] for column in table.columns), strict=True))
    assert list(zip(cells["method"], cells["stage"], strict=True))[2] == ("fedper", "served")
    share = np.array([balanced_accuracy(made_up_answers("fedper", seed)) for seed in (0, 1)])  # [seeds, clients]
    f1, brier = share**2, 1 - share
    assert cells["macro F1 in %"][2] == f"{100 * f1.mean():.1f} ({100 * f1.min(1).mean():.1f})"
    assert cells["Brier score"][2] == f"{brier.mean():.3f} ({brier.max(1).mean():.3f})"  # the worst is the largest
    assert str(table.caption) == "accuracy, macro F1: higher is better. Brier score, cross entropy: lower is better."


def test_clients_without_a_watched_value_are_counted_beside_it():
    """Of three clients the first has one class of test samples, and so no AUROC: its mean is that of the other two. All
    of them have a loss, and a metric that a method did not record is no matter of clients."""
    ids, values = np.arange(3), {"mine": np.ones(3), "auroc": np.array([np.nan, 0.5, 1]), "loss": np.ones(3)}
    scores = Scores(ids, ids + 5, ids, values, values, Scale("mine", "mine", True))
    one = Result("local", 0, (Evaluation(0, {"served": scores, "adapted": scores}),))
    table = watched.table([one])
    assert [str(cell) for cell in table.columns[2].cells] == ["75.0 (50.0)"] * 2
    said = "1 client has no AUROC on test data and is left out of its numbers."
    assert str(table.caption).splitlines()[1:] == [said]


def test_the_page_says_so_too(balanced):
    """Client 0 has no Brier score; what is not there of a single class is that client's mix of labels, and not said."""
    def without(scores):
        gone = np.where(np.arange(len(scores.clients)) == 0, np.nan, scores.test["brier"])
        return replace(scores, test={**scores.test, "brier": gone, "recall[ill]": gone})

    read = [(folder, replace(run, history=tuple(
        replace(e, stages={stage: without(scores) for stage, scores in e.stages.items()}) for e in run.history
    ))) for folder, run in balanced]
    notes = told(read, [balanced[0][0].path])["notes"]
    said = "1 client has no Brier score on test data and is left out of its numbers."
    assert [note for note in notes if "left out of its numbers" in note] == [said]


def test_another_metric_is_seen_at_the_rounds_that_the_chosen_one_chose(balanced):
    lines = rows([run for _, run in balanced], scale=BRIER)
    assert {line.rounds for line in lines} == {(4, 4)}
    assert {line.scale for line in lines} == {BRIER}


def test_metrics_of_one_class_are_left_to_the_page():
    chosen = Scale("mine", "mine", True)
    run = result({"mine": [1, 1], "accuracy[cat]": [1, 0]}, chosen)
    assert [scale.title for scale in watched.others([run])] == ["loss", "accuracy of cat"]
    assert [str(column.header) for column in watched.table([run]).columns] == ["method", "stage", "loss"]


def test_a_bound_is_no_metric_and_classes_come_last():
    chosen = Scale("mine", "mine", True)
    run = result({"mine": [1, 1], "accuracy[cat]": [1, 0], "auroc": [1, 1], "auroc_bound": [0, 0]}, chosen)
    assert [scale.name for scale in watched.others([run])] == ["auroc", "loss", "accuracy[cat]"]


def test_a_method_without_the_metric_has_no_value_of_it():
    one = result({"mine": [1, 1], "quite_new": [1, 0]}, Scale("mine", "mine", True))
    other = replace(result({"mine": [1, 1]}, Scale("mine", "mine", True)), method="fedavg")
    table = watched.table([one, other])
    assert [str(cell) for cell in list(table.columns[2].cells)[:2]] == ["0.500 (0.000)", "- (-)"]
    assert "left out" not in str(table.caption)
