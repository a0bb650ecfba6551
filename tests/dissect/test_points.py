"""The points of small models: which there are, and their bytes counted by hand."""

from dataclasses import replace

import pytest

from coterie import registry
from coterie.dissect.points import EVERYTHING, NOTHING, points_of
from coterie.errors import CoterieError
from coterie.running.experiment import Experiment

MLP = Experiment(clients=4, model="mlp:hidden=8", adapter="lora:rank=2,base=trains")
"""64 -> 8 -> 10: one adapted layer with A [r, 64] and B [8, r], and the head [10, 8] with 10 biases."""
DEEP = """
from torch import nn


class Net(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.first = nn.Linear(inputs, 6)
        self.norm = {norm}(6)
        self.second = nn.Linear(6, 5)
        self.head = nn.Linear(5, outputs)

    def forward(self, x):
        return self.head(self.second(self.norm(self.first(x.flatten(1)))))
"""


def sizes(experiment, *options):
    points, left_out = points_of(experiment, experiment.federation(), *options)
    return {one.name: one.personal for one in points}, left_out


def deep(folder, norm, **options):
    path = folder / "deep.py"
    path.write_text(DEEP.format(norm=norm))
    return replace(Experiment(clients=4, model=f"{path}:Net", head="head"), **options)


def test_bytes_are_four_a_number_of_what_stays():
    """b: 8 + 10; head: 10 * 8 + 10; B: 8 r; both factors: r (64 + 8); all: 64 * 8 + 8 + 2 * 72 + 90."""
    found, left_out = sizes(MLP, (1, 2, 4))
    assert found == {
        NOTHING: 0, "biases and scales": 4 * 18, "head": 4 * 90, "B of base.1": 4 * 8 * 2,
        "B of all layers and head": 4 * (8 * 2 + 90), "adapters of rank 1": 4 * 72, "adapters of rank 2": 4 * 2 * 72,
        "adapters of rank 4": 4 * 4 * 72, "adapters and head": 4 * (2 * 72 + 90), EVERYTHING: 4 * (520 + 2 * 72 + 90),
    }
    assert left_out == ["B of all layers is left out: it is the same as B of base.1 here."]


def test_several_layers_have_their_own_last_and_all_b(tmp_path):
    """A [r, 64] and B [6, r] of the first, A [r, 6] and B [5, r] of the second layer, r = 2; LayerNorm's scale and bias
    are 6 numbers each, beside biases of 6, 5 and 10."""
    found, left_out = sizes(deep(tmp_path, "nn.LayerNorm", adapter="lora:rank=2,base=trains"), (2,))
    assert found["biases and scales"] == 4 * (6 + 6 + 6 + 5 + 10)
    assert found["B of second"] == 4 * 5 * 2
    assert found["B of all layers"] == 4 * (6 + 5) * 2
    assert found["adapters of rank 2"] == 4 * 2 * (64 + 6 + 6 + 5)
    assert not left_out


def test_scales_of_batch_normalisation_stay_with_their_statistics(tmp_path):
    """Beside biases and scales: mean [6], variance [6] and the counter of batches."""
    found, _ = sizes(deep(tmp_path, "nn.BatchNorm1d"))
    assert found["biases and scales"] == 4 * (6 + 6 + 6 + 5 + 10 + 6 + 6 + 1)


def test_a_model_without_adapters_has_the_others_and_says_so():
    found, left_out = sizes(replace(MLP, adapter=""))
    assert list(found) == [NOTHING, "biases and scales", "head", EVERYTHING]
    assert len(left_out) == 1
    assert "--adapter lora:rank=8 puts them" in left_out[0]


def test_over_a_frozen_model_only_what_trains_counts():
    """All that trains are the adapters and the head: to keep both is everything, and of biases the head's is left."""
    found, left_out = sizes(replace(MLP, adapter="lora:rank=2"), (2,))
    assert found["biases and scales"] == 4 * 10
    assert found[EVERYTHING] == 4 * (2 * 72 + 90)
    assert "adapters and head is left out: it is the same as everything here." in left_out
    assert ("a second adapter" in found) == ("feddpa" in registry.methods())


def test_ranks_above_what_a_layer_can_have_and_fixed_ones_are_left_out():
    """The layer is 8 x 64, so rank 8 says everything."""
    found, left_out = sizes(MLP, (8, 9))
    assert found["adapters of rank 8"] == 4 * 8 * 72
    assert [said for said in left_out if "rank 9 is above what layer 'base.1' can have" in said]
    fixed = replace(MLP, adapter="lora:rank=2,targets=base.1(rank=3),base=trains")
    found, left_out = sizes(fixed, (1,))
    assert found["adapters of rank 2"] == 4 * 3 * 72
    assert "adapters of rank 1 is left out: every adapted layer has a rank of its own." in left_out


def test_further_parts_are_points_and_unknown_ones_are_said():
    found, left_out = sizes(replace(MLP, adapter=""), (1,), ("base.1", "base.7"))
    assert found["base.1"] == 4 * 520
    assert [said for said in left_out if said.startswith("base.7 is left out: unknown part of the model 'base.7'")]


def test_a_model_that_cannot_be_built_is_refused():
    with pytest.raises(CoterieError, match="unknown model"):
        sizes(replace(MLP, model="nomodel"))
