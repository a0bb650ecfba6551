"""A method is one file: dropped into coterie/methods, it is listed, conforms and runs, with no edit elsewhere."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import coterie

TOY = '''
"""Halfway: every client uses the middle between its own model and the shared one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coterie.cohort import Cohort
from coterie.methods.fedavg import FedAvg
from coterie.records import Model, Record, Upload


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


def run(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(place), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.long
def test_a_new_file_is_a_new_method(tmp_path):
    package, tests = Path(coterie.__file__).parent, Path(__file__).parent.parent
    shutil.copytree(package, tmp_path / "coterie", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "coterie" / "methods" / "halfway.py").write_text(TOY)
    (tmp_path / "tests" / "conformance").mkdir(parents=True)
    shutil.copy(tests / "conftest.py", tmp_path / "tests")
    shutil.copy(tests / "conformance" / "test_methods.py", tmp_path / "tests" / "conformance")

    listed = run(tmp_path, "-m", "coterie", "methods")
    assert "halfway" in listed.stdout, listed.stderr

    flags = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib"]
    conform = run(tmp_path, "-m", "pytest", *flags, "tests", "-k", "halfway")
    assert conform.returncode == 0, conform.stdout
    assert int(conform.stdout.split(" passed")[0].split()[-1]) >= 10, conform.stdout

    small = ["--clients", "4", "--partition", "iid", "--model", "linear", "--rounds", "2", "--out", "out"]
    done = run(tmp_path, "-m", "coterie", "run", "halfway:a=0.3", *small)
    assert done.returncode == 0, done.stderr
    assert "halfway:a=0.3" in done.stdout


@pytest.mark.long
def test_a_method_in_a_file_of_its_own_runs_by_its_path(tmp_path):
    """For people who do not own the package: the same class from any file, resumed as well."""
    (tmp_path / "mine.py").write_text(TOY)
    package = Path(coterie.__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    small = ["--clients", "4", "--partition", "iid", "--model", "linear", "--rounds", "2", "--out", "out"]
    for words in (["run", "mine.py:Halfway:a=0.3", *small], ["show", "out"], ["resume", "out"]):
        done = subprocess.run(
            [sys.executable, "-m", "coterie", *words], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert "Halfway" in done.stdout
