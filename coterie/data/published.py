"""The data sets of published experiments, read from their original files. Nothing is downloaded.

Original training and test sets are merged, as the papers do; pixels are centred (from -1 to 1) or lie between 0 and 1,
as in the papers' programs.
"""

from __future__ import annotations

import csv
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie import memory
from coterie.data.partition import generator
from coterie.data.readers.binaries import cifar, idx
from coterie.data.readers.images import open_image
from coterie.data.readers.leaf import leaf
from coterie.data.readers.pieces import Source
from coterie.errors import CoterieError, unknown
from coterie.files import opened, read_text

PICTURES = {".jpg", ".jpeg", ".png"}
ISIC_METADATA = "ISIC_2019_Training_Metadata.csv"
TORN_LESIONS = (
    "pictures are split as in the published experiments, so several of one lesion may be trained and tested on; "
    "fedisic2019:lesions=true keeps a lesion on one side"
)
ISIC_CLASSES = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")


@dataclass(frozen=True)
class PublishedSet:
    """A set by the function that reads it: `read(folder, **options)`, where `folder` holds the expected `files`."""

    read: Callable[..., Source]
    folders: tuple[str, ...]  # where the archive unpacks to; the folder itself is looked at last
    files: tuple[str, ...]
    origin: str


def load(name: str, folder: str, **options: Any) -> Source:
    """The set called `name` out of the folder that was given, or the folder its archive makes there."""
    if name not in SETS:
        raise unknown("published data set", name, SETS)
    chosen = SETS[name]
    known = [p for p in inspect.signature(chosen.read).parameters if p != "folder"]
    for option in options:
        if option not in known:
            raise unknown(f"option of {name}", option, known) if known else CoterieError(f"{name} takes no options.")
    expected = ", ".join(file.replace("|", " or ") for file in chosen.files)
    if not folder:
        raise CoterieError(f"{name} is read from its original files: name their folder with --data-dir ({expected}).")
    places = [Path(folder) / inner for inner in chosen.folders] + [Path(folder)]
    for place in places:
        if all(_there(place, file) for file in chosen.files):
            return chosen.read(place, **options)
    raise CoterieError(
        f"{name} is not in '{folder}': expected {expected}"
        f"{f' there or in {chosen.folders[0]}' if chosen.folders else ''}. It is to be had from {chosen.origin}; "
        "nothing is downloaded here."
    )


def _there(place: Path, file: str) -> bool:
    """Whether a file, packed or not, or the first of a pattern is there; `a|b` is either."""
    if "|" in file:
        return any(_there(place, one) for one in file.split("|"))
    found = place.glob(file) if "*" in file else (p for p in (place / file, place / f"{file}.gz") if p.exists())
    return next(iter(found), None) is not None


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Whatever damaged bytes make a decoder raise becomes a sentence with the file's name."""
    try:
        yield
    except CoterieError:
        raise
    except OSError as reason:
        raise CoterieError(f"'{path}' cannot be read: {reason.strerror or reason}.") from reason
    except Exception as reason:
        raise CoterieError(f"'{path}' is damaged: {type(reason).__name__}: {reason}.") from reason


# -- pictures ----------------------------------------------------------------------------------------------------------


def _pictures(paths: Sequence[Path], size: int, centred: bool) -> Tensor:
    """`[N, 3, size, size]` float32, scaled by bilinear interpolation, from 0 to 1 or, `centred`, from -1 to 1.

    They are read one after another into one tensor, which lies in a file where half of the free memory is not enough.
    """
    from PIL import Image

    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= 4096:
        raise CoterieError(f"the size of pictures must be a whole number from 1 to 4096, not {size}.")
    shape = (len(paths), 3, size, size)
    fits = 4 * prod(shape) <= memory.free(torch.device("cpu")) // 2
    x = torch.empty(shape) if fits else memory.mapped(shape, torch.float32, "the pictures")
    for number, path in enumerate(paths):
        with _reading(path), open_image(path) as picture:
            pixels = picture.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
            x[number] = torch.from_numpy(np.array(pixels)).permute(2, 0, 1).float().div(255)
        if centred:
            x[number].sub_(0.5).div_(0.5)
    return x


