"""Numbers by model: read under the name that the method says, and in older runs under the names there were."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

import coterie
from coterie.methods.ifca import IFCA
from coterie.models import model
from coterie.report import logs
from coterie.report.few_models import few, words
from coterie.running.folder import Folder


@dataclass(frozen=True)
class Loaded(IFCA):
    """IFCA under another name for its numbers, one that no version has ever used."""

    by_model = "load"


@pytest.fixture
def run(tiny, tmp_path):
    """(method, further options) -> the folder of three rounds."""

    def go(method, **options):
        factory = model("mlp", (tiny.FEATURES,), tiny.CLASSES, hidden=5)
        coterie.run(method, factory, tiny.federation(), folder=tmp_path / "run", rounds=3, batch=3, lr=0.1,
                    precision="float64", device="cpu", **options)
        return Folder(tmp_path / "run")

    return go


def change(folder, change):
    path = folder.path / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def drawn(folder):
    return few([folder.result()], [folder], 4, 60)


def test_numbers_are_read_under_the_name_that_the_method_says(run):
    """Three models of four clients each round, so the shares are quarters that sum to 1."""
    folder = run(Loaded())
    assert words(folder) == ("load",)
    shown = drawn(folder)["mass"]
    assert shown["rounds"] == [1, 2, 3]
    counts = [record["report"]["load"] for record in folder.rounds()]
    assert [sum(line) for line in counts] == [4, 4, 4]
    assert shown["share"] == [[count / 4 for count in line] for line in counts]


@pytest.mark.parametrize("method", ["fedfew", "ifca", "fedsoft", "pacfl", "fedavg"])
def test_a_run_of_an_earlier_version_shows_the_same(run, method):
    """Its config.json does not name the numbers; the names that methods had are tried."""
    folder = run(method)
    before = drawn(folder)
    change(folder, lambda config: config.pop("by_model"))
    assert drawn(folder) == before
    assert (before is None) == (method == "fedavg")


def test_the_method_itself_is_not_needed(run):
    """The file it came from may be gone, and nothing of it runs when a report is made."""
    folder = run("ifca")
    before = drawn(folder)
    change(folder, lambda config: config.update(method="/nowhere/gone.py:Mine"))
    assert drawn(folder) == before


def test_numbers_by_model_are_logged_one_by_one(run):
    """`alpha` belongs to clients, and lists of lists to nobody's curve."""
    folder = run("fedfew:models=2", evaluate_every=1)
    record = folder.rounds()[-1]
    assert {"alpha", "w", "mass"} <= record["report"].keys()
    told = dict(logs._of_round(record, words(folder)))
    assert [told[f"method/mass_{k}"] for k in (1, 2)] == record["report"]["mass"]
    assert {name for name in told if name.startswith("method/")} == {
        "method/opposing", "method/g", "method/mass_1", "method/mass_2",
    }


def test_numbers_of_a_name_of_the_methods_own_are_logged_too(run):
    """Only three names were known, so `load` would have made no curve."""
    folder = run(Loaded())
    record = folder.rounds()[-1]
    told = dict(logs._of_round(record, words(folder)))
    assert [told[f"method/load_{k}"] for k in (1, 2, 3)] == record["report"]["load"]
