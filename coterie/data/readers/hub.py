"""Hugging Face data sets and flwr-datasets partitioners, as objects or as folders that `save_to_disk` wrote.

Nothing is downloaded: what is read is in memory or on this disk already.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from coterie.data.readers.formats import Format
from coterie.data.readers.images import Colour, Picture, Seen, decoded, look, sides
from coterie.data.readers.pieces import SPLIT_WORDS, Places, Source, collect, names
from coterie.data.readers.refusals import Problems, reading, refuse_bomb
from coterie.data.readers.tables.columns import Roles
from coterie.data.readers.tables.encoding import encode
from coterie.data.readers.tables.packed import unpacked
from coterie.data.readers.tables.rows import (
    CLIENT,
    LABEL,
    NUMBER,
    SPLIT,
    Rows,
    arrow,
    block_rows,
    is_decimal,
    written_out,
)
from coterie.data.readers.tables.schema import Encoding, read_schema, without_labels
from coterie.data.readers.text import LENGTH, WORDS, Tokenizer
from coterie.errors import CoterieError, NoLabels, unknown
from coterie.files import read_json, refuse_irregular

STATE = "state.json"
"""Where a data set names its files of samples."""
LIBRARY = "Hugging Face data sets need the package datasets; install it with: pip install 'coterie[hub]'"


class _Part(NamedTuple):
    data: Any  # a datasets.Dataset
    where: str
    client: str | None
    split: int | None
    size: int | None = None  # bytes of the folder that it comes from


def hub(
    data: Any, *, label: str | None = None, client: str | None = None, split: str | None = None,
    text: str | None = None, x: str | None = None, ignore: str | None = None, size: str | None = None,
    colour: Colour = "auto",
    scale: bool = False, fill: str | None = None, tokenizer: str | Tokenizer = "words", words: int = WORDS,
    length: int = LENGTH, classes: str | None = None, regression: bool | None = None,
    schema: str | Encoding | None = None, shape: str | None = None, skip: bool = False, group: str | None = None,
) -> Source:
    """A `Dataset`, a `DatasetDict`, a flwr-datasets partitioner, or a folder that `save_to_disk` wrote.

    The keys of a `DatasetDict` are the split; a partition of a partitioner is a client.
    `group` names a column whose rows of one value stay on one side of a split.
    A column of images is the sample; otherwise columns are read like those of a table, with the same options.
    """
    parts, name = _parts(data)
    problems = Problems()
    with reading(name, "a Hugging Face data set"):
        if not parts or not any(len(part.data) for part in parts):
            raise CoterieError(f"{name} holds no rows.")
        features = dict(parts[0].data.features)
        for part in parts[1:]:
            if set(part.data.features) != set(features):
                raise CoterieError(f"{part.where} has other columns than {parts[0].where}.")
    followed = (schema if isinstance(schema, dict) else read_schema(schema)) or {}
    target = label if label is not None else followed.get("label")
    if target is not None and label is None and target not in (*features, LABEL):
        raise without_labels(name, target)
    target = target or next((c for c in ("label", "labels") if c in features), None)
    if target is None:
        labels = [c for c, f in features.items() if type(f).__name__ == "ClassLabel"]
        target = labels[0] if len(labels) == 1 else None
    if target is None:
        raise NoLabels(f"{name} has no column 'label'; say which it is: label=NAME (there are "
                       f"{', '.join(features)}).")
    if target not in (*features, LABEL):
        raise unknown("column", target, features)
    known = list(getattr(features.get(target), "names", None) or []) or None
    pictured = [c for c, f in features.items() if type(f).__name__ == "Image"]
    expected = [part.client for part in parts if part.client is not None]
    if pictured and text is None and (x is None or x in pictured):
        if len(pictured) > 1 and x is None:
            raise CoterieError(f"{name} has several columns of images ({', '.join(pictured)}); say which: x=NAME.")
        shown, target_size, seen = x or pictured[0], sides(size), Seen()
        owner = client if client is not None else "client" if "client" in features else None
        for named in (owner, group):
            if named is not None and named not in features:
                raise unknown("column", named, features)

        def pictures() -> Iterator[Picture]:
            yield from _pictures(parts, shown, target, owner, known, group)

        problems.totals["files"] = problems.totals["images"] = sum(len(part.data) for part in parts)
        with reading(name, "a Hugging Face data set"):
            fine = [look(picture, seen, problems) for picture in pictures()]
        good = (picture for picture, well in zip(pictures(), fine, strict=True) if well)
        source = collect(decoded(good, seen, target_size, colour, problems), name, problems, skip=skip,
                         classes=classes or known, regression=regression, clients=expected, shape=shape)
        return replace(source, notes=(*source.notes, *seen.notes()))

    def rows(told: Problems | None) -> Iterator[Rows]:
        for part in parts:
            yield from _rows(part, target, known)

    roles = Roles(target, client, split, text, x, ignore, group)
    return encode(rows, name, problems, roles, scale=scale, fill=fill, tokenizer=tokenizer, words=words,
                  length=length, classes=classes or known, regression=regression, schema=schema, shape=shape, skip=skip,
                  clients=expected)


def is_hub(data: Any) -> bool:
    """Whether this is an object of datasets or flwr-datasets, or a partitioner of somebody's own."""
    home = {cls.__module__.partition(".")[0] for cls in type(data).__mro__}
    return bool(home & {"datasets", "flwr_datasets"}) or hasattr(data, "load_partition")


