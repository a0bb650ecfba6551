"""Whoever splits a client's samples again follows its groups: newcomers' folds, a resumed run, a site of its own."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch
from commands import exit_code

import coterie
from coterie import cli
from coterie.data import SPLITS, Federation, digits, partition
from coterie.errors import CoterieError, NoLabels
from coterie.flower.job import Job, fresh_id
from coterie.flower.site import site_at
from coterie.models import model
from coterie.running.experiment import Experiment, read_experiment
from coterie.running.saved import Saved
from coterie.serving.estimate import cut
from coterie.serving.newcomer_data import read
from coterie.serving.newcomers import Desk, personalize

NET = "mlp:hidden=8"


def command(capsys, monkeypatch, *words):
    """The command line in this process: exit code, output, errors."""
    monkeypatch.setattr(sys, "argv", ["coterie", *map(str, words)])
    try:
        cli.main()
    except SystemExit as stop:
        return (stop.code or 0, *capsys.readouterr())
    return (0, *capsys.readouterr())


@pytest.mark.parametrize("folds", [2, 5, 10])
def test_folds_cut_no_group_and_are_alike_in_size(folds):
    rng = np.random.default_rng(0)
    group = rng.integers(0, 40, 200)
    made = cut(np.arange(200), folds, np.random.default_rng(1), group)
    assert sorted(np.concatenate([held for _, held in made]).tolist()) == list(range(200))
    for kept, held in made:
        assert not set(group[kept]) & set(group[held])
        assert sorted([*kept, *held]) == list(range(200))
    sizes = [len(held) for _, held in made]
    largest = np.bincount(group).max()  # the last one goes to the smallest fold, so no two differ by more
    assert max(sizes) - min(sizes) <= largest
    assert len(cut(np.arange(6), folds, rng, np.array([0, 0, 0, 1, 1, 1]))) == 2
    alone = cut(np.arange(6), folds, rng, np.zeros(6, dtype=int))
    assert len(alone) == min(folds, 6), "a single group is cut by samples, or nothing could be held out"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """FedAvg + fine-tune on digits, as a folder; and digits that were not in it."""
    x, y = digits()
    dealt = partition("iid", y[:600].numpy(), 6, seed=0)
    folder = tmp_path_factory.mktemp("run") / "fedavgft"
    coterie.run("fedavgft", model("mlp", (1, 8, 8), 10, hidden=8),
                Federation.from_assignment(x[:600], y[:600], dealt), folder=folder, rounds=2, lr=0.3, epochs=3,
                device="cpu")
    return folder, x[600:]


def test_the_estimate_is_not_fooled_by_copies(run):
    """20 pictures, three times each, with labels of pure chance: who has seen a copy knows the label, and nobody else
    can. By samples the estimate is far above the 1 in 10 of guessing; by groups it is there."""
    import dataclasses

    folder, x = run
    saved = Saved.open(folder, NET)
    training = dataclasses.replace(saved.spec.training, epochs=60, lr=0.3)
    saved = dataclasses.replace(saved, spec=dataclasses.replace(saved.spec, training=training))
    group = np.repeat(np.arange(20), 3)
    y = torch.randint(0, 10, (20,), generator=torch.Generator().manual_seed(0))[group]
    samples = (x[:20][torch.from_numpy(group)], y)
    free, kept = (personalize(saved, samples, adapt="yes", group=ids) for ids in (None, group))
    assert free.estimate.value > 0.5
    assert kept.estimate.value < 0.3
    assert any("Samples were held out by their 20 groups" in why for why in kept.why)
    assert kept.facts["groups"] == 20
    assert not any("held out by" in why for why in free.why)
    same = personalize(saved, samples, adapt="yes", group=np.zeros(60))
    assert any("All its samples are of one group" in why for why in same.why)


def test_validation_samples_of_a_newcomer_are_whole_groups(run):
    folder, _ = run
    group = np.repeat(np.arange(10), 6)
    desk = Desk(Saved.open(folder, NET))
    desk.group = group
    marks = torch.arange(60.0)[:, None, None, None].expand(60, 1, 8, 8)
    folds = cut(np.arange(60), 5, np.random.default_rng(0), group)
    made = desk.federation(marks, torch.zeros(60, dtype=torch.int64), folds, list("abcde"))
    for i in range(5):
        held = [set(group[made.client(i, split)[0][:, 0, 0, 0].long()]) for split in SPLITS]
        assert sum(map(len, held)) == 10
        assert len(set().union(*held)) == 10
        assert held[1], "there are validation samples"


def test_run_resume_and_personalize_follow_the_groups(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    rows = [(f"{rng.normal():.3f}", f"h{p % 3}", f"p{p}", ("ill", "well")[p % 2]) for p in range(36) for _ in range(3)]
    text = "weight,hospital,patient,outcome\n" + "".join(",".join(row) + "\n" for row in rows)
    (tmp_path / "all.csv").write_text(text)
    spelled = "all.csv:label=outcome,client=hospital,group=patient"
    words = ["--data", spelled, "--model", "linear", "--rounds", 1, "--set", "device=cpu", "--out", "run"]
    assert command(capsys, monkeypatch, "run", "fedavg", *words)[0] == 0
    kept = json.loads((tmp_path / "run" / "config.json").read_text())["federation"]
    assert kept["split"]["groups"] == 36
    assert kept["encoding"]["group"] == "patient"
    again = read_experiment(tmp_path / "run")[0].federation()
    assert again.fingerprint() == Experiment(data=spelled).federation().fingerprint()
    assert Saved.open("run").federation().group.tolist() == again.group.tolist()

    (tmp_path / "new.csv").write_text(text.splitlines()[0] + "\n" + "".join(
        f"{rng.normal():.3f},h9,q{k // 4},{('ill', 'well')[k // 4 % 2]}\n" for k in range(24)))
    code, text, errors = command(capsys, monkeypatch, "personalize", "run", "--data", "new.csv", "-o", "n.safetensors")
    assert code == 0, errors
    assert "Samples were held out by their 6 groups" in text
    (tmp_path / "plain.csv").write_text("weight,outcome\n" + "".join(
        f"{rng.normal():.3f},{('ill', 'well')[k % 2]}\n" for k in range(24)))
    words = ["--data", "plain.csv", "-o", "p.safetensors"]
    code, text, errors = command(capsys, monkeypatch, "personalize", "run", *words)
    assert code == 0, errors
    assert "The run keeps groups of samples together, and this client's data name none" in text
    assert "too good if some of them belong together" in text, "an error would be too low, not too high"


def test_a_site_follows_the_groups_of_its_file(tmp_path):
    lesion = np.repeat(np.arange(12), 4)
    np.savez(tmp_path / "a.npz", x=np.arange(48, dtype=np.float32)[:, None], y=np.arange(48) % 2, group=lesion)

    asked = Job(experiment=fresh_id(), method="fedavg", model="linear", shape=(1,), classes=2, outputs=2)
    made = site_at("wien", tmp_path / "a.npz", tmp_path)._data(asked)
    held = [set(lesion[made.client(0, split)[0][:, 0].long()]) for split in SPLITS]
    assert sum(map(len, held)) == 12
    assert len(set().union(*held)) == 12
    assert held[2]


def table_run(folder, monkeypatch, fill=None):
    """The run of a table whose columns, label and client have names of their own, and whose numbers are scaled."""
    monkeypatch.chdir(folder)
    rng = np.random.default_rng(0)
    lines = [f"{rng.normal(60, 10):.2f},{'mf'[k % 2]},{'ab'[k % 3 % 2]},{('ill', 'well')[k % 5 % 2]}"
             for k in range(80)]
    (folder / "t.csv").write_text("\n".join(["age,sex,ward,outcome", *lines]) + "\n")
    data = f"t.csv:label=outcome,client=ward,scale=true{f',fill={fill}' if fill else ''}"
    words = ["--data", data, "--model", "linear", "--set", "device=cpu"]
    assert exit_code(monkeypatch, "run", "fedavg", *words, "--rounds", "1", "--out", "run") == 0
    return Saved.open("run")


NEW = {"ward": ["c"] * 6, "outcome": ["well", "ill"] * 3, "sex": list("fmmfmm"), "age": [50, 55, 60, 65, 70, 75]}


def test_a_newcomer_s_table_in_any_form_is_encoded_as_the_run_was(tmp_path, monkeypatch):
    """One table as csv, as plain text that the user calls a table, and as a Hugging Face data set: the run's mean and
    deviation of age and its two sexes, and its classes by their names."""
    from datasets import ClassLabel, Dataset

    saved = table_run(tmp_path, monkeypatch)
    mean, deviation = saved.spec.encoding["scale"]["age"]
    columns = {"age": [[(age - mean) / deviation] for age in NEW["age"]],
               "sex": [[float(sex == word) for word in "fm"] for sex in NEW["sex"]]}
    x = np.concatenate([columns[name] for name in saved.spec.encoding["columns"]], 1)
    y = [saved.spec.class_names.index(word) for word in NEW["outcome"]]
    lines = [",".join(NEW), *(",".join(map(str, row)) for row in zip(*NEW.values(), strict=True))]
    for name in ("new.csv", "new.dat"):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    plain = Dataset.from_dict(NEW)
    plain.save_to_disk(str(tmp_path / "plain"))
    # classes numbered in an order of their own
    plain.cast_column("outcome", ClassLabel(names=["well", "ill"])).save_to_disk(str(tmp_path / "coded"))
    for data in ("new.csv", "new.dat:format=table", "plain", "coded"):
        (found, labels), client, *_ = read(data, None, saved)
        np.testing.assert_allclose(found.numpy(), x, rtol=1e-5, err_msg=data)
        assert labels.tolist() == y, data
        assert client == "c", data


def test_a_newcomer_s_data_set_without_the_run_s_label_column_has_no_labels(tmp_path, monkeypatch):
    """Its own column 'label' means something else: the run predicts 'outcome'."""
    from datasets import Dataset

    saved = table_run(tmp_path, monkeypatch)
    Dataset.from_dict({"age": [50.0], "sex": ["f"], "label": [1]}).save_to_disk(str(tmp_path / "none"))
    with pytest.raises(NoLabels, match="has no column 'outcome', which would hold the labels"):
        read("none", None, saved)
    with pytest.raises(CoterieError, match="unknown format 'tabel'"):
        read("none:format=tabel", None, saved)


@pytest.mark.parametrize("form", ["csv", "empty", "few", "hub"])
def test_a_newcomer_without_labels_is_told_of_gaps_and_units(form, tmp_path, monkeypatch, capsys):
    """Nothing is trained for it, and still the model takes its numbers: ages in days are 365 times the run's, and a gap
    among them is filled as the run's were. No column of labels, an empty one, or 4 labels: all get the fallback."""
    from datasets import Dataset

    table_run(tmp_path, monkeypatch, fill="mean")
    new = {"age": [365.25 * age for age in range(40, 52)], "sex": ["f", "m"] * 6, "outcome": [""] * 12}
    new["age"][0] = None
    if form == "few":
        new["outcome"][:4] = ["ill", "well"] * 2
    if form in ("csv", "hub"):
        del new["outcome"]
    rows = zip(*new.values(), strict=True)
    lines = [",".join(new), *(",".join("" if v is None else str(v) for v in row) for row in rows)]
    (tmp_path / "n.csv").write_text("\n".join(lines) + "\n")
    if form == "hub":
        Dataset.from_dict(new).save_to_disk(str(tmp_path / "n"))
    words = ["--data", "n" if form == "hub" else "n.csv", "-o", "new.safetensors"]
    assert exit_code(monkeypatch, "personalize", "run", *words) == 0
    said = " ".join(capsys.readouterr().out.split())
    held = json.loads((tmp_path / "new.json").read_text())
    assert held["fallback"] is True
    assert held["facts"]["other_units"] == ["age"]
    assert "Its data: filled in: column 'age' lacked 1 of 12 values" in said
    assert "'age' is 1" in said  # 14,000 days and more
    assert "other units?" in said


