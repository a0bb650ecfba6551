"""Where the clients' own states live between rounds: on the device, in host memory, or in memory-mapped files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coterie import memory
from coterie.contract.engine import IntArray

Place = Literal["device", "host", "disk"]


def choose(needed: int, everyone: bool, device: torch.device) -> Place:
    """The place for `needed` bytes of states.

    On a CUDA device when every client takes part each round and they fill at most a quarter of its free memory; in
    host memory when they fill at most half of what is free there; otherwise on disk.
    """
    if device.type == "cuda" and everyone and needed <= memory.free(device) // 4:
        return "device"
    return "host" if needed <= memory.free(torch.device("cpu")) // 2 else "disk"


class _Fetched(NamedTuple):
    ids: IntArray
    tensors: dict[str, Tensor]


class _Leaving(NamedTuple):
    ids: IntArray
    tensors: dict[str, Tensor]  # on their way into pinned memory
    arrived: torch.cuda.Event


class Store:
    """Tables `[M, ...]`, one for each name: `take` brings some clients' slices to the device, `put` writes them back.

    Tables that a CUDA device reads from the host are gathered into pinned memory, so that copies run beside the
    computation: `ahead` brings the next clients over on a stream of its own, and what `put` was given is written into
    the tables only when they are next read. Elsewhere all of this is plain indexing.
    """

    def __init__(self, clients: int, device: torch.device, place: Place) -> None:
        self.clients, self.device, self.place = clients, device, place
        self.away = device.type == "cuda" and place != "device"
        self._tables: dict[str, Tensor] = {}
        self._fetched: _Fetched | None = None
        self._leaving: _Leaving | None = None
        self._side = torch.cuda.Stream(device) if self.away else None  # type: ignore[no-untyped-call]

    @property
    def tables(self) -> dict[str, Tensor]:
        """The tables themselves, up to date. Whoever writes into them calls `replace` or `put` instead."""
        self._settle()
        return self._tables

    def open(self, like: Mapping[str, Tensor]) -> None:
        """Make a table `[M, ...]` of zeros for each tensor `[C, ...]`; tables of other names are dropped."""
        self._forget()
        self._tables = {name: self._table((self.clients, *t.shape[1:]), t.dtype) for name, t in like.items()}

    def replace(self, tables: Mapping[str, Tensor]) -> None:
        """Copy whole tables `[M, ...]` in, from wherever they are."""
        self.open(tables)
        for name, t in tables.items():
            self._tables[name].copy_(t)

    def take(self, ids: IntArray) -> dict[str, Tensor]:
        """These clients' slices `[C, ...]` on the device, as copies."""
        if not self._tables:
            return {}
        fetched = self._fetched
        if fetched is not None and np.array_equal(fetched.ids, ids):
            self._fetched = None
            self._join()
            for t in fetched.tensors.values():
                t.record_stream(torch.cuda.current_stream(self.device))
            return fetched.tensors
        self._settle()
        return self._gathered(ids)

    def ahead(self, ids: IntArray) -> None:
        """Start to bring these clients' slices over; `take` of the same clients finds them. Later `put`s count."""
        if self._side is None or not self._tables or not len(ids):
            return
        self._settle()
        with torch.cuda.stream(self._side):
            self._fetched = _Fetched(ids, self._gathered(ids))

    def put(self, ids: IntArray, tensors: Mapping[str, Tensor]) -> None:
        """Write these clients' slices `[C, ...]`."""
        self._settle()
        if not self.away:
            self._write(ids, tensors)
            return
        staged = {}
        for name, table in self._tables.items():
            t = tensors[name].detach().to(table.dtype)
            staged[name] = _pinned(t.shape, t.dtype).copy_(t, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record(torch.cuda.current_stream(self.device))
        self._leaving = _Leaving(ids, staged, arrived)
        self._correct(ids, tensors)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _gathered(self, ids: IntArray) -> dict[str, Tensor]:
        index = torch.from_numpy(ids)
        if not self.away:
            index = index.to(self.device)
            return {name: table.index_select(0, index) for name, table in self._tables.items()}
        found = {}
        for name, table in self._tables.items():
            staged = _pinned((len(ids), *table.shape[1:]), table.dtype)
            torch.index_select(table, 0, index, out=staged)
            found[name] = staged.to(self.device, non_blocking=True)
        return found

    def _write(self, ids: IntArray, tensors: Mapping[str, Tensor]) -> None:
        for name, table in self._tables.items():
            index = torch.from_numpy(ids).to(table.device)
            table.index_copy_(0, index, tensors[name].detach().to(table.dtype))

    def _settle(self) -> None:
        """What was put is in the tables from here on."""
        if self._leaving is not None:
            self._leaving.arrived.synchronize()
            self._write(self._leaving.ids, self._leaving.tensors)
            self._leaving = None

    def _correct(self, ids: IntArray, tensors: Mapping[str, Tensor]) -> None:
        """Clients fetched ahead that have changed since then."""
        if self._fetched is None:
            return
        both, there, here = np.intersect1d(self._fetched.ids, ids, assume_unique=True, return_indices=True)
        if not len(both):
            return
        self._join()
        to, of = (torch.from_numpy(places).to(self.device) for places in (there, here))
        for name, t in self._fetched.tensors.items():
            t.record_stream(torch.cuda.current_stream(self.device))
            t.index_copy_(0, to, tensors[name].detach().to(t.dtype).index_select(0, of))

    def _join(self) -> None:
        """The computation waits for the copies on the side stream."""
        assert self._side is not None
        torch.cuda.current_stream(self.device).wait_stream(self._side)

    def _forget(self) -> None:
        self._settle()
        self._fetched = None

    def _table(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self.place == "disk" and 0 not in shape:
            return memory.mapped(shape, dtype, "the clients' states")
        return torch.zeros(shape, dtype=dtype, device=self.device if self.place == "device" else "cpu")


def _pinned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Host memory that a device can copy from and to by itself; ordinary memory where the system has no more of it."""
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError:
        return torch.empty(shape, dtype=dtype)
