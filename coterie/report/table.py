"""The comparison as a table, as a file and in words: every method and stage, over clients and over seeds."""

from __future__ import annotations

import csv
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar, get_args

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from coterie import files
from coterie.contract.metric import Scale
from coterie.errors import CoterieError, counted, visible
from coterie.evaluation.reading import direction, measured, number, shortly, shown
from coterie.evaluation.stages import ADAPTED, SEEN, SERVED, unseen
from coterie.evaluation.summary import since_arrival, summarise
from coterie.files import csv_text
from coterie.report.federations import one_federation
from coterie.report.screen import markdown_text, plain
from coterie.running.outcome import DIVERGED, NOTHING, UNFINISHED, WORSE, Kind, outcome
from coterie.running.result import Result, When
from coterie.running.untrained import Level, level

Cell = TypeVar("Cell")
NAN = float("nan")
MEAN = "mean ± seeds"
MARKS: Mapping[Kind, str] = {DIVERGED: "✗", UNFINISHED: "…", NOTHING: "∅", WORSE: "▽"}
"""What stands before the mean of a method that is not ranked."""
AGES = ((0, 0), (1, 2), (3, 5), (6, 10), (11, 20), (21, 50), (51, 100), (101, 0))
"""Spans of rounds since a client's arrival; the last one has no end."""


@dataclass(frozen=True)
class Line:
    """One method in one stage. Numbers over clients are means over seeds; what is not known is NaN."""

    method: str  # its spelling
    label: str  # what people call it: FedAvg's adapted stage is FedAvg + fine-tune
    stage: str
    when: When
    scale: Scale  # of the metric that decides
    seeds: int
    mean: float  # over clients
    mean_spread: float  # standard deviation of `mean` over seeds
    pooled: float  # over all test samples
    client_std: float
    worst: float
    worst_spread: float  # standard deviation of `worst` over seeds
    lowest: float  # mean of the worst tenth of the clients
    best: float
    jain: float
    left_out: int  # clients without a value, which no other number counts
    diverged: int  # clients whose loss is not finite, at the round reported or the last one: the most of a seed
    outcome: Kind  # whether it diverged, learned nothing or is behind, which is then in no ranking; else empty
    why: str  # the same in words
    unseen: float  # mean over clients kept out of training, in the same stage
    epsilon: float  # spent by all rounds, where the aggregator is private
    bytes_each_round: float  # per client, down and up
    seconds: float
    rounds: tuple[int, ...]  # the round reported, seed by seed
    steps: float  # local steps a client spends to make the model that is scored
    printed: bool  # whether the method's paper printed this stage

    @property
    def ranked(self) -> bool:
        """Whether it may be called best: it learned something."""
        return not self.outcome

    @property
    def trains_before_use(self) -> bool:
        return self.stage == SERVED and self.steps > 0

    def record(self) -> dict[str, Any]:
        """Plain values by column, for files and for the page; the metric is its name and its direction."""
        found: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            found |= {"metric": value.name, "higher_is_better": value.higher} if field.name == "scale" else {
                field.name: value
            }
        return found


def rows(
    results: Sequence[Result], when: When = "chosen", scale: Scale | None = None, stages: Sequence[str] = SEEN
) -> list[Line]:
    """One line for each stage and method: first all methods as served, then all as adapted.

    With another `scale` the same rounds are seen by that metric; the one that decides has chosen them.
    """
    runs = by_method(results)
    against, furthest = level(results, scale_of(results[0])), max(run.reached for run in results)
    found = [
        _line(group, stage, when, scale or scale_of(results[0]), against, furthest)
        for stage in stages
        for group in runs.values()
        if all(stage in run.stages for run in group)
    ]
    if not found:
        raise CoterieError(f"there is no evaluation of the stage {' or '.join(stages)} to show.")
    return found