def _listed(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in PICTURES)


def _classes(folder: Path) -> list[Path]:
    """The class folders, in the order that numbers them."""
    return sorted(p for p in folder.iterdir() if p.is_dir())


def _some(paths: Sequence[Path], folder: Path) -> None:
    if not paths:
        raise CoterieError(f"there are no pictures in '{folder}'.")


def tinyimagenet(folder: Path, size: int = 64) -> Source:
    """Training folders and the 10,000 validation pictures, whose classes stand in val_annotations.txt."""
    classes = _classes(folder / "train")
    number = {path.name: k for k, path in enumerate(classes)}
    found = [(path, k) for k, place in enumerate(classes) for path in _listed(place / "images")]
    notes = folder / "val" / "val_annotations.txt"
    with _reading(notes):
        lines = read_text(notes).splitlines()
    for count, line in enumerate(filter(None, lines), 1):
        name, _, rest = line.partition("\t")
        wnid = rest.partition("\t")[0]
        if wnid not in number:
            raise CoterieError(f"'{notes}', line {count}: class '{wnid[:40]}' has no folder in train.")
        found.append((folder / "val" / "images" / Path(name).name, number[wnid]))
    _some([path for path, _ in found], folder)
    x = _pictures([path for path, _ in found], size, centred=True)
    return Source(x, torch.tensor([k for _, k in found]), None, "tinyimagenet")


def kvasir(folder: Path, size: int = 64) -> Source:
    """Kvasir v2: a folder of pictures for each of the 8 classes."""
    found = [(path, k) for k, place in enumerate(_classes(folder)) for path in _listed(place)]
    _some([path for path, _ in found], folder)
    x = _pictures([path for path, _ in found], size, centred=False)
    return Source(x, torch.tensor([k for _, k in found]), None, "kvasir")


def flowers102(folder: Path, size: int = 64) -> Source:
    """jpg/image_00001.jpg, ...; labels from 1 in imagelabels.mat; setid.mat lists which picture is in which set."""
    labels = _matrix(folder / "imagelabels.mat", ("labels",))["labels"]
    sets = _matrix(folder / "setid.mat", ("trnid", "valid", "tstid"))
    ids = np.concatenate([sets[name] for name in ("trnid", "valid", "tstid")])
    if not len(ids) or ids.min() < 1 or ids.max() > len(labels) or labels.min() < 1:
        raise CoterieError(f"'{folder}': setid.mat names pictures that imagelabels.mat ({len(labels)}) does not have.")
    x = _pictures([folder / "jpg" / f"image_{k:05d}.jpg" for k in ids.tolist()], size, centred=True)
    return Source(x, torch.from_numpy(labels[ids - 1] - 1), None, "flowers102")


def _matrix(path: Path, names: Sequence[str]) -> dict[str, NDArray[np.int64]]:
    """Rows of whole numbers out of a MATLAB file."""
    from scipy.io import loadmat

    with _reading(path):
        found = loadmat(path, variable_names=list(names))
        return {name: np.asarray(found[name]).reshape(-1).astype(np.int64) for name in names}


