"""The pilot and its advice on populations whose right answer is written down in docs/advise.md."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import populations
import pytest
import torch

from coterie.advise import Candidate, Findings, Pilot, advise, decide, report
from coterie.advise.pilot import PilotPlan, candidates, constant, fewer
from coterie.advise.shift import PullClusters, Shift
from coterie.contract.metric import Scale
from coterie.data import Federation
from coterie.errors import CoterieError
from coterie.metrics.accuracy import Accuracy
from coterie.models import model
from coterie.running.experiment import Experiment
from coterie.running.runs import compare

EXPECTED = {
    "hospitals": {"decoupling", "interpolation"},
    "phones": {"meta-learning", "fine-tuning"},
    "businesses": {"clustering"},
}


def federation(population, **options):
    return Federation.from_clients(population.clients, unseen=population.unseen, val=0.2, **options)


def pilot_on(population, **options):
    data = federation(population)
    factory = model("mlp", tuple(data.x.shape[1:]), data.classes, hidden=32)
    return advise(factory, data, newcomers=population.newcomers, lr=0.1, device="cpu", **options)


@pytest.mark.parametrize("name", EXPECTED)
def test_each_population_gets_the_family_that_was_expected(name):
    """Written down before the pilot was built; the populations' structure is stated in tests/populations.py."""
    population = getattr(populations, name)()
    pilot = pilot_on(population, rounds=16, seeds=1)
    assert pilot.advice.way in EXPECTED[name]
    assert pilot.findings.newcomers_held_out == population.unseen
    if name == "businesses":  # customers of one type have the same answers, those of different types do not
        assert pilot.findings.clusters.count >= 3
        assert pilot.advice.local == "too small"  # 48 samples a customer, ten times as many among its like
    if name == "hospitals":
        assert not pilot.findings.clusters.exist  # no two hospitals alike, by construction
    said = " ".join(report.sentences(pilot))
    assert f"Take {pilot.advice.way}" in said
    assert ("clients held out" in said) == (population.unseen > 0)


@pytest.fixture(scope="module")
def small():
    """A few clients for everything that does not depend on the answer."""
    return populations.businesses(count=9, n=40)


def test_the_same_rounds_give_the_same_advice(small):
    first, second = (pilot_on(small, rounds=2, seeds=1) for _ in range(2))
    records = [report.record(p, "") for p in (first, second)]
    for record in records:
        del record["seconds"], record["sentences"]
        for c in record["candidates"]:
            del c["seconds"]
    assert records[0] == records[1]


def test_a_way_of_several_models_is_left_out_where_the_model_comes_out_the_same(small):
    """The others are compared all the same, and the reason is said."""
    data = federation(small)
    drawn = model("mlp", tuple(data.x.shape[1:]), data.classes, hidden=4)

    def fixed():
        torch.manual_seed(0)
        return drawn()

    pilot = advise(fixed, data, newcomers=small.newcomers, lr=0.1, device="cpu", rounds=1, seeds=1)
    (reason,) = pilot.plan.left_out
    assert reason.startswith("ifca was left out: ")
    assert "two of them came out equal" in reason
    assert not [c for c in pilot.findings.candidates if "ifca" in c.label]


@pytest.mark.long
def test_the_pilot_sizes_itself(small):
    """It measures, and stays within the rounds it may take; what it may not is said before it is trained."""
    pilot = pilot_on(small, budget=60)
    assert pilot.plan.rounds >= 10
    assert pilot.plan.seconds <= 60
    with pytest.raises(CoterieError, match=r"does not fit into 0\.5 seconds"):
        pilot_on(small, budget=0.5)


def test_regression_is_judged_by_its_error():
    """Clients with opposite slopes: one linear model for all has the error of predicting 0, its own has none."""
    rng = np.random.default_rng(0)
    clients = []
    for i in range(8):
        x = rng.standard_normal((60, 3)).astype(np.float32)
        clients.append((x, x[:, 0] * (1 if i % 2 else -1)))
    data = Federation.from_clients(clients, val=0.2)
    pilot = advise(model("linear", (3,), 1), data, rounds=4, seeds=1, lr=0.1, device="cpu", newcomers="none")
    assert (pilot.findings.metric.name, pilot.findings.metric.higher) == ("loss", False)
    assert pilot.advice.way not in ("shared", "conflict-free")
    assert f"{pilot.findings.metric.title} 0." in " ".join(report.sentences(pilot))
    by_label = {s.candidate.label: s.value for s in pilot.advice.standings}
    assert by_label["fedavg"] < -0.5  # the mean of opposite slopes is 0, whose error is x's variance, 1


