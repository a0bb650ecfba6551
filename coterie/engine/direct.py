"""Chains of layers, differentiated by hand for a whole stack of models.

Most small models are a chain: linear layers and convolutions, each with ReLU and max pooling behind it. For those the
gradient of the task's loss needs neither autograd nor `vmap`: one batched product per layer and direction, and the
product that would be the weight's gradient goes straight into the weight. Any other module, objective or inner step
goes the general way.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from coterie.contract.net import Net, cross_entropy, squared_error
from coterie.engine.convolution import StackedConvolutions, pair

Pair = tuple[int, int]
Tensors = Mapping[str, Tensor]
aten = torch.ops.aten
threshold = aten.threshold_backward.default


class Target(NamedTuple):
    """What the outputs `[P, B, C]` are compared with, and each sample's share in the mean, `[P, B, 1]`.

    Labels come as minus their (smoothed) indicator times the share, so that the gradient of the cross entropy is
    softmax(outputs) * share + value.
    """

    value: Tensor
    share: Tensor

    def at(self, where: Any) -> Target:
        return Target(self.value[where], self.share[where])


class Way(NamedTuple):
    """One way back through a layer: tensors that receive gradients, the share that they keep of what they hold, and
    whether the layer below asks for a gradient too."""

    into: Tensors
    share: float
    further: bool

    def add(self, name: str | None, gradient: Tensor) -> None:
        """Add a gradient to the tensor of this name, if it wants one."""
        if name is not None and name in self.into:
            held = self.into[name]
            if self.share == 0:
                held.copy_(gradient)
            else:
                (held if self.share == 1 else held.mul_(self.share)).add_(gradient)


@dataclass(frozen=True)
class Layer:
    """`forward` gives what the next layer gets and what `back` will need; `back` the gradient for the layer below."""

    weight: str | None = None
    bias: str | None = None
    relu: bool = False

    def forward(self, tensors: Tensors, x: Tensor) -> tuple[Tensor, Any]:
        raise NotImplementedError

    def back(self, tensors: Tensors, kept: Any, gradient: Tensor, way: Way) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class Flat(Layer):
    """`[P, B, ...] -> [P, B, features]`."""

    def forward(self, tensors: Tensors, x: Tensor) -> tuple[Tensor, Any]:
        return x.flatten(2), x.shape

    def back(self, tensors: Tensors, kept: Any, gradient: Tensor, way: Way) -> Tensor:
        return gradient.view(kept)


@dataclass(frozen=True)
class Dense(Layer):
    """relu(x W^T + b), `[P, B, in] -> [P, B, out]`."""

    def forward(self, tensors: Tensors, x: Tensor) -> tuple[Tensor, Any]:
        assert self.weight is not None
        used, bias = tensors[self.weight], tensors[self.bias] if self.bias is not None else None
        if used.dtype != x.dtype:
            used, bias = used.to(x.dtype), bias.to(x.dtype) if bias is not None else None
        y = torch.bmm(x, used.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, used.mT)
        if self.relu:
            y.clamp_min_(0)
        return y, (x, y, used)

    def back(self, tensors: Tensors, kept: Any, gradient: Tensor, way: Way) -> Tensor:
        x, y, used = kept
        if gradient.dtype != x.dtype:
            gradient = gradient.to(x.dtype)
        if self.relu:
            gradient = threshold(gradient, y, 0)
        below = torch.bmm(gradient, used) if way.further else gradient
        if self.bias in way.into:
            way.add(self.bias, gradient.sum(1, dtype=torch.float32 if x.dtype == torch.bfloat16 else None))
        weight = way.into.get(self.weight or "")
        if weight is not None:
            if weight.dtype == x.dtype:
                weight.baddbmm_(gradient.mT, x, beta=way.share)
            else:
                from coterie.engine.kernels import accumulate

                accumulate(weight, gradient, x, way.share)
        return below


@dataclass(frozen=True)
class FlatLast(Layer):
    """`[P, B, H, W, C] -> [P, B, C * H * W]`, in the order that PyTorch's flattening has."""

    def forward(self, tensors: Tensors, x: Tensor) -> tuple[Tensor, Any]:
        first = x.movedim(-1, 2)
        return first.flatten(2), first.shape

    def back(self, tensors: Tensors, kept: Any, gradient: Tensor, way: Way) -> Tensor:
        return gradient.view(kept).movedim(2, -1).contiguous()


