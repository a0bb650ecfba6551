"""What an optimizer is: an element-wise rule that turns gradients into steps, for clients and for the server alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from torch import Tensor

from coterie.options import Positive, Range, require_ranges

Number = float | Tensor
"""One number for all, or a tensor that broadcasts over what it is used with."""
Decay = Annotated[float, Range(at_least=0, at_most=1000)]
"""A weight decay; the squares of gradients that contain a much larger one leave float32."""


@dataclass(frozen=True)
class Optimizer:
    """Base of every optimizer. Subclasses are frozen dataclasses of options in files of `coterie/optimizers`.

    A step is element-wise, so that it works on any tensor: one layer of one model, or the rows of a whole federation.
    Its memory is `slots`, tensors like the one that is stepped, 0 at first. With a learning rate of 0 nothing moves
    but the memory.
    """

    lr: Positive | None = field(default=None, kw_only=True)
    """Step size at the server; clients step by the run's learning rate."""
    keep: bool = field(default=False, kw_only=True)
    """Whether a client keeps the memory from round to round; otherwise it is fresh each time."""

    name: ClassVar[str]
    cite: ClassVar[str] = ""
    at_server: ClassVar[Mapping[str, Any]] = {}
    """Options whose defaults differ at the server; `lr` is one of them."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" not in cls.__dict__:
            cls.name = cls.__name__.lower()

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of its memory."""
        return ()

    @property
    def running(self) -> tuple[str, float] | None:
        """Where a step is `v <- share * v + gradient` and `row <- row - lr * v`, the slot v and the share.

        Engines may then add gradients to v where they compute them, instead of calling `step`.
        """
        return None

    @property
    def plain(self) -> bool:
        """Whether a step is `row - lr * gradient` and nothing is remembered."""
        return False

    def __post_init__(self) -> None:
        require_ranges(self)
        self.check()

    def check(self) -> None:
        """Raise a CoterieError for options that do not go together; each one's range is declared beside it."""

    def step(self, row: Tensor, gradient: Tensor, state: Mapping[str, Tensor], lr: Number, count: Number) -> None:
        """Move `row` and `state`, in place, by one step; the `gradient` may be overwritten.

        `count` is the number of this step, from 1. `lr` and `count` are numbers, or tensors that broadcast.
        """
        raise NotImplementedError
