"""One file per method; each is found by its presence in this folder.

`from coterie.methods import FedFew` works for every class without a list to keep.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    from coterie import registry

    classes = {cls.__name__: cls for cls in registry.methods().values()}
    if name in classes:
        return classes[name]
    raise AttributeError(f"coterie.methods has no method '{name}'")
