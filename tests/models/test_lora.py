"""Low-rank adapters: what an adapted layer computes, where it starts, what trains, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from coterie.contract.cohort import Init
from coterie.contract.layout import Layout
from coterie.contract.patterns import partly
from coterie.errors import CoterieError
from coterie.models.lora import LoRA, adapted, merged


class Net(nn.Module):
    """One layer of each kind that can be adapted, none of them square, and a head."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 5, padding_idx=0)
        self.one = nn.Conv1d(5, 6, 3, stride=2, padding=1, dilation=2, padding_mode="circular")
        self.two = nn.Conv2d(1, 4, (1, 3), padding=(0, 1), bias=False)
        self.encoder = nn.ModuleDict({"q": nn.Linear(6, 7), "v": nn.Linear(6, 3, bias=False)})
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        z = self.one(self.words(x).transpose(1, 2)).transpose(1, 2)
        z = torch.cat([self.encoder["q"](z), self.encoder["v"](z)], -1)
        return self.head(self.two(z[:, None]).mean((2, 3)))


TARGETS = {"words": (5, 9), "one": (6, 15), "two": (4, 3), "encoder.q": (7, 6), "encoder.v": (3, 6)}
EVERY = "lora:rank=2,alpha=3,targets=all+words"
SAMPLES = torch.tensor([[1, 2, 3, 0, 5, 6], [7, 8, 0, 0, 1, 4]])


def drawn(module, seed=0):
    """The module with every number drawn anew, adapters too, so that nothing is zero by its start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return module.double()


def test_an_adapted_layer_is_the_layer_with_the_weight_that_the_adapter_makes():
    """y = W x + b + s B A x is the layer with W + s B A: of every kind of layer, none of them square (a transposed
    product would not even fit), with stride, dilation and circular padding; `merged` has just those layers."""
    module = drawn(adapted(Net, EVERY)())
    with torch.no_grad():
        module.words.base.weight[0] = 0
        module.words.lora.A[:, 0] = 0  # the padding token's column, which never trains
    plain = merged(module)
    assert {type(sub) for sub in plain.modules()} == {type(sub) for sub in Net().modules()}
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in Net().named_parameters()]
    torch.testing.assert_close(module(SAMPLES), plain(SAMPLES), rtol=1e-12, atol=1e-12)
    for name in TARGETS:
        layer = module.get_submodule(name)
        product = 1.5 * layer.lora.B.flatten(1) @ layer.lora.A.flatten(1)  # s = alpha / rank = 3 / 2
        product = product.T if name == "words" else product
        expected = layer.base.weight + product.view_as(layer.base.weight)
        torch.testing.assert_close(plain.get_submodule(name).weight, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(layer.weight, expected, rtol=1e-12, atol=1e-12)


def test_a_layer_that_others_read_the_weight_of_is_adapted_for_them_too():
    """PyTorch's attention takes `out_proj.weight` and never calls the layer; in evaluation its fast way takes the
    weights of linear1 and linear2, too. Without gradients and with them the numbers are the merged model's."""
    torch.manual_seed(0)
    body = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    module = drawn(adapted(lambda: nn.Sequential(body, nn.Linear(8, 3)), "lora:rank=2")()).eval()
    assert {p.name for p in Layout.of(module).pairs} == {"0.self_attn.out_proj", "0.linear1", "0.linear2"}
    x = torch.randn(4, 5, 8, dtype=torch.float64)
    expected = merged(module).eval()(x)
    torch.testing.assert_close(module(x), expected, rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        torch.testing.assert_close(module(x), expected, rtol=1e-9, atol=1e-9)


def test_the_start_is_the_model_as_it_was():
    """B = 0, so s B A = 0 exactly; A is uniform on +-1/sqrt(inputs), whose deviation is 1/sqrt(3 inputs)."""
    torch.manual_seed(0)
    plain = Net()
    module = adapted(plain, EVERY)()
    assert not any(module.get_submodule(name).lora.product().any() for name in TARGETS)
    torch.testing.assert_close(module(SAMPLES), plain(SAMPLES))  # sums may be added in another order
    torch.manual_seed(0)
    wide = adapted(lambda: nn.Sequential(nn.Linear(3000, 50), nn.Linear(50, 2)), "lora:rank=16")()[0].lora
    assert not wide.B.any()
    assert float(wide.A.detach().abs().max()) <= 1 / math.sqrt(3000)
    assert float(wide.A.detach().std()) == pytest.approx(1 / math.sqrt(3 * 3000), rel=0.02)


def test_the_first_step_moves_b_alone():
    """dL/dA = s B'G = 0 at B = 0, and dL/dB = s G A', so one step of SGD makes of W: -lr s^2 G A'A."""
    torch.manual_seed(0)
    module = adapted(lambda: nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)), "lora:rank=2,alpha=6")().double()
    x, y = torch.randn(7, 5, dtype=torch.float64), torch.randint(0, 3, (7,))
    layer = module[0]
    layer.base.weight.requires_grad_(True)
    nn.functional.cross_entropy(module(x), y).backward()
    A, G, s = layer.lora.A.detach(), layer.base.weight.grad, 3.0
    assert not layer.lora.A.grad.any()
    step = s * (-0.1 * layer.lora.B.grad) @ A
    torch.testing.assert_close(step, -0.1 * s * s * G @ A.T @ A, rtol=1e-12, atol=1e-12)


