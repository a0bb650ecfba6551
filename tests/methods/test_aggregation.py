"""Personalized aggregation and clusters: the simpler methods, closed forms and golden numbers they must reduce to."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from by_hand import MODELS, assert_close, rounds, tensor
from torch import nn

import coterie
from coterie import registry
from coterie.contract.algebra import angles, chosen
from coterie.contract.method import Uploads
from coterie.contract.records import Models
from coterie.data import Federation
from coterie.errors import CoterieError
from coterie.methods.cwfedavg import CwFedAvg, class_weights, norms
from coterie.methods.fedala import FedALA, reweigh
from coterie.methods.fedamp import FedAMP, attention, cosine_attention
from coterie.methods.fedfomo import FedFomo, normalised, worth
from coterie.methods.fedsoft import FedSoft, shares
from coterie.methods.fesem import FeSEM
from coterie.methods.pacfl import PACFL
from coterie.methods.pfedhn import PFedHN


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows(sim):
    """What every client uses, `[M, D]`."""
    return torch.stack([sim.row(i) for i in range(sim.population)])


def share(sim):
    n = torch.from_numpy(sim.federation.sizes("train"))[: sim.population].double()
    return n / n.sum()


def local_rows(tiny, sim, start, **options):
    """Every client's plain SGD of this round from its `start [M, D]` (or one for all), by torch.optim."""
    start = start if start.ndim == 2 else start.expand(sim.population, -1)
    sizes = [int(n) for n in sim.federation.sizes("train")]
    steps = [tiny.steps_of(n, sim.training.batch, sim.training.epochs) for n in sizes]
    each = {name: value if isinstance(value, list) else [value] * len(start) for name, value in options.items()}
    return torch.stack([
        tiny.sgd(sim, i, start[i], steps[i], **{name: value[i] for name, value in each.items()})[0]
        for i in range(sim.population)
    ])


def module(sim, row):
    return sim.layout.load(copy.deepcopy(sim.init.module).double(), row).eval()


def loss(sim, client, row, split="train"):
    x, y = sim.federation.client(client, split)
    return F.cross_entropy(module(sim, row)(x), y).detach()


def uploads(sim, ids, **tensors):
    """What the server would see if these clients had sent these tensors."""
    ids = torch.tensor(ids)
    n = torch.from_numpy(sim.federation.sizes("train"))[ids]
    return Uploads(tensors, ids, n, n.double() / n.sum(), sim.population, sim.rounds_done, sim.layout)


def labelled(labels, features=4, seed=0, **options):
    """A federation whose client i holds these labels, with random inputs."""
    pairs = [(noise(len(y), features, seed=seed + i), torch.tensor(y)) for i, y in enumerate(labels)]
    return Federation.from_splits(pairs, classes=3, **options)


# -- cwFedAvg ---------------------------------------------------------------------------------------------------------

COUNTS = tensor([[8, 2, 0], [1, 1, 8], [0, 5, 5]])


def test_cwfedavg_golden():
    """Worked example for n_ij of three clients: Q, A = Pi Q', and scalar models (1, 2, 4)."""
    pi, p = COUNTS / 10, tensor([1, 1, 1]) / 3
    q = class_weights(p, pi)
    golden = [[0.88888889, 0.25, 0], [0.11111111, 0.125, 0.61538462], [0, 0.625, 0.38461538]]
    assert_close(q, tensor(golden), atol=1e-8)
    a = pi @ q.T
    golden = [
        [0.76111111, 0.11388889, 0.125], [0.11388889, 0.5159188, 0.37019231], [0.125, 0.37019231, 0.50480769],
    ]
    assert_close(a, tensor(golden), atol=1e-8)
    assert_close(a @ tensor([1, 2, 4]), tensor([1.48888889, 2.62649573, 2.88461538]), atol=1e-8)
    assert_close(p @ a @ tensor([1, 2, 4]), tensor(2.33333333), atol=1e-8)  # FedAvg's model, their mean


def test_cwfedavg_mixes_are_means_that_keep_the_mean():
    """Rows of A = Pi Q' sum to 1 and p'A = p'; a class that nobody holds has no weight and no 0 / 0."""
    pi, p = torch.softmax(noise(5, 4), 1), torch.softmax(noise(5, seed=1), 0)
    a = pi @ class_weights(p, pi).T
    assert_close(a.sum(1), torch.ones(5, dtype=torch.float64))
    assert_close(p @ a, p)
    held = torch.cat([pi, torch.zeros(5, 1, dtype=torch.float64)], 1)
    assert (class_weights(p, held)[:, 4] == 0).all()


@pytest.mark.parametrize("layers", ["output", "all"])
@pytest.mark.parametrize("model", MODELS)
def test_cwfedavg_with_equal_label_distributions_is_fedavg(tiny, model, layers):
    """pi_i the same for all: q_ij = p_i, so every class has FedAvg's model, and so has every mixture."""
    data = labelled([[0, 1, 2], [0, 1, 2] * 2, [2, 0, 1] * 3])
    one = rounds(tiny.simulation(CwFedAvg(lam=0, layers=layers, distribution="true"), model, data=data), 3)
    two = rounds(tiny.simulation("fedavg", model, data=data), 3)
    assert_close(rows(one), two.server.state.row.expand(3, -1))


@pytest.mark.parametrize("model", ["mlp", "bn"])
def test_cwfedavg_with_one_class_per_group_is_fedavg_in_each_group(tiny, model):
    labels, names = [[0] * 4, [1] * 5, [0] * 7, [1] * 3], ["a", "b", "c", "d"]
    data = labelled(labels, names=names)
    one = rounds(tiny.simulation(CwFedAvg(lam=0, layers="all", distribution="true"), model, data=data), 3)
    for group in ([0, 2], [1, 3]):
        part = Federation.from_splits([data.client(i) for i in group], classes=3, names=[names[i] for i in group])
        alone = rounds(tiny.simulation("fedavg", model, data=part), 3)
        assert_close(rows(one)[group], alone.server.state.row.expand(2, -1))


@pytest.mark.parametrize("half", [False, True])
def test_cwfedavg_rounds_by_hand(tiny, half):
    """theta_i <- sum_l A_il SGD_l in the head and sum_l p_l SGD_l elsewhere, SGD on CE + lam |pi - pi~|_2; twice."""
    sim = tiny.simulation(CwFedAvg(lam=2.0, half_lambda=half, distribution="true"))
    pi = tensor([[(sim.federation.client(i)[1] == c).double().mean() for c in range(3)] for i in range(4)])

    def objective(client):
        def value(net, x, y):
            length = net[2].weight.norm(dim=1)
            return F.cross_entropy(net(x), y) + (1.0 if half else 2.0) * (pi[client] - length / length.sum()).norm()

        return value

    p = share(sim)
    q = p[:, None] * pi
    a = pi @ (q / q.sum(0)).T
    for _ in range(2):
        trained = local_rows(tiny, sim, rows(sim), objective=[objective(i) for i in range(4)])
        sim.round()
        assert_close(sim.layout.cut(rows(sim), "head"), a @ sim.layout.cut(trained, "head"))
        assert_close(sim.layout.cut(rows(sim), "base"), (p @ sim.layout.cut(trained, "base")).expand(4, -1))


def test_the_mean_of_cwfedavgs_models_is_the_mean_of_what_was_sent(tiny):
    """p'A = p': sum_i p_i theta_i after the server's step is sum_i p_i SGD_i."""
    sim = rounds(tiny.simulation(CwFedAvg(lam=0.0, layers="all")), 1)
    expected = share(sim) @ local_rows(tiny, sim, rows(sim))
    sim.round()
    assert_close(share(sim) @ rows(sim), expected)


def test_equal_models_stay_as_they_are(tiny):
    """Whatever the labels, mixing copies of one model gives that model."""
    sim = tiny.simulation(CwFedAvg(layers="all"))
    server = sim.method.merge(sim.server.state, uploads(sim, [0, 1, 3], update=noise(1, sim.layout.size).expand(3, -1)))
    assert_close(sim.method.personal(server, torch.arange(4)), (sim.init.row + noise(sim.layout.size)).expand(4, -1))


