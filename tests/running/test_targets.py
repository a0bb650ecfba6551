"""What a constant answer scores in a regression, by hand."""

import numpy as np
import pytest
import torch

from coterie import Federation
from coterie.running.targets import constants


def test_the_mean_or_the_median_of_what_is_not_test_data_is_scored_on_test_data():
    """Known 0, 0, 6 have the mean 2 and the median 0; on 1 and 5 their errors are 1 and 9, and 1 and 5.

    R2 = 1 - (1 + 9) / ((1 - 3)^2 + (5 - 3)^2) = 1 - 10 / 8. The second client has no test data.
    """
    def pair(*y):
        return torch.zeros(len(y), 2), torch.tensor(y, dtype=torch.float32)

    data = Federation.from_splits([pair(0.0, 0.0), pair(2.0)], [pair(1.0, 5.0), pair()], [pair(6.0), pair()])
    found = constants(data)
    assert found["mse"][0] == pytest.approx(5)
    assert found["mae"][0] == pytest.approx(3)
    assert found["r2"][0] == pytest.approx(-0.25)
    assert all(np.isnan(each[1]) for each in found.values())
    on_validation = constants(data, "val")  # the training data's 0 and 0 on 6
    assert on_validation["mse"][0] == pytest.approx(36)
    assert on_validation["mae"][0] == pytest.approx(6)
