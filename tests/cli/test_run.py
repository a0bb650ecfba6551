"""The real command in a real process: training, comparing, stopping and going on."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from commands import FILES, OF_ANY_MODEL, SMALL, as_before, coterie, exit_code, in_process, in_process_shown

from coterie.cli import run as training
from coterie.running import checkpoint
from coterie.running.experiment import Experiment
from coterie.running.folder import Folder


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


@pytest.mark.long
def test_compare_all_trains_every_method_once(tmp_path):
    """Every file of the methods' folder, next to a method that is named besides; one step each, three clients."""
    x = np.random.default_rng(0).standard_normal((90, 5)).astype(np.float32)
    np.savez(tmp_path / "tiny.npz", x=x, y=(x[:, 0] > 0).astype(np.int64))
    tiny = ["--data", "tiny.npz", "--partition", "iid", "--clients", 3, "--model", "mlp:hidden=4", "--rounds", 1,
            "--set", "batch=0", "--set", "device=cpu", "--adapter", "lora:rank=2,base=trains", "--out", "out"]
    done = coterie("compare", "--methods", "all", "--methods", "fedavg+confree", *tiny, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    wanted = sorted([*FILES, "fedavg+confree"])
    for name in ("fedexlora", "flora"):  # they add to a frozen backbone
        wanted.remove(name)
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
    assert seen == [(*OF_ANY_MODEL, "fedavg+confree")]


@pytest.mark.parametrize(("words", "methods"), [
    ([], {"local", "fedavg", "fedprox", "fedper"}),  # ifca and fedfew have 3 models each
    (["--set", "ifca.models=2"], {"local", "fedavg", "fedprox", "fedper", "ifca-models-2"}),
])
def test_the_usual_comparison_leaves_out_what_two_clients_cannot_run(words, methods, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    two = ["--clients", 2, "--partition", "iid", "--model", "linear", "--rounds", 1]
    code, said = in_process(["compare", *two, *words, "--set", "device=cpu", "--out", "out"], monkeypatch, capsys)
    assert code == 0, said
    assert {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()} == methods
    left_out = "fedfew is left out of the usual comparison: it has 3 models for 2 clients; `coterie compare "
    assert left_out in " ".join(said.split())
    assert ("ifca is left out" in said) == (not words)
    code, said = in_process(["compare", "ifca", *two, "--out", "typed"], monkeypatch, capsys)
    assert code == 2
    assert "there are 2: write ifca:models=2, or name the other methods without it." in " ".join(said.split())


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
    as_before(tmp_path / "out" / "experiment.json", lambda values: values["experiment"].update(model="mlp:hidden=9"))
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
    assert all(folder.config()["choices"]["together"].startswith("3 runs in one stack") for folder in folders)
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


# -- metrics ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("watch", [
    ["--watch", "f1", "auroc"], ["--watch", "f1", "--watch", "auroc"], ["--watch", "f1,auroc"],
    ["--set", "watch=f1,auroc"],
])
def test_metrics_are_named_once_after_watch_or_with_commas(watch, monkeypatch, tmp_path):
    """Words after --watch that name metrics are metrics; the word that follows them and names none is a method."""
    seen = {}
    monkeypatch.setattr(training, "go_on", lambda experiment, *given, **options: seen.update(one=experiment))
    words = ["compare", "fedper", "--metric", "balanced_accuracy", *watch, *([] if "=" in watch[-1] else ["ifca"])]
    assert exit_code(monkeypatch, *words, "--out", tmp_path / "out") == 0
    assert seen["one"].training.metric == "balanced_accuracy"
    assert seen["one"].training.watch == ("f1", "auroc")
    assert seen["one"].methods == (("fedper",) if "=" in watch[-1] else ("fedper", "ifca"))


@pytest.mark.parametrize(("words", "said"), [
    (["--metric", "r2"], "r2 scores numbers, but the labels of these data are 10 classes"),
    (["--watch", "top_k(k=10)"], "below the 10 classes of these data, not 10; write top_k(k=9)"),
    (["--metric", "recall"], "cannot decide between rounds; watch it (--watch recall)"),
    (["--metric", "acuracy"], "unknown metric 'acuracy'; did you mean 'accuracy'?"),
    (["--metric", "nobody.py:Mine"], "there is no file"),
])
def test_a_metric_that_cannot_score_the_data_is_refused_before_anything_is_written(
    words, said, monkeypatch, capsys, tmp_path
):
    monkeypatch.chdir(tmp_path)
    code, text = in_process(["run", "fedavg", *SMALL, *words, "--out", "out"], monkeypatch, capsys)
    assert code == 2
    assert said in text.replace("\n", " ")
    assert not (tmp_path / "out").exists()


def test_a_file_for_config_names_metrics_as_seen_from_its_own_folder(monkeypatch, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "own.toml").write_text(
        'methods = ["fedavg"]\n[training]\nmetric = "mine.py:Mine(p=2)"\nwatch = ["f1", "mine.py:Mine"]\n'
    )
    monkeypatch.chdir(tmp_path)
    read = Experiment.read(Path("sub/own.toml")).training
    assert read.metric == f"{tmp_path}/sub/mine.py:Mine(p=2)"
    assert read.watch == ("f1", f"{tmp_path}/sub/mine.py:Mine")
