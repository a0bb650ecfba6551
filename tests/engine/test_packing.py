"""Plans: which samples a slot sees at each step, whatever stands next to it in the stack."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie import streams
from coterie.engine import packing
from coterie.engine.capture import Steps
from coterie.engine.packing import Recent, pack, steps_of
from coterie.engine.programs import Program

CPU = torch.device("cpu")
sizes_ = st.lists(st.integers(1, 25), min_size=1, max_size=6)
batches_ = st.integers(0, 8)


def plan_of(sizes, batch, steps=None, epochs=1, names=None, first_epoch=0, keys=True):
    sizes = np.array(sizes, dtype=np.int64)
    starts = np.cumsum(sizes) - sizes + 3  # the flat data begin with three samples that belong to nobody
    names = list(range(len(sizes))) if names is None else names
    count = steps_of(sizes, batch, epochs, None) if steps is None else np.array(steps, dtype=np.int64)
    found = streams.key(torch.tensor(names), "shuffle") if keys else None
    plan = pack(starts, sizes, batch, count, found, CPU, first_epoch)
    with pytest.MonkeyPatch.context() as patch:  # however it is laid out, everybody sees the same
        patch.setattr(packing, "DENSE", -1)
        patch.setattr(packing, "_FRAMES", Recent(0))
        cut = pack(starts, sizes, batch, count, found, CPU, first_epoch)
    assert sum(map(len, cut.stretches)) == plan.length
    assert all((cut.batches(p) == plan.batches(p)).all() for p in range(len(sizes)))
    return plan if np.random.default_rng(len(sizes)).integers(2) else cut, starts


def table(plan):
    """`[steps, slots, B]`: everybody's batches, -1 where a slot has ended."""
    full = torch.full((plan.length, len(plan.order), plan.batch), -1)
    for stretch in plan.stretches:
        full[stretch.first : stretch.first + len(stretch), : stretch.index.shape[1]] = stretch.index
    return full


def seen(plan, slot):
    """The batches of one slot as lists of real samples (padding left out), one for each of its own steps."""
    position = int(np.flatnonzero(plan.order == slot)[0])
    return [[i for i in step.tolist() if i >= 0] for step in plan.batches(position)]


@given(sizes_, batches_, st.integers(1, 3))
def test_every_sample_exactly_once_an_epoch(sizes, batch, epochs):
    plan, starts = plan_of(sizes, batch, epochs=epochs)
    for slot, (start, n) in enumerate(zip(starts, sizes)):
        found = seen(plan, slot)
        per_pass = math.ceil(n / batch) if batch else 1
        assert len(found) == epochs * per_pass
        for epoch in range(epochs):
            pieces = found[epoch * per_pass : (epoch + 1) * per_pass]
            assert sorted(i for piece in pieces for i in piece) == list(range(start, start + n))
            if batch:
                left = n - (per_pass - 1) * batch
                assert [len(piece) for piece in pieces] == [batch] * (per_pass - 1) + [left]


@given(sizes_, batches_, st.integers(1, 3))
def test_active_slots_are_a_prefix(sizes, batch, epochs):
    """At step s the slots that still train are the first ones, and everything behind them is padding."""
    plan, _ = plan_of(sizes, batch, epochs=epochs)
    assert (np.diff(plan.steps) <= 0).all()
    assert sorted(plan.order.tolist()) == list(range(len(sizes)))
    for step, active in enumerate(plan.active()):
        holds = (table(plan)[step] >= 0).any(1).tolist()
        assert holds == [True] * active + [False] * (len(sizes) - active)
    assert sum(plan.active()) == plan.steps.sum()


@given(sizes_, batches_)
def test_padding_points_to_a_sample_of_the_same_slot(sizes, batch):
    """Padding is ~first sample: negative, and inside the slot's own range once decoded."""
    plan, starts = plan_of(sizes, batch)
    width = batch or max(sizes)
    assert plan.batch == width
    for position, slot in enumerate(plan.order):
        here = plan.batches(position)
        assert (~here[here < 0] == starts[slot]).all()


