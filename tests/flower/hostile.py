"""Hostile answers: every field of what a site sends, in every wrong form, as the bytes that Flower carries.

A case takes an honest answer apart (`Raw`), spoils one field and puts it together again. What no honest encoder could
write is written byte by byte.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as Proto

from coterie.contract import sent
from coterie.flower.message import ARRAYS, HEADER, NONCE, PARTS, Encoder, masked, unmasked
from coterie.flower.wire import Parcel

DEEP = "[" * 200_000 + "]" * 200_000
DIGITS = "9" * 5000


def header(text: Any, **more: Any) -> ConfigRecord:
    return ConfigRecord({PARTS: text, NONCE: os.urandom(16), **more})


@dataclass
class Raw:
    """A message taken apart: numpy's bytes of every array by its key, and the text of the header."""

    arrays: dict[str, bytes]
    text: str
    stype: str = "numpy.ndarray"
    more: dict[str, Any] | None = None  # further records

    @classmethod
    def of(cls, parcels: list[Parcel]) -> Raw:
        return cls.apart(Encoder().records(parcels))

    @classmethod
    def apart(cls, content: RecordDict) -> Raw:
        arrays = {key: unmasked(array.data) for key, array in content.array_records.get(ARRAYS, {}).items()}
        return cls(arrays, str(content.config_records[HEADER][PARTS]))

    def records(self) -> RecordDict:
        arrays = {key: Array("float32", (1,), self.stype, masked(data)) for key, data in self.arrays.items()}
        parts = {ARRAYS: ArrayRecord(arrays), HEADER: header(self.text), **(self.more or {})}
        return RecordDict({key: part for key, part in parts.items() if part is not None})

    def carried(self) -> RecordDict:
        """As it arrives: through the bytes of Flower's message."""
        proto = Proto.FromString(recorddict_to_proto(self.records()).SerializeToString())
        return recorddict_from_proto(proto)


@dataclass(frozen=True)
class Case:
    """One field of an answer in one wrong form."""

    field: str
    form: str
    blamed: str = ""
    """The field that is named, if it is another one: a broken header has no fields."""

    @property
    def named(self) -> str:
        return self.blamed or self.field

    def spoiled(self, raw: Raw, number: int = 0) -> Raw:
        """The message with the field of its parcel `number` spoiled."""
        if self.field in FORMS["message"]:
            return FORMS["message"][self.field](raw)
        key = f"{number}:{self.field}"
        if key in raw.arrays:
            return _array(raw, key, self.form)
        return _header(raw, number, self.field.split("."), self.form)


# -- tensors -----------------------------------------------------------------------------------------------------------


def npy(t: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, t.numpy(), allow_pickle=False)
    return buffer.getvalue()


def described(descr: str, shape: str, data: bytes = b"", fortran: str = "False") -> bytes:
    """An array with a header of one's own."""
    text = f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


def tensor(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.load(io.BytesIO(data), allow_pickle=False).copy())


def zipped(t: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, t=t.numpy())
    return buffer.getvalue()


def pickled(t: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array([{"a": t.tolist()}], dtype=object), allow_pickle=True)
    return buffer.getvalue()


def _other_type(t: torch.Tensor) -> torch.Tensor:
    return t.to(torch.float32 if t.dtype != torch.float32 else torch.float64)


VALUES = {
    "wrong type": _other_type,
    "wrong shape": lambda t: torch.cat([t, t], -1),
    "fifty": lambda t: t.expand(50, *t.shape[1:]).contiguous(),
    "no client axis": lambda t: t[0],
    "nothing": lambda t: t[:0],
    "nan": lambda t: _set(t, torch.nan),
    "inf": lambda t: _set(t, torch.inf),
    "minus inf": lambda t: _set(t, -torch.inf),
    "huge": lambda t: _set(t, 3e38),
    "long": lambda t: (t.abs() + 1) * 1e6,
    "far off": lambda t: (t.abs() + 1) * (10**9 if not t.is_floating_point() else 1e9),
    "negative": lambda t: -t.abs() - 1,
    "doubled": lambda t: 2 * t + 1,
}
BYTES = {
    "empty": lambda t: b"",
    "claimed size": lambda t: described("'<f4'", f"({2**45},)"),
    "claimed rows": lambda t: described("'<f8'", "(1, 43)", b"\0" * 8),
    "zipped": zipped,
    "pickled": pickled,
    "deep": lambda t: described("'<f4'", "(" * 3000 + "1" + ",)" * 3000),
    "digits": lambda t: described("'<f4'", f"({DIGITS},)"),
    "columns first": lambda t: described("'<f8'", str(tuple(t.shape)), t.double().numpy().tobytes(), "True"),
    "objects": lambda t: described("'|O'", "(1,)", b"\x80\x04N."),
    "more bytes": lambda t: npy(t) + b"\0" * 8,
    "fewer bytes": lambda t: npy(t)[:-1],
    "version 3": lambda t: npy(t).replace(b"NUMPY\x01", b"NUMPY\x03", 1),
    "noise": lambda t: bytes(range(256)) * 4,
}


def _set(t: torch.Tensor, value: float) -> torch.Tensor:
    t = t.clone()
    t.view(-1)[0] = value
    return t


def _array(raw: Raw, key: str, form: str) -> Raw:
    arrays = dict(raw.arrays)
    if form == "missing":
        del arrays[key]
    elif form in VALUES:
        arrays[key] = npy(VALUES[form](tensor(arrays[key])))
    else:
        arrays[key] = BYTES[form](tensor(arrays[key]))
    return replace(raw, arrays=arrays)