def test_what_was_filled_in_for_a_newcomer_is_said(tmp_path, monkeypatch, capsys):
    """The run's file says it when it is read; a newcomer whose column is empty altogether gets the same words."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    dose = ["" if k % 9 == 0 else f"{rng.normal():.3f}" for k in range(80)]
    lines = [f"{rng.normal():.3f},{dose[k]},{'ab'[k % 2]},{k % 3 % 2}" for k in range(80)]
    (tmp_path / "t.csv").write_text("\n".join(["age,dose,client,label", *lines]) + "\n")
    (tmp_path / "n.csv").write_text("\n".join(["age,dose,label", *(f"{k / 10},,{k % 2}" for k in range(12))]) + "\n")
    data = "t.csv:scale=true,fill=mean"
    for words in (["run", "fedavg", "--data", data, "--model", "linear", "--rounds", "1", "--out", "run"],
                  ["personalize", "run", "--data", "n.csv", "-o", "n.safetensors"]):
        assert exit_code(monkeypatch, *words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Its data: filled in: column 'dose' lacked 12 of 12 values" in said
    assert any("lacked 12 of 12" in why for why in json.loads((tmp_path / "n.json").read_text())["why"])


@pytest.mark.parametrize("fill", [None, "mean"])
@pytest.mark.parametrize("labels", [True, False])
def test_codes_for_missing_numbers_of_a_newcomer_are_said(fill, labels, tmp_path, monkeypatch, capsys):
    """Three ages of 999 among 27 from 40 to 66, whose mean is 53, as `coterie data` says of a run's own table. Empty
    cells have no number where the run filled none, so a way to fill them is named there."""
    table_run(tmp_path, monkeypatch, fill=fill)
    lines = [f"{40 + k if k < 27 else 999},{'mf'[k % 2]}{',' + ('ill', 'well')[k % 2] if labels else ''}"
             for k in range(30)]
    (tmp_path / "n.csv").write_text("\n".join(["age,sex" + ",outcome" * labels, *lines]) + "\n")
    assert exit_code(monkeypatch, "personalize", "run", "--data", "n.csv", "-o", "n.safetensors") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Its data: perhaps missing: column 'age' holds 999 3 times, far from its other values (about 53," in said
    assert ("leave these cells empty in the file, and they are filled in." in said) == (fill is not None)
    assert ("leave these cells empty in the file and fill the gaps with fill=mean, or leave their rows out with "
            "skip=true." in said) == (fill is None)
    assert any("holds 999 3 times" in why for why in json.loads((tmp_path / "n.json").read_text())["why"])


@pytest.mark.parametrize(("scale", "fill"), [("", "fill=mean"), ("", "fill=3.5"), (",scale=true", "fill=mean")])
@pytest.mark.parametrize("labels", [True, False])
def test_what_fills_a_newcomer_s_gaps_is_written_beside_its_model(scale, fill, labels, tmp_path, monkeypatch, capsys):
    """The run fills none, so whoever serves the model cannot know it otherwise. The ages that are there are 1 to 11,
    whose mean is 6; a run with a scale knows the mean of its own, 49.5, and that is taken."""
    monkeypatch.chdir(tmp_path)
    lines = [f"{10 + k},{k % 7},{'ab'[k % 2]},{k // 2 % 2}" for k in range(80)]
    (tmp_path / "t.csv").write_text("\n".join(["age,dose,client,label", *lines]) + "\n")
    words = ["--data", f"t.csv:label=label{scale}", "--model", "linear", "--rounds", "1", "--out", "run"]
    assert exit_code(monkeypatch, "run", "fedavg", *words) == 0
    rows = [f"{k or ''},{k}{f',{k % 2}' if labels else ''}" for k in range(12)]
    (tmp_path / "n.csv").write_text("\n".join(["age,dose" + ",label" * labels, *rows]) + "\n")
    assert exit_code(monkeypatch, "personalize", "run", "--data", f"n.csv:{fill}", "-o", "n.safetensors") == 0
    said, held = capsys.readouterr().out, json.loads((tmp_path / "n.json").read_text())
    filled = 49.5 if scale else 6.0 if fill == "fill=mean" else 3.5
    assert held["job"]["encoding"]["fill"]["age"] == filled
    assert f"column 'age' lacked 1 of 12 values ({filled:g})" in " ".join(said.split())


def test_an_empty_column_has_no_mean_of_its_own(tmp_path, monkeypatch, capsys):
    """Filled with 0, as if that were a mean, every patient would be a newborn."""
    monkeypatch.chdir(tmp_path)
    lines = [f"{10 + k},{'ab'[k % 2]},{k // 2 % 2}" for k in range(80)]
    (tmp_path / "t.csv").write_text("\n".join(["age,client,label", *lines]) + "\n")
    words = ["--data", "t.csv", "--model", "linear", "--rounds", "1", "--out", "run"]
    assert exit_code(monkeypatch, "run", "fedavg", *words) == 0
    (tmp_path / "n.csv").write_text("\n".join(["age,label", *(f",{k % 2}" for k in range(12))]) + "\n")
    assert exit_code(monkeypatch, "personalize", "run", "--data", "n.csv:fill=mean", "-o", "n.safetensors") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "column 'age' is empty, so it has no mean, and the run says none; say what to fill in, fill=NUMBER." in said
