"""CFL: its split by hand, what splits and what does not, and what an update that is not finite does."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from by_hand import MODELS, assert_close, rounds, tensor
from torch import nn

from coterie import registry
from coterie.contract.algebra import bipartition, cosines, told_apart
from coterie.contract.method import Uploads
from coterie.data import Federation
from coterie.errors import CoterieError
from coterie.methods.cfl import CFL, Tree
from coterie.running.simulation import Simulation
from coterie.running.training import Training

AT_ONCE = {"relative": False, "eps1": 0.1, "eps2": 0.9, "split_after": 0}
"""Norms of updates are 1 and of means 0 below: a cluster like that may split in the first round."""


def uploads(sim, ids, t=0, **tensors):
    """What the server would see of these clients in round t."""
    ids = torch.tensor(list(ids))
    n = torch.as_tensor(sim.federation.sizes("train"))[ids].double()
    return Uploads(tensors, ids, n, n / n.sum(), sim.population, t, sim.layout)


def directed(sim, directions):
    """Updates along these vectors, `[clients, columns of the first axes]`."""
    update = torch.zeros(len(directions), sim.layout.size, dtype=torch.float64)
    update[:, : len(directions[0])] = tensor(directions)
    return update


def equal_clients(tiny, count, method):
    return tiny.simulation(method, data=tiny.federation(sizes=(3,) * count))


# -- the rule, by hand ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_cfl_that_never_splits_is_fedavg(tiny, model):
    """eps2 = inf: nobody moves as far, though all else allows a split from the first round on."""
    never = "cfl:eps1=100,eps2=inf,split_after=0,explained=none"
    one, two = (rounds(tiny.simulation(m, model), 4) for m in (never, "fedavg"))
    assert_close(one.server.state.rows, two.server.state.row[None])
    assert_close(torch.stack([one.row(i) for i in range(4)]), torch.stack([two.row(i) for i in range(4)]))


def test_rounds_that_nobody_answered_leave_the_unit_to_the_first_that_somebody_does(tiny):
    """Thresholds are fractions of early mean updates. Round 0 moved nothing (all updates were NaN), and `split_after=0`
    looks at no later one: without a unit no comparison would ever be true, and the run FedAvg without a word.

    Two opposite pairs: their mean is 0 in a round whose longest update is 1; the unit is then that of round 1, 1/2.
    """
    sim = equal_clients(tiny, 4, "cfl:split_after=0,eps1=0.5,eps2=0.9,explained=none")
    none = directed(sim, [[1.0, 0], [1, 0], [-1, 0], [-1, 0]]) * torch.nan
    state = sim.method.merge(sim.server.state, uploads(sim, range(4), 0, update=none))
    assert state.early.tolist() == [0, 0]
    state = replace(state, rows=sim.server.state.rows)
    state = sim.method.merge(state, uploads(sim, range(4), 1, update=directed(sim, [[1.0, 0], [1, 0], [0, 0], [0, 0]])))
    assert state.early.tolist() == [0.5, 1]
    opposed = directed(sim, [[1.0, 0], [1, 0], [-1, 0], [-1, 0]])
    state = sim.method.merge(state, uploads(sim, range(4), 2, update=opposed))
    assert len(state.rows) == 2


def test_unweighted_cfl_is_the_plain_mean(tiny):
    sim = tiny.simulation("cfl:eps2=inf,weighted=false")
    ends = torch.stack([tiny.sgd(sim, i, sim.init.row, tiny.steps_of(n, 3))[0] for i, n in enumerate(tiny.SIZES)])
    sim.round()
    assert_close(sim.server.state.rows[0], ends.mean(0))


def test_the_halves_average_the_round_of_the_split(tiny):
    """Delta = +-u: the mean stands still, all move. Each half takes its own mean at once, theta + u and theta - u."""
    sim = equal_clients(tiny, 6, CFL(**AT_ONCE))
    update = directed(sim, [[1.0], [-1.0], [-1.0], [1.0], [-1.0], [1.0]])
    tree = sim.method.merge(sim.server.state, uploads(sim, range(6), update=update))
    assert tree.cluster.tolist() == [0, 1, 1, 0, 1, 0]
    assert_close(tree.rows, torch.stack([sim.init.row + update[0], sim.init.row + update[1]]))
    assert_close(tree.splits, sim.init.row[None])


def test_cfl_numbers_clients_rightly_at_the_second_split(tiny):
    """Leaf {1, 2, 4, 6} splits into {1, 4} and {2, 6}; positions inside the leaf are not client numbers."""
    sim = equal_clients(tiny, 7, CFL(**AT_ONCE | {"eps1": 0.5}))
    first = directed(sim, [[1, 0], [-1, 0.1], [-1, -0.1], [1, 0], [-1, 0.1], [1, 0], [-1, -0.1]])
    tree = sim.method.merge(sim.server.state, uploads(sim, range(7), update=first))
    assert tree.cluster.tolist() == [0, 1, 1, 0, 1, 0, 1]
    start = tree.rows[1].clone()
    second = directed(sim, [[1, 0], [0, 1], [0, -1], [1, 0], [0, 1], [1, 0], [0, -1]])
    tree = sim.method.merge(tree, uploads(sim, range(7), update=second))
    assert tree.cluster.tolist() == [0, 1, 2, 0, 1, 0, 2]
    assert tree.parent.tolist() == [0, 1]
    assert torch.bincount(tree.cluster).sum() == 7  # a partition: everybody is in one leaf
    assert_close(tree.rows[1:], torch.stack([start + second[1], start + second[2]]))
    assert_close(tree.splits, torch.stack([sim.init.row, start]))


@pytest.mark.parametrize(("options", "split"), [
    ({}, True), ({"split_after": 1}, False), ({"smallest": 6}, False), ({"eps1": 0.0}, False), ({"eps2": 1.0}, False),
    ({"eps2": 1.1}, False), ({"gamma": 0.9}, True), ({"gamma": 1.01}, False), ({"explained": 0.59}, True),
    ({"explained": 0.6}, False), ({"explained": None}, True),
])
def test_cfl_conditions(tiny, options, split):
    """Updates +-u of norm 1 and mean 0, cosine across -1: allowed while -1 < 1 - 2 gamma^2, i.e. gamma < 1. The halves
    explain all of the spread, 1 > explained + 2 / (6 - 1)."""
    sim = equal_clients(tiny, 6, CFL(**AT_ONCE | options))
    update = directed(sim, [[1.0], [-1.0]] * 3)
    tree = sim.method.merge(sim.server.state, uploads(sim, range(6), update=update))
    assert (len(tree.rows) == 2) is split


@pytest.mark.parametrize(("t", "eps1", "eps2", "split"), [
    (1, 0.4, 1.9, False), (2, 0.4, 1.9, True), (2, 0.29, 1.9, False), (2, 0.31, 1.9, True), (2, 0.4, 2.2, False),
])
def test_thresholds_are_fractions_of_the_first_rounds_mean_updates(tiny, t, eps1, eps2, split):
    """Two rounds of mean updates 0.4 and 0.6 long, by clients that move 3: the unit is 0.5. Then the mean is 0.15 long,
    0.3 units, and the longest update sqrt(1 + 0.15^2), 2.02 units; nothing is split before `split_after`."""
    sim = equal_clients(tiny, 6, CFL(eps1=eps1, eps2=eps2, split_after=2))
    tree = sim.server.state
    for number, mean in enumerate((0.4, 0.6)[:t]):
        update = directed(sim, [[3.0, mean], [-3.0, mean]] * 3)
        tree = sim.method.merge(tree, uploads(sim, range(6), number, update=update))
        assert len(tree.rows) == 1
    update = directed(sim, [[1.0, 0.15], [-1.0, 0.15]] * 3)
    tree = sim.method.merge(tree, uploads(sim, range(6), t, update=update))
    assert (len(tree.rows) == 2) is split


def test_cfl_does_not_split_clients_that_agree(tiny):
    sim = equal_clients(tiny, 5, CFL(eps1=2.0, eps2=0.0, relative=False, split_after=0, explained=None))
    update = 0.1 * torch.randn(1, sim.layout.size, dtype=torch.float64).repeat(5, 1)
    assert len(sim.method.merge(sim.server.state, uploads(sim, range(5), update=update)).rows) == 1


def test_cfl_places_the_absent_by_their_last_update(tiny):
    """Clients 4 and 5 moved in the round before; client 6 never did, and stays where it is."""
    sim = equal_clients(tiny, 7, CFL(**AT_ONCE | {"split_after": 1}))
    still = directed(sim, [[1.0], [-1.0], [1.0], [-1.0], [1.0], [-1.0]])
    tree = sim.method.merge(sim.server.state, uploads(sim, [4, 5], 0, update=still[4:]))
    tree = sim.method.merge(tree, uploads(sim, [0, 1, 2, 3], 1, update=still[:4]))
    assert tree.cluster.tolist() == [0, 1, 0, 1, 0, 1, 0]


def test_told_apart_is_the_share_of_variance_between_the_halves():
    """As computed from the vectors themselves; 1 for two points, 1 / (m - 1) for any cut of orthogonal ones."""
    x = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    right = torch.tensor([True, False, False, True, True, False, False])
    within = sum((x[half] - x[half].mean(0)).square().sum() for half in (right, ~right))
    assert told_apart(x @ x.T, right) == pytest.approx(1 - float(within / (x - x.mean(0)).square().sum()))
    assert told_apart(torch.eye(7, dtype=torch.float64), right) == pytest.approx(1 / 6)
    opposed = tensor([[1, -1], [-1, 1]])
    assert told_apart(opposed, torch.tensor([False, True])) == pytest.approx(1)
    assert told_apart(torch.ones(3, 3, dtype=torch.float64), right[:3]) == 0


# -- updates that are not finite --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_update_that_is_not_finite_does_what_it_does_to_fedavg_and_no_more(tiny, bad):
    """Two leaves; client 0 of the first sends `bad` numbers. Its leaf's mean is FedAvg's, not finite, and not split;
    the other leaf splits and moves as if nothing had happened; client 0 keeps its last finite update."""
    sim = equal_clients(tiny, 12, CFL(**AT_ONCE | {"eps1": 0.5}))
    apart = directed(sim, [[1.0, 0.0]] * 6 + [[-1.0, 0.0]] * 6)
    tree = sim.method.merge(sim.server.state, uploads(sim, range(12), update=apart))
    assert tree.cluster.tolist() == [0] * 6 + [1] * 6
    update = directed(sim, [[0.0, 1.0], [0.0, -1.0]] * 6)
    clean = sim.method.merge(tree, uploads(sim, range(12), update=update))
    assert len(clean.rows) == 4
    update[0, 1] = bad
    hit = sim.method.merge(tree, uploads(sim, range(12), update=update))
    assert len(hit.rows) == 3
    assert not torch.isfinite(hit.rows[0]).all()
    assert hit.cluster[6:].tolist() == [1, 2] * 3
    assert_close(hit.rows[1:], clean.rows[[1, 3]] if clean.parent[1] == 0 else clean.rows[[1, 2]])
    assert torch.equal(hit.moves[0], apart[0])
    assert torch.isfinite(hit.early).all()


def test_one_such_client_under_a_robust_aggregator_neither_splits_nor_stops_a_split(tiny):
    """Multi-Krum leaves one client out, so means are finite: clients that agree stay together, opposed ones do not."""
    sim = equal_clients(tiny, 11, registry.method("cfl:relative=false,eps1=0.5,eps2=0.9,split_after=0+multikrum"))
    alike = directed(sim, [[0.3]] * 11)
    alike[3] = float("nan")
    tree = sim.method.merge(sim.server.state, uploads(sim, range(11), update=alike))
    assert (len(tree.rows), bool(torch.isfinite(tree.rows).all())) == (1, True)
    apart = directed(sim, [[1.0, 0.3], [-1.0, 0.3]] * 5 + [[0.0, 0.3]])
    apart[10] = float("nan")
    tree = sim.method.merge(tree, uploads(sim, range(11), update=apart))
    assert tree.cluster[:10].tolist() == [0, 1] * 5
    assert torch.isfinite(tree.rows).all()


# -- which clients split ----------------------------------------------------------------------------------------------


def population(kind, seed, clients=20, n=100, inputs=20, classes=4):
    """Clients that label x ~ N(0, 1) by one teacher, argmax V relu(W x); of two `opposed` groups the second calls class
    c + 1 what the first calls c."""
    rng = np.random.default_rng(seed)
    W, V = rng.standard_normal((inputs, 8)), rng.standard_normal((8, classes))
    V -= V.mean(0)
    pairs = []
    for i in range(clients):
        x = rng.standard_normal((n, inputs)).astype(np.float32)
        y = (np.maximum(x @ W, 0) @ V).argmax(1)
        pairs.append((x, (y + (i % 2 if kind == "opposed" else 0)) % classes))
    return Federation.from_clients(pairs, seed=seed)


def trained(method, data, seed, rounds_=60, **options):
    model = lambda: nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 4))  # noqa: E731
    usual = {"batch": 10, "lr": 0.1, "epochs": 5, "device": "cpu", "seed": seed, "rounds": rounds_}
    chosen = registry.method(method) if isinstance(method, str) else method
    return rounds(Simulation(chosen, model, data, Training(**usual | options)), rounds_)


def accuracy(sim):
    return float(sim.evaluate().stages["served"].test["accuracy"].mean())


@pytest.mark.parametrize("clients", [6, 20])
@pytest.mark.parametrize("seed", range(3))
def test_clients_with_data_of_one_kind_are_never_split(clients, seed):
    """60 rounds: one leaf, which is FedAvg's model; and by a margin: no cut told more than 0.8 of what it must."""
    data = population("iid", seed, clients)
    told = []

    class Watched(CFL):
        def merge(self, server, up):
            angles = cosines(up.layout.cut(up.update, "parameters"))
            told.append(told_apart(angles, bipartition(angles)[0]))
            return super().merge(server, up)

    sim = trained(Watched(), data, seed)
    assert len(sim.server.state.rows) == 1
    assert_close(sim.server.state.rows[0], trained("fedavg", data, seed).server.state.row, rtol=1e-3, atol=1e-4)
    assert max(told) < 0.8 * (CFL().explained + 2 / (clients - 1))


