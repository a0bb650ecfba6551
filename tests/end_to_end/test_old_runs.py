"""Run folders of version 0.1.0 are shown, reported, resumed, personalized and exported (see old_runs/README.md)."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from coterie import cli
from coterie.running.folder import Folder

HERE = Path(__file__).parent / "old_runs"
STOPPED = sorted(path.name for path in (HERE / "stopped").iterdir() if path.name not in ("cfl", "private"))  # see below


@pytest.fixture
def old(tmp_path):
    """A copy of the folders that may be written to, which believe that they were made here."""
    place = tmp_path / "old"
    shutil.copytree(HERE, place)
    for path in place.rglob("*.json"):
        path.write_text(path.read_text().replace("@HERE@", str(place)))
    return place


@pytest.fixture
def coterie(monkeypatch, capsys):
    """The command line in this process: words -> what it printed."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["coterie", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr()
        assert end.value.code in (0, None), said.err
        return said.out

    return run


def same(found, expected):
    """Two checkpoints hold the same numbers. Other machines add in another order, so the last bits may differ."""
    mine, theirs = load_file(found), load_file(expected)
    assert mine.keys() == theirs.keys()
    for name, t in theirs.items():
        torch.testing.assert_close(mine[name], t, rtol=1e-4, atol=1e-6)


def test_the_kept_folders_are_small():
    assert sum(path.stat().st_size for path in HERE.rglob("*") if path.is_file()) < 300_000


def test_they_are_shown(old, coterie):
    assert "fedfew" in coterie("show", old / "fedfew")
    table = coterie("show", old / "sites")
    assert all(word in table for word in ("local", "fedavg", "ifca:models=2", "apfl"))
    assert "unfinished" not in table
    assert "unfinished: 1 of 1" in coterie("show", old / "stopped" / "apfl")
    assert "fedavg" in coterie("show", old / "churned")


def test_they_are_reported_with_what_people_read(old, coterie):
    """Who uses which model comes from `w`, `mass` and `clients_per_model` of the round records."""
    for name in ("fedfew", "sites", "churned", "stopped/cfl"):
        coterie("report", old / name, "-o", old / "page.html")
        page = (old / "page.html").read_text()
        data = json.loads(page.split('id="data"', 1)[1].split(">", 1)[1].split("</script>", 1)[0])
        few = [method["name"] for method in data["methods"] if method["few"]]
        assert few == {"fedfew": ["fedfew"], "sites": ["ifca:models=2"], "churned": [], "stopped/cfl": ["cfl"]}[name]
        shares = [method["few"]["mass"]["share"] for method in data["methods"] if method["few"]]
        assert all(abs(sum(share) - 1) < 1e-3 for one in shares for share in one)  # rounded to four digits


@pytest.mark.parametrize("name", STOPPED)
def test_they_are_resumed_to_the_same_end(old, coterie, name):
    """What 0.1.0 itself reaches without being killed is kept in `whole`."""
    coterie("resume", old / "stopped" / name)
    same(old / "stopped" / name / "checkpoint.safetensors", old / "whole" / f"{name}.safetensors")
    assert json.loads((old / "stopped" / name / "result.json").read_text())["rounds"] == 4


