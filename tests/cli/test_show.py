"""What a person sees of results, data, methods and options."""

import csv
import json
import shutil
from dataclasses import fields

import numpy as np
import pytest
from commands import FILES, coterie, in_process_shown

from coterie import registry
from coterie.errors import CoterieError
from coterie.report import catalogue
from coterie.running.experiment import Experiment
from coterie.running.folder import Folder
from coterie.running.training import Training


def test_show_prints_the_same_table(compared):
    place, text = compared
    shown = coterie("show", "out", cwd=place)
    assert shown.returncode == 0, shown.stderr
    row = next(line for line in text.splitlines() if line.strip().startswith("fedfew"))
    assert row.split()[:4] == next(x for x in shown.stdout.splitlines() if x.strip().startswith("fedfew")).split()[:4]
    title, heads, _, *worst = shown.stdout.rstrip().splitlines()[-6:]  # it ends with the three clients served worst
    assert title.startswith("served worst by ")
    assert heads.split()[:3] == ["client", "test", "samples"]
    with (place / "out" / "local" / "seed0" / "clients.csv").open() as file:
        samples = {int(x["client"]): x["samples"] for x in csv.DictReader(file) if x["stage"] == "served"}
    names = json.loads((place / "out" / "local" / "seed0" / "config.json").read_text())["clients"]
    assert {tuple(line.split()[:2]) for line in worst} <= {(names[i], n) for i, n in samples.items()}
    assert len(worst) == 3


def test_show_prints_one_run_of_a_comparison_and_the_python_api_names_them(compared, monkeypatch, capsys):
    """It has no experiment.json, like the folders that coterie.run writes."""
    place, _ = compared
    shown = in_process_shown(["show", str(place / "out" / "fedper" / "seed0")], monkeypatch, capsys).out
    assert "fedper" in shown
    assert "fedfew" not in shown
    with pytest.raises(CoterieError, match=r"holds 8 runs; name one of them, e\.g\. .*seed"):  # 4 methods, 2 seeds
        Folder(place / "out").result()


def test_show_prints_markdown_with_the_numbers_of_the_table(compared, monkeypatch, capsys):
    """Two tables of the methods, and cell by cell the terminal's rows, whose second cell is the stage."""
    place, text = compared
    shown = in_process_shown(["show", str(place / "out"), "--markdown"], monkeypatch, capsys)
    cells = [[c.strip(" *") for c in x.strip("|").split("|")] for x in shown.out.splitlines() if x.startswith("|")]
    assert [row[0] for row in cells] == [
        "method", "---", "local", "fedavg", "fedper", "fedfew",
        "method", "---", "local", "fedavg + fine-tune", "fedper", "fedfew",
    ]
    titles = ["method", "mean ± seeds", "std", "worst", "low10", "Jain", "unseen", "bytes", "time", "round"]
    assert cells[0] == cells[6] == titles
    for block, stage in ((cells[2:6], "served"), (cells[8:], "adapted")):
        for name, *numbers in block:
            assert " ".join([name, stage, *numbers]) in [" ".join(line.split()) for line in text.splitlines()]
    assert shown.err == ""


def test_markdown_of_an_unfinished_comparison_says_so_beside_the_tables(compared, tmp_path, monkeypatch, capsys):
    """What is redirected into a document holds tables only."""
    shutil.copytree(compared[0] / "out", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "fedper" / "seed1")
    monkeypatch.chdir(tmp_path)
    shown = in_process_shown(["show", "cut", "--markdown"], monkeypatch, capsys)
    assert "unfinished: 1 of 8 runs" in shown.err  # local, fedavg, fedper, fedfew with two seeds each
    assert "unfinished" not in shown.out
    assert "| fedper |" in shown.out


def test_methods_lists_and_explains(tmp_path):
    listed = coterie("methods", cwd=tmp_path).stdout
    for name in [*FILES, *registry.aggregators()]:
        # indented at the start of a line: a method in both its tables, an aggregator in its one
        found = [line for line in listed.splitlines() if line.startswith(f"  {name} ")]
        assert len(found) == (2 if name in FILES else 1), name
    assert max(map(len, listed.splitlines())) <= 118
    page = coterie("methods", "fedfew", cwd=tmp_path).stdout
    assert "models" in page
    assert "official" in page


@pytest.mark.parametrize("cls", [*registry.methods().values(), *registry.aggregators().values()])
def test_every_option_of_a_method_or_aggregator_is_explained(cls):
    said = catalogue.explained(cls)
    assert [name for name in catalogue.own_options(cls()) if not said.get(name, "").endswith(".")] == []


def test_methods_explains_an_aggregator_too(monkeypatch, capsys):
    page = in_process_shown(["methods", "krum:faulty=2"], monkeypatch, capsys).out
    assert "fewest clients  7" in page  # 2 faulty + 3
    assert "Blanchard" in page


def test_methods_prints_the_catalogue_as_markdown(monkeypatch, capsys):
    assert in_process_shown(["methods", "--markdown"], monkeypatch, capsys).out == catalogue.markdown()
    one = in_process_shown(["methods", "confree", "--markdown"], monkeypatch, capsys).out
    assert one.startswith("### confree\n")
    assert one in catalogue.markdown()


