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
    folder = tmp_path_factory.mktemp("compared") / "cmp"
    words = [*COMMAND, "--out", str(folder)]
    before, sys.argv = sys.argv, ["coterie", *words]
    try:
        done = CliRunner().invoke(app, words, catch_exceptions=False)
    finally:
        sys.argv = before
    assert done.exit_code == 0, done.output
    return folder
