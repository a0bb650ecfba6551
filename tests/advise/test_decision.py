"""The decision alone: numbers in, advice out. Scores are made up, so that the right answer is known."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.advise import Candidate, Findings, decide
from coterie.advise.shift import PullClusters, Shift
from coterie.errors import CoterieError
from coterie.metrics.accuracy import Accuracy
from coterie.metrics.regression import MSE

CLIENTS, NEWCOMERS, SEEDS = 12, 6, 2
ORDER = ("local", "fedavg", "fedper", "ifca")
FAMILY = {"local": "local", "fedavg": "shared", "feddyn": "shared", "fedper": "decoupling", "ifca": "clustering"}
# The same ups and downs for every method: clients are hard or easy, and differences between methods have no noise.
EASY = np.linspace(-0.1, 0.1, CLIENTS)


def candidate(method, seen, new=0.5, noise=0.0, seed=0):
    rng = np.random.default_rng([seed, *method.encode()])
    return Candidate(
        method, "served", FAMILY[method],
        seen + EASY + noise * rng.standard_normal((SEEDS, CLIENTS)), np.full((SEEDS, NEWCOMERS), new),
        test=seen, worst=seen, new_test=new, bytes_each_round=1.0,
    )


def findings(*candidates, newcomers="none", objective="mean"):
    return Findings(
        candidates, Shift(0.0, 0.0, 0.0), PullClusters(1, 0.0, 0.0, 0.0, (0,) * CLIENTS), CLIENTS, NEWCOMERS, (50, 50),
        Accuracy().scale, newcomers, objective,
    )


def four(local, fedavg, fedper, ifca, **options):
    return [candidate(m, v, **options) for m, v in zip(ORDER, (local, fedavg, fedper, ifca), strict=True)]


@pytest.mark.parametrize("winner", ORDER)
def test_without_noise_the_best_is_taken(winner):
    """All differences are the same for every client and seed, so their standard error is 0: nothing else is close."""
    advice = decide(findings(*four(*[0.8 if m == winner else 0.7 for m in ORDER])))
    assert advice.chosen is advice.best
    assert advice.chosen.candidate.method == winner
    assert [s.beyond_noise for s in advice.standings] == [m != winner for m in ORDER]


def test_within_noise_the_simpler_one_is_taken():
    """IFCA leads by 0.1 points in the mean, by 20 points for one half of the clients and against the other half: the
    error is 20 / sqrt(12) = 6 points."""
    made = four(0.4, 0.7, 0.4, 0.701)
    made[1] = replace(made[1], seen=made[1].seen + 0.2 * np.tile([1.0, -1.0], CLIENTS // 2))
    advice = decide(findings(*made))
    assert advice.best.candidate.method == "ifca"
    assert advice.chosen.candidate.method == "fedavg"
    assert advice.chosen.close


def noisy(method, behind, spread):
    """So far behind 0.8, with an error of spread / sqrt(12) against who has no ups and downs of its own."""
    made = candidate(method, 0.8 - behind)
    return replace(made, seen=made.seen + spread * np.tile([1.0, -1.0], CLIENTS // 2))


def test_much_noise_is_no_advantage():
    """FedAvg is 8 points behind with an error of 0.35 / sqrt(12) = 10, so within one; Local, which is simpler, is 3
    behind with an error of 0, so not within. Whoever would take FedAvg can have 5 points more with less."""
    local, fedavg, best = noisy("local", 0.03, 0.0), noisy("fedavg", 0.08, 0.35), candidate("ifca", 0.8)
    advice = decide(findings(local, fedavg, best))
    assert [s.close for s in advice.standings] == [False, True, True]
    assert advice.chosen.candidate.method == "ifca"
    assert decide(findings(fedavg, best)).chosen.candidate.method == "fedavg", "without Local nothing simpler is better"
    assert decide(findings(noisy("local", 0.09, 0.0), fedavg, best)).chosen.candidate.method == "fedavg"


def test_of_one_way_the_better_is_taken():
    """FedAvg and FedDyn both serve one shared model, so neither is simpler; FedDyn, 5 behind, is better than FedAvg, 8
    behind. Both are within 0.35 / sqrt(12) = 10 of IFCA, which is less simple."""
    made = [noisy("fedavg", 0.08, 0.35), noisy("feddyn", 0.05, 0.35), candidate("ifca", 0.8)]
    assert decide(findings(*made)).chosen.candidate.method == "feddyn"


def test_the_noise_is_that_of_the_paired_difference():
    """Bootstrap standard error of a mean of m differences with standard deviation s (of the sample): s / sqrt(m)."""
    apart = 0.02 * np.tile([1.0, -1.0], CLIENTS // 2)  # sample standard deviation 0.02
    best, other = candidate("ifca", 0.8), candidate("fedavg", 0.7)
    other = replace(other, seen=other.seen + apart)
    found = decide(findings(other, best)).standings[0]
    assert found.behind == pytest.approx(0.1)
    assert found.error == pytest.approx(0.02 / np.sqrt(CLIENTS), rel=0.1)  # 1000 draws: 2 % for one standard deviation


def test_noise_between_seeds_counts():
    """Seeds that disagree by 2 d about everybody: a drawn pair of seeds is off by d, 0, 0 or -d, so the error is
    d / sqrt(2)."""
    best, other = candidate("ifca", 0.8), candidate("fedavg", 0.7)
    other = replace(other, seen=other.seen + np.array([[0.05], [-0.05]]))
    assert decide(findings(other, best)).standings[0].error == pytest.approx(0.05 / np.sqrt(2), rel=0.1)


def test_what_newcomers_get_counts_as_much_as_they_come():
    """Local is 10 points better for those who train and 30 worse for newcomers: 0.75 * 10 = 0.25 * 30 is even."""
    local, shared = candidate("local", 0.8, new=0.35), candidate("fedavg", 0.7, new=0.7)
    for often, method in (("none", "local"), ("some", "fedavg"), ("often", "fedavg")):
        assert decide(findings(local, shared, newcomers=often)).chosen.candidate.method == method
    # 29 instead of 35 points: now some newcomers do not outweigh the others, many do
    kind = replace(local, new=np.full((SEEDS, NEWCOMERS), 0.41))
    assert decide(findings(kind, shared, newcomers="some")).chosen.candidate.method == "local"
    assert decide(findings(kind, shared, newcomers="often")).chosen.candidate.method == "fedavg"


def test_a_better_one_for_newcomers_is_named_even_if_they_do_not_count():
    advice = decide(findings(candidate("local", 0.8, new=0.2), candidate("fedavg", 0.7, new=0.6)))
    assert advice.chosen.candidate.method == "local"
    assert advice.for_newcomers.candidate.method == "fedavg"
    assert advice.new_behind == pytest.approx(0.4)
    advice = decide(findings(candidate("local", 0.7, new=0.2), candidate("fedavg", 0.8, new=0.6)))
    assert advice.for_newcomers is None


def test_the_worst_tenth_may_want_something_else():
    """Of 12 clients the worst tenth is one: FedPer leaves it at 0.1, FedAvg lifts it to 0.5."""
    mean, fair = candidate("fedper", 0.8), candidate("fedavg", 0.7)
    mean.seen[:, 0], fair.seen[:, 0] = 0.1, 0.5
    assert decide(findings(fair, mean)).chosen.candidate.method == "fedper"
    assert decide(findings(fair, mean, objective="worst")).best.candidate.method == "fedavg"


@pytest.mark.parametrize(("local", "said"), [(0.5, "too small"), (0.7, "as good"), (0.9, "enough")])
def test_whether_clients_can_learn_alone(local, said):
    assert decide(findings(*four(local, 0.7, 0.4, 0.4))).local == said


def test_clients_without_validation_data_do_not_count():
    best = candidate("ifca", 0.8)
    best.seen[:, 3] = np.nan
    other = candidate("fedavg", 0.7)
    other.seen[:, 3] = np.nan
    found = decide(findings(other, best))
    assert found.chosen.candidate.method == "ifca"
    assert found.standings[0].behind == pytest.approx(0.1)


@pytest.mark.parametrize("scored", [1, 2])
def test_draws_are_among_the_clients_that_have_a_score(scored):
    """Of three clients one or two have validation samples. One in 27 (or eight) draws of all three met nobody with a
    score; the error was then NaN, nothing close to anything and nothing beyond noise.

    With one client that has a score all draws are of it, so differences have no noise: 0.1 is beyond it."""
    made = [replace(c, seen=np.where(np.arange(3) < scored, c.seen[:, :3], np.nan)) for c in four(0.5, 0.6, 0.7, 0.7)]
    advice = decide(findings(*made))
    assert advice.chosen.candidate.method == "fedper"
    assert [s.error for s in advice.standings] == pytest.approx([0, 0, 0, 0])
    assert advice.standings[0].beyond_noise
    assert not advice.standings[3].beyond_noise


def test_newcomers_without_a_score_do_not_decide():
    """Of two newcomers one has a score: as if it were alone. Where none has, those who train decide, and neither is an
    error. FedAvg is 20 points better for newcomers that come often, FedPer 10 for the others."""
    made = [candidate("fedavg", 0.6, new=0.7), candidate("fedper", 0.7, new=0.5)]
    alone = [replace(c, new=c.new[:, :1]) for c in made]
    one = [replace(c, new=np.where(np.arange(2) < 1, c.new[:, :2], np.nan)) for c in made]
    none = [replace(c, new=np.full_like(c.new[:, :2], np.nan)) for c in made]
    assert decide(findings(*one, newcomers="often")).chosen.candidate.method == "fedavg"
    values = [[s.value for s in decide(findings(*which, newcomers="often")).standings] for which in (alone, one)]
    assert values[0] == pytest.approx(values[1])
    advice = decide(findings(*none, newcomers="often"))
    assert advice.chosen.candidate.method == "fedper"
    assert advice.for_newcomers is None
    assert advice.chosen.value == pytest.approx(0.7)


def test_without_any_validation_sample_the_reason_is_said():
    made = [replace(c, seen=np.full_like(c.seen, np.nan)) for c in four(0.5, 0.6, 0.7, 0.7)]
    with pytest.raises(CoterieError, match="no client that trains has a sample for validation"):
        decide(replace(findings(*made), guess=np.full(CLIENTS, np.nan)))


def test_seeds_in_which_a_client_has_no_score_do_not_count_for_it():
    """The third client has a score in the second seed alone; draws are among the two that have one in both."""
    made = [replace(c, seen=c.seen[:, :3].copy()) for c in four(0.5, 0.6, 0.7, 0.7)]
    for c in made:
        c.seen[0, 2] = np.nan
    standings = decide(findings(*made)).standings
    assert standings[2].value == pytest.approx(0.7 + EASY[:2].mean())
    assert np.isfinite([s.error for s in standings]).all()


def test_what_has_diverged_is_left_out_and_nothing_left_is_an_error():
    broken = candidate("fedper", float("nan"))
    assert [s.candidate.method for s in decide(findings(candidate("fedavg", 0.5), broken)).standings] == ["fedavg"]
    with pytest.raises(CoterieError, match="lower the learning rate"):
        decide(findings(broken))


@pytest.mark.parametrize(
    ("ahead", "spread", "learned"),
    [(0.1, 0.0, True), (0.0, 0.0, False), (-0.1, 0.0, False), (0.02, 0.2, False), (0.1, 0.2, True)],
)
def test_nothing_is_learned_where_a_constant_answer_is_as_good(ahead, spread, learned):
    """The constant is `spread` better for one half of the clients and worse for the other: the error is
    0.2 / sqrt(12) = 0.058, between 0.02 and 0.1."""
    made = [candidate("local", 0.3), candidate("fedper", 0.5 + ahead)]
    guess = 0.5 + EASY + spread * np.tile([1.0, -1.0], CLIENTS // 2)
    assert decide(replace(findings(*made), guess=guess)).learned is learned


@pytest.mark.parametrize("scale", [Accuracy().scale, MSE().scale])
def test_a_lead_that_is_rounding_alone_teaches_nothing(scale):
    """1/9, 2/9, ... are counted in float32 by the runs and in float64 for the constant answer: they differ by 1e-8 for
    every client and seed alike, so the bootstrap sees no noise. In the unit of an error the same holds at any size."""
    level = (1.0 if scale.percent else 1e6) * scale.sign * np.arange(1, 9) / 9
    same = level + np.abs(level - level.astype(np.float32))
    assert same.mean() > level.mean()
    best = replace(candidate("local", 0.5), seen=np.tile(same, (SEEDS, 1)))
    found = replace(findings(best), metric=scale, guess=level)
    assert not decide(found).learned
    assert decide(replace(found, guess=level - 0.01 * abs(level))).learned


scores = st.lists(st.floats(0, 1), min_size=4, max_size=4)


@settings(max_examples=30)
@given(scores, scores, st.floats(0, 0.3), st.integers(0, 99), st.sampled_from(["none", "some", "often"]),
       st.sampled_from(["mean", "worst"]))
def test_never_something_worse_than_the_best_beyond_noise(seen, new, noise, seed, newcomers, objective):
    """Also: nothing simpler is better, and what is simpler and close is worse than something simpler still; worsening a
    loser that is less simple changes nothing."""
    made = [
        candidate(m, v, n, noise, seed) for m, v, n in zip(ORDER, seen, new, strict=True)
    ]
    advice = decide(findings(*made, newcomers=newcomers, objective=objective))
    assert not advice.chosen.beyond_noise
    assert advice.chosen.behind <= advice.chosen.error
    assert advice.best.value == max(s.value for s in advice.standings)
    place = [s.candidate.method for s in advice.standings].index(advice.chosen.candidate.method)
    values = [s.value for s in advice.standings]
    assert values[place] == max(values[:place + 1])
    assert not any(s.close and s.value == max(values[:k + 1]) for k, s in enumerate(advice.standings[:place]))
    losers = [s.candidate for s in advice.standings[place + 1:] if s is not advice.best]
    if losers:
        worse = replace(losers[0], seen=losers[0].seen - 0.1, new=losers[0].new - 0.1)
        again = decide(findings(*(worse if c is losers[0] else c for c in made), newcomers=newcomers,
                                objective=objective))
        assert again.chosen.candidate.method == advice.chosen.candidate.method


@settings(max_examples=30)
@given(scores, st.floats(0, 0.3), st.integers(0, 99), st.sampled_from(ORDER))
def test_what_is_far_better_for_everybody_is_taken(seen, noise, seed, method):
    """Ten times the range of all scores ahead: no standard error of a difference is as large."""
    made = [candidate(m, v + 20 * (m == method), 0.5, noise, seed) for m, v in zip(ORDER, seen, strict=True)]
    assert decide(findings(*made)).chosen.candidate.method == method
