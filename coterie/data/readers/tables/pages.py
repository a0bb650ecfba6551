"""What the pages of a parquet file become, by their own headers, before any of them is unpacked.

The summary at a file's end is its maker's word, and pyarrow unpacks as much as a page's header says. Such a header is a
few values in thrift's compact protocol.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.files import opened_bytes

PAGE = 1 << 10
"""Bytes that a page takes beside its values: a file may have millions of empty ones."""
DELTA_BYTE_ARRAY = 7
"""The encoding of texts that begin like the one before."""


@dataclass
class Pages:
    """The pages of a column in one row group."""

    values: int = 0
    size: int = 0  # bytes, unpacked
    largest: int = 0  # of them, in one page
    words: int = 0  # values of the dictionary
    prefixed: bool = False  # whether texts say how much they share with the one before


def pages_of(path: Path, metadata: Any) -> Iterator[tuple[int, int, Pages]]:
    """(row group, column, its pages). A file in which columns share their bytes is refused: none is written so."""
    chunks = [(group, column) for group in range(metadata.num_row_groups) for column in range(metadata.num_columns)]
    with opened_bytes(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        total = 0
        for group, column in chunks:
            told = metadata.row_group(group).column(column)
            total += max(0, told.total_compressed_size)
            if total > len(data):
                raise ValueError("its columns are announced to be larger than the file")
            first, words = told.data_page_offset, told.dictionary_page_offset
            at = words if words is not None and 0 < words < first else first
            yield group, column, _pages(data, at, at + told.total_compressed_size)


def _pages(data: mmap.mmap, at: int, end: int) -> Pages:
    found = Pages()
    while at < end:
        head, at = _struct(data, at)
        size, packed = head.get(2, 0), head.get(3, 0)
        if size < 0 or packed < 0:
            raise ValueError("a page of less than no bytes")
        data_page = head.get(5) or head.get(8) or {}
        found.values += max(0, data_page.get(1, 0))
        found.words += max(0, head.get(7, {}).get(1, 0))
        found.size += size + PAGE
        found.largest = max(found.largest, size)
        found.prefixed |= data_page.get(2 if 5 in head else 4) == DELTA_BYTE_ARRAY
        at += packed
    return found


# -- thrift's compact protocol -----------------------------------------------------------------------------------------


def _struct(data: mmap.mmap, at: int, depth: int = 0) -> tuple[dict[int, Any], int]:
    """(whole numbers and structs by the number of their field, where it ends)."""
    if depth > 8:
        raise ValueError("a page's header is nested too deeply")
    found: dict[int, Any] = {}
    number = 0
    while kind := data[at]:
        at += 1
        if kind >> 4:
            number += kind >> 4
        else:
            told, at = _varint(data, at)
            number = (told >> 1) ^ -(told & 1)
        found[number], at = _value(data, at, kind & 15, depth)
    return found, at + 1


def _value(data: mmap.mmap, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (1, 2):  # true and false
        return kind == 1, at
    if kind == 3:
        return data[at], at + 1
    if kind in (4, 5, 6):
        told, at = _varint(data, at)
        return (told >> 1) ^ -(told & 1), at
    if kind == 7:
        return None, at + 8
    if kind == 8:
        size, at = _varint(data, at)
        return None, at + size
    if kind == 12:
        return _struct(data, at, depth + 1)
    raise ValueError("a page's header holds what no page has")


def _varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    value = 0
    for k in range(10):
        value |= (data[at + k] & 127) << 7 * k
        if data[at + k] < 128:
            return value, at + k + 1
    raise ValueError("a page's header holds a number that is none")
