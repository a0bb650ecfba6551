"""What the commands of an operator do without Flower's processes: settings, rehearsals, predictions, the live table."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
import sites as toy
import torch
from typer.testing import CliRunner

from coterie.cli import app
from coterie.errors import CoterieError
from coterie.flower import operator
from coterie.flower.checks import Inspector, Limits
from coterie.flower.loopback import Loopback
from coterie.flower.plan import Plan
from coterie.flower.rounds import serve
from coterie.flower.site import site_at

CONFIG = """method = "fedper"
model = "mlp:hidden=5"
shape = [4]
classes = 3
[training]
rounds = 2
lr = 0.1
device = "cpu"
[policy]
sites = 3
"""


@pytest.fixture
def config(tmp_path):
    (tmp_path / "server.toml").write_text(CONFIG)
    return tmp_path / "server.toml"


@pytest.fixture
def files(tmp_path):
    rng, found = np.random.default_rng(0), {}
    for name in ("lyon", "oslo", "turin"):
        y = rng.integers(0, 3, 60)
        found[name] = tmp_path / f"{name}.npz"
        np.savez(found[name], x=(rng.standard_normal((60, 4)) + 2 * np.eye(4)[y]).astype(np.float32), y=y)
    return found


def test_a_file_is_a_plan(config):
    plan = Plan.configured(config)
    (job,) = plan.jobs
    assert (job.method, job.model, job.shape, job.classes, job.outputs) == ("fedper", "mlp:hidden=5", (4,), 3, 3)
    assert (job.training.rounds, plan.policy.sites, plan.limits.norm) == (2, 3, 10.0)
    assert Plan.configured(config).jobs[0].experiment != job.experiment  # each has an id of its own


@pytest.mark.parametrize(("line", "replacement", "sentence"), [
    ('method = "fedper"', 'method = "fedpur"', "did you mean 'fedper'"),
    ('method = "fedper"', 'metod = "fedper"', "did you mean 'method'"),
    ('method = "fedper"', "", "lacks method"),
    ("shape = [4]", "shape = 4", "shape in .* is that of one sample"),
    ("shape = [4]", "shape = [4, -1]", "shape in .* is that of one sample"),
    ("classes = 3", "classes = true", "classes in .* is a whole number"),
    ("rounds = 2", "round = 2", "did you mean 'rounds'"),
    ("rounds = 2", "dropouts = 0.3", "real sites fail by themselves"),
    ("sites = 3", "sites = 0", "sites must be at least 1"),
    ("sites = 3", "sites = 3\n[limits]\nnorm = 0.5", "a factor above 1"),
    ("sites = 3", "sites = 3\n[limit]\nnorm = 5", "did you mean 'limits'"),
    ("[policy]", "[policy", "is not valid TOML"),
    ("[training]", "training = 3\n[x]", "unknown setting|must be a table"),
])
def test_a_wrong_file_is_a_sentence(config, line, replacement, sentence):
    config.write_text(CONFIG.replace(line, replacement))
    with pytest.raises(CoterieError, match=sentence):
        Plan.configured(config)


def test_limits_can_be_switched_off(config):
    config.write_text(CONFIG + '[limits]\nnorm = "none"\nsamples = 5\n')
    assert Plan.configured(config).limits == Limits(norm=None, samples=5.0)


def test_a_folder_keeps_its_experiment(config, tmp_path):
    """The id is made once; patience may change, the experiment may not."""
    first = Plan.configured(config).placed(tmp_path / "run")
    config.write_text(CONFIG.replace("sites = 3", "sites = 3\ndeadline = 5"))
    second = Plan.configured(config).placed(tmp_path / "run")
    assert second.jobs == first.jobs
    assert second.policy.deadline == 5
    config.write_text(CONFIG.replace("lr = 0.1", "lr = 0.2"))
    with pytest.raises(CoterieError, match="holds an experiment with other settings"):
        Plan.configured(config).placed(tmp_path / "run")


@pytest.mark.parametrize(("words", "sentence"), [
    (["client", "--data", "x.npz"], "where is the server"),
    (["client", "--data", "x.npz", "--server", "hub:80"], "needs its keys"),
    (["client", "--data", "x.npz", "--server", "hub:80", "--insecure"], "needs a name"),
    (["client", "--data", "x.npz", "--server", "hub"], "is no address"),
    (["client", "--data", "gone.npz", "--server", "hub:80", "--insecure", "--name", "a"], "there is no file"),
    (["client", "--data", "x.npz", "--predict"], "holds no model yet"),
    (["server", "gone.toml", "--out", "run", "--insecure"], "gone.toml cannot be read"),
    (["server", "gone.toml", "--out", "run"], "needs its keys"),
    (["server", "gone.toml", "--out", "run", "--insecure", "--keys", "x"], "exclude each other"),
    (["status", "nowhere"], "is not the folder of a server"),
    (["status", ".", "--lift", "oslo"], "oslo is not quarantined; quarantined are: none"),
])
def test_wrong_words_are_a_sentence(tmp_path, monkeypatch, words, sentence):
    pytest.importorskip("flwr")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, CoterieError)
    assert sentence in str(result.exception)


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"fedper": "fedavg+private:sigma=1", "rounds = 2": 'rounds = 2\nsampling = "poisson"'}, "sites' scores"),
    ({"fedper": "fedavg+krum:faulty=1", "sites = 3": "sites = 2"}, "needs at least"),
])
def test_what_cannot_run_is_refused_before_the_server_starts(config, tmp_path, changes, sentence):
    """Nothing is left behind: neither a process nor a folder."""
    pytest.importorskip("flwr")
    text = CONFIG
    for old, new in changes.items():
        text = text.replace(old, new)
    config.write_text(text)
    result = CliRunner().invoke(app, ["server", str(config), "--out", str(tmp_path / "run"), "--insecure"])
    assert isinstance(result.exception, CoterieError)
    assert sentence in str(result.exception)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("method", "introduces", "uploads"), [
    ("fedper", set(), {"update"}), ("pacfl", {"basis"}, {"update"}), ("fedfew", set(), {"update", "loss"}),
])
def test_a_rehearsal_shows_what_leaves_and_sends_nothing(config, files, tmp_path, method, introduces, uploads):
    """FedPer's head, 5 * 3 + 3 of 43 columns, stays at home; n is 60 less a quarter, less a tenth of the rest."""
    config.write_text(CONFIG.replace("fedper", method))
    parcels = operator.rehearse(config, str(files["oslo"]), tmp_path / "home", "oslo", {"device": "cpu"})
    told = [parcel for parcel in parcels if parcel.meta["kind"] == "introduce"]
    trained = [parcel for parcel in parcels if "n" in parcel.meta]
    assert set().union(*(parcel.tensors for parcel in told)) == introduces
    assert [set(parcel.tensors) for parcel in trained] == [uploads]
    assert trained[0].meta["n"] == 41
    if method == "fedper":
        assert tuple(trained[0].tensors["update"].shape) == (1, 25)
    shown = operator.sending(parcels)
    cells = list(shown.columns[1].cells)
    assert {"n", "scores", *introduces, *uploads} <= set(cells)


