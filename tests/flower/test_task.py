"""Hostile tasks: each is refused in a sentence, nothing is trained or kept, and honest tasks go on as without it."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import sites as toy
import torch

from coterie.flower import site as site_module
from coterie.flower.loopback import Loopback
from coterie.flower.task import patience
from coterie.flower.wire import Parcel

METHOD = "ifca:models=2"
"""It introduces itself by nothing and is sent two models, `rows [1, 2, 43]`."""
ABSENT = object()
DEEP: dict = {}
for _ in range(5000):
    DEEP = {"a": DEEP}

WHOLE = ["3", 1.5, -5, 10**30, True, [], {}, math.nan, math.inf, "9" * 5000]
TEXTS = [ABSENT, None, 7, [], {"a": 1}, True, "x" * 5000]
FIELDS = {
    "round": [ABSENT, None, 99, *WHOLE], "number": [ABSENT, None, *WHOLE], "population": [ABSENT, None, 0, *WHOLE],
    "merged": [ABSENT, None, 99, *WHOLE], "best": [99, *WHOLE], "last": [99, *WHOLE],
    "deadline": ["soon", 0, -1, 10**30, True, [], math.nan, math.inf],
    "do": ["local", {"local": 1}, ["local", "local"], ["upload"], [["local"]], 7, [None], [DEEP], ["score"] * 9],
    "newcomer": ["yes", 1, None, True, []], "kind": [*TEXTS, "dance", "join", ""],
    "experiment": [*TEXTS, "../up", "", "/etc", "other", "a\x00b", "."], "method": [*TEXTS, "fedprox", "x.py:Evil", ""],
    "options": [*TEXTS, "IFCA()", ""], "layout": [*TEXTS, "beef", ""], "protocol": [ABSENT, None, 7, "1", [], math.nan],
    "record": [*TEXTS, "Model", "Nothing", "Module", "Upload", "__class__", "os.system", ""],
    "job": [ABSENT, None, [], {}, "job", 7, DEEP],
}
JOB = {
    "method": ["fedavg", "ifca:models=1000000", "/tmp/x.py:Evil", 7, None, ABSENT, "ifca:optimizer=/tmp/x.py:Evil"],
    "model": ["linear", "mlp:hidden=100000000", "mlp:hidden=-1", "x.py:Net", 7, None, "no", ABSENT],
    "shape": [[10**9, 10**9], [], "4", [4.5], [-4], [0], ["4"], None, 4, ABSENT],
    "classes": [10**9, -1, "3", 3.0, True, None, [], ABSENT], "outputs": [10**9, 0, "3", None, True, ABSENT],
    "training": [[], "lr=1", {"lr": math.nan}, {"lr": -1}, {"rounds": 10**30}, {"optimizer": "/tmp/x.py:Evil"},
                 {"metric": "/tmp/x.py:Evil"}, {"watch": ["/tmp/x.py:Evil"]}, {"server": "/tmp/x.py:Evil"},
                 {"seed": "x"}, {"unknown": 1}, {"batch": 1}, 7, None, DEEP],
    "scores": ["full", "all", 7, [], {}, DEEP], "head": [7, [], "no.such"], "dtype": ["object", 7, []],
    "class_names": [[1, 2, 3], ["a"], "abc", 7, ["a"] * 10**5], "encoding": [[], "x", DEEP], "unit": [[], DEEP, "x"],
    "freeze": [7, "*"], "train": [7, []], "loss": ["/tmp/x.py:evil", 7], "experiment": ["../up", "other", 7],
    "unknown": [1],
}


def tensors_cases(rows):
    nan, inf = rows.clone(), rows.clone()
    nan[0, 1, 7], inf[0, 0, 0] = math.nan, -math.inf
    return {
        "missing": {}, "extra": {"rows": rows, "more": rows}, "other name": {"row": rows}, "nan": {"rows": nan},
        "inf": {"rows": inf}, "all nan": {"rows": rows * math.nan}, "float32": {"rows": rows.float()},
        "int64": {"rows": rows.long()}, "bool": {"rows": rows > 0}, "complex": {"rows": rows + 0j},
        "no clients": {"rows": rows[:0]}, "two clients": {"rows": rows.repeat(2, 1, 1)},
        "one model": {"rows": rows[:, :1]}, "three models": {"rows": rows.repeat(1, 2, 1)[:, :3]},
        "a column less": {"rows": rows[..., :-1]}, "one column": {"rows": rows[..., :1]}, "no column":
        {"rows": rows[..., :0]}, "an axis less": {"rows": rows[0]}, "an axis more": {"rows": rows[None]},
        "a number": {"rows": rows.sum()}, "claims 8 TB": {"rows": rows[:, :1, :1].expand(1, 2, 2**39)},
        "strange name": {"rows\x00": rows}, "long name": {"x" * 10**5: rows},
    }


def with_(values, name, value):
    return {key: one for key, one in {**values, name: value}.items() if one is not ABSENT}


def cases(task):
    """Name -> hostile task, made from an honest one."""
    found = {}
    for name, values in FIELDS.items():
        for k, value in enumerate(values):
            found[f"{name} {k}"] = Parcel(with_(task.meta, name, value), task.tensors)
    for name, values in JOB.items():
        for k, value in enumerate(values):
            meta = {**task.meta, "job": with_(task.meta["job"], name, value)}
            found[f"job's {name} {k}"] = Parcel(meta, task.tensors)
    for name, tensors in tensors_cases(task.tensors["rows"]).items():
        found[f"tensors: {name}"] = Parcel(task.meta, tensors)
    return found


class Listening(Loopback):
    """Keeps lyon's tasks."""

    def __init__(self, sites):
        super().__init__(sites)
        self.tasks = []

    def deliver(self, name, parcels):
        if name == "lyon":
            self.tasks.append(Parcel(dict(parcels[0].meta), dict(parcels[0].tensors)))
        return super().deliver(name, parcels)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """What lyon is asked in an honest run without scores: the introduction, two rounds, the end."""
    home, data = tmp_path_factory.mktemp("honest"), toy.federation()
    line = Listening(toy.sites(data, home))
    job = replace(toy.job(data, METHOD, rounds=2), scores=False)
    toy.run(data, [job], home, line)
    assert [task.meta["kind"] for task in line.tasks][:3] == ["introduce", "round", "round"]
    return job, line.tasks


