"""Triton kernels for convolutions of many models at once: one product per model, the model as batch axis.

Images lie with their channels last, `[P, B, H, W, C]`, so that a row of a patch is one stretch of memory. The columns
of patches are never written down; they are gathered while the product runs. Borders are cut or padded beforehand, so
the kernels know only windows that lie inside.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

Pair = tuple[int, int]
CONVOLVE = {"BM": 128, "BN": 64, "BK": 32, "num_warps": 4, "num_stages": 3}
CORRELATE = {"BM": 64, "BN": 64, "BK": 128, "num_warps": 4, "num_stages": 3, "PROGRAMS": 1024}


@triton.jit
def _convolve(
    image, weight, bias, out, image_p, bias_p, pixels,
    N: tl.constexpr, IMAGE: tl.constexpr, LINE: tl.constexpr, C: tl.constexpr, OY: tl.constexpr, OX: tl.constexpr,
    R: tl.constexpr, RUN: tl.constexpr, STRIDE_Y: tl.constexpr, STRIDE_X: tl.constexpr,
    BIAS: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):
    """out[p, pixel, n] = bias[p, n] + sum over k of image[p, start of window + offset of k] * weight[p, n, k].

    k runs over the R lines of a window, each a stretch of RUN = S * C numbers.
    """
    p = tl.program_id(1).to(tl.int64)
    tiles: tl.constexpr = (N + BN - 1) // BN
    m = (tl.program_id(0) // tiles) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % tiles) * BN + tl.arange(0, BN)
    inside = tl.where(m < pixels, m, 0)
    b, pixel = inside // (OY * OX), inside % (OY * OX)
    start = b * IMAGE + (pixel // OX) * (STRIDE_Y * LINE) + (pixel % OX) * (STRIDE_X * C)
    filters = tl.where(n < N, n, 0) * (R * RUN)
    image += p * image_p
    weight += p * (N * R * RUN)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for first in range(0, R * RUN, BK):
        k = first + tl.arange(0, BK)
        offset = (k // RUN) * LINE + k % RUN
        if R * RUN % BK == 0:
            columns = tl.load(image + (start[:, None] + offset[None, :]))
            values = tl.load(weight + (filters[None, :] + k[:, None]))
        else:
            columns = tl.load(image + (start[:, None] + offset[None, :]), mask=(k < R * RUN)[None, :], other=0.0)
            values = tl.load(weight + (filters[None, :] + k[:, None]), mask=(k < R * RUN)[:, None], other=0.0)
        total = tl.dot(columns, values, total, input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias + p * bias_p + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    place = out + p * pixels * N + (m[:, None] * N + n[None, :])
    tl.store(place, total.to(out.dtype.element_ty), mask=(m < pixels)[:, None] & (n < N)[None, :])


@triton.jit
def _correlate(
    image, gradient, out, image_p, pixels, per_split,
    N: tl.constexpr, IMAGE: tl.constexpr, LINE: tl.constexpr, C: tl.constexpr, OY: tl.constexpr, OX: tl.constexpr,
    R: tl.constexpr, RUN: tl.constexpr, STRIDE_Y: tl.constexpr, STRIDE_X: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):
    """out[split, p, n, k] = sum over this split's pixels of gradient[p, pixel, n] * image[p, window + offset of k]."""
    p = tl.program_id(1).to(tl.int64)
    tiles: tl.constexpr = (N + BN - 1) // BN
    k = (tl.program_id(0) // tiles) * BK + tl.arange(0, BK)
    n = (tl.program_id(0) % tiles) * BN + tl.arange(0, BN)
    column = tl.where(k < R * RUN, k, 0)
    offset = (column // RUN) * LINE + column % RUN
    image += p * image_p
    gradient += p * pixels * N
    first = tl.program_id(2) * per_split
    last = tl.minimum(first + per_split, pixels)
    total = tl.zeros((BN, BK), dtype=tl.float32)
    for at in range(first, last, BM):
        m = at + tl.arange(0, BM)
        inside = tl.where(m < last, m, 0)
        b, pixel = inside // (OY * OX), inside % (OY * OX)
        start = b * IMAGE + (pixel // OX) * (STRIDE_Y * LINE) + (pixel % OX) * (STRIDE_X * C)
        columns = tl.load(image + (start[:, None] + offset[None, :]))
        live = (m < last)[:, None] & (n < N)[None, :]
        values = tl.load(gradient + (m[:, None] * N + n[None, :]), mask=live, other=0.0)
        total = tl.dot(tl.trans(values), columns, total, input_precision=PRECISION)
    part = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + p
    place = out + part * (N * R * RUN) + (n[:, None] * (R * RUN) + k[None, :])
    tl.store(place, total, mask=(n < N)[:, None] & (k < R * RUN)[None, :])


@triton.jit
def _pool(
    image, out, chosen, total, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, KY: tl.constexpr, KX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[q, y, x, c] = the largest value of the window, chosen = its place there (the first of equals, as PyTorch)."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    OX: tl.constexpr = W // KX
    OY: tl.constexpr = H // KY
    c, x, y, q = i % C, i // C % OX, i // (C * OX) % OY, i // (C * OX * OY)
    corner = image + ((q * H + y * KY) * W + x * KX) * C + c
    best = tl.load(corner, mask=i < total, other=0.0)
    place = tl.zeros((BLOCK,), dtype=tl.uint8)
    for k in tl.static_range(1, KY * KX):
        value = tl.load(corner + ((k // KX) * W + k % KX) * C, mask=i < total, other=0.0)
        better = (value > best) | ((value != value) & (best == best))
        best = tl.where(better, value, best)
        place = tl.where(better, k, place).to(tl.uint8)
    tl.store(out + i, best, mask=i < total)
    tl.store(chosen + i, place, mask=i < total)


@triton.jit
def _unpool(
    gradient, chosen, out, total, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, KY: tl.constexpr,
    KX: tl.constexpr, BLOCK: tl.constexpr,
):
    """out = the gradient at the chosen place of each window, 0 elsewhere in it."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    OX: tl.constexpr = W // KX
    OY: tl.constexpr = H // KY
    c, x, y, q = i % C, i // C % OX, i // (C * OX) % OY, i // (C * OX * OY)
    corner = out + ((q * H + y * KY) * W + x * KX) * C + c
    value = tl.load(gradient + i, mask=i < total, other=0.0)
    place = tl.load(chosen + i, mask=i < total, other=0)
    for k in tl.static_range(KY * KX):
        tl.store(corner + ((k // KX) * W + k % KX) * C, tl.where(place == k, value, 0.0), mask=i < total)


def _precision(low: bool) -> dict[str, Any]:
    """TF32 where PyTorch may use it."""
    return {"PRECISION": "tf32" if low or torch.backends.cudnn.allow_tf32 else "ieee"}


def _last(image: Tensor, padding: tuple[int, int, int, int] = (0, 0, 0, 0), multiple: int = 4) -> Tensor:
    """`[P, B, C, H, W]` -> `[P, B, H, W, C]`, contiguous but for P, padded (left, right, top, bottom), C rounded up."""
    last = image.movedim(2, -1)
    more = -last.shape[-1] % multiple
    if more or any(padding):
        return F.pad(last, (0, more, *padding)).contiguous()
    return last if last[0].is_contiguous() else last.contiguous()


def _windows(image: Tensor, window: Pair, stride: Pair) -> tuple[Pair, dict[str, Any]]:
    """The shape of the output and the constants that describe its windows; `image` is `[P, B, H, W, C]`."""
    high, wide, c = image.shape[2:]
    shape = ((high - window[0]) // stride[0] + 1, (wide - window[1]) // stride[1] + 1)
    return shape, {
        "IMAGE": high * wide * c, "LINE": wide * c, "C": c, "OY": shape[0], "OX": shape[1], "R": window[0],
        "RUN": window[1] * c, "STRIDE_Y": stride[0], "STRIDE_X": stride[1],
    }


def _product(image: Tensor, weight: Tensor, bias: Tensor | None, window: Pair, stride: Pair) -> Tensor:
    """`[P, B, H, W, C]` and `[P, N, R, S, C]` -> `[P, B, OY, OX, N]`, windows inside the image only."""
    models, batch = image.shape[:2]
    filters = weight.shape[1]
    bias = bias if bias is None or bias.stride(1) == 1 else bias.contiguous()  # the kernel steps along a model's bias
    shape, constants = _windows(image, window, stride)
    out = torch.empty(models, batch, *shape, filters, dtype=image.dtype, device=image.device)
    pixels = batch * shape[0] * shape[1]
    tile = CONVOLVE | {"BN": min(CONVOLVE["BN"], max(16, triton.next_power_of_2(filters)))}
    _convolve[(triton.cdiv(pixels, tile["BM"]) * triton.cdiv(filters, tile["BN"]), models)](
        image, weight, bias, out, image.stride(0), bias.stride(0) if bias is not None else 0, pixels, N=filters,
        **constants, BIAS=bias is not None, **_precision(image.dtype == torch.bfloat16), **tile,
    )
    return out


def convolve(image: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    """`[P, B, C, H, W]` and `[P, N, C, R, S]` -> `[P, B, N, OY, OX]`."""
    top, left = padding
    last = _last(image, (left, left, top, top))
    more = last.shape[-1] - weight.shape[2]
    filters = F.pad(weight.permute(0, 1, 3, 4, 2), (0, more)).to(image.dtype).contiguous()
    return _product(last, filters, bias, (weight.shape[3], weight.shape[4]), stride).movedim(-1, 2)


def convolve_back(gradient: Tensor, weight: Tensor, stride: Pair, padding: Pair, shape: Pair) -> Tensor:
    """The gradient of the image: `[P, B, N, OY, OX]` and `[P, N, C, R, S]` -> `[P, B, C, *shape]`.

    It is the convolution of the gradient, spread out by the stride, with the mirrored weights.
    """
    r, s = weight.shape[3:]
    if stride != (1, 1):
        models, batch, n, oy, ox = gradient.shape
        spread = gradient.new_zeros(models, batch, (oy - 1) * stride[0] + 1, (ox - 1) * stride[1] + 1, n).movedim(-1, 2)
        spread[..., :: stride[0], :: stride[1]] = gradient
        gradient = spread
    high, wide = gradient.shape[3:]
    top, left = r - 1 - padding[0], s - 1 - padding[1]
    last = _last(gradient, (left, shape[1] + s - 1 - left - wide, top, shape[0] + r - 1 - top - high))
    filters = F.pad(weight.flip(3, 4).permute(0, 2, 3, 4, 1), (0, last.shape[-1] - weight.shape[1]))
    return _product(last, filters.to(gradient.dtype).contiguous(), None, (r, s), (1, 1)).movedim(-1, 2)


def correlate(image: Tensor, gradient: Tensor, window: Pair, stride: Pair, padding: Pair) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias: `[P, B, C, H, W]`, `[P, B, N, OY, OX]` -> `[P, N, C, *window]`, `[P, N]`."""
    top, left = padding
    channels, filters = image.shape[2], gradient.shape[2]
    last, values = _last(image, (left, left, top, top)), _last(gradient, multiple=1).contiguous()
    if values.dtype != last.dtype:
        values = values.to(last.dtype)
    models, batch = last.shape[:2]
    shape, constants = _windows(last, window, stride)
    columns, pixels = window[0] * constants["RUN"], batch * shape[0] * shape[1]
    tile = CORRELATE | {
        "BN": min(CORRELATE["BN"], max(16, triton.next_power_of_2(filters))),
        "BK": min(CORRELATE["BK"], max(16, triton.next_power_of_2(columns))),
    }
    programs = tile.pop("PROGRAMS")
    tiles = triton.cdiv(columns, tile["BK"]) * triton.cdiv(filters, tile["BN"])
    # Fill the device, but let every part have a few hundred pixels; parts are added in a fixed order.
    splits = max(1, min(triton.cdiv(programs, tiles * models), pixels // 512))
    per_split = triton.cdiv(triton.cdiv(pixels, splits), tile["BM"]) * tile["BM"]
    splits = triton.cdiv(pixels, per_split)
    out = torch.empty(splits, models, filters, *window, last.shape[-1], dtype=torch.float32, device=image.device)
    _correlate[(tiles, models, splits)](
        last, values, out, last.stride(0), pixels, per_split, N=filters, **constants,
        **_precision(last.dtype == torch.bfloat16), **tile,
    )
    found = out.sum(0) if splits > 1 else out[0]
    return found[..., :channels].movedim(-1, 2), values.sum((1, 2, 3), dtype=torch.float32)


def pool(image: Tensor, window: Pair) -> tuple[Tensor, Tensor]:
    """Largest value of windows that do not overlap: `[Q, C, H, W]` -> values and places `[Q, C, OY, OX]`."""
    last = image.movedim(1, -1).contiguous()
    q, high, wide, c = last.shape
    out = torch.empty(q, high // window[0], wide // window[1], c, dtype=image.dtype, device=image.device)
    chosen = torch.empty(out.shape, dtype=torch.uint8, device=image.device)
    _pool[(triton.cdiv(out.numel(), 1024),)](
        last, out, chosen, out.numel(), H=high, W=wide, C=c, KY=window[0], KX=window[1], BLOCK=1024
    )
    return out.movedim(-1, 1), chosen.movedim(-1, 1)


def unpool(gradient: Tensor, chosen: Tensor, window: Pair, shape: Pair) -> Tensor:
    """The gradient of the image: `[Q, C, OY, OX]` -> `[Q, C, *shape]`."""
    last, places = gradient.movedim(1, -1).contiguous(), chosen.movedim(1, -1).contiguous()
    q, oy, ox, c = last.shape
    whole = (oy * window[0], ox * window[1]) == shape
    make = torch.empty if whole else torch.zeros
    out = make(q, *shape, c, dtype=gradient.dtype, device=gradient.device)
    _unpool[(triton.cdiv(last.numel(), 1024),)](
        last, places, out, last.numel(), H=shape[0], W=shape[1], C=c, KY=window[0], KX=window[1], BLOCK=1024
    )
    return out.movedim(-1, 1)
