"""What the report says is what the runs recorded; it stays small; a collapse is called by its name."""

import csv
import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import coterie
from coterie.cli import app
from coterie.data import Federation, digits, partition
from coterie.errors import CoterieError
from coterie.evaluation.score import LOSS, Evaluation, Scores
from coterie.metrics.accuracy import Accuracy
from coterie.models import model
from coterie.report.contents import gather
from coterie.report.few_models import judged, worth
from coterie.report.figures import figures
from coterie.report.page import page, write
from coterie.report.verdict import answer, cases, paired_error, worst_error
from coterie.running.experiment import Experiment
from coterie.running.folder import Folder
from coterie.running.result import Result


def method(data, name):
    return next(m for m in data["methods"] if m["name"] == name)


@pytest.fixture(scope="module")
def data(compared):
    return gather([compared])


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_the_clients_values_are_those_of_the_chosen_round_averaged_over_seeds(compared, data):
    """Computed again from clients.csv: the round of the best mean validation accuracy (then loss), earliest first."""
    found = np.zeros(20)
    for seed in (0, 1):
        with (compared / "ifca" / f"seed{seed}" / "clients.csv").open() as file:
            lines = [line for line in csv.DictReader(file) if line["stage"] == "served"]
        rounds = sorted({int(line["round"]) for line in lines})

        def score(t, lines=lines):
            here = [line for line in lines if int(line["round"]) == t and line["val_loss"]]
            return (np.mean([float(x["val_accuracy"]) for x in here]), -np.mean([float(x["val_loss"]) for x in here]))

        best = max(rounds, key=lambda t: (score(t), -t))
        found += [float(line["accuracy"]) / 2 for line in lines if int(line["round"]) == best]
    shown = method(data, "ifca")["values"]["served"]
    assert shown[:20] == pytest.approx(found.tolist(), rel=1e-3)
    assert shown[20:] == [None] * 3  # the unseen clients have stages of their own


def test_convergence_is_cumulative_in_bytes_and_seconds(compared, data):
    """IFCA sends K = 3 models down and one up with a choice (8 bytes), 20 clients, 20 rounds, D columns of 4 bytes."""
    size = 4 * (64 * 32 + 32 + 32 * 10 + 10)
    curve = method(data, "ifca")["spent"]
    assert curve["rounds"] == [0, 4, 8, 12, 16, 20]
    assert curve["bytes"][0] == 0
    assert curve["bytes"][-1] == pytest.approx(20 * 20 * (3 * size + size + 8), rel=1e-5)
    times = [r["seconds"] for seed in (0, 1) for r in Folder(compared / "ifca" / f"seed{seed}").rounds()]
    assert curve["seconds"][-1] == pytest.approx(sum(times) / 2, rel=1e-3)


def test_clients_have_the_samples_and_classes_of_their_federation(compared, data):
    """The same federation built again from what the run was asked for."""
    asked = json.loads((compared / "experiment.json").read_text())["experiment"]
    federation = Experiment.of(asked).federation()
    for split in ("train", "val", "test"):
        assert [c[split] for c in data["clients"]] == federation.sizes(split).tolist()
    counts = sum(federation.histogram(split) for split in ("train", "val", "test"))
    assert [c["classes"] for c in data["clients"]] == counts.tolist()
    assert [c["seen"] for c in data["clients"]] == [True] * 20 + [False] * 3


def test_the_command_and_versions_are_there_to_reproduce(compared, data):
    made = data["reproduce"]
    assert made["commands"][0].startswith("coterie compare ifca fedfew:official fedfew:normalise=true --clients 20")
    assert made["environments"][0]["versions"]["torch"]
    assert len(data["runs"]) == 5 * 2  # local, fedavg and three more, two seeds


# -- the answer -------------------------------------------------------------------------------------------------------


def result(name, seed, served, adapted=None):
    def scores(value):
        values = np.array(value, dtype=float)
        ids, zero = np.arange(len(values)), np.zeros(len(values))
        return Scores(ids, ids + 10, ids, {"loss": zero, "accuracy": values}, {"loss": zero, "accuracy": values})

    stages = {"served": scores(served), "adapted": scores(adapted or served)}
    return Result(name, seed, (Evaluation(0, stages),), names=("a", "b"))


