"""Every method gives across sites what it gives on the stacked engine; the messages travel inside one process."""

from __future__ import annotations

import numpy as np
import pytest
import sites as toy
import torch

from coterie import checkpoint, registry

METHODS = sorted(registry.methods())
CLOSE = {"rtol": 1e-9, "atol": 1e-9}  # both engines compute in float64; sums differ in their order at most


def same_everywhere(data, one, rounds, home):
    """Server state, every client's own state and its buffers: site by site beside the stacked engine's tables."""
    sim = toy.stacked(data, one)
    tensors = rounds.server.tensors()
    assert tensors.keys() == sim.server.tensors().keys()
    for name, t in sim.server.tensors().items():
        torch.testing.assert_close(tensors[name], t, **CLOSE)
    own, buffers = sim.own.tensors(), sim.buffers
    for i, name in enumerate(data.names[: sim.population]):
        held, _ = checkpoint.load(home / name / one.experiment / "state.safetensors")
        kept = {key[6:]: t for key, t in held.items() if key.startswith("after.")}
        assert kept.keys() == own.keys()
        for key, t in own.items():
            torch.testing.assert_close(kept[key], t[i : i + 1], **CLOSE)
        if buffers is not None and "buffers.after" in held:
            torch.testing.assert_close(held["buffers.after"], buffers[i : i + 1], **CLOSE)
    evaluation, ours = sim.evaluate(), next(e for e in rounds.history if e.round == sim.rounds_done)
    for stage, scores in ours.stages.items():
        np.testing.assert_array_equal(scores.steps, evaluation.stages[stage].steps)
        for metric, values in scores.test.items():
            np.testing.assert_allclose(values, evaluation.stages[stage].test[metric], **CLOSE)
        for metric, values in scores.val.items():
            np.testing.assert_allclose(values, evaluation.stages[stage].val[metric], **CLOSE)
    return sim


@pytest.mark.parametrize("method", METHODS)
def test_everybody_takes_part(tmp_path, method):
    data = toy.federation()
    one = toy.job(data, method)
    (rounds,), line = toy.run(data, [one], tmp_path)
    same_everywhere(data, one, rounds, tmp_path)
    assert line.messages == 4 * (1 + 3 + 1)  # the introduction, three rounds, the end


@pytest.mark.parametrize("method", METHODS)
def test_half_takes_part_and_the_model_has_batch_statistics(tmp_path, method):
    data = toy.federation(shape=(1, 28))
    one = toy.job(data, method, "sensor:width=2,hidden=4,norm=batch", participation=0.5)
    (rounds,), _ = toy.run(data, [one], tmp_path)
    same_everywhere(data, one, rounds, tmp_path)
