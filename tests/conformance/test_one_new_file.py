"""A method, an aggregator, an optimizer, a metric and a reader are one file each: dropped into its folder, it works.

Nothing else is edited.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import coterie
from coterie.running.folder import Folder

TOY = '''
"""Halfway: every client uses the middle between its own model and the shared one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coterie.contract.cohort import Cohort
from coterie.contract.records import Model, Record, Upload
from coterie.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Halfway(FedAvg):
    """v_i <- SGD_i(v_i) stays with its client, theta is FedAvg's, and client i deploys (1 - a) v_i + a theta."""

    a: float = 0.5

    family = "interpolation"
    shared = "a model"
    keeps = "a model of its own"
    newcomer = "the shared model"

    def join(self, cohort: Cohort, payload: Model) -> Model:
        return Model(payload.row)

    def local(self, cohort: Cohort, payload: Model, mine: Model) -> tuple[Upload, Record]:
        upload, _ = super().local(cohort, payload, mine)
        return upload, Model(cohort.train(mine.row, purpose="own"))

    def deploy(self, cohort: Cohort, payload: Model, mine: Model) -> Tensor:
        return mine.row.lerp(payload.row, self.a)
'''


AGGREGATOR = '''
"""Cautious: half of the mean."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coterie.contract.aggregator import Aggregator
from coterie.contract.layout import Layout


@dataclass(frozen=True)
class Cautious(Aggregator):
    """s sum_i w_i u_i: the mean of the updates, shortened."""

    s: float = 0.5
    """How much of the mean is taken."""

    protects = "nothing, slowly"
    cite = "nobody"

    def combine(self, updates: Tensor, weights: Tensor, layout: Layout) -> Tensor:
        return self.s * (weights @ updates)
'''

METRIC = '''
"""Metrics of the worst class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from coterie.contract.metric import Metric


@dataclass(frozen=True)
class WorstRecall(Metric):
    """min over classes k of (right_k + prior) / (labels_k + prior)."""

    prior: float = 1.0
    """Right answers that every class is granted."""

    name = "worst_recall"
    percent = True
    kind = "classes"

    def sums(self, outputs: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]:
        mine = (y[:, None] == outputs.new_tensor(range(outputs.shape[-1]))) * weight[:, None]
        right = (outputs.argmax(-1) == y)[:, None]
        return {"right": (mine * right).sum(0), "labels": mine.sum(0)}

    def value(self, sums: Mapping[str, Tensor]) -> Tensor:
        return ((sums["right"] + self.prior) / (sums["labels"] + self.prior)).amin(-1)
'''

OPTIMIZER = '''
"""Lion: steps of one size, along the sign of a mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from coterie.contract.optimizer import Number, Optimizer
from coterie.options import BelowOne


@dataclass(frozen=True)
class Lion(Optimizer):
    """w <- w - lr sign(beta1 m + (1 - beta1) g); m <- beta2 m + (1 - beta2) g."""

    beta1: BelowOne = 0.9
    """Share of the past in the step."""
    beta2: BelowOne = 0.99
    """Share of the past in what is remembered."""

    cite = "Chen et al., Symbolic discovery of optimization algorithms, NeurIPS 2023"
    slots = ("mean",)
    at_server: ClassVar[Mapping[str, Any]] = {"lr": 0.001}

    def step(self, row: Tensor, gradient: Tensor, state: Mapping[str, Tensor], lr: Number, count: Number) -> None:
        row.sub_(torch.sign(torch.lerp(gradient, state["mean"], self.beta1)).mul_(lr))
        state["mean"].lerp_(gradient, 1 - self.beta2)
'''

READER = '''
"""Lines of json, one sample each: {"x": [...], "y": 1, "client": "north"}."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from coterie.data.readers.formats import Format
from coterie.data.readers.pieces import Piece, Source, collect, names
from coterie.data.readers.refusals import Problems


def lines(path: str | Path, *, skip: bool = False, factor: float = 1.0) -> Source:
    held = [json.loads(line) for line in Path(path).read_text().splitlines()]
    x = factor * np.array([one["x"] for one in held], dtype=np.float32)
    y, client = np.array([one["y"] for one in held]), names([one["client"] for one in held])
    return collect([Piece(x, y, Path(path).name, client)], Path(path).stem, Problems(), skip=skip)


