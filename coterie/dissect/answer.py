"""The answer in a sentence: how many bytes a client must keep for most of what personal parts can give.

The gain is what the best point is ahead of nothing personal, in one stage and by the metric that decides. It counts
only where it is more than noise, as in a comparison's verdict; points that diverged or learned nothing are never the
best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from coterie.dissect.points import NOTHING, Point
from coterie.evaluation.reading import number, points, shown, unit
from coterie.evaluation.stages import title
from coterie.report.verdict import NO_DATA, NOISE, Case, Measure, difference
from coterie.running.outcome import DIVERGED, UNFINISHED

SHARE = 0.95
"""Of the gain: so much is most of it."""
ROUNDING = 1e-9
"""Of the gain: differences of two numbers that are 95 % on paper are that here."""


@dataclass(frozen=True)
class Found:
    """A point with what was measured of it in one stage."""

    point: Point
    case: Case


@dataclass(frozen=True)
class Gain:
    """What of the model must be personal; `gain` is in the metric's own unit and larger is better."""

    sentence: str
    gain: float | None = None  # of the best over nothing; None where it is not known
    best: str = ""
    enough: str = ""  # of the points with most of the gain, the one of the fewest bytes; none without a gain
    personal: int | None = None  # its bytes
    share: float | None = None  # of the gain that it gives
    level: tuple[str, ...] = ()  # points of fewer bytes that cannot be told apart from it


def answer(found: Sequence[Found], measure: Measure) -> Gain:
    """The answer of the points in one stage, by the mean over clients or by the worst client."""
    base = next((one for one in found if one.point.name == NOTHING), None)
    if base is None:
        return Gain(NO_DATA)
    where = f"{title(base.case.line.stage)}, {measure.what}"
    if any(one.case.line.outcome == UNFINISHED for one in found):
        return Gain(f"Runs are not finished, so nothing can be said yet ({where}).")
    if base.case.line.outcome == DIVERGED:
        return Gain(f"What personal parts give cannot be said: the run with nothing personal diverged ({where}).")
    able = [one for one in found if one.case.line.ranked and one is not base]
    if not able:
        return Gain(f"Nothing to be gained: no personal part learned anything ({where}).")
    winner = measure.best([one.case for one in able])
    best = next(one for one in able if one.case is winner)
    gain, clear = measure.ahead(winner, base.case), measure.beyond(winner, base.case)
    numbers = f"{_number(measure, base)} with nothing personal, {_number(measure, best)} with {best.point.name}"
    if gain <= 0 or clear is False:
        how = "by more than noise" if gain > 0 else "as no personal part is better than none"
        return Gain(f"Nothing to be gained {how} ({where}: {numbers}).", gain, best.point.name)
    return _gained(measure, base, best, able, f"{where}: {numbers}, {NOISE[clear]}")


def _gained(measure: Measure, base: Found, best: Found, able: Sequence[Found], said: str) -> Gain:
    """The sentence where there is a gain."""
    gain = measure.ahead(best.case, base.case)
    shares = {one.point.name: measure.ahead(one.case, base.case) / gain for one in able}
    reach = [one for one in able if shares[one.point.name] >= SHARE - ROUNDING]
    enough = min(reach, key=lambda one: (one.point.personal, -shares[one.point.name]))
    share, personal = shares[enough.point.name], enough.point.personal
    given = "all" if share > 1 - ROUNDING else f"{number(100 * share, 0)} %"
    far = Decimal(difference(best.case.scale, measure.of(best.case), measure.of(base.case)))
    text = f"{personal:,} bytes a client ({enough.point.name}) give {given} of the gain of "
    text += f"{far}{points(base.case.scale)} ({said})."
    if measure.beyond(enough.case, base.case) is False:
        text += " Their own lead over nothing personal is within noise."
    level = [one.point for one in able if one.point.personal < personal
             and measure.beyond(enough.case, one.case) is False]
    if level:
        fewer = (f"{one.name} ({one.personal:,} bytes, {number(100 * shares[one.name], 0)} %)" for one in level)
        text += f" Within noise, fewer bytes do as well: {', '.join(fewer)}."
    even = [one.point.name for one in able if one is not best and _number(measure, one) == _number(measure, best)]
    if even:
        text += f" Level with {best.point.name}: {', '.join(even)}."
    return Gain(text, gain, best.point.name, enough.point.name, personal, share, tuple(one.name for one in level))


def share_of_gain(found: Sequence[Found], one: Found, measure: Measure) -> float | None:
    """What a point gives of the gain; None where there is none that is more than noise."""
    known = answer(found, measure)
    base = next((other for other in found if other.point.name == NOTHING), None)
    if not known.enough or not known.gain or base is None or not one.case.line.ranked:
        return None
    return measure.ahead(one.case, base.case) / known.gain


def _number(measure: Measure, one: Found) -> str:
    scale = one.case.scale
    return f"{shown(scale, measure.of(one.case))}{unit(scale)}"