def test_norms_are_shares_with_the_right_slope():
    """pi~ sums to 1, ignores a common scale, and |pi - pi~| has the gradient that finite differences show."""
    weight = noise(3, 5).requires_grad_()
    assert norms(weight).sum().item() == pytest.approx(1)
    assert_close(norms(7.3 * weight), norms(weight))
    assert_close(norms(weight), weight.norm(dim=1) / weight.norm(dim=1).sum())
    assert torch.autograd.gradcheck(lambda w: (tensor([0.8, 0.2, 0.0]) - norms(w)).norm(), (weight,))
    assert torch.isfinite(norms(torch.zeros(3, 5))).all()


@pytest.mark.parametrize("method", ["cwfedavg", "cwfedavg:official", "cwfedavg:distribution=true"])
def test_cwfedavg_tells_no_labels_unless_it_is_asked_to(tiny, method):
    """First contact of clients that hold one class each: the norms of the model they were sent, alike for all, or their
    label shares. Later estimates come from what is uploaded anyway."""
    sim = tiny.simulation(method, data=labelled([[0] * 4, [1] * 5, [2] * 3]))
    start = norms(sim.layout.views(sim.init.row)["2.weight"]).expand(3, -1)
    assert_close(sim.server.state.mix, torch.eye(3, dtype=torch.float64) if "true" in method else start)


@pytest.mark.parametrize("hidden", [3, 6])
@pytest.mark.parametrize("distribution", ["approx", "true"])
def test_cwfedavg_refuses_a_head_of_several_layers(hidden, distribution):
    """The norms that tell labels are those of the layer that makes the scores, and only of one layer is that known."""
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(4, 5)
            self.head = nn.Sequential(nn.Linear(5, hidden), nn.ReLU(), nn.Linear(hidden, 3))

        def forward(self, x):
            return self.head(torch.tanh(self.body(x)))

    data = coterie.Federation.from_clients([(torch.randn(12, 4), torch.arange(12) % 3)] * 2)
    with pytest.raises(CoterieError, match="cwfedavg needs classes and a head that is one linear layer"):
        coterie.run(f"cwfedavg:distribution={distribution}", Two, data, rounds=1, head="head", device="cpu")


def test_cwfedavg_can_read_the_labels_off_the_weights(tiny):
    """By default pi is the share of each row's norm in the head of a client's last upload; client 0 sent nothing."""
    sim = tiny.simulation(CwFedAvg(lam=3.0))
    before, update = sim.server.state.mix.clone(), 0.1 * noise(3, sim.layout.size)
    trained = sim.method.personal(sim.server.state, torch.tensor([1, 2, 3])) + update
    server = sim.method.merge(sim.server.state, uploads(sim, [1, 2, 3], update=update))
    weight = sim.layout.views(trained)["2.weight"]
    assert_close(server.mix[1:], weight.norm(dim=2) / weight.norm(dim=2).sum(1, keepdim=True))
    assert torch.equal(server.mix[0], before[0])


@pytest.mark.parametrize("distribution", ["true", "approx"])
def test_cwfedavg_serves_a_newcomer_by_its_labels(tiny, distribution):
    """sum_j pi_j G_j in the head, zero-shot; `approx` reads pi off the head after a round from FedAvg's model."""
    data = tiny.federation(sizes=(7, 12, 1, 5, 6), unseen=1)
    sim = rounds(tiny.simulation(CwFedAvg(distribution=distribution, lam=0.0), data=data), 3)
    y = data.client(4)[1]
    pi = tensor([(y == c).double().mean() for c in range(3)])
    if distribution == "approx":
        trained, _ = tiny.sgd(sim, 4, sim.server.state.row, tiny.steps_of(len(y), 3))
        pi = norms(sim.layout.views(trained)["2.weight"])
    assert_close(sim.layout.cut(sim.row(4), "head"), pi @ sim.server.state.rows)
    assert_close(sim.layout.cut(sim.row(4), "base"), sim.layout.cut(sim.server.state.row, "base"))


def test_a_class_that_no_participant_holds_keeps_its_model(tiny):
    sim = tiny.simulation(CwFedAvg(distribution="true"), data=labelled([[0, 1], [0, 0, 1], [1, 1]]))
    before = sim.server.state.rows.clone()
    sim.round()
    assert torch.equal(sim.server.state.rows[2], before[2])
    assert (sim.server.state.rows[:2] - before[:2]).abs().amax(1).min() > 1e-4


def test_cwfedavg_needs_classes(tiny):
    with pytest.raises(CoterieError, match="no classes"):
        tiny.simulation("cwfedavg", "regression")


# -- FedAMP -----------------------------------------------------------------------------------------------------------


def test_fedamp_golden():
    """Worked example: w = (0,0), (1,0), (0,2); sigma = 2, alpha = 0.5."""
    golden = [
        [0.81453351, 0.15163266, 0.03383382],
        [0.15163266, 0.82784609, 0.02052125],
        [0.03383382, 0.02052125, 0.94564493],
    ]
    assert_close(attention(tensor([[0, 0], [1, 0], [0, 2]]), 0.5, 2.0), tensor(golden), atol=1e-8)


def test_fedamp_weights_are_means():
    """Rows sum to 1, no weight is negative by default, equal models count alike, and clients may be renumbered."""
    w = noise(5, 7)
    xi = attention(w, None, None)
    assert_close(xi.sum(1), torch.ones(5, dtype=torch.float64))
    assert (xi >= 0).all()
    order = torch.tensor([3, 1, 4, 0, 2])
    assert_close(attention(w[order], None, None), xi[order][:, order])
    assert_close(attention(w[:1].expand(4, -1), None, None), torch.full((4, 4), 0.25, dtype=torch.float64))
    assert attention(w[:1], None, None).tolist() == [[1.0]]


def test_fedamp_scales_itself():
    """sigma is the median squared distance, so xi does not change when all models are scaled."""
    w = noise(5, 7)
    assert_close(attention(100 * w, None, None), attention(w, None, None))
    apart = torch.stack([(a - b).square().sum() for a, b in itertools.combinations(w, 2)])
    assert_close(attention(w, None, None)[0, 1], torch.exp(-(w[0] - w[1]).square().sum() / apart.median()) / 5)


def test_fedamp_with_an_alpha_and_no_sigma_starts_as_local(tiny):
    """All models are equal at the start, so the median distance is 0 and says nothing: a client mixes its own alone,
    and one step of the first round is Local's. Afterwards there is a scale, and every model is finite."""
    assert torch.equal(attention(noise(1, 7).expand(4, -1), 0.1, None), torch.eye(4, dtype=torch.float64))
    one, two = (rounds(tiny.simulation(m, steps=1), 1) for m in ("fedamp:alpha=0.1", "local"))
    assert torch.equal(one.own.row, two.own.row)
    sim = rounds(one, 3)
    assert torch.isfinite(sim.own.row).all()
    assert (sim.own.row - rounds(two, 3).own.row).abs().max() > 1e-6  # the pull is there


@pytest.mark.parametrize("alpha", [1e-3, 0.5, 3.0, 1e6])
def test_fedamp_never_pushes_a_client_away_from_its_own_model(alpha):
    """However large alpha is beside an estimated sigma: rows of xi are weights, which sum to 1. Where alpha A' leaves
    something of 1 for the own model, they are the paper's."""
    w = noise(5, 7)
    apart = (w[:, None] - w).square().sum(2)
    sigma = apart[tuple(torch.triu_indices(5, 5, 1))].median()
    plain = (alpha * torch.exp(-apart / sigma) / sigma).fill_diagonal_(0)
    xi = attention(w, alpha, None)
    assert (xi >= 0).all()
    assert_close(xi.sum(1), torch.ones(5, dtype=torch.float64))
    small = plain.sum(1) <= 1
    assert_close(xi[small], (plain + torch.diag(1 - plain.sum(1)))[small])
    assert_close(xi.clone().fill_diagonal_(0)[~small], (plain / plain.sum(1, keepdim=True))[~small])


