"""Every reader on a real small file of its format, and on damaged ones: one report names files and clients."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from data_files import (
    ROWS,
    cubes,
    dataset,
    idx_bytes,
    leaf_json,
    pfllib_file,
    write_cifar10,
    write_cifar10_bin,
    write_cifar100,
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

from coterie.cli import main
from coterie.data import Federation, load
from coterie.data.readers import find, pickles
from coterie.data.readers.tables.columns import Column
from coterie.errors import CoterieError
from coterie.flower.job import Job
from coterie.flower.site import site_at
from coterie.running.experiment import Experiment


def refused(*args, **options) -> str:
    with pytest.raises(CoterieError) as caught:
        load(*args, **options)
    return str(caught.value)


def scaled(pixels):
    """What uint8 pixels become: (p / 255 - 1/2) / (1/2)."""
    return torch.as_tensor(np.asarray(pixels, np.float32) / 255 * 2 - 1)


@pytest.mark.parametrize(
    ("write", "kind"),
    [(write_npz, "npz"), (write_images, "images"), (write_index, "images"), (write_csv, "table"),
     (write_parquet, "table"), (write_hub, "hub"), (write_cifar10, "cifar"), (write_cifar10_bin, "cifar"),
     (write_cifar100, "cifar"), (write_idx, "idx"), (write_leaf, "leaf"), (write_pfllib, "pfllib")],
)
def test_the_format_is_found(write, kind, tmp_path):
    assert find(write(tmp_path)) == kind


# -- .npz --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.npz", "npz"), ("a.TSV", "table"), ("a.pq", "table"), ("a.json", "leaf"), ("train-images-idx3-ubyte.gz", "idx"),
     ("a.bin", "cifar"), ("data_batch_1", "cifar"), ("data_batch_1.csv", "table"), ("a-ubyte.json", "leaf"),
     ("a-ubyte.bin", "idx")],
)
def test_a_file_that_is_not_there_is_judged_by_its_name(name, kind, tmp_path):
    """Its reader then says that it is missing. A known ending counts for more than a word within the name."""
    assert find(tmp_path / name) == kind


@pytest.mark.parametrize(
    ("held", "kind"),
    [(["dataset_info.json", "data_batch_1"], "hub"), (["train.bin", "t10k-images-idx3-ubyte"], "cifar"),
     (["t10k-images-idx3-ubyte", "train/0.npz"], "idx"), (["train/0.npz", "index.csv"], "pfllib"),
     (["index.csv", "a.json"], "images"), (["a.json", "a.csv"], "leaf"), (["a.csv", "c/d.png"], "table"),
     ([], "images")],
)
def test_a_folder_of_several_formats_is_read_as_the_most_telling_one(held, kind, tmp_path):
    """The order of the formats, pair by pair: each case holds the marks of two neighbours."""
    for name in held:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert find(tmp_path) == kind


def test_npz_brings_clients_and_a_split(tmp_path):
    np.savez_compressed(tmp_path / "d.npz", x=np.eye(4), y=np.array(list("baba")), client=np.array([7, 7, 3, 3]),
                        split=np.array(["train", "test", "train", "train"]))
    source = load(tmp_path / "d.npz")
    assert torch.equal(source.x, torch.eye(4, dtype=torch.float64))
    assert source.y.tolist() == [1, 0, 1, 0]  # names in sorted order
    assert source.classes == ("a", "b")
    assert source.client.tolist() == [7, 7, 3, 3]
    assert source.split.tolist() == [0, 2, 0, 0]


def test_npz_reports_clients(tmp_path):
    x = np.ones((6, 2))
    x[1, 0], x[4, 1] = np.nan, np.inf
    np.savez(tmp_path / "d.npz", x=x, y=np.zeros(6, int), client=np.array(list("aabbcc")))
    said = refused(tmp_path / "d.npz")
    assert "2 of 6 samples hold NaN or infinite values (client a: 1, client c: 1)" in said
    kept = load(tmp_path / "d.npz", skip=True)
    assert len(kept.x) == 4
    assert "left out: 2 of 6 samples" in kept.notes[0]


def test_npz_whose_header_lies_is_refused(tmp_path):
    path = write_npz(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"(6, 3)", b"(9, 3)"))
    assert "data.npz' cannot be read as an .npz file" in refused(path)


# -- images ------------------------------------------------------------------------------------------------------------


def test_a_folder_of_clients_and_classes(tmp_path):
    source = load(write_images(tmp_path))
    assert source.x.shape == (8, 3, 4, 5)
    # Files come in sorted order, client by client and class by class; image k of (i, j) was painted 10 (4i + 2j + k).
    assert torch.allclose(source.x[:, 0, 0, 0], scaled([10 * v for v in range(8)]))
    assert source.y.tolist() == [0, 0, 1, 1] * 2
    assert source.classes == ("cat", "dog")
    assert source.client.tolist() == ["ann"] * 4 + ["bob"] * 4
    assert source.split is None


def test_a_folder_of_classes_alone_names_no_clients(tmp_path):
    source = load(write_images(tmp_path) / "ann")
    assert (source.client, source.classes, len(source.x)) == (None, ("cat", "dog"), 4)


def test_folders_called_train_and_test_are_a_split(tmp_path):
    write_images(tmp_path).rename(tmp_path / "train")
    write_images(tmp_path, each=1).rename(tmp_path / "test")
    (tmp_path / "all").mkdir()
    for part in ("train", "test"):
        (tmp_path / part).rename(tmp_path / "all" / part)
    source = load(tmp_path / "all")
    assert source.split.tolist() == [2] * 4 + [0] * 8  # test comes before train in the alphabet
    assert set(source.client) == {"ann", "bob"}


def test_an_index_brings_clients_and_a_split(tmp_path):
    source = load(write_index(tmp_path))
    assert source.split.tolist() == [0, 2] * 4
    assert source.client.tolist() == ["ann"] * 4 + ["bob"] * 4
    federation = Experiment(data=str(tmp_path / "photos.csv"), val=0).federation()
    assert (federation.sizes("train").tolist(), federation.sizes("test").tolist()) == ([2, 2], [2, 2])


def test_grey_images_have_one_channel_and_size_scales(tmp_path):
    from PIL import Image

    for k, side in enumerate((4, 8)):
        (tmp_path / "g" / str(k)).mkdir(parents=True)
        Image.fromarray(np.full((side, side), 51, np.uint8)).save(tmp_path / "g" / str(k) / "a.png")
    assert "1 of 2 images has another size: " in refused(tmp_path / "g")
    source = load(f"{tmp_path / 'g'}:size=4")
    assert source.x.shape == (2, 1, 4, 4)
    assert torch.allclose(source.x, torch.tensor(-0.6))  # 51 / 255 = 1/5, and a flat image stays flat
    assert (source.y.tolist(), source.classes) == ([0, 1], None)  # folders named by numbers are those numbers
    assert load(tmp_path / "g", size="6x2", colour="rgb").x.shape == (2, 3, 2, 6)


def test_damaged_images_are_listed_with_their_clients(tmp_path):
    from PIL import Image

    root = write_images(tmp_path, each=3)
    whole = (root / "bob" / "dog" / "1.png").read_bytes()
    (root / "bob" / "dog" / "1.png").write_bytes(whole[:45])
    (root / "bob" / "cat" / "2.png").write_bytes(b"no image at all")
    Image.new("RGB", (9, 9)).save(root / "ann" / "cat" / "0.png")
    (root / "eve").mkdir()
    said = refused(root)
    assert "2 of 12 files cannot be read (client bob: 2)" in said
    assert "bob/cat/2.png (no image)" in said
    assert "bob/dog/1.png (" in said
    assert "1 of 12 images has another size (client ann: 1): ann/cat/0.png (9x9 instead of 5x4)" in said
    assert "1 client has no samples: eve" in said
    kept = load(root, skip=True)
    assert len(kept.x) == 9
    assert len(kept.notes) == 3


def test_an_index_that_names_a_missing_file(tmp_path):
    index = write_index(tmp_path)
    (tmp_path / "photos" / "ann" / "cat" / "0.png").unlink()
    assert "1 of 8 files cannot be read (client ann: 1): photos/ann/cat/0.png (no such file)" in refused(index)
    index.write_text("path,label,client\nx.png,cat,\n")
    assert "1 line of the index is incomplete: line 2 (no client)" in refused(index)


def test_a_class_in_the_test_split_alone_is_reported(tmp_path):
    index = write_index(tmp_path)
    index.write_text("\n".join(line for line in index.read_text().splitlines() if "dog" not in line or "test" in line))
    said = refused(index)
    assert "2 of 6 samples have a class that no training sample has (client ann: 1, client bob: 1): class dog" in said


# -- tables ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [write_csv, write_parquet])
def test_a_table(write, tmp_path):
    source = load(f"{write(tmp_path)}:label=outcome,client=site")
    # age, one column each for the wards east, hall and west, then dose
    assert source.x.tolist() == [[31, 1, 0, 0, 0.5], [42, 0, 0, 1, 1.5], [53, 1, 0, 0, 2.5], [64, 0, 1, 0, 3.5]]
    assert (source.y.tolist(), source.classes) == ([1, 0, 0, 1], ("ill", "well"))
    assert source.client.tolist() == ["north", "south", "north", "south"]
    assert load(write(tmp_path), label="dose", client="site", x="age").y.tolist() == [0.5, 1.5, 2.5, 3.5]  # targets
    assert load(write(tmp_path), label="outcome", ignore=["ward", "site"]).x.shape == (4, 2)
    assert load(write(tmp_path), label="outcome", ignore="ward,site", classes="well,ill").y.tolist() == [0, 1, 1, 0]


def test_a_folder_of_tables_has_a_client_a_file(tmp_path):
    for k, row in enumerate(ROWS):
        write_csv(tmp_path, [row, {**row, "outcome": "ill"}]).rename(tmp_path / f"h{k}.csv")
    source = load(tmp_path, label="outcome", ignore="site")
    assert source.client.tolist() == ["h0", "h0", "h1", "h1", "h2", "h2", "h3", "h3"]
    (tmp_path / "h2.csv").write_bytes(b"age,ward\n\xff\xfe")
    assert "1 of 4 files cannot be read (client h2: 1): h2.csv (" in refused(tmp_path, label="outcome", ignore="site")
    (tmp_path / "h2.csv").write_text((tmp_path / "h1.csv").read_text().splitlines()[0])
    assert "1 client has no samples: h2" in refused(tmp_path, label="outcome", ignore="site")


@pytest.mark.parametrize("write", [write_csv, write_parquet])
def test_missing_values_are_reported_by_column_and_client_or_filled(write, tmp_path):
    rows = [dict(row) for row in ROWS]
    rows[0]["age"] = rows[2]["age"] = rows[1]["ward"] = rows[3]["outcome"] = None
    path = write(tmp_path, rows)
    said = refused(path, label="outcome", client="site")
    assert "2 of 4 rows have no value in column 'age' (client north: 2)" in said
    assert "1 of 4 rows has no value in column 'ward' (client south: 1)" in said
    assert "1 of 1 sample has no label (client south: 1)" in said
    kept = load(path, label="outcome", client="site", skip=True, fill=-1)
    assert kept.x[:, 0].tolist() == [-1, 42, -1]
    assert kept.x[1, 1:3].tolist() == [0, 0]  # no ward
    assert "filled in: column 'age' lacked 2 of 4 values (-1)" in kept.notes


@pytest.mark.parametrize("write", [write_csv, write_parquet])
def test_scaled_columns_have_mean_0_and_deviation_1_and_gaps_may_take_the_mean(write, tmp_path):
    """Ages 31, 42, 53 and a gap: mean 42, deviation sqrt(2 * 11^2 / 3); the gap lies at the mean, which is 0."""
    rows = [dict(row) for row in ROWS]
    for row, age in zip(rows, (31, 42, 53, None)):
        row["age"] = age
    path = write(tmp_path, rows)
    source = load(path, label="outcome", client="site", scale=True, fill="mean")
    step = 11 / np.sqrt(2 * 121 / 3)
    assert source.x[:, 0].tolist() == pytest.approx([-step, 0, step, 0])
    assert source.encoding["scale"]["age"] == pytest.approx([42, 11 / step])
    assert not any("large" in note for note in source.notes)
    again = load(write(tmp_path, rows[:1]), schema=source.encoding)  # one row, encoded as all of them were
    assert torch.equal(again.x, source.x[:1])
    assert (again.y.tolist(), again.client.tolist()) == (source.y[:1].tolist(), source.client[:1].tolist())
    assert "Mend this, fill the gaps with fill=mean, or leave it out" in refused(write(tmp_path, rows), label="outcome")
    assert "fill must be a number or mean, not 'median'" in refused(path, label="outcome", fill="median")


def test_large_numbers_are_pointed_out(tmp_path):
    source = load(write_csv(tmp_path), label="outcome", client="site")
    assert "columns hold large numbers, taken as they are: 'age' (about" in source.notes[0]
    assert "scale=true" in source.notes[0]


def test_statistics_of_a_column_do_not_depend_on_its_blocks():
    """Chan's update over blocks gives what numpy gives over all of them at once."""
    values = np.random.default_rng(0).normal(1e6, 2.0, 1000)
    column = Column()
    for block in np.split(values, [1, 7, 500]):
        column.count(block)
    assert column.n == 1000
    assert (column.mean, column.deviation) == pytest.approx((values.mean(), values.std()))


