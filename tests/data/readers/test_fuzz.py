"""Damaged and invented files: every reader gives a valid Source or a CoterieError, never another exception.

7,360 cases in all: a valid file with bytes changed, cut out, doubled or cut off, and structures made from scratch.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import pickle
import random
import shutil
import struct
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from data_files import (
    cubes,
    idx_bytes,
    leaf_json,
    python2,
    write_cifar10_bin,
    write_csv,
    write_hub,
    write_images,
    write_index,
    write_npz,
    write_parquet,
    write_pfllib,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coterie.data import load
from coterie.errors import CoterieError

QUIET = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]


def fuzz(cases):
    return settings(max_examples=cases, derandomize=True, deadline=None, database=None, suppress_health_check=QUIET)


SCALED = [{"scale": True}, {"fill": "mean"}, {"scale": True, "fill": "mean"}]


def outcome(path, **options):
    """A Source that keeps its promises, or a sentence."""
    try:
        source = load(path, **options)
    except CoterieError as error:
        said = str(error)
    else:
        return checked(source)
    assert said
    assert "\n" not in said


def checked(source):
    n = len(source.x)
    assert n == len(source.y) > 0
    assert source.x.ndim >= 2
    assert source.x.dtype in (torch.float32, torch.float64, torch.int64)
    assert source.y.dtype in (torch.float32, torch.float64, torch.int64)
    assert bool(torch.isfinite(source.x).all())
    assert bool(torch.isfinite(source.y).all())
    assert source.client is None or len(source.client) == n
    assert source.split is None or (len(source.split) == n and set(source.split.tolist()) <= {0, 1, 2})
    if source.classes is not None:
        assert int(source.y.max()) < len(source.classes)


NUMBERS = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 10**9)


def spoiled(whole, seed):
    """The bytes of a file after one to three accidents."""
    draw, data = random.Random(seed), bytearray(whole)
    for _ in range(draw.randint(1, 3)):
        if not data:
            break
        at, some = draw.randrange(len(data)), draw.randint(1, 16)
        match draw.choice(["flip", "set", "cut", "remove", "double", "insert", "number"]):
            case "flip":
                data[at] ^= 1 << draw.randrange(8)
            case "set":
                data[at] = draw.choice([0, 1, 0x7F, 0x80, 0xFF])
            case "cut":
                del data[at:]
            case "remove":
                del data[at : at + some]
            case "double":
                data[at:at] = data[at : at + some]
            case "insert":
                data[at:at] = draw.randbytes(some)
            case "number":
                data[at : at + 4] = struct.pack(draw.choice(["<I", ">I"]), draw.choice(NUMBERS))
    return bytes(data)


def damage(whole):
    """One draw a case: drawing every accident by itself costs several times what the readers take."""
    return st.integers(0, 2**32 - 1).map(lambda seed: spoiled(whole, seed))


SKIP = st.booleans()


@pytest.fixture(scope="module")
def place():
    """A folder for the module; one in memory where there is one."""
    home = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=home if home.is_dir() else None))
    yield folder
    shutil.rmtree(folder)


def test_npz(place):
    (place / "npz").mkdir()
    path = write_npz(place / "npz")
    whole = path.read_bytes()
    np.savez_compressed(path, x=np.zeros((3, 2, 2), np.uint8), y=np.array(["a", "b", "a"]), split=np.array([0, 0, 2]))
    packed = path.read_bytes()

    @fuzz(700)
    @given(st.one_of(damage(whole), damage(packed)), SKIP)
    def damaged(data, skip):
        path.write_bytes(data)
        outcome(path, skip=skip)

    @fuzz(300)
    @given(st.sampled_from(["x", "y", "client", "split"]), st.binary(max_size=40), st.data())
    def inside(member, tail, data):
        """The archive is sound; one array in it is not, so that its own header is met and not zip's checksum."""
        held = io.BytesIO()
        with zipfile.ZipFile(held, "w") as archive, zipfile.ZipFile(io.BytesIO(whole)) as old:
            for name in ("x", "y", "client"):
                one = old.read(f"{name}.npy")
                archive.writestr(f"{name}.npy", data.draw(damage(one)) + tail if name == member else one)
        path.write_bytes(held.getvalue())
        outcome(path)

    damaged()
    inside()


ARRAYS = st.sampled_from([np.float32, np.float64, np.int8, np.uint8, np.int64, np.bool_, "U2", "S3", np.float16, ">f4"])


