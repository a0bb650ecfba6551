"""Every value of every record of a run folder, replaced in turn: a page or a table, or a sentence, and little memory.

A folder may be somebody else's. Digests are made anew, as somebody would who knows of them.
"""

from __future__ import annotations

import copy
import json
import os
import resource
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from commands import exit_code

from coterie import cli, memory
from coterie.report import figures, page
from coterie.running.folder import SEAL, Folder, sealed

VALUES = ([], {}, "x", float("nan"), -1, 1e30, 10**10, [[[1]]], None)
TABLES = ("config.json", "data.json", "experiment.json", "result.json")
LINES = ("metrics.jsonl", "confusion.jsonl")
MORE = 500 << 20
"""Bytes of memory that a command may take beyond what the process had."""
COMMANDS = {
    "show": ["show", "run"], "report": ["report", "run", "-o", "out/report.html"],
    "export": ["export", "run", "--model", "0", "-o", "out/model.safetensors"],
}
EVERY = 47
"""Of the edited folders one in so many is tried unasked; it has no divisor in common with the number of values."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run with all that a record may hold: a few models, newcomers, clients kept out of training, a note."""
    place = tmp_path_factory.mktemp("made")
    x = np.random.default_rng(0).normal(size=(120, 4)).astype("f4")
    np.savez(place / "data.npz", x=x, y=np.arange(120) % 3, client=np.repeat(list("abcdef"), 20))
    words = ["--data", "data.npz", "--model", "linear", "--rounds", "2", "--unseen", "1", "--churn", "random:rate=0.3",
             "--set", "device=cpu", "--set", "evaluate_every=1", "--watch", "f1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert exit_code(patch, "run", "fedfew:models=2", *words, "--out", "run") == 0
    for picture in (place / "run").glob("*.png"):
        picture.unlink()
    Folder(place / "run").append_note({"text": "a note", "round": 1})
    return place


@pytest.fixture
def box(made, tmp_path, monkeypatch, capsys):
    """A copy of the run, and what a command on it says within so much memory: more of it is a failure."""
    shutil.copytree(made, tmp_path / "work")
    (tmp_path / "work" / "out").mkdir()
    monkeypatch.chdir(tmp_path / "work")

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["coterie", *words])
        with memory.at_most(MORE):
            try:
                cli.main()
                code = 0
            except SystemExit as stop:
                code = stop.code or 0
        said = capsys.readouterr()
        return code, said.out, " ".join(said.err.split())

    return SimpleNamespace(here=tmp_path / "work" / "run", run=run)


def places(value, at=()):
    """Where values stand in a record; of a list the first two."""
    keys = value if isinstance(value, dict) else range(min(2, len(value)) if at else len(value))
    for key in keys:
        if at or key != SEAL:
            yield (*at, key)
            if isinstance(value[key], dict | list):
                yield from places(value[key], (*at, key))


def replaced(value, at, new):
    value = copy.deepcopy(value)
    inner = value
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = new
    return value


def whole(record):
    """A record as a file holds it, with its digest if it has one."""
    return json.dumps(sealed({k: v for k, v in record.items() if k != SEAL}) if SEAL in record else record)


def corpus(folder):
    """File, place, value, and the file's content with that value in that place."""
    for name in TABLES:
        record = json.loads((folder / name).read_text())
        for at in places(record):
            yield from ((name, at, new, whole(replaced(record, at, new))) for new in VALUES)
    for name in LINES:
        lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for at in places(lines):
            for new in VALUES:
                yield name, at, new, "".join(json.dumps(line) + "\n" for line in replaced(lines, at, new))
    cells = [line.split(",") for line in (folder / "clients.csv").read_text().splitlines()]
    for at in ((line, k) for line in (0, 1, 2, len(cells) - 1) for k in range(len(cells[0]))):
        for new in VALUES:
            text = replaced(cells, at, "" if new is None else str(new))
            yield "clients.csv", at, new, "".join(",".join(line) + "\n" for line in text)


