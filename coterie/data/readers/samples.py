"""Where samples lie while they are read: in memory, or in a file when they are many."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from coterie import memory


class Pile:
    """Blocks `[n, ...]`, one after another; in memory up to a quarter of what is free, beyond that in a file.

    A quarter, because joining the blocks and dealing them to clients each take as much again.
    """

    def __init__(self) -> None:
        self._limit = memory.free(torch.device("cpu")) // 4
        self._blocks: list[Tensor] = []
        self._size = self._rows = 0
        self._like: Tensor | None = None
        self._file: Any = None

    def add(self, block: Tensor) -> None:
        self._like, self._rows = block[:0], self._rows + len(block)
        self._size += block.numel() * block.element_size()
        if self._file is None and self._size <= self._limit:
            self._blocks.append(block)
            return
        if self._file is None:
            handle, self._path = tempfile.mkstemp(prefix="coterie-")
            self._file = os.fdopen(handle, "wb")
            for earlier in self._blocks:
                self._write(earlier)
            self._blocks = []
        self._write(block)

    def tensor(self) -> Tensor:
        if self._file is None or self._like is None:
            return torch.cat(self._blocks) if len(self._blocks) != 1 else self._blocks[0]
        try:
            self._file.close()
            shape, dtype = (self._rows, *self._like.shape[1:]), self._like.dtype
            flat = torch.from_file(self._path, shared=True, size=self._size // dtype.itemsize, dtype=dtype)
            return flat.view(shape)
        except OSError as error:
            raise memory.no_room("the samples", self._size, error) from error
        finally:
            self.close()

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            with suppress(OSError):  # the mapping keeps the file; it has no name any more
                os.unlink(self._path)

    def _write(self, block: Tensor) -> None:
        try:
            self._file.write(block.contiguous().numpy().data)
        except OSError as error:
            raise memory.no_room("the samples", self._size, error) from error
