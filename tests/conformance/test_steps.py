"""Steps that are taken before a model is used are counted, whoever takes them, and wherever: they are training."""

from __future__ import annotations

import pytest

from coterie import registry

BATCH, EACH = 3, 10  # samples of a batch, and of every client
EPOCH = -(-EACH // BATCH)
NEWCOMER = {
    "cfl:relative=false,eps1=100,eps2=0,split_after=0,explained=none": None,  # an epoch for each split, see below
    "cwfedavg": EPOCH,  # FedAvg's model is trained to estimate the label shares
    "cwfedavg:distribution=true": 0,
    "fedala": 0,  # it has no model of its own to weigh against the shared one
    "fedavgft": EPOCH, "fedavgft:finetune_epochs=3": 3 * EPOCH,
    "fedbabu": 5 * EPOCH,
    "fedbn": 0,  # there is no BatchNorm to fit
    "fedper": EPOCH, "fedrep": 5 * EPOCH, "lgfedavg": EPOCH,
    "fedsoft": EPOCH,
    "fesem": EPOCH,  # the mean model is trained to find the nearest centre
    "perfedavg": 1, "perfedavg:adapt_steps=none": EPOCH,
    "pfedhn": 20, "pfedhn:adapt=7": 7,  # full gradient steps of the embedding
    "pfedhn:pc": 20 + EPOCH,
    "pfedme": 5,
}
"""Steps before a newcomer of ten samples uses a model, after three rounds; every other method takes none."""


def evaluated(tiny, method, rounds=3, **options):
    data = tiny.federation(sizes=(EACH,) * 5, unseen=1)
    sim = tiny.simulation(method, data=data, **options)
    for _ in range(rounds):
        sim.round()
    return sim, sim.evaluate().stages


@pytest.mark.parametrize("method", sorted({*registry.methods(), *NEWCOMER}))
def test_a_newcomers_steps_are_counted_from_its_introduction(tiny, method):
    sim, stages = evaluated(tiny, method)
    expected = NEWCOMER.get(method, 0)
    if expected is None:
        assert len(sim.server.state.splits) > 0
        expected = EPOCH * len(sim.server.state.splits)
    assert stages["unseen_served"].steps.tolist() == [expected]
    assert stages["unseen_adapted"].steps.tolist() == [expected + EPOCH]


def test_drawing_an_embedding_is_no_training(tiny):
    """Before the first round a newcomer of pFedHN draws its embedding as everybody does."""
    assert evaluated(tiny, "pfedhn", rounds=0)[1]["unseen_served"].steps.tolist() == [0]


@pytest.mark.parametrize("engine", ["stacked", "reference"])
def test_fedala_counts_the_steps_of_its_weights(tiny, engine):
    """A pass over 8 of 10 samples in batches of 3 takes 3 steps. From a client's second use on there is one pass: the
    first goes on until ten losses agree, ten passes at least and a hundred at most. Before it has trained there is
    nothing to weigh: own and shared model are the same."""
    assert evaluated(tiny, "fedala", rounds=0, engine=engine)[1]["served"].steps.tolist() == [0] * 4
    assert evaluated(tiny, "fedala", engine=engine)[1]["served"].steps.tolist() == [3] * 4
    young = evaluated(tiny, "fedala", rounds=1, engine=engine)[1]["served"].steps
    assert ((young >= 30) & (young <= 300) & (young % 3 == 0)).all()
