"""Every published set from a tiny copy in its original format: values, order, clients, and what is wrong with it."""

from __future__ import annotations

import numpy as np
import published_sets as made
import pytest
import torch

from coterie.data import published
from coterie.errors import CoterieError


def near(x, k, centred):
    """A flat picture has its colour everywhere; JPEG moves it by a few of 255 steps."""
    wanted = torch.tensor(made.colour(k)) / 255
    wanted = (wanted - 0.5) / 0.5 if centred else wanted
    return bool((x - wanted[:, None, None]).abs().max() < 0.08)


@pytest.mark.parametrize(("name", "classes", "per"), [("cifar10", 10, 8), ("cifar100", 100, 3)])
def test_cifar_keeps_every_byte(tmp_path, name, classes, per):
    y, pixels = made.cifar(tmp_path, classes, per)
    found = published.load(name, str(tmp_path))
    assert found.y.tolist() == y.tolist()  # of CIFAR-100 the fine labels; the coarse one is another number
    assert torch.equal(found.x, (torch.from_numpy(pixels).float() / 255 - 0.5) / 0.5)
    inner = next(tmp_path.iterdir())
    assert torch.equal(published.load(name, str(inner)).x, found.x)  # the archive's own folder may be named, too


def test_mnist_packed_and_unpacked(tmp_path):
    y, x = made.mnist(tmp_path)
    found = published.load("mnist", str(tmp_path))
    assert found.x.shape == (120, 1, 28, 28)
    assert found.y.tolist() == y.tolist()
    assert torch.equal(found.x[:, 0], (torch.from_numpy(x).float() / 255 - 0.5) / 0.5)


def test_femnist_takes_the_largest_writers(tmp_path):
    data = made.femnist(tmp_path, sizes=(9, 14, 6, 11, 12))
    found = published.load("femnist", str(tmp_path), writers=3)
    assert list(dict.fromkeys(found.client)) == ["f0001", "f0004", "f0003"]
    first = torch.tensor(data["f0001"]["x"][0]).reshape(28, 28)
    torch.testing.assert_close(found.x[0, 0], (first - 0.5) / 0.5)
    assert len(found.x) == 14 + 12 + 11


def test_femnist_as_released_gives_clients_of_one_class(tmp_path):
    """Classes of 40, 25, 12, 30 and 8 in chunks of about 10: 4x10, 2 of 13 and 12, 12, 3x10, 8; the four largest."""
    y, _ = made.emnist(tmp_path)
    found = published.load("femnist-by-class", str(tmp_path), writers=4, per=10)
    sizes = {name: int((found.client == name).sum()) for name in dict.fromkeys(found.client)}
    assert sizes == {"1.0": 13, "1.1": 12, "2.0": 12, "0.0": 10}
    for name in sizes:
        assert len(set(found.y.numpy()[found.client == name])) == 1
    assert np.isin(found.y.numpy(), y).all()


def test_tinyimagenet_reads_folders_and_annotations(tmp_path):
    made.tinyimagenet(tmp_path)
    found = published.load("tinyimagenet", str(tmp_path))
    assert found.x.shape == (3 * 12 + 6, 3, 64, 64)
    assert found.y.tolist() == [0] * 12 + [1] * 12 + [2] * 12 + [i % 3 for i in range(6)]
    assert all(near(x, int(k), True) for x, k in zip(found.x, found.y))


def test_kvasir_is_scaled_but_not_centred(tmp_path):
    made.kvasir(tmp_path)
    found = published.load("kvasir", str(tmp_path))
    assert found.x.shape == (36, 3, 64, 64)
    assert all(near(x, int(k), False) for x, k in zip(found.x, found.y))
    assert published.load("kvasir", str(tmp_path), size=8).x.shape == (36, 3, 8, 8)


def test_flowers_labels_count_from_zero_in_the_order_of_the_sets(tmp_path):
    labels = made.flowers102(tmp_path)
    found = published.load("flowers102", str(tmp_path))
    assert found.y.tolist() == (labels - 1).tolist()
    assert all(near(x, int(k), True) for x, k in zip(found.x, found.y))


@pytest.mark.parametrize("flamby", [True, False])
def test_isic_knows_its_centres(tmp_path, flamby):
    """From FLamby's table, or from the three original ones; a picture without a lesion's id has no centre."""
    names, centre = made.fedisic2019(tmp_path, flamby=flamby)
    found = published.load("fedisic2019", str(tmp_path), size=16)
    assert found.x.shape == (36, 3, 16, 16)
    assert found.y.tolist() == [k % 8 for k in range(len(names))]
    assert found.client.tolist() == ([f"centre {k % 6}" for k in range(36)] if flamby else centre)
    assert all(near(x, int(k), False) for x, k in zip(found.x, found.y))


