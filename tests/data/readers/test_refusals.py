"""Files that are none, and small files that would become very large: a sentence, and soon."""

import csv
import gzip
import io
import json
import os
import pickle
import socket
import struct
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from data_files import (
    idx_bytes,
    within,
    write_cifar10,
    write_cifar10_bin,
    write_csv,
    write_hub,
    write_idx,
    write_images,
    write_index,
    write_leaf,
    write_npz,
    write_parquet,
    write_pfllib,
)

from coterie.data import load
from coterie.data.churn import read as read_churn
from coterie.data.readers import pickles, refusals
from coterie.data.readers.tables.rows import MOST_COLUMNS
from coterie.errors import CoterieError

WRITERS = {
    "npz": write_npz, "images": write_images, "index": write_index, "csv": write_csv, "parquet": write_parquet,
    "hub": write_hub, "cifar": write_cifar10, "cifar bin": write_cifar10_bin, "idx": write_idx, "leaf": write_leaf,
    "pfllib": write_pfllib,
}
OPTIONS = {"csv": {"label": "outcome"}, "parquet": {"label": "outcome"}}
WHY = ("no regular file", "is missing", "holds no images")
"""A set whose first batch is none, or whose labels are, is not known for what it was."""


def pipe(path):
    os.mkfifo(path)


def device(path):
    path.symlink_to("/dev/zero")


def door(path):
    """A socket; its name is short in a folder of its own."""
    with socket.socket(socket.AF_UNIX) as one:
        here = Path.cwd()
        os.chdir(path.parent)
        try:
            one.bind(path.name)
        finally:
            os.chdir(here)


