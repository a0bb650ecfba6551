"""One model as a value that can leave its run: read from a run folder or a model file, written as safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coterie import files
from coterie.contract.frozen import duplicate
from coterie.contract.ground import grounded
from coterie.contract.layout import Layout
from coterie.contract.net import Net, Task
from coterie.contract.units import Unit, answering
from coterie.errors import CoterieError, counted
from coterie.evaluation.stages import ADAPTED, SERVED
from coterie.options import options
from coterie.running import checkpoint
from coterie.running.chosen import HandedOut
from coterie.running.outcome import warnings_of
from coterie.running.saved import Saved
from coterie.running.spec import RunSpec
from coterie.trust import code

SAMPLES = 16
"""Samples on which outputs are compared."""


# -- the form in which sites, personalize and export write a model -----------------------------------------------------


def write_model(path: Path, layout: Layout, row: Tensor, facts: Mapping[str, Any]) -> Path:
    """`row [D]` and what is frozen, tensor by tensor as safetensors; facts and layout in the header and a json beside.

    `facts["job"]` holds what builds the module again: method, model, head, shape, classes, outputs. The tensors are the
    module's own; where it was trained on standardised targets, `target` says how an answer is made of its output.
    """
    frozen = dict(zip((entry.name for entry in layout.frozen), layout.values, strict=True))
    unit = facts["job"].get("unit")
    whole = {
        **facts, **({"target": {**unit, "answer": "mean + deviation * output"}} if unit else {}),
        "layout": {
            "digest": layout.digest, "columns": layout.size,
            "tensors": {entry.name: list(entry.shape) for entry in layout.entries},
            **({"frozen": {entry.name: list(entry.shape) for entry in layout.frozen}} if frozen else {}),
        },
    }
    job = facts["job"]
    named = code.table(str(job.get(name, "")) for name in ("method", "model", "loss"))
    whole |= {"code": named} if named else {}
    checkpoint.save(path, {**layout.views(row), **frozen}, whole)
    beside = path.with_suffix(".json")
    files.write_json(beside, whole)
    return beside


@dataclass(frozen=True)
class Portable:
    """One model outside its run: its row, and what gives the row its meaning."""

    row: Tensor  # [D]
    layout: Layout
    module: nn.Module
    classes: int
    facts: Mapping[str, Any]
    x: Tensor  # [n, ...] samples to compare on
    unit: Unit | None = None  # in which it answers, where it was trained on standardised targets

    def net(self) -> Net:
        made = Net(self.module, self.layout, Task.of(self.classes))
        made.place(self.row.device, self.row.dtype)
        return made

    def outputs(self, x: Tensor) -> Tensor:
        """What the row itself answers, without anything having been loaded into the module."""
        net = self.net()
        net.stacked = False
        net.mode(training=False)
        with torch.no_grad():
            return self.answer(net(self.row, x))

    def answer(self, outputs: Tensor) -> Tensor:
        """The module's outputs in the user's unit."""
        return outputs if self.unit is None else self.unit.back(outputs)

    def loaded(self) -> nn.Module:
        """The module with the row in it, ready for use; it answers in the user's unit."""
        return answering(self.layout.load(duplicate(self.module).to(self.row.dtype), self.row).eval(), self.unit)


