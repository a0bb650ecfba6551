"""A linear model: logistic regression with several outputs, linear regression with one."""

from __future__ import annotations

from torch import Tensor, nn


class Linear(nn.Module):
    """Flattens its input and maps it to `outputs` numbers; `zeros` starts from all-zero weights."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True, zeros: bool = False) -> None:
        super().__init__()
        self.head = nn.Linear(inputs, outputs, bias=bias)
        if zeros:
            for parameter in self.parameters():
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x.flatten(1))  # [B, outputs]
        return logits
