"""Sites use their model of the round chosen on validation data, whoever was away or killed on the way to it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import sites as toy
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from coterie.cli import app
from coterie.errors import CoterieError
from coterie.flower import operator
from coterie.flower.loopback import Loopback
from coterie.flower.wire import Failure
from coterie.running.chosen import CHOSEN
from coterie.running.folder import Folder

ROUNDS = 6
RISING = {"rounds": ROUNDS, "lr": 1.5, "warmup": 5, "evaluate_every": 1}


class Killed(BaseException):
    """The server's process is gone."""


class Line(Loopback):
    """Kills the server before it asks for the time `at`; sites of which `away` says so are not there."""

    def __init__(self, sites, at=None, away=lambda name, task: False):
        super().__init__(sites)
        self.asked, self.at, self.away = 0, at, away

    def ask(self, messages, deadline, enough):
        if self.asked == self.at:
            raise Killed
        self.asked += 1
        return super().ask(messages, deadline, enough)

    def deliver(self, name, parcels):
        lost = self.away(name, parcels[0].meta)
        return Failure("lost", "") if lost else super().deliver(name, parcels)


def models(home, experiment):
    return {name: (load_file(home / name / experiment / "model.safetensors"), facts(home, experiment, name))
            for name in toy.NAMES}


def facts(home, experiment, name, file="model"):
    return json.loads((home / name / experiment / f"{file}.json").read_text())


def served(folder):
    return Folder(folder).result().round_of("served")


@pytest.mark.parametrize("method", ["ditto", "fedavg"])
def test_a_server_killed_at_any_message_hands_out_the_same_models(tmp_path, method):
    """Before every second of its messages; what sites have kept and what they forgot meanwhile must not matter."""
    data = toy.federation(val=(4, 5, 3, 4))
    one = toy.job(data, method, **RISING)
    _, line = toy.run(data, [one], tmp_path / "whole", Line(toy.sites(data, tmp_path / "whole")),
                      folder=tmp_path / "whole" / "server")
    expected, best = models(tmp_path / "whole", method), served(tmp_path / "whole" / "server")
    assert best < ROUNDS
    assert {found["round"] for _, found in expected.values()} == {best}
    for at in range(0, line.asked, 2):
        home = tmp_path / str(at)
        with pytest.raises(Killed):
            toy.run(data, [one], home, Line(toy.sites(data, home), at), folder=home / "server")
        toy.run(data, [one], home, folder=home / "server")
        for name, (tensors, found) in models(home, method).items():
            theirs, said = expected[name]
            assert (found["round"], found["when"], found["scores"]) == (best, CHOSEN, said["scores"])
            assert all(torch.equal(t, theirs[key]) for key, t in tensors.items())


@pytest.mark.parametrize(
    ("method", "tried"), [("ditto", ({5}, {4, 5}, {5, 6})), ("ditto", (set(range(8)),)), ("fedper", (set(range(8)),))],
    ids=["once", "always", "always, fedper"],
)
def test_a_site_that_was_away_in_the_chosen_round_uses_its_state_of_that_time(tmp_path, method, tried):
    """turin is away in that round. What every site had then is what it has at the end of a run that ends there."""
    data = toy.federation(val=(4, 5, 3, 4))
    one = toy.job(data, method, **{**RISING, "rounds": 8})
    for rounds in tried:  # the first with turin away in the chosen one
        home = tmp_path / "-".join(map(str, rounds))

        def away(name, task, rounds=frozenset(rounds)):
            return name == "turin" and task["round"] in rounds and "local" in task.get("do", ())

        toy.run(data, [one], home, Line(toy.sites(data, home), away=away), folder=home / "server")
        best = served(home / "server")
        if best in rounds:
            break
    assert best in rounds
    short = toy.job(data, method, **{**RISING, "rounds": best})
    toy.run(data, [short], tmp_path / "short", Line(toy.sites(data, tmp_path / "short"), away=away))
    for name, (tensors, found) in models(home, method).items():
        assert (found["round"], found["when"]) == (best, CHOSEN)
        files = [tmp_path / "short" / name / method / f"{word}.safetensors" for word in ("last", "model")]
        then = load_file(next(path for path in files if path.exists()))
        assert all(torch.equal(t, then[key]) for key, t in tensors.items())


