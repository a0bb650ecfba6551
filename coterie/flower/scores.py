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
from coterie.contract.sent import MOST
from coterie.errors import CoterieError
from coterie.evaluation import measures
from coterie.evaluation.measures import Measures
from coterie.evaluation.score import Array, Evaluation, Scores
from coterie.evaluation.stages import SEEN
from coterie.flower.checks import COUNTABLE
from coterie.flower.wire import Failure, plain, rejected
from coterie.metrics.confusion import ByLabelAndAnswer
from coterie.running.clients import Measured
from coterie.running.confusion import CONFUSION, MOST_CELLS

Told = Mapping[str, Any]
"""samples, validated, and for each stage: steps, test and val with their metrics, null where there is no number."""
ROUNDING = 1e-6
"""What a metric may be beyond its bounds: it is computed in floating point."""
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
    """A number, or null where there is none; of each class a list of such. One that diverged is MOST."""
    if isinstance(value, list):
        return [_number(v) for v in value]
    return None if math.isnan(value) else max(-MOST, min(MOST, value))


class Listener:
    """What the server expects sites to tell: it refuses the rest with a sentence, and makes evaluations of it."""

    def __init__(
        self, chosen: Measures, task: Task, targets: Sequence[int], names: Sequence[str], full: bool,
        most_samples: int = COUNTABLE,
    ) -> None:
        """`names` are the classes'; with `full` scores sites tell the sums as well."""
        self.measures, self.classes, self.most_samples = chosen, tuple(names), most_samples
        always = [name for name in ALWAYS if task.classes or name == "loss"]
        metrics = {metric.label: len(names) if metric.by_class else 0 for metric in chosen.further}
        self.values = {**dict.fromkeys(always, 0), **metrics}  # by name, how many classes it has a number of
        self.bounds = {f"{metric.label}{BOUND}": 0 for metric in chosen.further if metric.binned}
        self.ranges = {"loss": (0.0, MOST), "accuracy": (0.0, 1.0), **dict.fromkeys(self.bounds, (0.0, MOST))}
        for metric in chosen.further:
            least, most = metric.values
            self.ranges[metric.label] = (max(least - ROUNDING, -MOST), min(most + ROUNDING, MOST))
        tallies = kept(chosen, task.classes) if full else ()
        self.shapes = measures.shapes(tallies, task, targets) if tallies else {}
        self.adding = measures.adding(tallies, task, targets) if tallies else {}

    def wrong(self, scores: Any, sums: Any = None) -> Failure | None:
        """What is wrong with what one site tells, if anything is."""
        try:
            self._check(scores, sums)
            self.evaluation(0, "", {0: scores}, {0: sums})
            self.pooled({0: sums})
        except _WrongError as wrong:
            return rejected(wrong.field, str(wrong))
        except Exception as reason:  # no site may end the run by what it tells
            return rejected("scores", f"the scores cannot be used ({type(reason).__name__}: {reason}).")
        return None

    def _check(self, scores: Any, sums: Any) -> None:
        if not isinstance(scores, Mapping) or not _count(scores.get("samples")):
            raise _WrongError("scores.samples", "the scores do not say on how many samples they were taken.")
        if scores["samples"] > self.most_samples:
            raise _WrongError("scores.samples", f"the scores were taken on {scores['samples']} samples, more than the "
                                                f"{self.most_samples} that a site may claim.")
        if not isinstance(scores.get("validated"), bool):
            raise _WrongError("scores.validated", "the scores do not say whether there are validation data.")
        _only(scores, ("samples", "validated", *SEEN), "scores")
        for stage in SEEN:
            found = scores.get(stage)
            if not isinstance(found, Mapping) or not _count(found.get("steps")):
                raise _WrongError(f"scores.{stage}", f"the scores of the stage {stage} are missing or have no steps.")
            _only(found, ("steps", "test", "val"), f"scores.{stage}")
            for split, wanted in (("test", {**self.values, **self.bounds}), ("val", self.values)):
                self._check_values(found.get(split), wanted, stage, split)
        if self.shapes:
            _only(sums, SEEN, "sums")
            for stage in SEEN:
                self._add_up(self.sums(sums, stage), scores["samples"], stage)

    def _check_values(self, values: Any, wanted: Mapping[str, int], stage: str, split: str) -> None:
        where = f"scores.{stage}.{split}"
        if not isinstance(values, Mapping) or values.keys() != wanted.keys():
            said = plain(sorted(values) if isinstance(values, Mapping) else values, 100)
            raise _WrongError(where, f"the metrics of {stage}, {split} must be {sorted(wanted)}, not {said}.")
        for name, size in wanted.items():
            several = values[name] if size else [values[name]]
            right = isinstance(several, list) and len(several) == max(size, 1)
            least, most = self.ranges[name]
            if not right or not all(v is None or (_real(v) and least <= v <= most) for v in several):
                what = f"{size} numbers or nulls" if size else "a number or null"
                said = f"from {least:g} to {most:g}, not {plain(repr(values[name]), 60)}"
                raise _WrongError(f"{where}.{name}", f"{name} of {stage}, {split} must be {what} {said}.")

    def _add_up(self, found: Sums, samples: int, stage: str) -> None:
        """Raise unless what counts samples counts as many as the site has, and the metrics can have such values.

        Among all sites' sums each so weighs as many samples as it says it has.
        """
        for name, (how, each) in self.adding.items():
            t, most = found[name], each * samples
            counted = float(t.abs().sum())
            if how != "signed" and bool(((t < 0) | (t != t.round())).any()):
                raise _WrongError(f"sums.{stage}.{name}", f"the values in the sum {name} of {stage} are no counts.")
            if counted > most + ROUNDING * samples or (how == "all" and counted != most):
                said = f"samples make {'' if how == 'all' else 'at most '}{most:g}"
                raise _WrongError(f"sums.{stage}.{name}", f"the sum {name} of {stage} counts {counted:g}, and "
                                                          f"{samples} {said}.")
        for label, values in self._values([found]).items():
            least, most = self.ranges[label]
            for value in values if isinstance(values, list) else [values]:
                if value is not None and not least <= value <= most:
                    raise _WrongError(f"sums.{stage}", f"by the sums of {stage}, {label} is {value:g}, not from "
                                                       f"{least:g} to {most:g}.")

    def sums(self, said: Any, stage: str) -> Sums:
        """One site's sums of a stage."""
        named = said.get(stage) if isinstance(said, Mapping) else None
        if not isinstance(named, Mapping) or named.keys() != self.shapes.keys():
            raise _WrongError(f"sums.{stage}", f"the sums of {stage} must be {sorted(self.shapes)}.")
        found: Sums = {}
        for name, shape in self.shapes.items():
            field, size = f"sums.{stage}.{name}", math.prod(shape)
            _only(named[name], ("places", "values"), field)
            places, values = named[name]["places"], named[name]["values"]
            lists = isinstance(places, list) and isinstance(values, list) and len(places) == len(values) <= size
            if not lists or not all(_count(place) and place < size for place in places):
                raise _WrongError(field, f"the sum {name} of {stage} is no list of places and values.")
            if not all(map(_real, values)):
                raise _WrongError(field, f"the values in the sum {name} of {stage} are no numbers.")
            flat = torch.zeros(size, dtype=torch.float64)
            flat[torch.tensor(places, dtype=torch.int64)] = torch.tensor(values, dtype=torch.float64)
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
            found[stage] = self._values([self.sums(said, stage) for said in sums.values()])
        return found

    def _values(self, each: Sequence[Sums]) -> dict[str, Any]:
        """Every metric on the samples that these sums are of, together."""
        total = {name: torch.stack([one[name] for one in each]).sum(0) for name in self.shapes}
        values = {metric.label: metric.value(sums_of(metric, total)) for metric in self.measures.further}
        return {label: _number(value.tolist()) for label, value in values.items()}


class _WrongError(CoterieError):
    """What is wrong with scores, and in which field."""

    def __init__(self, field: str, said: str) -> None:
        super().__init__(said)
        self.field = field


def _only(told: Any, known: Sequence[str], where: str) -> None:
    """Raise unless these fields, and no others, are told."""
    if not isinstance(told, Mapping) or told.keys() != set(known):
        said = sorted(map(str, told)) if isinstance(told, Mapping) else told
        raise _WrongError(where, f"the {where} hold {', '.join(known)}, not {plain(said, 100)}.")


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= COUNTABLE


def _real(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MOST
