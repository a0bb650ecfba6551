"""The reference engine computes what the stacked one does; every method of the conformance suite is compared too."""

import numpy as np
import pytest
import torch
from torch import nn

from coterie.engine import reference
from coterie.errors import CoterieError


def pair(tiny, model="mlp", **options):
    return [tiny.simulation(model=model, engine=engine, **options) for engine in ("reference", "stack")]


@pytest.mark.parametrize("model", ["mlp", "dropout", "bn", "words", "regression"])
@pytest.mark.parametrize("models", [None, 2])
def test_plain_training_and_its_running_loss(tiny, model, models):
    """Stragglers, an incomplete batch, a client with one sample, two epochs, K models with orders of their own."""
    found = []
    for sim in pair(tiny, model):
        cohort = tiny.cohort(sim, pace=np.array([0.5, 1.0, 0.01, 0.34]))
        found.append(cohort.train_watched(tiny.rows(sim, models), epochs=2, distinct=models is not None))
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("model", ["mlp", "bn"])
def test_parts_corrections_and_bounds(tiny, model):
    """`correct` meets the rows of `given` cut to the tensor at hand; a part trains alone; a step is at most `clip`."""
    found = []
    for sim in pair(tiny, model):
        start = tiny.rows(sim)
        given = {"anchor": start.flip(0), "pull": torch.arange(4.0, dtype=torch.float64)}
        cohort = tiny.cohort(sim)
        found.append([
            cohort.train(start, given, correct=lambda g, v, near: g + near.pull * (v - near.anchor), clip=0.5),
            cohort.train(start, part="head", lr=0.3), cohort.train(start, steps=5, clip=1e-3),
        ])
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-11)


def descend(net, state, batches, given):
    """Two streams, and noise of the step's own."""
    one, other = batches
    pull = net.grad(state.row, one) + 0.5 * net.grad(state.row, other) + 0.01 * net.uniform(())
    return {"row": state.row - given.lr * pull, "seen": state.seen + one.weight.sum()}


@pytest.mark.parametrize("model", ["mlp", "dropout", "bn"])
def test_inner_steps_with_streams_fractions_and_an_end_of_their_own(tiny, model):
    """The clients that have seen ten samples after a pass stop; the steps that each took are told."""
    found = []
    for sim in pair(tiny, model):
        cohort = tiny.cohort(sim)
        state = {"row": tiny.rows(sim), "seen": torch.zeros(4, dtype=torch.float64)}
        first = cohort.loop(descend, state, epochs=3, streams=2, until=lambda s: s.seen >= 10)
        second = cohort.loop(descend, state, epochs=2, streams=2, fraction=0.6)
        found.append([first["row"], first["seen"], second["row"], second["seen"], torch.from_numpy(cohort.spent)])
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-11)


def per_class(net, row, batch, given):
    one_hot = nn.functional.one_hot(batch.y, 3).to(batch.weight) * batch.weight[:, None]
    return {"outputs": one_hot.T @ net(row, batch.x), "count": one_hot.sum(0) * given.scale}


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_sums_over_a_split(tiny, split):
    """Several batches a client, two models each, and a client that has no sample: its sums are 0."""
    found = []
    for sim in pair(tiny):
        sim.engine.evaluation_batch = 4
        cohort, rows = tiny.cohort(sim), tiny.rows(sim, 2)
        sums = cohort.total(per_class, rows, {"scale": torch.arange(4.0, dtype=torch.float64)}, split)
        found.append([sums, cohort.measure(rows, split), cohort.grad(rows, split=split)])
        if split == "val":
            assert not sums["outputs"][2].any()
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-11)


def test_it_is_chosen_by_name_recorded_and_kept(tiny):
    sim = tiny.simulation(engine="reference")
    assert isinstance(sim.engine, reference.Reference)
    assert sim.choices["engine"] == "reference"
    assert isinstance(tiny.simulation(choices=sim.choices).engine, reference.Reference)


def test_a_model_that_does_not_fit_the_data_is_refused_before_the_first_round(tiny):
    with pytest.raises(CoterieError, match="cannot take the data"):
        tiny.simulation(model=lambda: nn.Linear(7, 3), engine="reference")
    with pytest.raises(CoterieError, match="gives outputs of shape"):
        tiny.simulation(model=lambda: nn.Linear(4, 2), engine="reference")


def test_a_function_that_closes_over_a_tensor_is_refused(tiny):
    """As on the stacked engine: what runs here must run there."""
    sim, held = tiny.simulation(engine="reference"), torch.ones(())
    with pytest.raises(CoterieError, match="closes over a tensor"):
        tiny.cohort(sim).train(tiny.rows(sim), objective=lambda net, row, batch, given: held * net.loss(row, batch))
