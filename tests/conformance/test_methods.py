"""The suite that every registered method must pass; a new file in coterie/methods is in it without another word."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch

from coterie import registry
from coterie.contract.local import LocalOptions
from coterie.contract.records import Record, Upload, spread
from coterie.data import Federation
from coterie.errors import CoterieError
from coterie.options import options as options_of

METHODS = sorted(registry.methods())
BASELINES = ("local", "fedavg", "fedavgft")
LABELS_AND_OPTIONS_OF_A_PAGE = ("family", "shared", "keeps", "down", "up", "newcomer")


# -- what the contract says -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_the_page_is_complete(method):
    """`coterie methods` prints these; a method without them cannot be chosen by a reader."""
    cls = registry.methods()[method]
    for name in LABELS_AND_OPTIONS_OF_A_PAGE:
        assert getattr(cls, name), name
    assert inspect.getdoc(cls)
    assert "Base of every method" not in (cls.__doc__ or "")
    assert registry.method(registry.spelling(cls())) == cls()
    for preset in cls.presets:
        assert registry.method(f"{method}:{preset}") == getattr(cls, preset)()


@pytest.mark.parametrize("method", METHODS)
def test_no_option_has_the_name_of_a_training_option(method):
    """`fedper:lr=0.1` is the run's lr for FedPer alone, so no method may call something else so."""
    cls = registry.methods()[method]
    assert not options_of(cls).keys() & options_of(LocalOptions).keys()


@pytest.mark.parametrize("method", METHODS)
def test_what_options_were_called_is_still_read(method):
    """A former name leads to an option that is there, and is none that is there."""
    cls = registry.methods()[method]
    for old, new in cls.FORMER:
        assert old not in options_of(cls)
        assert new.partition("=")[0] in {*options_of(cls), *options_of(LocalOptions)}


@pytest.mark.parametrize("method", METHODS)
def test_shapes_and_purity_of_the_client_side(tiny, method):
    """Every tensor has the clients first; the same input gives the same output and is left as it was."""
    sim = tiny.simulation(method)
    cohort = tiny.cohort(sim)
    payload = spread(sim.method.send(sim.server.state, cohort.ids), cohort.size)
    mine = sim._own(np.arange(sim.population))
    copies = [{name: t.clone() for name, t in record.tensors().items()} for record in (payload, mine)]
    first, state = sim.method.local(cohort, payload, mine)
    second, again = sim.method.local(cohort, payload, mine)
    assert isinstance(first, Upload)
    assert isinstance(state, Record)
    assert type(state) is type(mine)
    tiny.same(first.tensors(), second.tensors())
    tiny.same(state.tensors(), again.tensors())
    for t in (*first.tensors().values(), *state.tensors().values()):
        assert len(t) == cohort.size
    row = sim.method.deploy(cohort, payload, mine)
    assert row.shape == (cohort.size, sim.layout.size)
    assert torch.equal(row, sim.method.deploy(cohort, payload, mine))
    tiny.same(payload.tensors(), copies[0])
    tiny.same(mine.tensors(), copies[1])


@pytest.mark.parametrize("method", METHODS)
def test_other_clients_data_never_touch_mine_before_merge(tiny, method):
    """Client 1's upload and own state of a round are the same bits whatever data client 0 holds."""
    found = []
    for seed in (0, 1):
        data, other = tiny.federation(), tiny.federation(seed=9)
        splits = [[(other if seed and i == 0 else data).client(i, split) for i in range(4)]
                  for split in ("train", "test", "val")]
        sim = tiny.simulation(method, data=Federation.from_splits(*splits, classes=data.classes))
        ids = np.array([1])
        upload, state = sim.method.local(tiny.cohort(sim, ids), sim.payload(ids), sim._own(ids))
        found.append({**upload.tensors(), **{f"own.{name}": t for name, t in state.tensors().items()}})
    tiny.same(*found)


@pytest.mark.parametrize("method", METHODS)
def test_a_client_never_seen_gets_a_model(tiny, method):
    data = tiny.federation(sizes=(7, 12, 1, 5, 6), unseen=1)
    sim = tiny.simulation(method, data=data)
    for _ in range(2):
        sim.round()
    row = sim.row(4)
    assert row.shape == (sim.layout.size,)
    assert torch.isfinite(row).all()
    assert np.isfinite(sim.evaluate().stages["unseen_adapted"].test["loss"]).all()


READS_ONE_SLICE = ("pfedhn",)  # a newcomer's introduction takes the server's network from one slice for all


@pytest.mark.parametrize("method", METHODS)
def test_two_seeds_in_one_stack_are_the_two_runs(tiny, method):
    """Clients compute for themselves and draw from streams of their own run, so sharing a stack changes nothing."""
    data = tiny.federation(sizes=(7, 12, 1, 5, 6), unseen=1)
    apart, joined, stack = tiny.side_by_side([method], data=data, participation=0.75)
    tiny.agree(apart, joined)
    apart_from_others = 1 if method in READS_ONE_SLICE else 0
    assert len(stack.apart) == apart_from_others
    if registry.methods()[method].moves:
        assert stack.joined == 0  # an engine has one backbone at a time, and each run moves its own
        return
    # each run: two rounds, the scores of the seen, the newcomers' introductions and their scores
    assert stack.joined == 2 * (5 - apart_from_others)


