"""Confusion matrices and recall by class, from counts that fit on a page."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rescored import made_up_answers
from sklearn.metrics import recall_score

from coterie.contract.metric import Scale
from coterie.errors import CoterieError
from coterie.report import confusion
from coterie.report.confusion import counted_by_client, matrices, matrix, recall, weakest, worst_first
from coterie.report.contents import told
from coterie.running import confusion as recorded

SHARE = Scale("balanced_accuracy", "balanced accuracy", higher=True, percent=True)
ERROR = Scale("loss", "huber", higher=False)
# Three clients, three classes: client 0 has no samples of class 2, client 1 none at all.
COUNTS = np.array([
    [[3, 1, 0], [2, 2, 0], [0, 0, 0]],
    np.zeros((3, 3), dtype=int),
    [[5, 0, 0], [0, 0, 4], [1, 0, 2]],
])


def test_the_worst_served_comes_first_in_the_direction_of_the_metric():
    """Client 1 has no samples, so it has no matrix; who has no value, though samples, comes last."""
    assert worst_first(COUNTS, np.array([0.9, 0.0, 0.2]), SHARE) == [2, 0]
    assert worst_first(COUNTS, np.array([0.9, 0.0, 0.2]), ERROR) == [0, 2]
    assert worst_first(COUNTS, np.array([np.nan, 0.0, 0.2]), SHARE) == [2, 0]


def test_a_matrix_shows_the_classes_that_occur():
    assert matrix(COUNTS[0]) == {"classes": [0, 1], "counts": [[3, 1], [2, 2]], "held": [4, 4], "of": 2}
    assert matrix(COUNTS[2])["classes"] == [0, 1, 2]


def test_of_too_many_classes_the_most_mistaken_are_kept_with_all_their_samples():
    """Of client 2, class 0 is wrong once as an answer, class 1 4 times as a label, class 2 4 + 1 times."""
    found = matrix(COUNTS[2], most=2)
    assert (found["classes"], found["of"]) == ([1, 2], 3)
    assert found["counts"] == [[0, 4], [0, 2]]
    assert found["held"] == [4, 3]  # 1 of class 2 was answered with class 0, which is not shown


def test_matrices_are_kept_while_there_is_room_and_at_least_one():
    """Client 2 takes 9 cells and client 0 another 4."""
    values = np.array([0.9, np.nan, 0.2])
    assert [one["client"] for one in matrices(COUNTS, values, SHARE)["clients"]] == [2, 0]
    for cells, kept in ((13, [2, 0]), (12, [2]), (1, [2])):
        found = matrices(COUNTS, values, SHARE, cells)
        assert [one["client"] for one in found["clients"]] == kept
        assert found["of"] == 2
    assert found["all"]["counts"] == [[8, 1, 0], [2, 2, 4], [1, 0, 2]]


def test_recall_of_a_class_and_its_worst_client():
    """Class 0: 3 of 4 and 5 of 5; class 1: 2 of 4 and 0 of 4; class 2: client 2 alone, 2 of 3; class 3 nobody."""
    wider = np.pad(COUNTS, ((0, 0), (0, 1), (0, 1)))
    assert recall(wider, [0, 1, 2, 3]) == [[8, 9, 0, 3, 4], [2, 8, 2, 0, 4], [2, 3, 2, 2, 3], None]


def test_of_equally_bad_clients_the_one_with_more_samples_is_the_worst():
    both = np.array([[[0, 2], [0, 0]], [[0, 5], [0, 0]]])
    assert recall(both, [0]) == [[0, 7, 1, 0, 5]]


def test_recall_is_scikit_learns():
    rng = np.random.default_rng(0)
    truth, answer = rng.integers(0, 5, 200), rng.integers(0, 5, 200)
    counts = np.zeros((1, 5, 5), dtype=np.int64)
    np.add.at(counts[0], (truth, answer), 1)
    found = recall(counts, range(5))
    assert [right / of for right, of, *_ in found] == pytest.approx(recall_score(truth, answer, average=None))


def test_of_many_classes_those_of_the_lowest_recall_are_listed():
    """Over two methods: class 0 has 8 of 9, class 1 2 of 8, class 2 2 of 3, and class 3 has no samples."""
    wider = np.pad(COUNTS, ((0, 0), (0, 1), (0, 1)))
    assert weakest([wider, wider]) == [0, 1, 2]
    assert weakest([wider, wider], most=2) == [1, 2]
    assert weakest([]) == []


def test_seeds_are_summed_by_client(balanced):
    runs = [result for _, result in balanced if result.method == "fedper"]
    found = counted_by_client(runs, "served", 12)
    assert found.tolist() == sum(made_up_answers("fedper", seed) for seed in (0, 1)).tolist()


def test_runs_without_a_record_have_no_matrices(balanced, tmp_path):
    """A run of an earlier version, and a result that was never written."""
    _, result = balanced[0]
    for folder in (None, tmp_path):
        assert counted_by_client([replace(result, folder=folder)], "served", 12) is None


def test_a_damaged_record_is_a_sentence(balanced, tmp_path):
    _, result = balanced[0]
    line = recorded.line("served", result.round_of("served"), np.ones((2, 3, 3), dtype=np.int64))
    (tmp_path / recorded.FILE).write_text(line)
    with pytest.raises(CoterieError, match=r"confusion\.jsonl is damaged"):
        replace(result, folder=tmp_path).confusion("served")


def test_the_pages_matrices_stay_small(balanced, monkeypatch):
    """12 clients of 9 cells, three methods in two stages: with 300 cells, each has room for 50, 5 clients."""
    monkeypatch.setattr("coterie.report.contents.CELLS", 300)
    data = told(balanced, [Path("cmp")])
    for method in data["methods"]:
        for found in method["confusion"].values():
            assert (len(found["clients"]), found["of"]) == (5, 12)
    assert confusion.CELLS < 3e6 / 4  # of the 3 MB that a page may take