def test_fedamp_refuses_an_alpha_that_leaves_nothing_of_the_own_model(tiny):
    """Four clients: the others' weights at the start are 3 alpha / sigma together. By cosine alpha is in no weight, and
    without a pull nothing is mixed, so these stay."""
    with pytest.raises(CoterieError, match=r"alpha \(M - 1\) / sigma = 3.*take an alpha of at most 0.1667"):
        tiny.simulation("fedamp:alpha=0.5,sigma=0.5")
    for method in ("fedamp:alpha=0.5,sigma=1.5", "fedamp:alpha=5,sigma=1,by=cosine", "fedamp:pfllib"):
        tiny.simulation(method)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", ["fedamp:lam=0", "fedamp:pfllib,validation=true"])
def test_fedamp_without_pull_is_local(tiny, model, method):
    """The pull adds 0 to every gradient: bit for bit; PFLlib's detached term does the same."""
    one, two = (rounds(tiny.simulation(m, model), 3) for m in (method, "local"))
    assert torch.equal(one.own.row, two.own.row)


def test_fedamp_rounds_by_hand(tiny):
    """w_i <- SGD from w_i with lam / alpha (w - u_i) added to the gradient, u_i = sum_j xi_ij w_j; three times."""
    sim = tiny.simulation(FedAMP(lam=0.6, alpha=0.3, sigma=0.9))  # alpha (M - 1) / sigma = 1, the most there may be
    w = sim.init.row.expand(4, -1)
    for _ in range(3):
        near = tensor([[math.exp(-(a - b).square().sum() / 0.9) * 0.3 / 0.9 for b in w] for a in w]).fill_diagonal_(0)
        u = near @ w + (1 - near.sum(1))[:, None] * w
        views = [sim.layout.views(row) for row in u]
        pulls = [lambda name, g, value, v=v: g + 2.0 * (value - v[name]) for v in views]
        expected = local_rows(tiny, sim, w, correct=pulls)
        sim.round()
        assert_close(sim.own.row, expected)
        assert_close(sim.server.state.rows, expected)
        assert_close(rows(sim), expected)
        w = expected


@pytest.mark.parametrize("method", ["fedamp", "fedamp:lam=5", "fedamp:heur"])
def test_a_client_of_fedamp_that_ran_away_comes_back(tiny, method):
    """Least squares has one solution, so a client thrown a million times as far off ends where it would have been. Out
    there the server keeps its model from before, and counts it; as soon as it is not too long it is known as it is, not
    as the old one and the moves since, a phantom that would hold it for good."""
    data = tiny.federation(sizes=(9, 12, 11, 10), kind="regression")
    quiet, thrown = (rounds(tiny.simulation(method, lambda: nn.Linear(4, 1), data=data, batch=0, steps=5), 3)
                     for _ in range(2))
    known = thrown.server.state.rows[2].clone()
    thrown.own = replace(thrown.own, row=thrown.own.row * tensor([1, 1, 1e6, 1])[:, None])
    assert [int(thrown.round().report["left_out"]) for _ in range(2)] == [1, 1]
    assert torch.equal(thrown.server.state.rows[2], known)
    assert int(rounds(thrown, 196).round().report["left_out"]) == 0
    assert_close(thrown.server.state.rows, thrown.own.row)
    assert_close(thrown.own.row, rounds(quiet, 199).own.row, atol=1e-5, rtol=0)


@pytest.mark.parametrize("scale", [0.0, 1e-4])
def test_fedamp_measures_no_model_by_those_that_have_not_trained(tiny, scale):
    """A start near 0 and a third of the clients a round: beside it every trained model is long, and beside 0 none is.
    Nobody is left out who trained in the usual way, and who was thrown far off is."""

    def model():
        module = nn.Linear(4, 1)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(scale)
        return module

    data = tiny.federation(sizes=(9, 12, 11, 10, 9, 12), kind="regression")
    sim = tiny.simulation("fedamp", model, data=data, batch=0, steps=5, participation=0.5)
    for t in range(3):
        assert int(sim.round().report["left_out"]) == 0, t
    asked = sim.selected(3).tolist()
    far = torch.ones(6, dtype=torch.float64)
    far[asked[0]] = 1e6
    sim.own = replace(sim.own, row=(sim.own.row + 1e-3) * far[:, None])
    assert int(sim.round().report["left_out"]) == 1


def test_fedamp_serves_the_mean_to_a_newcomer_and_keeps_the_absent(tiny):
    data = tiny.federation(sizes=(7, 12, 1, 5, 6), unseen=1)
    sim = rounds(tiny.simulation("fedamp", data=data, participation=0.5), 1)
    assert_close(sim.row(4), sim.own.row.mean(0))
    absent = [i for i in range(4) if i not in sim.selected(0)]
    assert torch.equal(sim.server.state.rows[absent], sim.init.row.expand(len(absent), -1))


def test_heurfedamp_weights_by_hand():
    """w = (1,0), (1,1), (0,2), sigma = 2: cosines 1/sqrt 2, 0, 1/sqrt 2; own 0.4 leaves 0.6 to share out."""
    near, far = math.exp(math.sqrt(2)), 1.0
    rest = 0.6 * near / (near + far)
    expected = [[0.4, rest, 0.6 - rest], [0.3, 0.4, 0.3], [0.6 - rest, rest, 0.4]]
    w = tensor([[1, 0], [1, 1], [0, 2]])
    assert_close(cosine_attention(w, 0.4, 2.0), tensor(expected))
    scaled = w * tensor([[3], [0.1], [7]])
    assert_close(cosine_attention(scaled, 0.4, 2.0), tensor(expected))  # angles know no lengths
    usual = 1 / (1 - 1 / math.sqrt(2))  # the median of 1 - cos over the pairs
    assert_close(cosine_attention(w, 0.4, None), cosine_attention(w, 0.4, usual))
    equal = 0.3 + 0.1 * torch.eye(3, dtype=torch.float64)
    assert_close(cosine_attention(w[:1].expand(3, -1), 0.4, None), equal)
    assert cosine_attention(w[:1], 0.4, None).tolist() == [[1.0]]


def test_heurfedamp_rounds_by_hand(tiny):
    """As FedAMP with lam (w - u_i), where u_i = own w_i + (1 - own) sum_j softmax_j(sigma cos(w_i, w_j)) w_j."""
    assert registry.method("fedamp:heur") == FedAMP(by="cosine")
    sim = tiny.simulation("fedamp:heur,lam=0.6,own=0.3,sigma=20")
    w = sim.init.row.expand(4, -1)
    for _ in range(3):
        mass = tensor([[math.exp(20 * F.cosine_similarity(a, b, dim=0)) for b in w] for a in w]).fill_diagonal_(0)
        u = 0.3 * w + 0.7 * mass @ w / mass.sum(1, keepdim=True)
        views = [sim.layout.views(row) for row in u]
        pulls = [lambda name, g, value, v=v: g + 0.6 * (value - v[name]) for v in views]
        w = local_rows(tiny, sim, w, correct=pulls)
        sim.round()
        assert_close(sim.own.row, w)
    with pytest.raises(CoterieError, match="own must be from 0 to 1"):
        tiny.simulation("fedamp:own=1.5")


def test_heurfedamp_that_trusts_itself_alone_is_a_pull_to_the_own_start(tiny):
    """own = 1: u_i = w_i, and the first step of a round is Local's."""
    one, two = (rounds(tiny.simulation(m, steps=1), 3) for m in ("fedamp:heur,own=1,lam=5", "local"))
    assert_close(rows(one), rows(two))


# -- FedALA -----------------------------------------------------------------------------------------------------------


def test_fedala_golden():
    """Worked example: theta_i = (0, 1), theta = (1, 3), W = 1, gradient (0.4, -0.2), eta = 1."""
    own, shared = tensor([0, 1]), tensor([1, 3])
    w = reweigh(torch.ones(2, dtype=torch.float64), tensor([0.4, -0.2]), own, shared, 1.0)
    assert_close(w, tensor([0.6, 1]))
    assert_close(torch.lerp(own, shared, w), tensor([0.6, 3]))


