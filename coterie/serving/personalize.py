"""What `coterie personalize` hands out: the model, the json beside it, and the words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from coterie.data import spelled
from coterie.errors import CoterieError, NoLabels, counted, unknown
from coterie.evaluation.intervals import LEVEL
from coterie.evaluation.reading import shortly, unit
from coterie.running.outcome import warnings_of
from coterie.running.saved import Saved
from coterie.serving.estimate import Adapt, Estimate
from coterie.serving.newcomer_data import Fill, read, unlabelled
from coterie.serving.newcomers import Personalized, personalize
from coterie.serving.portable import job_of, write_model

REPORTS = ("text", "json")


def hand_out(
    saved: Saved, data: str, out: Path, client: str | None, adapt: str, future: int | None, seed: int, report: str,
    when: str = "chosen",
) -> str:
    """What `coterie personalize` does: read, personalize, write the model and its json; the text to print."""
    for what, given, known in (("value of --adapt", adapt, get_args(Adapt)), ("kind of report", report, REPORTS)):
        if given not in known:
            raise unknown(what, given, known)
    if out.suffix != ".safetensors":
        raise CoterieError(f"the model is written as safetensors, so -o must end in .safetensors, not {out.name}.")
    if not out.parent.is_dir():
        raise CoterieError(f"there is no folder {out.parent} to write {out.name} to.")
    name = client or Path(spelled(data)[0]).stem
    samples, group, lacking = None, None, ""
    filled: tuple[str, ...] = ()
    unlike: dict[str, str] = {}
    try:
        samples, name, group, filled, fill = read(data, client, saved)
    except NoLabels as reason:
        lacking = str(reason)
        filled, unlike, fill = unlabelled(data, client, saved)
    found = personalize(saved, samples, name, adapt, future, seed, group, when)  # type: ignore[arg-type]
    if lacking:
        found = replace(found, why=(*unlike.values(), *found.why, lacking),
                        facts={**found.facts, "other_units": list(unlike)})
    found = replace(found, why=(*found.why, *(f"Its data: {note}." for note in filled)))
    of_run = warnings_of(saved.folder, (found.taken.stage,), found.taken.scored)
    found = replace(found, why=(*(f"Of the run: {text}" for text in of_run), *found.why))
    facts = described(saved, found, fill)
    beside = write_model(out, found.layout, found.row, facts)
    if report == "json":
        return json.dumps({**facts, "file": str(out)}, indent=2)
    return "\n".join([*found.why, *_stated(found.estimate), f"model: {out}, {beside}"])


def described(saved: Saved, found: Personalized, fill: Fill) -> dict[str, Any]:
    """What the json beside a newcomer's model says: how samples become numbers is what the run says, but for what
    filled gaps of the newcomer's own, if it had a way of its own."""
    job = job_of(saved)
    if fill is not None:
        job["encoding"] = {**job["encoding"], "fill": fill}
    return {
        "method": job["method"], "model": job["model"], "run": str(saved.folder.path.resolve()), "client": found.client,
        **found.taken.facts, "newcomer": True, "adapted": found.adapted, "fallback": found.fallback,
        "estimate": None if found.estimate is None else _plain(found.estimate),
        "why": list(found.why), "facts": dict(found.facts), "job": job,
    }


def _plain(estimate: Estimate) -> dict[str, Any]:
    """The metric by its name, beside the numbers."""
    numbers = {name: value for name, value in vars(estimate).items() if name != "scale"}
    return {"metric": estimate.metric, **numbers, "level": LEVEL}


def _stated(estimate: Estimate | None) -> list[str]:
    if estimate is None:
        return []
    scale = estimate.scale

    def shown(value: float) -> str:
        return f"{shortly(scale, value)}{unit(scale)}"

    (low, high), (least, most), level = estimate.interval, estimate.confidence, f"{LEVEL:.0%}".replace("%", " %")
    return [
        f"Estimate: {scale.title} {shown(estimate.value)}, by {estimate.folds}-fold cross-validation of all of this, "
        f"the choice whether to adapt included, on its {counted(estimate.n, 'labelled sample')}.",
        f"On {counted(estimate.future, 'further sample')} of this client: {shown(low)} to {shown(high)} ({level} "
        "prediction interval).",
        f"On endlessly many: {shown(least)} to {shown(most)} ({level} confidence interval).",
    ]
