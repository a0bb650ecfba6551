"""The advice in words, as a table and as files."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from coterie.advise.decision import Candidate, Standing, apart, mean_seen
from coterie.advise.pilot import Pilot
from coterie.errors import CoterieError, counted
from coterie.evaluation.measures import AUTO
from coterie.evaluation.reading import measured, points, shortly, unit
from coterie.evaluation.stages import ADAPTED
from coterie.files import write_json, write_text
from coterie.report.table import human_bytes, human_seconds, markdown_table
from coterie.running.experiment import Experiment

MEANING = {
    "local": "every client trains alone",
    "shared": "one model for all",
    "fine-tuning": "one shared model that each client trains a little before use",
    "decoupling": "a shared body under personal heads",
    "meta-learning": "a shared model made to be adapted",
    "clustering": "a few models, of which each client uses the one that fits",
    "interpolation": "an own model mixed with the shared one",
    "class-wise": "averages class by class, mixed for each client by its labels",
    "conflict-free": "one model from updates that do not work against each other",
}
HEADS = ("way", "method", "validation", "behind ± noise", "test", "worst", "newcomers", "bytes")


def sentences(pilot: Pilot) -> list[str]:
    """The advice, then one fact each, most important first."""
    scored = _nothing(pilot) if not pilot.advice.learned else [_take(pilot), *_scored(pilot)]
    taken = [*_new(pilot), _cost(pilot)] if pilot.advice.learned else []
    facts = [*_lost(pilot), *_unlike(pilot), *_alone(pilot), _groups(pilot), *taken, *_limits(pilot)]
    return [*scored, *facts, *pilot.plan.left_out]


def _lost(pilot: Pilot) -> list[str]:
    """Candidates that diverged or learned nothing: no advice is taken from them."""
    said: dict[str, list[str]] = {}
    for one in pilot.findings.candidates:
        if one.lost:
            said.setdefault(one.lost, []).append(one.label)
    return [f"{_joined(names)} {lost}." for lost, names in said.items()]


def _take(pilot: Pilot) -> str:
    way = pilot.advice.way
    return f"Take {way}: {MEANING[way]} ({pilot.advice.chosen.candidate.label})."


def _nothing(pilot: Pilot) -> list[str]:
    """No candidate beats a constant answer, so nothing can be said about ways to serve clients."""
    found = pilot.findings
    top = max((s.candidate for s in pilot.advice.standings), key=mean_seen)
    assert found.guess is not None
    constant = _scored_value(pilot, float(np.nanmean(found.guess)))
    return [
        f"Nothing was learned: no method is better, by more than noise, than {found.guessing} "
        f"({_scored_value(pilot, mean_seen(top))} with {top.label}, {constant} without any model).",
        f"{'Change' if found.scaled else 'Scale the inputs (scale=true for tables), change'} the learning rate "
        "(--set lr=...) or allow more rounds; then ask again. Until then the numbers below say little, and no method "
        "is advised.",
    ]


def _scored(pilot: Pilot) -> list[str]:
    found, advice = pilot.findings, pilot.advice
    chosen, best = advice.chosen, advice.best
    goal = "mean over clients" if found.objective == "mean" else "worst tenth of the clients"
    more, less = ("more", "less") if found.metric.higher else ("less", "more")
    if found.weight:
        goal += f", newcomers counting {100 * found.weight:.0f} %"
    if chosen is not best:
        ahead, noise = _points(pilot, chosen.behind), _points(pilot, chosen.error)
        return [
            f"It scored {_scored_value(pilot, chosen.value)} on validation data ({goal}).",
            f"{best.candidate.label} scored {ahead} {more}, but with {counted(found.clients, 'client')} and "
            f"{_seeds(pilot)} that is within noise (± {noise}), and {chosen.candidate.label} is simpler.",
        ]
    said = [f"It scored best on validation data: {_scored_value(pilot, chosen.value)} ({goal})."]
    close = [s for s in advice.standings if s.close and s.candidate.way != advice.way]
    others = [s for s in advice.standings if s.candidate.way != advice.way]
    labels = [s.candidate.label for s in advice.standings]
    simpler = labels[: labels.index(chosen.candidate.label)]
    for before, how in ((False, "and less simple"), (True, "but worse than what is as simple or simpler")):
        if some := [s for s in close if (s.candidate.label in simpler) is before]:
            said.append(f"{_names(some)} {'is' if len(some) == 1 else 'are'} within noise of it, {how}.")
    if others and not close:
        after = min(others, key=lambda s: s.behind)
        beyond, passed = ("more than noise", after.noise) if after.beyond_noise else (
            "hardly more than noise", after.error)
        said.append(f"The next way, {after.candidate.way} ({after.candidate.label}), scored "
                    f"{_points(pilot, after.behind)} {less}, {beyond} (± {_points(pilot, passed)}).")
    return said


def _unlike(pilot: Pilot) -> list[str]:
    shift, classes = pilot.findings.shift, pilot.findings.classes
    if classes:
        beyond = shift.label - shift.label_by_chance
        how = "about the same" if beyond < 0.05 else "different" if beyond < 0.25 else "very different"
        said = [f"Clients hold {how} mixes of classes (distance {shift.label:.2f}; by chance alone it would be "
                f"{shift.label_by_chance:.2f})."]
    else:
        said = [f"Targets {_degree(shift.label)} between clients ({100 * shift.label:.0f} % of their variation)."]
    if shift.feature is not None:
        what, share = "Inputs of the same class" if classes else "Inputs", f"{100 * shift.feature:.0f} %"
        said.append(f"{what} {_degree(shift.feature)} between clients ({share} of their variation).")
    return said


def _degree(share: float) -> str:
    return "hardly differ" if share < 0.05 else "differ" if share < 0.25 else "differ much"


def _alone(pilot: Pilot) -> list[str]:
    found = pilot.findings
    fine = [one.candidate for one in pilot.advice.standings]
    local = next((c for c in fine if c.label == "local"), None)
    shared = max((c for c in fine if c.way != "local"), key=mean_seen, default=None)
    least, median = found.samples
    validated = "" if found.validation is None else f" and {found.validation} for validation"
    used = "" if pilot.plan.samples is None else f", of which the pilot used at most {pilot.plan.samples}"
    said = []
    if local is not None and shared is not None and pilot.advice.learned:
        own, theirs = (_scored_value(pilot, mean_seen(one)) for one in (local, shared))
        said = [{
            "too small": "Clients are too small to learn alone",
            "as good": f"Learning alone and learning from others {_even(pilot, apart(local, shared))}",
            "enough": "Clients have enough data to learn alone",
        }[pilot.advice.local] + f" ({own} alone, {theirs} with {shared.label})."]
    return [
        *said,
        f"The median client has {counted(median, 'training sample')}{validated}, the smallest {least}{used}.",
    ]


def _even(pilot: Pilot, worse: Standing) -> str:
    """What two do whose difference is not beyond noise: that they are equally good is more than is known."""
    if not worse.behind:
        return "score the same"
    return (f"cannot be told apart: they differ by {_points(pilot, worse.behind)}, within noise "
            f"(± {_points(pilot, worse.noise)})")


def _groups(pilot: Pilot) -> str:
    groups, advice = pilot.findings.clusters, pilot.advice
    if groups.exist:
        sizes = ", ".join(map(str, np.bincount(groups.groups)))
        return f"Clients fall into {groups.count} clear groups (of {sizes} clients)."
    if advice.way == "clustering" and advice.learned:
        how = "best" if advice.chosen is advice.best else "well"
        return (f"There are no clear groups of clients, and still a few models scored {how}: the groups are soft, with "
                "clients in between, and the nearest model helps a client all the same.")
    return "There are no clear groups of clients."


def _new(pilot: Pilot) -> list[str]:
    found, advice = pilot.findings, pilot.advice
    if not found.newcomers_held_out:
        return ["No client was held out, so what a new client gets was not measured."]
    chosen = advice.chosen.candidate
    if not found.judged:
        return [f"No client that was held out ({found.newcomers_held_out}) has a sample for validation, so what a new "
                "client gets was not compared."]
    said = [f"A new client gets {_value(pilot, chosen.new_test)} from {chosen.label} on arrival, those that trained "
            f"get {_value(pilot, chosen.test)} (test data, {counted(found.newcomers_held_out, 'client')} held out)."]
    if advice.for_newcomers is not None:
        rival = advice.for_newcomers.candidate
        said.append(f"{rival.label} is better for new clients, by more than noise ({_value(pilot, rival.new_test)}).")
    return said


def _cost(pilot: Pilot) -> str:
    chosen = pilot.advice.chosen.candidate
    shared = next((c.bytes_each_round for c in pilot.findings.candidates if c.label == "fedavg"), 0.0)
    if not chosen.bytes_each_round:
        return f"With {chosen.label} nothing is sent."
    times = f", {chosen.bytes_each_round / shared:.1f} times FedAvg's" if shared else ""
    return f"{chosen.label} sends {human_bytes(chosen.bytes_each_round)} per client and round (both ways{times})."


def _limits(pilot: Pilot) -> list[str]:
    plan = pilot.plan
    length = f"{counted(plan.rounds, 'round')}, {_seeds(pilot)}, {human_seconds(pilot.seconds)}"
    said = [f"The pilot was short ({length}){'; the command below decides' if pilot.advice.learned else ''}."]
    return said if plan.seeds > 1 else [*said, "With one seed, the noise is that between clients only."]


def _seeds(pilot: Pilot) -> str:
    return counted(pilot.plan.seeds, "seed")


def _names(standings: list[Standing]) -> str:
    return _joined([s.candidate.label for s in standings])


def _joined(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _value(pilot: Pilot, value: float) -> str:
    """A value of the metric as people read it; without a unit, it is called by its name."""
    scale = pilot.findings.metric
    named = "" if scale.percent or math.isnan(value) else f"{scale.title} "
    return f"{named}{shortly(scale, value)}{'' if math.isnan(value) else unit(scale)}"


def _scored_value(pilot: Pilot, score: float) -> str:
    """The same of a validation score, of which larger is better."""
    return _value(pilot, pilot.findings.metric.sign * score)


def _points(pilot: Pilot, value: float) -> str:
    return f"{shortly(pilot.findings.metric, value)}{points(pilot.findings.metric)}"


# -- the table ---------------------------------------------------------------------------------------------------------


def rows(pilot: Pilot) -> list[list[str]]:
    """One line for each method, in its better stage; the chosen line is marked."""
    kept: dict[str, Standing] = {}
    for one in pilot.advice.standings:
        before = kept.get(one.candidate.method)
        if one is pilot.advice.chosen or before is None or (
            before is not pilot.advice.chosen and one.value > before.value
        ):
            kept[one.candidate.method] = one
    return [_cells(pilot, one) for one in sorted(kept.values(), key=lambda s: s.behind)]


def _cells(pilot: Pilot, one: Standing) -> list[str]:
    c: Candidate = one.candidate
    scale = pilot.findings.metric

    def number(value: float) -> str:
        return shortly(scale, value)

    mark = "→ " if one is pilot.advice.chosen and pilot.advice.learned else ""
    first = "best" if pilot.advice.learned else "first"
    behind = first if one is pilot.advice.best else f"{number(one.behind)} ± {number(one.error)}"
    tested = [number(value) for value in (c.test, c.worst, c.new_test)]
    return [mark + c.way, c.label, number(scale.sign * one.value), behind, *tested, human_bytes(c.bytes_each_round)]


def table(pilot: Pilot) -> Table:
    made = Table(
        title=f"{measured(pilot.findings.metric)}; chosen on validation data, test only shown", title_style="bold",
        title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False,
    )
    for number, head in enumerate(HEADS):
        made.add_column(head, justify="left" if number < 2 else "right", no_wrap=number != 1)
    for cells in rows(pilot):
        made.add_row(*cells)
    return made


# -- going on, and files -----------------------------------------------------------------------------------------------


def command(pilot: Pilot, experiment: Experiment, settings: list[str], own_clients: bool) -> str:
    """The comparison to go on with: the chosen method and the best, with more rounds and seeds than the pilot's."""
    chosen, best = pilot.advice.chosen.candidate, pilot.advice.best.candidate
    named = [_spelled(chosen), *([_spelled(best)] if best.method != chosen.method else [])]
    words = ["coterie", "compare", *named, "--data", experiment.data]
    if experiment.partition:
        words += ["--partition", experiment.partition]
    if not own_clients:
        words += ["--clients", str(pilot.findings.clients)]
    if pilot.findings.newcomers_held_out:
        words += ["--unseen", str(pilot.findings.newcomers_held_out)]
    words += ["--model", experiment.model]
    words += [word for name in ("head", "adapter", "freeze", "train", "loss") if (value := getattr(experiment, name))
              for word in (f"--{name}", value)]
    words += ["--metric", experiment.training.metric] if experiment.training.metric != AUTO else []
    words += ["--rounds", str(max(3 * pilot.plan.rounds, experiment.training.warmup)), "--seeds", "3"]
    return shlex.join([*words, *(word for item in settings for word in ("--set", item))])


