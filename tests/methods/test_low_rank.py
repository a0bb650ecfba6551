"""Methods on the factors of low-rank adapters: golden values, exact reductions, and what each of them promises."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from by_hand import assert_close, rounds, tensor
from torch import nn

from coterie import registry
from coterie.contract.layout import Entry, Layout, Pair
from coterie.contract.low_rank import best, completed, factors, joined, side_by_side, split, with_factors
from coterie.contract.method import Uploads
from coterie.contract.records import Model
from coterie.errors import CoterieError
from coterie.models.lora import adapted
from coterie.running.experiment import Experiment

ALL = ("fedavg", "ffalora", "fedsvd", "rolora", "flexlora", "lorafair")


def net():
    """Layers of unequal sides, so that no transposed factor goes unseen."""
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def simulation(tiny, method, adapter="lora:rank=2", **options):
    return tiny.simulation(method, adapted(net, adapter), **options)


def products(row, layout):
    """s B A of every layer."""
    return {pair.name: pair.scale * torch.matmul(*factors(row, pair)) for pair in layout.pairs}


def served(sim, client=0):
    return sim.row(client)


def pair_of(o, q, r):
    """A layout of one layer: B `[o, r]`, then A `[r, q]`."""
    b = Entry("l.lora.B", (o, r), 0, "parameter", "base", True)
    a = Entry("l.lora.A", (r, q), o * r, "parameter", "base", True)
    return Layout((b, a), pairs=(Pair("l", a, b, 1.0),))


B = tensor([[[2.0], [1.0]], [[0.0], [1.0]]])
A = tensor([[[1.0, 0.0]], [[1.0, 2.0]]])
P = tensor([0.25, 0.75])
MEAN_PRODUCT = tensor([[0.5, 0.0], [1.0, 1.5]])  # 1/4 [[2, 0], [1, 0]] + 3/4 [[0, 0], [1, 2]]


def merged(method, b=B, a=A, p=P):
    """B and A after one round in which clients upload these factors; the server stood at 0."""
    layout = pair_of(b.shape[1], a.shape[2], b.shape[2])
    rows = torch.cat([b.flatten(1), a.flatten(1)], 1)
    ids = torch.arange(len(rows))
    up = Uploads({"update": rows}, ids, torch.ones_like(ids), p, len(rows), 0, layout)
    row = registry.method(method).merge(Model(torch.zeros(layout.size, dtype=torch.float64)), up).row
    return factors(row, layout.pairs[0])


# -- words -------------------------------------------------------------------------------------------------------------


def test_the_factors_of_a_mean_of_products():
    """Two clients of weight 1/4 and 3/4; by hand. The product of the means is [[0.5, 0.75], [1, 1.5]]."""
    left, right = side_by_side(P, B, A)
    assert_close(left @ right, MEAN_PRODUCT)
    b, a = merged("fedavg")
    assert_close(b @ a, tensor([[0.5, 0.75], [1.0, 1.5]]))
    covariance = sum(p * (x - b) @ (y - a) for p, x, y in zip(P, B, A, strict=True))
    assert_close(MEAN_PRODUCT - b @ a, covariance)  # [[0, -0.75], [0, 0]]


def test_the_best_factors_of_rank_1():
    """sigma = sqrt of the roots of the characteristic polynomial of D D': 1.825141 and 0.410927, the second of which
    is the error (Eckart and Young)."""
    u, sigma, vt = best(*side_by_side(P, B, A), 1)
    found = u * sigma @ vt
    assert_close(sigma, tensor([1.825141]), atol=1e-6, rtol=0)
    assert_close(found, tensor([[0.170943, 0.237171], [1.053399, 1.461512]]), atol=1e-6, rtol=0)
    assert_close(torch.linalg.norm(MEAN_PRODUCT - found), tensor(0.410927), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("o", "q", "k", "rank"), [(7, 5, 3, 2), (5, 7, 9, 4), (4, 9, 20, 4), (30, 20, 6, 6)])
def test_thin_factors_give_the_svd_of_their_product(o, q, k, rank):
    generator = torch.Generator().manual_seed(o)
    b, a = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((o, k), (k, q)))
    u, sigma, vt = best(b, a, rank)
    left, values, right = torch.linalg.svd(b @ a, full_matrices=False)
    assert_close(sigma, values[:rank], rtol=1e-12, atol=1e-12)
    assert_close(u * sigma @ vt, left[:, :rank] * values[:rank] @ right[:rank], rtol=1e-11, atol=1e-11)
    assert (vt.gather(1, vt.abs().argmax(1, keepdim=True)) > 0).all()


def test_ranks_that_are_not_there_are_0_and_filled_from_a():
    """A product of rank 1 in factors of 3: two of three ranks are rounding, of which no direction is taken."""
    generator = torch.Generator().manual_seed(1)
    b, a = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((6, 1), (1, 5)))
    u, sigma, vt = best(b.repeat(1, 3), a.repeat(3, 1), 3)
    assert sigma[0] > 0
    assert not sigma[1:].any()
    assert not u[:, 1:].any()
    assert not vt[1:].any()
    own = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    whole = completed(vt, own)
    assert_close(whole @ whole.T, torch.eye(3, dtype=torch.float64))
    assert torch.equal(whole[0], vt[0])
    basis, _ = torch.linalg.qr(torch.cat([vt[:1], own]).T)
    assert_close(whole @ basis @ basis.T, whole)  # nothing but A and what is there
    assert torch.equal(completed(whole, own), whole)


def test_rows_are_split_and_joined(tiny):
    sim = simulation(tiny, "fedavg")
    rows = tiny.rows(sim)
    assert torch.equal(joined(split(rows, sim.layout), sim.layout), rows)
    assert torch.equal(with_factors(rows, [(pair, factors(rows, pair)) for pair in sim.layout.pairs]), rows)


# -- golden merges -----------------------------------------------------------------------------------------------------


def test_flexlora_hands_out_the_best_factors_of_the_mean_product():
    b, a = merged("flexlora")
    assert_close(b @ a, tensor([[0.170943, 0.237171], [1.053399, 1.461512]]), atol=1e-6, rtol=0)
    assert_close(a @ a.T, tensor([[1.0]]))
    shared, other = merged("flexlora:balanced=true")
    assert_close(shared @ other, b @ a)  # the same model
    assert_close(shared.norm(), other.norm())


@pytest.mark.parametrize(("lam", "moved", "error"), [(0, -0.346154, 0.416025), (0.01, -0.345092, None),
                                                     (1, -0.264706, 0.441176)])
def test_lorafair_corrects_b(lam, moved, error):
    """(D - mean B mean A) mean A' = (-1.125, 0); mean A mean A' = 3.25: -1.125 / (3.25 + lam)."""
    b, a = merged(f"lorafair:lam={lam}")
    assert_close(a, tensor([[1.0, 1.5]]))
    assert_close(b - tensor([[0.5], [1.0]]), tensor([[-1.125 / (3.25 + lam)], [0.0]]))
    assert_close(b[0, 0] - 0.5, tensor(moved), atol=1e-6, rtol=0)
    if error is not None:
        assert_close(torch.linalg.norm(MEAN_PRODUCT - b @ a), tensor(error), atol=1e-6, rtol=0)


def test_with_much_weight_lorafair_is_fedavg():
    for mine, others in zip(merged("lorafair:lam=1e12"), merged("fedavg"), strict=True):
        assert_close(mine, others, atol=1e-11)


def test_an_equal_a_leaves_nothing_to_correct():
    """Then the mean of products is the product of means."""
    alike = A[:1].expand_as(A)
    for mine, others in zip(merged("lorafair", a=alike), merged("fedavg", a=alike), strict=True):
        assert_close(mine, others)


def test_a_hostile_client_has_no_part_in_the_mean_product():
    """Of five clients one sends factors a million times as large: with a robust aggregator the product stays theirs."""
    generator = torch.Generator().manual_seed(3)
    b, a = (1 + 0.1 * torch.randn(5, *shape, generator=generator, dtype=torch.float64) for shape in ((4, 2), (2, 3)))
    p = torch.full((5,), 0.2, dtype=torch.float64)
    honest = torch.matmul(*merged("flexlora+median", b[:4], a[:4], p[:4] * 1.25))
    for method in ("flexlora+median", "lorafair+krum", "flexlora+geometricmedian"):
        spoiled = torch.matmul(*merged(method, torch.cat([b[:4], 1e6 * b[4:]]), a, p))
        assert torch.linalg.norm(spoiled - honest) < 0.2 * torch.linalg.norm(honest), method


# -- exact reductions --------------------------------------------------------------------------------------------------


def test_ffa_with_the_identity_is_fedavg_on_the_weight(tiny):
    """A = I, s = 1: then B is a full matrix beside W, and its gradient is W's."""

    class Beside(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(torch.tanh(self.one(x)))

    def square():
        module = adapted(Beside, "lora:rank=4,alpha=4")()
        with torch.no_grad():
            module.one.lora.A.copy_(torch.eye(4))
        return module

    def plain():
        module = Beside()
        module.one.bias.requires_grad_(False)
        return module

    sim, whole = tiny.simulation("ffalora", square), tiny.simulation("fedavg", plain)
    begun = whole.layout.views(whole.init.row)["one.weight"].clone()
    for _ in range(3):
        sim.round()
        whole.round()
    moved = whole.layout.views(whole.row(0))["one.weight"] - begun
    assert_close(products(sim.row(0), sim.layout)["one"], moved)
    for name in ("head.weight", "head.bias"):
        assert_close(sim.layout.views(sim.row(0))[name], whole.layout.views(whole.row(0))[name])


def test_one_step_of_one_round_is_the_same_for_all(tiny):
    """B = 0, so the gradient of A is 0 and B alone moves: every way to combine gives s (sum p_i B_i) A."""
    data = tiny.federation(sizes=(7, 12, 1, 5))
    options = {"data": data, "batch": 50, "epochs": 1}
    sims = [rounds(simulation(tiny, method, **options), 1) for method in ALL]
    for sim in sims[1:]:
        for name, product in products(served(sim), sim.layout).items():
            assert_close(product, products(served(sims[0]), sims[0].layout)[name])


@pytest.mark.parametrize("method", ["fedavg", "lorafair:lam=0", "flexlora"])
def test_of_one_client_the_model_is_its_own(tiny, method):
    """Its product has the adapter's rank, so nothing is lost."""
    data = tiny.federation(sizes=(12,), val=(2,), test=(3,))
    sim = simulation(tiny, method, data=data)
    trained = {n: p.clone() for n, p in products(tiny.cohort(sim).train(sim.init.row[None])[0], sim.layout).items()}
    sim.round()
    for name, product in products(served(sim), sim.layout).items():
        assert_close(product, trained[name], atol=1e-11)


@pytest.mark.parametrize("method", ALL)
def test_no_steps_change_nothing(tiny, method):
    """What is served stays, to rounding, though FedSVD and FlexLoRA write the factors anew."""
    sim = rounds(simulation(tiny, method), 2)
    before = {name: t.clone() for name, t in products(served(sim), sim.layout).items()}
    up = {"fedsvd": "~*.lora.A", "ffalora": "~*.lora.A", "rolora": "~*.lora.A"}.get(method, "all")
    nothing = torch.zeros(2, sim.layout.only(up).size, dtype=torch.float64)
    ids = torch.arange(2)
    uploads = Uploads({"update": nothing}, ids, ids + 1, tensor([0.5, 0.5]), 4, 2, sim.layout)
    state = sim.method.merge(sim.server.state, uploads)
    sim.server.state = state
    for name, product in products(served(sim), sim.layout).items():
        assert_close(product, before[name], atol=1e-11)


def test_fedsvd_without_an_svd_is_ffa_and_with_one_serves_the_same_model_after_it(tiny):
    without, ffa = (rounds(simulation(tiny, m), 3) for m in ("fedsvd:every=0", "ffalora"))
    assert torch.equal(served(without), served(ffa))
    one, other = (rounds(simulation(tiny, m), 1) for m in ("fedsvd", "ffalora"))
    for name, product in products(served(one), one.layout).items():
        assert_close(product, products(served(other), other.layout)[name])
    for pair in one.layout.pairs:
        a = factors(served(one), pair)[1]
        assert_close(a @ a.T, torch.eye(pair.rank, dtype=torch.float64))
    every = [rounds(simulation(tiny, f"fedsvd:every={k}"), 2) for k in (1, 2)]
    assert not torch.equal(served(every[0]), served(every[1]))


def test_rolora_trains_b_then_a(tiny):
    """In its first round it is FFA; in the second B stays and A moves, the head in both."""
    sim, ffa = simulation(tiny, "rolora"), rounds(simulation(tiny, "ffalora"), 1)
    sim.round()
    first = served(sim).clone()
    assert torch.equal(first, served(ffa))
    done = sim.round()
    second = served(sim)
    for part, moves in (("*.lora.A", True), ("*.lora.B", False), ("head", True)):
        assert torch.equal(sim.layout.cut(first, part), sim.layout.cut(second, part)) is not moves, part
    assert done.up == {"update": 8 * (sim.layout.size - sum(pair.b.size for pair in sim.layout.pairs))}


def test_averages_are_exact_where_one_factor_is_fixed(tiny):
    """The served product is the mean of the clients': of FFA always, of RoLoRA in either round; not of FedAvg."""
    for method, exact in (("ffalora", True), ("rolora", True), ("fedavg", False)):
        sim = rounds(simulation(tiny, method, epochs=3), 1)
        cohort = tiny.cohort(sim)
        start = served(sim).expand(cohort.size, -1).clone()
        part = {"ffalora": "~*.lora.A", "rolora": "~*.lora.B", "fedavg": "all"}[method]
        cohort.members = replace(cohort.members, round=1)
        trained = cohort.train(start, part=part)
        share = cohort.n.double() / cohort.n.sum()
        sim.round()
        for pair in sim.layout.pairs:
            mean = torch.einsum("c,cor,crq->oq", share, *factors(trained, pair))
            off = float((torch.matmul(*factors(served(sim), pair)) - mean).abs().max())
            assert (off < 1e-12) is exact, (method, pair.name, off)


def test_an_orthogonal_change_of_basis_commutes_with_plain_sgd(tiny):
    """(B Q, Q' A) is the same model, and plain SGD keeps it so."""
    sim = rounds(simulation(tiny, "fedavg"), 2)
    row = served(sim).clone()
    q, _ = torch.linalg.qr(torch.randn(2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    turned = with_factors(row, [(pair, (b @ q, q.T @ a)) for pair in sim.layout.pairs
                                for b, a in [factors(row, pair)]])
    cohort = tiny.cohort(sim)
    one, other = (tiny.cohort(sim).train(r.expand(cohort.size, -1).clone()) for r in (row, turned))
    for pair in sim.layout.pairs:
        b, a = factors(one, pair)
        for mine, theirs in zip((b @ q, q.T @ a), factors(other, pair), strict=True):
            assert_close(mine, theirs, atol=1e-11)


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ALL[1:])
def test_a_model_without_adapters_is_refused(tiny, method):
    said = f"{method} works on the two factors of low-rank adapters, and this model has none that train; give it some"
    with pytest.raises(CoterieError, match=said):
        tiny.Simulation(registry.method(method), net, tiny.federation(), tiny.Training(device="cpu"))


@pytest.mark.parametrize("method", ["flexlora", "lorafair"])
@pytest.mark.parametrize("aggregator", ["confree", "mgda", "fedmgdaplus"])
def test_aggregators_of_directions_are_refused_where_products_are_averaged(tiny, method, aggregator):
    with pytest.raises(CoterieError, match=f"{method} averages products of factors, and {aggregator} combines"):
        simulation(tiny, f"{method}+{aggregator}")


# -- presets -----------------------------------------------------------------------------------------------------------


def test_presets_are_methods_on_a_part(tiny):
    """FedIT is FedAvg; FedSA shares A alone; Wu's FedLoRA shares all but the adapters, and trains both in turn."""
    assert registry.method("fedavg:fedit") == registry.method("fedavg")
    sim = simulation(tiny, "fedper:fedsa")
    done = sim.round()
    assert done.up == {"update": 8 * sum(pair.a.size for pair in sim.layout.pairs)}
    assert not sim.layout.cut(sim.init.row, "*.lora.B").any()  # so a newcomer without labels has the plain backbone
    full = simulation(tiny, "fedrep:fedlora", "lora:rank=2,base=trains")
    first = full.init.row.clone()
    full.round()
    assert full.own.row.shape == (4, sum(pair.a.size + pair.b.size for pair in full.layout.pairs))
    assert not torch.equal(full.layout.cut(served(full), "~adapters"), full.layout.cut(first, "~adapters"))
    assert len({tuple(full.layout.cut(served(full, i), "adapters").tolist()) for i in range(4)}) == 4


def test_all_takes_them_where_there_are_adapters():
    mine = {name for name, cls in registry.methods().items() if cls.adapters}
    assert mine == {"ffalora", "fedsvd", "rolora", "flexlora", "lorafair", "hetlora", "raflora", "fedplora",
                    "fedexlora", "flora", "feddpa", "fedalt", "hilora"}
    assert set(registry.expand(["all"], adapters=True)) - set(registry.expand(["all"])) == mine
    assert set(Experiment().changed(["all"]).methods) & mine == set()
    assert set(Experiment(adapter="lora:rank=2").changed(["all"]).methods) >= mine
