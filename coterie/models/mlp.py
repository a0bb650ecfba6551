"""A multi-layer perceptron."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from coterie.errors import CoterieError
from coterie.options import require_few


class MLP(nn.Module):
    """Flattens its input; `base` holds the hidden layers (ReLU after each), `head` the last layer.

    `hidden` is one width or several: 128, (64, 32) or "64,32".
    """

    def __init__(
        self, inputs: int, outputs: int, hidden: int | str | Sequence[int] = (128,), dropout: float = 0.0
    ) -> None:
        super().__init__()
        if not 0 <= dropout < 1:
            raise CoterieError(f"dropout must be a share from 0 up to but not including 1, got {dropout}")
        layers: list[nn.Module] = [nn.Flatten()]
        width = inputs
        for units in widths(hidden):
            layers += [nn.Linear(width, units), nn.ReLU()]
            if dropout:
                layers.append(nn.Dropout(dropout))
            width = units
        self.base = nn.Sequential(*layers)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.base(x))  # [B, outputs]
        return logits


def widths(hidden: int | str | Sequence[int]) -> tuple[int, ...]:
    """The layer widths however they were written down."""
    parts: Sequence[int | str]
    if isinstance(hidden, str):
        parts = [part for part in hidden.strip("()[] ").split(",") if part.strip()]
    else:
        parts = [hidden] if isinstance(hidden, int) else list(hidden)
    require_few(parts, "hidden")
    try:
        sizes = tuple(int(part) for part in parts)
    except ValueError as error:
        raise CoterieError(f"hidden must be layer widths such as 64,32, got '{hidden}'") from error
    if any(size < 1 for size in sizes):
        raise CoterieError(f"hidden layers must have at least one unit, got {hidden}")
    return sizes