def test_data_takes_the_path_without_its_flag(tmp_path, monkeypatch, capsys):
    """Four clients of ten samples: the same words as with --data; dealt anew there are as many as asked for."""
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "own.npz", x=rng.standard_normal((40, 3)), y=rng.integers(0, 2, 40), client=np.arange(40) // 10)
    monkeypatch.chdir(tmp_path)
    plain = in_process_shown(["data", "own.npz"], monkeypatch, capsys).out
    assert plain == in_process_shown(["data", "--data", "own.npz"], monkeypatch, capsys).out
    assert "4 (4 train" in plain
    dealt = in_process_shown(["data", "own.npz", "--clients", "2", "--partition", "iid"], monkeypatch, capsys).out
    assert "2 (2 train" in dealt


@pytest.mark.parametrize("cls", [Training, Experiment])
def test_options_lists_every_option_with_default_and_meaning(cls, monkeypatch, capsys):
    """What a person can set is what the dataclass has; the training of an experiment is the other table."""
    rows = {name: (default, said) for name, default, said in catalogue.option_rows(cls)}
    own = [f.name for f in fields(cls) if f.metadata.get("option", True)]
    assert list(rows) == [name for name in own if name != "training"]
    assert all(said for _, said in rows.values())
    shown = in_process_shown(["options"], monkeypatch, capsys).out
    for name, (default, _) in rows.items():
        assert any(line.split()[:2] == [name, default] for line in shown.splitlines()), name
    assert max(map(len, shown.splitlines())) <= 118
    assert in_process_shown(["options", "--markdown"], monkeypatch, capsys).out == catalogue.option_markdown()


def test_data_fits_one_screen_and_draws(tmp_path):
    done = coterie("data", "--clients", 30, "--unseen", 3, "--partition", "iid", "--picture", "p.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) <= 24
    assert "--each lists the clients" in done.stdout
    assert (tmp_path / "p.png").stat().st_size > 1000


def test_a_table_without_clients_says_that_they_are_made_up(tmp_path):
    (tmp_path / "t.csv").write_text("a,label\n" + "".join(f"{k % 7},{k % 2}\n" for k in range(80)))
    done = coterie("data", "--data", "t.csv", "--clients", 4, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "dealt to 4 made-up clients (dirichlet); client=COLUMN names the clients" in done.stderr


def test_data_lists_who_holds_what(tmp_path):
    """Two sites with 10 samples each; their classes are counted by name, over all splits."""
    rows = [f"{k},{site},{'ill' if k % 5 else 'well'}" for site in ("north", "south") for k in range(10)]
    (tmp_path / "t.csv").write_text("\n".join(["a,site,outcome", *rows]))
    done = coterie("data", "--data", "t.csv:label=outcome,client=site", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["client", "train", "val", "test", "ill", "well"] in lines
    assert [line[0::4] for line in lines if line[:1] == ["north"]] == [["north", "8"]]
    assert "2 classes: ill, well" in done.stdout


@pytest.mark.parametrize("each", [False, True])
def test_data_lists_the_features_and_points_to_an_id(tmp_path, monkeypatch, capsys, each):
    drawn = np.random.default_rng(0).normal(50, 10, (60, 60)).round(3)
    lines = [",".join(["id", *(f"f{k}" for k in range(60)), "client", "label"])]
    lines += [",".join([str(k), *map(str, row), "abc"[k % 3], str(k % 2)]) for k, row in enumerate(drawn)]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    shown = in_process_shown(["data", str(tmp_path / "t.csv"), *(["--each"] if each else [])], monkeypatch, capsys)
    assert "feature  type           range                     missing" in shown.out
    assert "id       whole number   0 to 59                         -" in shown.out
    assert f"f0       number         {drawn[:, 0].min():g} to {drawn[:, 0].max():g}" in shown.out
    assert ("and 21 more features; --each lists all of them" in shown.out) != each
    assert ("\nf59 " in shown.out) == each
    assert "ignore=id" in shown.err
    table = shown.out[shown.out.index("feature  type") :]
    assert max(len(line) for line in table.splitlines()) <= 80


def test_data_shows_features_of_every_kind_and_groups_by_split(tmp_path, monkeypatch, capsys):
    rows = "".join(f"good day {k},w{k // 4},{k % 2}\n" for k in range(40))
    (tmp_path / "t.csv").write_text(f"said,who,label\n{rows}")
    shown = in_process_shown(["data", f"{tmp_path / 't.csv'}:text=said,length=8,group=who", "--clients", "2",
                              "--partition", "iid"], monkeypatch, capsys)
    assert "said     text           8 inputs" in shown.out
    groups = next(line for line in shown.out.splitlines() if line.startswith("groups"))
    assert groups.split(":")[0].split() == ["groups", "10"]
    assert "none on two sides" in " ".join(shown.out.split())
    np.savez(tmp_path / "a.npz", x=np.zeros((8, 6, 5, 3), np.uint8), y=np.arange(8) % 2, client=np.repeat([0, 1], 4))
    shown = in_process_shown(["data", str(tmp_path / "a.npz")], monkeypatch, capsys)
    assert "channel 2  image 6x5      -1 everywhere (constant)" in shown.out
