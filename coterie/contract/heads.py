"""Heads that methods put in the place of a model's last linear layer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from torch import nn

from coterie.contract.cohort import Init
from coterie.contract.frozen import duplicate
from coterie.contract.layout import head_name
from coterie.errors import CoterieError


def with_head(module: nn.Module, build: Callable[[nn.Linear], nn.Module], inner: str, name: str) -> nn.Module:
    """A copy of the module with `build(head)` for a head; `inner` ('x+y'), submodules or parameters of it, are parts.

    If one of them is `head`, that one is the head, and what lies before it belongs to the body.
    """
    module = duplicate(module)
    place = head_name(module)
    head = None if place is None else module.get_submodule(place)
    if not isinstance(head, nn.Linear):
        raise CoterieError(f"{name} needs a model whose head is a linear layer, not {type(head).__name__}.")
    parts = dict(getattr(module, "parts", {}))
    new = build(head)
    if place:
        module.set_submodule(place, new)
    else:
        module = new
    prefix = f"{place}." if place else ""
    mine = {part: prefix + part for part in inner.split("+")}
    module.parts = {**mine, **parts, "head": mine.get("head", place)}  # type: ignore[assignment]
    return module


def projected(module: nn.Module, width: int, name: str) -> nn.Module:
    """A copy of the module whose features go d -> d -> `width`, with a ReLU between, before a head of that width."""

    def build(head: nn.Linear) -> nn.Module:
        one, two = nn.Linear(head.in_features, head.in_features), nn.Linear(head.in_features, width)
        last = nn.Linear(width, head.out_features, bias=head.bias is not None)
        return nn.Sequential(OrderedDict(one=one, relu=nn.ReLU(), two=two, head=last))

    return with_head(module, build, "head", name)


def require_scores(init: Init, name: str, part: str = "head") -> None:
    """Refuse a task without classes, and a head that is frozen or not the one layer that makes their scores."""
    if init.layout.is_frozen(part):
        raise CoterieError(f"{name} trains the model's {part}, which is frozen; let it train, or take another method.")
    weights = [entry.shape for entry in init.layout.within(part) if len(entry.shape) > 1]
    if not init.classes or len(weights) != 1 or weights[0][0] != init.classes:
        raise CoterieError(f"{name} needs classes and a head that is one linear layer with a score for each of them.")