@pytest.mark.parametrize("method", METHODS)
def test_one_client_alone(tiny, method):
    """A federation of one either runs or is refused before round 1 with a sentence."""
    try:
        sim = tiny.simulation(method, data=tiny.federation(sizes=(7,)))
    except CoterieError:
        with pytest.raises(CoterieError, match="clients"):
            tiny.simulation(method, data=tiny.federation(sizes=(7,)))
        return
    sim.round()
    assert torch.isfinite(sim.row(0)).all()


@pytest.mark.parametrize("method", METHODS)
def test_partial_participation_and_a_client_that_never_takes_part(tiny, method):
    """With a quarter of the clients a round, whoever was not drawn in three rounds still has a model."""
    sim = tiny.simulation(method, data=tiny.federation(sizes=(6, 3, 1, 5, 4, 9, 2, 8)), participation=0.25)
    drawn = {int(i) for t in range(3) for i in sim.selected(t)}
    assert len(drawn) < 8
    for _ in range(3):
        sim.round()
    assert all(torch.isfinite(sim.row(i)).all() for i in range(8))


NEEDS = {"fedbn": "bn"}  # models without which a method has nothing to do


def opposed():
    """Eight clients, of whom every other calls class c + 1 what the rest calls c."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    inputs = [torch.randn(60, 4, generator=generator, dtype=torch.float64) for _ in range(8)]
    pairs = [(x, ((x @ w).argmax(1) + i % 2) % 3) for i, x in enumerate(inputs)]
    return Federation.from_splits(pairs, [(x[:5], y[:5]) for x, y in pairs], classes=3)


@pytest.mark.parametrize("method", [m for m in METHODS if m not in BASELINES])
def test_no_default_switches_the_method_off(tiny, method):
    """With its defaults a method's clients predict otherwise than FedAvg's and Local's, which their losses show.

    CFL is FedAvg until it has found two kinds of clients, so it gets such and the rounds that it waits.
    """
    losses = {}
    data, rounds = (opposed(), 15) if method == "cfl" else (None, 3)
    for name in (method, "fedavg", "local"):
        sim = tiny.simulation(name, NEEDS.get(method, "mlp"), data=data, epochs=3)
        for _ in range(rounds):
            sim.round()
        losses[name] = sim.evaluate().stages["served"].test["loss"]
    for baseline in ("fedavg", "local"):
        assert np.abs(losses[method] - losses[baseline]).max() > 1e-6, f"{method} is {baseline} in disguise"


# -- however clients are grouped, drop out or come late ---------------------------------------------------------------


def permuted(tiny, order, **options):
    """The same clients under the same names in another order."""
    data = tiny.federation(**options)
    splits = {split: [data.client(i, split) for i in order] for split in ("train", "test", "val")}
    names = [data.names[i] for i in order]
    return Federation.from_splits(splits["train"], splits["test"], splits["val"], classes=data.classes, names=names)


SHARED = ("row", "body", "prototypes", "control", "tilt", "psi")  # server state that belongs to no client in particular

WAYS = {
    "dropout": [{"engine": "loop"}, {"wave": 1}, {"wave": 2}, {"wave": 3}],
    "bn": [{"engine": "loop"}, {"wave": 1}, {"wave": 3}],
}


@pytest.mark.long
@pytest.mark.parametrize("model", ["dropout", "bn"])
@pytest.mark.parametrize("method", METHODS)
def test_results_do_not_depend_on_the_grouping(tiny, method, model):
    """Five rounds stacked equal the loop engine and waves of 1, 2 and 3; relabelled clients deploy the same rows
    and leave the server's models as they are."""
    reference = tiny.after(5, method, model)
    for options in WAYS[model]:
        tiny.close(tiny.after(5, method, model, **options), reference, 1e-12)
    order = [2, 0, 3, 1]
    sims = [tiny.simulation(method, model), tiny.simulation(method, model, data=permuted(tiny, order))]
    for sim in sims:
        for _ in range(5):
            sim.round()
    first, moved = (torch.stack([sim.row(i) for i in range(4)]) for sim in sims)
    torch.testing.assert_close(moved, first[order], rtol=1e-12, atol=1e-12)
    servers = [{name: t for name, t in sim.server.state.tensors().items() if name in SHARED} for sim in sims]
    tiny.close(*servers, 1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_results_do_not_depend_on_the_grouping_in_float32(tiny, method):
    """cwFedAvg's regulariser is an unsquared norm: its slope turns with the last bits of shares that nearly agree."""
    data = tiny.federation(dtype=torch.float32)
    tolerance = 1e-4 if method == "cwfedavg" else 1e-5
    reference = tiny.after(5, method, "dropout", data=data, precision="float32")
    for options in ({"engine": "loop"}, {"wave": 2}):
        tiny.close(tiny.after(5, method, "dropout", data=data, precision="float32", **options), reference, tolerance)


@pytest.mark.parametrize("model", ["dropout", "bn"])
@pytest.mark.parametrize("method", METHODS)
def test_the_reference_engine_gives_the_rows_of_the_stacked_one(tiny, method, model):
    """Two rounds and an evaluation, client after client with torch.optim.SGD: the same equations on the same batches
    and the same noise, so float64 leaves only rounding."""
    data = tiny.federation(sizes=(7, 12, 1, 5, 6), unseen=1)
    ends = []
    for engine in ("reference", "stack"):
        sim = tiny.simulation(method, model, data=data, engine=engine)
        for _ in range(2):
            sim.round()
        stages = sim.evaluate().stages
        losses = {name: torch.from_numpy(stages[name].test["loss"]) for name in stages}
        ends.append((tiny.state(sim), losses, {name: torch.from_numpy(stages[name].steps) for name in stages}))
    for found, expected in zip(*ends, strict=True):
        tiny.close(found, expected, 1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_dropouts_are_as_if_they_had_not_been_asked(tiny, method):
    """Own states of clients that drop out keep their bits, and the server merges the answers of the others only."""
    sim = tiny.simulation(method, data=tiny.federation(sizes=(6, 3, 1, 5, 4, 9)), dropouts=0.5, seed=3)
    before = tiny.state(sim)
    caught = tiny.seen_clients(sim)
    outcome = sim.round()
    answered = caught[0]
    assert 0 < outcome.dropped < 6
    assert outcome.participants == len(answered) == 6 - outcome.dropped
    gone = [i for i in range(6) if i not in answered]
    after = tiny.state(sim)
    for name in [n for n in after if n.startswith("own.")]:
        assert torch.equal(after[name][gone], before[name][gone])


@pytest.mark.parametrize("method", METHODS)
def test_a_round_without_answers_changes_nothing(tiny, method):
    """With dropouts close to 1 nobody answers; server and clients keep their bits and the round counts."""
    sim = tiny.simulation(method, dropouts=1 - 1e-9)
    before = tiny.state(sim)
    outcome = sim.round()
    assert (outcome.participants, outcome.dropped, sim.rounds_done) == (0, 4, 1)
    tiny.same(tiny.state(sim), before)


@pytest.mark.parametrize("model", ["mlp", pytest.param("bn", marks=pytest.mark.long)])
@pytest.mark.parametrize("method", METHODS)
def test_evaluation_changes_nothing(tiny, method, model):
    """Bit for bit: state, the next round and a second evaluation are the same with and without an evaluation."""
    data = tiny.federation(sizes=(7, 12, 1, 5, 6), unseen=1)
    sim, other = (tiny.simulation(method, model, data=data) for _ in range(2))
    for _ in range(2):
        sim.round()
        other.round()
    before = tiny.state(sim)
    first, second = sim.evaluate(), sim.evaluate()
    tiny.same(tiny.state(sim), before)
    for stage in ("served", "adapted", "unseen_served", "unseen_adapted"):
        np.testing.assert_array_equal(first.stages[stage].test["loss"], second.stages[stage].test["loss"])
    sim.round()
    other.round()
    tiny.same(tiny.state(sim), tiny.state(other))


@pytest.mark.parametrize("method", METHODS)
def test_unseen_clients_never_influence_training(tiny, method):
    """Three rounds with evaluations, next to two unseen clients, give the rows of a federation without them."""
    data = tiny.federation(sizes=(7, 12, 1, 5, 6, 2), unseen=2)
    ids = data.seen
    without = Federation.from_splits(
        *([data.client(i, split) for i in ids] for split in ("train", "test", "val")), classes=data.classes,
        names=[data.names[i] for i in ids],
    )
    sim = tiny.simulation(method, data=data)
    for _ in range(3):
        sim.evaluate()
        sim.round()
    tiny.close(tiny.state(sim), tiny.after(3, method, data=without), 1e-13)


@pytest.mark.parametrize("model", ["dropout", pytest.param("bn", marks=pytest.mark.long)])
@pytest.mark.parametrize("method", METHODS)
def test_going_on_from_a_snapshot_is_bit_identical(tiny, method, model):
    """Two rounds, a snapshot, two more: a fresh simulation that restores the snapshot ends with the same bits.

    The first simulation goes on after the snapshot, and the snapshot is used twice: it must be a copy, and stay one.
    """
    options = {"buffers": "local"} if model == "bn" else {}
    try:
        sim = tiny.simulation(method, model, participation=0.75, **options)
    except CoterieError:  # a method that does not exchange whole models
        sim, options = tiny.simulation(method, model, participation=0.75), {}
    sim.round()
    sim.round()
    tensors, meta = sim.snapshot()
    for _ in range(2):
        sim.round()
    expected = tiny.state(sim)
    for _ in range(2):
        other = tiny.simulation(method, model, participation=0.75, choices=meta["choices"], **options)
        other.restore(tensors, meta)
        for _ in range(2):
            other.round()
        tiny.same(tiny.state(other), expected)
        assert other.rounds_done == sim.rounds_done == 4
