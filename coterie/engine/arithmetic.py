"""In which numbers an engine computes, whatever other engines of the process do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

Precision = Literal["float32", "float64", "tf32", "bf16"]


@dataclass(frozen=True)
class Arithmetic:
    """Rows are float32 (float64 with float64); tf32 and bf16 round what enters a product."""

    precision: Precision = "float32"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.precision == "float64" else torch.float32

    @property
    def bf16(self) -> bool:
        return self.precision == "bf16"

    @property
    def tf32(self) -> bool:
        """Whether products of float32 may be computed in TF32; with bf16, those that are left in float32 may."""
        return self.precision in ("tf32", "bf16")

    @contextmanager
    def set(self) -> Iterator[None]:
        """PyTorch's switches for TF32, which belong to the whole process, as this arithmetic has them, for a while."""
        products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
        before = products.allow_tf32, convolutions.allow_tf32
        if before == (self.tf32, self.tf32):
            yield
            return
        products.allow_tf32 = convolutions.allow_tf32 = self.tf32
        try:
            yield
        finally:
            products.allow_tf32, convolutions.allow_tf32 = before