@dataclass(frozen=True)
class Convolved(Layer):
    """relu(the largest value of each `pool` window of x * W + b), `[1, B, H, W, C] -> [1, B, OY, OX, N]`.

    On a host every model's convolution is computed by itself, with channels last: there a stack is no faster, and
    pooling is many times slower with channels first.
    """

    window: Pair = (1, 1)
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    pool: Pair | None = None

    def forward(self, tensors: Tensors, x: Tensor) -> tuple[Tensor, Any]:
        assert self.weight is not None
        image = x[0].movedim(-1, 1)
        weight = tensors[self.weight][0].contiguous(memory_format=torch.channels_last)
        y = torch.conv2d(image, weight, tensors[self.bias][0] if self.bias else None, self.stride, self.padding)
        places, before = None, y
        if self.pool is not None:
            y, places = aten.max_pool2d_with_indices(y, self.pool)
        if self.relu:
            y.clamp_min_(0)
        return y.movedim(1, -1).unsqueeze(0), (image, weight, y, before, places)

    def back(self, tensors: Tensors, kept: Any, gradient: Tensor, way: Way) -> Tensor:
        image, weight, y, before, places = kept
        gradient = gradient[0].movedim(-1, 1)
        if self.relu:
            gradient = threshold(gradient, y, 0)
        way.add(self.bias, gradient.sum((0, 2, 3)).unsqueeze(0))
        if places is not None:
            size = (self.pool, self.pool, [0, 0], [1, 1], False)
            gradient = aten.max_pool2d_with_indices_backward(gradient, before, *size, places)
        wanted = [way.further, self.weight in way.into, False]
        if not any(wanted):
            return gradient
        shapes = (self.stride, self.padding, [1, 1], False, [0, 0], 1)
        below, of_weight, _ = aten.convolution_backward(gradient, image, weight, None, *shapes, wanted)
        if wanted[1]:
            way.add(self.weight, of_weight.unsqueeze(0))
        return below.movedim(1, -1).unsqueeze(0) if wanted[0] else gradient


@dataclass(frozen=True)
class Windows(Convolved):
    """The same for a stack on a GPU, channels last: `[P, B, H, W, C] -> [P, B, OY, OX, N]`, see `kernels`."""

    tf32: bool = False  # products of float32 are rounded to TF32

    def forward(self, tensors: Tensors, x: Tensor) -> tuple[Tensor, Any]:
        from coterie.engine import kernels

        assert self.weight is not None
        weight, bias = tensors[self.weight], tensors[self.bias] if self.bias else None
        y, places = kernels.windows(x, weight, bias, self.padding, self.relu, self.pool is not None, self.tf32)
        return y, (x, y, places)

    def back(self, tensors: Tensors, kept: Any, gradient: Tensor, way: Way) -> Tensor:
        from coterie.engine import kernels

        assert self.weight is not None
        image, y, places = kept
        weight = tensors[self.weight]
        if self.relu:
            gradient = threshold(gradient, y, 0)
        way.add(self.bias, gradient.sum((1, 2, 3), dtype=torch.float32))
        window = self.window
        shape = (image.shape[2] + 2 * self.padding[0] - window[0] + 1,
                 image.shape[3] + 2 * self.padding[1] - window[1] + 1)
        border = (window[0] - 1 - self.padding[0], window[1] - 1 - self.padding[1]) if way.further else (0, 0)
        whole = kernels.spread(gradient, places, shape, border)
        below = kernels.windows_back(whole, weight, self.tf32) if way.further else gradient
        if self.weight in way.into:
            shapes = (border, window, self.padding, weight.shape[2])
            way.add(self.weight, kernels.windows_weight(image, whole, *shapes, self.tf32))
        return below


