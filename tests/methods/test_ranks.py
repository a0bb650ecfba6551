"""Methods over adapters of unequal ranks: golden values, exact reductions, and what each does when nobody trains."""

from __future__ import annotations

import pytest
import torch
from by_hand import assert_close, rounds, tensor
from torch import nn

from coterie import registry
from coterie.contract.layout import Entry, Layout, Pair
from coterie.contract.low_rank import factors, sizes, with_factors
from coterie.contract.method import Uploads
from coterie.contract.ranks import Cut, among, within
from coterie.contract.records import Model
from coterie.models.lora import adapted

HALF = tensor([0.5, 0.5])


def net():
    """Layers of unequal sides, so that no transposed factor goes unseen."""
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def simulation(tiny, method, rank=2, **options):
    return tiny.simulation(method, adapted(net, f"lora:rank={rank}"), **options)


def products(row, layout):
    return {pair.name: pair.scale * torch.matmul(*factors(row, pair)) for pair in layout.pairs}


def pair_of(o, q, r):
    """A layout of one layer: B `[o, r]`, then A `[r, q]`."""
    b = Entry("l.lora.B", (o, r), 0, "parameter", "base", True)
    a = Entry("l.lora.A", (r, q), o * r, "parameter", "base", True)
    return Layout((b, a), pairs=(Pair("l", a, b, 1.0),))


def merged(method, row, updates, rank, p, layout, modules=None):
    """The server's row after a round in which clients of these ranks upload how far they moved."""
    method = registry.method(method)
    rank = torch.tensor(rank)[:, None]
    ids = torch.arange(len(updates))
    extra = {"modules": modules} if modules is not None else {"rank": rank}
    up = Uploads({"update": updates, **extra}, ids, torch.ones_like(ids), p, len(ids), 0, layout)
    return method.merge(Model(row) if modules is not None else Cut(row, rank), up).row


def moved(b, a, row=None):
    """The update of a client with these factors, from the server's row, or 0, in the ranks that it has."""
    full = torch.cat([b.flatten(), a.flatten()])
    return full if row is None else full - row


# -- golden values -----------------------------------------------------------------------------------------------------


def nobody_trains(method, times):
    """The product `[3, 2]` after rounds in which clients of ranks 1 and 2, of equal weight, send what they got.

    The server stands at B = [e1 e2], A = B' of it: client 1 has B_1 A_1 = e1 e1', client 2 all of it.
    """
    layout = pair_of(3, 2, 2)
    row = moved(torch.eye(3, 2, dtype=torch.float64), torch.eye(2, dtype=torch.float64))
    for _ in range(times):
        row = merged(method, row, torch.zeros(2, layout.size, dtype=torch.float64), [1, 2], HALF, layout)
    return torch.matmul(*factors(row, layout.pairs[0]))


@pytest.mark.parametrize(("method", "left"), [("hetlora:padding", 0.25), ("flexlora:ranks=1+2", 0.5),
                                              ("flexlora:ranks=1+2,balanced=true", 0.5), ("raflora", 1.0),
                                              ("raflora+median", 1.0)])
def test_what_one_of_two_clients_has_not_is_kept_or_shrinks(method, left):
    """Rank collapse: padded means halve b_2 and a_2 each, so a quarter is left; the mean of products halves b_2 a_2;
    the mean over those who have the rank keeps it. The common rank stays 1."""
    for times in (1, 5):
        found = nobody_trains(method, times)
        expected = torch.zeros(3, 2, dtype=torch.float64)
        expected[0, 0], expected[1, 1] = 1, left**times
        assert_close(found, expected)


def test_hetloras_weights_are_norms_of_products():
    """|B_i A_i| = sqrt(5) for both, whatever their samples: the weights are 1/2 each, A = (1, 1) and B = (1, 1)'."""
    layout = pair_of(2, 2, 1)
    rows = torch.stack([moved(tensor([[2.0], [1.0]]), tensor([[1.0, 0.0]])),
                        moved(tensor([[0.0], [1.0]]), tensor([[1.0, 2.0]]))])
    assert_close(sizes(rows, layout), tensor([5.0, 5.0]).sqrt())
    row = merged("hetlora", torch.zeros(4, dtype=torch.float64), rows, [1, 1], tensor([0.25, 0.75]), layout)
    b, a = factors(row, layout.pairs[0])
    assert_close(b, tensor([[1.0], [1.0]]))
    assert_close(a, tensor([[1.0, 1.0]]))


