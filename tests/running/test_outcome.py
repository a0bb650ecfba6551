"""Divergence and models that learned nothing are called that, wherever the answer is read, for regression too."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from commands import in_process_shown

import coterie
from coterie.contract.metric import Scale
from coterie.evaluation.score import Evaluation, Scores
from coterie.evaluation.summary import chosen_round, summarise
from coterie.models import model
from coterie.report.table import comparison, markdown, rows, to_csv
from coterie.report.verdict import answer, served_worst, verdict
from coterie.running.folder import Folder
from coterie.running.outcome import outcome
from coterie.running.result import Result

ACCURACY = Scale("accuracy", "accuracy", higher=True, percent=True)
MSE = Scale("loss", "MSE", higher=False)


def stage(scale, values, loss=0.5, steps=0):
    """One stage of clients with 10 test samples; test and validation scores are the same."""
    values = np.array(values, dtype=float)
    table = {"loss": np.broadcast_to(np.array(loss, dtype=float), values.shape).copy(), scale.name: values}
    return Scores(np.arange(len(values)), np.full(len(values), 10), np.full(len(values), steps), table, table, scale)


def result(method, *rounds, seed=0, scale=ACCURACY, folder=None):
    """`rounds` are (values, loss) after 0, 1, ... rounds, as served and as adapted alike."""
    history = tuple(
        Evaluation(t, {"served": stage(scale, values, loss), "adapted": stage(scale, values, loss, steps=3)})
        for t, (values, loss) in enumerate(rounds)
    )
    return Result(method, seed, history, names=tuple("abcd"[: len(rounds[0][0])]), folder=folder)


def targets(scale=1.0, each=24, clients=4, seed=0):
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(clients):
        x = rng.standard_normal((each, 3)).astype(np.float32)
        found.append((x, (scale * (x @ np.array([1.0, -2.0, 0.5]) + 3)).astype(np.float32)))
    return coterie.Federation.from_clients(found, val=0.25, test=0.25)


def diverging(tmp_path, **options):
    given = {"rounds": 3, "lr": 1e6, "evaluate_every": 1, "device": "cpu", **options}
    return coterie.compare([], model("linear", (3,), 1), targets(), folder=tmp_path / "out", **given)


# -- one client among several -----------------------------------------------------------------------------------------


def test_a_loss_that_is_no_number_is_infinite_and_not_a_client_without_data():
    """Two models of a linear net: zeros, whose squared error is the mean of y^2, and NaN. Nobody is left out."""
    data = targets()
    simulation = coterie.run("local", model("linear", (3,), 1), data, rounds=0, device="cpu").simulation
    tables = {name: t.clone() for name, t in simulation.own.tensors().items()}
    for t in tables.values():
        t[0] = torch.nan
    simulation.own = type(simulation.own).of(tables)
    scores = simulation.evaluate().stages["served"]
    assert scores.test["loss"][0] == np.inf
    assert scores.diverged.tolist() == [True, False, False, False]
    found = summarise(scores)
    assert (found.mean, found.left_out, found.diverged) == (np.inf, 0, 1)


def test_outputs_that_are_no_numbers_are_never_right():
    """argmax of NaN is the first class, so a broken model was right for all samples of it."""
    clients = [(np.ones((20, 2), np.float32), np.zeros(20, int) + (k % 2)) for k in range(2)]
    data = coterie.Federation.from_clients(clients, classes=2)
    simulation = coterie.run("fedavg", model("linear", (2,), 2), data, rounds=0, device="cpu").simulation
    state = simulation.server.state
    simulation.server.state = type(state).of({n: t * torch.nan for n, t in state.tensors().items()})
    assert simulation.evaluate().stages["served"].test["accuracy"].tolist() == [0, 0]


def test_a_diverged_client_counts_as_the_worst_there_is():
    """Balanced accuracy happened to be 1 for a model without answers: as a share it is 0, so the mean is 0.4."""
    share = Scale("balanced_accuracy", "balanced accuracy", higher=True, percent=True)
    assert summarise(stage(share, [0.8, 1.0], [0.5, np.inf])).mean == pytest.approx(0.4)
    rounds = [Evaluation(0, {"served": stage(share, [0.5, 0.5])}),
              Evaluation(1, {"served": stage(share, [0.6, 1.0], [0.5, np.inf])})]
    assert chosen_round(rounds) == 0  # 0.5 against (0.6 + 0) / 2


# -- labels -----------------------------------------------------------------------------------------------------------


def test_a_method_that_diverged_is_named_and_not_ranked():
    """FedAvg's numbers are the best, those of a client whose loss is not finite; Local is the best that counts."""
    good, fake = ([0.8, 0.8], 0.5), ([0.95, 0.95], [0.5, np.inf])
    runs = [result("local", ([0.5, 0.5], 0.7), good), result("fedavg", ([0.96, 0.0], [0.7, np.inf]), fake)]
    said = verdict(runs)
    assert "fedavg (served) and fedavg + fine-tune diverged: the loss of 1 of 2 clients is not finite" in said
    assert "For the mean over clients, local (served) is best with 80.00 %. fedavg + fine-tune diverged." in said
    assert "runner-up" not in said
    assert answer(runs)["headline"] == ("local (served) leads, but whether it pays cannot be said, as fedavg + "
                                        "fine-tune diverged.")
    assert "✗: diverged; not ranked." in markdown(runs)
    assert "**✗" not in markdown(runs)
    lines = {(line.method, line.stage): line for line in rows(runs)}
    assert lines["fedavg", "served"].outcome == "diverged"
    assert lines["fedavg", "served"].diverged == 1
    assert lines["local", "served"].outcome == ""


