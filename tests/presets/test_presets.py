"""Every preset is a sound experiment; one for each data set runs whole, from files in the set's original format."""

from __future__ import annotations

import inspect
import json
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import published_sets as made
import pytest

import coterie
from coterie import cli, models, presets
from coterie.data import PARTITIONS, published
from coterie.errors import CoterieError
from coterie.options import parse_options
from coterie.running.experiment import Experiment

PAPERS = [name for name in presets.names() if not name.endswith(presets.RELEASED)]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", presets.names())
def test_every_name_in_a_preset_exists(name):
    """Data set, partition, model and methods are known, and every printed number belongs to a method that runs."""
    one = presets.load(name)
    assert one.about
    data, options = parse_options(one.data)
    assert set(options) <= set(inspect.signature(published.SETS[data].read).parameters)
    kind, options = parse_options(one.partition)
    assert set(options) <= (set() if kind == "natural" else set(inspect.signature(PARTITIONS[kind]).parameters))
    model, options = parse_options(one.model)
    assert set(options) <= set(inspect.signature(models.MODELS[model]).parameters)
    chosen = {f"{m.name}" + ("" if m.aggregator.name == "mean" else f"+{m.aggregator.name}") for m in one.chosen()}
    assert set(one.published) <= chosen | {"local", "fedavg"}
    assert len(chosen) == len(one.methods)
    assert all(re.fullmatch(r"\d+\.\d\d(±\d+\.\d\d)?( \(\d+\.\d\d to \d+\.\d\d\))?", v) for v in one.published.values())


@pytest.mark.parametrize("name", [name for name in presets.names() if name.endswith(presets.RELEASED)])
def test_a_released_variant_differs_and_has_no_validation(name):
    paper, program = presets.load(name.removesuffix(presets.RELEASED)), presets.load(name)
    assert paper.methods != program.methods
    assert (paper.val, program.val) == (0.1, 0.0)
    assert paper.published == program.published


@pytest.mark.parametrize("name", [name for name in presets.names() if name.startswith("cwfedavg/")])
def test_cwfedavg_estimates_label_shares_as_paper_and_program_do(name):
    (chosen,) = [m for m in presets.load(name).chosen() if m.name == "cwfedavg"]
    assert chosen.distribution == "approx"


def test_the_presets_say_what_the_papers_say():
    """A few settings and numbers from the papers, so that a slip in a common file is seen."""
    one, program = (presets.load(f"fedfew/cifar100-dirichlet-20{end}") for end in ("", "-released"))
    assert (one.clients, one.partition, program.partition) == (20, "dirichlet:alpha=0.5", "dirichlet:alpha=0.1")
    assert (one.training.rounds, one.training.batch, one.training.lr, one.training.epochs) == (2000, 50, 0.005, 1)
    assert one.published["fedfew"] == "53.69±4.79"
    assert "fedfew:official" in program.methods
    tiny, text = presets.load("fedfew/tinyimagenet-dirichlet-10"), presets.load("fedfew/agnews-dirichlet-20")
    assert (tiny.training.lr, text.training.batch, text.model) == (0.0005, 100, "textcnn")
    kvasir, isic = presets.load("fedfew/kvasir-dirichlet-5"), presets.load("fedfew/fedisic2019")
    assert (kvasir.training.rounds, kvasir.training.batch, kvasir.training.lr, kvasir.clients) == (1000, 100, 0.002, 5)
    assert isic.published["local"] == "65.37±17.23 (41.08 to 94.54)"
    assert presets.load("fedfew/cifar100-pathological-20").partition.endswith("=2")
    assert presets.load("fedfew/cifar100-pathological-20-released").partition.endswith("=10")
    wise = presets.load("cwfedavg/tinyimagenet-dirichlet-20-resnet18")
    assert (wise.model, wise.training.rounds, wise.published["cwfedavg"]) == ("resnet18", 1000, "43.51")
    assert "cwfedavg:lam=2000" in wise.methods
    flowers, program = (presets.load(f"confree/flowers102-pathological-20{end}") for end in ("", "-released"))
    assert (flowers.test, program.test, flowers.seeds, flowers.training.rounds) == (0.3, 0.25, 3, 500)
    assert flowers.published["fedpac+confree"] == "74.68"
    part = presets.load("confree/cifar100-dirichlet-60-participation-30")
    assert (part.clients, part.training.participation, part.published["fedala"]) == (60, 0.3, "58.01")
    assert (len(PAPERS), len(presets.names())) == (37, 74)  # 11 + 12 + 14 columns


def test_an_unknown_preset_suggests_the_nearest():
    with pytest.raises(CoterieError, match="did you mean 'fedfew/cifar100-dirichlet-20'"):
        presets.load("fedfew/cifar100-dirichlet20")


def test_a_printed_preset_is_the_same_experiment(tmp_path):
    """`coterie presets NAME` writes a file that --config reads to the same values."""
    for name in ("fedfew/femnist-20-released", "confree/flowers102-dirichlet-60-participation-30"):
        path = tmp_path / "one.toml"
        path.write_text(presets.text(name))
        assert Experiment.read(path) == presets.load(name)