READS = (Format(lines, file=lambda path: path.name.endswith(".lines.json")),)
'''

SMALL = ["--partition", "iid", "--model", "linear", "--rounds", "2", "--out", "out"]


def run(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(place), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=300)


def copied(place: Path, file: str, text: str) -> None:
    """The package with one more file."""
    shutil.copytree(Path(coterie.__file__).parent, place / "coterie", ignore=shutil.ignore_patterns("__pycache__"))
    assert not (place / "coterie" / file).exists()
    (place / "coterie" / file).write_text(text)


def conforms(place: Path, suite: str, word: str, least: int) -> None:
    """The conformance suite finds the newcomer by itself: at least so many of its tests are about it, and all pass."""
    tests = Path(__file__).parent.parent
    (place / "tests" / "conformance").mkdir(parents=True)
    for name in ("conftest.py", "by_hand.py"):
        shutil.copy(tests / name, place / "tests")
    shutil.copy(tests / "conformance" / suite, place / "tests" / "conformance")
    flags = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-o", "pythonpath=tests"]
    done = run(place, "-m", "pytest", *flags, "tests", "-k", word)
    assert done.returncode == 0, done.stdout
    assert int(done.stdout.split(" passed")[0].split()[-1]) >= least, done.stdout


@pytest.mark.long
def test_a_new_file_is_a_new_method(tmp_path):
    copied(tmp_path, "methods/halfway.py", TOY)
    listed = run(tmp_path, "-m", "coterie", "methods")
    assert "halfway" in listed.stdout, listed.stderr
    conforms(tmp_path, "test_methods.py", "halfway", 10)
    done = run(tmp_path, "-m", "coterie", "run", "halfway:a=0.3", "--clients", "4", *SMALL)
    assert done.returncode == 0, done.stderr
    assert "halfway:a=0.3" in done.stdout


@pytest.mark.long
def test_a_new_file_is_a_new_aggregator(tmp_path):
    """It plugs into every method that averages; the suite tries it under each of them."""
    copied(tmp_path, "aggregators/cautious.py", AGGREGATOR)
    listed = run(tmp_path, "-m", "coterie", "methods")
    assert "cautious" in listed.stdout, listed.stderr
    conforms(tmp_path, "test_aggregators.py", "cautious", 10)
    done = run(tmp_path, "-m", "coterie", "run", "fedavg+cautious:s=0.3", "--clients", "4", *SMALL)
    assert done.returncode == 0, done.stderr
    assert "fedavg+cautious:s=0.3" in done.stdout


@pytest.mark.long
def test_a_new_file_is_a_new_optimizer(tmp_path):
    """It is listed, explained and spelled like the others; a step of Lion is lr long in every number, at the server
    and, three of them along a gradient that keeps its signs, at a client."""
    copied(tmp_path, "optimizers/lion.py", OPTIMIZER)
    listed = run(tmp_path, "-m", "coterie", "methods")
    assert "lion" in listed.stdout, listed.stderr
    explained = run(tmp_path, "-m", "coterie", "methods", "lion")
    assert "Share of the past in what is remembered." in explained.stdout, explained.stderr
    program = """
import torch
import coterie
from coterie import registry
from coterie.models import model

assert registry.optimizer("lion(beta1=0.5)").beta1 == 0.5
clients = [(torch.randn(8, 5), torch.arange(8) % 2) for _ in range(4)]
federation = coterie.Federation.from_clients(clients)
result = coterie.run("fedavg:server=lion(lr=0.25)", model("linear", (5,), 2), federation, rounds=1, device="cpu")
moved = result.simulation.server.state.row - result.simulation.init.row
assert torch.allclose(moved.abs(), torch.tensor(0.25)), moved
result = coterie.run("local", model("linear", (5,), 2), federation, rounds=1, device="cpu", optimizer="lion(keep=true)",
                     lr=1e-4, batch=0, steps=3)
moved = result.simulation.own.row - result.simulation.init.row
assert torch.allclose(moved.abs(), torch.tensor(3e-4), rtol=1e-2), moved
"""
    done = run(tmp_path, "-c", program)
    assert done.returncode == 0, done.stderr
    words = ["fedper:server=lion", "fedavg:server=lion(lr=0.1)+median", "--set", "server=lion(beta2=0.9)"]
    done = run(tmp_path, "-m", "coterie", "compare", *words, "--clients", "4", *SMALL)
    assert done.returncode == 0, done.stderr
    assert "fedavg:server=lion(lr=0.1)+median" in done.stdout
    words = ["ditto", "fedper:optimizer=lion(beta1=0.5)", "--set", "optimizer=lion", "--set", "lr=0.001"]
    done = run(tmp_path, "-m", "coterie", "compare", *words, "--clients", "4", *SMALL[:-1], "local")
    assert done.returncode == 0, done.stderr
    assert "fedper:optimizer=lion(beta1=0.5)" in done.stdout
    refused = run(tmp_path, "-m", "coterie", "run", "fedavg:server=lion(beta1=1)", "--clients", "4", *SMALL)
    assert "lion's beta1 must be at least 0 and below 1, not 1.0" in " ".join(refused.stderr.split())


def worst_recall(place: Path, column: str) -> None:
    """The chosen round's values are the least of (right + prior) / (labels + prior), from the confusion matrices."""
    result = Folder(place / "out").result()
    scores, counts = result.at("served"), result.confusion("served").counts
    prior = 2.0 if "prior" in column else 1.0
    expected = ((np.diagonal(counts, axis1=1, axis2=2) + prior) / (counts.sum(2) + prior)).min(1)
    np.testing.assert_allclose(scores.test[column], expected, rtol=1e-9)


@pytest.mark.long
def test_a_new_file_is_a_new_metric(tmp_path):
    """It decides, is watched beside others, and is stored per client."""
    copied(tmp_path, "metrics/worst.py", METRIC)
    words = ["--clients", "4", *SMALL, "--metric", "worst_recall(prior=2.0)", "--watch", "f1", "worst_recall"]
    done = run(tmp_path, "-m", "coterie", "run", "fedavg", *words)
    assert done.returncode == 0, done.stderr
    assert Folder(tmp_path / "out").result().at("served").metric == "worst_recall(prior=2.0)"
    for column in ("worst_recall(prior=2.0)", "worst_recall"):
        worst_recall(tmp_path, column)
    refused = run(tmp_path, "-m", "coterie", "run", "fedavg", "--metric", "worst_recal", "--out", "other")
    assert "unknown metric 'worst_recal'; did you mean 'worst_recall'?" in refused.stderr.replace("\n", " ")


@pytest.mark.long
def test_a_metric_in_a_file_of_its_own_decides_and_is_needed_for_the_training_alone(tmp_path):
    """Chosen by its path, resumed from another folder; the table is shown when the file is gone."""
    (tmp_path / "mine.py").write_text(METRIC)
    package = Path(coterie.__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}

    def command(*words, cwd=tmp_path):
        command = [sys.executable, "-m", "coterie", *map(str, words)]
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)

    chosen = ["--metric", "mine.py:WorstRecall(prior=2)", "--watch", "mine.py:WorstRecall"]
    done = command("run", "fedavg", "--clients", "4", *SMALL, *chosen)
    assert done.returncode == 0, done.stderr
    for column in ("worst_recall(prior=2.0)", "worst_recall"):
        worst_recall(tmp_path, column)
    (tmp_path / "elsewhere").mkdir()
    assert command("resume", tmp_path / "out", cwd=tmp_path / "elsewhere").returncode == 0
    (tmp_path / "mine.py").unlink()
    for words in (["show", "out"], ["export", "out", "--client", "0", "-o", "model.safetensors"]):
        done = command(*words)
        assert done.returncode == 0, done.stderr
    again = command("run", "fedavg", *chosen, "--out", "other")
    assert again.returncode == 2
    assert "to take the metric WorstRecall from" in again.stderr
    assert not (tmp_path / "other").exists()


@pytest.mark.long
def test_a_new_file_is_a_new_reader(tmp_path):
    """Found by the file's name before LEAF's reader, which takes all other .json files, or named by `format`."""
    copied(tmp_path, "data/readers/lines.py", READER)
    held = [{"x": [k, 2.0 * k, 1.0], "y": k % 2, "client": ("north", "south")[k // 20]} for k in range(40)]
    text = "\n".join(json.dumps(one) for one in held)
    for name in ("own.lines.json", "own.txt"):
        (tmp_path / name).write_text(text)
    program = """
from coterie.data import load
from coterie.data.readers import find
assert (find("own.lines.json"), find("own.json")) == ("lines", "leaf")
source = load("own.txt:format=lines,factor=3")
assert source.x[:3].tolist() == [[0, 0, 3], [3, 6, 3], [6, 12, 3]]
assert source.y[:3].tolist() == [0, 1, 0]
assert sorted(set(source.client)) == ["north", "south"]
"""
    done = run(tmp_path, "-c", program)
    assert done.returncode == 0, done.stderr
    done = run(tmp_path, "-m", "coterie", "data", "own.lines.json", "--each")
    assert "north" in done.stdout, done.stderr
    unknown = run(tmp_path, "-m", "coterie", "data", "own.lines.json:faktor=2")
    assert "unknown option of lines data 'faktor'; did you mean 'factor'?" in unknown.stderr.replace("\n", " ")
    done = run(tmp_path, "-m", "coterie", "run", "fedavg", "--data", "own.lines.json", *SMALL[2:])
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_a_method_in_a_file_of_its_own_runs_by_its_path(tmp_path):
    """For people who do not own the package: the same class from any file, resumed as well."""
    (tmp_path / "mine.py").write_text(TOY)
    package = Path(coterie.__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    for words in (["run", "mine.py:Halfway:a=0.3", "--clients", "4", *SMALL], ["show", "out"], ["resume", "out"]):
        done = subprocess.run(
            [sys.executable, "-m", "coterie", *words], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert "Halfway" in done.stdout