def lyon(home, job):
    """A site that has approved the job and nothing else."""
    data = toy.federation()
    return site_module.Site("lyon", toy.alone(data, 1), home, "cpu", accept=job.digest)


def files(home):
    return {path.relative_to(home): path.read_bytes() for path in home.rglob("*")
            if path.is_file() and path.name not in ("sent.jsonl", "site.log")}


def test_the_corpus_is_large_enough(tasks):
    assert len(cases(tasks[1][1])) >= 200


@pytest.mark.parametrize("when", ["at first contact", "after a round"])
def test_hostile_tasks_are_refused_and_change_nothing(tasks, tmp_path, monkeypatch, when):
    """The site that saw them all answers the honest tasks bit by bit as one that saw none of them."""
    job, (hello, first, second, *_) = tasks
    attacked, spared = lyon(tmp_path / "attacked", job), lyon(tmp_path / "spared", job)
    if when == "after a round":
        for one in (attacked, spared):
            one.answer([hello])
            one.answer([first])
    (tmp_path / "attacked").mkdir(exist_ok=True)
    before, trained = files(tmp_path / "attacked"), []
    monkeypatch.setattr(site_module, "local", lambda *given: trained.append(given))
    honest = first if when == "at first contact" else second
    hostile = cases(honest)
    wrong = {}
    for name, task in hostile.items():
        (answer,) = attacked.answer([task])
        said = answer.meta.get("error", "")
        in_words = said.endswith((".", ")")) and "reference" not in said and 20 < len(said) <= 1000
        refused = answer.meta.get("cause") == "refused"
        if not (in_words and refused and not answer.tensors and files(tmp_path / "attacked") == before):
            wrong[name] = answer.meta
    assert wrong == {}, {name: meta.get('error') for name, meta in wrong.items()}
    assert trained == []
    assert sorted(path.name for path in (tmp_path / "attacked").iterdir() if path.is_file()) == [
        "sent.jsonl", "site.log"]
    assert not list(tmp_path.glob("**/up"))
    monkeypatch.undo()
    rest = (hello, first, second) if when == "at first contact" else (second,)
    for task in rest:
        (mine,), (theirs,) = attacked.answer([task]), spared.answer([task])
        assert "error" not in mine.meta
        assert mine.meta == theirs.meta
        assert mine.tensors.keys() == theirs.tensors.keys()
        assert all(torch.equal(t, theirs.tensors[name]) for name, t in mine.tensors.items())
    assert files(tmp_path / "attacked").keys() == files(tmp_path / "spared").keys()
    lines = (tmp_path / "attacked" / "sent.jsonl").read_text().splitlines()
    assert sum("error" in json.loads(line) for line in lines) == len(hostile)
    assert max(map(len, lines)) < 10_000


def test_a_file_that_the_server_names_is_not_run(tasks, tmp_path):
    """A Python file of the site's own disk, named as optimizer or metric, was run before the job was refused."""
    canary = tmp_path / "canary"
    (tmp_path / "mine.py").write_text(f"open({str(canary)!r}, 'w')\n")
    job, (hello, *_) = tasks
    for option in ("optimizer", "server", "metric", "augment"):
        for value in (f"{tmp_path}/mine.py:Mine", f"{tmp_path}/mine.py:Mine(a=1)"):
            asked = {**hello.meta["job"], "training": {**hello.meta["job"]["training"], option: value}}
            (answer,) = lyon(tmp_path / "home", job).answer([Parcel({**hello.meta, "job": asked}, hello.tensors)])
            assert "lies in a file" in answer.meta["error"]
    for method in (f"{tmp_path}/mine.py:Mine", f"ifca:optimizer={tmp_path}/mine.py:Mine"):
        (answer,) = lyon(tmp_path / "home", job).answer([Parcel({**hello.meta, "method": method}, hello.tensors)])
        assert "method differs" in answer.meta["error"]
    assert not canary.exists()


def test_a_message_may_take_as_long_as_the_server_waits():
    """The longest of its tasks' deadlines; what is no number of seconds says nothing."""
    said = [{"deadline": 3}, {"deadline": 5.5}, {"deadline": "9"}, {"deadline": -7}, {"deadline": math.inf}, {}]
    assert patience(said) == 5.5
    assert patience([{"deadline": "soon"}, {}]) == math.inf