def test_a_file_may_extend_another(tmp_path):
    (tmp_path / "base.toml").write_text('model = "linear"\nclients = 7\n[training]\nrounds = 3\nlr = 0.5\n')
    top = 'extends = "base.toml"\nclients = 9\n[training]\nlr = 0.1\n[released]\nval = 0.0\n'
    (tmp_path / "top.toml").write_text(top)
    one = Experiment.read(tmp_path / "top.toml")
    assert (one.model, one.clients, one.training.rounds, one.training.lr, one.val) == ("linear", 9, 3, 0.1, 0.1)
    assert Experiment.read(tmp_path / "top.toml", released=True).val == 0.0
    (tmp_path / "self.toml").write_text('extends = "self.toml"\n')
    with pytest.raises(CoterieError, match="at most four in a row"):
        Experiment.read(tmp_path / "self.toml")
    (tmp_path / "lost.toml").write_text('extends = "nowhere.toml"\n')
    with pytest.raises(CoterieError, match="cannot be read"):
        Experiment.read(tmp_path / "lost.toml")


def told(words, monkeypatch, capsys):
    """What a command prints, and its exit code."""
    monkeypatch.setattr(sys, "argv", ["coterie", *map(str, words)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code, capsys.readouterr()


RUNS = {  # data set -> a preset, and what makes it small enough for a test
    "cifar10": ("fedfew/cifar10-dirichlet-10", ["fedfew:models=2", "--clients", "2"]),
    "cifar100": ("confree/cifar100-pathological-20", ["fedrep+confree", "--clients", "4", "--seeds", "1"]),
    "mnist": ("cwfedavg/mnist-pathological-20", ["cwfedavg:lam=10", "--clients", "5"]),
    "femnist": ("fedfew/femnist-20", ["ifca:models=2"]),
    "femnist-by-class": ("fedfew/femnist-20-released", ["fedrep:pfllib"]),
    "tinyimagenet": ("fedfew/tinyimagenet-dirichlet-10", ["fedprox", "--clients", "3"]),
    "agnews": ("fedfew/agnews-dirichlet-20-released", ["apfl:pfllib", "--clients", "3"]),
    "kvasir": ("fedfew/kvasir-dirichlet-5", ["fedrep", "--clients", "2"]),
    "flowers102": ("confree/flowers102-dirichlet-20", ["fedpac", "--clients", "3", "--seeds", "1"]),
    "fedisic2019": ("fedfew/fedisic2019", ["fedavg"]),
}
MODELS = {"agnews": "fasttext:features=4,vocabulary=200"}


@pytest.mark.parametrize("data", ["cifar10", "cifar100"])
def test_a_preset_is_one_command(data, tmp_path, monkeypatch, capsys):
    """The whole command, one round; the paper's numbers stand beside ours, there and in `coterie show`."""
    name, words = RUNS[data]
    one = presets.load(name)
    made.WRITERS[data](tmp_path / "sets")
    monkeypatch.chdir(tmp_path)
    small = ["--data-dir", "sets", "--rounds", "1", "--model", MODELS.get(data, "linear"), "--set", "device=cpu"]
    code, said = told(["compare", "--preset", name, *words, *small, "--out", "out"], monkeypatch, capsys)
    assert code == 0, said.err
    assert len(list((tmp_path / "out").glob("*/seed0/result.json"))) == 3  # the method, local and fedavg
    record = json.loads((tmp_path / "out" / "experiment.json").read_text())["experiment"]
    assert record["published"] == one.published
    assert record["training"]["lr"] == one.training.lr
    assert Path(record["data_dir"]) == tmp_path / "sets"
    code, shown = told(["show", "out"], monkeypatch, capsys)
    assert code == 0
    for text in (said.out, shown.out):
        assert "the paper's numbers, on its own split of the data" in text
        method = words[0].partition(":")[0]
        assert re.search(rf"{re.escape(method)} +{re.escape(one.published[method])} ", text)


@pytest.mark.parametrize("data", sorted(set(RUNS) - {"cifar10", "cifar100"}))
def test_a_preset_runs_from_the_original_files(data, tmp_path):
    """What the command does between reading its words and drawing: data, model, one round of a method."""
    name, words = RUNS[data]
    one = presets.load(name)
    assert parse_options(one.data)[0] == data
    assert words[0] in one.methods or words[0].partition(":")[0] in ("ifca", "fedavg")
    made.WRITERS[data](tmp_path)
    clients = int(words[words.index("--clients") + 1]) if "--clients" in words else one.clients
    one = replace(one, data_dir=str(tmp_path), clients=clients, model=MODELS.get(data, "linear"))
    federation = one.federation()
    assert federation.recipe["data"] == one.data
    training = {**asdict(one.training), "rounds": 1, "device": "cpu"}
    result = coterie.run(words[0], one.factory(federation), federation, **training)
    assert np.isfinite(result.at("adapted").test["loss"]).all()


def test_missing_files_and_contradictions_are_sentences(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for words, says in (
        (["compare", "--preset", "fedfew/cifar100-dirichlet-20", "--data-dir", "."], "cifar100 is not in '.'"),
        (["compare", "--preset", "fedfew/cifar100-dirichlet-20"], "name their folder with --data-dir"),
        (["run", "--preset", "fedfew/cifar99"], "unknown preset 'fedfew/cifar99'"),
        (["compare", "--preset", "fedfew/fedisic2019", "--config", "x.toml"], "--config and --preset both"),
    ):
        code, said = told(words, monkeypatch, capsys)
        assert code == 2
        assert says in said.err
        assert not list(tmp_path.iterdir())


def test_the_listing_and_the_page(monkeypatch, capsys):
    code, said = told(["presets"], monkeypatch, capsys)
    assert code == 0
    assert len(said.out.splitlines()) == 74
    assert "FedFew, table 1: CIFAR-100, Dirichlet 0.5, 20 clients" in said.out
    page = (ROOT / "docs" / "presets.md").read_text(encoding="utf-8")
    assert presets.markdown() in page, "run `coterie presets --markdown` and put its table into docs/presets.md"
