"""SCAFFOLD, Ditto, APFL, Per-FedAvg, pFedMe, FedDyn, MOON, FedMTL: reductions, invariants, closed forms, by hand.

The references are torch.optim and autograd on the actual module; they share no code with the engine.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from by_hand import MODELS, assert_close, rounds
from torch import nn

from coterie import registry, streams
from coterie.contract.net import Batch, Given
from coterie.contract.objectives import hessian_times
from coterie.contract.records import Model
from coterie.errors import CoterieError
from coterie.methods.apfl import APFL
from coterie.methods.ditto import Ditto
from coterie.methods.feddyn import FedDyn
from coterie.methods.fedmtl import FedMTL
from coterie.methods.perfedavg import PerFedAvg
from coterie.methods.pfedme import PFedMe
from coterie.methods.scaffold import SCAFFOLD

N = torch.tensor([7.0, 12.0, 1.0, 5.0], dtype=torch.float64)  # the clients' samples
SHARE = N / N.sum()


def served(sim):
    return torch.stack([sim.row(i) for i in range(sim.population)])


def gradient(sim, row, x, y):
    """The gradient of the mean loss at `row [D]`, by autograd on the module (models without dropout and buffers)."""
    module = sim.layout.load(copy.deepcopy(sim.init.module).double(), row)
    outputs = module(x)
    loss = F.cross_entropy(outputs, y) if sim.federation.classes else (outputs[:, 0] - y).square().mean()
    found = dict(zip(dict(module.named_parameters()), torch.autograd.grad(loss, list(module.parameters()))))
    return torch.cat([found[entry.name].reshape(-1) for entry in sim.layout.entries])


def batches(tiny, sim, client, number=0):
    """`(x, y)` of each local step of this round, from the client's stream of that number."""
    x, y = sim.federation.client(client)
    steps = tiny.steps_of(len(x), sim.training.batch, sim.training.epochs)
    chosen = tiny.batches(tiny.stream(sim, client, number=number), len(x), sim.training.batch, steps)
    return [(x[c], y[c]) for c in chosen]


def sgd(tiny, sim, start, **options):
    """Every client's plain SGD of this round by torch.optim, from one row or one for each."""
    start = start if start.ndim == 2 else start.expand(sim.population, -1)
    sizes = sim.federation.sizes("train").tolist()
    steps = [tiny.steps_of(n, sim.training.batch, sim.training.epochs) for n in sizes]
    return torch.stack([tiny.sgd(sim, i, start[i], steps[i], **options)[0] for i in range(sim.population)])


def squares(tiny, sizes):
    """Least squares: the federation, and H_i [5, 5], b_i [5] with L_i = w' H_i w / 2 - b_i' w + const.

    H_i is turned from client to client and has its eigenvalues between 1 and 3, so that few steps solve a problem.
    """
    generator = torch.Generator().manual_seed(0)
    pairs, H, b = [], [], []
    for n in sizes:
        ones = torch.ones(n, 1, dtype=torch.float64)
        drawn, turn = (torch.randn(k, 4, generator=generator, dtype=torch.float64) for k in (n, 4))
        Q, _ = torch.linalg.qr(torch.cat([ones, drawn], 1))
        R, _ = torch.linalg.qr(turn)
        stretch = torch.rand(4, generator=generator, dtype=torch.float64) + 0.5
        x = (n * stretch).sqrt() * Q[:, 1:] @ R
        y = 2 * torch.randn(n, generator=generator, dtype=torch.float64)
        full = torch.cat([x, ones], 1)  # a row is weight, then bias
        pairs.append((x, y))
        H.append(2 / n * full.T @ full)
        b.append(2 / n * full.T @ y)
    return type(tiny.federation()).from_splits(pairs, classes=0), torch.stack(H), torch.stack(b)


EYE = torch.eye(5, dtype=torch.float64)


def full_batch(tiny, method, data, **options):
    return tiny.simulation(method, "regression", data=data, batch=0, **{"lr": 0.3, **options})


# -- SCAFFOLD ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_scaffold_begins_as_fedavg_of_equal_weights(tiny, model):
    """All control variates are 0 in round 1, so it is the plain mean of the clients' SGD runs."""
    sim = tiny.simulation("scaffold", model, epochs=2)
    expected = sgd(tiny, sim, sim.server.state.row).mean(0)
    sim.round()
    keep = "parameters"  # counters take the maximum, not the mean
    assert_close(sim.layout.cut(sim.server.state.row, keep), sim.layout.cut(expected, keep))


@pytest.mark.parametrize("model", MODELS)
def test_weighted_scaffold_begins_as_fedavg(tiny, model):
    one, two = (rounds(tiny.simulation(m, model), 1) for m in ("scaffold:weighted=true", "fedavg"))
    assert torch.equal(one.server.state.row, two.server.state.row)


@pytest.mark.parametrize("model", ["mlp", "bn"])
@pytest.mark.parametrize("variate", ["path", "gradient"])
def test_scaffolds_control_is_the_mean_of_the_clients(tiny, model, variate):
    """c = 1/M sum_i c_i after every round, with half of the clients, dropouts and stragglers; buffers have none."""
    data = tiny.federation(sizes=(6, 3, 1, 5, 4, 9))
    chosen = SCAFFOLD(variate=variate)
    sim = tiny.simulation(chosen, model, data=data, participation=0.5, dropouts=0.2, stragglers=0.5, seed=1)
    for _ in range(5):
        sim.round()
        assert_close(sim.server.state.control, sim.own.row.mean(0))
    assert sim.server.state.control.abs().max() > 1e-3
    assert (sim.layout.cut(sim.own.row, "buffers") == 0).all()


def test_scaffolds_control_after_one_full_batch_step_is_the_gradient(tiny):
    """c_i - c + (theta - y) / lr with y = theta - lr (grad - c_i + c) is grad L_i(theta), in every round."""
    sim = tiny.simulation("scaffold", batch=0)
    for _ in range(3):
        expected = torch.stack([gradient(sim, sim.server.state.row, *sim.federation.client(i)) for i in range(4)])
        sim.round()
        assert_close(sim.own.row, expected)


