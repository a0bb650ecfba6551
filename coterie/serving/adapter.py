"""What adapters made of a model: the adapter alone in PEFT's format, or the model with the adapters merged into it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from coterie import files
from coterie.contract.frozen import duplicate
from coterie.contract.layout import Layout, head_name, under
from coterie.contract.stored import widen
from coterie.errors import CoterieError
from coterie.models import lora
from coterie.running import checkpoint
from coterie.running.spec import RunSpec
from coterie.serving.portable import Portable

PEFT = "peft"
"""The format: a folder."""
CONFIG, TENSORS, HEAD, FACTS = "adapter_config.json", "adapter_model.safetensors", "head.safetensors", "coterie.json"
BEFORE = "base_model.model."
"""What PEFT writes before every name."""
TOLERANCE = 1e-5
"""The largest difference between outputs of what was written and of the row, relative to the largest (at least 1)."""


@dataclass(frozen=True)
class _AdaptedLayer:
    """An adapted layer: its name in the module, and in the model as PEFT loads it."""

    name: str
    published: str
    layer: lora.Adapted

    @property
    def rank(self) -> int:
        return len(self.layer.lora.A)

    @property
    def alpha(self) -> float:
        """PEFT's scale is alpha / rank."""
        return self.layer.lora.low_rank * self.rank

    def tensors(self) -> dict[str, Tensor]:
        """A and B under PEFT's names; those of an embedding are called otherwise."""
        words = isinstance(self.layer.lora, lora.EmbeddingFactors)
        a, b = ("lora_embedding_A", "lora_embedding_B") if words else ("lora_A.weight", "lora_B.weight")
        factors = {a: self.layer.lora.A, b: self.layer.lora.B}
        return {f"{BEFORE}{self.published}.{name}": t.detach().clone() for name, t in factors.items()}


# -- merged ------------------------------------------------------------------------------------------------------------


def merged(model: Portable) -> Portable:
    """The same model without adapters: the weights W + s B A in plain layers, as its spelling alone builds them."""
    module = model.layout.load(duplicate(model.module), model.row)
    if not _adapted(module):
        raise CoterieError("the model has no adapters to merge; leave --merged out.")
    job = {name: value for name, value in model.facts["job"].items() if name not in ("adapter", "freeze", "train")}
    spec = RunSpec.of(job, "the run's settings")
    plain = spec.init(spec.chosen()).module
    plain.load_state_dict(lora.merged(module).state_dict())
    layout = Layout.of(plain)
    facts = {**model.facts, "job": job, "merged": model.facts["job"].get("adapter", "")}
    return replace(model, row=layout.row(plain, model.row.dtype), layout=layout, module=plain, facts=facts)


# -- the adapter alone -------------------------------------------------------------------------------------------------


def export_peft(model: Portable, folder: Path) -> str:
    """Write the folder; lines that say what is in it. It is read back, and must give the model's outputs."""
    if folder.exists() or folder.is_symlink():
        raise CoterieError(f"{folder} is there already; name a folder that is not, as PEFT's format is one.")
    module = model.layout.load(duplicate(model.module), model.row).eval()
    found, head = _found(module, model.layout), head_name(module)
    _refuse_others(model.layout, found, head)
    fresh = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        files.make_folder(fresh)
        _write(fresh, module, found, head, model)
        apart = _apart(fresh, module, found, head, model)
        if not apart <= TOLERANCE:
            raise CoterieError(f"the adapter in PEFT's format gives other outputs than the model: {apart:.2g} apart, "
                               f"at most {TOLERANCE:g} is allowed; nothing was written.")
        fresh.rename(folder)
    except OSError as reason:
        raise CoterieError(f"{folder} cannot be written: {reason.strerror or reason}.") from reason
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    numbers = sum(t.numel() for one in found for t in one.tensors().values())
    beside = f", the head in {HEAD}" if (folder / HEAD).exists() else ""
    unit = "" if model.unit is None else (f"; an answer is {model.unit.mean:.6g} + {model.unit.deviation:.6g} * output "
                                          f"({FACTS}: target)")
    return (f"{folder}: the adapter alone in PEFT's format, {numbers:,} numbers in {len(found)} layers{beside}; read "
            f"back, the same outputs (relative difference {apart:.1g}){unit}")


def _adapted(module: nn.Module) -> list[tuple[str, lora.Adapted]]:
    return [(name, sub) for name, sub in module.named_modules() if isinstance(sub, lora.Adapted)]


def _published(module: nn.Module, name: str) -> str | None:
    """The name of a layer in the model as others load it; a module that knows another one than its own says so."""
    given = getattr(module, "published", None)
    return cast("str | None", given(name)) if callable(given) else name


def _found(module: nn.Module, layout: Layout) -> list[_AdaptedLayer]:
    """The adapted layers; raises where there are none, or one that others' model does not have."""
    found = []
    for name, layer in _adapted(module):
        published = _published(module, name)
        if published is None:
            raise CoterieError(f"layer '{name}' is no layer of the backbone, so its adapter has no place in PEFT's "
                               "format; write the whole model, with --merged where plain layers are wanted.")
        found.append(_AdaptedLayer(name, published, layer))
    if not found:
        raise CoterieError("the model has no adapters, so there is nothing to write in PEFT's format; train it with "
                           "--adapter lora:rank=8, or leave --format peft out.")
    return found


