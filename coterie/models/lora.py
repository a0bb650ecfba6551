"""Low-rank adapters: beside a layer's frozen weight W lies s B A, and what trains is B and A."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.contract.frozen import duplicate
from coterie.contract.layout import declare_head, head_name, under
from coterie.contract.patterns import Built, Extended
from coterie.contract.stored import store, widen
from coterie.errors import CoterieError, unknown
from coterie.options import (
    BelowOne,
    Count,
    CountOrZero,
    Positive,
    build,
    parse_call,
    pieces,
    require_few,
    require_ranges,
    split_options,
)

USUAL_SCALE = 2.0
"""s where no alpha is given, whatever the rank: ranks can then differ, and change, without changing what B A means."""


@dataclass(frozen=True)
class LoRA:
    """The adapters of a model, spelled `lora:rank=8,alpha=16,targets=q+v`.

    The adapted layer computes y = W x + b + s B A x, with A `[r, inputs]` and B `[outputs, r]`. B starts at 0, so the
    model starts as it was; A starts uniform on +-1/sqrt(inputs), from the run's seed.
    """

    name: ClassVar[str] = "lora"
    FORMER: ClassVar[dict[str, str]] = {}
    OTHER_WORDS: ClassVar[dict[str, str]] = {
        "r": "rank", "lorarank": "rank", "loraalpha": "alpha", "loradropout": "dropout", "targetmodules": "targets",
        "modules": "targets", "layers": "targets", "userslora": "write scaling=rslora", "dtype": "backbone",
    }

    rank: CountOrZero = 8
    """Columns of B and rows of A; 0 adapts nothing, so that the head alone trains."""
    alpha: Positive | None = None
    """The scale is s = alpha / rank; where it is not given, s is 2 whatever the rank."""
    targets: str = "all"
    """The layers that are adapted, joined by `+`: their names, the end of their names, the name of a module around
    them, with `*` for any text, each with a rank of its own where wanted: `q+v(rank=4)`. `all` is every linear and
    convolutional layer but the head."""
    scaling: Literal["lora", "rslora"] = "lora"
    """How the scale follows from alpha: alpha / rank, or alpha / sqrt(rank), which keeps large ranks from fading."""
    dropout: BelowOne = 0.0
    """Share of an adapter's inputs that training sets to zero."""
    base: Literal["frozen", "trains"] = "frozen"
    """Whether all of the model but the adapters and the head is frozen, or trains beside them."""
    backbone: Literal["float32", "bfloat16"] = "float32"
    """How the weights of frozen layers are stored: bfloat16 takes half the memory and rounds each once, by at most
    2^-8 of itself. Adapters, head and everything computed keep the run's precision."""

    def __post_init__(self) -> None:
        require_ranges(self)
        if self.scaling != "lora" and self.alpha is None:
            raise CoterieError(f"scaling={self.scaling} says how the scale follows from alpha; give alpha as well, "
                               f"e.g. lora:rank={self.rank},alpha=16,scaling={self.scaling}.")
        if self.base == "trains" and self.backbone != "float32":
            raise CoterieError(f"backbone={self.backbone} stores what is frozen, and with base=trains nothing is; "
                               "leave one of the two out.")

    @classmethod
    def of(cls, text: str) -> LoRA:
        """From its spelling."""
        name, _, rest = text.partition(":")
        if name != cls.name:
            raise unknown("adapter", name, [cls.name])
        return build(cls, split_options(rest, text), "adapter 'lora'")

    def scale(self, rank: int) -> float:
        """s of a layer with this rank."""
        if self.alpha is None:
            return USUAL_SCALE
        return self.alpha / (rank if self.scaling == "lora" else math.sqrt(rank))

    def chosen(self, module: nn.Module, head: str | None) -> dict[str, int]:
        """The names of the layers that are adapted, each with its rank, in the module's order."""
        layers = {name: sub for name, sub in module.named_modules() if name and kind_of(sub) is not None}
        ranks: dict[str, int] = {}
        targets = pieces(self.targets, "+")
        require_few(targets, "targets of the adapter")
        for piece in targets:
            pattern, own = parse_call(piece)
            rank = build(_Target, own, f"target '{pattern}'").rank
            found = self._meant(pattern, module, layers, head)
            ranks.update(dict.fromkeys(found, self.rank if rank is None else rank))
        if not self.targets.strip("+ "):
            raise CoterieError("targets names no layer; leave it out to adapt all of them.")
        for name, rank in ranks.items():
            rows, columns = _kind(layers[name]).sides(cast("Tensor", layers[name].weight))
            most = min(rows, columns)
            if rank > most:
                raise CoterieError(
                    f"rank {rank} is above what layer '{name}' can have: its weight is {rows} x {columns}, so "
                    f"{most} says everything; give a smaller rank, or this layer one of its own: "
                    f"targets=...+{name}(rank={most})."
                )
        return {name: ranks[name] for name in layers if ranks.get(name)}

    @staticmethod
    def _meant(pattern: str, module: nn.Module, layers: dict[str, nn.Module], head: str | None) -> list[str]:
        """The layers that one pattern stands for."""
        free = {name: sub for name, sub in layers.items() if head is None or not under(name, head)}
        if pattern == "all":
            found = [name for name, sub in free.items() if _kind(sub).usual and not _kind(sub).hinders(sub)]
            if not found:
                raise CoterieError("the model has no linear or convolutional layer beside its head, so there is "
                                   "nothing to adapt.")
            return found
        found = [name for name in free if _stands_for(pattern, name)]
        for name in found:
            if why := _kind(free[name]).hinders(free[name]):
                raise CoterieError(f"layer '{name}' cannot be adapted: {why}.")
        if found:
            return found
        if head is not None and _stands_for(pattern, head):
            raise CoterieError(f"target '{pattern}' is the head '{head}', which trains whole; name other layers.")
        other = [(name, sub) for name, sub in module.named_modules() if name and _stands_for(pattern, name)]
        if other:
            name, sub = other[0]
            raise CoterieError(f"target '{pattern}' is '{name}', a {type(sub).__name__}; linear layers, convolutions "
                               "and embeddings can be adapted.")
        ends = {name.rpartition(".")[2] for name in free}
        known = {*free, *(end for end in ends if not end.isdecimal()), "all"}
        raise unknown("target of the adapter", pattern, known)


