"""Exact copies on two sides of a split are pointed out; honest repeats of small tables are not."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from commands import exit_code
from data_files import cubes

from coterie.data import Federation, digits, partition
from coterie.data.copies import among, digests
from coterie.running.experiment import Experiment

RNG = np.random.default_rng


def notes(x, y, clients=4, **options):
    dealt = partition("iid", np.asarray(y), clients, seed=0)
    made = Federation.from_assignment(x, y, dealt, recipe={"data": "t"}, **options)
    return [note for note in made.looked_at().recipe.get("notes", ()) if "copies" in note]


def test_equal_samples_with_equal_labels_have_one_digest(monkeypatch):
    """By hand: 0 and 2 are one sample; 1 has another label, 3 other numbers. Blocks change nothing."""
    x = torch.tensor([[1.0, 2.0], [1.0, 2.0], [1.0, 2.0], [2.0, 1.0]])
    y = torch.tensor([0, 1, 0, 0])
    found = digests(x, y)
    assert found[0] == found[2]
    assert len(set(found.tolist())) == 3
    monkeypatch.setattr("coterie.memory.BLOCK", 3)
    assert digests(x, y).tolist() == found.tolist()


def test_a_table_pasted_four_times_is_pointed_out():
    """300 rows of chance, four times each: of a held-out row each of the other three trains with probability 0.675 at
    least, so nearly all (1 - 0.325^3 = 97 %) have a copy in training. Pasted with other labels they are no copies."""
    x, y = RNG(0).normal(size=(300, 5)).astype(np.float32), RNG(1).integers(0, 2, 300)
    (said,) = notes(np.tile(x, (4, 1)), np.tile(y, 4))
    copied, _, held = said.partition(" samples held out")[0].split()
    assert int(copied) > 0.9 * int(held)
    assert "are exact copies of training samples" in said
    assert "scores may come out too high" in said
    assert "group=COLUMN" in said
    assert notes(x, y) == []
    other = np.concatenate([y + 2 * k for k in range(4)])
    assert notes(np.tile(x, (4, 1)), other) == []


def test_groups_that_hold_the_copies_together_need_no_note():
    """The same id for all copies of a row: they lie on one side, and nobody tests on what somebody trains on."""
    x, y = RNG(0).normal(size=(300, 5)).astype(np.float32), RNG(1).integers(0, 2, 300)
    dealt = [np.concatenate([np.arange(k, 300, 3) + 300 * copy for copy in range(4)]) for k in range(3)]
    made = Federation.from_assignment(np.tile(x, (4, 1)), np.tile(y, 4), dealt, group=np.tile(np.arange(300), 4))
    assert "notes" not in made.looked_at().recipe


def test_one_client_with_copies_is_named():
    """A client's own share counts: 20 of 1000 rows would be lost in the whole."""
    x, y = RNG(0).normal(size=(1000, 4)).astype(np.float32), RNG(1).integers(0, 2, 1000)
    x[910:920], x[920:930], y[910:920], y[920:930] = x[900:910], x[900:910], y[900:910], y[900:910]
    owned = [np.arange(0, 300), np.arange(300, 600), np.arange(600, 900), np.arange(900, 1000)]
    made = Federation.from_assignment(x, y, owned, names=list("abcd"))
    (said,) = made.looked_at().recipe["notes"]
    assert "(client d: " in said
    assert "a: " not in said


def few_answers(n):
    """Ten questions, answered yes or no: at most 1024 different rows."""
    return RNG(2).integers(0, 2, (n, 10))


def like_minded(n):
    """Twenty answers on a scale of 3 that hang together: most people answer near their own mood."""
    mood = RNG(3).integers(0, 3, (n, 1))
    return np.where(RNG(4).random((n, 20)) < 0.95, mood, RNG(5).integers(0, 3, (n, 20)))


def one_hot(n):
    """Three categories of 4, as one 0/1 number for each."""
    return np.concatenate([np.eye(4)[RNG(6 + k).integers(0, 4, n)] for k in range(3)], 1)


