"""Convolutions of stacked models.

Under `vmap` PyTorch turns the convolutions of P models into one grouped convolution, which on a GPU is many times
slower than the products it consists of. Here they become one batched product (`kernels`). `StackedConvolutions` are the
functions that stand in for PyTorch's; what the kernels do not cover goes to PyTorch as before.

A convolution is bilinear, so three functions are closed under differentiation: the convolution, the gradient of its
image and the gradients of its weights; each one's derivative is made of the other two.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input, conv2d_weight

Pair = tuple[int, int]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton runs the kernels on the CPU, slowly, to test them without a GPU."""


@cache
def available() -> bool:
    """Whether Triton is there, and a GPU whose tensor cores know TF32 and bfloat16."""
    try:
        from coterie.engine import kernels  # noqa: F401
    except ImportError:
        return False
    return INTERPRETED or (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0))


@dataclass(frozen=True)
class StackedConvolutions:
    """PyTorch's functions by the kernels, as one engine computes them: `tf32` rounds products of float32 to TF32."""

    tf32: bool

    @classmethod
    def on(cls, device: torch.device, tf32: bool) -> StackedConvolutions | None:
        """Those of a device; None where the kernels do not run."""
        return cls(tf32) if (device.type == "cuda" or INTERPRETED) and available() else None

    @property
    def stand_ins(self) -> Mapping[Callable[..., Any], Callable[..., Any]]:
        """What is called in the place of PyTorch's functions."""
        return {torch.conv1d: self.conv1d, torch.conv2d: self.conv2d, F.max_pool2d: max_pool2d}

    def serves(self, dtype: torch.dtype) -> bool:
        """Whether the kernels compute convolutions in this number format.

        Tensor cores compute products of bfloat16 and TF32; where every bit of float32 counts PyTorch is faster.
        """
        return dtype == torch.bfloat16 or (dtype == torch.float32 and self.tf32)

    def conv2d(
        self, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1,
    ) -> Tensor:
        """As `torch.conv2d`: `[B, C, H, W]` and `[N, C, R, S]` -> `[B, N, OY, OX]`."""
        if not (self.serves(weight.dtype) and input.ndim == 4 and _plain(padding, dilation, groups)):
            return torch.conv2d(input, weight, bias, stride, padding, dilation, groups)
        return self._apply(input, weight, bias, pair(stride), pair(padding))

    def conv1d(
        self, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1,
    ) -> Tensor:
        """As `torch.conv1d`: `[B, C, W]` and `[N, C, S]` -> `[B, N, OX]`."""
        if not (self.serves(weight.dtype) and input.ndim == 3 and _plain(padding, dilation, groups)):
            return torch.conv1d(input, weight, bias, stride, padding, dilation, groups)
        high = self._apply(input.unsqueeze(2), weight.unsqueeze(2), bias, (1, pair(stride)[1]), (0, pair(padding)[1]))
        return high.squeeze(2)

    def _apply(self, image: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
        if torch.is_autocast_enabled("cuda"):
            image = image.to(torch.get_autocast_dtype("cuda"))
        with torch.autocast("cuda", enabled=False):
            out: Tensor = _call(_Convolution, image, weight, bias, stride, padding, self.tf32)
        return out


def _plain(padding: Any, dilation: Any, groups: int) -> bool:
    return groups == 1 and not isinstance(padding, str) and pair(dilation) == (1, 1)


def pair(value: Any) -> Pair:
    """One number for both directions, or one for each."""
    if isinstance(value, int):
        return value, value
    return int(value[0]), int(value[-1])


def _nested(*inputs: Any) -> bool:
    """Whether there is one more `vmap` around this one; PyTorch's own convolution serves such cases."""
    return any(isinstance(t, Tensor) and torch._C._functorch.is_batchedtensor(t) for t in inputs)


def _batched(size: int, dims: tuple[int | None, ...], tensors: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """The tensors with the models' axis in front."""
    found: list[Tensor | None] = []
    for tensor, dim in zip(tensors, dims, strict=True):
        if tensor is None:
            found.append(None)
        elif dim is None:
            found.append(tensor.expand(size, *tensor.shape))
        else:
            found.append(tensor.movedim(dim, 0))
    return found


def _call(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    return function.apply(*inputs)  # type: ignore[no-untyped-call]


class _Convolution(torch.autograd.Function):
    """image, weight, bias -> the convolution. `tf32` is for the kernels, here and below."""

    @staticmethod
    def forward(
        image: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, tf32: bool
    ) -> Tensor:
        kind = image.dtype
        out = torch.conv2d(image, weight.to(kind), bias.to(kind) if bias is not None else None, stride, padding)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        image, weight, bias, ctx.stride, ctx.padding, ctx.tf32 = inputs
        ctx.has_bias = bias is not None
        ctx.save_for_backward(image, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        image, weight = ctx.saved_tensors
        of_image = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            shape = tuple(image.shape[-2:])
            of_image = _call(_ImageGradient, gradient, weight, ctx.stride, ctx.padding, shape, ctx.tf32)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            window = tuple(weight.shape[-2:])
            of_weight, of_bias = _call(_WeightGradient, image, gradient, window, ctx.stride, ctx.padding, ctx.tf32)
        return of_image, of_weight, of_bias if ctx.has_bias else None, None, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        from coterie.engine.kernels import convolve

        if _nested(*inputs):
            return torch.func.vmap(_Convolution.forward, dims)(*inputs), 0
        image, weight, bias = _batched(info.batch_size, dims[:3], inputs[:3])
        return convolve(image, weight, bias, *inputs[3:]), 0  # type: ignore[arg-type]


class _ImageGradient(torch.autograd.Function):
    """gradient of the output, weight -> gradient of the image."""

    @staticmethod
    def forward(
        gradient: Tensor, weight: Tensor, stride: Pair, padding: Pair, shape: Pair, tf32: bool
    ) -> Tensor:
        like = gradient.new_empty(len(gradient), weight.shape[1], *shape)
        found: Tensor = conv2d_input(like.shape, weight.to(gradient.dtype), gradient, stride, padding)  # type: ignore[no-untyped-call]
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        gradient, weight, ctx.stride, ctx.padding, _, ctx.tf32 = inputs
        ctx.save_for_backward(gradient, weight)

    @staticmethod
    def backward(ctx: Any, second: Tensor) -> tuple[Any, ...]:
        gradient, weight = ctx.saved_tensors
        window = tuple(weight.shape[-2:])
        of_gradient = _call(_Convolution, second, weight, None, ctx.stride, ctx.padding, ctx.tf32)
        of_weight, _ = _call(_WeightGradient, second, gradient, window, ctx.stride, ctx.padding, ctx.tf32)
        return of_gradient, of_weight, None, None, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        from coterie.engine.kernels import convolve_back

        if _nested(*inputs):
            return torch.func.vmap(_ImageGradient.forward, dims)(*inputs), 0
        gradient, weight = _batched(info.batch_size, dims[:2], inputs[:2])
        return convolve_back(gradient, weight, *inputs[2:]), 0  # type: ignore[arg-type]


class _WeightGradient(torch.autograd.Function):
    """image, gradient of the output -> gradients of the weight and of the bias, in float32."""

    @staticmethod
    def forward(
        image: Tensor, gradient: Tensor, window: Pair, stride: Pair, padding: Pair, tf32: bool
    ) -> tuple[Tensor, Tensor]:
        shape = (gradient.shape[1], image.shape[1], *window)
        given = (image, shape, gradient.to(image.dtype), stride, padding)
        weight: Tensor = conv2d_weight(*given)  # type: ignore[no-untyped-call]
        return weight.to(torch.float32), gradient.sum((0, 2, 3), dtype=torch.float32)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        image, gradient, _, ctx.stride, ctx.padding, ctx.tf32 = inputs
        ctx.save_for_backward(image, gradient)

    @staticmethod
    def backward(ctx: Any, of_weight: Tensor, of_bias: Tensor) -> tuple[Any, ...]:
        image, gradient = ctx.saved_tensors
        shape = tuple(image.shape[-2:])
        of_image = _call(_ImageGradient, gradient, of_weight, ctx.stride, ctx.padding, shape, ctx.tf32)
        of_gradient = _call(_Convolution, image, of_weight, of_bias, ctx.stride, ctx.padding, ctx.tf32)
        return of_image, of_gradient, None, None, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *inputs: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        from coterie.engine.kernels import correlate

        if _nested(*inputs):
            return torch.func.vmap(_WeightGradient.forward, dims)(*inputs), (0, 0)
        image, gradient = _batched(info.batch_size, dims[:2], inputs[:2])
        return correlate(image, gradient, *inputs[2:]), (0, 0)  # type: ignore[arg-type]


def max_pool2d(
    input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """As `torch.nn.functional.max_pool2d`: `[B, C, H, W]` -> `[B, C, OY, OX]`; it rounds nothing in any precision."""
    window = pair(kernel_size)
    apart = stride is None or stride == [] or pair(stride) == window
    plain = apart and pair(padding) == (0, 0) and pair(dilation) == (1, 1) and not ceil_mode and not return_indices
    if not (plain and input.ndim == 4 and input.dtype in (torch.float32, torch.bfloat16)):
        plainly: Any = F.max_pool2d
        return plainly(input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
    return _call(_Pool, input, window)[0]


def _whole_batch(function: Any, dims: tuple[int | None, ...], count: int, inputs: tuple[Any, ...]) -> Any:
    """One more batch axis is only a larger batch: fold it in, call, unfold. The first `count` inputs are tensors."""
    size = next(t.shape[d] for t, d in zip(inputs[:count], dims, strict=False) if d is not None)
    front = _batched(size, dims[:count], inputs[:count])
    found = _call(function, *(t.flatten(0, 1) for t in front if t is not None), *inputs[count:])
    if isinstance(found, tuple):
        return tuple(t.unflatten(0, (size, -1)) for t in found), (0,) * len(found)
    return found.unflatten(0, (size, -1)), 0


class _Pool(torch.autograd.Function):
    """image -> the largest value of every window and its place there."""

    @staticmethod
    def forward(image: Tensor, window: Pair) -> tuple[Tensor, Tensor]:
        from coterie.engine.kernels import pool

        return pool(image, window)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        image, ctx.window = inputs
        ctx.shape = tuple(image.shape[-2:])
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
        return _call(_Unpool, gradient, ctx.saved_tensors[0], ctx.window, ctx.shape), None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *inputs: Any) -> Any:
        return _whole_batch(_Pool, dims, 1, inputs)


class _Unpool(torch.autograd.Function):
    """gradient of the pooled image, places -> gradient of the image."""

    @staticmethod
    def forward(gradient: Tensor, chosen: Tensor, window: Pair, shape: Pair) -> Tensor:
        from coterie.engine.kernels import unpool

        return unpool(gradient, chosen, window, shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, chosen, ctx.window, ctx.shape = inputs
        ctx.save_for_backward(chosen)

    @staticmethod
    def backward(ctx: Any, second: Tensor) -> tuple[Any, ...]:
        return _call(_Picked, second, ctx.saved_tensors[0], ctx.window), None, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *inputs: Any) -> Any:
        return _whole_batch(_Unpool, dims, 2, inputs)


class _Picked(torch.autograd.Function):
    """image, places -> the image's values at the places; the reverse of `_Unpool`."""

    @staticmethod
    def forward(image: Tensor, chosen: Tensor, window: Pair) -> Tensor:
        (oy, ox), (ky, kx) = chosen.shape[-2:], window
        parts = image[..., : oy * ky, : ox * kx].reshape(*image.shape[:-2], oy, ky, ox, kx)
        return parts.transpose(-3, -2).flatten(-2).gather(-1, chosen.to(torch.int64).unsqueeze(-1)).squeeze(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        image, chosen, ctx.window = inputs
        ctx.shape = tuple(image.shape[-2:])
        ctx.save_for_backward(chosen)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return _call(_Unpool, gradient, ctx.saved_tensors[0], ctx.window, ctx.shape), None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *inputs: Any) -> Any:
        return _whole_batch(_Picked, dims, 2, inputs)