def test_a_run_of_cfl_is_not_continued_by_another_rule(old, monkeypatch, capsys):
    """0.1.0 split clusters against the longest update. Its models are served, see below, and the run stays as it is."""
    run = old / "stopped" / "cfl"
    before = load_file(run / "checkpoint.safetensors")
    monkeypatch.setattr(sys, "argv", ["coterie", "resume", str(run)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = " ".join(capsys.readouterr().err.split())
    assert end.value.code == 2
    assert "begun by an earlier version, which split clusters by another rule" in said
    after = load_file(run / "checkpoint.safetensors")
    both = after.keys() & before.keys()
    assert {"server.rows", "server.cluster", "server.moves"} <= both
    assert all(torch.equal(after[name], before[name]) for name in both)


@pytest.mark.parametrize("secret", [None, "a text nobody knows", "6f1d2b8c94e07a35b1c8f02d7e6a49530c9d1b7f8a2e4c6d"])
def test_a_private_run_is_not_continued_with_other_noise(old, coterie, monkeypatch, capsys, secret):
    """0.1.0 named noise by secret and seed alone, here by the second of these secrets, and its clip could be passed by
    a little. The run stays as it is: it is shown and reported with its epsilon, and its models are served, see below.
    """
    run = old / "stopped" / "private"
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    monkeypatch.delenv("COTERIE_SECRET", raising=False)
    if secret is not None:
        monkeypatch.setenv("COTERIE_SECRET", secret)
    monkeypatch.setattr(sys, "argv", ["coterie", "resume", str(run)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = " ".join(capsys.readouterr().err.split())
    assert end.value.code == 2
    assert "begun by an earlier version, whose noise was named otherwise" in said
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before
    shown = coterie("show", run)
    assert "unfinished" in shown
    assert "4.85" in shown  # epsilon
    coterie("report", run, "-o", old / "page.html")
    assert "fedavg+private" in (old / "page.html").read_text()


@pytest.mark.parametrize("run", ["sites/apfl/seed0", "sites/ifca-models-2/seed0", "sites/fedavg/seed0", "stopped/pacfl",
                                 "stopped/fedsoft", "stopped/fedala", "stopped/cfl", "stopped/private"])
def test_newcomers_are_served_and_clients_exported(old, coterie, run):
    """The newcomer's table has no client column; the run's encoding tells what its columns mean."""
    words = ("--data", f"{old / 'newcomer.csv'}:label=outcome", "-o", old / "new.safetensors", "--report", "json")
    told = json.loads(coterie("personalize", old / run, *words))
    assert told["estimate"]["n"] == 20
    assert "the same outputs" in coterie("export", old / run, "--client", "north", "-o", old / "north.pt2")
    assert "the same outputs" in coterie("export", old / "new.safetensors", "-o", old / "new.pt2")


def test_a_server_model_is_exported(old, coterie):
    assert "the same outputs" in coterie("export", old / "fedfew", "--model", "2", "-o", old / "two.safetensors")
    model = load_file(old / "two.safetensors")
    rows = load_file(HERE / "fedfew" / "checkpoint.safetensors")["server.rows"]
    assert torch.equal(torch.cat([t.flatten() for t in model.values()]).sort().values, rows[2].sort().values)


def test_labels_and_targets_are_what_they_were(old, coterie):
    """0.1.0 counted the grades 1.0 to 3.0 as four classes from 0, and left the prices as they are.

    The same data are other samples now; the old runs keep theirs: the checkpoint's digest of the data says so.
    """
    for name in ("grades", "prices"):
        run = old / name
        assert "the same outputs" in coterie("export", run, "--client", "north", "-o", old / f"{name}.safetensors")
        assert "target" not in json.loads((old / f"{name}.json").read_text())
        words = ("--data", f"{old / 'grades.csv'}:client=site", "--client", "west", "-o", old / "new.safetensors")
        told = json.loads(coterie("personalize", run, *words, "--report", "json"))
        assert told["estimate"]["metric"] == {"grades": "accuracy", "prices": "loss"}[name]
        (run / "result.json").unlink()
        coterie("resume", run)
        assert json.loads((run / "result.json").read_text())["rounds"] == 4
    assert {len(t) for t in load_file(old / "grades.safetensors").values()} == {4}


def test_they_kept_the_last_round_alone_which_is_handed_out_with_a_word(old, coterie):
    """The table reports the round chosen on validation data; where that is not the last, its state is gone."""
    said = []
    for place in sorted(path.parent for path in (old / "sites").glob("*/seed*/checkpoint.safetensors")):
        run = Folder(place)
        best, last = run.result().round_of("served"), run.kept().last
        told = coterie("export", place, "--client", run.config()["clients"][0], "-o", old / "model.safetensors")
        facts = json.loads((old / "model.json").read_text())
        assert facts["round"] == last
        if best != last:
            said.append(best)
            note = f"Round {best} was chosen on validation data, but an earlier version of coterie kept the state of"
            assert note in told
            assert note in facts["note"]
            assert facts["when"] == "last"
            assert note in " ".join(coterie("show", place).split())
    assert said, "in one of the old runs the chosen round is not the last"
