"""Frozen weights with a residual: laid out, added once for all clients, taken along by models that leave a run."""

from __future__ import annotations

import torch
from by_hand import assert_close
from torch import nn

from coterie.contract.ground import Ground, added, grounded, pieces, unmoved
from coterie.contract.layout import Layout
from coterie.contract.records import concatenate
from coterie.models.lora import adapted


class Three(nn.Module):
    """A weight o x q, one o x q k, and one q x o."""

    def __init__(self):
        super().__init__()
        self.words, self.one, self.conv = nn.Embedding(7, 4), nn.Linear(4, 6), nn.Conv1d(6, 5, 3)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.conv(self.one(self.words(x)).transpose(1, 2)).mean(-1))


def made():
    module = adapted(Three, "lora:rank=2,targets=words+one+conv")().double()
    layout = Layout.of(module)
    generator = torch.Generator().manual_seed(0)
    products = [torch.randn(o, q, generator=generator, dtype=torch.float64) for o, q in ((4, 7), (6, 4), (5, 18))]
    return module, layout, added(unmoved(layout, products[0]), products), products


def test_a_residual_lies_layer_after_layer():
    _, layout, residual, products = made()
    assert residual.shape == (28 + 24 + 90, 1)
    assert [pair.name for pair, _ in pieces(residual, layout)] == ["words", "one", "conv"]
    for (_, found), expected in zip(pieces(added(residual, products), layout), products, strict=True):
        assert torch.equal(found, 2 * expected)


def test_a_model_that_leaves_takes_it_along_and_the_backbone_stays():
    """R in the shape of each kind of weight: as it is, per offset of a convolution, and turned for an embedding."""
    module, layout, residual, (words, one, conv) = made()
    before = {name: p.clone() for name, p in module.named_parameters()}
    moved, theirs = grounded(module, layout, residual)
    expected = {"words.base.weight": words.T, "one.base.weight": one, "conv.base.weight": conv.view(5, 6, 3)}
    values = dict(zip((entry.name for entry in theirs.frozen), theirs.values, strict=True))
    for name, p in moved.named_parameters():
        assert_close(p.detach(), before[name] + expected.get(name, 0))
        if name in expected:
            assert torch.equal(values[name], p)
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
    assert theirs.digest != layout.digest
    assert grounded(module, layout, None) == (module, layout)


def test_a_net_stands_where_it_is_put_in_one_place_of_memory():
    """What was captured for W + R reads one address, and finds there whatever R is the last."""
    module, layout, residual, _ = made()
    given, weight = layout.values, module.one.base.weight
    ground, kept, start = Ground(module, layout), weight.clone(), weight.data_ptr()
    ground.stand_on(residual)
    place, first = weight.data_ptr(), weight.clone()
    assert place != start
    ground.stand_on(3 * residual)
    assert weight.data_ptr() == place
    assert_close(weight.detach() - kept, 3 * (first - kept))
    ground.stand_on(None)
    assert (weight.data_ptr(), ground.moved) == (start, False)
    assert torch.equal(weight, kept)
    ground.stand_on(3 * residual)
    residual.mul_(3)  # written into, as a caller may that has no other use for it
    ground.stand_on(residual)
    assert_close(weight.detach() - kept, 3 * (first - kept))
    for value, entry in zip(given, layout.frozen, strict=True):
        assert torch.equal(value, kept) or entry.name != "one.base.weight"


def test_what_all_clients_share_stays_one_tensor():
    """Joined along the clients it is one view still, also where each part was of a single client."""
    shared, own = torch.randn(5, 1), torch.randn(3, 2)
    parts = [{"residual": shared.unsqueeze(0), "own": own[i : i + 1]} for i in range(3)]
    found = concatenate([*parts, {"residual": shared.unsqueeze(0).expand(2, 5, 1), "own": own[:2]}])
    assert found["residual"].shape == (5, 5, 1)
    assert found["residual"].data_ptr() == shared.data_ptr()
    assert torch.equal(found["residual"][4], shared)
    assert torch.equal(found["own"], torch.cat([own, own[:2]]))
