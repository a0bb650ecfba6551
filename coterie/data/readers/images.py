"""Images: folders `client/class/image` and `class/image`, and a csv index of paths."""

from __future__ import annotations

import csv
import io
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from coterie.data.labels import are_targets, measured
from coterie.data.readers.formats import Format
from coterie.data.readers.pieces import SPLIT_WORDS, Array, Piece, Source, collect, from_pixels, names
from coterie.data.readers.refusals import Problems, reading, reason, refuse_bomb
from coterie.data.readers.tables.rows import CSV, WHOLE, Dialect, header, parsed
from coterie.data.readers.tables.suspicious import unused_groups
from coterie.data.readers.unread import unread
from coterie.errors import CoterieError, NoLabels, unknown
from coterie.files import opened, opened_bytes
from coterie.memory import BLOCK

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
DECODED = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
"""Those that Pillow decodes by itself; others would start programs."""
INDEX = "index.csv"
MOST_PIXELS = 10**8
Colour = Literal["auto", "grey", "rgb"]
LIBRARY = "images need Pillow; install it with: pip install 'coterie[images]'"
TOP = {8: 255, 16: 65535}
"""Depth in bits -> the largest number of a pixel, which is white."""
FAR_LESS = 4
"""16-bit images that use less than one part in so many of their range are pointed out: 12 bits in 16 are one in 16."""


@dataclass(frozen=True)
class Picture:
    """One image that is yet to be decoded: a file, or bytes that a table holds."""

    where: str
    content: Path | bytes
    label: Any
    client: str | None = None
    split: int | None = None
    group: str | None = None


@dataclass
class Seen:
    """Sizes and kinds of images, from their headers; and the range of the deep ones, once they are decoded."""

    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    coloured: bool = False
    depths: Counter[int] = field(default_factory=Counter)  # bits of a grey pixel, or of a colour
    low: float = TOP[16]  # of the pixels of 16-bit images
    high: float = 0

    packed: int = 0  # bytes
    unpacked: int = 0

    def notes(self) -> list[str]:
        """Images of several depths, and deep ones that use little of their range."""
        said = []
        if len(self.depths) > 1:
            some = " and ".join(f"{count} of {bits} bits" for bits, count in sorted(self.depths.items()))
            said.append(f"images are of different depths: {some}; each is read as a share of its own range, 0 to 255 "
                        "or 0 to 65535")
        if self.depths[16] and self.high - self.low < TOP[16] / FAR_LESS:
            ends = " to ".join(f"{2 * end / TOP[16] - 1:.3g}" for end in (self.low, self.high))
            said.append(f"images of 16 bits hold {self.low:.0f} to {self.high:.0f} alone, and 0 to 65535 is read as -1 "
                        f"to 1: these lie within {ends}, where models hardly tell them apart; save them with the "
                        "whole range, by one factor for all images of all clients")
        return said


