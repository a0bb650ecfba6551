"""The sentence on made-up points whose answer is known: every client's value is written down."""

import math

import numpy as np
import pytest

from coterie.contract.metric import Scale
from coterie.dissect.answer import Found, answer, share_of_gain
from coterie.dissect.points import Point
from coterie.metrics.accuracy import Accuracy
from coterie.report.table import Line
from coterie.report.verdict import MEAN, WORST, Case
from coterie.running.outcome import DIVERGED, NOTHING

MSE = Scale("mse", "MSE", higher=False)
CLIENTS = 12
BYTES = {"nothing": 0, "biases and scales": 40, "head": 400, "adapters of rank 4": 2000, "everything": 9000}


def found(name, mean, spread=0.0, scale=None, outcome="", seeds=1, seed_spread=0.0, values=None):
    """A point whose clients lie evenly around the mean, `spread` to either side."""
    scale = scale or Accuracy().scale
    own = mean + spread * np.linspace(-1, 1, CLIENTS) if values is None else np.array(values)
    table = np.stack([own + seed_spread * (k - (seeds - 1) / 2) for k in range(seeds)])
    worst = table.min(1) if scale.higher else table.max(1)
    deviation = float(table.mean(1).std(ddof=1)) if seeds > 1 else math.nan
    line = Line(
        method=name, label=name, stage="served", when="chosen", scale=scale, seeds=seeds, mean=float(table.mean()),
        mean_spread=deviation, pooled=0.0, client_std=float(own.std()), worst=float(worst.mean()),
        worst_spread=deviation, lowest=0.0, best=0.0, jain=1.0, left_out=0, diverged=0, outcome=outcome, why="",
        unseen=math.nan, epsilon=math.nan, bytes_each_round=0.0, seconds=0.0, rounds=(1,) * seeds, steps=0.0,
        printed=False,
    )
    case = Case(line, table, np.full(CLIENTS, 1000, dtype=np.int64))
    return Found(Point(name, "fedavg", "", BYTES[name]), case)


def test_the_fewest_bytes_with_most_of_a_gain_are_named():
    """From 60 to 80: the gain is 20 points, of which 19 are 95 %. The head has 19.4, 97 %; the biases 10, 50 %."""
    points = [found("nothing", 0.6), found("biases and scales", 0.7), found("head", 0.794), found("everything", 0.8)]
    known = answer(points, MEAN)
    assert (known.enough, known.personal, known.best) == ("head", 400, "everything")
    assert known.gain == pytest.approx(0.2)
    assert known.share == pytest.approx(0.97)
    assert known.level == ()  # clients are alike, so that nothing is noise
    assert known.sentence == (
        "400 bytes a client (head) give 97 % of the gain of 20.00 points (served, the mean over clients: 60.00 % with "
        "nothing personal, 80.00 % with everything, more than noise between clients)."
    )
    assert share_of_gain(points, points[1], MEAN) == pytest.approx(0.5)


def test_with_several_seeds_the_noise_between_them_is_known_too():
    points = [found("nothing", 0.6, seeds=3, seed_spread=0.001), found("head", 0.8, seeds=3, seed_spread=0.001)]
    assert "more than noise)" in answer(points, MEAN).sentence
    assert "give all of the gain of 20.00 points" in answer(points, MEAN).sentence


def test_seeds_that_differ_more_than_the_points_are_noise():
    """Means of 0.50, 0.60, 0.70 have a deviation of 0.1: two standard errors of a difference are 2 * 0.1 * sqrt(2 / 3)
    = 0.163, more than 0.05."""
    points = [found("nothing", 0.6, seeds=3, seed_spread=0.1), found("head", 0.65, seeds=3, seed_spread=0.1)]
    known = answer(points, MEAN)
    assert known.sentence == ("Nothing to be gained by more than noise (served, the mean over clients: 60.00 % with "
                              "nothing personal, 65.00 % with head).")
    assert (known.enough, known.personal, known.best) == ("", None, "head")
    assert share_of_gain(points, points[1], MEAN) is None


def test_where_personal_parts_are_worse_nothing_is_to_be_gained():
    known = answer([found("nothing", 0.8), found("head", 0.7), found("everything", 0.6)], MEAN)
    assert known.sentence.startswith("Nothing to be gained as no personal part is better than none (served")
    assert "80.00 % with nothing personal, 70.00 % with head" in known.sentence


def test_fewer_bytes_that_cannot_be_told_apart_are_named():
    """The biases give half of the gain in the mean, but their clients differ by +-0.3 from the head's: the standard
    error of 12 differences evenly in +-0.3 is 0.057, twice that is more than the 0.1 between them."""
    points = [found("nothing", 0.4), found("biases and scales", 0.5, spread=0.3), found("head", 0.6)]
    known = answer(points, MEAN)
    assert known.enough == "head"
    assert known.level == ("biases and scales",)
    assert "Within noise, fewer bytes do as well: biases and scales (40 bytes, 50 %)." in known.sentence


def test_a_tie_for_the_best_is_named():
    known = answer([found("nothing", 0.5), found("head", 0.7), found("everything", 0.7)], MEAN)
    assert known.enough == "head"
    assert "give all of the gain" in known.sentence
    assert known.sentence.endswith("Level with head: everything.")


def test_what_diverged_or_learned_nothing_is_never_the_best():
    points = [found("nothing", 0.5), found("head", 0.7), found("adapters of rank 4", 0.9, outcome=DIVERGED),
              found("everything", 0.9, outcome=NOTHING)]
    assert answer(points, MEAN).best == "head"
    assert share_of_gain(points, points[2], MEAN) is None
    diverged = [found("nothing", 0.5, outcome=DIVERGED), found("head", 0.7)]
    assert "cannot be said: the run with nothing personal diverged" in answer(diverged, MEAN).sentence
    hopeless = [found("nothing", 0.5), found("head", 0.4, outcome=NOTHING)]
    assert "no personal part learned anything" in answer(hopeless, MEAN).sentence
    assert answer([], MEAN).sentence == "No client has test data, so there is nothing to compare."


def test_a_shared_model_that_learned_nothing_is_still_what_the_gain_is_counted_from():
    """Label skew can leave FedAvg below a constant answer: a reason for personal parts, and none against the answer."""
    assert answer([found("nothing", 0.3, outcome=NOTHING), found("head", 0.7)], MEAN).gain == pytest.approx(0.4)


def test_errors_are_better_when_lower():
    """From 4 to 2: the head's 2.1 is 95 % of the way; MSE is no share, so that its difference has no points."""
    points = [found("nothing", 4.0, scale=MSE), found("head", 2.1, scale=MSE), found("everything", 2.0, scale=MSE)]
    known = answer(points, MEAN)
    assert known.enough == "head"
    assert known.gain == pytest.approx(2.0)
    assert "give 95 % of the gain of 2.000 (served, the mean over clients: 4.000 with nothing" in known.sentence


def test_the_worst_client_has_an_answer_of_its_own():
    """The head lifts the mean and leaves the worst client where it was; everything lifts it to 60."""
    base = [0.2, *[0.5] * (CLIENTS - 1)]
    points = [found("nothing", 0, values=base), found("head", 0, values=[0.2, *[0.9] * (CLIENTS - 1)]),
              found("everything", 0, values=[0.9] * CLIENTS)]
    known = answer(points, WORST)
    assert known.enough == "everything"
    assert "the worst client: 20.00 % with nothing personal, 90.00 % with everything" in known.sentence
