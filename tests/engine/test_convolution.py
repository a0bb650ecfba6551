"""The kernels compute PyTorch's convolutions and pooling, and their first and second derivatives.

They run on a GPU, or anywhere Triton is installed with TRITON_INTERPRET=1; elsewhere these tests are skipped.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

from coterie import models, registry
from coterie.data import Federation
from coterie.engine import convolution
from coterie.engine.convolution import StackedConvolutions
from coterie.running.simulation import Simulation
from coterie.running.training import Training

here = pytest.mark.skipif(
    not ((torch.cuda.is_available() or convolution.INTERPRETED) and convolution.available()),
    reason="needs a GPU, or Triton with TRITON_INTERPRET=1",
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def exact(monkeypatch):
    """Kernels that compute products in full float32, so that only the order of sums differs from PyTorch."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # PyTorch's own, which they are compared with
    monkeypatch.setattr(StackedConvolutions, "serves", lambda self, dtype: dtype == torch.float32)
    return StackedConvolutions(tf32=False)


def weighted(y):
    """A scalar that is not linear in y and treats no two places alike."""
    return (y.tanh() * torch.arange(y.numel(), device=y.device).view(y.shape).cos()).sum()


def derivatives(function, *stacked):
    """Value, gradients and the gradient of the gradients' squares, for every model of the stack."""
    everything = tuple(range(len(stacked)))

    def value(*given):
        return weighted(function(*given))

    first = grad(value, argnums=everything)
    second = grad(lambda *given: sum(g.square().sum() for g in first(*given)), argnums=everything)
    return [vmap(value)(*stacked), *vmap(first)(*stacked), *vmap(second)(*stacked)]


def close(found, wanted, limit=1e-5):
    for one, other in zip(found, wanted, strict=True):
        assert torch.linalg.vector_norm(one - other) <= limit * torch.linalg.vector_norm(other).clamp(min=1e-6)


@here
@pytest.mark.parametrize(
    ("batch", "channels", "image", "filters", "window", "stride", "padding"),
    [
        (3, 3, (8, 8), 5, (5, 5), 1, 0),
        (2, 4, (6, 7), 9, (3, 3), 2, 1),  # the stride leaves a column that no window reaches
        (2, 3, (9, 8), 4, (3, 2), (2, 1), (1, 0)),
        (2, 6, (5, 5), 3, (1, 1), 2, 0),
        (1, 2, (4, 4), 2, (3, 3), 1, 3),  # more padding than the window needs: the way back cuts instead of padding
    ],
)
@pytest.mark.parametrize("biased", [True, False])
def test_convolutions_and_both_derivatives_are_those_of_pytorch(
    exact, batch, channels, image, filters, window, stride, padding, biased
):
    """A convolution is the same sum however it is computed; float32 in another order of adding."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE)

    x, w = draw(3, batch, channels, *image), draw(3, filters, channels, *window) / (channels * 4)
    stacked = (x, w, draw(3, filters)) if biased else (x, w)

    def through(conv):
        return lambda x, w, b=None: conv(x, w, b, stride, padding)

    close(derivatives(through(exact.conv2d), *stacked), derivatives(through(torch.conv2d), *stacked))


@here
def test_convolutions_over_time_and_what_the_kernels_leave_to_pytorch(exact):
    """conv1d is a conv2d of height 1; groups, dilation, named padding and nested stacks are PyTorch's own."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, 4, 9, generator=generator).to(DEVICE)
    w = torch.randn(3, 6, 4, 3, generator=generator).to(DEVICE)
    close(
        derivatives(lambda x, w: exact.conv1d(x, w, None, 2, 1), x, w),
        derivatives(lambda x, w: torch.conv1d(x, w, None, 2, 1), x, w),
    )
    for options in ({"groups": 2}, {"dilation": 2}, {"padding": "same"}):
        thin = w[:, :, :2] if "groups" in options else w
        own = vmap(lambda x, w: exact.conv1d(x, w, **options))(x, thin)  # noqa: B023
        close([own], [vmap(lambda x, w: torch.conv1d(x, w, **options))(x, thin)])  # noqa: B023
    twice = vmap(vmap(exact.conv1d, (None, 0)), (0, None))
    plain = vmap(vmap(torch.conv1d, (None, 0)), (0, None))
    close([twice(x, w)], [plain(x, w)])


@here
def test_the_models_axis_may_be_any(exact):
    """vmap hands over views whose models lie along another axis; a model's own numbers are then apart in memory."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(2, 3, 4, 6, 6, generator=generator), torch.randn(5, 4, 3, 3, 3, generator=generator)
    b, axes = torch.randn(5, 3, generator=generator), (1, 4, 1)
    given = [t.to(DEVICE) for t in (x, w, b)]
    close([vmap(exact.conv2d, axes)(*given)], [vmap(torch.conv2d, axes)(*given)])


@here
@pytest.mark.parametrize(("shape", "window"), [((3, 2, 4, 6, 6), 2), ((2, 3, 5, 7, 9), (2, 3))])
def test_pooling_and_both_derivatives_are_those_of_pytorch(shape, window):
    """Also where values are equal (zeros after a ReLU) the first of them is chosen, and borders that no window reaches
    have no gradient."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).relu().to(DEVICE)
    own = derivatives(lambda x: convolution.max_pool2d(x, window), x)
    close(own, derivatives(lambda x: F.max_pool2d(x, window), x), 1e-6)


@here
def test_a_module_trains_to_the_same_row_with_and_without_the_kernels(exact, monkeypatch):
    """Net puts the kernels in the place of the module's own calls; switching them off changes only rounding."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 1, 16, 16, generator=generator), torch.arange(60) % 3
    federation = Federation.from_assignment(x, y, [np.arange(i, 60, 3) for i in range(3)], val=0.0, test=0.2)
    rows, calls = [], []
    kernels = pytest.importorskip("coterie.engine.kernels")
    counted = kernels.convolve
    monkeypatch.setattr(kernels, "convolve", lambda *given: (calls.append(1), counted(*given))[1])
    for on in (True, False):
        training = Training(batch=8, lr=0.05, device=DEVICE, engine="stack", kernels=on)
        simulation = Simulation(registry.method("fedavg"), models.model("cnn", (1, 16, 16), 3), federation, training)
        simulation.round()
        rows.append(simulation.row(0))
        assert bool(calls) == on
        calls.clear()
    close(rows[:1], rows[1:], 1e-4)