def test_a_site_that_lost_its_state_of_the_chosen_round_keeps_the_last_and_says_so(tmp_path, caplog):
    """As the home of a site of an earlier version, which kept no such states."""
    data = toy.federation(val=(4, 5, 3, 4))
    one = toy.job(data, "ditto", **RISING)

    class Forgetful(Line):
        def deliver(self, name, parcels):
            if name == "oslo":
                for path in (tmp_path / "oslo" / "ditto").glob("chosen-*"):
                    path.unlink()
            return super().deliver(name, parcels)

    (rounds,), _ = toy.run(data, [one], tmp_path, Forgetful(toy.sites(data, tmp_path)), folder=tmp_path / "server")
    best = served(tmp_path / "server")
    assert best < ROUNDS - 1
    assert rounds.served == set(toy.NAMES)
    assert "oslo keeps the model of the last round" in caplog.text
    found = facts(tmp_path, "ditto", "oslo")
    assert (found["round"], found["when"]) == (ROUNDS, "last")
    assert found["note"] == f"It is the last round; round {best} had been the best on validation data."
    assert facts(tmp_path, "ditto", "lyon")["round"] == best


def test_a_server_without_a_folder_hands_out_the_same_models(tmp_path):
    data = toy.federation(val=(4, 5, 3, 4))
    one = toy.job(data, "ditto", **RISING)
    toy.run(data, [one], tmp_path / "with", folder=tmp_path / "with" / "server")
    toy.run(data, [one], tmp_path / "without")
    mine, theirs = models(tmp_path / "without", "ditto"), models(tmp_path / "with", "ditto")
    for name, (tensors, found) in mine.items():
        assert found["round"] == theirs[name][1]["round"] < ROUNDS
        assert all(torch.equal(t, theirs[name][0][key]) for key, t in tensors.items())


def test_a_site_holds_two_rounds_at_most(tmp_path):
    """The best so far, and the one that was scored since."""
    data = toy.federation(val=(4, 5, 3, 4))
    most = [0]

    class Counting(Line):
        def deliver(self, name, parcels):
            found = super().deliver(name, parcels)
            most[0] = max(most[0], len(list((tmp_path / name / "ditto").glob("chosen-*"))))
            return found

    toy.run(data, [toy.job(data, "ditto", **RISING)], tmp_path, Counting(toy.sites(data, tmp_path)))
    assert most == [2]


def test_predict_takes_the_chosen_round_and_the_last_on_request(tmp_path):
    """The command says which; each csv holds the classes that the file's own model answers."""
    data = toy.federation(val=(4, 5, 3, 4))
    toy.run(data, [toy.job(data, "ditto", precision="float32", **RISING)], tmp_path, folder=tmp_path / "server")
    best, home = served(tmp_path / "server"), tmp_path / "lyon"
    assert best < ROUNDS
    x, y = data.client(1, "test")
    np.savez(tmp_path / "new.npz", x=x.float().numpy(), y=y.numpy())
    for when, words in (("chosen", f"The model is that of round {best}, {CHOSEN}."),
                        ("last", f"The model is that of round {ROUNDS}, the last one.")):
        done = CliRunner().invoke(app, ["client", "--predict", "--data", str(tmp_path / "new.npz"), "--home", str(home),
                                        "--out", str(tmp_path / "out.csv"), "--round", when], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        assert words in done.output
        accuracy = operator.predict(home, str(tmp_path / "new.npz"), tmp_path / "out.csv", when=when)[1]
        printed = facts(tmp_path, "ditto", "lyon", "model" if when == "chosen" else "last")
        assert accuracy == pytest.approx(printed["scores"]["served"]["test"]["accuracy"], abs=1e-6)
    with pytest.raises(CoterieError, match="name 'chosen' or 'last', not '3'"):
        operator.model_of(home, when="3")
