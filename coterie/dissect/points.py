"""What a client may keep for itself, from nothing to everything: each is an existing method on a part of the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from coterie import registry
from coterie.contract.layout import Entry, Layout
from coterie.contract.low_rank import UP
from coterie.contract.method import Method
from coterie.data import Federation
from coterie.errors import CoterieError
from coterie.methods.fedper import FedPer
from coterie.models.lora import LoRA
from coterie.options import spelled
from coterie.running.experiment import Experiment
from coterie.running.simulation import Simulation

RANKS = (1, 2, 4, 8)
"""Ranks at which a client's adapters are its own, where nobody names any."""
NOTHING, EVERYTHING = "nothing", "everything"
NUMBER = 4
"""Bytes of a number of a row, which is float32 where it is kept and where it travels."""
SECOND = "feddpa"
"""The method with a second, personal adapter beside the shared one."""


@dataclass(frozen=True)
class Point:
    """What a client keeps, and how that is trained. `personal` are its bytes, 4 a column of the kept part."""

    name: str
    method: str  # its spelling
    adapter: str  # the adapters of its model; points of one adapter run as one comparison
    personal: int


def points_of(
    experiment: Experiment, federation: Federation, ranks: Sequence[int] = RANKS, parts: Sequence[str] = ()
) -> tuple[list[Point], list[str]]:
    """The points of a model from nothing to everything, and a sentence on each that it does not have.

    `ranks` are those of personal adapters, and `parts` further parts of the model that are tried as personal.
    """
    known: dict[tuple[str, str], Layout] = {}

    def layout_of(chosen: Method, adapter: str) -> Layout:
        """Of a method's model; one that adds no parts to it has that of FedAvg, so that a model is built seldom."""
        wraps = chosen.name if type(chosen).wrap is not Method.wrap else ""
        if (wraps, adapter) not in known:
            factory = replace(experiment, adapter=adapter).factory(federation)
            known[wraps, adapter] = Simulation.layout_of(chosen, factory, experiment.head)
        return known[wraps, adapter]

    layout = layout_of(registry.method("fedavg"), experiment.adapter)
    found: list[Point] = []
    left_out: list[str] = []
    kept_by: dict[tuple[str, tuple[Entry, ...]], str] = {}
    for name, method, adapter in _wished(layout, experiment.adapter, ranks, parts):
        try:
            chosen = registry.method(method)
            own = layout_of(chosen, adapter)
            kept = own.within(_personal_part(chosen))
            _refuse(name, kept, own)
            chosen.check(federation.arrived(0), own)
            if adapter != experiment.adapter and own.entries == layout.entries:
                raise CoterieError("every adapted layer has a rank of its own.")
            if (adapter, kept) in kept_by:
                raise CoterieError(f"it is the same as {kept_by[adapter, kept]} here.")
        except CoterieError as reason:
            left_out.append(f"{name} is left out: {reason}")
            continue
        kept_by[adapter, kept] = name
        found.append(Point(name, registry.spelling(chosen), adapter, NUMBER * sum(entry.size for entry in kept)))
    if not layout.pairs:
        left_out.append("adapters are left out: the model has none; --adapter lora:rank=8 puts them beside a frozen "
                        "model, and --adapter lora:rank=8,base=trains beside one that trains.")
    return found, left_out


def _refuse(name: str, kept: tuple[Entry, ...], layout: Layout) -> None:
    """Raise where a point in between is one of the two ends."""
    if not kept and name != NOTHING:
        raise CoterieError("nothing of it trains in this model.")
    if len(kept) == len(layout.entries) and name != EVERYTHING:
        raise CoterieError(f"it is the same as {EVERYTHING} here.")


def _personal_part(method: Method) -> str:
    """The part of a model that stays with a client."""
    if isinstance(method, FedPer):
        return method.personal
    ends = {"fedavg": "none", "local": "all"}
    if method.name not in ends:
        raise CoterieError(f"{method.name} does not say which part stays with a client.")
    return ends[method.name]


def _wished(
    layout: Layout, adapter: str, ranks: Sequence[int], parts: Sequence[str]
) -> Iterator[tuple[str, str, str]]:
    """Name, method and adapter of every point that could be."""
    yield NOTHING, "fedavg", adapter
    # of batch normalisation also the statistics: a client's scales are those of its own, as in FedBN
    kept = "biases+batchnorm" if any(entry.batchnorm for entry in layout.entries) else "biases"
    yield "biases and scales", _personal(kept), adapter
    yield "head", _personal("head"), adapter
    if layout.pairs:
        last = layout.pairs[-1]
        yield f"B of {last.name}", _personal(last.b.name), adapter
        yield "B of all layers", _personal(UP), adapter
        yield "B of all layers and head", _personal(f"{UP}+head"), adapter
        given = LoRA.of(adapter)
        for rank in sorted({*ranks, given.rank}):
            yield f"adapters of rank {rank}", _personal("adapters"), _of_rank(given, rank, adapter)
        yield "adapters and head", _personal("adapters+head"), adapter
        if SECOND in registry.methods() and given.base == "frozen":
            yield "a second adapter", SECOND, adapter
    for part in parts:
        yield part, _personal(part), adapter
    yield EVERYTHING, "local", adapter


def _personal(part: str) -> str:
    return f"fedper:personal={part}"


def _of_rank(given: LoRA, rank: int, adapter: str) -> str:
    """The spelling of the same adapters with another rank; layers that have a rank of their own keep it."""
    if rank == given.rank:
        return adapter
    made = replace(given, rank=rank)
    plain = {one.name: one.default for one in fields(made)}
    said = {name: getattr(made, name) for name in plain if name == "rank" or getattr(made, name) != plain[name]}
    return f"{LoRA.name}:{','.join(f'{name}={spelled(value)}' for name, value in said.items())}"
