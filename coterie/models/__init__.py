"""Models by name. Any other nn.Module works as well; these are the ones the benchmarks use."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coterie import files
from coterie.errors import CoterieError, unknown
from coterie.models.cnn import CNN
from coterie.models.linear import Linear
from coterie.models.mlp import MLP
from coterie.models.pretrained import PRETRAINED
from coterie.models.pretrained.folder import HuggingFace
from coterie.models.resnet import ResNet18
from coterie.models.sensor import SensorCNN
from coterie.models.text import FastText, TextCNN
from coterie.models.transformer import Causal, TextEncoder
from coterie.trust import code

__all__ = [
    "CNN", "MLP", "MODELS", "Causal", "FastText", "Linear", "ResNet18", "SensorCNN", "TextCNN", "TextEncoder",
    "model",
]

MODELS: dict[str, type[nn.Module]] = {
    "linear": Linear, "mlp": MLP, "cnn": CNN, "resnet18": ResNet18, "textcnn": TextCNN, "fasttext": FastText,
    "sensor": SensorCNN, "causal": Causal, "encoder": TextEncoder,
}


def model(name: str, shape: Sequence[int], outputs: int, **options: Any) -> Callable[[], nn.Module]:
    """A factory for the model called `name`, for samples of `shape` (without the batch).

    `name` is one of MODELS, or `file.py:Net` for a class in a file (or a function that returns a module). Each call of
    the factory draws fresh weights from torch's global generator. Of a pretrained one, by its name or as `hf:PATH` for
    a folder of Hugging Face's format, only the head is drawn.
    """
    if file := files.in_file(name):
        return _from_file(Path(file[0]), file[1], tuple(shape), outputs, options)
    known = {**MODELS, **PRETRAINED}
    if folder := files.in_folder(name):
        chosen: Callable[..., nn.Module] = partial(HuggingFace, folder[0])
    elif name in known:
        chosen = known[name]
    else:
        raise unknown("model", name, [*known, "hf:FOLDER"])
    parameters = list(inspect.signature(chosen).parameters)
    _check_options(name, options, [p for p in parameters if p not in ("inputs", "shape", "outputs")])
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


def _check_options(name: str, options: dict[str, Any], known: list[str]) -> None:
    for option in options:
        if option not in known:
            if not known:
                raise CoterieError(f"model '{name}' has no options, got '{option}'")
            raise unknown(f"option of model '{name}'", option, known)


def _from_file(
    path: Path, name: str, shape: tuple[int, ...], outputs: int, options: dict[str, Any]
) -> Callable[[], nn.Module]:
    """The factory of a user's class or function, which is told of the data what its signature asks for."""
    held = vars(code.module(path, f"the model {name}"))
    ours = [n for n, v in held.items() if callable(v) and getattr(v, "__module__", "") == held["__name__"]]
    chosen = held.get(name)
    if chosen is None:
        raise unknown(f"model in {path}", name, ours)
    if not callable(chosen) or isinstance(chosen, nn.Module):
        raise CoterieError(f"{name} in {path} is a {type(chosen).__name__}; a class or a function is needed.")
    told = {"shape": shape, "inputs": prod(shape), "outputs": outputs, "classes": outputs, "num_classes": outputs}
    parameters = inspect.signature(chosen).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        _check_options(f"{path.name}:{name}", options, [p for p in parameters if p not in told])
    given = {**{n: value for n, value in told.items() if n in parameters}, **options}

    def build() -> nn.Module:
        made = chosen(**given)
        if not isinstance(made, nn.Module):
            raise CoterieError(f"{path.name}:{name} gives a {type(made).__name__}; an nn.Module was expected.")
        return made

    try:
        with torch.random.fork_rng(devices=[]):
            build()
    except CoterieError:
        raise
    except Exception as reason:
        raise CoterieError(
            f"the model {path.name}:{name} cannot be built with {given}: {type(reason).__name__}: {reason}"
        ) from reason
    return build
