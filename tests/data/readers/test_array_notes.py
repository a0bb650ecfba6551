"""Arrays of an .npz file that are probably not what they are taken for are pointed out, with what to save instead."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.data import load

Y = np.arange(40) % 3


def normal(*shape):
    return np.random.default_rng(0).normal(size=shape)


def notes(folder, x, y=Y, options="", **more):
    np.savez(folder / "a.npz", x=x, y=y, **more)
    return load(f"{folder / 'a.npz'}{options}").notes


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64, np.uint8, np.bool_])
def test_one_hot_labels(kind, tmp_path):
    """Three columns with a single 1 in each row are three classes to whoever wrote them."""
    (said,) = notes(tmp_path, normal(40, 2), np.eye(3)[Y].astype(kind))
    assert "y of shape [40, 3] has a single 1 in every row" in said
    assert "is taken as 3 numbers to predict; for 3 classes, save y.argmax(1), the numbers 0 to 2" in said


def test_what_is_no_one_hot_label(tmp_path):
    """Several ones in a row, shares that add up to 1, one column, and targets that the user asked for."""
    x, one = np.ones((40, 2)), np.eye(3)[Y]
    both = one.copy()
    both[0] = (1, 1, 0)
    for y in (both, 0.9 * one + 0.05, one[:, :1]):
        assert notes(tmp_path, x, y) == ()
    assert notes(tmp_path, x, one, ":regression=true") == ()


@pytest.mark.parametrize("shape", [(40, 8, 8), (40, 8, 8, 1), (40, 16)])
def test_masks_of_0_and_1(shape, tmp_path):
    """1 / 255 of the range apart, a pixel of 1 is one of 0 to a model; times 255 it is as far as can be."""
    x = (np.indices(shape).sum(0) % 2).astype(np.uint8)
    (said,) = notes(tmp_path, x)
    assert "uint8 with nothing but 0 and 1" in said
    assert "save x * 255" in said
    for fine in (x * 255, x * 2, np.zeros_like(x)):
        assert notes(tmp_path, fine) == ()


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_floats_with_channels_last(channels, tmp_path):
    (said,) = notes(tmp_path, normal(40, 32, 28, channels).astype(np.float32))
    assert f"floats of shape [40, 32, 28, {channels}], read as 32 channels of 28 x {channels}" in said
    assert "save x.transpose(0, 3, 1, 2)" in said


@pytest.mark.parametrize("shape", [(40, 3, 32, 32), (40, 1, 28, 3), (40, 3, 4, 4), (40, 12, 100), (40, 30), (40,)])
def test_scaled_floats_in_the_usual_order_need_no_word(shape, tmp_path):
    assert notes(tmp_path, normal(*shape).astype(np.float32)) == ()


def test_floats_from_0_to_255(tmp_path):
    """A chequerboard of 0 and 255 has a root mean square of 255 / sqrt(2), about 180."""
    (said,) = notes(tmp_path, np.tile(np.array([[0, 255], [255, 0]], np.float32), (40, 1, 14, 14)))
    assert said == ("x holds large numbers, taken as they are: channel 0 (about 180); models train badly on these: "
                    "save x / 255")


def test_large_numbers(tmp_path):
    """The rule of tables: a root mean square above 10 for a column, a mean or deviation above 100 for a target."""
    x = normal(40, 3) * (1, 500, 9) + (0, 0, 0)
    (said,) = notes(tmp_path, x, feature_names=np.array(["age", "dose", "z"]))
    assert "large numbers, taken as they are: dose (about " in said
    assert said.endswith("save (x - x.mean(0)) / (x.std(0) + 1e-8)")
    (said,) = notes(tmp_path, x[:, [1]])
    assert "x[0] (about " in said
    (said,) = notes(tmp_path, normal(40, 2, 50) * 300)
    assert "channel 0 (about " in said
    assert said.endswith("save (x - x.mean()) / x.std()")
    (said,) = notes(tmp_path, x[:, :1], np.full(40, 200.0) + normal(40))
    assert said.startswith("y holds large numbers to predict, taken as they are (about 200);")
    assert said.endswith("save (y - y.mean(0)) / y.std(0)")
    (said,) = notes(tmp_path, x[:, :1], Y[:, None] * (1, 400))
    assert "(about 5" in said, "of two targets the larger: 400 times the root of (0 + 1 + 4) / 3"
    assert notes(tmp_path, x[:, :1], 90 + normal(40)) == ()
