"""`coterie check`: a method that keeps the contract passes, one that breaks it is told how."""

import itertools
import sys
from dataclasses import dataclass

import pytest
import torch

from coterie import Upload, cli, registry
from coterie.methods.fedavg import FedAvg
from coterie.running.check import DEMANDS, examine, lines


@pytest.mark.parametrize("method", ["fedavg", "ifca", "scaffold+confree"])
def test_methods_of_the_library_pass(method):
    found = list(lines(examine(method)))
    assert [line for line in found if not line.startswith("holds")] == []
    assert len(found) == len(DEMANDS)


COUNT = itertools.count()


@dataclass(frozen=True)
class Noisy(FedAvg):
    """Draws from a stream that nobody seeds."""

    def local(self, cohort, payload, mine):
        row = cohort.train(payload.row)
        return Upload(update=row - payload.row + torch.rand_like(row)), mine


@dataclass(frozen=True)
class Peeking(FedAvg):
    """Looks at the other clients of its cohort."""

    def local(self, cohort, payload, mine):
        update = cohort.train(payload.row) - payload.row
        return Upload(update=update - update.mean(0)), mine


@dataclass(frozen=True)
class Counting(FedAvg):
    """Every look at a model makes the next one different."""

    def deploy(self, cohort, payload, mine):
        return payload.row + next(COUNT)


@dataclass(frozen=True)
class Placed(FedAvg):
    """Who comes first has a say, by place and not by name."""

    def local(self, cohort, payload, mine):
        update = cohort.train(payload.row) - payload.row
        return Upload(update=update / (1 + cohort.ids[:, None])), mine


@dataclass(frozen=True)
class Falling(FedAvg):
    def join(self, cohort, payload):
        return 1 / 0


@pytest.mark.parametrize(("broken", "demand", "wrong"), [
    (Noisy, "the same seed gives the same result", "clients' models differ by up to"),
    (Peeking, "the result does not depend on how clients are grouped", "with wave=1 clients' models differ"),
    (Peeking, "what a client sends depends on its own data alone", "client 1's upload 'update' differs"),
    (Counting, "evaluation changes nothing", "clients' models differ by up to"),
    (Placed, "the result does not depend on the order of clients", "clients' models differ by up to"),
    (Falling, "it trains", "ZeroDivisionError: division by zero ("),
])
def test_what_is_broken_is_named(monkeypatch, broken, demand, wrong):
    monkeypatch.setattr(registry, "method", lambda spec, **values: broken())
    found = {finding.demand: finding.wrong for finding in examine("broken")}
    assert wrong in found[demand]


def test_the_command_ends_with_1_where_something_fails(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(
        "from coterie.methods.fedavg import FedAvg\n\n\nclass Mine(FedAvg):\n"
        "    def deploy(self, cohort, payload, mine):\n        return payload.row[0]\n"
    )
    monkeypatch.setattr(sys, "argv", ["coterie", "check", f"{tmp_path / 'mine.py'}:Mine"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 1
    said = capsys.readouterr().out
    assert "fails  it trains: Mine.deploy must return a tensor [1, 51], a row for each client, not one [51]" in said
