"""Running a program of many small steps: directly, or as CUDA graphs that are captured once and replayed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from coterie.errors import CoterieError

BUCKETS = 8


def identity(function: Callable[..., Any] | None, _inside: tuple[Callable[..., Any], ...] = ()) -> Hashable:
    """What a per-sample function computes, as a key: its code and the values it closes over.

    Tensors are refused: clients are sorted and cut into waves, so a tensor captured from the outside would be
    misaligned, and it would be baked into a captured graph.
    """
    if function is None:
        return None
    owner = getattr(function, "__self__", None)
    inner = getattr(function, "__func__", function)
    code = getattr(inner, "__code__", None)
    if not isinstance(code, CodeType):
        return _constant(inner, function)
    if inner in _inside:  # it calls itself
        return code
    cells = [cell.cell_contents for cell in (getattr(inner, "__closure__", None) or ())]
    defaults = [*(inner.__defaults__ or ()), *(inner.__kwdefaults__ or {}).values()]
    return (code, *(_constant(value, function, (*_inside, inner)) for value in (owner, *cells, *defaults)))


def _constant(value: Any, function: Callable[..., Any], inside: tuple[Callable[..., Any], ...] = ()) -> Hashable:
    name = getattr(function, "__qualname__", repr(function))
    if isinstance(value, Tensor) or (isinstance(value, nn.Module) and (value.state_dict() or list(value.buffers()))):
        what = "tensor" if isinstance(value, Tensor) else "module with tensors"
        raise CoterieError(f"{name} closes over a {what}; hand it in through `given` or `state` instead.")
    if callable(value) and hasattr(value, "__code__"):
        return identity(value, inside)
    if isinstance(value, partial):
        pieces = (value.func, *value.args, *value.keywords.values())
        return (tuple(value.keywords), *(_constant(item, function, inside) for item in pieces))
    if isinstance(value, tuple | list):
        return tuple(_constant(item, function, inside) for item in value)
    if is_dataclass(value) and not isinstance(value, type) and type(value).__hash__ is not None:
        pieces = tuple(getattr(value, f.name) for f in fields(value))
        return (type(value), *(_constant(item, function, inside) for item in pieces))
    try:
        hash(value)
    except TypeError:
        raise CoterieError(
            f"{name} closes over a {type(value).__name__}, which may change between rounds; "
            "close over plain values only and hand tensors in through `given` or `state`."
        ) from None
    return value  # type: ignore[no-any-return]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python must not free an old graph while a new one is captured: the driver forbids it and the capture is lost."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Pool:
    """Memory that all graphs of an engine share. A graph of its own keeps it alive while others are replaced."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        held = torch.zeros(1, device="cuda")
        self._keeper = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.graph(self._keeper, pool=self.handle):
            held.add_(1)


class Steps:
    """Runs `step(prefix)` for a sequence of prefixes; on CUDA as one graph per bucket of prefix sizes.

    `step` reads and writes static tensors only and finds its place through a counter on the device, so replaying
    needs nothing from the host. A bucket may be larger than the prefix: `step` must leave finished slots untouched.
    """

    def __init__(self, step: Callable[[int], None], slots: int, counter: Tensor, captured: bool) -> None:
        self.step = step
        self.counter = counter
        self.captured = captured
        self.sizes = sorted({max(1, -(-slots * b // BUCKETS)) for b in range(1, BUCKETS + 1)})
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def bucket(self, prefix: int) -> int:
        return next(size for size in self.sizes if size >= prefix) if self.captured else prefix

    def prepare(self, prefixes: list[int], pool: Pool | None) -> None:
        """Capture what these prefixes need. Call it before loading the static tensors: warming up runs the step."""
        if pool is None or not self.captured:
            return
        for size in sorted({self.bucket(p) for p in prefixes if p} - set(self.graphs), reverse=True):
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self.counter.zero_()
                    self.step(size)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with _no_collection(), torch.cuda.graph(graph, pool=pool.handle):
                self.step(size)
            self.graphs[size] = graph

    def run(self, prefixes: list[int]) -> None:
        """All steps in order. The counter starts at 0 and is advanced by the step itself."""
        self.counter.zero_()
        for prefix in prefixes:
            self.one(prefix)

    def one(self, prefix: int) -> None:
        if self.captured:
            self.graphs[self.bucket(prefix)].replay()
        else:
            self.step(prefix)
