"""A one-dimensional convolutional network for windows of sensor signals."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal

from torch import Tensor, nn

from coterie.errors import CoterieError, unknown
from coterie.models.mlp import widths

SMALLEST = 28  # 28 -conv-> 20 -pool-> 10 -conv-> 2 -pool-> 1; one less and nothing is left


class SensorCNN(nn.Module):
    """Two convolutions of width 9 over time with pooling, the `hidden` linear layers, and the linear `head`.

    For windows [channels, time], e.g. [9, 128] of smartphone signals; further axes are read as time. `width` is the
    number of channels of the first convolution, the second has twice as many; `norm=batch` normalises both.
    """

    def __init__(
        self, shape: tuple[int, ...], outputs: int, width: int = 32, hidden: int | str | Sequence[int] = (1024, 512),
        norm: Literal["none", "batch"] = "none",
    ) -> None:
        super().__init__()
        if len(shape) < 2:
            raise CoterieError(f"the sensor model needs windows [channels, time], got shape {list(shape)}; try 'mlp'")
        time = prod(shape[1:])
        if time < SMALLEST:
            raise CoterieError(f"the sensor model needs windows of at least {SMALLEST} time steps, got {time}")
        if width < 1:
            raise CoterieError(f"width must be at least 1 channel, got {width}")
        if norm not in ("none", "batch"):
            raise unknown("norm of the sensor model", str(norm), ("none", "batch"))
        layers: list[nn.Module] = [nn.Flatten(2)]
        for inputs, channels in ((shape[0], width), (width, 2 * width)):
            layers.append(nn.Conv1d(inputs, channels, 9))
            if norm == "batch":
                layers.append(nn.BatchNorm1d(channels))
            layers += [nn.ReLU(), nn.MaxPool1d(2)]
        layers.append(nn.Flatten())
        features = 2 * width * (((time - 8) // 2 - 8) // 2)
        for units in widths(hidden):
            layers += [nn.Linear(features, units), nn.ReLU()]
            features = units
        self.base = nn.Sequential(*layers)
        self.head = nn.Linear(features, outputs)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.base(x))  # [B, outputs]
        return logits
