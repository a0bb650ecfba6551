"""A model for other programs: safetensors, TorchScript, torch.export and ONNX, each read back and compared."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coterie.contract.frozen import duplicate
from coterie.contract.units import answering
from coterie.errors import CoterieError, counted, unknown
from coterie.running import checkpoint
from coterie.running.chosen import CHOSEN
from coterie.serving.adapter import PEFT
from coterie.serving.portable import Portable, write_model

FORMATS = {"safetensors": ".safetensors", "torchscript": ".pt", "torch-export": ".pt2", "onnx": ".onnx"}
"""Format -> the file ending that stands for it."""
TOLERANCE = 1e-4
"""The largest difference between outputs of the file and of the row, relative to the largest output (at least 1)."""


def export_model(model: Portable, path: Path, form: str) -> str:
    """Write the file; lines that say where it is, how near its outputs are and of which round the model is."""
    apart = write(model, path, form)
    beside = f" and {path.with_suffix('.json')}" if form == "safetensors" else ""
    allowed = f"relative difference at most {apart:.1g}, {TOLERANCE:g} allowed"
    said = f"{path}{beside}: {form}; the same outputs on {counted(len(model.x), 'sample')} ({allowed})"
    warned = [f"Of the run: {text}" for text in model.facts.get("warnings", ())]
    return "\n".join([*warned, said + _unit(model, form), *_of_round(model.facts)])


def _unit(model: Portable, form: str) -> str:
    """What is to be known of a model that was trained on standardised targets."""
    if model.unit is None:
        return ""
    if form != "safetensors":
        return "; it answers in the unit of the target"
    mean, deviation = model.unit.mean, model.unit.deviation
    return f"; its tensors are the module's own: an answer is {mean:.6g} + {deviation:.6g} * output (json: target)"


def _of_round(facts: Mapping[str, Any]) -> list[str]:
    """Of which round a model is; files of earlier versions do not say how it was chosen."""
    if "when" not in facts:
        return []
    how = f"{facts['when']} (stage {facts['stage']})" if facts["when"] == CHOSEN else "the last one"
    return [f"the model after round {facts['round']}, {how}", *filter(None, [facts.get("note", "")])]


def format_of(path: Path, wanted: str | None) -> str:
    """The format asked for, or the one the file's ending stands for; refuses a place that is not there."""
    if not path.parent.is_dir():
        raise CoterieError(f"{path} cannot be written: there is no folder {path.parent}.")
    if wanted is not None:
        if wanted not in (*FORMATS, PEFT):
            raise unknown("format", wanted, (*FORMATS, PEFT))
        return wanted
    found = next((name for name, ending in FORMATS.items() if path.suffix == ending), None)
    if found is None:
        raise CoterieError(f"the ending of {path} stands for no format; give --format, one of {', '.join(FORMATS)}.")
    return found


def write(model: Portable, path: Path, form: str) -> float:
    """Write the model, read it back from the file, compare outputs; the largest relative difference.

    A file that cannot be written, read or reproduces other outputs is an error and is not left behind.
    """
    fresh = path.with_name(f"{path.stem}.tmp{FORMATS[form]}")
    leftovers = (fresh, fresh.with_suffix(".json"), Path(f"{fresh}.data"))
    try:
        for left in leftovers:  # a link that lies there would be written through
            left.unlink(missing_ok=True)
        answer = _WRITERS[form](model, fresh)
        apart = parity(model.outputs(model.x), answer(model.x))
        if len(model.x) > 1:  # another batch size than the one it was traced with
            apart = max(apart, parity(model.outputs(model.x[:1]), answer(model.x[:1])))
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
    a, b = expected.double(), found.double()
    same = (a == b) | (a.isnan() & b.isnan())  # of a model that diverged
    largest = torch.where(a.isfinite(), a, 0.0).abs().max().clamp(min=1)
    apart = torch.where(same, 0.0, (a - b).abs()).max() / largest
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


def _safetensors(model: Portable, path: Path) -> Answer:
    write_model(path, model.layout, model.row, model.facts)
    tensors, _ = checkpoint.load(path)
    module = duplicate(model.module).to(model.row.dtype).eval()
    module.load_state_dict(tensors, strict=False)
    return _quiet(answering(_Plain(module), model.unit))


def _torchscript(model: Portable, path: Path) -> Answer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(_Plain(model.loaded()), (model.x,), check_trace=False)  # type: ignore[no-untyped-call]
        torch.jit.save(traced, str(path))
        return _quiet(torch.jit.load(str(path)))  # type: ignore[no-untyped-call]


def _torch_export(model: Portable, path: Path) -> Answer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(_Plain(model.loaded()), (_two(model.x),), dynamic_shapes=_any_batch())
        torch.export.save(program, str(path))
        return _quiet(torch.export.load(str(path)).module())


def _onnx(model: Portable, path: Path) -> Answer:
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
            _Plain(model.loaded()), (_two(model.x),), str(path), dynamo=True, external_data=False, verbose=False,
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


_WRITERS: dict[str, Callable[[Portable, Path], Answer]] = {
    "safetensors": _safetensors, "torchscript": _torchscript, "torch-export": _torch_export, "onnx": _onnx,
}
