"""Models have the published sizes, the promised shapes and refuse what they cannot do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from coterie.errors import CoterieError
from coterie.models import CNN, MLP, MODELS, Linear, model


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("shape", "outputs", "published"),
    [
        ((1, 28, 28), 10, 582_026),
        ((1, 28, 28), 62, 608_702),
        ((3, 32, 32), 10, 878_538),
        ((3, 32, 32), 100, 924_708),
        ((3, 64, 64), 200, 5_694_600),
    ],
)
def test_cnn_has_the_published_number_of_parameters(
    shape: tuple[int, int, int], outputs: int, published: int
) -> None:
    with torch.device("meta"):
        net = CNN(shape, outputs)
        assert parameters(net) == published
        assert len(list(net.parameters())) == 8  # four layers with weight and bias
        assert net(torch.empty(2, *shape)).shape == (2, outputs)


@pytest.mark.parametrize("side", [(16, 16), (16, 23), (28, 17)])
def test_smallest_images_pass_the_cnn(side: tuple[int, int]) -> None:
    assert CNN((1, *side), 3)(torch.zeros(2, 1, *side)).shape == (2, 3)


def test_cnn_refuses_what_it_cannot_see() -> None:
    with pytest.raises(CoterieError, match="at least 16x16 pixels, got 8x8"):
        model("cnn", (1, 8, 8), 10)
    with pytest.raises(CoterieError, match="images"):
        model("cnn", (12,), 10)


def test_linear_is_a_flat_matrix_product() -> None:
    net = Linear(12, 3)
    x = torch.randn(5, 3, 4)
    expected = torch.einsum("bi,oi->bo", x.reshape(5, 12), net.head.weight) + net.head.bias
    torch.testing.assert_close(net(x), expected)
    assert parameters(Linear(12, 3, bias=False)) == 36
    assert Linear(12, 1, zeros=True)(x).tolist() == [[0.0]] * 5


def test_mlp_layers() -> None:
    # 64*20+20 = 1300, 20*8+8 = 168, 8*10+10 = 90
    assert parameters(MLP(64, 10, hidden=(20, 8))) == 1300 + 168 + 90
    assert MLP(64, 10)(torch.zeros(3, 1, 8, 8)).shape == (3, 10)
    assert parameters(MLP(64, 10, hidden=())) == 64 * 10 + 10


@pytest.mark.parametrize("hidden", ["20,8", "(20, 8)", [20, 8], (20, 8), "20,8,"])
def test_mlp_widths_may_be_written_in_any_way(hidden: object) -> None:
    assert parameters(model("mlp", (1, 8, 8), 10, hidden=hidden)()) == 1558


def test_mlp_one_width() -> None:
    for hidden in (16, "16"):
        assert parameters(model("mlp", (4,), 2, hidden=hidden)()) == 4 * 16 + 16 + 16 * 2 + 2


def test_mlp_dropout_acts_in_training_only() -> None:
    net = MLP(4, 2, hidden=(256,), dropout=0.5)
    x = torch.randn(3, 4)
    assert not torch.equal(net(x), net(x))
    net.eval()
    assert torch.equal(net(x), net(x))


@pytest.mark.parametrize("name", MODELS)
def test_last_layer_is_called_head_and_the_rest_base(name: str) -> None:
    names = {key.split(".")[0] for key, _ in model(name, (1, 16, 16), 5)().named_parameters()}
    assert names == ({"head"} if name == "linear" else {"base", "head"})


def test_a_factory_draws_fresh_weights_and_making_it_draws_none() -> None:
    torch.manual_seed(0)
    direct = Linear(4, 2).head.weight
    torch.manual_seed(0)
    build = model("linear", (2, 2), 2)
    first, second = build(), build()
    assert torch.equal(first.head.weight, direct)
    assert not torch.equal(first.head.weight, second.head.weight)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("lineer", {}, "did you mean 'linear'"),
        ("mlp", {"hiden": 3}, "did you mean 'hidden'"),
        ("cnn", {"hidden": 3}, "has no options"),
        ("mlp", {"hidden": "wide"}, "layer widths"),
        ("mlp", {"hidden": 0}, "at least one unit"),
        ("mlp", {"dropout": 1.0}, "dropout"),
    ],
)
def test_bad_names_and_options(name: str, options: dict[str, object], sentence: str) -> None:
    with pytest.raises(CoterieError, match=sentence):
        model(name, (1, 28, 28), 10, **options)
