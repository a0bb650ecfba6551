"""Samples arrive with the promised shape, scale and type, and the textbook's numbers come out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]

from coterie.data import Federation, digits, load, npz, textbook_clients
from coterie.errors import CoterieError


def test_digits() -> None:
    x, y = digits()
    assert (x.shape, x.dtype, y.dtype) == ((1797, 1, 8, 8), torch.float32, torch.int64)
    assert (float(x.min()), float(x.max())) == (0.0, 1.0)
    table = load_digits()
    assert np.array_equal(x.flatten(1).numpy() * 16, table.data)  # sixteenths are exact in float32
    assert y.tolist() == table.target.tolist()


def test_npz_images_become_channels_first_from_minus_one_to_one(tmp_path: Path) -> None:
    x = np.zeros((2, 4, 5, 3), np.uint8)
    x[0, 1, 2, 0], x[1, 3, 4, 2] = 255, 51
    np.savez(tmp_path / "images.npz", x=x, y=np.array([1, 0], np.uint8), client=np.array(["b", "a"]), other=np.ones(9))
    source = npz(tmp_path / "images.npz")
    assert (source.x.shape, source.x.dtype) == ((2, 3, 4, 5), torch.float32)
    assert source.x.is_contiguous()
    assert float(source.x[0, 0, 1, 2]) == 1.0  # (255/255 - 1/2) / (1/2)
    assert float(source.x[1, 2, 3, 4]) == pytest.approx(-0.6)  # 51/255 = 1/5
    assert int((source.x == -1).sum()) == 2 * 60 - 2  # black everywhere else
    assert (source.y.tolist(), source.y.dtype, source.name) == ([1, 0], torch.int64, "images")
    assert source.client is not None
    assert source.client.tolist() == ["b", "a"]


@pytest.mark.parametrize(
    ("x", "shape", "dtype"),
    [
        (np.zeros((3, 4, 4), np.uint8), (3, 1, 4, 4), torch.float32),
        (np.zeros((3, 16), np.uint8), (3, 16), torch.float32),
        (np.zeros((3, 2, 4, 4), np.float64), (3, 2, 4, 4), torch.float64),
        (np.zeros((3, 2), np.float16), (3, 2), torch.float32),
        (np.zeros((3, 7), np.int32), (3, 7), torch.int64),
    ],
)
def test_npz_other_features(x: np.ndarray, shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=x, y=np.zeros(3))
    source = load(tmp_path / "data.npz")
    assert (source.x.shape, source.x.dtype) == (shape, dtype)
    assert source.client is None
    assert source.y.is_floating_point()


def test_unreadable_files_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(CoterieError, match="there is no file"):
        load(tmp_path / "missing.npz")
    for name, content in (("junk", b"junk"), ("empty", b""), ("zip", b"PK\x03\x04 cut off")):
        path = tmp_path / f"{name}.npz"
        path.write_bytes(content)
        with pytest.raises(CoterieError, match="cannot be read"):
            load(path)
    np.savez(tmp_path / "nolabels.npz", x=np.zeros((3, 2)))
    with pytest.raises(CoterieError, match="no array 'y'; it has x"):
        load(tmp_path / "nolabels.npz")
    np.savez(tmp_path / "short.npz", x=np.zeros((3, 2)), y=np.zeros(2))
    with pytest.raises(CoterieError, match=r"x of shape \[3, 2\] but y of shape \[2\]"):
        load(tmp_path / "short.npz")
    np.savez(tmp_path / "objects.npz", x=np.zeros((3, 2)), y=np.array([None, 1, "a"], dtype=object))
    with pytest.raises(CoterieError, match="cannot be read"):
        load(tmp_path / "objects.npz")
    np.savez(tmp_path / "channels.npz", x=np.zeros((3, 3, 32, 32), np.uint8), y=np.zeros(3))
    with pytest.raises(CoterieError, match="channels"):
        load(tmp_path / "channels.npz")
    with (tmp_path / "array.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(CoterieError, match="cannot be read"):
        load(tmp_path / "array.npz")


def test_unknown_dataset() -> None:
    with pytest.raises(CoterieError, match="did you mean 'digits'"):
        load("digit")


def descend(w: np.ndarray, x: np.ndarray, y: np.ndarray, steps: int) -> np.ndarray:
    for _ in range(steps):
        w = w - 0.03 * (2 / len(y)) * x.T @ (x @ w - y)
    return w


def test_textbook_table_comes_out_of_the_drawn_data() -> None:
    """The published test errors (3 decimals) are reached only if every draw comes in the recipe's order."""
    train, test = ([(x.numpy(), y.numpy()) for x, y in pairs] for pairs in textbook_clients())
    shared = np.zeros(12)
    for _ in range(400):
        shared = np.mean([descend(shared, x, y, 5) for x, y in train], axis=0)
    models = [(shared, descend(np.zeros(12), x, y, 200), descend(shared, x, y, 200)) for x, y in train]
    errors = [[float(np.mean((x @ w - y) ** 2)) for w in ws] for ws, (x, y) in zip(models, test, strict=True)]
    published = [
        [3.763, 4.314, 1.913],
        [3.154, 3.699, 3.505],
        [3.014, 4.031, 1.622],
        [2.463, 2.026, 2.447],
        [2.546, 5.203, 2.402],
        [4.186, 7.982, 3.112],
    ]
    np.testing.assert_allclose(errors, published, atol=5.001e-4)


def test_textbook_clients_make_a_federation() -> None:
    train, test = textbook_clients(n_train=5)
    federation = Federation.from_splits(train, test)
    assert (federation.clients, federation.classes, federation.x.dtype) == (6, 0, torch.float64)
    assert federation.sizes("train").tolist() == [5] * 6
    assert federation.sizes("test").tolist() == [400] * 6
    assert torch.equal(federation.client(4, "test")[1], test[4][1])