def test_isic_keeps_lesions_together_where_asked_and_says_where_not(tmp_path):
    """Every second picture of a centre shows the lesion of the one before."""
    made.fedisic2019(tmp_path, flamby=False)
    file = tmp_path / "isic2019" / published.ISIC_METADATA
    head, *lines = file.read_text().splitlines()
    cells = [line.split(",") for line in lines]
    for k, cell in enumerate(cells[:36]):
        if k % 12 >= 6:
            cell[3] = cells[k - 6][3]
    file.write_text("\n".join([head, *(",".join(cell) for cell in cells)]) + "\n")
    plain = published.load("fedisic2019", str(tmp_path), size=16)
    assert plain.group is None
    assert "fedisic2019:lesions=true keeps a lesion on one side" in plain.notes[0]
    found = published.load("fedisic2019", str(tmp_path), size=16, lesions=True)
    assert found.notes == ()
    assert found.group.tolist() == [cell[3] for cell in cells[:36]]
    assert len(set(found.group)) == 18


def test_agnews_numbers_words_by_frequency(tmp_path):
    lines = made.agnews(tmp_path)
    found = published.load("agnews", str(tmp_path), length=12, vocabulary=50)
    assert found.x.shape == (40, 12)
    assert found.y.tolist() == [label - 1 for label, _, _ in lines]
    first = published.words(f"{lines[0][1]} {lines[0][2]}")
    assert first == ["title", "0", ",", "with", "'", "quotes", "'", "a", "word", "more", "number", "0", ".", "fed", "(",
                     "raises", ")", "rates", "!"]
    assert found.x[0, 0] == published.CLS
    assert found.x[0, 5] == found.x[0, 7] == 4  # the apostrophe, twice in every text, is the most frequent word
    assert (published.load("agnews", str(tmp_path), length=40).x[:, 20:] == published.PAD).all()
    few = published.load("agnews", str(tmp_path), vocabulary=6).x
    assert few.max() == 5
    assert (few == published.UNK).any()


@pytest.mark.parametrize("name", sorted(published.SETS))
def test_a_set_that_is_not_there_says_what_is_missing_and_where_it_is_from(tmp_path, name):
    with pytest.raises(CoterieError, match=r"is not in .*expected .*to be had from .*nothing is downloaded"):
        published.load(name, str(tmp_path))
    with pytest.raises(CoterieError, match="--data-dir"):
        published.load(name, "")
    made.WRITERS[name](tmp_path)
    with pytest.raises(CoterieError, match=r"unknown option of|takes no options"):
        published.load(name, str(tmp_path), sizes=3)


def shorten(path):
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize(("name", "file", "spoil", "says"), [
    ("cifar10", "cifar-10-batches-bin/data_batch_2.bin", shorten,
     "data_batch_2.bin .* no whole number of records of 3073"),
    ("mnist", "mnist/train-images-idx3-ubyte.gz", shorten, "train-images-idx3-ubyte.gz"),
    ("mnist", "mnist/t10k-labels-idx1-ubyte", shorten, "t10k-labels-idx1-ubyte"),
    ("femnist", "femnist/data/all_data/all_data_0.json", shorten, "all_data_0.json"),
    ("tinyimagenet", "tiny-imagenet-200/train/n00000001/images/n00000001_3.JPEG", lambda p: p.write_bytes(b"no"),
     "n00000001_3.JPEG' cannot be read|n00000001_3.JPEG' is damaged"),
    ("tinyimagenet", "tiny-imagenet-200/val/val_annotations.txt", lambda p: p.write_text("val_0.JPEG\tn9\t0\n"),
     "line 1: class 'n9' has no folder"),
    ("kvasir", "kvasir-dataset-v2/polyps/polyps-1.jpg", lambda p: p.write_bytes(p.read_bytes()[:300]), "polyps-1.jpg'"),
    ("flowers102", "flowers-102/imagelabels.mat", shorten, "imagelabels.mat' cannot be read"),
    ("flowers102", "flowers-102/jpg/image_00003.jpg", lambda p: p.unlink(),
     "image_00003.jpg' cannot be read: No such file"),
    ("fedisic2019", "isic2019/train_test_split", lambda p: p.write_text(p.read_text().replace("target", "class", 1)),
     "has no column 'target'"),
    ("fedisic2019", "isic2019/train_test_split", lambda p: p.write_text(p.read_text().replace(",4,4,", ",9,4,", 1)),
     "line 6: '9' is no whole number from 0 to 7"),
    ("agnews", "ag_news_csv/test.csv", lambda p: p.write_text(p.read_text() + "7,a,b\n"),
     r"test.csv', line 11: expected a class"),
])
def test_damage_is_a_sentence_with_the_file(tmp_path, name, file, spoil, says):
    made.WRITERS[name](tmp_path)
    spoil(tmp_path / file)
    with pytest.raises(CoterieError, match=says):
        published.load(name, str(tmp_path))