def test_npz_of_any_arrays(place):
    path = place / "any.npz"

    @fuzz(300)
    @given(st.dictionaries(st.sampled_from(["x", "y", "client", "split", "other"]),
                           st.tuples(ARRAYS, st.lists(st.integers(0, 4), max_size=4)), max_size=5))
    def invented(arrays):
        np.savez(path, **{name: np.ones(shape).astype(kind) for name, (kind, shape) in arrays.items()})
        outcome(path)

    invented()


@pytest.mark.parametrize("suffix", ["png", "jpg", "bmp", "gif"])
def test_images(suffix, place):
    (place / suffix).mkdir()
    root = write_images(place / suffix, clients=("a",), each=1, suffix=suffix)
    path = root / "a" / "cat" / f"0.{suffix}"

    @fuzz(250)
    @given(damage(path.read_bytes()), SKIP)
    def damaged(data, skip):
        path.write_bytes(data)
        outcome(root, skip=skip)

    damaged()


CELLS = st.sampled_from(["", "0", "1", "2.5", "cat", "nan", "inf", "-1", "1e999", "train", "test", "é", "\x00", '"',
                         "a,b", "photos/ann/cat/0.png", "../x", "99999999999999999999"])
NAMES = st.sampled_from(["label", "client", "split", "path", "a", "b", "", "label "])


def test_an_index(place):
    (place / "index").mkdir()
    path = write_index(place / "index")

    @fuzz(250)
    @given(damage(path.read_bytes()), SKIP)
    def damaged(data, skip):
        path.write_bytes(data)
        outcome(path, skip=skip)

    damaged()


def test_csv(place):
    (place / "csv").mkdir()
    path = write_csv(place / "csv")
    options = {"label": "outcome", "client": "site"}

    @fuzz(500)
    @given(damage(path.read_bytes()), SKIP)
    def damaged(data, skip):
        path.write_bytes(data)
        outcome(path, skip=skip, **options)

    @fuzz(400)
    @given(st.lists(NAMES, max_size=5), st.lists(st.lists(CELLS, max_size=5), max_size=5), SKIP,
           st.sampled_from([{}, {"text": "a"}, {"fill": 0.5}, {"regression": True}, {"x": "a,b"}, {"shape": "1,2"},
                            *SCALED]))
    def invented(names, rows, skip, more):
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([names, *(row[: len(names)] + ["0"] * (len(names) - len(row)) for row in rows)])
        outcome(path, skip=skip, **more)

    damaged()
    invented()


def test_schema(place):
    """A schema of anything, from nearly right to nonsense, for a sound table."""
    (place / "schema").mkdir()
    path, schema = write_csv(place / "schema"), place / "schema" / "s.json"
    words = st.sampled_from(["age", "ward", "site", "ill", ""])
    plain = st.none() | st.booleans() | st.integers(-2, 2) | st.floats() | words
    anything = st.recursive(plain, lambda inner: st.lists(inner, max_size=3), max_leaves=4)
    columns = st.dictionaries(st.sampled_from(["age", "ward", "dose", "site", "b"]), anything, max_size=3)
    held = st.fixed_dictionaries({}, optional={
        "columns": st.just({"age": None, "ward": ["east", "west"]}) | columns | anything, "classes": anything,
        "scale": st.just({"age": [40.0, 9.0]}) | columns | anything, "fill": st.just({"age": 1}) | columns | anything,
        "label": st.just("outcome") | anything, "client": st.just("site") | anything,
    })

    @fuzz(500)
    @given(held, SKIP)
    def invented(one, skip):
        schema.write_text(json.dumps(one))
        outcome(path, skip=skip, schema=str(schema))

    invented()


def test_parquet(place):
    (place / "parquet").mkdir()
    path = write_parquet(place / "parquet")
    kinds = (st.integers(-3, 3), st.booleans(), st.floats(), st.text(max_size=3), st.lists(st.floats(0, 1), max_size=2),
             st.binary(max_size=2), st.sampled_from(["train", "test"]))
    values = st.one_of([st.lists(st.none() | kind, min_size=3, max_size=3) for kind in kinds])  # a column has one kind
    columns = st.dictionaries(st.sampled_from(["label", "client", "split", "a"]), values)

    @fuzz(400)
    @given(damage(path.read_bytes()), SKIP)
    def damaged(data, skip):
        path.write_bytes(data)
        outcome(path, skip=skip, label="outcome", client="site")

    @fuzz(250)
    @given(columns, SKIP, st.sampled_from([{}, *SCALED]))
    def invented(held, skip, more):
        import pyarrow as pa
        import pyarrow.parquet as parquet

        parquet.write_table(pa.table(held), path)
        outcome(path, skip=skip, **more)

    damaged()
    invented()


