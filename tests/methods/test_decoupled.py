"""Methods that share a part of the model, against FedAvg, Local, FedPer, plain PyTorch and golden numbers."""

from __future__ import annotations

import copy
import math
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from by_hand import MODELS, assert_close, rounds, tensor
from torch import nn

from coterie import registry, streams
from coterie.contract.algebra import mmd
from coterie.contract.layout import Layout
from coterie.data import Federation
from coterie.errors import CoterieError
from coterie.methods.fedcp import WIDTHS, gate
from coterie.methods.fednh import FedNH
from coterie.methods.fedrep import FedRep
from coterie.methods.feduv import crowding, lacking_variance
from coterie.models import ResNet18
from coterie.running.runs import prepare_comparison

SHARE = torch.tensor([7, 12, 1, 5], dtype=torch.float64) / 25  # of the tiny federation's clients


def deployed(sim):
    return torch.stack([sim.row(i) for i in range(len(sim.federation.names))])


def sgd(tiny, sim, rows, part="all", epochs=None, objective=None):
    """Every client's SGD of this round from its row, by torch.optim on the module itself, [M, D]."""
    epochs = sim.training.epochs if epochs is None else epochs
    steps = [tiny.steps_of(int(n), sim.training.batch, epochs) for n in sim.federation.sizes("train")]
    rows = rows if rows.ndim == 2 else rows.expand(sim.population, -1)
    return torch.stack(
        [tiny.sgd(sim, i, rows[i], steps[i], part=part, objective=objective)[0] for i in range(sim.population)]
    )


def mean(sim, rows, part):
    """The clients' mean of a part, weighted by their samples; counters take the largest."""
    layout, parts = sim.layout.only(part), sim.layout.cut(rows, part)
    out = SHARE @ parts
    for entry in layout.entries:
        if entry.kind == "counter":
            out[entry.start : entry.stop] = parts[:, entry.start : entry.stop].amax(0)
    return out


def module_of(sim, row):
    return sim.layout.load(copy.deepcopy(sim.init.module).double(), row)


# -- FedPer, and what FedPer, FedRep and LG-FedAvg have in common ------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", ["fedper", "fedrep", "lgfedavg"])
def test_keeping_nothing_is_fedavg(tiny, method, model):
    """Everything is shared: phi is the whole model."""
    one, two = (rounds(tiny.simulation(m, model), 3) for m in (f"{method}:personal=none", "fedavg"))
    assert_close(one.server.state.row, two.server.state.row)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", ["fedper", "fedrep:head_epochs=1", "lgfedavg"])
def test_keeping_everything_is_local(tiny, method, model):
    """Nothing is shared: every client trains its whole model alone, bit for bit."""
    one, two = (rounds(tiny.simulation(m, model), 3) for m in (registry.method(method, personal="all"), "local"))
    assert torch.equal(one.own.row, two.own.row)
    assert one.server.state.row.numel() == 0


def test_fedper_round_by_hand(tiny):
    """(phi_i, h_i) <- SGD jointly from (phi, h_i); phi <- sum p_i phi_i; heads stay; twice, so that heads differ."""
    sim = tiny.simulation("fedper")
    for _ in range(2):
        trained = sgd(tiny, sim, deployed(sim))
        sim.round()
        assert_close(sim.server.state.row, mean(sim, trained, "~head"))
        assert_close(sim.own.row, sim.layout.cut(trained, "head"))


# -- FedRep -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["mlp", "bn"])
def test_fedrep_round_by_hand(tiny, model):
    """Head by SGD over the fixed body, then the body under the fixed head, twice so that heads differ."""
    sim = tiny.simulation("fedrep", model, epochs=2)  # of which the body takes its own one
    assert (sim.method.head_epochs, sim.method.body_epochs) == (5, 1)
    for _ in range(2):
        fitted = sgd(tiny, sim, deployed(sim), "head", epochs=5)
        trained = sgd(tiny, sim, fitted, "~head", epochs=1)
        sim.round()
        assert_close(sim.server.state.row, mean(sim, trained, "~head"))
        assert_close(sim.own.row, sim.layout.cut(trained, "head"))


def test_fedrep_phases_leave_the_other_part_bit_unchanged(tiny):
    """Without a body phase phi stays as it was; without a head phase the heads do."""
    no_body = rounds(tiny.simulation("fedrep:body_epochs=0"), 2)
    assert torch.equal(no_body.server.state.row, no_body.layout.cut(no_body.init.row, "~head"))
    assert (no_body.own.row - no_body.layout.cut(no_body.init.row, "head")).abs().amax(1).min() > 1e-6
    no_head = rounds(tiny.simulation("fedrep:head_epochs=0"), 2)
    assert torch.equal(no_head.own.row, no_head.layout.cut(no_head.init.row, "head").expand(4, -1))
    assert (no_head.server.state.row - no_head.layout.cut(no_head.init.row, "~head")).abs().max() > 1e-6


