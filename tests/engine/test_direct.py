"""Chains of layers differentiated by hand give what autograd gives, and everything else goes the general way."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from coterie import models, registry
from coterie.contract.layout import Layout
from coterie.contract.net import Net, Task
from coterie.data import Federation
from coterie.engine import convolution, trial
from coterie.engine.convolution import StackedConvolutions
from coterie.engine.direct import Chain
from coterie.errors import CoterieError
from coterie.running.simulation import Simulation
from coterie.running.training import Training

HOST = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
kernels_here = pytest.mark.skipif(
    not ((torch.cuda.is_available() or convolution.INTERPRETED) and convolution.available()),
    reason="needs a GPU, or Triton with TRITON_INTERPRET=1",
)


class LeNet(nn.Module):
    """Functions instead of layers, pooling with a rest, padding, a convolution without bias, `view` to flatten."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 10, 3, bias=False)
        self.three, self.head = nn.Linear(60, 12), nn.Linear(12, 4)

    def forward(self, x):
        x = F.relu(self.two(F.max_pool2d(F.relu(self.one(x)), 2)))  # 9x11 -> 4x5 -> 2x3
        return self.head(F.relu(self.three(x.view(x.size(0), -1))))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x + self.one(x))


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.one(self.one(x)))


class Depends(nn.Module):
    """What it computes depends on how many samples there are."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x) if len(x) > 1 else self.head(2 * x)


def chain(module, shape, classes=3, device=HOST, dtype=torch.float64, bf16=False, kernels=None):
    net = Net(module, Layout.of(module), Task.of(classes), bf16=bf16)
    return Chain.of(net, torch.zeros(2, *shape), device, dtype, kernels)


@pytest.mark.parametrize(
    ("build", "shape", "is_one"),
    [
        (lambda: nn.Linear(4, 3), (4,), True),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), (2, 2), True),
        (lambda: models.CNN((3, 16, 16), 10), (3, 16, 16), True),
        (LeNet, (1, 9, 11), True),
        (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), (4,), False),  # not one of its layers
        (lambda: nn.Sequential(nn.Linear(4, 5), nn.Dropout(), nn.Linear(5, 3)), (4,), False),  # it draws
        (lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)), (4,), False),
        (lambda: nn.Sequential(nn.ReLU(), nn.Linear(4, 3)), (4,), False),  # ReLU of the data
        (lambda: nn.Sequential(nn.Linear(2, 3), nn.Flatten(), nn.Linear(6, 3)), (2, 2), False),  # along another axis
        (lambda: nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Flatten(), nn.Linear(16, 3)), (2, 4, 4), False),
        (Residual, (4,), False),
        (Twice, (4,), False),
        (Depends, (4,), False),
    ],
)
def test_only_chains_of_known_layers_are_chains(build, shape, is_one):
    """A branch, a draw, an unknown layer, weights used twice or data-dependent flow would be differentiated wrongly."""
    assert (chain(build(), shape) is not None) == is_one


def test_a_module_with_hooks_is_no_chain():
    """A hook may change what passes through, and reading the layers would not see it."""
    module = nn.Linear(4, 3)
    module.register_forward_hook(lambda *given: None)
    assert chain(module, (4,)) is None


def gradients(module, found, shape, classes, device, dtype, whole=False):
    """(by hand, by autograd in float64) of every parameter of 3 models on 6 samples, two of them padding."""
    layout = Layout.of(module)
    generator = torch.Generator().manual_seed(0)

    def draw(*size, top=2):
        if whole:  # small whole numbers: every product and sum is exact in bfloat16
            return torch.randint(-1, top, size, generator=generator).to(device, dtype)
        return torch.randn(*size, generator=generator, dtype=dtype).to(device)

    spread = draw(3, layout.size)
    rows = spread if whole else layout.row(module, dtype).to(device) + 0.1 * spread
    x, y = draw(3, 6, *shape), torch.randint(0, classes, (3, 6), generator=generator).to(device)
    weight = torch.ones(3, 6, dtype=dtype, device=device)
    weight[0, 4:] = 0
    views = layout.views(rows)
    into = {name: torch.ones_like(t) for name, t in views.items()}
    scale = torch.tensor([1.0, 2.0, -1.0], dtype=dtype, device=device)
    inputs = found.samples(x.flatten(0, 1)).unflatten(0, (3, 6))
    target = found.target(y, weight)
    loss = found.loss(found.descend(views, inputs, target, scale, into), target)
    wide, ends = module.to(device).double(), []
    for p in range(3):
        mine = {name: t[p].double().detach().requires_grad_() for name, t in views.items()}
        each = F.cross_entropy(functional_call(wide, mine, (x[p].double(),)), y[p], reduction="none")
        value = (each * weight[p]).sum() / weight[p].sum()
        wanted = torch.autograd.grad(value, list(mine.values()))
        ends += [((into[n][p] - 1).double() / scale[p].double(), w) for n, w in zip(mine, wanted, strict=True)]
        ends.append((loss[p].double(), value.detach()))
    return ends


@pytest.mark.parametrize(
    ("build", "shape", "classes"),
    [(lambda: models.MLP(20, 5, hidden="16,8"), (20,), 5), (LeNet, (1, 9, 11), 4),
     (lambda: models.CNN((3, 16, 16), 10), (3, 16, 16), 10)],
)
def test_gradients_are_autograds(build, shape, classes):
    """Scaled per model and added to what is there; padding counts for nothing. float64 leaves rounding only."""
    module = build()
    found = chain(module, shape, classes)
    for mine, wanted in gradients(module, found, shape, classes, HOST, torch.float64):
        torch.testing.assert_close(mine, wanted, rtol=1e-10, atol=1e-12)


@pytest.fixture
def exact(monkeypatch):
    """The kernels with products in full float32."""
    monkeypatch.setattr(StackedConvolutions, "serves", lambda self, dtype: dtype in (torch.float32, torch.bfloat16))
    return StackedConvolutions(tf32=False)


CONVOLUTIONS = [(LeNet, (1, 9, 11), 4), (lambda: models.CNN((3, 17, 16), 10), (3, 17, 16), 10)]


@kernels_here
@pytest.mark.parametrize(("build", "shape", "classes"), CONVOLUTIONS)
def test_kernels_give_autograds_gradients(exact, build, shape, classes):
    """The fused convolution, pooling and weight gradient against float64, to the rounding of float32."""
    module = build()
    found = chain(module, shape, classes, DEVICE, torch.float32, kernels=exact)
    assert any(type(layer).__name__ == "Windows" for layer in found.layers)
    for mine, wanted in gradients(module, found, shape, classes, DEVICE, torch.float32):
        torch.testing.assert_close(mine, wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton's interpreter does not multiply bfloat16")
def test_kernels_pool_and_route_exactly_in_bfloat16():
    """With weights and data of -1, 0 and 1 the first layer is exact in bfloat16, ties included, so its pooling must
    choose as PyTorch does; the loss is then exact up to the rounding of the later layers (2^-8 each)."""
    build = lambda: nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 4))  # noqa: E731
    module = build()
    found = chain(module, (1, 8, 8), 4, DEVICE, torch.float32, bf16=True, kernels=StackedConvolutions(tf32=True))
    for mine, wanted in gradients(module, found, (1, 8, 8), 4, DEVICE, torch.float32, whole=True):
        torch.testing.assert_close(mine, wanted, rtol=0.02, atol=0.02 * float(wanted.abs().max()))


def relu():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


@pytest.mark.parametrize("spec", [*sorted(registry.methods()), "fedprox:mu=0.5", "fedavg+confree"])
def test_every_method_trains_alike_by_hand_and_stacked(tiny, spec):
    """Two rounds and an evaluation of every method: the step is the same equation, so float64 agrees to rounding.

    Methods with parts, corrections of the gradient and clipping go through their own lines of the direct step.
    """
    ends = []
    for engine in ("auto", "stack"):
        sim = tiny.simulation(spec, model=relu, engine=engine, participation=0.8)
        for _ in range(2):
            sim.round()
        scores = sim.evaluate().stages
        ends.append((tiny.state(sim), {name: s.test["loss"] for name, s in scores.items()}))
    (rows, losses), (wanted, wanted_losses) = ends
    for name, t in wanted.items():
        torch.testing.assert_close(rows[name], t, rtol=1e-9, atol=1e-11)
    for name, loss in wanted_losses.items():
        np.testing.assert_allclose(losses[name], loss, rtol=1e-9)


def test_convolutions_train_alike_by_hand_and_stacked():
    """Clients of unequal size, a CNN on the host: by hand each model alone with channels last, stacked under vmap."""
    generator = torch.Generator().manual_seed(0)
    clients = [(torch.randn(n, 1, 16, 16, generator=generator, dtype=torch.float64), torch.arange(n) % 3)
               for n in (9, 4, 13)]
    data = Federation.from_clients(clients, classes=3)
    ends = []
    for engine in ("direct", "stack"):
        training = Training(batch=4, lr=0.1, precision="float64", device="cpu", engine=engine)
        sim = Simulation(registry.method("fedper"), models.model("cnn", (1, 16, 16), 3), data, training)
        sim.round()
        ends.append(sim.snapshot()[0])
    for name, t in ends[1].items():
        torch.testing.assert_close(ends[0][name], t, rtol=1e-9, atol=1e-11)


def test_the_choice_is_kept_and_can_be_made(tiny):
    """A chain trains by hand unless told otherwise; a resumed run keeps what it began with."""
    assert tiny.simulation(model=relu).choices["direct"]
    chosen = tiny.simulation(model=relu, engine="stack").choices
    assert chosen["engine"] == "stack"
    assert "direct" not in chosen
    assert tiny.simulation(model=relu, choices={"engine": "stack"}).engine.chain is None
    with pytest.raises(CoterieError, match="engine=direct needs a chain"):
        tiny.simulation(model="dropout", engine="direct")


@pytest.mark.parametrize(
    ("stacked", "looped", "engine"), [(2.0, 1.0, "loop"), (2.0, 1.9, "stack"), (1.0, 5.0, "stack")]
)
def test_the_faster_of_stack_and_loop_is_taken_and_reported(tiny, monkeypatch, stacked, looped, engine):
    """One after another is chosen where it is clearly faster: below 0.8 of the stack's time, so not at 1.9 of 2."""
    took = {"models": 8, "stacked": stacked, "looped": looped}
    monkeypatch.setattr(trial, "times", lambda *given: took)
    sim = tiny.simulation(model="dropout")
    assert (sim.choices["engine"], sim.choices["milliseconds"]) == (engine, took)
    assert sim.engine.net.stacked == (engine == "stack")


def test_the_trial_is_made_once(tiny, monkeypatch):
    """Three methods on one model are tried once; the trial reports both times of the same work."""
    monkeypatch.setattr(trial, "_known", {})
    took = [tiny.simulation(method, model="dropout").choices["milliseconds"] for method in ("fedavg", "local", "ditto")]
    assert took[0] is took[1] is took[2]
    assert took[0]["stacked"] > 0
    assert took[0]["looped"] > 0
