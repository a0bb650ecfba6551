"""One reader a format. `read` finds the format by itself; every reader gives a `Source` or one error that lists all."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from coterie.data.readers.formats import Format
from coterie.data.readers.pieces import Source, listed_names, with_class_names
from coterie.errors import CoterieError, unknown
from coterie.files import refuse_irregular
from coterie.options import convert, split_options

_OPTIONS = re.compile(r":(?=\w+=)")
LISTS = ("ignore", "x", "classes", "class_names")
"""Options that are lists of names: given more than once, they add up."""
CLASS_NAMES = "class_names"
"""An option of every reader: the names of the classes that labels number from 0."""
OTHER_WORDS = {
    **dict.fromkeys(("target", "y", "labels", "outcome", "response", "targetcolumn", "labelcolumn"), "label"),
    **dict.fromkeys(("features", "columns", "inputs", "cols", "usecols"), "x"),
    **dict.fromkeys(("drop", "exclude", "without", "skipcolumns"), "ignore"),
    **dict.fromkeys(("clients", "site", "by", "owner", "clientcolumn"), "client"),
    **dict.fromkeys(("groups", "patient", "subject", "patients", "subjects", "groupby", "keeptogether"), "group"),
    **dict.fromkeys(("normalize", "normalise", "standardize", "standardise", "zscore"), "scale"),
    **dict.fromkeys(("sep", "delimiter", "delim"), "separator"),
    **dict.fromkeys(("impute", "fillna", "na", "missing"), "fill"),
    **dict.fromkeys(("names", "classnames", "labelnames", "targetnames"), CLASS_NAMES),
    **dict.fromkeys(("resize", "imagesize"), "size"), "color": "colour", "task": "regression",
}
"""What others call an option of data, without `_` and `-`."""


def _found() -> list[Format]:
    """The formats of all modules in this folder, in the order in which they are asked."""
    modules = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    return sorted((each for module in modules for each in getattr(module, "READS", ())), key=lambda each: each.order)


FORMATS = _found()
READERS: dict[str, Callable[..., Source]] = {each.name: each.read for each in sorted(FORMATS, key=lambda f: f.name)}


def spelled(text: str) -> tuple[str, dict[str, str]]:
    """`path:option=value,...` -> the path and the options; a path may hold colons itself."""
    if os.path.exists(text):  # a text that no system takes for a path is none
        return text, {}
    path, *rest = _OPTIONS.split(text, maxsplit=1)
    return path, split_options(rest[0], text, LISTS) if rest else {}


def read(data: Any, options: Mapping[str, Any]) -> Source:
    """The samples of a file, a folder or an object; `format` among the options names the reader."""
    given = dict(options)
    name = given.pop("format", None)
    if name is not None and name not in READERS:
        raise unknown("format", str(name), READERS)
    reader = READERS[name or find(data)]
    hints = _options(reader)
    called = given.pop(CLASS_NAMES, None) if CLASS_NAMES not in hints else None
    for option in given:
        if option not in hints:
            known = {*hints, CLASS_NAMES}
            raise unknown(f"option of {reader.__name__} data", option, known, OTHER_WORDS)
    made = (int, float, str, Path, list, tuple)  # the rest are functions and mappings, which nobody can type
    values = {option: convert(_text(value, hints[option]), hints[option], f"{reader.__name__}'s {option}")
              if value is None or isinstance(value, made) else value for option, value in given.items()}
    source = reader(data, **values)
    if called is None:
        return source
    return with_class_names(source, listed_names(called), source.name)


def takes(format: str, option: str) -> bool:
    """Whether data of this format have this option."""
    return option in _options(READERS[format])


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


def find(data: Any) -> str:
    """The format of data, by name and content."""
    if not isinstance(data, (str, Path)):
        for each in FORMATS:
            if each.value(data):
                return each.name
        raise CoterieError(f"a {type(data).__name__} cannot be read as data; give a path, a Dataset or a partitioner.")
    path = Path(data)
    try:
        refuse_irregular(path)
        folder = path.is_dir()
        for each in FORMATS:
            if each.folder(path) if folder else each.file(path):
                return each.name
        there = path.exists()
    except OSError as error:
        raise CoterieError(f"'{path}' cannot be read: {error.strerror}.") from error
    if not there:
        raise CoterieError(f"there is no file or folder '{path}', and no data set of that name; known: digits.")
    raise CoterieError(f"the format of '{path}' is not known from its name; say it with format=NAME, one of "
                       f"{', '.join(READERS)}.")


__all__ = ["FORMATS", "READERS", "Format", "Source", "find", "read", "spelled", "takes"]
