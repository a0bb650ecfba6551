"""Files: read with a sentence for errors, and written in one step.

Whatever a folder of somebody else's holds under a name, a symbolic link, a pipe or a device, is neither written through
nor waited for.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from coterie.errors import CoterieError, visible

CODE = ".py:"
"""The first one ends the path in `path.py:Name`: for whoever loads it as for whoever asks whether it may run."""


def in_file(spec: str) -> tuple[str, str, str] | None:
    """Path, name, and what stands behind another colon, of `path.py:Name:options`; None where it names no file."""
    path, ending, rest = spec.partition(CODE)
    name, _, more = rest.partition(":")
    return (f"{path}.py", name, more) if path and ending and re.fullmatch(r"\w+", name) else None


FOLDER = "hf:"
"""What a model in a folder of Hugging Face's format begins with."""


def in_folder(spec: str) -> tuple[str, str] | None:
    """Path, and what stands behind another colon, of `hf:PATH:options`; None where it names no folder."""
    path, _, more = spec.removeprefix(FOLDER).partition(":")
    return (path, more) if spec.startswith(FOLDER) and path else None


# -- reading -----------------------------------------------------------------------------------------------------------

MOST = 256 << 20
"""Bytes of a json or TOML file, at most."""


def opened(path: Path, newline: str | None = None, encoding: str = "utf-8") -> TextIO:
    """A regular file's text; what else lies there, such as a pipe, would be waited for, and is refused."""
    return open(_handle(path), encoding=encoding, newline=newline)


def opened_bytes(path: Path) -> BinaryIO:
    """The same for its bytes."""
    return open(_handle(path), "rb")


def read_bytes(path: Path, most: int | None = None) -> bytes:
    """A regular file's content, of at most so many bytes."""
    try:
        with opened_bytes(path) as file:
            size = os.fstat(file.fileno()).st_size
            if most is not None and size > most:
                raise CoterieError(f"{path} is too large to be read: {size} bytes, at most {most} are.")
            return file.read()
    except OSError as reason:
        raise CoterieError(f"{path} cannot be read: {reason.strerror}.") from reason


def read_text(path: Path, most: int | None = None) -> str:
    """A regular file's text."""
    return read_bytes(path, most).decode("utf-8")


def refuse_irregular(path: Path) -> None:
    """Raise where a pipe, a device or a socket lies there, or a link to one; folders and nothing at all are others'
    business."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise CoterieError(f"{path} cannot be read: it is no regular file.")


def _handle(path: Path) -> int:
    refuse_irregular(path)  # opening a device may do something by itself
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # whatever has taken its place since
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise CoterieError(f"{path} cannot be read: it is no regular file.")
    return handle


def read_json(path: Path) -> dict[str, Any]:
    """The table of values in a json file; whatever is wrong with the file becomes a sentence."""
    try:
        found = json.loads(read_text(path, MOST))
    except CoterieError:
        raise
    except RecursionError:
        raise CoterieError(f"{path} is damaged: it is nested too deeply.") from None
    except ValueError as reason:
        raise CoterieError(f"{path} is damaged: {reason}.") from reason
    if not isinstance(found, dict):
        raise CoterieError(f"{path} is damaged: it holds no table of values.")
    return found


# -- writing: every file of a run folder is written by one of these ----------------------------------------------------


def write_json(path: Path, values: Mapping[str, Any], indent: int | None = 2) -> None:
    """`values` as json, in one step."""
    write_text(path, json.dumps(values, indent=indent) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step: whoever reads it finds the old text or the new one."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file in one step; a symbolic link in its place is replaced, and what it leads to stays as it is."""
    fresh = beside(path)
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666), "wb") as file:
        file.write(content)
    os.replace(fresh, path)


def beside(path: Path) -> Path:
    """The name under which the new content of a file is written before it takes its place; nothing lies there."""
    fresh = path.with_name(f"{path.name}.tmp")
    fresh.unlink(missing_ok=True)
    return fresh


def append_text(path: Path, text: str) -> None:
    """Add to the end of a file and flush to the disk; the file must be one of its own, under one name."""
    with open(own(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as file:
        file.write(text.encode("utf-8"))
        file.flush()
        os.fsync(file.fileno())


def cut(path: Path, length: int) -> None:
    """Shorten a file."""
    handle = own(path, os.O_WRONLY)
    try:
        os.ftruncate(handle, length)
    finally:
        os.close(handle)


def own(path: Path, flags: int) -> int:
    """A handle to write to a regular file that has no other name; a link would lead to somebody's other file."""
    if path.is_symlink():
        raise CoterieError(f"{path} is a symbolic link; nothing is written through it.")
    handle = os.open(path, os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o666)
    facts = os.fstat(handle)
    if not stat.S_ISREG(facts.st_mode) or facts.st_nlink > 1:
        os.close(handle)
        what = "has another name elsewhere" if stat.S_ISREG(facts.st_mode) else "is no regular file"
        raise CoterieError(f"{path} {what}; nothing is written to it.")
    return handle


def make_folder(path: Path) -> None:
    """A folder inside one that was named; a symbolic link in its place would lead elsewhere and is refused."""
    if path.is_symlink():
        raise CoterieError(f"{path} is a symbolic link; nothing is written through it.")
    path.mkdir(parents=True, exist_ok=True)


def refuse_links(folder: Path) -> None:
    """Raise where a folder that is about to be written to, which may be a link itself, holds a symbolic link."""
    for place, folders, names in os.walk(folder):
        for name in sorted([*folders, *names]):
            if os.path.islink(os.path.join(place, name)):
                raise CoterieError(f"{os.path.join(place, name)} is a symbolic link, and a run writes into its own "
                                   "folder only; remove it, or put a copy in its place.")
FORMULA = re.compile(r"[=+\-@]")


def csv_text(name: str) -> str:
    """A name in a csv file, in one line. Spreadsheets compute what begins with =, +, - or @ unless an apostrophe stands
    before it; numbers stay as they are, -1 too."""
    seen = visible(name)
    if FORMULA.match(seen) is None:
        return seen
    try:
        float(seen)
    except ValueError:
        return f"'{seen}"
    return seen
