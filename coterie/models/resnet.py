"""ResNet-18, with batch or group normalisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn

from coterie.errors import CoterieError

Norm = Callable[[int], nn.Module]


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = norm(outputs)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        sum_: Tensor = self.relu(out + self.shortcut(x))
        return sum_


class ResNet18(nn.Module):
    """The 18-layer residual network with the 7x7 stem of ImageNet, whatever the size of the images.

    `norm` is `batch`, or `group` for GroupNorm in `groups` groups, which has no statistics to share or to keep.
    Weights start as in torchvision: He's normal draws for convolutions, 1 and 0 for normalisation.
    """

    def __init__(
        self, shape: tuple[int, int, int], outputs: int, norm: Literal["batch", "group"] = "batch", groups: int = 32
    ) -> None:
        super().__init__()
        if len(shape) != 3:
            raise CoterieError(f"ResNet-18 needs images [channels, height, width], got shape {list(shape)}; try 'mlp'")
        layer = _norm(norm, groups)
        widths = (64, 128, 256, 512)
        blocks: list[nn.Module] = []
        for before, width in zip((64, *widths), widths):
            blocks += [Block(before, width, 1 if width == 64 else 2, layer), Block(width, width, 1, layer)]
        self.base = nn.Sequential(
            nn.Conv2d(shape[0], 64, 7, stride=2, padding=3, bias=False),
            layer(64),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
            *blocks,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Linear(512, outputs)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.base(x))  # [B, outputs]
        return logits


def _norm(kind: str, groups: int) -> Norm:
    if kind == "batch":
        return nn.BatchNorm2d
    if kind != "group":
        raise CoterieError(f"norm must be 'batch' or 'group', got '{kind}'")
    if groups < 1 or 64 % groups:
        raise CoterieError(f"groups must divide 64, got {groups}")
    return lambda width: nn.GroupNorm(groups, width)
