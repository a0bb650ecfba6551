"""The answer in a few sentences: which method is best for whom, what comes next, and is the difference noise?

A difference between two methods is *more than noise* beyond twice its standard error, sqrt(c^2 + s_a^2 / k_a + s_b^2 /
k_b): c is its standard error between clients, s the standard deviation over k seeds. For the mean, c is that of the
clients' paired differences, each averaged over seeds: sqrt(var / n). For the worst client, c is the deviation of the
difference over draws with replacement of the clients and, where the metric counts right samples, of their test samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.table import Table

from coterie.contract.metric import Scale
from coterie.data.readers.tables.schema import scaled
from coterie.errors import counted
from coterie.evaluation.intervals import is_proportion
from coterie.evaluation.reading import measured, points, shortly, shown, unit
from coterie.evaluation.stages import ADAPTED, SEEN, SERVED
from coterie.report.screen import plain
from coterie.report.series import Floats, over_seeds
from coterie.report.table import Line, alone, by_method, fine_tuned, fine_tunes, label_of, rows, without_value
from coterie.running.folder import Folder
from coterie.running.outcome import DIVERGED, NOTHING, UNFINISHED, WORSE, gap
from coterie.running.result import Result
from coterie.running.runs import ALWAYS
from coterie.running.untrained import Level, level

BEYOND = 2.0
"""Standard errors that a difference must exceed to be more than noise."""
DRAWS = 400
"""Of clients and test samples, for the worst client."""


@dataclass(frozen=True)
class Case:
    """One line of the table with the clients behind it."""

    line: Line
    values: Floats  # [seeds, clients] test metric, NaN where a client has none
    samples: NDArray[np.int64]  # [clients] test samples

    @property
    def name(self) -> str:
        """Method and stage: FedAvg's adapted stage has a name of its own."""
        fine = self.line.stage == ADAPTED and fine_tunes(self.line.method)
        return self.line.label if fine else f"{self.line.label} ({self.line.stage})"

    @property
    def scale(self) -> Scale:
        return self.line.scale


Number = Callable[[Case], float]
Hint = tuple[str, str]
"""What to do, and what where columns of numbers were scaled already."""


@dataclass(frozen=True)
class Measure:
    """What methods are ranked by: a number of a case, its deviation over seeds, and its error between clients."""

    what: str
    of: Number
    spread: Number
    error: Callable[[Case, Case], float]

    def ahead(self, a: Case, b: Case) -> float:
        return a.scale.sign * (self.of(a) - self.of(b))

    def best(self, cases: Sequence[Case]) -> Case:
        return max(cases, key=lambda case: case.scale.sign * self.of(case))

    def noise(self, a: Case, b: Case) -> float:
        """The standard error of the difference of two cases, between clients and, of several, between seeds."""
        seeds = [0.0 if one.line.seeds < 2 else self.spread(one) ** 2 / one.line.seeds for one in (a, b)]
        return math.sqrt(self.error(a, b) ** 2 + sum(seeds))

    def beyond(self, a: Case, b: Case) -> bool | None:
        """Whether a leads b by more than noise; None where it does between clients and there is one seed only."""
        ahead = self.ahead(a, b)
        if math.isinf(ahead):
            return ahead > 0
        clear = ahead > BEYOND * self.noise(a, b)
        return None if clear and min(a.line.seeds, b.line.seeds) < 2 else clear


def answer(results: Sequence[Result], unfinished: int = 0) -> dict[str, Any]:
    """`headline`, `sentences` (on the mean and on the worst client), `caveat` and `warnings` where there are such.

    `mean` and `worst` are what the page shows first; a method is called best in the headline and the sentences only.
    """
    found = cases(results)
    if not found:
        return {"headline": NO_DATA, "sentences": [], "caveat": "", "warnings": []}
    able = ranked(found)
    mean, worst = (measure.best(able or found) for measure in (MEAN, WORST))
    hopeless, warnings = troubles(results, found)
    return {
        "headline": hopeless or _headline(mean, found), "warnings": warnings,
        "sentences": [] if hopeless else [_sentences(measure, found) for measure in (MEAN, WORST)],
        "caveat": caveat(found, unfinished),
        "mean": [mean.line.method, mean.line.stage], "worst": [worst.line.method, worst.line.stage],
    }


