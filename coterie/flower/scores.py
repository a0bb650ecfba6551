"""The scores that sites tell: small json that a site writes about its own model, and what the server makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from coterie.evaluation.score import Evaluation, Scores
from coterie.evaluation.stages import SEEN
from coterie.running.clients import Measured

Told = Mapping[str, Any]
"""samples, validated, and for each stage: steps, test and val with their metrics."""


def told(found: Mapping[str, Measured], samples: int, validated: bool) -> dict[str, Any]:
    """One client's stages, and on how many test samples; without validation data `val` is of training data."""
    return {"samples": samples, "validated": validated} | {
        stage: {
            "steps": int(steps[0]), "test": {name: float(v[0]) for name, v in test.items()},
            "val": {name: float(v[0]) for name, v in val.items()},
        }
        for stage, (test, val, steps) in found.items()
    }


def evaluation(t: int, prefix: str, sites: Mapping[int, Told], classes: int) -> Evaluation:
    """What the sites told after t rounds, by their numbers."""
    numbers = sorted(sites)
    metrics = ("accuracy", "loss") if classes else ("loss",)

    def stage(name: str) -> Scores:
        def column(split: str, metric: str) -> np.ndarray[Any, np.dtype[np.float64]]:
            kept = [split == "test" or sites[k]["validated"] for k in numbers]
            return np.array([sites[k][name][split][metric] if ok else np.nan
                             for k, ok in zip(numbers, kept, strict=True)])

        return Scores(
            np.array(numbers), np.array([sites[k]["samples"] for k in numbers]),
            np.array([sites[k][name]["steps"] for k in numbers]),
            {m: column("test", m) for m in metrics}, {m: column("val", m) for m in metrics},
        )

    return Evaluation(t, {f"{prefix}{name}": stage(name) for name in SEEN})