def test_the_pilot_trains_the_experiments_loss_with_as_much_warm_up_as_its_rounds_hold():
    """A loss that is 0 everywhere trains nothing: every candidate is off by exactly 0. The look for groups takes 5
    rounds, fewer than this warm-up; more than the pilot's own rounds is refused."""
    rng = np.random.default_rng(0)
    clients = [(rng.standard_normal((24, 3)), rng.standard_normal(24)) for _ in range(4)]
    data = Federation.from_clients(clients, classes=0, val=0.2)
    options = {"rounds": 6, "seeds": 1, "device": "cpu", "newcomers": "none"}

    def nothing(outputs, y):
        return outputs.flatten() * 0

    pilot = advise(model("linear", (3,), 1), data, loss=nothing, warmup=6, **options)
    assert all((one.seen == 0).all() for one in pilot.findings.candidates)
    with pytest.raises(CoterieError, match="warmup must be at most the number of rounds, 6, not 7"):
        advise(model("linear", (3,), 1), data, warmup=7, **options)


def test_the_guess_is_each_clients_most_frequent_training_class():
    """Most of the first client's labels are 0, of the others' 1; the accuracy is recounted from the samples."""
    y = [np.repeat([0, 1], [30, 10]), np.repeat([0, 1], [4, 36]), np.ones(40, int)]
    data = Federation.from_clients([(np.zeros((40, 2), np.float32), labels) for labels in y], val=0.2)
    found = constant(data, Accuracy().scale)
    for i, most in enumerate((0, 1, 1)):
        assert found[i] == pytest.approx(float((data.client(i, "val")[1] == most).float().mean()))
    assert found[2] == 1  # it has one class


@pytest.fixture(scope="module")
def unlearnable():
    """Labels that do not depend on the inputs, three in four of them class 0."""
    rng = np.random.default_rng(0)
    return [(rng.standard_normal((40, 4)).astype(np.float32), (rng.random(40) < 0.25).astype(int)) for _ in range(6)]


def test_the_advice_begins_with_it_when_nothing_was_learned(unlearnable):
    data = Federation.from_clients(unlearnable, val=0.2)
    pilot = advise(model("linear", (4,), 2), data, rounds=2, seeds=1, lr=0.1, device="cpu", newcomers="none")
    assert not pilot.advice.learned
    first, second, *rest = report.sentences(pilot)
    assert first.startswith("Nothing was learned")
    assert "scale=true" in second
    assert "Take" not in " ".join([first, second, *rest])
    assert report.markdown(pilot, "").startswith(f"# Advice\n\n**{first}**\n\n- {second}\n- ")
    assert report.record(pilot, "")["learned"] is False


def numbers(learnable):
    rng = np.random.default_rng(0)
    found = []
    for k in range(6):
        x = rng.standard_normal((40, 3)).astype(np.float32)
        found.append((x, (x.sum(1) if learnable else 5 * k + rng.standard_normal(40)).astype(np.float32)))
    return Federation.from_clients(found, val=0.2)


def test_advice_where_everything_diverges_is_a_sentence():
    with pytest.raises(CoterieError, match="no method of the pilot can be advised: each diverged"):
        advise(model("linear", (3,), 1), numbers(True), rounds=4, seeds=1, lr=1e6, device="cpu", newcomers="none")


def test_a_regression_that_learned_nothing_is_advised_no_method():
    """Targets of a client alone that do not depend on the inputs: nothing beats the mean of its training targets,
    whose score is recomputed here. Of targets that do, a method is taken."""
    data = numbers(False)
    pilot = advise(model("linear", (3,), 1), data, rounds=4, seeds=1, lr=0.1, device="cpu", newcomers="none")
    first = report.sentences(pilot)[0]
    assert "always answering the mean of the client's training targets" in first
    for i, found in enumerate(pilot.findings.guess):
        middle = data.client(i, "train")[1].double().mean()
        assert -found == pytest.approx(float((data.client(i, "val")[1] - middle).square().mean()))
    assert "Take" not in report.markdown(pilot, "coterie compare local")
    assert "coterie compare" not in report.markdown(pilot, "coterie compare local")
    assert report.record(pilot, "")["method"] is None
    learned = advise(model("linear", (3,), 1), numbers(True), rounds=8, seeds=1, lr=0.1, device="cpu", newcomers="none")
    assert report.sentences(learned)[0].startswith("Take")


