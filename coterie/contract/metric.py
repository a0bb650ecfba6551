"""What a metric is: sums over samples that add up, the number they give, and how people read it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.contract.tokens import one_by_one
from coterie.options import require_ranges

Kind = Literal["classes", "numbers", "any"]
"""What a metric can score: class scores, numbers (regression), or both."""
Counted = Literal["all", "some", "signed"]
"""How a sum counts samples: whole numbers of at least 0, to which every sample adds the same in all; such numbers that
add up to the samples at most; numbers of any sign whose sizes do."""
Held = NDArray[np.int64] | Sequence[Tensor]
"""The labels that clients hold: samples `[clients, classes]`, or the targets `[n, ...]` of each client."""


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
    by_median: bool = field(default=False, compare=False)
    """Whether rounds are compared by the median of clients' validation values instead of their mean."""

    @property
    def sign(self) -> int:
        """1 where larger is better, else -1."""
        return 1 if self.higher else -1


@dataclass(frozen=True)
class Tally:
    """Sums over samples that add up over batches, waves and sites. Subclasses are frozen dataclasses of options."""

    name: ClassVar[str]
    counts: ClassVar[Mapping[str, Counted]] = {}
    """Which of its sums count samples, so that what somebody tells of them can be compared with how many he has."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" not in cls.__dict__:
            cls.name = cls.__name__.lower()

    def __post_init__(self) -> None:
        require_ranges(self)

    @property
    def label(self) -> str:
        """The name, with the options that are not as usual: `top_k(k=3)`."""
        differ = [f.name for f in fields(self) if f.repr and getattr(self, f.name) != f.default]
        given = [f"{name}={getattr(self, name)}" for name in differ]
        return f"{self.name}({','.join(given)})" if given else self.name

    @property
    def tally(self) -> str:
        """What its sums are called; metrics with the same word here have the same sums, which are taken once."""
        return self.label

    def sums(self, outputs: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]:
        """`outputs [B, ...]` (float64), `y [B, ...]`, `weight [B]` of one client -> tensors without the axis B.

        A sample counts `weight` times; 0 marks padding, whose outputs may be anything.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Metric(Tally):
    """Base of every metric. Subclasses are frozen dataclasses of options in files of `coterie/metrics`.

    `sums` is written for one client's batch and returns tensors that add up over batches, waves and sites; `value`
    makes the number of such sums, with any leading axes `[...]` (clients, models).
    """

    title: ClassVar[str] = ""
    """As people write it; by default the name with spaces."""
    higher: ClassVar[bool] = True
    percent: ClassVar[bool] = False
    kind: ClassVar[Kind] = "any"
    by_class: ClassVar[bool] = False
    """Whether the value is one number a class, `[..., classes]`; such a metric is watched and decides nothing."""
    binned: ClassVar[bool] = False
    """Whether the value is that of binned scores, at most `bound` away from that of the scores themselves."""

    @property
    def scale(self) -> Scale:
        """How its values are read."""
        return Scale(self.label, self.title or self.label.replace("_", " "), self.higher, self.percent)

    @property
    def values(self) -> tuple[float, float]:
        """The least and the largest value that it may have: of shares 0 and 1, of errors (`higher` is false) at least
        0, else any; one with other bounds says so."""
        return (0.0, 1.0) if self.percent else (-math.inf if self.higher else 0.0, math.inf)

    def check(self, classes: int) -> None:
        """Raise a CoterieError where data of so many classes (0 for regression) cannot be scored."""

    def value(self, sums: Mapping[str, Tensor]) -> Tensor:
        """`[..., *shape]` each -> `[...]`; NaN where the samples cannot say."""
        raise NotImplementedError

    def bound(self, sums: Mapping[str, Tensor]) -> Tensor:
        """How far the value may be from that of the scores themselves `[...]`: 0 unless it is `binned`."""
        return torch.zeros_like(self.value(sums))

    def constant(self, known: Held, scored: Held) -> NDArray[np.float64]:
        """What answering without a look at the input scores on the labels `scored`: `[clients]`, NaN without any.

        The answer is what the labels `known`, usually the training data, say by themselves: of classes their shares
        as probabilities, so that the most frequent class is chosen, of numbers their `centre`. Without any such, it is
        equal shares and 0.
        """
        found = [self.value(_whole(self.sums(*self._blind(k, s)))) for k, s in zip(known, scored, strict=True)]
        return np.array([value.numpy() for value in found], dtype=np.float64)

    def centre(self, targets: Tensor) -> Tensor:
        """The constant answer for targets `[n, ...]` that this metric likes best, `[...]`: their mean."""
        return targets.mean(0)

    def _blind(
        self, known: NDArray[np.int64] | Tensor, scored: NDArray[np.int64] | Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs, labels and weights of one client's constant answer; of classes, a line for each with its samples."""
        if isinstance(known, np.ndarray):  # [classes] samples
            shares = torch.from_numpy(known).double() / max(int(known.sum()), 1)
            outputs = shares.log() if known.any() else torch.zeros_like(shares)
            there = np.flatnonzero(scored)  # of a vocabulary's words, a client's text has a few
            often = torch.tensor(scored[there], dtype=torch.float64)
            return outputs.expand(len(there), -1), torch.from_numpy(there), often
        centre = self.centre(known.double()) if len(known) else torch.zeros(scored.shape[1:], dtype=torch.float64)
        outputs = centre.expand(len(scored), *centre.shape) if centre.ndim else centre.expand(len(scored), 1)
        return outputs, torch.as_tensor(scored), torch.ones(len(scored), dtype=torch.float64)


def _whole(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.double() for name, t in sums.items()}


def tallied(tallies: Iterable[Tally], outputs: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """The sums of one client's batch, float64, by `tally.sum`; what several share is taken once.

    Where y are classes of tokens, a tally gets every token as a sample.
    """
    exact, y, weight = one_by_one(outputs.double(), y, weight.double())
    once = {tally.tally: tally for tally in tallies}
    found = {word: tally.sums(exact, y, weight) for word, tally in once.items()}
    return {f"{word}.{name}": t.double() for word, sums in found.items() for name, t in sums.items()}


def sums_of(tally: Tally, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One tally's own among the sums of several."""
    return {name.removeprefix(f"{tally.tally}."): t for name, t in sums.items() if name.startswith(f"{tally.tally}.")}


@dataclass(frozen=True)
class Scored:
    """What clients are scored by, beside the loss and the accuracy that are always taken."""

    metrics: tuple[Metric, ...] = ()
    """On test and on validation data."""
    kept: tuple[Tally, ...] = ()
    """Whose sums over the test data are kept as well."""
