"""Methods whose server moves the backbone: golden values, exact reductions, and what is computed over W + R."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from by_hand import assert_close, rounds, tensor
from torch import nn

from coterie import registry
from coterie.contract.frozen import duplicate
from coterie.contract.ground import grounded, pieces
from coterie.contract.layout import Entry, Layout, Pair
from coterie.contract.low_rank import factors
from coterie.contract.method import Uploads
from coterie.contract.moving import Moved
from coterie.contract.records import Model
from coterie.data import Federation
from coterie.errors import CoterieError
from coterie.models import lora
from coterie.models.lora import adapted

MOVING = ("fedexlora", "flora", "flora:fresh=false")


def net():
    """Layers of unequal sides, so that no transposed factor goes unseen."""
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def square():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))


def convolved():
    """A convolution, whose weight is o x q k k, between linear layers."""
    return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 5, 2, padding=1), nn.Tanh(), nn.Flatten(),
                         nn.Linear(45, 3))


def simulation(tiny, method, model=net, adapter="lora:rank=2", **options):
    return tiny.simulation(method, adapted(model, adapter), **options)


def whole(sim, row=None):
    """The plain module, without adapters, of the weights W + R + s B A that a row stands for; by default the served."""
    module, layout = grounded(duplicate(sim.init.module).double(), sim.layout, sim.residual)
    return lora.merged(layout.load(module, sim.row(0) if row is None else row))


def weights(sim, row=None):
    """W + R + s B A of every adapted layer."""
    module = whole(sim, row)
    return {pair.name: module.get_submodule(pair.name).weight.detach() for pair in sim.layout.pairs}


def uploads(sim, rows, share):
    ids = torch.arange(len(rows))
    return Uploads({"update": rows}, ids, ids + 1, share, len(rows), sim.rounds_done, sim.layout)


# -- golden merges -----------------------------------------------------------------------------------------------------

B = tensor([[[2.0], [1.0]], [[0.0], [1.0]]])
A = tensor([[[1.0, 0.0]], [[1.0, 2.0]]])
P = tensor([0.25, 0.75])


def one_round(method, b=B, a=A, p=P):
    """B, A and R after clients uploaded these factors to a server that stood at 0; s = 1."""
    o, r, q = b.shape[1], b.shape[2], a.shape[2]
    entries = (Entry("l.lora.B", (o, r), 0, "parameter", "base", True),
               Entry("l.lora.A", (r, q), o * r, "parameter", "base", True))
    layout = Layout(entries, pairs=(Pair("l", entries[1], entries[0], 1.0),))
    rows, ids = torch.cat([b.flatten(1), a.flatten(1)], 1), torch.arange(len(b))
    chosen, begun = registry.method(method), torch.zeros(layout.size, dtype=torch.float64)
    begun = begun if method.startswith("fedex") else begun[:0]
    state = Moved(begun, torch.zeros(o * q, 1, dtype=torch.float64))
    after = chosen.merge(state, Uploads({"update": rows}, ids, torch.ones_like(ids), p, len(rows), 0, layout))
    return after.row, pieces(after.residual, layout)[0][1]


def test_fedex_adds_what_the_averaged_factors_miss():
    """mean of products [[0.5, 0], [1, 1.5]] less product of means [[0.5, 0.75], [1, 1.5]]: the covariance of B and A,
    p_1 p_2 (B_1 - B_2)(A_1 - A_2) = 3/16 (2, 0)' (0, -2)."""
    row, missing = one_round("fedexlora")
    assert_close(row, tensor([0.5, 1.0, 1.0, 1.5]))  # mean B, mean A
    assert_close(missing, tensor([[0.0, -0.75], [0.0, 0.0]]))
    assert_close(missing, 3 / 16 * (B[0] - B[1]) @ (A[0] - A[1]))


def test_flora_adds_the_mean_product():
    row, moved = one_round("flora")
    assert not len(row)  # the adapters begin anew, and there is no head
    assert_close(moved, tensor([[0.5, 0.0], [1.0, 1.5]]))


def test_an_equal_factor_leaves_nothing_to_add():
    """The covariance of factors, one of which does not vary, is 0."""
    for b, a in ((B, A[:1].expand_as(A)), (B[1:].expand_as(B), A)):
        assert_close(one_round("fedexlora", b, a)[1], torch.zeros(2, 2, dtype=torch.float64))


