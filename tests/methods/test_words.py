"""Words that several methods share: shares, averages model by model, rows made of parts, inner steps by name."""

from __future__ import annotations

import pytest
import torch
from by_hand import assert_close, tensor

from coterie.contract.layout import Entry, Layout
from coterie.contract.method import Uploads
from coterie.methods.fedavg import FedAvg

FLAT = Layout((Entry("w", (3,), 0, "parameter", "base", True),))
N = torch.tensor([2, 6, 1, 3])
UPLOADS = Uploads({}, torch.arange(4), N, N.double() / 12, 9, 0, FLAT)
ROWS = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_shares_in_clusters_are_those_of_the_clusters_samples():
    """Clients 0 and 3 hold 2 and 3 samples of cluster 2's 5; cluster 1 is empty and has no weights, not 0 / 0."""
    cluster = torch.tensor([2, 0, 0, 2])
    assert_close(UPLOADS.share_in(cluster, 3), tensor([[0, 0, 0.4], [6 / 7, 0, 0], [1 / 7, 0, 0], [0, 0, 0.6]]))
    alike = UPLOADS.share_in(cluster, 3, weighted=False)
    assert_close(alike, tensor([[0, 0, 0.5], [0.5, 0, 0], [0.5, 0, 0], [0, 0, 0.5]]))
    assert UPLOADS.even.tolist() == [0.25] * 4


def test_averages_model_by_model():
    """Weights [m, K] with updates for all models alike or one for each; a model nobody weighs stays."""
    weights = tensor([[1, 0.5, 0], [0, 0.5, 0], [0, 1, 0], [1, 0, 0]])
    expected = torch.stack([ROWS[0] + ROWS[3], (ROWS[0] + ROWS[1]) / 2 + ROWS[2], 0 * ROWS[0]])
    assert_close(FedAvg().aggregate(ROWS, weights, FLAT), expected)
    own = torch.stack([ROWS, 2 * ROWS, 3 * ROWS], 1)
    assert_close(FedAvg().aggregate(own, weights, FLAT), expected * tensor([[1], [2], [3]]))


def test_recentred_models_are_the_means_of_their_clients():
    centres = torch.ones(2, 3, dtype=torch.float64)
    weights = tensor([[0.5, 0], [0.5, 0], [0, 0], [0, 0]])
    assert_close(FedAvg().recentre(centres, ROWS, weights, FLAT), torch.stack([ROWS[:2].mean(0), centres[1]]))


@pytest.mark.parametrize("training", [{}, {"participation": 0.5}, {"dropouts": 0.4, "seed": 3}])
def test_shares_are_those_of_the_clients_that_answered(tiny, training):
    """p_i = n_i / n over them, so they sum to 1."""
    caught = []

    class Spy(FedAvg):
        name = "spy"

        def merge(self, server, up):
            caught.append(up)
            return super().merge(server, up)

    sim = tiny.simulation(Spy(), data=tiny.federation(sizes=(6, 3, 1, 5, 4, 9)), **training)
    for _ in range(3):
        sim.round()
    for up in caught:
        assert up.share.sum().item() == pytest.approx(1, abs=1e-15)
        assert_close(up.share, up.n.double() / up.n.sum())
        assert up.n.tolist() == [[6, 3, 1, 5, 4, 9][i] for i in up.ids.tolist()]


def test_rows_made_of_parts(tiny):
    """The parts named are put in, in their order; the rest is the initial model."""
    sim = tiny.simulation("fedavg")
    cohort, layout = tiny.cohort(sim), sim.layout
    assert torch.equal(cohort.assemble({}), sim.init.row.expand(4, -1))
    head = torch.arange(4.0, dtype=torch.float64)[:, None].expand(-1, 18)
    rows = cohort.assemble({"head": head, "2.bias": head.new_tensor(7.0)})
    assert torch.equal(layout.cut(rows, "~head"), layout.cut(sim.init.row, "~head").expand(4, -1))
    assert torch.equal(layout.cut(rows, "2.weight"), head[:, :15])
    assert (layout.cut(rows, "2.bias") == 7).all()


def test_label_distributions(tiny):
    sim = tiny.simulation("fedavg")
    for i, found in enumerate(tiny.cohort(sim).labels):
        assert_close(found, torch.bincount(sim.federation.client(i)[1], minlength=3).double() / tiny.SIZES[i])


def test_the_descent_of_one_full_batch_step_is_the_gradient(tiny):
    """(theta - (theta - lr g)) / lr = g; running statistics have none."""
    sim = tiny.simulation("fedavg", "bn", batch=0, data=tiny.federation(sizes=(4, 6, 5)))
    cohort, start = tiny.cohort(sim), sim.init.row.expand(3, -1)
    slope = cohort.descent(start, cohort.train(start))
    by_hand = torch.stack([(start[i] - tiny.sgd(sim, i, start[i], 1)[0]) / 0.1 for i in range(3)])
    assert_close(sim.layout.cut(slope, "parameters"), sim.layout.cut(by_hand, "parameters"))
    assert (sim.layout.cut(slope, "buffers") == 0).all()


def test_an_inner_step_takes_and_gives_plain_names(tiny):
    """A dictionary in, a dictionary out: the sum of the samples a client has seen is n in one epoch."""
    sim = tiny.simulation("fedavg")

    def count(net, s, batch, given):
        return {"seen": s.seen + batch.weight.sum()}

    end = tiny.cohort(sim).loop(count, {"seen": torch.zeros(4, dtype=torch.float64)})
    assert end["seen"].tolist() == list(tiny.SIZES)
