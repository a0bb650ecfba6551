"""A one-dimensional convolutional network for windows of sensor signals."""

from __future__ import annotations

from math import prod

from torch import Tensor, nn

from coterie.errors import CoterieError

SMALLEST = 28  # 28 -conv-> 20 -pool-> 10 -conv-> 2 -pool-> 1; one less and nothing is left


class SensorCNN(nn.Module):
    """Two convolutions of width 9 over time with pooling and three linear layers, of which `head` is the last.

    For windows [channels, time], e.g. [9, 128] of smartphone signals; further axes are read as time.
    """

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        if len(shape) < 2:
            raise CoterieError(f"the sensor model needs windows [channels, time], got shape {list(shape)}; try 'mlp'")
        time = prod(shape[1:])
        if time < SMALLEST:
            raise CoterieError(f"the sensor model needs windows of at least {SMALLEST} time steps, got {time}")
        self.base = nn.Sequential(
            nn.Flatten(2),
            nn.Conv1d(shape[0], 32, 9),
            nn.ReLU(),
            nn.MaxPool1d(2),
            nn.Conv1d(32, 64, 9),
            nn.ReLU(),
            nn.MaxPool1d(2),
            nn.Flatten(),
            nn.Linear(64 * (((time - 8) // 2 - 8) // 2), 1024),
            nn.ReLU(),
            nn.Linear(1024, 512),
            nn.ReLU(),
        )
        self.head = nn.Linear(512, outputs)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.base(x))  # [B, outputs]
        return logits