def test_a_lead_over_all_others_beyond_noise_is_said():
    """Leads of 20 and 30 points against seed deviations of 1 point at most, with two seeds, alike for both clients."""
    means = {"local": 0.5, "fedavg": 0.6, "ifca": 0.8}
    runs = [result(name, k, [v + 0.01 * k, v]) for name, v in means.items() for k in (0, 1)]
    said = answer(runs)
    assert said["headline"] == "ifca (served) is best here, by more than noise."
    assert said["mean"] == ["ifca", "served"]
    assert said["sentences"][0] == (
        "For the mean over clients, ifca (served) is best with 80.25 %; the runner-up, fedavg (served), is 20.00 "
        "points behind, more than noise. fedavg + fine-tune is 20.00 and local (served) 30.00 points behind, both more "
        "than noise."
    )
    assert "For the worst client, ifca (served) is best with 80.00 %" in said["sentences"][1]


def test_a_lead_within_seed_noise_is_called_that():
    """ifca is 1 point ahead of FedAvg while both vary by about 10 points from seed to seed."""
    runs = [result("local", k, [0.3, 0.3]) for k in (0, 1)]
    runs += [result(n, k, [v + 0.1 * k] * 2) for n, v in (("fedavg", 0.6), ("ifca", 0.61)) for k in (0, 1)]
    said = answer(runs)
    assert said["headline"] == (
        "ifca (served) leads, but within noise it cannot be told apart from fedavg + fine-tune.")
    assert "the runner-up, fedavg (served), is 1.00 points behind, within noise." in said["sentences"][0]


def test_a_lead_within_noise_between_clients_is_called_that():
    """Seeds agree to the digit, but ifca gains 9 points for one client and loses 7 for the other: 1 on average.

    The paired differences 0.09 and -0.07 have the standard error 0.16 / 2 = 0.08, so 0.01 is far from beyond 0.16; a
    gain of 1 point for both clients has the standard error 0.
    """
    base = {"local": [0.3, 0.3], "fedavg": [0.6, 0.7]}
    runs = {k: [result(n, k, v) for n, v in base.items()] for k in (0, 1)}
    uneven = [*runs[0], *runs[1], *(result("ifca", k, [0.69, 0.63]) for k in (0, 1))]
    assert answer(uneven)["headline"] == (
        "ifca (served) leads, but within noise it cannot be told apart from fedavg + fine-tune.")
    even = [*runs[0], *runs[1], *(result("ifca", k, [0.61, 0.71]) for k in (0, 1))]
    assert answer(even)["headline"] == "ifca (served) is best here, by more than noise."


def test_a_runner_up_that_does_as_well_is_in_the_headline():
    """Both are far ahead of the baselines, and 1 point apart with clients 8 points to either side of that."""
    values = {"local": [0.3, 0.3], "fedavg": [0.4, 0.4], "ifca": [0.9, 0.8], "apfl": [0.81, 0.87]}
    said = answer([result(n, k, v) for n, v in values.items() for k in (0, 1)])
    assert said["headline"] == (
        "ifca (served) beats fedavg + fine-tune and local (served) by more than noise; within noise it cannot be "
        "told apart from apfl (served)."
    )


def test_the_standard_error_of_paired_differences():
    """Differences 0.1, 0.2, 0.3: variance 0.01 over three clients, so sqrt(0.01 / 3); a client one lacks is out."""
    a, b = np.array([0.5, 0.7, 0.9, 0.4]), np.array([0.4, 0.5, 0.6, np.nan])
    assert paired_error(a, b) == pytest.approx(np.sqrt(0.01 / 3))


def test_the_worst_of_few_test_samples_is_noisy():
    """10 and 9 of 10 samples right, one client: the deviation of a binomial share, sqrt(0.9 * 0.1 / 10) = 0.095.

    400 draws know it to about 1 / sqrt(800) = 3.5 %. With 1000 times the samples it is sqrt(1000) times smaller.
    """
    def error(n):
        runs = [result(name, k, [v]) for name, v in (("a", 1.0), ("b", 0.9)) for k in (0, 1)]
        found = [replace(case, samples=np.array([n])) for case in cases(runs)]
        return worst_error(found[0], found[1])

    assert error(10) == pytest.approx(0.095, rel=0.15)
    assert error(10_000) == pytest.approx(0.003, rel=0.15)


def test_one_seed_claims_nothing_about_noise_between_seeds():
    said = answer([result(n, 0, [v, v]) for n, v in (("local", 0.5), ("fedavg", 0.6), ("ifca", 0.8))])
    assert said["headline"] == "ifca (served) leads; with one seed, noise between seeds is unknown."
    assert "both more than noise between clients" in said["sentences"][0]
    assert "With one seed" in said["caveat"]