def by_method(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The runs of each method, one for each seed, in the order given."""
    if not results:
        raise CoterieError("there is no result to compare; train a method first.")
    one_federation(results)
    runs: dict[str, list[Result]] = {}
    for result in results:
        same = runs.setdefault(result.method, [])
        if result.seed in [other.seed for other in same]:
            raise CoterieError(f"{result.method} was given twice with seed {result.seed}; give each seed once.")
        same.append(result)
    scales = list(dict.fromkeys(scale_of(result) for result in results))
    if len(scales) > 1:
        first, second = (scale.title for scale in scales[:2])
        raise CoterieError(f"{first} and {second} cannot be compared; give results of one metric only.")
    return runs


def scale_of(result: Result) -> Scale:
    """Of the metric that decides in a run."""
    return result.at(result.stages[0], "last").scale


def label_of(method: str, stage: str) -> str:
    """FedAvg's model after local training is, by definition, FedAvg + fine-tune; of a file only its name is shown."""
    if stage == ADAPTED and fine_tunes(method):
        return visible(f"{method} + fine-tune")
    return visible(re.sub(r"^.*/(?=[^/]+\.py:)", "", method))


def fine_tunes(method: str) -> bool:
    """Whether the method's adapted stage is FedAvg + fine-tune."""
    return _name(method) == "fedavg"


def comparison(results: Sequence[Result], when: When = "chosen") -> Table:
    """The table people read; the best mean and the best worst client of each stage are bold, where they stand out."""
    lines = rows(results, when)
    extra = _extra(lines)
    table = Table(
        title=plain(_title(lines)), caption=Text(_caption(lines, extra)), title_style="bold", caption_style="dim",
        title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False,
        pad_edge=False,
    )
    table.add_column("method", overflow="fold", min_width=10, max_width=36)
    table.add_column("stage", no_wrap=True)
    for name in _cells(lines[0], extra):
        if name != "method":
            table.add_column(name, justify="right", no_wrap=True)
    for group in _stages(lines):
        for line in group:
            method, *cells = _marked(line, group, extra, plain, lambda text: Text(text, "bold"))
            table.add_row(method, line.stage, *cells, end_section=line is group[-1])
    return table


def without_value(lines: Sequence[Line]) -> list[str]:
    """How many clients the numbers of a metric say nothing about: AUROC, for one, needs test samples of two classes."""
    most = max((line.left_out for line in lines if not math.isnan(line.mean)), default=0)
    if not most:
        return []
    have, are, title = *(("has", "is") if most == 1 else ("have", "are")), lines[0].scale.title
    return [f"{counted(most, 'client')} {have} no {title} on test data and {are} left out of its numbers."]


def beside_paper(results: Sequence[Result], printed: Mapping[str, str]) -> Table | None:
    """What a paper printed beside our means, for methods that are in both; None where there is none."""
    lines = {(_plainly(line.method), line.stage): line for line in rows(results)}
    methods = [name for name in printed if (name, SERVED) in lines]
    if not methods:
        return None
    table = Table(
        title="published: the paper's numbers, on its own split of the data and by its own rules", title_style="bold",
        caption="Same recipe, other clients: read them side by side, not as a difference.", caption_style="dim",
        title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False,
        pad_edge=False, min_width=80,
    )
    for name in ("method", "paper", *(f"here, {stage}" for stage in SEEN)):
        table.add_column(name, justify="left" if name == "method" else "right")
    for name in methods:
        ours = [lines[name, stage] for stage in SEEN]
        table.add_row(plain(name), plain(str(printed[name])), *(shown(line.scale, line.mean) for line in ours))
    return table


def _plainly(method: str) -> str:
    """`fedrep:pfllib+confree:c=0.3` -> `fedrep+confree`."""
    return "+".join(part.partition(":")[0] for part in method.split("+"))


def newcomers(results: Sequence[Result], stage: str = SERVED) -> Table | None:
    """How clients that arrived during training fare, by the rounds since their arrival; None where nobody did.

    A cell is the mean over these clients, the evaluations that found them so long after their arrival, and the seeds.
    """
    found = {method: by_age(runs, stage) for method, runs in by_method(results).items()}
    present = [span for span in AGES if any(span in cells for cells in found.values())]
    if not present:
        return None
    scale = scale_of(results[0])
    title = f"newcomers, {stage}: test {measured(scale)} by rounds since their arrival"
    table = Table(title=plain(title), title_style="bold", title_justify="left", box=box.SIMPLE_HEAD,
                  padding=(0, 1, 0, 0), show_edge=False, pad_edge=False, min_width=len(title))
    table.add_column("method", overflow="fold", max_width=36)
    for low, high in present:
        table.add_column(str(low) if low == high else f"{low}-{high}" if high else f"{low}+", justify="right")
    for method, by_span in found.items():
        cells = [shortly(scale, by_span.get(span, NAN)) for span in present]
        table.add_row(plain(label_of(method, stage)), *cells)
    return table


def by_age(runs: Sequence[Result], stage: str) -> dict[tuple[int, int], float]:
    """Span of rounds since arrival -> mean over newcomers, evaluations and seeds; (low, 0) has no end."""
    points = [point for run in runs for e in run.history for point in since_arrival(e, run.arrives).get(stage, [])]
    found = {}
    for low, high in AGES:
        last = high if high or not low else math.inf
        inside = [(count, mean) for age, count, mean in points if low <= age <= last]
        if inside:
            found[low, high] = sum(n * mean for n, mean in inside) / sum(n for n, _ in inside)
    return found


def markdown(results: Sequence[Result], when: When = "chosen") -> str:
    """The same table as Markdown, one for each stage, with the title above and the legend below."""
    lines = rows(results, when)
    extra = _extra(lines)
    several = any(line.seeds > 1 for line in lines)
    title = markdown_text(_title(lines))
    parts = [f"{title[0].upper()}{title[1:]}."]
    for group in _stages(lines):
        heads = ["mean" if name == MEAN and not several else name for name in _cells(group[0], extra)]
        cells = [_marked(line, group, extra, markdown_text, "**{}**".format) for line in group]
        parts += [f"**{group[0].stage}**", markdown_table(heads, cells, "--:")]
    return "\n\n".join([*parts, _caption(lines, extra)]) + "\n"


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]], alignment: str = "---") -> str:
    """A table in Markdown; the alignment is that of the columns behind the first."""
    lines = [heads, ["---", *[alignment] * (len(heads) - 1)], *([cell.replace("|", "\\|") for cell in r] for r in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def to_csv(results: Sequence[Result], path: str | Path) -> Path:
    """Every number of the comparison, at the chosen and at the last round; what is not known stays empty."""
    lines = [line for when in get_args(When) for line in rows(results, when)]
    text = StringIO(newline="")
    writer = csv.DictWriter(text, list(lines[0].record()))
    writer.writeheader()
    for line in lines:
        writer.writerow({name: _plain(value) for name, value in line.record().items()})
    files.write_text(Path(path), text.getvalue())
    return Path(path)


# -- numbers -----------------------------------------------------------------------------------------------------------


def _line(
    runs: Sequence[Result], stage: str, when: When, scale: Scale, against: Level | None, furthest: int
) -> Line:
    scores = [run.at(stage, when).by(scale) for run in runs]
    found = [summarise(one) for one in scores]
    became = outcome(runs, stage, when, against, furthest)

    def average(name: str) -> float:
        return float(np.mean([getattr(one, name) for one in found]))

    return Line(
        method=runs[0].method,
        label=label_of(runs[0].method, stage),
        stage=stage,
        when=when,
        scale=scale,
        seeds=len(runs),
        mean=average("mean"),
        mean_spread=_spread([one.mean for one in found]),
        pooled=average("pooled"),
        client_std=average("std"),
        worst=average("worst"),
        worst_spread=_spread([one.worst for one in found]),
        lowest=average("lowest"),
        best=average("best"),
        jain=average("jain"),
        left_out=max(one.left_out for one in found),
        diverged=became.clients,
        outcome=became.kind,
        why=became.words,
        unseen=_unseen(runs, unseen(stage), when, scale),
        epsilon=max(run.epsilon for run in runs),
        bytes_each_round=float(np.mean([run.bytes_each_round for run in runs])),
        seconds=float(np.mean([run.seconds for run in runs])),
        rounds=tuple(run.round_of(stage, when) for run in runs),
        steps=float(np.mean([one.steps.mean() for one in scores])),
        printed=runs[0].printed == stage,
    )


def _unseen(runs: Sequence[Result], stage: str, when: When, scale: Scale) -> float:
    if not all(stage in run.stages for run in runs):
        return NAN
    return float(np.mean([summarise(run.at(stage, when).by(scale)).mean for run in runs]))


def _spread(values: Sequence[float]) -> float:
    with np.errstate(invalid="ignore"):  # an infinite one leaves no spread
        return float(np.std(values, ddof=1)) if len(values) > 1 else NAN


def _name(method: str) -> str:
    return re.split(r"[:+]", method)[0]


# -- the table ---------------------------------------------------------------------------------------------------------


def _stages(lines: Sequence[Line]) -> list[list[Line]]:
    """The lines of each stage."""
    return [list(group) for _, group in itertools.groupby(lines, key=lambda line: line.stage)]


def _extra(lines: Sequence[Line]) -> tuple[str, ...]:
    """The columns that are shown where a line has something to say."""
    return tuple(name for name in ("unseen", "epsilon") if not all(math.isnan(getattr(line, name)) for line in lines))


def _cells(line: Line, extra: Sequence[str]) -> dict[str, str]:
    """What a table shows of a line, by column; the stage is said otherwise."""
    marks = ("·t" if line.trains_before_use else "") + ("†" if line.printed else "")
    spread = f" ± {shown(line.scale, line.mean_spread)}" if line.seeds > 1 else ""
    return {
        "method": f"{line.label} {marks}".strip(),
        MEAN: (f"{MARKS[line.outcome]} " if line.outcome else "") + shown(line.scale, line.mean) + spread,
        "std": shortly(line.scale, line.client_std),
        "worst": shortly(line.scale, line.worst),
        "low10": shortly(line.scale, line.lowest),
        "Jain": number(line.jain, 3),
        **({"unseen": shortly(line.scale, line.unseen)} if "unseen" in extra else {}),
        **({"epsilon": number(line.epsilon, 2)} if "epsilon" in extra else {}),
        "bytes": human_bytes(line.bytes_each_round),
        "time": human_seconds(line.seconds),
        "round": _span(line.rounds),
    }


def _marked(
    line: Line, group: Sequence[Line], extra: Sequence[str], escaped: Callable[[str], Cell],
    bold: Callable[[str], Cell],
) -> list[Cell]:
    """The cells in a markup: its special characters escaped, the best mean and the best worst client bold."""
    cells = _cells(line, extra)
    best = {MEAN: _best(group, lambda one: one.mean, shown), "worst": _best(group, lambda one: one.worst, shortly)}
    told = {MEAN: shown(line.scale, line.mean), "worst": shortly(line.scale, line.worst)} if line.ranked else {}
    return [(bold if name in told and told[name] == best[name] else escaped)(text) for name, text in cells.items()]


def _best(group: Sequence[Line], of: Callable[[Line], float], text: Callable[[Scale, float], str]) -> str | None:
    """The best value of several methods that learned something, as it is printed; None where more than half of the
    methods have it, or where one is not finished and behind others.

    A column that is bold from top to bottom tells nobody apart, and two values that print alike are level.
    """
    scale = group[0].scale
    values = [of(line) for line in group if line.ranked and not math.isnan(of(line))]
    if len(group) < 2 or not values or any(line.outcome == UNFINISHED for line in group):
        return None
    found = text(scale, max(values) if scale.higher else min(values))
    return found if 2 * [text(scale, of(line)) for line in group].count(found) <= len(group) else None


def human_bytes(count: float) -> str:
    """Bytes in the unit that leaves one to three digits before the point, with two digits at least."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 9.95 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def human_seconds(seconds: float) -> str:
    """Seconds, or minutes or hours once they are many."""
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}-{high}"


def _title(lines: Sequence[Line]) -> str:
    first = lines[0]
    metric = f"test {measured(first.scale)}, {direction(first.scale)}"
    when = "the round chosen on validation data" if first.when == "chosen" else "the last round"
    seeds = _span([line.seeds for line in lines])
    return f"{metric}; {when}; {seeds} seed{'' if seeds == '1' else 's'}"


def _caption(lines: Sequence[Line], extra: Sequence[str]) -> str:
    notes = ["adapted: after the run's local training. std: over clients. low10: mean of the worst 10 %."]
    notes.append("bytes: per client and round, both ways. time: of the training.")
    if "unseen" in extra:
        notes.append("unseen: mean over clients kept out of training.")
    if "epsilon" in extra:
        notes.append("epsilon: spent by all rounds, at the aggregator's delta.")
    if any(line.trains_before_use for line in lines):
        notes.append("·t: trains before use.")
    if any(line.printed for line in lines):
        notes.append("†: the stage its paper printed.")
    for kind, mark in MARKS.items():
        if any(line.outcome == kind for line in lines):
            notes.append(f"{mark}: {kind}; not ranked.")
    return "\n".join(notes)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return " ".join(str(item) for item in value)
    if isinstance(value, str):
        return csv_text(value)
    return "" if isinstance(value, float) and math.isnan(value) else value


# -- the baselines -----------------------------------------------------------------------------------------------------


def fine_tuned(lines: Sequence[Line]) -> Line | None:
    """FedAvg + fine-tune among the lines."""
    wanted = (("fedavg", ADAPTED), ("fedavgft", SERVED))
    return next((x for w in wanted for x in lines if (_name(x.method), x.stage) == w), None)


def alone(lines: Sequence[Line]) -> Line | None:
    """Local, as served, among the lines."""
    return next((line for line in lines if _name(line.method) == "local" and line.stage == SERVED), None)
