"""Every registered method gives a newcomer a model, the one that the evaluator gives an unseen client."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from by_hand import adapter_for

import coterie
from coterie import registry
from coterie.models import model
from coterie.running.saved import Saved
from coterie.serving import newcomers
from coterie.serving.newcomers import Desk, personalize

METHODS = sorted(registry.methods())
NET = "mlp:hidden=5"
RULES_WITHOUT_DATA = (  # what these give a newcomer depends on the server alone, so nobody has to bring labels for it
    "apfl", "ditto", "fedamp", "fedavg", "fedcp", "feddyn", "fedmtl", "fednh", "fedprox", "fedrod", "feduv", "local",
    "moon", "scaffold",
)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """Newcomers are computed where there is a GPU on it; the simulation they are compared with is not."""
    monkeypatch.setattr(newcomers, "anywhere", lambda training: training)


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """method -> a run of two rounds whose fifth client was unseen, as its folder holds it; and its simulation."""
    found = {}

    def build(method):
        if method not in found:
            data = tiny.federation(sizes=(7, 12, 4, 5, 12), unseen=1)
            folder = tmp_path_factory.mktemp(method)
            result = coterie.run(
                method, model("mlp", (tiny.FEATURES,), tiny.CLASSES, hidden=5), data, folder=folder, rounds=2, batch=3,
                lr=0.1, precision="float64", device="cpu", epochs=2, adapter=adapter_for(method),
            )
            found[method] = Saved.open(folder, NET), result.simulation
        return found[method]

    return build


def alone(sim, data, client):
    """One client of a federation as a federation of its own, splits and name kept."""
    one = [[data.client(client, split)] for split in ("train", "test", "val")]
    return coterie.Federation.from_splits(*one, classes=data.classes, names=[data.names[client]])


@pytest.mark.parametrize("method", METHODS)
def test_a_newcomer_gets_what_the_evaluator_gives_an_unseen_client(trained, method):
    """The same data under the same name: the row of the simulation, before and after adaptation.

    The simulation has all clients at hand, the newcomer's desk only what the run's folder holds.
    """
    saved, sim = trained(method)
    desk = Desk(saved, when="last")  # where the simulation is
    clients = desk.clients(alone(sim, sim.federation, 4))
    came, cohort = desk.arrive(clients)
    torch.testing.assert_close(came.rows[0], sim.row(4), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(cohort.train(came.rows)[0], sim.row(4, adapted=True), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_personalize_gives_a_model_and_an_estimate(trained, method):
    saved, sim = trained(method)
    x, y = sim.federation.client(4)
    found = personalize(saved, (x, y), future=4)
    assert found.row.shape == (sim.layout.size,)
    assert torch.isfinite(found.row).all()
    low, high = found.estimate.interval
    assert found.estimate.n == len(x) == 12
    assert 0 <= low <= found.estimate.value <= high <= 1  # of 4 samples: ends are quarters, wider than the estimate
    assert registry.methods()[method].newcomer in found.why[0]


@pytest.mark.parametrize("method", METHODS)
def test_without_labels_there_is_a_fallback(trained, method):
    """Where the method's rule looks at no data, the fallback is what the rule gives."""
    saved, sim = trained(method)
    found = personalize(saved, None, when="last")
    assert found.fallback
    assert found.row.shape == (sim.layout.size,)
    assert torch.isfinite(found.row).all()
    if method in RULES_WITHOUT_DATA:
        torch.testing.assert_close(found.row, sim.row(4), rtol=1e-12, atol=1e-12)
    elif method not in ("fedbabu", "fedper", "fedrep", "fedbn", "lgfedavg"):  # parts that never left their clients
        assert np.abs((found.row - sim.init.row).numpy()).max() > 1e-6, "the untrained model"
