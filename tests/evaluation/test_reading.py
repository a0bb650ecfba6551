"""How values are read: rounding, unit and words follow the metric's scale, whatever the metric is called."""

import math

import numpy as np
import pytest

from coterie.contract.metric import Scale
from coterie.evaluation.reading import direction, measured, number, points, scaled, shortly, shown, unit
from coterie.evaluation.score import Scores, loss_scale

F1 = Scale("f1", "macro F1", higher=True, percent=True)
HUBER = Scale("loss", "huber", higher=False)
R2 = Scale("r2", "R²", higher=True)


@pytest.mark.parametrize(
    ("value", "decimals", "text"),
    [(88.25, 1, "88.3"), (88.35, 1, "88.4"), (100 * 0.28725, 2, "28.73"), (88.2499, 1, "88.2"), (-0.25, 1, "-0.3")],
)
def test_halves_are_rounded_away_from_zero(value: float, decimals: int, text: str) -> None:
    """88.25 is a double, where round-half-even gives 88.2; 88.35 and 100 * 0.28725 lie below their decimals."""
    assert number(value, decimals) == text


@pytest.mark.parametrize(
    ("scale", "mean", "one", "after", "apart", "axis", "better"),
    [
        (F1, "28.73", "28.7", " %", " points", "macro F1 in %", "higher is better"),
        (HUBER, "0.287", "0.287", "", "", "huber", "lower is better"),
        (R2, "0.287", "0.287", "", "", "R²", "higher is better"),
    ],
)
def test_a_value_is_read_by_its_scale(scale, mean, one, after, apart, axis, better):
    """0.28725 of a share is 28.725 %: two decimals for a mean, one for a client; other values have three."""
    assert (shown(scale, 0.28725), shortly(scale, 0.28725)) == (mean, one)
    assert (unit(scale), points(scale), measured(scale), direction(scale)) == (after, apart, axis, better)
    assert scaled(scale, np.array([0.5])).tolist() == ([50.0] if scale.percent else [0.5])
    assert shown(scale, math.nan) == "-"


def test_a_loss_is_called_by_its_name_and_mse_only_where_it_is():
    assert loss_scale(0).title == "MSE"
    assert loss_scale(0, "huber") == HUBER
    assert loss_scale(0, "squared error").title == "MSE"
    assert loss_scale(3).title == "loss"  # cross entropy, of which nobody gave another name


def test_scores_seen_by_another_metric():
    """Values stay; what was not recorded is not known."""
    ids, one = np.arange(2), np.array([0.25, 0.5])
    scores = Scores(ids, ids, ids, {"loss": one, "f1": 2 * one}, {"loss": one}, HUBER)
    assert scores.by(F1).test["f1"].tolist() == [0.5, 1.0]
    assert scores.by(F1).metric == "f1"
    assert np.isnan(scores.by(R2).test["r2"]).all()
    assert scores.metric == "loss"
