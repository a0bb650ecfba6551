"""Which engine a run gets: what was asked for, what the model allows, what an earlier part of the run had, a trial."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from coterie.contract.cohort import Init
from coterie.contract.engine import Engine
from coterie.contract.net import Net, Task
from coterie.data import Federation
from coterie.engine import trial
from coterie.engine.arithmetic import Arithmetic, Precision
from coterie.engine.convolution import StackedConvolutions
from coterie.engine.direct import Chain
from coterie.engine.reference import Reference
from coterie.engine.stacked import Stacked
from coterie.errors import CoterieError

Word = Literal["auto", "direct", "stack", "loop", "reference"]
Choices = dict[str, Any]
"""What was decided, kept with the run: `engine` (stack, loop or reference), `direct`, `milliseconds` of the trial, and
the `reason` why a model cannot be stacked."""


def build(
    init: Init, task: Task, federation: Federation, device: torch.device, *, engine: Word = "auto",
    precision: Precision = "float32", kernels: bool = True, capture: bool = True, batch: int = 10,
    several: bool = True, earlier: Mapping[str, Any] | None = None,
) -> tuple[Engine, Choices]:
    """The engine for the module of `init` on a federation's data, and the choices that were made.

    `several` clients make a stack worth trying; `earlier` choices of the same run are kept, so that a resumed run goes
    on with the same bits.
    """
    arithmetic, past = Arithmetic(precision), dict(earlier or {})
    if past.get("engine", engine) == "reference":
        net = Net(init.module, init.layout, task, arithmetic.bf16)
        made = Reference(net, federation, device, arithmetic)
        net.probe(init.row, *_first(federation, 2, device, arithmetic), gradient_too=False)
        net.stacked = False
        return made, {"engine": "reference"}
    own = StackedConvolutions.on(device, arithmetic.tf32) if kernels else None
    net = Net(init.module, init.layout, task, arithmetic.bf16, own.stand_ins if own is not None else None)
    net.place(device, arithmetic.dtype)
    chain = _chain(net, federation, device, arithmetic, own, engine, past)
    x, y = _first(federation, 2, device, arithmetic)
    if federation.clients == 1 and not past and chain is not None:
        net.probe(init.row, x, y, gradient_too=False)  # nothing to decide; torch.func, slow to start, is not needed
        return Stacked(net, federation, device, arithmetic, chain, capture), {"engine": "stack", "direct": True}
    reason = net.probe(init.row, x, y)
    if engine == "stack" and reason is not None:
        raise CoterieError(f"the model cannot be stacked ({reason}); use engine=loop or engine=auto.")
    chosen: Choices = {}
    if "engine" in past:
        net.stacked = past["engine"] == "stack"
        if "milliseconds" in past:
            chosen["milliseconds"] = past["milliseconds"]
    elif engine == "loop":
        net.stacked = False
    elif engine != "stack" and reason is None and device.type == "cpu" and several:
        took = trial.times(net, init.row, *_first(federation, batch or len(federation.x), device, arithmetic))
        net.stacked = took["looped"] >= trial.CLEAR * took["stacked"]
        chosen["milliseconds"] = took
    chosen["engine"] = "stack" if net.stacked else "loop"
    if chain is not None:
        chosen["direct"] = True
    if reason is not None:
        chosen["reason"] = f"the model cannot be stacked: {reason}"
    return Stacked(net, federation, device, arithmetic, chain, capture), chosen


def _chain(
    net: Net, federation: Federation, device: torch.device, arithmetic: Arithmetic, own: StackedConvolutions | None,
    engine: Word, past: Mapping[str, Any],
) -> Chain | None:
    """The model as a chain of layers, where plain training differentiates it by hand."""
    wanted = bool(past.get("direct")) if past else engine in ("auto", "direct")
    found = Chain.of(net, federation.x, device, arithmetic.dtype, own) if wanted else None
    if engine == "direct" and not past and found is None:
        raise CoterieError(
            "engine=direct needs a chain of linear layers, convolutions, ReLU and max pooling (convolutions on a "
            "GPU in tf32 or bf16 only); use engine=auto."
        )
    return found


def _first(
    federation: Federation, count: int, device: torch.device, arithmetic: Arithmetic
) -> tuple[Tensor, Tensor]:
    """The first samples of the data, at most `count`."""
    first = int(federation.bounds[0, 0])
    x, y = (t[first : first + count].to(device) for t in (federation.x, federation.y))
    return tuple(t.to(arithmetic.dtype) if t.is_floating_point() else t for t in (x, y))  # type: ignore[return-value]