def test_fedrep_head_phase_is_least_squares_on_the_features(tiny):
    """Squared loss, full batches, run to convergence: h_i = argmin |[z, 1] h - y|^2 with z of the fixed body."""
    data = tiny.federation(sizes=(20, 30), kind="regression")

    def build():
        return nn.Sequential(nn.Linear(4, 2, bias=False), nn.Linear(2, 1))

    sim = tiny.simulation(FedRep(head_epochs=700, body_epochs=0), build, data=data, batch=0, lr=0.4)
    body = sim.server.state.row.view(2, 4)
    sim.round()
    for client in range(2):
        x, y = data.client(client)
        z = torch.cat([x @ body.T, torch.ones(len(x), 1, dtype=torch.float64)], 1)
        assert_close(sim.own.row[client], torch.linalg.lstsq(z, y[:, None]).solution[:, 0], rtol=1e-9, atol=1e-9)


def test_a_newcomer_of_fedrep_fits_a_head_over_the_shared_body(tiny):
    data = tiny.federation(sizes=(7, 12, 1, 5, 6), unseen=1)
    sim = rounds(tiny.simulation("fedrep:head_epochs=2", data=data), 2)
    start = sim.layout.put(sim.init.row, "~head", sim.server.state.row)
    steps = 2 * tiny.steps_of(int(data.sizes("train")[4]), 3)
    assert_close(sim.row(4), tiny.sgd(sim, 4, start, steps, part="head")[0])


def test_fedreps_released_preset():
    chosen = registry.method("fedrep:pfllib")
    assert (chosen.head_epochs, chosen.body_epochs, chosen.validation, chosen.printed) == (1, 1, False, "served")


# -- LG-FedAvg --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["mlp", "bn"])
def test_lgfedavg_round_by_hand_and_only_the_last_layer_travels(tiny, model):
    sim = tiny.simulation("lgfedavg", model)
    head = 8 * (5 * 3 + 3)  # bytes of a 5 -> 3 layer
    for _ in range(2):
        trained = sgd(tiny, sim, deployed(sim))
        outcome = sim.round()
        assert_close(sim.server.state.row, mean(sim, trained, "head"))
        assert_close(sim.own.row, sim.layout.cut(trained, "~head"))
        assert (outcome.down, outcome.up) == ({"row": head}, {"update": head})


def test_lgfedavg_starts_clients_and_newcomers_from_a_module_that_fedavg_trained(tiny):
    """The paper's warm start; a newcomer trains that body for one round under the shared head."""
    data = tiny.federation(sizes=(7, 12, 1, 5, 6), unseen=1)
    warm = rounds(tiny.simulation("fedavg", data=data), 3)
    trained = module_of(warm, warm.server.state.row)
    sim = tiny.simulation("lgfedavg", trained, data=data)
    assert torch.equal(deployed(sim), warm.server.state.row.expand(5, -1))
    rounds(sim, 2)
    start = sim.layout.put(warm.server.state.row, "head", sim.server.state.row)
    steps = tiny.steps_of(int(data.sizes("train")[4]), 3)
    assert_close(sim.row(4), tiny.sgd(sim, 4, start, steps, part="~head")[0])


# -- FedBABU ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["mlp", "bn"])
def test_fedbabu_is_fedavg_on_the_body_under_a_fixed_head(tiny, model):
    """phi <- sum_i p_i SGD_i(phi) where only the body has gradients; every client's head is bit for bit the first."""
    sim = tiny.simulation("fedbabu:finetune_epochs=0", model)
    for _ in range(2):
        trained = sgd(tiny, sim, deployed(sim), "~head")
        sim.round()
        assert_close(sim.server.state.row, mean(sim, trained, "~head"))
    assert torch.equal(sim.layout.cut(deployed(sim), "head"), sim.layout.cut(sim.init.row, "head").expand(4, -1))
    assert len({tuple(row.tolist()) for row in deployed(sim)}) == 1  # without fine-tuning there is one global model


