"""One client that uploads NaN, or everything 10,000 times as large: what a server keeps besides models is safe, too."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from coterie import registry
from coterie.contract.layout import Entry, Layout
from coterie.contract.method import Method, Uploads
from coterie.contract.records import Upload
from coterie.data import Federation
from coterie.methods.feddyn import FedDyn

ROBUST = ["geometricmedian", "krum", "median", "multikrum", "normclip", "trimmedmean"]
SUMS = ["feddyn", "scaffold", "fedpac", "fednh"]  # their servers sum more than updates
BAD = {"nan": math.nan, "long": 1e4}
HONEST = tuple(range(6))
FAULTY = 6  # the client that is


@cache
def clients() -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """[train, test, val][client] of seven clients, alike but for a small shift: 3 classes of 4 numbers."""
    rng = np.random.default_rng(0)
    rule, shift = rng.standard_normal((4, 3)), 0.3 * rng.standard_normal((7, 4))
    splits = []
    for n in (30, 6, 6):
        pairs = []
        for i in range(7):
            x = rng.standard_normal((n, 4)) + shift[i]
            pairs.append((torch.from_numpy(x), torch.from_numpy((x @ rule).argmax(1))))
        splits.append(pairs)
    return splits


def federation(who: tuple[int, ...]) -> Federation:
    """These of the clients, under the names they have in any company: draws go by names."""
    return Federation.from_splits(
        *([split[i] for i in who] for split in clients()), classes=3, names=[f"c{i}" for i in who]
    )


def spoil(sim, factor: float) -> None:
    """From now on the last client's uploads are `factor` times as large on their way to the server, or all NaN."""
    merge = sim.server.merge

    def spoiled(up: Uploads):
        tensors = {name: t.clone() for name, t in up.tensors.items()}
        for t in tensors.values():
            if t.is_floating_point():
                t[-1] *= factor
        return merge(replace(up, tensors=tensors))

    sim.server.merge = spoiled


def run(tiny, spec: str, who: tuple[int, ...], factor: float | None = None, model: str = "mlp", rounds: int = 3):
    sim = tiny.simulation(spec, model, data=federation(who), batch=10)
    if factor is not None:
        spoil(sim, factor)
    for _ in range(rounds):
        sim.round()
    return sim


