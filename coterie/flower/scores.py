"""The scores that sites tell: small json that a site writes about its own model, and what the server makes of it.

With `scores = "values"` a site tells the value of each metric. With `scores = "full"` it also tells the sums that they
are made of, confusion counts and score histograms among them: these hold how many samples of which class it has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.contract.cohort import ALWAYS, BOUND
from coterie.contract.metric import Tally, sums_of
from coterie.contract.net import Task
from coterie.errors import CoterieError
from coterie.evaluation import measures
from coterie.evaluation.measures import Measures
from coterie.evaluation.score import Array, Evaluation, Scores
from coterie.evaluation.stages import SEEN
from coterie.metrics.confusion import ByLabelAndAnswer
from coterie.running.clients import Measured
from coterie.running.confusion import CONFUSION, MOST_CELLS

Told = Mapping[str, Any]
"""samples, validated, and for each stage: steps, test and val with their metrics, null where there is no number."""
Sums = dict[str, Tensor]
"""By `tally.sum`, as `contract.metric` names them."""


def kept(chosen: Measures, classes: int) -> tuple[Tally, ...]:
    """What a site's sums are of, where it tells them."""
    counted = (ByLabelAndAnswer(),) if 0 < classes**2 <= MOST_CELLS else ()
    return (*counted, *chosen.further)


def told(found: Mapping[str, Measured], samples: int, validated: bool, sums: Sequence[Tally] = ()) -> dict[str, Any]:
    """One client's stages, and on how many test samples; without validation data `val` is of training data.

    The `sums` among what was measured are left out: `sums_told` tells them.
    """
    words = tuple(f"{tally.tally}." for tally in sums)
    return {"samples": samples, "validated": validated} | {
        stage: {
            "steps": int(steps[0]),
            "test": {name: _number(v[0].tolist()) for name, v in test.items() if not name.startswith(words)},
            "val": {name: _number(v[0].tolist()) for name, v in val.items()},
        }
        for stage, (test, val, steps) in found.items()
    }


def sums_told(found: Mapping[str, Measured], sums: Sequence[Tally]) -> dict[str, Any]:
    """The sums of one client's stages; most are 0, so the others are listed by their places."""
    said: dict[str, Any] = {}
    for stage, (test, _, _) in found.items():
        for tally in sums:
            for name, t in sums_of(tally, test).items():
                flat = t[0].double().cpu().flatten()
                places = flat.nonzero()[:, 0]
                listed = {"places": places.tolist(), "values": flat[places].tolist()}
                said.setdefault(stage, {})[f"{tally.tally}.{name}"] = listed
    return said


def _number(value: Any) -> Any:
    """A number, or null where there is none; of each class a list of such."""
    return [_number(v) for v in value] if isinstance(value, list) else None if math.isnan(value) else value


