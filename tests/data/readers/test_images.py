"""Images of 16 bits are read over their whole range, alike to 8-bit ones; those without a known range are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from data_files import cubes
from PIL import Image

from coterie.data import load
from coterie.errors import CoterieError, NoLabels
from coterie.serving.newcomer_data import read

SHADES = cubes(8, shape=(5, 6))


def folder(root, pictures, suffix="png"):
    """Two clients with two classes each."""
    for k, pixels in enumerate(pictures):
        place = root / "ab"[k % 2] / "xy"[k // 2 % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place / f"{k}.{suffix}")
    return root


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
@pytest.mark.parametrize("options", [{}, {"colour": "rgb"}])
def test_16_bit_copies_are_the_same_pictures(suffix, options, tmp_path):
    """255 times 257 is 65535, so v of 255 and 257 v of 65535 are one share; before, 16 bits were clipped at 255."""
    small = load(folder(tmp_path / "8", SHADES), **options)
    deep = load(folder(tmp_path / "16", SHADES.astype(np.uint16) * 257, suffix), **options)
    assert torch.equal(small.x, deep.x)
    assert deep.x.dtype == torch.float32
    assert deep.notes == ()


def test_each_of_65536_shades_is_its_own(tmp_path):
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    x = load(folder(tmp_path, [ramp] * 4)).x[0, 0]
    assert torch.allclose(x.flatten(), torch.arange(65536) / 65535 * 2 - 1, atol=1e-6)
    assert len(torch.unique(x)) == 65536


def test_scaled_16_bit_images_are_those_of_8_bit_up_to_rounding(tmp_path):
    """8 bits are rounded to whole numbers twice, along rows and along columns; a cubic curve's weights add up to less
    than 2 in size, so that they are within 0.5 + 2 * 0.5 of one in 255, on a range of 2."""
    small = load(folder(tmp_path / "8", SHADES), size=3).x
    deep = load(folder(tmp_path / "16", SHADES.astype(np.uint16) * 257), size=3).x
    assert torch.allclose(small, deep, atol=2 * 1.5 / 255)


def test_12_bits_in_16_are_pointed_out_and_still_differ(tmp_path):
    """A scanner's 0 to 4095 lies within -1 and 2 * 4095 / 65535 - 1 = -0.875."""
    values = np.stack([np.linspace(0, 4095, 30).astype(np.uint16).reshape(5, 6)] * 8)
    source = load(folder(tmp_path, values))
    (said,) = source.notes
    assert said.startswith("images of 16 bits hold 0 to 4095 alone")
    assert "within -1 to -0.875" in said
    assert len(torch.unique(source.x[0])) == 30


def test_mixed_depths_are_counted_and_read_alike(tmp_path):
    mixed = [pixels.astype(np.uint16) * 257 if k < 3 else pixels for k, pixels in enumerate(SHADES)]
    mixed[0][0, 0] = 65535  # so that the whole range is used
    source = load(folder(tmp_path / "m", mixed))
    assert [note for note in source.notes if "depths" in note] == [
        "images are of different depths: 5 of 8 bits and 3 of 16 bits; each is read as a share of its own range, 0 to "
        "255 or 0 to 65535"
    ]
    plain = load(folder(tmp_path / "p", [SHADES[k] for k in range(8)]))
    same = source.x == plain.x
    assert int((~same).sum()) <= 1


def test_a_deep_grey_image_among_coloured_ones_is_grey(tmp_path):
    coloured = [np.stack([pixels] * 3, 2) for pixels in SHADES[:7]]
    source = load(folder(tmp_path, [*coloured, SHADES[7].astype(np.uint16) * 257]))
    assert source.x.shape == (8, 3, 5, 6)
    assert torch.equal(source.x[:, 0], source.x[:, 2])


@pytest.mark.parametrize(("kind", "what"), [(np.float32, "floats"), (np.int32, "whole numbers of more than 16 bits")])
def test_numbers_without_a_range_are_refused(kind, what, tmp_path):
    """-1000 to 3000 of a CT have no black and white: how to bring them to pixels is the user's to say."""
    root = folder(tmp_path / "t", [*SHADES[:6], *(pixels.astype(kind) * 40 - 1000 for pixels in SHADES[6:])], "tif")
    with pytest.raises(CoterieError) as caught:
        load(root)
    said = str(caught.value)
    assert "2 of 8 images have no range of pixels that is known (client a: 1, client b: 1)" in said
    assert what in said
    assert "save such images with 8 or 16 bits" in said
    kept = load(root, skip=True)
    assert len(kept.x) == 6


def test_pictures_of_a_hugging_face_data_set_follow_the_same_rule(tmp_path):
    import datasets

    folder(tmp_path, SHADES.astype(np.uint16) * 16)
    held = [{"bytes": path.read_bytes(), "path": None} for path in sorted(tmp_path.rglob("*.png"))]
    made = datasets.Dataset.from_dict(
        {"image": held, "label": [0, 1] * 4},
        features=datasets.Features({"image": datasets.Image(decode=False), "label": datasets.Value("int64")}),
    )
    assert any("images of 16 bits" in note for note in load(made).notes)


def test_images_in_no_folder_have_no_labels(tmp_path):
    """Whoever sends them may be served without; the sentence says how labels are told."""
    folder(tmp_path, SHADES[:2], "png")
    for path in sorted(tmp_path.rglob("*.png")):
        path.rename(tmp_path / path.name)
    for place in sorted(tmp_path.rglob("*"), reverse=True):
        if place.is_dir():
            place.rmdir()
    with pytest.raises(NoLabels, match=r"of each class into a folder of its name, as CLASS/\w+\.png, or list them in"):
        load(tmp_path)


def test_a_newcomers_range_is_said(tmp_path):
    """12 bits in 16 are nearly black to a model that was trained on whole ranges."""
    folder(tmp_path, SHADES.astype(np.uint16) * 16)
    assert any(note.startswith("images of 16 bits hold") for note in read(str(tmp_path), "a")[3])
