"""Methods against the simpler methods, closed forms and golden numbers they must reduce to."""

from __future__ import annotations

import copy
import math
from decimal import Decimal

import pytest
import torch
import torch.nn.functional as F
from by_hand import MODELS, assert_close, rounds, tensor
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from coterie import registry
from coterie.contract.cohort import Cohort
from coterie.errors import CoterieError
from coterie.methods.fedfew import FedFew, full_steps, stch_set_weights
from coterie.methods.fedprox import FedProx


def local_rows(tiny, sim, start):
    """Every client's plain SGD of this round from `start [D]` (or one row for each), by torch.optim."""
    start = start if start.ndim == 2 else start.expand(sim.population, -1)
    sizes = sim.federation.sizes("train")
    steps = [tiny.steps_of(int(n), sim.training.batch, sim.training.epochs) for n in sizes]
    return torch.stack([tiny.sgd(sim, i, start[i], steps[i])[0] for i in range(sim.population)])


# -- FedAvg -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["mlp", "dropout"])
def test_fedavg_is_the_mean_of_the_clients_sgd_runs(tiny, model):
    """theta <- sum_i p_i SGD_i(theta), twice, with torch.optim as SGD."""
    sim = tiny.simulation("fedavg", model, epochs=2)
    n = tensor(tiny.SIZES)
    for _ in range(2):
        expected = (n / n.sum()) @ local_rows(tiny, sim, sim.server.state.row)
        sim.round()
        assert_close(sim.server.state.row, expected)


def test_fedavg_with_a_full_batch_step_is_centralised_gradient_descent(tiny):
    """One full-batch step on each client = one step on sum_i p_i L_i, which is the mean loss over all samples."""
    sim = tiny.simulation("fedavg", batch=0)
    module = sim.layout.load(copy.deepcopy(sim.init.module).double(), sim.server.state.row)
    pooled = [torch.cat(t) for t in zip(*(sim.federation.client(i) for i in range(4)))]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    F.cross_entropy(module(pooled[0]), pooled[1]).backward()
    optimizer.step()
    sim.round()
    assert_close(sim.server.state.row, sim.layout.row(module, torch.float64))


@pytest.mark.parametrize("model", MODELS)
def test_one_client_is_plain_sgd(tiny, model):
    """FedAvg of one client is its SGD run, round after round; so is Local's client."""
    data = tiny.federation(sizes=(7,))
    sim, alone = tiny.simulation("fedavg", model, data=data), tiny.simulation("local", model, data=data)
    for _ in range(3):
        expected, _ = tiny.sgd(sim, 0, sim.server.state.row, 3)
        sim.round()
        alone.round()
        assert_close(sim.server.state.row, expected)
        assert_close(alone.own.row[0], expected)


def test_half_a_server_step(tiny):
    """The server's lr interpolates between the old model and the mean."""
    half, full = (rounds(tiny.simulation(f"fedavg:server=sgd(lr={lr})"), 1) for lr in (0.5, 1.0))
    assert_close(half.server.state.row, (half.init.row + full.server.state.row) / 2)


def test_local_clients_do_not_see_each_other(tiny):
    """A client's rows are the same whatever the others hold."""
    data, others = tiny.federation(), tiny.federation(seed=7)
    mixed = type(data).from_splits(
        *([(data if i == 1 else others).client(i, split) for i in range(4)] for split in ("train", "test", "val")),
        classes=3,
    )
    one, two = (rounds(tiny.simulation("local", data=d), 3) for d in (data, mixed))
    assert_close(one.own.row[1], two.own.row[1])
    assert (one.own.row[0] - two.own.row[0]).abs().max() > 1e-3


# -- FedProx ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", ["fedprox:mu=0", "fedprox:pfllib,validation=true"])
def test_fedprox_without_pull_is_fedavg(tiny, model, method):
    """mu = 0 adds 0 to every gradient: bit for bit; PFLlib's program starts with that mu."""
    tiny.same(tiny.after(3, method, model), tiny.after(3, "fedavg", model))


@pytest.mark.parametrize("mu", [0.01, 1.0, 100.0])
def test_fedprox_with_one_local_step_is_fedavg(tiny, mu):
    """At w = theta the proximal gradient vanishes, whatever mu."""
    tiny.same(tiny.after(3, f"fedprox:mu={mu}", steps=1), tiny.after(3, "fedavg", steps=1))


