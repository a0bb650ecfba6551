"""Server optimizers: closed recursions by hand, who is stepped and who is not, and a run that is killed and goes on."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from coterie import registry
from coterie.contract.method import Method, Uploads
from coterie.contract.records import Record
from coterie.errors import CoterieError
from coterie.running import checkpoint
from coterie.running.server import Server
from coterie.running.simulation import Simulation
from coterie.running.stepper import Stepper

ROUNDS = 6
AVERAGES = [name for name, cls in registry.methods().items() if cls.averages and not cls.steps_itself]
REFUSES = sorted(set(registry.methods()) - {*AVERAGES, "local"})


def exactly(one, other):
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


# -- the recursions of Reddi et al. 2021, Algorithm 2, with Delta_t known and v_0 = 0, number by number ---------------


def fedavgm(deltas, w, lr=1.0, momentum=0.9):
    """Hsu, Qi, Brown 2019: v <- beta v + Delta; w <- w + lr v."""
    v = 0.0
    for delta in deltas:
        v = momentum * v + delta
        w = w + lr * v
    return w


def adaptive(deltas, w, grown, lr=0.01, beta1=0.9, tau=1e-3):
    """m <- beta1 m + (1 - beta1) Delta; v by the method; w <- w + lr m / (sqrt(v) + tau)."""
    m = v = 0.0
    for delta in deltas:
        m = beta1 * m + (1 - beta1) * delta
        v = grown(v, delta * delta)
        w = w + lr * m / (math.sqrt(v) + tau)
    return w


def sign(x):
    return (x > 0) - (x < 0)


RECURSIONS = {
    "sgd(momentum=0.9)": fedavgm,
    "sgd(lr=0.5,momentum=0.5)": lambda d, w: fedavgm(d, w, 0.5, 0.5),
    "adam": lambda d, w: adaptive(d, w, lambda v, s: 0.99 * v + 0.01 * s),
    "adam(lr=0.1,beta2=0.9,eps=0.01)": lambda d, w: adaptive(d, w, lambda v, s: 0.9 * v + 0.1 * s, 0.1, tau=0.01),
    "yogi": lambda d, w: adaptive(d, w, lambda v, s: v - 0.01 * s * sign(v - s)),
    "adagrad": lambda d, w: adaptive(d, w, lambda v, s: v + s, beta1=0.0),
    "sgd(lr=0.5)": lambda d, w: w + 0.5 * sum(d),
}


@pytest.mark.parametrize("spec", RECURSIONS)
def test_the_recursion_by_hand(tiny, spec):
    """Two clients of 3 and 1 samples send known updates, so Delta_t = (3 u_1 + u_2) / 4, number by number."""
    sim = tiny.simulation(f"fedavg:server={spec}", data=tiny.federation(sizes=(3, 1)))
    server, n = sim.server, torch.tensor([3, 1])
    generator = torch.Generator().manual_seed(5)
    sent = torch.randn(ROUNDS, 2, sim.layout.size, generator=generator, dtype=torch.float64)
    start, deltas = server.state.row.tolist(), ((3 * sent[:, 0] + sent[:, 1]) / 4).T.tolist()
    for t in range(ROUNDS):
        server.merge(Uploads({"update": sent[t]}, torch.arange(2), n, n.double() / 4, 2, t, sim.layout))
    expected = [RECURSIONS[spec](moves, w) for moves, w in zip(deltas, start, strict=True)]
    exactly(server.state.row, torch.tensor(expected, dtype=torch.float64))


def test_adam_with_the_correction_is_torchs(tiny):
    """`corrected=true` counts the server's own steps: torch.optim.Adam on the gradients -Delta."""
    sim = tiny.simulation("fedavg:server=adam(lr=0.02,beta2=0.999,eps=1e-8,corrected=true)")
    row = sim.server.state.row.clone().requires_grad_()
    optimizer, ids = torch.optim.Adam([row], lr=0.02), torch.arange(1)
    for t in range(ROUNDS):
        delta = torch.randn(1, sim.layout.size, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
        sim.server.merge(Uploads({"update": delta}, ids, ids + 1, torch.ones(1).double(), 4, t, sim.layout))
        row.grad = -delta[0]
        optimizer.step()
    torch.testing.assert_close(sim.server.state.row, row.detach(), rtol=1e-10, atol=1e-10)


# -- what is stepped ---------------------------------------------------------------------------------------------------


def merged(sim) -> list[tuple[Record, Record, Record]]:
    """Rounds of a simulation: the server's state before, what the method alone makes of it, and what it became."""
    seen, before = [], type(sim.server.method).merge

    def merge(self, server, up):
        found = before(self, server, up)
        seen.append([server, found])
        return found

    kind = type("Spy", (type(sim.server.method),), {"name": sim.method.name, "merge": merge})
    object.__setattr__(sim.server.method, "__class__", kind)
    for _ in range(3):
        sim.round()
        seen[-1].append(sim.server.state)
    return [tuple(one) for one in seen]


@pytest.mark.parametrize("model", ["mlp", "bn"])
@pytest.mark.parametrize("name", AVERAGES)
def test_half_a_step_is_half_of_the_way_in_what_is_averaged(tiny, name, model):
    """sgd(lr=0.5) goes half of the merge's way in trained parameters and takes all else, statistics too, as merged."""
    for old, new, stepped in merged(tiny.simulation(f"{name}:server=sgd(lr=0.5)", model)):
        sim = tiny.simulation(name, model)
        averaged = sim.method.averaged(old, sim.layout)
        assert averaged
        for field, t in new.tensors().items():
            expected = t.clone()
            for entry in averaged[field].entries if field in averaged else ():
                if entry.trainable:
                    where = slice(entry.start, entry.stop)
                    expected[..., where] = (old.tensors()[field][..., where] + t[..., where]) / 2
            exactly(stepped.tensors()[field], expected)


@pytest.mark.parametrize("name", AVERAGES)
def test_plain_sgd_of_one_is_the_merge_bit_for_bit(tiny, name):
    """It is skipped, so nothing is remembered either."""
    sims = [tiny.simulation(f"{name}{more}") for more in ("", ":server=sgd", ":server=sgd(lr=1)")]
    for sim in sims:
        sim.round()
        sim.round()
        assert sim.server.stepper is None
    tiny.same(tiny.state(sims[0]), tiny.state(sims[1]))
    tiny.same(tiny.state(sims[0]), tiny.state(sims[2]))


@pytest.mark.parametrize("name", ["fedavg", "fedfew", "scaffold", "fednh", "ditto", "moon"])
def test_the_former_server_lr_is_what_it_was(tiny, name):
    """server_lr=0.5 scaled the mean of the updates, so after one round the server is half-way to the plain run's."""
    half, full = tiny.simulation(f"{name}:server_lr=0.5"), tiny.simulation(name)
    start = full.server.state.tensors()
    half.round()
    full.round()
    field = "rows" if name == "fedfew" else "row"
    moved = full.server.state.tensors()[field]
    expected = (start[field] + moved) / 2
    if name == "fednh":  # whose prototypes never followed it
        expected = full.layout.put(expected, "prototypes", full.layout.cut(moved, "prototypes"))
    exactly(half.server.state.tensors()[field], expected)


def test_every_model_has_a_past_of_its_own_and_one_without_participants_keeps_its_place(tiny):
    """Cluster 1 of IFCA has no taker in round 1: its momentum waits, and goes on from where it was in round 2."""
    sim = tiny.simulation("ifca:models=2,server=sgd(momentum=0.5)")
    server, size, ids = sim.server, sim.layout.size, torch.arange(2)
    start, ones = server.state.rows.clone(), torch.ones(2, size, dtype=torch.float64)
    places = []
    for t, choice in enumerate(([0, 1], [0, 0], [0, 1])):
        up = {"update": ones, "choice": torch.tensor(choice)}
        server.merge(Uploads(up, ids, ids * 0 + 1, torch.full((2,), 0.5).double(), 4, t, sim.layout))
        places.append(server.state.rows - start)
    expected = [[1, 1], [1 + 1.5, 1], [1 + 1.5 + 1.75, 1 + 1.5]]  # v = 1, then 0.5 v + 1 at each step that is taken
    for found, (first, second) in zip(places, expected, strict=True):
        exactly(found, torch.tensor([[first], [second]], dtype=torch.float64).expand(2, size))
    assert server.stepper.memory["rows"]["count"].tolist() == [[3] * 4, [2] * 4]  # of each model's four tensors


def test_a_part_of_an_absent_cluster_stays_while_the_shared_part_steps(tiny):
    """With `clustered=head` the body moves for all; the head of a cluster that nobody chose does not."""
    sim = tiny.simulation("ifca:models=2,clustered=head,server=sgd(momentum=0.5)")
    server, layout, ids = sim.server, sim.layout, torch.arange(1)
    for t, choice in enumerate((1, 0, 0)):
        before = server.state.rows.clone()
        up = {"update": torch.ones(1, layout.size, dtype=torch.float64), "choice": torch.tensor([choice])}
        server.merge(Uploads(up, ids, ids + 1, torch.ones(1).double(), 4, t, layout))
        moved = server.state.rows - before
        assert bool((layout.cut(moved, "base") != 0).all())
        assert bool((layout.cut(moved[choice], "head") != 0).all())
        assert torch.equal(layout.cut(moved[1 - choice], "head"), torch.zeros_like(layout.cut(moved[0], "head")))


def test_a_shared_part_alone_is_stepped(tiny):
    """FedPer's server holds the body: FedAvgM of the body by hand over three real rounds, heads as FedPer's are."""
    sim = tiny.simulation("fedper:server=sgd(momentum=0.5)")
    velocity = torch.zeros_like(sim.server.state.row)
    for old, new, stepped in merged(sim):
        velocity = 0.5 * velocity + (new.row - old.row)
        exactly(stepped.row, old.row + velocity)


def test_partial_participation_goes_on_with_the_momentum(tiny):
    """Whoever takes part, the one model has one past."""
    sim = tiny.simulation("fedavg:server=adam(lr=0.1)", participation=0.5)
    mean, square = torch.zeros_like(sim.server.state.row), torch.zeros_like(sim.server.state.row)
    for old, new, stepped in merged(sim):
        g = old.row - new.row
        mean, square = 0.9 * mean + 0.1 * g, 0.99 * square + 0.01 * g * g
        exactly(stepped.row, old.row - 0.1 * mean / (square.sqrt() + 1e-3))
    assert len(sim.selected(0)) == 2


def test_privacy_comes_first_and_the_optimizer_steps_along_the_noisy_mean(tiny):
    """What the server does with a noisy mean costs no privacy: the epsilon is that of the plain run."""
    plain, stepped = (tiny.simulation(f"fedavg{more}+private:sigma=0.5", seed=3) for more in ("", ":server=yogi"))
    old = stepped.server.state.row.clone()
    said = [sim.round().report["epsilon"] for sim in (plain, stepped)]
    assert said[0] == said[1]
    g = old - plain.server.state.row
    exactly(stepped.server.state.row, old - 0.01 * 0.1 * g / ((0.01 * g * g).sqrt() + 1e-3))


def test_aggregators_and_a_servers_optimizer_go_together(tiny):
    """The optimizer steps along whatever the aggregator made."""
    half, full = (tiny.simulation(f"fedavg{more}+median") for more in (":server=sgd(lr=0.5)", ""))
    start = full.server.state.row
    half.round()
    full.round()
    exactly(half.server.state.row, (start + full.server.state.row) / 2)


# -- going on ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [
    "fedavg:server=sgd(momentum=0.9)", "fedper:server=adam", "ifca:models=2,server=yogi", "fedpac:server=adagrad",
    "cwfedavg:server=adam(corrected=true)", "fedavg:server=adam+private",
])
def test_going_on_from_a_checkpoint_is_bit_identical(tiny, spec, tmp_path):
    whole, other = tiny.simulation(spec, participation=0.5, sampling="poisson"), None
    for t in range(5):
        if t == 2:
            tensors, meta = whole.snapshot()
            checkpoint.save(tmp_path / "state.safetensors", tensors, meta)
            other = tiny.simulation(spec, participation=0.5, sampling="poisson")
            other.restore(*checkpoint.load(tmp_path / "state.safetensors"))
            assert any(name.startswith("optimizer.") and name.endswith(".count") for name in tensors)
        whole.round()
        if other is not None:
            other.round()
    tiny.same(tiny.state(whole), tiny.state(other))