def test_a_hostile_client_has_no_part_in_what_moves():
    """Of five clients one sends factors a million times as large: with a robust aggregator the model stays theirs."""
    generator = torch.Generator().manual_seed(3)
    b, a = (1 + 0.1 * torch.randn(5, *shape, generator=generator, dtype=torch.float64) for shape in ((4, 2), (2, 3)))
    p = torch.full((5,), 0.2, dtype=torch.float64)
    for method, honest in (("flora+median", one_round("flora", b[:4], a[:4], p[:4] * 1.25)[1]),
                           ("fedexlora+median", one_round("fedexlora", b[:4], a[:4], p[:4] * 1.25)[1])):
        moved = one_round(method, torch.cat([b[:4], 1e6 * b[4:]]), a, p)[1]
        mean = torch.einsum("mor,mrq->oq", b, a) / 5
        assert torch.linalg.norm(moved - honest) < 0.2 * torch.linalg.norm(mean), method


# -- what released programs add ----------------------------------------------------------------------------------------


def test_official_fedex_adds_the_transpose(tiny):
    """As released it adds the residual's transpose to a linear layer, which is right for o x q = q x o alone in shape,
    and then wrong: the clients' mean model is missed by more than without any residual. Other layers are refused."""
    row, missing = one_round("fedexlora:transposed=true")
    assert_close(missing, tensor([[0.0, 0.0], [-0.75, 0.0]]))
    b, a = row[:2, None], row[None, 2:]
    mean = tensor([[0.5, 0.0], [1.0, 1.5]])
    released, fedavg = (torch.linalg.norm(b @ a + r - mean) for r in (missing, torch.zeros_like(missing)))
    assert_close(torch.stack([released, fedavg]), tensor([0.75 * 2**0.5, 0.75]))
    sims = [rounds(simulation(tiny, m, square), 1)
            for m in ("fedexlora:official", "fedexlora:weighted=false,validation=false")]
    (_, theirs), (_, ours) = (pieces(sim.residual, sim.layout)[0] for sim in sims)
    assert_close(theirs, ours.T)
    assert float(ours.abs().max()) > 1e-6
    with pytest.raises(CoterieError, match="fits square layers alone, and '0' is 6 x 4"):
        simulation(tiny, "fedexlora:official")


def test_the_released_fedit_baseline_keeps_the_first_client_alone():
    """FLoRA's program stores the running sum of its FedIT under another name than the one it reads, so that p_1 A_1 and
    p_1 B_1 are left: p_1^2 of the first client's product. FedAvg's is the product of the weighted means."""
    kept = {"A": A[0] * P[0], "B": B[0] * P[0]}
    for k in range(1, len(P)):
        misspelt = {name: kept[name] + P[k] * one[k] for name, one in (("A", A), ("B", B))}  # and never read
    assert_close(kept["B"] @ kept["A"], P[0] ** 2 * B[0] @ A[0])
    layout_row = registry.method("fedavg").merge(
        Model(torch.zeros(4, dtype=torch.float64)),
        Uploads({"update": torch.cat([B.flatten(1), A.flatten(1)], 1)}, torch.arange(2), torch.ones(2), P, 2, 0,
                Layout.flat(4))).row
    ours = layout_row[:2, None] @ layout_row[None, 2:]
    assert_close(ours, misspelt["B"] @ misspelt["A"])
    assert_close(ours, tensor([[0.5, 0.75], [1.0, 1.5]]))


def test_a_released_flexlora_takes_the_roots_of_the_singular_values():
    """B = U sqrt(Sigma) / s beside A = V' has the roots of D's singular values, 1.825141 and 0.410927; ours has D's."""
    u, sigma, vt = torch.linalg.svd(tensor([[0.5, 0.0], [1.0, 1.5]]))
    assert_close(torch.linalg.svdvals(u * sigma.sqrt() @ vt), sigma.sqrt())
    b, a = (torch.eye(2, dtype=torch.float64)[None], tensor([[[0.5, 0.0], [1.0, 1.5]]]))
    entries = (Entry("l.lora.B", (2, 2), 0, "parameter", "base", True),
               Entry("l.lora.A", (2, 2), 4, "parameter", "base", True))
    layout = Layout(entries, pairs=(Pair("l", entries[1], entries[0], 1.0),))
    up = Uploads({"update": torch.cat([b.flatten(1), a.flatten(1)], 1)}, torch.arange(1), torch.ones(1),
                 torch.ones(1, dtype=torch.float64), 1, 0, layout)
    row = registry.method("flexlora").merge(Model(torch.zeros(8, dtype=torch.float64)), up).row
    assert_close(torch.linalg.svdvals(torch.matmul(*factors(row, layout.pairs[0]))), sigma)
    assert_close(sigma, tensor([1.825141, 0.410927]), atol=1e-6, rtol=0)


