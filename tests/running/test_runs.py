"""Runs that are killed, interrupted, or have no room on the disk; and the ten lines a user writes."""

import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
import torch
from torch import nn

import coterie
from coterie import registry
from coterie.errors import CoterieError
from coterie.evaluation.summary import chosen_round
from coterie.registry import respelled
from coterie.running import checkpoint
from coterie.running.folder import Folder


def clients(count=5, seed=0):
    rng = np.random.default_rng(seed)
    sizes = range(12, 12 + 4 * count, 4)
    return [(rng.standard_normal((n, 4)).astype(np.float32), rng.integers(0, 3, n)) for n in sizes]


def model():
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.2), nn.ReLU(), nn.Linear(6, 3))


OPTIONS = {"rounds": 60, "lr": 0.1, "participation": 0.8, "evaluate_every": 7, "checkpoint_every": 4, "device": "cpu"}


def train(folder, resume=False, method="fedper"):
    federation = coterie.Federation.from_clients(clients(), unseen=1)
    return coterie.run(method, model, federation, folder=folder, resume=resume, **OPTIONS)


def in_a_process(work):
    """Fork and do the work there; the parent gets the process number. It is a real process that a signal can end."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return child


def ended(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.long
def test_killed_at_20_random_moments_and_resumed_to_the_same_rows(tmp_path):
    """kill -9 anywhere between the first file and the last: resuming gives the bits of the undisturbed run."""
    if torch.cuda.is_initialized():
        pytest.skip("a process that has used CUDA cannot be forked; run this test alone")
    started = time.monotonic()
    assert ended(in_a_process(lambda: train(tmp_path / "whole"))) == 0
    seconds = time.monotonic() - started
    expected = json.loads((tmp_path / "whole" / "result.json").read_text())["rows_sha256"]
    draw = random.Random(4)
    cut_short = 0
    for trial in range(60):  # a kill that comes after the end tests nothing and does not count
        if cut_short == 20:
            break
        folder = tmp_path / f"cut{trial}"
        child = in_a_process(lambda folder=folder: train(folder))
        time.sleep(draw.uniform(0.02, 0.9) * seconds)
        os.kill(child, signal.SIGKILL)
        cut_short += ended(child) == -signal.SIGKILL and not Folder(folder).finished
        begun = (folder / "config.json").exists()
        assert ended(in_a_process(lambda folder=folder, begun=begun: train(folder, resume=begun))) == 0
        assert json.loads((folder / "result.json").read_text())["rows_sha256"] == expected
        rounds = [record["round"] for record in Folder(folder).rounds()]
        assert rounds == list(range(60))
        assert [e.round for e in Folder(folder).history()] == [0, 7, 14, 21, 28, 35, 42, 49, 56, 60]
    assert cut_short == 20


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 400 kB, as full as a test wants it; needs the right to mount."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", place], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system is not allowed here")
    yield place
    subprocess.run(["umount", place], check=True)


def fill(place):
    handle = os.open(place / "filler", os.O_WRONLY | os.O_CREAT)
    try:
        while os.write(handle, b"x" * 4096):
            pass
    except OSError as reason:
        assert reason.errno == errno.ENOSPC  # noqa: PT017 (the loop ends here)
    finally:
        os.close(handle)


def test_a_full_disk_is_a_sentence_and_the_previous_checkpoint_survives(small_disk):
    path = small_disk / "checkpoint.safetensors"
    old = {"row": torch.arange(20_000, dtype=torch.float32)}
    checkpoint.save(path, old, {"round": 1})
    fill(small_disk)
    with pytest.raises(CoterieError, match=r"could not be written.*the previous checkpoint is intact"):
        checkpoint.save(path, {"row": torch.zeros(40_000)}, {"round": 2})
    tensors, meta = checkpoint.load(path)
    assert torch.equal(tensors["row"], old["row"])
    assert meta["round"] == 1
    assert sorted(p.name for p in small_disk.iterdir()) == ["checkpoint.safetensors", "filler"]


def test_a_run_that_meets_a_full_disk_can_be_resumed(small_disk, tmp_path):
    """The run stops with a sentence; with room again it ends with the rows of an undisturbed run."""
    train(tmp_path / "whole")
    folder = small_disk / "run"
    (small_disk / "filler").write_bytes(b"x" * 376_000)
    with pytest.raises(CoterieError, match="could not be written"):
        train(folder)
    assert (folder / "checkpoint.safetensors").exists()
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    train(moved, resume=True)
    digests = [json.loads((f / "result.json").read_text())["rows_sha256"] for f in (tmp_path / "whole", moved)]
    assert digests[0] == digests[1]


def test_a_file_size_limit_leaves_the_previous_checkpoint(tmp_path):
    """The same without mounting: the system refuses files over 50 kB while the second checkpoint is written."""
    path = tmp_path / "checkpoint.safetensors"
    checkpoint.save(path, {"row": torch.ones(1000)}, {"round": 1})

    def refused():
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        with pytest.raises(CoterieError, match="previous checkpoint is intact"):
            checkpoint.save(path, {"row": torch.zeros(40_000)}, {"round": 2})

    assert ended(in_a_process(refused)) == 0
    assert checkpoint.load(path)[1]["round"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.safetensors"]


def test_a_comparison_whose_last_method_cannot_draw_its_models_ends_before_its_first_round():
    """Not after the hours that the others take."""

    def fixed():
        torch.manual_seed(0)
        return model()

    federation, told = coterie.Federation.from_clients(clients()), []
    with pytest.raises(CoterieError, match="3 models are to be drawn independently"):
        coterie.compare(["fedavg", "ifca"], fixed, federation, rounds=1, device="cpu", watch=told.append)
    assert not told


def test_early_stopping_ends_at_the_patience_and_reports_the_best_round():
    """Full-batch regression on noise overfits: after the best validation score come exactly `patience` evaluations."""
    rng = np.random.default_rng(3)
    noise = [(rng.standard_normal((24, 12)).astype(np.float32), rng.integers(0, 2, 24)) for _ in range(4)]
    federation = coterie.Federation.from_clients(noise, val=0.3)
    result = coterie.run("local", lambda: nn.Linear(12, 2), federation, rounds=400, lr=1.0, batch=0, evaluate_every=1,
                         patience=3)
    assert result.history[-1].round < 400
    best = chosen_round(result.history)
    assert result.history[-1].round == best + 3
    assert result.round_of("served") == best


def test_ten_lines_of_python_end_in_a_model_for_a_client():
    """The deployed module scores what the evaluator scored for that client."""
    data = clients()
    federation = coterie.Federation.from_clients(data, unseen=1)
    result = coterie.run("fedfew:models=2", model, federation, rounds=5, lr=0.1, device="cpu")
    for client in (0, 4):
        stage = "served" if client < 4 else "unseen_served"
        scores = result.at(stage, "last")
        x, y = federation.client(client, "test")
        accuracy = (result.model_for(client)(x).argmax(1) == y).double().mean().item()
        assert accuracy == pytest.approx(scores.test["accuracy"][list(scores.clients).index(client)])
    named = result.model_for(federation.names[2])
    assert torch.equal(named(x), result.model_for(2)(x))
    with pytest.raises(CoterieError, match="unknown client '9'"):
        result.model_for(9)


def test_a_pretrained_module_is_where_training_starts():
    """A module (not a factory) is used as it is given; only further models of a set are drawn anew."""
    torch.manual_seed(0)
    given = model()
    federation = coterie.Federation.from_clients(clients())
    start = coterie.run("fedavg", given, federation, rounds=0, device="cpu").model_for(0)
    for ours, theirs in zip(start.parameters(), given.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    few = coterie.run("fedfew", given, federation, rounds=0, device="cpu").simulation.server.state.rows
    assert torch.equal(few[0], coterie.Layout.of(given).row(given))
    assert not torch.equal(few[0], few[1])


def test_the_same_seed_gives_the_same_rows_and_another_seed_others(tmp_path):
    federation = coterie.Federation.from_clients(clients())
    runs = [coterie.run("fedavg", model, federation, rounds=3, seed=seed, device="cpu") for seed in (1, 1, 2)]
    rows = [result.simulation.server.state.row for result in runs]
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])


@pytest.mark.parametrize("spec", ["fedfew:normalise=true", "fedfew:scale=false+median:weighted=false", "fedper"])
def test_spellings_have_true_and_false_as_people_type_them_and_read_both(spec):
    """What is typed is what is shown; spellings of older runs, with Python's words, mean the same method."""
    assert registry.spelling(registry.method(spec)) == spec
    old = spec.replace("=true", "=True").replace("=false", "=False")
    assert registry.method(old) == registry.method(spec)
    assert respelled(old) == respelled(spec) == spec


