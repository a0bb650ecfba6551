"""Pickles of plain values and numpy arrays, read without running anything they name.

Published data sets (CIFAR, the files PFLlib writes) are pickles. A pickle is a program that may call any function, so
this reader knows a dozen harmless names, builds arrays by itself from their bytes, and refuses everything else. What a
few bytes say again and again of one value (a list of ten times a list of ten times ...) would take ages to look at: the
values may be `LARGER` times the file, each counted as often as it is met. Of a compressed pickle, the values and the
instructions may each take what any file may become.
"""

from __future__ import annotations

import io
import pickle
from math import prod
from typing import Any

import numpy as np

from coterie.data.readers.refusals import PACKED, UNPACKED

LARGER = 16
ITEM, STEP = 8, 128
"""Bytes of a list's or a dictionary's entry; and those that an instruction of one byte takes: an empty list, a mark."""


class _Type:
    """Stands for a numpy type that a pickle names; it cannot be called."""


_ARRAY = _Type()


class _Dtype:
    """A numpy dtype on its way: plain numbers, text or objects."""

    def __init__(self, code: Any = None, *_: Any) -> None:
        code = code.decode("ascii") if isinstance(code, bytes) else code
        if not isinstance(code, str) or len(code) > 16:
            raise pickle.UnpicklingError("a dtype without a name")
        self.dtype = np.dtype(code)
        if self.dtype.kind not in "biufSUO" or self.dtype.shape:
            raise pickle.UnpicklingError(f"values of type {self.dtype}")

    def __setstate__(self, state: Any) -> None:
        order = state[1].decode("ascii") if isinstance(state[1], bytes) else state[1]
        if self.dtype.kind != "O" and order in ("<", ">"):
            self.dtype = self.dtype.newbyteorder("<" if order == "<" else ">")


class _Array:
    """A numpy array on its way."""

    def __init__(self, subtype: Any = None, shape: Any = None, *_: Any) -> None:
        if subtype is not _ARRAY:
            raise pickle.UnpicklingError("an array of a foreign class")
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        if not isinstance(dtype, _Dtype) or not isinstance(shape, tuple) or len(shape) > 32:
            raise pickle.UnpicklingError("an array without type or shape")
        if not all(type(n) is int and 0 <= n < 2**63 for n in shape):
            raise pickle.UnpicklingError("an array with a shape that is none")
        self.state = (shape, dtype.dtype, bool(fortran), data)

    def value(self, depth: int, room: _Room) -> Any:
        if self.state is None:
            raise pickle.UnpicklingError("an array without content")
        shape, dtype, fortran, data = self.state
        if dtype.kind == "O":
            if not isinstance(data, list) or len(data) != prod(shape):
                raise pickle.UnpicklingError(f"{len(data)} objects in an array of shape {list(shape)}")
            room.take(ITEM * len(data))
            array = np.empty(len(data), dtype=object)
            array[:] = [_plain(item, depth + 1, room) for item in data]
            return array.reshape(shape, order="F" if fortran else "C")
        data = data.encode("latin-1") if isinstance(data, str) else data
        if not isinstance(data, (bytes, bytearray)) or len(data) != prod(shape) * dtype.itemsize:
            raise pickle.UnpicklingError(f"{len(data)} bytes in an array of shape {list(shape)} and {dtype}")
        room.take(len(data))
        return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")


class _Scalar:
    """A numpy number on its way."""

    def __init__(self, dtype: Any = None, data: Any = b"", *_: Any) -> None:
        if not isinstance(dtype, _Dtype) or dtype.dtype.kind not in "biuf":
            raise pickle.UnpicklingError("a number of a foreign type")
        data = data.encode("latin-1") if isinstance(data, str) else data
        self.number = np.frombuffer(data, dtype.dtype)[0].item()


class _Room:
    """How much may still be made of a file."""

    def __init__(self, size: int, packed: int) -> None:
        most = max(UNPACKED, PACKED * packed)
        self.left, self.steps = min(LARGER * size + 1000, most), most // STEP

    def take(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise pickle.UnpicklingError(f"its values are more than {LARGER} times its size")

    def encode(self, text: Any, coding: Any = None) -> bytes:
        """`_codecs.encode(text, 'latin1')`, which is how Python 2's strings of bytes are pickled by protocol 2."""
        if not isinstance(text, str) or coding not in ("latin1", "latin-1"):
            raise pickle.UnpicklingError("a text in a foreign coding")
        self.take(len(text))
        return text.encode("latin-1")


def _frombuffer(data: Any = b"", dtype: Any = None, shape: Any = None, order: Any = "C") -> _Array:
    made = _Array(_ARRAY)
    made.__setstate__((1, shape, dtype, order == "F", data))
    return made


_NAMES: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _ARRAY, ("numpy", "dtype"): _Dtype,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _Array for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _Scalar for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _frombuffer for core in ("core", "_core")},
}
_Slow: Any = pickle._Unpickler
"""The unpickler in Python: the one in C takes memory for whatever a damaged file claims."""
_REFUSED = (pickle.NEXT_BUFFER, pickle.READONLY_BUFFER, pickle.EXT1, pickle.EXT2, pickle.EXT4,
            pickle.PERSID, pickle.BINPERSID, pickle.INST, pickle.OBJ, pickle.EMPTY_SET, pickle.ADDITEMS,
            pickle.FROZENSET)