class Listener:
    """What the server expects sites to tell: it refuses the rest with a sentence, and makes evaluations of it."""

    def __init__(self, chosen: Measures, task: Task, targets: Sequence[int], names: Sequence[str], full: bool) -> None:
        """`names` are the classes'; with `full` scores sites tell the sums as well."""
        self.measures, self.classes = chosen, tuple(names)
        always = [name for name in ALWAYS if task.classes or name == "loss"]
        metrics = {metric.label: len(names) if metric.by_class else 0 for metric in chosen.further}
        self.values = {**dict.fromkeys(always, 0), **metrics}  # by name, how many classes it has a number of
        self.bounds = {f"{metric.label}{BOUND}": 0 for metric in chosen.further if metric.binned}
        tallies = kept(chosen, task.classes) if full else ()
        self.shapes = measures.shapes(tallies, task, targets) if tallies else {}

    def check(self, scores: Any, sums: Any = None) -> None:
        """Raise unless this is what one site has to tell."""
        if not isinstance(scores, Mapping) or not _count(scores.get("samples")):
            raise CoterieError("the scores do not say on how many samples they were taken.")
        if not isinstance(scores.get("validated"), bool):
            raise CoterieError("the scores do not say whether there are validation data.")
        for stage in SEEN:
            found = scores.get(stage)
            if not isinstance(found, Mapping) or not _count(found.get("steps")):
                raise CoterieError(f"the scores of the stage {stage} are missing or have no steps.")
            for split, wanted in (("test", {**self.values, **self.bounds}), ("val", self.values)):
                self._check_values(found.get(split), wanted, f"{stage}, {split}")
            if self.shapes:
                self.sums(sums, stage)

    def _check_values(self, values: Any, wanted: Mapping[str, int], where: str) -> None:
        if not isinstance(values, Mapping) or values.keys() != wanted.keys():
            said = sorted(values) if isinstance(values, Mapping) else values
            raise CoterieError(f"the metrics of {where} must be {sorted(wanted)}, not {said}.")
        for name, size in wanted.items():
            several = values[name] if size else [values[name]]
            right = isinstance(several, list) and len(several) == max(size, 1)
            if not right or not all(v is None or _real(v) for v in several):
                what = f"{size} numbers or nulls" if size else "a number or null"
                raise CoterieError(f"{name} of {where} must be {what}, not {values[name]!r}.")

    def sums(self, said: Any, stage: str) -> Sums:
        """One site's sums of a stage."""
        named = said.get(stage) if isinstance(said, Mapping) else None
        if not isinstance(named, Mapping) or named.keys() != self.shapes.keys():
            raise CoterieError(f"the sums of {stage} must be {sorted(self.shapes)}.")
        found: Sums = {}
        for name, shape in self.shapes.items():
            flat = torch.zeros(math.prod(shape), dtype=torch.float64)
            try:
                places, values = named[name]["places"], named[name]["values"]
                sound = all(_real(value) and (name != CONFUSION or value >= 0) for value in values)
                if not sound or not all(_count(place) for place in places):
                    raise ValueError("these are no counts" if name == CONFUSION else "these are no numbers")
                flat[torch.tensor(places, dtype=torch.int64)] = torch.tensor(values, dtype=torch.float64)
            except (LookupError, TypeError, ValueError, RuntimeError) as reason:
                raise CoterieError(f"the sum {name} of {stage} is no list of places and values ({reason}).") from reason
            found[name] = flat.view(shape)
        return found

    def evaluation(
        self, t: int, prefix: str, sites: Mapping[int, Told], sums: Mapping[int, Any] | None = None
    ) -> Evaluation:
        """What the sites told after t rounds, by their numbers; all of it has been checked."""
        return Evaluation(t, {f"{prefix}{name}": self._stage(name, sites, sums or {}) for name in SEEN})

    def _stage(self, name: str, sites: Mapping[int, Told], sums: Mapping[int, Any]) -> Scores:
        numbers = sorted(sites)

        def columns(split: str, wanted: Mapping[str, int]) -> dict[str, Array]:
            found: dict[str, Array] = {}
            for metric, size in wanted.items():
                nothing = [None] * size if size else None
                told = [sites[k][name][split][metric] if split == "test" or sites[k]["validated"] else nothing
                        for k in numbers]
                found[metric] = np.array(told, dtype=np.float64)
            return self.measures.columns(found, self.classes)

        counts = None
        if CONFUSION in self.shapes:
            counts = np.stack([self.sums(sums[k], name)[CONFUSION].numpy().astype(np.int64) for k in numbers])
        return Scores(
            np.array(numbers), np.array([sites[k]["samples"] for k in numbers]),
            np.array([sites[k][name]["steps"] for k in numbers]), columns("test", {**self.values, **self.bounds}),
            columns("val", self.values), self.measures.scale, counts,
        )

    def pooled(self, sums: Mapping[int, Any]) -> dict[str, dict[str, Any]]:
        """Every metric on all sites' test samples as if they were one client's, by stage, from the sums they told."""
        found: dict[str, dict[str, Any]] = {}
        for stage in SEEN if self.shapes and sums else ():
            each = [self.sums(said, stage) for said in sums.values()]
            total = {name: torch.stack([one[name] for one in each]).sum(0) for name in self.shapes}
            values = {metric.label: metric.value(sums_of(metric, total)) for metric in self.measures.further}
            found[stage] = {label: _number(value.tolist()) for label, value in values.items()}
        return found


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _real(value: Any) -> bool:
    """A number; a model that diverged has an infinite loss, which is one too."""
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
