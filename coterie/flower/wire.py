"""What travels between server and sites: parcels, each with tensors and a small json; what both sides check of them.

A message holds one parcel for each experiment it serves. A parcel from the server carries

    protocol, kind, experiment, job, method, options, layout, round, number, population, record, do, merged, deadline,
    best (the round chosen on validation data so far, or null), and at the end last (the last round)

and the tensors of one record, `[1, ...]`; the answer repeats protocol, kind, experiment, method, layout and round and
names the site. It holds n (training samples), scores and sums, where the task asks for them, or else error and cause.

Neither side believes the other. A header is bounded in length, depth and digits before it is parsed, the key of a
tensor is `number:name`, and a task says which tensors its answer holds. Nothing here needs Flower.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

import coterie
from coterie.errors import CoterieError

PROTOCOL = 2
ECHOED = ("protocol", "kind", "experiment", "method", "layout", "round")
"""What an answer repeats, so that the server sees what it is an answer to."""
CAUSES = ("refused", "failed")
"""Why a site says that it did not do a task: it did not want to, or it could not."""
LONGEST, SHORT, PIECES, DEEPEST, DIGITS, WORDS = 1 << 26, 1 << 22, 1 << 20, 12, 40, 500
"""A header has at most so many letters (an answer without sums `SHORT` ones), texts and lists together, lists in lists
and digits in a row; of what sites say so many letters are repeated."""
KEY = re.compile(r"(0|[1-9][0-9]{0,4}):([A-Za-z_][A-Za-z0-9_]{0,63})", re.ASCII)
_TOKENS = re.compile(rf'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[\[{{]|[\]}}]|[0-9]{{{DIGITS + 1},}}', re.ASCII | re.DOTALL)

Schema = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Name -> shape and dtype of a tensor that one client sends, with its client axis `[1, ...]`."""


@dataclass(frozen=True)
class Parcel:
    """A json header and named tensors: what one experiment has to say in a message."""

    meta: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    expected: Schema | None = None
    """Of a task, and never sent: the tensors that its answer holds; None where anything may come."""


@dataclass(frozen=True)
class Failure:
    """No usable answer: the cause in a word, to be counted, the reason in a sentence, and which field is to blame."""

    cause: str
    reason: str
    field: str = ""


BLAMED = ("mismatch", "rejected")
"""The causes that are the site's own doing, each of which is a strike."""


def rejected(field: str, reason: str) -> Failure:
    """An answer that is not used for what one of its fields holds."""
    return Failure("rejected", plain(reason), plain(field, 64))


def pack(parcels: Sequence[Parcel]) -> tuple[dict[str, Tensor], str]:
    """Named tensors and one json text. A tensor of several messages stays one object, so it can be encoded once."""
    tensors = {f"{k}:{name}": t for k, parcel in enumerate(parcels) for name, t in parcel.tensors.items()}
    return tensors, json.dumps([parcel.meta for parcel in parcels])


def unpack(tensors: Mapping[str, Tensor], text: str) -> list[Parcel]:
    """The parcels again; whatever is not of this form gets a sentence."""
    parcels = [Parcel(meta) for meta in headers(text)]
    for key, t in tensors.items():
        number, name = placed(key, len(parcels))
        parcels[number].tensors[name] = t
    return parcels


def headers(text: Any, most: int = LONGEST) -> list[dict[str, Any]]:
    """The json of each parcel of a message. What is long, deep or full of digits is refused before it is parsed."""
    if not isinstance(text, str) or len(text) > most:
        raise CoterieError(f"the message's header is no text of at most {most} letters.")
    depth = 0
    for count, token in enumerate(_TOKENS.finditer(text)):
        if count >= PIECES:
            raise CoterieError(f"the message's header has more than {PIECES} texts and lists.")
        first = text[token.start()]
        depth += (first in "[{") - (first in "]}")
        if depth > DEEPEST:
            raise CoterieError(f"the message's header has more than {DEEPEST} lists in lists.")
        if first.isdigit():
            raise CoterieError(f"the message's header holds a number of more than {DIGITS} digits.")
    try:
        metas = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as reason:
        raise CoterieError(f"the message's header is no json ({plain(reason)}).") from reason
    if not isinstance(metas, list) or not all(isinstance(meta, dict) for meta in metas):
        raise CoterieError("the message's header must be a list of parcels.")
    return metas


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")


def placed(key: Any, parcels: int) -> tuple[int, str]:
    """`2:update` -> 2 and `update`, of a message with so many parcels."""
    found = KEY.fullmatch(key) if isinstance(key, str) else None
    if found is None or int(found[1]) >= parcels:
        raise CoterieError(f"the message holds a tensor '{plain(key, 64)}' that belongs to no parcel.")
    return int(found[1]), found[2]


def plain(value: Any, most: int = WORDS) -> str:
    """What somebody else said, as one line of at most so many printable letters."""
    said = ascii(value)[1:-1] if isinstance(value, str) and not value.isprintable() else str(value)
    return said if len(said) <= most else f"{said[: most - 3]}..."


def unlike(schema: Schema, found: Schema) -> Failure | None:
    """What is wrong with the names, shapes and types of what came, if anything is."""
    absent, extra = sorted(set(schema) - set(found)), sorted(set(found) - set(schema))
    if absent or extra:
        both = (("missing", absent), ("unexpected", extra))
        return rejected((absent or extra)[0], "; ".join(f"{word}: {', '.join(names)}" for word, names in both if names))
    for name, (shape, dtype) in schema.items():
        theirs, kind = found[name]
        if theirs != shape:
            return rejected(name, f"{name} has shape {list(theirs)}, not {list(shape)}")
        if kind != dtype:
            return rejected(name, f"{name} is {_word(kind)}, not {_word(dtype)}")
    return None


def schema_of(tensors: Mapping[str, Tensor]) -> Schema:
    """Names, shapes and dtypes of one client's tensors."""
    return {name: (tuple(t.shape), t.dtype) for name, t in sorted(tensors.items())}


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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


def check_answer(task: Mapping[str, Any], reply: Parcel, site: str, fields: Iterable[str] = ()) -> Failure | None:
    """What is wrong with an answer, if anything is; `fields` are those that it has beside what all answers have."""
    meta = reply.meta
    if "error" in meta:
        cause = meta.get("cause")
        return Failure(cause if cause in CAUSES else "failed", plain(meta["error"]))
    if meta.get("site") != site:
        return Failure("mismatch", f"the answer comes from '{plain(meta.get('site'), 64)}', not from '{site}'.", "site")
    for name in ("round", *ECHOED):
        theirs, ours = meta.get(name), task.get(name)
        if type(theirs) is type(ours) and theirs == ours:
            continue
        if name == "round" and type(theirs) is int and 0 <= theirs < (ours or 0):
            return Failure("late", f"the answer is for round {theirs}, not for round {ours}.", name)
        return Failure("mismatch", f"the answer's {name} is '{plain(theirs, 64)}', not '{ours}'.", name)
    allowed = {*ECHOED, "site", *fields}
    for word, names in (("missing", allowed - meta.keys()), ("unexpected", meta.keys() - allowed)):
        if names:
            first = sorted(names)[0]
            return rejected(first, f"{word} in the answer's header: {plain(first, 64)}")
    return None