def test_a_column_of_many_texts_with_a_space_in_its_name_says_to_quote_it(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("patient id,label\n" + "".join(f"p{k},0\n" for k in range(101)))
    assert "ignore=patient id, or take it as text=patient id (in quotes on a command line" in refused(path)


def test_a_schema_makes_sites_encode_alike(tmp_path):
    everyone = load(write_csv(tmp_path), label="outcome", client="site", schema=tmp_path / "s.json")
    write_csv(tmp_path, ROWS[:1])
    alone = load(tmp_path / "patients.csv", label="outcome", ignore="site", schema=str(tmp_path / "s.json"))
    assert torch.equal(alone.x, everyone.x[:1])
    assert (alone.y.tolist(), alone.classes) == ([1], ("ill", "well"))
    write_csv(tmp_path, [{**ROWS[0], "ward": "roof"}])
    said = refused(tmp_path / "patients.csv", label="outcome", ignore="site", schema=str(tmp_path / "s.json"))
    assert "1 of 1 row has a value in column 'ward' that the schema lacks: line 2 of patients.csv ('roof')" in said


def test_clients_in_two_spellings_are_two_with_skip_and_nothing_is_left_out(tmp_path):
    """No row is wrong, so none is left out: the note says what became of them. A row without x still is left out."""
    path = tmp_path / "t.csv"
    path.write_text("client,x,label\n" + "".join(f"{name},{k}.5,{k % 2}\n" for name in "aAbBc" for k in range(4)))
    assert refused(path).endswith("'a' and 'A', 'b' and 'B'. Mend this, or take such clients as different ones with "
                                  "skip=true.")
    source = load(path, skip=True)
    assert (len(source.x), len(set(source.client))) == (20, 5)
    (said,) = (note for note in source.notes if "spellings" in note)
    assert said == ("2 clients appear in several spellings: 'a' and 'A', 'b' and 'B'; they are taken as different "
                    "clients")
    path.write_text(path.read_text() + "A,,1\n")
    assert "take such clients as different ones with skip=true, or leave it out with skip=true" in refused(path)
    source = load(path, skip=True)
    assert len(source.x) == 20
    assert any(note.startswith("left out: 1 of 21 rows has no value") for note in source.notes)


def test_damaged_tables(tmp_path):
    path = write_csv(tmp_path)
    assert "did you mean 'outcome'" in refused(path, label="outcomes")
    assert "has no column 'label'; say which it is: label=NAME (there are age, ward" in refused(path)
    path.write_text("age,label\n1,0\n2\n")
    assert "patients.csv' cannot be read as a csv file: line 3 has 1 value, the header 2" in refused(path)
    path.write_text("client,age,label\n a,1,0\na ,2,1\nA,3,1\n")
    assert "1 client appears in several spellings: 'a' and 'A'. Mend this, or take such clients as d" in refused(path)
    path.write_text("label,note\n" + "\n".join(f"0,word {k}" for k in range(101)))
    assert "column 'note' holds neither numbers nor at most 100 different texts" in refused(path)
    whole = write_parquet(tmp_path).read_bytes()
    (tmp_path / "patients.parquet").write_bytes(whole[:-10])
    assert "patients.parquet' cannot be read as a parquet file" in refused(tmp_path / "patients.parquet")
    assert "unknown option of table data 'lable'; did you mean 'label'?" in refused(f"{path}:lable=x")


def test_a_parquet_file_with_arrays(tmp_path):
    rows = [{"x": [float(k), 0.0, 1.0, 2.0], "label": k % 2} for k in range(4)]
    source = load(f"{write_parquet(tmp_path, rows)}:shape=1,2,2")
    assert source.x.shape == (4, 1, 2, 2)
    assert source.x[:, 0, 0, 0].tolist() == [0, 1, 2, 3]
    write_parquet(tmp_path, [*rows, {"x": [1.0], "label": 0}])
    assert "column 'x' holds lists that are no numbers of one length" in refused(tmp_path / "patients.parquet")


# -- text --------------------------------------------------------------------------------------------------------------

TALK = [{"said": "Good day, Sir!", "label": "kind", "client": "a"}, {"said": "no. NO", "label": "rude", "client": "b"}]


def test_text_is_numbered_by_a_hash_of_its_words(tmp_path):
    source = load(write_csv(tmp_path, TALK), text="said", length=6)
    assert source.x.dtype == torch.int64
    good, day, comma, sir, mark, rest = source.x[0].tolist()
    no, stop, again, *padding = source.x[1].tolist()
    assert len({good, day, comma, sir, mark, no, stop}) == 7
    assert (no, rest, padding) == (again, 0, [0, 0, 0])  # case does not matter; texts are filled up with 0
    assert source.x[0, :5].min() > 0
    assert source.x.max() < 32_000  # the vocabulary of the text models
    assert load(write_parquet(tmp_path, TALK), text="said", length=6).x.tolist() == source.x.tolist()


def test_the_tokenizer_can_be_replaced(tmp_path):
    path = write_csv(tmp_path, TALK)
    assert load(path, text="said", tokenizer=lambda text: [len(text)], length=2).x.tolist() == [[14, 0], [6, 0]]
    (tmp_path / "own.py").write_text("def tokens(text):\n    return [ord(c) - 32 for c in text]\n")
    source = load(f"{path}:text=said,length=3,tokenizer={tmp_path}/own.py:tokens")
    assert source.x[1].tolist() == [ord("n") - 32, ord("o") - 32, ord(".") - 32]
    assert load(path, text="said", length=2, tokenizer="characters").x[1].tolist() == [1 + ord("n"), 1 + ord("o")]
    assert "gives the number 14; with words=10 it must be from 0 to 9" in refused(
        path, text="said", tokenizer=lambda text: [len(text)], words=10)
    assert "fails on 'Good day, Sir!': division by zero" in refused(path, text="said", tokenizer=lambda text: [1 / 0])
    assert "did you mean 'words'" in refused(f"{path}:text=said,tokenizer=word")
    assert "column 'n' holds numbers, so it is no text" in refused(
        write_csv(tmp_path, [{"n": 1, "label": 0}]), text="n")


# -- Hugging Face and flwr-datasets ------------------------------------------------------------------------------------


def test_a_dataset_and_its_folder(tmp_path):
    for source in (load(dataset(), client="who"), load(write_hub(tmp_path), client="who")):
        assert source.x.tolist() == [[i / 2, i] for i in range(6)]
        assert (source.y.tolist(), source.classes) == ([0, 1, 0, 0, 1, 0], ("no", "yes"))
        assert source.client.tolist() == ["u", "v"] * 3


def test_a_dataset_dict_is_a_split(tmp_path):
    import datasets

    both = datasets.DatasetDict(train=dataset(), test=dataset(2))
    both.save_to_disk(str(tmp_path / "both"))
    for source in (load(both, ignore="who"), load(tmp_path / "both", ignore="who")):
        assert source.split.tolist() == [0] * 6 + [2] * 2
    assert "'extra' is neither train" in refused(datasets.DatasetDict(train=dataset(), extra=dataset()))


def test_partitioners_name_the_clients():
    from flwr_datasets.partitioner import IidPartitioner, NaturalIdPartitioner

    partitioner = IidPartitioner(num_partitions=3)
    assert "the partitioner has no dataset" in refused(partitioner)
    partitioner.dataset = dataset()
    source = load(partitioner, ignore="who")
    # The partitioner deals contiguous shards: rows 0-1, 2-3, 4-5 are found again in column b.
    rows = {c: sorted(source.x[source.client == c, 1].tolist()) for c in range(3)}
    parts = {c: sorted(partitioner.load_partition(c)["b"]) for c in range(3)}
    assert rows == parts
    natural = NaturalIdPartitioner(partition_by="who")
    natural.dataset = dataset()
    source = load(natural, ignore="who")
    assert set(source.client) == {"u", "v"}
    assert source.x[source.client == "v", 1].tolist() == [1, 3, 5]


def test_a_dataset_of_images(tmp_path):
    import datasets
    from PIL import Image

    pictures = [Image.fromarray(np.full((3, 3), 51 * k, np.uint8)) for k in range(4)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"]),
                                  "writer": datasets.Value("string")})
    held = datasets.Dataset.from_dict({"image": pictures, "label": [0, 1, 1, 0], "writer": list("wwzz")}, features)
    source = load(held, client="writer")
    assert source.x.shape == (4, 1, 3, 3)
    assert torch.allclose(source.x[:, 0, 0, 0], scaled([0, 51, 102, 153]))
    assert (source.y.tolist(), source.client.tolist()) == ([0, 1, 1, 0], list("wwzz"))
    spoilt = datasets.Dataset.from_dict(
        {"image": [{"bytes": b"junk", "path": None}] * 2 + [{"bytes": _png(), "path": None}], "label": [0, 1, 1],
         "writer": list("wzz")}, features)
    said = refused(spoilt, client="writer")
    assert "2 of 3 files cannot be read (client w: 1, client z: 1): index 0 of dataset (no image)" in said


