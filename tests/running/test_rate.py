"""A learning rate that explodes is said at once, with a smaller one that was tried aside; the run stays as it was."""

from __future__ import annotations

import json

import numpy as np
import pytest

import coterie
from coterie.models import model
from coterie.running import rate
from coterie.running.folder import Folder
from coterie.running.runs import prepare_run


def clients(seed=0):
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(4):
        x = rng.standard_normal((24, 3)).astype(np.float32)
        made.append((x, (x @ np.array([1.0, -2.0, 0.5])).astype(np.float32)))
    return coterie.Federation.from_clients(made, val=0.25)


def trained(folder, method="fedavg", **options):
    said = []
    given = {"rounds": 3, "lr": 10.0, "evaluate_every": 1, "batch": 0, "device": "cpu", **options}
    coterie.run(method, model("linear", (3,), 1), clients(), folder=folder,
                watch=lambda progress: progress.note and said.append(progress.note), **given)
    return said


def rows_of(folder):
    return json.loads((folder / "result.json").read_text())["rows_sha256"]


def records_of(folder):
    """What the run recorded, without notes and seconds."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in line.items() if k != "seconds"} for line in lines if line["kind"] != "note"]
    return repr(kept), (folder / "clients.csv").read_text()  # repr: NaN is not equal to itself


@pytest.fixture
def blind(monkeypatch):
    """Switches the watch off."""
    def off():
        monkeypatch.setattr(rate.Watch, "begin", lambda self: None)
        monkeypatch.setattr(rate.Watch, "evaluated", lambda self, found, seconds: None)

    return off


def test_the_rate_that_is_named_is_fine_and_the_larger_ones_that_were_tried_are_not(tmp_path):
    """Full-batch steps of a linear model: the error is multiplied by 1 - 2 lr s^2 in a step, with s^2 about 1. At 10 it
    grows 19-fold and its square 361-fold. What was tried is tried again, as runs of their own."""
    said = trained(tmp_path / "run")
    assert len(said) == 1
    note, = Folder(tmp_path / "run").result().notes
    assert note["text"] == said[0]
    assert said[0].startswith("round 1: the loss of 4 of 4 clients is more than 10 times that before training at lr=10")
    assert note["tried"] == [3, 1][: len(note["tried"])]
    assert said[0].endswith(f"--set lr={note['fine']:g}.")
    for lr in (10.0, *note["tried"]):
        first = coterie.run("fedavg", model("linear", (3,), 1), clients(), rounds=1, lr=lr, batch=0, device="cpu")
        before, after = (np.array(e.stages["served"].val["loss"]) for e in first.history)
        limit = 10 * np.maximum(before, 0)
        assert bool((after <= np.maximum(limit, 10 * variances())).all()) == (lr == note["fine"])


def variances():
    data = clients()
    return np.array([float(data.client(i, "train")[1].double().var(unbiased=False)) for i in range(4)])


@pytest.mark.parametrize("method", ["local", "fedavg", "scaffold", "ifca:models=2", "ditto", "fedavg+median"])
def test_the_run_is_the_same_with_and_without_the_watch(method, tmp_path, blind):
    said = trained(tmp_path / "watched", method)
    assert said
    blind()
    assert trained(tmp_path / "alone", method) == []
    assert rows_of(tmp_path / "watched") == rows_of(tmp_path / "alone")
    assert records_of(tmp_path / "watched") == records_of(tmp_path / "alone")


def test_runs_that_are_computed_together_are_the_same_too(tmp_path, blind):
    def compared(folder):
        return coterie.compare(["fedprox"], model("linear", (3,), 1), clients(), folder=folder, seeds=2, rounds=3,
                               lr=10.0, evaluate_every=1, together="on", device="cpu")

    noted = compared(tmp_path / "watched")
    assert all(run.notes for run in noted)
    blind()
    plain = compared(tmp_path / "alone")
    assert not any(run.notes for run in plain)
    for one, other in zip(noted, plain, strict=True):
        assert rows_of(one.folder) == rows_of(other.folder)
        assert records_of(one.folder) == records_of(other.folder)


def test_a_resumed_run_says_it_once(tmp_path):
    """Stopped after its second round, with the note in its records, and gone on to the end."""
    class EnoughError(Exception):
        pass

    def stop(progress):
        if progress.round == 2:
            raise EnoughError

    given = {"rounds": 4, "lr": 10.0, "evaluate_every": 1, "checkpoint_every": 1, "batch": 0, "device": "cpu"}
    with pytest.raises(EnoughError):
        coterie.run("fedavg", model("linear", (3,), 1), clients(), folder=tmp_path / "run", watch=stop, **given)
    assert len(Folder(tmp_path / "run").notes()) == 1
    again = coterie.run("fedavg", model("linear", (3,), 1), clients(), folder=tmp_path / "run", resume=True, **given)
    assert len(again.notes) == 1
    whole = coterie.run("fedavg", model("linear", (3,), 1), clients(), folder=tmp_path / "whole", **given)
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")
    assert again.notes == whole.notes


def test_nothing_is_repeated_where_nothing_is_wrong(tmp_path, monkeypatch):
    """A rate that works: no copy is made and no loss is looked at."""
    made = prepare_run("fedavg", model("linear", (3,), 1), clients(), rounds=6, lr=0.05, device="cpu")
    def refused(*given):
        raise AssertionError("something was tried aside")

    monkeypatch.setattr(rate.Watch, "_examined", refused)
    assert made.go()[0].notes == ()


def test_where_no_smaller_rate_helps_that_is_said(tmp_path):
    """Inputs of 10^18: the loss of any model is beyond float32 before the first round."""
    rng = np.random.default_rng(0)
    huge = [((1e25 * rng.standard_normal((12, 3))).astype(np.float32), rng.standard_normal(12).astype(np.float32))
            for _ in range(3)]
    run = coterie.run("fedavg", model("linear", (3,), 1), coterie.Federation.from_clients(huge, val=0.25), rounds=2,
                      lr=0.1, device="cpu")
    note, = run.notes
    assert (note["fine"], note["tried"]) == (None, [])
    assert "is not finite before any training: scale the inputs" in note["text"]


def test_at_most_eight_smaller_rates_are_tried(tmp_path, monkeypatch):
    """Nothing is ever fine: every loss counts as exploded once training has begun."""
    whole = coterie.running.simulation.Simulation.losses
    monkeypatch.setattr(coterie.running.simulation.Simulation, "losses",
                        lambda self: whole(self) + (np.inf if self.rounds_done else 0))
    trained(tmp_path / "run")
    note, = Folder(tmp_path / "run").notes()
    assert note["tried"] == [3, 1, 0.3, 0.1, 0.01, 1e-3, 1e-5, 1e-7]
    assert "no smaller rate helped" in note["text"]
