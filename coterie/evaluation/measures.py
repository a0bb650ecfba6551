"""What a run is scored by: the metric that decides, those that are watched beside it, and whether they fit the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie import registry
from coterie.contract.cohort import ALWAYS
from coterie.contract.metric import Counted, Metric, Scale, Tally, tallied
from coterie.contract.net import Task
from coterie.errors import CoterieError, visible
from coterie.evaluation.score import Array
from coterie.metrics.accuracy import Accuracy
from coterie.metrics.loss import Loss

AUTO = "auto"
"""Accuracy where there are classes, else the loss."""


@dataclass(frozen=True)
class Measures:
    """The `chosen` metric decides between rounds and methods; the `watched` ones are computed and stored beside it."""

    chosen: Metric
    watched: tuple[Metric, ...] = ()
    by_median: bool = False

    @classmethod
    def of(
        cls, metric: str, watch: Sequence[str], task: Task, targets: Sequence[int] = (), by_median: bool = False
    ) -> Measures:
        """From their spellings, for one task; `targets` is the shape of one target of a regression. Rounds are compared
        by the mean over clients, or `by_median`, which a few clients that tell anything cannot move far.

        Raises, before anything is trained, where one of them cannot score such data.
        """
        auto = "accuracy" if task.classes else "loss"
        specs = list(dict.fromkeys([auto if metric == AUTO else metric, *watch]))
        found = [_fitting(spec, task, targets) for spec in specs]
        by_label: dict[str, Metric] = {}
        for spec, one in zip(specs, found, strict=True):
            if one.label in (*by_label, *(name for name in ALWAYS if type(one) not in (Accuracy, Loss))):
                raise CoterieError(f"two metrics would be called {one.label}; give {spec} a name of its own.")
            by_label[one.label] = one
        if found[0].by_class:
            raise CoterieError(
                f"{found[0].label} is a number of each class, so it cannot decide between rounds; watch it (--watch "
                f"{found[0].label}) and choose a metric that is one number, e.g. balanced_accuracy."
            )
        return cls(found[0], tuple(found[1:]), by_median)

    @property
    def further(self) -> tuple[Metric, ...]:
        """Those that are not measured anyway."""
        return tuple(metric for metric in (self.chosen, *self.watched) if metric.label not in ALWAYS)

    @property
    def scale(self) -> Scale:
        """Of the metric that decides."""
        return replace(self.chosen.scale, by_median=self.by_median)

    def record(self) -> dict[str, Any]:
        """For config.json: how every metric is read, so that nobody needs the metrics themselves to show a run."""
        watched = [asdict(metric.scale) | {"by_class": metric.by_class} for metric in self.watched]
        return {"chosen": asdict(self.scale), "watched": watched}

    def columns(self, values: Mapping[str, Array], classes: Sequence[str]) -> dict[str, Array]:
        """Values `[c]` by name; those of each class `[c, classes]` become one a class, `recall[cat]`."""
        found: dict[str, Array] = {}
        for name, value in values.items():
            if value.ndim == 1:
                found[name] = value
            else:
                found |= {f"{name}[{visible(word)}]": value[:, k] for k, word in enumerate(classes)}
        return found


def scale_of(record: Any) -> Scale | None:
    """The metric that decides, from what `Measures.record` wrote; None in records of earlier versions."""
    return Scale(**record["chosen"]) if record else None


def _fitting(spec: str, task: Task, targets: Sequence[int]) -> Metric:
    """The metric of this spelling, if it can score such data."""
    metric = registry.metric(spec)
    kind = "classes" if task.classes else "numbers"
    if metric.kind not in ("any", kind):
        fit = ", ".join(name for name, cls in sorted(registry.metrics().items()) if cls.kind in ("any", kind))
        said = "are numbers" if kind == "numbers" else f"are {task.classes} classes"
        raise CoterieError(f"{metric.label} scores {metric.kind}, but the labels of these data {said}; choose one of "
                           f"{fit}.")
    metric.check(task.classes)
    if isinstance(metric, Loss):
        return replace(metric, function=task.scored)
    _try(metric, task, targets)
    return metric


def blank(task: Task, targets: Sequence[int], samples: int) -> tuple[Tensor, Tensor]:
    """Outputs and labels of the right form, always the same ones."""
    generator = torch.Generator().manual_seed(0)
    if task.classes:
        form = (samples, *(min(n, 2) for n in targets))  # of a text with a class a token, two tokens tell all
        outputs = torch.randn(*form, task.classes, generator=generator, dtype=torch.float64)
        return outputs, torch.arange(outputs[..., 0].numel()).view(form) % task.classes
    outputs = torch.randn(samples, int(np.prod(targets)), generator=generator, dtype=torch.float64)
    return outputs, torch.randn(samples, *targets, generator=generator)


def shapes(tallies: Sequence[Tally], task: Task, targets: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """The shape of every sum of one client, by `tally.sum`."""
    outputs, y = blank(task, targets, 2)
    return {name: tuple(t.shape) for name, t in tallied(tallies, outputs, y, torch.ones(2)).items()}


def adding(tallies: Sequence[Tally], task: Task, targets: Sequence[int]) -> dict[str, tuple[Counted, float]]:
    """Of the sums that count samples, by `tally.sum`, in which way and how much one sample adds at most in all."""
    one = tallied(tallies, *blank(task, () if task.classes else targets, 1), torch.ones(1))
    return {
        name: (how, float(one[name].sum()) if how == "all" else 1.0) for tally in tallies
        for word, how in tally.counts.items() if (name := f"{tally.tally}.{word}") in one
    }


def _try(metric: Metric, task: Task, targets: Sequence[int]) -> None:
    """Raise where a metric does not keep its contract on six made-up samples, the last of them padding."""
    outputs, y = blank(task, () if task.classes else targets, 6)  # a metric gets tokens one by one
    weight = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    try:
        whole, short = metric.sums(outputs, y, weight), metric.sums(outputs[:5], y[:5], weight[:5])
        parts = [metric.sums(outputs[near], y[near], weight[near]) for near in (slice(0, 2), slice(2, 6))]
        two = {name: torch.stack([t.double(), t.double()]) for name, t in whole.items()}
        value = metric.value(two)
    except CoterieError:
        raise
    except Exception as reason:
        raise CoterieError(f"{metric.label} cannot score such data: {type(reason).__name__}: {reason}") from reason
    for name, total in whole.items():
        if not torch.allclose(short[name].double(), total.double()):
            raise CoterieError(f"{metric.label} counts padding: a sample of weight 0 changes its sum '{name}'; "
                               "multiply what a sample adds by its weight.")
        if not torch.allclose(parts[0][name].double() + parts[1][name].double(), total.double()):
            raise CoterieError(f"{metric.label}'s sum '{name}' does not add up over batches: that of five samples is "
                               "not that of two and of three together; divide in `value`, not in `sums`.")
    wanted = (2, task.classes) if metric.by_class else (2,)
    if tuple(value.shape) != wanted:
        raise CoterieError(f"{metric.label}'s value of two clients has the shape {list(value.shape)}, not "
                           f"{list(wanted)}; sums come with the clients as first axis.")