def _png() -> bytes:
    import io

    from PIL import Image

    held = io.BytesIO()
    Image.new("L", (3, 3)).save(held, "PNG")
    return held.getvalue()


def test_a_damaged_folder_of_a_dataset(tmp_path):
    root = write_hub(tmp_path)
    arrow = next(root.glob("*.arrow"))
    arrow.write_bytes(arrow.read_bytes()[:100])
    assert "saved' cannot be read as a folder that save_to_disk wrote" in refused(root)


def test_a_folder_of_a_dataset_without_samples(tmp_path):
    import datasets

    for name, held in {"columns": {"a": [], "label": []}, "nothing": {}}.items():
        datasets.Dataset.from_dict(held).save_to_disk(str(tmp_path / name))
        said = refused(tmp_path / name)
        assert f"{name}' cannot be read as a folder that save_to_disk wrote: {name} holds no samples" in said
    datasets.DatasetDict(train=dataset(), test=dataset(2).select([])).save_to_disk(str(tmp_path / "both"))
    assert "test holds no samples" in refused(tmp_path / "both")


# -- original binaries -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [write_cifar10, write_cifar10_bin])
def test_cifar10(write, tmp_path):
    source = load(write(tmp_path))
    assert source.x.shape == (24, 3, 32, 32)
    # Stored channel by channel, row by row, so a flat record read as [3, 32, 32] is the image.
    assert torch.allclose(source.x[5], scaled(cubes(4, 1, (3072,))[1].reshape(3, 32, 32)))
    assert source.y.tolist() == [(k + i) % 4 for k in range(6) for i in range(4)]
    assert source.split.tolist() == [0] * 20 + [2] * 4
    assert len(load(tmp_path, part="test").x) == 4  # the folder above is fine too


