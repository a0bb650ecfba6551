"""Augmentations by hand, and that a sample's draws depend on its step's key and its place in the batch alone."""

import math

import numpy as np
import pytest
import torch

from coterie import streams
from coterie.data.augment import AUGMENTATIONS, Augment, Crop, Flip
from coterie.errors import CoterieError


def keys(count):
    return streams.key("test", torch.arange(count))


def images(*lead, shape=(2, 5, 4), seed=0):
    return torch.randn(*lead, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_flipped_image_is_mirrored_left_to_right():
    """Every image is itself or NumPy's mirror image along the last axis, each about every second time."""
    x, found = images(400), Flip()(images(400), keys(400))
    mirrored = np.flip(x.numpy(), -1)
    swapped = [np.array_equal(found[i], mirrored[i]) for i in range(400)]
    assert all(np.array_equal(found[i], x[i]) for i in range(400) if not swapped[i])
    assert abs(sum(swapped) - 200) < 4 * math.sqrt(400) / 2  # four standard deviations of a binomial


def test_a_crop_is_a_window_of_the_padded_image():
    """Every result is one of NumPy's (2 pad + 1)^2 windows of the image in a border of zeros, and all of them occur."""
    x, pad = images(500), 2
    found = Crop(pad)(x, keys(500))
    seen = set()
    for i in range(500):
        wide = np.pad(x[i].numpy(), ((0, 0), (pad, pad), (pad, pad)))
        places = [(a, b) for a in range(5) for b in range(5) if np.array_equal(found[i], wide[:, a : a + 5, b : b + 4])]
        assert len(places) == 1
        seen |= set(places)
    assert len(seen) == 25


def test_a_crop_keeps_what_is_not_finite_out_of_the_border():
    """The border is 0, not 0 times a pixel."""
    found = Crop(1)(torch.full((50, 1, 3, 3), torch.inf), keys(50))
    assert not found.isnan().any()
    assert (found == 0).any()


def test_draws_belong_to_the_step_and_the_place_in_the_batch():
    """Batches of several steps and slots at once, one alone, and one that is cut short see the same images."""
    augment, x = Augment.of("flip+crop(pad=3)"), images(3, 4, 6)
    steps = streams.key(torch.arange(12).view(3, 4), "step")
    found = augment(x, steps)
    assert torch.equal(augment(x[1, 2], steps[1, 2]), found[1, 2])
    assert torch.equal(augment(x[1, 2, :4], steps[1, 2]), found[1, 2, :4])
    again = augment(x[:1, :1].expand(3, 4, 6, 2, 5, 4), steps)  # the same images under other keys
    assert not torch.equal(again[0, 0], again[2, 3])
    same = augment(x[0, 0, :1].expand(6, 2, 5, 4), steps[0, 0])  # and at other places
    assert len({tuple(one.flatten().tolist()) for one in same}) > 1


@pytest.mark.parametrize(("text", "parts"), [
    ("flip", (Flip(),)), ("crop", (Crop(4),)), ("crop(pad=2)", (Crop(2),)), ("flip+crop(pad=4)", (Flip(), Crop(4))),
    ("crop( pad = 1 ) + flip()", (Crop(1), Flip())),
])
def test_spellings(text, parts):
    assert Augment.of(text).parts == parts


@pytest.mark.parametrize(("text", "said"), [
    ("flop", "did you mean 'flip'"), ("flip,crop", "is spelled"), ("crop(pad=4", "is spelled"), ("", "is spelled"),
    ("crop(pads=4)", "did you mean 'pad'"), ("crop(pad=x)", "must be a whole number"), ("crop(pad=0)", "at least 1"),
    ("crop(4)", "is no option"), ("flip+flip", "stands twice"), ("flip(p=1)", "unknown option"),
])
def test_what_is_no_augmentation_is_a_sentence(text, said):
    with pytest.raises(CoterieError, match=said):
        Augment.of(text)


def test_samples_that_are_no_images_are_refused():
    with pytest.raises(CoterieError, match=r"these samples have shape \[4\]"):
        Augment.of("flip").require((4,))
    with pytest.raises(CoterieError, match="use a pad below 8"):
        Augment.of("crop(pad=8)").require((1, 8, 9))
    Augment.of("flip+crop(pad=7)").require((1, 8, 9))


def test_every_augmentation_keeps_the_shape_and_says_what_it_is():
    for name, kind in AUGMENTATIONS.items():
        assert kind.__doc__
        x = images(6, 7, shape=(3, 9, 8))
        assert kind()(x, streams.key(torch.arange(42).view(6, 7))).shape == x.shape, name
