"""The advice in words, as a table and as files."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from coterie.advise.decision import WEIGHT, Candidate, Standing
from coterie.advise.pilot import Pilot
from coterie.advise.shift import CLEAR
from coterie.errors import CoterieError
from coterie.experiment import Experiment
from coterie.report.table import human_bytes, human_seconds, markdown_table

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
HEADS = ("family", "method", "validation", "behind ± noise", "test", "worst", "newcomers", "bytes")


def sentences(pilot: Pilot) -> list[str]:
    """The advice, most important first."""
    found, advice = pilot.findings, pilot.advice
    chosen, best = advice.chosen, advice.best
    said = [f"Take {advice.family}: {MEANING[advice.family]} ({chosen.candidate.label})."]
    goal = "mean over clients" if found.objective == "mean" else "worst tenth of the clients"
    weight = WEIGHT[found.newcomers] if found.newcomers_held_out else 0
    if weight:
        goal += f", newcomers counting {100 * weight:.0f} %"
    if chosen is best:
        close = [s for s in advice.standings if s.close and s.candidate.family != advice.family]
        others = [s for s in advice.standings if s.candidate.family != advice.family]
        said.append(f"It has the best validation score, {_value(pilot, chosen.value)} ({goal}).")
        if close:
            said.append(f"{_names(close)} {'is' if len(close) == 1 else 'are'} within noise of it, and less simple.")
        elif others:
            next_one = min(others, key=lambda s: s.behind)
            beyond = "more than noise" if next_one.beyond_noise else "between one and two standard errors"
            said.append(f"The next family, {next_one.candidate.family} ({next_one.candidate.label}), is "
                        f"{_points(pilot, next_one.behind)} behind, {beyond}.")
    else:
        said.append(
            f"On validation data ({goal}) it has {_value(pilot, chosen.value)}; {best.candidate.label} has "
            f"{_points(pilot, chosen.behind)} more, which is within noise (± {_points(pilot, chosen.error)}), and the "
            "simpler one is preferred."
        )
    return [*said, _unlike(pilot), _alone(pilot), _groups(pilot), _new(pilot), _cost(pilot), _limits(pilot)]


def _unlike(pilot: Pilot) -> str:
    shift, classes = pilot.findings.shift, pilot.findings.metric == "accuracy"
    if classes:
        beyond = shift.label - shift.label_by_chance
        how = "hardly differ" if beyond < 0.05 else "differ" if beyond < 0.25 else "differ much"
        text = (f"Labels {how} between clients (distance {shift.label:.2f}; equal clients of these sizes would show "
                f"{shift.label_by_chance:.2f})")
    else:
        text = f"Of the targets' variance, {100 * shift.label:.0f} % lie between clients"
    if shift.feature is None:
        return f"{text}."
    inside = " within a class" if classes else ""
    return f"{text}; of the inputs' variance{inside}, {100 * shift.feature:.0f} % lie between clients."


def _alone(pilot: Pilot) -> str:
    found = pilot.findings
    named = {c.label: c for c in found.candidates}
    local = _value(pilot, float(np.nanmean(named["local"].seen)))
    shared = max((c for c in found.candidates if c.family != "local"), key=lambda c: float(np.nanmean(c.seen)))
    numbers = f"Local {local}, {shared.label} {_value(pilot, float(np.nanmean(shared.seen)))}"
    least, median = found.samples
    sizes = f"{median} training samples in the median, {least} at least"
    if pilot.plan.samples is not None:
        sizes += f"; the pilot used at most {pilot.plan.samples}"
    return {
        "too small": f"Clients are too small to learn alone ({sizes}): {numbers}.",
        "as good": f"Learning alone and learning from others are equally good ({sizes}): {numbers}.",
        "enough": f"Clients have enough data to learn alone ({sizes}): {numbers}.",
    }[pilot.advice.local]


def _groups(pilot: Pilot) -> str:
    groups = pilot.findings.clusters
    if not groups.lead:
        return "There are no groups of clients."
    numbers = f"silhouette {groups.silhouette:.2f}, one cloud would have {groups.by_chance:.2f}"
    if not groups.exist:
        lead = f"{groups.lead:.1f} standard deviations apart, and from {CLEAR:g} on they would count"
        return f"There are no clear groups of clients ({numbers}: {lead})."
    sizes = np.bincount(groups.groups)
    return f"Clients fall into {groups.count} groups of {', '.join(map(str, sizes))} ({numbers})."


def _new(pilot: Pilot) -> str:
    found, advice = pilot.findings, pilot.advice
    if not found.newcomers_held_out:
        return "No client was held out, so what a new client gets was not measured."
    chosen = advice.chosen.candidate
    text = (f"A new client gets {_value(pilot, chosen.new_test)} from it on arrival (test, {found.newcomers_held_out} "
            f"clients held out), the others {_value(pilot, chosen.test)}")
    if advice.for_newcomers is None:
        return f"{text}."
    rival = advice.for_newcomers.candidate
    return f"{text}; {rival.label} would give it {_value(pilot, rival.new_test)}, more than noise."


def _cost(pilot: Pilot) -> str:
    each = pilot.advice.chosen.candidate.bytes_each_round
    shared = next((c.bytes_each_round for c in pilot.findings.candidates if c.label == "fedavg"), 0.0)
    if not each:
        return "Nothing travels."
    times = f", {each / shared:.1f} times FedAvg's" if shared else ""
    return f"It costs {human_bytes(each)} per client and round, both ways{times}."


def _limits(pilot: Pilot) -> str:
    plan = pilot.plan
    text = f"The pilot: {plan.rounds} rounds, {plan.seeds} seed{'s' if plan.seeds > 1 else ''}"
    if plan.samples is not None:
        text += f", at most {plan.samples} training samples a client"
    text += f", {human_seconds(pilot.seconds)}. It is short; the command below decides."
    return text if plan.seeds > 1 else f"{text} With one seed, noise is that between clients only."


def _names(standings: list[Standing]) -> str:
    names = [s.candidate.label for s in standings]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _value(pilot: Pilot, value: float) -> str:
    """A validation score (larger is better) or a test metric as people read it."""
    if math.isnan(value):
        return "-"
    return f"{100 * value:.1f} %" if pilot.findings.metric == "accuracy" else f"an error of {abs(value):.3g}"


def _points(pilot: Pilot, value: float) -> str:
    return f"{100 * value:.1f} points" if pilot.findings.metric == "accuracy" else f"{value:.3g}"


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
    scale, digits = (100, 1) if pilot.findings.metric == "accuracy" else (1, 3)

    def number(value: float) -> str:
        return "-" if math.isnan(value) else f"{scale * value:.{digits}f}"

    mark = "→ " if one is pilot.advice.chosen else ""
    behind = "best" if one is pilot.advice.best else f"{number(one.behind)} ± {number(one.error)}"
    value = one.value if scale == 100 else -one.value
    return [mark + c.family, c.label, number(value), behind, number(c.test), number(c.worst), number(c.new_test),
            human_bytes(c.bytes_each_round)]


def table(pilot: Pilot) -> Table:
    unit = "accuracy in %" if pilot.findings.metric == "accuracy" else "mean squared error"
    made = Table(
        title=f"{unit}; chosen on validation data, test only shown", title_style="bold", title_justify="left",
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False,
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
    words += ["--model", experiment.model, *(["--head", experiment.head] if experiment.head else [])]
    words += ["--rounds", str(3 * pilot.plan.rounds), "--seeds", "3"]
    return shlex.join([*words, *(word for item in settings for word in ("--set", item))])


def _spelled(candidate: Candidate) -> str:
    """FedAvg + fine-tune as the method of that name."""
    return "fedavgft" if candidate.label == "fedavg + fine-tune" else candidate.method


def markdown(pilot: Pilot, go_on: str) -> str:
    said = sentences(pilot)
    shown = markdown_table(HEADS, rows(pilot))
    return "\n\n".join(["# Advice", f"**{said[0]}** {' '.join(said[1:])}", shown, "To go on:",
                        f"```console\n{go_on}\n```"]) + "\n"


def record(pilot: Pilot, go_on: str) -> dict[str, Any]:
    """Every number behind the advice, as plain values."""
    found, advice = pilot.findings, pilot.advice
    return {
        "family": advice.family, "method": advice.chosen.candidate.method, "stage": advice.chosen.candidate.stage,
        "best": {"method": advice.best.candidate.method, "stage": advice.best.candidate.stage},
        "sentences": sentences(pilot), "command": go_on, "local": advice.local,
        "newcomers": found.newcomers, "objective": found.objective, "metric": found.metric,
        "clients": found.clients, "newcomers_held_out": found.newcomers_held_out,
        "training_samples": {"least": found.samples[0], "median": found.samples[1]},
        "shift": asdict(found.shift), "clusters": asdict(found.clusters), "plan": asdict(pilot.plan),
        "seconds": pilot.seconds,
        "candidates": [
            {
                "method": s.candidate.method, "stage": s.candidate.stage, "family": s.candidate.family,
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
        (folder / "advice.json").write_text(json.dumps(record(pilot, go_on), indent=2) + "\n")
        (folder / "advice.md").write_text(markdown(pilot, go_on), encoding="utf-8")
    except OSError as reason:
        raise CoterieError(f"the folder {folder} cannot be written: {reason.strerror}.") from reason