@pytest.mark.parametrize("part", ["all", "head"])
def test_fedbabu_serves_the_shared_body_fine_tuned(tiny, part):
    """Five epochs from (phi, h_0), seen and unseen clients alike."""
    data = tiny.federation(sizes=(7, 12, 1, 5, 6), unseen=1)
    sim = rounds(tiny.simulation(f"fedbabu:part={part}", data=data), 2)
    start = sim.layout.put(sim.init.row, "~head", sim.server.state.row)
    steps = [5 * tiny.steps_of(int(n), 3) for n in data.sizes("train")]
    expected = torch.stack([tiny.sgd(sim, i, start, steps[i], part=part)[0] for i in range(5)])
    assert_close(deployed(sim), expected)
    assert sim.evaluate().stages["served"].steps.tolist() == steps[:4]


def test_pfllibs_fedbabu_fine_tunes_the_body_that_a_client_trained_last(tiny):
    """Ten epochs from (phi_i, h_0) of the client's last round; who never took part has the body it was first sent."""
    data = tiny.federation(sizes=(7, 12, 1, 5, 6), unseen=1)
    sim = tiny.simulation("fedbabu:pfllib,validation=true", data=data, participation=0.5)
    start = sim.init.row.expand(5, -1).clone()
    for _ in range(2):
        chosen = list(sim.selected(sim.rounds_done))
        whole = sim.layout.put(sim.init.row, "~head", sim.server.state.row)
        trained = sgd(tiny, sim, whole, "~head")
        start[chosen] = trained[chosen]
        sim.round()
    start[4] = sim.layout.put(sim.init.row, "~head", sim.server.state.row)  # a newcomer's is the shared one
    steps = [10 * tiny.steps_of(int(n), 3) for n in data.sizes("train")]
    expected = torch.stack([tiny.sgd(sim, i, start[i], steps[i])[0] for i in range(5)])
    assert_close(deployed(sim), expected)
    assert registry.method("fedbabu:pfllib").printed == "served"


# -- FedBN ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["mlp", "dropout"])
def test_fedbn_without_batchnorm_is_fedavg(tiny, model):
    """Bit for bit, unseen clients included."""
    data = tiny.federation(sizes=(7, 12, 1, 5, 6), unseen=1)
    one, two = (rounds(tiny.simulation(m, model, data=data), 3) for m in ("fedbn", "fedavg"))
    assert torch.equal(deployed(one), deployed(two))


@pytest.mark.parametrize(
    ("method", "model", "said"),
    [
        ("fedbn", "mlp", ["fedbn: this model has no part batchnorm, so all of it is shared, as in fedavg."]),
        ("fedbn", "bn", []),
        ("fedper", "mlp", []),
        ("fedper:personal=none", "mlp", []),  # asked for
        ("fedper", "linear", ["fedper: this model is nothing but the part head, which does not travel, so nothing is "
                              "shared."]),
        ("lgfedavg", "linear", ["lgfedavg: this model has no part ~head, so all of it is shared, as in fedavg."]),
        ("fedavg", "linear", []),
    ],
)
def test_a_method_that_becomes_another_with_this_model_says_so(tiny, method, model, said):
    """In the run's record and, before any training, among the notes of a comparison where it is not the first."""
    layers = {"linear": [], "mlp": [nn.Linear(4, 4)], "bn": [nn.Linear(4, 4), nn.BatchNorm1d(4)]}[model]
    module = nn.Sequential(*layers, nn.Linear(4, 3))
    assert tiny.simulation(method, module).choices.get("aggregator", []) == said
    found = prepare_comparison(["fedavg", method], module, tiny.federation(), rounds=1, device="cpu")
    assert found.notes == said


def test_fedbn_round_by_hand(tiny):
    """Plain SGD of (w, b_i); the mean of w; all five tensors of the BatchNorm layer stay."""
    sim = tiny.simulation("fedbn", "bn")
    for _ in range(2):
        trained = sgd(tiny, sim, deployed(sim))
        outcome = sim.round()
        assert_close(sim.server.state.row, mean(sim, trained, "~batchnorm"))
        assert_close(sim.own.row, sim.layout.cut(trained, "batchnorm"))
    assert sim.own.row.shape == (4, 5 * 4 + 1)  # weight, bias, mean, variance of 5 features, and the counter
    assert outcome.up["update"] == outcome.down["row"] == 8 * (4 * 5 + 5 + 5 * 3 + 3)


