"""Parts as Flower's records: an ArrayRecord with a named array for each tensor, if any, a ConfigRecord with the json.

Flower names objects by their content, and whoever can guess a name can announce it before its owner does, or ask
whether it is there. So every object holds what nobody can guess: the json stands beside a nonce, and an array's bytes
are a nonce and then, masked by a stream that follows from it, those of numpy's .npy format, version 1.0. That hides
nothing from who has the array. Arrays are read here and not by numpy: the header is compared with what is expected, and
the length of the bytes with the header, before there is a tensor.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Sequence
from typing import ClassVar

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.app.message import array as flower
from flwr.supercore.inflatable.inflatable_object import InflatableObject, get_object_body
from flwr.supercore.inflatable.inflatable_utils import inflatable_class_registry
from torch import Tensor

from coterie.errors import CoterieError
from coterie.flower import wire
from coterie.flower.wire import Failure, Parcel

ARRAYS, HEADER, PARTS, NONCE = "arrays", "header", "parts", "nonce"
ODD = 16
"""Bytes of a nonce."""
NPY, START = b"\x93NUMPY\x01\x00", 10
"""The first bytes of every array; two more say how long the description is that follows."""
DESCRIPTION = 1 << 10
"""What an array's bytes may have beside its numbers."""
DESCRIBED = re.compile(
    rb"\{'descr': '([<|][a-z][0-9])', 'fortran_order': False, 'shape': \(((?:[0-9]{1,12}, ?){0,8}[0-9]{0,12})\), \} *\n"
)
RECORD = 1 << 16
"""Bytes of a short record."""
_COUNT = rb"[\x80-\xff]{0,4}[\x00-\x7f]"
HEADED = re.compile(rb"ConfigRecord  [0-9]{1,9}\x00\n" + _COUNT + rb"\n\x05parts\x12" + _COUNT + rb"\*" + _COUNT)
"""What stands before the text of a header's record in its bytes; after it come `NONCED` and the nonce."""
NONCED = get_object_body(ConfigRecord({NONCE: bytes(ODD)}).deflate(), ConfigRecord)[:-ODD]
DESCRIPTOR = re.compile(
    rb'\{"dtype": "[^"\\]{0,64}", "shape": \[[0-9, ]{0,200}\], "stype": "[^"\\]{0,64}", '
    rb'"arraychunk_ids": \[([0-9, ]*+)\]\}')
TYPES = {
    b"<f2": torch.float16, b"<f4": torch.float32, b"<f8": torch.float64, b"|i1": torch.int8, b"|u1": torch.uint8,
    b"<i2": torch.int16, b"<i4": torch.int32, b"<i8": torch.int64, b"|b1": torch.bool,
}


class Encoder:
    """Encodes the messages of one round; a tensor that goes to several sites is encoded once."""

    def __init__(self) -> None:
        self._done: dict[int, tuple[Tensor, Array]] = {}  # the tensor is held, so that its id stays its own

    def records(self, parcels: Sequence[Parcel]) -> RecordDict:
        tensors, text = wire.pack(parcels)
        arrays = {name: self._array(t) for name, t in tensors.items()}
        header = ConfigRecord({PARTS: text, NONCE: os.urandom(ODD)})
        return RecordDict({ARRAYS: ArrayRecord(arrays), HEADER: header} if arrays else {HEADER: header})

    def _array(self, t: Tensor) -> Array:
        if id(t) not in self._done:
            plain = Array(t.detach().cpu().contiguous().numpy())
            self._done[id(t)] = (t, Array(plain.dtype, plain.shape, plain.stype, masked(plain.data)))
        return self._done[id(t)][1]


def masked(data: bytes) -> bytes:
    """A fresh nonce, and the bytes as nobody can guess them."""
    nonce = os.urandom(ODD)
    return nonce + _stream(nonce, data)


def unmasked(data: bytes, most: int | None = None) -> bytes:
    """The bytes again, the first ones where `most` says how many are wanted."""
    return _stream(data[:ODD], memoryview(data)[ODD : None if most is None else ODD + most])


def _stream(nonce: bytes, data: bytes | memoryview) -> bytes:
    """The bytes under AES in counter mode, which undoes itself."""
    return Cipher(algorithms.AES(nonce), modes.CTR(bytes(16))).encryptor().update(data)