@code.foreign()
def read_model(path: Path, spelling: str | None = None, trust: bool = False) -> Portable:
    """What `write_model` wrote, with its module; `spelling` names the model where the file's own is not found.

    Code files that its header names run if they are as they were, and this user has named them before, or with `trust`.
    """
    code.typed(spelling)
    if not path.exists():
        raise CoterieError(f"there is no run folder or model file {path}.")
    tensors, facts = checkpoint.load(path)
    job = facts.get("job")
    if not isinstance(job, dict):
        raise CoterieError(f"{path} holds no model written by coterie: its header does not say how to build one.")
    known = {name: value for name, value in job.items() if name in options(RunSpec) and name != "training"}
    if spelling is not None:
        known["model"] = spelling
    spec = RunSpec.of(known, f"how to build the model of {path}")
    told = [spec.method, *([] if spelling else [spec.model])]
    code.require_same(told, facts.get("code"), str(path))
    code.require(told, str(path), trust)
    method, held = spec.chosen(), sum(t.numel() for t in tensors.values())
    if files.in_file(spec.model) is None and (said := spec.numbers(method)) > held:
        raise CoterieError(f"{path} holds {held} numbers and is said to be {spec.model} with {said}; it is damaged, or "
                           "not what it says.")
    module = spec.init(method).module
    layout = Layout.of(module)
    if layout.frozen:  # the file holds these too
        lacking = sorted(entry.name for entry in layout.frozen if entry.name not in tensors)
        if lacking:
            raise CoterieError(f"{path} does not hold {lacking[0]}, which is frozen in {spec.model}; "
                               "name the model that it was written with.")
        module.load_state_dict({entry.name: tensors[entry.name] for entry in layout.frozen}, strict=False)
        layout = Layout.of(module)
    digest = facts.get("layout", {}).get("digest")
    if layout.digest != digest:
        raise CoterieError(f"{path} holds a model of layout {digest}; {spec.model} has layout {layout.digest}.")
    row = torch.cat([tensors[entry.name].reshape(-1) for entry in layout.entries])
    x = spec.random_samples(SAMPLES, row.dtype, module)
    return Portable(row, layout, module, spec.classes, facts, x, Unit.of(spec.unit))


def job_of(saved: Saved) -> dict[str, Any]:
    """What builds a run's module again, as a site's job says it; how it was trained is not needed for that."""
    spec = saved.spec.as_it_was()
    named = replace(spec, model=code.absolute(spec.model), loss=code.absolute(spec.loss))
    return {name: value for name, value in named.values().items() if name != "training"}


# -- one model of a run ------------------------------------------------------------------------------------------------


def of_run(
    saved: Saved, client: str | None, number: int | None, adapted: bool, when: str = "chosen"
) -> Portable:
    """A client's model, or the server's of this number, of the round that tables report or of the last one."""
    if (client is None) == (number is None):
        raise CoterieError("name one model: --client NAME for the one a client uses, or --model K for the server's.")
    if client is not None:
        return of_client(saved, client, adapted, when)
    if adapted:
        raise CoterieError("--adapted is for a client's model; the server has no data to train on.")
    assert number is not None
    return of_server(saved, number, when)


def of_client(saved: Saved, name: str, adapted: bool, when: str = "chosen") -> Portable:
    """The model that a client of the run uses; reads the run's data again."""
    number = saved.client(name)
    taken = saved.handed_out(ADAPTED if adapted else SERVED, when)
    simulation = saved.simulation(taken.stage, when)
    row = simulation.row(number, adapted).cpu()
    split = "test" if simulation.federation.sizes("test")[number] else "train"
    x = simulation.federation.client(number, split)[0][:SAMPLES].cpu()
    facts = {"client": name, "adapted": adapted, "newcomer": number >= simulation.arrived}
    return _portable(saved, row, x, taken, facts, simulation.residual)


def of_server(saved: Saved, number: int, when: str = "chosen") -> Portable:
    """The server's model of this number."""
    taken = saved.handed_out(SERVED, when)
    tensors, meta = saved.checkpoint(SERVED, when)
    server = saved.server(saved.init(), tensors, meta)
    rows = saved.method.whole(server.state, server.layout)
    if rows is None:
        raise CoterieError(f"the server of {saved.method.name} keeps no whole model; export a client's with --client.")
    if not 0 <= number < len(rows):
        kept = counted(len(rows), "model")
        raise CoterieError(f"the server keeps {kept}, numbered from 0; there is no model {number}.")
    return _portable(saved, rows[number], None, taken, {"server_model": number}, saved.method.residual(server.state))


def _portable(
    saved: Saved, row: Tensor, x: Tensor | None, taken: HandedOut, facts: Mapping[str, Any], residual: Tensor | None
) -> Portable:
    init = saved.init()
    if x is None:
        x = saved.spec.random_samples(SAMPLES, row.dtype, init.module)
    elif x.is_floating_point():
        x = x.to(row.dtype)
    job = job_of(saved)
    known = {"method": job["method"], "model": job["model"], "run": str(saved.folder.path.resolve()),
             "warnings": warnings_of(saved.folder, (taken.stage,), taken.scored)}
    whole = {**known, **taken.facts, **facts, "job": job}
    module, layout = grounded(init.module, init.layout, residual)
    return Portable(row, layout, module, saved.spec.classes, whole, x, Unit.of(saved.spec.unit))
