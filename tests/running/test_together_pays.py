"""Runs are computed together where that is faster: small models, in a stack, as much as memory holds."""

import numpy as np

import coterie
from coterie import models
from coterie.methods.fedavg import FedAvg
from coterie.running import together_pays
from coterie.running.simulation import Simulation
from coterie.running.training import Training


def test_the_work_of_a_step_is_counted(tiny):
    """linear 4 -> 3 on 4 clients, batches of 3: forward 2 * 4 * 3 FLOP a sample, backward twice that; but a weight
    (15 with the biases) costs at least 6 a sample. Two models a client double it."""
    one = tiny.simulation("fedavg", "linear")
    assert together_pays.step_flop(one) == 4 * 3 * max(3 * 2 * 4 * 3, 6 * 15)
    assert together_pays.step_flop(tiny.simulation("fedfew:models=2", "linear")) == 2 * together_pays.step_flop(one)
    half = tiny.simulation("fedavg", "linear", participation=0.5)
    assert together_pays.step_flop(half) == together_pays.step_flop(one) / 2


def test_small_models_are_joined_and_large_ones_are_not(tiny, monkeypatch):
    """The limit decides, and `together` decides before it; a model that is not stacked has nothing to gain."""
    sim = tiny.simulation()
    assert together_pays.pays(sim)[0]
    monkeypatch.setitem(together_pays.PAYS, "cpu", together_pays.step_flop(sim) - 1)
    wanted, reason = together_pays.pays(sim)
    assert not wanted
    assert "more than" in reason
    assert together_pays.pays(tiny.simulation(together="on")) == (True, "together=on")
    monkeypatch.setitem(together_pays.PAYS, "cpu", 1e9)
    assert together_pays.pays(tiny.simulation(together="off")) == (False, "together=off")
    assert together_pays.pays(tiny.simulation(engine="loop")) == (False, "the model is not stacked")


def test_a_cnn_on_a_cpu_is_not_joined():
    """However little there is to compute: grouped convolutions are no faster than single ones there."""
    rng = np.random.default_rng(0)
    data = [(rng.standard_normal((20, 1, 16, 16)).astype(np.float32), rng.integers(0, 10, 20))]
    federation = coterie.Federation.from_clients(data)
    simulation = Simulation(FedAvg(), models.model("cnn", (1, 16, 16), 10), federation, Training(device="cpu"))
    assert together_pays.step_flop(simulation) < together_pays.PAYS["cpu"]
    assert together_pays.pays(simulation) == (False, "convolutions on a CPU")