@pytest.mark.parametrize("method", ["fedbn", "fedper:personal=batchnorm+1", "fedper:personal=1+buffers", "lgfedavg"])
def test_statistics_of_a_newcomer_and_of_who_was_never_asked_are_those_of_its_samples(tiny, method):
    """In one batch, which normalises the samples themselves: their mean and variance. They were those of the start,
    0 and 1, of which one round leaves 0.9^steps; what clients with statistics of their own learn fits neither."""
    sim = tiny.simulation(
        method, lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)), participation=0.4, batch=50,
        data=tiny.federation(sizes=(7, 12, 8, 5), unseen=1),
    )
    for _ in range(2):
        sim.round()
    asked = {int(client) for t in range(2) for client in sim.selected(t)}
    never = sorted({0, 1, 2} - asked)
    assert never, "somebody was never asked"
    for client in (*never, 3):
        x, _ = sim.federation.client(client, "train")
        module = sim.layout.load(copy.deepcopy(sim.init.module).double(), sim.row(client))
        torch.testing.assert_close(module[0].running_mean, x.mean(0))
        torch.testing.assert_close(module[0].running_var, x.var(0))


def test_fedbn_keeps_every_batchnorm_layer_of_a_resnet():
    """Told by type: 20 layers, 40 affine tensors and 60 buffers, those in the shortcuts included."""
    with torch.device("meta"):
        module = ResNet18((3, 32, 32), 10)
    kept = {entry.name for entry in Layout.of(module).within(registry.method("fedbn").personal)}
    layers = {name: sub for name, sub in module.named_modules() if isinstance(sub, nn.BatchNorm2d)}
    assert len(layers) == 20
    expected = {f"{name}.{inner}" for name, sub in layers.items() for inner in sub.state_dict()}
    assert kept == expected
    parameters = {name for name, _ in module.named_parameters()}
    assert (len(kept & parameters), len(kept - parameters)) == (40, 60)


# -- FedROD -----------------------------------------------------------------------------------------------------------


def labelled(labels, seed=0):
    """One client for each list of labels, with random inputs."""
    generator = torch.Generator().manual_seed(seed)
    pairs = [(torch.randn(len(y), 4, generator=generator, dtype=torch.float64), torch.tensor(y)) for y in labels]
    return Federation.from_splits(pairs, classes=3)


@pytest.mark.parametrize("model", MODELS)
def test_fedrod_with_equal_class_counts_shares_fedavgs_model(tiny, model):
    """log n is then the same for all classes, and softmax does not see it; nor does it see the personal head."""
    data = labelled([[0, 1, 2] * 3, [2, 1, 0], [1, 0, 2, 0, 2, 1]])
    one, two = (rounds(tiny.simulation(m, model, data=data), 3) for m in ("fedrod", "fedavg"))
    assert_close(one.server.state.row, two.server.state.row)


def test_fedrod_shares_nothing_of_the_personal_heads(tiny):
    """Body and generic head after a round are the same bits whatever the personal heads are."""
    one, two = (tiny.simulation("fedrod") for _ in range(2))
    two.own.row.copy_(torch.randn(two.own.row.shape, generator=torch.Generator().manual_seed(1)))
    rounds(one, 1)
    rounds(two, 1)
    assert torch.equal(one.server.state.row, two.server.state.row)
    assert (one.own.row - two.own.row).abs().max() > 0.1


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_fedrod_round_by_hand(tiny, gamma):
    """-log(n_y^g e^o_y / sum_c n_c^g e^o_c) for body and generic head, CE of the sum for the personal one."""
    sim = tiny.simulation(f"fedrod:gamma={gamma}", epochs=2)
    for _ in range(2):
        start, trained = deployed(sim), []
        for i, n in enumerate(tiny.SIZES):
            counts = torch.bincount(sim.federation.client(i)[1], minlength=3).double() ** gamma

            def loss(module, x, y, counts=counts):
                z = module[:2](x)
                generic, personal = module[2].generic(z), module[2].personal(z.detach())
                e = counts * generic.exp()
                own = F.cross_entropy(generic.detach() + personal, y)
                return own - (e.gather(1, y[:, None])[:, 0] / e.sum(1)).log().mean()

            trained.append(tiny.sgd(sim, i, start[i], tiny.steps_of(n, 3, 2), objective=loss)[0])
        trained = torch.stack(trained)
        sim.round()
        assert_close(sim.server.state.row, mean(sim, trained, "~personal"))
        assert_close(sim.own.row, sim.layout.cut(trained, "personal"))


