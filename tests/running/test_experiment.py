"""An experiment in one call, and what it costs to find out early that a run cannot start."""

import json
from dataclasses import replace

import numpy as np
import pytest
from commands import exit_code

import coterie
from coterie.errors import CoterieError
from coterie.running.experiment import experiment, read_experiment
from coterie.running.runs import run
from coterie.running.saved import Saved
from coterie.running.simulation import Simulation
from coterie.trust import code

TOML = """
data = "digits"
clients = 4
unseen = 1
model = "mlp:hidden=6"
methods = ["fedper", "ifca:models=2"]
seeds = 2
[training]
rounds = 3
evaluate_every = 2
participation = 0.7
seed = 5
device = "cpu"
"""

CLUMSY = '''
from coterie import CoterieError
from coterie.methods.fedavg import FedAvg

class Clumsy(FedAvg):
    def start(self, init):
        raise CoterieError("there is nothing to start with")
'''


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.toml").write_text(TOML)
    return tmp_path / "file.toml"


@pytest.fixture
def built(monkeypatch):
    """The methods of all simulations that are built."""
    found, build = [], Simulation.__init__

    def watched(self, method, *words, **options):
        found.append(method.name)
        build(self, method, *words, **options)

    monkeypatch.setattr(Simulation, "__init__", watched)
    return found


def left_by(folder):
    """Every run's scores and the digest of its rows."""
    found = {}
    for path in sorted(folder.rglob("result.json")):
        name = str(path.parent.relative_to(folder))
        found[name] = (json.loads(path.read_text())["rows_sha256"], (path.parent / "clients.csv").read_bytes())
    return found


# -- one call ----------------------------------------------------------------------------------------------------------


def test_a_file_runs_from_python_as_on_the_command_line(file, tmp_path, monkeypatch):
    """Four methods, the two baselines among them, with two seeds: the same rows and the same clients.csv."""
    results = coterie.experiment(str(file)).run(tmp_path / "python")
    assert exit_code(monkeypatch, "compare", "--config", file, "--out", tmp_path / "typed") == 0
    typed = left_by(tmp_path / "typed")
    assert left_by(tmp_path / "python") == typed
    assert len(typed) == len(results) == 8
    assert [(r.method, r.seed) for r in results[2:5]] == [("fedavg", 5), ("fedavg", 6), ("fedper", 5)]
    experiments = [read_experiment(tmp_path / name) for name in ("python", "typed")]
    assert experiments[0] == experiments[1]


def test_one_method_runs_by_itself(file, tmp_path, monkeypatch):
    """As `coterie run` does; on request it is compared with the baselines, in memory as well as in a folder."""
    file.write_text(TOML.replace('"fedper", "ifca:models=2"', '"fedper"').replace("seeds = 2", ""))
    one = coterie.experiment(file)
    (result,) = one.run(tmp_path / "python")
    assert exit_code(monkeypatch, "run", "--config", file, "--out", tmp_path / "typed") == 0
    assert left_by(tmp_path / "python") == left_by(tmp_path / "typed")
    assert result.model_for("0")(coterie.data.digits()[0][:2]).shape == (2, 10)
    compared = one.run(single=False)
    assert [r.method for r in compared] == ["local", "fedavg", "fedper"]
    assert (compared[2].history[-1].stages["served"].test["loss"] == result.at(when="last").test["loss"]).all()


def test_values_are_an_experiment_too():
    values = {"clients": 3, "model": "linear", "methods": ["local"], "training": {"rounds": 1, "device": "cpu"}}
    (result,) = coterie.experiment(values).run()
    assert (result.method, result.history[-1].round) == ("local", 1)
    with pytest.raises(CoterieError, match="did you mean 'clients'"):
        coterie.experiment({"cleints": 3})


def test_an_experiment_goes_on_where_it_was_stopped(file, tmp_path):
    """A run that was not begun and one without its result are made; with another experiment the folder is refused."""
    one = coterie.experiment(file)
    one.run(tmp_path / "run", resume=True)
    before = left_by(tmp_path / "run")
    (tmp_path / "run" / "ifca-models-2" / "seed6" / "result.json").unlink()
    with pytest.raises(CoterieError, match="already holds a run"):
        one.run(tmp_path / "run")
    again = one.run(tmp_path / "run", resume=True)
    assert (len(again), left_by(tmp_path / "run")) == (8, before)
    with pytest.raises(CoterieError, match="holds a run of another experiment"):
        one.changed(clients=5).run(tmp_path / "run", resume=True)


