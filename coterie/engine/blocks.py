"""The tensors of many models in one vector, so that an element-wise rule is one call however many tensors there are."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from coterie.contract.layout import Entry, Layout


class Blocks:
    """Tensors of P models, each `[P, *shape]` and contiguous, one after another in `flat [P * d]`."""

    def __init__(self, layout: Layout, entries: Sequence[Entry], like: Tensor, models: int) -> None:
        self.layout, self.entries, self.models = layout, entries, models
        self.flat = like.new_empty(models * sum(entry.size for entry in entries))
        self.tensors: dict[str, Tensor] = {}
        start = 0
        for entry in entries:
            stop = start + models * entry.size
            self.tensors[entry.name] = self.flat[start:stop].view(models, *entry.shape)
            start = stop

    @classmethod
    def of(cls, layout: Layout, entries: Sequence[Entry], rows: Tensor) -> Blocks:
        """The entries' tensors of `rows [P, D]`."""
        made = cls(layout, entries, rows, len(rows))
        for name, view in layout.views(rows, entries).items():
            made.tensors[name].copy_(view)
        return made

    def put(self, rows: Tensor, first: int = 0) -> None:
        """Write the models from `first` on back into `rows [P, D]`."""
        for name, view in self.layout.views(rows[first : self.models], self.entries).items():
            view.copy_(self.tensors[name][first:])

    def shrunk(self, models: int) -> Blocks:
        """The first so many models."""
        made = Blocks(self.layout, self.entries, self.flat, models)
        for name, t in made.tensors.items():
            t.copy_(self.tensors[name][:models])
        return made
