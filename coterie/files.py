"""Files: what a user's Python file holds, and text and json, written in one step and read with a sentence for errors.

`mine.py:Mine` is a method in a file, `mymodel.py:Net` a model.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

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


# -- text and json -----------------------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """The table of values in a json file; whatever is wrong with the file becomes a sentence."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as reason:
        raise CoterieError(f"{path} cannot be read: {reason.strerror}.") from reason
    except RecursionError:
        raise CoterieError(f"{path} is damaged: it is nested too deeply.") from None
    except ValueError as reason:
        raise CoterieError(f"{path} is damaged: {reason}.") from reason
    if not isinstance(found, dict):
        raise CoterieError(f"{path} is damaged: it holds no table of values.")
    return found


def write_json(path: Path, values: Mapping[str, Any], indent: int | None = 2) -> None:
    """`values` as json, in one step."""
    write_text(path, json.dumps(values, indent=indent) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step: whoever reads it finds the old text or the new one."""
    fresh = path.with_name(f"{path.name}.tmp")
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, path)
