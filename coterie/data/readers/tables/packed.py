"""What the compressed parts of an arrow stream become, before any of them is unpacked.

datasets unpacks all of a file that it opens. A message is a flatbuffer: tables of which an entry's place is looked up.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DICTIONARY, ROWS = 2, 3
"""Kinds of messages that have a body."""


def unpacked(path: Path) -> int:
    """Bytes of all buffers of a file; as many as it has where nothing is compressed."""
    import pyarrow as pa

    total = 0
    with pa.memory_map(str(path)) as file:
        for message in pa.ipc.MessageReader.open_stream(file):
            head, body = memoryview(message.metadata), message.body
            rows = _rows(head)
            if body is None or rows is None:
                continue
            compressed, content = _field(head, rows, 3), memoryview(body)
            for at, size in _buffers(head, rows):
                if size < 0 or at < 0 or at + size > len(content):
                    raise ValueError("a buffer lies outside of its message")
                told = struct.unpack_from("<q", content, at)[0] if compressed is not None and size >= 8 else -1
                total += size if told < 0 else told
    return total


def _rows(head: memoryview) -> int | None:
    """Where the table of a message's rows lies; None where it has none."""
    root = _int(head, 0)
    kind, held = _field(head, root, 1), _field(head, root, 2)
    if kind is not None and head[kind] == DICTIONARY:
        raise ValueError("it holds dictionaries, which save_to_disk does not write")  # datasets writes out each text
    return held + _int(head, held) if kind is not None and held is not None and head[kind] == ROWS else None


def _buffers(head: memoryview, rows: int) -> Iterator[tuple[int, int]]:
    """(place in the body, bytes)."""
    listed = _field(head, rows, 2)
    if listed is not None:
        first = listed + _int(head, listed)
        for k in range(_int(head, first)):
            yield struct.unpack_from("<qq", head, first + 4 + 16 * k)


def _field(head: memoryview, table: int, number: int) -> int | None:
    """Where a table's entry lies; None where it is left out."""
    entries = table - _int(head, table)
    size: int = struct.unpack_from("<H", head, entries)[0]
    place: Any = struct.unpack_from("<H", head, entries + 4 + 2 * number)[0] if 4 + 2 * number < size else 0
    return table + place if place else None


def _int(head: memoryview, at: int) -> int:
    found: int = struct.unpack_from("<i", head, at)[0]
    return found