def test_a_comparison_of_the_older_spelling_is_read_and_resumed_in_its_folders(tmp_path):
    """Its folder and config say True. The finished seed is kept, the open one goes on beside it: one method."""
    federation = coterie.Federation.from_clients(clients())
    options = {"rounds": 2, "seeds": 2, "folder": tmp_path, "device": "cpu"}
    spec = "fedfew:models=2,normalise=true"
    first = coterie.compare([spec], model, federation, **options)
    old = tmp_path / "fedfew-models-2-normalise-True"
    (tmp_path / "fedfew-models-2-normalise-true").rename(old)
    for config in old.glob("seed*/config.json"):
        config.write_text(config.read_text().replace("normalise=true", "normalise=True"))
    kept = (old / "seed0" / "result.json").stat().st_mtime_ns
    digest = json.loads((old / "seed1" / "result.json").read_text())["rows_sha256"]
    shutil.rmtree(old / "seed1")

    again = coterie.compare([spec], model, federation, resume=True, **options)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fedavg", "fedfew-models-2-normalise-True", "local"]
    assert (old / "seed0" / "result.json").stat().st_mtime_ns == kept
    assert json.loads((old / "seed1" / "result.json").read_text())["rows_sha256"] == digest
    assert [r.method for r in again] == [r.method for r in first]
    assert [Folder(old / f"seed{seed}").result().method for seed in (0, 1)] == [spec, spec]
