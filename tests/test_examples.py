"""The examples run as they stand, in a folder of their own, and find what was planted in their data."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from coterie.running.check import DEMANDS

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name, folder):
    """What the example prints when it is run as its docstring says."""
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "out"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in folder.iterdir()] == ["out"]  # nothing is left elsewhere
    return done.stdout


def test_every_example_is_run_here_and_listed():
    scripts = {path.stem for path in EXAMPLES.glob("*.py")}
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert scripts <= tested
    assert scripts == set(re.findall(r"^\| \[(\w+)\.py\]", (EXAMPLES / "README.md").read_text("utf-8"), re.MULTILINE))


def test_own_data(tmp_path):
    """South's labels are the others' turned round. One model for five that agree answers south wrongly, so that site is
    FedAvg's worst, with less than half right; two models or training alone leave nobody there."""
    printed = example("own_data", tmp_path)
    found = re.findall(r"^(\S+), seed (\d): mean [\d.]+, worst ([\d.]+) at (\w+)$", printed, re.MULTILINE)
    assert [(method, seed) for method, seed, _, _ in found] == [
        (method, seed) for method in ("local", "fedavg", "fedper", "ifca:models=2") for seed in "01"
    ]
    for method, _, worst, site in found:
        assert (float(worst) < 0.5) == (method == "fedavg")
        assert site == "south" or method != "fedavg"
    assert "south" in (tmp_path / "out" / "report.html").read_text("utf-8")


def test_own_method(tmp_path):
    """A client that may choose between Local's model and FedAvg's is served no worse than by the worse of them."""
    printed = example("own_method", tmp_path)
    assert printed.count("holds  ") == len(DEMANDS)
    assert "fails" not in printed
    means = {name: float(mean) for name, mean in re.findall(r"^(\S+) +mean ([\d.]+), worst", printed, re.MULTILINE)}
    assert set(means) == {"local", "fedavg", "Better", "Better:doubt=0.5"}
    assert means["Better"] >= min(means["local"], means["fedavg"])


def test_newcomer(tmp_path):
    """The accuracy on what came later lies in the interval that was stated before, for just as many samples."""
    printed = example("newcomer", tmp_path)
    said = re.search(r"samples that came later: accuracy ([\d.]+); ([\d.]+) to ([\d.]+) was expected", printed)
    accuracy, low, high = map(float, said.groups())
    assert low <= accuracy <= high


@pytest.mark.parametrize("name", ["own_data", "own_method", "newcomer"])
def test_an_example_is_short_and_says_how_it_is_run(name):
    text = (EXAMPLES / f"{name}.py").read_text("utf-8")
    assert f"    python examples/{name}.py [FOLDER]\n" in text
    assert len(text.splitlines()) <= 80
