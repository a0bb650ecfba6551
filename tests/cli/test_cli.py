"""The real command in a real process: what a person types, sees and gets."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from coterie import cli, methods, registry
from coterie.cli import run as training
from coterie.errors import CoterieError
from coterie.report import catalogue
from coterie.running import checkpoint
from coterie.running.config import Training
from coterie.running.experiment import DEFAULT_PARTITION, Experiment
from coterie.running.folder import Folder

FILES = sorted(p.stem for p in Path(methods.__file__).parent.glob("*.py") if p.stem != "__init__")  # one per method
SMALL = ["--clients", "6", "--unseen", "2", "--model", "mlp:hidden=8", "--partition", "iid", "--set", "device=cpu"]


def coterie(*words, cwd, **options):
    """Run `python -m coterie` and return the finished process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    command = [sys.executable, "-m", "coterie", *map(str, words)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, **options)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    place = tmp_path_factory.mktemp("compared")
    done = coterie("compare", "fedper", "fedfew", *SMALL, "--rounds", 3, "--seeds", 2, "--out", "out", cwd=place)
    assert done.returncode == 0, done.stderr
    return place, done.stdout


def test_a_comparison_prints_every_method_and_stage_with_the_baselines(compared):
    """Local and FedAvg + fine-tune are there without asking; every column the table promises is there."""
    _, text = compared
    for name in ("local", "fedavg", "fedavg + fine-tune", "fedper", "fedfew", "served", "adapted"):
        assert name in text
    for column in ("mean", "std", "worst", "low", "Jain", "unseen", "bytes", "time"):
        assert column in text


def test_a_comparison_leaves_everything_that_ran(compared):
    place, _ = compared
    out = place / "out"
    for name in ("experiment.json", "comparison.csv", "picture.png", "clients.png", "conflicts.png"):
        assert (out / name).stat().st_size > 0, name
    runs = sorted(p.parent for p in out.glob("*/seed*/config.json"))
    assert len(runs) == 4 * 2  # local, fedavg, fedper, fedfew; two seeds
    config = json.loads((runs[0] / "config.json").read_text())
    assert config["training"]["rounds"] == 3
    assert config["environment"]["versions"]["torch"]
    for run in runs:
        assert json.loads((run / "result.json").read_text())["rounds"] == 3
        with (run / "clients.csv").open() as file:
            lines = list(csv.DictReader(file))
        # evaluations after 0 and 3 rounds, served and adapted for 6 clients and for 2 unseen ones
        assert len(lines) == 2 * 2 * (6 + 2)


def test_the_csv_agrees_with_the_clients_file(compared):
    """The mean of the last round, recomputed from the per-client records."""
    place, _ = compared
    with (place / "out" / "comparison.csv").open() as file:
        lines = [x for x in csv.DictReader(file) if x["when"] == "last" and x["stage"] == "served"]
    for line in lines:
        means = []
        for run in (place / "out" / line["method"]).iterdir():
            with (run / "clients.csv").open() as file:
                found = [x for x in csv.DictReader(file) if x["round"] == "3" and x["stage"] == "served"]
            means.append(np.mean([float(x["accuracy"]) for x in found]))
        assert float(line["mean"]) == pytest.approx(np.mean(means))


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


def in_process_shown(words, monkeypatch, capsys):
    """What a command that succeeds prints, without a new interpreter."""
    monkeypatch.setattr(sys, "argv", ["coterie", *words])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0
    return capsys.readouterr()


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


