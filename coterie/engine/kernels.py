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
CONVOLVE = {"BM": 128, "BN": 64, "BK": 64, "num_warps": 4, "num_stages": 3}
SHORT = {"BM": 64, "BN": 64, "BK": 128, "num_warps": 4, "num_stages": 2}  # pooled, a window is one step
POOLED = {"BM": 64, "BN": 64, "BK": 32, "num_warps": 4, "num_stages": 3}
ACCUMULATE = {"BM": 64, "BN": 64, "BK": 64, "num_warps": 4, "num_stages": 2}
CORRELATE = {"BM": 64, "BN": 64, "BK": 128, "num_warps": 4, "num_stages": 3, "PROGRAMS": 512}


@triton.jit
def _convolve(
    image, weight, bias, out, places, image_p, bias_p, pixels,
    N: tl.constexpr, IMAGE: tl.constexpr, LINE: tl.constexpr, C: tl.constexpr, OY: tl.constexpr, OX: tl.constexpr,
    R: tl.constexpr, RUN: tl.constexpr, STRIDE_Y: tl.constexpr, STRIDE_X: tl.constexpr, BIAS: tl.constexpr,
    RELU: tl.constexpr, POOL: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):
    """out[p, pixel, n] = bias[p, n] + sum over k of image[p, start of window + offset of k] * weight[p, n, k].

    k runs over the R lines of a window, each a stretch of RUN = S * C numbers. With POOL a pixel is the largest of the
    four of a 2x2 window, and `places` says which (the first of equals). With RELU it is at least 0.
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
    if POOL:
        total1 = tl.zeros((BM, BN), dtype=tl.float32)
        total2 = tl.zeros((BM, BN), dtype=tl.float32)
        total3 = tl.zeros((BM, BN), dtype=tl.float32)
    for first in range(0, R * RUN, BK):
        k = first + tl.arange(0, BK)
        offset = (k // RUN) * LINE + k % RUN
        at = image + (start[:, None] + offset[None, :])
        if R * RUN % BK == 0:
            values = tl.load(weight + (filters[None, :] + k[:, None]))
            total = tl.dot(tl.load(at), values, total, input_precision=PRECISION)
            if POOL:
                total1 = tl.dot(tl.load(at + C), values, total1, input_precision=PRECISION)
                total2 = tl.dot(tl.load(at + LINE), values, total2, input_precision=PRECISION)
                total3 = tl.dot(tl.load(at + (LINE + C)), values, total3, input_precision=PRECISION)
        else:
            live = (k < R * RUN)[None, :]
            values = tl.load(weight + (filters[None, :] + k[:, None]), mask=(k < R * RUN)[:, None], other=0.0)
            total = tl.dot(tl.load(at, mask=live, other=0.0), values, total, input_precision=PRECISION)
            if POOL:
                one = tl.load(at + C, mask=live, other=0.0)
                total1 = tl.dot(one, values, total1, input_precision=PRECISION)
                two = tl.load(at + LINE, mask=live, other=0.0)
                total2 = tl.dot(two, values, total2, input_precision=PRECISION)
                three = tl.load(at + (LINE + C), mask=live, other=0.0)
                total3 = tl.dot(three, values, total3, input_precision=PRECISION)
    put = m[:, None] * N + n[None, :]
    real = (m < pixels)[:, None] & (n < N)[None, :]
    if POOL:
        place = tl.zeros((BM, BN), dtype=tl.uint8)
        better = (total1 > total) | (total1 != total1)
        total, place = tl.where(better, total1, total), tl.where(better, 1, place).to(tl.uint8)
        better = (total2 > total) | (total2 != total2)
        total, place = tl.where(better, total2, total), tl.where(better, 2, place).to(tl.uint8)
        better = (total3 > total) | (total3 != total3)
        total, place = tl.where(better, total3, total), tl.where(better, 3, place).to(tl.uint8)
        tl.store(places + p * pixels * N + put, place, mask=real)
    if BIAS:
        total += tl.load(bias + p * bias_p + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if RELU:
        total = tl.where(total < 0, 0.0, total)
    tl.store(out + p * pixels * N + put, total.to(out.dtype.element_ty), mask=real)


@triton.jit
def _correlate(
    image, gradient, out, image_p, gradient_p, batch, per_split,
    N: tl.constexpr, IMAGE: tl.constexpr, LINE: tl.constexpr, C: tl.constexpr, OY: tl.constexpr, OX: tl.constexpr,
    R: tl.constexpr, RUN: tl.constexpr, STRIDE_Y: tl.constexpr, STRIDE_X: tl.constexpr, G_IMAGE: tl.constexpr,
    G_LINE: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):
    """out[split, p, n, k] = sum over the pixels of this split's images of gradient[p, pixel, n] * image[p, window + k].

    The same BM pixels are taken of one image after another, so that addresses only move by an image's size.
    """
    p = tl.program_id(1).to(tl.int64)
    tiles: tl.constexpr = (N + BN - 1) // BN
    k = (tl.program_id(0) // tiles) * BK + tl.arange(0, BK)
    n = (tl.program_id(0) % tiles) * BN + tl.arange(0, BN)
    offset = (k // RUN) * LINE + k % RUN
    image += p * image_p
    gradient += p * gradient_p
    first = tl.program_id(2) * per_split
    last = tl.minimum(first + per_split, batch)
    total = tl.zeros((BN, BK), dtype=tl.float32)
    for at in range(0, OY * OX, BM):
        m = at + tl.arange(0, BM)
        pixel = tl.where(m < OY * OX, m, 0)
        y, x = pixel // OX, pixel % OX
        columns_at = image + ((y * (STRIDE_Y * LINE) + x * (STRIDE_X * C))[:, None] + offset[None, :])
        values_at = gradient + ((y * G_LINE + x * N)[:, None] + n[None, :])
        live = (m < OY * OX)[:, None] & (n < N)[None, :]
        for b in range(first, last):
            if R * RUN % BK == 0:
                columns = tl.load(columns_at + b * IMAGE)
            else:
                columns = tl.load(columns_at + b * IMAGE, mask=(k < R * RUN)[None, :], other=0.0)
            values = tl.load(values_at + b * G_IMAGE, mask=live, other=0.0)
            total = tl.dot(tl.trans(values), columns, total, input_precision=PRECISION)
    part = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + p
    place = out + part * (N * R * RUN) + (n[:, None] * (R * RUN) + k[None, :])
    tl.store(place, total, mask=(n < N)[:, None] & (k < R * RUN)[None, :])


@triton.jit
def _spread(
    gradient, places, out, total, H: tl.constexpr, W: tl.constexpr, N: tl.constexpr, PY: tl.constexpr,
    PX: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr, BLOCK: tl.constexpr,
):
    """out[q, y + TOP, x + LEFT, n] = the pooled gradient where (y, x) was the largest of its 2x2 window, else 0."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    n, x, y, q = i % N, i // N % W - LEFT, i // (N * W) % H - TOP, i // (N * W * H)
    live = (i < total) & (y >= 0) & (x >= 0) & (y < 2 * PY) & (x < 2 * PX)
    at = ((q * PY + y // 2) * PX + x // 2) * N + n
    chosen = tl.load(places + at, mask=live, other=4).to(tl.int32) == (y % 2) * 2 + x % 2
    tl.store(out + i, tl.load(gradient + at, mask=live & chosen, other=0.0), mask=i < total)


@triton.jit
def _accumulate(
    weight, gradient, x, weight_p, batch, share, N: tl.constexpr, K: tl.constexpr, KEEP: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):
    """weight[p, n, k] = share * weight (kept, or 0) + sum over b of gradient[p, b, n] * x[p, b, k]."""
    p = tl.program_id(1).to(tl.int64)
    tiles: tl.constexpr = (N + BN - 1) // BN
    k = (tl.program_id(0) // tiles) * BK + tl.arange(0, BK)
    n = (tl.program_id(0) % tiles) * BN + tl.arange(0, BN)
    gradient += p * batch * N
    x += p * batch * K
    total = tl.zeros((BN, BK), dtype=tl.float32)
    for at in range(0, batch, BM):
        b = at + tl.arange(0, BM)
        live = (b < batch)[:, None]
        values = tl.load(gradient + (b[:, None] * N + n[None, :]), mask=live & (n < N)[None, :], other=0.0)
        inputs = tl.load(x + (b[:, None] * K + k[None, :]), mask=live & (k < K)[None, :], other=0.0)
        total = tl.dot(tl.trans(values), inputs, total, input_precision=PRECISION)
    place = weight + p * weight_p + (n[:, None] * K + k[None, :])
    real = (n < N)[:, None] & (k < K)[None, :]
    if KEEP:
        total += share * tl.load(place, mask=real, other=0.0)
    tl.store(place, total, mask=real)


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


def _precision(tf32: bool) -> dict[str, Any]:
    """How products of float32 are rounded; those of bfloat16 are exact."""
    return {"PRECISION": "tf32" if tf32 else "ieee"}


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


def _product(
    image: Tensor, weight: Tensor, bias: Tensor | None, window: Pair, stride: Pair, tf32: bool, relu: bool = False,
    pool: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`[P, B, H, W, C]` and `[P, N, R, S, C]` -> `[P, B, OY, OX, N]`, windows inside the image only, and with `pool`
    the places of the largest."""
    models, batch = image.shape[:2]
    filters = weight.shape[1]
    bias = bias if bias is None or bias.stride(1) == 1 else bias.contiguous()  # the kernel steps along a model's bias
    shape, constants = _windows(image, window, stride)
    if pool:
        shape = (shape[0] // 2, shape[1] // 2)
        constants |= {"OY": shape[0], "OX": shape[1], "STRIDE_Y": 2, "STRIDE_X": 2}
    out = torch.empty(models, batch, *shape, filters, dtype=image.dtype, device=image.device)
    places = torch.empty(out.shape, dtype=torch.uint8, device=image.device) if pool else None
    pixels = batch * shape[0] * shape[1]
    tile = dict((POOLED if window[0] * constants["RUN"] > SHORT["BK"] else SHORT) if pool else CONVOLVE)
    tile["BN"] = min(tile["BN"], max(16, triton.next_power_of_2(filters)))
    _convolve[(triton.cdiv(pixels, tile["BM"]) * triton.cdiv(filters, tile["BN"]), models)](
        image, weight, bias, out, places, image.stride(0), bias.stride(0) if bias is not None else 0, pixels,
        N=filters, **constants, BIAS=bias is not None, RELU=relu, POOL=pool,
        **_precision(tf32), **tile,
    )
    return out, places


def convolve(
    image: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, tf32: bool
) -> Tensor:
    """`[P, B, C, H, W]` and `[P, N, C, R, S]` -> `[P, B, N, OY, OX]`."""
    top, left = padding
    last = _last(image, (left, left, top, top))
    more = last.shape[-1] - weight.shape[2]
    filters = F.pad(weight.permute(0, 1, 3, 4, 2), (0, more)).to(image.dtype).contiguous()
    return _product(last, filters, bias, (weight.shape[3], weight.shape[4]), stride, tf32)[0].movedim(-1, 2)


def convolve_back(
    gradient: Tensor, weight: Tensor, stride: Pair, padding: Pair, shape: Pair, tf32: bool
) -> Tensor:
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
    return _product(last, filters.to(gradient.dtype).contiguous(), None, (r, s), (1, 1), tf32)[0].movedim(-1, 2)


def correlate(
    image: Tensor, gradient: Tensor, window: Pair, stride: Pair, padding: Pair, tf32: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias: `[P, B, C, H, W]`, `[P, B, N, OY, OX]` -> `[P, N, C, *window]`, `[P, N]`."""
    top, left = padding
    channels = image.shape[2]
    last, values = _last(image, (left, left, top, top)), _last(gradient, multiple=1).contiguous()
    if values.dtype != last.dtype:
        values = values.to(last.dtype)
    found = _weight_gradient(last, values, (0, 0), window, stride, tf32)
    return found[..., :channels].movedim(-1, 2), values.sum((1, 2, 3), dtype=torch.float32)


def _weight_gradient(
    image: Tensor, gradient: Tensor, border: Pair, window: Pair, stride: Pair, tf32: bool
) -> Tensor:
    """`[P, B, H, W, C]` and `[P, B, OY, OX, N]` inside a border of zeros -> `[P, N, *window, C]` in float32."""
    models, batch = image.shape[:2]
    filters = gradient.shape[-1]
    _, constants = _windows(image, window, stride)
    columns = window[0] * constants["RUN"]
    tile = dict(CORRELATE)
    tile["BN"] = min(tile["BN"], max(16, triton.next_power_of_2(filters)))
    tile["BK"] = min(tile["BK"], max(16, triton.next_power_of_2(columns)))
    programs = tile.pop("PROGRAMS")
    tiles = triton.cdiv(columns, tile["BK"]) * triton.cdiv(filters, tile["BN"])
    # Fill the device; the parts are added in a fixed order.
    per_split = triton.cdiv(batch, max(1, min(triton.cdiv(programs, tiles * models), batch)))
    splits = triton.cdiv(batch, per_split)
    out = torch.empty(splits, models, filters, *window, image.shape[-1], dtype=torch.float32, device=image.device)
    high, wide = gradient.shape[2:4]
    inner = gradient[:, :, border[0] :, border[1] :]  # the kernel only needs where it begins
    _correlate[(tiles, models, splits)](
        image, inner, out, image.stride(0), gradient.stride(0), batch, per_split, N=filters, **constants,
        G_IMAGE=high * wide * filters, G_LINE=wide * filters, **_precision(tf32), **tile,
    )
    return out.sum(0) if splits > 1 else out[0]


# -- for chains of layers, channels last throughout --------------------------------------------------------------------


def windows(
    image: Tensor, weight: Tensor, bias: Tensor | None, padding: Pair, relu: bool, pool: bool, tf32: bool
) -> tuple[Tensor, Tensor | None]:
    """relu(the largest of each 2x2 window of image * weight + bias), and its place there.

    `[P, B, H, W, C]` and `[P, N, C, R, S]` -> `[P, B, OY, OX, N]`.
    """
    last = _padded(image, padding)
    filters = weight.permute(0, 1, 3, 4, 2)
    if more := last.shape[-1] - weight.shape[2]:
        filters = F.pad(filters, (0, more))
    used = filters.to(image.dtype).contiguous()
    return _product(last, used, bias, (weight.shape[3], weight.shape[4]), (1, 1), tf32, relu, pool)


def spread(gradient: Tensor, places: Tensor | None, shape: Pair, border: Pair) -> Tensor:
    """The gradient before pooling, inside a border of zeros: `[P, B, PY, PX, N] -> [P, B, *(shape + 2 border), N]`."""
    top, left = border
    if places is None:
        return F.pad(gradient, (0, 0, left, left, top, top)).contiguous() if any(border) else gradient.contiguous()
    models, batch, high, wide, n = gradient.shape
    size = (shape[0] + 2 * top, shape[1] + 2 * left)
    out = torch.empty(models, batch, *size, n, dtype=gradient.dtype, device=gradient.device)
    _spread[(triton.cdiv(out.numel(), 1024),)](
        gradient.contiguous(), places, out, out.numel(), H=size[0], W=size[1], N=n, PY=high, PX=wide, TOP=top,
        LEFT=left, BLOCK=1024,
    )
    return out


def windows_back(gradient: Tensor, weight: Tensor, tf32: bool) -> Tensor:
    """The gradient of the image: `[P, B, H + R - 1, W + S - 1, N]`, its border 0, and `[P, N, C, R, S]` -> that of
    `[P, B, H, W, C]`."""
    models, batch, _, wide, _ = gradient.shape
    n, c, r, s = weight.shape[1:]
    last = _padded(gradient, (0, 0))
    filters = weight.flip(3, 4).permute(0, 2, 3, 4, 1)
    if more := last.shape[-1] - n:
        filters = F.pad(filters, (0, more))
    if (wide - s + 1) % 2 or c > 64:
        return _product(last, filters.to(last.dtype).contiguous(), None, (r, s), (1, 1), tf32)[0]
    # Two neighbours share all but one column of their windows: as one window with twice the outputs they are read once.
    both = torch.stack([F.pad(filters, (0, 0, 0, 1)), F.pad(filters, (0, 0, 1, 0))], dim=1).flatten(1, 2)
    out, _ = _product(last, both.to(last.dtype), None, (r, s + 1), (1, 2), tf32)  # [P, B, H, W / 2, 2 C]
    return out.view(models, batch, out.shape[2], -1, c)


def windows_weight(
    image: Tensor, gradient: Tensor, border: Pair, window: Pair, padding: Pair, channels: int, tf32: bool
) -> Tensor:
    """The gradient of the weight, `[P, B, H, W, C]` and `[P, B, ..., N]` inside a border -> `[P, N, C, *window]`, of
    the first `channels` of C; the others only fill up."""
    found = _weight_gradient(_padded(image, padding), gradient, border, window, (1, 1), tf32)
    return found[..., :channels].movedim(-1, 2)


def _padded(image: Tensor, padding: Pair) -> Tensor:
    """`[P, B, H, W, C]` with zeros around it, C rounded up to a multiple of 4."""
    more = -image.shape[-1] % 4
    if more or any(padding):
        image = F.pad(image, (0, more, padding[1], padding[1], padding[0], padding[0]))
    return image.contiguous()


def accumulate(weight: Tensor, gradient: Tensor, x: Tensor, share: float) -> None:
    """weight <- share * weight + gradient^T x in float32, in place.

    `weight [P, N, K]` (rows of a stack), `gradient [P, B, N]` and `x [P, B, K]` in bfloat16.
    """
    models, batch, n = gradient.shape
    k = x.shape[2]
    tile = dict(ACCUMULATE)
    tile["BM"] = min(tile["BM"], max(16, triton.next_power_of_2(batch)))
    tile["BN"] = min(tile["BN"], max(16, triton.next_power_of_2(n)))
    tile["BK"] = min(tile["BK"], max(16, triton.next_power_of_2(k)))
    _accumulate[(triton.cdiv(n, tile["BN"]) * triton.cdiv(k, tile["BK"]), models)](
        weight, gradient.contiguous(), x.contiguous(), weight.stride(0), batch, share, N=n, K=k, KEEP=share != 0,
        **_precision(tf32=True), **tile,
    )


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
