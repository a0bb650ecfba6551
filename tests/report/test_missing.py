"""Where a section has nothing to show, the page gives the reason that is true of these runs."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import coterie
from coterie.data import Federation
from coterie.models import model
from coterie.report.contents import gather
from coterie.report.page import page
from coterie.running.folder import Folder, inside

OLD = Path(__file__).parents[1] / "end_to_end" / "old_runs"


def change(path, **values):
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, **values}))


def said(found):
    """Every word of the page's data on what is not there."""
    return json.dumps([found.get("missing", ""), found["notes"],
                       [m["few"] and [m["few"]["words"], m["few"].get("unweighed", "")] for m in found["methods"]]])


def test_sites_are_not_taken_for_an_earlier_version(tmp_path):
    """A server of real sites never knew who holds which class, in no version."""
    found = gather([OLD / "flower" / "server"])
    assert "earlier version" not in said(found)
    assert found["missing"]["classes"].endswith("their server is not told who holds which class.")
    assert found["missing"]["sizes"].endswith("their server is not told how many training samples a site has.")
    assert found["reproduce"]["started"] == "by the server of real sites"


def test_counts_that_were_too_many_are_not_taken_for_an_earlier_version(named, tmp_path):
    """600 classes for 12 clients are 4.3 million cells of matrices; the counts of classes were left out as well."""
    shutil.copytree(named / "fedper" / "seed0", tmp_path / "run")
    data = json.loads((tmp_path / "run" / "data.json").read_text())
    del data["histogram"], data["tested"]
    (tmp_path / "run" / "data.json").write_text(json.dumps(data | {"classes": 600}))
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["samples"]["classes"], config["federation"] = 600, {}
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    (tmp_path / "run" / "confusion.jsonl").unlink()
    found = gather([tmp_path / "run"])
    assert "earlier version" not in said(found)
    many = "With 12 clients and 600 classes"
    assert found["missing"]["classes"] == f"{many}, who holds which class is too much to record."
    matrices = found["missing"]["confusion"]["fedper"]
    assert matrices["served"] == f"{many}, confusion matrices are too much to record."


def test_an_unfinished_run_is_not_taken_for_an_earlier_version(compared, tmp_path):
    """The models' line and the matrices of the last evaluation come with the end of a run."""
    shutil.copytree(compared / "ifca" / "seed0", tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    (tmp_path / "run" / "confusion.jsonl").write_text("")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(x for x in lines if '"kind": "models"' not in x))
    found = gather([tmp_path / "run"])
    assert "earlier version" not in said(found)
    assert found["methods"][0]["few"]["words"] == (
        "Which model a client uses is unknown: the run is not finished, and it is recorded at the end."
    )
    assert "it is not finished" in found["missing"]["confusion"]["ifca"]["served"]


def test_an_earlier_version_is_called_one(compared, tmp_path):
    shutil.copytree(compared / "ifca" / "seed0", tmp_path / "run")
    for name in ("data.json", "confusion.jsonl"):
        (tmp_path / "run" / name).unlink()
    found = gather([tmp_path / "run"])
    for name in ("classes", "sizes"):
        assert found["missing"][name].startswith("An earlier version made these runs"), name
    matrices = found["missing"]["confusion"]["ifca"]
    assert matrices["served"] == "An earlier version made these runs; it recorded no answers."


def test_nothing_is_missing_where_it_is_there(compared):
    assert gather([compared])["missing"] == {}


@pytest.mark.parametrize(
    ("method", "clients", "why"),
    [
        ("fedavg", 1, "One client takes part in a round: there are no two updates to compare."),
        ("local", 3, "None of these methods uploads an update, so there are no angles between updates."),
        ("fedavg+private", 3, "With the aggregator private, the server sees a noisy mean and no client's update."),
    ],
)
def test_why_there_are_no_angles_between_updates(method, clients, why, tmp_path):
    draw = torch.Generator().manual_seed(0)
    parts = [(torch.randn(20, 3, generator=draw), torch.arange(20) % 2) for _ in range(clients)]
    coterie.run(method, model("linear", (3,), 2), Federation.from_clients(parts, classes=2), folder=tmp_path / "run",
                rounds=2, evaluate_every=1, device="cpu")
    assert gather([tmp_path / "run"])["missing"]["conflicts"] == why


@pytest.fixture(scope="module")
def diverged(tmp_path_factory):
    """Three models of numbers too large for float32 after the first round, and clients whose losses are none."""
    draw = torch.Generator().manual_seed(0)
    parts = [(torch.randn(30, 3, generator=draw), torch.randn(30, generator=draw)) for _ in range(4)]
    folder = tmp_path_factory.mktemp("diverged") / "cmp"
    options = {"rounds": 3, "lr": 1e30, "evaluate_every": 1, "device": "cpu"}
    coterie.compare(["fedfew", "ifca", "fedsoft"], model("linear", (3,), 1), Federation.from_clients(parts),
                    folder=folder, **options)
    return folder


def test_a_comparison_that_diverged_has_a_page(diverged):
    """Its weights, distances and losses are no numbers, which a page's data cannot hold: words stand for them."""
    records = [record for folder in inside(diverged) for record in Folder(folder.path).rounds()]
    distances = [np.array(r["report"]["apart"]) for r in records if "apart" in r["report"]]
    assert not all(np.isfinite(one).all() for one in distances)  # they did diverge
    found = json.loads(json.dumps(gather([diverged]), allow_nan=False))
    assert page(found)
    for method in found["methods"]:
        if method["few"]:
            assert method["few"]["verdict"] == "unknown"
            assert method["few"]["words"].endswith("models hold values that are no numbers: the training diverged.")
            assert method["few"]["end"] is None
    assert found["missing"]["conflicts"].startswith("The training diverged")
