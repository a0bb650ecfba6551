"""A backbone stored in bfloat16: half the memory, and nothing is rounded but its weights, once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from coterie.contract.frozen import frozen_tensors
from coterie.contract.layout import Layout
from coterie.errors import CoterieError
from coterie.models.lora import LoRA, adapted, merged

STORED = "lora:rank=2,backbone=bfloat16"


class Reader(nn.Module):
    """Every kind of layer that can be stored: an embedding, convolutions and linear layers; and one that cannot."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 6, padding_idx=0)
        self.one = nn.Conv1d(6, 5, 3, padding=1)
        self.two = nn.Conv2d(1, 4, (1, 3), bias=False)
        self.norm = nn.LayerNorm(4)
        self.q = nn.Linear(4, 7)
        self.head = nn.Linear(7, 3)

    def forward(self, x):
        z = torch.tanh(self.one(self.words(x).transpose(1, 2)))
        z = self.norm(self.two(z[:, None]).mean((2, 3)))
        return self.head(torch.tanh(self.q(z)))


TOKENS = torch.tensor([[1, 2, 3, 0, 5, 6], [7, 8, 10, 0, 1, 4]])


def rounded(module):
    """The module with every frozen weight of such a layer rounded to bfloat16 and back, by hand."""
    with torch.no_grad():
        for name, p in module.named_parameters():
            if not p.requires_grad and "norm" not in name:
                p.copy_(p.to(torch.bfloat16).float())
    return module


def test_only_the_weights_are_rounded_and_each_once():
    """What it computes is bit for bit what a float32 model with the rounded weights computes, in float32; against the
    weights as they were it is off by the rounding, at most 2^-8 of each weight."""
    torch.manual_seed(0)
    plain = adapted(Reader(), "lora:rank=2")()
    torch.manual_seed(0)
    stored = adapted(Reader(), STORED)()
    frozen = {n: t for n, t in stored.named_parameters() if not t.requires_grad}
    assert {t.dtype for n, t in frozen.items() if "norm" not in n} == {torch.bfloat16}
    assert {t.dtype for n, t in stored.named_parameters() if t.requires_grad or "norm" in n} == {torch.float32}
    before = dict(plain.named_parameters())
    for name, weight in frozen.items():
        assert bool(((weight.float() - before[name]).abs() <= 2**-8 * before[name].abs()).all())
    near = plain(TOKENS)
    assert torch.equal(stored(TOKENS), rounded(plain)(TOKENS))
    assert not torch.equal(stored(TOKENS), near)


def test_the_backbone_takes_half_the_memory():
    """Two bytes instead of four for each number of every layer but the normalisation's, which is 2 * 4 numbers."""
    sizes = {}
    for adapter in ("lora:rank=2", STORED):
        held = frozen_tensors(adapted(Reader, adapter)())
        sizes[adapter] = sum(t.nbytes for t in held.values())
    numbers = 11 * 6 + (6 * 3 * 5 + 5) + 4 * 3 + (4 * 7 + 7)
    assert sizes["lora:rank=2"] == 4 * (numbers + 8)
    assert sizes[STORED] == 2 * numbers + 4 * 8


@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_a_run_is_that_over_the_rounded_backbone(tiny, precision):
    """On every engine, with rows of both formats and with kept outputs of frozen layers: the rows are those of a run
    whose backbone was rounded beforehand. The first layer is frozen, so its outputs are kept."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    with torch.no_grad():
        by_hand = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        for p, q in zip(by_hand.parameters(), module.parameters(), strict=True):
            p.copy_(q.to(torch.bfloat16).float())
        for p, q in zip(by_hand[-1].parameters(), module[-1].parameters(), strict=True):
            p.copy_(q)  # the head trains
    for options in ({"engine": "stack"}, {"engine": "loop"}, {"engine": "reference"}, {"prefix": "off"}):
        rows = []
        for model, more in ((module, ",backbone=bfloat16"), (by_hand, "")):
            sim = tiny.simulation("fedavg", adapted(model, f"lora:rank=2,targets=2{more}"), precision=precision,
                                  **options)
            sim.round()
            sim.round()
            rows.append(tiny.state(sim))
        tiny.close(*rows, 1e-12 if precision == "float64" else 1e-6)


def test_what_was_stored_is_whole_again_when_merged():
    """Merged layers are of the usual kind, in float32, with the rounded weight plus s B A unrounded."""
    model = adapted(Reader, STORED)()
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.01)
    layer = model.q
    expected = layer.base.weight.float() + 2 * layer.lora.B @ layer.lora.A
    found = merged(model)
    assert type(found.q) is nn.Linear
    assert found.q.weight.dtype == torch.float32
    assert torch.equal(found.q.weight, expected)
    torch.testing.assert_close(found(TOKENS), model(TOKENS), rtol=1e-5, atol=1e-5)


def test_the_fingerprint_tells_a_stored_backbone_from_another():
    """Sites over a rounded backbone and over another do not exchange rows: their models differ."""
    torch.manual_seed(0)
    module = Reader()
    digests = [Layout.of(adapted(module, adapter)()).digest for adapter in ("lora:rank=2", STORED)]
    assert digests[0].split("-")[0] == digests[1].split("-")[0]
    assert digests[0] != digests[1]


def test_what_cannot_be_stored_is_said():
    with pytest.raises(CoterieError, match="with base=trains nothing is"):
        LoRA.of("lora:base=trains,backbone=bfloat16")
    with pytest.raises(CoterieError, match="backbone"):
        LoRA.of("lora:backbone=int3")