def test_scaffold_of_the_first_option_takes_the_gradient_at_the_received_model(tiny):
    sim = rounds(tiny.simulation("scaffold:variate=gradient", epochs=2), 1)
    expected = torch.stack([gradient(sim, sim.server.state.row, *sim.federation.client(i)) for i in range(4)])
    sim.round()
    assert_close(sim.own.row, expected)


def test_scaffold_for_equal_clients_corrects_nothing(tiny):
    """Equal data and batches: c_i - c = 0 always, and the run is FedAvg's."""
    x, y = tiny.federation().client(1)
    data = type(tiny.federation()).from_splits([(x, y)] * 3, classes=3)
    one, two = (tiny.simulation(m, data=data, batch=0, epochs=3) for m in ("scaffold", "fedavg"))
    for _ in range(4):
        one.round()
        two.round()
        assert_close(one.own.row, one.server.state.control.expand(3, -1))
        assert_close(one.server.state.row, two.server.state.row)


def test_scaffold_round_by_hand(tiny):
    """y <- y - lr (grad - c_i + c); c_i <- c_i - c + (theta - y) / (tau_i lr) with the steps stragglers really took."""
    sim = rounds(tiny.simulation("scaffold:server=sgd(lr=0.5)", epochs=3, stragglers=0.6, seed=2), 1)
    theta, c, own = sim.server.state.row.clone(), sim.server.state.control.clone(), sim.own.row.clone()
    assert own.abs().max() > 1e-2
    work = sim._straggling(sim.selected(1), 1)
    steps = [math.ceil(tiny.steps_of(n, 3, 3) * share) for n, share in zip(tiny.SIZES, work)]
    assert steps != [tiny.steps_of(n, 3, 3) for n in tiny.SIZES]
    ends = []
    for i in range(4):
        drift = sim.layout.views(c - own[i])
        ends.append(tiny.sgd(sim, i, theta, steps[i], correct=lambda name, g, _, d=drift: g + d[name])[0])
    ends = torch.stack(ends)
    sim.round()
    assert_close(sim.server.state.row, theta + 0.5 * (ends - theta).mean(0))
    tau = torch.tensor(steps, dtype=torch.float64)[:, None]
    assert_close(sim.own.row, own - c + (theta - ends) / (tau * 0.1))


@pytest.mark.parametrize("method", [SCAFFOLD(), FedDyn(alpha=0.5, gradient_clip=None)])
def test_drift_correction_reaches_the_minimiser_that_fedavg_misses(tiny, method):
    """Least squares, many local steps: the minimiser of the mean loss solves mean H w = mean b; FedAvg is biased."""
    data, H, b = squares(tiny, (7, 7, 7))
    expected = torch.linalg.solve(H.mean(0), b.mean(0))
    sim = rounds(full_batch(tiny, method, data, epochs=5), 120)
    assert_close(sim.server.state.row, expected, rtol=1e-6, atol=1e-6)
    plain = rounds(full_batch(tiny, "fedavg", data, epochs=5), 60)
    assert (plain.server.state.row - expected).abs().max() > 1e-2


# -- Ditto ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", ["ditto:lam=0", "ditto:pfllib,validation=true"])
def test_ditto_without_pull_keeps_locals_models(tiny, model, method):
    """lam = 0, as in PFLlib's program: personal models are Local's bit for bit, half of the clients taking part."""
    one, two = (rounds(tiny.simulation(m, model, participation=0.5), 4) for m in (method, "local"))
    assert torch.equal(one.own.row, two.own.row)
    assert torch.equal(served(one), served(two))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("lam", [0.0, 1.0, 7.0])
def test_dittos_shared_model_is_fedavgs(tiny, model, lam):
    """Whatever lam, and however long the personal models train."""
    one, two = (rounds(tiny.simulation(m, model), 3) for m in (Ditto(lam=lam, personal_epochs=2), "fedavg"))
    assert torch.equal(one.server.state.row, two.server.state.row)


def test_ditto_falls_on_the_shared_model_where_data_say_nothing(tiny):
    """lam * personal_lr = 1 and a loss without gradient: one step from anywhere is theta."""
    silent = tiny.simulation(Ditto(lam=4.0, personal_lr=0.25), loss=lambda out, y: 0 * out.sum(-1), batch=0)
    silent.own = Model(tiny.rows(silent))
    silent.round()
    assert_close(silent.own.row, silent.init.row.expand(4, -1))


def test_ditto_reaches_its_minimiser(tiny):
    """Least squares: v* solves (H_i + lam) v = b_i + lam theta with the received theta."""
    data, H, b = squares(tiny, (6, 8, 7))
    sim = rounds(full_batch(tiny, Ditto(lam=0.7, personal_epochs=80), data), 2)
    theta = sim.server.state.row.clone()
    sim.round()
    expected = torch.linalg.solve(H + 0.7 * EYE, b + 0.7 * theta)
    assert_close(sim.own.row, expected, rtol=1e-9, atol=1e-9)
    assert_close(served(sim), expected, rtol=1e-9, atol=1e-9)


# -- APFL -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_apfl_of_proportion_0_deploys_the_shared_model(tiny, model):
    sim = rounds(tiny.simulation("apfl:alpha=0,adaptive=false", model), 3)
    assert torch.equal(served(sim), sim.server.state.row.expand(4, -1))


@pytest.mark.parametrize("model", MODELS)
def test_apfl_of_proportion_1_is_local(tiny, model):
    """v follows Local's clients, running statistics included."""
    one, two = (rounds(tiny.simulation(m, model), 3) for m in ("apfl:alpha=1,adaptive=false", "local"))
    assert_close(one.own.own, two.own.row)
    assert_close(served(one), served(two))


