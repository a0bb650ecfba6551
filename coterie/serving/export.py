"""Models as files: safetensors with a json beside it, TorchScript, torch.export and ONNX, each checked when written."""

from __future__ import annotations

import copy
import json
import logging
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from coterie import files, models, registry
from coterie.contract.cohort import Init
from coterie.contract.layout import Layout
from coterie.contract.net import Net, Task
from coterie.errors import CoterieError, counted, unknown
from coterie.options import parse_options
from coterie.running import checkpoint
from coterie.running.folder import write_text
from coterie.running.saved import Saved

if TYPE_CHECKING:
    from coterie.serving.newcomers import Personal

FORMATS = {"safetensors": ".safetensors", "torchscript": ".pt", "torch-export": ".pt2", "onnx": ".onnx"}
"""Format -> the file ending that stands for it."""
TOLERANCE = 1e-4
"""The largest difference between outputs of the file and of the row, relative to the largest output (at least 1)."""
SAMPLES = 16
"""Samples that are compared."""


# -- the form in which sites, personalize and export write a model -----------------------------------------------------


def write_model(path: Path, layout: Layout, row: Tensor, facts: Mapping[str, Any]) -> Path:
    """`row [D]` tensor by tensor as safetensors, its facts and layout in the header and in a json beside it.

    `facts["job"]` holds what builds the module again: method, model, head, shape, classes, outputs.
    """
    whole = {
        **facts,
        "layout": {
            "digest": layout.digest, "columns": layout.size,
            "tensors": {entry.name: list(entry.shape) for entry in layout.entries},
        },
    }
    checkpoint.save(path, layout.views(row), whole)
    beside = path.with_suffix(".json")
    write_text(beside, json.dumps(whole, indent=2) + "\n")
    return beside


@dataclass(frozen=True)
class Piece:
    """One model: its row, and what gives the row its meaning."""

    row: Tensor  # [D]
    layout: Layout
    module: nn.Module
    classes: int
    facts: Mapping[str, Any]
    x: Tensor  # [n, ...] samples to compare on

    def net(self) -> Net:
        return Net(self.module, self.layout, Task.of(self.classes))

    def outputs(self, x: Tensor) -> Tensor:
        """What the row itself gives, without anything having been loaded into the module."""
        net = self.net()
        net.stacked = False
        net.mode(training=False)
        with torch.no_grad():
            return net(self.row, x)

    def loaded(self) -> nn.Module:
        """The module with the row in it, ready for use."""
        return self.layout.load(copy.deepcopy(self.module).to(self.row.dtype), self.row).eval()


def module_of(found: Personal) -> nn.Module:
    """A newcomer's model as a module, ready for use."""
    clients, row = found.clients, found.row.cpu()
    return clients.layout.load(copy.deepcopy(clients.init.module).to(row.dtype).cpu(), row).eval()


def read_model(path: Path, spelling: str | None = None) -> Piece:
    """What `write_model` wrote, with its module; `spelling` names the model where the file's own is not found."""
    tensors, facts = checkpoint.load(path)
    job = facts.get("job")
    if not isinstance(job, dict):
        raise CoterieError(f"{path} holds no model written by coterie: its header does not say how to build one.")
    try:
        shape, classes = tuple(int(n) for n in job["shape"]), int(job["classes"])
        name, given = parse_options(spelling or job["model"])
        factory = models.model(name, shape, int(job["outputs"]), **given)
        init = Init(factory, registry.method(job["method"]).wrap, 0, job.get("head"))
        digest = facts["layout"]["digest"]
    except (KeyError, TypeError) as reason:
        raise CoterieError(f"{path} does not say how to build its model: {reason!r} is missing.") from reason
    if init.layout.digest != digest:
        named = spelling or job["model"]
        raise CoterieError(f"{path} holds a model of layout {digest}; {named} has layout {init.layout.digest}.")
    row = torch.cat([tensors[entry.name].reshape(-1) for entry in init.layout.entries])
    return Piece(row, init.layout, init.module, classes, facts, random_samples(init.module, shape, row.dtype))


def job_of(saved: Saved) -> dict[str, Any]:
    """What builds a run's module again, as a site's job says it."""
    return {
        "method": registry.spelling(saved.method), "model": files.resolved(saved.model), "head": saved.head,
        "shape": list(saved.shape), "classes": saved.classes, "outputs": saved.outputs,
        **({"class_names": list(saved.class_names)} if saved.class_names else {}),
        **({"encoding": saved.encoding} if saved.encoding else {}),
    }