class _Steps(io.BytesIO):
    """A pickle's bytes; each reading of them is one instruction or a part of it."""

    def __init__(self, data: bytes, room: _Room) -> None:
        super().__init__(data)
        self._room = room

    def read(self, size: int | None = -1, /) -> bytes:
        self._room.steps -= 1
        if self._room.steps < 0:
            raise pickle.UnpicklingError("it has more instructions than a file of its size may become")
        return super().read(size)


class _Unpickler(_Slow):  # type: ignore[misc]
    dispatch = {code: load for code, load in _Slow.dispatch.items() if bytes([code]) not in _REFUSED}  # noqa: RUF012

    def load_bytearray8(self) -> None:
        """As bytes: the original takes as much memory as a damaged file claims before it reads."""
        self.append(self.read(int.from_bytes(self.read(8), "little")))

    dispatch[pickle.BYTEARRAY8[0]] = load_bytearray8

    def __init__(self, data: bytes, room: _Room) -> None:
        super().__init__(_Steps(data, room), encoding="bytes")
        self._room, self._size = room, len(data)

    def load_frame(self) -> None:
        """Frames are for faster reading; their content is read like all other."""
        self.read(8)

    dispatch[pickle.FRAME[0]] = load_frame

    def load_put(self) -> None:
        """Numbers of the memo's entries are small: chosen ones would all fall into one place of its table."""
        number = self.readline()[:-1]
        if len(number) > 12 or not 0 <= int(number) <= self._size:
            raise pickle.UnpicklingError("an entry of a strange number")
        self.memo[int(number)] = self.stack[-1]

    dispatch[pickle.PUT[0]] = load_put

    def load_build(self) -> None:
        if not isinstance(self.stack[-2], (_Array, _Dtype)):
            raise pickle.UnpicklingError("the state of a foreign object")
        self.stack[-2].__setstate__(self.stack.pop())

    dispatch[pickle.BUILD[0]] = load_build

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.append(_keyed(items))

    dispatch[pickle.DICT[0]] = load_dict

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._into(self.stack[-1], [key, value])

    dispatch[pickle.SETITEM[0]] = load_setitem

    def load_setitems(self) -> None:
        items = self.pop_mark()
        self._into(self.stack[-1], items)

    dispatch[pickle.SETITEMS[0]] = load_setitems

    @staticmethod
    def _into(table: Any, items: list[Any]) -> None:
        if type(table) is not dict:
            raise pickle.UnpicklingError("items of what is no dictionary")
        table.update(_keyed(items))

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):
            return self._room.encode
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not loaded from data files")
        return _NAMES[module, name]


def loads(data: bytes, packed: int | None = None) -> Any:
    """The value in a pickle: numbers, text, lists, tuples, dictionaries and numpy arrays of them.

    `packed` is the size it had where it was compressed.
    """
    room = _Room(len(data), len(data) if packed is None else packed)
    return _plain(_Unpickler(data, room).load(), 0, room)


def _keyed(items: list[Any]) -> dict[str | bytes, Any]:
    """Keys and values in turn. Keys are texts: what a tuple of tuples is found by takes ages to compute."""
    if len(items) % 2 or not all(type(key) in (str, bytes) for key in items[::2]):
        raise pickle.UnpicklingError("a dictionary whose keys are no texts")
    return dict(zip(items[::2], items[1::2], strict=True))


def _plain(value: Any, depth: int, room: _Room) -> Any:
    """The value with arrays in place of what stands for them."""
    if depth > 16:
        raise pickle.UnpicklingError("values nested too deeply")
    if isinstance(value, _Array):
        return value.value(depth, room)
    if isinstance(value, _Scalar):
        return value.number
    if type(value) is dict:
        room.take(ITEM * len(value))
        return {k: _plain(v, depth + 1, room) for k, v in value.items()}
    if type(value) in (list, tuple):
        longest = max((len(v) for v in value if isinstance(v, (str, bytes))), default=0)
        room.take(len(value) * (ITEM + longest))  # an array of texts would have room for the longest everywhere
        if not any(type(v) in (list, tuple, dict, _Array, _Scalar) for v in value):
            return value
        return type(value)(_plain(v, depth + 1, room) for v in value)
    if isinstance(value, (str, bytes, int, float, type(None))):
        return value
    raise pickle.UnpicklingError(f"a value of type {type(value).__name__}")