def images(
    path: str | Path, *, size: str | None = None, colour: Colour = "auto", skip: bool = False,
    classes: str | None = None, regression: bool | None = None, label: str = "label", client: str = "client",
    split: str = "split", group: str | None = None,
) -> Source:
    """A folder of images, or a csv index with columns path, label and optionally client, split and group.

    Folders are `client/class/image` or `class/image`; folders called train, val and test, above the classes or above
    the clients, are a split. Where a folder holds index.csv, that is read instead. All images must have one size, or
    `size=32` or `size=64x48` (width x height) scales them. They are grey if all are, else rgb. Labels of an index that
    are numbers with a decimal point are numbers to predict, as in a table; `regression` says otherwise, or of whole
    numbers that they are.
    """
    path = Path(path)
    problems = Problems()
    index = path / INDEX if path.is_dir() else path
    notes: list[str] = []
    if index.is_file():
        listed, notes = _indexed(index, label, client, split, group, problems)
        clients = set[str]()
        listed = listed if classes else _with_targets(listed, regression)
    elif path.is_dir() and group is not None:
        raise CoterieError(f"folders of images do not say which belong together, so group={group} needs an index: a "
                           f"file {path / INDEX} with the columns path, label, {group}.")
    elif path.is_dir():
        listed, clients, notes = _found(path, problems)
    else:
        raise CoterieError(f"there is no folder of images and no index '{path}'")
    if not listed and not problems:
        raise CoterieError(f"'{path}' holds no images ({', '.join(s[1:] for s in SUFFIXES)}).")
    problems.totals["images"] = len(listed)
    problems.totals["files"] = problems.totals["files"] or len(listed)
    scale = sides(size)
    seen = Seen()
    good = [picture for picture in listed if look(picture, seen, problems)]
    shown = path.stem if path.is_file() else path.resolve().name
    source = collect(decoded(good, seen, scale, colour, problems), shown, problems, skip=skip, classes=classes,
                     regression=regression, notes=notes,
                     clients=sorted(clients | {p.client for p in listed if p.client is not None}))
    return replace(source, notes=(*source.notes, *seen.notes()))


