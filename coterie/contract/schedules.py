"""Schedules of the learning rate: what a round's rate is, as a factor of `lr`. A new one is a function here and its
name in `Schedule`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

Schedule = Literal["constant", "decay", "cosine"]


def constant(round: int, rounds: int, decay: float) -> float:
    """1."""
    return 1.0


def decay(round: int, rounds: int, decay: float) -> float:
    """decay^t."""
    return float(decay**round)


def cosine(round: int, rounds: int, decay: float) -> float:
    """(1 + cos(pi t / T)) / 2, never exactly 0: round T is what the last `adapted` evaluation trains in."""
    return max(0.5 * (1 + math.cos(math.pi * round / max(rounds, 1))), 1e-3)


def warm(round: int, warmup: int) -> float:
    """(t + 1) / (warmup + 1) in the first `warmup` rounds, then 1."""
    return (round + 1) / (warmup + 1) if round < warmup else 1.0


FACTORS: dict[Schedule, Callable[[int, int, float], float]] = {"constant": constant, "decay": decay, "cosine": cosine}
"""`(round, rounds, decay) -> factor`."""


def factor(schedule: Schedule, round: int, rounds: int, decay: float, warmup: int) -> float:
    """A round's learning rate over `lr`: that of the warm-up, times the schedule's, whose clock starts after it.

    (t + 1) / (warmup + 1) * f(0, T - warmup) for t < warmup, then f(t - warmup, T - warmup).
    """
    return warm(round, warmup) * FACTORS[schedule](max(round - warmup, 0), rounds - warmup, decay)