def test_cifar100_has_fine_and_coarse_labels(tmp_path):
    root = write_cifar100(tmp_path)
    assert load(root).y.tolist() == [50, 51, 52, 53, 51, 52, 53, 50]
    assert load(root, coarse=True).y.tolist() == [0, 1, 0, 1] * 2
    binary = tmp_path / "cifar-100-binary"
    binary.mkdir()
    for name in ("train.bin", "test.bin"):
        (binary / name).write_bytes(b"".join(bytes([i % 2, 50 + i]) + bytes(3072) for i in range(4)))
    assert load(binary).y.tolist() == [50, 51, 52, 53] * 2


def test_damaged_cifar(tmp_path):
    root = write_cifar10(tmp_path)
    (root / "data_batch_3").write_bytes((root / "data_batch_3").read_bytes()[:200])
    (root / "data_batch_5").unlink()
    said = refused(root)
    assert "2 of 6 files cannot be read: data_batch_3 (" in said
    assert "data_batch_5 (no such file)" in said
    assert len(load(root, skip=True).x) == 16
    binary = write_cifar10_bin(tmp_path)
    (binary / "test_batch.bin").write_bytes(bytes(3072))
    assert "test_batch.bin (3072 bytes are no whole number of records of 3073)" in refused(binary)


@pytest.mark.parametrize("zipped", [True, False])
def test_idx(zipped, tmp_path):
    source = load(write_idx(tmp_path, zipped=zipped))
    assert source.x.shape == (12, 1, 4, 4)
    assert torch.allclose(source.x[:6, 0], scaled(cubes(6, 0)))
    assert source.y.tolist() == [0, 1, 2] * 4
    assert source.split.tolist() == [0] * 6 + [2] * 6
    end = ".gz" if zipped else ""
    one = load(tmp_path / "mnist" / f"t10k-images-idx3-ubyte{end}:turned=true")
    assert torch.allclose(one.x[:, 0], scaled(cubes(6, 1).transpose(0, 2, 1)))
    assert one.split is None


