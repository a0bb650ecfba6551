"""What a reader says of itself. Whatever lies in this folder and has `READS` is known; nothing else is edited."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.data.readers.pieces import Source


def _no(data: Any) -> bool:
    return False


@dataclass(frozen=True)
class Format:
    """A format by the function that reads it and has its name: `read(path, *, option=value, ...) -> Source`.

    Formats are asked in rising `order` whether data are theirs, and the first that says yes reads them. Those that look
    into data come before those that see a name, and a reader of any folder at all comes last. The package's own begin
    at 10, so a reader that says nothing of its order is asked before them.
    """

    read: Callable[..., Source]
    order: int = 0
    file: Callable[[Path], bool] = _no  # a path that is no folder, perhaps of nothing: then its name decides
    folder: Callable[[Path], bool] = _no
    value: Callable[[Any], bool] = _no  # an object that is no path

    @property
    def name(self) -> str:
        return self.read.__name__
