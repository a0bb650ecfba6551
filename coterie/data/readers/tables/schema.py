"""How a table became numbers, as a schema file keeps it, so that every site encodes alike."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coterie.contract.units import Unit
from coterie.data.readers.refusals import reading
from coterie.errors import CoterieError, NoLabels
from coterie.files import read_json, write_json

Encoding = dict[str, Any]
"""`columns` {name: its categories, or null for numbers}, `label` and `client` (columns, the second perhaps null),
`classes` (names, or null), `regression` (whether the label is a number to predict; older ones do not say); where asked
for, `scale` {name: [mean, deviation]}, with that of the label where it is a number to predict, `constant` (columns of a
single number, which are centred and whose deviation is written as 1; older ones do not say), `fill` {name: number}
and `group` (the column whose rows stay together). Where the sample is a text, `text` (its column), `tokenizer`,
`words`, `length` and, for the built-in tokenizers, their `rule` in words; `columns` is empty then."""


def read_schema(path: str | None) -> Encoding | None:
    if path is None or not os.path.exists(path):
        return None
    with reading(path, "a schema"):
        held = read_json(Path(path))
        if not isinstance(held.get("columns"), dict) or "classes" not in held:
            raise ValueError("columns and classes are expected")
        if not all(isinstance(held.get(role, ""), str | None) for role in ("label", "client", "group", "text")):
            raise ValueError("label, client, group and text are names of columns")
        for words in (held["classes"], held.get("constant"), *held["columns"].values()):
            if words is not None and not (isinstance(words, list) and all(isinstance(word, str) for word in words)):
                raise ValueError("classes, categories and constant columns are lists of texts")
        if not isinstance(held.get("regression"), bool | None):
            raise ValueError("regression is true or false")
        if not all(isinstance(held.get(name), dict | None) for name in ("scale", "fill")):
            raise ValueError("scale and fill name columns")
        for column, pair in (held.get("scale") or {}).items():
            if not (isinstance(pair, list) and len(pair) == 2 and all(_finite(v) for v in pair) and pair[1] > 0):
                raise ValueError(f"the scale of '{column[:40]}' is a mean and a deviation above 0")
        if not all(_finite(value) for value in (held.get("fill") or {}).values()):
            raise ValueError("what fills gaps are numbers")
        return held


def write_schema(path: Path, encoding: Encoding) -> None:
    try:
        write_json(path, encoding, indent=1)
    except OSError as error:
        raise CoterieError(f"the schema {path} cannot be written: {error.strerror}.") from error


def without_labels(name: str, column: str) -> NoLabels:
    """What is said of data that lack the column of labels that a schema names."""
    return NoLabels(f"{name} has no column '{column}', which would hold the labels.")


def unit_of(encoding: Mapping[str, Any] | None) -> Unit | None:
    """How the targets of a table are standardised; None where they are not, or where labels are classes."""
    pair = ((encoding or {}).get("scale") or {}).get((encoding or {}).get("label"))
    return None if pair is None else Unit(float(pair[0]), float(pair[1]))


def scaled(recipe: Mapping[str, Any]) -> bool:
    """Whether a federation's columns of numbers were brought to mean 0 and deviation 1 when they were read."""
    return bool((recipe.get("encoding") or {}).get("scale"))


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