def test_padding_tokens_get_nothing():
    module = adapted(Net, "lora:rank=2,targets=words")()
    assert not module.words.lora.A[:, 0].any()
    with torch.no_grad():
        module.words.lora.B.normal_()
    module(SAMPLES).sum().backward()
    assert not module.words.lora.A.grad[:, 0].any()
    assert module.words.lora.A.grad[:, 2].any()


@pytest.mark.parametrize(("adapter", "rank", "scale"), [
    ("lora", 8, 2.0), ("lora:rank=4", 4, 2.0),  # one constant, whatever the rank
    ("lora:rank=4,alpha=16", 4, 4.0), ("lora:rank=4,alpha=16,scaling=rslora", 4, 8.0),
])
def test_scales(adapter, rank, scale):
    (pair,) = Layout.of(adapted(lambda: nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 2)), adapter)()).pairs
    assert (pair.name, pair.rank, pair.scale) == ("0", rank, scale)
    assert (pair.a.shape, pair.b.shape) == ((rank, 20), (30, rank))


@pytest.mark.parametrize(("targets", "ranks"), [
    ("all", {"one": 2, "two": 2, "encoder.q": 2, "encoder.v": 2}),
    ("q+v", {"encoder.q": 2, "encoder.v": 2}), ("encoder", {"encoder.q": 2, "encoder.v": 2}),
    ("*.q", {"encoder.q": 2}), ("encoder.*", {"encoder.q": 2, "encoder.v": 2}),
    ("q+v(rank=3)", {"encoder.q": 2, "encoder.v": 3}), ("all+q(rank=1)", {
        "one": 2, "two": 2, "encoder.q": 1, "encoder.v": 2}),
    ("words", {"words": 2}),
])
def test_targets(targets, ranks):
    found = {pair.name: pair.rank for pair in Layout.of(adapted(Net, f"lora:rank=2,targets={targets}")()).pairs}
    assert found == ranks


@pytest.mark.parametrize(("adapter", "said"), [
    ("lora:targets=p", "unknown target of the adapter 'p'; known: all, encoder.q, encoder.v, one, q, two, v, words"),
    ("lora:targets=wrods", "did you mean 'words'"),
    ("lora:targets=head", "target 'head' is the head 'head', which trains whole"),
    ("lora:rank=4", "rank 4 is above what layer 'two' can have: its weight is 4 x 3, so 3 says everything"),
    ("lora:rank=2,targets=words(rank=6)", "rank 6 is above what layer 'words' can have: its weight is 5 x 9"),
    ("lora:targets=q(rank=0)", "rank must be a whole number, at least 1|rank must be at least 1"),
    ("lora:targets=q(rang=1)", "did you mean 'rank'"), ("lora:targets=+", "targets names no layer"),
    ("lora:rank=-1", "rank must be at least 0"), ("lora:rank=1.5", "must be a whole number"),
    ("lora:alpha=0", "alpha must be above 0"), ("lora:scaling=rslora", "give alpha as well"),
    ("lora:r=4", "did you mean 'rank'"), ("lora:dropout=1", "dropout must be at least 0 and below 1"),
    ("qlora", "unknown adapter 'qlora'; did you mean 'lora'"), ("lora:base=melts", "unknown value"),
])
def test_bad_words_are_a_sentence(adapter, said):
    with pytest.raises(CoterieError, match=said):
        adapted(Net, adapter)()


def test_layers_that_cannot_be_adapted_are_named():
    def odd():
        return nn.Sequential(nn.Conv1d(4, 8, 3, groups=2), nn.BatchNorm1d(8), nn.Flatten(), nn.Linear(8, 2))

    with pytest.raises(CoterieError, match="layer '0' cannot be adapted: it is a convolution in 2 groups"):
        adapted(odd, "lora:rank=2,targets=0")()
    with pytest.raises(CoterieError, match="target '1' is '1', a BatchNorm1d; linear layers, convolutions and emb"):
        adapted(odd, "lora:rank=2,targets=1")()
    with pytest.raises(CoterieError, match="no linear or convolutional layer beside its head"):
        adapted(odd, "lora:rank=2")()
    with pytest.raises(CoterieError, match="max_norm"):
        adapted(lambda: nn.Sequential(nn.EmbeddingBag(4, 3), nn.Embedding(4, 3, max_norm=1.0), nn.Linear(3, 2)),
                "lora:rank=2,targets=1")()


# -- what trains ------------------------------------------------------------------------------------------------------


