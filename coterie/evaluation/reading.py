"""How values of a metric are read: as text, with their unit, on an axis, and which of two is better.

Tables, sentences, charts and the page say the same of a `Scale`: shares in %, with 2 decimals for means and 1 for a
single client, and points between two of them; other values with 3 decimals and without a unit.
"""

from __future__ import annotations

import math
from decimal import ROUND_HALF_UP, Decimal
from typing import TypeVar

from coterie.contract.metric import Scale
from coterie.evaluation.score import Array

ABSENT = "-"

V = TypeVar("V", float, Array)


def number(value: float, decimals: int) -> str:
    """With so many decimals, halves away from zero: the one way of rounding of tables, sentences and the page."""
    if math.isnan(value):
        return ABSENT
    if abs(value) >= 1e5:
        return f"{value:.2e}"
    # 88.25 is 88.3 everywhere, also where it is computed as 88.24999999999999; the page does the same.
    return str(Decimal(f"{value:.9f}").quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_UP))


def scaled(scale: Scale, values: V) -> V:
    """As they are drawn and printed: shares in %."""
    return 100 * values if scale.percent else values


def shown(scale: Scale, value: float) -> str:
    """A mean over clients, without its unit."""
    return number(scaled(scale, value), 2 if scale.percent else 3)


def shortly(scale: Scale, value: float) -> str:
    """As `shown`, with the decimals that one client's few test samples deserve."""
    return number(scaled(scale, value), 1 if scale.percent else 3)


def unit(scale: Scale) -> str:
    """What follows a value."""
    return " %" if scale.percent else ""


def points(scale: Scale) -> str:
    """What follows a difference of two values."""
    return " points" if scale.percent else ""


def measured(scale: Scale) -> str:
    """What an axis or a title says: `accuracy in %`, `MSE`."""
    return f"{scale.title} in %" if scale.percent else scale.title


def direction(scale: Scale) -> str:
    """Which of two values is better."""
    return f"{'higher' if scale.higher else 'lower'} is better"