def test_damaged_idx(tmp_path):
    root = write_idx(tmp_path)
    path = root / "train-images-idx3-ubyte.gz"
    whole = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(whole[:-5]))
    assert "1 of 4 files cannot be read: train-images-idx3-ubyte.gz (6 images are announced, 5 are there)" in (
        refused(root))
    path.write_bytes(gzip.compress(idx_bytes(cubes(5))))
    assert "(5 images but 6 labels)" in refused(root)
    (root / "train-labels-idx1-ubyte.gz").unlink()
    assert "has no labels beside it: train-labels-idx1-ubyte is missing" in refused(root)
    (tmp_path / "two").mkdir()
    for name in ("emnist-digits", "emnist-letters"):
        for kind in ("images-idx3", "labels-idx1"):
            (tmp_path / "two" / f"{name}-train-{kind}-ubyte").write_bytes(b"")
    assert "holds several sets (emnist-digits-train, emnist-letters-train); name one file" in refused(tmp_path / "two")


class Evil:
    def __reduce__(self):
        return os.system, ("touch pwned",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_run_nothing(protocol, tmp_path, monkeypatch):
    """The command of a hostile pickle is not run; the same pickle does run it with the pickle module."""
    monkeypatch.chdir(tmp_path)
    hostile = pickle.dumps({"data": Evil(), "labels": []}, protocol=protocol)
    Path("data_batch_1").write_bytes(hostile)
    assert f"it asks for {os.system.__module__}.system, which is not loaded from data files" in refused("data_batch_1")
    assert not Path("pwned").exists()
    pickle.loads(hostile)
    assert Path("pwned").exists()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_of_arrays_come_back(protocol):
    value = {"x": np.arange(6, dtype=">i4").reshape(2, 3).T, "y": [1, 2.5, "é", b"\xff", None, True, (3, 4)],
             "o": np.array([np.float32(0.5), "a"], dtype=object), "s": np.float64(2.5), "t": np.array(["ab", "c"])}
    found = pickles.loads(pickle.dumps(value, protocol=protocol))
    assert found["x"].tolist() == value["x"].tolist()
    assert found["y"] == value["y"]
    assert found["o"].tolist() == [0.5, "a"]
    assert (found["s"], found["t"].tolist()) == (2.5, ["ab", "c"])


# -- LEAF --------------------------------------------------------------------------------------------------------------


def test_leaf(tmp_path):
    source = load(write_leaf(tmp_path))
    assert source.client.tolist() == ["f00"] * 3 + ["f01"] * 3 + ["f00"] * 3 + ["f01"] * 3
    assert source.split.tolist() == [0] * 6 + [2] * 6
    assert source.x[:, 0].tolist() == [0, 1, 2, 0, 1, 2, 9, 10, 11, 9, 10, 11]
    federation = Experiment(data=str(tmp_path / "femnist"), val=0).federation()
    assert federation.client(1, "test")[0].tolist() == [[9, 0.25], [10, 1.25], [11, 2.25]]


def test_leaf_texts(tmp_path):
    """Shakespeare's samples are 80 characters and their label the next one; Sentiment140's are lists of fields."""
    plays = {"users": ["HAMLET"], "num_samples": [2], "user_data": {"HAMLET": {"x": ["to b", "o be"], "y": ["e", " "]}}}
    (tmp_path / "plays.json").write_text(json.dumps(plays).replace('" "', '"_"'))
    source = load(tmp_path / "plays.json", tokenizer="characters", length=4)
    assert source.x.tolist() == [[1 + ord(c) for c in text] for text in ("to b", "o be")]
    assert source.classes == ("_", "e")
    tweets = {"user_data": {"u": {"x": [["1", "hi there"], ["2", "bye"]], "y": [0, 1]}}}
    (tmp_path / "tweets.json").write_text(json.dumps(tweets))
    assert "say which field" in refused(tmp_path / "tweets.json")
    assert load(tmp_path / "tweets.json", field=1, length=2).x[1, 1] == 0  # one word, one padding


def test_damaged_leaf(tmp_path):
    root = write_leaf(tmp_path)
    held = leaf_json(["f00", "f01", "f02", "f03"])
    held["user_data"]["f00"]["y"] = [1]
    held["user_data"]["f01"]["x"][1] = [1.0]
    held["num_samples"][2] = 9
    del held["user_data"]["f03"]
    (root / "train" / "all_data_0.json").write_text(json.dumps(held))
    (root / "train" / "all_data_1.json").write_text(json.dumps(leaf_json(["f02"])))
    said = refused(root)
    for part in (
        "1 client has unequal numbers of samples and labels (client f00: 1): f00 (train/all_data_0.json: 3 samples, 1",
        "1 client has unusable samples (client f01: 1)",
        "f02 (train/all_data_0.json: 3 instead of 9)",
        "1 client appears twice: f02 (train/all_data_0.json and train/all_data_1.json)",
        "clients have no samples: f03 (listed in train/all_data_0.json)",
        "clients have no training samples: f00 (3 others), f01 (3 others)",
    ):
        assert part in said, said
    (root / "train" / "all_data_0.json").write_text(json.dumps(held)[:-40])
    assert "files cannot be read: train/all_data_0.json (" in refused(root)


# -- PFLlib ------------------------------------------------------------------------------------------------------------


def test_pfllib_keeps_its_split(tmp_path):
    root = write_pfllib(tmp_path)
    federation = Experiment(data=str(root), val=0).federation()
    assert federation.names == ("0", "1", "2")
    assert (federation.sizes("train").tolist(), federation.sizes("test").tolist()) == ([4] * 3, [3] * 3)
    assert federation.client(2, "test")[0].unique().tolist() == [12]  # written as 10 * (test = 1) + client
    single = load(root / "train" / "1.npz")
    assert single.split.tolist() == [0] * 4 + [2] * 3


def test_pfllib_texts_are_pairs_of_tokens_and_length(tmp_path):
    x = np.array([[[5, 6, 0], 2], [[7, 0, 0], 1]], dtype=object)
    (tmp_path / "train").mkdir()
    pfllib_file(tmp_path / "train" / "0.npz", x, np.array([0, 1]))
    assert load(tmp_path).x.tolist() == [[5, 6, 0], [7, 0, 0]]


def test_damaged_pfllib(tmp_path):
    root = write_pfllib(tmp_path, clients=4)
    (root / "train" / "1.npz").write_bytes((root / "train" / "1.npz").read_bytes()[:60])
    pfllib_file(root / "train" / "3.npz", np.zeros((0, 1, 2, 2), np.float32), np.zeros(0, int))
    pfllib_file(root / "train" / "02.npz", np.zeros((1, 1, 2, 2), np.float32), np.zeros(1, int))
    np.savez(root / "test" / "0.npz", data=np.array({"x": Evil()}, dtype=object))
    said = refused(root)
    assert "2 of 8 files cannot be read (client 1: 1, client 0: 1): train/1.npz (" in said
    assert "1 client appears twice: 2 (train/2.npz, train/02.npz)" in said
    assert "clients have no training samples: 1 (3 others), 3 (3 others)" in said


# -- one way in --------------------------------------------------------------------------------------------------------


def test_a_natural_split_leaves_validation_to_be_drawn(tmp_path):
    """Nothing moves into or out of the test samples; validation is drawn from training."""
    federation = Experiment(data=str(write_pfllib(tmp_path)), val=0.25).federation()
    assert [federation.sizes(s).tolist() for s in ("train", "val", "test")] == [[3] * 3, [1] * 3, [3] * 3]
    assert federation.recipe["split"]["given"] is True


def test_given_splits_need_one_entry_a_sample():
    with pytest.raises(CoterieError, match="3 samples but 2 are given a split"):
        Federation.from_assignment(np.ones((3, 1)), np.zeros(3, int), [np.arange(3)], given=np.zeros(2, int))


def test_other_partitions_deal_all_samples_anew(tmp_path):
    federation = Experiment(data=str(write_idx(tmp_path)), partition="iid", clients=2).federation()
    assert federation.sizes("train").sum() + federation.sizes("val").sum() + federation.sizes("test").sum() == 12


def test_an_experiment_keeps_the_spelling(tmp_path, monkeypatch):
    write_csv(tmp_path)
    monkeypatch.chdir(tmp_path)
    made = Experiment(data="patients.csv:label=outcome,client=site")
    kept = made.record()["data"]
    assert kept == f"{tmp_path.resolve()}/patients.csv:label=outcome,client=site"
    monkeypatch.chdir("/")
    assert Experiment(data=kept).federation().names == ("north", "south")
    (tmp_path / "e.toml").write_text('data = "patients.csv:label=outcome,client=site"')
    assert Experiment.read(tmp_path / "e.toml").federation().names == ("north", "south")


def test_a_site_reads_its_file(tmp_path):
    root = write_pfllib(tmp_path)
    site = site_at("1", root / "train" / "1.npz", tmp_path / "home", val=0)
    job = Job("fedavg", "linear", shape=(1, 2, 2), classes=2, outputs=2, experiment="e")
    data = site.federation(job)
    assert (data.names, data.sizes("train").tolist(), data.sizes("test").tolist()) == (("1",), [4], [3])


def test_unknown_things_are_sentences(tmp_path):
    (tmp_path / "data.xyz").write_text("?")
    assert "the format of" in refused(tmp_path / "data.xyz")
    assert "did you mean 'images'" in refused(tmp_path, format="image")
    assert "there is no file or folder" in refused(tmp_path / "missing" / "folder")
    assert "a dict cannot be read as data" in refused({})
    assert "holds no images" in refused(tmp_path)
    assert "digits has no options" in refused("digits:skip=true")


@pytest.mark.parametrize(("write", "module", "extra"), [(write_images, "PIL", "images"),
                                                        (write_parquet, "pyarrow.parquet", "tables"),
                                                        (write_hub, "datasets", "hub")])
def test_a_missing_library_is_named_with_what_to_type(write, module, extra, tmp_path, monkeypatch):
    path = write(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    assert f"pip install 'coterie[{extra}]'" in refused(path)


def test_the_command_line_reports_before_training(tmp_path, monkeypatch, capsys):
    root = write_images(tmp_path)
    (root / "bob" / "dog" / "1.png").write_bytes(b"junk")
    monkeypatch.chdir(tmp_path)
    words = ["coterie", "run", "fedavg", "--rounds", "1", "--model", "linear", "--data"]
    monkeypatch.setattr(sys, "argv", [*words, str(root), "--out", "bad"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith(
        "coterie: photos cannot be used as it is. 1 of 8 files cannot be read (client bob: 1): bob/dog/1.png (no image)"
    )
    assert not (tmp_path / "bad").exists()
    monkeypatch.setattr(sys, "argv", [*words, f"{root}:skip=true", "--out", "good"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert not stopped.value.code
    assert "left out: 1 of 8 files cannot be read (client bob: 1)" in capsys.readouterr().err
