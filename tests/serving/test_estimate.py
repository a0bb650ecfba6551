"""The estimate of a newcomer's score: how far models made again differ."""

import numpy as np
import pytest

from coterie.serving.estimate import drift


def test_drift_is_what_samples_of_a_fold_have_in_common():
    """Accuracies 0.5 + u with u of variance 0.01 common to a fold's model, each sample drawn on its own beyond that;
    samples that flip on their own have none."""
    rng = np.random.default_rng(0)
    common = [rng.random((20, 50)) < 0.5 + rng.normal(0, 0.1, (20, 1)) for _ in range(100)]
    alone = [rng.random((20, 50)) < 0.5 for _ in range(100)]
    assert drift([fold.astype(float) for fold in common]) == pytest.approx(0.01, rel=0.15)
    assert drift([fold.astype(float) for fold in alone]) < 2e-4
    assert drift([np.ones((3, 1))]) == 0  # no pair of samples