@pytest.mark.parametrize("layers", ["head", "all"])
@pytest.mark.parametrize("model", MODELS)
def test_fedala_that_does_not_learn_its_weights_is_fedavg(tiny, model, layers):
    """W = 1 takes the shared model exactly: bit for bit."""
    one, two = (rounds(tiny.simulation(m, model), 3) for m in (FedALA(eta=0, layers=layers), "fedavg"))
    assert torch.equal(one.server.state.row, two.server.state.row)
    assert torch.equal(rows(one), rows(two))


@pytest.mark.parametrize("model", MODELS)
def test_fedala_with_weights_of_zero_everywhere_is_local(tiny, model):
    """W = 0 keeps the own model exactly, buffers included: bit for bit."""
    one, two = (rounds(tiny.simulation(m, model), 3) for m in (FedALA(eta=0, initial=0, layers="all"), "local"))
    assert torch.equal(one.own.row, two.own.row)
    assert torch.equal(rows(one), rows(two))


@pytest.mark.parametrize(("model", "layers"), [("mlp", "head"), ("bn", "head"), ("mlp", "0.weight+2.weight")])
def test_fedala_blends_its_layers_only(tiny, model, layers):
    """Elsewhere the served model is the shared one exactly; W stays in [0, 1] and has moved."""
    sim = rounds(tiny.simulation(FedALA(layers=layers), model, epochs=3), 3)
    rest = sim.layout.cut(sim.server.state.row, f"~{layers}")
    assert torch.equal(sim.layout.cut(rows(sim), f"~{layers}"), rest.expand(4, -1))
    assert sim.own.w.min() >= 0
    assert sim.own.w.max() <= 1
    assert sim.own.w.min() < 0.9
    assert (sim.layout.cut(rows(sim), layers) - sim.layout.cut(sim.server.state.row, layers)).abs().max() > 1e-3


def test_fedala_by_hand(tiny):
    """At first W takes ten passes (as any spread is allowed), then one a round, on batches of its own stream."""
    sim = rounds(tiny.simulation(FedALA(fraction=1.0, settled=1e9)), 1)
    w = torch.ones(4, 18, dtype=torch.float64)
    for passes in (10, 1):
        starts = []
        for i, n in enumerate(tiny.SIZES):
            x, y = sim.federation.client(i)
            own, shared = (sim.layout.cut(t, "head") for t in (sim.own.row[i], sim.server.state.row))
            for batch in tiny.batches(tiny.stream(sim, i, "ala"), n, 3, passes * tiny.steps_of(n, 3)):
                net = module(sim, sim.layout.put(sim.server.state.row, "head", own + (shared - own) * w[i]))
                F.cross_entropy(net(x[batch]), y[batch]).backward()
                gradient = torch.cat([net[2].weight.grad.flatten(), net[2].bias.grad])
                w[i] = (w[i] - gradient * (shared - own)).clamp(0, 1)
            starts.append(sim.layout.put(sim.server.state.row, "head", own + (shared - own) * w[i]))
        assert_close(rows(sim), torch.stack(starts))
        expected = share(sim) @ local_rows(tiny, sim, torch.stack(starts))
        sim.round()
        assert_close(sim.own.w, w)
        assert_close(sim.server.state.row, expected)
    assert w.min() < 0.95


def test_fedala_learns_on_a_stretch_of_the_samples_until_losses_agree(tiny):
    """`settled` = 0 is never reached and all `passes` are made; a stretch has ceil(0.8 n) samples, which cost steps."""
    data = tiny.federation(sizes=(10, 5))
    sim = rounds(tiny.simulation(FedALA(settled=0.0, passes=15), data=data), 1)
    spent = sim.evaluate().stages["served"].steps.tolist()
    assert spent == [15 * 3, 15 * 2]  # 8 and 4 samples in batches of 3
    sim.round()
    assert sim.evaluate().stages["served"].steps.tolist() == [3, 2]


def test_fedala_serves_the_shared_model_to_whoever_has_not_trained(tiny):
    data = tiny.federation(sizes=(7, 12, 1, 5, 6), unseen=1)
    sim = rounds(tiny.simulation("fedala", data=data, participation=0.5), 1)
    absent = [i for i in range(4) if i not in sim.selected(0)]
    for client in (*absent, 4):
        assert torch.equal(sim.row(client), sim.server.state.row)


# -- FedFomo ----------------------------------------------------------------------------------------------------------


def test_fedfomo_golden():
    """Worked example: L_old = 2, L_n = (1.5, 2.5, 1), distances (1, 2, 4); 1e-5 in the denominator."""
    omega = worth(tensor([2]), tensor([[1.5, 2.5, 1]]), tensor([[1, 2, 4]]))
    assert_close(omega, tensor([[0.5, -0.25, 0.25]]), atol=1e-5)
    assert_close(normalised(omega), tensor([[2 / 3, 0, 1 / 3]]), atol=1e-5)


def test_fedfomo_keeps_its_model_where_none_is_better():
    """Weights sum to 1, or are all 0; the own model is at distance 0 with the same loss and weighs nothing."""
    omega = worth(tensor([1, 1]), tensor([[2, 1], [0.5, 3]]), tensor([[1, 0], [1, 1]]))
    assert normalised(omega)[0].tolist() == [0, 0]
    assert_close(normalised(omega)[1], tensor([1, 0]))
    many = noise(50, 3)
    some = (many > 0).any(1)
    assert 0 < some.sum() < 50
    assert_close(normalised(many).sum(1), some.double())


@pytest.mark.parametrize("model", MODELS)
def test_fedfomo_alone_is_local(tiny, model):
    """The only model there is to receive is one's own."""
    data = tiny.federation(sizes=(7,))
    one, two = (rounds(tiny.simulation(m, model, data=data), 3) for m in ("fedfomo", "local"))
    assert torch.equal(one.own.row, two.own.row)


def test_fedfomo_rounds_by_hand(tiny):
    """theta_i + sum_n w_n (theta_n - theta_i) by validation losses (client 2 has none: training), then SGD."""
    sim = rounds(tiny.simulation("fedfomo", epochs=2), 1)
    gain = torch.zeros(4, 4, dtype=torch.float64)
    for _ in range(2):
        old, mixtures = sim.own.row.clone(), []
        for i in range(4):
            split = "train" if i == 2 else "val"
            omega = torch.zeros(4, dtype=torch.float64)
            for j in set(range(4)) - {i}:
                difference = loss(sim, i, old[i], split) - loss(sim, i, old[j], split)
                omega[j] = difference / ((old[j] - old[i]).norm() + 1e-5)
            weights = omega.clamp(min=0)
            mixtures.append(old[i] + (weights / weights.sum().clamp(min=1e-30)) @ (old - old[i]))
            gain[i] += omega
        expected = local_rows(tiny, sim, torch.stack(mixtures))
        assert (torch.stack(mixtures) - old).abs().max() > 1e-3
        sim.round()
        assert_close(sim.own.row, expected)
        assert_close(sim.server.state.rows, expected)
        assert_close(sim.server.state.gain, gain)


def test_fedfomo_receives_those_it_gained_most_from(tiny):
    """`received=2`: the two largest entries of a client's gains, its own left out, ties by number."""
    sim = tiny.simulation(FedFomo(received=2))
    server = replace(sim.server.state, rows=noise(4, sim.layout.size), gain=tensor(
        [[9, 1, 2, 3], [0, 9, 0, 0], [-1, -2, 9, -3], [0, 0.5, 1, 0]]
    ))
    offer = sim.method.send(server, torch.arange(4))
    assert offer.who.each.tolist() == [[3, 2], [0, 2], [0, 1], [2, 1]]
    assert torch.equal(offer.rows.each[0, 0], server.rows[3])


def test_fedfomo_can_explore(tiny):
    """With explore=1 the choice is random but never oneself, and another one each round."""
    sim = tiny.simulation(FedFomo(received=2, explore=1.0), data=tiny.federation(sizes=(3,) * 12))
    first = sim.method.send(sim.server.state, torch.arange(12)).who.each
    sim.round()
    second = sim.method.send(sim.server.state, torch.arange(12)).who.each
    assert not torch.equal(first, second)
    for who in (first, second):
        assert not (who == torch.arange(12)[:, None]).any()
        assert len(set(who.flatten().tolist())) > 4