@pytest.mark.parametrize("seed", range(3))
def test_opposed_groups_are_split_and_served_better_than_by_fedavg(seed):
    """Two groups that call classes differently: two leaves, the groups, and far more right answers than one model."""
    data = population("opposed", seed)
    sim, one = (trained(method, data, seed) for method in ("cfl", "fedavg"))
    assert len(sim.server.state.rows) == 2
    assert sim.server.state.cluster.tolist() in ([0, 1] * 10, [1, 0] * 10)
    assert accuracy(sim) > accuracy(one) + 0.2


def test_the_random_start_does_not_split_anybody():
    """What went wrong: at the random start updates are long and the mean is short beside the longest of them."""
    sim = trained("cfl:split_after=0", population("iid", 0), 0, rounds_=5, epochs=1)
    assert len(sim.server.state.rows) == 1


# -- checkpoints of earlier versions ----------------------------------------------------------------------------------


def test_an_earlier_tree_can_be_used_but_not_grown(tiny):
    """Earlier versions kept the length of the longest update, `peak`, and split by it."""
    sim = equal_clients(tiny, 6, CFL())
    tensors = sim.server.state.tensors()
    del tensors["early"]
    old = Tree.of(tensors | {"peak": torch.tensor(1.0, dtype=torch.float64)})
    assert torch.equal(sim.method.send(old, torch.arange(6)).row.each, sim.init.row.expand(6, -1))
    with pytest.raises(CoterieError, match="begun by an earlier version, which split clusters by another rule"):
        sim.method.merge(old, uploads(sim, range(6), update=directed(sim, [[1.0]] * 6)))


@pytest.mark.parametrize(("clients", "leaves"), [(8, 1), (10, 2)])
def test_no_half_is_smaller_than_the_aggregator_needs(tiny, clients, leaves):
    """Krum needs 5: halves of 4 would never move again, for an aggregate of fewer is 0. With halves of 5 it splits."""
    sim = equal_clients(tiny, clients, "cfl+krum")
    moves = sim.layout.cut(directed(sim, [[1.0 if i % 2 else -1.0] for i in range(clients)]), "parameters")
    assert len(sim.method.split(replace(sim.server.state, moves=moves), 0).rows) == leaves


def test_a_leaf_with_too_few_answers_for_its_aggregator_does_not_stand_still(tiny):
    """Of 10 clients that move as one, and would be cut were they still, 3 answer: Krum's aggregate of 3 is 0."""
    sim = equal_clients(tiny, 10, "cfl+krum:faulty=1")
    method = replace(sim.method, **AT_ONCE, explained=None)
    opposed = directed(sim, [[1.0 if i % 2 else -1.0] for i in range(10)])
    tree = replace(sim.server.state, moves=sim.layout.cut(opposed, "parameters"))
    assert len(method.merge(tree, uploads(sim, range(3), update=opposed[:3])).rows) == 1