def test_norms_of_products_are_those_of_the_written_ones(tiny):
    sim = simulation(tiny, "fedavg")
    rows = tiny.rows(sim)
    whole = torch.stack([torch.cat([t.flatten() for t in products(row, sim.layout).values()]) for row in rows])
    assert_close(sizes(rows, sim.layout), whole.norm(dim=1))


# -- exact reductions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "other"), [
    ("raflora:ranks=all", "flexlora:balanced=true"), ("raflora:ranks=2", "flexlora:balanced=true"),
    ("flexlora:ranks=2", "flexlora"), ("lorafair:ranks=2", "lorafair"),
    ("hetlora:padding,ranks=all", "fedavg"), ("fedplora:ranks=all", "fedavg"), ("fedplora:ranks=2", "fedavg"),
])
def test_equal_ranks_are_the_method_of_equal_ranks(tiny, method, other):
    """Of adapters of rank 2: with all ranks everywhere nothing is left of what is new."""
    one, two = (rounds(simulation(tiny, name, participation=0.75), 3) for name in (method, other))
    for i in range(4):
        assert_close(one.row(i), two.row(i), atol=1e-11)


def random_clients(layout, ranks, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(len(ranks), layout.size, generator=generator, dtype=torch.float64)
    return torch.where(within(torch.tensor(ranks)[:, None], layout), rows, 0)


def test_flexloras_model_is_the_mean_of_the_clients_where_the_rank_suffices():
    """Ranks 1 and 2 make a mean of rank 3, which the adapter has: Sum p_i B_i A_i to rounding."""
    layout = pair_of(5, 4, 3)
    rows, p = random_clients(layout, [1, 2]), tensor([0.25, 0.75])
    row = merged("flexlora:ranks=1+2", torch.zeros(layout.size, dtype=torch.float64), rows, [1, 2], p, layout)
    mean = torch.einsum("c,cor,crq->oq", p, *factors(rows, layout.pairs[0]))
    assert_close(torch.matmul(*factors(row, layout.pairs[0])), mean)


def test_raflora_is_the_sum_over_slices():
    """D = sum over slices (l, h] between the ranks 1, 2 and 4 of sum_{r_k >= h} (n_k / N_h) B_k[:, l:h] A_k[l:h]; the
    adapter's rank of 7 = 1 + 2 + 4 holds it."""
    layout = pair_of(8, 9, 7)
    ranks, p = [1, 2, 4], tensor([0.5, 0.3, 0.2])
    rows = random_clients(layout, ranks)
    b, a = factors(rows, layout.pairs[0])
    whole = torch.zeros(8, 9, dtype=torch.float64)
    for low, high in ((0, 1), (1, 2), (2, 4)):
        those = [k for k in range(3) if ranks[k] >= high]
        for k in those:
            whole += p[k] / sum(p[j] for j in those) * b[k][:, low:high] @ a[k][low:high]
    row = merged("raflora", torch.zeros(layout.size, dtype=torch.float64), rows, ranks, p, layout)
    assert_close(torch.matmul(*factors(row, layout.pairs[0])), whole)


@pytest.mark.parametrize("method", ["raflora", "hetlora"])
def test_a_rank_that_no_participant_has_stays(method):
    """Two clients of rank 1 and an adapter of 2: what the absent know of rank 2 is not touched."""
    layout = pair_of(3, 4, 2)
    row = random_clients(layout, [2])[0]
    after = merged(method, row, torch.zeros(2, layout.size, dtype=torch.float64), [1, 1], HALF, layout)
    b, a = factors(row, layout.pairs[0])
    assert_close(torch.matmul(*factors(after, layout.pairs[0])), b @ a)


SENT = {"fedplora": {"modules": torch.tensor([[1, 0], [1, 0]])}, "raflora": {"rank": torch.tensor([[1], [2]])},
        "hetlora:ranks=all": {"rank": torch.tensor([[2], [2]])}, "flexlora:ranks=all": {}, "lorafair:ranks=all": {}}


@pytest.mark.parametrize("method", SENT)
def test_no_steps_change_nothing(tiny, method):
    """Where means are over those that have a rank, unequal ones too; else where all have the adapter's. What padding
    and FlexLoRA lose with unequal ranks is shown above."""
    sim = rounds(simulation(tiny, method), 2)
    before = products(sim.server.state.row.clone(), sim.layout)
    nothing = {"update": torch.zeros(2, sim.layout.size, dtype=torch.float64), **SENT[method]}
    up = Uploads(nothing, torch.arange(2), torch.tensor([1, 3]), tensor([0.25, 0.75]), 4, 2, sim.layout)
    # HetLoRA's means of factors change products unless clients are alike, as they are after no steps at all ranks
    for name, product in products(sim.method.merge(sim.server.state, up).row, sim.layout).items():
        assert_close(product, before[name], atol=1e-11)


@pytest.mark.parametrize("optimizer", ["sgd", "sgd(momentum=0.9,weight_decay=0.1)", "adamw(weight_decay=0.1)"])
def test_padding_ranks_change_nothing(tiny, optimizer):
    """Zeros in row j of A and column j of B stay zeros under any optimizer, and the other numbers are those of the
    smaller adapter: no gate or mask is needed in training."""
    small, large = (simulation(tiny, "fedavg", rank, optimizer=optimizer) for rank in (2, 4))
    begun = tiny.rows(small)
    padded = large.init.row.expand(4, -1).clone()
    for name, values in small.layout.views(begun).items():
        if ".lora." not in name:
            large.layout.views(padded)[name].copy_(values)

    def filled(b, a):
        return torch.cat([b, b.new_zeros(4, len(b[0]), 2)], 2), torch.cat([a, a.new_zeros(4, 2, a.shape[2])], 1)

    padded = with_factors(padded, [(big, filled(*factors(begun, pair)))
                                   for pair, big in zip(small.layout.pairs, large.layout.pairs, strict=True)])
    one, other = tiny.cohort(small).train(begun), tiny.cohort(large).train(padded)
    for pair, big in zip(small.layout.pairs, large.layout.pairs, strict=True):
        (b, a), (wide, long) = factors(one, pair), factors(other, big)
        assert_close(wide[..., :2], b)
        assert_close(long[:, :2], a)
        assert not wide[..., 2:].any()
        assert not long[:, 2:].any()
    assert_close(large.layout.cut(other, "head"), small.layout.cut(one, "head"))


# -- what each of them promises ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["flexlora:ranks=1+2", "lorafair:ranks=1+2", "raflora:ranks=1+2",
                                    "hetlora:padding,ranks=1+2"])
