"""The answer in a few sentences: does personalization pay here, which method is best for whom, and is it noise?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from coterie.report.table import Line, alone, fine_tuned, rows, shown
from coterie.result import Result

Number = Callable[[Line], float]


def answer(results: Sequence[Result], unfinished: int = 0) -> dict[str, Any]:
    """`headline`, `sentences` (on the mean and on the worst client) and `caveat`, empty where nothing limits them."""
    lines = [line for line in rows(results) if not math.isnan(line.mean)]
    if not lines:
        return {"headline": "No client has test data, so there is nothing to compare.", "sentences": [], "caveat": ""}
    mean, worst = _best(lines, lambda line: line.mean), _best(lines, lambda line: line.worst)
    sentences = [
        _sentence("the mean over clients", mean, lines, lambda line: line.mean, lambda line: line.mean_spread),
        _sentence("the worst client", worst, lines, lambda line: line.worst, lambda line: line.worst_spread),
    ]
    return {
        "headline": _headline(mean, lines), "sentences": sentences, "caveat": _caveat(lines, unfinished),
        "mean": [mean.method, mean.stage], "worst": [worst.method, worst.stage],
    }


def named(line: Line) -> str:
    """The method with its stage, where the label does not say it."""
    return line.label if line.label != line.method else f"{line.label} ({line.stage})"


def beyond(a: Line, b: Line, of: Number, spread: Number) -> bool | None:
    """Whether a is better than b by more than twice the standard error between seeds; None with one seed."""
    if min(a.seeds, b.seeds) < 2:
        return None
    error = math.sqrt(spread(a) ** 2 / a.seeds + spread(b) ** 2 / b.seeds)
    return _ahead(a, b, of) > 2 * error


def _ahead(a: Line, b: Line, of: Number) -> float:
    return (of(a) - of(b)) * (1 if a.higher_is_better else -1)


def _best(lines: Sequence[Line], of: Number) -> Line:
    return max(lines, key=lambda line: of(line) if line.higher_is_better else -of(line))


def _baselines(lines: Sequence[Line]) -> dict[str, Line | None]:
    return {"FedAvg + fine-tune": fine_tuned(lines), "Local": alone(lines)}


def _headline(winner: Line, lines: Sequence[Line]) -> str:
    known = {name: line for name, line in _baselines(lines).items() if line is not None}
    others = {name: line for name, line in known.items() if line is not winner}
    if len(known) < 2:
        missing = " and ".join(name for name, line in _baselines(lines).items() if line is None)
        if len({line.method for line in lines}) == 1:
            return f"One method only: whether it pays cannot be said without {missing}."
        return f"{named(winner)} leads, but whether it pays cannot be said without {missing}."
    if winner is known["Local"]:
        return "Training alone is best here: no shared model beats Local."
    if winner is known["FedAvg + fine-tune"]:
        return "FedAvg + fine-tune is the best here: no other method does better for the mean client."
    if winner.method == "fedavg":
        return "One shared model is the best here: personalization does not pay for the mean client."
    verdicts = {name: beyond(winner, line, lambda x: x.mean, lambda x: x.mean_spread) for name, line in others.items()}
    if None in verdicts.values():
        return f"{named(winner)} leads, with one seed: whether that is more than seed noise is unknown."
    if all(verdicts.values()):
        return f"{named(winner)} pays here: it beats FedAvg + fine-tune and Local beyond seed noise."
    equal = " and ".join(name for name, better in verdicts.items() if not better)
    return f"{named(winner)} leads, but {equal} {'do' if ' and ' in equal else 'does'} as well within seed noise."


def _sentence(what: str, winner: Line, lines: Sequence[Line], of: Number, spread: Number) -> str:
    unit = " %" if winner.higher_is_better else ""
    said = []
    for name, line in _baselines(lines).items():
        if line is None:
            said.append(f"{name} was not run")
        elif line is not winner:
            ahead = _ahead(winner, line, of)
            points = " points" if winner.higher_is_better else ""
            clear = beyond(winner, line, of, spread)
            noise = "" if clear is None else ", beyond seed noise" if clear else ", within seed noise"
            way = f"level with {name}" if ahead == 0 else f"{shown(winner, ahead)}{points} better than {name}"
            said.append(f"{way}{noise}")
    return f"Best for {what}: {named(winner)} with {shown(winner, of(winner))}{unit}; {'; '.join(said)}."


def _caveat(lines: Sequence[Line], unfinished: int) -> str:
    parts = []
    if unfinished:
        parts.append(f"{unfinished} run{'s are' if unfinished > 1 else ' is'} not finished; the numbers will change.")
    seeds = min(line.seeds for line in lines)
    if seeds < 2:
        parts.append("With one seed, the noise between seeds is unknown; compare with --seeds 3 or more to know.")
    elif seeds < 3:
        parts.append("With two seeds the noise between seeds is known only roughly.")
    return " ".join(parts)