@pytest.mark.parametrize(
    ("values", "headline"),
    [
        ({"local": [0.9, 0.9], "fedavg": [0.5, 0.5], "ifca": [0.6, 0.6]},
         "Training alone is as good as anything here: no method does better than local (served)."),
        ({"local": [0.5, 0.5], "fedavg": [0.9, 0.9], "ifca": [0.6, 0.6]},
         "One shared model is as good as anything here: no method does better than fedavg (served)."),
        ({"ifca": [0.6, 0.6]}, "One method only: whether it pays cannot be said without fedavg + fine-tune and local."),
        ({"ifca": [0.6, 0.6], "local": [0.5, 0.5]},
         "ifca (served) leads, but whether it pays cannot be said without fedavg + fine-tune."),
    ],
)
def test_a_baseline_that_wins_is_said_to_win(values, headline):
    assert answer([result(n, 0, v) for n, v in values.items()])["headline"] == headline


def test_a_baseline_that_wins_within_noise_is_said_to_be_told_apart_from_nothing():
    """Local gains 9 points for one client and loses 7 for the other: 1 on average, with the standard error 8."""
    values = {"local": [0.69, 0.63], "fedavg": [0.3, 0.3], "ifca": [0.6, 0.7]}
    assert answer([result(n, k, v) for n, v in values.items() for k in (0, 1)])["headline"] == (
        "Training alone is as good as anything here: no method does better than local (served); within noise it cannot "
        "be told apart from ifca (served)."
    )


def test_fine_tuning_that_wins_is_said_to_win():
    runs = [result("local", 0, [0.5, 0.5]), result("fedavg", 0, [0.6, 0.6], [0.9, 0.9]), result("ifca", 0, [0.7, 0.7])]
    said = answer(runs)
    assert said["headline"].endswith("no method does better than fedavg + fine-tune.")
    assert "the runner-up, ifca (served), is 20.00 points behind" in said["sentences"][0]


# -- a few models -----------------------------------------------------------------------------------------------------


def test_the_released_fedfew_collapses_and_the_report_says_so(data):
    """Equal starts and steps of the size of a model's mass: whichever model leads takes all clients."""
    few = method(data, "fedfew:official")["few"]
    assert few["verdict"] == "collapsed"
    assert "have collapsed into one" in few["words"]
    users = np.bincount(few["end"]["choice"], minlength=3)
    assert users.max() >= 18  # the criterion holds of what was recorded, not only of the words
    assert np.argmax(few["mass"]["share"][-1]) == users.argmax()
    assert few["worth"] <= 0.01  # a choice that nobody makes is worth nothing


@pytest.mark.parametrize("name", ["ifca", "fedfew:normalise=true"])
def test_healthy_models_are_not_said_to_have_collapsed(data, name):
    few = method(data, name)["few"]
    assert few["verdict"] == "healthy"
    assert "collapse" not in few["words"]
    assert np.bincount(few["end"]["choice"], minlength=3).max() < 18


def test_models_that_stay_identical_are_a_collapse_too(tmp_path):
    """40 clients: n_i / n is small, the scaled losses hardly differ, so equal models get equal steps."""
    x, y = digits()
    dealt = partition("dirichlet", y.numpy(), 40, seed=0, alpha=0.5)
    federation = Federation.from_assignment(x, y, dealt)
    factory = model("mlp", (1, 8, 8), 10, hidden=16)
    coterie.run("fedfew:official", factory, federation, folder=tmp_path / "run", rounds=8, lr=0.1, evaluate_every=4)
    few = gather([tmp_path / "run"])["methods"][0]["few"]
    assert few["verdict"] == "collapsed"
    assert "nearly identical" in few["words"]


def end(choice, apart, moved=(1.0, 1.0), **more):
    test = [[0.5, 0.5]] * len(choice)
    return {"choice": choice, "apart": [[0, apart], [apart, 0]], "moved": list(moved), "metric": "accuracy",
            "test": test, **more}


