"""What travels between server and sites: parcels, each with tensors and a small json; what both sides check of them.

A message holds one parcel for each experiment it serves. A parcel from the server carries

    protocol, kind, experiment, job, method, options, layout, round, number, population, record, do, merged, deadline,
    best (the round chosen on validation data so far, or null), and at the end last (the last round)

and the tensors of one record, `[1, ...]`; the answer repeats protocol, kind, experiment, method, layout and round and
names the site. Nothing here needs Flower.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

import coterie
from coterie.errors import CoterieError

PROTOCOL = 1
ECHOED = ("protocol", "kind", "experiment", "method", "layout", "round")
"""What an answer repeats, so that the server sees what it is an answer to."""


@dataclass(frozen=True)
class Parcel:
    """A json header and named tensors: what one experiment has to say in a message."""

    meta: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """No usable answer: the cause in a word, to be counted, and the reason in a sentence."""

    cause: str
    reason: str


def pack(parcels: Sequence[Parcel]) -> tuple[dict[str, Tensor], str]:
    """Named tensors and one json text. A tensor of several messages stays one object, so it can be encoded once."""
    tensors = {f"{k}:{name}": t for k, parcel in enumerate(parcels) for name, t in parcel.tensors.items()}
    return tensors, json.dumps([parcel.meta for parcel in parcels])


def unpack(tensors: Mapping[str, Tensor], text: str) -> list[Parcel]:
    """The parcels again; whatever is not of this form gets a sentence."""
    try:
        metas = json.loads(text)
    except json.JSONDecodeError as reason:
        raise CoterieError(f"the message's header is no json ({reason}).") from reason
    if not isinstance(metas, list) or not all(isinstance(meta, dict) for meta in metas):
        raise CoterieError("the message's header must be a list of parcels.")
    parcels = [Parcel(meta) for meta in metas]
    for key, t in tensors.items():
        number, colon, name = key.partition(":")
        if not colon or not number.isdigit() or int(number) >= len(parcels):
            raise CoterieError(f"the message holds a tensor '{key}' that belongs to no parcel.")
        parcels[int(number)].tensors[name] = t
    return parcels


def check_protocol(meta: Mapping[str, Any]) -> None:
    if meta.get("protocol") != PROTOCOL:
        raise CoterieError(
            f"the other side speaks protocol {meta.get('protocol')}, this one {PROTOCOL} (coterie "
            f"{coterie.__version__}); install the same version on both sides."
        )


def check_same(what: str, theirs: Any, ours: Any, consequence: str) -> None:
    """Raise unless both sides mean the same thing."""
    if theirs != ours:
        raise CoterieError(f"the {what} differs: the other side has '{theirs}', this one '{ours}'; {consequence}.")


def answer(task: Mapping[str, Any], site: str, tensors: Mapping[str, Tensor] | None = None, **meta: Any) -> Parcel:
    """A site's answer to a task."""
    echoed = {name: task.get(name) for name in ECHOED}
    return Parcel({**echoed, "protocol": PROTOCOL, "site": site, **meta}, dict(tensors or {}))


def check_answer(task: Mapping[str, Any], reply: Parcel, site: str) -> Failure | None:
    """What is wrong with an answer, if anything is."""
    meta = reply.meta
    if "error" in meta:
        return Failure(str(meta.get("cause", "failed")), str(meta["error"]))
    if meta.get("site") != site:
        return Failure("mismatch", f"the answer comes from '{meta.get('site')}', not from '{site}'.")
    if meta.get("round") != task.get("round"):
        return Failure("late", f"the answer is for round {meta.get('round')}, not for round {task.get('round')}.")
    for name in ECHOED:
        if meta.get(name) != task.get(name):
            return Failure("mismatch", f"the answer's {name} is '{meta.get(name)}', not '{task.get(name)}'.")
    return None
