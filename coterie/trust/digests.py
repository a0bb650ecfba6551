"""The digests of code files that this user has trusted: one file in the user's configuration folder.

A line is a sha256 and the name that the file had then. It is `coterie/trusted` in XDG_CONFIG_HOME or in ~/.config, or
what COTERIE_TRUSTED names.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from coterie.errors import CoterieError, say

VARIABLE = "COTERIE_TRUSTED"
"""Names another file."""
LINE = re.compile(r"([0-9a-f]{64})(?:\s|$)")

_unkept: set[str] = set()
"""Trusted in this process alone, because the file could not be written."""


def place() -> Path:
    """The file; raises where there is no home to keep it in."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    above = os.environ.get("XDG_CONFIG_HOME", "")
    try:
        return (Path(above) if Path(above).is_absolute() else Path.home() / ".config") / "coterie" / "trusted"
    except RuntimeError as reason:
        raise CoterieError("there is no home folder to keep trusted digests in.") from reason


def trusted(digest: str) -> bool:
    """Whether this user has trusted a file of this content."""
    return digest in _unkept or digest in _kept()[0]


def trouble() -> str:
    """Why nothing that was kept is trusted; empty where the list can be read, or was never begun."""
    return _kept()[1]


def add(digest: str, name: str) -> None:
    """Trust a content from now on; `name` is for whoever reads the list."""
    if trusted(digest):
        return
    shown = "".join(c if c.isprintable() else "?" for c in name)[:200]
    try:
        path = place()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "ab") as file:
            file.write(f"{digest}  {shown}\n".encode())
        why = trouble()
    except (OSError, CoterieError) as reason:
        why = str(getattr(reason, "strerror", None) or reason).rstrip(".")
    if why:
        _unkept.add(digest)
        say([f"that {shown} is trusted cannot be kept ({why}); it counts for this process alone."])


def _kept() -> tuple[set[str], str]:
    """The digests in the file, and why they do not count; a list that others could write to is nobody's word."""
    try:
        path = place()
    except CoterieError as reason:
        return set(), str(reason).rstrip(".")
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(handle, encoding="utf-8", errors="replace") as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                return set(), f"{path} is no regular file"
            if facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
                return set(), f"others may write to {path}; `chmod 600` it, and look whether it is still yours"
            return {found[1] for line in file if (found := LINE.match(line))}, ""
    except FileNotFoundError:
        return set(), ""
    except OSError as reason:
        return set(), f"{path} cannot be read: {reason.strerror}"