def random_samples(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Samples to compare outputs on where there are no real ones: normal numbers, or tokens the model knows."""
    generator = torch.Generator().manual_seed(0)
    first = next((m for m in module.modules() if next(m.parameters(recurse=False), None) is not None), None)
    if isinstance(first, nn.Embedding):
        return torch.randint(0, first.num_embeddings, (SAMPLES, *shape), generator=generator)
    return torch.randn((SAMPLES, *shape), generator=generator, dtype=torch.float64).to(dtype)


# -- one model of a run ------------------------------------------------------------------------------------------------


def of_run(saved: Saved, client: str | None, number: int | None, adapted: bool) -> Piece:
    """A client's model, or the server's of this number."""
    if (client is None) == (number is None):
        raise CoterieError("name one model: --client NAME for the one a client uses, or --model K for the server's.")
    if client is not None:
        return of_client(saved, client, adapted)
    if adapted:
        raise CoterieError("--adapted is for a client's model; the server has no data to train on.")
    assert number is not None
    return of_server(saved, number)


def of_client(saved: Saved, name: str, adapted: bool) -> Piece:
    """The model that a client of the run uses; reads the run's data again."""
    number = saved.client(name)
    simulation = saved.simulation()
    row = simulation.row(number, adapted).cpu()
    split = "test" if simulation.federation.sizes("test")[number] else "train"
    x = simulation.federation.client(number, split)[0][:SAMPLES].cpu()
    facts = {"client": name, "adapted": adapted, "newcomer": number >= saved.population}
    return _piece(saved, row, x, simulation.rounds_done, facts)


def of_server(saved: Saved, number: int) -> Piece:
    """The server's model of this number."""
    server, meta = saved.server()
    held = server.tensors()
    rows = held["rows"] if "rows" in held else held["row"][None] if "row" in held else None
    init = Init(saved.factory(), saved.method.wrap, 0, saved.head)
    if rows is None or rows.shape[-1] != init.layout.size:
        raise CoterieError(f"the server of {saved.method.name} keeps no whole model; export a client's with --client.")
    if not 0 <= number < len(rows):
        raise CoterieError(f"the server keeps {len(rows)} model(s), numbered from 0; there is no model {number}.")
    return _piece(saved, rows[number], None, int(meta["round"]), {"server_model": number})


def _piece(saved: Saved, row: Tensor, x: Tensor | None, t: int, facts: Mapping[str, Any]) -> Piece:
    init = Init(saved.factory(), saved.method.wrap, 0, saved.head)
    if x is None:
        x = random_samples(init.module, saved.shape, row.dtype)
    elif x.is_floating_point():
        x = x.to(row.dtype)
    job = job_of(saved)
    known = {"method": job["method"], "model": job["model"], "run": str(saved.folder.path.resolve()), "round": t}
    return Piece(row, init.layout, init.module, saved.classes, {**known, **facts, "job": job}, x)


# -- formats -----------------------------------------------------------------------------------------------------------


def hand_out(piece: Piece, path: Path, form: str) -> str:
    """Write the file and say how near its outputs are."""
    apart = write(piece, path, form)
    beside = f" and {path.with_suffix('.json')}" if form == "safetensors" else ""
    allowed = f"relative difference at most {apart:.1g}, {TOLERANCE:g} allowed"
    return f"{path}{beside}: {form}; the same outputs on {counted(len(piece.x), 'sample')} ({allowed})"


def format_of(path: Path, wanted: str | None) -> str:
    """The format asked for, or the one the file's ending stands for; refuses a place that is not there."""
    if not path.parent.is_dir():
        raise CoterieError(f"{path} cannot be written: there is no folder {path.parent}.")
    if wanted is not None:
        if wanted not in FORMATS:
            raise unknown("format", wanted, FORMATS)
        return wanted
    found = next((name for name, ending in FORMATS.items() if path.suffix == ending), None)
    if found is None:
        raise CoterieError(f"the ending of {path} stands for no format; give --format, one of {', '.join(FORMATS)}.")
    return found


def write(piece: Piece, path: Path, form: str) -> float:
    """Write the model, read it back from the file, compare outputs; the largest relative difference.

    A file that cannot be written, read or reproduces other outputs is an error and is not left behind.
    """
    fresh = path.with_name(f"{path.stem}.tmp{FORMATS[form]}")
    leftovers = (fresh, fresh.with_suffix(".json"), Path(f"{fresh}.data"))
    try:
        answer = _WRITERS[form](piece, fresh)
        apart = parity(piece.outputs(piece.x), answer(piece.x))
        if len(piece.x) > 1:  # another batch size than the one it was traced with
            apart = max(apart, parity(piece.outputs(piece.x[:1]), answer(piece.x[:1])))
        if not apart <= TOLERANCE:
            raise CoterieError(
                f"the {form} file gives other outputs than the model: {apart:.2g} apart, at most {TOLERANCE:g} is "
                "allowed; nothing was written."
            )
        os.replace(fresh, path)
        if fresh.with_suffix(".json").exists():
            os.replace(fresh.with_suffix(".json"), path.with_suffix(".json"))
    except CoterieError:
        raise
    except OSError as reason:
        raise CoterieError(f"{path} cannot be written: {reason.strerror or reason}.") from reason
    except Exception as reason:  # whatever the exporters say, the reader gets one line of it
        said = (str(reason).strip().splitlines() or [type(reason).__name__])[0]
        raise CoterieError(f"the model cannot be exported as {form}: {said}") from reason
    finally:
        for left in leftovers:
            left.unlink(missing_ok=True)
    return apart


def parity(expected: Tensor, found: Tensor) -> float:
    """The largest difference, relative to the largest expected value (at least 1); infinite where shapes differ."""
    if expected.shape != found.shape:
        return float("inf")
    apart = (expected.double() - found.double()).abs().max() / expected.double().abs().max().clamp(min=1)
    return float(apart) if bool(torch.isfinite(apart)) else float("inf")


class _Plain(nn.Module):
    """A module whose answer is one tensor, also where the user's gives an object with `logits`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        out = self.module(x)
        answer: Tensor = out if isinstance(out, Tensor) else out.logits
        return answer


Answer = Callable[[Tensor], Tensor]


def _safetensors(piece: Piece, path: Path) -> Answer:
    write_model(path, piece.layout, piece.row, piece.facts)
    tensors, _ = checkpoint.load(path)
    module = copy.deepcopy(piece.module).to(piece.row.dtype).eval()
    module.load_state_dict(tensors, strict=False)
    return _quiet(_Plain(module))


def _torchscript(piece: Piece, path: Path) -> Answer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(_Plain(piece.loaded()), (piece.x,), check_trace=False)  # type: ignore[no-untyped-call]
        torch.jit.save(traced, str(path))
        return _quiet(torch.jit.load(str(path)))  # type: ignore[no-untyped-call]


def _torch_export(piece: Piece, path: Path) -> Answer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(_Plain(piece.loaded()), (_two(piece.x),), dynamic_shapes=_any_batch())
        torch.export.save(program, str(path))
        return _quiet(torch.export.load(str(path)).module())


def _onnx(piece: Piece, path: Path) -> Answer:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # type: ignore[import-untyped,unused-ignore]
        import onnxscript  # noqa: F401
    except ImportError as reason:
        raise CoterieError(f"ONNX needs {reason.name}: pip install 'coterie[export]'.") from reason
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)  # asks for torchvision
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            _Plain(piece.loaded()), (_two(piece.x),), str(path), dynamo=True, external_data=False, verbose=False,
            input_names=["x"], output_names=["outputs"], dynamic_shapes=_any_batch(),
        )
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    entry = session.get_inputs()[0].name
    return lambda x: torch.from_numpy(session.run(None, {entry: x.numpy()})[0])


def _two(x: Tensor) -> Tensor:
    """At least two samples: a batch of one would be taken for a constant."""
    return x if len(x) > 1 else torch.cat([x, x])


def _any_batch() -> Any:
    return ({0: torch.export.Dim("batch")},)


def _quiet(module: Callable[[Tensor], Tensor]) -> Answer:
    def answer(x: Tensor) -> Tensor:
        with torch.no_grad():
            return module(x)

    return answer


_WRITERS: dict[str, Callable[[Piece, Path], Answer]] = {
    "safetensors": _safetensors, "torchscript": _torchscript, "torch-export": _torch_export, "onnx": _onnx,
}