@pytest.mark.parametrize("model", ["dropout", "bn"])
@pytest.mark.parametrize("method", ["apfl:alpha=0.3,adaptive=false", "apfl", "apfl:pfllib,validation=true"])
def test_apfls_shared_model_is_fedavgs(tiny, model, method):
    """The upload does not depend on the client's own model."""
    one, two = (rounds(tiny.simulation(m, model), 3) for m in (method, "fedavg"))
    assert_close(one.server.state.row, two.server.state.row)


def apfl_by_hand(tiny, sim, client, w, v, alpha, pfllib):
    """One round of a client in plain PyTorch: w, v and alpha."""
    for x, y in batches(tiny, sim, client):
        at_w = gradient(sim, w, x, y)
        if pfllib:
            at_v = gradient(sim, v, x, y)
            w, v = w - 0.1 * at_w, v - 0.1 * at_v
            slope = (v - w) @ (alpha * at_v + (1 - alpha) * at_w) + 0.02 * alpha
            alpha = (alpha - 0.1 * slope).clamp(0, 1)
        else:
            mixed = alpha * v + (1 - alpha) * w
            w, v = w - 0.1 * at_w, v - 0.1 * alpha * gradient(sim, mixed, x, y)
    mixed = alpha * v + (1 - alpha) * w
    if pfllib:
        return w, mixed, alpha
    slope = (v - w) @ gradient(sim, mixed, *sim.federation.client(client)) + 0.3 * alpha
    return w, v, (alpha - 0.3 * slope).clamp(0, 1)


@pytest.mark.parametrize("pfllib", [False, True])
def test_apfl_rounds_by_hand(tiny, pfllib):
    """The paper's form with alpha_lr = rho = 0.3; PFLlib's, whose v becomes the mixture and is deployed unmixed."""
    chosen = APFL(alpha_lr=0.3, rho=0.3) if not pfllib else registry.method("apfl:pfllib,validation=true,alpha=0.8")
    sim = tiny.simulation(chosen, epochs=2)
    for _ in range(3):
        own = [(sim.own.own[i].clone(), sim.own.alpha[i].clone()) for i in range(4)]
        ends = [apfl_by_hand(tiny, sim, i, sim.server.state.row, v, alpha, pfllib) for i, (v, alpha) in enumerate(own)]
        w, v, alpha = (torch.stack(part) for part in zip(*ends))
        sim.round()
        assert_close(sim.server.state.row, SHARE @ w)
        assert_close(sim.own.own, v)
        assert_close(sim.own.alpha, alpha)
        assert_close(served(sim), v if pfllib else alpha[:, None] * v + (1 - alpha[:, None]) * SHARE @ w)
    assert len(set(alpha.tolist())) == 4


def test_apfls_slope_is_the_derivative_of_the_mixtures_loss(tiny):
    """(alpha before - after) / alpha_lr against the central difference of L(alpha v + (1 - alpha) w) in alpha."""
    fixed, moving = (tiny.simulation(f"apfl:alpha=0.4,alpha_lr=0.01,adaptive={a}", epochs=2) for a in (False, True))
    w = sgd(tiny, fixed, fixed.server.state.row)
    fixed.round()
    moving.round()
    assert torch.equal(fixed.own.own, moving.own.own)
    v, cohort, h = fixed.own.own, tiny.cohort(fixed), 1e-5
    up, down = (cohort.loss(a * v + (1 - a) * w) for a in (0.4 + h, 0.4 - h))
    assert_close((0.4 - moving.own.alpha) / 0.01, (up - down) / (2 * h), rtol=1e-6, atol=1e-8)


def test_apfls_proportion_rests_where_both_models_are_equal(tiny):
    """One client and alpha = 1: v = w, so alpha moves by rho alone: 1 - lr rho after a round."""
    data = tiny.federation(sizes=(7,))
    assert rounds(tiny.simulation("apfl:alpha=1", data=data), 3).own.alpha.item() == 1
    decayed = rounds(tiny.simulation("apfl:alpha=1,rho=0.5", data=data), 1).own.alpha.item()
    assert decayed == pytest.approx(0.95, abs=1e-12)


@pytest.mark.parametrize("method", ["apfl:alpha_lr=1000", "apfl:pfllib,alpha_lr=1000"])
def test_apfls_proportion_stays_in_the_unit_interval(tiny, method):
    sim = tiny.simulation(method)
    for _ in range(4):
        sim.round()
        assert ((sim.own.alpha >= 0) & (sim.own.alpha <= 1)).all()


def test_the_pfllib_preset_of_apfl():
    chosen = registry.method("apfl:pfllib")
    assert chosen == APFL.pfllib()
    assert (chosen.alpha, chosen.adaptive, chosen.rho, chosen.form) == (1.0, True, 0.02, "pfllib")
    assert (chosen.validation, chosen.printed) == (False, "served")


# -- Per-FedAvg -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["dropout", "bn"])
@pytest.mark.parametrize("order", ["first", "hessian_free", "exact"])
def test_perfedavg_without_inner_step_is_fedavg(tiny, model, order):
    """alpha = 0: plain SGD of learning rate beta on the batches D', which are plain training's."""
    chosen = PerFedAvg(order=order, alpha=0.0, beta=0.2)
    one, two = rounds(tiny.simulation(chosen, model), 3), rounds(tiny.simulation("fedavg", model, lr=0.2), 3)
    assert_close(one.server.state.row, two.server.state.row)


@pytest.mark.parametrize("order", ["first", "hessian_free", "exact"])
def test_perfedavg_without_outer_step_stands_still(tiny, order):
    """beta = 0: the step starts from the old w, which the inner step has not touched."""
    sim = rounds(tiny.simulation(PerFedAvg(order=order, beta=0.0)), 2)
    assert torch.equal(sim.server.state.row, sim.init.row)


def hessian_product(sim, row, x, y, g):
    """H g by autograd, twice backwards."""
    module = copy.deepcopy(sim.init.module).double()

    def loss(flat):
        views = sim.layout.views(flat)
        return F.cross_entropy(torch.func.functional_call(module, views, (x,)), y)

    return torch.autograd.functional.hvp(loss, row, g)[1]


