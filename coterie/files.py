"""Classes and functions from a user's Python file: `mine.py:Mine` for methods, `mymodel.py:Net` for models."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

from coterie.errors import CoterieError

IN_FILE = re.compile(r"^(.+\.py):(\w+)(?::(.*))?$")
"""`path.py:Name`, maybe with options behind another colon."""


def module(path: Path, what: str) -> ModuleType:
    """Run the file and return it as a module; `what` says what is wanted of it, e.g. `the method Mine`."""
    if not path.is_file():
        raise CoterieError(f"there is no file '{path}' to take {what} from.")
    name = f"coterie_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[name] = found
    try:
        spec.loader.exec_module(found)
    except Exception as reason:
        raise CoterieError(f"'{path}' cannot be imported: {type(reason).__name__}: {reason}") from reason
    found.__dict__["__coterie_file__"] = str(path.resolve())
    return found


def resolved(spec: str) -> str:
    """The spelling with the file's whole path, so that it means the same from another folder; others as they are."""
    found = IN_FILE.match(spec)
    return spec if found is None else f"{Path(found[1]).resolve()}{spec[found.end(1):]}"


def digest(path: Path) -> str:
    """sha256 of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
