"""State, payload and upload are small frozen dataclasses of tensors, so everything generic is written once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from coterie.errors import CoterieError


@dataclass(frozen=True)
class Record:
    """Base of all states and payloads: a frozen dataclass whose fields are tensors (or None where absent)."""

    former: ClassVar[tuple[str, ...]] = ()
    """Names that the class had in earlier versions: a checkpoint names the class of a state."""

    def tensors(self) -> dict[str, Tensor]:
        """Field name -> tensor, absent ones left out."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: t.each if isinstance(t, Each) else t for name, t in found.items() if t is not None}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """The record with these tensors; fields that are not given are None."""
        names = [f.name for f in fields(cls)]
        extra = sorted(set(tensors) - set(names))
        if extra:
            raise CoterieError(f"{cls.__name__} has fields {names}, not {extra}.")
        return cls(**{name: tensors.get(name) for name in names})

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The record with `change` applied to every tensor."""
        return type(self).of({name: change(t) for name, t in self.tensors().items()})


@dataclass(frozen=True)
class Nothing(Record):
    """No tensors at all: what a stateless side keeps, or what travels when nothing does."""


@dataclass(frozen=True)
class Model(Record):
    """One server model, `row [D]` (or the columns of a shared part)."""

    row: Tensor


@dataclass(frozen=True)
class Models(Record):
    """K server models, `rows [K, D]`."""

    rows: Tensor


@dataclass(frozen=True)
class Each:
    """Marks a payload tensor `[m, ...]` as one slice per client; unmarked tensors go to every client alike."""

    each: Tensor


class Upload:
    """What leaves a cohort, named by the method: `Upload(update=..., loss=...)`, each `[clients, ...]`."""

    def __init__(self, **tensors: Tensor) -> None:
        self._tensors = tensors

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """The upload of these tensors."""
        return cls(**tensors)

    def tensors(self) -> dict[str, Tensor]:
        return dict(self._tensors)

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self.__dict__["_tensors"][name]  # type: ignore[no-any-return]
        except KeyError:
            held = sorted(self.__dict__.get("_tensors", {}))
            raise AttributeError(f"the upload holds {held}, not '{name}'") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)


def spread(payload: Record, clients: int) -> Record:
    """Give every payload tensor a client axis: shared ones as stride-0 views, `Each` ones as they are."""

    def view(t: Any) -> Any:
        if isinstance(t, Each):
            if len(t.each) != clients:
                raise CoterieError(f"a per-client payload has {len(t.each)} slices for {clients} clients.")
            return t.each
        return t.unsqueeze(0).expand(clients, *t.shape) if isinstance(t, Tensor) else t

    return type(payload)(**{f.name: view(getattr(payload, f.name)) for f in fields(payload)})


def concatenate(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join records of several waves along the client axis; what is one tensor for all clients stays one view."""
    return {name: _joined([part[name] for part in parts]) for name in parts[0]}


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    if len(tensors) == 1:
        return tensors[0]
    alike = {(t.data_ptr(), t.shape[1:], t.stride()[1:], len(t) == 1 or t.stride(0) == 0) for t in tensors}
    if alike == {(tensors[0].data_ptr(), tensors[0].shape[1:], tensors[0].stride()[1:], True)}:
        return tensors[0][:1].expand(sum(map(len, tensors)), *tensors[0].shape[1:])
    return torch.cat(list(tensors))


def bytes_each(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Bytes per client of tensors `[clients, ...]`, by name."""
    return {name: t[0].numel() * t.element_size() if len(t) else 0 for name, t in tensors.items()}
