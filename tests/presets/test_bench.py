"""The benchmark compares like with like, and refuses what it cannot compare."""

from typing import ClassVar

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

from coterie import models
from coterie.data import Federation
from coterie.errors import CoterieError
from coterie.presets import bench


def contest(method, factory=None, **options):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(90, 6, generator=generator), torch.arange(90) % 3
    parts = np.split(np.arange(90), [10, 45])
    data = Federation.from_assignment(x, y, parts, val=0.0)
    made = factory or models.model("mlp", (6,), 3, hidden=8)
    return bench.Contest(method, data, made, 4, 0.1, "cpu", options)


@pytest.mark.parametrize(
    "method", ["fedavg", "fedper", "ditto", "fedfew:official", "cwfedavg", "fedavg+confree", "apfl"]
)
def test_both_ways_reach_the_same_rows(method):
    """The published way is torch.optim.SGD over a DataLoader with the engine's own batches, and client after client
    where a method has steps of its own (APFL): only rounding differs."""
    assert bench.apart(contest(method)) < 1e-6


def test_a_round_is_timed_both_ways():
    """Three precisions would be three lines; here it is one, with both times and what they amount to."""
    (timing,) = bench.measure(contest("fedavg"), ["float32"], (1e9, 1e9), rounds=2, reference_rounds=1)
    assert timing.ratio == timing.reference / timing.seconds
    assert timing.seconds > 0
    trained = contest("fedavg").federation.sizes("train").sum()  # one epoch: every training sample once
    assert timing.samples * timing.seconds == pytest.approx(trained)
    console = Console(record=True, width=120)
    console.print(bench.table([timing]))
    assert "fedavg" in console.export_text()


def test_a_run_counts_its_first_round():
    """100 rounds of 2 s against 1 round of 11 s and 99 of 1 s: 200 / 110."""
    timing = bench.Timing("m", "float32", 0.0, 2.0, 11.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    assert timing.over(100) == pytest.approx(200 / 110)


class Noting(nn.Module):
    """Notes at every call whether products may be rounded to TF32."""

    seen: ClassVar[list[bool]] = []

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        self.seen.append(torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32)
        return self.layer(x)


def test_the_published_way_computes_in_float32_beside_a_faster_precision():
    """It was timed in TF32 on a GPU: the simulation in tf32, built after it, set a switch of the whole process."""
    either = contest("fedavg", Noting, engine="stack")
    reference, fast = either.built("float32", reference=True), either.built("tf32")
    assert reference.choices["engine"] == "reference"
    for simulation, rounded in ((reference, False), (fast, True), (reference, False)):
        Noting.seen.clear()
        simulation.round()
        assert Noting.seen
        assert set(Noting.seen) == {rounded}


def test_ways_that_differ_are_not_timed(monkeypatch):
    """A wrong engine must not win a race."""
    monkeypatch.setattr(bench, "apart", lambda given: 0.5)
    with pytest.raises(CoterieError, match="differ by"):
        list(bench.measure(contest("fedavg"), ["float32"], (1.0, 1.0)))