def test_a_client_uses_the_ranks_it_has(tiny, method):
    """Before and after training, newcomers too; what it uploads has zeros elsewhere."""
    data = tiny.federation(sizes=(7, 12, 1, 5, 6, 4), unseen=2)
    sim = rounds(simulation(tiny, f"{method},dealt=inturn", data=data), 2)
    for i in range(6):
        rank = sim.method.rank_of(tiny.cohort(sim, [i]))
        hidden = ~within(rank, sim.layout)[0]
        assert bool(hidden.any()) is (int(rank) == 1)
        for adapted_too in (False, True):
            assert not sim.row(i, adapted_too)[hidden].any()
    ids = torch.arange(4).numpy()
    upload, _ = sim.method.local(tiny.cohort(sim), sim.payload(ids), sim.own)
    assert not upload.update[~within(upload.rank, sim.layout)].any()


def test_hetlora_holds_its_tail_down(tiny):
    """One step: the tail of B moves by -lr lam |tail of A| B / |B| more than without the term, and A the other way
    round, by hand; whatever is no tail moves alike."""
    sim = simulation(tiny, "hetlora:lam=0.3", batch=50)
    rows, layout = tiny.rows(sim), sim.layout
    tail = (within(torch.tensor([[2]]), layout) & ~within(torch.tensor([[1]]), layout)).to(rows.dtype).expand(4, -1)
    plain = tiny.cohort(sim).train(rows)
    held = tiny.cohort(sim).train(rows, {"tail": tail}, objective=sim.method.objective)
    for pair in layout.pairs:
        b, a = factors(rows, pair)
        one, other = factors(plain, pair), factors(held, pair)
        b_tail, a_tail = b[..., 1], a[:, 1]
        lengths = b_tail.norm(dim=1, keepdim=True), a_tail.norm(dim=1, keepdim=True)
        expected_b, expected_a = torch.zeros_like(b), torch.zeros_like(a)
        expected_b[..., 1] = -0.1 * 0.3 * lengths[1] * b_tail / lengths[0]
        expected_a[:, 1] = -0.1 * 0.3 * lengths[0] * a_tail / lengths[1]
        assert_close(other[0] - one[0], expected_b)
        assert_close(other[1] - one[1], expected_a)
    assert_close(layout.cut(held, "head"), layout.cut(plain, "head"))