def test_fedfomo_mixes_a_model_for_a_newcomer(tiny):
    """It receives the models that others gained most from, and goes from their mean to those that help it."""
    data = tiny.federation(sizes=(7, 12, 1, 5, 6), unseen=1)
    sim = rounds(tiny.simulation(FedFomo(received=2), data=data, epochs=2), 3)
    theirs = sim.own.row[sim.server.state.gain.mean(0).argsort(descending=True)[:2]]
    start, split = theirs.mean(0), "val" if data.sizes("val")[4] else "train"
    omega = torch.stack([
        (loss(sim, 4, start, split) - loss(sim, 4, row, split)) / ((row - start).norm() + 1e-5) for row in theirs
    ])
    weights = omega.clamp(min=0) / omega.clamp(min=0).sum()
    assert_close(sim.row(4), weights @ theirs)


# -- PACFL ------------------------------------------------------------------------------------------------------------


def test_a_signature_spans_the_leading_directions_of_each_label(tiny):
    """Orthonormal columns; a label's samples on a line give that line."""
    x = torch.cat([3 * noise(5, 1) * torch.eye(8)[0], noise(4, 1) * (torch.eye(8)[0] + torch.eye(8)[1])]).double()
    basis = PACFL().basis(x, torch.tensor([0] * 5 + [2] * 4), 3)
    assert_close(basis.T @ basis, torch.eye(2, dtype=torch.float64))
    assert_close(basis @ basis.T, torch.diag(tensor([1, 1, 0, 0, 0, 0, 0, 0])))


def test_a_signature_of_all_samples_together(tiny):
    """by_label=false: the leading directions of the samples whatever their labels, as many as `vectors`."""
    x, y = noise(9, 6), torch.arange(9) % 3
    basis = PACFL(vectors=2, by_label=False).basis(x, y, 3)
    leading = torch.linalg.svd(x.T).U[:, :2]
    assert_close(basis @ basis.T, leading @ leading.T)
    sim = tiny.simulation(PACFL(vectors=2, by_label=False))
    assert sim.server.state.basis.shape == (4, 4, 2)


def test_matched_angles():
    """The sum over l of the angles between the lines of the l-th columns; a column that only one has is 90 degrees."""
    e, h = torch.eye(3, dtype=torch.float64), 0.5**0.5
    pair = torch.stack([e[0], e[1]], 1)
    turned = torch.stack([-e[0], h * (e[1] + e[2])], 1)  # the same line, and one at 45 degrees
    single = torch.stack([e[1], 0 * e[0]], 1)
    bases = torch.stack([pair, turned, single])
    expected = tensor([[0, 45, 180], [45, 0, 180], [180, 180, 0]])
    assert_close(angles(bases, bases, "matched"), expected, atol=1e-5)  # arccos is steep at 1
    assert_close(angles(bases[:1], bases, "matched"), expected[:1], atol=1e-5)
    assert PACFL(measure="matched").basis(noise(9, 6), torch.arange(9) % 3, 3).shape == (6, 9)


@pytest.mark.parametrize("model", MODELS)
def test_pacfl_with_one_cluster_is_fedavg(tiny, model):
    one, two = (rounds(tiny.simulation(m, model), 3) for m in ("pacfl:beta=90", "fedavg"))
    assert one.server.state.rows.shape[0] == 1
    assert_close(rows(one), rows(two))


@pytest.mark.parametrize("model", MODELS)
def test_pacfl_with_clients_apart_is_local(tiny, model):
    one, two = (rounds(tiny.simulation(m, model), 3) for m in ("pacfl:beta=-1", "local"))
    assert sorted(one.server.state.cluster.tolist()) == [0, 1, 2, 3]
    assert_close(rows(one), rows(two))


def planes(unseen=0):
    """Six (or seven) clients whose inputs lie in one of two orthogonal planes of R^4, with a little noise."""
    pairs = []
    for i in range(6 + unseen):
        x = 0.01 * noise(12, 4, seed=i)
        x[:, [0, 1] if i % 2 else [2, 3]] += noise(12, 2, seed=50 + i)
        pairs.append((x, torch.arange(12) % 3))
    return Federation.from_splits(pairs, classes=3, names=[str(i) for i in range(6 + unseen)], unseen=unseen)


@pytest.mark.parametrize("options", [
    {}, {"beta": 30.0}, {"linkage": "complete"}, {"by_label": False, "vectors": 2},
    {"by_label": False, "vectors": 2, "measure": "matched", "beta": 150.0},  # sums of two angles have no clear gap
])
def test_pacfl_finds_groups_that_span_different_planes(tiny, options):
    """Even and odd clients; inside a group the rows are FedAvg's on that group alone."""
    data = planes()
    sim = rounds(tiny.simulation(PACFL(**options), data=data), 2)
    assert sim.server.state.cluster.tolist() in ([0, 1] * 3, [1, 0] * 3)
    odd = Federation.from_splits([data.client(i) for i in (1, 3, 5)], classes=3, names=["1", "3", "5"])
    alone = rounds(tiny.simulation("fedavg", data=odd), 2)
    assert_close(rows(sim)[[1, 3, 5]], alone.server.state.row.expand(3, -1))


@pytest.mark.parametrize("seed", range(5))
def test_pacfl_leaves_clients_with_data_of_one_kind_together(tiny, seed):
    """Their angles differ by chance, and there is always a widest gap between them; it does not stand out."""
    pairs = [(noise(50, 32, seed=100 * seed + i), torch.arange(50) % 3) for i in range(12)]
    federation = Federation.from_splits(pairs, classes=3, names=[str(i) for i in range(12)])
    sim = tiny.simulation("pacfl", lambda: nn.Linear(32, 3), data=federation)
    assert sim.server.state.cluster.tolist() == [0] * 12


def test_fesem_leaves_a_client_that_is_not_finite_where_it_is(tiny):
    """No centre is nearest to NaN: the client stays in its cluster, and the other centres stay finite."""
    sim = rounds(tiny.simulation("fesem:models=2"), 2)
    before = sim.server.state.cluster.tolist()
    alone = next(i for i in range(4) if before.count(before[i]) < 4)
    update = 0.01 * noise(4, sim.layout.size)
    update[alone] = torch.nan
    after = sim.method.merge(sim.server.state, uploads(sim, [0, 1, 2, 3], update=update))
    assert after.cluster[alone] == before[alone]
    assert torch.isfinite(after.rows[[k for k in range(2) if k != before[alone]]]).all()


def test_a_client_that_diverges_while_fesem_places_its_centres_becomes_none(tiny):
    """Participants 1, 2 and 3 of six send updates, 2's is NaN: the centres are the other two's models, 2 counts in
    neither, and the absent go to the one nearest to the common model, which they are still at."""
    sim = tiny.simulation("fesem:models=2", data=tiny.federation(sizes=(6, 5, 4, 6, 5, 4)))
    update = noise(3, sim.layout.size)
    update[0] *= 0.1  # the nearest to the common model
    update[1] = torch.nan
    after = sim.method.merge(sim.server.state, uploads(sim, [1, 2, 3], update=update))
    near, far = int(after.cluster[1]), int(after.cluster[3])
    assert_close(after.rows[[near, far]], sim.init.row + update[[0, 2]])
    assert after.cluster[[0, 4, 5]].tolist() == [near] * 3


def test_pacfl_sends_a_newcomer_to_the_nearest_cluster(tiny):
    data = planes(unseen=1)
    sim = rounds(tiny.simulation("pacfl", data=data), 2)
    new = int(data.names[6])
    friend = next(i for i in range(6) if int(data.names[i]) % 2 == new % 2)
    stranger = next(i for i in range(6) if int(data.names[i]) % 2 != new % 2)
    assert torch.equal(sim.row(6), sim.row(friend))
    assert not torch.equal(sim.row(6), sim.row(stranger))


# -- clusters ---------------------------------------------------------------------------------------------------------