def _spelled(candidate: Candidate) -> str:
    """FedAvg + fine-tune as the method of that name."""
    return "fedavgft" if candidate.label == "fedavg + fine-tune" else candidate.method


def names(pilot: Pilot) -> list[str]:
    """What the names in the command stand for, where they are not the table's."""
    said: list[str] = []
    chosen, best = pilot.advice.chosen, pilot.advice.best
    for one in (chosen.candidate, *([best.candidate] if best is not chosen else [])):
        if _spelled(one) != one.method:
            said.append(f"`{_spelled(one)}` is FedAvg + fine-tune: one shared model that each client trains a little "
                        "before it uses it.")
        elif one.stage == ADAPTED:
            said.append(f"{one.label} is `{one.method}` in the block `adapted` of the table that the command prints.")
    return said


def markdown(pilot: Pilot, go_on: str) -> str:
    first, *rest = sentences(pilot)
    shown = markdown_table(HEADS, rows(pilot))
    further = ["To go on:", f"```console\n{go_on}\n```", *names(pilot)] if pilot.advice.learned else []
    noted = ["Of the data:", _bullets(pilot.notes)] if pilot.notes else []
    return "\n\n".join(["# Advice", f"**{first}**", _bullets(rest), *noted, shown, *further]) + "\n"


