"""Every aggregator under every method that averages: whatever lies in the two folders works together."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch

from coterie import registry
from coterie.errors import CoterieError

AGGREGATORS = sorted(registry.aggregators())
METHODS = sorted(name for name, cls in registry.methods().items() if cls.averages)
SIZES = (4, 3, 2, 3, 5)


@pytest.fixture(scope="module")
def data(tiny):
    return tiny.federation(sizes=SIZES, val=(1,), test=(2,))


@pytest.mark.parametrize("aggregator", AGGREGATORS)
def test_the_page_is_complete(aggregator):
    """What a reader chooses by; and every spelling builds the same value again."""
    cls = registry.aggregators()[aggregator]
    assert cls.protects
    assert cls.cite
    assert "Base of every aggregator" not in (inspect.getdoc(cls) or "Base of every aggregator")
    method = registry.method("fedavg")
    for value in (cls(), *(getattr(cls, preset)() for preset in cls.presets)):
        plugged = replace(method, aggregator=value)
        assert registry.method(registry.spelling(plugged)) == plugged
    for preset in cls.presets:
        assert registry.method(f"fedavg+{aggregator}:{preset}").aggregator == getattr(cls, preset)()


@pytest.mark.long
@pytest.mark.parametrize("aggregator", AGGREGATORS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_with_every_aggregator(tiny, data, method, aggregator):
    """Two rounds are finite, and the second one from a snapshot has the same bits.

    With privacy, methods that send more than updates are refused; which ones is a test of its own. So are methods of
    soft shares with aggregators that do not keep to them, and FedMTL and those that average products with those that
    are neither the mean nor robust.
    """
    chosen = replace(registry.methods()[method](), aggregator=registry.aggregators()[aggregator]())
    try:
        sim = tiny.simulation(chosen, data=data, batch=0)
    except CoterieError:
        plug, soft = chosen.aggregator, chosen.soft and not chosen.aggregator.weighs
        if not (plug.private or soft or ((chosen.running_mean or chosen.products) and not plug.robust)):
            raise
        return
    sim.round()
    tensors, meta = sim.snapshot()
    sim.round()
    after = tiny.state(sim)
    assert all(torch.isfinite(t).all() for t in after.values())
    sim.restore(tensors, meta)
    sim.round()
    tiny.same(tiny.state(sim), after)


@pytest.mark.parametrize("aggregator", [a for a in AGGREGATORS if a != "mean"])
def test_it_is_not_the_mean_in_disguise(tiny, data, aggregator):
    """With its defaults, on clients that differ, an aggregator does something."""
    plain, other = (tiny.after(1, f"fedavg{plug}", data=data)["server.row"] for plug in ("", f"+{aggregator}"))
    assert (plain - other).abs().max() > 1e-6


@pytest.mark.parametrize("aggregator", [a for a in AGGREGATORS if not registry.aggregators()[a].private])
def test_waves_and_buffers_do_not_change_it(tiny, data, aggregator):
    """Grouping clients changes rounding only; running statistics are FedAvg's in the first round, if clients count as
    there."""
    whole = tiny.after(2, f"fedavg+{aggregator}", "bn", data=data)
    tiny.close(tiny.after(2, f"fedavg+{aggregator}", "bn", data=data, wave=2), whole, 1e-6)
    one, mean = (tiny.simulation(spec, "bn", data=data, counts=True) for spec in (f"fedavg+{aggregator}", "fedavg"))
    one.round()
    mean.round()
    buffers = [sim.layout.cut(sim.server.state.row, "buffers") for sim in (one, mean)]
    torch.testing.assert_close(*buffers, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("aggregator", [a for a in AGGREGATORS if registry.aggregators()[a]().minimum > 1])
def test_too_few_clients_are_refused_before_round_1(tiny, aggregator):
    least = registry.aggregators()[aggregator]().minimum
    with pytest.raises(CoterieError, match=f"{aggregator} needs at least {least} clients; there are {least - 1}"):
        tiny.simulation(f"fedavg+{aggregator}", data=tiny.federation(sizes=(3,) * (least - 1)))
    tiny.simulation(f"fedavg+{aggregator}", data=tiny.federation(sizes=(3,) * least)).round()


@pytest.mark.parametrize("aggregator", [a for a in AGGREGATORS if registry.aggregators()[a]().minimum > 1])
def test_a_round_with_too_few_answers_is_skipped(tiny, data, aggregator):
    """Drop-outs below the minimum: server and clients keep their bits, the round counts and says who answered."""
    least = registry.aggregators()[aggregator]().minimum
    sim = tiny.simulation(f"fedavg+{aggregator}", data=data, dropouts=0.5, seed=3)
    answers = [int((sim._chance(sim.selected(t), t, "dropout") >= 0.5).sum()) for t in range(8)]
    short = next(t for t, count in enumerate(answers) if 0 < count < least)
    sim.rounds_done = short
    before = tiny.state(sim)
    outcome = sim.round()
    assert (outcome.participants, outcome.participants + outcome.dropped) == (answers[short], len(SIZES))
    tiny.same(tiny.state(sim), before)
    assert sim.rounds_done == short + 1


def test_one_broken_client_spoils_the_mean_only(tiny):
    """A client whose training overflows uploads NaN; robust aggregators still return a finite model."""
    data = tiny.federation(sizes=(3,) * 5, val=(1,), test=(2,))
    splits = [[data.client(i, split) for i in range(5)] for split in ("train", "test", "val")]
    splits[0][4] = (splits[0][4][0] * 1e200, splits[0][4][1])
    broken = type(data).from_splits(*splits, classes=data.classes)
    finite = {}
    for aggregator in ("mean", "median", "trimmedmean", "krum", "multikrum", "geometricmedian", "normclip"):
        row = tiny.after(1, f"fedavg+{aggregator}", "linear", data=broken, epochs=3)["server.row"]
        finite[aggregator] = bool(torch.isfinite(row).all())
    assert finite == {name: name != "mean" for name in finite}