def test_the_command_of_a_rehearsal(config, files):
    result = CliRunner().invoke(app, ["client", "--data", str(files["oslo"]), "--dry-run", str(config)])
    assert result.exit_code == 0, result.output
    assert "float32 [1, 25]" in result.output


@pytest.fixture
def trained(config, files, tmp_path):
    """A finished run of three sites in this process: its folder and the sites' homes."""
    plan = Plan.configured(config).placed(tmp_path / "run")
    sites = [site_at(name, path, tmp_path / name, "cpu") for name, path in files.items()]
    serve(plan.jobs, Loopback(sites), plan.policy, tmp_path / "run", Inspector(plan.limits, tmp_path / "run"))
    return tmp_path / "run"


def test_a_site_predicts_with_its_model(trained, files, tmp_path):
    """The csv agrees with the labels as often as is said, and as the model's own file gives."""
    out = tmp_path / "said.csv"
    path, accuracy = operator.predict(tmp_path / "oslo", str(files["oslo"]), out)
    with path.open() as file:
        rows = list(csv.DictReader(file))
    y = np.load(files["oslo"])["y"]
    assert [int(row["sample"]) for row in rows] == list(range(60))
    assert accuracy == pytest.approx(np.mean([int(row["class"]) == label for row, label in zip(rows, y, strict=True)]))
    assert all(1 / 3 <= float(row["probability"]) <= 1 for row in rows)
    np.savez(tmp_path / "wide.npz", x=np.zeros((3, 5), np.float32), y=np.zeros(3, np.int64))
    with pytest.raises(CoterieError, match=r"samples of \[4\]; .* has \[5\]"):
        operator.predict(tmp_path / "oslo", str(tmp_path / "wide.npz"), None)


def test_a_site_writes_down_what_left_it(trained, tmp_path):
    (path,) = (tmp_path / "oslo").glob("*/sent.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["introduce", "round", "round", "round", "round"]
    assert [line["tensors"] for line in lines] == [{}, *[{"update": "float32 [1, 25]"}] * 2, {}, {}]
    assert ["scores" in line for line in lines[3:]] == [True, False]  # the last round's; the chosen model tells nothing
    assert lines[1]["n"] == 41


def test_the_table_of_a_run(trained):
    table = operator.status(trained)
    assert str(table.title).startswith("fedper: finished")
    assert "2 of 2 rounds" in str(table.title)
    assert list(table.columns[0].cells) == ["lyon", "oslo", "turin"]
    assert list(table.columns[3].cells) == ["2", "2", "2"]
    assert list(table.columns[6].cells) == ["has its model"] * 3
    assert CliRunner().invoke(app, ["status", str(trained)]).exit_code == 0


def test_a_late_site_gets_a_model_from_the_finished_folder(trained, files, tmp_path, config):
    """The same command on the same folder serves whoever came since, by the method's rule for unseen clients."""
    np.savez(tmp_path / "zurich.npz", **np.load(files["lyon"]))
    late = [site_at("zurich", tmp_path / "zurich.npz", tmp_path / "zurich", "cpu")]
    plan = Plan.configured(config).placed(tmp_path / "run")
    serve(plan.jobs, Loopback(late), plan.policy, tmp_path / "run")
    (facts,) = (tmp_path / "zurich").glob("*/model.json")
    assert json.loads(facts.read_text())["newcomer"] is True
    assert operator.predict(tmp_path / "zurich", str(files["lyon"]), tmp_path / "z.csv")[1] is not None


def test_made_up_samples_fit_the_job():
    data = toy.federation()
    made = toy.job(data, "fedavg").made_up(2)
    assert made.population == 2
    assert made.x.shape[1:] == data.x.shape[1:]
    assert torch.equal(made.y.unique(), torch.arange(3))