def _refuse_others(layout: Layout, found: Iterable[_AdaptedLayer], head: str | None) -> None:
    """An adapter and a head say nothing of what else trained."""
    places = [f"{one.name}.lora" for one in found] + ([] if head is None else [head])
    other = [entry.name for entry in layout.entries if not any(under(entry.name, place) for place in places)]
    if other:
        raise CoterieError(f"'{other[0]}' trained as well, and PEFT's format holds adapters and the head alone; write "
                           "the whole model: --merged, with another --format.")


def _config(module: nn.Module, found: list[_AdaptedLayer], head: str | None, model: Portable) -> dict[str, Any]:
    """adapter_config.json."""
    ranks, alphas = [one.rank for one in found], [_whole(one.alpha) for one in found]
    rank, alpha = max(ranks, key=ranks.count), max(alphas, key=alphas.count)
    names = [one.published for one in found]
    plain = [name for name, sub in lora.merged(module).named_modules() if lora.kind_of(sub) is not None]
    others = [p for name in plain if (p := _published(module, name)) and p not in names]
    # PEFT takes a layer by the end of its name; where that would take more of them, it gets a pattern of the whole.
    blurred = any(other.endswith(f".{name}") for other in others + names for name in names)
    key = {name: f"^{re.escape(name)}" if blurred else name for name in names}
    spelled, saved = model.facts["job"]["model"], head and _published(module, head)
    return {
        "peft_type": "LORA", "task_type": _task(module, head), "base_model_name_or_path": _base(spelled),
        "inference_mode": True, "r": rank, "lora_alpha": alpha, "lora_dropout": found[0].layer.lora.dropout,
        "use_rslora": False, "bias": "none", "fan_in_fan_out": False, "init_lora_weights": True,
        "target_modules": "|".join(map(re.escape, names)) if blurred else names,
        "rank_pattern": {key[one.published]: one.rank for one in found if one.rank != rank},
        "alpha_pattern": {key[n]: a for n, a in zip(names, alphas, strict=True) if a != alpha},
        "modules_to_save": [saved] if saved and _trains(head, model.layout) else None,
    }


def _task(module: nn.Module, head: str | None) -> str | None:
    """PEFT's word for what the model does; none for a module of the user's own."""
    if not callable(getattr(module, "published", None)):
        return None
    return "CAUSAL_LM" if getattr(module, "speaks", False) else "FEATURE_EXTRACTION"


def _base(spelling: str) -> str:
    """Where the backbone is, as far as the model's spelling says it."""
    folder = files.in_folder(spelling)
    return str(Path(folder[0]).resolve()) if folder else spelling.partition(":")[0]


def _whole(number: float) -> float | int:
    return int(number) if number == int(number) else number


def _trains(head: str | None, layout: Layout) -> bool:
    return head is not None and any(under(entry.name, head) for entry in layout.entries)


def _write(folder: Path, module: nn.Module, found: list[_AdaptedLayer], head: str | None, model: Portable) -> None:
    """The folder's files; the head goes among PEFT's tensors where the model as others load it has it, else beside."""
    tensors = {name: t for one in found for name, t in one.tensors().items()}
    beside: dict[str, Tensor] = {}
    if head is not None:
        published, layer = _published(module, head), widen(duplicate(module.get_submodule(head)))
        for name, t in layer.state_dict().items():
            if published is None:
                beside[name] = t
            elif _trains(head, model.layout):
                tensors[f"{BEFORE}{published}.{name}"] = t
    checkpoint.save(folder / TENSORS, {name: t.contiguous() for name, t in tensors.items()}, {})
    if beside:
        checkpoint.save(folder / HEAD, beside, {})
    files.write_json(folder / CONFIG, _config(module, found, head, model))
    unit = model.facts["job"].get("unit")
    told = {"target": {**unit, "answer": "mean + deviation * output"}} if unit else {}
    files.write_json(folder / FACTS, {**model.facts, **told})


def _apart(folder: Path, module: nn.Module, found: list[_AdaptedLayer], head: str | None, model: Portable) -> float:
    """The largest difference of outputs between the model and its backbone with what the folder says, merged."""
    config, tensors = files.read_json(folder / CONFIG), checkpoint.load(folder / TENSORS)[0]
    beside = checkpoint.load(folder / HEAD)[0] if (folder / HEAD).exists() else {}
    plain = lora.merged(module)
    for one in found:
        a, b = (tensors[name] for name in one.tensors())
        rank, alpha = (_of(config[f"{word}_pattern"], one.published, config[usual])
                       for word, usual in (("rank", "r"), ("alpha", "lora_alpha")))
        product = alpha / rank * (b.flatten(1) @ a.flatten(1))
        base, layer = widen(duplicate(one.layer.base)), plain.get_submodule(one.name)
        weight = cast("Tensor", base.weight)
        turned = product.T if isinstance(one.layer.lora, lora.EmbeddingFactors) else product
        layer.weight = nn.Parameter(weight.detach() + turned.reshape(weight.shape))
    if head is not None:
        written = _published(module, head)
        for name, t in plain.get_submodule(head).named_parameters():
            t.data = beside.get(name, tensors.get(f"{BEFORE}{written}.{name}", t.data))
    with torch.no_grad():
        expected = model.outputs(model.x)
        again = model.answer(_tensor(plain.eval()(model.x)))
    return float((expected - again).abs().max() / expected.abs().max().clamp(min=1))


def _of(pattern: Mapping[str, Any], name: str, usual: Any) -> Any:
    return pattern.get(name, pattern.get(f"^{re.escape(name)}", usual))


def _tensor(out: Any) -> Tensor:
    return cast("Tensor", out if isinstance(out, Tensor) else out.logits)
