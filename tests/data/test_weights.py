"""Class weights are those of scikit-learn on each client's own training labels."""

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_sample_weight

from coterie.data.weights import balanced


def test_a_client_by_hand(tiny):
    """5 training labels 0 0 0 1 1 of 3 classes: n = 5, two classes are held, so 5 / (2 * 3) and 5 / (2 * 2)."""
    x, y = torch.zeros(5, 4), torch.tensor([0, 1, 0, 0, 1])
    data = tiny.Federation.from_splits([(x, y)], classes=3)
    found = dict(zip(data.client(0, "train")[1].tolist(), balanced(data)[data.bounds[0, 0] :].tolist(), strict=False))
    assert found == pytest.approx({0: 5 / 6, 1: 5 / 4})


@pytest.mark.parametrize("seed", range(5))
def test_every_client_has_the_weights_of_scikit_learn(tiny, seed):
    """Its classes are those of its training samples; held-back samples count once; the weights average to 1."""
    data = tiny.federation(seed=seed, sizes=(7, 40, 1, 5, 23))
    found = balanced(data)
    for client, (start, stop) in enumerate(data.bounds[:, :2]):
        mine = found[start:stop].numpy()
        np.testing.assert_allclose(mine, compute_sample_weight("balanced", data.y[start:stop].numpy()), rtol=1e-14)
        assert mine.mean() == pytest.approx(1)
        assert (found[stop : data.bounds[client, 3]] == 1).all()


def test_validation_that_is_given_back_counts_as_training(tiny):
    """A method without validation trains on those samples, too, so they are among its n_ic."""
    data = tiny.federation().without_validation()
    found = balanced(data)
    for start, stop in data.bounds[:, :2]:
        expected = compute_sample_weight("balanced", data.y[start:stop].numpy())
        np.testing.assert_allclose(found[start:stop].numpy(), expected, rtol=1e-14)
