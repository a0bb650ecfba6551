"""Images: folders `client/class/image` and `class/image`, and a csv index of paths."""

from __future__ import annotations

import csv
import io
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from coterie.data.labels import are_targets, measured
from coterie.data.readers.formats import Format
from coterie.data.readers.pieces import SPLIT_WORDS, Array, Piece, Source, collect, names
from coterie.data.readers.refusals import Problems, reading, reason
from coterie.data.readers.tables.rows import CSV, WHOLE, Dialect, header, parsed
from coterie.data.readers.tables.suspicious import unused_groups
from coterie.errors import CoterieError, unknown
from coterie.memory import BLOCK

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
DECODED = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
"""Those that Pillow decodes by itself; others would start programs."""
INDEX = "index.csv"
Colour = Literal["auto", "grey", "rgb"]
LIBRARY = "images need Pillow; install it with: pip install 'coterie[images]'"


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
    """Sizes and kinds of images, from their headers."""

    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    coloured: bool = False


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
        listed, clients = _found(path, problems)
    else:
        raise CoterieError(f"there is no folder of images and no index '{path}'")
    if not listed and not problems:
        raise CoterieError(f"'{path}' holds no images ({', '.join(s[1:] for s in SUFFIXES)}).")
    problems.totals["files"] = problems.totals["images"] = len(listed)
    scale = sides(size)
    seen = Seen()
    good = [picture for picture in listed if look(picture, seen, problems)]
    shown = path.stem if path.is_file() else path.resolve().name
    return collect(decoded(good, seen, scale, colour, problems), shown, problems, skip=skip, classes=classes,
                   regression=regression, notes=notes,
                   clients=sorted(clients | {p.client for p in listed if p.client is not None}))


def _found(root: Path, problems: Problems) -> tuple[list[Picture], set[str]]:
    """Images below a folder, and the clients that have a folder."""
    files = sorted(
        Path(folder) / name for folder, _, held in os.walk(root) for name in held
        if name.lower().endswith(SUFFIXES) and not name.startswith(".")
    )
    deep = [list(file.relative_to(root).parts[:-1]) for file in files]
    at = next((k for k in (0, 1) if deep and all(len(d) > k + 1 and d[k].lower() in SPLIT_WORDS for d in deep)), None)
    splits = [None if at is None else SPLIT_WORDS[d.pop(at).lower()] for d in deep]
    if not deep:
        return [], set()
    usual = Counter(len(d) for d in deep).most_common(1)[0][0]
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
    return listed, clients


def _indexed(
    index: Path, label: str, client: str, split: str, group: str | None, problems: Problems
) -> tuple[list[Picture], list[str]]:
    """What the index lists, and a note on a column that looks like a group and is not taken as one."""
    listed: list[Picture] = []
    unused: dict[str, list[str | None]] = {}
    with reading(index, "a csv index"), index.open(newline="", encoding="utf-8-sig") as file:
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
                    "no group" if together == "" else f"split '{word}'")
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
    try:
        with _open(picture.content) as image:
            seen.sizes[image.size] += 1
            seen.coloured |= image.mode not in ("1", "L", "I", "I;16", "F")
        return True
    except CoterieError:
        raise
    except Exception as error:  # damaged bytes make decoders raise anything
        problems.add("files cannot be read", picture.where, picture.client, _why(error))
        return False


def decoded(
    pictures: Iterable[Picture], seen: Seen, scale: tuple[int, int] | None, colour: Colour, problems: Problems
) -> Iterator[Piece]:
    """The pixels, a block at a time: uint8 [n, H, W] or [n, H, W, 3]."""
    if not seen.sizes:
        return
    size = scale or seen.sizes.most_common(1)[0][0]
    mode = "RGB" if colour == "rgb" or (colour == "auto" and seen.coloured) else "L"
    block = max(1, BLOCK // (size[0] * size[1] * len(mode)))
    waiting: list[tuple[Picture, Array]] = []
    for picture in pictures:
        try:
            with _open(picture.content) as image:
                if scale is None and image.size != size:
                    problems.add("images have another size", picture.where, picture.client,
                                 f"{image.size[0]}x{image.size[1]} instead of {size[0]}x{size[1]}")
                    continue
                if image.size[0] * image.size[1] > 10**8:
                    raise ValueError(f"{image.size[0]}x{image.size[1]} pixels")
                shown = image.convert(mode)
                pixels = np.asarray(shown if scale is None or shown.size == scale else shown.resize(scale))
        except Exception as error:  # damaged bytes make decoders raise anything
            problems.add("files cannot be read", picture.where, picture.client, _why(error))
            continue
        waiting.append((picture, pixels))
        if len(waiting) == block:
            yield _piece(waiting)
            waiting = []
    if waiting:
        yield _piece(waiting)


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


def _open(content: Path | bytes) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise CoterieError(LIBRARY) from error
    return Image.open(io.BytesIO(content) if isinstance(content, bytes) else content, formats=DECODED)


def _why(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if type(error).__name__ == "UnidentifiedImageError":
        return "no image"
    return reason(error)


def _is_index(path: Path) -> bool:
    return path.suffix.lower() in CSV and path.is_file() and "path" in header(path)


READS = (
    Format(images, 50, file=_is_index, folder=lambda path: (path / INDEX).is_file()),
    Format(images, 100, folder=lambda path: True),
)
