"""ResNet-18, text and sensor models: published sizes, promised shapes, refusals, and training on the stacked engine."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from coterie.data import Federation
from coterie.errors import CoterieError
from coterie.models import FastText, ResNet18, SensorCNN, TextCNN, model
from coterie.registry import method
from coterie.running.simulation import Simulation
from coterie.running.training import Training


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(("outputs", "published"), [(8, 11_180_616), (200, 11_279_112), (10, 11_176_512 + 5130)])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_resnet_has_the_published_number_of_parameters(norm: str, outputs: int, published: int) -> None:
    with torch.device("meta"):
        net = ResNet18((3, 64, 64), outputs, norm=norm)  # type: ignore[arg-type]
        assert parameters(net) == published
        assert net(torch.empty(2, 3, 64, 64)).shape == (2, outputs)
    kinds = [nn.BatchNorm2d, nn.GroupNorm]
    counts = [sum(isinstance(sub, kind) for sub in net.modules()) for kind in kinds]
    assert counts == ([20, 0] if norm == "batch" else [0, 20])
    assert len(list(net.buffers())) == (60 if norm == "batch" else 0)


def test_resnet_halves_the_image_five_times() -> None:
    """The stem of ImageNet: 224 pixels become 7, whatever came before the mean."""
    with torch.device("meta"):
        net = ResNet18((3, 224, 224), 5)
        assert net.base[:-2](torch.empty(1, 3, 224, 224)).shape == (1, 512, 7, 7)


def test_textcnn_has_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        assert parameters(TextCNN(200, 4)) == 16_999_904


def test_fasttext_has_the_number_of_parameters_of_its_layers() -> None:
    """Embeddings, features -> features, features -> classes; with the sizes of the cwFedAvg experiments."""
    with torch.device("meta"):
        net = FastText(200, 4, vocabulary=98_635, features=32)
    assert parameters(net) == 98_635 * 32 + (32 * 32 + 32) + (32 * 4 + 4)


def test_sensor_model_has_the_number_of_parameters_of_its_layers() -> None:
    """Windows of 128: -9+1-> 120 -pool-> 60 -9+1-> 52 -pool-> 26 steps of 64 channels."""
    with torch.device("meta"):
        net = SensorCNN((9, 128), 6)
        assert net(torch.empty(2, 9, 128)).shape == net(torch.empty(2, 9, 1, 128)).shape == (2, 6)
    convolutions = (9 * 32 * 9 + 32) + (32 * 64 * 9 + 64)
    assert parameters(net) == convolutions + (64 * 26 * 1024 + 1024) + (1024 * 512 + 512) + (512 * 6 + 6)


def test_text_models_by_hand() -> None:
    """The largest answer of each filter over all windows; the mean over all positions, padding included."""
    x = torch.tensor([[3, 1, 4, 1, 5, 0], [2, 7, 1, 0, 0, 0]])
    net = TextCNN(6, 3, vocabulary=9, features=4, filters=2).eval()
    words = net.base[0].embedding.weight[x]  # [2, 6, 4]
    found = []
    for conv, width in zip(net.base[0].convolutions, (3, 4, 5)):
        windows = [(words[:, t : t + width].transpose(1, 2)[:, None] * conv.weight).sum((2, 3)) + conv.bias
                   for t in range(6 - width + 1)]
        found.append(torch.stack(windows).relu().amax(0))
    torch.testing.assert_close(net(x), F.linear(torch.cat(found, 1), net.head.weight, net.head.bias))
    fast = FastText(6, 3, vocabulary=9, features=4)
    mean = fast.base[0].embedding.weight[x].sum(1) / 6
    torch.testing.assert_close(fast(x), fast.head(fast.base[1](mean)))


def test_textcnn_drops_features_in_training_only_and_never_trains_padding() -> None:
    net, x = TextCNN(6, 3, vocabulary=9, features=4), torch.tensor([[3, 1, 4, 0, 0, 0]])
    net.train()
    assert (net.base(x.expand(50, -1)) == 0).double().mean() > 0.75
    net(x).sum().backward()
    assert net.base[0].embedding.weight.grad[0].abs().max() == 0
    net.eval()
    assert torch.equal(net(x), net(x))


@pytest.mark.parametrize(
    ("name", "shape", "options", "sentence"),
    [
        ("resnet18", (12,), {}, "images"),
        ("resnet18", (3, 32, 32), {"norm": "layer"}, "'batch' or 'group', got 'layer'"),
        ("resnet18", (3, 32, 32), {"norm": "group", "groups": 24}, "divide 64"),
        ("textcnn", (4,), {}, "at least 5 tokens, got 4"),
        ("textcnn", (200,), {"dropout": 1.0}, "dropout"),
        ("sensor", (128,), {}, r"\[channels, time\]"),
        ("sensor", (9, 27), {}, "at least 28 time steps, got 27"),
        ("sensor", (9, 28), {"width": 0}, "at least 1 channel, got 0"),
        ("sensor", (9, 28), {"norm": "bach"}, "batch"),
    ],
)
def test_refusals(name: str, shape: tuple[int, ...], options: dict[str, object], sentence: str) -> None:
    with pytest.raises(CoterieError, match=sentence):
        model(name, shape, 3, **options)


def test_the_shortest_window_passes_the_sensor_model() -> None:
    assert SensorCNN((2, 28), 3)(torch.zeros(1, 2, 28)).shape == (1, 3)


SMALL = [
    ("resnet18", (1, 8, 8), {}),
    ("resnet18", (1, 8, 8), {"norm": "group"}),
    ("textcnn", (6,), {"vocabulary": 9, "features": 4, "filters": 3}),
    ("fasttext", (6,), {"vocabulary": 9, "features": 4}),
    ("sensor", (2, 28), {}),
    ("sensor", (2, 28), {"width": 4, "hidden": "16,8", "norm": "batch"}),
]


@pytest.mark.parametrize(("name", "shape", "options"), SMALL)
def test_models_are_stacked_and_a_step_changes_every_parameter_it_should(name, shape, options) -> None:
    """The probe finds nothing against stacking, and one step of two clients is that of plain PyTorch for one of them.

    The other has 4 samples more, so that the batches differ.
    """
    generator = torch.Generator().manual_seed(0)
    draw = (lambda n: torch.randint(1, 9, (n, *shape), generator=generator)) if len(shape) == 1 else (
        lambda n: torch.randn(n, *shape, generator=generator))
    pairs = [(draw(n), torch.arange(n) % 3) for n in (2, 6)]
    options = {**options, "dropout": 0.0} if name == "textcnn" else options
    torch.manual_seed(1)
    module = model(name, shape, 3, **options)()
    training = Training(batch=0, lr=0.1, device="cpu", engine="stack")
    sim = Simulation(method("local"), module, Federation.from_splits(pairs, classes=3), training)
    assert sim.choices["engine"] == "stack"
    sim.round()
    module.train()
    F.cross_entropy(module(pairs[0][0]), pairs[0][1]).backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    torch.testing.assert_close(sim.own.row[0], sim.layout.row(module), rtol=3e-4, atol=1e-5)  # variances of 2 samples