def verdict(results: Sequence[Result]) -> str:
    """The same for the terminal, a line for each of them; with one method only, what is wrong with it or nothing."""
    found = cases(results)
    if not found:
        return NO_DATA
    hopeless, warnings = troubles(results, found)
    said = [*([hopeless] if hopeless else []), *warnings]
    if len({case.line.method for case in found}) < 2:
        return " ".join([*said, *without_value([case.line for case in found])])
    if hopeless:
        return "\n".join([*said, *without_value([case.line for case in found])])
    said += [_sentences(measure, found) for measure in (MEAN, WORST)]
    said += _going_on(sum(not result.finished for result in results))
    if min(case.line.seeds for case in found) < 2:
        said.append("With one seed, the noise between seeds is unknown.")
    return "\n".join([*said, *_clients_only(found), *without_value([case.line for case in found])])


def ranked(found: Sequence[Case]) -> list[Case]:
    """Those that may be called best: they learned something, and did not diverge; none while one is behind others."""
    if any(case.line.outcome == UNFINISHED for case in found):
        return []
    return [case for case in found if case.line.ranked]


def troubles(results: Sequence[Result], found: Sequence[Case]) -> tuple[str, list[str]]:
    """A sentence where no method may be called best, and sentences on what went wrong and what to do about it."""
    against, scale = level(results, found[0].scale), found[0].scale
    if against is not None and against.perfect:
        return ("Every client's test data are of one class, its most frequent one: they cannot tell methods apart.",
                [*_went_wrong(found), *_retried(results)])
    if against is not None and against.equal:
        return ("Every client's test targets are the mean of its training targets, as where all targets are equal: a "
                "constant answer is exact, and they cannot tell methods apart.",
                [*_went_wrong(found), *_retried(results)])
    able = ranked(found)
    what = "method" if len({case.line.method for case in found}) > 1 else "stage"
    if not able:
        useless = HINT if {NOTHING, WORSE} & {case.line.outcome for case in found} else None
        return (_hopeless(found, what, against),
                [*_went_wrong(found), *_hint(found, results, useless), *_retried(results)])
    warnings = []
    best = MEAN.best(able)
    if against is not None:
        known = gap(best.values, against, scale.sign)
        values = over_seeds(best.values)[: len(against.own)]
        error = paired_error(values, against.own[: len(values)])
        if known is not None and known[0] <= BEYOND * error:
            said = f"{against.words} ({shortly(scale, known[1])}{unit(scale)})"
            warnings.append(f"The best, {best.name}, is within noise between clients of {said}.")
    useless = HINT if any(case.line.outcome == NOTHING for case in found) else None
    return "", [*warnings, *_went_wrong(found), *_hint(found, results, useless), *_retried(results)]


def _hopeless(found: Sequence[Case], what: str, against: Level | None) -> str:
    kinds = {case.line.outcome for case in found}
    if kinds == {DIVERGED}:
        return f"Every {what} diverged, so none is best."
    if UNFINISHED in kinds:
        return "Runs are not finished and stand at different rounds, or at none, so none is best yet."
    finite = [case for case in found if case.line.outcome != DIVERGED]
    beside = None if against is None else gap(MEAN.best(finite).values, against, found[0].scale.sign)
    if against is None or beside is None or beside[0] > against.slack:
        return f"No {what} learned anything, so none is best."
    scale = found[0].scale
    return f"No {what} does better than {against.words} ({shortly(scale, beside[1])}{unit(scale)})."


