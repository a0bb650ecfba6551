"""One small real comparison, made once by the command line, for everything that reads a run folder."""

import sys

import pytest
from typer.testing import CliRunner

from coterie.cli import app

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
    return made(COMMAND, tmp_path_factory.mktemp("compared") / "cmp")


@pytest.fixture(scope="session")
def churned(tmp_path_factory):
    """The folder of a comparison where 1 and 2 arrive in round 2, 3 in round 5, and 0 and 3 leave in 4 and 7."""
    place = tmp_path_factory.mktemp("churned")
    (place / "churn.csv").write_text("client,arrives,leaves\n0,,4\n1,2,\n2,2,\n3,5,7\n")
    words = ["compare", "fedper", "--clients", "7", "--model", "linear", "--rounds", "8", "--seeds", "2", "--set",
             "evaluate_every=1", "--set", "device=cpu", "--churn", str(place / "churn.csv")]
    return made(words, place / "cmp")


def made(words, folder):
    words = [*words, "--out", str(folder)]
    before, sys.argv = sys.argv, ["coterie", *words]
    try:
        done = CliRunner().invoke(app, words, catch_exceptions=False)
    finally:
        sys.argv = before
    assert done.exit_code == 0, done.output
    return folder