class Bounded:
    """Flower's way to read records of a kind, for those alone that are as short as coterie's: names, each with that of
    a part. Json of empty lists would take 25 times its bytes."""

    def __init__(self, kind: type[InflatableObject]) -> None:
        self._kind = kind

    def inflate(self, object_content: bytes, children: dict[str, InflatableObject] | None = None) -> InflatableObject:
        size, parts, nested = len(object_content), len(children or {}), object_content.count(b"[")
        if size > RECORD + 512 * parts or (size > RECORD and (nested or object_content.count(b'"') > 16 * parts)):
            raise CoterieError(f"a {self._kind.__qualname__} of {size} bytes and {parts} parts is none of coterie's.")
        return self._kind.inflate(object_content, children)


class BoundedHeader(ConfigRecord):
    """The header's record: it is a text and a nonce, which is seen before anything else is made of it."""

    most: ClassVar[int] = wire.SHORT
    """Bytes of the longest text that is expected."""

    @classmethod
    def inflate(cls, object_content: bytes, children: dict[str, InflatableObject] | None = None) -> ConfigRecord:
        if len(object_content) > cls.most + RECORD:
            raise CoterieError(f"a header of {len(object_content)} bytes is longer than any that was asked for.")
        begin = HEADED.match(object_content)
        if begin is not None and not children:
            text = object_content[begin.end() : -len(NONCED) - ODD].decode(errors="replace")
            found = ConfigRecord({PARTS: text, NONCE: object_content[-ODD:]})
            if found.deflate() == object_content:
                return found
        raise CoterieError("the header is no text with a nonce.")


class BoundedArray(Array):
    """Flower's array, for the processes of server and client apps (`install`): one that would be too large is refused
    before its chunks are put together. It may name one chunk a million times."""

    most: ClassVar[int] = 0
    """Bytes of the largest array that is expected."""
    left: ClassVar[int | None] = None
    """Bytes that all arrays which still come may have together, where nothing is known of what is expected."""

    @classmethod
    def install(cls, together: int | None = None) -> None:
        """With `together` it is so many bytes for all arrays of the process, else what answers are expected to have."""
        bounded: list[type[InflatableObject]] = [RecordDict, ArrayRecord]
        if together is None:  # a site may have another app, with records of its own
            bounded += [Message, MetricRecord]
            inflatable_class_registry[ConfigRecord.__qualname__] = BoundedHeader
        for kind in bounded:
            inflatable_class_registry[kind.__qualname__] = Bounded(kind)  # type: ignore[assignment]
        inflatable_class_registry[Array.__qualname__] = cls
        cls.left = together

    @classmethod
    def expect(cls, tasks: Iterable[Parcel]) -> None:
        """Answers to these tasks may come from now on."""
        tasks = list(tasks)
        BoundedHeader.most = max(BoundedHeader.most, _letters(tasks))
        expected = [form for task in tasks for form in (task.expected or {}).values()]
        cls.most = max([cls.most, *(math.prod(shape) * dtype.itemsize + DESCRIPTION for shape, dtype in expected)])

    @classmethod
    def inflate(cls, object_content: bytes, children: dict[str, InflatableObject] | None = None) -> Array:
        described = DESCRIPTOR.fullmatch(get_object_body(object_content, Array))
        if described is None:
            raise CoterieError("an array is described in another way than Flower does.")
        count = described[1].count(b",") + bool(described[1])
        largest = max((len(chunk.data) for chunk in (children or {}).values()), default=0)  # type: ignore[attr-defined]
        room = cls.most if cls.left is None else cls.left
        whole = flower.FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE  # type: ignore[attr-defined]
        if (count - 1) * max(largest, whole) > room:  # the last chunk may be shorter
            why = "than any that was asked for" if cls.left is None else "than there is room for"
            raise CoterieError(f"an array of {count} chunks is larger {why}.")
        found = Array.inflate(object_content, children)
        if cls.left is not None:
            cls.left -= len(found.data)
        return found


def parcels_of(content: RecordDict) -> list[Parcel]:
    """The parcels of a message that arrived."""
    arrays, text = _parts(content)
    return wire.unpack({name: _tensor(name, array) for name, array in arrays.items()}, text)