def test_round_0_is_never_best_without_a_word():
    """The untrained models have 60 %, training makes it 50 %: nobody is called best, and the reason is said."""
    runs = [result(name, ([0.6, 0.6], 0.5), ([0.5, 0.5], 0.6)) for name in ("local", "fedavg")]
    assert "learned nothing: the models before training, round 0, were the best on validation data" in verdict(runs)
    line = next(line for line in rows(runs) if line.stage == "served")
    assert (line.outcome, line.rounds) == ("learned nothing", (0,))
    adapted = next(line for line in rows(runs) if line.stage == "adapted")
    assert adapted.outcome == ""  # local training made it, and the words say that the rounds did not
    assert "did best at round 0 on validation data" in adapted.why


def test_a_run_of_which_only_round_0_was_evaluated_has_not_learned_nothing():
    """It has not begun: nobody knows what its rounds teach, and round 0 was best of one. A finished run of 0 rounds is
    called by its numbers, as before."""
    runs = [result("local", ([0.6, 0.6], 0.5), ([0.8, 0.8], 0.3)), result("fedavg", ([0.6, 0.6], 0.5))]
    assert "learned nothing" in verdict(runs)
    runs[1] = replace(runs[1], finished=False)
    said = verdict(runs)
    assert "learned nothing" not in said
    assert "taught nothing" not in said  # of FedAvg + fine-tune, which round 0 has trained
    assert "fedavg (served) and fedavg + fine-tune did no round of training so far: only round 0 was evaluated." in said
    assert {line.outcome for line in rows(runs) if line.method == "fedavg"} == {"not finished"}
    assert "…: not finished; not ranked." in markdown(runs)
    alone = verdict([runs[1]])
    assert "learned nothing" not in alone
    assert "only round 0 was evaluated" in alone


def test_runs_at_different_rounds_name_no_winner_while_one_goes_on():
    """FedAvg leads at round 1 and might at round 2: Local has two rounds behind it. Nobody is best, nothing is bold."""
    start, one, two = ([0.5, 0.5], 0.7), ([0.7, 0.8], 0.4), ([0.6, 0.7], 0.5)
    ahead = result("local", start, two, two)
    behind = replace(result("fedavg", start, one), finished=False)
    for runs in ([ahead, behind], [replace(ahead, finished=False), behind]):
        said = verdict(runs)
        assert "Runs are not finished and stand at different rounds, or at none, so none is best yet." in said
        assert "fedavg (served) and fedavg + fine-tune reached round 1 so far, and others round 2." in said
        assert "is best with" not in said
        assert "**" not in markdown(runs).replace("**served**", "").replace("**adapted**", "")
        assert answer(runs)["headline"].endswith("so none is best yet.")
        assert answer(runs)["sentences"] == []
        assert served_worst(runs) is None
    assert "is best with" in verdict([ahead, replace(behind, finished=True)]), "patience may end a run earlier"
    level = [replace(result(name, start, one), finished=False) for name in ("local", "fedavg")]
    assert "2 runs are not finished; the numbers will change." in verdict(level)
    assert "is best with" in verdict(level), "at the same round, runs may be compared"