def fedisic2019(folder: Path, size: int = 224, lesions: bool = False) -> Source:
    """ISIC 2019's training pictures; the 6 centres are the clients.

    Classes and centres come from FLamby's table `train_test_split` (image, target, center) where it is there, else from
    ISIC's ground truth and metadata and HAM10000's metadata: a lesion's id begins with BCN, MSK or HAM, and HAM10000
    names the part of Vienna's or Rosendahl's collection. Pictures without a centre are left out. There are several
    pictures of some lesions, and the published experiments split pictures; `lesions` keeps those of one lesion on one
    side, by ISIC's metadata.
    """
    table = next((p for p in (folder / "train_test_split", folder / "train_test_split.csv") if p.is_file()), None)
    rows = _flamby(table) if table is not None else _isic(folder)
    places = [p for p in (folder / "ISIC_2019_Training_Input_preprocessed", folder / "ISIC_2019_Training_Input", folder)
              if p.is_dir()]
    place = next((p for p in places if (p / f"{rows[0][0]}.jpg").is_file()), places[0])
    x = _pictures([place / f"{name}.jpg" for name, _, _ in rows], size, centred=False)
    y = torch.tensor([label for _, label, _ in rows])
    made = Source(x, y, np.array([centre for _, _, centre in rows]), "fedisic2019")
    if not lesions:
        return replace(made, notes=(TORN_LESIONS,))
    whose = {row["image"]: row["lesion_id"] for _, row in _table(folder / ISIC_METADATA, ("image", "lesion_id"))}
    # A picture whose lesion nobody noted is one of its own.
    return replace(made, group=np.array([whose.get(Path(name).stem) or name for name, _, _ in rows]))


def _flamby(path: Path) -> list[tuple[str, int, str]]:
    found = []
    for number, row in _table(path, ("image", "target", "center")):
        label = _whole(row["target"], path, number, len(ISIC_CLASSES))
        found.append((Path(row["image"]).name, label, f"centre {_whole(row['center'], path, number, 6)}"))
    return _rows(found, path)


def _isic(folder: Path) -> list[tuple[str, int, str]]:
    truth, metadata = folder / "ISIC_2019_Training_GroundTruth.csv", folder / ISIC_METADATA
    ham = next((p for p in (folder / "HAM10000_metadata", folder / "HAM10000_metadata.csv") if p.is_file()), None)
    if ham is None or not truth.is_file() or not metadata.is_file():
        raise CoterieError(
            f"'{folder}' lacks FLamby's train_test_split, or else {truth.name}, {metadata.name} and HAM10000_metadata."
        )
    label = {}
    for number, row in _table(truth, ("image", *ISIC_CLASSES)):
        hot = [k for k, name in enumerate(ISIC_CLASSES) if row[name].strip() in ("1", "1.0")]
        if len(hot) != 1:
            raise CoterieError(f"'{truth}', line {number}: {len(hot)} of the classes {', '.join(ISIC_CLASSES)} are 1.")
        label[row["image"]] = hot[0]
    part = {row["image_id"]: row["dataset"] for _, row in _table(ham, ("image_id", "dataset"))}
    found = []
    for _, row in _table(metadata, ("image", "lesion_id")):
        kind = row["lesion_id"][:3]
        if kind in ("BCN", "MSK", "HAM") and row["image"] in label and (kind != "HAM" or row["image"] in part):
            centre = kind if kind != "HAM" else f"HAM_{part[row['image']]}"
            found.append((Path(row["image"]).name, label[row["image"]], centre))
    return _rows(found, metadata)


def _rows(found: list[tuple[str, int, str]], path: Path) -> list[tuple[str, int, str]]:
    if not found:
        raise CoterieError(f"'{path}' names no picture with a centre.")
    return found