@pytest.mark.parametrize("order", ["first", "hessian_free", "exact"])
def test_perfedavg_rounds_by_hand(tiny, order):
    """g = grad L(w - alpha grad L(w; D); D') and w <- w - beta (g - alpha H(w; D'') g), from the old w."""
    sim = tiny.simulation(PerFedAvg(order=order, alpha=0.3, beta=0.2), epochs=2)
    for _ in range(2):
        ends = []
        for i in range(4):
            w = sim.server.state.row.clone()
            drawn = [batches(tiny, sim, i, number) for number in range(3)]
            for second, first, third in zip(*drawn):
                g = gradient(sim, w - 0.3 * gradient(sim, w, *first), *second)
                w = w - 0.2 * (g if order == "first" else g - 0.3 * hessian_product(sim, w, *third, g))
            ends.append(w)
        sim.round()
        quotient = {"rtol": 1e-6, "atol": 1e-6} if order == "hessian_free" else {}  # of order delta^2
        assert_close(sim.server.state.row, SHARE @ torch.stack(ends), **quotient)


def test_exact_perfedavg_descends_the_meta_objective(tiny):
    """With full batches a step is - beta times the gradient of L(w - alpha grad L(w)), by autograd through both."""
    data = tiny.federation(sizes=(12,))
    sim = tiny.simulation(PerFedAvg(order="exact", alpha=0.4, beta=0.1), data=data, batch=0)
    x, y = data.client(0)
    module = copy.deepcopy(sim.init.module).double()

    def loss(flat):
        return F.cross_entropy(torch.func.functional_call(module, sim.layout.views(flat), (x,)), y)

    w = sim.init.row.clone().requires_grad_()
    (inner,) = torch.autograd.grad(loss(w), w, create_graph=True)
    (meta,) = torch.autograd.grad(loss(w - 0.4 * inner), w)
    sim.round()
    assert_close(sim.server.state.row, w.detach() - 0.1 * meta)


@pytest.mark.parametrize("delta", [1e-3, 1.0])
def test_hessian_free_is_exact_on_quadratics(tiny, delta):
    """The gradient of a quadratic is affine, so the difference quotient is H g for any delta."""
    data, _, _ = squares(tiny, (6, 8, 7))
    one, two = (
        rounds(tiny.simulation(PerFedAvg(order=order, delta=delta, alpha=0.05), "regression", data=data), 3)
        for order in ("hessian_free", "exact")
    )
    assert_close(one.server.state.row, two.server.state.row, rtol=1e-10, atol=1e-10)


def test_the_second_order_term_of_perfedavg(tiny):
    """w_exact - w_first = + beta alpha H g after one full-batch step, H = 2/n X'X and g the gradient one step ahead."""
    data, H, b = squares(tiny, (9,))
    first, exact = (
        rounds(full_batch(tiny, PerFedAvg(order=order, alpha=0.05, beta=0.2), data), 1) for order in ("first", "exact")
    )
    w = first.init.row
    g = H[0] @ (w - 0.05 * (H[0] @ w - b[0])) - b[0]
    assert_close(exact.server.state.row - first.server.state.row, 0.2 * 0.05 * H[0] @ g)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d, nn.LayerNorm, lambda width: nn.GroupNorm(2, width)])
def test_second_derivatives_of_layers_that_normalise(tiny, layer):
    """H v is the central difference of gradients along v: of step 1e-5 it errs by 1e-10 and its rounding by 1e-11."""
    def model():
        return nn.Sequential(nn.Linear(tiny.FEATURES, 6), layer(6), nn.Tanh(), nn.Linear(6, tiny.CLASSES))

    sim = tiny.simulation(model=model)
    net, row = sim.engine.net, tiny.rows(sim)[1]
    x, y = sim.federation.client(1)
    batch = Batch(x, y, torch.ones(len(x), dtype=row.dtype), streams.key("test", torch.zeros((), dtype=torch.int64)))
    v = sim.layout.put(torch.zeros_like(row), "parameters", sim.layout.cut(tiny.rows(sim, seed=2)[0], "parameters"))
    net.mode(training=True)
    ahead, behind = (net.grad(row + step * v, batch) for step in (1e-5, -1e-5))
    assert_close(hessian_times(net, row, batch, v), (ahead - behind) / 2e-5, rtol=1e-6, atol=1e-8)


def test_perfedavg_deploys_the_shared_model_after_one_step(tiny):
    """On one training batch with step alpha, for a client never seen as well; the evaluator counts it."""
    data = tiny.federation(sizes=(7, 12, 1, 5, 6), unseen=1)
    sim = rounds(tiny.simulation("perfedavg:alpha=0.3", data=data), 2)
    for client in range(5):
        assert_close(sim.row(client), tiny.sgd(sim, client, sim.server.state.row, 1, lr=0.3)[0])
    assert sim.evaluate().stages["unseen_served"].steps.tolist() == [1]


def test_perfedavg_may_adapt_for_the_runs_epochs(tiny):
    """With step alpha = lr it then deploys what its shared model's `adapted` would be."""
    sim = rounds(tiny.simulation("perfedavg:adapt_steps=none"), 1)
    assert_close(served(sim), sgd(tiny, sim, sim.server.state.row))


# -- pFedMe -----------------------------------------------------------------------------------------------------------


def test_pfedme_with_beta_0_freezes_the_server(tiny):
    sim = rounds(tiny.simulation("pfedme:beta=0"), 2)
    assert torch.equal(sim.server.state.row, sim.init.row)


@pytest.mark.parametrize("model", MODELS)
def test_pfedme_without_pull_never_moves_the_shared_model(tiny, model):
    """lam = 0: the outer gradient lam (w - v) is 0 (running statistics move)."""
    sim = rounds(tiny.simulation("pfedme:lam=0", model), 2)
    assert torch.equal(*(sim.layout.cut(row, "parameters") for row in (sim.server.state.row, sim.init.row)))


