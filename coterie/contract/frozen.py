"""What of a module is frozen: tensors that never change, so that one copy of them serves every model of a process."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def in_rows(module: nn.Module) -> set[int]:
    """The identities of the parameters that rows hold: those that train, and those that their module names in `in_row`.

    A method's own module names there what no gradient moves and what differs between models all the same.
    """
    named = {id(getattr(sub, name)) for sub in module.modules() for name in getattr(sub, "in_row", ())}
    return {id(p) for p in module.parameters() if p.requires_grad or id(p) in named}


def frozen_layers(module: nn.Module) -> set[nn.Module]:
    """The submodules of which nothing trains: the nearest enclosing one that has parameters has none in a row."""
    held, found, seen = in_rows(module), set[nn.Module](), set[nn.Module]()

    def walk(sub: nn.Module, frozen: bool) -> None:
        if sub in seen:
            return
        seen.add(sub)
        own = [id(p) in held for p in sub.parameters()]
        frozen = not any(own) if own else frozen
        if frozen:
            found.add(sub)
        for child in sub.children():
            walk(child, frozen)

    walk(module, False)
    return found


def frozen_tensors(module: nn.Module) -> dict[str, Tensor]:
    """By name, the parameters that are in no row, and the saved buffers of frozen layers."""
    held, layers, modules = in_rows(module), frozen_layers(module), dict(module.named_modules())
    saved = set(module.state_dict(keep_vars=True))
    found: dict[str, Tensor] = {name: p for name, p in module.named_parameters() if id(p) not in held}
    for name, buffer in module.named_buffers():
        if name in saved and modules[name.rpartition(".")[0]] in layers:
            found[name] = buffer
    return found


def duplicate(module: M) -> M:
    """A deep copy that shares the memory of frozen parameters.

    The parameters themselves are objects of the copy: moved to another device or number format, or asked for
    gradients, they leave the original as it is. Buffers are copied: a forward pass in training may write into them.
    """
    held = in_rows(module)
    shared = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in module.parameters() if id(p) not in held}
    return copy.deepcopy(module, dict(shared))


def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """sha256 over names, shapes and values; numbers that are not whole count as float32, whatever holds them."""
    total = hashlib.sha256()
    for name, tensor in tensors:
        values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        values = values.detach().to("cpu", torch.float32 if values.is_floating_point() else None).contiguous()
        total.update(f"{name}{tuple(tensor.shape)}".encode())
        total.update(values.view(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def same_values(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    """Whether two sets of named tensors hold the same numbers; where they share memory nothing is compared."""

    def alike(a: Tensor, b: Tensor) -> bool:
        if a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and a.data_ptr() == b.data_ptr():
            return True
        return a.shape == b.shape and torch.equal(a.cpu().to(b.dtype), b.cpu())

    return mine.keys() == theirs.keys() and all(alike(t, theirs[name]) for name, t in mine.items())
