"""Small vision models of inverted residual blocks: MobileNetV2 and EfficientNet-Lite, trained on ImageNet.

Their batch normalisation is folded into the convolutions, so that no client's batch moves it:
W' = W g / sqrt(v + eps) and b' = beta - m g / sqrt(v + eps), with g and beta the layer's scale and shift, m and v its
running mean and variance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from coterie.errors import CoterieError
from coterie.models.pretrained import packages

FEATURES = 1280
STEP = 32
"""The sides of an image are halved five times."""


@dataclass(frozen=True)
class Stage:
    """Blocks alike: how wide inside, kernel, stride of the first, channels, and how many."""

    widen: int
    kernel: int
    stride: int
    channels: int
    repeat: int


MOBILE = (Stage(1, 3, 1, 16, 1), Stage(6, 3, 2, 24, 2), Stage(6, 3, 2, 32, 3), Stage(6, 3, 2, 64, 4),
          Stage(6, 3, 1, 96, 3), Stage(6, 3, 2, 160, 3), Stage(6, 3, 1, 320, 1))
LITE = (Stage(1, 3, 1, 16, 1), Stage(6, 3, 2, 24, 2), Stage(6, 5, 2, 40, 2), Stage(6, 3, 2, 80, 3),
        Stage(6, 5, 1, 112, 3), Stage(6, 5, 2, 192, 4), Stage(6, 3, 1, 320, 1))


def scaled(stages: Sequence[Stage], width: float, depth: float) -> tuple[Stage, ...]:
    """Channels times `width`, to the nearest multiple of 8 that is not below 90 %, and repeats times `depth`, but those
    of the first stage and the last."""
    def channels(count: int) -> int:
        near = max(8, int(count * width + 4) // 8 * 8)
        return near + 8 if near < 0.9 * count * width else near

    last = len(stages) - 1
    return tuple(
        Stage(s.widen, s.kernel, s.stride, channels(s.channels),
              s.repeat if number in (0, last) else math.ceil(depth * s.repeat))
        for number, s in enumerate(stages)
    )


def convolution(inputs: int, outputs: int, kernel: int, stride: int, groups: int, late: bool) -> nn.Module:
    """A convolution that gives as many pixels as it got, by `stride` fewer.

    With `late` a stride of 2 pads as TensorFlow does, by one more at the end than at the beginning.
    """
    if not late or stride == 1:
        return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups)
    before = (kernel - stride) // 2
    after = kernel - stride - before
    return nn.Sequential(nn.ZeroPad2d((before, after, before, after)),
                         nn.Conv2d(inputs, outputs, kernel, stride, groups=groups))


class InvertedResidual(nn.Module):
    """Widen, a convolution channel by channel, and narrow; with a residual where the shape stays."""

    def __init__(self, inputs: int, stage: Stage, stride: int, late: bool) -> None:
        super().__init__()
        inner = inputs * stage.widen
        self.expand = convolution(inputs, inner, 1, 1, 1, late) if stage.widen > 1 else None
        self.depthwise = convolution(inner, inner, stage.kernel, stride, inner, late)
        self.project = convolution(inner, stage.channels, 1, 1, 1, late)
        self.relu = nn.ReLU6()
        self.residual = stride == 1 and inputs == stage.channels

    def forward(self, x: Tensor) -> Tensor:
        z = x if self.expand is None else self.relu(self.expand(x))
        out: Tensor = self.project(self.relu(self.depthwise(z)))
        return x + out if self.residual else out


class Residuals(nn.Module):
    """`[B, 3, H, W] -> [B, 1280]`: a stem, the blocks, a last convolution and the mean over all pixels."""

    def __init__(self, stages: Sequence[Stage], late: bool) -> None:
        super().__init__()
        self.stem = convolution(3, 32, 3, 2, 1, late)
        blocks, width = list[nn.Module](), 32
        for stage in stages:
            for number in range(stage.repeat):
                blocks.append(InvertedResidual(width, stage, 1 if number else stage.stride, late))
                width = stage.channels
        self.blocks = nn.Sequential(*blocks)
        self.last = convolution(width, FEATURES, 1, 1, 1, late)
        self.relu = nn.ReLU6()

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.relu(self.last(self.blocks(self.relu(self.stem(x)))))
        return z.mean((2, 3))


Names = Callable[[int], Iterator[tuple[str, str]]]
"""Number of blocks -> for each convolution, in the module's order, the names of it and of its normalisation."""


