"""One file per method; each is found by its presence in this folder.

`from coterie.methods import FedFew` works for every class without a list to keep: a method's file is called after it.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any


def __getattr__(name: str) -> Any:
    file = f"{__name__}.{name.lower()}"
    found = vars(import_module(file)).get(name) if find_spec(file) else None
    if isinstance(found, type):
        return found
    raise AttributeError(f"coterie.methods has no method '{name}'")