def opposite(unseen=0):
    """Clients with targets +x'w and -x'w by turns, and the sign of each."""
    w = noise(4)
    pairs = []
    for i in range(6 + unseen):
        x = noise(20, 4, seed=i + 1)
        pairs.append((x, x @ w * (1 if i % 2 else -1)))
    return Federation.from_splits(pairs, classes=0, names=[str(i) for i in range(6 + unseen)], unseen=unseen), w


@pytest.mark.parametrize("method", ["cfl", "fesem:models=2"])
def test_opposite_groups_are_found_and_learned(tiny, method):
    """Two groups with opposite targets: each gets its model, and so does a newcomer of either group."""
    data, w = opposite(unseen=2)
    sim = rounds(tiny.simulation(method, "regression", data=data, batch=0, epochs=5), 40)
    assert sim.server.state.rows.shape[0] == 2
    for client in range(8):
        sign = 1 if int(data.names[client]) % 2 else -1
        assert_close(sim.row(client)[:4], sign * w, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("method", [
    "cfl:eps1=2,eps2=0.1,smallest=1,split_after=0,explained=none", "pacfl", "fesem", "fesem:common_rounds=2",
])
def test_clusters_partition_the_clients(tiny, method):
    """Whoever takes part, every client has one cluster that exists; CFL's leaves and PACFL's clusters are not empty."""
    data = tiny.federation(sizes=(6, 3, 1, 5, 4, 9, 2, 8))
    sim = tiny.simulation(method, data=data, participation=0.6, dropouts=0.2, seed=1)
    most = 1
    for _ in range(5):
        sim.round()
        found = torch.bincount(sim.server.state.cluster, minlength=len(sim.server.state.rows))
        assert (len(found), int(found.sum())) == (len(sim.server.state.rows), 8)
        assert "fesem" in method or (found > 0).all()
        most = max(most, len(found))
    assert most > 1


# -- FeSEM ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["mlp", "dropout"])
def test_fesem_with_one_centre_is_the_plain_mean(tiny, model):
    """K = 1: theta <- mean over clients of SGD_i(theta), whatever their sizes; three rounds."""
    sim = tiny.simulation("fesem:models=1", model)
    for _ in range(3):
        expected = local_rows(tiny, sim, sim.server.state.rows[0]).mean(0)
        sim.round()
        assert_close(sim.server.state.rows[0], expected)


@pytest.mark.parametrize("model", MODELS)
def test_weighted_fesem_with_one_centre_is_fedavg(tiny, model):
    one, two = (rounds(tiny.simulation(m, model), 3) for m in ("fesem:models=1,weighted=true", "fedavg"))
    assert_close(rows(one), rows(two))


@pytest.mark.parametrize("weighted", [False, True])
def test_fesem_never_raises_its_objective(tiny, weighted):
    """sum_i n_i |theta_i - W_r(i)|^2 with theta fixed falls through the E-step and the M-step, until it is fixed."""
    sim = tiny.simulation(FeSEM(models=3, weighted=weighted), data=tiny.federation(sizes=(3, 9, 1, 5, 4, 2, 8, 6)))
    theta = noise(8, sim.layout.size)
    n = torch.from_numpy(sim.federation.sizes("train")).double() if weighted else torch.ones(8, dtype=torch.float64)
    server = replace(
        sim.server.state, rows=noise(3, sim.layout.size, seed=1), cluster=torch.arange(8) % 3,
        placed=torch.tensor([True]),
    )

    def objective(state):
        return (n * (theta - state.rows[state.cluster]).square().sum(1)).sum().item()

    values = [objective(server)]
    for _ in range(5):
        update = theta - server.rows[server.cluster]
        server = sim.method.merge(server, uploads(sim, range(8), update=update))
        values.append(objective(server))
    assert all(after <= before + 1e-9 for before, after in itertools.pairwise(values))
    assert values[1] < values[0]
    assert values[-1] == pytest.approx(values[-2])


def test_fesem_rounds_by_hand(tiny):
    """Warm-up mean, then centres on the clients' models, nearest assignment, plain means; SGD from one's centre."""
    sim = tiny.simulation("fesem:models=2")
    theta = local_rows(tiny, sim, sim.init.row)
    first = (theta - theta.mean(0)).norm(dim=1).argmin()
    second = (theta - theta[first]).norm(dim=1).argmax()
    centres = theta[torch.stack([first, second])]
    for _ in range(2):
        choice = tensor([[(row - c).norm() for c in centres] for row in theta]).argmin(1)
        centres = torch.stack([theta[choice == k].mean(0) if (choice == k).any() else centres[k] for k in range(2)])
        sim.round()
        assert sim.server.state.cluster.tolist() == choice.tolist()
        assert_close(rows(sim), centres[choice])
        theta = local_rows(tiny, sim, centres[choice])


def test_an_empty_cluster_keeps_its_centre_and_all_clients_stay_assigned(tiny):
    sim = tiny.simulation(FeSEM(models=2))
    far = torch.stack([sim.init.row, sim.init.row + 100])
    server = replace(sim.server.state, rows=far, placed=torch.tensor([True]))
    server = sim.method.merge(server, uploads(sim, [0, 2], update=noise(2, sim.layout.size)))
    assert torch.equal(server.rows[1], far[1])
    assert server.cluster.tolist() == [0, 0, 0, 0]


def test_fesem_can_pull_to_its_centre(tiny):
    """lam (theta - W) is added to the gradient."""
    sim = tiny.simulation(FeSEM(models=1, lam=0.5), epochs=2)
    start = sim.layout.views(sim.init.row)
    trained = local_rows(tiny, sim, sim.init.row, correct=lambda name, g, value: g + 0.5 * (value - start[name]))
    sim.round()
    assert_close(sim.server.state.rows[0], trained.mean(0))


# -- FedSoft ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_fedsoft_without_pull_is_local(tiny, model):
    """Personal models are Local's bit for bit; the cluster models are then averages only."""
    one, two = (rounds(tiny.simulation(m, model), 3) for m in ("fedsoft:lam=0", "local"))
    assert torch.equal(one.own.row, two.own.row)


def winners(sim, client, centres):
    x, y = sim.federation.client(client)
    losses = torch.stack([F.cross_entropy(module(sim, c)(x), y, reduction="none") for c in centres])
    return torch.bincount(losses.argmin(0), minlength=len(centres)).double() / len(y)


def test_fedsoft_rounds_by_hand(tiny):
    """u from the samples' winners (zeros become sigma), SGD with lam sum_s u_s (w - c_s), c_s = sum_i v_is w_i."""
    sim = tiny.simulation(FedSoft(models=2, lam=0.7, sigma=0.01))
    centres, w, n = sim.server.state.rows.clone(), sim.init.row.expand(4, -1), tensor(tiny.SIZES)
    for _ in range(2):
        u = torch.stack([winners(sim, i, centres) for i in range(4)]).clamp(min=0.01)

        def pull(client, u=u, centres=centres):
            near = [sim.layout.views(c) for c in centres]
            return lambda name, g, value: g + 0.7 * sum(
                u[client, s] * (value - near[s][name]) for s in range(2)
            )

        w = local_rows(tiny, sim, w, correct=[pull(i) for i in range(4)])
        v = u * n[:, None] / (u * n[:, None]).sum(0)
        centres = v.T @ w
        sim.round()
        assert_close(sim.own.u, u)
        assert_close(sim.own.row, w)
        assert_close(sim.server.state.rows, centres)
    assert torch.equal(rows(sim), sim.own.row)


def test_fedsoft_importance(tiny):
    """All samples won by one cluster: one-hot up to sigma; K = 1: u = 1; the clients' parts of a cluster sum to 1."""
    sim = tiny.simulation(FedSoft(models=3, sigma=1e-4))
    centres = sim.server.state.rows.clone()
    centres[0] = rounds(tiny.simulation("local", epochs=60), 1).own.row[2]  # client 2 has one sample: fits it
    payload = Models(centres.expand(4, -1, -1))
    assert_close(sim.method.importance(tiny.cohort(sim), payload)[2], tensor([1, 1e-4, 1e-4]))
    alone = tiny.simulation(FedSoft(models=1))
    assert alone.own.u.tolist() == [[1.0]] * 4
    v = shares(noise(5, 3).abs() + 0.01, torch.arange(1, 6))
    assert_close(v.sum(0), torch.ones(3, dtype=torch.float64))


def test_fedsofts_draws_follow_the_clients_parts():
    """One of three: with frequencies v; two of three: without replacement, so client 0 is missing with the chance of
    the draws (1, 2) and (2, 1), v1 v2 / (1 - v1) + v2 v1 / (1 - v2) = 0.3 * 0.2 / 0.7 + 0.2 * 0.3 / 0.8."""
    v = tensor([[0.5], [0.3], [0.2]]).expand(3, 20000)
    chance = torch.rand(3, 20000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one, two, all_of_them = (chosen(v, count, chance) for count in (1, 2, 5))
    error = 4 * 0.5 / 20000**0.5  # four standard deviations of a frequency, at most
    assert_close(one.mean(1), v[:, 0], atol=error)
    assert ((two == 0.5).sum(0) == 2).all()
    assert abs((two[0] == 0).double().mean().item() - (0.06 / 0.7 + 0.06 / 0.8)) < error
    assert (all_of_them == 1 / 3).all()


def test_fedsoft_of_selected_clients_is_their_plain_mean(tiny):
    """Each cluster model is the mean of two personal models, another pair as rounds go on; all four: of everybody."""
    sim, pairs = tiny.simulation(FedSoft(models=2, selected=2)), set()
    for _ in range(6):
        sim.round()
        for centre in sim.server.state.rows:
            means = {(i, j): (sim.own.row[i] + sim.own.row[j]) / 2 for i, j in itertools.combinations(range(4), 2)}
            apart = {pair: (mean - centre).abs().max().item() for pair, mean in means.items()}
            pairs.add(min(apart, key=apart.get))
            assert min(apart.values()) < 1e-12
    assert len(pairs) > 1
    everybody = rounds(tiny.simulation(FedSoft(models=2, selected=4)), 1)
    assert_close(everybody.server.state.rows, everybody.own.row.mean(0).expand(2, -1))
    with pytest.raises(CoterieError, match="at least 1"):
        tiny.simulation("fedsoft:selected=0")


def test_fedsoft_counts_samples_every_other_round(tiny):
    sim = rounds(tiny.simulation(FedSoft(models=2, every=2)), 1)
    before = sim.own.u.clone()
    sim.round()
    assert torch.equal(sim.own.u, before)
    expected = torch.stack([winners(sim, i, sim.server.state.rows) for i in range(4)]).clamp(min=1e-4)
    sim.round()
    assert_close(sim.own.u, expected)


def test_fedsoft_mixes_and_trains_a_newcomers_model(tiny):
    """w = sum_s u_s c_s (u normalised), then a round of SGD near the cluster models."""
    data = tiny.federation(sizes=(7, 12, 1, 5, 6), unseen=1)
    sim = rounds(tiny.simulation(FedSoft(models=2, lam=0.3), data=data), 2)
    centres = sim.server.state.rows
    u = winners(sim, 4, centres).clamp(min=1e-4)
    near = [sim.layout.views(c) for c in centres]

    def pull(name, gradient, value):
        return gradient + 0.3 * sum(u[s] * (value - near[s][name]) for s in range(2))

    start = (u / u.sum()) @ centres
    steps = tiny.steps_of(int(data.sizes("train")[4]), 3)
    assert_close(sim.row(4), tiny.sgd(sim, 4, start, steps, correct=pull)[0])


# -- pFedHN -----------------------------------------------------------------------------------------------------------


class Twin(nn.Module):
    """The hypernetwork in plain PyTorch, with a server's weights."""

    def __init__(self, method, server):
        super().__init__()
        first, middle, outer = method.matrices(server.psi, server.e.shape[1])
        matrices = [first, *middle, outer]
        self.layers = nn.ModuleList(nn.Linear(m.shape[1] - 1, len(m)).double() for m in matrices)
        for layer, m in zip(self.layers, matrices):
            layer.weight.data, layer.bias.data = m[:, :-1].clone(), m[:, -1].clone()
        self.e = nn.Parameter(server.e.clone())

    def forward(self, ids):
        z = self.layers[0](self.e[ids])
        for layer in self.layers[1:-1]:
            z = layer(torch.relu(z))
        return self.layers[-1](z)

    def psi(self):
        """All weights as the server keeps them: matrix by matrix, a row's bias after its weights."""
        return torch.cat([torch.cat([m.weight, m.bias[:, None]], 1).flatten().detach() for m in self.layers])


@pytest.mark.parametrize("clip", [50.0, 0.01])
def test_pfedhn_steps_are_sgd_on_the_surrogate(tiny, clip):
    """torch.optim.SGD (momentum, decay, clipped) on <stopgrad(theta_i - theta~_i), H(e_i)>, of which psi takes the mean
    over clients and e_i its own in full; three rounds."""
    sim = tiny.simulation(PFedHN(hidden=6, depth=2, hyper_clip=clip, hyper_lr=0.3))
    twin = Twin(sim.method, sim.server.state)
    tolerance = {} if clip == 50 else {"rtol": 1e-3, "atol": 1e-6}  # torch divides by norm + 1e-6
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.3, momentum=0.9, weight_decay=1e-3)
    for _ in range(3):
        written = twin(torch.arange(4))
        assert_close(rows(sim), written.detach(), **tolerance)
        trained = local_rows(tiny, sim, written.detach())
        optimizer.zero_grad()
        ((written.detach() - trained) * written).sum(1).mean().backward()
        twin.e.grad *= 4
        nn.utils.clip_grad_norm_(twin.parameters(), clip)
        optimizer.step()
        sim.round()
        assert_close(sim.server.state.psi, twin.psi(), **tolerance)
        assert_close(sim.server.state.e, twin.e.detach(), **tolerance)


class Table(PFedHN):
    """One bias-free linear layer whose embeddings do not learn."""

    name = "table"

    def generate(self, psi, e):
        return e.detach() @ self.matrices(psi, 4)[2][:, :-1].T


def test_pfedhn_with_one_hot_embeddings_is_local(tiny):
    """H(e) = W e with frozen one-hot e: column i is client i's model, and a step of size M takes the whole update."""
    plain = {"hyper_momentum": 0.0, "hyper_decay": 0.0, "hyper_clip": 1e9}
    sim = tiny.simulation(Table(embedding=4, hidden=4, hyper_lr=4.0, **plain))
    outer = torch.cat([sim.init.row[:, None].expand(-1, 4), torch.zeros_like(sim.init.row)[:, None]], 1)
    psi = torch.cat([sim.server.state.psi[: -outer.numel()], outer.flatten()])
    sim.server.state = replace(sim.server.state, e=torch.eye(4, dtype=torch.float64), psi=psi)
    alone = tiny.simulation("local")
    for _ in range(3):
        sim.round()
        alone.round()
        assert_close(rows(sim), rows(alone))


@pytest.mark.parametrize("length", [1e3, 1e25])
def test_pfedhn_learns_nothing_of_a_client_on_its_way_to_nan(tiny, length):
    """A model a hundred times as long as the middle one is left out like one that is not finite: it would take the
    whole clipped step, or, where its norm overflows, leave none to the others."""
    sim = tiny.simulation(PFedHN(hidden=6, depth=2))
    update = 0.1 * noise(4, sim.layout.size)
    merged = []
    for value in (length, float("nan")):
        update[2] = value
        up = uploads(sim, [0, 1, 2, 3], update=update)
        assert sim.method.report(sim.server.state, up)["left_out"] == 1
        merged.append(sim.method.merge(sim.server.state, up))
    for one, other in zip(merged[0].tensors().values(), merged[1].tensors().values(), strict=True):
        assert_close(one, other)
    assert (merged[0].psi - sim.server.state.psi).abs().max() > 1e-6


@pytest.mark.parametrize("asked", [[2], [0, 2]])
def test_pfedhn_measures_a_lone_participant_beside_what_it_writes_for_others(tiny, asked):
    """One client after another is what the paper does, and by itself nobody is a hundred times the middle length."""
    sim = tiny.simulation(PFedHN(hidden=6, depth=2))
    update = 0.1 * noise(4, sim.layout.size)
    up = uploads(sim, asked, update=update[asked])
    assert sim.method.report(sim.server.state, up)["left_out"] == 0
    update[2] = 1e3
    up = uploads(sim, asked, update=update[asked])
    assert sim.method.report(sim.server.state, up)["left_out"] == 1


def test_pfedhn_learns_of_who_learns_although_all_others_have_learned(tiny):
    """Updates of clients that fit their data end near 0: whoever still learns is a thousand times the middle one, and
    is healthy. The others' slopes being next to nothing, psi moves twice as far for twice the update (no decay)."""
    sim = tiny.simulation(PFedHN(hidden=6, depth=2, hyper_momentum=0.0, hyper_decay=0.0))
    update = 1e-9 * noise(4, sim.layout.size)
    moved = []
    for times in (1, 2):
        update[2] = times * 0.01 * noise(sim.layout.size, seed=1)
        up = uploads(sim, [0, 1, 2, 3], update=update)
        assert sim.method.report(sim.server.state, up)["left_out"] == 0
        moved.append(sim.method.merge(sim.server.state, up).psi - sim.server.state.psi)
    assert moved[0].norm() > 1e-6
    assert_close(moved[1], 2 * moved[0], rtol=1e-4, atol=1e-8)


def test_pfedhn_needs_something_to_write(tiny):
    with pytest.raises(CoterieError, match="all of the model but its personal part, and nothing else"):
        tiny.simulation("pfedhn:pc", lambda: nn.Linear(4, 3))


def test_pfedhn_without_embedding_has_one_model(tiny):
    sim = rounds(tiny.simulation("pfedhn:embedding=0"), 2)
    assert_close(rows(sim), rows(sim)[:1].expand(4, -1))
    assert (rows(sim)[0] - tiny.simulation("pfedhn:embedding=0").row(0)).abs().max() > 1e-6


def test_pfedhn_starts_near_a_fresh_model(tiny):
    """The output's bias is a fresh model: with spread 0 it is what every client gets; k = 1 + M // 4."""
    sim = tiny.simulation("pfedhn:spread=0")
    assert torch.equal(rows(sim), sim.init.row.expand(4, -1))
    assert sim.server.state.e.shape == (4, 2)
    apart = rows(tiny.simulation("pfedhn")) - sim.init.row
    assert 0 < apart.square().mean().sqrt() < 0.3 * sim.init.row.square().mean().sqrt()


def test_embeddings_are_normal_and_differ(tiny):
    """Drawn from each client's own stream: N(0, 1), and all different."""
    e = tiny.simulation("pfedhn:embedding=50,hidden=2,depth=0", data=tiny.federation(sizes=(1,) * 40)).server.state.e
    assert len(e.unique()) == 2000
    assert abs(e.mean().item()) < 4 / 2000**0.5
    assert abs(e.std().item() - 1) < 4 / 4000**0.5


def test_a_newcomer_of_pfedhn_fits_its_embedding_only(tiny):
    """The hypernetwork and the others' embeddings keep their bits; the fitted embedding lowers the newcomer's loss."""
    data = tiny.federation(sizes=(7, 12, 1, 5, 6), unseen=1)
    sim = rounds(tiny.simulation(PFedHN(hidden=8, depth=1, hyper_lr=0.3, adapt=30), data=data), 10)
    admitted = sim.admitted(data.unseen).state
    for name, t in sim.server.state.tensors().items():
        assert torch.equal(admitted.tensors()[name][: len(t)], t), name
    mean = sim.method.rows(sim.server.state, sim.server.state.e.mean(0, keepdim=True))[0]
    assert loss(sim, 4, sim.row(4)) < loss(sim, 4, mean) - 1e-4


def test_pfedhn_pc_by_hand(tiny):
    """Bodies H(e_i) under heads that stay: SGD on both jointly, the server steps by SGD on the body's surrogate."""
    sim = tiny.simulation(PFedHN(personal="head", hidden=6, depth=2, hyper_lr=0.3))
    twin, body = Twin(sim.method, sim.server.state), sim.layout.columns("~head")
    head = sim.layout.cut(sim.init.row, "head").expand(4, -1)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.3, momentum=0.9, weight_decay=1e-3)
    for _ in range(3):
        written = twin(torch.arange(4))
        start = sim.layout.put(sim.layout.put(sim.init.row, "head", head), "~head", written.detach())
        assert_close(rows(sim), start)
        trained = local_rows(tiny, sim, start)
        optimizer.zero_grad()
        ((written.detach() - trained[:, body]) * written).sum(1).mean().backward()
        twin.e.grad *= 4  # the mean's is a fourth of its client's own
        optimizer.step()
        sim.round()
        head = sim.layout.cut(trained, "head")
        assert_close(sim.own.row, head)
        assert_close(sim.server.state.psi, twin.psi())
        assert_close(sim.server.state.e, twin.e.detach())
    assert registry.method("pfedhn:pc") == PFedHN(personal="head")