def mobile_names(blocks: int) -> Iterator[tuple[str, str]]:
    yield "features.0.0", "features.0.1"
    for number in range(1, blocks + 1):
        for place in (0, 3) if number == 1 else (0, 3, 6):
            yield f"features.{number}.conv.{place}", f"features.{number}.conv.{place + 1}"
    yield f"features.{blocks + 1}.0", f"features.{blocks + 1}.1"


def lite_names(blocks: int) -> Iterator[tuple[str, str]]:
    yield "_conv_stem", "_bn0"
    for number in range(blocks):
        layers = [("_expand_conv", "_bn0"), ("_depthwise_conv", "_bn1"), ("_project_conv", "_bn2")]
        for convolution_, normalisation in layers[number == 0 :]:
            yield f"_blocks.{number}.{convolution_}", f"_blocks.{number}.{normalisation}"
    yield "_conv_head", "_bn1"


def folded(module: Residuals, tensors: dict[str, Tensor], names: Names, eps: float) -> dict[str, Tensor]:
    """A published file's tensors under this module's names, with the normalisation folded in; those of its classifier,
    which is not needed, are left out."""
    layers = [name for name, sub in module.named_modules() if isinstance(sub, nn.Conv2d)]
    layers.sort(key=lambda name: (not name.startswith("stem"), name.startswith("last")))
    found: dict[str, Tensor] = {}
    for layer, (conv, norm) in zip(layers, names(len(module.blocks)), strict=True):
        needed = [f"{conv}.weight", *(f"{norm}.{of}" for of in ("weight", "bias", "running_mean", "running_var"))]
        if not all(name in tensors for name in needed):
            continue  # what is lacking is said when the module is filled
        weight, scale, shift, mean, variance = (tensors[name].double() for name in needed)
        factor = scale / (variance + eps).sqrt()
        found[f"{layer}.weight"] = (weight * factor[:, None, None, None]).float()
        found[f"{layer}.bias"] = (shift - mean * factor).float()
    return found


@dataclass(frozen=True)
class Release:
    """How published weights are written, and what they were trained on."""

    names: Names
    eps: float  # of the normalisation
    late: bool  # whether padding is TensorFlow's
    mean: tuple[float, ...]  # of pixels from 0 to 1, by channel
    deviation: tuple[float, ...]


TORCH = Release(mobile_names, 1e-5, False, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
TENSORFLOW = Release(lite_names, 1e-3, True, (127 / 255,) * 3, (128 / 255,) * 3)


class Vision(nn.Module):
    """Images `[B, 1 or 3, H, W]` with pixels from 0 to 1 -> scores, by a backbone of ImageNet and a fresh head."""

    name: ClassVar[str]
    stages: ClassVar[tuple[Stage, ...]]
    release: ClassVar[Release] = TENSORFLOW
    centre: Tensor
    spread: Tensor

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        if len(shape) != 3 or shape[0] not in (1, 3):
            raise CoterieError(f"{self.name} needs images [1 or 3, height, width], got samples {list(shape)}")
        if any(side < STEP or side % STEP for side in shape[1:]):
            raise CoterieError(f"{self.name} needs images whose sides are multiples of {STEP}, not "
                               f"{shape[2]}x{shape[1]}; scale them, e.g. --data FOLDER:size=96")
        release = self.release
        with torch.device("meta"):
            base = Residuals(self.stages, release.late)
        path = packages.found(packages.WEIGHTS[self.name], f"the model {self.name}")
        if not packages.weightless():
            packages.filled(base, folded(base, packages.read(path), release.names, release.eps), path)
        self.base = base
        self.register_buffer("centre", torch.tensor(release.mean)[:, None, None], persistent=False)
        self.register_buffer("spread", torch.tensor(release.deviation)[:, None, None], persistent=False)
        self.head = nn.Linear(FEATURES, outputs)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.base((x - self.centre) / self.spread))  # [B, outputs]; grey becomes 3 channels
        return scores


class MobileNetV2(Vision):
    """MobileNetV2, 2.2 million numbers, and a fresh head."""

    name, stages, release = "mobilenetv2", MOBILE, TORCH


class EfficientNetLite0(Vision):
    """EfficientNet-Lite0, 3.4 million numbers, and a fresh head."""

    name, stages = "efficientnet-lite0", LITE


class EfficientNetLite1(Vision):
    """EfficientNet-Lite1, 4.1 million numbers, and a fresh head."""

    name, stages = "efficientnet-lite1", scaled(LITE, 1.0, 1.1)


class EfficientNetLite2(Vision):
    """EfficientNet-Lite2, 4.8 million numbers, and a fresh head."""

    name, stages = "efficientnet-lite2", scaled(LITE, 1.1, 1.2)