@given(sizes_, st.integers(1, 8), st.lists(st.integers(0, 12), min_size=6, max_size=6))
def test_a_number_of_steps_cuts_and_repeats(sizes, batch, steps):
    """`steps` batches exactly: the first ones of as many passes as it takes."""
    steps = steps[: len(sizes)]
    plan, _ = plan_of(sizes, batch, steps)
    long, _ = plan_of(sizes, batch, epochs=13)
    for slot, count in enumerate(steps):
        found = seen(plan, slot)
        assert len(found) == count
        assert found == seen(long, slot)[:count]


def test_steps_of():
    """E ceil(n / B), one step a pass with full batches, or what was asked."""
    sizes = np.array([1, 10, 11, 25])
    assert steps_of(sizes, 10, 2, None).tolist() == [2, 2, 4, 6]
    assert steps_of(sizes, 0, 3, None).tolist() == [3, 3, 3, 3]
    assert steps_of(sizes, 10, 2, 7).tolist() == [7, 7, 7, 7]


@given(sizes_)
def test_full_batches_keep_the_order(sizes):
    plan, starts = plan_of(sizes, 0, epochs=2)
    for slot, (start, n) in enumerate(zip(starts, sizes)):
        assert seen(plan, slot) == [list(range(start, start + n))] * 2


@given(sizes_)
def test_without_keys_samples_keep_their_order(sizes):
    plan, starts = plan_of(sizes, 4, keys=False)
    for slot, (start, n) in enumerate(zip(starts, sizes)):
        assert [i for piece in seen(plan, slot) for i in piece] == list(range(start, start + n))


@given(sizes_, st.integers(1, 8), st.randoms(use_true_random=False))
def test_a_slots_shuffle_depends_on_nobody_else(sizes, batch, random):
    """Alone, in company and in any order, a slot of the same key sees the same batches (relative to its start)."""
    names = [10 + i for i in range(len(sizes))]
    plan, starts = plan_of(sizes, batch, epochs=2, names=names)
    order = random.sample(range(len(sizes)), len(sizes))
    moved, moved_starts = plan_of([sizes[i] for i in order], batch, epochs=2, names=[names[i] for i in order])
    for slot, n in enumerate(sizes):
        alone, alone_starts = plan_of([n], batch, epochs=2, names=[names[slot]])
        relative = [[i - starts[slot] for i in piece] for piece in seen(plan, slot)]
        assert relative == [[i - alone_starts[0] for i in piece] for piece in seen(alone, 0)]
        there = order.index(slot)
        assert relative == [[i - moved_starts[there] for i in piece] for piece in seen(moved, there)]


def test_passes_are_shuffled_differently_and_evenly():
    """600 passes over 6 samples: each sample comes first 100 times +- 5 standard deviations of 9.1."""
    plan, _ = plan_of([6], 6, epochs=600)
    first = torch.bincount(plan.batches(0)[:, 0] - 3, minlength=6)
    assert (first - 100).abs().max() < 46
    assert len({tuple(step.tolist()) for step in plan.batches(0)}) > 300  # of 720 orders


def test_a_later_first_epoch_goes_on_where_the_plan_would():
    """Pass 2 of a longer plan is a plan of one pass with first_epoch=2, and it knows how many steps came before."""
    whole, _ = plan_of([7, 3], 3, epochs=3)
    last, _ = plan_of([7, 3], 3, first_epoch=2)
    assert seen(last, 0) == seen(whole, 0)[6:]
    assert seen(last, 1) == seen(whole, 1)[2:]
    assert last.before.tolist() == [6, 2]
    assert whole.before.tolist() == [0, 0]


@given(sizes_, batches_, st.lists(st.integers(0, 9), min_size=6, max_size=6))
def test_short_lists_the_batches_that_are_not_full(sizes, batch, steps):
    """`short(step)` names exactly the active slots with fewer than B real samples, and how many they have."""
    plan, _ = plan_of(sizes, batch, steps[: len(sizes)])
    for step in range(plan.length):
        real = (table(plan)[step] >= 0).sum(1).tolist()
        expected = [(p, n) for p, n in enumerate(real) if plan.steps[p] > step and n < plan.batch]
        assert plan.short(step) == expected