# -- exact reductions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [net, convolved])
@pytest.mark.parametrize("method", MOVING)
def test_the_served_model_is_the_mean_of_the_clients_models(tiny, method, model):
    """In the second round, where R is no longer 0: every adapted weight, and the head."""
    sim = rounds(simulation(tiny, method, model, epochs=3), 1)
    cohort, ids = tiny.cohort(sim), np.arange(sim.population)
    trained = cohort.train(sim.method.deploy(cohort, sim.payload(ids), sim._own(ids)))
    share, each = cohort.n.double() / cohort.n.sum(), [weights(sim, row) for row in trained]
    head = share @ sim.layout.cut(trained, "head")
    before = sim.residual.clone()
    sim.round()
    assert not torch.equal(before, sim.residual)
    for name, found in weights(sim).items():
        assert_close(found, sum(p * one[name] for p, one in zip(share, each, strict=True)))
    assert_close(sim.layout.cut(sim.row(0), "head"), head)


def test_one_step_of_the_first_round_is_the_same_for_all(tiny):
    """B = 0, so the gradient of A is 0 and B alone moves: -eta s^2 (mean G) A' A, G the gradient of the whole weight.

    FLoRA only where clients start from the same A; with an own A_i each, the mean of G_i A_i' A_i is another.
    """
    data = tiny.federation(sizes=(7, 12, 1, 5))
    options = {"data": data, "batch": 50, "epochs": 1}
    sims = [simulation(tiny, m, **options)
            for m in ("fedavg", "ffalora", "flexlora", "fedexlora", "flora:fresh=false")]
    begun, first = whole(sims[0]), sims[0].layout.views(sims[0].init.row)
    share = tensor([7, 12, 1, 5]) / 25
    gradients = []
    for i in range(4):
        x, y = data.client(i, "train")
        begun.zero_grad()
        found = list(begun.parameters())
        for p in found:
            p.requires_grad_(True)
        nn.functional.cross_entropy(begun(x), y).backward()
        layers = {pair.name: begun.get_submodule(pair.name) for pair in sims[0].layout.pairs}
        gradients.append({name: layer.weight.grad.clone() for name, layer in layers.items()})
    start = {pair.name: begun.get_submodule(pair.name).weight.detach().clone() for pair in sims[0].layout.pairs}
    for sim in sims:
        sim.round()
        for pair in sim.layout.pairs:
            a = first[pair.a.name]
            mean = sum(p * g[pair.name] for p, g in zip(share, gradients, strict=True))
            assert_close(weights(sim)[pair.name] - start[pair.name], -0.1 * pair.scale**2 * mean @ a.T @ a, atol=1e-11)
    own = rounds(simulation(tiny, "flora", **options), 1)
    assert float((weights(own)["0"] - weights(sims[0])["0"]).abs().max()) > 1e-4


def test_of_one_client_fedex_adds_nothing(tiny):
    """One client's mean factors are its own: R stays 0, and the run is FedAvg's."""
    data = tiny.federation(sizes=(12,), val=(2,), test=(3,))
    sim, plain = (rounds(simulation(tiny, m, data=data), 3) for m in ("fedexlora", "fedavg"))
    assert_close(sim.residual, torch.zeros_like(sim.residual))
    assert_close(sim.row(0), plain.row(0))


