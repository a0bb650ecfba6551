"""Every method gives across sites what it gives on the stacked engine; the messages travel inside one process."""

from __future__ import annotations

import numpy as np
import pytest
import sites as toy
import torch

from coterie import registry
from coterie.evaluation.stages import SEEN
from coterie.flower.loopback import Loopback
from coterie.running import checkpoint

pytestmark = pytest.mark.flower  # needs no processes, but minutes: `make test-flower` runs it
METHODS = sorted(registry.methods())
CLOSE = {"rtol": 1e-9, "atol": 1e-9}  # both engines compute in float64; sums differ in their order at most
NORMED = "sensor:width=2,hidden=4,norm=batch"


def kept(home, name, job, merged):
    """A site's own state, buffers and its optimizer's memory after the last round that the server merged."""
    held, meta = checkpoint.load(home / name / job.experiment / "state.safetensors")
    word = "after" if meta["after"] <= merged else "before"
    assert meta[word] <= merged
    return checkpoint.part(held, word), held.get(f"buffers.{word}"), checkpoint.part(held, f"memory.{word}")


def states_agree(data, sim, rounds, home):
    """Server state, every client's own state and its buffers: site by site beside the stacked engine's tables."""
    tensors = rounds.server.state.tensors()
    assert tensors.keys() == sim.server.state.tensors().keys()
    for name, t in sim.server.state.tensors().items():
        torch.testing.assert_close(tensors[name], t, **CLOSE)
    for i, name in enumerate(data.names[: sim.population]):
        own, buffers, memory = kept(home, name, rounds.job, rounds.merged[name])
        assert own.keys() == sim.own.tensors().keys()
        for key, t in sim.own.tensors().items():
            torch.testing.assert_close(own[key], t[i : i + 1], **CLOSE)
        if buffers is not None:
            torch.testing.assert_close(buffers, sim.buffers[i : i + 1], **CLOSE)
        table = checkpoint.part(sim.snapshot()[0], "memory")
        assert memory.keys() == (table.keys() if rounds.merged[name] >= 0 else set())
        for key, t in memory.items():
            torch.testing.assert_close(t, table[key][i : i + 1], **CLOSE)


def scores_agree(sim, rounds, wanted=lambda stage: True):
    """The evaluation of the round that the stacked run has come to, in the stages that are `wanted`."""
    expected = {stage: s for stage, s in sim.evaluate().stages.items() if wanted(stage)}
    at = [e for e in rounds.history if e.round == sim.rounds_done]
    found = {stage: s for e in at for stage, s in e.stages.items() if wanted(stage)}
    assert found.keys() == expected.keys()
    for stage, scores in found.items():
        np.testing.assert_array_equal(scores.clients, expected[stage].clients)
        np.testing.assert_array_equal(scores.samples, expected[stage].samples)
        np.testing.assert_array_equal(scores.steps, expected[stage].steps)
        for mine, theirs in ((scores.test, expected[stage].test), (scores.val, expected[stage].val)):
            assert mine.keys() == theirs.keys()
            for metric, values in mine.items():
                np.testing.assert_allclose(values, theirs[metric], **CLOSE)


class LateSite(Loopback):
    """The last site comes when the others have begun to train."""

    def sites(self):
        everybody = super().sites()
        return everybody if self.messages > 4 else everybody - {"zurich"}


@pytest.mark.parametrize("method", [*METHODS, "hilora:root_rounds=1,cluster_rounds=1"])
def test_everybody_trains_and_a_late_site_gets_the_newcomers_model(tmp_path, method):
    names = (*toy.NAMES, "zurich")
    data = toy.federation(names=names, sizes=(*toy.SIZES, 6), val=(*toy.VAL, 2), test=(*toy.TEST, 3), unseen=1)
    one = toy.job(data, method)
    (rounds,), line = toy.run(data, [one], tmp_path, LateSite(toy.sites(data, tmp_path)))
    sim, then = toy.stacked(data, one), toy.stacked(data, one, rounds.handed_out)
    states_agree(data, sim, rounds, tmp_path)
    scores_agree(sim, rounds, lambda stage: stage in SEEN)
    scores_agree(then, rounds, lambda stage: stage not in SEEN)  # the newcomer comes to the server of the chosen round
    for i, name in enumerate(names):  # the model on a site's disk is the row that the stacked engine deploys for it
        model, _ = checkpoint.load(tmp_path / name / one.experiment / "model.safetensors")
        for key, t in then.layout.views(then.row(i)).items():
            torch.testing.assert_close(model[key], t, **CLOSE)
    assert not (tmp_path / "zurich" / one.experiment / "state.safetensors").exists()  # it never trained
    again = 4 * (rounds.handed_out is not None)  # which round it is, known once all have been scored
    assert line.messages == 4 * (1 + 3 + 1) + 2 + again  # introductions, three rounds, the end; the newcomer's two


