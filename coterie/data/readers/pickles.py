"""Pickles of plain values and numpy arrays, read without running anything they name.

Published data sets (CIFAR, the files PFLlib writes) are pickles. A pickle is a program that may call any function, so
this reader knows a dozen harmless names, builds arrays by itself from their bytes, and refuses everything else.
"""

from __future__ import annotations

import io
import pickle
from math import prod
from typing import Any

import numpy as np


class _Type:
    """Stands for a numpy type that a pickle names; it cannot be called."""


_ARRAY = _Type()


class _Dtype:
    """A numpy dtype on its way: plain numbers, text or objects."""

    def __init__(self, code: Any = None, *_: Any) -> None:
        code = code.decode("ascii") if isinstance(code, bytes) else code
        if not isinstance(code, str):
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
        if not all(type(n) is int and n >= 0 for n in shape):
            raise pickle.UnpicklingError("an array with a shape that is none")
        self.state = (shape, dtype.dtype, bool(fortran), data)

    def value(self, depth: int) -> Any:
        if self.state is None:
            raise pickle.UnpicklingError("an array without content")
        shape, dtype, fortran, data = self.state
        if dtype.kind == "O":
            if not isinstance(data, list) or len(data) != prod(shape):
                raise pickle.UnpicklingError(f"{len(data)} objects in an array of shape {list(shape)}")
            array = np.empty(len(data), dtype=object)
            array[:] = [_plain(item, depth + 1) for item in data]
            return array.reshape(shape, order="F" if fortran else "C")
        data = data.encode("latin-1") if isinstance(data, str) else data
        if not isinstance(data, (bytes, bytearray)) or len(data) != prod(shape) * dtype.itemsize:
            raise pickle.UnpicklingError(f"{len(data)} bytes in an array of shape {list(shape)} and {dtype}")
        return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")


class _Scalar:
    """A numpy number on its way."""

    def __init__(self, dtype: Any = None, data: Any = b"", *_: Any) -> None:
        if not isinstance(dtype, _Dtype) or dtype.dtype.kind not in "biuf":
            raise pickle.UnpicklingError("a number of a foreign type")
        data = data.encode("latin-1") if isinstance(data, str) else data
        self.number = np.frombuffer(data, dtype.dtype)[0].item()


def _encode(text: Any, coding: Any = None) -> bytes:
    """`_codecs.encode(text, 'latin1')`, which is how Python 2's strings of bytes are pickled by protocol 2."""
    if not isinstance(text, str) or str(coding).lower() not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError("a text in a foreign coding")
    return text.encode("latin-1")


def _frombuffer(data: Any = b"", dtype: Any = None, shape: Any = None, order: Any = "C") -> _Array:
    made = _Array(_ARRAY)
    made.__setstate__((1, shape, dtype, order == "F", data))
    return made


_NAMES: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _ARRAY, ("numpy", "dtype"): _Dtype, ("_codecs", "encode"): _encode,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _Array for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _Scalar for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _frombuffer for core in ("core", "_core")},
}
_Slow: Any = pickle._Unpickler
"""The unpickler in Python: the one in C takes memory for whatever a damaged file claims."""
_REFUSED = (pickle.NEXT_BUFFER, pickle.READONLY_BUFFER, pickle.EXT1, pickle.EXT2, pickle.EXT4,
            pickle.PERSID, pickle.BINPERSID, pickle.INST, pickle.OBJ)


class _Unpickler(_Slow):  # type: ignore[misc]
    dispatch = {code: load for code, load in _Slow.dispatch.items() if bytes([code]) not in _REFUSED}  # noqa: RUF012

    def load_bytearray8(self) -> None:
        """As bytes: the original takes as much memory as a damaged file claims before it reads."""
        self.append(self.read(int.from_bytes(self.read(8), "little")))

    dispatch[pickle.BYTEARRAY8[0]] = load_bytearray8

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not loaded from data files")
        return _NAMES[module, name]


def loads(data: bytes) -> Any:
    """The value in a pickle: numbers, text, lists, tuples, dictionaries and numpy arrays of them."""
    return _plain(_Unpickler(io.BytesIO(data), encoding="bytes").load(), 0)


def _plain(value: Any, depth: int) -> Any:
    """The value with arrays in place of what stands for them."""
    if depth > 16:
        raise pickle.UnpicklingError("values nested too deeply")
    if isinstance(value, _Array):
        return value.value(depth)
    if isinstance(value, _Scalar):
        return value.number
    if type(value) is dict:
        return {_plain(k, depth + 1): _plain(v, depth + 1) for k, v in value.items()}
    if type(value) in (list, tuple):
        if not any(type(v) in (list, tuple, dict, _Array, _Scalar) for v in value):
            return value
        return type(value)(_plain(v, depth + 1) for v in value)
    if isinstance(value, (str, bytes, int, float, type(None))):
        return value
    raise pickle.UnpicklingError(f"a value of type {type(value).__name__}")