def test_what_trains_is_the_adapters_and_the_head():
    layout = Layout.of(adapted(Net, "lora:rank=2")())
    factors = [f"{name}.lora.{factor}" for name in ("one", "two", "encoder.q", "encoder.v") for factor in "AB"]
    assert [entry.name for entry in layout.entries] == [*factors, "head.weight", "head.bias"]
    assert [entry.name for entry in layout.within("adapters")] == factors
    assert [entry.name for entry in layout.within("*.B")] == factors[1::2]
    assert layout.size == sum(2 * (o + q) for name, (o, q) in TARGETS.items() if name != "words") + 15
    assert [entry.name for entry in layout.within("~adapters")] == ["head.weight", "head.bias"]


def test_rank_0_is_the_head_alone():
    """No adapter is made: the same layout, digest and rows as with all but the head frozen."""
    none, head = (Init(model, lambda m: m, 3) for model in (adapted(Net, "lora:rank=0"), partly(Net, train="head")))
    assert none.layout == head.layout
    assert none.layout.digest == head.layout.digest
    assert torch.equal(none.rows(2), head.rows(2))


def test_a_base_that_trains_is_beside_its_adapters():
    """Shared full rank and personal low rank: every tensor of the model is a column, and the adapters' too."""
    layout = Layout.of(adapted(Net, "lora:rank=2,base=trains")())
    assert not layout.frozen
    assert {entry.name for entry in layout.within("~adapters")} == {
        name.replace(layer, f"{layer}.base") if layer in TARGETS and layer != "words" else name
        for name, _ in Net().named_parameters() for layer in [name.rpartition(".")[0]]}


def test_a_head_that_is_tied_to_the_base_stays_frozen_with_it():
    """A language model's output layer may be its table of words: it belongs to the backbone then."""
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.body = nn.Embedding(9, 5), nn.Linear(5, 5)
            self.head = nn.Linear(5, 9, bias=False)
            self.head.weight = self.words.weight

    layout = Layout.of(adapted(Tied, "lora:rank=2")())
    assert [entry.name for entry in layout.entries] == ["body.lora.A", "body.lora.B"]


def test_a_layer_of_several_names_has_one_adapter():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.b = self.a
            self.head = nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.b(self.a(x)))

    module = adapted(Shared, "lora:rank=2")()
    assert module.a is module.b
    assert len(Layout.of(module).pairs) == 1


def test_a_module_keeps_its_weights_and_every_draw_has_adapters_of_its_own():
    """Row 0 is the module as it was given, with adapters from the run's seed; further rows draw the head anew as well,
    as those of any module, and the frozen weights are the given ones, held once."""
    given = Net()
    before = {name: t.clone() for name, t in given.state_dict().items()}
    model = adapted(given, "lora:rank=2")
    one, again, other = (Init(model, lambda m: m, seed) for seed in (0, 0, 1))
    rows = one.rows(3)
    assert torch.equal(rows, again.rows(3))
    head, factors = one.layout.cut(rows, "head"), one.layout.cut(rows, "*.A")
    assert torch.equal(head[0], torch.cat([given.head.weight.detach().flatten(), given.head.bias.detach()]))
    assert torch.equal(head[0], other.layout.cut(other.row, "head"))
    assert not torch.equal(factors[0], other.layout.cut(other.row, "*.A"))
    for part in (head, factors):
        assert not torch.equal(part[0], part[1])
        assert not torch.equal(part[1], part[2])
    assert one.module.one.base.weight.data_ptr() == again.module.one.base.weight.data_ptr()
    one.layout.load(one.module, torch.randn(one.layout.size))
    assert all(torch.equal(t, before[name]) for name, t in given.state_dict().items())
    assert all(parameter.requires_grad for parameter in given.parameters())


def test_adapters_can_be_named_among_what_trains():
    frozen = partly(adapted(Net, "lora:rank=2"), train="adapters")()
    assert {entry.part for entry in Layout.of(frozen).entries} == {"base"}
    assert {name.rpartition(".")[2] for name, p in frozen.named_parameters() if p.requires_grad} == {"A", "B"}
    only = partly(adapted(Net(), "lora:rank=2"), freeze="*.A")()
    assert Layout.of(only).pairs == ()  # of a pair one factor alone is in the row
    assert [e.name for e in Layout.of(only).within("*.B")] == [f"{n}.lora.B" for n in (
        "one", "two", "encoder.q", "encoder.v")]
    with pytest.raises(CoterieError, match="has no adapters"):
        Layout.of(Net()).within("adapters")


def test_two_scales_are_two_models():
    """The same factors under another scale are another model, so rows of one are refused by the other."""
    one, other = (Layout.of(adapted(Net, f"lora:rank=2,alpha={alpha}")()) for alpha in (2, 4))
    assert one.digest != other.digest
    assert LoRA.of("lora:rank=2,alpha=2") == LoRA(rank=2, alpha=2.0)