def _went_wrong(found: Sequence[Case]) -> list[str]:
    """What became of those that are not ranked, and of those that diverged later: one sentence for all alike."""
    said: dict[str, list[str]] = {}
    for case in found:
        if case.line.why:
            said.setdefault(case.line.why, []).append(case.name)
    return [f"{_listed(names)} {why}." for why, names in said.items()]


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def _hint(found: Sequence[Case], results: Sequence[Result], otherwise: Hint | None) -> list[str]:
    """What to do about divergence, where no smaller learning rate was found by trying, or else this."""
    if any(note.get("fine") for result in results for note in result.notes):
        return []
    said = LOWER if any(case.line.outcome == DIVERGED for case in found) else otherwise
    return [said[scaled(_recipe(results[0]))]] if said else []


def _recipe(result: Result) -> Mapping[str, Any]:
    """How the federation of a run was made."""
    if result.folder is not None and (result.folder / "config.json").is_file():
        return Folder(result.folder).config().get("federation") or {}
    return {} if result.simulation is None else result.simulation.federation.recipe


def _retried(results: Sequence[Result], most: int = 3) -> list[str]:
    """What the runs noted of themselves while they went on, a few of them."""
    noted = [f"{label_of(result.method, SERVED)}, seed {result.seed}, {note['text']}"
             for result in results for note in result.notes]
    more = [f"So did {counted(len(noted) - most, 'more run')}."] if len(noted) > most else []
    return [*noted[:most], *more]


HINT: Hint = ("Scale the inputs or change the learning rate.", "Change the learning rate, or allow more rounds.")
LOWER: Hint = ("Lower the learning rate (--set lr=...) or scale the inputs.", "Lower the learning rate (--set lr=...).")


def cases(results: Sequence[Result], stages: Sequence[str] = SEEN) -> list[Case]:
    """Every line of the table that has test data, with its clients; `stages` may be those of unseen clients."""
    runs = by_method(results)
    most = 1 + max(int(scores.clients.max()) for run in results for e in run.history for scores in e.stages.values())
    found = []
    for line in rows(results, stages=stages):
        values, samples = np.full((line.seeds, most), np.nan), np.zeros(most, dtype=np.int64)
        for own, run in zip(values, runs[line.method]):
            scores = run.at(line.stage)
            own[scores.clients], samples[scores.clients] = scores.counted(scores.test), scores.samples
        if not math.isnan(line.mean):
            found.append(Case(line, values, samples))
    return found


def served_worst(results: Sequence[Result], most: int = 3) -> Table | None:
    """The clients that the best method serves worst, and what Local and FedAvg, as served, give them; None where no
    method may be called best."""
    found = cases(results)
    if not ranked(found):
        return None
    best = MEAN.best(ranked(found))
    values = over_seeds(best.values)
    order = [i for i in np.argsort(best.scale.sign * values, kind="stable") if not np.isnan(values[i])][:most]
    beside = [case for case in found if case.line.method in ALWAYS and case.line.stage == SERVED]
    columns = [best, *(case for case in beside if case is not best)]
    title = f"served worst by {best.name}: test {measured(best.scale)}"
    table = Table(title=plain(title), title_style="bold", title_justify="left", box=box.SIMPLE_HEAD,
                  padding=(0, 1, 0, 0), show_edge=False, pad_edge=False, min_width=len(title))
    table.add_column("client", overflow="fold", max_width=40)
    for name in ("test samples", *(case.name for case in columns)):
        table.add_column(plain(name), justify="right")
    names = results[0].names or tuple(map(str, range(len(values))))
    for i in order:
        cells = [shortly(case.scale, float(over_seeds(case.values)[i])) for case in columns]
        table.add_row(plain(names[i]), str(best.samples[i]), *cells)
    return table


# -- noise -------------------------------------------------------------------------------------------------------------


