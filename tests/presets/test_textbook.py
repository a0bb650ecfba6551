"""The textbook's printed numbers (Output 14.7.1) and the answers to exercises 14.7.2 and 14.7.3.

The expected values were computed by a separate NumPy program from the textbook's recipe, not by this library.
"""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from matplotlib.image import imread
from rich.console import Console

from coterie.presets import textbook

OUTPUT = {
    "0": (3.763, 4.314, 1.913),
    "1": (3.154, 3.699, 3.505),
    "2": (3.014, 4.031, 1.622),
    "3": (2.463, 2.026, 2.447),
    "4": (2.546, 5.203, 2.402),
    "5": (4.186, 7.982, 3.112),
    "mean": (3.188, 4.543, 2.500),
    "worst": (4.186, 7.982, 3.505),
}

MEANS = {
    5: (4.215, 18.138, 4.630),
    10: (3.550, 7.459, 3.217),
    14: (3.188, 4.543, 2.500),
    20: (2.893, 2.058, 1.968),
    30: (3.188, 1.568, 1.545),
    50: (2.871, 1.290, 1.287),
    100: (2.996, 1.149, 1.147),
    200: (2.839, 1.035, 1.035),
    2000: (2.891, 1.032, 1.032),
}


def rounded(*values: float) -> tuple[float, ...]:
    return tuple(round(value, 3) for value in values)


def test_output_14_7_1() -> None:
    lines = textbook.table()
    assert {line.client: rounded(line.shared, line.local, line.personalized) for line in lines} == OUTPUT


def test_exercise_14_7_2_best_mixtures() -> None:
    mixes = textbook.interpolation()
    assert [mix.weight for mix in mixes] == [0.4, 0.4, 0.4, 0.7, 0.2, 0.1]
    assert rounded(*(mix.error for mix in mixes)) == (3.287, 2.207, 1.547, 1.878, 2.284, 4.148)


def test_the_ends_of_the_mixtures_are_the_global_and_the_local_model() -> None:
    for mix, line in zip(textbook.interpolation(), textbook.table(), strict=False):
        assert mix.errors[0] == pytest.approx(line.shared, abs=1e-12)
        assert mix.errors[-1] == pytest.approx(line.local, abs=1e-12)


def test_exercise_14_7_3_thresholds() -> None:
    lines = textbook.thresholds()
    assert {line.n_train: rounded(line.shared, line.local, line.personalized) for line in lines} == MEANS


def test_fedavg_adapted_is_the_personalized_column() -> None:
    """FedAvg + fine-tune is FedAvg's adapted stage: 200 epochs from the same global model give the same errors."""
    found = textbook._trained(14)
    longer = textbook._simulation("fedavg", found.together.federation, textbook.ROUNDS, steps=textbook.OWN_STEPS)
    longer.restore(*found.together.snapshot())
    assert longer.evaluate().stages["adapted"].test["loss"] == pytest.approx(found.personalized, abs=1e-12)


def test_all_numbers_are_shown() -> None:
    text = StringIO()
    Console(file=text, width=80).print(textbook.show())
    shown = text.getvalue().split()
    for numbers in (*OUTPUT.values(), *MEANS.values()):
        assert {f"{number:.3f}" for number in numbers} <= set(shown)


def test_both_exercises_are_drawn(tmp_path: Path) -> None:
    paths = textbook.draw(tmp_path / "new" / "folder")
    assert [path.name for path in paths] == ["textbook_interpolation.png", "textbook_thresholds.png"]
    for path in paths:
        image = imread(path)
        assert image.shape[1] > 800
        assert 0.005 < float((image[..., :3].min(axis=2) < 0.9).mean()) < 0.5