@pytest.mark.parametrize("method", METHODS)
def test_half_takes_part_and_the_model_has_batch_statistics(tmp_path, method):
    data = toy.federation(shape=(1, 28))
    one = toy.job(data, method, NORMED, participation=0.5)
    (rounds,), _ = toy.run(data, [one], tmp_path)
    sim = toy.stacked(data, one)
    assert len(set(sim.selected(0)) | set(sim.selected(1)) | set(sim.selected(2))) > len(sim.selected(0)) == 2
    states_agree(data, sim, rounds, tmp_path)
    scores_agree(sim, rounds)


@pytest.mark.parametrize("policy", ["local", "server"])
@pytest.mark.parametrize("method", ["fedavg", "ditto", "ifca"])
def test_policies_of_running_statistics(tmp_path, method, policy):
    """Own buffers stay at the site, one set for each model of `ifca`; the server's stay as they started."""
    data = toy.federation(shape=(1, 28))
    one = toy.job(data, method, NORMED, participation=0.5, buffers=policy)
    (rounds,), _ = toy.run(data, [one], tmp_path)
    sim = toy.stacked(data, one)
    assert (sim.buffers is not None) == (policy == "local")
    states_agree(data, sim, rounds, tmp_path)
    scores_agree(sim, rounds)


@pytest.mark.parametrize("optimizer", ["sgd(momentum=0.9,keep=true)", "adam(eps=0.1,keep=true)", "adamw(eps=0.1)"])
@pytest.mark.parametrize("method", ["fedavg", "ditto", "fedrep", "fedfew:models=2"])
def test_a_site_keeps_what_its_optimizer_remembers(tmp_path, method, optimizer):
    """On its own disk, from round to round, as the stacked engine keeps it in a table; half of them a round."""
    data = toy.federation()
    one = toy.job(data, method, participation=0.5, optimizer=optimizer, clip=1.0, rounds=5)
    (rounds,), _ = toy.run(data, [one], tmp_path)
    sim = toy.stacked(data, one)
    states_agree(data, sim, rounds, tmp_path)
    assert ("keep" in optimizer) == any(name.startswith("memory.") for name in sim.snapshot()[0])


@pytest.mark.parametrize("method", ["scaffold", "ditto", "apfl", "feddyn", "fedper", "fedavg+median"])
def test_what_was_trained_but_never_arrived_is_taken_back(tmp_path, method):
    """A site whose answer is lost is, for both sides, a client that did not take part: a drop-out of the stacked run.

    SCAFFOLD's server adds up the changes of the clients' controls: one that moved alone would be wrong for good.
    """
    lost = {0: {"lyon"}, 1: {"lyon", "turin"}, 2: {"berlin"}, 4: {"oslo"}}

    class Leaky(Loopback):
        def deliver(self, name, parcels):
            answer = super().deliver(name, parcels)
            gone = name in lost.get(parcels[0].meta["round"], ()) and "local" in parcels[0].meta.get("do", ())
            return answer if not gone else toy.Failure("lost", "the answer never arrived.")

    data = toy.federation()
    one = toy.job(data, method, rounds=5, experiment="leaky")
    (rounds,), _ = toy.run(data, [one], tmp_path, Leaky(toy.sites(data, tmp_path)))
    sim = toy.stacked(data, one, rounds=0)
    sim._answering = lambda selected, t: np.array([i for i in selected if data.names[i] not in lost.get(t, ())])
    for _ in range(5):
        sim.round()
    states_agree(data, sim, rounds, tmp_path)
    assert [r["participants"] for r in rounds.rounds] == [3, 2, 3, 4, 3]
    assert [r["report"].get("failures", {}).get("lost", 0) for r in rounds.rounds] == [1, 2, 1, 0, 1]
