"""Small files of every format, written as the format's own library or its authors' program writes them."""

from __future__ import annotations

import csv
import gzip
import io
import json
import pickle
import signal
import struct
from contextlib import contextmanager
from pathlib import Path

import numpy as np

PIXELS = 3 * 32 * 32


@contextmanager
def within(seconds):
    """Fail where it takes longer."""
    def stop(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def cubes(n, seed=0, shape=(4, 4)):
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), dtype=np.uint8)


def write_npz(folder: Path, n=6) -> Path:
    x = np.arange(n * 3, dtype=np.float32).reshape(n, 3)
    np.savez(folder / "data.npz", x=x, y=np.arange(n) % 2, client=np.array(["a", "b"] * (n // 2)))
    return folder / "data.npz"


def write_images(folder: Path, clients=("ann", "bob"), classes=("cat", "dog"), each=2, suffix="png") -> Path:
    from PIL import Image

    root = folder / "photos"
    for i, client in enumerate(clients):
        for j, name in enumerate(classes):
            (root / client / name).mkdir(parents=True)
            for k in range(each):
                Image.fromarray(np.full((4, 5, 3), 10 * (4 * i + 2 * j + k), np.uint8)).save(
                    root / client / name / f"{k}.{suffix}"
                )
    return root


def write_index(folder: Path) -> Path:
    """The same images behind a csv index with clients and a split."""
    root = write_images(folder)
    with (folder / "photos.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["path", "label", "client", "split"])
        for path in sorted(root.rglob("*.png")):
            split = "test" if path.stem == "1" else "train"
            lines.writerow([path.relative_to(folder), path.parent.name, path.parent.parent.name, split])
    return folder / "photos.csv"


ROWS = [
    {"age": 31, "ward": "east", "dose": 0.5, "site": "north", "outcome": "well"},
    {"age": 42, "ward": "west", "dose": 1.5, "site": "south", "outcome": "ill"},
    {"age": 53, "ward": "east", "dose": 2.5, "site": "north", "outcome": "ill"},
    {"age": 64, "ward": "hall", "dose": 3.5, "site": "south", "outcome": "well"},
]


def write_csv(folder: Path, rows=ROWS) -> Path:
    import pandas

    pandas.DataFrame(rows).to_csv(folder / "patients.csv", index=False)
    return folder / "patients.csv"


def write_parquet(folder: Path, rows=ROWS) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    parquet.write_table(pa.Table.from_pylist(rows), folder / "patients.parquet")
    return folder / "patients.parquet"


def dataset(n=6):
    import datasets

    features = datasets.Features(
        {"a": datasets.Value("float32"), "b": datasets.Value("int64"), "who": datasets.Value("string"),
         "label": datasets.ClassLabel(names=["no", "yes"])}
    )
    rows = {"a": [i / 2 for i in range(n)], "b": list(range(n)), "who": ["u", "v"] * (n // 2),
            "label": [i % 3 % 2 for i in range(n)]}
    return datasets.Dataset.from_dict(rows, features=features)


def write_hub(folder: Path) -> Path:
    dataset().save_to_disk(str(folder / "saved"))
    return folder / "saved"


class Python2(pickle._Pickler):
    """Pickles as the authors' Python 2 did: protocol 2, and texts of bytes as they are."""

    def save_bytes(self, text):
        self.write(pickle.BINSTRING + struct.pack("<i", len(text)) + text)
        self.memoize(text)

    dispatch = {**pickle._Pickler.dispatch, bytes: save_bytes}  # noqa: RUF012


def python2(value) -> bytes:
    held = io.BytesIO()
    Python2(held, protocol=2).dump(value)
    return held.getvalue()


def write_cifar10(folder: Path, n=4) -> Path:
    root = folder / "cifar-10-batches-py"
    root.mkdir()
    for k, name in enumerate([*(f"data_batch_{b}" for b in range(1, 6)), "test_batch"]):
        batch = {b"batch_label": name.encode(), b"labels": [(k + i) % 4 for i in range(n)],
                 b"data": cubes(n, k, (PIXELS,)), b"filenames": [b"a.png"] * n}
        (root / name).write_bytes(python2(batch))
    return root


def write_cifar10_bin(folder: Path, n=4) -> Path:
    root = folder / "cifar-10-batches-bin"
    root.mkdir()
    for k, name in enumerate([*(f"data_batch_{b}" for b in range(1, 6)), "test_batch"]):
        records = [bytes([(k + i) % 4]) + row.tobytes() for i, row in enumerate(cubes(n, k, (PIXELS,)))]
        (root / f"{name}.bin").write_bytes(b"".join(records))
    return root


def write_cifar100(folder: Path, n=4) -> Path:
    root = folder / "cifar-100-python"
    root.mkdir()
    for k, name in enumerate(("train", "test")):
        batch = {b"fine_labels": [(i + k) % 4 + 50 for i in range(n)], b"coarse_labels": [i % 2 for i in range(n)],
                 b"data": cubes(n, k, (PIXELS,)), b"filenames": [b"a.png"] * n}
        (root / name).write_bytes(python2(batch))
    return root


def idx_bytes(array) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_idx(folder: Path, n=6, zipped=True) -> Path:
    root = folder / "mnist"
    root.mkdir()
    for k, part in enumerate(("train", "t10k")):
        y = (np.arange(n) % 3).astype(np.uint8)
        for name, array in ((f"{part}-images-idx3-ubyte", cubes(n, k)), (f"{part}-labels-idx1-ubyte", y)):
            if zipped:
                (root / f"{name}.gz").write_bytes(gzip.compress(idx_bytes(array)))
            else:
                (root / name).write_bytes(idx_bytes(array))
    return root


def leaf_json(users, n=3, first=0.0):
    data = {u: {"x": [[first + i, i + k / 4] for i in range(n)], "y": [i % 2 for i in range(n)]}
            for k, u in enumerate(users)}
    return {"users": list(users), "num_samples": [n] * len(users), "user_data": data}


def write_leaf(folder: Path) -> Path:
    root = folder / "femnist"
    for part, first in (("train", 0.0), ("test", 9.0)):
        (root / part).mkdir(parents=True)
        (root / part / "all_data_0.json").write_text(json.dumps(leaf_json(["f00", "f01"], first=first)))
    return root


def pfllib_file(path: Path, x, y) -> None:
    """`generate_*.py` of PFLlib: np.savez_compressed of a dictionary under the name data."""
    with path.open("wb") as file:
        np.savez_compressed(file, data={"x": x, "y": y})


def write_pfllib(folder: Path, clients=3) -> Path:
    root = folder / "Cifar10"
    for k, part in enumerate(("train", "test")):
        (root / part).mkdir(parents=True)
        for i in range(clients):
            x = np.full((4 - k, 1, 2, 2), 10 * k + i, np.float32)
            pfllib_file(root / part / f"{i}.npz", x, np.arange(4 - k) % 2)
    (root / "config.json").write_text(json.dumps({"num_clients": clients, "num_classes": 2}))
    return root