@pytest.mark.parametrize("gamma", [1.0, 0.1])
def test_fedrod_learns_nothing_of_classes_that_a_client_has_not(tiny, gamma):
    """A class of weight n^gamma = 0 has no share of the balanced softmax, and no smoothed label either: where all
    clients lack class 2, its row of the generic head stays as it started."""
    x = torch.randn(3, 8, tiny.FEATURES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = Federation.from_splits(*[[(one, torch.arange(8) % 2) for one in x]] * 3, classes=3)
    sim = tiny.simulation(f"fedrod:gamma={gamma}", data=data, label_smoothing=0.2)
    before = sim.layout.views(sim.init.row)["2.generic.weight"]
    after = sim.layout.views(rounds(sim, 3).row(0))["2.generic.weight"]
    assert_close(after[2], before[2], rtol=0, atol=1e-12)
    assert (after[0] - before[0]).abs().max() > 1e-3


def test_fedrod_predicts_with_both_heads_and_a_newcomer_with_the_generic_one(tiny):
    """At the start the personal head is a copy, so scores are doubled; a newcomer's scores are the generic ones."""
    data = tiny.federation(sizes=(7, 12, 1, 5, 6), unseen=1)
    sim = tiny.simulation("fedrod", data=data)
    x = data.client(4)[0]
    plain = tiny.simulation("fedavg", data=data)
    assert_close(module_of(sim, sim.row(0))(x), 2 * module_of(plain, plain.row(0))(x))
    rounds(sim, 2)
    assert torch.equal(sim.layout.cut(sim.row(4), "~personal"), sim.server.state.row)
    module = module_of(sim, sim.row(4))
    assert_close(module(x), module[2].generic(module[:2](x)))
    assert sim.round().up["update"] == 8 * plain.layout.size


@pytest.mark.parametrize("method", ["fedrod", "fedpac", "fednh", "feduv"])
def test_methods_of_classes_refuse_regression(tiny, method):
    with pytest.raises(CoterieError, match=f"{method} needs classes"):
        tiny.simulation(method, "regression")


def test_a_head_that_cannot_be_doubled_is_refused(tiny):
    def build():
        return nn.Sequential(nn.Linear(4, 5), nn.Sequential(nn.Tanh(), nn.Linear(5, 3)))

    with pytest.raises(CoterieError, match="linear layer, not Sequential"):
        tiny.simulation("fedrod", build, head="1")
    assert rounds(tiny.simulation("fedrod", build), 1).server.state.row.numel() == 43


# -- FedPAC -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_fedpac_of_one_client_without_prototypes_is_fedrep(tiny, model):
    """a = 1 and lam = 0: FedRep with one head epoch."""
    data = tiny.federation(sizes=(7,))
    methods = ("fedpac:lam=0", "fedrep:head_epochs=1,body_epochs=none")
    one, two = (rounds(tiny.simulation(m, model, data=data, epochs=2), 3) for m in methods)
    assert_close(one.row(0), two.row(0))


def every_support(P):
    """argmin a'Pa on the simplex by trying every set of positive weights."""
    best = None
    for size in range(1, len(P) + 1):
        for chosen in combinations(range(len(P)), size):
            system = torch.ones(size + 1, size + 1, dtype=torch.float64)
            system[:size, :size], system[-1, -1] = P[list(chosen)][:, list(chosen)], 0
            wanted = torch.zeros(size + 1, dtype=torch.float64)
            wanted[-1] = 1
            found, singular = torch.linalg.solve_ex(system, wanted)
            a = torch.zeros(len(P), dtype=torch.float64)
            a[list(chosen)] = found[:size]
            if not singular and a.min() >= -1e-12 and (best is None or a @ P @ a < best @ P @ best - 1e-15):
                best = a
    return best


def fedpac_statistics(sim, client, row):
    """V and H [classes, d] of a client under a row, class by class from their definitions.

    Of one sample no variance can be told, and its head would be certain: there V is |z|^2.
    """
    x, y = sim.federation.client(client)
    z = module_of(sim, row).eval()[:2](x).detach()
    H, spread, n = torch.zeros(3, z.shape[1], dtype=torch.float64), 0.0, len(x)
    for k in range(3):
        if (y == k).any():
            q, mu = (y == k).double().mean(), z[y == k].mean(0)
            H[k] = q * mu
            spread += q * z[y == k].square().sum(1).mean() - (q**2 * mu.square().sum() if n > 1 else 0)
    return spread / n, H


def fedpac_weights(V, H, mine):
    D = torch.stack([torch.stack([((mine - a) * (mine - b)).sum() for b in H]) for a in H])
    a = every_support(torch.diag(torch.stack(V)) + D)
    a = torch.where(a < 1e-3, 0, a)
    return a / a.sum()


def test_fedpac_rounds_by_hand(tiny):
    """Two rounds in plain PyTorch: head, aligned body, prototypes, statistics and combined heads; then a newcomer."""
    data = tiny.federation(sizes=(7, 12, 1, 5, 6), unseen=1)
    sim = tiny.simulation("fedpac:lam=0.3", data=data)
    n = tensor(data.sizes("train")[:4])
    c, known = torch.zeros(3, 5, dtype=torch.float64), torch.zeros(3, dtype=torch.bool)
    for _ in range(2):
        start = deployed(sim)[:4]

        def loss(module, x, y, c=c, known=known):
            z = module[:2](x)
            pull = ((z - c[y]).square().sum(1) / 5 * known[y]).mean()
            return F.cross_entropy(module[2](z), y) + 0.3 * pull

        trained = sgd(tiny, sim, sgd(tiny, sim, start, "head", 1), "~head", objective=loss)
        facts = [fedpac_statistics(sim, i, start[i]) for i in range(4)]
        V, H = [f[0] for f in facts], [f[1] for f in facts]
        heads = sim.layout.cut(trained, "head")
        combined = torch.stack([fedpac_weights(V, H, H[i]) @ heads for i in range(4)])
        z = torch.cat([module_of(sim, trained[i])[:2](data.client(i)[0]).detach() for i in range(4)])
        y = torch.cat([data.client(i)[1] for i in range(4)])
        c, known = torch.stack([z[y == k].mean(0) for k in range(3)]), torch.ones(3, dtype=torch.bool)
        sim.round()
        assert_close(sim.server.state.body, (n / n.sum()) @ sim.layout.cut(trained, "~head"))
        assert_close(sim.server.state.prototypes, c)
        assert_close(sim.layout.cut(deployed(sim)[:4], "head"), combined, rtol=1e-9, atol=1e-9)
    row = sim.row(4)
    assert torch.equal(sim.layout.cut(row, "~head"), sim.server.state.body)
    _, mine = fedpac_statistics(sim, 4, row)
    assert_close(sim.layout.cut(row, "head"), fedpac_weights(V, H, mine) @ heads, rtol=1e-9, atol=1e-9)


def test_fedpac_relabelled_clients_get_the_same_heads(tiny):
    """Every head is combined for its own client, in whatever order clients come: with part of them a round, too."""
    data, order = tiny.federation(sizes=(6, 3, 2, 5, 4, 9)), [2, 0, 5, 3, 1, 4]
    splits = [[data.client(i, split) for i in order] for split in ("train", "test", "val")]
    moved = Federation.from_splits(*splits, classes=3, names=[data.names[i] for i in order])
    one, two = (rounds(tiny.simulation("fedpac", data=d, participation=0.5), 4) for d in (data, moved))
    assert_close(deployed(two), deployed(one)[order], rtol=1e-10, atol=1e-10)


def test_fedpac_prototypes_of_classes_nobody_has_do_not_pull(tiny):
    sim = rounds(tiny.simulation("fedpac", data=labelled([[0, 1, 1, 0], [1, 1, 0]])), 2)
    assert sim.server.state.known.tolist() == [1, 1, 0]
    assert sim.server.state.prototypes[2].tolist() == [0] * 5


# -- FedNH ------------------------------------------------------------------------------------------------------------


def prototypes(sim, row=None):
    return sim.layout.cut(sim.server.state.row if row is None else row, "prototypes").view(3, -1)


def narrow():
    return nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 3))


