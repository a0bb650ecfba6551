"""Features in words: what a sample is made of, in 80 columns."""

from __future__ import annotations

import numpy as np
import torch

from coterie.data import Federation, load
from coterie.data.features import MOST, Feature, features_of, listed


def test_the_features_of_a_table(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("age,ward,dose,label\n31,east,0.5,0\n,west,1.5,1\n53,east,,0\n64,hall,,1\n")
    source = load(path, fill="mean")
    assert source.features == (
        Feature("age", "whole number", 1, 31, 64, missing=1 / 4),
        Feature("ward", "category", 3, categories=3),
        Feature("dose", "number", 1, 0.5, 1.5, missing=2 / 4),
    )
    assert sum(feature.inputs for feature in source.features) == source.x.shape[1]


def test_two_hundred_features_fit_80_columns_and_are_cut_with_a_word():
    long = "measurement of something very long, number"
    many = [Feature(f"{long} {k}", "number", 1, -1e-12 / 3, 1e12 / 7) for k in range(200)]
    text = listed(many)
    assert max(map(len, text.splitlines())) <= 80
    assert f"and {200 - MOST} more features; --each lists all of them." in text
    assert len(text.splitlines()) == MOST + 2
    assert len(listed(many, every=True).splitlines()) == 201
    wide = listed([Feature("ward", "category", 100, categories=100, missing=1e-5), Feature("c", "number", 1, 3, 3)])
    assert "100 different, 100 input" in wide
    assert "< 0.1 %" in wide
    assert "3 everywhere (constant)" in wide
    assert "2 features make 101 inputs." in wide


def test_other_samples_show_their_features_too():
    numbers = features_of(torch.tensor([[1.0, 5.0], [2.0, 5.0]]))
    assert numbers == (Feature("x[0]", "number", 1, 1, 2), Feature("x[1]", "number", 1, 5, 5))
    assert [f.name for f in features_of(torch.zeros(2, 2), ["a", "b"])] == ["a", "b"]
    images = features_of(torch.linspace(-1, 1, 2 * 3 * 16).reshape(2, 3, 4, 4))
    assert [(f.name, f.kind, f.inputs) for f in images] == [(f"channel {k}", "image 4x4", 16) for k in range(3)]
    assert (images[0].low, images[2].high) == (-1, 1)
    (tokens,) = features_of(torch.tensor([[1, 7], [0, 3]]))
    assert (tokens.kind, tokens.inputs, tokens.low, tokens.high) == ("text or codes", 2, 0, 7)


def test_a_federation_in_python_needs_none_of_this():
    made = Federation.from_clients([(np.zeros((4, 2)), np.arange(4) % 2)])
    assert "groups" not in made.summary()


def test_one_of_anything_is_written_as_one():
    text = listed([Feature("said", "text", 64)])
    assert text.endswith("1 feature makes 64 inputs.")
    assert Feature("ward", "category", 1, categories=1).range == "1 different, 1 input of 0 or 1"
    assert "1 different, 1 input " in listed([Feature("ward", "category", 1, categories=1)])


def test_no_number_of_a_range_is_cut(tmp_path):
    """1.2345e+06 to 1.23457e+06 has 26 letters; cut after 24 it read 1.23457e+0."""
    lines = [f"{1234500 + k},{'ab'[k % 2]}" for k in range(71)]
    (tmp_path / "a.csv").write_text("\n".join(["cells,y", *lines]) + "\n")
    assert "1.2345e+06 to 1.23457e+06 " in listed(load(f"{tmp_path / 'a.csv'}:label=y").features)