# -- the words ---------------------------------------------------------------------------------------------------------


def test_candidates_are_scored_by_the_metric_that_decides(small):
    """Validation scores are larger when better: accuracies as they are, a loss with its sign turned."""
    data = federation(small)
    factory = model("mlp", tuple(data.x.shape[1:]), data.classes, hidden=4)
    results = compare(["fedavg"], factory, data, rounds=1, lr=0.1, device="cpu")
    by_loss = [
        replace(run, history=tuple(
            replace(e, stages={name: replace(s, chosen=HUBER) for name, s in e.stages.items()}) for e in run.history
        ))
        for run in results
    ]
    for metric, sign, runs in (("accuracy", 1, results), ("loss", -1, by_loss)):
        fedavg = next(c for c in candidates(runs, data) if c.label == "fedavg")
        scores = next(run for run in runs if run.method == "fedavg").at("served")
        assert fedavg.seen[0] == pytest.approx(sign * scores.val[metric])
        assert fedavg.test == pytest.approx(scores.test[metric].mean())
        assert fedavg.worst == pytest.approx((sign * scores.test[metric]).min() * sign)
    assert constant(data, HUBER) is None  # what a constant answer scores by it is not known


ACCURACY = Accuracy().scale
HUBER = Scale("loss", "huber", higher=False)
CLOUD = PullClusters(1, 0.3, 0.28, 1.2, (0,) * 8)


def told(*values, noise=0.0, clusters=CLOUD, stages=("served",) * 9, metric=ACCURACY, guess=0.2):
    """What is said of methods with these scores, for 8 clients and 2 seeds, from the simplest to the most involved."""
    names = ("local", "fedavg", "fedper", "ifca:models=2")
    ways = ("local", "shared", "decoupling", "clustering")
    rng = np.random.default_rng(0)
    made = tuple(
        Candidate(name, stage, "fine-tuning" if (name, stage) == ("fedavg", "adapted") else way,
                  metric.sign * np.clip(value + noise * rng.standard_normal((2, 8)), 0, 1), np.zeros((2, 0)), value,
                  value, float("nan"), 100.0)
        for name, way, value, stage in zip(names, ways, values, stages, strict=False)
    )
    found = Findings(made, Shift(0.1, 0.1, 0.0), clusters, 8, 0, (30, 40), metric, "none", "mean",
                     None if guess is None else np.full(8, guess))
    return Pilot(found, decide(found), PilotPlan(names, 10, 2, None, None), 5.0)


def test_clustering_without_clear_groups_says_how_both_can_be():
    said = " ".join(report.sentences(told(0.4, 0.5, 0.5, 0.9)))
    assert "Take clustering" in said
    assert "no clear groups of clients, and still a few models scored best: the groups are soft" in said
    clear = PullClusters(2, 0.8, 0.3, 9.0, (0, 0, 0, 1, 1, 1, 1, 1))
    assert "2 clear groups (of 3, 5 clients)" in " ".join(report.sentences(told(0.4, 0.5, 0.5, 0.9, clusters=clear)))
    other = " ".join(report.sentences(told(0.4, 0.5, 0.9, 0.5)))
    assert "There are no clear groups of clients." in other


def test_what_is_within_noise_cannot_be_told_apart_and_is_not_called_equally_good():
    """Alone is 5 points ahead in the mean, but 30 points behind for every second client: deviation 35 over 8 clients,
    so the standard error is 35 / sqrt(8) = 12.4 points; over draws of two equal seeds, as well. Two of them decide."""
    pilot = told(0.75, 0.7)
    found = pilot.findings
    local = replace(found.candidates[0], seen=found.candidates[0].seen + 0.35 * np.tile([1.0, -1.0], 4))
    found = replace(found, candidates=(local, found.candidates[1]))
    said = " ".join(report.sentences(replace(pilot, findings=found, advice=decide(found))))
    assert "equally good" not in said
    told_apart = re.search(r"Learning alone and learning from others cannot be told apart: they differ by 5.0 points, "
                           r"within noise \(± (\S+) points\) \(75.0 % alone, 70.0 % with fedavg\)", said)
    assert float(told_apart[1]) == pytest.approx(2 * 35 / 8**0.5, rel=0.1)
    assert "Learning alone and learning from others score the same (" in " ".join(report.sentences(told(0.7, 0.7)))


