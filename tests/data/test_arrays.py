"""Numpy and torch, whole numbers and floats become the tensors of a federation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from marked import marked

from coterie.data import SPLITS, Federation


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint16, np.int64, bool, ">i4"])
def test_whole_number_targets_are_labels(dtype: object) -> None:
    y = np.array([0, 1, 1, 0, 1]).astype(dtype)
    federation = Federation.from_clients([(np.zeros((5, 2), np.float32), y)])
    assert federation.y.dtype == torch.int64
    assert federation.classes == 2
    assert sum(federation.histogram(split).sum(axis=0) for split in SPLITS).tolist() == [2, 3]


def test_float_targets_are_regression_in_the_features_precision() -> None:
    x = torch.zeros(6, 2)
    federation = Federation.from_clients([(x, torch.arange(12.0).double().reshape(6, 2))])
    assert federation.classes == 0
    assert federation.y.shape == (6, 2)
    assert federation.y.dtype == torch.float32
    assert federation.histogram().shape == (1, 0)
    assert "regression" in federation.summary()
    counted = Federation.from_clients([(x, torch.arange(6))], classes=0)
    assert (counted.classes, counted.y.dtype) == (0, torch.float32)


@pytest.mark.parametrize(
    ("given_dtype", "kept"),
    [
        (np.float16, torch.float32),
        (np.float32, torch.float32),
        (np.float64, torch.float64),
        (np.int32, torch.int64),
        (np.uint8, torch.int64),
    ],
)
def test_feature_types(given_dtype: type, kept: torch.dtype) -> None:
    x = np.arange(12).reshape(6, 2).astype(given_dtype)
    x.flags.writeable = False
    federation = Federation.from_clients([(x, np.zeros(6, int))], test=0, val=0)
    assert federation.x.dtype == kept
    assert sorted(federation.x[:, 0].tolist()) == [0, 2, 4, 6, 8, 10]


def test_torch_and_numpy_clients_are_the_same_federation() -> None:
    numpy = marked(9, 12)
    mixed = [(torch.from_numpy(numpy[0][0]), torch.from_numpy(numpy[0][1])), numpy[1]]
    assert Federation.from_clients(mixed).fingerprint() == Federation.from_clients(numpy).fingerprint()