def state(sim, who: tuple[int, ...], shown: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """The server's tensors; of tables of clients the rows of those `shown`, which all are among `who`."""
    rows = [who.index(i) for i in shown]
    return {n: (t[rows] if t.ndim and len(t) == len(who) else t).double()
            for n, t in sim.server.state.tensors().items()}


def apart(one, other) -> dict[str, float]:
    return {name: float((t - other[name]).norm()) for name, t in one.items()}


REACHED: dict[tuple[str, str], tuple[dict[str, Any], dict[str, float]]] = {}


def reach(tiny, spec: str, model: str) -> tuple[dict[str, Any], dict[str, float]]:
    """How far the server is from where six honest clients lead it: with a faulty seventh, and without one of them.

    The second is the yardstick: the most that any honest client's absence does, tensor by tensor.
    """
    if (spec, model) in REACHED:
        return REACHED[spec, model]
    alone = run(tiny, spec, HONEST, model=model)
    least: dict[str, float] = {}
    for left in HONEST:
        others = tuple(i for i in HONEST if i != left)
        moved = apart(state(run(tiny, spec, others, model=model), others, others), state(alone, HONEST, others))
        least = {name: max(least.get(name, 0.0), value) for name, value in moved.items()}
    found = {}
    for name, factor in BAD.items():
        sim = run(tiny, spec, (*HONEST, FAULTY), factor, model)
        for kept, t in sim.server.state.tensors().items():
            assert bool(torch.isfinite(t.double()).all()), f"{spec}: {kept} is not finite ({name})"
        found[name] = apart(state(sim, (*HONEST, FAULTY), HONEST), state(alone, HONEST, HONEST))
    REACHED[spec, model] = found, least
    return found, least


@pytest.mark.parametrize("model", ["mlp", "bn"])
@pytest.mark.parametrize("aggregator", ROBUST)
@pytest.mark.parametrize("method", SUMS)
def test_what_the_server_sums_is_as_safe_as_fedavgs_model(tiny, method, aggregator, model):
    """Finite, and as near to the honest clients' server as FedAvg's model is under the same aggregator.

    Distances are measured by what one honest client's absence does to the same tensor. FedAvg's model moves by so many
    of these (1 at least is granted: a seventh client may do as much as a sixth), every tensor here by half as many
    again. Today the most is 1.14 times as many; a sum that takes the client in is thousands of them away.
    """
    plain, usual = reach(tiny, f"fedavg+{aggregator}", model)
    allowed = 1.5 * max(1.0, *(far[name] / usual[name] for far in plain.values() for name in far))
    found, least = reach(tiny, f"{method}+{aggregator}", model)
    for bad, far in found.items():
        for name, value in far.items():
            assert value <= allowed * least[name] + 1e-9, (bad, name)


def drawn_in(honest, told, aggregator):
    """The mean of the honest values, none further from what the aggregator makes of all that was told than the median
    one of them: a client that is kept could otherwise lie five times as far off."""
    even = torch.full((len(told),), 1 / len(told), dtype=told.dtype)
    centre = registry.aggregators()[aggregator]().aggregate(told, even, Layout.flat(told.shape[1]))
    far = (honest - centre).norm(dim=1, keepdim=True)
    return (centre + (honest - centre) * (far.median() / far).clamp(max=1)).mean(0)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("aggregator", ROBUST)
def test_scaffolds_and_feddyns_servers_hold_the_mean_of_the_honest_clients_terms(tiny, aggregator, bad):
    """All take part and the honest are kept, so c is the mean of their c_i and s of their g_i, those drawn in that lie
    furthest off; the clients' own are right.

    In one full-batch step c_i is the gradient at theta, and g_i = -alpha (theta_i - theta) = alpha lr gradient (the
    dynamic terms are 0 in the first round): closed forms, whatever the aggregator.
    """
    who = (*HONEST, FAULTY)
    options = {"data": federation(who), "batch": 0, "epochs": 1}
    for spec, name in ((f"scaffold+{aggregator}", "control"), (f"feddyn:gradient_clip=none+{aggregator}", "tilt")):
        sim = tiny.simulation(spec, **options)
        gradient = tiny.cohort(sim).grad(sim.server.state.row.expand(len(who), -1))
        spoil(sim, BAD[bad])
        sim.round()
        own = gradient if name == "control" else 0.1 * 0.1 * gradient  # alpha and lr
        torch.testing.assert_close(sim.own.row, own, rtol=1e-9, atol=1e-12)
        held, told = getattr(sim.server.state, name), own.clone()
        told[FAULTY] *= BAD[bad]
        expected = drawn_in(own[: len(HONEST)], told, aggregator)
        torch.testing.assert_close(held, expected, rtol=1e-9, atol=1e-12)


def test_a_client_that_is_left_out_once_does_not_bend_scaffolds_control_for_good(tiny):
    """Changes of c_i that were left out would be missing ever after; c follows the c_i themselves, drawn in."""
    sim = tiny.simulation("scaffold+median", data=federation((*HONEST, FAULTY)), batch=10)
    merge = sim.server.merge
    spoil(sim, 1e4)
    sim.round()
    sim.server.merge = merge
    for _ in range(2):
        sim.round()
    expected = drawn_in(sim.own.row, sim.own.row, "median")
    torch.testing.assert_close(sim.server.state.control, expected, rtol=1e-9, atol=1e-12)


AVERAGING = sorted(name for name, cls in registry.methods().items() if cls().averages)
APART = {"cfl"}  # keeps every client's last update, whatever it is, to place it in the tree


@pytest.mark.parametrize("method", [name for name in AVERAGING if name not in APART])
def test_no_server_is_poisoned_by_one_client(tiny, method):
    """Whatever a method averages and keeps, all its server's tensors are finite with one NaN client of seven."""
    options = {"fedfew": ":models=2", "fedsoft": ":models=2", "ifca": ":models=1", "fesem": ":models=2"}
    for aggregator in ("krum", "median"):
        soft = method in ("fedfew", "fedsoft", "cwfedavg")
        if soft and aggregator == "krum":
            continue  # refused
        sim = run(tiny, f"{method}{options.get(method, '')}+{aggregator}", (*HONEST, FAULTY), math.nan)
        wrong = [n for n, t in sim.server.state.tensors().items() if not torch.isfinite(t.double()).all()]
        assert wrong == [], aggregator


def test_fesem_places_no_centre_on_a_faulty_client(tiny):
    """The farthest models become centres, and nothing is farther than a client that sends anything."""
    for factor in BAD.values():
        sim = run(tiny, "fesem:models=2+krum", (*HONEST, FAULTY), factor)
        usual = run(tiny, "fesem:models=2+krum", HONEST)
        assert sim.server.state.rows.norm(dim=1).max() < 2 * usual.server.state.rows.norm(dim=1).max()


# -- buffers -----------------------------------------------------------------------------------------------------------

BUFFERED = Layout((
    Entry("bn.running_var", (2,), 0, "statistic", "base", False), Entry("w", (4,), 2, "parameter", "base", True),
    Entry("bn.num", (), 6, "counter", "base", False),
))


@pytest.mark.parametrize("where", ["everywhere", "buffers", "parameters"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -1e4, 1e4])
@pytest.mark.parametrize("aggregator", ROBUST)
def test_running_statistics_are_those_of_the_clients_that_are_kept(aggregator, bad, where):
    """The weighted mean, and the largest count, of the six; whether the seventh's parameters or statistics are wrong.

    The six lie within each other's reach (their numbers differ by at most 1), so none of them is left out.
    """
    honest = torch.rand(6, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    last = honest[:1].clone()
    columns = {"everywhere": slice(0, 7), "buffers": slice(0, 2), "parameters": slice(2, 6)}[where]
    last[:, columns] = bad
    weights = torch.tensor([0.1, 0.15, 0.2, 0.15, 0.1, 0.2, 0.1], dtype=torch.float64)
    method = Method(aggregator=registry.aggregators()[aggregator]())
    found = method.aggregate(torch.cat([honest, last]), weights, BUFFERED)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found[:2], weights[:6] @ honest[:, :2] / weights[:6].sum(), rtol=1e-12, atol=0)
    assert found[6] == honest[:, 6].max()


def test_where_all_clients_are_broken_buffers_stay():
    method = Method(aggregator=registry.aggregators()["median"]())
    found = method.aggregate(torch.full((5, 7), math.nan).double(), torch.full((5,), 0.2).double(), BUFFERED)
    assert (found[[0, 1, 6]] == 0).all()


def test_the_aggregators_made_for_faulty_clients_are_these():
    assert [name for name, cls in registry.aggregators().items() if cls.robust] == ROBUST


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("model", ["mlp", "bn"])
@pytest.mark.parametrize("spec", ["fedamp", "fedamp:heur", "fedfomo", "pfedhn", "local"])
def test_where_nothing_can_be_plugged_in_a_client_that_diverged_does_not_spread(tiny, spec, model, bad):
    """These take no aggregator: the server keeps that client's last finite model, or learns nothing from it, and the
    others go on. The sums of a round, 0 * NaN among them, would make all of them NaN."""
    assert not registry.method(spec).averages
    sim = run(tiny, spec, (*HONEST, FAULTY), bad, model, rounds=4)
    rows = torch.stack([sim.row(i) for i in HONEST])
    assert bool(torch.isfinite(rows).all())
    moved = rows - torch.stack([run(tiny, spec, (*HONEST, FAULTY), bad, model, rounds=1).row(i) for i in HONEST])
    assert bool((moved.norm(dim=1) > 0).all()), "and they still learn"


def test_feddyn_by_size_is_the_same_under_an_aggregator_that_leaves_nobody_out(tiny, monkeypatch):
    """alpha_i differs between clients there; the server's s is of one alpha, whether it is summed or followed."""
    monkeypatch.setattr(FedDyn, "drawn_in", lambda self, values: values)  # how far off a term may be is another matter
    sizes = (30, 20, 26, 24, 28, 22)
    splits = [[pair[i] if k else (pair[i][0][:n], pair[i][1][:n]) for i, n in enumerate(sizes)]
              for k, pair in enumerate(clients())]
    data = Federation.from_splits(*splits, classes=3, names=[f"c{i}" for i in HONEST])
    one, other = (tiny.simulation(f"feddyn:by_size=true{plus}", data=data, batch=10)
                  for plus in ("", "+normclip:bound=1e6"))
    for sim in (one, other):
        for _ in range(3):
            sim.round()
    for name, t in one.server.state.tensors().items():
        assert torch.allclose(t.double(), other.server.state.tensors()[name].double(), atol=1e-10), name


@pytest.mark.parametrize("many", [2, 3, 6])
@pytest.mark.parametrize("spec", ["fedamp", "fedamp:heur", "fedfomo"])
def test_a_client_that_runs_away_by_itself_takes_nobody_along(tiny, spec, many):
    """Its inputs are 1,000 times as large: its model is 1e5, 1e10, ... long before it is NaN, and cosines do not see
    lengths. The others' weights, near 1 each of four, stay far below 100. (pFedHN says that a long update takes it.)"""
    scale = [1.0] * (many - 1) + [1e3]
    splits = [[(x * scale[i], (x @ torch.ones(4, 1, dtype=x.dtype)) * scale[i] ** 2)
               for i, (x, _) in enumerate(split[:many])] for split in clients()]
    data = Federation.from_splits(*splits, classes=0, names=[f"c{i}" for i in range(many)])
    sim = tiny.simulation(spec, lambda: torch.nn.Linear(4, 1), data=data, batch=10)
    for _ in range(8):
        sim.round()
    rows = torch.stack([sim.row(i) for i in range(many - 1)])
    assert not bool(torch.isfinite(sim.row(many - 1)).all()) or sim.row(many - 1).norm() > 1e6, "it does run away"
    assert bool(torch.isfinite(rows).all())
    assert float(rows.norm(dim=1).max()) < 100


def test_an_embedding_that_diverged_before_its_client_arrived_is_not_taken_in(tiny):
    """The products of psi's round pass through every embedding, and 0 * NaN is NaN; the mean embedding as well."""
    sim = tiny.simulation("pfedhn", data=federation(HONEST), batch=10)
    here = sim.server.state
    known = sim.method.admit(here, torch.tensor([6]), Upload(e=torch.full_like(here.e[:1], math.nan)))
    assert torch.equal(known.e[:6], here.e)
    assert torch.equal(known.e[6], torch.zeros_like(here.e[0]))