def pfedme_by_hand(tiny, sim, client, method):
    """One round of a client in plain PyTorch: w after every batch, and v."""
    w = v = sim.server.state.row.clone()
    for x, y in batches(tiny, sim, client):
        for _ in range(method.inner):
            v = v - method.inner_lr * (gradient(sim, v, x, y) + method.lam * (v - w) + method.nu * v)
        w = w - sim.training.lr * method.lam * (w - v)
    return w, v


@pytest.mark.parametrize("weighted", [False, True])
def test_pfedme_rounds_by_hand(tiny, weighted):
    """v is kept from batch to batch; theta <- (1 - beta) theta + beta mean w_i."""
    method = PFedMe(lam=4.0, inner=3, inner_lr=0.07, nu=0.1, beta=0.5, weighted=weighted)
    sim = tiny.simulation(method, epochs=2)
    for _ in range(2):
        ends = torch.stack([pfedme_by_hand(tiny, sim, i, method)[0] for i in range(4)])
        mean = SHARE @ ends if weighted else ends.mean(0)
        expected = 0.5 * sim.server.state.row + 0.5 * mean
        sim.round()
        assert_close(sim.server.state.row, expected)


def test_pfedme_may_take_so_many_batches(tiny):
    """20 batches are 20 local steps, on into further passes; 0.1 is the run's step size, as 20 steps of a run have."""
    one, two = tiny.simulation("pfedme:batches=20"), tiny.simulation("pfedme", steps=20)
    for sim in (one, two):
        sim.round()
    assert torch.equal(one.server.state.row, two.server.state.row)
    w = v = one.init.row
    x, y = one.federation.client(1)
    one = tiny.simulation("pfedme:batches=20")
    for chosen in tiny.batches(tiny.stream(one, 1), len(x), 3, 20):
        for _ in range(5):
            v = v - 0.01 * (gradient(one, v, x[chosen], y[chosen]) + 15 * (v - w))
        w = w - 0.1 * 15 * (w - v)
    assert_close(one.method.train(tiny.cohort(one), one.init.row.expand(4, -1))[1], w)


def test_pfedmes_outer_step_of_size_1_is_the_personal_model(tiny):
    """lr lam = 1: w = v after each outer step, and with beta = 1 theta is the plain mean of the v_i."""
    method = PFedMe(lam=10.0, inner=2, inner_lr=0.05)
    sim = tiny.simulation(method, epochs=2)
    ends = [pfedme_by_hand(tiny, sim, i, method) for i in range(4)]
    assert_close(*(torch.stack(part) for part in zip(*ends)))
    sim.round()
    assert_close(sim.server.state.row, torch.stack([v for _, v in ends]).mean(0))


def test_pfedme_solves_its_inner_problem_on_quadratics(tiny):
    """v* solves (H + lam + nu) v = b + lam w; w moves by - lr lam (w - v*), which for nu = 0 is
    - lr lam H (H + lam)^-1 (w - c) with c the minimiser; what is deployed is v* at theta."""
    data, H, b = squares(tiny, (9,))
    for nu in (0.0, 0.3):
        sim = full_batch(tiny, PFedMe(lam=2.0, inner=60, inner_lr=0.2, nu=nu), data)
        w = sim.init.row
        best = torch.linalg.solve(H[0] + (2 + nu) * EYE, b[0] + 2 * w)
        assert_close(sim.row(0), best, rtol=1e-9, atol=1e-9)
        sim.round()
        assert_close(sim.server.state.row, w - 0.3 * 2 * (w - best), rtol=1e-9, atol=1e-9)
        if nu == 0:
            c = torch.linalg.solve(H[0], b[0])
            slope = 2 * H[0] @ torch.linalg.solve(H[0] + 2 * EYE, w - c)
            assert_close(sim.server.state.row, w - 0.3 * slope, rtol=1e-9, atol=1e-9)


def test_pfedme_deploys_the_inner_problem_solved_from_the_shared_model(tiny):
    """`inner` steps on training batches with the pull, also for a client never seen."""
    data = tiny.federation(sizes=(7, 12, 1, 5, 6), unseen=1)
    sim = rounds(tiny.simulation(PFedMe(lam=4.0, inner=3, inner_lr=0.07), data=data), 2)
    theta = sim.layout.views(sim.server.state.row)

    def pull(name, gradient, value):
        return gradient + 4.0 * (value - theta[name])

    for client in range(5):
        assert_close(sim.row(client), tiny.sgd(sim, client, sim.server.state.row, 3, lr=0.07, correct=pull)[0])


def test_pfedmes_decay_spares_what_is_not_trained(tiny):
    """nu |v|^2 does not shrink running statistics; a frozen layer is in no row."""

    def frozen():
        module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        module[0].requires_grad_(False)
        return module

    sim = rounds(tiny.simulation("pfedme:nu=5", frozen), 2)
    assert sim.layout.within("0") == ()
    still = sim.layout.views(sim.server.state.row)["1.running_var"]
    assert (still > 0.3).all()  # 5 % a step for 10 inner steps would leave less than 0.6^4 of it


# -- FedDyn -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["mlp", "bn"])
@pytest.mark.parametrize("method", ["feddyn", "feddyn:pfllib"])
def test_feddyns_server_state_is_the_mean_of_the_linear_terms(tiny, model, method):
    """s = 1/M sum_i g_i after every round, with half of the clients and dropouts; buffers have none."""
    sim = tiny.simulation(method, model, data=tiny.federation(sizes=(6, 3, 1, 5, 4, 9)), participation=0.5,
                          dropouts=0.2, seed=1)
    for _ in range(5):
        sim.round()
        assert_close(sim.server.state.tilt, sim.own.row.mean(0))
    assert sim.server.state.tilt.abs().max() > 1e-3
    assert (sim.layout.cut(sim.own.row, "buffers") == 0).all()