def test_an_error_is_called_by_its_name_and_less_of_it_is_better():
    """The same numbers as errors: fedper's 0.3 is the least, and the next way, local's 0.4, has 0.100 more."""
    pilot = told(0.4, 0.6, 0.3, 0.7, metric=HUBER, guess=None)
    said = report.sentences(pilot)
    assert said[0] == "Take decoupling: a shared body under personal heads (fedper)."
    assert said[1] == "It scored best on validation data: huber 0.300 (mean over clients)."
    assert said[2].startswith("The next way, local (local), scored 0.100 more, more than noise")
    assert "huber 0.400 alone, huber 0.300 with fedper" in " ".join(said)
    assert "Clients hold about the same mixes of classes" in " ".join(said)  # it has classes, whatever decides
    assert str(report.table(pilot).title).startswith("huber; chosen on validation data")
    assert [cells[2] for cells in report.rows(pilot)] == ["0.300", "0.400", "0.600", "0.700"]
    record = report.record(pilot, "")
    assert (record["metric"], record["higher_is_better"]) == ("loss", False)


def test_the_simpler_one_within_noise_is_said_with_its_numbers():
    pilot = told(0.3, 0.6, 0.3, 0.62, noise=0.2)
    chosen, best = pilot.advice.chosen, pilot.advice.best
    assert (chosen.candidate.method, best.candidate.method) == ("fedavg", "ifca:models=2")  # by construction
    behind, noise = (f"{100 * v:.1f} points" for v in (chosen.behind, chosen.error))
    assert (f"ifca:models=2 scored {behind} more, but with 8 clients and 2 seeds that is within noise (± {noise}), and "
            "fedavg is simpler.") in report.sentences(pilot)


def test_a_noisy_one_that_a_simpler_one_beats_is_said_to_be_so():
    """Fedavg is 8 points behind, with 35 up or down for every second client: within the error of 35 / sqrt(8) = 12. It
    is simpler than ifca, which is the best, but local, 3 behind without any noise, is simpler still and better."""
    pilot = told(0.77, 0.72, 0.3, 0.8)
    local, fedavg, *more = pilot.findings.candidates
    fedavg = replace(fedavg, seen=fedavg.seen + 0.35 * np.tile([1.0, -1.0], 4))
    found = replace(pilot.findings, candidates=(local, fedavg, *more))
    said = report.sentences(replace(pilot, findings=found, advice=decide(found)))
    assert said[0].startswith("Take clustering")
    assert "fedavg is within noise of it, but worse than what is as simple or simpler." in said
    assert not any("less simple" in line for line in said)


@pytest.mark.parametrize("ahead", [0.15, 0.2, 0.3])
def test_the_noise_that_is_printed_is_the_one_that_a_lead_passed_or_did_not(ahead):
    """Alone is ahead by 15, 20 or 30 points with a standard error of about 12.4: by more than one, which is hardly more
    than noise, and the last by more than two. What is called more has a smaller number behind it, what is within a
    larger one."""
    pilot = told(0.4 + ahead, 0.4)
    found = pilot.findings
    local = replace(found.candidates[0], seen=found.candidates[0].seen + 0.35 * np.tile([1.0, -1.0], 4))
    found = replace(found, candidates=(local, found.candidates[1]))
    pilot = replace(pilot, findings=found, advice=decide(found))
    said = " ".join(report.sentences(pilot))
    scored = re.search(r"scored (\S+) points less, (hardly )?more than noise \(± (\S+) points\)", said)
    assert float(scored[1]) > float(scored[3])
    assert bool(scored[2]) == (ahead < 0.25)
    if within := re.search(r"they differ by (\S+) points, within noise \(± (\S+) points\)", said):
        assert float(within[1]) <= float(within[2])
    assert bool(within) == (ahead < 0.25)


def test_no_word_of_statistics_is_printed():
    """They are explained in docs/advise.md; a line is one sentence."""
    for pilot in (told(0.4, 0.5, 0.5, 0.9), told(0.9, 0.5, 0.5, 0.5), told(0.3, 0.6, 0.3, 0.62, noise=0.2)):
        for line in report.sentences(pilot):
            assert not any(word in line.lower() for word in ("silhouette", "cloud", "standard", "variance"))
            assert line.endswith(".")
            assert ". " not in line