@pytest.mark.parametrize(
    ("given", "verdict"),
    [
        (end([0] * 9 + [1], 1.0), "collapsed"),  # 90 % of the clients: the bound itself
        (end([0] * 8 + [1] * 2, 1.0), "healthy"),
        (end([0] * 5 + [1] * 5, 0.1), "collapsed"),  # a tenth of the way gone: the bound itself
        (end([0] * 5 + [1] * 5, 0.11), "healthy"),
        ({**end([0, 0], 0.0), "apart": [[0.0]], "moved": [1.0]}, "one"),
    ],
)
def test_the_criterion_is_the_stated_one(given, verdict):
    assert judged(given)[0] == verdict


def test_what_choosing_is_worth():
    """Each client's own choice scores 1; the best single model scores 0.75 on average."""
    given = end([0, 1], 1.0)
    given["test"] = [[1.0, 0.5], [0.5, 1.0]]
    assert worth(given, Accuracy().scale) == pytest.approx(0.25)
    assert worth(given, LOSS) == pytest.approx(0.75 - 1)  # of errors, 1 is worse than the best single model's 0.75


def test_w_and_alpha_are_recorded_for_every_participant(compared, data):
    """Rows of w and all of alpha are shares, so they sum to 1 up to the digits kept; IFCA's w is its choice."""
    rounds = Folder(compared / "fedfew-normalise-true" / "seed0").rounds()
    assert [r["round"] + 1 for r in rounds if "w" in r["report"]] == [4, 8, 12, 16, 20]  # where evaluations are
    for report in (r["report"] for r in rounds if "w" in r["report"]):
        assert np.sum(report["w"], axis=1) == pytest.approx(np.ones(20), abs=3e-4)
        assert np.sum(report["alpha"]) == pytest.approx(1, abs=2e-3)
        mass = np.array(report["alpha"]) @ np.array(report["w"])
        assert mass == pytest.approx(report["mass"], abs=2e-3)  # a second computation of what FedFew reports itself
    few = method(data, "ifca")["few"]
    assert {tuple(sorted(line)) for table in few["w"] for line in table if line} == {(0, 0, 100)}


def test_partial_participation_says_who_took_part(tmp_path):
    x, y = digits()
    federation = Federation.from_assignment(x[:300], y[:300], partition("iid", y[:300].numpy(), 6, seed=0))
    factory = model("mlp", (1, 8, 8), 10, hidden=4)
    options = {"rounds": 2, "evaluate_every": 1, "participation": 0.5}
    run = coterie.run("ifca", factory, federation, folder=tmp_path / "run", **options)
    report = run.rounds[-1]["report"]
    assert report["clients"] == run.simulation.selected(1).tolist()
    table = gather([tmp_path / "run"])["methods"][0]["few"]["w"][-1]
    assert [i for i, line in enumerate(table) if line] == report["clients"]


# -- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_needs_nothing_else(data):
    made = page(data)
    assert "%DATA%" not in made
    assert "src=" not in made
    assert "http" not in made.replace("http://www.w3.org/2000/svg", "").replace('http-equiv', "")


def test_a_name_cannot_break_out_of_the_data(data):
    named = {**data, "title": "</script><script>alert(1)</script>%JS%"}
    made = page(named)
    assert made.count("</script>") == 2  # the data's and the program's
    assert "alert(1)</script>" not in made


def test_ten_methods_and_a_hundred_clients_take_less_than_3_mb(tmp_path, monkeypatch):
    """Full records of random numbers, which have the most digits, for more evaluations than the page keeps."""
    monkeypatch.setattr("os.fsync", lambda file: None)  # thousands of lines need not survive a power cut
    random = np.random.default_rng(0)
    names = ["local", "fedavg", "ifca", "fedfew", "fedper", "fedprox", "ditto", "fedrep", "fedsoft", "apfl"]
    x, y = digits()
    federation = Federation.from_assignment(x, y, partition("iid", y.numpy(), 100, seed=0))
    for name in names:
        folder = Folder(tmp_path / "cmp" / name / "seed0")
        training = {"seed": 0, "rounds": 62, "lr": 0.1}
        folder.create({"method": name, "training": training, "population": 90, "clients": list(federation.names)})
        folder.describe(federation)
        for t in range(63):
            stages = {}
            for stage, ids in (("served", range(90)), ("adapted", range(90)), ("unseen_served", range(90, 100))):
                n, ids = len(ids), np.array(ids)
                values = {"accuracy": random.random(n), "loss": random.random(n)}
                stages[stage] = Scores(ids, ids, ids, values, values)
            folder.append_evaluation(Evaluation(t, stages), federation.names)
            if t < 62:
                report = {"opposing": 0.5, "w": random.random((90, 3)).round(4).tolist(), "mass": [0.2, 0.3, 0.5],
                          "alpha": random.random(90).round(4).tolist(), "apart": random.random((3, 3)).tolist()}
                if t == 61:
                    report["cosines"] = random.uniform(-1, 1, (90, 90)).round(4).tolist()
                folder.append_round({"round": t, "participants": 90, "dropped": 0, "down": {"row": 9}, "up": {"row": 9},
                                     "report": report, "seconds": 0.1234})
        models = {"round": 62, "choice": [k % 3 for k in range(90)], "metric": "accuracy", "moved": [1, 1, 1]}
        tables = {"test": random.random((90, 3)).tolist(), "apart": random.random((3, 3)).tolist()}
        folder.append_models({**models, **tables})
        folder.finish({})
    assert 1e6 < len(page(gather([tmp_path / "cmp"])).encode()) < 3e6


