"""What every registered method says of itself: its few models, clusters, whole models, and who gets what untold."""

from __future__ import annotations

import sys

import pytest
import torch

from coterie import registry
from coterie.contract.records import Record

METHODS = sorted(registry.methods())


@pytest.fixture(scope="module")
def trained(tiny):
    """method -> its simulation after two rounds, and what the server noted in the last of them."""
    found = {}

    def build(method):
        if method not in found:
            sim = tiny.simulation(method, data=tiny.federation(sizes=(7, 12, 4, 5, 12)), epochs=2)
            sim.round()
            found[method] = sim, sim.round().report
        return found[method]

    return build


@pytest.mark.parametrize("method", METHODS)
def test_a_method_with_few_models_reports_a_number_for_each(trained, method):
    """`few` and `by_model` go together: the report draws the one and weighs it by the other.

    A round reports how the models it began with were used, and clusters may be more after it.
    """
    sim, report = trained(method)
    rows = sim.method.few(sim.server.state)
    assert (rows is not None) == bool(sim.method.by_model)
    if rows is not None:
        assert rows.shape[1] == sim.layout.size
        used = report[sim.method.by_model]
        assert 1 <= len(used) <= len(rows)
        assert min(used) >= 0
        assert sum(used) > 0


@pytest.mark.parametrize("method", METHODS)
def test_without_labels_the_model_used_most_is_given(trained, method):
    """Of clusters the one with most members, counted here one by one; of few models the one of the largest number."""
    sim, report = trained(method)
    rows, clusters = sim.method.few(sim.server.state), sim.method.clusters(sim.server.state)
    if rows is None:
        assert clusters is None
        return
    members = report[sim.method.by_model]
    if clusters is not None:
        assert len(clusters) == sim.population
        members = [clusters.tolist().count(k) for k in range(len(rows))]
        assert sum(members) == sim.population
    most = members.index(max(members))
    assert torch.equal(sim.method.fallback(sim.server.state, sim.init, report), rows[most])


@pytest.mark.parametrize("method", METHODS)
def test_without_labels_and_without_a_round_there_is_a_model_as_well(tiny, method):
    """Nobody has answered, so there is no report: `fallback` gives a row that is finite, never an error."""
    sim = tiny.simulation(method)
    row = sim.method.fallback(sim.server.state, sim.init, {})
    assert row.shape == (sim.layout.size,)
    assert torch.isfinite(row).all()


@pytest.mark.parametrize("method", METHODS)
def test_whole_models_are_whole_and_trained(trained, method):
    """What is exported as the server's model K is a whole row that training moved, not the one it started from."""
    sim, _ = trained(method)
    rows = sim.method.whole(sim.server.state, sim.layout)
    if rows is None:
        return
    assert rows.ndim == 2
    assert rows.shape[1] == sim.layout.size
    first = sim.method.whole(sim.method.start(sim.init), sim.layout)
    moved = [not any(torch.equal(row, start) for start in first) for row in rows]
    assert any(moved), "the untrained model"


def test_what_a_hypernetwork_has_beside_it_is_no_model(trained):
    """pFedHN's server keeps a row for the clients' buffers; its other columns are those of the start for ever."""
    sim, _ = trained("pfedhn")
    assert torch.equal(sim.server.state.row, sim.init.row)
    assert sim.method.whole(sim.server.state, sim.layout) is None


def test_records_have_names_of_their_own():
    """A checkpoint names the class of a state; two classes of one name would be told apart by their place alone.

    Names of earlier versions may be shared, because the method of a run is known.
    """
    found = {}
    for cls in registry.methods().values():
        for name, value in vars(sys.modules[cls.__module__]).items():
            if isinstance(value, type) and issubclass(value, Record):
                assert found.setdefault(name, value) is value, name
                assert name not in value.former
    assert found["Mixture"].former == found["Membership"].former == found["Blended"].former == ("Own",)
    assert "former" not in found["Mixture"](torch.zeros(1), torch.zeros(1)).tensors()