def test_fedprox_reaches_its_minimiser_on_quadratics(tiny):
    """Least squares: w* solves (2/n X'X + mu I) w = 2/n X'y + mu theta; many full-batch steps get there."""
    data = tiny.federation(sizes=(20,), kind="regression")
    sim = tiny.simulation(FedProx(mu=0.7), "regression", data=data, batch=0, epochs=600)
    theta = sim.server.state.row.clone()
    x, y = data.client(0)
    ones = torch.cat([x, torch.ones(20, 1, dtype=torch.float64)], 1)  # columns of the row: weight, then bias
    assert [entry.name for entry in sim.layout.entries] == ["weight", "bias"]
    a = 2 / 20 * ones.T @ ones + 0.7 * torch.eye(5, dtype=torch.float64)
    expected = torch.linalg.solve(a, 2 / 20 * ones.T @ y + 0.7 * theta)
    sim.round()
    assert_close(sim.server.state.row, expected, rtol=1e-9, atol=1e-9)


def test_fedprox_step_by_step(tiny):
    """w <- w - lr (grad + mu (w - theta)) in plain PyTorch."""
    sim = tiny.simulation("fedprox:mu=0.5", epochs=3)
    start = sim.layout.views(sim.server.state.row)

    def pull(name, gradient, value):
        return gradient + 0.5 * (value - start[name])

    n = tensor(tiny.SIZES)
    steps = [tiny.steps_of(size, 3, 3) for size in tiny.SIZES]
    trained = [tiny.sgd(sim, i, sim.server.state.row, steps[i], correct=pull)[0] for i in range(4)]
    sim.round()
    assert_close(sim.server.state.row, (n / n.sum()) @ torch.stack(trained))


# -- FedAvg + fine-tune -----------------------------------------------------------------------------------------------


def test_fine_tuning_for_no_epoch_is_fedavg(tiny):
    one, two = (rounds(tiny.simulation(m), 2) for m in ("fedavgft:finetune_epochs=0", "fedavg"))
    for client in range(4):
        assert torch.equal(one.row(client), two.row(client))
    assert one.evaluate().stages["served"].steps.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("model", MODELS)
def test_fine_tuned_is_fedavgs_adapted(tiny, model):
    """Its server is FedAvg's, and its served rows and scores are FedAvg's adapted ones, bit for bit."""
    one, two = (rounds(tiny.simulation(m, model), 2) for m in ("fedavgft", "fedavg"))
    assert torch.equal(one.server.state.row, two.server.state.row)
    for client in range(4):
        assert torch.equal(one.row(client), two.row(client, adapted=True))
    served, adapted = one.evaluate().stages["served"], two.evaluate().stages["adapted"]
    assert served.steps.tolist() == adapted.steps.tolist() == [3, 4, 1, 2]
    for name in served.test:
        assert (served.test[name] == adapted.test[name]).all()


def test_fine_tuning_the_head_leaves_the_body(tiny):
    sim = rounds(tiny.simulation("fedavgft:part=head"), 1)
    base, row = sim.layout.cut(sim.server.state.row, "base"), sim.row(1)
    assert torch.equal(sim.layout.cut(row, "base"), base)
    assert_close(row, tiny.sgd(sim, 1, sim.server.state.row, 4, part="head")[0])


def test_fine_tuning_at_a_rate_of_its_own(tiny):
    """The server is FedAvg's; the copy takes two epochs of plain SGD at lr = 0.03, in the run's 0.1 it would differ."""
    sim = rounds(tiny.simulation("fedavgft:finetune_lr=0.03,finetune_epochs=2"), 1)
    assert torch.equal(sim.server.state.row, rounds(tiny.simulation("fedavg"), 1).server.state.row)
    assert_close(sim.row(1), tiny.sgd(sim, 1, sim.server.state.row, 2 * 4, lr=0.03)[0])


# -- IFCA -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_one_cluster_is_fedavg(tiny, model):
    one, two = (rounds(tiny.simulation(m, model), 3) for m in ("ifca:models=1", "fedavg"))
    assert_close(one.server.state.rows[0], two.server.state.row)


