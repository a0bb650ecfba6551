"""The reference says of a field what the comment beside it says, where no docstring stands below it."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Fields(griffe.Extension):
    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        declared = isinstance(attr.parent, griffe.Class) and not attr.source.lstrip().startswith("self.")
        if attr.docstring is None and declared:
            beside = re.search(r"\S.*?  # (?!type:|noqa)(.+)$", attr.source)
            if beside:
                said = re.sub(r"^\[[^]]*\]", r"`\g<0>`", beside[1])  # shapes are code, as in docstrings
                attr.docstring = griffe.Docstring(f"{said[:1].upper()}{said[1:]}.", parent=attr)
