"""One small real comparison, made once by the command line, for everything that reads a run folder."""

import sys

import pytest
import torch
from rescored import BALANCED, DIAGNOSES, HUBER, SITES, rescored
from typer.testing import CliRunner

import coterie
from coterie.cli import app
from coterie.data import Federation, churn, digits, partition
from coterie.models import model

# Digits dealt by dirichlet 0.5 to 20 clients and 20 rounds at this rate: long enough for FedFew's released program,
# whose models start equal, to run into one model; the same models kept at full steps, and IFCA's, stay apart.
COMMAND = [
    "compare", "ifca", "fedfew:official", "fedfew:normalise=true", "--clients", "20", "--unseen", "3", "--model",
    "mlp:hidden=32", "--rounds", "20", "--seeds", "2", "--set", "lr=0.3", "--set", "evaluate_every=4", "--set",
    "device=cpu",
]


@pytest.fixture(scope="session")
def compared(tmp_path_factory):
    """The folder of the comparison."""
    folder = tmp_path_factory.mktemp("compared") / "cmp"
    words = [*COMMAND, "--out", str(folder)]
    before, sys.argv = sys.argv, ["coterie", *words]
    try:
        done = CliRunner().invoke(app, words, catch_exceptions=False)
    finally:
        sys.argv = before
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture(scope="session")
def churned(tmp_path_factory):
    """The folder of a comparison where 1 and 2 arrive in round 2, 3 in round 5, and 0 and 3 leave in 4 and 7."""
    x, y = (part[:600] for part in digits())
    data = Federation.from_assignment(x, y, partition("iid", y.numpy(), 7, seed=0))
    data = churn.with_times(data, {"0": (0, 4), "1": (2, churn.NEVER), "2": (2, churn.NEVER), "3": (5, 7)})
    folder = tmp_path_factory.mktemp("churned") / "cmp"
    options = {"rounds": 8, "evaluate_every": 1, "device": "cpu"}
    coterie.compare(["fedper"], model("linear", (1, 8, 8), 10), data, seeds=(0, 1), folder=folder, **options)
    return folder


@pytest.fixture(scope="session")
def sites():
    """Twelve named clients of 24 to 46 samples with three named classes, each the sign of one of three numbers."""
    parts = []
    for i in range(len(SITES)):
        draw = torch.Generator().manual_seed(i)
        x = torch.randn(24 + 2 * i, 3, generator=draw)
        parts.append((x, (x + 0.3 * torch.randn(x.shape, generator=draw)).argmax(1)))
    return Federation.from_clients(parts, names=list(SITES), classes=3, recipe={"classes": list(DIAGNOSES)})


@pytest.fixture(scope="session")
def named(sites, tmp_path_factory):
    """The folder of a comparison on them."""
    folder = tmp_path_factory.mktemp("named") / "cmp"
    options = {"rounds": 4, "lr": 0.1, "device": "cpu", "evaluate_every": 2}
    coterie.compare(["fedper"], model("mlp", (3,), 3, hidden=8), sites, seeds=(0, 1), folder=folder, **options)
    return folder


@pytest.fixture(scope="session")
def balanced(named, tmp_path_factory):
    """Runs that balanced accuracy decides, with macro F1 and a Brier score beside it: folders with their results."""
    return rescored(named, tmp_path_factory.mktemp("balanced") / "cmp", BALANCED)


@pytest.fixture(scope="session")
def huber(named, tmp_path_factory):
    """The same runs, decided by a loss that was called huber."""
    return rescored(named, tmp_path_factory.mktemp("huber") / "cmp", HUBER)
