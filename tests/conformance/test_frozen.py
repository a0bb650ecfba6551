"""Every method over a frozen body and under a frozen head: it runs alike on every engine, or says why not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from coterie import registry
from coterie.contract.patterns import partly
from coterie.errors import CoterieError

METHODS = sorted(name for name, cls in registry.methods().items() if not cls.adapters)  # these: test_adapted.py
WAYS = {
    "stack": {"engine": "stack"}, "stack, no prefix": {"engine": "stack", "prefix": "off"},
    "loop": {"engine": "loop"}, "loop, no prefix": {"engine": "loop", "prefix": "off"},
    "one client a wave": {"wave": 1}, "the usual choice": {},
}
SHARES_THE_BODY = {"fedbabu", "fedper", "fedrep"}
KEEPS_THE_BODY = {"lgfedavg", "fedbn"}  # the body's BatchNorm layers, that is
COMPARES_FEATURES = {"moon", "feduv", "fedpac"}  # which a frozen body does not move
WORKS_ON_THE_HEAD = {"cwfedavg", "fedala", "fedbabu", "fedcp", "fedpac", "fedper", "fedrep", "fedrod", "feduv",
                     "lgfedavg"}


def deep():
    return nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 5), nn.Dropout(0.3), nn.Tanh(), nn.Linear(5, 3)
    )


def found(tiny, method, model, **options):
    """The state after two rounds, and the losses of all stages then."""
    sim = tiny.simulation(method, model, data=tiny.federation(sizes=(7, 12, 1, 5, 6), unseen=1), **options)
    for _ in range(2):
        sim.round()
    state = tiny.state(sim)
    for stage, scores in sim.evaluate().stages.items():
        state |= {f"{stage}.test": torch.from_numpy(scores.test["loss"]),
                  f"{stage}.val": torch.from_numpy(np.nan_to_num(scores.val["loss"], nan=-1.0))}
    return sim, state


@pytest.mark.parametrize("train", ["head", "3+head"])
@pytest.mark.parametrize("method", METHODS)
def test_a_frozen_body(tiny, method, train):
    """Training what is left of the model gives the rows of the plain loop, with the prefix kept or computed anew."""
    model = partly(deep, train=train)
    refused = {"fedbn"} if train == "3+head" else SHARES_THE_BODY | KEEPS_THE_BODY | COMPARES_FEATURES
    if method in refused:
        with pytest.raises(CoterieError, match=f"what {method} .* is frozen; let some of it train"):
            tiny.simulation(method, model)
        return
    plain, expected = found(tiny, method, model, engine="reference")
    assert all(torch.isfinite(t).all() for t in expected.values() if t.is_floating_point())
    assert plain.layout.frozen
    for way, options in WAYS.items():
        sim, state = found(tiny, method, model, **options)
        tiny.close(state, expected, 1e-9)
        # Dropout comes after the layer '3', so what lies before it is kept in any case.
        kept = {"head": "3", "3+head": "2"}[train]
        assert sim.choices.get("prefix", {}).get("until") == (None if "no prefix" in way else kept)


@pytest.mark.parametrize("method", ["feduv:uniformity=0", "fedpac:lam=0"])
def test_a_term_on_features_that_is_off_asks_for_no_body(tiny, method):
    """What is left of these works on the head: the variance of scores, the combination of heads."""
    model = partly(deep, train="head")
    tiny.close(found(tiny, method, model, engine="stack")[1], found(tiny, method, model, engine="reference")[1], 1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_a_frozen_head(tiny, method):
    model = partly(deep, freeze="head")
    if method in WORKS_ON_THE_HEAD:
        with pytest.raises(CoterieError, match=r"is frozen; let"):
            tiny.simulation(method, model)
        return
    expected = found(tiny, method, model, engine="reference")[1]
    sim, state = found(tiny, method, model, engine="stack")
    tiny.close(state, expected, 1e-9)
    assert "prefix" not in sim.choices


LOOKS_AT_SAMPLES = {"pacfl"}
RUNS = sorted(set(METHODS) - SHARES_THE_BODY - KEEPS_THE_BODY - COMPARES_FEATURES - LOOKS_AT_SAMPLES)


@pytest.mark.parametrize("method", RUNS)
def test_it_is_the_method_on_the_bodys_features(tiny, method):
    """Freezing the body is training a linear model on what the body makes of the samples: the same rows."""
    body = nn.Sequential(nn.Linear(4, 6), nn.Tanh()).double()
    torch.manual_seed(3)
    head = nn.Linear(6, 3)
    whole = nn.Sequential(body, head)
    whole[0].requires_grad_(False)
    alone = nn.Sequential(nn.Identity(), head)
    data = tiny.federation()
    with torch.no_grad():
        features = type(data)(body(data.x), data.y, data.bounds, data.trained, data.classes, data.names, data.recipe)
    states = []
    for model, samples in ((whole, data), (alone, features)):
        sim = tiny.simulation(method, model, data=samples, seed=1)
        for _ in range(2):
            sim.round()
        states.append(tiny.state(sim))
    tiny.close(*states, 1e-9)


@pytest.mark.parametrize("aggregator", sorted(registry.aggregators()))
def test_aggregators_over_few_columns(tiny, aggregator):
    sizes, options = (7, 12, 3, 5, 6, 4, 8), {"device": "cpu"}
    if aggregator == "private":
        options |= {"sampling": "poisson"}
    sim = tiny.simulation(f"fedavg+{aggregator}", partly(deep, train="head"), tiny.federation(sizes=sizes), **options)
    for _ in range(2):
        sim.round()
    assert sim.server.state.row.shape == (18,)
    assert torch.isfinite(sim.server.state.row).all()


@pytest.mark.parametrize("buffers", ["average", "local", "server"])
def test_policies_of_buffers_leave_frozen_ones_alone(tiny, buffers):
    """One BatchNorm layer is frozen with its statistics, the other moves as the policy says, on every engine alike."""

    def model():
        module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        module[0].requires_grad_(False)
        module[1].requires_grad_(False)
        return module

    states = []
    for options in ({"engine": "stack"}, {"engine": "loop"}, {"engine": "reference"}):
        sim = tiny.simulation("fedavg", model, buffers=buffers, **options)
        assert [entry.name for entry in sim.layout.within("buffers")] == [
            "3.running_mean", "3.running_var", "3.num_batches_tracked"]
        for _ in range(2):
            sim.round()
        states.append(tiny.state(sim))
        frozen = sim.engine.net.whole[1]
        assert frozen.num_batches_tracked == 0
        assert torch.equal(frozen.running_mean, torch.zeros_like(frozen.running_mean))
    tiny.close(states[0], states[1], 1e-9)
    tiny.close(states[0], states[2], 1e-9)
