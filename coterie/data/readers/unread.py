"""What lies in a folder of data and is not read: a site's samples in files of another kind must not vanish unsaid."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from coterie.data.readers.refusals import EXAMPLES
from coterie.errors import counted

OWN = ("thumbs.db", "desktop.ini")
"""What systems put into folders."""
WORDS = ("readme", "license", "licence", "citation")
"""How files begin that are for people."""


def unread(root: Path, read: Collection[Path], why: str) -> list[str]:
    """A note on the files below a folder that are not among those `read`; hidden ones and pages for people are none."""
    left = [place for place in _below(root) if place not in read]
    if not left:
        return []
    shown = [place.relative_to(root).as_posix() for place in left[:EXAMPLES]]
    more = [f"and {len(left) - EXAMPLES} more"] if len(left) > EXAMPLES else []
    return [f"not read: {counted(len(left), 'file')} of other names ({', '.join([*shown, *more])}); {why}"]


def _below(root: Path) -> list[Path]:
    found = []
    for folder, inner, held in os.walk(root):
        inner[:] = [name for name in inner if not name.startswith((".", "__MACOSX"))]
        found += [Path(folder) / name for name in held if not _for_people(name.lower())]
    return sorted(found)


def _for_people(name: str) -> bool:
    return name.startswith((".", *WORDS)) or name in OWN or name.endswith(".md")
