"""What people read of a federation."""

from __future__ import annotations

import numpy as np

from coterie.data import Federation, label_distance


def test_label_distance_closed_forms() -> None:
    # Two clients with one class each: the pool is (1/2, 1/2), so each is half of |1 - 1/2| + |0 - 1/2| = 1/2 away.
    assert label_distance(np.array([[7, 0], [0, 7]])).tolist() == [0.5, 0.5]
    assert label_distance(np.array([[3, 6], [1, 2]])).tolist() == [0.0, 0.0]


def test_summary_fits_a_screen_with_many_clients() -> None:
    x, y = np.zeros((20000, 2), dtype=np.float32), np.arange(20000) % 7
    assignment = list(np.arange(20000).reshape(10000, 2))
    recipe = {"source": "made up", "notes": "long " * 400}
    federation = Federation.from_assignment(x, y, assignment, unseen=1000, recipe=recipe)
    lines = federation.summary().splitlines()
    assert len(lines) <= 23
    assert max(len(line) for line in lines) <= 80
    assert "10000 (9000 train, 1000 unseen)" in federation.summary()
    # Clients of two samples train on one and test on the other.
    assert "train 10000, val 0, test 10000" in federation.summary()