def _found(root: Path, problems: Problems) -> tuple[list[Picture], set[str], list[str]]:
    """Images below a folder, the clients that have a folder, and a note on files that are none of these."""
    files = sorted(
        Path(folder) / name for folder, _, held in os.walk(root) for name in held
        if name.lower().endswith(SUFFIXES) and not name.startswith(".")
    )
    deep = [list(file.relative_to(root).parts[:-1]) for file in files]
    at = next((k for k in (0, 1) if deep and all(len(d) > k + 1 and d[k].lower() in SPLIT_WORDS for d in deep)), None)
    splits = [None if at is None else SPLIT_WORDS[d.pop(at).lower()] for d in deep]
    if not deep:
        return [], set(), []
    problems.totals["files"] = len(files)
    usual = Counter(len(d) for d in deep).most_common(1)[0][0]
    if not any(deep):
        raise NoLabels(f"'{root}' holds images that lie in no folders, so they have no labels: put those of each class "
                       f"into a folder of its name, as CLASS/{files[0].name}, or list them in a file {INDEX} with the "
                       "columns path and label.")
    if usual not in (1, 2):
        raise CoterieError(f"'{root}' must hold folders client/class/image or class/image; "
                           f"'{files[0].relative_to(root)}' lies {usual} folders deep.")
    listed, clients = [], set[str]()
    for file, folders, split in zip(files, deep, splits, strict=True):
        where = file.relative_to(root).as_posix()
        if len(folders) != usual:
            problems.add("files lie outside the folders of the others", where, why=f"{len(folders)} folders deep, not "
                                                                                   f"{usual}")
            continue
        listed.append(Picture(where, file, folders[-1], folders[0] if usual == 2 else None, split))
    if usual == 2 and at != 0:
        clients = {p.name for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")}
    kinds = f"{', '.join(SUFFIXES[:-1])} and {SUFFIXES[-1]}"
    return listed, clients, unread(root, set(files), f"of a folder of images, {kinds} files are read")


def _indexed(
    index: Path, label: str, client: str, split: str, group: str | None, problems: Problems
) -> tuple[list[Picture], list[str]]:
    """What the index lists, and a note on a column that looks like a group and is not taken as one."""
    listed: list[Picture] = []
    unused: dict[str, list[str | None]] = {}
    with reading(index, "a csv index"), opened(index, newline="", encoding="utf-8-sig") as file:
        rows = csv.DictReader(file, strict=True, delimiter=Dialect.of(index).separator)
        columns = rows.fieldnames or []
        for needed in ("path", label, *([] if group is None else [group])):
            if needed not in columns:
                raise unknown(f"column of '{index}'", needed, [c for c in columns if c is not None] or ["none"])
        whose = group if group is not None else "group" if "group" in columns else None
        ended = rows.line_num
        for row in rows:
            line, ended = ended + 1, rows.line_num
            for column in columns:
                if whose is None and column not in ("path", label, client, split):
                    unused.setdefault(column, []).append((row[column] or "").strip() or None)
            where, word = (row["path"] or "").strip(), (row.get(split) or "").strip().lower()
            owner = (row.get(client) or "").strip() if client in columns else None
            together = (row.get(whose) or "").strip() if whose is not None else None
            if not where or (word and word not in SPLIT_WORDS) or "" in (owner, together) or (
                    split in columns and not word):
                why = "no path" if not where else "no client" if owner == "" else (
                    "no group" if together == "" else f"split '{word}', not train, val or test")
                problems.add("lines of the index are incomplete", f"line {line}", owner or None, why)
                continue
            listed.append(Picture(where, index.parent / where, (row[label] or "").strip(), owner,
                                  SPLIT_WORDS[word] if word else None, together))
    if not listed and not problems:
        raise CoterieError(f"'{index}' lists no images.")
    owners = {picture.client for picture in listed}
    return listed, unused_groups({column: names(values) for column, values in unused.items()}, len(owners))


def _with_targets(listed: list[Picture], regression: bool | None) -> list[Picture]:
    """Pictures whose labels are numbers where that is what all of them say."""
    values = [parsed(picture.label) for picture in listed]
    decimal = not all(WHOLE.fullmatch(picture.label) for picture in listed)
    if any(value is None for value in values) or not are_targets(decimal, regression=regression):
        return listed
    return [replace(picture, label=value) for picture, value in zip(listed, values, strict=True)]


def sides(size: str | None) -> tuple[int, int] | None:
    """`32` or `64x48` as (width, height)."""
    if size is None:
        return None
    parts = size.lower().replace(",", "x").split("x")
    if len(parts) > 2 or not all(p.isdecimal() and 0 < int(p) <= 10_000 for p in parts):
        raise CoterieError(f"size must be 32 or 64x48 (width x height), not '{size}'.")
    return int(parts[0]), int(parts[-1])


def look(picture: Picture, seen: Seen, problems: Problems) -> bool:
    """Read an image's header."""
    _pillow()
    try:
        with open_image(picture.content) as image:
            bits = depth(image)
            if bits is None:
                what = "floats" if image.mode == "F" else "whole numbers of more than 16 bits, or below 0"
                problems.remedies.append("save such images with 8 or 16 bits")
                problems.add("images have no range of pixels that is known", picture.where, picture.client, what)
                return False
            coloured = image.mode not in ("1", "L") and bits == 8
            size, pixels = image.size, image.size[0] * image.size[1] * (3 if coloured else 1)
        content = picture.content
        held = len(content) if isinstance(content, bytes) else content.stat().st_size
        refuse_bomb(seen.packed + held, seen.unpacked + pixels)
        seen.depths[bits] += 1
        seen.sizes[size] += 1
        seen.coloured |= coloured
        seen.packed, seen.unpacked = seen.packed + held, seen.unpacked + pixels
        return True
    except Exception as error:  # damaged bytes make decoders raise anything
        problems.add("files cannot be read", picture.where, picture.client, reason(error))
        return False


def depth(image: Any) -> int | None:
    """Bits of a pixel's grey or of each of its colours, 8 or 16; None where the file says no largest number.

    Pillow gives grey of 16 bits as I;16 or, from PNG and PGM files, as I; colours of 16 bits it cuts to 8 itself.
    """
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return 16
    return None if image.mode.startswith(("I", "F")) else 8


def decoded(
    pictures: Iterable[Picture], seen: Seen, scale: tuple[int, int] | None, colour: Colour, problems: Problems
) -> Iterator[Piece]:
    """The pixels, a block at a time: uint8 [n, H, W] or [n, H, W, 3]; float32 [n, C, H, W] where some are deeper."""
    if not seen.sizes:
        return
    size = scale or seen.sizes.most_common(1)[0][0]
    mode = "RGB" if colour == "rgb" or (colour == "auto" and seen.coloured) else "L"
    if seen.depths[16]:  # every image becomes float32 then
        kept = sum(seen.sizes.values()) if scale else seen.sizes[size]
        try:
            refuse_bomb(seen.packed, 4 * kept * size[0] * size[1] * len(mode))
        except ValueError as reason_:
            raise CoterieError(f"images cannot be read, some of which have 16 bits a pixel: {reason_}; give a smaller "
                               "size=, or save all with 8 bits.") from reason_
    block = max(1, BLOCK // (size[0] * size[1] * len(mode)))
    waiting: list[tuple[Picture, Array]] = []
    for picture in pictures:
        try:
            with open_image(picture.content) as image:
                if scale is None and image.size != size:
                    problems.add("images have another size", picture.where, picture.client,
                                 f"{image.size[0]}x{image.size[1]} instead of {size[0]}x{size[1]}")
                    continue
                pixels = _pixels(image, mode, scale, seen)
        except Exception as error:  # damaged bytes make decoders raise anything
            problems.add("files cannot be read", picture.where, picture.client, reason(error))
            continue
        waiting.append((picture, pixels))
        if len(waiting) == block:
            yield _piece(waiting)
            waiting = []
    if waiting:
        yield _piece(waiting)


def _pixels(image: Any, mode: str, scale: tuple[int, int] | None, seen: Seen) -> Array:
    """One image in the mode L or RGB; what a pixel becomes follows from its own file alone."""
    bits = depth(image)
    shown = image.convert(mode if bits == 8 else "F")  # L would clip 16 bits at 255
    shown = shown if scale is None or shown.size == scale else shown.resize(scale)
    pixels = np.asarray(shown)
    if bits == 16:
        pixels = np.clip(pixels, 0, TOP[16])  # a curve through pixels may go beyond them
        seen.low, seen.high = min(seen.low, float(pixels.min())), max(seen.high, float(pixels.max()))
        pixels = np.stack([pixels] * 3, 2) if mode == "RGB" else pixels
    if not seen.depths[16]:
        return pixels
    deep: Array = from_pixels(torch.from_numpy(pixels.astype(np.float32)), TOP[bits or 8]).numpy()
    return deep.transpose(2, 0, 1) if mode == "RGB" else deep[None]


def _piece(held: list[tuple[Picture, Array]]) -> Piece:
    pictures = [picture for picture, _ in held]
    labels = [picture.label for picture in pictures]
    y = measured(labels)
    if y is None:
        y = np.array(labels) if all(type(v) is int for v in labels) else names(labels)
    client = None if pictures[0].client is None else names([str(p.client) for p in pictures])
    split = None if pictures[0].split is None else np.array([p.split for p in pictures], dtype=np.int8)
    group = None if pictures[0].group is None else names([str(p.group) for p in pictures])
    return Piece(np.stack([pixels for _, pixels in held]), y, pictures[0].where, client, split, group)


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise CoterieError(LIBRARY) from error
    return Image


@contextmanager
def open_image(content: Path | bytes) -> Iterator[Any]:
    """A picture whose header is read; one of so many pixels that Pillow would warn of it is refused."""
    image_library = _pillow()
    with io.BytesIO(content) if isinstance(content, bytes) else opened_bytes(content) as file:
        with warnings.catch_warnings():
            warnings.simplefilter("error", image_library.DecompressionBombWarning)
            image = image_library.open(file, formats=DECODED)
        if image.size[0] * image.size[1] > MOST_PIXELS:
            raise ValueError(f"{image.size[0]}x{image.size[1]} pixels")
        yield image


def _is_index(path: Path) -> bool:
    return path.suffix.lower() in CSV and path.is_file() and "path" in header(path)


READS = (
    Format(images, 50, file=_is_index, folder=lambda path: (path / INDEX).is_file()),
    Format(images, 100, folder=lambda path: True),
)