def test_ifca_round_by_hand(tiny):
    """c_i = argmin of the training loss; each model becomes the n-weighted mean of its clients' SGD runs or stays."""
    sim = tiny.simulation("ifca:models=3", seed=2)
    before = sim.server.state.rows.clone()
    losses = torch.empty(4, 3)
    for client in range(4):
        x, y = sim.federation.client(client)
        for k in range(3):
            module = sim.layout.load(copy.deepcopy(sim.init.module).double(), before[k])
            losses[client, k] = F.cross_entropy(module(x), y)
    choice = losses.argmin(1)
    trained = local_rows(tiny, sim, before[choice])
    outcome = sim.round()
    assert outcome.report["clients_per_model"] == torch.bincount(choice, minlength=3).tolist()
    for k in range(3):
        n = tensor(tiny.SIZES) * (choice == k)
        expected = n @ trained / n.sum() if n.sum() else before[k]
        assert_close(sim.server.state.rows[k], expected)


@pytest.mark.parametrize("model", MODELS)
def test_ifca_that_clusters_nothing_is_fedavg(tiny, model):
    """clustered=none: the K models are one model, whoever chooses which, and its average is over everybody."""
    one, two = (rounds(tiny.simulation(m, model), 3) for m in ("ifca:clustered=none", "fedavg"))
    assert_close(one.server.state.rows, two.server.state.row.expand(3, -1))


def test_ifca_refuses_a_frozen_part_to_cluster(tiny):
    """All its K models would be one, and it FedAvg with K downloads; of a part that trains in places there are K."""
    def model():
        return nn.Sequential(nn.Linear(4, 5).requires_grad_(False), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 3))

    with pytest.raises(CoterieError, match=r"what ifca clusters \(0\) is frozen; let some of it train"):
        tiny.simulation("ifca:clustered=0", model)
    for part in ("base", "head", "0+2"):
        tiny.simulation(f"ifca:clustered={part}", model)


def test_ifca_with_shared_lower_layers_by_hand(tiny):
    """clustered=head: the body is the n-weighted mean of all clients' SGD runs, a head that of its cluster's."""
    sim = tiny.simulation("ifca:models=2,clustered=head", seed=2)
    body, n, share = sim.layout.columns("~head"), tensor(tiny.SIZES), tensor(tiny.SIZES) / sum(tiny.SIZES)
    for _ in range(2):
        before = sim.server.state.rows.clone()
        assert torch.equal(before[0, body], before[1, body])
        assert not torch.equal(before[0], before[1])
        choice = sim.method.local(tiny.cohort(sim), type(sim.server.state)(before.expand(4, -1, -1)), None)[0].choice
        assert set(choice.tolist()) == {0, 1}
        trained = local_rows(tiny, sim, before[choice])
        sim.round()
        for k in range(2):
            mass = n * (choice == k)
            expected = sim.layout.put(mass @ trained / mass.sum(), "~head", (share @ trained)[body])
            assert_close(sim.server.state.rows[k], expected)


def test_ifca_recovers_two_opposite_groups(tiny):
    """Targets +x'w and -x'w, starts +-sign(w) of equal norm: the first assignment is right, then both are learned.

    The losses of the two starts differ by 4 sign(w)' S w with S the clients' second moments, about 4 |w|_1 > 0.
    """
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(4, generator=generator, dtype=torch.float64)
    pairs = []
    for client in range(6):
        x = torch.randn(20, 4, generator=generator, dtype=torch.float64)
        pairs.append((x, x @ w * (1 if client % 2 else -1)))
    data = type(tiny.federation()).from_splits(pairs, classes=0)

    class Opposite(registry.methods()["ifca"]):
        def start(self, init):
            first = torch.cat([w.sign(), torch.zeros(1, dtype=torch.float64)])
            return type(super().start(init))(torch.stack([first, -first]))

    sim = tiny.simulation(Opposite(models=2), "regression", data=data, batch=0, epochs=20)
    outcome = sim.round()
    assert outcome.report["clients_per_model"] == [3, 3]
    rounds(sim, 20)
    found = torch.stack([sim.row(i)[:4] for i in range(6)])
    signs = tensor([-1, 1, -1, 1, -1, 1])
    assert_close(found, signs[:, None] * w, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["ifca", "fedfew", "fesem", "fedsoft"])
