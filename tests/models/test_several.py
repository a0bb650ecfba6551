"""Layers with several adapters: what they compute, and that a layer starts as it was."""

from __future__ import annotations

import pytest
import torch
from by_hand import assert_close
from torch import nn

from coterie.errors import CoterieError
from coterie.models.lora import adapted, merged
from coterie.models.several import Mixed, Summed, Weighed, with_several

BESIDE = {"mixed": Mixed, "weighed": Weighed, "summed": Summed}


def net():
    """Layers of unequal sides, so that no transposed factor goes unseen."""
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.mark.parametrize("kind", BESIDE)
@pytest.mark.parametrize("layer", ["linear", "convolution", "embedding"])
def test_layers_add_the_outputs_of_their_adapters(kind, layer):
    """As W x and the products applied one by one, with s = 3 / 2; never a product of one pair's B and another's A."""
    made, x = {
        "linear": (lambda: nn.Linear(4, 6), torch.randn(5, 4)),
        "convolution": (lambda: nn.Conv2d(2, 6, 3, stride=2, padding=1), torch.randn(5, 2, 7, 7)),
        "embedding": (lambda: nn.Embedding(9, 6), torch.randint(0, 9, (5, 4))),
    }[layer]
    torch.manual_seed(1)
    module = with_several(adapted(lambda: nn.ModuleDict({"l": made(), "head": nn.Linear(6, 3)}),
                                  "lora:rank=2,alpha=3,targets=l")(), BESIDE[kind])
    one = module["l"]
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.normal_()
    added = {name: sub(one.base, x) for name, sub in one.named_children() if name != "base"}
    axis = 1 if layer == "convolution" else -1
    if kind == "mixed":
        expected = (1 - one.own_share) * added["lora"] + one.own_share * added["own_lora"]
    elif kind == "summed":
        expected = added["lora"] + added["cluster_lora"] + added["leaf_lora"]
    else:
        g = one.own_mixer
        scored = {"linear": lambda: x @ g.T, "embedding": lambda: g.T[x],
                  "convolution": lambda: torch.nn.functional.conv2d(x, g, stride=2, padding=1)}[layer]()
        own, shared = scored.softmax(axis).split(1, axis)
        expected = own * added["own_lora"] + shared * added["lora"]
    torch.testing.assert_close(one(x), one.base(x) + expected)
    if kind == "weighed":
        with pytest.raises(CoterieError, match="weighed by its input has no weight"):
            merged(module)
    else:
        torch.testing.assert_close(merged(module)["l"](x), one(x), rtol=1e-4, atol=1e-5)


def test_a_layer_starts_as_it_was_and_its_first_adapter_as_alone():
    """The shared pair is drawn before the others, so a method with one adapter starts from the same; others add 0."""
    def drawn(kind):
        torch.manual_seed(3)
        module = adapted(net, "lora:rank=2")()
        return module if kind is None else with_several(module, kind)

    alone, x = drawn(None).double(), torch.randn(9, 4, dtype=torch.float64)
    for kind in BESIDE.values():
        module = drawn(kind).double()
        assert torch.equal(module[0].lora.A, alone[0].lora.A)
        assert_close(module(x), alone(x))
        others = [sub for name, sub in module[0].named_children() if name.endswith("_lora")]
        assert all(sub.A.any() and not sub.B.any() and not torch.equal(sub.A, module[0].lora.A) for sub in others)
