"""An experiment in one call, and what it costs to find out early that a run cannot start."""

import json

import pytest
from commands import exit_code

import coterie
from coterie.errors import CoterieError
from coterie.running.experiment import read_experiment
from coterie.running.simulation import Simulation

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
