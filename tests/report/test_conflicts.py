"""The picture of conflicts is written for every shape of comparison, and shows what was recorded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from coterie.errors import CoterieError
from coterie.evaluation.score import Evaluation, Scores
from coterie.report.conflicts import alike, conflicts, last_cosines, opposed
from coterie.running.result import Result


def result(method: str = "fedavg", fractions: tuple[float | None, ...] = (0.5, None, 0.25), clients: int = 6,
           seed: int = 0, matrix: bool = True) -> Result:
    rng = np.random.default_rng(seed)
    updates = rng.standard_normal((clients, 3))
    updates /= np.linalg.norm(updates, axis=1, keepdims=True)
    rounds = [{"round": t, "report": {} if f is None else {"opposing": f}} for t, f in enumerate(fractions)]
    if matrix:
        rounds[-1]["report"] = rounds[-1]["report"] | {"cosines": (updates @ updates.T).tolist()}  # type: ignore[operator]
    nobody = np.zeros(0)
    scores = Scores(nobody, nobody, nobody, {"loss": nobody}, {"loss": nobody})
    return Result(method, seed, (Evaluation(0, {"served": scores}),), tuple(rounds))


@pytest.mark.parametrize(
    "results",
    [
        pytest.param([result()], id="one method"),
        pytest.param([result(m, seed=s) for m in ("fedavg", "fedper", "ifca") for s in range(2)], id="seeds"),
        pytest.param([result(f"m{k}") for k in range(9)], id="nine methods"),
        pytest.param([result(clients=1, fractions=(0.5,)), result("two", clients=2)], id="few clients"),
        pytest.param([result(matrix=False), result("local", (None,), matrix=False)], id="no matrix"),
    ],
)
def test_the_picture_is_written(results: list[Result], tmp_path: Path) -> None:
    path = conflicts(results, tmp_path / "conflicts.png")
    image = imread(path)
    assert image.shape[1] > 600
    assert 0.001 < float((image[..., :3].min(axis=2) < 0.9).mean()) < 0.9


def test_fractions_are_means_over_seeds_by_round() -> None:
    rounds, fractions = opposed([result(), result(fractions=(0.7, 0.1, float("nan")))])
    np.testing.assert_allclose(rounds, [1, 2, 3])
    np.testing.assert_allclose(fractions, [0.6, 0.1, 0.25])


def test_the_last_matrix_is_shown_with_like_clients_together() -> None:
    signs = np.array([1, -1, 1, -1, 1, -1.0])
    matrix = np.outer(signs, signs)
    groups = signs[alike(matrix)]
    assert np.abs(np.diff(groups)).sum() == 2  # one change of sides
    assert last_cosines([result(matrix=False)]) is None
    found = last_cosines([result(matrix=False), result(seed=3)])
    assert found is not None
    assert found.shape == (6, 6)


def test_nothing_recorded_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(CoterieError, match="no round recorded"):
        conflicts([result(fractions=(None, None), matrix=False)], tmp_path / "none.png")