def test_tables_follow_the_samples_and_not_the_largest_client():
    """One slot of 100,000 samples beside 255 of 10: a table of all steps and slots would hold 25.6 million numbers.
    In stretches less than half is padding of slots that ended, and a last batch of each slot."""
    plan, _ = plan_of([100_000] + [10] * 255, 10)
    assert [len(s.index[0]) for s in plan.stretches] == [256, 1]
    assert plan.numbers <= 2 * (100_000 + 255 * 10) + 10 * 256


def test_what_was_used_last_is_kept_and_nothing_that_is_too_large():
    class Thing:
        def __init__(self, numbers):
            self.numbers = numbers

    kept = Recent(10)
    first, second = kept.get("first", lambda: Thing(4)), kept.get("second", lambda: Thing(6))
    assert kept.get("first", lambda: Thing(4)) is first  # now the second is the older one
    third = kept.get("third", lambda: Thing(5))
    assert (len(kept), kept.numbers) == (2, 9)
    assert kept.get("third", lambda: Thing(5)) is third
    assert kept.get("second", lambda: Thing(6)) is not second
    kept.get("large", lambda: Thing(11))
    assert len(kept) == kept.numbers == 0


# -- training on stretches --------------------------------------------------------------------------------------------


@dataclass
class Replayed:
    """Stands for a step captured for a bucket: replaying it computes the whole bucket, ended slots included."""

    step: Callable[[int], None]
    size: int

    def replay(self):
        self.step(self.size)


def captured(monkeypatch, table):
    """Programs load and replay as on a GPU, a table of sample numbers holding at most `table` of them."""
    def prepare(steps, prefixes, pool):
        steps.graphs |= {size: Replayed(steps.step, size) for size in {steps.bucket(p) for p in prefixes if p}}

    def moving(program, weight, short):
        full = program.engine.net.batch_statistics and short is None
        return weight.sum(1) == weight.shape[1] if full else weight.sum(1) > 0

    monkeypatch.setattr(Steps, "prepare", prepare)
    monkeypatch.setattr(Program, "_moving", moving)
    monkeypatch.setattr(Program, "TABLE", table)


CASES = [
    ("fedavg", "mlp", {}), ("fedavg", "mlp", {"optimizer": "adam"}),
    ("fedavg", "mlp", {"optimizer": "sgd(momentum=0.9)"}), ("fedavg", "bn", {}), ("fedavg", "dropout", {}),
    ("ditto", "dropout", {"optimizer": "adam"}), ("perfedavg:order=hessian_free", "mlp", {}), ("fedrep", "bn", {}),
    ("apfl", "dropout", {}),
]


@pytest.mark.parametrize("engine", ["stack", "reference", "captured"])
@pytest.mark.parametrize(("method", "model", "options"), CASES)
def test_rows_do_not_depend_on_how_batches_are_cut(tiny, monkeypatch, method, model, options, engine):
    """One table of all steps, one for each number of slots at work, and stretches of few steps train the same models
    on the same samples with the same noise; losses too."""
    data = tiny.federation(sizes=(25, 3, 1, 8, 14), val=(2, 3, 0, 1, 1), test=(3, 4, 2, 5, 1))

    def trained(dense, table):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(packing, "DENSE", dense)
            patch.setattr(packing, "_FRAMES", Recent(0))
            if engine == "captured":
                captured(patch, table)
            kind = "stack" if engine == "captured" else engine
            sim = tiny.simulation(method, model, data=data, engine=kind, epochs=2, **options)
            if engine == "captured":
                sim.engine.pool = object()
            for _ in range(2):
                sim.round()
            watched = tiny.cohort(sim).train_watched(tiny.rows(sim))
            return [*sim.server.state.tensors().values(), *watched]

    whole = trained(1 << 30, 1 << 30)
    for dense, table in ((-1, 1 << 30), (1 << 30, 30), (-1, 30)):
        for found, expected in zip(trained(dense, table), whole, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
