"""How newcomers fare by rounds since arrival: by hand on a few numbers, and beside what a real run recorded."""

import json

import numpy as np
import pytest

from coterie.errors import CoterieError
from coterie.evaluation.score import Evaluation, Scores
from coterie.report.arrivals import newcomers, schedule
from coterie.report.contents import gather
from coterie.report.figures import figures
from coterie.report.page import page
from coterie.running.folder import Folder
from coterie.running.result import Result

CHURN = [[0, None], [0, None], [1, None], [2, 3]]
# Clients 0 and 1 are there from the start, 2 arrives in round 1, 3 in round 2 and is gone in round 3.
SERVED = [{0: 0.1, 1: 0.3}, {0: 0.4, 1: 0.6, 2: 0.2}, {0: 0.6, 1: 0.8, 2: 0.5, 3: 0.3}, {0: 0.7, 1: 0.9, 2: 0.9}]
ADAPTED = [*SERVED[:3], {0: 0.7, 1: 0.9, 2: 0.7}]
OTHER_SEED = [SERVED[0], {**SERVED[1], 2: 0.4}, *SERVED[2:]]  # client 2 gets 0.4 on arrival instead of 0.2


def scores(values, metric="accuracy"):
    ids, test = np.array(list(values)), np.array(list(values.values()), dtype=float)
    found = {"loss": test} if metric == "loss" else {"loss": 1 - test, "accuracy": test}
    return Scores(ids, ids + 5, ids, found, found)


def run(lines, arrives, every=1, metric="accuracy"):
    history = [Evaluation(every * t, {"served": scores(values, metric)}) for t, values in enumerate(lines)]
    return Result("fedavg", 0, tuple(history), arrives=arrives)


def test_the_values_by_hand(tmp_path):
    """Two seeds of one method, written as a run writes them and read as the report reads them."""
    for seed, served in enumerate((SERVED, OTHER_SEED)):
        folder = Folder(tmp_path / "fedavg" / f"seed{seed}")
        folder.create({"method": "fedavg", "training": {"seed": seed, "rounds": 3, "lr": 0.1}, "population": 4,
                       "clients": list("abcd"), "churn": CHURN})
        for t in range(4):
            stages = {"served": scores(served[t]), "adapted": scores(ADAPTED[t])}
            folder.append_evaluation(Evaluation(t, stages), [a for a, _ in CHURN])
    data = gather([tmp_path])
    assert data["churn"] == {"rounds": 3, "start": 2, "arrived": 2, "left": 1}
    found = data["methods"][0]["newcomers"]
    # On arrival: 2 in round 1 with 0.2 and 0.4, 3 in round 2 with 0.3 in both seeds, so (0.2 + 0.4 + 0.3 + 0.3) / 4.
    # Those from the start have 0.5 in round 1 and 0.7 in round 2, so 0.6. Client 2 alone is there 1 and 2 rounds later;
    # its 0.5 is behind 0.7 in round 2, its 0.9 ahead of 0.8 in round 3.
    assert found["served"] == {
        "span": 1, "low": [0, 1, 2], "high": [0, 1, 2], "age": [0, 1, 2], "clients": [2, 1, 1],
        "mean": [0.3, 0.5, 0.9], "start": [0.6, 0.7, 0.8], "reached": 2,
    }
    assert found["adapted"]["mean"] == [0.25, 0.5, 0.7]
    assert found["adapted"]["reached"] is None  # 0.7 against 0.8 is as far as it gets


def test_evaluations_that_are_apart_make_spans():
    """Every second round: 2 is 1 and 3 rounds old, 3 is 0 and 2, so each span of two rounds has both."""
    lines = [{0: 0.1}, {0: 0.5, 2: 0.2, 3: 0.4}, {0: 0.5, 2: 0.6, 3: 0.8}]
    found = newcomers([run(lines, (0, 0, 1, 2), every=2)], "served", 60)
    assert (found["span"], found["low"], found["high"], found["age"]) == (2, [0, 2], [1, 3], [0.5, 2.5])
    assert found["clients"] == [2, 2]
    assert found["mean"] == pytest.approx([0.3, 0.7])
    assert found["reached"] == 1
    many = run([{0: 0.5}] + [{0: 0.5, 1: t / 100} for t in range(100)], (0, 1))  # ages 0 to 99, at most 40 points
    thinned = newcomers([many], "served", 40)
    assert (thinned["span"], len(thinned["mean"]), thinned["high"][-1]) == (3, 34, 99)
    assert thinned["mean"][:2] == pytest.approx([0.01, 0.04])  # of 0, 1, 2 and of 3, 4, 5 hundredths