def test_hub(place):
    (place / "hub").mkdir()
    root = write_hub(place / "hub")
    sound = {file.name: file.read_bytes() for file in root.iterdir()}

    @fuzz(160)
    @given(st.sampled_from(sorted(sound)), st.data(), SKIP)
    def damaged(name, data, skip):
        for file, whole in sound.items():
            (root / file).write_bytes(data.draw(damage(whole)) if file == name else whole)
        outcome(root, skip=skip, client="who")

    damaged()


def test_cifar(place):
    batch = place / "data_batch_1"
    whole = python2({b"labels": [0, 1], b"data": cubes(2, 0, (3072,)), b"batch_label": b"one"})
    head = 160  # what comes before the pixels, where the structure is
    root = write_cifar10_bin(place, n=1)

    @fuzz(600)
    @given(st.one_of(damage(whole[:head]).map(lambda part: part + whole[head:]), damage(whole)))
    def damaged(data):
        batch.write_bytes(data)
        outcome(batch)

    plain = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.binary(max_size=3))
    nested = st.recursive(
        plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner), max_leaves=5)
    arrays = st.sampled_from([cubes(2, 0, (3072,)), cubes(2, 0, (10,)), np.zeros((2, 3072)), np.array([None, 1]),
                              np.array("a"), np.float64(2)])

    @fuzz(300)
    @given(st.one_of(nested, st.dictionaries(st.sampled_from(["data", "labels", b"data", b"labels", "fine_labels"]),
                                             st.one_of(arrays, nested, st.just([0, 1])))), st.integers(0, 5))
    def invented(value, protocol):
        batch.write_bytes(pickle.dumps(value, protocol=protocol))
        outcome(batch)

    @fuzz(200)
    @given(st.integers(0, 7000), SKIP)
    def binary(size, skip):
        (root / "test_batch.bin").write_bytes(bytes(size))
        outcome(root, skip=skip)

    damaged()
    invented()
    binary()


def test_idx(place):
    root = place / "idx"
    root.mkdir()
    y = root / "train-labels-idx1-ubyte"
    x = root / "train-images-idx3-ubyte"
    parts = {x: idx_bytes(cubes(3)), y: idx_bytes(np.arange(3, dtype=np.uint8))}

    @fuzz(500)
    @given(st.sampled_from([x, y]), st.booleans(), st.data(), SKIP)
    def damaged(which, zipped, data, skip):
        for path, whole in parts.items():
            spoilt = whole
            if path == which:
                spoilt = data.draw(damage(gzip.compress(whole) if zipped else whole))
            path.write_bytes(spoilt)
        outcome(root, skip=skip)

    damaged()


def test_leaf(place):
    path = place / "leaf.json"
    whole = json.dumps(leaf_json(["a", "b"])).encode()
    values = st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3)),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["x", "y", "u"]), inner),
        max_leaves=8)

    @fuzz(500)
    @given(damage(whole), SKIP)
    def damaged(data, skip):
        path.write_bytes(data)
        outcome(path, skip=skip)

    @fuzz(300)
    @given(st.dictionaries(st.sampled_from(["users", "num_samples", "user_data"]), values), SKIP, values, values)
    def invented(value, skip, x, y):
        if "user_data" in value and skip:
            value["user_data"] = {"u": {"x": x, "y": y}}
        path.write_text(json.dumps(value))
        outcome(path, skip=skip)

    damaged()
    invented()


def test_pfllib(place):
    (place / "pfllib").mkdir()
    root = write_pfllib(place / "pfllib", clients=1)
    path = root / "train" / "0.npz"
    whole = path.read_bytes()
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        array = archive.read("data.npy")

    @fuzz(200)
    @given(damage(whole), SKIP)
    def damaged(data, skip):
        path.write_bytes(data)
        outcome(root, skip=skip)

    @fuzz(500)
    @given(damage(array), SKIP)
    def inside(data, skip):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("data.npy", data)
        outcome(root, skip=skip)

    damaged()
    inside()
