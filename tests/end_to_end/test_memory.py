"""Memory follows the data, and where it runs out a run says what fits and goes on with that."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from coterie import memory
from coterie.errors import NoMemory
from coterie.running import checkpoint

pytestmark = [
    pytest.mark.long, pytest.mark.skipif(sys.platform != "linux", reason="limits and peaks as Linux has them"),
]

UNEVEN = """
import sys
import numpy as np, torch
from torch import nn
import coterie
import coterie.running.runs

def peak():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024

sizes = [1_000_000] + [10] * 999
x = torch.randn(sum(sizes), 6, generator=torch.Generator().manual_seed(0))
ends = np.cumsum(sizes)
owned = [np.arange(end - size, end) for end, size in zip(ends, sizes)]
data = coterie.Federation.from_assignment(x, (x[:, 0] > 0).long(), owned, classes=2)
del x
base = peak()
result = coterie.run(
    "fedavg", lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)), data, rounds=1, lr=0.1, batch=100,
    device="cpu",
)
assert result.at("served").test["accuracy"].mean() > 0.9
print(peak() - base)
"""

LIMITED = """
import resource, sys
import torch
import coterie.report.pictures, coterie.running.runs
from coterie.cli.app import main

torch.randn(600, 600) @ torch.randn(600, 600)  # the threads and their stacks
torch.func.vmap(torch.func.grad(lambda x: x.sum()))(torch.ones(2, 2))
if int(sys.argv[1]):
    now = int(open("/proc/self/status").read().split("VmSize:")[1].split()[0]) >> 10
    resource.setrlimit(resource.RLIMIT_AS, ((now + int(sys.argv[1])) << 20,) * 2)
sys.argv = ["coterie", *sys.argv[2:]]
main()
"""


def python(code, *words):
    alone = {**os.environ, "MALLOC_ARENA_MAX": "1"}  # else a thread takes 64 MB of addresses more or less by chance
    return subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, env=alone)


def test_a_client_with_a_million_samples_beside_small_ones_costs_its_samples():
    """The data are 32 MB. One table of 256 clients times the steps of the largest took 5.7 GB here."""
    done = python(UNEVEN)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) <= 400


def rows_in(folder):
    return json.loads((folder / "result.json").read_text())["rows_sha256"]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """64 clients whose training takes 950 to 1,100 MB at once and 250 to 450 MB four at a time, as the heap
    happens to be cut up: what one batch of 288 samples becomes in a layer of 4,096 is most of it."""
    data = tmp_path_factory.mktemp("data") / "clients.npz"
    x = np.random.default_rng(0).normal(size=(64 * 400, 20)).astype(np.float32)
    np.savez(data, x=x, y=(x[:, 0] > 0).astype(int), client=np.arange(len(x)) % 64)
    return ["run", "fedavg", "--data", data, "--model", "mlp:hidden=4096", "--rounds", 2, "--set", "device=cpu",
            "--set", "batch=0"]


@pytest.mark.parametrize("megabytes", [600, 680, 760])
def test_out_of_memory_says_what_fits_and_that_does(tmp_path, words, megabytes):
    """What is said works in the same limit, and gives the rows of a run that had all the memory."""
    begun = python(LIMITED, megabytes, *words, "--set", "wave=64", "--out", tmp_path / "run")
    assert begun.returncode == 2
    found = re.search(r"memory ran out while 64 clients were computed at once; wave=4 .* `coterie (resume .*)` goes on",
                      " ".join(begun.stderr.split()))
    assert found, begun.stderr
    assert "Traceback" not in begun.stderr
    resumed = python(LIMITED, megabytes, *found[1].split())
    assert resumed.returncode == 0, resumed.stderr
    free = python(LIMITED, 0, *words, "--set", "wave=4", "--out", tmp_path / "free")
    assert free.returncode == 0, free.stderr
    assert rows_in(tmp_path / "run") == rows_in(tmp_path / "free")


def test_a_checkpoint_that_does_not_fit_is_not_called_damaged(tmp_path, monkeypatch):
    """The system finds no room to map a file, which says nothing against the file."""
    path = tmp_path / "a.safetensors"
    checkpoint.save(path, {"row": torch.ones(3)}, {"round": 1})

    def no_room(*args, **kwargs):
        raise RuntimeError(f"unable to mmap 12 bytes from file <{path}>: Cannot allocate memory (12)")

    monkeypatch.setattr(checkpoint, "safe_open", no_room)
    with pytest.raises(NoMemory, match=r"memory ran out while the checkpoint .* was read") as said:
        checkpoint.load(path)
    assert memory.exhausted(said.value)  # so a run says which settings take less


def test_one_client_that_does_not_fit_needs_a_smaller_batch(tmp_path):
    """One model of 67 million parameters and its gradient take 540 MB; a smaller batch would change the results."""
    done = python(LIMITED, 400, "run", "fedavg", "--clients", 4, "--model", "mlp:hidden=900000", "--rounds", 1, "--set",
                  "device=cpu", "--set", "wave=1", "--out", tmp_path / "run")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "memory ran out" in done.stderr
