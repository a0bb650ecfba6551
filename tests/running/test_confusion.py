"""Confusion matrices and metrics in a run folder: what is there, by whose name, and the same after a stop."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix

import coterie
from coterie.errors import CoterieError
from coterie.models import model
from coterie.running import confusion, simulation
from coterie.running.folder import Folder

OPTIONS = {"rounds": 7, "evaluate_every": 1, "checkpoint_every": 3, "lr": 0.3, "device": "cpu",
           "metric": "balanced_accuracy", "watch": ["recall", "auroc"]}


class StoppedError(Exception):
    pass


@pytest.fixture(scope="module")
def animals():
    """Three named classes, five named clients and an unseen one; `e` has no test data."""
    generator = torch.Generator().manual_seed(1)

    def pair(n, k):
        y = torch.randint(0, 3, (n,), generator=generator)
        return torch.randn(n, 5, generator=generator) + 0.5 * torch.eye(5)[y] + 0.1 * k, y

    splits = [[pair(n if k != 4 or n != 11 else 0, k) for k in range(6)] for n in (30, 11, 9)]
    data = coterie.Federation.from_splits(*splits, classes=3, names=list("abcdef"))
    recipe = {**data.recipe, "classes": ["cat", "dog", "owl"]}
    return coterie.Federation(data.x, data.y, data.bounds, 5, 3, data.names, recipe)


def run(data, folder=None, **options):
    return coterie.run("fedper", model("mlp", (5,), 3, hidden=4), data, folder=folder, **{**OPTIONS, **options})


@pytest.fixture(scope="module")
def finished(animals, tmp_path_factory):
    place = tmp_path_factory.mktemp("whole") / "run"
    return run(animals, place), place


def test_the_matrices_of_the_last_round_are_those_of_the_clients_models(animals, finished):
    result, place = finished
    for stage in ("served", "adapted"):
        found = Folder(place).result().confusion(stage, "last")
        assert (found.classes, found.round) == (("cat", "dog", "owl"), 7)
        for client in range(5):
            x, y = animals.client(client, "test")
            module = result.model_for(client, adapted=stage == "adapted", when="last")
            expected = confusion_matrix(y, module(x).argmax(1), labels=range(3)) if len(y) else np.zeros((3, 3))
            np.testing.assert_array_equal(found.counts[client], expected)


def test_the_chosen_and_the_last_round_are_kept_and_agree_with_the_scores(finished):
    """Recall of each class is its row's share on the diagonal; unseen clients take the round of the seen ones."""
    result, place = finished
    lines = map(json.loads, (place / confusion.FILE).read_text().splitlines())
    held = {(line["stage"], line["round"]) for line in lines}
    for read in (result, Folder(place).result()):
        for stage in read.stages:
            for when in ("chosen", "last"):
                found, scores = read.confusion(stage, when), read.at(stage, when)
                assert found.round == read.round_of(stage, when)
                assert (stage, found.round) in held
                np.testing.assert_array_equal(found.counts.sum((1, 2)), scores.samples)
                with np.errstate(invalid="ignore"):
                    recall = np.diagonal(found.counts, axis1=1, axis2=2) / found.counts.sum(2)
                for k, name in enumerate(found.classes):
                    np.testing.assert_allclose(scores.test[f"recall[{name}]"], recall[:, k])
                np.testing.assert_allclose(scores.test["balanced_accuracy"][:4], np.nanmean(recall[:4], 1))
    assert result.round_of("served") != 7  # otherwise both rounds would be one


def test_a_run_without_a_folder_has_them_too(animals, finished):
    result, _ = finished
    alone = run(animals)
    for stage in alone.stages:
        for when in ("chosen", "last"):
            mine, theirs = alone.confusion(stage, when), result.confusion(stage, when)
            np.testing.assert_array_equal(mine.counts, theirs.counts)
            assert mine[1:] == theirs[1:]


