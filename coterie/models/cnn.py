"""The small convolutional network of the federated-learning benchmarks."""

from __future__ import annotations

from torch import Tensor, nn

from coterie.errors import CoterieError

SMALLEST = 16  # 16 -conv-> 12 -pool-> 6 -conv-> 2 -pool-> 1; one pixel less and nothing is left


class CNN(nn.Module):
    """Two 5x5 convolutions with pooling and two linear layers; `head` is the last one, `base` all before it."""

    def __init__(self, shape: tuple[int, int, int], outputs: int) -> None:
        super().__init__()
        if len(shape) != 3:
            raise CoterieError(f"the CNN needs images [channels, height, width], got shape {list(shape)}; try 'mlp'")
        channels, height, width = shape
        if min(height, width) < SMALLEST:
            raise CoterieError(
                f"the CNN needs images of at least {SMALLEST}x{SMALLEST} pixels, got {height}x{width}; try 'mlp'"
            )
        self.base = nn.Sequential(
            nn.Conv2d(channels, 32, kernel_size=5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, kernel_size=5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * _left(height) * _left(width), 512),
            nn.ReLU(),
        )
        self.head = nn.Linear(512, outputs)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.base(x))  # [B, outputs]
        return logits


def _left(side: int) -> int:
    """What two rounds of convolution and pooling leave of an image's side."""
    return ((side - 4) // 2 - 4) // 2
