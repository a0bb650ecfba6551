"""One small real comparison, made once by the command line, for everything that reads a run folder."""

import json
import shutil
import sys
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import coterie
from coterie.cli import app
from coterie.contract.metric import Scale
from coterie.data import Federation, churn, digits, partition
from coterie.models import model
from coterie.running import confusion
from coterie.running.folder import inside

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


SITES = (
    "Charité Berlin", "St Mary's London", "Karolinska", "Hôpital Saint-Louis", "Mayo Clinic Rochester", "AKH Wien",
    "Massachusetts General", "Universitätsspital Zürich", "Rigshospitalet", "Toronto General", "Royal Melbourne",
    "Oslo University Hospital",
)
DIAGNOSES = ("healthy", "pneumonia", "tuberculosis")


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


BALANCED = Scale("balanced_accuracy", "balanced accuracy", higher=True, percent=True)
HUBER = Scale("loss", "huber", higher=False)
WATCHED = {"f1": ("macro F1", True, True), "brier": ("Brier score", False, False)}


def answers(method, seed):
    """Samples by label and answer `[clients, 3, 3]`, made up: a client holds 4 to 15 of a class, and fedper finds more
    of them than fedavg, and fedavg than local; client 7 has its pneumonia taken for tuberculosis by everybody."""
    rng = np.random.default_rng([seed, *method.encode()])
    found = {"local": 0.5, "fedavg": 0.65, "fedper": 0.85}[method]
    counts = np.zeros((len(SITES), 3, 3), dtype=np.int64)
    for client, per_class in enumerate(counts):
        for k, line in enumerate(per_class):
            held = 4 + (5 * client + 3 * k) % 12
            line[:] = rng.multinomial(held, np.where(np.arange(3) == k, found, (1 - found) / 2))
    counts[7] = [[9, 0, 1], [0, 1, 9], [1, 0, 8]]
    return counts


def balanced_accuracy(counts):
    return (counts.diagonal(axis1=-2, axis2=-1) / counts.sum(-1)).mean(-1)


def rescored(named, folder, chosen):
    """The comparison on the named sites, copied, with scores that follow from made-up answers, better round by round.

    The loss is 2 minus the balanced accuracy for even clients and 1 minus it for odd ones, so that other clients are
    the worst by it.
    """
    shutil.copytree(named, folder)
    read = []
    for run in inside(folder):
        result, old = run.result(), []
        counts = answers(result.method, result.seed)
        share = balanced_accuracy(counts)
        worth = {
            "accuracy": counts.diagonal(axis1=1, axis2=2).sum(1) / counts.sum((1, 2)), "balanced_accuracy": share,
            "f1": share**2, "brier": 1 - share, "loss": np.where(np.arange(len(share)) % 2, 1, 2) - share,
        }
        lines = ""
        for e in result.history:
            part = {name: v if e.round == 4 else v / 2 if name not in ("loss", "brier") else 2 * v
                    for name, v in worth.items()}
            stages = {
                name: replace(s, test=part, val=part, samples=counts.sum((1, 2)), chosen=chosen)
                for name, s in e.stages.items()
            }
            lines += "".join(confusion.line(name, e.round, counts) for name in stages)
            old.append(replace(e, stages=stages))
        (run.path / confusion.FILE).write_text(lines, encoding="utf-8")
        config = json.loads((run.path / "config.json").read_text())
        scales = [{"name": name, "title": title, "higher": higher, "percent": percent}
                  for name, (title, higher, percent) in WATCHED.items()]
        config["metrics"] = {"chosen": asdict(chosen), "watched": scales}
        (run.path / "config.json").write_text(json.dumps(config))
        read.append((run, replace(result, history=tuple(old))))
    return read


@pytest.fixture(scope="session")
def balanced(named, tmp_path_factory):
    """Runs that balanced accuracy decides, with macro F1 and a Brier score beside it: folders with their results."""
    return rescored(named, tmp_path_factory.mktemp("balanced") / "cmp", BALANCED)


@pytest.fixture(scope="session")
def huber(named, tmp_path_factory):
    """The same runs, decided by a loss that was called huber."""
    return rescored(named, tmp_path_factory.mktemp("huber") / "cmp", HUBER)