def test_the_figures_lie_beside_the_page_as_png_and_svg(compared, tmp_path):
    """One of each kind of chart, here for three of the methods."""
    shutil.copytree(compared, tmp_path / "cmp", ignore=shutil.ignore_patterns("fedfew*", "experiment.json"))
    out, folder = write([tmp_path / "cmp"], tmp_path / "deep" / "mine.html")
    assert out.stat().st_size > 50_000
    assert folder.name == "mine-figures"
    names = {"clients", "distribution", "convergence", "classes", "models-ifca", "conflicts", "size", "unseen",
             "confusion", "recall"}
    assert {p.name for p in folder.iterdir()} == {f"{n}.{kind}" for n in names for kind in ("png", "svg")}
    assert (folder / "clients.png").read_bytes()[:4] == b"\x89PNG"
    assert (folder / "clients.svg").read_text().startswith("<?xml")


def test_the_page_of_one_run_is_written_into_its_folder(named, tmp_path, monkeypatch):
    """In place of an earlier one, and said so; of several into the folder one is in."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(named / "fedper" / "seed0", tmp_path / "one")
    shutil.copytree(named / "local" / "seed0", tmp_path / "two")
    (tmp_path / "one" / "report.html").write_text("an earlier one")
    done = CliRunner().invoke(app, ["report", "one"], catch_exceptions=False)
    assert done.output == "report: one/report.html (in place of the earlier one), figures: one/report-figures\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "two"]
    assert (tmp_path / "one" / "report.html").stat().st_size > 50_000
    assert (tmp_path / "one" / "report-figures" / "classes.png").is_file()
    done = CliRunner().invoke(app, ["report", "one", "two"], catch_exceptions=False)
    assert done.output == "report: report.html, figures: report-figures\n"
    assert (tmp_path / "report.html").is_file()


def test_a_single_run_and_several_folders_are_read(compared):
    one = gather([compared / "ifca" / "seed0"])
    assert [m["name"] for m in one["methods"]] == ["ifca"]
    assert one["answer"]["headline"].startswith("One method only")
    two = gather([compared / "ifca" / "seed0", compared / "fedavg" / "seed0", compared / "ifca" / "seed0"])
    assert [m["name"] for m in two["methods"]] == ["ifca", "fedavg"]
    assert next(figures(one))[0] == "distribution"


def test_a_run_of_an_earlier_version_is_still_readable(compared, tmp_path):
    """Without data.json, without the models' line and the weights; the page says what is missing."""
    old = tmp_path / "old"
    shutil.copytree(compared / "ifca" / "seed0", old)
    (old / "data.json").unlink()
    lines = [json.loads(line) for line in (old / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        for name in ("w", "alpha", "apart"):
            line.get("report", {}).pop(name, None)
    (old / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines if x["kind"] != "models"))
    found = gather([old])
    assert found["clients"][0]["classes"] is None
    assert any("earlier version" in note for note in found["notes"])
    few = found["methods"][0]["few"]
    assert (few["verdict"], few["models"], few["w"]) == ("unknown", 3, [])
    assert page(found)


def test_regression_has_no_classes_and_lower_is_better(tmp_path):
    inputs = torch.randn(4, 30, 3, generator=torch.Generator().manual_seed(0))
    federation = Federation.from_clients([(x, x @ torch.tensor([1.0, -i, 0.5])) for i, x in enumerate(inputs)])
    coterie.compare([], lambda: torch.nn.Linear(3, 1), federation, folder=tmp_path / "cmp", rounds=2, lr=0.05)
    found = gather([tmp_path / "cmp"])
    assert found["metrics"] == [{"name": "loss", "title": "MSE", "higher": False, "percent": False, "by_median": False}]
    assert found["classes"] == 0
    best = min((line["mean"], line["method"]) for m in found["methods"] for line in m["lines"])
    assert found["answer"]["mean"][0] == best[1]
    assert all(math.isfinite(v) for v in found["methods"][0]["values"]["served"])
    assert "conflicts" in dict(figures(found))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["report", "nowhere"], "nowhere does not exist"),
        (["report", "."], "is not a run folder"),
        (["report", "patients.csv"], "patients.csv is not a run folder: it is a file."),
        (["watch", "patients.csv"], "patients.csv is not a run folder: it is a file."),
        (["watch", "nowhere"], "nowhere does not exist"),
    ],
)
def test_bad_input_is_one_sentence(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "patients.csv").write_text("age,diagnosis\n")
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, CoterieError)
    assert said in str(done.exception)