def test_in_how_many_seeds_a_run_is_behind_is_said():
    start, one = ([0.5, 0.5], 0.7), ([0.7, 0.8], 0.4)
    runs = [result("fedavg", start, one, seed=0), replace(result("fedavg", start, seed=1), finished=False)]
    assert outcome(runs, "served").words == (
        "did no round of training so far in 1 of 2 seeds: only round 0 was evaluated")


def test_in_how_many_seeds_the_rounds_taught_nothing_is_said():
    """Adapted, seed 0 is best after local training alone (60 %) and seed 1 after a round more (80 %)."""
    start, worse, better = ([0.6, 0.6], 0.5), ([0.5, 0.5], 0.6), ([0.8, 0.8], 0.3)
    for ends, said in (
        ((worse, better), "did best at round 0 on validation data in 1 of 2 seeds"),
        ((worse, worse), "did best at round 0 on validation data in 2 of 2 seeds: the rounds taught nothing that local "
                         "training alone did not"),
        ((better, better), ""),
    ):
        runs = [result("fedavg", start, end, seed=seed) for seed, end in enumerate(ends)]
        assert outcome(runs, "adapted").words == said


def test_one_diverged_seed_of_three_is_said():
    fine, broken = ([0.9, 0.9], 0.1), ([0.9, 0.9], [0.1, np.inf])
    start = ([0.5, 0.5], 0.7)
    runs = [result("fedavg", start, broken if seed == 1 else fine, seed=seed) for seed in range(3)]
    runs += [result("local", start, ([0.8, 0.8], 0.2), seed=seed) for seed in range(3)]
    # what a broken seed would report: 0.9 and 0 are worse than the 0.5 of round 0
    both = "fedavg (served) and fedavg + fine-tune"
    assert f"{both} diverged in 1 of 3 seeds: the loss of 1 of 2 clients" in verdict(runs)
    assert "local (served) is best" in verdict(runs)


def test_a_run_that_diverged_after_the_round_it_reports_keeps_its_place_and_says_so():
    runs = [result("local", ([0.5, 0.5], 0.7), ([0.9, 0.9], 0.1), ([0.1, 0.1], np.inf)),
            result("fedavg", ([0.5, 0.5], 0.7), ([0.8, 0.8], 0.2))]
    line = rows(runs)[0]
    assert (line.outcome, line.rounds, line.diverged) == ("", (1,), 2)
    assert line.why == ("diverged: the loss of 2 of 2 clients is not finite since round 2; its numbers are of an "
                        "earlier round")
    assert "local (served) is best" in verdict(runs)


def test_a_metric_of_the_users_own_says_nothing_but_that_it_is_not_finite(tmp_path):
    mine = Scale("mine", "mine", higher=True)
    (tmp_path / "data.json").write_text(json.dumps({"classes": 2, "histogram": [[9, 1]] * 2, "tested": [[4, 0]] * 2}))
    poor = result("local", ([0.0, 0.0], 1.0), ([0.1, 0.1], 0.9), scale=mine, folder=tmp_path)
    assert rows([poor])[0].outcome == ""
    broken = result("local", ([0.0, 0.0], 1.0), ([0.1, 0.1], [0.9, np.inf]), ([0.2, 0.2], [0.9, np.inf]), scale=mine)
    assert rows([broken])[0].outcome == "diverged"


# -- regression --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", [1e-4, 1.0, 1e4])
def test_regression_is_measured_against_the_mean_of_each_clients_targets(tmp_path, unit):
    """A rate of 10^-9 leaves the model where it began; one of 0.1 learns a linear function, in whatever unit."""
    data = targets(unit)
    runs = {lr: coterie.run("local", model("linear", (3,), 1), data, folder=tmp_path / f"{lr}", rounds=100, lr=lr,
                            evaluate_every=50, device="cpu") for lr in (1e-9, 0.1)}
    for lr, run in runs.items():
        scores = run.at("served")
        known = [torch.cat([data.client(i, s)[1] for s in ("train", "val")]).double() for i in range(4)]
        guess = np.array([float((data.client(i, "test")[1].double() - known[i].mean()).square().mean())
                          for i in range(4)])
        better = scores.test["loss"].mean() < guess.mean()
        assert better == (lr == 0.1)
        for one in (run, Folder(tmp_path / f"{lr}").result(), replace(run, folder=None)):
            guessing = "No stage does better than always answering the mean of the client's training targets"
            assert verdict([one]).startswith(guessing) == (not better)
            assert bool(rows([one])[0].outcome) == (not better)