def test_hetlora_cuts_ranks_whose_product_fell_and_keeps_to_it(tiny):
    """In round 1 nobody cuts, as B = 0 cannot fall; then a client's rank goes from r to floor(r / 2) exactly where its
    tail's product is smaller after training; the server sends it no more than that, and never more again."""
    sim = simulation(tiny, "hetlora:ranks=4,gamma=0.5,lam=3", rank=4, lr=0.05)
    sim.round()
    assert (sim.server.state.rank == 4).all()
    seen = [sim.server.state.rank]
    for _ in range(4):
        before = sim.server.state.rank
        ids = torch.arange(4).numpy()
        cohort, payload = tiny.cohort(sim), sim.payload(ids)
        upload, _ = sim.method.local(cohort, payload, sim.own)
        assert not upload.update[~within(upload.rank, sim.layout)].any()
        done = sim.round()
        assert torch.equal(sim.server.state.rank, upload.rank)
        assert all(now in (was, max(1, was // 2)) for was, now in
                   zip(before[:, 0].tolist(), upload.rank[:, 0].tolist(), strict=True))
        columns = within(upload.rank, sim.layout).sum(1).double().mean()
        assert done.up["update"] == 8 * float(columns)
        seen.append(upload.rank)
    assert (seen[-1] < 4).any()
    never = rounds(simulation(tiny, "hetlora:ranks=4,gamma=1,lam=3", rank=4, lr=0.05), 4)
    assert (never.server.state.rank == 4).all()


def test_fedplora_trains_the_drawn_modules_and_computes_with_all(tiny):
    """One step moves the drawn modules and the head as a step of the whole adapter does, and nothing else; sets have
    r_i members and are drawn anew each round."""
    sim = rounds(simulation(tiny, "fedplora:ranks=1+3,dealt=inturn", rank=4, batch=50), 1)
    drawn = []
    for _ in range(3):
        cohort = tiny.cohort(sim)
        payload = sim.payload(torch.arange(4).numpy())
        upload, _ = sim.method.local(cohort, payload, sim.own)
        assert upload.modules.sum(1).tolist() == [1, 3, 1, 3]
        whole = tiny.cohort(sim).train(payload.row) - payload.row
        assert_close(upload.update, torch.where(among(upload.modules, sim.layout), whole, 0))
        drawn.append(upload.modules)
        done = sim.round()
        sent = among(upload.modules, sim.layout).sum(1).double().mean()
        assert (done.up["update"], done.down) == (8 * float(sent), {"row": 8 * sim.layout.size})
    assert len({tuple(modules.flatten().tolist()) for modules in drawn}) > 1


def test_fedplora_averages_a_module_over_those_who_trained_it():
    """Weights 1/2, 1/3, 1/6; module 0 of clients 0 and 2, module 1 of 1 and 2, module 2 of nobody, so it stays."""
    layout = pair_of(3, 4, 3)
    p, modules = tensor([1 / 2, 1 / 3, 1 / 6]), torch.tensor([[1, 0, 0], [0, 1, 0], [1, 1, 0]])
    row = random_clients(layout, [3], seed=1)[0]
    updates = torch.where(among(modules, layout), random_clients(layout, [3, 3, 3]), 0)
    after = merged("fedplora", row, updates, [1, 1, 2], p, layout, modules)
    (b, a), (new_b, new_a) = factors(row, layout.pairs[0]), factors(after, layout.pairs[0])
    ub, ua = factors(updates, layout.pairs[0])
    assert_close(new_a[0] - a[0], 0.75 * ua[0, 0] + 0.25 * ua[2, 0])  # 1/2 and 1/6 of 2/3
    assert_close(new_b[:, 1] - b[:, 1], 2 / 3 * ub[1, :, 1] + 1 / 3 * ub[2, :, 1])  # 1/3 and 1/6 of 1/2
    assert torch.equal(new_a[2], a[2])
    assert torch.equal(new_b[:, 2], b[:, 2])


def test_a_rank_beyond_the_adapters_is_all_of_it(tiny):
    """What a site says of its rank is its own word: a huge number is no table of that length, and no other model."""
    found = []
    for rank in (2, 10**15):
        sim = simulation(tiny, "hetlora:ranks=2")
        ids = torch.arange(4)
        up = Uploads({"update": tiny.rows(sim), "rank": torch.tensor([[2], [1], [rank], [1]])}, ids, ids + 1,
                     tensor([0.25] * 4), 4, 0, sim.layout)
        sim.server.merge(up)
        found.append(sim.server.state.row)
        assert sim.method.report(sim.server.state, up)["clients_per_rank"].tolist() == [0, 2, 2]
    assert torch.equal(*found)