def link(path):
    pipe(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def sentence(path, **options):
    with within(20), pytest.raises(CoterieError) as raised:
        load(path, **options)
    return str(raised.value)


# -- no files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [pipe, device, door, link])
@pytest.mark.parametrize("format", WRITERS)
def test_whatever_is_no_regular_file_is_refused(format, kind, tmp_path):
    """In the place of each file of a data set in turn: a pipe among images was waited for, for ever."""
    written = WRITERS[format](tmp_path)
    files = [written] if written.is_file() else sorted(p for p in written.rglob("*") if p.is_file())
    if format == "index":
        files += sorted(tmp_path.rglob("*.png"))[:1]
    for file in files[:2] + files[-1:]:
        if file.name in ("config.json", "dataset_info.json"):  # may be missing
            continue
        content = file.read_bytes()
        file.unlink()
        kind(file)
        said = sentence(written, **OPTIONS.get(format, {}))
        assert any(why in said for why in WHY), (file, said)
        file.unlink()
        file.with_name("elsewhere").unlink(missing_ok=True)
        file.write_bytes(content)
    load(written, **OPTIONS.get(format, {}))  # it was that alone


@pytest.mark.parametrize("name", ["a.npz", "a.csv", "a.tsv", "a.parquet", "a.json", "a.bin", "x-images-idx3-ubyte",
                                  "data_batch_1", "a.png", "a"])
def test_a_name_alone_opens_nothing(name, tmp_path):
    pipe(tmp_path / name)
    assert "no regular file" in sentence(tmp_path / name)
    for format in ("npz", "table", "leaf", "images", "cifar", "idx", "pfllib"):
        assert sentence(tmp_path / name, format=format)  # said by the user, without a look at the name


def test_pipes_among_images_can_be_left_out(tmp_path):
    """They are files that cannot be read, like damaged ones."""
    root = write_images(tmp_path)
    pipe(root / "ann" / "cat" / "pipe.png")
    assert "1 of 9 files cannot be read (client ann: 1): ann/cat/pipe.png (it is no regular file)" in sentence(root)
    with within(20):
        assert len(load(root, skip=True).y) == 8


def test_an_index_that_names_a_device(tmp_path):
    write_images(tmp_path)
    with (tmp_path / "photos.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["path", "label"], ["/dev/zero", "cat"], ["/dev/stdin", "dog"]])
    assert "2 of 2 files cannot be read: /dev/zero (it is no regular file)" in sentence(tmp_path / "photos.csv")


def test_a_saved_set_names_its_own_files_alone(tmp_path):
    root = write_hub(tmp_path)
    state = (root / "state.json").read_text()
    for other in ("/dev/zero", "../elsewhere.arrow"):
        (root / "state.json").write_text(state.replace("data-00000-of-00001.arrow", other))
        assert "names a file that lies elsewhere" in sentence(root)


def test_a_churn_file_that_is_a_pipe(tmp_path):
    pipe(tmp_path / "churn.csv")
    with within(20), pytest.raises(CoterieError, match="no regular file"):
        read_churn(tmp_path / "churn.csv")


# -- bombs -------------------------------------------------------------------------------------------------------------


def npy(shape, kind):
    held = io.BytesIO()
    np.lib.format.write_array_header_1_0(held, {"descr": kind, "fortran_order": False, "shape": shape})
    return held.getvalue()


def zeros_packed(head, size):
    """Deflated: a head and so many zeros; a block of zeros is packed once and repeated."""
    pack = zlib.compressobj(9, zlib.DEFLATED, -15)
    first = pack.compress(head) + pack.flush(zlib.Z_FULL_FLUSH)
    block = pack.compress(bytes(1 << 20)) + pack.flush(zlib.Z_FULL_FLUSH)
    rest = pack.compress(bytes(size % (1 << 20))) + pack.flush()
    return first + block * (size >> 20) + rest


def test_an_archive_of_zeros(tmp_path):
    """2 GiB in 4 MB, with true sizes in its directory; nothing of it is unpacked."""
    size = 1 << 30
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("x", "y"):
            head = npy((size,), "|u1")
            info = zipfile.ZipInfo(f"{name}.npy")
            packed = zeros_packed(head, size)
            # written as it is, and said to be deflated afterwards
            archive.writestr(info, packed)
            info.compress_type, info.file_size = zipfile.ZIP_DEFLATED, size + len(head)
    with within(5):
        said = sentence(tmp_path / "bomb.npz")
    assert f"would become {2 * (size + len(npy((size,), '|u1')))}, more than 500 times as many" in said


def test_deep_images_beside_a_coloured_one(tmp_path):
    """Three of 36 million pixels, 250 kB in all: one of 16 bits makes floats of all, one in colour three each."""
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "a").mkdir()
    for name in ("1.png", "2.png"):
        image.fromarray(np.zeros((6000, 6000), np.uint16)).save(tmp_path / "a" / name)
    image.new("RGB", (6000, 6000)).save(tmp_path / "a" / "3.png")
    with within(30):
        said = sentence(tmp_path)
    assert "some of which have 16 bits a pixel" in said
    assert "would become 1296000000" in said  # 3 images, 3 colours, 4 bytes


def test_an_archive_of_many_arrays(tmp_path):
    with zipfile.ZipFile(tmp_path / "many.npz", "w") as archive:
        for k in range(1001):
            archive.writestr(f"{k}.npy", b"")
    assert "1001 arrays, at most 1000 are read" in sentence(tmp_path / "many.npz")


@pytest.mark.parametrize("which", ["images", "labels"])
def test_gzipped_zeros(which, tmp_path):
    """2 GiB of labels, or as many images of one pixel, in 2 MB."""
    n, head = 1 << 31, gzip.compress(b"")[:10]
    for name, array in (("images-idx3", np.zeros((3, 2, 2), np.uint8)), ("labels-idx1", np.zeros(3, np.uint8))):
        (tmp_path / f"train-{name}-ubyte.gz").write_bytes(gzip.compress(idx_bytes(array)))
    if which == "labels":
        packed = zeros_packed(struct.pack(">HBBI", 0, 8, 1, n), n)
        (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(head + packed + bytes(8))
    else:
        packed = zeros_packed(struct.pack(">HBBIII", 0, 8, 3, 3, 1 << 14, 1 << 12), 3 << 26)
        (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(head + packed[:100_000] + bytes(8))
    with within(5):
        said = sentence(tmp_path, format="idx")
    assert "would become" in said or "1 of 2 files cannot be read" in said


def png(width, height):
    """A grey picture of zeros whose rows are packed as tightly as deflate can."""
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress(bytes((width + 1) * 64), 9) if height == 64 else zlib.compress(b"", 9)
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize(("side", "why"), [(60_000, "exceeds limit"), (9_800, "exceeds limit"), (9_000, "bytes would")])
def test_pictures_of_a_few_bytes(side, why, tmp_path):
    """60,000 x 60,000 pixels in 60 bytes; and many of 9,000 x 9,000, each below Pillow's limit: 100 make 8 GB."""
    for kind in ("cat", "dog"):
        (tmp_path / "p" / kind).mkdir(parents=True)
        for k in range(50):
            (tmp_path / "p" / kind / f"{k}.png").write_bytes(png(side, side))
    assert why in sentence(tmp_path / "p")


def test_a_table_of_one_value(tmp_path):
    """200,000,000 equal cells in 150 kB; rows that are written so are read as long as they are not so many."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    ones = pa.array(np.zeros(10_000_000, np.int8))
    table = pa.table({"a": ones, "label": ones})
    with parquet.ParquetWriter(tmp_path / "bomb.parquet", table.schema) as writer:
        for _ in range(10):
            writer.write_table(table, row_group_size=10_000_000)
    assert "would become 1600000000, more than 500 times as many" in sentence(tmp_path / "bomb.parquet")


LETTERS = "a" * 100_000


def said_again(rows, first=0):
    """One text in each row but the `first`, said by numbers."""
    import pyarrow as pa

    at = pa.array(np.zeros(rows, np.int32), mask=np.arange(rows) < first)
    return pa.DictionaryArray.from_arrays(at, pa.array([LETTERS]))


def repeated(kind, rows=20_000):
    import pyarrow as pa

    if kind == "a label":
        return {"x": np.zeros(rows), "label": said_again(rows)}
    if kind.startswith("lists"):  # all in the second row
        held = said_again(rows)
        held = pa.StructArray.from_arrays([held], ["a"]) if "tables" in kind else held
        return {"x": pa.ListArray.from_arrays(pa.array([0, 0, rows], pa.int32()), held), "label": [0, 1]}
    column = {"texts": said_again(rows), "a gap first": said_again(rows, 1),
              "tables": pa.StructArray.from_arrays([said_again(rows)], ["a"]),
              "bytes": said_again(rows).cast(pa.dictionary(pa.int32(), pa.binary()))}[kind]
    return {"x": column, "label": np.arange(rows) % 2}


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("kind", ["texts", "a label", "a gap first", "bytes", "tables", "lists", "lists of tables"])
def test_a_text_that_a_table_says_again_and_again(kind, kept, tmp_path):
    """2 GB of letters in 600 bytes, by a dictionary of one text; with `kept`, arrow's own types are in the file too."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    parquet.write_table(pa.table(repeated(kind)), tmp_path / "a.parquet", compression="zstd", store_schema=kept)
    assert (tmp_path / "a.parquet").stat().st_size < 2000
    assert ", more than 500 times as many" in sentence(tmp_path / "a.parquet")


def test_texts_that_begin_alike(tmp_path):
    """As 100,000 letters of the text before, and one more: no two are equal, and no dictionary is needed."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    block = pa.table({"x": [f"{LETTERS}{k}" for k in range(2000)], "label": np.arange(2000) % 2})
    with parquet.ParquetWriter(tmp_path / "a.parquet", block.schema, compression="zstd", use_dictionary=False,
                               column_encoding={"x": "DELTA_BYTE_ARRAY", "label": "PLAIN"}) as writer:
        for _ in range(6):
            writer.write_table(block)
    assert (tmp_path / "a.parquet").stat().st_size < 20_000
    assert ", more than 500 times as many" in sentence(tmp_path / "a.parquet", text="x")


def test_one_long_text(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as parquet

    parquet.write_table(pa.table({"x": ["a " * 10**7, "b"], "label": [0, 1]}), tmp_path / "a.parquet")
    assert "a text of 20000000 bytes, at most 16777216 are read" in sentence(tmp_path / "a.parquet", text="x")


@pytest.mark.parametrize("lying", [False, True])
def test_a_row_that_is_a_list_of_zeros(lying, tmp_path):
    """50,000,000 in 900 bytes; the file's summary may say that it is one, and its pages are what is unpacked."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    n = 50_000_000
    zeros = pa.ListArray.from_arrays(pa.array([0, n], pa.int32()), pa.array(np.zeros(n, np.int8)))
    parquet.write_table(pa.table({"x": zeros, "label": [1]}), tmp_path / "a.parquet", compression="zstd")
    if lying:
        data = (tmp_path / "a.parquet").read_bytes()
        summary = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
        told = bytes([2 * n >> 7 * k & 127 | (0x80 if k < 3 else 0) for k in range(4)])
        assert told in data[summary:]
        (tmp_path / "a.parquet").write_bytes(data[:summary] + data[summary:].replace(told, b"\x82\x80\x80\x00"))
        assert parquet.ParquetFile(tmp_path / "a.parquet").metadata.row_group(0).column(0).num_values == 1
    assert ", more than 500 times as many" in sentence(tmp_path / "a.parquet")


@pytest.mark.parametrize("options", [{}, {"data_page_version": "2.0"}, {"use_dictionary": False},
                                     {"compression": "zstd", "data_page_size": 1000, "row_group_size": 700}])
def test_pages_are_counted_as_pyarrow_does(options, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as parquet

    from coterie.data.readers.tables.pages import PAGE, pages_of

    table = pa.table({"a": np.arange(2000) / 7, "b": [f"text {k % 9}" for k in range(2000)],
                      "c": [[1, k] for k in range(2000)]})
    parquet.write_table(table, tmp_path / "a.parquet", **options)
    metadata = parquet.ParquetFile(tmp_path / "a.parquet").metadata
    for group, column, pages in pages_of(tmp_path / "a.parquet", metadata):
        told = metadata.row_group(group).column(column)
        assert pages.values == told.num_values
        assert PAGE < pages.largest + PAGE <= pages.size
        assert pages.largest < told.total_uncompressed_size < pages.size  # a header is smaller than PAGE
        assert (pages.words > 0) == (told.dictionary_page_offset is not None)


def saved(folder, columns, kinds, **options):
    """A folder as `save_to_disk` writes it, with an arrow file of one's own."""
    import pyarrow as pa

    table = pa.table(columns)
    with pa.OSFile(str(folder / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema, **options) as stream:
        stream.write_table(table)
    (folder / "state.json").write_text(json.dumps({
        "_data_files": [{"filename": "a.arrow"}], "_fingerprint": "a", "_format_columns": None, "_format_kwargs": {},
        "_format_type": None, "_output_all_columns": False, "_split": None}))
    (folder / "dataset_info.json").write_text(json.dumps({
        "features": {name: {"dtype": kind, "_type": "Value"} for name, kind in zip(columns, kinds, strict=True)}}))
    return folder


def test_a_saved_set_of_compressed_zeros(tmp_path):
    """datasets would unpack all of it on opening; one that is compressed and small is read."""
    import pyarrow as pa

    packed = pa.ipc.IpcWriteOptions(compression="zstd")
    zeros = pa.array(np.zeros(300_000_000, np.int8))
    folder = saved(tmp_path, {"a": zeros, "b": zeros, "c": zeros, "label": zeros}, ["int8"] * 4, options=packed)
    assert "would become 1200000000, more than 500 times as many" in sentence(folder)
    folder = saved(tmp_path, {"a": np.zeros(1000), "label": np.arange(1000) % 2}, ["float64", "int64"], options=packed)
    assert load(folder).x.shape == (1000, 1)


def test_a_saved_set_of_rows_without_bytes(tmp_path):
    import pyarrow as pa

    folder = saved(tmp_path, {"a": pa.nulls(10**9), "label": pa.nulls(10**9)}, ["null", "null"])
    assert "would become 16000000000, more than 500 times as many" in sentence(folder)


def test_a_saved_set_that_says_one_text_again_and_again(tmp_path):
    """By a dictionary, which datasets would write out on opening, or by views, of 16 bytes each."""
    import pyarrow as pa

    label = np.arange(20_000) % 2
    folder = saved(tmp_path, {"a": said_again(20_000), "label": label}, ["string", "int64"])
    assert "holds dictionaries, which save_to_disk does not write" in sentence(folder)
    _, views, letters = pa.array([LETTERS], pa.string_view()).buffers()
    views = pa.py_buffer(views.to_pybytes()[:16] * 20_000)
    texts = pa.Array.from_buffers(pa.string_view(), 20_000, [None, views, letters])
    folder = saved(tmp_path, {"a": texts, "label": label}, ["string_view", "int64"])
    assert ", more than 500 times as many" in sentence(folder)


def pickled(folder, content):
    (folder / "train").mkdir()
    with zipfile.ZipFile(folder / "train" / "0.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data.npy", npy((), "|O") + content)
    return folder


@pytest.mark.parametrize("instruction", [b"]", b"("])
def test_a_pickle_of_empty_lists(instruction, monkeypatch, tmp_path):
    """A million in a kilobyte: each takes a byte in the pickle, and 64 or more in memory."""
    monkeypatch.setattr(pickles, "UNPACKED", 1 << 26)
    folder = pickled(tmp_path, b"\x80\x04(" + instruction * 10**6 + b"l.")
    assert "it has more instructions than a file of its size may become" in sentence(folder)


@pytest.mark.parametrize("where", ["x", "y"])
@pytest.mark.parametrize("like", [lambda word: [word], lambda word: np.array([word])])
def test_a_pickle_with_a_long_text_among_short_ones(where, like, tmp_path):
    """numpy would have room for the long one 2000 times."""
    texts = [like(LETTERS), *(like("b") for _ in range(2000))]
    held = {"x": np.zeros((2001, 2)), "y": np.zeros(2001), where: texts}
    assert f"{where} holds texts" in sentence(pickled(tmp_path, pickle.dumps(held, 4)))


@pytest.mark.parametrize("like", [lambda word: [word], lambda word: word if word == LETTERS else 1])
def test_a_json_file_with_a_long_text_among_short_ones(like, tmp_path):
    x = [like(LETTERS), *(like("b") for _ in range(2000))]
    user = {"x": x, "y": [0] * len(x)}
    (tmp_path / "a.json").write_text(json.dumps({"users": ["u"], "user_data": {"u": user}}))
    tracemalloc.start()
    try:
        assert "samples are neither numbers of one shape nor texts" in sentence(tmp_path / "a.json")
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("format", ["csv", "npz"])
def test_one_long_name_among_short_ones(format, tmp_path):
    """Of a client: an array of names has room for the longest one in every row, 4 bytes a letter."""
    n, path = 5000, tmp_path / f"a.{format}"
    if format == "csv":
        path.write_text(f"x,client,label\n1,{LETTERS},0\n" + "1,b,1\n0,b,0\n" * (n // 2) + f"0,{LETTERS},1\n")
    else:
        np.savez_compressed(path, x=np.zeros((n, 2)), y=np.arange(n) % 2, client=np.arange(n) // 2 % 2,
                            client_names=np.array([LETTERS, "b"]))
    tracemalloc.start()
    try:
        source = load(path)
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()
    assert set(source.client) == {LETTERS, "b"}


def test_a_header_of_a_million_columns(tmp_path):
    names = ",".join(f"a{k}" for k in range(10**6))
    (tmp_path / "wide.csv").write_text(f"{names},label\n{'1,' * 10**6}0\n{'2,' * 10**6}1\n")
    with within(20):
        assert f"1000001 columns, at most {MOST_COLUMNS} are read" in sentence(tmp_path / "wide.csv")


def test_a_cell_of_a_million_letters(tmp_path):
    (tmp_path / "long.csv").write_text(f"a,label\n{'x' * 10**6},0\ny,1\n")
    assert "field larger than field limit" in sentence(tmp_path / "long.csv")


def test_what_packs_well_is_read(tmp_path):
    """A thousand times smaller, and small: labels of one client after another."""
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros((100_000, 8), np.float32), y=np.arange(100_000) // 50_000)
    assert (tmp_path / "a.npz").stat().st_size * refusals.PACKED < 8 * 4 * 100_000
    assert len(load(tmp_path / "a.npz").y) == 100_000