@pytest.mark.parametrize("model", ["mlp", "bn", narrow])
def test_fednh_prototypes_have_unit_length_after_every_round(tiny, model):
    """They start orthonormal where there are at least as many features as classes."""
    sim = tiny.simulation("fednh", model)
    if model != narrow:
        assert_close(prototypes(sim) @ prototypes(sim).T, torch.eye(3, dtype=torch.float64), atol=1e-6)  # float32 draw
    for _ in range(3):
        assert_close(prototypes(sim).norm(dim=1), tensor([1, 1, 1]))
        sim.round()


def test_fednh_with_rho_1_keeps_its_prototypes(tiny):
    sim = tiny.simulation("fednh:rho=1")
    before = prototypes(sim).clone()
    rounds(sim, 3)
    assert_close(prototypes(sim), before)


@pytest.mark.parametrize("uniform", [False, True])
def test_fednh_round_by_hand(tiny, uniform):
    """Scores s <z/|z|, W_c>; means of unit features, unit again, smoothed into W; the scale is trained too."""
    sim = tiny.simulation(FedNH(rho=0.6, scale=2.0, uniform=uniform))
    weights = tensor([0.25] * 4) if uniform else SHARE
    assert sim.layout.within("head")[0].name == "2.scale"
    assert sim.layout.cut(sim.server.state.row, "head").tolist() == [2.0]
    for _ in range(2):
        W = prototypes(sim).clone()

        def loss(module, x, y, W=W):
            z = module[:2](x)
            return F.cross_entropy(module[2].scale * (z / z.norm(dim=1, keepdim=True)) @ W.T, y)

        trained = sgd(tiny, sim, sim.server.state.row, objective=loss)
        total = torch.zeros(3, 5, dtype=torch.float64)
        for i in range(4):
            x, y = sim.federation.client(i)
            z = module_of(sim, trained[i])[:2](x).detach()
            z = z / z.norm(dim=1, keepdim=True)
            for k in y.unique():
                mu = z[y == k].mean(0)
                total[k] += (y == k).sum() * mu / mu.norm()
        new = 0.6 * W + 0.4 * total / total.norm(dim=1, keepdim=True)
        sim.round()
        assert_close(prototypes(sim), new / new.norm(dim=1, keepdim=True))
        body, expected = (sim.layout.cut(rows, "~prototypes") for rows in (sim.server.state.row, trained))
        assert_close(body, weights @ expected)
    assert sim.layout.cut(sim.server.state.row, "head").item() != 2.0