@dataclass(frozen=True)
class _Target:
    """What one of the targets has of its own."""

    rank: Count | None = None

    def __post_init__(self) -> None:
        require_ranges(self)


def _stands_for(pattern: str, name: str) -> bool:
    """Whether a pattern is a name, the end of one behind a dot, or the name of a module around it."""
    pieces = name.split(".")
    around = (".".join(pieces[:count]) for count in range(1, len(pieces)))
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}") or any(
        fnmatchcase(level, pattern) for level in around
    )


# -- modules ----------------------------------------------------------------------------------------------------------


class Factors(nn.Module):
    """A `[r, ...inputs]` and B `[outputs, r, ...]` of one layer, and s, with which their product counts.

    `low_rank` is what a layout knows such a pair by.
    """

    usual: ClassVar[bool] = True
    """Whether such layers are adapted where nobody names any."""

    @staticmethod
    def hinders(layer: nn.Module) -> str:
        """Why a layer cannot be adapted, empty if it can."""
        return ""

    @staticmethod
    def sides(weight: Tensor) -> tuple[int, int]:
        """Rows and columns of a layer's weight as a matrix: outputs, and what each output is a sum over."""
        return weight.shape[0], weight[0].numel()

    def __init__(self, layer: nn.Module, rank: int, scale: float, dropout: float) -> None:
        super().__init__()
        weight = cast("Tensor", layer.weight)
        self.low_rank, self.dropout = scale, dropout
        self.A = nn.Parameter(weight.new_empty(self._shape_of_a(weight, rank)))
        self.B = nn.Parameter(weight.new_empty(self._shape_of_b(weight, rank)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A uniform on +-1/sqrt(inputs), B zero."""
        bound = 1 / math.sqrt(self._inputs())
        nn.init.uniform_(self.A, -bound, bound)
        nn.init.zeros_(self.B)

    def _shape_of_a(self, weight: Tensor, rank: int) -> tuple[int, ...]:
        return (rank, *weight.shape[1:])

    def _shape_of_b(self, weight: Tensor, rank: int) -> tuple[int, ...]:
        return (weight.shape[0], rank, *(1 for _ in weight.shape[2:]))

    def _inputs(self) -> int:
        return self.A[0].numel()

    def product(self) -> Tensor:
        """s B A, of the weight's shape."""
        return self.low_rank * self.as_weight(self.B.flatten(1) @ self.A.flatten(1))

    def as_weight(self, matrix: Tensor) -> Tensor:
        """A matrix like B A, `[outputs, inputs]`, in the shape of the layer's weight."""
        return matrix.view(len(matrix), *self.A.shape[1:])

    def forward(self, layer: nn.Module, x: Tensor) -> Tensor:
        """s B A x."""
        return self.low_rank * F.linear(F.linear(self._dropped(x), self.A), self.B)

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x

    def extra_repr(self) -> str:
        return f"rank={len(self.A)}, scale={self.low_rank:g}"


class ConvolutionFactors(Factors):
    """A is a convolution like the layer's own with r outputs, B one of width 1."""

    @staticmethod
    def hinders(layer: nn.Module) -> str:
        groups = cast("nn.Conv2d", layer).groups
        return f"it is a convolution in {groups} groups, whose weight is no single matrix" if groups > 1 else ""

    def forward(self, layer: nn.Module, x: Tensor) -> Tensor:
        inner = cast("nn.Conv2d", layer)._conv_forward(self._dropped(x), self.A, None)
        width_one = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[self.B.ndim]
        return self.low_rank * width_one(inner, self.B)


class EmbeddingFactors(Factors):
    """A `[r, tokens]`, B `[features, r]`: token v gets s B A[:, v] more; the padding token gets nothing."""

    usual = False

    @staticmethod
    def hinders(layer: nn.Module) -> str:
        rescales = cast("nn.Embedding", layer).max_norm is not None
        return "it is an embedding with max_norm, which rescales its own weight" if rescales else ""

    @staticmethod
    def sides(weight: Tensor) -> tuple[int, int]:
        return weight.shape[1], weight.shape[0]

    def __init__(self, layer: nn.Module, rank: int, scale: float, dropout: float) -> None:
        self.padding = cast("nn.Embedding", layer).padding_idx
        super().__init__(layer, rank, scale, dropout)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.padding is not None:
            with torch.no_grad():
                self.A[:, self.padding] = 0

    def _shape_of_a(self, weight: Tensor, rank: int) -> tuple[int, ...]:
        return rank, weight.shape[0]

    def _shape_of_b(self, weight: Tensor, rank: int) -> tuple[int, ...]:
        return weight.shape[1], rank

    def as_weight(self, matrix: Tensor) -> Tensor:
        return matrix.T

    def forward(self, layer: nn.Module, x: Tensor) -> Tensor:
        inner = F.embedding(x, self.A.T, self.padding)
        return self.low_rank * F.linear(self._dropped(inner), self.B)


ADAPTABLE: dict[type[nn.Module], type[Factors]] = {
    nn.Linear: Factors, nn.Conv1d: ConvolutionFactors, nn.Conv2d: ConvolutionFactors, nn.Conv3d: ConvolutionFactors,
    nn.Embedding: EmbeddingFactors,
}
"""Layers that can have an adapter, and its kind."""


def kind_of(layer: nn.Module) -> type[Factors] | None:
    """The kind of adapter that a layer can have."""
    return next((kind for layers, kind in ADAPTABLE.items() if isinstance(layer, layers)), None)


def _kind(layer: nn.Module) -> type[Factors]:
    kind = kind_of(layer)
    assert kind is not None
    return kind


class Adapted(nn.Module):
    """A layer with an adapter beside it. `weight` is what the two amount to, for those that read it."""

    def __init__(self, base: nn.Module, rank: int, lora: LoRA) -> None:
        super().__init__()
        self.base = base
        self.lora = _kind(base)(base, rank, lora.scale(rank), lora.dropout)

    @property
    def weight(self) -> Tensor:
        """W + s B A."""
        return cast("Tensor", self.base.weight) + self.lora.product()

    @property
    def bias(self) -> Tensor | None:
        return cast("Tensor | None", getattr(self.base, "bias", None))

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.base(x) + self.lora(self.base, x))

    def merged(self) -> nn.Module:
        """A layer of the original kind with the weight W + s B A."""
        layer = widen(copy.deepcopy(self.base))
        with torch.no_grad():
            cast("Tensor", layer.weight).copy_(self.weight)
        return layer


# -- models -----------------------------------------------------------------------------------------------------------


def adapted(model: Built, adapter: str, head: str | None = None) -> Built:
    """The model, a module or a function that builds one, with adapters; as it was where `adapter` is empty.

    All but the adapters and the head is frozen, unless the adapter says base=trains. A module stays as it is, and its
    weights are where every run starts; the adapters are drawn from the run's seed.
    """
    if not adapter:
        return model
    lora = LoRA.of(adapter)

    def extend(module: nn.Module) -> nn.Module:
        return _adapt(module, lora, head)

    if isinstance(model, nn.Module):
        kept = duplicate(model)
        _freeze_base(kept, lora, head)
        return Extended(kept, extend)
    if isinstance(model, Extended):
        return model.further(extend)
    build = model
    return lambda: extend(build())


def _adapt(module: nn.Module, lora: LoRA, head: str | None) -> nn.Module:
    """The same module with adapters in place of the chosen layers."""
    scores = _freeze_base(module, lora, head)
    ranks = lora.chosen(module, scores)
    layers = {name: module.get_submodule(name) for name in ranks}
    put = {layers[name]: Adapted(layers[name], rank, lora) for name, rank in ranks.items()}
    for sub in list(module.modules()):
        for name, child in sub._modules.items():
            if child in put:
                setattr(sub, name, put[child])
    return store(module) if lora.backbone == "bfloat16" else module


def _freeze_base(module: nn.Module, lora: LoRA, head: str | None) -> str | None:
    """Freeze all but the head, where the base is frozen; the head's name, which is declared from now on, as the last
    linear layer may soon be an adapter's."""
    if head is not None:
        declare_head(module, head)
    scores = head_name(module)
    if scores is not None:
        declare_head(module, scores)
    if lora.base == "frozen":
        named = list(module.named_parameters(remove_duplicate=False))
        base = {id(p) for name, p in named if scores is None or not under(name, scores)}  # what a head is tied to too
        for _, parameter in named:
            parameter.requires_grad_(parameter.requires_grad and id(parameter) not in base)
    return scores


def merged(module: nn.Module) -> nn.Module:
    """A copy in which every adapted layer is a layer of the original kind with the weight W + s B A."""
    made = copy.deepcopy(module)
    for sub in list(made.modules()):
        for name, child in sub._modules.items():
            if isinstance(child, Adapted):
                setattr(sub, name, child.merged())
    return made
