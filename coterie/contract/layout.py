"""A model is a row: where each named tensor of a module lies in one flat vector of length D."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from coterie.contract.frozen import fingerprint, frozen_tensors
from coterie.errors import CoterieError, unknown

Kind = Literal["parameter", "statistic", "counter"]
Columns = slice | Tensor


@dataclass(frozen=True)
class Entry:
    """One tensor of the module: its columns are [start, stop) of the row; a frozen one has none, and starts at -1."""

    name: str
    shape: tuple[int, ...]
    start: int
    kind: Kind
    part: str
    trainable: bool
    batchnorm: bool = False  # belongs to a batch normalisation layer

    @property
    def stop(self) -> int:
        return self.start + self.size

    @property
    def size(self) -> int:
        return int(torch.Size(self.shape).numel())


@dataclass(frozen=True)
class Pair:
    """The factors A and B of one adapted layer: with its adapter, the layer's weight is W + scale * B A."""

    name: str  # of the adapted layer
    a: Entry  # A [r, ...inputs]
    b: Entry  # B [outputs, r, ...]
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


def adapters_of(module: nn.Module) -> dict[str, float]:
    """By name, the submodules that hold a pair of factors, each with its scale: they say so by `low_rank`."""
    found = {name: getattr(sub, "low_rank", None) for name, sub in module.named_modules()}
    return {name: scale for name, scale in found.items() if isinstance(scale, float)}


def find_head(module: nn.Module) -> str | None:
    """The name of the last linear layer in order of registration, which is where class scores are usually made."""
    names = [name for name, sub in module.named_modules() if isinstance(sub, nn.Linear)]
    return names[-1] if names else None


def head_name(module: nn.Module) -> str | None:
    """The layer that makes the scores: the one declared in the module's `parts`, else the last linear one."""
    declared = getattr(module, "parts", {})
    return declared["head"] if isinstance(declared, Mapping) and "head" in declared else find_head(module)


def declare_head(module: nn.Module, head: str) -> None:
    """Note the user's choice of head in the module's `parts`."""
    names = [name for name, _ in module.named_modules() if name]
    if head not in names:
        raise unknown("layer given as head", head, names)
    declared = getattr(module, "parts", {})
    module.parts = {**(declared if isinstance(declared, Mapping) else {}), "head": head}  # type: ignore[assignment]


def under(name: str, prefix: str) -> bool:
    """Whether a tensor is this one or lies in the module of this name."""
    return prefix == "" or name == prefix or name.startswith(prefix + ".")


def parts_of(module: nn.Module, head: str | None = None) -> tuple[dict[str, str], str | None]:
    """The parts that a module declares, `head` among them where there is one, by module name; and the head's name."""
    declared = getattr(module, "parts", {})
    prefixes: dict[str, str] = dict(declared) if isinstance(declared, Mapping) else {}
    found = head if head is not None else prefixes.pop("head", find_head(module))
    prefixes.pop("head", None)
    return (prefixes if found is None else {**prefixes, "head": found}), found


def part_of(name: str, prefixes: Mapping[str, str]) -> str:
    """The part that a tensor belongs to; `base` is what lies in none."""
    return next((part for part, prefix in prefixes.items() if under(name, prefix)), "base")