class Chain:
    """The layers of a module in order, and what one step of SGD of P such models does with them."""

    def __init__(self, layers: list[Layer], classes: int, low: torch.dtype | None, smoothing: float = 0.0) -> None:
        """`smoothing` is that of the labels."""
        self.layers = layers
        self.classes = classes
        self.smoothing = smoothing
        self.low = low
        self.images = isinstance(layers[0], Convolved)
        self.alone = any(type(layer) is Convolved for layer in layers)

    @classmethod
    def of(
        cls, net: Net, x: Tensor, device: torch.device, dtype: torch.dtype,
        convolutions: StackedConvolutions | None = None,
    ) -> Chain | None:
        """The net for data `x [N, ...]` as a chain; None where it is none, or where this device has a better way.

        `convolutions` are the kernels of the engine that asks, if it has any.
        """
        known = net.task.scored in (cross_entropy, squared_error) and not net.batch_statistics
        layers = _layers(net.module) if known else None
        entries = {entry.name for entry in net.layout.entries}
        if not layers or x.ndim != {Dense: 2, Convolved: 4}.get(type(layers[0]), x.ndim):
            return None
        if {n for layer in layers for n in (layer.weight, layer.bias) if n is not None} != entries:
            return None
        low = torch.bfloat16 if net.low_precision else None
        served = convolutions is not None and convolutions.serves(low or dtype)
        convolves = any(isinstance(layer, Convolved) for layer in layers)
        if (low is not None or (convolves and device.type != "cpu")) and not served:
            return None
        arranged = _arranged(layers, convolutions if served else None)
        return cls(arranged, net.task.classes, low, net.task.smoothing) if arranged else None

    def samples(self, x: Tensor) -> Tensor:
        """The data as the first layer takes them, `[samples, ...]`: images channels last, anything else flat."""
        if not self.images:
            x = x.flatten(1) if isinstance(self.layers[0], Dense) else x
            return x if self.low is None else x.to(self.low)
        last = x.movedim(1, -1)
        if self.alone:
            return last.contiguous()
        out = torch.zeros(*last.shape[:-1], last.shape[-1] + -last.shape[-1] % 4, dtype=self.low or x.dtype,
                          device=x.device)  # the kernels read 4 channels at once
        out[..., : last.shape[-1]] = last
        return out

    def target(self, y: Tensor, weight: Tensor, worth: Tensor | None = None) -> Target:
        """`y [..., B]` or `[..., B, k]`, `weight [..., B]` 1 for a sample and 0 for padding -> their target.

        A sample's share is `worth [..., B]`, 1 without it, over the number of samples. With smoothing s its label is
        (1 - s) times its indicator + s / classes.
        """
        share = weight / weight.sum(-1, keepdim=True).clamp(min=1)
        share = (share if worth is None else share * worth).unsqueeze(-1)
        if self.classes:
            value = torch.zeros(*y.shape, self.classes, dtype=share.dtype, device=share.device)
            if self.smoothing:
                value.sub_(share * (self.smoothing / self.classes))
                return Target(value.scatter_add_(-1, y.unsqueeze(-1), share * (self.smoothing - 1)), share)
            return Target(value.scatter_(-1, y.unsqueeze(-1), -share), share)
        return Target(y.flatten(weight.ndim) if y.ndim > weight.ndim else y.unsqueeze(-1), share)

    def descend(
        self, tensors: Tensors, x: Tensor, target: Target, scale: Tensor | None, into: Tensors, share: float = 1.0
    ) -> Tensor:
        """`into <- share * into + scale [P] * gradient of the mean loss`; returns the outputs `[P, B, C]`.

        `x [P, B, ...]` are `samples`. The tensors of `into` may be the parameters themselves: `scale = -lr` is then a
        step of SGD. With a share of 0 what they held is overwritten. Gradients are linear in that of the outputs, so
        the scale goes there; without one it is in the target (`scaled`).
        """
        if self.alone and len(x) > 1:
            return _apart(len(x), lambda p: self.descend(
                {n: t[p] for n, t in tensors.items()}, x[p], target.at(p),
                scale if scale is None or scale.ndim == 0 else scale[p], {n: t[p] for n, t in into.items()}, share,
            ))
        kept = []
        for layer in self.layers:
            x, state = layer.forward(tensors, x)
            kept.append(state)
        outputs = x if self.low is None else x.to(target.share.dtype)
        gradient = self._slope(outputs, target)
        if scale is not None:
            gradient.mul_(scale.view(-1, 1, 1))
        lowest = next(i for i, layer in enumerate(self.layers) if layer.weight in into or layer.bias in into)
        way, last = Way(into, share, True), Way(into, share, False)
        for number in range(len(self.layers) - 1, lowest - 1, -1):
            gradient = self.layers[number].back(tensors, kept.pop(), gradient, way if number > lowest else last)
        return outputs

    def scaled(self, target: Target, scale: Tensor) -> Target:
        """The target whose slope is `scale` (0-d, or one a model `[P]`) times as large; for many steps at once."""
        factor = scale.view(-1, 1, 1)
        return Target(target.value * factor if self.classes else target.value, target.share * factor)

    def loss(self, outputs: Tensor, target: Target) -> Tensor:
        """The mean loss, `[..., B, C] -> [...]`."""
        if self.classes:
            return (outputs.log_softmax(-1) * target.value).sum((-2, -1))
        return ((outputs - target.value).square() * target.share).sum((-2, -1)) / outputs.shape[-1]

    def _slope(self, outputs: Tensor, target: Target) -> Tensor:
        """The gradient of the loss with respect to the outputs, `[P, B, C]`."""
        if self.classes:
            return torch.addcmul(target.value, outputs.softmax(-1), target.share)
        return (outputs - target.value).mul_(target.share * (2 / outputs.shape[-1]))

    def outputs(self, tensors: Tensors, x: Tensor) -> Tensor:
        """`x [P, B, ...]` of `samples` -> `[P, B, C]`."""
        if self.alone and len(x) > 1:
            return _apart(len(x), lambda p: self.outputs({n: t[p] for n, t in tensors.items()}, x[p]))
        for layer in self.layers:
            x, _ = layer.forward(tensors, x)
        return x if self.low is None else x.to(torch.float32)


