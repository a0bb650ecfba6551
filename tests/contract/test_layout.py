"""Rows and modules: nothing is lost, nothing is copied, parts add up."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from coterie.contract.frozen import duplicate
from coterie.contract.layout import Layout, find_head
from coterie.errors import CoterieError


class Tied(nn.Module):
    """A language model in small: the head's weight is the embedding's."""

    def __init__(self):
        super().__init__()
        self.embedding, self.mix, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.mix(self.embedding(x)))


class Declared(nn.Module):
    """Names parts of its own: a gate besides body and head."""

    parts = {"gate": "switch", "head": "out"}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.out, self.switch, self.body = nn.Linear(4, 3), nn.Linear(4, 1), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("cache", torch.zeros(9), persistent=False)


def conv():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))


MODULES = {"conv": conv, "tied": Tied, "declared": Declared, "linear": lambda: nn.Linear(4, 3)}
PARTS = ["all", "none", "parameters", "buffers", "base", "head", "~head", "~base", "head+buffers", "~head+buffers", "0",
         "1", "0.weight", "1.running_mean+4.bias", "~parameters", "base+head"]


def scrambled(module):
    """Every tensor filled with numbers of its own; counters with a large whole number."""
    with torch.no_grad():
        for number, t in enumerate(module.state_dict().values()):
            t.copy_(torch.randn(t.shape) if t.is_floating_point() else torch.full_like(t, 12345 + number))
    return module


@pytest.mark.parametrize("name", MODULES)
def test_round_trip_is_exact(name):
    """Module -> row -> another module: every tensor of the state dict has its old bits, counters and ties included."""
    module, other = scrambled(MODULES[name]()), scrambled(MODULES[name]())
    layout = Layout.of(module)
    layout.load(other, layout.row(module))
    for key, t in module.state_dict().items():
        assert torch.equal(other.state_dict()[key], t), key
        assert other.state_dict()[key].dtype == t.dtype
    assert torch.equal(layout.row(other), layout.row(module))


def test_sizes_count_each_tensor_once():
    """conv: 2*9 + 2, BatchNorm 2+2 and buffers 2+2+1, linear 8*3 + 3. Tied: 7*4, 4*4 + 4, bias 7."""
    assert Layout.of(conv()).size == 20 + 4 + 5 + 27
    tied = Layout.of(Tied())
    assert tied.size == 28 + 20 + 7
    assert [entry.name for entry in tied.entries if entry.part == "head"] == ["head.bias"]
    assert "cache" not in [entry.name for entry in Layout.of(Declared()).entries]  # not saved, so no state


def test_kinds():
    kinds = {entry.name: entry.kind for entry in Layout.of(conv()).entries}
    assert kinds["1.num_batches_tracked"] == "counter"
    assert kinds["1.running_mean"] == kinds["1.running_var"] == "statistic"
    assert kinds["1.weight"] == kinds["0.weight"] == "parameter"


@pytest.mark.parametrize("lead", [(), (3,), (3, 2)])
@pytest.mark.parametrize("name", MODULES)
def test_views_share_the_rows_memory(name, lead):
    """Writing a view changes the row at its columns and nowhere else, and the other way round."""
    layout = Layout.of(MODULES[name]())
    rows = torch.zeros(*lead, layout.size)
    for number, entry in enumerate(layout.entries):
        view = layout.views(rows)[entry.name]
        assert view.shape == lead + entry.shape
        assert view.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()
        view.fill_(number + 1)
        assert (rows[..., entry.start : entry.stop] == number + 1).all()
    expected = torch.cat([torch.full((entry.size,), i + 1.0) for i, entry in enumerate(layout.entries)])
    assert torch.equal(rows, expected.expand_as(rows))
    rows.fill_(-1)
    assert all((view == -1).all() for view in layout.views(rows).values())


def test_usual_parts_are_cut_without_copying():
    layout = Layout.of(conv())
    rows = torch.randn(2, layout.size)
    for part in ("all", "base", "head", "~head", "0.weight"):
        assert isinstance(layout.columns(part), slice)
        assert layout.cut(rows, part).untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()


def names(layout, part):
    return [entry.name for entry in layout.within(part)]


def test_parts_of_a_sequential():
    """The last linear layer is the head; prefixes, tensors, sums and complements name what they say."""
    layout = Layout.of(conv())
    body = ["0.weight", "0.bias", "1.weight", "1.bias"]
    buffers = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    head = ["4.weight", "4.bias"]
    assert names(layout, "head") == head
    assert names(layout, "base") == names(layout, "~head") == body + buffers
    assert names(layout, "buffers") == buffers
    assert names(layout, "parameters") == body + head
    assert names(layout, "1") == ["1.weight", "1.bias", *buffers]
    assert names(layout, "0.weight") == ["0.weight"]
    assert names(layout, "4.bias+0.weight") == ["0.weight", "4.bias"]  # in the row's order
    assert names(layout, "~head+buffers") == body  # neither head nor buffers
    assert names(layout, "buffers+~base") == buffers + head
    assert names(layout, "~all") == names(layout, "none") == []
    assert names(layout, "all") == body + buffers + head


def test_a_prefix_is_a_whole_name():
    """'1' is layer 1 and not layer 10."""
    layout = Layout.of(nn.Sequential(*[nn.Linear(2, 2) for _ in range(11)]))
    assert names(layout, "1") == ["1.weight", "1.bias"]


def test_declared_parts_and_order():
    """Base first, then declared parts, the head last, in spite of the order of registration."""
    layout = Layout.of(Declared())
    assert layout.parts == ("base", "gate", "head")
    assert names(layout, "gate") == ["switch.weight", "switch.bias"]
    assert names(layout, "head") == ["out.weight", "out.bias"]
    assert layout.head == "out"
    assert layout.entries[-1].name == "out.bias"


def test_head_override():
    layout = Layout.of(Declared(), head="body")
    assert names(layout, "head") == ["body.weight", "body.bias"]
    assert "out.weight" in names(layout, "base")
    assert find_head(Declared()) == "body"  # the last registered linear layer, were it not declared
    with pytest.raises(CoterieError, match="did you mean 'body'"):
        Layout.of(Declared(), head="bodi")


def test_a_bare_linear_layer_is_all_head():
    layout = Layout.of(nn.Linear(2, 2))
    assert names(layout, "head") == ["weight", "bias"]
    assert names(layout, "base") == []


@given(st.sampled_from(PARTS), st.lists(st.integers(1, 3), max_size=2), st.integers(0, 99))
def test_put_and_cut_are_inverse(part, lead, seed):
    """cut(put(rows, part, c)) = c, the rest keeps its bits; put(rows, part, cut(rows)) = rows; inputs stay."""
    layout = Layout.of(conv())
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(*lead, layout.size, generator=generator)
    before = rows.clone()
    columns = torch.randn(layout.cut(rows, part).shape, generator=generator)
    out = layout.put(rows, part, columns)
    assert torch.equal(layout.cut(out, part), columns)
    assert torch.equal(layout.cut(out, f"~{part}"), layout.cut(rows, f"~{part}"))
    assert torch.equal(layout.put(rows, part, layout.cut(rows, part)), rows)
    assert torch.equal(rows, before)
    inner = layout.only(part)
    assert inner.size == columns.shape[-1]
    for name, view in inner.views(columns).items():
        assert torch.equal(view, layout.views(out)[name])


@given(st.sampled_from(PARTS), st.sampled_from(PARTS))
def test_parts_follow_set_algebra(one, two):
    """`x+y` is the union, `~x+y` the complement of the union, `~~x` is x; for names that hold no ~ themselves."""
    layout = Layout.of(conv())
    everything = set(names(layout, "all"))
    if one.startswith("~"):
        assert set(names(layout, one)) == everything - set(names(layout, one[1:]))
        assert names(layout, f"~{one}") == names(layout, one[1:])
    elif not two.startswith("~"):
        union = set(names(layout, one)) | set(names(layout, two))
        assert set(names(layout, f"{one}+{two}")) == union
        assert set(names(layout, f"~{one}+{two}")) == everything - union


def test_put_broadcasts():
    """One row and many heads, or many rows and one head, give many rows."""
    layout = Layout.of(conv())
    row, rows = torch.zeros(layout.size), torch.zeros(3, layout.size)
    heads = torch.ones(3, 27) * torch.arange(3.0)[:, None]
    assert torch.equal(layout.cut(layout.put(row, "head", heads), "head"), heads)
    assert torch.equal(layout.cut(layout.put(rows, "head", heads[1]), "head"), heads[1].expand(3, -1))


def test_the_digest_tells_models_apart():
    """Equal for equal architectures whatever their weights; different shapes, names or order differ."""
    assert Layout.of(conv()).digest == Layout.of(conv()).digest
    others = [Layout.of(m) for m in (conv(), Tied(), nn.Linear(4, 3), nn.Linear(3, 4), nn.Linear(4, 3, bias=False))]
    assert len({layout.digest for layout in others}) == 5


def test_errors_are_sentences():
    layout = Layout.of(conv())
    with pytest.raises(CoterieError, match="did you mean 'head'"):
        layout.within("heda")
    with pytest.raises(CoterieError, match="unknown part of the model 'xyzzy'"):
        layout.within("xyzzy")
    with pytest.raises(CoterieError, match=r"shape \(3,\) does not fit a model of 56 columns"):
        layout.load(conv(), torch.zeros(3))
    with pytest.raises(CoterieError, match="no linear layer; name the layer"):
        Layout.of(nn.Sequential(nn.Conv2d(1, 2, 3))).within("head")
    with pytest.raises(CoterieError, match="no trainable parameter"):
        Layout.of(nn.Sequential(nn.ReLU()))
    complex_one = nn.Linear(2, 2)
    complex_one.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(CoterieError, match="'phase' is complex"):
        Layout.of(complex_one)


def test_frozen_parameters_are_in_no_row(tiny):
    """requires_grad=False: no columns, and the model that a client uses has them as they were given."""
    def model():
        module = tiny.mlp()
        module[0].weight.requires_grad_(False)
        return module

    layout = Layout.of(model())
    assert [entry.name for entry in layout.entries] == ["0.bias", "2.weight", "2.bias"]
    assert [entry.name for entry in layout.frozen] == ["0.weight"]
    assert layout.size == 5 + 3 * 5 + 3
    sim = tiny.simulation("fedavg", model)
    frozen = sim.init.module[0].weight.clone()
    sim.round()
    assert sim.server.state.row.shape == (layout.size,)
    used = layout.load(duplicate(sim.init.module).double(), sim.row(0, adapted=True))
    assert torch.equal(used[0].weight, frozen.double())
    assert not torch.equal(used[0].bias, sim.init.module[0].bias.double())


def test_a_module_is_left_alone_by_a_simulation(tiny):
    """The user's module is copied: training never writes into it."""
    module = tiny.mlp()
    before = copy.deepcopy(module.state_dict())
    sim = tiny.simulation("fedavg", module)
    sim.round()
    assert all(torch.equal(module.state_dict()[name], t) for name, t in before.items())
    assert torch.equal(sim.init.row.float(), Layout.of(module).row(module))