def test_a_checkpoint_of_another_optimizer_is_refused(tiny):
    one, other = tiny.simulation("fedavg:server=adam"), tiny.simulation("fedavg:server=sgd(momentum=0.9)")
    one.round()
    with pytest.raises(CoterieError, match=r"does not fit server=sgd: row.mean, row.square, row.velocity is missing"):
        other.restore(*one.snapshot())


# -- who refuses, and how ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFUSES)
def test_methods_without_an_average_that_lasts_say_why_not(tiny, name):
    sim, chosen = tiny.simulation(), registry.method(f"{name}:server=adam")
    said = f"server=adam does not fit {name}: .+; {name}:server=sgd leaves it as it is"
    with pytest.raises(CoterieError, match=said):
        Server.refuse_early(chosen, 4, sim.layout, sim.training)
    with pytest.raises(CoterieError, match=said):
        tiny.simulation(name, server="adam")
    tiny.simulation(f"{name}:server=sgd", server="adam").round()


def test_those_that_refuse_are_these():
    """Decided method by method; a new one that averages takes part unless it says why not."""
    assert REFUSES == [
        "cfl", "fedalt", "fedamp", "feddyn", "fedexlora", "fedfomo", "fedmtl", "fedsvd", "fesem", "flexlora", "flora",
        "hilora", "lorafair", "pfedhn", "raflora",
    ]


