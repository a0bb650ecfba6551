"""Each reader on data larger than the memory the process may take, and training on samples that lie in a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from data_files import PIXELS, idx_bytes, pfllib_file, python2, write_cifar10_bin

from coterie import memory, registry
from coterie.data import Federation
from coterie.models import model
from coterie.running.simulation import Simulation
from coterie.running.training import Training

LIMIT = 28 << 20
SIZE = 36 << 20
pytestmark = pytest.mark.long
FORMATS = ("npz", "compressed", "images", "csv", "parquet", "hub", "bin", "cifar", "idx", "leaf", "pfllib", "published")

READ = """
import gc, json, os, resource, sys
import numpy as np, pyarrow.parquet, datasets, torch
from PIL import Image
from pathlib import Path
from coterie import run
from coterie.data import Federation, load, published
from coterie import memory

LIMIT, root = int(sys.argv[1]), Path(sys.argv[2])
how = {"csv": dict(text="said", tokenizer=lambda text: [len(text)], length=1)}
how["parquet"] = how["hub"] = how["csv"]


def used():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmData")).split()[1]) << 10


def told(name, limit, work):
    # the work runs in a process of its own that may take `limit` bytes more than it has
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            resource.setrlimit(resource.RLIMIT_DATA, (used() + limit, used() + limit))
            answer = work()
        except BaseException as error:
            answer = repr(error)
        print(json.dumps([name, answer]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)


def read(folder):
    if folder.name == "published":
        source = published.load("kvasir", str(folder))
    else:
        source = load(next(folder.iterdir()), **how.get(folder.name, {}))
    return [len(source.x), memory.is_mapped(source.x), int(source.y.sum()), float(source.x[-1].double().mean())]


def plain():
    return len(np.load(root / "large" / "npz" / "d.npz")["x"])


def trained(size="large"):
    source = load(root / size / "bin" / "cifar-10-batches-bin")
    size = source.x.numel() * 4
    owned = np.array_split(np.arange(len(source.x)), 4)
    federation = Federation.from_assignment(source.x, source.y, owned)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 4))
    losses = run("fedavg", model, federation, rounds=1, batch=20).at("served").test["loss"]
    return [size > 5 * LIMIT, memory.is_mapped(federation.x), len(losses)]


for folder in sorted((root / "small").iterdir()):  # the libraries take what they need anyway
    read(folder)
trained("small")
gc.collect()
for folder in sorted((root / "large").iterdir()):
    told(folder.name, LIMIT, lambda: read(folder))
