"""Methods in which a client has an adapter of its own: exact reductions, and what each of them promises."""

from __future__ import annotations

import pytest
import torch
from by_hand import assert_close, rounds, tensor
from torch import nn

from coterie import registry
from coterie.contract.low_rank import best, factors, side_by_side
from coterie.contract.patterns import partly
from coterie.contract.spectral import closest
from coterie.data import Federation
from coterie.errors import CoterieError
from coterie.models.lora import adapted
from coterie.models.several import CLUSTER, LEAF, OWN, SHARED, Mixed, Weighed, with_several


def net():
    """Layers of unequal sides, so that no transposed factor goes unseen."""
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def simulation(tiny, method, adapter="lora:rank=2", head=True, **options):
    """Over an adapted model; without `head` the adapters alone train."""
    model = adapted(net, adapter)
    return tiny.simulation(method, model if head else partly(model, train="adapters"), **options)


def every(sim, part="all"):
    """What all clients use `[M, d]`."""
    return torch.stack([sim.layout.cut(sim.row(i), part) for i in range(sim.population)])


def outputs(sim, row, x):
    return sim.layout.load(sim.init.module.double(), row)(x)


def samples():
    return torch.randn(9, 4, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def product(row, layout, part, layer="0"):
    """s B A of one layer's pair of this kind."""
    pair = next(p for p in layout.pairs if p.b.name == f"{layer}{part[1:]}.B")
    return pair.scale * torch.matmul(*factors(row, pair))


def test_a_model_without_adapters_is_left_alone_and_refused(tiny):
    for method in ("feddpa", "fedalt", "hilora"):
        with pytest.raises(CoterieError, match=f"{method} works on the two factors of low-rank adapters"):
            tiny.Simulation(registry.method(method), net, tiny.federation(), tiny.Training(device="cpu"))


# -- FedDPA ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["t", "f"])
def test_feddpa_at_weight_0_is_fedit(tiny, variant):
    """The own pair counts for nothing: shared pair and head are FedAvg's, and so is what is predicted."""
    dual, fedit = (rounds(simulation(tiny, m), 3) for m in (f"feddpa:a=0,variant={variant}", "fedavg:fedit"))
    assert_close(dual.server.state.row, fedit.server.state.row)
    x = samples()
    for i in range(4):
        assert_close(outputs(dual, dual.row(i), x), outputs(fedit, fedit.row(i), x))


def test_feddpa_at_weight_1_is_local(tiny):
    """With the adapters alone, or a head of its own, the own pair trains as if there were no other. Both runs are over
    the wrapped model, in which Local sets the weight to 1, so that the own pair starts from the same draw."""
    for method, head in (("feddpa:a=1", False), ("feddpa:a=1,head=personal", True)):
        dual = rounds(simulation(tiny, method, head=head), 3)

        def alone(head=head):
            module = with_several(adapted(net, "lora:rank=2")(), Mixed)
            for name, parameter in module.named_parameters():
                if name.endswith("own_share"):
                    parameter.data.fill_(1.0)
                parameter.requires_grad_("own_lora" in name or (head and name.startswith("4.")))
            return module

        local = rounds(tiny.simulation("local", alone), 3)
        mine, theirs = (sim.layout.views(every(sim)) for sim in (dual, local))
        for entry in dual.layout.within(OWN + "+head" * head):
            assert_close(mine[entry.name], theirs[entry.name])


def test_with_equal_adapters_the_weight_does_not_matter(tiny):
    """(1 - a) s B A x + a s B A x = s B A x, through all layers."""
    sim = rounds(simulation(tiny, "feddpa"), 2)
    row, x = sim.row(0), samples()
    row = sim.layout.put(row, OWN, sim.layout.cut(row, SHARED))
    assert product(row, sim.layout, SHARED).any()
    found = [outputs(sim, sim.layout.put(row, "*.own_share", tensor(a)), x).detach().clone() for a in (0, 0.3, 1)]
    for one in found[1:]:
        assert_close(one, found[0])


def test_feddpa_f_fine_tunes_a_copy_of_the_shared_adapter(tiny):
    """At a = 1 what is used is FedIT's model with its adapters trained on, which is FedAvg + fine-tune on them; the
    steps are counted, and the shared pair is as FedIT left it."""
    dual = rounds(simulation(tiny, "feddpa:a=1,variant=f"), 2)
    tuned = rounds(simulation(tiny, "fedavgft:part=adapters"), 2)
    x = samples()
    for i in range(4):
        assert_close(outputs(dual, dual.row(i), x), outputs(tuned, tuned.row(i), x))
    steps = [sim.evaluate().stages["served"].steps.tolist() for sim in (dual, tuned)]
    assert steps[0] == steps[1] == [3, 4, 1, 2]


def test_who_has_not_trained_uses_the_shared_adapter_alone(tiny):
    """A newcomer and a client that was never asked have a = 0: with B_l = 0 a mixture would halve what is shared."""
    data = tiny.federation(sizes=(7, 12, 1, 5, 6), unseen=1)
    sim = rounds(simulation(tiny, "feddpa", data=data, participation=0.25), 1)
    shares = [float(sim.layout.cut(sim.row(i), "*.own_share").sum()) for i in range(5)]
    assert sorted(shares) == [0, 0, 0, 0, 1.0]  # two layers at 1/2
    assert shares[4] == 0


# -- FedALT ------------------------------------------------------------------------------------------------------------


def test_the_rest_of_the_world_is_the_mean_of_the_others(tiny):
    """(M - 1) R_k + L_k is the sum of all L, so the same for every k, whoever took part."""
    sim = rounds(simulation(tiny, "fedalt", participation=0.5), 3)
    table = sim.server.state.table
    others = sim.server.payload(torch.arange(4)).others
    total = 3 * others + table
    assert_close(total, table.sum(0).expand_as(total))
    assert not torch.equal(others[0], others[1])
    assert_close(table[1], sim.layout.cut(sim.row(1), OWN))  # everybody's last upload is what it goes on from
    newcomer = sim.server.payload(torch.tensor([4])).others[0]
    assert_close(newcomer, table.mean(0))


def test_of_two_clients_each_has_the_others_adapter(tiny):
    data = tiny.federation(sizes=(7, 5), val=(2, 2), test=(3, 3))
    sim = rounds(simulation(tiny, "fedalt", data=data), 2)
    for k in (0, 1):
        assert_close(sim.layout.cut(sim.row(k), SHARED), sim.layout.cut(sim.row(1 - k), OWN))


def test_fedalt_whose_gate_is_open_is_local(tiny):
    """With a constant input of 1000 and a mixer that starts at (1, -1) there, a = 1 to the last bit, and its gradient
    is 0: then the own pair trains as Local does on it."""
    x, y = torch.randn(3, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3
    x[..., 0] = 1000.0

    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.l, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x):
            return self.head(torch.tanh(self.l(x) / 100))

    def opened(module):
        module = with_several(module, Weighed)
        with torch.no_grad():
            module.l.own_mixer[:, 0] = torch.tensor([1.0, -1.0])
            return module

    class Opened(registry.methods()["fedalt"]):
        name = "opened"

        def wrap(self, module):
            return opened(module)

    pairs = [(one, y) for one in x]
    data = Federation.from_splits(pairs, pairs, pairs, classes=3)
    model = partly(adapted(One, "lora:rank=2"), train="adapters")

    def alone():
        module = opened(adapted(One, "lora:rank=2")())
        for name, parameter in module.named_parameters():
            parameter.requires_grad_("own_lora" in name)
        return module

    sims = [tiny.simulation(m, f, data=data, lr=1e-4) for m, f in ((Opened(), model), ("local", alone))]
    for sim in sims:
        rounds(sim, 3)
    assert product(sims[0].row(0), sims[0].layout, OWN, "l").any()
    assert_close(every(sims[0], OWN), every(sims[1], OWN))


def test_the_mixer_learns_and_a_client_goes_on_from_its_own(tiny):
    """It starts at 1/2 each; what is in use is the client's own pair and mixer beside the others' mean."""
    sim = simulation(tiny, "fedalt")
    assert not every(sim, "*.own_mixer").any()
    rounds(sim, 3)
    assert every(sim, "*.own_mixer").any(1).all()
    assert len({tuple(row.tolist()) for row in every(sim, OWN)}) == 4


# -- HiLoRA ------------------------------------------------------------------------------------------------------------


def test_the_root_is_flexlora(tiny):
    """After a round the same model as FlexLoRA at equal ranks: both hand out the best approximation of the mean
    product, HiLoRA with B = U and A = Sigma V'. Later rounds start from other factors of the same product."""
    root, flex = (rounds(simulation(tiny, m), 1) for m in ("hilora", "flexlora"))
    for layer in ("0", "2"):
        assert_close(product(root.row(0), root.layout, SHARED, layer), product(flex.row(0), flex.layout, SHARED, layer))
        b = next(factors(root.row(0), p)[0] for p in root.layout.pairs if p.b.name == f"{layer}.lora.B")
        assert_close(b.T @ b, torch.eye(2, dtype=torch.float64))
    assert_close(root.layout.cut(root.row(0), "head"), flex.layout.cut(flex.row(0), "head"))
    assert not product(root.row(0), root.layout, CLUSTER).any()


def test_stages_follow_each_other_and_are_then_fixed(tiny):
    """Root: one model for all. Cluster: the root's pair stays, and clients of a cluster use one model. Leaf: nothing is
    sent, root and cluster stay, every client has its own pair and head."""
    sim = simulation(tiny, "hilora:root_rounds=2,cluster_rounds=2,clusters_wanted=2")
    size = 8 * sim.layout.only(f"~{CLUSTER}+{LEAF}").size
    pairs = 8 * sim.layout.only(SHARED).size
    done = [sim.round() for _ in range(2)]
    assert [(d.up, d.down) for d in done] == [({"update": size}, {"row": size, "root": 0})] * 2
    root = every(sim, SHARED)
    assert_close(root, root[:1].expand_as(root))
    done = [sim.round() for _ in range(2)]
    assert [(d.up, d.down) for d in done] == [({"update": size}, {"row": size, "root": pairs})] * 2
    cluster, middle = sim.server.state.cluster, every(sim, CLUSTER)
    assert torch.equal(every(sim, SHARED), root)
    assert len(cluster.unique()) == 2
    assert all(torch.equal(middle[i], middle[j]) == (cluster[i] == cluster[j]) for i in range(4) for j in range(4))
    assert not any(product(sim.row(i), sim.layout, LEAF).any() for i in range(4))
    done = sim.round()
    assert (done.up, done.down) == ({}, {"row": size, "root": pairs})
    assert torch.equal(every(sim, SHARED), root)
    assert torch.equal(every(sim, CLUSTER), middle)
    assert len({tuple(row.tolist()) for row in every(sim, LEAF)}) == 4
    assert len({tuple(row.tolist()) for row in every(sim, "head")}) == 4


def test_one_cluster_is_a_second_global_adapter(tiny):
    """Without a penalty its rounds are FlexLoRA's over the second pair, the root's being fixed: the mean product of
    what the clients trained, cut to the rank."""
    sim = rounds(simulation(tiny, "hilora:root_rounds=1,cluster_rounds=5,clusters_wanted=1,gamma_c=0"), 1)
    cohort = tiny.cohort(sim)
    trained = cohort.train(every(sim), part=f"~{SHARED}+{LEAF}")
    share = cohort.n.double() / cohort.n.sum()
    sim.round()
    for pair in sim.layout.pairs:
        if pair.b.name.endswith(".cluster_lora.B"):
            u, sigma, vt = best(*side_by_side(share, *factors(trained, pair)), pair.rank)
            for i in range(4):
                assert_close(torch.matmul(*factors(sim.row(i), pair)), u * sigma @ vt, atol=1e-11)
    assert_close(every(sim, "head")[0], share @ sim.layout.cut(trained, "head"))


def test_the_penalty_keeps_columns_orthogonal(tiny):
    """|B_r' B_c|^2 after a round in the clusters, with gamma_c = 0 and large."""
    left = []
    for gamma in (0, 2):
        sim = rounds(simulation(tiny, f"hilora:root_rounds=2,cluster_rounds=9,clusters_wanted=1,gamma_c={gamma}"), 6)
        views = sim.layout.views(sim.row(0))
        left.append(sum(float((views[f"{n}.lora.B"].T @ views[f"{n}.cluster_lora.B"]).square().sum()) /
                        float(views[f"{n}.cluster_lora.B"].square().sum()) for n in ("0", "2")))
    assert left[1] < left[0]


def test_a_newcomer_finds_its_cluster(tiny):
    """It trains the root's adapter for a round, counted as steps, and gets root and cluster at once, its leaf being 0;
    by the same rule every client of the federation would come to its own cluster."""
    data = tiny.federation(sizes=(7, 12, 8, 5, 6), unseen=1)
    sim = rounds(simulation(tiny, "hilora:root_rounds=1,cluster_rounds=2,clusters_wanted=2", data=data), 2)
    row = sim.row(4)
    assert not product(row, sim.layout, LEAF).any()
    assert any(torch.equal(sim.layout.cut(row, f"{CLUSTER}+head"), sim.layout.cut(sim.row(i), f"{CLUSTER}+head"))
               for i in range(4))
    stages = sim.evaluate().stages
    # the newcomer is the client with 12 samples: 4 batches of 3
    assert (stages["unseen_served"].steps.tolist(), stages["unseen_adapted"].steps.tolist()) == ([4], [8])
    state = sim.server.state
    assert closest(state.up, state.up, state.cluster).tolist() == state.cluster.tolist()


# -- FedLoRA of Wu et al. ----------------------------------------------------------------------------------------------


def test_fedlora_is_fedavg_without_adapters_and_local_with_a_fixed_model(tiny):
    """fedrep:fedlora trains tau with sigma fixed, then sigma with tau fixed, and shares sigma. An adapter that never
    trains, B = 0, is none: FedAvg of the plain model. A sigma that never trains: Local on the adapters."""
    full = "lora:rank=2,base=trains"
    fedavg = rounds(tiny.simulation("fedavg", net), 3)
    mine = rounds(simulation(tiny, "fedrep:fedlora,head_epochs=0", full), 3)
    names = {entry.name: entry.name.replace(".base.", ".") for entry in mine.layout.within("~adapters")}
    theirs, ours = (sim.layout.views(sim.row(1)) for sim in (fedavg, mine))
    assert set(names.values()) == set(theirs)
    for name, plain in names.items():
        assert_close(ours[name], theirs[plain])
    frozen = rounds(simulation(tiny, "fedrep:fedlora,body_epochs=0", full), 3)
    local = rounds(simulation(tiny, "local", head=False), 3)
    assert_close(every(frozen, "adapters"), every(local, "adapters"))


def test_fedsa_is_fedper_on_a_part(tiny):
    assert registry.method("fedper:fedsa") == registry.method("fedper:personal=*.lora.B+head")