def _apart(models: int, work: Callable[[slice], Tensor]) -> Tensor:
    """`work` for each model by itself, as many at once as PyTorch has threads: each then needs but one."""
    parts, workers = [slice(p, p + 1) for p in range(models)], min(torch.get_num_threads(), models)

    def quietly(part: slice) -> Tensor:
        with torch.no_grad():  # this is each thread's own
            return work(part)

    return torch.cat(list(map(quietly, parts) if workers == 1 else _workers(workers).map(quietly, parts)))


@cache
def _workers(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "coterie", initializer=torch.set_num_threads, initargs=(1,))


# -- reading a module --------------------------------------------------------------------------------------------------


def _layers(module: nn.Module) -> list[Layer] | None:
    """The module's layers if it is a chain; None if its graph branches, draws, or has any other layer."""
    if any(m._forward_hooks or m._forward_pre_hooks for m in module.modules()):
        return None
    if type(module) is nn.Linear:
        return [Dense("weight", "bias" if module.bias is not None else None)]
    try:
        graph = fx.symbolic_trace(module).graph
    except Exception:  # control flow that depends on the data, or whatever else the tracer does not follow
        return None
    layers: list[Layer] = []
    before: fx.Node | None = None
    for node in graph.nodes:
        if node.op == "placeholder":
            if before is not None:
                return None
        elif node.op == "output":
            return layers if node.args == (before,) else None
        elif _is_size(node):
            continue
        else:
            follows = [n for n in node.all_input_nodes if not _is_size(n)] == [before]
            if not follows or not _append(layers, node, dict(module.named_modules())):
                return None
        before = node
    return None