def paired_error(a: Floats, b: Floats) -> float:
    """The standard error of the mean over clients of a - b: sqrt(var / n); 0 for one client, who is all there is."""
    apart = a - b
    apart = apart[np.isfinite(apart)]
    return math.sqrt(float(apart.var(ddof=1)) / len(apart)) if len(apart) > 1 else 0.0


def worst_error(a: Case, b: Case) -> float:
    """The deviation of worst(a) - worst(b) over draws of the clients and, for proportions, of their test samples."""
    both = np.flatnonzero(~np.isnan(over_seeds(a.values)) & ~np.isnan(over_seeds(b.values)))
    if not len(both) or not all(np.isfinite(np.where(np.isnan(one.values), 0, one.values)).all() for one in (a, b)):
        return 0.0
    rng = np.random.default_rng(0)  # the same runs, the same words
    drawn = np.empty((DRAWS, 2))
    for line in drawn:
        chosen = rng.choice(both, len(both))
        for k, one in enumerate((a, b)):
            moved = one.values[:, chosen]
            if is_proportion(one.scale):
                p, n = over_seeds(moved), np.maximum(one.samples[chosen], 1)
                moved = moved + rng.binomial(n, np.clip(p, 0, 1)) / n - p
            sign = one.scale.sign
            line[k] = sign * np.mean([np.nanmin(sign * seed) for seed in moved if not np.isnan(seed).all()])
    return float((drawn[:, 0] - drawn[:, 1]).std(ddof=1))


MEAN = Measure(
    "the mean over clients", lambda case: case.line.mean, lambda case: case.line.mean_spread,
    lambda a, b: paired_error(over_seeds(a.values), over_seeds(b.values)),
)
WORST = Measure("the worst client", lambda case: case.line.worst, lambda case: case.line.worst_spread, worst_error)
NO_DATA = "No client has test data, so there is nothing to compare."


# -- words -------------------------------------------------------------------------------------------------------------


def baselines(found: Sequence[Case]) -> dict[str, Case | None]:
    """FedAvg + fine-tune and Local as served, by the names used where they are missing."""
    lines = [case.line for case in found]
    wanted = {"fedavg + fine-tune": fine_tuned(lines), "local": alone(lines)}
    return {name: next((c for c in found if c.line is line), None) for name, line in wanted.items()}


def _absent(known: Mapping[str, Case | None]) -> list[str]:
    """The baselines that nothing can be compared with, and why: a method that diverged has no number."""
    missing = [name for name, case in known.items() if case is None]
    lost = [name for name, case in known.items() if case is not None and case.line.outcome == DIVERGED]
    return [
        *([f"{' and '.join(missing)} {'were' if len(missing) > 1 else 'was'} not run"] if missing else []),
        *([f"{' and '.join(lost)} diverged"] if lost else []),
    ]


def _usable(known: Mapping[str, Case | None]) -> list[Case]:
    return [case for case in known.values() if case is not None and case.line.outcome != DIVERGED]


def runner_up(winner: Case, found: Sequence[Case], measure: Measure) -> Case | None:
    """The best of another method, of those that learned something."""
    others = [case for case in ranked(found) if case.line.method != winner.line.method]
    return measure.best(others) if others else None


def _sentences(measure: Measure, found: Sequence[Case]) -> str:
    """The best, the runner-up, and the two baselines where they are neither."""
    winner = measure.best(ranked(found))
    scale, apart = winner.scale, points(winner.scale)
    said = f"For {measure.what}, {winner.name} is best with {shown(scale, measure.of(winner))}{unit(scale)}"

    def behind(other: Case) -> tuple[str, str]:
        return difference(scale, measure.of(winner), measure.of(other)), NOISE[measure.beyond(winner, other)]

    second = runner_up(winner, found, measure)
    if second is not None:
        far, noise = behind(second)
        said += f"; the runner-up, {second.name}, is "
        said += f"{far}{apart} behind, {noise}" if Decimal(far) else "level with it"
    said += "."
    known = baselines(found)
    rest = [case for case in _usable(known) if case is not winner and case is not second]
    words = [behind(case) for case in rest]
    if len(rest) == 2 and words[0][1] == words[1][1]:
        said += f" {rest[0].name} is {words[0][0]} and {rest[1].name} {words[1][0]}{apart} behind, both {words[0][1]}."
    elif rest:
        said += f" {rest[0].name} is {words[0][0]}{apart} behind ({words[0][1]})"
        said += f", {rest[1].name} {words[1][0]}{apart} ({words[1][1]})." if len(rest) == 2 else "."
    return said + "".join(f" {one}." for one in _absent(known))