def _bullets(texts: Sequence[str]) -> str:
    return "\n".join(f"- {text}" for text in texts)


def record(pilot: Pilot, go_on: str) -> dict[str, Any]:
    """Every number behind the advice, as plain values."""
    found, advice = pilot.findings, pilot.advice
    taken = {
        "family": advice.way, "method": advice.chosen.candidate.method, "stage": advice.chosen.candidate.stage,
        "best": {"method": advice.best.candidate.method, "stage": advice.best.candidate.stage}, "command": go_on,
        "local": advice.local,
    }
    return {
        **(taken if advice.learned else dict.fromkeys(taken)), "sentences": sentences(pilot),
        "notes": list(pilot.notes),
        "newcomers": found.newcomers, "objective": found.objective, "metric": found.metric.name,
        "clients": found.clients, "newcomers_held_out": found.newcomers_held_out,
        "training_samples": {"least": found.samples[0], "median": found.samples[1]},
        "shift": asdict(found.shift), "clusters": asdict(found.clusters), "plan": asdict(pilot.plan),
        "seconds": pilot.seconds, "learned": advice.learned, "higher_is_better": found.metric.higher,
        "most_frequent_class": None if found.guess is None else [_known(v) for v in found.guess.tolist()],
        "candidates": [
            {
                "method": s.candidate.method, "stage": s.candidate.stage, "family": s.candidate.way,
                "value": s.value, "behind": s.behind, "error": s.error, "test": s.candidate.test,
                "worst": s.candidate.worst, "newcomers": _known(s.candidate.new_test),
                "bytes_each_round": s.candidate.bytes_each_round, "seconds": s.candidate.seconds,
                "validation": [[_known(v) for v in seed] for seed in s.candidate.seen.tolist()],
                "validation_newcomers": [[_known(v) for v in seed] for seed in s.candidate.new.tolist()],
            }
            for s in advice.standings
        ],
    }


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def write(pilot: Pilot, go_on: str, folder: Path) -> None:
    """`advice.json` and `advice.md`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "advice.json", record(pilot, go_on))
        write_text(folder / "advice.md", markdown(pilot, go_on))
    except OSError as reason:
        raise CoterieError(f"the folder {folder} cannot be written: {reason.strerror}.") from reason