def test_a_regression_that_diverged_names_no_winner(tmp_path, monkeypatch, capsys):
    """On the terminal, in the table, in comparison.csv, on the page, by show; the table is not empty."""
    results = diverging(tmp_path)
    assert answer(results)["headline"] == "Every method diverged, so none is best."
    assert answer(results)["sentences"] == []
    said = verdict(results)
    assert "is best with" not in said
    assert "leads" not in said
    assert all(line.outcome == "diverged" for line in rows(results))
    with to_csv(results, tmp_path / "comparison.csv").open() as file:
        assert {line["outcome"] for line in csv.DictReader(file)} == {"diverged"}
    shown = in_process_shown(["show", str(tmp_path / "out")], monkeypatch, capsys).out
    assert "Every method diverged, so none is best." in shown
    assert str(comparison(results).caption).endswith("✗: diverged; not ranked.")
    read = [Folder(run.folder).result() for run in results]
    assert [line.outcome for line in rows(read)] == [line.outcome for line in rows(results)]


def test_runs_of_earlier_versions_are_labelled_too(tmp_path):
    """They wrote nothing where a loss was not a number; a client with test samples that has none diverged."""
    results = diverging(tmp_path)
    path = results[0].folder / "clients.csv"
    kept = path.read_text()
    assert "inf" in kept
    path.write_text(kept.replace(",inf", ","))
    assert rows([Folder(path.parent).result()], "last")[0].outcome == "diverged"


def test_a_model_of_a_run_that_diverged_is_exported_with_a_sentence(tmp_path, monkeypatch, capsys):
    (tmp_path / "t.csv").write_text("client,a,label\n" + "".join(f"c{k % 3},{k % 7}.5,{k % 5}.25\n" for k in range(90)))
    monkeypatch.chdir(tmp_path)
    words = ["--data", "t.csv:regression=true", "--model", "linear", "--rounds", "2", "--set", "device=cpu"]
    for lr, warned in (("1e6", True), ("0.01", False)):
        in_process_shown(["run", "fedavg", *words, "--set", f"lr={lr}", "--out", lr], monkeypatch, capsys)
        asked = ["export", lr, "--client", "c0", "-o", f"{lr}.safetensors"]
        said = in_process_shown(asked, monkeypatch, capsys).out
        assert ("Of the run: fedavg (served) diverged: the loss of 3 of 3 clients is not finite" in said) == warned
        beside = json.loads((tmp_path / lr).with_suffix(".json").read_text() if lr != "0.01" else
                            (tmp_path / "0.01.json").read_text())
        assert any("diverged" in text for text in beside["warnings"]) == warned


def test_a_model_of_the_last_round_or_adapted_is_warned_of_by_that_round_and_stage(tmp_path, monkeypatch, capsys):
    """The chosen round of a run that diverged lies before it did; what is handed out with --round last does not."""
    rng = np.random.default_rng(0)
    (tmp_path / "t.csv").write_text("client,a,label\n" + "".join(
        f"c{k % 3},{rng.normal():.3f},{rng.normal():.3f}\n" for k in range(90)))
    (tmp_path / "new.csv").write_text("a,label\n" + "".join(
        f"{rng.normal():.3f},{rng.normal():.3f}\n" for k in range(20)))
    monkeypatch.chdir(tmp_path)
    words = ["run", "fedavg", "--data", "t.csv", "--model", "linear", "--rounds", "4", "--out", "run"]
    in_process_shown([*words, "--set", "device=cpu", "--set", "lr=1e6", "--set", "evaluate_every=1"],
                     monkeypatch, capsys)
    new = ["personalize", "run", "--data", "new.csv", "-o", "m.safetensors", "--adapt"]
    given = {("export", "run", "--client", "c0", "-o", "m.safetensors"): "served",
             (*new, "no"): "served", (*new, "yes"): "adapted"}
    for asked, taken in given.items():
        for when in ("chosen", "last"):
            said = in_process_shown([*asked, "--round", when], monkeypatch, capsys).out
            told = next(line for line in said.splitlines() if line.startswith("Of the run: "))
            assert told.startswith(f"Of the run: fedavg ({taken}) diverged: the loss of 3 of 3 clients is not finite")
            assert ("its numbers are of round 0" in told) == (when == "chosen"), (asked, when)
