"""A newcomer's samples from a file, encoded as those of the run were."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.data import Source, copies, load, load_as, spelled
from coterie.data.labels import placed
from coterie.data.readers import READERS, find, takes
from coterie.data.readers.npz import arrays
from coterie.data.readers.tables.rows import LABEL
from coterie.data.unlike import Shape, number_columns, short, without_filled
from coterie.errors import CoterieError, NoLabels, unknown
from coterie.running.saved import Saved

INHERITED = ("decimal", "text", "tokenizer", "words", "length", "regression", "shape")
"""Options of the run's data that a newcomer's table takes over where it does not say otherwise."""
OF_LABELS = ("label", "classes", "class_names", "regression")
"""Options that say something of labels."""
SAID = ("filled in", "left out", "images ", "perhaps missing")
"""How those notes on data begin that a newcomer is told."""


ONE_LABEL = ("a newcomer's model and its estimate are for one label a sample, and in these data each token has a "
             "class; keep newcomers among the data of the run as unseen clients (--unseen).")
Fill = Mapping[str, float] | None
"""What stands for a missing number, by column."""


def read(
    path: str, client: str | None = None, saved: Saved | None = None
) -> tuple[tuple[Tensor, Tensor], str, NDArray[Any] | None, tuple[str, ...], Fill]:
    """One client's labelled samples from a file, spelled as for --data, its name, the samples' groups if they have any,
    notes on them (what was filled in, images of several depths, copies), and what fills gaps of a table; NoLabels where
    there are no labels.

    A table is encoded as the run's was: columns, categories, scale and classes. Labels are found among the run's
    classes by their names or numbers; one that is not there is refused.
    """
    place, options = spelled(path)
    given: dict[str, Any] = {**_as_in_the_run(place, options.get("format"), saved), **options}
    try:
        source = _loaded(place, given, saved)
    except NoLabels:
        # leaves out samples without a label, and nothing else is wrong
        source = _loaded(place, {**given, "skip": True}, saved)
    if source.vocabulary:
        raise CoterieError(ONE_LABEL)
    x, y, told = source.x, source.y, tuple(note for note in source.notes if note.startswith(SAID))
    if saved is not None:
        y = placed(y, source.classes, saved.spec.classes, saved.spec.class_names, path)
    fill = (source.encoding or {}).get("fill")
    if source.client is not None:
        names = sorted({str(c) for c in source.client})
        if client is None and len(names) > 1:
            raise CoterieError(f"{path} holds the samples of {len(names)} clients; name the newcomer with --client.")
        if client is not None and client not in names:
            raise unknown(f"client in {path}", client, names)
        name = client or names[0]
        mine = torch.from_numpy(np.array([str(c) == name for c in source.client]))
        x, y, group = x[mine], y[mine], None if source.group is None else source.group[mine.numpy()]
        return (x, y), name, group, (*told, *copies.among(x, y, group)), fill
    if client is not None:
        raise CoterieError(f"{path} names no clients; leave --client out.")
    return (x, y), Path(place).stem, source.group, (*told, *copies.among(x, y, source.group)), fill


def unlabelled(path: str, client: str | None, saved: Saved) -> tuple[tuple[str, ...], dict[str, str], Fill]:
    """Notes on the samples of a newcomer without labels, its columns that look like other units, as `other_units`, and
    what fills gaps; of all clients in the data where none is named. Nothing is known of data without columns."""
    place, options = spelled(path)
    known = _as_in_the_run(place, options.get("format"), saved)
    if "schema" not in known:
        return (), {}, None
    schema = {**known["schema"], "label": LABEL, "classes": None, "regression": True}
    kept = {name: value for name, value in options.items() if name not in OF_LABELS}
    source = load(place, **{**known, **kept, "schema": schema, "regression": True, "skip": True})
    x = source.x
    if source.client is not None and client is not None:
        names = [str(c) for c in source.client]
        if client not in names:
            raise unknown(f"client in {path}", client, sorted(set(names)))
        x = x[torch.tensor([name == client for name in names])]
    told, fill = (note for note in source.notes if note.startswith(SAID)), (source.encoding or {}).get("fill")
    return tuple(told), other_units(saved.spec.encoding, x), fill


def _loaded(place: str, given: Mapping[str, Any], saved: Saved | None) -> Source:
    return load(place, **given) if saved is None else load_as(place, saved.spec.classes, **given)


def _as_in_the_run(place: str, said: str | None, saved: Saved | None) -> dict[str, Any]:
    """How the run read its columns, for one more: its encoding, and how it made samples of texts.

    The format is what was `said`, or found. Each that follows a schema has columns: tables and Hugging Face data sets.
    """
    if saved is None or saved.experiment is None or (said is not None and said not in READERS):
        return {}
    asked, kind = spelled(saved.experiment.data)[1], said or find(place)
    if kind == "npz" and asked.get("group") in arrays(Path(place)):
        return {"group": asked["group"]}
    if saved.spec.encoding is None or not takes(kind, "schema"):
        return {}
    taken = [name for name in INHERITED if name in asked and takes(kind, name)]
    return {"schema": saved.spec.encoding, **{name: asked[name] for name in taken}}


# -- units -------------------------------------------------------------------------------------------------------------


def other_units(encoding: Mapping[str, Any] | None, x: Tensor, y: Tensor | None = None) -> dict[str, str]:
    """Columns that lie so far from the run's that they look like other units, each with a sentence.

    `x [n, ...]` is encoded as the run's table was, and `y`, if there are labels, is in the user's unit. Only scaled
    columns, and a number to predict that was scaled, have a mean and a deviation to compare with.
    """
    scale: Mapping[str, Any] = (encoding or {}).get("scale") or {}
    if encoding is None or not scale or not len(x):
        return {}
    places = number_columns(encoding, x[0].numel())
    flat = x.flatten(1).double().cpu().numpy()
    places = {name: place for name, place in places.items() if name in scale}
    filled = {**{name: scale[name][0] for name in places}, **(encoding.get("fill") or {})}  # the mean, or what was said
    known = without_filled(flat[:, list(places.values())], list(places), {"scale": scale, "fill": filled})
    columns = dict(zip(places, known.T, strict=True))  # as the run standardised them
    label = str(encoding.get("label"))
    if encoding.get("regression") and label in scale and y is not None and y.ndim == 1:
        columns[label] = (y.double().cpu().numpy() - scale[label][0]) / scale[label][1]
    found = {}
    for name in encoding.get("constant") or ():
        own = columns.pop(name, np.zeros(1))
        own = flat[:, places[name]] if name in places else own  # who holds the run's number is no gap
        if own.any():
            always = float(scale[name][0])
            found[name] = (f"'{name}' is {always + own.mean():.4g} ± {own.std():.4g} here (mean ± deviation) and "
                           f"always {always:.4g} in the run, which has learned nothing of it: other units?")
    for name, values in columns.items():
        mean, deviation = map(float, scale[name])
        here = Shape.of_columns(mean + deviation * values[:, None])[0]
        if here.away(mean, deviation) or here.together(mean, deviation):
            there = f"{short(mean)} ± {short(deviation)}"
            found[name] = f"'{name}' is {here} here and {there} in the run (mean ± deviation): other units?"
    return found
