"""Where it pays to compute several runs as one stack, and how many clients that stack may have."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from coterie import memory
from coterie.contract import records
from coterie.contract.frozen import duplicate
from coterie.running.simulation import Simulation

PAYS = {"cpu": 4e7, "cuda": 4e9}
"""A run's clients are joined by other runs' if one step of all of them takes at most so many FLOP: below that, a step
costs mostly what it costs to start it."""
MOST = 1024
"""Clients in one joined stack at most, however much memory is free; further runs wait for their turn."""


def pays(simulation: Simulation) -> tuple[bool, str]:
    """Whether further runs like this one should join its stack, and why."""
    training, engine = simulation.training, simulation.engine
    if training.together != "auto":
        return training.together == "on", f"together={training.together}"
    if simulation.choices["engine"] != "stack" and "direct" not in simulation.choices:
        return False, "the model is not stacked"
    if engine.device.type == "cpu" and any(isinstance(m, nn.modules.conv._ConvNd) for m in engine.net.module.modules()):
        return False, "convolutions on a CPU"  # a stack of them takes as long as one after another
    flop, most = step_flop(simulation), PAYS.get(engine.device.type, 0.0)
    wanted = flop <= most
    return wanted, f"a step of all clients takes {flop:.1e} FLOP, {'at most' if wanted else 'more than'} {most:.0e}"


def step_flop(simulation: Simulation) -> float:
    """FLOP of one local step of all clients of a round, forward and backward; at least 6 for each weight and sample."""
    from torch.utils.flop_counter import FlopCounterMode  # half a second, which a site's process need not spend

    training, engine = simulation.training, simulation.engine
    module = duplicate(engine.net.module).to("cpu", torch.float32).eval()
    x = engine.example().to("cpu")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(x.to(next(module.parameters()).dtype) if x.is_floating_point() else x)
    batch = training.batch or float(engine.sizes(simulation.federation.seen, "train").mean())
    slots = max(1.0, training.participation * simulation.population) * _models(simulation)
    return float(slots * batch * max(3 * counter.get_total_flops(), 6 * simulation.layout.size))


def most_clients(simulation: Simulation) -> int:
    """How many clients of all joined runs together are computed at once."""
    if simulation.training.wave:
        return simulation.training.wave
    free = memory.free(simulation.device) // 2
    return max(1, min(MOST, free // simulation.client_bytes(_models(simulation))))


def _models(simulation: Simulation) -> int:
    """Models a client works on: as many as it is sent, at least one."""
    sent = records.bytes_each(simulation.payload(np.arange(1)).tensors())
    return max(1, sum(sent.values()) // (simulation.layout.size * simulation.dtype.itemsize))