@pytest.mark.parametrize("alpha", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("norm_power", [1, 2])
def test_feddyn_begins_with_fedavgs_gradient(tiny, alpha, norm_power):
    """At w = theta, g_i = 0: one step of round 1 is plain SGD's for every alpha; then theta moves by mean + mean."""
    sim = tiny.simulation(FedDyn(alpha=alpha, norm_power=norm_power), steps=1)
    moves = torch.stack([tiny.sgd(sim, i, sim.init.row, 1)[0] for i in range(4)]) - sim.init.row
    sim.round()
    assert_close(sim.own.row, -alpha * moves)
    assert_close(sim.server.state.row, sim.init.row + 2 * moves.mean(0))


def test_feddyn_solved_exactly_keeps_the_gradient(tiny):
    """theta_i solves (H_i + alpha) w = b_i + g_i + alpha theta, and then g_i = grad L_i(theta_i), round after round."""
    data, H, b = squares(tiny, (6, 8, 7))
    sim = full_batch(tiny, FedDyn(alpha=0.7, gradient_clip=None), data, epochs=80)
    for _ in range(3):
        theta, g, s = sim.server.state.row.clone(), sim.own.row.clone(), sim.server.state.tilt.clone()
        best = torch.linalg.solve(H + 0.7 * EYE, b + g + 0.7 * theta)
        sim.round()
        assert_close(sim.own.row, torch.einsum("ijk,ik->ij", H, best) - b, rtol=1e-8, atol=1e-8)
        s = s - 0.7 / 3 * (best - theta).sum(0)
        assert_close(sim.server.state.row, best.mean(0) - s / 0.7, rtol=1e-8, atol=1e-8)


def test_feddyn_of_large_alpha_does_not_move(tiny):
    """|theta_i - theta| <= |grad L_i(theta)| / alpha however long it trains (lr alpha = 1/2)."""
    data, H, b = squares(tiny, (6, 8, 7))
    sim = full_batch(tiny, FedDyn(alpha=1e4, gradient_clip=None), data, epochs=100, lr=5e-5)
    theta = sim.init.row
    slope = torch.einsum("ijk,k->ij", H, theta) - b
    sim.round()
    moved = sim.own.row.norm(dim=1) / 1e4  # g_i = - alpha (theta_i - theta)
    assert (moved <= slope.norm(dim=1) / 1e4).all()
    assert (moved >= 0.9 * slope.norm(dim=1) / 1e4).all()


def test_feddyn_of_one_client_ends_in_its_minimiser(tiny):
    data, H, b = squares(tiny, (9,))
    sim = rounds(full_batch(tiny, FedDyn(alpha=0.5), data, epochs=5), 60)
    assert_close(sim.server.state.row, torch.linalg.solve(H[0], b[0]), rtol=1e-8, atol=1e-8)


def away(w, theta):
    """(w - theta) / |w - theta|, where 0 / 0 is 0."""
    return torch.nn.functional.normalize(w - theta, dim=0)


@pytest.mark.parametrize(
    ("power", "pull"), [(1, lambda w, theta: 0.3 * away(w, theta)), (0, lambda w, theta: -0.6 * theta)]
)
def test_feddyn_with_other_pulls_by_hand(tiny, power, pull):
    """w <- w - lr (grad - g_i + pull) with the gradient of alpha/2 |w - theta|, as PFLlib has it, or of
    -alpha <w, theta>, what FL-bench's program descends; all else is FedDyn's."""
    sim = tiny.simulation(FedDyn(alpha=0.6, gradient_clip=None, norm_power=power), epochs=2)
    for _ in range(2):
        theta, g, s = sim.server.state.row.clone(), sim.own.row.clone(), sim.server.state.tilt.clone()
        ends = []
        for i in range(4):
            w = theta
            for x, y in batches(tiny, sim, i):
                w = w - 0.1 * (gradient(sim, w, x, y) - g[i] + pull(w, theta))
            ends.append(w)
        moves = torch.stack(ends) - theta
        s = s - 0.6 / 4 * moves.sum(0)
        sim.round()
        assert_close(sim.own.row, g - 0.6 * moves)
        assert_close(sim.server.state.row, theta + moves.mean(0) - s / 0.6)


def test_feddyn_of_flbench_by_hand(tiny):
    """alpha_i = 0.01 / (n_i M / n): w <- w - lr (grad - g_i - alpha_i theta), g_i <- g_i - alpha_i (theta_i - theta);
    at the server alpha cancels: theta <- mean theta_i + mean over all clients of their drifts so far."""
    sim = tiny.simulation(replace(registry.method("feddyn:flbench"), gradient_clip=None), epochs=2)
    n = torch.from_numpy(sim.federation.sizes("train")).double()
    alpha = 0.01 / (n * 4 / n.sum())
    drift = torch.zeros(4, sim.layout.size, dtype=torch.float64)
    for _ in range(2):
        theta, g = sim.server.state.row.clone(), sim.own.row.clone()
        ends = []
        for i in range(4):
            w = theta
            for x, y in batches(tiny, sim, i):
                w = w - 0.1 * (gradient(sim, w, x, y) - g[i] - alpha[i] * theta)
            ends.append(w)
        moves = torch.stack(ends) - theta
        drift += moves
        sim.round()
        assert_close(sim.own.row, g - alpha[:, None] * moves)
        assert_close(sim.server.state.row, theta + moves.mean(0) + drift.mean(0))


def test_feddyns_presets_are_the_programs_above():
    assert registry.method("feddyn:pfllib") == FedDyn(1.0, None, 1, validation=False, printed="served")
    assert registry.method("feddyn:flbench") == FedDyn(0.01, 10.0, 0, by_size=True, validation=False)


def test_feddyn_clips_each_step(tiny):
    """A step is at most lr * clip long; as in PyTorch, |g| + 1e-6 divides, which at |g| > 0.01 is 1e-4 at most."""
    sim = rounds(tiny.simulation("feddyn:gradient_clip=0.001,alpha=2", steps=1), 1)
    assert_close(sim.own.row.norm(dim=1), torch.full((4,), 2 * 0.1 * 0.001, dtype=torch.float64), rtol=1e-4)


@pytest.mark.parametrize("method", ["feddyn:alpha=0", "feddyn:norm_power=3"])
def test_feddyn_refuses_what_it_cannot_do(tiny, method):
    with pytest.raises(CoterieError, match="must be"):
        tiny.simulation(method)


# -- MOON -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", ["moon:mu=0", "moon:pfllib,validation=true"])
def test_moon_without_contrast_is_fedavg(tiny, model, method):
    """mu = 0, as in PFLlib's program."""
    one, two = (rounds(tiny.simulation(m, model, epochs=2), 3) for m in (method, "fedavg"))
    assert_close(one.server.state.row, two.server.state.row)


@pytest.mark.parametrize("model", MODELS)
def test_moons_first_round_is_fedavgs(tiny, model):
    """While the last model is the received one the two cosines are equal and their gradients cancel, also with
    dropout and batch statistics, because both fixed models are in evaluation mode."""
    one, two = (rounds(tiny.simulation(m, model, epochs=2), 1) for m in ("moon:mu=50", "fedavg"))
    assert_close(one.server.state.row, two.server.state.row)
    one.round()
    two.round()
    assert (one.server.state.row - two.server.state.row).abs().max() > 1e-4


@pytest.mark.parametrize("model", MODELS)
def test_moons_first_contrast_is_log_2(tiny, model):
    sim = tiny.simulation("moon:mu=3", model)
    cohort, row = tiny.cohort(sim), sim.init.row.expand(4, -1)
    given = {"shared": row, "last": row}
    _, with_contrast = cohort.train_watched(row, given, objective=sim.method.contrast)
    _, plain = cohort.train_watched(row)
    assert_close(with_contrast - plain, torch.full((4,), 3 * math.log(2), dtype=torch.float64))


def features(module, x):
    """The input of the last layer: after two layers, or after the two and the three of a projection head."""
    z = module[:2](x)
    return module[2][:3](z) if isinstance(module[2], nn.Sequential) else z


def test_moons_projection_head_is_a_part_of_the_body(tiny):
    """4 -> 5 -> tanh, then 5 -> 5 -> ReLU -> 7 and the head 7 -> 3, which is all that belongs to the head."""
    sim = tiny.simulation("moon:projection_head=7")
    one, relu, two, head = sim.init.module[2]
    assert [(m.in_features, m.out_features) for m in (one, two, head)] == [(5, 5), (5, 7), (7, 3)]
    assert isinstance(relu, nn.ReLU)
    assert sum(entry.size for entry in sim.layout.within("head")) == 7 * 3 + 3
    assert sim.layout.size == (4 * 5 + 5) + (5 * 5 + 5) + (5 * 7 + 7) + (7 * 3 + 3)


@pytest.mark.parametrize("width", [0, 7])
def test_moon_rounds_by_hand(tiny, width):
    """CE + mu mean -log(e^(cos(z, z_g)/tau) / (e^(cos(z, z_g)/tau) + e^(cos(z, z_p)/tau))) with torch.optim."""
    sim = tiny.simulation(f"moon:mu=2,tau=0.3,projection_head={width}", epochs=2)
    last = sim.init.row.expand(4, -1)
    for _ in range(3):
        ends = []
        for i in range(4):
            fixed = (sim.server.state.row, last[i])
            shared, old = (sim.layout.load(copy.deepcopy(sim.init.module).double(), row) for row in fixed)

            def objective(module, x, y, shared=shared, old=old):
                z, z_g, z_p = (features(m, x) for m in (module, shared, old))
                near, far = (F.cosine_similarity(z, other.detach()) / 0.3 for other in (z_g, z_p))
                return F.cross_entropy(module(x), y) - 2 * (near.exp() / (near.exp() + far.exp())).log().mean()

            steps = tiny.steps_of(tiny.SIZES[i], 3, 2)
            ends.append(tiny.sgd(sim, i, sim.server.state.row, steps, objective=objective)[0])
        last = torch.stack(ends)
        sim.round()
        assert_close(sim.server.state.row, SHARE @ last)
        assert_close(sim.own.row, last)


def test_moon_does_not_overflow(tiny):
    """tau = 1e-6 makes exponents of a million: softplus stays finite in float32."""
    data = tiny.federation(dtype=torch.float32)
    sim = rounds(tiny.simulation("moon:tau=1e-6,mu=1e-6", data=data, precision="float32"), 3)
    assert torch.isfinite(sim.server.state.row).all()


def test_moon_needs_a_head(tiny):
    class Headless(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(4, 3))

        def forward(self, x):
            return x @ self.w

    with pytest.raises(CoterieError, match="head"):
        tiny.simulation("moon", Headless)


# -- FedMTL -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", ["fedmtl:lam=0", "fedmtl:pfllib,validation=true"])
def test_fedmtl_without_pull_is_local(tiny, model, method):
    """Bit for bit, half of the clients taking part; PFLlib's penalty has no gradient, so its lam does not matter."""
    one, two = (rounds(tiny.simulation(m, model, participation=0.5), 4) for m in (method, "local"))
    assert torch.equal(one.own.row, two.own.row)
    assert torch.equal(served(one), served(two))


@pytest.mark.parametrize("model", ["mlp", "bn"])
def test_fedmtls_server_keeps_the_mean_of_all_models(tiny, model):
    """Whoever takes part; running statistics are averaged over the participants."""
    data = tiny.federation(sizes=(6, 3, 1, 5, 4, 9))
    sim = tiny.simulation("fedmtl", model, data=data, participation=0.5, dropouts=0.2, seed=1)
    for _ in range(5):
        caught = tiny.seen_clients(sim)
        sim.round()
        assert_close(*(sim.layout.cut(r, "parameters") for r in (sim.server.state.row, sim.own.row.mean(0))))
        if model == "bn":
            variance = sim.layout.views(sim.own.row[caught[0]])["1.running_var"].mean(0)
            assert_close(sim.layout.views(sim.server.state.row)["1.running_var"], variance)


@pytest.mark.parametrize("aggregator", ["median", "krum", "normclip", "geometricmedian"])
def test_fedmtls_server_keeps_the_mean_under_a_robust_aggregator_too(tiny, aggregator):
    """Nobody of these clients is far from the others, so all are kept and the mean is the plain one, for ever: moves
    through the aggregator would add up to something else."""
    sim = tiny.simulation(f"fedmtl:lam=0.01+{aggregator}", data=tiny.federation(sizes=(6, 6, 6, 6, 6, 6)))
    for _ in range(6):
        sim.round()
        assert_close(sim.server.state.row, sim.own.row.mean(0))


def test_fedmtl_refuses_aggregators_that_keep_no_mean(tiny):
    """Its server adds moves up. Per round confree makes of them something else than their mean, and the difference adds
    up, too; only the mean, private included, and what leaves clients out are defined. Detached, nothing is averaged."""
    data = tiny.federation(sizes=(6, 6, 6, 6, 6, 6))
    others = {name for name, cls in registry.aggregators().items() if not (cls.robust or cls.private)} - {"mean"}
    assert others == {"confree", "fedmgdaplus", "mgda"}
    for name in others:
        with pytest.raises(CoterieError, match=rf"adds up to no mean of models; leave out \+{name}, or take a robust"):
            tiny.simulation(f"fedmtl+{name}", data=data)
    with pytest.raises(CoterieError, match="cannot be private: its server takes more"):  # the sentence of privacy
        tiny.simulation("fedmtl+private", data=data, sampling="poisson")
    with pytest.raises(CoterieError, match="averages nothing"):
        tiny.simulation("fedmtl:detached=true+confree", data=data)
    for name in ("mean", "median", "trimmedmean", "normclip"):
        tiny.simulation(f"fedmtl+{name}", data=data)


def test_fedmtl_round_by_hand(tiny):
    """theta_i <- theta_i - lr (grad + 2 lam (theta_i - mean)) with the mean of the round's beginning."""
    sim = tiny.simulation("fedmtl:lam=0.8", epochs=2)
    for _ in range(3):
        mean = sim.layout.views(sim.own.row.mean(0))
        expected = sgd(tiny, sim, sim.own.row.clone(), correct=lambda name, g, v, m=mean: g + 1.6 * (v - m[name]))
        sim.round()
        assert_close(sim.own.row, expected)
        assert_close(sim.server.state.row, expected.mean(0))


def test_fedmtls_pull_is_the_gradient_of_the_trace():
    """tr(W (I - 11'/m)^2 W') = sum_j |theta_j - mean|^2, and lam times its gradient is the pull."""
    W = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    centre = torch.eye(4, dtype=torch.float64) - 1 / 4
    trace = (W @ centre @ centre @ W.T).trace()
    apart = W - W.mean(1, keepdim=True)
    assert_close(trace, apart.square().sum())
    (slope,) = torch.autograd.grad(0.3 * trace, W)
    pulled = [FedMTL(lam=0.3).pull(torch.zeros(6), W[:, j], Given(mean=W.mean(1))) for j in range(4)]
    assert_close(torch.stack(pulled, 1), slope)


def test_fedmtl_of_large_lam_makes_all_models_equal(tiny):
    """lr 2 lam = 1: every step ends at mean - lr grad, so models lie within lr |grad| of their mean, from anywhere."""
    sim = tiny.simulation(FedMTL(lam=5e4), lr=1e-5)
    sim.own = Model(tiny.rows(sim))
    sim.server.state = Model(sim.own.row.mean(0))
    assert (sim.own.row - sim.server.state.row).abs().max() > 0.3
    sim.round()
    assert (sim.own.row - sim.server.state.row).abs().max() < 1e-4


def test_what_a_client_never_seen_gets(tiny):
    """The shared model, the mean of the models, or with PFLlib's FedMTL, which shares nothing, the initial model."""
    data = tiny.federation(sizes=(7, 12, 1, 5, 6), unseen=1)
    for method in ("scaffold", "ditto", "apfl", "feddyn", "moon", "fedmtl"):
        sim = rounds(tiny.simulation(method, data=data), 2)
        assert torch.equal(sim.row(4), sim.server.state.row)
        assert not torch.equal(sim.row(4), sim.init.row)
    alone = rounds(tiny.simulation("fedmtl:pfllib", data=data), 2)
    assert torch.equal(alone.row(4), alone.init.row)


# -- variants that the conformance suite, which takes defaults, does not reach ----------------------------------------

VARIANTS = ["scaffold:variate=gradient", "apfl:pfllib", "perfedavg:order=hessian_free", "perfedavg:order=exact",
            "feddyn:pfllib", "feddyn:flbench", "fedmtl:pfllib", "moon:projection_head=4", "fedbabu:pfllib",
            "ifca:clustered=head", "fedsoft:selected=2", "pacfl:by_label=false", "fedamp:heur", "pfedhn:pc"]


@pytest.mark.parametrize("model", ["dropout", "bn"])
@pytest.mark.parametrize("method", VARIANTS)
def test_variants_do_not_depend_on_the_grouping_either(tiny, method, model):
    reference = tiny.after(2, method, model)
    tolerance = 1e-9 if "hessian_free" in method else 1e-12  # rounding over 2 delta
    options = {"dropout": {"engine": "loop"}, "bn": {"wave": 3}}[model]
    tiny.close(tiny.after(2, method, model, **options), reference, tolerance)


@pytest.mark.parametrize("buffers", ["local", "server"])
@pytest.mark.parametrize("method", ["scaffold", "ditto", "apfl", "perfedavg", "pfedme", "feddyn", "moon", "fedmtl"])
def test_what_the_server_keeps_has_no_part_in_buffers_that_stay_at_home(tiny, method, buffers):
    """With buffers=local or server the clients' running statistics never reach the server's tensors."""
    sim = rounds(tiny.simulation(method, "bn", buffers=buffers, participation=0.75), 2)
    fresh = sim.layout.cut(sim.init.row, "buffers")
    for name, t in sim.server.state.tensors().items():
        if t.ndim == 0:  # FedDyn's number of clients
            continue
        assert torch.equal(sim.layout.cut(t, "buffers"), fresh if name == "row" else torch.zeros_like(fresh))
    assert torch.isfinite(served(sim)).all()
