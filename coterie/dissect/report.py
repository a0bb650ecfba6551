"""A dissection as a table, as files and in words."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from coterie import files
from coterie.dissect.answer import Found, answer, share_of_gain
from coterie.dissect.measure import DISSECT, Dissection
from coterie.evaluation.reading import direction, measured, number, shortly, shown
from coterie.evaluation.stages import SEEN, SERVED, STAGES, title, unseen
from coterie.files import csv_text
from coterie.report.screen import plain
from coterie.report.table import MARKS, human_bytes
from coterie.report.verdict import MEAN, WORST, caveat, troubles
from coterie.running.folder import SEAL, sealed

SHOWN = (*SEEN, unseen(SERVED))
"""The stages of the table and the picture; the files have every one."""
ABSENT = "-"


def table(made: Dissection) -> Table:
    """One line a point: what a client keeps and sends, and in each stage the mean over clients and the worst client."""
    found = made.found()
    stages = [stage for stage in SHOWN if found.get(stage)]
    scale = next(iter(found.values()))[0].case.scale
    seeds = made.asked.experiment.seeds
    heading = f"test {measured(scale)}, {direction(scale)}; the round chosen on validation data; {seeds} seed"
    notes = [f"keeps: personal bytes of a client. sends: per client and round, both ways. gain: share of the gain, "
             f"{title(made.asked.stage)}, mean over clients."]
    if any(stage != made.asked.stage and stage.startswith("unseen") for stage in stages):
        notes.append("unseen: clients kept out of training, as served.")
    marked = {one.case.line.outcome for stage in stages for one in found[stage]}
    notes += [f"{mark}: {kind}; not ranked." for kind, mark in MARKS.items() if kind in marked]
    drawn = Table(
        title=plain(heading + ("" if seeds == 1 else "s")), caption=Text("\n".join(notes)), title_style="bold",
        caption_style="dim", title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
        show_edge=False, pad_edge=False,
    )
    drawn.add_column("a client keeps", overflow="fold", min_width=10, max_width=36)
    for name in ("keeps", "sends", *(["lr"] if made.asked.rates else []), *_heads(stages), "gain"):
        drawn.add_column(plain(name), justify="right", no_wrap=True)
    for point in made.points:
        own = {stage: next((one for one in found[stage] if one.point is point), None) for stage in stages}
        any_stage = next(one for one in own.values() if one is not None)
        cells = [human_bytes(point.personal), human_bytes(any_stage.case.line.bytes_each_round)]
        cells += [f"{made.rates[point.name]:g}"] if made.asked.rates else []
        cells += [cell for stage in stages for cell in _cells(own[stage])]
        share = _share(found, made.asked.stage, point.name)
        cells.append(ABSENT if share is None else f"{number(100 * share, 0)} %")
        drawn.add_row(plain(point.name), *map(plain, cells))
    return drawn


def _heads(stages: Sequence[str]) -> Iterator[str]:
    for stage in stages:
        yield from ("unseen" if stage.startswith("unseen") else stage, "worst")


def _cells(one: Found | None) -> list[str]:
    if one is None:
        return [ABSENT, ABSENT]
    line = one.case.line
    spread = f" ± {shown(line.scale, line.mean_spread)}" if line.seeds > 1 else ""
    mark = f"{MARKS[line.outcome]} " if line.outcome else ""
    return [mark + shown(line.scale, line.mean) + spread, shortly(line.scale, line.worst)]


def _share(found: Mapping[str, Sequence[Found]], stage: str, name: str) -> float | None:
    one = next((one for one in found.get(stage, ()) if one.point.name == name), None)
    return None if one is None else share_of_gain(found[stage], one, MEAN)


def sentence(made: Dissection) -> str:
    """The answer, for the mean over clients in the stage that was asked for."""
    return answer(made.found().get(made.asked.stage, ()), MEAN).sentence


def notes(made: Dissection) -> list[str]:
    """What went wrong, what is not known, and the answer for the worst client: what is read before the answer."""
    found = made.found().get(made.asked.stage, [])
    every = [one.case for one in found]
    if not every:
        return []
    hopeless, warnings = troubles(made.results, every)
    said = [*([hopeless] if hopeless else []), *warnings, *made.notes, *_last_rounds(made, found)]
    doubts = caveat(every)
    return [*said, *([doubts] if doubts else []), answer(found, WORST).sentence]


def _last_rounds(made: Dissection, found: Sequence[Found]) -> list[str]:
    """Of the points that the answer hangs on, those that were still getting better when training ended."""
    known = answer(found, MEAN)
    last = {one.method: one.reached for one in made.results}
    late = [one.point.name for one in found if all(t == last[one.point.name] for t in one.case.line.rounds)
            and one.point.name in (made.points[0].name, known.best, known.enough)]
    return [f"On validation data the last round was the best for {', '.join(late)}: more --rounds may change the "
            "answer."] if late else []


# -- files -------------------------------------------------------------------------------------------------------------


def write(made: Dissection, folder: Path) -> tuple[Path, Path]:
    """Every number as dissect.csv, and what was asked, found and answered as dissect.json."""
    found = made.found()
    lines = [line for stage in STAGES for line in _lines(made, found, stage)]
    text = StringIO(newline="")
    writer = csv.DictWriter(text, list(lines[0]))
    writer.writeheader()
    for line in lines:
        writer.writerow({k: csv_text(v) if isinstance(v, str) else "" if v is None else v for k, v in line.items()})
    files.write_text(folder / "dissect.csv", text.getvalue())
    before = {name: value for name, value in files.read_json(folder / DISSECT).items() if name != SEAL}
    answers = {
        stage: {name: asdict(answer(group, by)) for name, by in (("mean", MEAN), ("worst", WORST))}
        for stage, group in found.items() if group
    }
    record = {"sentence": sentence(made), "notes": notes(made), "left_out": list(made.left_out), "answers": answers,
              "table": lines}
    files.write_json(folder / DISSECT, sealed({**before, "found": _finite(record)}))
    return folder / DISSECT, folder / "dissect.csv"


def _lines(made: Dissection, found: Mapping[str, Sequence[Found]], stage: str) -> Iterator[dict[str, Any]]:
    base = found[stage][0] if found.get(stage) else None
    for one in found.get(stage, ()):
        line, scale = one.case.line, one.case.scale
        yield {
            "keeps": one.point.name, "stage": stage, "personal_bytes": one.point.personal,
            "bytes_each_round": line.bytes_each_round, "method": one.point.method, "adapter": one.point.adapter,
            "lr": made.rates[one.point.name], "metric": scale.name, "higher_is_better": scale.higher,
            "seeds": line.seeds, "mean": line.mean, "mean_spread": line.mean_spread, "worst": line.worst,
            "worst_spread": line.worst_spread, "clients_std": line.client_std, "left_out": line.left_out,
            "ahead": None if base is None else MEAN.ahead(one.case, base.case),
            "ahead_noise": None if base is None or one is base else MEAN.noise(one.case, base.case),
            "worst_ahead_noise": None if base is None or one is base else WORST.noise(one.case, base.case),
            "share_of_gain": share_of_gain(found[stage], one, MEAN), "outcome": line.outcome, "why": line.why,
            "rounds": " ".join(map(str, line.rounds)),
        }


def _finite(value: Any) -> Any:
    """Without what JSON has no number for."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