def _append(layers: list[Layer], node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Add what a node does to the layers; False if it is nothing known."""
    name = str(node.target)
    inner = modules.get(name) if node.op == "call_module" else None
    kind = type(inner)
    last = layers[-1] if layers else None
    if kind is nn.Linear or kind is nn.Conv2d:
        names = (f"{name}.weight", f"{name}.bias" if inner.bias is not None else None)  # type: ignore[union-attr]
        if any(layer.weight == names[0] for layer in layers):
            return False  # used twice
        if kind is nn.Linear:
            layers.append(Dense(*names))
            return True
        assert isinstance(inner, nn.Conv2d)
        plain = inner.groups == 1 and inner.dilation == (1, 1) and not isinstance(inner.padding, str)
        if not plain or inner.padding_mode != "zeros":
            return False
        shape = (inner.kernel_size, inner.stride, inner.padding)
        layers.append(Convolved(*names, False, *shape))  # type: ignore[arg-type]
        return True
    if kind is nn.Identity:
        return True
    if kind is nn.ReLU or (inner is None and node.target in (F.relu, torch.relu, "relu")):
        if last is None or last.weight is None:
            return False
        layers[-1] = replace(last, relu=True)
        return True
    if inner is None and node.target is F.max_pool2d:
        inner = nn.MaxPool2d(*node.args[1:], **node.kwargs)  # type: ignore[arg-type]
    if type(inner) is nn.MaxPool2d:
        return _pool(layers, inner)
    if _flattens(node, inner):
        layers.append(Flat())
        return True
    return False


def _pool(layers: list[Layer], inner: Any) -> bool:
    """Pooling commutes with ReLU, so it may stand on either side."""
    last = layers[-1] if layers else None
    window, stride, padding, dilation = (
        pair(v) for v in (inner.kernel_size, inner.stride, inner.padding, inner.dilation)
    )
    plain = stride == window and padding == (0, 0) and dilation == (1, 1) and not inner.ceil_mode
    if not isinstance(last, Convolved) or last.pool is not None or not plain or inner.return_indices:
        return False
    layers[-1] = replace(last, pool=window)
    return True


def _flattens(node: fx.Node, inner: nn.Module | None) -> bool:
    """Everything but the batch becomes one axis: flatten(1), view(len, -1), reshape(len, -1)."""
    if isinstance(inner, nn.Flatten):
        return (inner.start_dim, inner.end_dim) == (1, -1)
    if node.target in (torch.flatten, "flatten"):
        return tuple(node.args[1:]) == (1,) and not node.kwargs
    if node.target in ("view", "reshape"):
        rest = node.args[1:]
        return len(rest) == 2 and isinstance(rest[0], fx.Node) and _is_size(rest[0]) and bool(rest[1] == -1)
    return False


def _is_size(node: fx.Node) -> bool:
    """The number of samples: x.size(0), x.shape[0], and x.shape itself on the way there."""
    if node.op == "call_method" and node.target == "size":
        return tuple(node.args[1:]) == (0,)
    if node.op == "call_function" and node.target is getattr and node.args[1] == "shape":
        return all(user.target is operator.getitem and user.args[1] == 0 for user in node.users)
    first = node.op == "call_function" and node.target is operator.getitem and bool(node.args[1] == 0)
    return first and isinstance(node.args[0], fx.Node) and node.args[0].target is getattr


def _arranged(layers: list[Layer], kernels: StackedConvolutions | None) -> list[Layer] | None:
    """The layers with channels last, as the device computes them; None where a convolution is not one of its own."""
    found: list[Layer] = []
    images = False
    for layer in layers:
        if isinstance(layer, Convolved):
            within = all(p < w for p, w in zip(layer.padding, layer.window, strict=True))
            if kernels is not None and (not within or layer.stride != (1, 1) or layer.pool not in (None, (2, 2))):
                return None
            if found and not images:
                return None
            found.append(layer if kernels is None else Windows(**vars(layer), tf32=kernels.tf32))
            images = True
        elif isinstance(layer, Flat):
            if found and images:
                found.append(FlatLast())
            elif found:
                found.append(layer)
            images = False
        elif images:
            return None
        else:
            found.append(layer)
    return None if images else found