@pytest.mark.parametrize(
    ("own", "metric", "reached"),
    [
        ((0.6, 0.2, 0.2), "accuracy", None),  # above 0.5 once, by luck
        ((0.2, 0.7, 0.4), "accuracy", 1),  # +0.2 and then -0.1: level with what follows
        ((0.5, 0.5, 0.5), "accuracy", 0),
        ((0.9, 0.9, 0.4), "loss", 2),  # errors: lower is better
    ],
)
def test_who_has_caught_up(own, metric, reached):
    lines = [{0: 0.5}] + [{0: 0.5, 1: value} for value in own]
    assert newcomers([run(lines, (0, 1), metric=metric)], "served", 60)["reached"] == reached


def test_nobody_from_the_start_is_left_to_compare_with():
    lines = [{0: 0.5}, {1: 0.4}, {1: 0.9}]
    found = newcomers([run(lines, (0, 1))], "served", 60)
    assert np.isnan(found["start"]).all()
    assert found["reached"] is None
    assert newcomers([run(lines[:1], (0, 1))], "served", 60) is None  # nobody has arrived yet
    assert schedule([[0, 2], [1, None], [9, None]], 2) == {"rounds": 2, "start": 1, "arrived": 1, "left": 1}


def test_a_real_run_is_shown_as_it_was_recorded(churned):
    """Means by age, weighed by clients, from metrics.jsonl of both seeds; the page and the figures have them."""
    data = gather([churned])
    assert data["churn"] == {"rounds": 8, "start": 4, "arrived": 3, "left": 2}  # as the fixture says
    assert [m["name"] for m in data["methods"] if "newcomers" in m] == ["local", "fedavg", "fedper"]
    for stage in ("served", "adapted"):
        recorded = {}
        for seed in (0, 1):
            for line in (churned / "fedper" / f"seed{seed}" / "metrics.jsonl").read_text().splitlines():
                for age, clients, mean in json.loads(line).get("newcomers", {}).get(stage, ()):
                    recorded.setdefault(age, []).append((clients, clients * mean))
        found = data["methods"][2]["newcomers"][stage]
        assert found["age"] == sorted(recorded) == [0, 1, 2, 3, 4, 5, 6]  # 1 and 2 come in round 2 of 8
        sums = [np.sum(recorded[age], axis=0) for age in sorted(recorded)]
        assert found["mean"] == pytest.approx([total / n for n, total in sums], rel=1e-3)
        assert found["clients"] == [3, 3, 2, 2, 2, 2, 2]  # 3 comes in round 5 and is gone in round 7
    left, right = dict(figures(data))["newcomers"].axes
    for axes, stage in ((left, "served"), (right, "adapted")):
        drawn = {line.get_label(): line.get_ydata() / 100 for line in axes.lines}
        own = {m["label"]: m["newcomers"][stage]["mean"] for m in data["methods"]}
        assert {name: drawn[name].tolist() for name in own} == {name: pytest.approx(own[name]) for name in own}
        assert len(drawn) == 3 + 1  # the last is the clients from the start


def test_runs_without_churn_have_nothing_of_it(compared, churned):
    """Neither keys nor a figure; and no run here differs from another in who is there when."""
    data = gather([compared])
    assert "churn" not in data
    assert not any("newcomers" in m for m in data["methods"])
    assert '"newcomers"' not in page(data).partition('id="data">')[2].partition("</script>")[0]
    assert "newcomers" not in dict(figures(data))
    assert not any("which rounds" in note for note in data["notes"] + gather([churned])["notes"])


def test_schedules_that_differ_or_make_no_sense_are_called_that(tmp_path):
    for seed, churn in enumerate((CHURN, [*CHURN[:3], [3, None]])):
        folder = Folder(tmp_path / "fedavg" / f"seed{seed}")
        folder.create({"method": "fedavg", "training": {"seed": seed, "rounds": 1, "lr": 0.1}, "population": 4,
                       "clients": list("abcd"), "churn": churn})
        folder.append_evaluation(Evaluation(1, {"served": scores(SERVED[1])}), [a for a, _ in churn])
    assert "These runs differ in which clients are there in which rounds." in gather([tmp_path])["notes"]
    config = json.loads((folder.path / "config.json").read_text())
    (folder.path / "config.json").write_text(json.dumps({**config, "churn": [*CHURN[:3], [2, "soon"]]}))
    with pytest.raises(CoterieError, match=r"config.json is damaged: its churn"):
        gather([folder.path])
