"""Tiny data sets written in the original formats of the published ones, and what was written."""

from __future__ import annotations

import csv
import gzip
import json
import struct

import numpy as np
from PIL import Image
from scipy.io import savemat


def colour(k):
    """A colour that says which picture it is: JPEG keeps flat colours within a few steps of 255."""
    return (40 * k % 256, 255 - 25 * k % 256, 97 * k % 256)


def picture(path, k, size=(20, 16)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour(k)).save(path, quality=95)


def cifar(root, classes, per=4):
    """cifar-10-batches-bin or cifar-100-binary: `per` pictures of each of `classes` classes, dealt over the files."""
    rng = np.random.default_rng(0)
    y = np.tile(np.arange(classes, dtype=np.uint8), per)
    pixels = rng.integers(0, 256, (len(y), 3072), dtype=np.uint8)
    ten = classes == 10
    folder = root / ("cifar-10-batches-bin" if ten else "cifar-100-binary")
    folder.mkdir(parents=True)
    labels = y[:, None] if ten else np.column_stack([y // 5, y])
    names = [*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin"] if ten else ["train.bin", "test.bin"]
    for name, part in zip(names, np.array_split(np.column_stack([labels, pixels]), len(names)), strict=True):
        part.tofile(folder / name)
    return y, pixels.reshape(-1, 3, 32, 32)


def idx(path, array, packed=False):
    data = b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(path.name + ".gz").write_bytes(gzip.compress(data)) if packed else path.write_bytes(data)


def mnist(root, per=12):
    rng = np.random.default_rng(1)
    y = np.tile(np.arange(10, dtype=np.uint8), per)
    x = rng.integers(0, 256, (len(y), 28, 28), dtype=np.uint8)
    for name, part in (("train", slice(0, 90)), ("t10k", slice(90, None))):
        idx(root / "mnist" / f"{name}-images-idx3-ubyte", x[part], packed=name == "train")
        idx(root / "mnist" / f"{name}-labels-idx1-ubyte", y[part], packed=name == "train")
    return y, x


def emnist(root):
    """Classes 0 to 4 with 40, 25, 12, 30 and 8 samples."""
    y = np.repeat(np.arange(5, dtype=np.uint8), (40, 25, 12, 30, 8))
    x = np.random.default_rng(2).integers(0, 256, (len(y), 28, 28), dtype=np.uint8)
    order = np.random.default_rng(3).permutation(len(y))
    for name, part in (("train", order[:100]), ("test", order[100:])):
        idx(root / "gzip" / f"emnist-byclass-{name}-images-idx3-ubyte", x[part], packed=True)
        idx(root / "gzip" / f"emnist-byclass-{name}-labels-idx1-ubyte", y[part], packed=True)
    return y, x


def femnist(root, sizes=(9, 14, 6, 11, 12)):
    """LEAF's json, two files, a writer for each size."""
    rng = np.random.default_rng(4)
    data = {f"f{k:04d}": {"x": rng.random((n, 784)).round(3).tolist(), "y": (np.arange(n) % 62).tolist()}
            for k, n in enumerate(sizes)}
    folder = root / "femnist" / "data" / "all_data"
    folder.mkdir(parents=True)
    for number, names in enumerate((list(data)[:3], list(data)[3:])):
        part = {"users": names, "num_samples": [len(data[n]["y"]) for n in names],
                "user_data": {n: data[n] for n in names}}
        (folder / f"all_data_{number}.json").write_text(json.dumps(part))
    return data


def tinyimagenet(root, classes=3, per=12, val=6):
    folder = root / "tiny-imagenet-200"
    names = [f"n{k:08d}" for k in range(classes)]
    for k, name in enumerate(names):
        for i in range(per):
            picture(folder / "train" / name / "images" / f"{name}_{i}.JPEG", k, (64, 64))
    lines = []
    for i in range(val):
        picture(folder / "val" / "images" / f"val_{i}.JPEG", i % classes, (64, 64))
        lines.append(f"val_{i}.JPEG\t{names[i % classes]}\t0\t0\t63\t63\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    (folder / "wnids.txt").write_text("\n".join(names) + "\n")


def kvasir(root, classes=("dyed-lifted-polyps", "esophagitis", "polyps"), per=12):
    for k, name in enumerate(classes):
        for i in range(per):
            picture(root / "kvasir-dataset-v2" / name / f"{name}-{i}.jpg", k, (90, 70))


def flowers102(root, count=36, classes=3):
    labels = np.arange(count) % classes + 1
    for k in range(count):
        picture(root / "flowers-102" / "jpg" / f"image_{k + 1:05d}.jpg", int(labels[k]) - 1, (50, 70))
    savemat(root / "flowers-102" / "imagelabels.mat", {"labels": labels[None].astype(np.uint8)})
    ids = np.arange(1, count + 1)
    sets = {"trnid": ids[None, :10], "valid": ids[None, 10:20], "tstid": ids[None, 20:]}
    savemat(root / "flowers-102" / "setid.mat", sets)
    return labels


ISIC = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")


def fedisic2019(root, per=6, flamby=True):
    """Six centres, `per` pictures each; the class is the picture's number modulo 8."""
    folder = root / "isic2019"
    parts = ("vidir_molemax", "vidir_modern", "rosendahl", "vienna_dias")
    centres = ["BCN", "MSK", *(f"HAM_{part}" for part in parts)]
    names = [f"ISIC_{k:07d}" for k in range(6 * per)]
    for k, name in enumerate(names):
        picture(folder / "ISIC_2019_Training_Input" / f"{name}.jpg", k % 8, (60, 45))
    centre = [centres[k % 6] for k in range(len(names))]
    if flamby:
        lines = [("", "image", "target", "center", "fold", "fold2")]
        lines += [(k, name, k % 8, k % 6, "train", f"train_{k % 6}") for k, name in enumerate(names)]
        _table(folder / "train_test_split", lines)
        return names, centre
    _table(folder / "ISIC_2019_Training_GroundTruth.csv", [("image", *ISIC, "UNK")] + [
        (name, *(float(c == k % 8) for c in range(9))) for k, name in enumerate(names)])
    metadata = [("image", "age_approx", "anatom_site_general", "lesion_id", "sex")]
    metadata += [(name, "", "", f"{where[:3]}_{k:07d}", "") for k, (name, where) in enumerate(zip(names, centre))]
    metadata += [("ISIC_9999999", "", "", "", "")]  # without a lesion's id nobody knows its centre
    _table(folder / "ISIC_2019_Training_Metadata.csv", metadata)
    both = zip(names, centre, strict=True)
    ham = [(f"HAM_{name}", name, "nv", where[4:]) for name, where in both if where[:3] == "HAM"]
    _table(folder / "HAM10000_metadata", [("lesion_id", "image_id", "dx", "dataset"), *ham])
    return names, centre


def agnews(root, per=10):
    folder = root / "ag_news_csv"
    folder.mkdir(parents=True)
    lines = [(k % 4 + 1, f"Title {k}, with 'quotes'", f'A "word" more; number {k % 4}. Fed (raises) rates!')
             for k in range(4 * per)]
    for name, part in (("train.csv", lines[: 3 * per]), ("test.csv", lines[3 * per :])):
        with (folder / name).open("w", newline="") as file:
            csv.writer(file, quoting=csv.QUOTE_ALL).writerows(part)
    return lines


def _table(path, lines):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(lines)


WRITERS = {
    "cifar10": lambda root: cifar(root, 10), "cifar100": lambda root: cifar(root, 100, 2), "mnist": mnist,
    "femnist": femnist, "femnist-by-class": emnist, "tinyimagenet": tinyimagenet, "kvasir": kvasir,
    "flowers102": flowers102, "fedisic2019": fedisic2019, "agnews": agnews,
}