def age_and_sex(n):
    return np.stack([RNG(9).integers(18, 90, n), RNG(10).integers(0, 2, n)], 1)


@pytest.mark.parametrize("table", [few_answers, like_minded, one_hot, age_and_sex])
def test_honest_repeats_of_small_tables_are_no_copies(table):
    """Few values make equal rows by chance; each of these has more than 5 % of them."""
    x = table(1000).astype(np.float32)
    y = RNG(11).integers(0, 2, 1000)
    counts = np.unique(np.column_stack([x, y]), axis=0, return_counts=True)[1]
    assert counts[counts > 1].sum() > 0.05 * len(x)
    assert notes(x, y) == []
    assert among(torch.from_numpy(x), torch.from_numpy(y)) == []


@pytest.mark.parametrize("name", ["iris", "wine", "breast_cancer", "diabetes"])
def test_well_known_tables_have_no_copies(name):
    import sklearn.datasets

    held = getattr(sklearn.datasets, f"load_{name}")()
    assert notes(held.data.astype(np.float32), held.target.astype(int) // (60 if name == "diabetes" else 1)) == []


def test_bundled_digits_have_none():
    assert "notes" not in Experiment().federation().recipe
    x, y = digits()
    assert among(x, y) == []


def test_measurements_rounded_to_whole_numbers_pasted_three_times():
    """302 patients as 1025 rows: whole numbers of 40 to 100 values in five columns repeat hardly ever by chance."""
    x = np.stack([RNG(k).integers(0, size, 302) for k, size in enumerate((40, 60, 100, 90, 50))], 1).astype(np.float32)
    y = RNG(9).integers(0, 2, 302)
    assert len(notes(np.tile(x, (3, 1)), np.tile(y, 3))) == 1


def test_image_files_copied_twice(tmp_path):
    from PIL import Image

    for k, pixels in enumerate(cubes(60, shape=(6, 6))):
        place = tmp_path / "photos" / "ab"[k % 2] / "xy"[k // 2 % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place / f"{k}.png")
        shutil.copy(place / f"{k}.png", place / f"copy of {k}.png")
    made = Experiment(data=str(tmp_path / "photos")).federation()
    assert any("exact copies of training samples" in note for note in made.recipe["notes"])


def test_a_newcomers_copies_are_counted_with_their_groups():
    """30 samples twice: all 60 have a copy; of one group, or with the copy in the same group, none."""
    x, y = torch.from_numpy(RNG(0).normal(size=(30, 4))).repeat(2, 1), torch.arange(30).remainder(2).repeat(2)
    (said,) = among(x, y)
    assert said.startswith("60 of 60 samples are exact copies of another; copies may be trained and tested on")
    assert among(x, y, np.tile(np.arange(30), 2)) == []
    assert len(among(x, y, np.arange(60))) == 1


def test_personalize_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rng = RNG(0)
    rows = [f"{rng.normal():.4f},{rng.normal():.4f},{'ab'[k % 2]},{k % 3 % 2}" for k in range(80)]
    (tmp_path / "t.csv").write_text("\n".join(["age,dose,client,label", *rows]) + "\n")
    own = [f"{rng.normal():.4f},{rng.normal():.4f},{k % 2}" for k in range(15)]
    (tmp_path / "n.csv").write_text("\n".join(["age,dose,label", *own, *own]) + "\n")
    for words in (["run", "fedavg", "--data", "t.csv", "--model", "linear", "--rounds", "1", "--out", "run"],
                  ["personalize", "run", "--data", "n.csv", "-o", "n.safetensors"]):
        assert exit_code(monkeypatch, *words) == 0
    assert "Its data: 30 of 30 samples are exact copies of another" in " ".join(capsys.readouterr().out.split())
    assert any("exact copies" in why for why in json.loads((tmp_path / "n.json").read_text())["why"])