@pytest.mark.parametrize(("models", "said"), [(0, "'s models must be at least 1"), (5, " with 5 models needs")])
def test_more_models_than_clients_are_refused(tiny, method, models, said):
    with pytest.raises(CoterieError, match=f"{method}{said}"):
        tiny.simulation(f"{method}:models={models}")


# -- FedFew: the weights ----------------------------------------------------------------------------------------------

LOSSES = tensor([[1.0, 2.0], [3.0, 0.5], [0.2, 0.9]])


def test_golden_1():
    """Worked example, mu = 0.5: s_i = log sum_k e^(-L_ik / mu), alpha = softmax(-s), w = softmax_k(-L / mu)."""
    alpha, w, g = stch_set_weights(LOSSES, 0.5)
    assert g.item() == pytest.approx(1.17114638, abs=1e-8)
    assert_close(alpha, tensor([0.62548948, 0.25949753, 0.11501299]), atol=1e-8)
    golden = [[0.88079708, 0.11920292], [0.00669285, 0.99330715], [0.80218389, 0.19781611]]
    assert_close(w, tensor(golden), atol=1e-8)
    assert_close((alpha[:, None] * w).sum(0), tensor([0.64492765, 0.35507235]), atol=1e-8)


def test_golden_2():
    """The same losses scaled by n = (10, 30, 60), mu = 0.1."""
    share = tensor([0.1, 0.3, 0.6])
    alpha, _, g = stch_set_weights(share[:, None] * LOSSES, 0.1)
    assert g.item() == pytest.approx(0.22759844, abs=1e-8)
    assert_close(alpha, tensor([0.2040794, 0.45999605, 0.33592455]), atol=1e-8)


def test_golden_3():
    """One model, mu = 0.5."""
    alpha, w, g = stch_set_weights(LOSSES[:, :1], 0.5)
    assert g.item() == pytest.approx(3.01088735, abs=1e-8)
    assert_close(alpha, tensor([0.01792113, 0.97846065, 0.00361821]), atol=1e-8)
    assert (w == 1).all()