def test_the_folder_of_a_comparison_hints_at_the_runs_inside(compared):
    """Five methods with two seeds; ten runs, the first by name."""
    with pytest.raises(CoterieError) as said:
        Folder(compared).result()
    assert str(said.value) == f"{compared} holds 10 runs; name one of them, e.g. {compared / 'fedavg' / 'seed0'}."


def test_runs_on_other_clients_are_refused(compared, tmp_path):
    x, y = digits()
    federation = Federation.from_assignment(x[:200], y[:200], partition("iid", y[:200].numpy(), 4, seed=0))
    coterie.run("fedavg", model("mlp", (1, 8, 8), 10, hidden=4), federation, folder=tmp_path / "run", rounds=1)
    with pytest.raises(CoterieError, match=r"20 clients and 3 unseen, .* \(4 clients, .* are runs on different"):
        gather([compared, tmp_path / "run"])


def test_an_unfinished_run_is_said_to_be_unfinished(compared, tmp_path):
    shutil.copytree(compared, tmp_path / "cmp")
    (tmp_path / "cmp" / "ifca" / "seed1" / "result.json").unlink()
    found = gather([tmp_path / "cmp"])
    assert "1 run is not finished" in found["answer"]["caveat"]
    assert found["progress"]["finished"] == 9


@pytest.mark.parametrize(
    ("words", "runs"),
    [(["FedAvg"], ["fedavg", "local"]), (["fedfew", "fedfew:models=3"], ["fedavg", "fedfew", "local"])],
)
def test_a_finished_comparison_is_finished_however_its_methods_are_spelled(words, runs, tmp_path):
    """FedAvg is the baseline fedavg, and three models are fedfew's default: one run each, whatever they are called."""
    folder = tmp_path / "cmp"
    asked = ["compare", *words, "--clients", "4", "--model", "linear", "--rounds", "1", "--set", "device=cpu"]
    done = CliRunner().invoke(app, [*asked, "--out", str(folder)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert sorted(path.parent.name for path in folder.glob("*/seed0")) == runs
    found = gather([folder])
    assert "not finished" not in found["answer"]["caveat"]
    assert (found["progress"]["finished"], found["progress"]["runs"]) == (len(runs), len(runs))
    assert "unfinished" not in CliRunner().invoke(app, ["show", str(folder)], catch_exceptions=False).output


def test_a_method_whose_file_is_gone_is_still_one_of_the_runs_asked_for(compared, tmp_path):
    """Two seeds of it are missing: the report needs the method's name alone, not its code."""
    shutil.copytree(compared, tmp_path / "cmp")
    saved = json.loads((compared / "experiment.json").read_text())
    saved["experiment"]["methods"].append(str(tmp_path / "gone.py:Mine"))
    (tmp_path / "cmp" / "experiment.json").write_text(json.dumps(saved))
    assert "2 runs are not finished" in gather([tmp_path / "cmp"])["answer"]["caveat"]


@pytest.mark.parametrize("text", ["{}", "[]", '{"experiment": 3}', "{"])
def test_a_damaged_experiment_is_said_to_be_damaged(text, compared, tmp_path):
    shutil.copytree(compared, tmp_path / "cmp")
    (tmp_path / "cmp" / "experiment.json").write_text(text)
    with pytest.raises(CoterieError, match=r"experiment\.json"):
        gather([tmp_path / "cmp"])