def test_the_name_of_fine_tuned_fedavg_is_explained():
    pilot = told(0.3, 0.8, stages=("served", "adapted"))
    assert pilot.advice.way == "fine-tuning"
    go_on = report.command(pilot, Experiment(), [], False)
    assert "compare fedavgft " in go_on
    assert "`fedavgft` is FedAvg + fine-tune" in report.markdown(pilot, go_on)


def test_fewer_samples_are_the_same_clients_with_less():
    data = federation(populations.businesses(count=6, n=80))
    less = fewer(data, 20)
    assert (less.sizes("train") == 20).all()
    assert (less.sizes("val") == data.sizes("val")).all()
    assert (less.sizes("test") == np.minimum(data.sizes("test"), 20)).all()
    assert less.client(0, "val")[0].equal(data.client(0, "val")[0])


def test_without_validation_data_there_is_nothing_to_choose_on():
    data = Federation.from_clients([(np.zeros((4, 2), np.float32), np.arange(4) % 2)] * 3, val=0.0)
    with pytest.raises(CoterieError, match="no client has validation data"):
        advise(model("linear", (2,), 2), data, rounds=1)


# -- the command -------------------------------------------------------------------------------------------------------


def coterie(*words, cwd):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    command = [sys.executable, "-m", "coterie", *map(str, words)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.long
def test_the_command_prints_and_writes_the_advice(tmp_path):
    population = populations.businesses(count=10, n=40)
    x, y = (np.concatenate(parts) for parts in zip(*population.clients, strict=True))
    np.savez(tmp_path / "shops.npz", x=x, y=y, client=np.repeat(np.arange(10), 40))
    done = coterie("advise", "--data", "shops.npz", "--model", "mlp:hidden=8", "--rounds", 2, "--seeds", 1,
                   "--set", "device=cpu", "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "out" / "advice.json").read_text())
    page = (tmp_path / "out" / "advice.md").read_text()
    assert f"Take {record['family']}" in done.stdout
    assert f"**Take {record['family']}" in page
    assert record["newcomers_held_out"] == 2  # 15 % of 10
    assert record["clients"] == 8
    ways = {c["family"] for c in record["candidates"]}
    assert ways >= {"local", "shared", "fine-tuning", "decoupling", "interpolation", "meta-learning", "clustering"}
    assert record["command"] in done.stdout
    assert record["command"] in page
    again = record["command"].split()
    assert again[:2] == ["coterie", "compare"]
    again[again.index("--rounds") + 1] = again[again.index("--seeds") + 1] = "1"
    assert coterie(*again[1:], cwd=tmp_path).returncode == 0  # what it says to type can be typed


def test_what_is_noted_of_the_data_is_said_before_the_pilot_and_kept_with_the_advice(tmp_path, monkeypatch, capsys):
    """Inputs of a hundred thousand are too large for a model; `data` says so of the same file, in the same words."""
    from coterie import cli

    rng = np.random.default_rng(0)
    lines = [f"{site},{rng.integers(90_000, 110_000)},{rng.integers(2)}" for site in "abcd" for _ in range(30)]
    (tmp_path / "large.csv").write_text("\n".join(["client,cells,label", *lines]) + "\n")
    monkeypatch.chdir(tmp_path)
    pilot = ["--model", "linear", "--rounds", "1", "--seeds", "1", "--set", "device=cpu", "--set", "lr=1e-12"]
    said = []
    for typed in (["data", "large.csv"], ["advise", "large.csv", *pilot, "--out", "out"]):
        monkeypatch.setattr(sys, "argv", ["coterie", *typed])
        with pytest.raises(SystemExit, match=r"^0$"):
            cli.main()
        said.append([line.removeprefix("coterie: ") for line in capsys.readouterr().err.splitlines()])
    notes = said[0]
    assert any("scale=true" in note for note in notes)
    assert said[1] == notes
    assert json.loads((tmp_path / "out" / "advice.json").read_text())["notes"] == notes
    page = (tmp_path / "out" / "advice.md").read_text()
    assert "\n\nOf the data:\n\n" + "".join(f"- {note}\n" for note in notes) in page


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--newcomers", "ofen"], "did you mean 'often'?"),
        (["--objective", "wrost"], "did you mean 'worst'?"),
        (["--data", "nothing.npz"], "there is no file"),
        (["--budget", "0"], "budget must be above 0"),
    ],
)
def test_bad_input_is_one_sentence(words, said, tmp_path, monkeypatch, capsys):
    from coterie import cli

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["coterie", "advise", *words])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
