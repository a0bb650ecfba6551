"""A site's own state: finite numbers alone, two generations of them, and the same end whenever it is killed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import sites as toy
import torch
from safetensors.torch import load_file

from coterie.flower.loopback import Loopback
from coterie.flower.wire import Parcel
from coterie.running import checkpoint

NAMES = ("state.safetensors", "former.safetensors")


def rounds_of(folder):
    return [checkpoint.header(folder / name)["after"] for name in NAMES]


def spoilt(path, how):
    """Damage a state: cut it, or put NaN into one of its numbers."""
    if how == "cut":
        path.write_bytes(path.read_bytes()[:-7])
        return
    tensors, meta = checkpoint.load(path)
    tensors["after.row"][0, 0] = torch.nan
    checkpoint.save(path, tensors, {name: value for name, value in meta.items() if name != "format"})


@pytest.fixture
def trained(tmp_path):
    """Ditto's four sites after three rounds; the messages of all of them."""
    data = toy.federation()
    line = Recorded(toy.sites(data, tmp_path))
    toy.run(data, [toy.job(data, "ditto")], tmp_path, line)
    return line


class Recorded(Loopback):
    def __init__(self, sites):
        super().__init__(sites)
        self.log = []

    def deliver(self, name, parcels):
        found = super().deliver(name, parcels)
        self.log.append((name, parcels[0], found[0]))
        return found

    def task(self, name, t):
        return next(one for site, one, _ in self.log
                    if site == name and one.meta["round"] == t and "local" in one.meta.get("do", ()))


def test_the_former_generation_is_the_round_before(trained, tmp_path):
    assert rounds_of(tmp_path / "lyon" / "ditto") == [2, 1]


@pytest.mark.parametrize("how", ["cut", "nan"])
def test_a_damaged_state_gives_way_to_the_former_one(trained, tmp_path, how):
    """lyon goes on from its state after round 1, as a site whose folder is an older copy does, and says so."""
    folder = tmp_path / "lyon" / "ditto"
    good = load_file(folder / "former.safetensors")["after.row"]
    spoilt(folder / "state.safetensors", how)
    task = trained.task("lyon", 2)
    again = Parcel({**task.meta, "best": None}, task.tensors)  # round 2 comes once more
    (answer,) = toy.sites(toy.federation(), tmp_path, ["lyon"])[0].answer([again])
    assert "error" not in answer.meta
    assert torch.equal(load_file(folder / "state.safetensors")["before.row"], good)
    assert rounds_of(folder) == [2, 1]  # the damaged file is nowhere
    assert "The site goes on from" in (tmp_path / "lyon" / "site.log").read_text()


@pytest.mark.parametrize("how", ["cut", "nan"])
def test_without_a_sound_generation_the_operator_is_told(trained, tmp_path, how):
    folder = tmp_path / "lyon" / "ditto"
    for name in NAMES:
        spoilt(folder / name, how)
    before = [(folder / name).read_bytes() for name in NAMES]
    (answer,) = toy.sites(toy.federation(), tmp_path, ["lyon"])[0].answer([trained.task("lyon", 2)])
    assert answer.meta["error"] == "this site's own state is damaged; its operator has been told."
    assert [(folder / name).read_bytes() for name in NAMES] == before
    assert "Remove both to join anew" in (tmp_path / "lyon" / "site.log").read_text()


def test_training_that_diverges_leaves_the_last_finite_state(tmp_path):
    """lyon's samples are 1e200 times as large: its model overflows in the first round, for honest reasons.

    It sends nothing, keeps what it joined with, is not asked to leave, and its operator is told; the others go on.
    """
    data = toy.federation()
    sites = toy.sites(data, tmp_path)
    loud = toy.alone(data, 1)
    loud.x.mul_(1e200)
    sites[1]._data = loud
    (rounds,), _ = toy.run(data, [toy.job(data, "ditto", evaluate_every=100)], tmp_path, Loopback(sites))
    assert all(one["report"]["failures"] == {"failed": 1} for one in rounds.rounds)
    state, meta = checkpoint.load(tmp_path / "lyon" / "ditto" / "state.safetensors")
    assert meta["after"] == -1
    assert all(bool(torch.isfinite(t).all()) for t in state.values())
    sent = [json.loads(line) for line in (tmp_path / "lyon" / "sent.jsonl").read_text().splitlines()]
    failed = [one for one in sent if one.get("cause") == "failed"]
    assert failed[0]["error"].startswith("training at the site gave numbers that are not finite")
    assert failed[0]["tensors"] == {}
    assert "not finite" in (tmp_path / "lyon" / "site.log").read_text()


class Killed(BaseException):
    """The site's process is gone."""


def test_a_site_killed_at_any_change_of_its_files_comes_to_the_same_end(tmp_path, monkeypatch):
    """Before the last time that each of its files is put in its place, the former state's and the new one's among them;
    then all processes start again."""
    data = toy.federation()
    one = toy.job(data, "ditto", rounds=2)
    replaced, changes, at = os.replace, [], [None]

    def put(source, target, *more, **options):
        if "berlin" in str(target):
            if at[0] == len(changes):
                raise Killed
            changes.append(Path(target).name)
        replaced(source, target, *more, **options)

    monkeypatch.setattr(os, "replace", put)
    toy.run(data, [one], tmp_path / "whole", folder=tmp_path / "whole" / "server")
    last = {name: number for number, name in enumerate(changes)}
    assert {*NAMES, "job.json", "forms.json", "introduced.json", "model.safetensors", "model.json"} <= last.keys()
    for name, number in last.items():
        home = tmp_path / name
        changes.clear()
        at[0] = number
        with pytest.raises(Killed):
            toy.run(data, [one], home, folder=home / "server")
        at[0] = None
        toy.run(data, [one], home, folder=home / "server")
        for site in toy.NAMES:
            for file in ("state.safetensors", "model.safetensors"):
                mine, theirs = (load_file(root / site / "ditto" / file) for root in (home, tmp_path / "whole"))
                assert mine.keys() == theirs.keys()
                assert all(torch.equal(mine[key], theirs[key]) for key in theirs), (name, site, file)