def _table(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """The lines of a csv file by column, with their numbers."""
    with _reading(path), opened(path, newline="") as file:
        reader = csv.DictReader(file)
        if missing := [name for name in columns if name not in (reader.fieldnames or ())]:
            raise CoterieError(f"'{path}' has no column '{missing[0]}'; it has {', '.join(reader.fieldnames or ())}.")
        for row in reader:
            if any(row[name] is None for name in columns):
                raise CoterieError(f"'{path}', line {reader.line_num}: a value is missing.")
            yield reader.line_num, row


def _whole(text: str, path: Path, line: int, end: int) -> int:
    if not re.fullmatch(r"\s*\d{1,3}(\.0)?\s*", text) or float(text) >= end:
        raise CoterieError(f"'{path}', line {line}: '{text[:40]}' is no whole number from 0 to {end - 1}.")
    return int(float(text))


# -- text --------------------------------------------------------------------------------------------------------------

PAD, CLS, UNK, EOS = range(4)


def agnews(folder: Path, vocabulary: int = 32_000, length: int = 200) -> Source:
    """train.csv and test.csv: class from 1, title, description. The most frequent words get numbers, the first 4 are
    padding, start, unknown and end; a text is the start and its words, cut or padded to `length`."""
    if vocabulary < 5 or length < 2:
        raise CoterieError(f"agnews needs 5 words and a length of 2 at least, not {vocabulary} and {length}.")
    labels: list[int] = []
    texts: list[list[str]] = []
    for path in (folder / "train.csv", folder / "test.csv"):
        with _reading(path), opened(path, newline="") as file:
            for number, line in enumerate(csv.reader(file), 1):
                if len(line) != 3 or line[0].strip() not in ("1", "2", "3", "4"):
                    if number == 1 and len(line) == 3:  # some copies begin with the columns' names
                        continue
                    raise CoterieError(f"'{path}', line {number}: expected a class from 1 to 4, title and description.")
                labels.append(int(line[0]) - 1)
                texts.append(words(f"{line[1]} {line[2]}"))
    if not texts:
        raise CoterieError(f"'{folder}' holds no texts.")
    counts = Counter(word for text in texts for word in text)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[: vocabulary - 4]
    number_of = {word: k for k, word in enumerate(ranked, 4)}
    x = torch.full((len(texts), length), PAD)
    for row, text in zip(x, texts, strict=True):
        tokens = [CLS, *(number_of.get(word, UNK) for word in text)][:length]
        row[: len(tokens)] = torch.tensor(tokens)
    return Source(x, torch.tensor(labels), None, "agnews")


def words(text: str) -> list[str]:
    """Lower-case English words; punctuation that ends or joins phrases is a word of its own, the rest separates."""
    text = re.sub(r'["]|<br\s*/?>', " ", text.lower())
    text = re.sub(r"[;:]", " ", text)
    return re.sub(r"(['.,()!?])", r" \1 ", text).split()


# -- digits, letters and small pictures --------------------------------------------------------------------------------


def cifar10(folder: Path) -> Source:
    """The five batches and the test batch, as binary files or as pickles."""
    return replace(cifar(folder), split=None)


def cifar100(folder: Path) -> Source:
    """train and test, as binary files or as pickles; of the coarse and fine labels, the fine ones."""
    return replace(cifar(folder), split=None)


def mnist(folder: Path) -> Source:
    """The four IDX files, packed or not."""
    return replace(idx(folder), split=None)


CHARACTERS = tuple(str(k) for k in range(62))
"""FEMNIST's and EMNIST byclass's classes, whichever of them the writers that are kept have drawn."""


def femnist(folder: Path, writers: int = 20) -> Source:
    """LEAF's FEMNIST by writers; the `writers` with most samples are kept, the first names among equals."""
    whole = leaf(folder, shape="1,28,28")
    if whole.client is None:
        raise CoterieError(f"'{folder}' holds no writers.")
    names, sizes = np.unique(whole.client, return_counts=True)
    kept = names[np.argsort(-sizes, kind="stable")[:writers]]
    rows = np.concatenate([np.flatnonzero(whole.client == name) for name in kept])
    x = memory.taken(whole.x, torch.from_numpy(rows)).to(torch.float32)
    y = whole.y[torch.from_numpy(rows)]
    return Source(x.sub_(0.5).div_(0.5), y, whole.client[rows], "femnist", classes=CHARACTERS)


def femnist_by_class(folder: Path, writers: int = 20, per: int = 500, seed: int = 1) -> Source:
    """EMNIST byclass cut into pseudo-writers of about `per` samples of one class; the `writers` largest are kept.

    This is what FedFew's released program calls FEMNIST: every client holds a single class.
    """
    if per < 1 or writers < 1:
        raise CoterieError(f"femnist-by-class needs at least 1 writer of at least 1 sample, not {writers} of {per}.")
    files = [folder / f"emnist-byclass-{part}-images-idx3-ubyte" for part in ("train", "test")]
    parts = [idx(file if file.exists() else file.with_name(f"{file.name}.gz")) for file in files]
    x, y = torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts])
    labels, rng = y.numpy(), generator(seed, "pseudo-writers")
    chunks = []
    for label in np.unique(labels):
        mine = rng.permutation(np.flatnonzero(labels == label))
        chunks += [(f"{label}.{k}", some) for k, some in enumerate(np.array_split(mine, max(len(mine) // per, 1)))]
    kept = sorted(chunks, key=lambda chunk: -len(chunk[1]))[:writers]
    rows = torch.from_numpy(np.concatenate([some for _, some in kept]))
    client = np.concatenate([np.full(len(some), name) for name, some in kept])
    return Source(x[rows], y[rows], client, "femnist-by-class", classes=CHARACTERS)


_IDX = ("{}-images-idx3-ubyte", "{}-labels-idx1-ubyte")

SETS: dict[str, PublishedSet] = {
    "cifar10": PublishedSet(
        cifar10, ("cifar-10-batches-bin", "cifar-10-batches-py"),
        ("data_batch_1.bin|data_batch_1", "data_batch_5.bin|data_batch_5", "test_batch.bin|test_batch"),
        "https://www.cs.toronto.edu/~kriz/cifar.html"),
    "cifar100": PublishedSet(
        cifar100, ("cifar-100-binary", "cifar-100-python"), ("train.bin|train", "test.bin|test"),
        "https://www.cs.toronto.edu/~kriz/cifar.html"),
    "tinyimagenet": PublishedSet(
        tinyimagenet, ("tiny-imagenet-200",), ("train", "val/images", "val/val_annotations.txt"),
        "http://cs231n.stanford.edu/tiny-imagenet-200.zip"),
    "agnews": PublishedSet(
        agnews, ("ag_news_csv", "agnews"), ("train.csv", "test.csv"),
        "the authors of Character-level convolutional networks (ag_news_csv.tar.gz)"),
    "femnist": PublishedSet(
        femnist, ("femnist/data/all_data", "femnist"), ("*.json",),
        "https://github.com/TalwalkarLab/leaf, whose preprocess.sh makes data/all_data/*.json"),
    "femnist-by-class": PublishedSet(
        femnist_by_class, ("emnist", "gzip"),
        tuple(f.format(f"emnist-byclass-{k}") for k in ("train", "test") for f in _IDX),
        "https://www.nist.gov/itl/products-and-services/emnist-dataset (gzip.zip)"),
    "mnist": PublishedSet(
        mnist, ("mnist", "MNIST/raw"), tuple(f.format(k) for k in ("train", "t10k") for f in _IDX),
        "http://yann.lecun.com/exdb/mnist or its mirrors"),
    "kvasir": PublishedSet(
        kvasir, ("kvasir-dataset-v2",), ("*/*.jpg",), "https://datasets.simula.no/kvasir (kvasir-dataset-v2.zip)"),
    "fedisic2019": PublishedSet(
        fedisic2019, ("fed_isic2019", "isic2019"), ("ISIC_2019_Training_Input*",),
        "https://challenge.isic-archive.com/data/#2019, with the table of centres (train_test_split) of "
        "https://github.com/owkin/FLamby or the metadata of ISIC 2019 and HAM10000"),
    "flowers102": PublishedSet(
        flowers102, ("flowers-102", "102flowers"), ("jpg", "imagelabels.mat", "setid.mat"),
        "https://www.robots.ox.ac.uk/~vgg/data/flowers/102"),
}