def is_saved(path: Path) -> bool:
    """Whether `save_to_disk` wrote this folder."""
    return (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file()


def _parts(data: Any) -> tuple[list[_Part], str]:
    if isinstance(data, (str, Path)):
        try:
            import datasets
        except ImportError as error:
            raise CoterieError(LIBRARY) from error
        path = Path(data)
        with reading(path, "a folder that save_to_disk wrote"):
            _refuse_others(path)
            held = datasets.load_from_disk(str(path))
            size = _size(path)
            parts = [part._replace(size=size) for part in _parts(held)[0]]
            refuse_bomb(size, sum(NUMBER * len(part.data) * len(part.data.features) for part in parts))
        return parts, path.resolve().name
    if hasattr(data, "load_partition"):
        with reading("the partitioner", "partitions"):
            if not data.is_dataset_assigned():
                raise CoterieError("the partitioner has no dataset; assign one: partitioner.dataset = ...")
            known = getattr(data, "partition_id_to_natural_id", None)
            count = int(data.num_partitions)
            if count and known is not None and not known:
                data.load_partition(0)  # partitioners name their partitions with the first one
                known = data.partition_id_to_natural_id
            called = [str(known[i]) if known else str(i) for i in range(count)]
            parts = [_Part(data.load_partition(i), f"partition {i}", called[i], None) for i in range(count)]
            return parts, "partitions"
    if isinstance(data, dict):
        for key in data:
            if len(data) > 1 and str(key).lower() not in SPLIT_WORDS:
                raise CoterieError(f"the part '{key}' is neither train, validation nor test; give one part alone.")
        return [_Part(held, str(key), None, SPLIT_WORDS[str(key).lower()] if len(data) > 1 else None)
                for key, held in data.items()], "dataset"
    if not hasattr(data, "features") or not hasattr(data, "with_format") or not hasattr(data, "__len__"):
        raise CoterieError(f"a {type(data).__name__} cannot be read; give a Dataset, a DatasetDict or a partitioner.")
    return [_Part(data, "dataset", None, None)], "dataset"


def _refuse_others(folder: Path) -> None:
    """Raise where a folder holds a pipe or a device, or names samples outside of itself."""
    for file in folder.rglob("*"):
        refuse_irregular(file)
        if file.name == STATE:
            held = read_json(file).get("_data_files") or ()
            if not held:  # the library's own error is about a list
                raise ValueError(f"{file.parent.name} holds no samples")
            for one in held:
                if not isinstance(one, dict) or Path(str(one.get("filename"))).name != one.get("filename"):
                    raise ValueError(f"{file.name} names a file that lies elsewhere")
                if (other := file.parent / one["filename"]).is_file():
                    refuse_bomb(_size(folder), unpacked(other))


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _blocks(part: _Part, columns: list[str] | None = None) -> Iterator[tuple[int, Any]]:
    """(first row, arrow table of some rows)."""
    with reading(part.where, "a Hugging Face data set"):
        held = part.data if columns is None else part.data.select_columns(columns)
        rows = block_rows(len(held.data), held.data.nbytes, len(held.features))
        held, total = held.with_format("arrow"), 0
    for first in range(0, len(held), rows):
        with reading(part.where, "a Hugging Face data set"):
            block = held[first : first + rows]
            block.validate(full=True)
            if part.size is not None:
                total += sum(written_out(chunk) for column in block.columns for chunk in column.chunks)
                refuse_bomb(part.size, total)
        yield first, block


def _rows(part: _Part, label: str, known: list[str] | None) -> Iterator[Rows]:
    for first, block in _blocks(part):
        with reading(part.where, "a Hugging Face data set"):
            columns, decimals = {}, set[str]()
            for name in block.column_names:
                column = block.column(name).combine_chunks()
                column = column.storage if hasattr(column, "storage") else column
                columns[name] = arrow(column, name)
                decimals |= {name} if is_decimal(column.type) else set()
            if known is not None:
                columns[label] = names([_class(v, known) for v in columns[label].tolist()])
            if part.client is not None:
                columns[CLIENT] = names([part.client] * len(block))
            if part.split is not None:
                word = next(word for word, code in SPLIT_WORDS.items() if code == part.split)
                columns[SPLIT] = names([word] * len(block))
        yield Rows(Places(part.where, "index", np.arange(first, first + len(block))), columns, decimals)


def _class(value: float, known: list[str]) -> str | None:
    return known[int(value)] if not np.isnan(value) and 0 <= int(value) < len(known) else None


def _pictures(
    parts: list[_Part], shown: str, label: str, owner: str | None, known: list[str] | None, group: str | None
) -> Iterator[Picture]:
    wanted = list(dict.fromkeys(name for name in (shown, label, owner, group) if name is not None))
    for part in parts:
        for first, block in _blocks(part, wanted):
            with reading(part.where, "a Hugging Face data set"):
                held, labels = block.column(shown).to_pylist(), block.column(label).to_pylist()
                owners = block.column(owner).to_pylist() if owner else [None] * len(block)
                groups = block.column(group).to_pylist() if group else [None] * len(block)
            for k, (image, value, client, whose) in enumerate(zip(held, labels, owners, groups, strict=True)):
                content: Path | bytes = b""
                if isinstance(image, dict):
                    content = image.get("bytes") or Path(image.get("path") or "missing")
                said = value if known is None else None if value is None else _class(float(value), known)
                called = part.client if owner is None else None if client is None else str(client)
                yield Picture(f"index {first + k} of {part.where}", content, said, called, part.split,
                              None if group is None else "" if whose is None else str(whose))


READS = (Format(hub, 10, folder=is_saved, value=is_hub),)