def test_the_baseline_without_a_server_takes_part_in_a_comparison_with_a_servers_optimizer(tiny):
    """Nothing of Local is at a server, so the run's option changes nothing; one of its own is a mistake."""
    one, other = tiny.simulation("local"), tiny.simulation("local", server="adam")
    one.round()
    other.round()
    tiny.same(tiny.state(one), tiny.state(other))
    with pytest.raises(CoterieError, match="server=adam does not fit local: it averages nothing"):
        tiny.simulation("local:server=adam")


def test_a_method_that_does_not_say_what_is_averaged_is_told_what_to_write(tiny):
    @dataclass(frozen=True)
    class Odd(Record):
        theta: Tensor

    class Mine(Method):
        def start(self, init):
            return Odd(init.row)

        def merge(self, server, up):
            return server

    with pytest.raises(CoterieError, match="mine does not say which of its server's tensors are averaged models"):
        Server(Mine(), (sim := tiny.simulation(server="adam")).init, sim.training)


@pytest.mark.parametrize(("given", "said"), [
    ("sgd(momentum=1.5)", "sgd's momentum must be at least 0 and below 1, not 1.5"),
    ("adm", "unknown optimizer 'adm'; did you mean 'adam'"),
    ("adam(lr=0)", "adam's lr must be above 0 or none, not 0.0"),
    ("adam(keep=true)", "always remembers its past; leave out keep"),
    ("adam(lr=0.1", "opens a parenthesis that nothing closes"),
])
def test_bad_spellings_end_in_a_sentence(tiny, given, said):
    with pytest.raises(CoterieError, match=said):
        tiny.simulation(server=given)


def test_the_number_of_models_may_not_change_under_it(tiny):
    sim = tiny.simulation("fedfew:models=2")
    rows = sim.server.state.rows
    stepper = Stepper.of(sim.method, type(sim.training)(server="adam"))
    more = type(sim.server.state)(torch.cat([rows, rows]))
    with pytest.raises(CoterieError, match="their number changed"):
        stepper.step(sim.server.state, more, {"rows": sim.layout})


def test_the_servers_options_of_the_run_and_of_the_method(tiny):
    """The method's own stands in the run's place."""
    run, own = tiny.simulation("fedavg", server="adam(lr=0.1)"), tiny.simulation("fedavg:server=adam(lr=0.1)")
    other = tiny.simulation("fedavg:server=sgd", server="adam(lr=0.1)")
    plain = tiny.simulation("fedavg")
    sims: list[Simulation] = [run, own, other, plain]
    for sim in sims:
        sim.round()
        sim.round()
    assert torch.equal(run.server.state.row, own.server.state.row)
    assert torch.equal(other.server.state.row, plain.server.state.row)
    assert not torch.equal(run.server.state.row, plain.server.state.row)
