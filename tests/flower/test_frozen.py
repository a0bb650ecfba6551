"""Sites whose model is partly frozen: what they send is what a simulation sends, and their weights must be the same."""

from __future__ import annotations

from dataclasses import replace
from functools import wraps

import numpy as np
import pytest
import sites as toy
import torch
from torch import nn

from coterie import models
from coterie.errors import CoterieError
from coterie.flower import operator
from coterie.flower.loopback import Loopback
from coterie.flower.plan import Plan
from coterie.models.mlp import MLP
from coterie.serving.portable import read_model


@pytest.mark.parametrize("method", ["fedavg", "ditto", "fedfew"])
def test_sites_train_what_the_simulation_trains(tmp_path, method):
    data = toy.federation()
    one = replace(toy.job(data, method), train="head")
    (rounds,), _ = toy.run(data, [one], tmp_path)
    sim = toy.stacked(data, one)
    assert sim.layout.frozen
    for name, t in sim.server.state.tensors().items():
        torch.testing.assert_close(rounds.server.state.tensors()[name], t, rtol=1e-9, atol=1e-9)
    sent = {"fedavg": 1, "ditto": 1, "fedfew": 3}[method]
    assert rounds.rounds[0]["up"]["update"] == sent * 8 * (5 * 3 + 3)
    model = read_model(tmp_path / toy.NAMES[0] / one.experiment / "model.safetensors")
    used = toy.stacked(data, one, model.facts["round"])  # the chosen round
    torch.testing.assert_close(model.row, used.row(0), rtol=1e-9, atol=1e-9)
    body = dict(sim.init.module.named_parameters())["base.1.weight"]
    assert torch.equal(model.loaded().base[1].weight, body.to(model.row.dtype))


def test_sites_train_adapters(tmp_path):
    """The server's job names the adapters and sites build them: rows of 2 (4 + 5) numbers beside the head, which FedPer
    keeps; a site's model holds the body, too."""
    data = toy.federation()
    one = replace(toy.job(data, "fedper"), adapter="lora:rank=2")
    (rounds,), _ = toy.run(data, [one], tmp_path)
    sim = toy.stacked(data, one)
    torch.testing.assert_close(rounds.server.state.row, sim.server.state.row, rtol=1e-9, atol=1e-9)
    assert rounds.rounds[0]["up"] == {"update": 8 * 2 * (4 + 5)}
    model = read_model(tmp_path / toy.NAMES[0] / one.experiment / "model.safetensors")
    assert {name for name in model.loaded().state_dict() if ".lora." in name} == {"base.1.lora.A", "base.1.lora.B"}
    used = toy.stacked(data, one, model.facts["round"])
    torch.testing.assert_close(model.row, used.row(0), rtol=1e-9, atol=1e-9)


def test_buffers_are_listed_apart(tmp_path, monkeypatch):
    data = toy.federation()

    class Normed(MLP):
        def __init__(self, inputs, outputs):
            super().__init__(inputs, outputs, 5)
            self.base.append(nn.BatchNorm1d(5))

    monkeypatch.setitem(models.MODELS, "normed", Normed)
    one = toy.job(data, "fedavg", "normed")
    (rounds,), _ = toy.run(data, [one], tmp_path)
    assert rounds.rounds[0]["up"] == {"update": 8 * (25 + 10 + 18), "update buffers": 8 * 11}


def test_a_site_with_other_frozen_weights_is_refused(tmp_path):
    """lyon's copy of the model has another body; it says so, and the run does not begin."""
    data = toy.federation()
    one = replace(toy.job(data, "fedavg"), train="head")

    class Line(Loopback):
        def deliver(self, name, parcels):
            with pytest.MonkeyPatch.context() as patch:
                if name == "lyon":
                    drawn = MLP.__init__

                    @wraps(drawn)
                    def other(module, *given, **options):
                        drawn(module, *given, **options)
                        with torch.no_grad():
                            module.base[1].bias += 1

                    patch.setattr(MLP, "__init__", other)
                return super().deliver(name, parcels)

    line = Line(toy.sites(data, tmp_path))
    sentence = r"lyon: the frozen weights of the model mlp:hidden=5 are not those of the server .*; build it with the"
    with pytest.raises(CoterieError, match=sentence):
        toy.run(data, [one], tmp_path, line, policy=replace(toy.POLICY, wait=1, minimum=4))


def test_a_site_predicts_with_the_whole_model(tmp_path):
    data = toy.federation()
    one = replace(toy.job(data, "fedavg"), freeze="base")
    toy.run(data, [one], tmp_path)
    x, y = data.client(0, "test")
    np.savez(tmp_path / "x.npz", x=x.numpy(), y=y.numpy())
    path, accuracy = operator.predict(tmp_path / toy.NAMES[0], str(tmp_path / "x.npz"), tmp_path / "p.csv")
    sim = toy.stacked(data, one)
    expected = sim.evaluate().stages["served"].test["accuracy"][0]
    assert accuracy == pytest.approx(expected)
    assert path == tmp_path / "p.csv"


def test_a_servers_file_names_what_trains(tmp_path):
    (tmp_path / "server.toml").write_text('method = "fedavg"\nshape = [4]\nclasses = 3\ntrain = "head"\n')
    (job,) = Plan.configured(tmp_path / "server.toml").jobs
    assert job.train == "head"
    assert type(job).of(job.values()) == job
    assert "freeze" not in job.values()
    (tmp_path / "server.toml").write_text('method = "fedavg"\nshape = [4]\nclasses = 3\ntrain = "heed"\n')
    with pytest.raises(CoterieError, match="to train 'heed'; did you mean 'head'"):
        Plan.configured(tmp_path / "server.toml")