def unrendered(data, folder):
    """The figures without the seconds that it takes to write them."""
    assert list(figures.figures(data))


def tried(box, monkeypatch, cases):
    """Each command on each of the edited folders; returns how often it succeeded and how often it said a sentence."""
    monkeypatch.setattr(page, "draw", unrendered)
    for words in COMMANDS.values():
        assert box.run(*words)[0] == 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ended = {name: [0, 0] for name in COMMANDS}
    for name, at, new, text in cases:
        kept = (box.here / name).read_text()
        (box.here / name).write_text(text)
        for command, words in COMMANDS.items():
            what = f"{command}: {name} {at} {new!r}"
            try:
                code, _, said = box.run(*words)
            except BaseException as error:
                raise AssertionError(what) from error
            assert code in (0, 2), what
            assert code == 0 or said.startswith("coterie: "), what
            assert code == 0 or len(said) < 2000, what
            ended[command][code // 2] += 1
        (box.here / name).write_text(kept)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < MORE >> 10, f"{name} {at} {new!r}"  # kilobytes
    return ended


def test_some_edited_records(box, monkeypatch):
    cases = list(corpus(box.here))
    assert len(cases) > 5000
    assert len({name for name, *_ in cases[::EVERY]}) == len(TABLES) + len(LINES) + 1
    ended = tried(box, monkeypatch, cases[::EVERY])
    assert all(count > 10 for counts in ended.values() for count in counts), ended


@pytest.mark.long
@pytest.mark.parametrize("name", [*TABLES, *LINES, "clients.csv"])
def test_more_edited_records(box, monkeypatch, name):
    """One in ten, and all of the smaller records; `COTERIE_CORPUS=all` tries all of them, about 20 minutes."""
    cases = [case for case in corpus(box.here) if case[0] == name]
    every = 1 if os.environ.get("COTERIE_CORPUS") == "all" or len(cases) < 200 else 10
    ended = tried(box, monkeypatch, cases[::every])
    assert sum(map(sum, ended.values())) > 60


def test_watching_damaged_records_is_refused_at_once(box):
    """It waited for the first evaluation, for ever."""
    edit(box.here / "data.json", ("sizes", "val"), [[[1]]])
    code, _, said = box.run("watch", "run")
    assert (code, "data.json is damaged" in said) == (2, True), said


def edit(path, at, new):
    path.write_text(whole(replaced(json.loads(path.read_text()), at, new)))


def edit_line(path, change):
    """Every line of a record with its values changed."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        change(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("named", [True, False], ids=["with names", "without names"])
@pytest.mark.parametrize("number", [10**9, 10**30, -1])
def test_a_clients_number_takes_no_memory(box, number, named):
    """Tables by the clients' numbers were as long as the largest number: 8 GB."""
    path = box.here / "clients.csv"
    lines = [line.split(",") for line in path.read_text().splitlines()]
    lines[-1][2] = str(number)
    path.write_text("".join(",".join(line) + "\n" for line in lines))
    if not named:
        edit(box.here / "config.json", ("clients",), [])
        edit(box.here / "config.json", ("churn",), [])
    for command in ("show", "report"):
        code, _, said = box.run(*COMMANDS[command])
        assert (code, "clients.csv is damaged" in said) == (2, True), said


@pytest.mark.parametrize("classes", [900, 3000, 40000])
def test_matrices_of_many_classes_take_no_memory(box, classes):
    """Config and record agree on a shape of which no run records matrices: up to 38 GB. The page says so."""
    for name in ("classes", "outputs"):
        edit(box.here / "config.json", ("samples", name), classes)
    (box.here / "data.json").unlink()
    edit_line(box.here / "confusion.jsonl", lambda line: line.update(shape=[line["shape"][0], classes, classes]))
    for command in ("show", "report"):
        code, _, said = box.run(*COMMANDS[command])
        assert code == 0, said
    assert Folder(box.here).result().confusion() is None