def test_of_one_client_flora_is_local_training_restarted_each_round(tiny):
    """By hand: train the adapters of a module, merge them into its weights, start again from A as drawn and B = 0."""
    data = tiny.federation(sizes=(12,), val=(2,), test=(3,))
    sim = simulation(tiny, "flora:fresh=false", data=data)
    module = whole(sim)
    for t in range(3):
        step = tiny.simulation("fedavg", adapted(module, "lora:rank=2"), data=data)
        row = sim.layout.put(step.init.row, "adapters", sim.layout.cut(sim.init.row, "adapters"))
        step.server.state, step.rounds_done = Model(row), t
        step.round()
        module = whole(step)
        sim.round()
        for name, found in weights(sim).items():
            assert_close(found, module.get_submodule(name).weight.detach(), atol=1e-11)
        assert_close(sim.layout.cut(sim.row(0), "head"), step.layout.cut(step.row(0), "head"), atol=1e-11)


@pytest.mark.parametrize("method", ["fedexlora", "flora:fresh=false"])
def test_identical_clients_are_one_client(tiny, method):
    """Full batches of the same samples: every client's model is the mean, so FedEx adds nothing and FLoRA one's own."""
    x, y = tiny.federation(sizes=(9,)).client(0, "train")
    data = Federation.from_splits(*[[(x, y)] * 3] * 3, classes=3)
    sim = simulation(tiny, method, data=data, batch=0, epochs=3)
    cohort, ids = tiny.cohort(sim), np.arange(3)
    own = cohort.train(sim.method.deploy(cohort, sim.payload(ids), sim._own(ids)))[0]
    expected = weights(sim, own)
    sim.round()
    for name, found in weights(sim).items():
        assert_close(found, expected[name])
    if method == "fedexlora":
        assert_close(sim.residual, torch.zeros_like(sim.residual))


@pytest.mark.parametrize("method", MOVING)
def test_no_steps_change_nothing(tiny, method):
    """What is served stays where clients return what they began with: FedEx no move, FLoRA A_i beside B = 0."""
    sim = rounds(simulation(tiny, method), 2)
    before, ids = weights(sim), np.arange(sim.population)
    cohort, payload = tiny.cohort(sim), sim.payload(ids)
    begun = sim.method.deploy(cohort, payload, sim._own(ids))
    moved = begun - payload.row if method == "fedexlora" else sim.layout.put(begun, "~adapters", torch.zeros(()))
    sim.server.state = sim.method.merge(sim.server.state, uploads(sim, moved, cohort.n.double() / cohort.n.sum()))
    for name, found in weights(sim).items():
        assert_close(found, before[name])


# -- over W + R --------------------------------------------------------------------------------------------------------


class Words(nn.Module):
    """An embedding, whose weight is q x o, with a padding token."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 4, padding_idx=0), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.embedding(x).mean(1))


@pytest.mark.parametrize(("model", "adapter"), [(net, "lora:rank=2"), (convolved, "lora:rank=2"),
                                                (Words, "lora:rank=2,targets=embedding")])
@pytest.mark.parametrize("method", MOVING)
def test_scores_are_those_of_a_plain_module_with_the_moved_weights(tiny, method, model, adapter):
    """Of every client, those who never took part and those never seen included, after rounds of a third of them: the
    loss of a module without adapters that is loaded with W + R + s B A."""
    kind = "words" if model is Words else "scores"
    data = tiny.federation(sizes=(6, 3, 1, 5, 4, 9, 2, 8), val=(2,), test=(3,), unseen=1, kind=kind)
    sim = simulation(tiny, method, model, adapter, data=data, participation=0.3)
    drawn = {int(i) for t in range(3) for i in sim.selected(t)}
    assert len(drawn) < 7
    rounds(sim, 3)
    assert sim.residual.any()
    stages, module = sim.evaluate().stages, whole(sim).eval()
    for stage, clients in (("served", range(7)), ("unseen_served", [7])):
        samples = [data.client(i, "test") for i in clients]
        expected = [nn.functional.cross_entropy(module(x), y).item() for x, y in samples]
        np.testing.assert_allclose(stages[stage].test["loss"], expected, rtol=1e-10)


def test_flora_draws_by_client_and_round_and_leaves_padding_alone(tiny):
    """Uniform on +-1/sqrt(q), whoever else is in the cohort; a padding token's column of A stays 0."""
    data = tiny.federation(sizes=(6, 3, 5, 4), kind="words")
    sim = simulation(tiny, "flora", Words, "lora:rank=2,targets=embedding", data=data)
    pair, found = sim.layout.pairs[0], {}
    for t in (0, 1):
        sim.rounds_done = t
        for ids in (np.arange(4), np.array([2, 0])):
            cohort, payload = sim.cohort(ids), sim.payload(ids)
            b, a = factors(sim.method.deploy(cohort, payload, sim._own(ids)), pair)
            assert not b.any()
            assert not a[..., 0].any()
            assert a[..., 1:].all()
            assert float(a.abs().max()) <= 11**-0.5
            for i, one in zip(ids.tolist(), a, strict=True):
                assert torch.equal(found.setdefault((t, i), one), one)
    assert len({tuple(one.flatten().tolist()) for one in found.values()}) == 8