def test_a_newcomer_of_pfedhn_pc_fits_its_embedding_and_then_its_head(tiny):
    """The embedding under the initial head, by full gradient steps of autograd; then a round of the head alone."""
    data = tiny.federation(sizes=(7, 12, 1, 5, 6), unseen=1)
    sim = rounds(tiny.simulation(PFedHN(personal="head", hidden=6, depth=1, adapt=3), data=data), 2)
    twin, body = Twin(sim.method, sim.server.state), sim.layout.columns("~head")
    e = sim.server.state.e.mean(0)
    x, y = data.client(4)
    for _ in range(3):
        e = e.detach().requires_grad_()
        twin.e = nn.Parameter(torch.zeros(1, len(e), dtype=torch.float64))
        z = twin.layers[0](e)
        for layer in twin.layers[1:]:
            z = layer(torch.relu(z)) if layer is not twin.layers[-1] else layer(z)
        row = sim.layout.put(sim.init.row, "~head", z.detach())
        net = sim.layout.load(copy.deepcopy(sim.init.module).double(), row)
        F.cross_entropy(net(x), y).backward()
        slope = torch.cat([dict(net.named_parameters())[entry.name].grad.flatten() for entry in sim.layout.entries])
        (grad,) = torch.autograd.grad(z, e, slope[body])
        e = e.detach() - 0.1 * grad
    written = sim.method.rows(sim.server.state, e[None])[0]
    start = sim.layout.put(sim.init.row, "~head", written)
    expected = tiny.sgd(sim, 4, start, tiny.steps_of(int(data.sizes("train")[4]), 3), part="head")[0]
    assert_close(sim.row(4), expected)