def answers_of(content: RecordDict, tasks: Sequence[Parcel]) -> list[Parcel | Failure] | Failure:
    """A site's answer to each of some tasks, or what is wrong with it; what is wrong with the message as a whole.

    No tensor is made but those that the task expects.
    """
    try:
        arrays, text = _parts(content)
        metas = wire.headers(text, _letters(tasks))
        if len(metas) != len(tasks):
            return Failure("mismatch", f"{len(metas)} answers came for {len(tasks)} tasks.", HEADER)
        found: list[dict[str, Array]] = [{} for _ in tasks]
        for key, array in arrays.items():
            number, name = wire.placed(key, len(tasks))
            found[number][name] = array
    except CoterieError as reason:
        return wire.rejected(HEADER, str(reason))
    return [_answer(meta, held, task) for meta, held, task in zip(metas, found, tasks, strict=True)]


def _letters(tasks: Iterable[Parcel]) -> int:
    """What the header of an answer to these tasks has at most."""
    summed = any(task.meta.get("job", {}).get("scores") == "full" for task in tasks)
    return wire.LONGEST if summed else wire.SHORT


def _answer(meta: dict[str, object], arrays: dict[str, Array], task: Parcel) -> Parcel | Failure:
    if "error" in meta:
        return Parcel(meta)
    name = ""
    try:
        forms = {}
        for name, array in arrays.items():
            forms[name] = _described(name, array)[:2]
        wrong = None if task.expected is None else wire.unlike(task.expected, forms)
        return wrong or Parcel(meta, {name: _tensor(name, array) for name, array in arrays.items()})
    except CoterieError as reason:
        return wire.rejected(name, str(reason))


def _parts(content: RecordDict) -> tuple[ArrayRecord, str]:
    """The arrays and the json of a message, which holds nothing else but a nonce."""
    try:
        header, arrays = content.config_records[HEADER], content.array_records.get(ARRAYS, ArrayRecord())
        if set(content) - {ARRAYS} != {HEADER} or set(header) != {PARTS, NONCE}:
            raise ValueError("it holds other records")
        return arrays, header[PARTS]  # type: ignore[return-value]  # `headers` looks at what it is
    except (KeyError, TypeError, ValueError, AttributeError) as reason:
        raise CoterieError(f"the message is not one of coterie's ({wire.plain(reason)}).") from reason


def _described(name: str, array: Array) -> tuple[tuple[int, ...], torch.dtype, int]:
    """Shape and type of an array, as its bytes say, and where its numbers begin; raises unless they are all there."""
    data = unmasked(array.data, DESCRIPTION) if isinstance(array.data, bytes) and len(array.data) > ODD else b""
    if array.stype != "numpy.ndarray" or not data.startswith(NPY):
        raise CoterieError(f"{wire.plain(name, 64)} is no array of numpy's format, version 1.0.")
    begin = START + int.from_bytes(data[8:START], "little")
    found = DESCRIBED.fullmatch(data[START:begin]) if begin <= len(data) else None
    if found is None or found[1] not in TYPES:
        raise CoterieError(f"{wire.plain(name, 64)} is described by {wire.plain(repr(data[START:begin]), 100)}.")
    shape = tuple(int(number) for number in found[2].replace(b" ", b"").split(b",") if number)
    dtype = TYPES[found[1]]
    size = len(array.data) - ODD - begin
    if math.prod(shape) * dtype.itemsize != size:
        raise CoterieError(
            f"{wire.plain(name, 64)} claims the shape {list(shape)} of {str(dtype).removeprefix('torch.')} and has "
            f"{size} bytes."
        )
    return shape, dtype, begin


def _tensor(name: str, array: Array) -> Tensor:
    shape, dtype, begin = _described(name, array)
    data = unmasked(array.data)
    if dtype == torch.bool:  # any byte but 0 is true, and 1 in memory
        return torch.from_numpy(np.frombuffer(data, np.uint8, offset=begin) != 0).view(shape)
    kind = torch.empty(0, dtype=dtype).numpy().dtype
    return torch.from_numpy(np.frombuffer(data, kind, offset=begin).reshape(shape).copy())
