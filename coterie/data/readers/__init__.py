"""One reader a format. `read` finds the format by itself; every reader gives a `Source` or one error that lists all."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from coterie.data.readers.binaries import cifar, idx, is_cifar, is_idx
from coterie.data.readers.hub import hub, is_hub
from coterie.data.readers.images import INDEX, SUFFIXES, images
from coterie.data.readers.leaf import leaf, leaf_files
from coterie.data.readers.npz import is_pfllib, npz, pfllib
from coterie.data.readers.pieces import Source
from coterie.data.readers.tables import CSV, PARQUET, header, table, table_files
from coterie.errors import CoterieError, unknown
from coterie.options import convert, split_options

READERS: dict[str, Callable[..., Source]] = {
    "npz": npz, "images": images, "table": table, "hub": hub, "cifar": cifar, "idx": idx, "leaf": leaf,
    "pfllib": pfllib,
}
_OPTIONS = re.compile(r":(?=\w+=)")


def spelled(text: str) -> tuple[str, dict[str, str]]:
    """`path:option=value,...` -> the path and the options; a path may hold colons itself."""
    if Path(text).exists():
        return text, {}
    path, *rest = _OPTIONS.split(text, maxsplit=1)
    return path, split_options(rest[0], text) if rest else {}


def read(data: Any, options: Mapping[str, Any]) -> Source:
    """The samples of a file, a folder or an object; `format` among the options names the reader."""
    given = dict(options)
    name = given.pop("format", None)
    if name is not None and name not in READERS:
        raise unknown("format", str(name), READERS)
    reader = READERS[name or find(data, given)]
    hints = _options(reader)
    for option in given:
        if option not in hints:
            raise unknown(f"option of {reader.__name__} data", option, hints)
    made = (int, float, str, Path, list, tuple)  # the rest are functions and mappings, which nobody can type
    values = {option: convert(_text(value, hints[option]), hints[option], f"{reader.__name__}'s {option}")
              if value is None or isinstance(value, made) else value for option, value in given.items()}
    return reader(data, **values)


@cache
def _options(reader: Callable[..., Source]) -> dict[str, Any]:
    """A reader's options and their types."""
    hints = get_type_hints(reader)
    named = inspect.signature(reader).parameters.items()
    return {name: hints[name] for name, spec in named if spec.kind is spec.KEYWORD_ONLY}


def _text(value: Any, hint: Any) -> Any:
    """Lists of names and numbers are written with commas, as on the command line."""
    if isinstance(value, (list, tuple)):
        return ",".join(str(part) for part in value)
    wanted = hint is str or get_args(hint)[:1] == (str,)
    return str(value) if wanted and isinstance(value, (int, float, Path)) else value


def find(data: Any, options: Mapping[str, Any] | None = None) -> str:
    """The format of data, by name and content."""
    if not isinstance(data, (str, Path)):
        if is_hub(data) or hasattr(data, "load_partition"):
            return "hub"
        raise CoterieError(f"a {type(data).__name__} cannot be read as data; give a path, a Dataset or a partitioner.")
    path = Path(data)
    try:
        return _folder(path) if path.is_dir() else _file(path, options or {})
    except OSError as error:
        raise CoterieError(f"'{path}' cannot be read: {error.strerror}.") from error


def _file(path: Path, options: Mapping[str, Any]) -> str:
    suffix = path.suffix.lower()
    if suffix == ".npz":
        return "pfllib" if is_pfllib(path) else "npz"
    if suffix in CSV:
        pictured = path.is_file() and "path" in header(path)
        return "images" if pictured else "table"
    if suffix in PARQUET:
        return "table"
    if suffix == ".json":
        return "leaf"
    if "-ubyte" in path.name:
        return "idx"
    if suffix == ".bin" or path.name in ("train", "test", "test_batch") or path.name.startswith("data_batch"):
        return "cifar"
    if not path.exists():
        raise CoterieError(f"there is no file or folder '{path}', and no data set of that name; known: digits.")
    raise CoterieError(f"the format of '{path}' is not known from its name; say it with format=NAME, one of "
                       f"{', '.join(READERS)}.")


def _folder(path: Path) -> str:
    if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
        return "hub"
    if is_cifar(path):
        return "cifar"
    if is_idx(path):
        return "idx"
    if next(path.glob("train/*.npz"), None):
        return "pfllib"
    if (path / INDEX).is_file():
        return "images"
    if leaf_files(path):
        return "leaf"
    if table_files(path):
        return "table"
    return "images"


__all__ = ["READERS", "SUFFIXES", "Source", "find", "npz", "read", "spelled"]