def test_pfedhn_averages_buffers(tiny):
    """What a hypernetwork cannot write, running statistics and counters, is FedAvg's."""
    sim = tiny.simulation("pfedhn", "bn")
    trained = local_rows(tiny, sim, rows(sim))
    before = sim.layout.cut(sim.server.state.row, "parameters").clone()
    sim.round()
    statistics = [e for e in sim.layout.entries if e.kind == "statistic"]
    for entry in statistics:
        columns = slice(entry.start, entry.stop)
        assert_close(rows(sim)[:, columns], (share(sim) @ trained[:, columns]).expand(4, -1))
    assert torch.equal(sim.layout.cut(sim.server.state.row, "parameters"), before)


# -- presets ----------------------------------------------------------------------------------------------------------


def test_released_programs():
    """What the released programs do, spelled as presets."""
    names = ("cwfedavg:official", "fedamp:pfllib", "pacfl:official", "cfl:official")
    cw, amp, pac, cfl = (registry.method(name) for name in names)
    assert (cw.half_lambda, cw.lam) == (True, 10.0)
    assert (amp.lam, amp.alpha, amp.sigma) == (0.0, 1.0, 1.0)
    assert (pac.vectors, pac.beta, pac.linkage, pac.measure) == (3, 4.9, "weighted", "columns")
    assert (cfl.eps1, cfl.eps2, cfl.relative, cfl.split_after, cfl.weighted) == (0.4, 1.6, False, 20, False)
    assert all(m.printed == "served" and not m.validation for m in (cw, amp, pac, cfl))
