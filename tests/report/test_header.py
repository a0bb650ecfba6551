"""The head of a report of several folders: what differs between the runs is said, never the first run's alone."""

import shutil

import pytest
from commands import as_before

from coterie.errors import CoterieError
from coterie.report.contents import gather


@pytest.fixture
def merged(named, tmp_path):
    """Runs of three methods in folders of their own: fedper with other options than the rest."""
    for name in ("local", "fedavg", "fedper"):
        shutil.copytree(named / name / "seed0", tmp_path / name)
    change(tmp_path / "fedper", {"rounds": 9, "lr": 0.02, "batch": 5})
    return [tmp_path / name for name in ("local", "fedavg", "fedper")]


def change(folder, training):
    as_before(folder / "config.json", lambda config: config["training"].update(training))


def test_rounds_and_rates_that_differ_are_in_the_facts(merged):
    said = gather(merged)["facts"]
    assert "4 to 9 rounds, learning rates 0.02 and 0.1" in said
    assert "4 rounds, learning rate 0.1" in gather(merged[:2])["facts"]


def test_runs_trained_otherwise_are_called_out(merged):
    """Batch 10 is the default of the others; the options are in the order of the run's own record."""
    first, second = "batch 10, lr 0.1 and rounds 4", "batch 5, lr 0.02 and rounds 9"
    assert gather(merged)["notes"] == [
        f"These runs were not trained alike: local and fedavg with {first}; fedper with {second}. What sets their "
        "numbers apart may be that, and not the methods."
    ]
    assert gather(merged[:2])["notes"] == []


def test_seeds_of_one_method_that_were_trained_otherwise_are_told_apart(named, tmp_path):
    shutil.copytree(named, tmp_path / "cmp")
    change(tmp_path / "cmp" / "fedper" / "seed1", {"lr": 0.5})
    (said,) = gather([tmp_path / "cmp"])["notes"]
    assert "fedper (seed 0)" in said
    assert said.endswith("fedper (seed 1) with lr 0.5. What sets their numbers apart may be that, and not the methods.")


def test_options_that_change_no_row_are_no_difference(merged):
    change(merged[2], {"rounds": 4, "lr": 0.1, "batch": 10, "device": "cuda", "engine": "stack", "checkpoint_every": 3})
    assert gather(merged)["notes"] == []


def test_notes_on_the_data_are_on_the_page_once(merged):
    """All runs of a comparison read the same data, so they have the same notes."""
    for folder in merged:
        as_before(folder / "config.json",
                  lambda config: config["federation"].update(notes=["columns hold large numbers"]))
    assert gather(merged)["notes"].count("Columns hold large numbers") == 1


def test_seeds_are_counted_by_method(named, tmp_path):
    """fedper with seeds 0 and 1, local with 0 alone, fedavg with 1 alone: nobody has three."""
    folders = [named / "fedper" / "seed0", named / "fedper" / "seed1", named / "local" / "seed0"]
    assert "1 to 2 seeds a method" in gather(folders)["facts"]
    assert "1 seed" in gather([named / "local" / "seed0", named / "fedavg" / "seed1"])["facts"]


def test_baselines_that_two_comparisons_share_are_shown_once(named, tmp_path):
    """local and fedavg are in every comparison; where their scores are the same to the digit, it is one run."""
    for folder, left_out in (("a", None), ("b", "fedper")):
        shutil.copytree(named, tmp_path / folder, ignore=shutil.ignore_patterns(*([left_out] if left_out else [])))
    shutil.rmtree(tmp_path / "a" / "fedavg")
    found = gather([tmp_path / "a", tmp_path / "b"])
    assert sorted(m["name"] for m in found["methods"]) == ["fedavg", "fedper", "local"]
    assert found["notes"] == ["local is in several of the folders with the same numbers; it is shown once."]
    assert len(found["runs"]) == 6
    assert (found["progress"]["runs"], found["progress"]["finished"]) == (6, 6)


def test_two_runs_of_a_method_with_other_numbers_are_refused_by_their_folders(named, tmp_path):
    for folder in ("a", "b"):
        shutil.copytree(named / "fedper" / "seed0", tmp_path / folder)
    lines = (tmp_path / "b" / "clients.csv").read_text().splitlines(keepends=True)
    (tmp_path / "b" / "clients.csv").write_text("".join(lines[: 1 + len(lines) // 2]))
    with pytest.raises(CoterieError) as said:
        gather([tmp_path / "a", tmp_path / "b"])
    assert str(said.value) == (
        f"fedper with seed 0 is in {tmp_path / 'a'} and in {tmp_path / 'b'}, with other numbers; a report shows each "
        "method and seed once, so give it only one of these folders."
    )


def test_folders_of_one_name_are_told_apart_in_the_title(named, tmp_path):
    paths = [tmp_path / "a" / "cmp", tmp_path / "b" / "cmp"]
    for path, name in zip(paths, ("local", "fedper")):
        shutil.copytree(named / name / "seed0", path)
    assert gather(paths)["title"] == "a/cmp, b/cmp"
    assert gather(paths[:1])["title"] == "cmp"