NOISE: Mapping[bool | None, str] = {
    True: "more than noise", False: "within noise", None: "more than noise between clients"
}


def difference(scale: Scale, a: float, b: float) -> str:
    """|a - b| of the two numbers as `shown` rounds them, so that readers can check it, and in its notation."""
    texts = shown(scale, a), shown(scale, b)
    apart = abs(Decimal(texts[0]) - Decimal(texts[1]))
    return f"{float(apart):.2e}" if apart and any("e" in text for text in texts) else f"{apart:f}"


def _headline(winner: Case, found: Sequence[Case]) -> str:
    known = baselines(found)
    missing = " and ".join(name for name, case in known.items() if case is None)
    lost = " and ".join(name for name, case in known.items() if case is not None and case.line.outcome == DIVERGED)
    if missing and len({case.line.method for case in found}) == 1:
        return f"One method only: whether it pays cannot be said without {missing}."
    if missing:
        return f"{winner.name} leads, but whether it pays cannot be said without {missing}."
    if lost:
        return f"{winner.name} leads, but whether it pays cannot be said, as {lost} diverged."
    second = runner_up(winner, found, MEAN)
    clear = None if second is None else MEAN.beyond(winner, second)
    also = f"; within noise it cannot be told apart from {second.name}" if second is not None and clear is False else ""
    better = f"no method does better than {winner.name}{also}"
    if winner.line.method == "local":
        return f"Training alone is as good as anything here: {better}."
    if winner is known["fedavg + fine-tune"]:
        return f"Fine-tuning is as good as anything here: {better}."
    if winner.line.method == "fedavg":
        return f"One shared model is as good as anything here: {better}."
    beaten = {case.name: MEAN.beyond(winner, case) for case in known.values() if case is not None}
    even = [name for name, clear in beaten.items() if clear is False]
    if even:
        return f"{winner.name} leads, but within noise it cannot be told apart from {' and '.join(even)}."
    if None in beaten.values():
        return f"{winner.name} leads{also}; with one seed, noise between seeds is unknown."
    if also:
        return f"{winner.name} beats {' and '.join(beaten)} by more than noise{also}."
    return f"{winner.name} is best here, by more than noise."


def caveat(found: Sequence[Case], unfinished: int = 0) -> str:
    """What is not known: runs that go on, seeds, the noise of a metric, clients without a value."""
    parts = _going_on(unfinished)
    seeds = min(case.line.seeds for case in found)
    if seeds < 2:
        parts.append("With one seed, the noise between seeds is unknown; compare with --seeds 3 or more to know.")
    elif seeds < 3:
        parts.append("With two seeds the noise between seeds is known only roughly.")
    parts += _clients_only(found) if len({case.line.method for case in found}) > 1 else []
    return " ".join([*parts, *without_value([case.line for case in found])])


def _going_on(unfinished: int) -> list[str]:
    are = "runs are" if unfinished > 1 else "run is"
    return [f"{unfinished} {are} not finished; the numbers will change."] if unfinished else []


def _clients_only(found: Sequence[Case]) -> list[str]:
    """What the noise of the worst client leaves out where the metric is no count of test samples."""
    scale = found[0].scale
    if is_proportion(scale):
        return []
    return [f"For {scale.title}, the noise of the worst client is that between clients; how few test samples it has is "
            "not in it."]
