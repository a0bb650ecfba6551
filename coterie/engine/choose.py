"""Which engine a run gets: what was asked for, what the model allows, what an earlier part of the run had, a trial."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from coterie.contract.cohort import Init
from coterie.contract.engine import Engine
from coterie.contract.net import Net, Task
from coterie.data import Federation
from coterie.engine import trial
from coterie.engine.arithmetic import Arithmetic, Precision
from coterie.engine.convolution import StackedConvolutions
from coterie.engine.direct import Chain
from coterie.engine.prefix import TRIED, Prefix, planned, prefix_of
from coterie.engine.reference import Reference
from coterie.engine.resident import Feeding
from coterie.engine.stacked import Stacked
from coterie.errors import CoterieError

Word = Literal["auto", "direct", "stack", "loop", "reference"]
Choices = dict[str, Any]
"""What was decided, kept with the run: `engine` (stack, loop or reference), `direct`, `milliseconds` of the trial, the
`reason` why a model cannot be stacked, the `prefix` whose outputs are kept, and `notes` for whoever starts the run."""


def build(
    init: Init, task: Task, federation: Federation, device: torch.device, *, engine: Word = "auto",
    precision: Precision = "float32", kernels: bool = True, capture: bool = True, batch: int = 10,
    prefix: Literal["auto", "off"] = "auto", several: bool = True, earlier: Mapping[str, Any] | None = None,
    feeding: Feeding | None = None,
) -> tuple[Engine, Choices]:
    """The engine for the module of `init` on a federation's data, and the choices that were made.

    `several` clients make a stack worth trying; `earlier` choices of the same run are kept, so that a resumed run goes
    on with the same bits. `feeding` is what training does with samples beyond reading them.
    """
    _require_known(init.module, federation)
    arithmetic, past = Arithmetic(precision), dict(earlier or {})
    if past.get("engine", engine) == "reference":
        net = Net(init.module, init.layout, task, arithmetic.bf16)
        plain = Reference(net, federation, device, arithmetic, feeding)
        net.probe(init.row, *_first(federation, 2, device, arithmetic), gradient_too=False)
        net.stacked = False
        return plain, {"engine": "reference"}
    own = StackedConvolutions.on(device, arithmetic.tf32) if kernels else None
    net = Net(init.module, init.layout, task, arithmetic.bf16, own.stand_ins if own is not None else None)
    net.place(device, arithmetic.dtype)
    # Only samples that are the same in every step have outputs that can be kept.
    same = feeding is None or feeding.augment is None
    wanted = "prefix" in past if past else prefix == "auto" and same
    found, chosen = _prefix(net, init.row, federation, device, arithmetic, bool(past)) if wanted else (None, {})

    def first(count: int) -> tuple[Tensor, Tensor]:
        x, y = _first(federation, count, device, arithmetic)
        return x if found is None else found.outputs(x, arithmetic.dtype, arithmetic.bf16), y

    x, y = first(2)
    chain = _chain(net, x, device, arithmetic, own, engine, past)
    if federation.clients == 1 and not past and chain is not None:
        net.probe(init.row, x, y, gradient_too=False)  # nothing to decide; torch.func, slow to start, is not needed
        made = Stacked(net, federation, device, arithmetic, chain, capture, feeding, found)
        return made, {"engine": "stack", "direct": True, **chosen}
    reason = net.probe(init.row, x, y)
    if engine == "stack" and reason is not None:
        raise CoterieError(f"the model cannot be stacked ({reason}); use engine=loop or engine=auto.")
    if "engine" in past:
        net.stacked = past["engine"] == "stack"
        if "milliseconds" in past:
            chosen["milliseconds"] = past["milliseconds"]
    elif engine == "loop":
        net.stacked = False
    elif engine != "stack" and reason is None and device.type == "cpu" and several:
        sizes = federation.sizes()
        usual = int(np.median(sizes[sizes > 0])) if (sizes > 0).any() else 1  # of the full batches, the middle one
        took = trial.times(net, init.row, *first(batch or usual))
        net.stacked = took["looped"] >= trial.CLEAR * took["stacked"]
        chosen["milliseconds"] = took
    chosen["engine"] = "stack" if net.stacked else "loop"
    if chain is not None:
        chosen["direct"] = True
    if reason is not None:
        chosen["reason"] = f"the model cannot be stacked: {reason}"
    return Stacked(net, federation, device, arithmetic, chain, capture, feeding, found), chosen


def _prefix(
    net: Net, row: Tensor, federation: Federation, device: torch.device, arithmetic: Arithmetic, again: bool
) -> tuple[Prefix | None, Choices]:
    """The frozen prefix whose outputs are kept, which the net then takes, and what is to be said of it.

    A run that goes on (`again`) keeps them as it did before, so that it goes on with the same bits.
    """
    spread = torch.linspace(0, len(federation.x) - 1, min(len(federation.x), TRIED)).long()
    x = _ready(federation.x[spread], device, arithmetic)
    found = prefix_of(net, row, x)
    if found is None:
        return None, {}
    plan = planned(found, x, len(federation.x), arithmetic.dtype, arithmetic.bf16)
    if not plan.fits and not again:
        return None, {"notes": [plan.note]}
    net.takes(found.rest)
    kept = {"until": plan.until, "samples": plan.samples, "numbers": plan.numbers, "bytes": plan.size}
    return found, {"prefix": kept, "notes": [plan.note]}


def _chain(
    net: Net, x: Tensor, device: torch.device, arithmetic: Arithmetic, own: StackedConvolutions | None,
    engine: Word, past: Mapping[str, Any],
) -> Chain | None:
    """The model as a chain of layers, where plain training differentiates it by hand."""
    wanted = bool(past.get("direct")) if past else engine in ("auto", "direct")
    found = Chain.of(net, x, device, arithmetic.dtype, own) if wanted else None
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
    x, y = (_ready(t[first : first + count], device, arithmetic) for t in (federation.x, federation.trained_on))
    return x, y


def _ready(t: Tensor, device: torch.device, arithmetic: Arithmetic) -> Tensor:
    """As the engine computes with it."""
    return t.to(device, arithmetic.dtype if t.is_floating_point() else None)


def _require_known(module: nn.Module, federation: Federation) -> None:
    """Raise where samples hold token numbers that a model, which says how many it knows, was never taught."""
    known = next((n for m in module.modules() if isinstance(n := getattr(m, "vocabulary", None), int)), None)
    if known is None or not federation.x.numel():
        return
    if federation.x.is_floating_point():
        raise CoterieError("the model reads texts as token numbers, and the samples are other numbers.")
    if (most := int(federation.x.max())) >= known:
        raise CoterieError(f"the samples hold the token number {most}, and the model knows {known} of them, from 0; "
                           "number the texts by the tokenizer that comes with the model.")