# -- early -------------------------------------------------------------------------------------------------------------

SMALL = ["--clients", 3, "--model", "linear", "--rounds", 1, "--set", "device=cpu", "--out", "out"]


@pytest.mark.parametrize(("words", "runs"), [
    (["compare", "fedavg", "local", "fedper", "--seeds", 1], ["fedavg", "fedper", "local"]),
    (["compare", "fedper"], ["fedavg", "fedper", "local"]),
    (["run", "fedper"], ["fedper"]),
], ids=["baselines named", "baselines added", "run"])
def test_a_simulation_is_built_once_for_every_run(words, runs, built, tmp_path, monkeypatch):
    """Five were built for three runs: the command line, the comparison and the run each asked for themselves."""
    monkeypatch.chdir(tmp_path)
    assert exit_code(monkeypatch, *words, *SMALL) == 0
    assert sorted(built) == runs


def test_a_resumed_run_is_built_once(built, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert exit_code(monkeypatch, "run", "fedper", *SMALL) == 0
    (tmp_path / "out" / "result.json").unlink()
    assert exit_code(monkeypatch, "resume", "out") == 0
    assert built == ["fedper"] * 2


@pytest.mark.parametrize("words", [
    ["compare", "fedper", "--set", "buffers=local", "--model", "normed.py:Net"],
    ["compare", "fedavg", "fedavg+krum:attackers=2"],
    ["run", "clumsy.py:Clumsy"],
    ["compare", "clumsy.py:Clumsy"],
], ids=["buffers", "too few clients", "run", "compare"])
def test_what_cannot_run_is_said_before_anything_is_trained_or_written(words, tmp_path, monkeypatch):
    """Also where the method that was asked for comes behind the baselines."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clumsy.py").write_text(CLUMSY)
    (tmp_path / "normed.py").write_text(
        "from torch import nn\n\ndef Net(inputs, outputs):\n    return nn.Sequential("
        "nn.Flatten(), nn.Linear(inputs, 4), nn.BatchNorm1d(4), nn.Linear(4, outputs))\n"
    )

    def trained(self):
        raise AssertionError("a round was begun")

    monkeypatch.setattr(Simulation, "rounding", trained)
    small = SMALL[:2] + SMALL[4:] if "--model" in words else SMALL
    assert exit_code(monkeypatch, *words, *small) == 2
    assert not (tmp_path / "out").exists()


# -- a loss of one's own ----------------------------------------------------------------------------------------------

HUBER = """
import torch.nn.functional as F


def huber(outputs, y):
    return F.huber_loss(outputs[:, 0], y, reduction="none", delta=0.1)
"""


@pytest.fixture
def regressing(tmp_path):
    """The text of an experiment with a loss beside it, and the same run from Python."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3)).astype("f4")
    np.savez(tmp_path / "data.npz", x=x, y=(x.sum(1) + rng.normal(size=60)).astype("f4"),
             client=np.repeat(list("abc"), 20))
    (tmp_path / "mine.py").write_text(HUBER)
    (tmp_path / "file.toml").write_text(
        'data = "data.npz"\nmodel = "linear"\nmethods = ["fedavg"]\nloss = "mine.py:huber"\n'
        '[training]\nrounds = 3\ndevice = "cpu"\n'
    )
    return tmp_path


def copy_of_loss(regressing):
    (copy,) = (regressing / "out" / "code").glob("*/mine.py")
    return copy


def scored(results):
    return results[0].at("served").test["loss"]


def test_a_loss_beside_its_file_trains_and_is_called_by_its_name(regressing):
    """The rows are those of `run(..., loss=huber)`, and not those of the squared error; config.json has the name."""
    made = experiment(regressing / "file.toml", trust=True)
    assert made.loss == f"{regressing / 'mine.py'}:huber"
    found = made.run(regressing / "out")
    config = json.loads((regressing / "out" / "config.json").read_text())
    assert config["loss"] == "huber"
    record = json.loads((regressing / "out" / "experiment.json").read_text())
    assert record["experiment"]["loss"] == f"{regressing / 'mine.py'}:huber"
    assert copy_of_loss(regressing).read_text() == HUBER
    federation = made.federation()
    module = vars(code.module(regressing / "mine.py", "huber"))
    same = run("fedavg", made.factory(federation), federation, rounds=3, device="cpu", loss=module["huber"])
    np.testing.assert_array_equal(scored(found), same.at("served").test["loss"])
    other = replace(made, loss="").run(regressing / "plain")
    assert json.loads((regressing / "plain" / "config.json").read_text())["loss"] == "squared error"
    assert not np.allclose(scored(found), scored(other))


def test_a_run_goes_on_with_its_copy_of_the_loss(regressing):
    """The file is gone: resuming, handing out and exporting take the copy that the run made, and say so."""
    made = experiment(regressing / "file.toml", trust=True)
    made.run(regressing / "out")
    (regressing / "mine.py").unlink()
    again, single, note = read_experiment(regressing / "out")
    assert again.loss == f"{copy_of_loss(regressing)}:huber"
    assert "mine.py is gone; the run goes on with its copy" in note
    again.prepare(again.federation(), regressing / "out", single, resume=True)
    saved = Saved.open(regressing / "out")
    assert saved.loss().__name__ == "huber"
    assert saved.simulation().engine.net.task.name == "huber"
    copy_of_loss(regressing).write_text("")
    with pytest.raises(CoterieError, match=r"mine.py is gone, and .* is not the copy the run made of it"):
        read_experiment(regressing / "out")


def test_a_run_from_python_asks_for_the_file_of_its_loss(regressing):
    """Its folder holds the loss's name alone: another one, or the squared error, would train something else."""
    made = experiment(regressing / "file.toml", trust=True)
    federation = made.federation()

    def huber(outputs, y):
        return (outputs[:, 0] - y).abs()

    training = {"rounds": 1, "device": "cpu", "loss": huber, "folder": regressing / "python"}
    run("fedavg", made.factory(federation), federation, **training)
    with pytest.raises(CoterieError, match="trained with the loss huber, which was given in Python; name its file"):
        Saved.open(regressing / "python", "linear").loss()
    assert Saved.open(regressing / "python", "linear", f"{regressing / 'mine.py'}:huber").loss() is not None
    (regressing / "mine.py").write_text(HUBER.replace("def huber", "def other"))
    with pytest.raises(CoterieError, match="trained with the loss huber, not other"):
        Saved.open(regressing / "python", "linear", f"{regressing / 'mine.py'}:other").loss()


def test_smoothing_a_loss_of_ones_own_is_refused(regressing):
    (regressing / "mine.py").write_text("import torch.nn.functional as F\n\n\ndef mine(outputs, y):\n"
                                        "    return F.cross_entropy(outputs, y, reduction='none')\n")
    made = experiment({"clients": 3, "model": "linear", "methods": ["fedavg"], "loss": f"{regressing / 'mine.py'}:mine",
                       "training": {"label_smoothing": 0.1, "rounds": 1, "device": "cpu"}})
    with pytest.raises(CoterieError, match="is for the cross entropy, and the loss is your own"):
        made.run()


def test_the_command_takes_a_loss_and_hands_out_with_it(regressing, monkeypatch, capsys):
    """`run --loss`, then `personalize` of a newcomer: the run's own loss is asked for, not the squared error."""
    monkeypatch.chdir(regressing)
    words = ["--data", "data.npz", "--model", "linear", "--set", "device=cpu", "--rounds", "2"]
    assert exit_code(monkeypatch, "run", "fedavg", *words, "--loss", "mine.py:huber", "--out", "out") == 0
    assert json.loads((regressing / "out" / "config.json").read_text())["loss"] == "huber"
    hand_out = ["personalize", "out", "--data", "data.npz", "--client", "a", "-o", "a.safetensors"]
    assert exit_code(monkeypatch, *hand_out) == 0
    assert json.loads((regressing / "a.json").read_text())["job"]["loss"] == f"{regressing / 'mine.py'}:huber"
    assert exit_code(monkeypatch, "run", "fedavg", *words, "--loss", "mine.py:hubber", "--out", "other") == 2
    assert "did you mean 'huber'" in capsys.readouterr().err
    assert not (regressing / "other").exists()