def of_tensor(name: str, told: sent.Values | None, t: torch.Tensor) -> list[Case]:
    """The wrong forms of a tensor, of which `told` is declared."""
    forms = ["missing", "wrong type", "wrong shape", "fifty", "no client axis", "nothing", *BYTES]
    if t.is_floating_point():
        forms += ["nan", "inf", "minus inf", "huge"] if t.numel() else []
    if isinstance(told, sent.Vectors):
        forms += ["long"] + (["negative"] if told.at_least is not None else [])
    elif told is not None:
        signed = isinstance(told, sent.Numbers) and told.above is None
        forms += ["far off"] + ([] if signed else ["negative"])
        forms += ["doubled"] if isinstance(told, sent.Counts | sent.Shares) else []
    if not t.numel():  # nothing is in it that could be wrong
        forms = ["missing", "wrong type", "fifty", "no client axis", *(f for f in BYTES if f != "columns first")]
    return [Case(name, form) for form in forms]


# -- the header --------------------------------------------------------------------------------------------------------

RAW = {"digits": DIGITS, "deep": DEEP, "nan": "NaN", "inf": "Infinity", "minus inf": "-Infinity"}
"""Forms that no json of values has, as text; a header with one of them is refused as a whole."""
PLAIN = {
    "null": None, "true": True, "text": "seven", "list": [1], "object": {}, "huge": 10**39, "huge number": 1e308,
    "negative": -3, "half": 0.5, "overflow": 2**63 - 1, "beyond": 2**63, "empty": "", "many": [0] * 1000,
    "escapes": "\x1b[31m[/x]\u202e",
}


def _header(raw: Raw, number: int, path: list[str], form: str) -> Raw:
    metas = json.loads(raw.text)
    place = metas[number]
    for word in path[:-1]:
        place = place[word]
    if form == "missing":
        del place[path[-1]]
    elif form == "extra":
        place["more"] = 1
    else:
        place[path[-1]] = PLAIN.get(form, "@here@")
    return replace(raw, text=json.dumps(metas).replace('"@here@"', RAW.get(form, "")))


def of_fact(path: str, but: tuple[str, ...] = ()) -> list[Case]:
    """The wrong forms of a value in the header, without those that are right there."""
    found = [Case(path, form) for form in ("missing", *PLAIN) if form not in but]
    return found + [Case(path, form, HEADER) for form in RAW]


ECHOED = {
    "protocol": (), "kind": (), "experiment": (), "method": (), "layout": (), "round": (), "site": (), "n": (),
}
SCORES = {
    "scores": (), "scores.samples": (), "scores.validated": ("true",), "scores.served": (),
    "scores.served.steps": (), "scores.served.test": (),
    "scores.served.test.loss": ("null", "half", "overflow", "beyond"),
    "scores.served.test.accuracy": ("null", "half"), "scores.adapted.val.accuracy": ("null", "half"),
}


def _message(**changes: Any):
    return lambda raw: replace(raw, **{name: change(raw) if callable(change) else change
                                       for name, change in changes.items()})


def _renamed(key: str):
    return lambda raw: replace(raw, arrays={**raw.arrays, key: npy(torch.zeros(1, 1))})


FORMS = {"message": {
    "no json": _message(text="{"),
    "an empty text": _message(text=""),
    "a number": _message(text="3"),
    "no parcels": _message(text="[]"),
    "an object": _message(text=lambda raw: raw.text[1:-1]),
    "two answers": _message(text=lambda raw: f"[{raw.text[1:-1]}, {raw.text[1:-1]}]"),
    "lists": _message(text="[[], []]"),
    "deep": _message(text=DEEP),
    "deep objects": _message(text='[{"a":' * 100_000),
    "digits": _message(text=f"[{DIGITS}]"),
    "an open string": _message(text='[{"' + '\\"' * 100_000),
    "bytes for text": _message(more={HEADER: header(b"[]")}),
    "numbers for text": _message(more={HEADER: header([1, 2])}),
    "two texts": _message(more={HEADER: header("[]", more="[]")}),
    "another record": _message(more={"more": MetricRecord({"a": 1.0})}),
    "no nonce": _message(more={HEADER: ConfigRecord({PARTS: "[]"})}),
    "no header": _message(more={HEADER: None}),
    "no arrays": _message(more={ARRAYS: None}),
    "arrays for header": _message(more={HEADER: ArrayRecord({})}),
    "another stype": lambda raw: replace(_renamed("0:more")(raw), stype="pickle"),
    "superscript": _renamed("\u00b2:update"),
    "arabic digits": _renamed("\u0660:update"),
    "no number": _renamed("update"),
    "another parcel": _renamed("1:update"),
    "minus": _renamed("-1:update"),
    "5000 digits": _renamed(f"{DIGITS}:update"),
    "zeros": _renamed("00:update"),
    "no name": _renamed("0:"),
    "a path": _renamed("0:../update"),
    "a new line": _renamed("0:update\n"),
    "extra": _renamed("0:more"),
}}


def of_message() -> list[Case]:
    blamed = {"another stype": "more", "extra": "more", "no arrays": "update"}
    return [Case(form, "message", blamed.get(form, HEADER)) for form in FORMS["message"]]


def of_facts() -> list[Case]:
    """Every value of a header that has scores in every wrong form."""
    return [case for path, fine in (ECHOED | SCORES).items() for case in of_fact(path, fine)]


def of_tensors(tensors: Mapping[str, torch.Tensor], declared: Mapping[str, sent.Values]) -> list[Case]:
    """Every tensor of an honest answer in every wrong form, and one thing too many."""
    found = [case for name, t in tensors.items() for case in of_tensor(name, declared.get(name), t)]
    return [*found, Case("more", "extra")]
