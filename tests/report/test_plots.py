"""The picture is written for every shape of comparison, and shows the numbers it should."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from coterie.contract.metric import Scale
from coterie.errors import CoterieError
from coterie.evaluation.score import Evaluation, Scores
from coterie.report import plots
from coterie.report.plots import client_values, convergence, newcomers, picture
from coterie.running.result import Result

BALANCED = Scale("balanced_accuracy", "balanced accuracy", higher=True, percent=True)
HUBER = Scale("loss", "huber", higher=False)


def scores(values: Sequence[float], metric: str = "accuracy") -> Scores:
    test = np.array(values, dtype=np.float64)
    table = {"loss": test} if metric == "loss" else {"loss": 1 - test, "accuracy": test}
    val = {name: np.full(len(test), np.nan) for name in table}
    return Scores(np.arange(len(test)), np.full(len(test), 10), np.zeros(len(test), dtype=np.int64), table, val)


def result(
    method: str = "fedavg", clients: int = 8, rounds: int = 3, seed: int = 0, metric: str = "accuracy",
    unseen: bool = False,
) -> Result:
    rng = np.random.default_rng([len(method), seed])
    history = []
    for number in range(rounds):
        values = rng.random((4, clients)) * (40 / (1 + number) if metric == "loss" else 1)
        stages = ["served", "adapted", *(["unseen_served", "unseen_adapted"] if unseen else [])]
        found = {stage: scores(row, metric) for stage, row in zip(stages, values, strict=False)}
        history.append(Evaluation(10 * number, found))
    return Result(method, seed, tuple(history))


@pytest.mark.parametrize(
    "results",
    [
        pytest.param([result("local"), result("fedavg")], id="one seed"),
        pytest.param([result(m, seed=s) for m in ("local", "ditto") for s in range(3)], id="three seeds"),
        pytest.param([result("local", metric="loss"), result("fedavg", metric="loss")], id="regression"),
        pytest.param([result(unseen=True)], id="unseen clients"),
        pytest.param([result(clients=1, rounds=1)], id="one client, one round"),
        pytest.param([result("local", rounds=2), result("fedavg", rounds=5)], id="a run stopped early"),
    ],
)
def test_the_picture_is_written(results: list[Result], tmp_path: Path) -> None:
    path = picture(results, tmp_path / "comparison.png")
    assert path == tmp_path / "comparison.png"
    image = imread(path)  # [height, width, 4], white where nothing is drawn
    assert image.shape[1] > 1000
    assert 0.001 < float((image[..., :3].min(axis=2) < 0.9).mean()) < 0.5


def test_fifteen_methods_and_two_hundred_clients_get_more_height(tmp_path: Path) -> None:
    few = imread(picture([result("m1", clients=200)], tmp_path / "few.png"))
    many = imread(picture([result("m" * (i + 1), clients=200) for i in range(15)], tmp_path / "many.png"))
    assert many.shape[1] == few.shape[1]
    assert many.shape[0] > 3 * few.shape[0]


def test_values_that_are_missing_or_infinite_do_not_stop_the_picture(tmp_path: Path) -> None:
    nothing, broken = scores([math.nan, math.nan], "loss"), scores([1.0, math.inf], "loss")
    run = Result("fedavg", 0, (Evaluation(0, {"served": nothing, "adapted": broken}),))
    assert picture([run], tmp_path / "broken.png").is_file()


def test_a_client_is_one_dot_whose_place_is_its_mean_over_seeds() -> None:
    def run(seed: int, *values: float) -> Result:
        return Result("fedavg", seed, (Evaluation(0, {"served": scores(values), "adapted": scores(values)}),))

    # client 2 has no test data in either seed, client 1 in one of them
    dots = client_values([run(0, 0.2, 0.5, math.nan), run(1, 0.4, math.nan, math.nan)], "served")
    assert dots == pytest.approx([30.0, 50.0])  # in percent


def test_a_curve_ends_where_its_run_stopped() -> None:
    rounds, means = convergence([result(rounds=3), result(rounds=2, seed=1)], "served")
    assert rounds.tolist() == [0, 10, 20]
    assert means.shape == (2, 3)
    assert np.isnan(means).tolist() == [[False, False, False], [False, False, True]]


def test_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(CoterieError, match="there is no result"):
        picture([], tmp_path / "empty.png")


@pytest.mark.parametrize(
    ("scale", "what", "of", "high"), [(BALANCED, "balanced accuracy in %", "balanced accuracy of a client in %", 40.0),
                                      (HUBER, "huber", "huber of a client", 0.4)],
)
def test_axes_and_titles_are_those_of_the_metric(
    scale: Scale, what: str, of: str, high: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two clients with 0.2 and 0.4, of which one arrived in round 1."""
    values = np.array([0.2, 0.4])
    one = Scores(np.arange(2), np.full(2, 10), np.zeros(2, int), {"loss": values, scale.name: values},
                 {"loss": values, scale.name: values}, scale)
    run = Result("fedavg", 0, tuple(Evaluation(t, {"served": one, "adapted": one}) for t in (1, 2)), arrives=(0, 1))
    drawn = []
    made = plots.new_figure

    def kept(width: float, height: float) -> Figure:
        drawn.append(made(width, height))
        return drawn[-1]

    monkeypatch.setattr(plots, "new_figure", kept)
    picture([run], tmp_path / "picture.png")
    newcomers([run], tmp_path / "newcomers.png")
    left, right = drawn[0].axes
    assert left.get_xlabel() == f"test {of} (round chosen on validation data)"
    assert right.get_title(loc="left") == f"mean test {what} over clients"
    assert drawn[1].axes[0].get_title(loc="left") == f"test {what} of clients that arrived during training, as served"
    assert client_values([run], "served").max() == pytest.approx(high)
