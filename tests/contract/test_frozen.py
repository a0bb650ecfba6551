"""What is frozen: which tensors, one copy of them, their fingerprint, and the patterns that choose them."""

from __future__ import annotations

import copy
import hashlib

import pytest
import torch
from torch import nn

from coterie.contract.cohort import Init
from coterie.contract.frozen import duplicate, fingerprint, frozen_layers
from coterie.contract.layout import Layout
from coterie.contract.net import Net, Task
from coterie.contract.patterns import partly
from coterie.errors import CoterieError


def unwrapped(module):
    return module


class Body(nn.Module):
    """Two blocks, each a linear layer and two normalisations, one of them without parameters; and a head."""

    def __init__(self):
        super().__init__()
        self.one = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.BatchNorm1d(5, affine=False))
        self.two = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.BatchNorm1d(5, affine=False))
        self.fc = nn.Linear(5, 3)

    def forward(self, x):
        return self.fc(self.two(self.one(x)))


# -- which tensors ----------------------------------------------------------------------------------------------------


def test_buffers_go_with_their_layer():
    """A layer without parameters is frozen as the nearest module around it that has some: block one, not block two."""
    module = Body()
    module.one.requires_grad_(False)
    module.two[0].requires_grad_(False)
    layout = Layout.of(module)
    assert {e.name.rpartition(".")[0] for e in layout.entries} == {"two.1", "two.2", "fc"}
    assert {e.name.rpartition(".")[0] for e in layout.frozen} == {"one.0", "one.1", "one.2", "two.0"}
    assert {name for name, m in module.named_modules() if m in frozen_layers(module)} == {
        "one", "one.0", "one.1", "one.2", "two.0"}


def test_frozen_normalisation_stays_in_evaluation_mode():
    module = Body()
    module.one.requires_grad_(False)
    net = Net(module, Layout.of(module), Task.of(3))
    net.mode(training=True)
    modes = {name: m.training for name, m in net.module.named_modules() if isinstance(m, nn.BatchNorm1d)}
    assert modes == {"one.1": False, "one.2": False, "two.1": True, "two.2": True}
    assert net.batch_statistics
    net.mode(training=True)
    with net.still():
        pass
    assert not net.module.one[1].training
    module.two.requires_grad_(False)
    assert not Net(module, Layout.of(module), Task.of(3)).batch_statistics


def test_a_module_may_keep_in_the_row_what_no_gradient_moves():
    class Kept(nn.Module):
        in_row = ("fixed",)

        def __init__(self):
            super().__init__()
            self.fixed = nn.Parameter(torch.ones(2), requires_grad=False)
            self.other = nn.Parameter(torch.ones(3), requires_grad=False)
            self.head = nn.Linear(2, 2)

    layout = Layout.of(Kept())
    assert [(e.name, e.trainable) for e in layout.entries if e.kind == "parameter"][:1] == [("fixed", False)]
    assert [e.name for e in layout.frozen] == ["other"]


def test_parts_of_a_frozen_model():
    module = Body()
    module.fc.requires_grad_(False)
    layout = Layout.of(module)
    assert layout.within("head") == ()
    assert layout.is_frozen("head")
    assert not layout.is_frozen("~head")
    assert not layout.is_frozen("none")
    assert not layout.is_frozen("all")
    assert layout.cut(torch.zeros(3, layout.size), "head").shape == (3, 0)
    with pytest.raises(CoterieError, match="unknown part of the model 'foot'"):
        layout.is_frozen("foot")


# -- one copy ---------------------------------------------------------------------------------------------------------


def test_copies_share_what_is_frozen_and_nothing_else():
    module = Body()
    module.one.requires_grad_(False)
    copied = duplicate(module)
    theirs = dict(copied.named_parameters())
    for name, p in module.named_parameters():
        assert (theirs[name].data_ptr() == p.data_ptr()) == name.startswith("one.")
        assert theirs[name].requires_grad == p.requires_grad
    assert copied.one[1].running_mean.data_ptr() != module.one[1].running_mean.data_ptr()


def test_moving_a_copy_to_another_format_leaves_the_original():
    module = Body()
    module.one.requires_grad_(False)
    before = copy.deepcopy(module.state_dict())
    moved = duplicate(module).double()
    assert moved.one[0].weight.dtype == torch.float64
    assert module.one[0].weight.dtype == torch.float32
    assert all(torch.equal(t, before[name]) for name, t in module.state_dict().items())


def test_tied_parameters_stay_tied():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    module[1].weight = module[0].weight
    module[0].requires_grad_(False)
    copied = duplicate(module)
    assert copied[0].weight is copied[1].weight


