"""Models by name. Any other nn.Module works as well; these are the ones the benchmarks use."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import nn

from coterie.errors import CoterieError, unknown
from coterie.models.cnn import CNN
from coterie.models.linear import Linear
from coterie.models.mlp import MLP
from coterie.models.resnet import ResNet18
from coterie.models.sensor import SensorCNN
from coterie.models.text import FastText, TextCNN

__all__ = ["CNN", "MLP", "MODELS", "FastText", "Linear", "ResNet18", "SensorCNN", "TextCNN", "model"]

MODELS: dict[str, type[nn.Module]] = {
    "linear": Linear, "mlp": MLP, "cnn": CNN, "resnet18": ResNet18, "textcnn": TextCNN, "fasttext": FastText,
    "sensor": SensorCNN,
}


def model(name: str, shape: Sequence[int], outputs: int, **options: Any) -> Callable[[], nn.Module]:
    """A factory for the model called `name`, for samples of `shape` (without the batch).

    Each call of the factory draws fresh weights from torch's global generator.
    """
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    chosen = MODELS[name]
    parameters = list(inspect.signature(chosen).parameters)
    known = [p for p in parameters if p not in ("inputs", "shape", "outputs")]
    for option in options:
        if option not in known:
            if not known:
                raise CoterieError(f"model '{name}' has no options, got '{option}'")
            raise unknown(f"option of model '{name}'", option, known)
    size = tuple(shape) if "shape" in parameters else prod(shape)

    def build() -> nn.Module:
        return chosen(size, outputs, **options)

    # A trial on the meta device brings bad options to light here, and costs neither memory nor random numbers.
    try:
        with torch.device("meta"):
            build()
    except CoterieError:
        raise
    except (TypeError, ValueError, RuntimeError, OverflowError, MemoryError) as reason:
        given = ", ".join(f"{key}={value}" for key, value in options.items())
        why = str(reason).strip().partition("\n")[0]
        raise CoterieError(f"model '{name}' cannot be built for samples {list(shape)} with {given}: {why}") from reason
    return build