told("plain", LIMIT, plain)
told("trained", 5 * LIMIT, trained)
"""


def write(folder: Path, size: int) -> dict[str, tuple[int, int, float]]:
    """Files of `size` bytes in each format; what reading them must give: samples, sum of labels, mean of the last."""
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as parquet
    from PIL import Image

    for name in FORMATS:
        (folder / name).mkdir(parents=True)
    found = {}
    n = max(size // 4000, 2)
    x, y = np.ones((n, 1000), np.float32), np.arange(n) % 2
    x[-1] = 3
    np.savez(folder / "npz" / "d.npz", x=x, y=y)
    np.savez_compressed(folder / "compressed" / "d.npz", x=x, y=y)
    found["npz"] = found["compressed"] = (n, int(y.sum()), 3.0)
    del x

    n = max(size // 600_000, 2)
    for k in range(2):
        (folder / "images" / "photos" / str(k)).mkdir(parents=True)
    for k in range(n):
        Image.new("RGB", (500, 400), (255, 255, 255)).save(folder / "images" / "photos" / str(k % 2) / f"{k:04}.bmp")
    found["images"] = (n, n // 2, 1.0)  # white is 1

    n = max(size // (4 * 3 * 64 * 64), 2)  # each picture is scaled to 64 x 64
    for k in range(2):
        (folder / "published" / str(k)).mkdir()
    for k in range(n):
        Image.new("RGB", (80, 60), (255, 255, 255)).save(folder / "published" / str(k % 2) / f"{k:04}.jpg")
    found["published"] = (n, n // 2, 1.0)

    n = max(size // 10_000, 2)
    rows = {"said": [f"{k} " + "word " * 2000 for k in range(n)], "label": [k % 2 for k in range(n)]}
    length = len(rows["said"][-1].strip())
    with (folder / "csv" / "t.csv").open("w") as file:
        file.write("said,label\n")
        file.writelines(f"{s},{y}\n" for s, y in zip(rows["said"], rows["label"], strict=True))
    parquet.write_table(pa.table(rows), folder / "parquet" / "t.parquet", compression="none", use_dictionary=False,
                        write_batch_size=64)  # pages of 1 MB; by default they hold at least 1024 rows
    datasets.Dataset.from_dict(rows).save_to_disk(str(folder / "hub" / "saved"))
    found["csv"] = found["parquet"] = found["hub"] = (n, n // 2, float(length))
    del rows

    n = max(size // PIXELS, 4)
    root = write_cifar10_bin(folder / "bin")
    record = bytes([1]) + bytes([255]) * PIXELS
    (root / "test_batch.bin").write_bytes(record * n)
    found["bin"] = (20 + n, 30 + n, 1.0)  # the five small batches hold 20 samples with labels (k + i) % 4
    each = max(n // 6, 1)
    root = folder / "cifar" / "cifar-10-batches-py"
    root.mkdir()
    batch = {b"labels": [1] * each, b"data": np.full((each, PIXELS), 255, np.uint8)}
    for name in (*(f"data_batch_{b}" for b in range(1, 6)), "test_batch"):
        (root / name).write_bytes(python2(batch))
    found["cifar"] = (6 * each, 6 * each, 1.0)

    n = max(size // 784, 2)
    root = folder / "idx" / "mnist"
    root.mkdir()
    (root / "train-images-idx3-ubyte").write_bytes(idx_bytes(np.full((n, 28, 28), 255, np.uint8)))
    (root / "train-labels-idx1-ubyte").write_bytes(idx_bytes((np.arange(n) % 2).astype(np.uint8)))
    found["idx"] = (n, n // 2, 1.0)

    users = max(size // 400_000, 1)
    sample = "[" + ", ".join(["0.5" + "0" * 15] * 1000) + "]"  # 20 characters a number
    one = f'{{"x": [{", ".join([sample] * 20)}], "y": {[1] * 20}}}'
    (folder / "leaf" / "data.json").write_text(
        '{"user_data": {' + ", ".join(f'"u{k}": {one}' for k in range(users)) + "}}")
    found["leaf"] = (20 * users, 20 * users, 0.5)

    root = folder / "pfllib" / "Set"
    for part in ("train", "test"):
        (root / part).mkdir(parents=True)
    clients = max(size // (1 << 20), 1)
    for k in range(clients):
        pfllib_file(root / "train" / f"{k}.npz", np.full((262, 1000), 2, np.float32), np.ones(262, np.int64))
    found["pfllib"] = (262 * clients, 262 * clients, 2.0)
    return found


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """What a process with a memory limit read, format by format, beside what was written."""
    root = tmp_path_factory.mktemp("large")
    write(root / "small", 1)
    expected = write(root / "large", SIZE)
    done = subprocess.run(
        [sys.executable, "-c", READ, str(LIMIT), str(root)], capture_output=True, text=True, timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system", "COTERIE_KEEP_MEMORY": "0",
             # threads of a library would take memory of their own, more or less by chance
             "MALLOC_ARENA_MAX": "1", "ARROW_IO_THREADS": "1",
             "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    return expected, dict(json.loads(line) for line in done.stdout.splitlines()), done.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not keep RLIMIT_DATA")
@pytest.mark.parametrize("name", FORMATS)
def test_a_file_larger_than_the_memory_limit(name, read):
    """csv, parquet and hub hold texts, of which only a number is kept: their samples fit, their files do not."""
    expected, found, errors = read
    samples, labels, last = expected[name]
    assert name in found, errors
    assert found[name] == [samples, name not in ("csv", "parquet", "hub"), labels, pytest.approx(last)]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not keep RLIMIT_DATA")
def test_the_limit_is_one(read):
    """Reading the same file whole does not fit, so the limit of these tests is real."""
    assert "MemoryError" in read[1]["plain"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not keep RLIMIT_DATA")
def test_training_on_samples_larger_than_the_limit(read):
    assert read[1].get("trained") == [True, True, 4], read[2]


@pytest.mark.parametrize("name", ["cnn", "mlp"])
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_samples_in_a_file_train_alike(name, precision):
    """Where the samples lie changes nothing: the rows after two rounds are the same bits."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, 16, 16) if name == "cnn" else (5,)
    x, y = torch.randn(24, *shape, generator=generator), torch.arange(24) % 3
    lying = memory.mapped(tuple(x.shape), x.dtype, "the samples").copy_(x)
    rows = []
    for held in (x, lying):
        federation = Federation.from_assignment(held, y, np.array_split(np.arange(24), 3))
        assert memory.is_mapped(federation.x) is (held is lying)
        simulation = Simulation(registry.method("fedavg"), model(name, shape, 3), federation,
                                Training(rounds=2, batch=4, device="cpu", precision=precision))
        simulation.round()
        simulation.round()
        rows.append(simulation.server.state.row)
    assert torch.equal(*rows)