@pytest.mark.parametrize("given", ["module", "factory"])
def test_all_rows_stand_on_the_first_draw(given):
    """Further rows have fresh heads; the frozen part is that of draw 0, and a user's module is not written to."""
    module = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    module[0].requires_grad_(False)
    before = copy.deepcopy(module.state_dict())

    def factory():
        made = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
        made[0].requires_grad_(False)
        return made

    init = Init(module if given == "module" else factory, unwrapped, seed=3)
    rows = init.rows(3)
    assert rows.shape == (3, 18)
    assert len({float(row[0]) for row in rows}) == 3
    assert torch.equal(Init(module if given == "module" else factory, unwrapped, seed=3).rows(3), rows)
    assert all(torch.equal(t, before[name]) for name, t in module.state_dict().items())
    if given == "module":
        assert init.module[0].weight.data_ptr() == module[0].weight.data_ptr()


def test_a_frozen_layer_need_not_be_drawn_anew():
    """A layer without reset_parameters stops a second draw only where it trains."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return x * self.w

    module = nn.Sequential(Odd(), nn.Linear(4, 3))
    with pytest.raises(CoterieError, match=r"layer '0' \(Odd\) cannot be drawn anew"):
        Init(module, unwrapped, 0).rows(2)
    module[0].requires_grad_(False)
    assert Init(module, unwrapped, 0).rows(2).shape == (2, 15)


# -- the fingerprint --------------------------------------------------------------------------------------------------


def test_the_fingerprint_is_a_sha256_of_names_shapes_and_float32_values():
    w, k = torch.tensor([[1.5, -2.0]], dtype=torch.float64), torch.tensor(7)
    expected = hashlib.sha256(b"w(1, 2)" + w.float().numpy().tobytes() + b"k()" + k.numpy().tobytes()).hexdigest()
    assert fingerprint([("w", w), ("k", k)]) == expected
    assert fingerprint([("w", w.float()), ("k", k)]) == expected
    assert fingerprint([("w", w.bfloat16()), ("k", k)]) == expected  # these values are exact in bfloat16


def test_the_digest_tells_models_and_frozen_weights_apart():
    module = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    everything = Layout.of(module)
    assert "-" not in everything.digest
    module[0].requires_grad_(False)
    first = Layout.of(module)
    with torch.no_grad():
        other = copy.deepcopy(module)
        other[0].bias[0] += 1
    second, columns = Layout.of(other), first.digest.partition("-")[0]
    assert second.digest.partition("-")[0] == columns
    assert second.digest != first.digest
    assert Layout.of(copy.deepcopy(module)).digest == first.digest
    first.refuse(first.digest, "the checkpoint")
    with pytest.raises(CoterieError, match="the frozen weights of the model mlp are not those of the server"):
        first.refuse(second.digest, "the server", "mlp")
    with pytest.raises(CoterieError, match="the checkpoint holds another model"):
        first.refuse(everything.digest, "the checkpoint")


def test_engines_are_shared_over_the_same_frozen_weights_only():
    module = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    module[0].requires_grad_(False)
    net = Net(module, Layout.of(module), Task.of(3))
    other = copy.deepcopy(module)
    assert net.fits(duplicate(module))
    assert net.fits(other)
    with torch.no_grad():
        other[0].weight[0, 0] += 1
    assert not net.fits(other)
    assert not net.fits(copy.deepcopy(module).requires_grad_(True))


# -- patterns ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("freeze", "train", "trained"), [
    ("", "head", {"fc"}),
    ("base", "", {"fc"}),
    ("head", "", {"one.0", "one.1", "two.0", "two.1"}),
    ("one", "", {"two.0", "two.1", "fc"}),
    ("o*", "", {"two.0", "two.1", "fc"}),
    ("*.1", "", {"one.0", "two.0", "fc"}),
    ("", "two.0.bias+fc", {"two.0", "fc"}),
    ("two.1", "two+head", {"two.0", "fc"}),
])
def test_patterns(freeze, train, trained):
    module = partly(Body, freeze, train)()
    assert {name.rpartition(".")[0] for name, p in module.named_parameters() if p.requires_grad} == trained


def test_train_wakes_what_was_frozen_and_leaves_the_given_module():
    module = Body()
    module.fc.requires_grad_(False)
    chosen = partly(module, train="head")
    assert chosen.fc.weight.requires_grad
    assert not module.fc.weight.requires_grad
    assert module.one[0].weight.requires_grad
    assert partly(module) is module


def test_the_head_may_be_another_layer():
    module = partly(Body, train="head", head="two.0")()
    assert [name for name, p in module.named_parameters() if p.requires_grad] == ["two.0.weight", "two.0.bias"]


@pytest.mark.parametrize(("freeze", "train", "sentence"), [
    ("tow", "", "unknown part or parameter to freeze 'tow'; did you mean 'two'"),
    ("", "xyzzy*", r"unknown part or parameter to train 'xyzzy\*'; the model consists of: .*base.*fc.*one"),
    ("base+head", "", "freeze=base.head freezes every parameter"),
    ("one", "one", "train=one and freeze=one freezes every parameter"),
])
def test_bad_patterns_end_in_a_sentence(freeze, train, sentence):
    with pytest.raises(CoterieError, match=sentence):
        partly(Body, freeze, train)()