@pytest.mark.parametrize("when", [1, 4, 6, 7])
def test_a_run_that_was_stopped_and_resumed_has_the_same_files(animals, finished, tmp_path, when):
    def stop(progress):
        if progress.round == when and progress.latest.round == when:
            raise StoppedError

    with pytest.raises(StoppedError):
        run(animals, tmp_path / "run", watch=[*OPTIONS["watch"], stop])
    run(animals, tmp_path / "run", resume=True)
    for name in (confusion.FILE, "clients.csv"):
        assert (tmp_path / "run" / name).read_bytes() == (finished[1] / name).read_bytes()


def test_clients_csv_names_clients_and_has_a_column_for_every_metric(finished):
    result, place = finished
    with (place / "clients.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert list(lines[0]) == [
        "round", "stage", "client", "name", "samples", "steps", "accuracy", "loss", "balanced_accuracy", "recall[cat]",
        "recall[dog]", "recall[owl]", "auroc", "auroc_bound", "val_accuracy", "val_loss", "val_balanced_accuracy",
        "val_recall[cat]", "val_recall[dog]", "val_recall[owl]", "val_auroc",
    ]
    last = [line for line in lines if line["round"] == "7" and line["stage"] == "served"]
    assert [line["name"] for line in last] == list("abcde")
    assert last[4]["auroc"] == ""  # no test data
    scores = result.at("served", "last")
    np.testing.assert_array_equal([float(line["auroc"] or "nan") for line in last], scores.test["auroc"])
    read = Folder(place).result().at("served", "last")
    assert read.scale == scores.scale
    assert read.test.keys() == scores.test.keys()
    assert read.val.keys() == scores.val.keys()


def test_config_says_how_the_metrics_are_read(finished):
    config = Folder(finished[1]).config()
    assert config["metrics"]["chosen"] == {
        "name": "balanced_accuracy", "title": "balanced accuracy", "higher": True, "percent": True,
        "by_median": False,
    }
    assert [one["name"] for one in config["metrics"]["watched"]] == ["recall", "auroc"]
    assert config["training"]["metric"] == "balanced_accuracy"
    assert config["training"]["watch"] == ["recall", "auroc"]


def test_a_recorded_evaluation_counts_who_is_left_out(finished):
    lines = [json.loads(line) for line in (finished[1] / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if line["kind"] == "evaluation"][-1]["stages"]
    assert found["served"]["metric"] == "balanced_accuracy"
    assert found["served"]["left_out"] == 1


def test_many_clients_and_classes_leave_the_matrices_out(animals, monkeypatch, tmp_path):
    monkeypatch.setattr(simulation, "MOST_CELLS", 6 * 9 - 1)
    result = run(animals, tmp_path / "run", rounds=1)
    assert result.confusion() is None
    assert (tmp_path / "run" / confusion.FILE).read_text() == ""


def test_regression_has_none(tiny):
    data = tiny.federation(kind="regression")
    result = coterie.run("fedavg", model("linear", (4,), 1), data, rounds=1, device="cpu", metric="mae")
    assert result.confusion() is None
    assert result.at("served").scale.name == "mae"


@pytest.mark.parametrize(("line", "said"), [
    ('{"round": 7, "stage": "served"}', "KeyError"),
    ('{"round": 7, "stage": "served", "shape": [1, 2], "cells": [], "counts": []}', "counts of shape"),
    ('{"round": 7, "stage": "served", "shape": [5, 3, 3], "cells": [99], "counts": [1]}', "IndexError"),
])
def test_a_damaged_record_is_a_sentence(finished, tmp_path, line, said):
    path = tmp_path / confusion.FILE
    path.write_text(line + "\n")
    with pytest.raises(CoterieError, match=f"confusion.jsonl is damaged: .*{said}"):
        confusion.read(path, "served", 7, 5, ("cat", "dog", "owl"))
    path.write_text('{"round": 7, "sta')  # half a line, as a killed run leaves it
    assert confusion.read(path, "served", 7, 5, ("cat", "dog", "owl")) is None
