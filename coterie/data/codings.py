"""Clients that seem to write the same labels, or the same categories of a column, in other ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from coterie.data.labels import NUMBER
from coterie.data.partition import Ints

RARE = 0.05
"""Share of the samples up to which classes that a client alone has, or lacks, are passed over."""
CODINGS = 3
"""Groups of clients with as many words each, up to which these may be one coding; more are clients that differ."""
SHOWN = 4
"""Groups, and clients of a group, that a note names."""

Bools = NDArray[np.bool_]


def notes(x: Tensor, bounds: Ints, counts: Ints, names: Sequence[str], recipe: Mapping[str, Any]) -> list[str]:
    """Sentences on a federation's samples, in client order, and its samples of each class, `counts [clients, classes]`.

    Only where the data name their clients: dealt ones share how labels are written.
    """
    if recipe.get("partition") != "natural" or len(names) < 2:
        return []
    called = [str(name) for name in recipe.get("classes") or range(counts.shape[1])]
    said = _groups("class", "labels", counts > 0, called, names) or _alone(counts, called, names)
    for column, (place, words) in _category_columns(recipe.get("encoding") or {}, x).items():
        there = np.array([(x[b0:b3, place : place + len(words)] != 0).any(0).cpu().numpy()
                          for b0, _, _, b3 in bounds.tolist()])
        said += [f"column '{column}': {note}, or leave the column out with ignore={column}"
                 for note in _groups("value", "values", there, words, names)]
    return said


def _groups(one: str, many: str, there: Bools, words: Sequence[str], names: Sequence[str]) -> list[str]:
    """A note where clients fall into groups without a word in common that look like codings of the same.

    They do where some groups write mostly numbers and others words, or where a few groups have as many words each.
    Numbers everywhere are one coding of which clients hold other parts; a group with a single word is skew.
    """
    group = _connected(there)
    found = [np.flatnonzero(group == g) for g in np.unique(group[there.any(1)])]
    held = [[words[k] for k in np.flatnonzero(there[clients].any(0)).tolist()] for clients in found]
    if len(found) < 2 or min(map(len, held)) < 2:
        return []
    numbers = {2 * sum(NUMBER.fullmatch(word) is not None for word in own) > len(own) for own in held}
    alike = numbers == {False} and len({len(own) for own in held}) == 1 and len(held) <= CODINGS
    if len(numbers) == 1 and not alike:
        return []
    each = [f"{_listed([names[i] for i in clients.tolist()], SHOWN)} with {_quoted(own)}"
            for clients, own in zip(found, held, strict=True)]
    return [f"clients fall into {len(found)} groups without a {one} in common, {'; '.join(each[:SHOWN])}"
            f"{f'; and {len(each) - SHOWN} more' if len(each) > SHOWN else ''}: the same {many}, written otherwise? "
            "Write them alike then"]


def _connected(there: Bools) -> Ints:
    """The group of each client `[clients]`, by its first client: who shares a word with one of a group is in it."""
    who, what = np.nonzero(there)  # there: [clients, words]
    group = np.arange(len(there))
    while True:
        first = np.full(there.shape[1], len(there))
        np.minimum.at(first, what, group[who])
        joined = group.copy()
        np.minimum.at(joined, who, first[what])
        if (joined == group).all():
            return group
        group = joined


def _alone(counts: Ints, called: Sequence[str], names: Sequence[str]) -> list[str]:
    """A note where a client alone has some classes in place of others that everybody else has.

    Neither may be rare, and there is no note where several clients are so: then labels differ from client to client.
    """
    there = counts > 0  # [clients, classes]
    said = []
    for i, name in enumerate(names):
        others = np.delete(there, i, axis=0)
        own, lacks = there[i] & ~others.any(0), ~there[i] & others.all(0)
        rest = np.delete(counts, i, axis=0)
        frequent = counts[i, own].sum() > RARE * counts[i].sum() and rest[:, lacks].sum() > RARE * rest.sum()
        if frequent and len(names) > 2:  # two clients differ as clients do
            mine, theirs = (_quoted([called[k] for k in np.flatnonzero(mask).tolist()]) for mask in (own, lacks))
            said.append(f"client {name} alone has the {'class' if own.sum() == 1 else 'classes'} {mine}, and lacks "
                        f"{theirs}, which all others have: the same labels, written otherwise? Write them alike then")
    return said if len(said) == 1 else []


def _category_columns(encoding: Mapping[str, Any], x: Tensor) -> dict[str, tuple[int, list[str]]]:
    """Where in the samples of a table each column of categories begins, and its categories; none elsewhere."""
    places, place = {}, 0
    for column, words in (encoding.get("columns") or {}).items():
        if words is not None:
            places[column] = (place, words)
        place += 1 if words is None else len(words)
    return places if x.ndim == 2 and place == x.shape[1] else {}


def _quoted(words: Sequence[str]) -> str:
    return _listed([f"'{word}'" for word in words], 6)


def _listed(words: Sequence[str], most: int) -> str:
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")