@pytest.mark.long
def test_compare_all_trains_every_method_once(tmp_path):
    """Every file of the methods' folder, next to a method that is named besides; one step each, three clients."""
    x = np.random.default_rng(0).standard_normal((90, 5)).astype(np.float32)
    np.savez(tmp_path / "tiny.npz", x=x, y=(x[:, 0] > 0).astype(np.int64))
    tiny = ["--data", "tiny.npz", "--partition", "iid", "--clients", 3, "--model", "mlp:hidden=4", "--rounds", 1,
            "--set", "batch=0", "--set", "device=cpu", "--out", "out"]
    done = coterie("compare", "--methods", "all", "--methods", "fedavg+confree", *tiny, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    wanted = sorted([*FILES, "fedavg+confree"])
    assert sorted(line.split()[0] for line in done.stdout.splitlines() if " served " in line) == wanted
    with (tmp_path / "out" / "comparison.csv").open() as file:
        lines = [x for x in csv.DictReader(file) if x["when"] == "last" and x["stage"] == "served"]
    assert sorted(line["method"] for line in lines) == wanted
    assert all(0 <= float(line["mean"]) <= 1 and line["rounds"] == "1" for line in lines)


@pytest.mark.parametrize(
    "words",
    [
        ["all", "fedavg+confree"],
        ["--methods", "ALL", "--methods", "fedavg+confree"],
        ["all", "--methods", "fedavg+confree"],
    ],
)
def test_all_is_a_word_for_the_methods_wherever_they_are_named(words, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(training, "go_on", lambda experiment, *rest, **options: seen.append(experiment.methods))
    in_process_shown(["compare", *words], monkeypatch, capsys)
    assert seen == [(*FILES, "fedavg+confree")]


def test_expand_puts_every_method_in_place_of_all_and_repeats_none():
    assert registry.expand(["all"]) == tuple(FILES)
    rest = tuple(name for name in FILES if name != "fedper")
    assert registry.expand(["fedper", "all"]) == ("fedper", *rest)  # what is named first stays first
    assert registry.expand(["all", "fedper", "fedper:personal=none"]) == (*FILES, "fedper:personal=none")
    assert registry.expand(["all", "All"]) == tuple(FILES)


def test_expand_leaves_spellings_alone():
    assert registry.expand(["mine.py:All", "fedavg+confree", "fedavg"]) == ("mine.py:All", "fedavg+confree", "fedavg")
    assert registry.expand(["ifca", "ifca"]) == ("ifca",)
    assert registry.expand([]) == ()


def test_a_toml_file_is_the_whole_experiment(tmp_path):
    (tmp_path / "e.toml").write_text(
        'data = "digits"\npartition = "dirichlet:alpha=1.0,minimum=10"\nclients = 5\nmodel = "linear"\n'
        'methods = ["fedprox:mu=0.5"]\n[training]\nrounds = 2\nlr = 0.2\nbatch = 20\n'
    )
    done = coterie("run", "--config", "e.toml", "--set", "lr=0.3", "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["method"] == "fedprox:mu=0.5"
    assert config["training"]["lr"] == 0.3  # the command line wins over the file
    assert config["training"]["batch"] == 20
    assert config["federation"]["alpha"] == 1.0  # always recorded


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


def shown_at_80(words, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    return in_process_shown([*words, "--help"], monkeypatch, capsys).out


def test_help_lists_the_commands_in_the_order_of_use_and_cuts_nothing_off(monkeypatch, capsys):
    lines = shown_at_80([], monkeypatch, capsys).partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in lines] == [
        "run", "compare", "show", "report", "watch", "resume", "advise", "data", "methods", "check", "options",
        "presets", "personalize", "export", "keys", "server", "client", "status", "bench", "textbook",
    ]
    assert not [line for line in lines if "..." in line]


def test_help_says_the_defaults_that_hold(monkeypatch, capsys):
    """Taken from the dataclasses that the commands fill in, so they are what happens without the option."""
    shown = " ".join(shown_at_80(["compare"], monkeypatch, capsys).split())
    one = Experiment()
    for flag, value in {"clients": one.clients, "unseen": one.unseen, "rounds": one.training.rounds,
                        "seeds": one.seeds, "model": one.model, "data": one.data}.items():
        said = shown.partition(f" --{flag} ")[2].partition(" --")[0]
        assert f"[default: {value}]" in said, flag
    assert f"else {DEFAULT_PARTITION}]" in shown
    assert "a new one under runs/]" in shown
    assert f"[default: {' '.join(training.DEFAULT_METHODS)}]" in shown


@pytest.mark.parametrize("name", ["run", "compare", "report", "advise", "methods", "keys"])
def test_help_explains_the_arguments_and_has_no_stray_marks(name, monkeypatch, capsys):
    """An argument's line has more than its name; a default is set in plain brackets."""
    shown = shown_at_80([name], monkeypatch, capsys)
    assert shown.lower().count("arguments:\n") == 1  # one list of them
    arguments = shown.partition("Arguments:\n")[2].partition("\n\n")[0].splitlines()
    assert all(len(line.split()) > 2 for line in arguments)
    assert "\\" not in shown


def test_data_takes_the_path_without_its_flag(tmp_path, monkeypatch, capsys):
    """Four clients of ten samples: the same words as with --data; dealt anew there are as many as asked for."""
    bad_npz(tmp_path)
    monkeypatch.chdir(tmp_path)
    plain = in_process_shown(["data", "own.npz"], monkeypatch, capsys).out
    assert plain == in_process_shown(["data", "--data", "own.npz"], monkeypatch, capsys).out
    assert "4 (4 train" in plain
    dealt = in_process_shown(["data", "own.npz", "--clients", "2", "--partition", "iid"], monkeypatch, capsys).out
    assert "2 (2 train" in dealt


@pytest.mark.parametrize("cls", [Training, Experiment])
def test_options_lists_every_option_with_default_and_meaning(cls, monkeypatch, capsys):
    """What a person can set is what the dataclass has; the training of an experiment is the other table."""
    rows = {name: (default, said) for name, default, _, said in catalogue.option_rows(cls)}
    assert list(rows) == [f.name for f in fields(cls) if f.name != "training"]
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


BAD = {
    "unknown command": (["runn", "fedfew"], "unknown command 'runn'; did you mean 'run'? `coterie --help`"),
    "unknown method": (["run", "fedfwe"], "did you mean 'fedfew'"),
    "unknown preset": (["run", "fedfew:oficial"], "did you mean 'official'"),
    "unknown page": (["methods", "fedfwe"], "unknown method or aggregator 'fedfwe'; did you mean 'fedfew'"),
    "unknown aggregator's page": (["methods", "cnfree"], "did you mean 'confree'"),
    "unknown option of an aggregator": (["methods", "confree:d=1"], "option of confree"),
    "unknown dataset": (["run", "fedavg", "--data", "digit"], "did you mean 'digits'"),
    "unknown partition": (["run", "fedavg", "--partition", "dirchlet:alpha=1"], "did you mean 'dirichlet'"),
    "unknown model": (["run", "fedavg", "--model", "mpl"], "did you mean 'mlp'"),
    "unknown option": (["run", "fedavg", "--set", "rouds=3"], "did you mean 'rounds'"),
    "another word for it": (["run", "fedavg", "--set", "learningrate=1"], "did you mean 'lr'? `coterie options`"),
    "and with a line": (["run", "fedavg", "--set", "learning_rate=1"], "did you mean 'lr'?"),
    "nothing like an option": (["run", "fedfew", "--set", "zzz=1"], "unknown option 'zzz'; `coterie options` lists"),
    "a setting is no option": (["run", "fedavg", "--set", "val=0.2"], "a setting of the experiment"),
    "unknown method option": (["run", "fedfew:model=3"], "did you mean 'models'"),
    "option of another method": (["run", "fedfew", "--set", "fedprox.mu=1"], "unknown option 'fedprox.mu'"),
    "not a number": (["run", "fedavg", "--set", "lr=fast"], "must be a number, not 'fast'"),
    "negative": (["run", "fedavg", "--set", "rounds=-1"], "rounds must be at least 0"),
    "zero seeds": (["compare", "fedavg", "--seeds", "0"], "seeds"),
    "missing alpha": (["run", "fedavg", "--partition", "dirichlet"], "needs a value for alpha"),
    "more models than clients": (["run", "fedfew:models=9", "--clients", "5", "--partition", "iid"], "there are 5"),
    "more, compared": (["compare", "ifca:models=9", "--clients", "5", "--partition", "iid"], "there are 5"),
    "head not found": (["run", "fedper", "--head", "haed", "--partition", "iid"], "did you mean 'head'"),
    "no such part": (["run", "fedper:personal=haed", "--partition", "iid"], "did you mean 'head'"),
    "missing file": (["run", "fedavg", "--data", "no.npz"], "no.npz"),
    "missing config": (["run", "--config", "no.toml"], "no.toml"),
    "a file without its class": (["run", "mine.py"], "Write mine.py:NAME"),
    "missing method file": (["run", "no.py:Mine"], "no.py"),
    "not a run": (["show", "nowhere"], "not a run folder: it does not exist"),
    "a report of a file": (["report", __file__], "is not a run folder: it is a file"),
    "resume nothing": (["resume", "nowhere"], "not a run folder"),
    "two methods": (["run"], "run trains one method"),
    "no device": (["run", "fedavg", "--set", "device=tpu9000"], "device"),
    "a client without data": (
        ["run", "fedavg", "--clients", "60", "--partition", "dirichlet:alpha=0.01,minimum=0"], "has no samples"
    ),
    "impossible partition": (["run", "fedavg", "--clients", "3000", "--partition", "dirichlet:alpha=1"], "client"),
}


def bad_npz(place: Path) -> dict[str, tuple[list[str], str]]:
    """Data files with one fault each."""
    rng = np.random.default_rng(0)
    x, y, client = rng.standard_normal((40, 3)).astype(np.float32), rng.integers(0, 2, 40), np.repeat(np.arange(4), 10)
    holed = x.copy()
    holed[13, 1] = np.nan
    below = y.copy()
    below[25] = -3
    np.savez(place / "nan.npz", x=holed, y=y, client=client)
    np.savez(place / "own.npz", x=x, y=y, client=client)
    np.savez(place / "label.npz", x=x, y=below, client=client)
    np.savez(place / "short.npz", x=x, y=y[:-1], client=client)
    np.savez(place / "empty.npz", x=x[:0], y=y[:0], client=client[:0])
    (place / "text.npz").write_text("this is no archive")
    (place / "broken.toml").write_text("rounds = = 3")
    (place / "unknown.toml").write_text("cleints = 3")
    return {
        "NaN in data": (["run", "fedavg", "--data", "nan.npz", "--model", "linear"], "client 1"),
        "label out of range": (["run", "fedavg", "--data", "label.npz", "--model", "linear"], "client 2"),
        "x and y differ": (["run", "fedavg", "--data", "short.npz", "--model", "linear"], "39"),
        "no samples": (["run", "fedavg", "--data", "empty.npz", "--model", "linear"], "no"),
        "not an archive": (["run", "fedavg", "--data", "text.npz"], "text.npz"),
        "clients of their own": (["data", "own.npz", "--clients", "50"], "the data bring 4 clients of their own"),
        "and in a run": (["run", "fedavg", "--data", "own.npz", "--clients", "50"], "so --clients does not apply"),
        "and in a pilot": (["advise", "own.npz", "--clients", "50"], "--partition dirichlet:alpha=0.5 would deal them"),
        "data named twice": (["data", "own.npz", "--data", "nan.npz"], "both name the data"),
        "broken toml": (["run", "fedavg", "--config", "broken.toml"], "broken.toml is not valid TOML"),
        "unknown setting": (["run", "fedavg", "--config", "unknown.toml"], "did you mean 'clients'"),
    }


def in_process(words, monkeypatch, capsys):
    """The command's entry point without a new interpreter: starting PyTorch for every bad word would take minutes."""
    monkeypatch.setattr(sys, "argv", ["coterie", *words])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code, capsys.readouterr().err


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence_and_exit_code_2(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words, sentence = BAD[name]
    code, said = in_process(words, monkeypatch, capsys)
    assert code == 2, said
    assert sentence in said
    assert "Traceback" not in said
    assert len(said.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists(), "bad input must not leave a run folder behind"


def test_bad_files_are_one_sentence_and_exit_code_2(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, (words, sentence) in bad_npz(tmp_path).items():
        code, said = in_process(words, monkeypatch, capsys)
        assert code == 2, (name, said)
        assert sentence in said, (name, said)
        assert len(said.strip().splitlines()) == 1, (name, said)


def test_the_exit_code_is_that_of_the_process(tmp_path):
    done = coterie("run", "fedfwe", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip() == "coterie: unknown method 'fedfwe'; did you mean 'fedfew'?"


def test_a_misspelt_flag_is_refused_too(tmp_path):
    done = coterie("run", "fedavg", "--rouds", 3, cwd=tmp_path)
    assert done.returncode == 2
    assert "--rounds" in done.stderr


def test_a_run_folder_is_never_overwritten(tmp_path):
    words = ["run", "fedavg", *SMALL, "--rounds", 1, "--out", "out"]
    assert coterie(*words, cwd=tmp_path).returncode == 0
    again = coterie(*words, cwd=tmp_path)
    assert again.returncode == 2
    assert "already holds a run" in again.stderr
    assert "choose another --out" in again.stderr


def test_damaged_checkpoints_are_named(tmp_path, monkeypatch, capsys):
    """Truncated at any of several places, or of another model: a sentence, and the file is left as it was."""
    assert coterie("run", "fedavg", *SMALL, "--rounds", 2, "--out", "out", cwd=tmp_path).returncode == 0
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "out" / "checkpoint.safetensors"
    (tmp_path / "out" / "result.json").unlink()
    whole = place.read_bytes()
    for length in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        place.write_bytes(whole[:length])
        code, said = in_process(["resume", "out"], monkeypatch, capsys)
        assert code == 2
        assert "damaged" in said
        assert len(said.strip().splitlines()) == 1
    place.write_bytes(whole)
    saved = json.loads((tmp_path / "out" / "experiment.json").read_text())
    saved["experiment"]["model"] = "mlp:hidden=9"
    (tmp_path / "out" / "experiment.json").write_text(json.dumps(saved))
    code, said = in_process(["resume", "out"], monkeypatch, capsys)
    assert code == 2
    assert "another model" in said


def start(place, *words):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "coterie", *map(str, words)], cwd=place, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )


def wait_for_rounds(path, count, process):
    for _ in range(600):
        if path.exists() and path.read_text().count('"kind": "round"') >= count:
            return
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    raise AssertionError(f"{path} never reached {count} rounds")


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_run_is_shown_and_resumed_to_the_same_rows(tmp_path, how):
    """ctrl-C and kill -9 of the real command, then show and resume: the rows of an undisturbed run, bit for bit."""
    words = ["run", "fedfew", *SMALL, "--rounds", 80, "--set", "checkpoint_every=3"]
    assert coterie(*words, "--out", "whole", cwd=tmp_path).returncode == 0
    running = start(tmp_path, *words, "--out", "cut")
    wait_for_rounds(tmp_path / "cut" / "metrics.jsonl", 12, running)
    running.send_signal(how)
    _, said = running.communicate(timeout=60)
    if how == signal.SIGINT:
        assert running.returncode == 130
        assert "resume" in said
    assert not Folder(tmp_path / "cut").finished
    shown = coterie("show", "cut", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "unfinished" in shown.stdout
    resumed = coterie("resume", "cut", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    digests = [json.loads((tmp_path / name / "result.json").read_text())["rows_sha256"] for name in ("whole", "cut")]
    assert digests[0] == digests[1]
    tensors, meta = checkpoint.load(tmp_path / "cut" / "checkpoint.safetensors")
    assert checkpoint.digest(tensors) == digests[0]
    assert meta["round"] == 80
    lines = (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(x)["round"] for x in lines if '"kind": "round"' in x] == list(range(80))  # each once


@pytest.mark.long
def test_a_comparison_goes_on_where_it_was_stopped(tmp_path):
    words = ["compare", "fedper", *SMALL, "--rounds", 40]
    assert coterie(*words, "--out", "whole", cwd=tmp_path).returncode == 0
    running = start(tmp_path, *words, "--out", "cut")
    wait_for_rounds(tmp_path / "cut" / "fedavg" / "seed0" / "metrics.jsonl", 5, running)
    running.kill()
    running.communicate()
    resumed = coterie("resume", "cut", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    for name in ("local", "fedavg", "fedper"):
        results = [json.loads((tmp_path / x / name / "seed0" / "result.json").read_text()) for x in ("whole", "cut")]
        assert results[0]["rows_sha256"] == results[1]["rows_sha256"]


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_seeds_that_share_a_stack_are_stopped_and_resumed_to_the_same_rows(tmp_path, how):
    """The seeds of fedavg run side by side when the command is stopped; both are resumed, bit for bit."""
    words = ["compare", "fedavg", *SMALL, "--seeds", 3, "--rounds", 80, "--set", "checkpoint_every=3"]
    assert coterie(*words, "--out", "whole", cwd=tmp_path).returncode == 0
    running = start(tmp_path, *words, "--out", "cut")
    wait_for_rounds(tmp_path / "cut" / "fedavg" / "seed2" / "metrics.jsonl", 12, running)
    running.send_signal(how)
    _, said = running.communicate(timeout=60)
    folders = [Folder(tmp_path / "cut" / "fedavg" / f"seed{seed}") for seed in range(3)]
    assert not any(folder.finished for folder in folders)  # they were under way together
    assert all(folder.config()["choices"]["join"].startswith("3 runs in one stack") for folder in folders)
    if how == signal.SIGINT:
        assert running.returncode == 130
        assert "resume" in said
        for folder in folders:  # each was saved after the round it was in
            assert checkpoint.load(folder.checkpoint)[1]["round"] == len(folder.rounds())
    resumed = coterie("resume", "cut", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    for path in (tmp_path / "whole").glob("*/seed*/result.json"):
        again = tmp_path / "cut" / path.relative_to(tmp_path / "whole")
        assert json.loads(again.read_text())["rows_sha256"] == json.loads(path.read_text())["rows_sha256"]
        assert [r["round"] for r in Folder(again.parent).rounds()] == list(range(80))  # each once


@pytest.mark.long
def test_bench_times_both_ways(tmp_path):
    """The small benchmark anybody can run: one line a method, with the ratio."""
    done = coterie("bench", "fedavg", "--clients", "5", "--set", "batch=100", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ratio" in done.stdout
    assert "fedavg" in done.stdout


@pytest.mark.long
def test_bench_says_what_it_cannot_compare(tmp_path):
    """A method with inner steps of its own has no published way here."""
    done = coterie("bench", "apfl", "--clients", "5", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "coterie: this method trains by steps of its own; the published way here is plain SGD.\n"
