"""A newcomer's samples from a file, encoded as those of the run were."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.data import Source, load, load_as, spelled
from coterie.data.labels import placed
from coterie.data.readers import find
from coterie.data.readers.npz import arrays
from coterie.errors import CoterieError, NoLabels, unknown
from coterie.running.saved import Saved

INHERITED = ("text", "tokenizer", "words", "length", "regression", "shape")
"""Options of the run's data that a newcomer's table takes over where it does not say otherwise."""


def read(
    path: str, client: str | None = None, saved: Saved | None = None
) -> tuple[tuple[Tensor, Tensor], str, NDArray[Any] | None]:
    """One client's labelled samples from a file, spelled as for --data, its name, and the samples' groups if they have
    any; NoLabels where there are no labels.

    A table is encoded as the run's was: columns, categories, scale and classes. Labels are found among the run's
    classes by their names or numbers; one that is not there is refused.
    """
    place, options = spelled(path)
    given: dict[str, Any] = {**_as_in_the_run(place, saved), **options}
    try:
        source = _loaded(place, given, saved)
    except NoLabels:
        # leaves out samples without a label, and nothing else is wrong
        source = _loaded(place, {**given, "skip": True}, saved)
    x, y = source.x, source.y
    if saved is not None:
        y = placed(y, source.classes, saved.spec.classes, saved.spec.class_names, path)
    if source.client is not None:
        names = sorted({str(c) for c in source.client})
        if client is None and len(names) > 1:
            raise CoterieError(f"{path} holds the samples of {len(names)} clients; name the newcomer with --client.")
        if client is not None and client not in names:
            raise unknown(f"client in {path}", client, names)
        name = client or names[0]
        mine = torch.from_numpy(np.array([str(c) == name for c in source.client]))
        return (x[mine], y[mine]), name, None if source.group is None else source.group[mine.numpy()]
    if client is not None:
        raise CoterieError(f"{path} names no clients; leave --client out.")
    return (x, y), Path(place).stem, source.group


def _loaded(place: str, given: Mapping[str, Any], saved: Saved | None) -> Source:
    return load(place, **given) if saved is None else load_as(place, saved.spec.classes, **given)


def _as_in_the_run(place: str, saved: Saved | None) -> dict[str, Any]:
    """How the run read its table, for one more: its encoding, and how it made samples of texts."""
    if saved is None or saved.experiment is None:
        return {}
    asked, kind = spelled(saved.experiment.data)[1], find(place)
    if kind == "npz" and asked.get("group") in arrays(Path(place)):
        return {"group": asked["group"]}
    if saved.spec.encoding is None or kind != "table":
        return {}
    return {"schema": saved.spec.encoding, **{name: asked[name] for name in INHERITED if name in asked}}
