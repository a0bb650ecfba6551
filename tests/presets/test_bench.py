"""The benchmark compares like with like, and refuses what it cannot compare."""

import numpy as np
import pytest
import torch
from rich.console import Console

from coterie import models
from coterie.data import Federation
from coterie.errors import CoterieError
from coterie.presets import bench


def case(method):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(90, 6, generator=generator), torch.arange(90) % 3
    parts = np.split(np.arange(90), [10, 45])
    data = Federation.from_assignment(x, y, parts, val=0.0)
    return bench.Case(method, data, models.model("mlp", (6,), 3, hidden=8), 4, 0.1, "cpu", {})


@pytest.mark.parametrize("method", ["fedavg", "fedper", "ditto", "fedfew:official", "cwfedavg", "fedavg+confree"])
def test_both_ways_reach_the_same_rows(method):
    """The published way is torch.optim.SGD over a DataLoader with the engine's own batches: only rounding differs."""
    assert bench.apart(case(method)) < 1e-6


def test_a_round_is_timed_both_ways():
    """Three precisions would be three lines; here it is one, with both times and what they amount to."""
    (timing,) = bench.measure(case("fedavg"), ["float32"], (1e9, 1e9), rounds=2, published_rounds=1)
    assert timing.ratio == timing.published / timing.seconds
    assert timing.seconds > 0
    trained = case("fedavg").federation.sizes("train").sum()  # one epoch: every training sample once
    assert timing.samples * timing.seconds == pytest.approx(trained)
    console = Console(record=True, width=120)
    console.print(bench.table([timing]))
    assert "fedavg" in console.export_text()


def test_a_run_counts_its_first_round():
    """100 rounds of 2 s against 1 round of 11 s and 99 of 1 s: 200 / 110."""
    timing = bench.Timing("m", "float32", 0.0, 2.0, 11.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    assert timing.over(100) == pytest.approx(200 / 110)


def test_steps_of_a_method_are_not_compared_with_plain_sgd():
    """APFL's inner step is its own; timing the stacked engine under the name `published` would flatter."""
    with pytest.raises(CoterieError, match="steps of its own"):
        bench.apart(case("apfl"))


def test_ways_that_differ_are_not_timed(monkeypatch):
    """A wrong engine must not win a race."""
    monkeypatch.setattr(bench, "apart", lambda given: 0.5)
    with pytest.raises(CoterieError, match="differ by"):
        list(bench.measure(case("fedavg"), ["float32"], (1.0, 1.0)))
