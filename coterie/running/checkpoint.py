"""Checkpoints: one safetensors file, tensors and a json header, replaced in one step, so never half written."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from coterie import files, memory
from coterie.errors import CoterieError, NoMemory

FORMAT = 1


def save(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Write beside the old file, flush to the disk, then take its place. On failure the old file stays as it was."""
    fresh = path.with_name(path.name + ".tmp")
    header = {"coterie": json.dumps({**meta, "format": FORMAT})}
    try:
        save_file(_apart(tensors), files.beside(path), metadata=header)
        _flush(fresh)
        os.replace(fresh, path)
        _flush(path.parent)
    except (OSError, SafetensorError) as reason:
        fresh.unlink(missing_ok=True)
        kept = "the previous checkpoint is intact" if path.exists() else "no checkpoint was written before"
        raise CoterieError(f"the checkpoint {path} could not be written ({_cause(reason)}); {kept}.") from reason


def link(path: Path, other: Path) -> None:
    """Another name for a checkpoint, under which it stays when a newer one takes its place; the same bytes on the disk.

    Where the file system has no such names it is a copy.
    """
    fresh = other.with_name(other.name + ".tmp")
    try:
        fresh.unlink(missing_ok=True)
        try:
            os.link(path, fresh)
        except OSError:
            shutil.copyfile(path, fresh)
            _flush(fresh)
        os.replace(fresh, other)
        _flush(other.parent)
    except OSError as reason:
        fresh.unlink(missing_ok=True)
        raise CoterieError(f"the checkpoint {path} could not be kept as {other.name} ({_cause(reason)}).") from reason


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and header of a checkpoint."""
    return _read(path, with_tensors=True)


def header(path: Path) -> dict[str, Any]:
    """The header of a checkpoint; its tensors are not read."""
    return _read(path, with_tensors=False)[1]


def _read(path: Path, with_tensors: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if not path.is_file():
        raise CoterieError(f"there is no checkpoint {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            meta = json.loads((file.metadata() or {})["coterie"])
            names = file.keys() if with_tensors else ()
            tensors = {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError, LookupError, ValueError, RecursionError, RuntimeError, MemoryError) as reason:
        if memory.exhausted(reason):
            raise NoMemory(f"memory ran out while the checkpoint {path} was read; the file is as it was.") from reason
        raise CoterieError(f"the checkpoint {path} is damaged or not one of coterie's ({_cause(reason)}).") from reason
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        found = meta.get("format") if isinstance(meta, dict) else None
        raise CoterieError(f"the checkpoint {path} has format {found}; this version reads {FORMAT}.")
    return tensors, meta


def prefixed(word: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of one record as a checkpoint of several names them: `row` of `server` is `server.row`."""
    return {f"{word}.{name}": t for name, t in tensors.items()}


def part(tensors: Mapping[str, Tensor], word: str) -> dict[str, Tensor]:
    """The tensors of one record again."""
    return {name.removeprefix(f"{word}."): t for name, t in tensors.items() if name.startswith(f"{word}.")}


def digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names, shapes and bytes: equal for bit-identical states only."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        t = tensors[name].detach().cpu().contiguous()
        total.update(f"{name}{tuple(t.shape)}{t.dtype}".encode())
        total.update(t.view(torch.uint8).numpy().data if t.numel() and t.ndim else t.numpy().tobytes())
    return total.hexdigest()


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the host, none in memory of another or inside a larger one; whatever is so already is no copy."""
    found: dict[str, Tensor] = {}
    held: set[int] = set()
    for name, tensor in tensors.items():
        t = tensor.detach().cpu().contiguous()
        storage = t.untyped_storage()
        if storage.data_ptr() in held or storage.nbytes() != t.nbytes:
            t = t.clone()
        held.add(t.untyped_storage().data_ptr())
        found[name] = t
    return found


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _cause(reason: Exception) -> str:
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror.lower()
    return " ".join(str(reason).split())[:200] or type(reason).__name__