@pytest.mark.parametrize("method", MOVING)
def test_runs_that_share_an_engine_do_not_share_a_backbone(tiny, method):
    """Rounds in turn of a run that moves it, of another such, and of one that does not: as each alone."""
    model, options = adapted(net, "lora:rank=2"), [(method, 0), ("fedavg", 0), (method, 0), ("fedexlora", 0)]
    alone = [rounds(tiny.simulation(m, model, seed=s), 3) for m, s in options]
    first = tiny.simulation(*[options[0][0], model], seed=0)
    shared = [first, *(tiny.simulation(m, model, seed=s, twin=first) for m, s in options[1:])]
    assert len({id(sim.engine) for sim in shared}) == 1
    shared[2].round()  # ahead of the others
    for t in range(3):
        for number, sim in enumerate(shared):
            if sim.rounds_done <= t:
                sim.round()
                if number % 2:
                    sim.evaluate()
    for one, other in zip(alone, shared, strict=True):
        tiny.same(tiny.state(one), tiny.state(other))
        mine, theirs = (sim.evaluate().stages["adapted"].test["loss"] for sim in (one, other))
        assert np.array_equal(mine, theirs)


@pytest.mark.parametrize("method", MOVING)
def test_kept_outputs_of_frozen_layers_stay_right(tiny, method):
    """What comes before the first adapted layer never moves: with its outputs kept, the same rows and R."""
    states = []
    for prefix in ("auto", "off"):
        sim = rounds(simulation(tiny, method, adapter="lora:rank=2,targets=2", prefix=prefix), 3)
        assert ("prefix" in sim.choices) is (prefix == "auto")
        states.append(tiny.state(sim))
    tiny.close(*states, 1e-10)


@pytest.mark.parametrize("method", MOVING)
def test_a_restored_run_goes_on_with_all_that_moved(tiny, method):
    sim = rounds(simulation(tiny, method, participation=0.5), 2)
    snapshot = sim.snapshot()
    other = simulation(tiny, method, participation=0.5)
    other.restore(*snapshot)
    assert torch.equal(other.residual, sim.residual)
    tiny.same(tiny.state(rounds(sim, 2)), tiny.state(rounds(other, 2)))


# -- bad input ---------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.head(self.two(torch.tanh(self.one(x))))


@pytest.mark.parametrize("method", ["fedexlora", "flora"])
def test_what_cannot_be_moved_is_refused(tiny, method):
    with pytest.raises(CoterieError, match="and that of '0' trains itself; leave base=trains out of the adapter"):
        simulation(tiny, method, adapter="lora:rank=2,base=trains")
    with pytest.raises(CoterieError, match="rounded to bfloat16; leave backbone=bfloat16 out of the adapter"):
        simulation(tiny, method, adapter="lora:rank=2,backbone=bfloat16")
    with pytest.raises(CoterieError, match=r"weight of 'one', which is that of 'two.* as well; leave this layer out"):
        simulation(tiny, method, Tied, "lora:rank=2,targets=one")
    with pytest.raises(CoterieError, match=f"{method} works on the two factors of low-rank adapters"):
        tiny.Simulation(registry.method(method), net, tiny.federation(), tiny.Training(device="cpu"))
    with pytest.raises(CoterieError, match="its server adds to the backbone, too"):
        simulation(tiny, method, server="adam(lr=0.1)")
    for aggregator in ("confree", "mgda"):
        with pytest.raises(CoterieError, match=f"averages products of factors, and {aggregator} combines"):
            simulation(tiny, f"{method}+{aggregator}")
    with pytest.raises(CoterieError, match="private"):
        simulation(tiny, f"{method}+private", sampling="poisson", participation=0.5)