@dataclass(frozen=True)
class Layout:
    """Names, shapes, offsets and named parts of a row `[D]`.

    Tensors are ordered part by part (base first, head last; inside a part parameters before buffers), so that the
    usual parts are contiguous and `cut` is a view. Tied tensors appear once. Buffers are columns too: `statistic`
    for floating point ones, `counter` for integers (exact in float32 up to 2^24).

    What is `frozen` (requires_grad=False, and the buffers of layers of which nothing trains) has no columns: it is the
    same in every row of a run, so it is stored once and does not travel. Its fingerprint is part of the digest.

    A part is named by: `all`, `none`, `parameters`, `buffers`, `batchnorm` (all tensors of such layers), `biases`
    (parameters with one axis: the scales of normalisation, too), `adapters` (the factors of low-rank adapters),
    `base`, `head`, a part the module declares in its attribute `parts` (part name -> module name), or the name of any
    module or tensor, in which `*` stands for any text: `*.A` are the factors A of all adapters. `x+y` is both and
    `~x` everything but x, where x may itself be a sum: `~x+y` is all but x and y.
    """

    entries: tuple[Entry, ...]
    head: str | None = None  # the layer that makes the scores, by its module name
    frozen: tuple[Entry, ...] = ()  # tensors that are in no row
    values: tuple[Tensor, ...] = field(default=(), repr=False, compare=False)  # theirs
    pairs: tuple[Pair, ...] = ()  # the low-rank adapters whose two factors are columns

    @classmethod
    def of(cls, module: nn.Module, head: str | None = None) -> Layout:
        """Lay out a module; `head` names the layer that makes the scores when the last linear layer is not it."""
        modules = dict(module.named_modules())
        if head is not None and head not in modules:
            raise unknown("layer given as head", head, (name for name in modules if name))
        prefixes, found = parts_of(module, head)
        order = ["base", *(part for part in prefixes if part != "head"), "head"]
        frozen = frozen_tensors(module)

        def place(name: str) -> int:
            return order.index(part_of(name, prefixes))

        named: list[tuple[str, Tensor, bool]] = [(name, p, True) for name, p in module.named_parameters()]
        saved = set(module.state_dict(keep_vars=True))
        named += [(name, b, False) for name, b in module.named_buffers() if name in saved]
        entries: list[Entry] = []
        start = 0
        apart: list[Entry] = []
        for name, tensor, is_parameter in sorted(named, key=lambda item: place(item[0])):
            column = name not in frozen
            if column and tensor.is_complex():
                raise CoterieError(f"tensor '{name}' is complex; a row holds real numbers only.")
            if column and is_parameter and not tensor.is_floating_point():
                raise CoterieError(f"parameter '{name}' is {tensor.dtype}; parameters must be floating point.")
            kind: Kind = "parameter" if is_parameter else "statistic" if tensor.is_floating_point() else "counter"
            owner = modules[name.rpartition(".")[0]]
            entry = Entry(
                name, tuple(tensor.shape), start if column else -1, kind, part_of(name, prefixes),
                is_parameter and tensor.requires_grad, isinstance(owner, nn.modules.batchnorm._BatchNorm),
            )
            (entries if column else apart).append(entry)
            start = entry.stop if column else start
        if not any(entry.trainable for entry in entries):
            raise CoterieError("the model has no trainable parameter.")
        values = tuple(frozen[entry.name].detach() for entry in apart)
        return cls(tuple(entries), found, tuple(apart), values, _paired(entries, adapters_of(module)))

    @classmethod
    def flat(cls, size: int) -> Layout:
        """So many numbers that are no model, as one trained tensor."""
        return cls((Entry("values", (size,), 0, "parameter", "base", True),))

    @property
    def size(self) -> int:
        """D, the length of a row."""
        return self.entries[-1].stop if self.entries else 0

    @cached_property
    def rank(self) -> int:
        """R, the rank of the largest low-rank adapter; 0 where there is none."""
        return max((pair.rank for pair in self.pairs), default=0)

    @cached_property
    def parts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(entry.part for entry in self.entries + self.frozen))

    @cached_property
    def digest(self) -> str:
        """A fingerprint of names, shapes and order; two models with the same digest can exchange rows.

        Behind a hyphen follows that of the frozen tensors, where there are any.
        """
        text = ";".join(f"{entry.name}{entry.shape}{entry.kind}" for entry in self.entries)
        text += "".join(f";{pair.name}*{pair.scale!r}" for pair in self.pairs)
        columns = hashlib.sha256(text.encode()).hexdigest()[:16]
        if not self.frozen:
            return columns
        named = zip((entry.name for entry in self.frozen), self.values, strict=True)
        return f"{columns}-{fingerprint(named)[:16]}"

    def frozen_facts(self) -> dict[str, Any]:
        """For the record, how many numbers of the model are in no row, and their fingerprint."""
        if not self.frozen:
            return {}
        return {"frozen": sum(entry.size for entry in self.frozen), "frozen_sha256": self.digest.partition("-")[2]}

    def refuse(self, digest: object, whose: str, model: str = "") -> None:
        """Raise if rows of this digest, those of a checkpoint or of another side (`whose`), are of another model."""
        theirs, ours = str(digest).split("-"), self.digest.split("-")
        if theirs == ours:
            return
        if theirs[0] == ours[0]:
            there, here = ("-".join(both[1:]) or "none" for both in (theirs, ours))
            raise CoterieError(
                f"the frozen weights of {f'the model {model}' if model else 'this model'} are not those of {whose} "
                f"(fingerprint {here} here, {there} there); build it with the same ones: the same file of weights, or, "
                "where they are drawn, the same seed and the same version of PyTorch, and the same freeze and train."
            )
        raise CoterieError(f"{whose} holds another model (layout {digest}); this one has layout {self.digest} and "
                           f"{self.size} columns.")

    # -- parts -----------------------------------------------------------------------------------------------------

    def within(self, part: str) -> tuple[Entry, ...]:
        """The entries of a part, in row order; frozen tensors are none."""
        return tuple(entry for entry in self._named(part) if entry.start >= 0)

    def is_frozen(self, part: str) -> bool:
        """Whether a part has frozen parameters and none that trains."""
        found = self._named(part)
        return any(entry.start < 0 for entry in found) and not any(entry.trainable for entry in found)

    def _named(self, part: str) -> tuple[Entry, ...]:
        """The tensors of a part, those that are frozen last."""
        every = self.entries + self.frozen
        if part.startswith("~"):
            left_out = set(self._named(part[1:]))
            return tuple(entry for entry in every if entry not in left_out)
        if "+" in part:
            chosen = {entry for piece in part.split("+") for entry in self._named(piece)}
            return tuple(entry for entry in every if entry in chosen)
        if part == "none":
            return ()
        if part == "all":
            return every
        if part == "parameters":
            return tuple(entry for entry in every if entry.kind == "parameter")
        if part == "batchnorm":
            return tuple(entry for entry in every if entry.batchnorm)
        if part == "biases":
            return tuple(entry for entry in every if entry.kind == "parameter" and len(entry.shape) == 1)
        if part == "buffers":
            return tuple(entry for entry in every if entry.kind != "parameter")
        if part == "adapters" and self.pairs:
            factors = {entry for pair in self.pairs for entry in (pair.a, pair.b)}
            return tuple(entry for entry in every if entry in factors)
        found = tuple(entry for entry in every if entry.part == part)
        found = found or tuple(entry for entry in every if under(entry.name, part))
        found = found or tuple(entry for entry in every if "*" in part and _like(entry.name, part))
        if not found and part == "adapters":
            raise CoterieError("this model has no adapters whose factors train; give it some, e.g. --adapter "
                               "lora:rank=8.")
        if not found and part == "head":
            raise CoterieError(
                "no head was found because the model has no linear layer; name the layer that makes the scores "
                f"with head=..., one of: {', '.join(dict.fromkeys(e.name.rpartition('.')[0] for e in every))}."
            )
        if not found and part != "base":
            raise unknown("part of the model", part, {*self.parts, "all", "none", *(e.name for e in every)})
        return found

    def columns(self, part: str) -> Columns:
        """A slice where the part is contiguous (cutting is then a view), else an index tensor."""
        return _columns(self.within(part))

    def only(self, part: str) -> Layout:
        """The layout of the columns that `cut(rows, part)` returns."""
        entries, start = [], 0
        for entry in self.within(part):
            entries.append(replace(entry, start=start))
            start += entry.size
        held = {pair.a.name.removesuffix(".A"): pair.scale for pair in self.pairs}
        return Layout(tuple(entries), pairs=_paired(entries, held))

    def normalisation(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The columns of the running statistics of batch normalisation, and of its counters of batches."""
        def columns(kind: Kind) -> Tensor:
            entries = [entry for entry in self.entries if entry.batchnorm and entry.kind == kind]
            found = [torch.arange(entry.start, entry.stop, device=device) for entry in entries]
            return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64, device=device)

        return columns("statistic"), columns("counter")

    def cut(self, rows: Tensor, part: str) -> Tensor:
        """`[..., D] -> [..., d]`: the columns of a part."""
        columns = self.columns(part)
        return rows[..., columns] if isinstance(columns, slice) else rows[..., columns.to(rows.device)]

    def put(self, rows: Tensor, part: str, columns: Tensor) -> Tensor:
        """A copy of `rows [..., D]` whose columns of `part` are `columns [..., d]`."""
        where = self.columns(part)
        out = rows.expand(_broadcast(rows.shape[:-1], columns.shape[:-1]) + rows.shape[-1:]).clone()
        out[..., where if isinstance(where, slice) else where.to(rows.device)] = columns
        return out

    # -- modules and rows ------------------------------------------------------------------------------------------

    def row(self, module: nn.Module, dtype: torch.dtype = torch.float32) -> Tensor:
        """The module's tensors as one row `[D]`."""
        state = dict(module.named_parameters()) | dict(module.named_buffers())
        if not self.entries:
            return torch.zeros(0, dtype=dtype)
        return torch.cat([state[entry.name].detach().to(dtype).reshape(-1) for entry in self.entries])

    def load(self, module: nn.Module, row: Tensor) -> nn.Module:
        """Write a row `[D]` into the module's tensors, exactly, and return the module."""
        if row.shape != (self.size,):
            raise CoterieError(f"a row of shape {tuple(row.shape)} does not fit a model of {self.size} columns.")
        state = dict(module.named_parameters()) | dict(module.named_buffers())
        with torch.no_grad():
            for entry in self.entries:
                state[entry.name].copy_(row[entry.start : entry.stop].view(entry.shape))
        return module

    def views(self, rows: Tensor, entries: Iterable[Entry] | None = None) -> dict[str, Tensor]:
        """`[..., D]` -> name: `[..., *shape]`, views that share the rows' memory."""
        lead = rows.shape[:-1]
        chosen = self.entries if entries is None else entries
        return {e.name: rows[..., e.start : e.stop].view(lead + e.shape) for e in chosen}


def _paired(entries: Iterable[Entry], scales: Mapping[str, float]) -> tuple[Pair, ...]:
    """The pairs of which both factors are among the entries; `scales` are those of the modules that hold them."""
    named = {entry.name: entry for entry in entries}
    held = [(name, named.get(f"{name}.A"), named.get(f"{name}.B"), scale) for name, scale in scales.items()]
    return tuple(Pair(name.rpartition(".")[0], a, b, scale) for name, a, b, scale in held if a and b)


def _like(name: str, pattern: str) -> bool:
    """Whether a tensor, or a module around it, is called as the pattern says."""
    levels = name.split(".")
    return any(fnmatchcase(".".join(levels[:count]), pattern) for count in range(1, len(levels) + 1))


def _broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(a, b))  # type: ignore[no-untyped-call]


def _columns(entries: Sequence[Entry]) -> Columns:
    if not entries:
        return slice(0, 0)
    if all(before.stop == after.start for before, after in pairwise(entries)):
        return slice(entries[0].start, entries[-1].stop)
    return torch.cat([torch.arange(entry.start, entry.stop) for entry in entries])