def test_the_weights_are_the_gradient_of_g():
    """Quadratics L_i(theta) = a_i/2 |theta - c_i|^2: autograd of g equals sum_i alpha_i w_ik a_i (theta_k - c_i)."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    scale = torch.rand(5, generator=generator, dtype=torch.float64) + 0.5
    theta = torch.randn(2, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    apart = theta[None] - centres[:, None]  # [M, K, d]
    losses = 0.5 * scale[:, None] * apart.square().sum(2)
    alpha, w, g = stch_set_weights(losses, 0.3)
    (gradient,) = torch.autograd.grad(g, theta)
    expected = ((alpha[:, None] * w * scale[:, None])[:, :, None] * apart).sum(0)
    assert_close(gradient, expected.detach())


matrices = st.integers(1, 6).flatmap(
    lambda m: st.integers(1, 4).flatmap(
        lambda k: st.lists(st.lists(st.floats(0, 20), min_size=k, max_size=k), min_size=m, max_size=m)
    )
)


@given(matrices, st.floats(1e-3, 10))
def test_g_bounds_the_tchebycheff_value(values, mu):
    """-mu log K <= g - max_i min_k L_ik <= mu log M; all weights together make 1."""
    losses = tensor(values)
    alpha, w, g = stch_set_weights(losses, mu)
    gap = g.item() - losses.amin(1).amax().item()
    clients, models = losses.shape
    assert -mu * math.log(models) - 1e-9 <= gap <= mu * math.log(clients) + 1e-9
    rounding = 1e-10  # exp(a - s) with a = L / mu up to 2e4, whose last bit is 4e-12
    assert (alpha[:, None] * w).sum().item() == pytest.approx(1, abs=rounding)
    assert_close(w.sum(1), torch.ones(clients, dtype=torch.float64), atol=rounding)


def test_no_overflow():
    """Losses of a thousand at mu = 1e-3: g is the hard value max_i min_k, and only the worst client counts."""
    alpha, w, g = stch_set_weights(1000 * LOSSES, 1e-3)
    assert g.item() == pytest.approx(1000.0)
    assert alpha.tolist() == [1, 0, 0]
    assert w.tolist() == [[1, 0], [0, 1], [1, 0]]


def test_one_model_is_a_softmax_over_clients():
    alpha, w, _ = stch_set_weights(LOSSES[:, :1], 0.2)
    assert_close(alpha, torch.softmax(LOSSES[:, 0] / 0.2, 0))
    assert (w == 1).all()


def test_hot_is_uniform_and_cold_is_the_worst_client():
    hot, _, _ = stch_set_weights(LOSSES[:, :1], 1e12)
    cold, _, _ = stch_set_weights(LOSSES[:, :1], 1e-4)
    assert_close(hot, torch.full((3,), 1 / 3, dtype=torch.float64), atol=1e-11)
    assert cold.tolist() == [0, 1, 0]


def test_identical_models_share_equally():
    """w = 1/K exactly, and alpha is the softmax over clients of the common loss."""
    alpha, w, _ = stch_set_weights(LOSSES[:, :1].expand(3, 4), 0.5)
    assert_close(w, torch.full((3, 4), 0.25, dtype=torch.float64))
    assert_close(alpha, torch.softmax(LOSSES[:, 0] / 0.5, 0))


def test_a_shift_moves_g_only_and_models_may_be_renumbered():
    alpha, w, g = stch_set_weights(LOSSES, 0.5)
    moved = stch_set_weights(LOSSES + 7, 0.5)
    assert_close(moved[0], alpha)
    assert_close(moved[1], w)
    assert moved[2].item() == pytest.approx(g.item() + 7)
    turned = stch_set_weights(LOSSES.flip(1), 0.5)
    assert_close(turned[0], alpha)
    assert_close(turned[1], w.flip(1))


# -- FedFew: the method -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mu", "scale"), [(1e12, True), (1e12, False)])
def test_fedfew_with_one_hot_model_is_the_uniform_average(tiny, mu, scale):
    """mu -> infinity: theta <- mean over clients of SGD_i(theta), each client alike whatever its size."""
    sim = tiny.simulation(FedFew(models=1, mu=mu, scale=scale))
    expected = local_rows(tiny, sim, sim.server.state.rows[0]).mean(0)
    sim.round()
    assert_close(sim.server.state.rows[0], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mu", [1e-3, 0.1, 10.0])
def test_fedfew_with_one_model_and_equal_losses_is_the_uniform_average(tiny, mu):
    """Clients with the same data have the same loss, so alpha = 1 / M whatever mu; their batch orders still differ."""
    x, y = tiny.federation().client(1)
    data = type(tiny.federation()).from_splits([(x, y)] * 3, classes=3)
    sim = tiny.simulation(FedFew(models=1, mu=mu), data=data)
    trained = local_rows(tiny, sim, sim.server.state.rows[0])
    assert (trained[0] - trained[1]).abs().max() > 1e-4
    sim.round()
    assert_close(sim.server.state.rows[0], trained.mean(0), rtol=1e-9, atol=1e-9)  # losses agree up to rounding over mu


def test_one_model_of_the_official_preset_is_weighted_fedavg_and_fine_tuning(tiny):
    """alpha = softmax over clients of (n_i / n) (running loss) / mu; the stage it printed is SGD_i of that model."""
    sim = tiny.simulation("fedfew:official,models=1,mu=0.2", epochs=2)
    sizes = sim.federation.sizes("train").tolist()
    for _ in range(2):
        before, copies, losses = sim.server.state.rows[0].clone(), [], []
        for i, n in enumerate(sizes):
            key = tiny.stream(sim, i, copy=0)
            row, history = tiny.sgd(sim, i, before, tiny.steps_of(n, 3, 2), key=key)
            copies.append(row)
            losses.append(sum(loss * count for loss, count in history[len(history) // 2 :]) / n)
        alpha = torch.softmax(tensor(sizes) / sum(sizes) * tensor(losses) / 0.2, 0)
        assert alpha.max() > 1.2 * alpha.min()
        sim.round()
        assert_close(sim.server.state.rows[0], before + alpha @ (torch.stack(copies) - before))
    for client in range(4):
        tuned, _ = tiny.sgd(sim, client, sim.server.state.rows[0], tiny.steps_of(sizes[client], 3, 2))
        assert_close(sim.row(client, adapted=True), tuned)


def raw_losses(sim, rows):
    """The mean training loss of every client at every model, [M, K], by the module itself."""
    found = torch.empty(sim.population, len(rows), dtype=torch.float64)
    for client in range(sim.population):
        x, y = sim.federation.client(client)
        for k, row in enumerate(rows):
            module = sim.layout.load(copy.deepcopy(sim.init.module).double(), row)
            found[client, k] = F.cross_entropy(module(x), y).item()
    return found


def test_fedfew_with_one_cold_model_follows_the_worst_client(tiny):
    """mu -> 0: theta <- SGD_i(theta) of the client with the largest loss."""
    sim = tiny.simulation(FedFew(models=1, mu=1e-5, scale=False))
    worst = int(raw_losses(sim, sim.server.state.rows)[:, 0].argmax())
    expected = local_rows(tiny, sim, sim.server.state.rows[0])[worst]
    sim.round()
    assert_close(sim.server.state.rows[0], expected)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("scale", [False, True])
def test_fedfew_round_by_hand(tiny, scale, normalise):
    """theta_k <- theta_k + sum_i alpha_i w_ik (SGD_i(theta_k) - theta_k), with weights written out as fractions.

    alpha_i w_ik = (e^{-L_ik/mu} / S_i) (1/S_i) / sum_j 1/S_j with S_i = sum_k e^{-L_ik/mu}; `normalise` divides by
    the mass of model k.
    """
    sim = tiny.simulation(FedFew(models=2, mu=0.1, scale=scale, normalise=normalise))
    before, mu = sim.server.state.rows.clone(), 0.1
    share = tensor(tiny.SIZES) / sum(tiny.SIZES)
    losses = raw_losses(sim, before) * (share[:, None] if scale else 1)
    e = torch.exp(-losses / mu)
    s = e.sum(1)
    weights = (e / s[:, None]) * ((1 / s) / (1 / s).sum())[:, None]
    mass = weights.sum(0)
    assert mass.sum().item() == pytest.approx(1)
    if normalise:
        weights = weights / mass
    outcome_expected = torch.stack(
        [before[k] + weights[:, k] @ (local_rows(tiny, sim, before[k]) - before[k]) for k in range(2)]
    )
    outcome = sim.round()
    assert_close(sim.server.state.rows, outcome_expected)
    assert outcome.report["mass"] == pytest.approx(mass.tolist())
    assert outcome.report["g"] == pytest.approx(mu * math.log((1 / s).sum().item()))


@pytest.mark.parametrize("mu", [0.01, 1e-3, 1e-4])
def test_every_model_of_fedfew_takes_a_full_step_however_little_mass_it_has(tiny, mu):
    """The formula in Decimal, whose exponents have no such end as those of floats, e^-745. Below it a model would get 0
    of 0 and never move again."""
    sim = tiny.simulation(FedFew(models=3, mu=mu, scale=False, normalise=True))
    before = sim.server.state.rows.clone()
    losses = raw_losses(sim, before)
    e = [[(Decimal(-loss) / Decimal(mu)).exp() for loss in row] for row in losses.tolist()]
    weights = [[one / sum(row) / sum(row) for one in row] for row in e]  # a factor for all divides out
    full = tensor([[float(row[k] / sum(other[k] for other in weights)) for k in range(3)] for row in weights])
    assert_close(full.sum(0), torch.ones(3, dtype=torch.float64))
    trained = torch.stack([local_rows(tiny, sim, row) for row in before], 1)  # [M, K, D]
    outcome = sim.round()
    assert (min(outcome.report["mass"]) == 0) is (mu == 1e-4)
    assert_close(sim.server.state.rows, torch.einsum("ik,ikd->kd", full, trained), atol=1e-9)


def test_full_steps_by_hand():
    """Two clients that differ by mu log 3 in a model that is e^-1000 of the other to both: 3/4 and 1/4. A model that
    is infinitely bad for everybody has no takers, one that is so for a client has the other."""
    losses = tensor([[0, 1000, math.inf, 2000], [0, 1000 + math.log(3), math.inf, math.inf]])
    assert_close(full_steps(losses, 1.0), tensor([[0.5, 0.75, 0, 1], [0.5, 0.25, 0, 0]]))


@pytest.mark.parametrize("loss_at", ["running", "after"])
def test_fedfew_can_weigh_by_other_losses(tiny, loss_at):
    """`running` is the samples' mean of the losses before each step of the last epoch; `after` that of the copies."""
    sim = tiny.simulation(FedFew(models=2, mu=0.1, scale=False, loss_at=loss_at), epochs=2)
    before = sim.server.state.rows.clone()
    losses = torch.empty(4, 2, dtype=torch.float64)
    copies = torch.empty(4, 2, sim.layout.size, dtype=torch.float64)
    for i, n in enumerate(tiny.SIZES):
        for k in range(2):
            copies[i, k], history = tiny.sgd(sim, i, before[k], tiny.steps_of(n, 3, 2))
            last = history[len(history) // 2 :]
            losses[i, k] = sum(loss * count for loss, count in last) / n
    if loss_at == "after":
        for i in range(4):
            losses[i] = raw_losses(sim, copies[i])[i]
    alpha, w, _ = stch_set_weights(losses, 0.1)
    sim.round()
    assert_close(sim.server.state.rows, before + torch.einsum("ik,ikd->kd", alpha[:, None] * w, copies - before))


def test_fedfew_serves_the_model_of_least_validation_loss(tiny):
    """Client 2 has no validation data and takes its training loss; the others choose on validation data."""
    sim = rounds(tiny.simulation("fedfew"), 2)
    for client in range(4):
        x, y = sim.federation.client(client, "train" if client == 2 else "val")
        module = copy.deepcopy(sim.init.module).double()
        losses = [F.cross_entropy(sim.layout.load(module, row)(x), y).item() for row in sim.server.state.rows]
        best = losses.index(min(losses))
        assert torch.equal(sim.row(client), sim.server.state.rows[best])


def test_the_official_preset(tiny):
    """The released program: equal starts, running loss, no validation split, and a table of adapted scores."""
    chosen = registry.method("fedfew:official")
    assert chosen == FedFew.official()
    assert (chosen.models, chosen.mu, chosen.start_from, chosen.loss_at) == (3, 0.01, "same", "running")
    assert (chosen.scale, chosen.normalise) == (True, False)
    assert (chosen.printed, chosen.validation) == ("adapted", False)
    sim = tiny.simulation(chosen)
    assert sim.federation.sizes("val").tolist() == [0, 0, 0, 0]
    assert sim.federation.sizes("train").tolist() == [9, 15, 1, 6]  # validation samples given back to training


def test_equal_starts_part_through_batch_orders_only(tiny):
    """`same` starts bit-equal; after a round the models differ because the copies see other batch orders.

    With full batches there is no order, so they stay equal.
    """
    sim = tiny.simulation(FedFew(start_from="same"))
    assert all(torch.equal(row, sim.init.row) for row in sim.server.state.rows)
    sim.round()
    first, second, third = sim.server.state.rows
    assert min((a - b).abs().max() for a, b in ((first, second), (first, third), (second, third))) > 1e-6
    full = rounds(tiny.simulation(FedFew(start_from="same"), batch=0), 2)
    assert_close(full.server.state.rows[1], full.server.state.rows[0])
    assert_close(full.server.state.rows[2], full.server.state.rows[0])


def test_equal_starts_with_noise(tiny):
    """Parameters are the common start plus noise of the asked size; buffers have none."""
    sim = tiny.simulation(FedFew(start_from="same+noise", noise=0.02), "bn")
    apart = sim.layout.cut(sim.server.state.rows - sim.init.row, "parameters")
    assert len({tuple(row.tolist()) for row in apart}) == 3
    assert 0.01 < apart.std().item() < 0.03  # 150 draws: the standard error is 6 %
    fresh = sim.layout.cut(sim.init.row, "buffers")
    assert torch.equal(sim.layout.cut(sim.server.state.rows, "buffers"), fresh.expand(3, -1))


def test_independent_starts_differ(tiny):
    sim = tiny.simulation("fedfew")
    assert torch.equal(sim.server.state.rows[0], sim.init.row)
    assert len({tuple(row.tolist()) for row in sim.server.state.rows}) == 3


def test_the_k_models_share_batches_unless_they_start_equal(tiny, monkeypatch):
    """Independent models are told apart by themselves; only equal starts need orders of their own."""
    asked = []
    original = Cohort.train_watched

    def spy(self, rows, *args, distinct=False, **options):
        asked.append(distinct)
        return original(self, rows, *args, distinct=distinct, **options)

    monkeypatch.setattr(Cohort, "train_watched", spy)
    rounds(tiny.simulation(FedFew()), 1)
    rounds(tiny.simulation(FedFew(start_from="same")), 1)
    assert asked == [False, True]
