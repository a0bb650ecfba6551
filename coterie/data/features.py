"""The features of a sample in words: what each is, its range and what is missing, for `coterie data`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.errors import counted, shortened

MOST = 40
"""Features that are listed unasked."""
NAME = 30
"""Letters of a name that are shown."""


@dataclass(frozen=True)
class Feature:
    """A column that became numbers of x: one number, or one 0/1 number for each of its categories."""

    name: str
    kind: str  # number, category, text, ...
    inputs: int = 1  # how many numbers of a sample it makes
    low: float | None = None
    high: float | None = None
    categories: int = 0
    missing: float = 0.0  # share of the rows, before anything was filled in or left out

    @property
    def range(self) -> str:
        """What it holds, in a few words."""
        if self.categories:
            return f"{self.categories} different, {counted(self.inputs, 'input')} of 0 or 1"
        if self.low is None or self.high is None:
            return counted(self.inputs, "input")
        if self.low == self.high:
            return f"{self.low:.6g} everywhere (constant)"
        return f"{self.low:.6g} to {self.high:.6g}"


def features_of(x: Tensor, names: Sequence[str] = ()) -> tuple[Feature, ...]:
    """What samples `[N, ...]` show by themselves.

    Flat numbers `[N, F]` are a feature each, with `names` where they have any; images `[N, C, H, W]` one for each
    channel, series `[N, C, L]` likewise, and whole numbers are tokens.
    """
    if not x.is_floating_point():
        shape = "x".join(str(n) for n in x.shape[1:])
        return (Feature(f"tokens {shape}", "text or codes", x[0].numel(), *_ends(x)),)
    if x.ndim == 2:
        called = names if len(names) == x.shape[1] else [f"x[{k}]" for k in range(x.shape[1])]
        low, high = x.amin(0).tolist(), x.amax(0).tolist()
        return tuple(Feature(name, "number", 1, *ends) for name, *ends in zip(called, low, high, strict=True))
    kind = "image" if x.ndim == 4 else "series" if x.ndim == 3 else "array"
    size = "x".join(str(n) for n in x.shape[2:])
    return tuple(Feature(f"channel {k}", f"{kind} {size}", x[0, k].numel(), *_ends(x[:, k]))
                 for k in range(x.shape[1]))


def _ends(x: Tensor) -> tuple[float, float]:
    """Least and largest value, some samples at a time: a set may lie in a file."""
    parts = [torch.stack(torch.aminmax(part)) for part in torch.split(x, 4096)]
    ends = torch.stack(parts)
    return float(ends[:, 0].min()), float(ends[:, 1].max())


def listed(features: Sequence[Feature], every: bool = False) -> str:
    """A table in 80 columns: name, type, range, missing. `every` lists more than MOST of them too."""
    shown = features if every else features[:MOST]
    inputs = sum(feature.inputs for feature in features)
    ranges = [said if len(said := feature.range) <= 24 else said.removesuffix(" of 0 or 1") for feature in shown]
    span = max([24, *map(len, ranges)])
    names = [shortened(feature.name, NAME - (span - 24)) for feature in shown]
    wide = max([len("feature"), *map(len, names)])
    lines = [f"{'feature':<{wide}}  {'type':<13}  {'range':<{span}}  missing"]
    for name, feature, said in zip(names, shown, ranges, strict=True):
        lines.append(f"{name:<{wide}}  {feature.kind:<13.13}  {said:<{span}}  {_share(feature.missing):>7}")
    if len(features) > len(shown):
        lines.append(f"and {counted(len(features) - len(shown), 'more feature')}; --each lists all of them.")
    if inputs != len(features):
        made = f"{counted(len(features), 'feature')} {'makes' if len(features) == 1 else 'make'}"
        lines.append(f"{made} {counted(inputs, 'input')}.")
    return "\n".join(lines)


def _share(missing: float) -> str:
    return "-" if not missing else f"{100 * missing:.1f} %" if missing >= 0.001 else "< 0.1 %"