def test_fednh_keeps_the_prototypes_of_absent_classes_and_a_fixed_scale(tiny):
    sim = tiny.simulation("fednh:scale=30,learn_scale=false", data=labelled([[0, 1, 1, 0], [1, 1, 0]]))
    before = prototypes(sim).clone()
    rounds(sim, 2)
    assert torch.equal(prototypes(sim)[2], before[2])
    assert (prototypes(sim)[:2] - before[:2]).abs().amax(1).min() > 1e-3
    assert sim.layout.cut(sim.server.state.row, "head").tolist() == [30.0]


# -- FedUV ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_feduv_without_its_terms_is_fedavg(tiny, model):
    one, two = (rounds(tiny.simulation(m, model), 3) for m in ("feduv:variance=0,uniformity=0", "fedavg"))
    assert_close(one.server.state.row, two.server.state.row)


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("copies", [1, 2, 7])
def test_feduvs_variance_of_one_hot_rows(classes, copies):
    """0 for one sample of each class; 1/sqrt(C) - sqrt(B/(B-1) (C-1))/C for balanced batches of B."""
    p = torch.eye(classes, dtype=torch.float64).repeat(copies, 1)
    B = len(p)
    expected = 1 / math.sqrt(classes) - math.sqrt(B / (B - 1) * (classes - 1)) / classes
    assert lacking_variance(p, torch.ones(B, dtype=torch.float64)).item() == pytest.approx(expected, abs=1e-15)
    if copies == 1:
        assert expected == pytest.approx(0, abs=1e-15)


def test_feduvs_uniformity_by_its_definition_and_without_padding():
    """Pairs, their median and the mean written out; samples of weight 0 change nothing; equal features give 1."""
    z = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    z[5] = z[2]  # a pair at distance 0 counts in the mean and not in the median
    squares = [(z[a] - z[b]).square().sum() for a, b in combinations(range(6), 2)]
    median = sorted(s.item() for s in squares if s > 0)[6]  # the lower one of 14
    expected = sum(math.exp(-s / median) for s in squares) / 15
    ones = torch.ones(6, dtype=torch.float64)
    assert crowding(z, ones).item() == pytest.approx(expected, rel=1e-12)
    padded, weight = torch.cat([z, z[:2]]), torch.cat([ones, 0 * ones[:2]])
    assert crowding(padded, weight).item() == pytest.approx(expected, rel=1e-12)
    assert crowding(z[:1].expand(4, -1), ones[:4]).item() == 1
    assert crowding(z[:1], ones[:1]).item() == 0


def test_feduv_round_by_hand(tiny):
    """CE + 2.5 V + 0.5 U in plain PyTorch, over batches of 3 and of a single sample."""

    def loss(module, x, y):
        z = module[:2](x)
        scores = module[2](z)
        if len(x) == 1:
            return F.cross_entropy(scores, y)
        V = (1 / math.sqrt(3) - scores.softmax(1).std(0)).clamp(min=0).mean()
        apart = F.pdist(z).square()
        U = torch.exp(-apart / apart.detach().median()).mean()
        return F.cross_entropy(scores, y) + 2.5 * V + 0.5 * U

    sim = tiny.simulation("feduv", epochs=2)
    for _ in range(2):
        trained = sgd(tiny, sim, sim.server.state.row, objective=loss)
        sim.round()
        assert_close(sim.server.state.row, SHARE @ trained)


