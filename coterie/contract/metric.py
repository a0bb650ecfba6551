"""What a metric is: sums over samples that add up, the number they give, and how people read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

Kind = Literal["classes", "numbers", "any"]
"""What a metric can score: class scores, numbers (regression), or both."""


@dataclass(frozen=True)
class Scale:
    """How the values of a metric are read, wherever they are shown: nothing else of the metric is needed for that."""

    name: str
    """As it is spelled and stored, e.g. `balanced_accuracy`."""
    title: str
    """As people write it, e.g. `balanced accuracy`."""
    higher: bool
    """Whether larger values are better."""
    percent: bool = False
    """Whether values are shares, shown in %."""

    @property
    def sign(self) -> int:
        """1 where larger is better, else -1."""
        return 1 if self.higher else -1


@dataclass(frozen=True)
class Metric:
    """Base of every metric. Subclasses are frozen dataclasses of options in files of `coterie/metrics`.

    `sums` is written for one client's batch and returns tensors that add up over batches, waves and sites; `value`
    makes the number of such sums, with any leading axes `[...]` (clients, models). Weight 0 marks padding.
    """

    name: ClassVar[str]
    title: ClassVar[str] = ""
    """As people write it; by default the name with spaces."""
    higher: ClassVar[bool] = True
    percent: ClassVar[bool] = False
    kind: ClassVar[Kind] = "any"

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" not in cls.__dict__:
            cls.name = cls.__name__.lower()

    @property
    def scale(self) -> Scale:
        """How its values are read."""
        return Scale(self.name, self.title or self.name.replace("_", " "), self.higher, self.percent)

    def sums(self, outputs: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]:
        """`outputs [B, ...]`, `y [B, ...]`, `weight [B]` -> tensors without the axis of samples."""
        raise NotImplementedError

    def value(self, sums: Mapping[str, Tensor]) -> Tensor:
        """`[..., *shape]` each -> `[...]`; NaN where the samples cannot say."""
        raise NotImplementedError