# -- FedCP ------------------------------------------------------------------------------------------------------------


def draws(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_fedcp_gate_shares_every_feature_out():
    """r + s = 1, both positive, with noise and without."""
    z, policy = draws(7, 4), (draws(8, 4, seed=1), draws(8, seed=2), draws(8, seed=3), draws(8, seed=4))
    for noise in (torch.zeros(7, 1, 4, dtype=torch.float64), draws(7, 2, 4, seed=5)):
        r, s = gate(z, noise, draws(4, seed=6), *policy)
        assert_close(r + s, torch.ones(7, 4, dtype=torch.float64))
        assert (r > 0).all()
        assert (s > 0).all()


def test_fedcp_round_by_hand(tiny):
    """Context, gate with Gumbel noise of its stream, both heads, MMD to the received body; half heads are averaged."""
    sim = tiny.simulation("fedcp:lam=0.7", epochs=2)
    layout = sim.layout
    for _ in range(2):
        shared = layout.put(sim.init.row, "~personal+context", sim.server.state.row)
        start = layout.put(shared.expand(4, -1), "personal", sim.own.row)
        context = sim.own.row[:, :15].view(4, 3, 5).sum(1)
        start = layout.put(start, "context", context / context.norm(dim=1, keepdim=True))
        assert_close(deployed(sim), start)
        trained = []
        for i, n in enumerate(tiny.SIZES):
            body, steps = module_of(sim, start[i])[:2], iter(range(100))

            def loss(module, x, y, body=body, steps=steps, i=i):
                z, top = module[:2](x), module[2]
                u = streams.uniform(streams.key(streams.key(tiny.stream(sim, i), next(steps)), 1), (len(x), 2, 5))
                scored = torch.relu(top.policy(z * top.context)).view(len(x), 2, 5) - torch.log(-torch.log(u.double()))
                r, s = scored.softmax(1).unbind(1)
                out = top.personal(r * z) + top.generic(s * z)
                apart = mmd(z, body(x).detach(), torch.ones(len(x), dtype=z.dtype), WIDTHS)
                return F.cross_entropy(out, y) + 0.7 * apart

            steps_taken = tiny.steps_of(n, 3, 2)
            trained.append(tiny.sgd(sim, i, start[i], steps_taken, part="~head", objective=loss)[0])
        trained = torch.stack(trained)
        personal, head = layout.cut(trained, "personal"), layout.cut(trained, "head")
        assert torch.equal(head, layout.cut(start, "head"))  # frozen
        sent = layout.put(trained, "head", (personal + head) / 2)
        sim.round()
        assert_close(sim.own.row, personal)
        assert_close(sim.server.state.row, SHARE @ layout.cut(sent, "~personal+context"))


@pytest.mark.parametrize("model", ["mlp", "dropout"])
def test_fedcp_whose_gate_is_personal_is_fedper(tiny, model):
    """lam = 0, r = 1 (a policy whose layer norm gives 1000 to r and 0 to s) and no shared bias, for one round."""
    sim, per = tiny.simulation("fedcp:lam=0", model), tiny.simulation("fedper", model)
    only = sim.layout.only("~personal+context")
    top = sim.layout.head
    row = sim.server.state.row
    row = only.put(row, f"{top}.policy.1.weight", torch.zeros(10, dtype=torch.float64))
    row = only.put(row, f"{top}.policy.1.bias", tensor([1000] * 5 + [0] * 5))
    row = only.put(row, f"{top}.generic.bias", torch.zeros(3, dtype=torch.float64))
    sim.server.state = type(sim.server.state)(row)
    rounds(sim, 1)
    rounds(per, 1)
    assert_close(sim.own.row, per.own.row)
    assert_close(only.cut(sim.server.state.row, "base"), per.server.state.row)


def test_a_newcomer_of_fedcp_predicts_with_the_shared_head(tiny):
    """Its second head is the shared one without a bias: then the gate does not matter and the scores are h(z)."""
    data = tiny.federation(sizes=(7, 12, 1, 5, 6), unseen=1)
    sim = rounds(tiny.simulation("fedcp", data=data), 2)
    module, x = module_of(sim, sim.row(4)), data.client(4)[0]
    z = module[:2](x)
    assert_close(module(x), module[2].generic(z))
    assert torch.equal(sim.layout.cut(sim.row(4), "~personal+context"), sim.server.state.row)
