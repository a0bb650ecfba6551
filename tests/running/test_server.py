"""The server object: admission beside the run, payloads, its part of a checkpoint, and classes by their names."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from coterie import registry
from coterie.contract.method import Uploads
from coterie.contract.records import Model, Models, Nothing, Record, Upload, spread
from coterie.errors import CoterieError
from coterie.methods.fedavg import FedAvg
from coterie.running import checkpoint
from coterie.running.server import Server, record_class


def started(tiny, method="fedavg", **training):
    """The server of a run of 4 clients that nobody has been admitted to yet, and the run."""
    sim = tiny.simulation(method, **training)
    return Server(sim.method, sim.init, sim.training), sim


def same(one, other):
    assert type(one) is type(other)
    assert one.tensors().keys() == other.tensors().keys()
    assert all(torch.equal(t, other.tensors()[name]) for name, t in one.tensors().items())


# -- start and rounds --------------------------------------------------------------------------------------------------


def test_it_starts_as_the_method_does(tiny):
    server, sim = started(tiny, "fedfew:models=2")
    same(server.state, sim.method.start(sim.init))
    assert (server.layout, server.device, server.guard) == (sim.layout, sim.device, None)


@pytest.mark.parametrize(("method", "said"), [
    ("fedfew:models=5", "with 5 models needs as many clients; there are 4"),
    ("fedavg+krum:faulty=1", "needs at least 5 clients; there are 4"),
])
def test_it_refuses_what_cannot_run_before_anything_is_started(tiny, method, said):
    sim, chosen = tiny.simulation(), registry.method(method)
    with pytest.raises(CoterieError, match=said):
        Server(chosen, sim.init, sim.training)
    with pytest.raises(CoterieError, match=said):
        Server.refuse_early(chosen, 4, sim.layout, sim.training)


@pytest.mark.parametrize("plug", ["mean", "mgda", "confree", "fedmgdaplus"])
@pytest.mark.parametrize("counts", [False, True])
def test_clients_count_by_their_samples(tiny, plug, counts):
    """7, 12, 1 and 5 of 25, to the last bit."""
    server, _ = started(tiny, f"fedavg+{plug}", counts=counts)
    n, share = server.weighed(torch.tensor([7, 12, 1, 5]))
    assert n.tolist() == [7, 12, 1, 5]
    assert share.tolist() == [7 / 25, 12 / 25, 1 / 25, 5 / 25]


@pytest.mark.parametrize("plug", ["median", "trimmedmean:trim=0.3", "geometricmedian", "normclip", "krum:faulty=0"])
def test_with_a_robust_aggregator_what_clients_say_of_their_samples_does_not_count(tiny, plug):
    """The lower median of 7, 10^12, 1 and 5 is 5, which stands for everybody's; with counts=true none has more than
    three times that, so a client that says 10^12 has 15 of 28 and not all."""
    server, _ = started(tiny, f"fedavg+{plug}")
    said = torch.tensor([7, 10**12, 1, 5])
    n, share = server.weighed(said)
    assert n.tolist() == [5, 5, 5, 5]
    assert share.tolist() == [0.25] * 4
    server, _ = started(tiny, f"fedavg+{plug}", counts=True)
    n, share = server.weighed(said)
    assert n.tolist() == [7, 15, 1, 5]
    assert share.tolist() == [7 / 28, 15 / 28, 1 / 28, 5 / 28]
    assert server.weighed(said[:0])[1].tolist() == []


def test_the_shares_of_a_run_are_those(tiny):
    """Both engines ask the server: a run with the median counts alike, and clusters and mixtures do, too."""
    seen = {}
    for spec, counts in (("ifca:models=2+median", False), ("ifca:models=2+median", True), ("ifca:models=2", False)):
        sim = tiny.simulation(spec, counts=counts)
        sim.server.merge = lambda up, key=(spec, counts): seen.setdefault(key, up) and {}
        sim.round()
        up = seen[spec, counts]
        together = up.share_in(torch.zeros(4, dtype=torch.int64), 2)[:, 0]
        torch.testing.assert_close(together, up.share, rtol=0, atol=1e-15)
    shares = [[round(25 * value, 9) for value in up.share.tolist()] for up in seen.values()]
    assert shares == [[6.25] * 4, [7.0, 12.0, 1.0, 5.0], [7.0, 12.0, 1.0, 5.0]]


def test_a_merge_is_the_methods(tiny):
    """Everybody moved by 1, so FedAvg's server moves by 1, whatever the shares."""
    server, sim = started(tiny)
    before, ids = server.state.row, torch.arange(4)
    up = Uploads({"update": torch.ones(4, sim.layout.size, dtype=torch.float64)}, ids, ids + 1,
                 (ids + 1).double() / 10, 4, 0, sim.layout)
    server.merge(up)
    torch.testing.assert_close(server.state.row, before + 1)


@pytest.mark.parametrize("method", ["fedavg", "ifca:models=2", "pacfl", "fedfomo"])
def test_payloads_one_by_one_are_those_together(tiny, method):
    """For a wire each client gets its own slice; a tensor that all receive is one object, to be encoded once."""
    sim = tiny.simulation(method)
    sim.round()
    ids = torch.tensor([2, 0, 3])
    together, apart = sim.server.payload(ids), sim.server.payloads(ids)
    assert together.tensors().keys() == apart[0].tensors().keys()
    for name, t in together.tensors().items():
        assert torch.equal(t, torch.cat([one.tensors()[name] for one in apart]))
        shared = t.stride(0) == 0
        assert shared == (len({id(one.tensors()[name]) for one in apart}) == 1)


def test_answers_that_are_needed(tiny):
    """An aggregator may need more than the least; with privacy on a skipped round would tell who was there."""
    assert started(tiny)[0].needed() == 1
    assert started(tiny)[0].needed(3) == 3
    assert started(tiny, "fedavg+krum:faulty=0")[0].needed() == 3  # 2 f + 3
    assert started(tiny, "fedavg+private")[0].needed(3) == 0


# -- admission ---------------------------------------------------------------------------------------------------------


def test_an_admission_leaves_the_server_as_it_is(tiny):
    """An unseen client of PACFL has row 5 in the copy's table; the run's own tables stay at 4."""
    data = tiny.federation(sizes=(3,) * 5)
    data = type(data)(data.x, data.y, data.bounds, 4, data.classes, data.names, data.recipe)
    sim = tiny.simulation("pacfl", data=data)
    before = sim.server.tensors()
    other = sim.admitted(np.array([4]))
    assert other is not sim.server
    assert (len(other.state.cluster), len(sim.server.state.cluster)) == (5, 4)
    assert all(torch.equal(t, before[name]) for name, t in sim.server.tensors().items())


def test_introductions_are_refused_where_they_are_not_protected(tiny):
    server, _ = started(tiny, "fedavg+private")
    with pytest.raises(CoterieError, match="introduce themselves by 'basis'"):
        server.admitted(torch.arange(1), Upload(basis=torch.zeros(1, 2)))


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "fedfew:models=2", "scaffold", "pacfl", "fedavg+private:quantile=0.5"])
def test_a_checkpoint_is_enough(tiny, tmp_path, method):
    """Without a client or its data the server sends what it sent, and its next checkpoint is the same."""
    sim = tiny.simulation(method)
    for _ in range(2):
        sim.round()
    checkpoint.save(tmp_path / "run.safetensors", *sim.snapshot())
    tensors, meta = checkpoint.load(tmp_path / "run.safetensors")
    server = Server.restored(sim.method, sim.init, sim.training, tensors, meta)
    same(server.state, sim.server.state)
    ids = torch.arange(4)
    same(server.payload(ids), sim.server.payload(ids))
    assert checkpoint.digest(server.tensors()) == checkpoint.digest(sim.server.tensors())
    names = ("server", "layout", *(["privacy"] if sim.server.guard is not None else []))
    assert server.meta() == sim.server.meta() == {name: meta[name] for name in names}
    if server.guard is not None:
        assert server.guard.clip == sim.server.guard.clip != server.guard.plan.clip


def test_what_does_not_fit_changes_nothing(tiny):
    """A state without FedAvg's row, or of another model; the server goes on as it was."""
    server, sim = started(tiny)
    tensors, meta = sim.snapshot()
    before = server.state
    with pytest.raises(CoterieError, match="does not fit this run: row is missing"):
        server.restore({}, {**meta, "server": "Nothing"})
    with pytest.raises(CoterieError, match=r"holds another model \(layout beef\)"):
        server.restore(tensors, {**meta, "layout": "beef"})
    with pytest.raises(CoterieError, match="a state 'Gone' was named that fedavg does not define"):
        server.restore(tensors, {**meta, "server": "Gone"})
    assert server.state is before


def test_a_restored_state_is_in_memory_of_its_own(tiny):
    server, sim = started(tiny)
    tensors, meta = sim.snapshot()
    server.restore(tensors, meta)
    tensors["server.row"].zero_()
    assert server.state.row.abs().sum() > 0


# -- classes by name ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Renamed(Record):
    """Was called Centres once, and Anchors before that."""

    former: ClassVar[tuple[str, ...]] = ("Centres", "Anchors")

    rows: Tensor


@dataclass(frozen=True)
class Anchored(FedAvg):
    """A method of this module."""


@dataclass(frozen=True)
class Moored(Anchored):
    """A method that inherits another's records."""


@pytest.mark.parametrize(("name", "expected"), [
    ("Renamed", Renamed), ("Centres", Renamed), ("Anchors", Renamed), ("Model", Model), ("Models", Models),
    ("Nothing", Nothing),
])
def test_a_class_is_found_by_its_name_and_by_former_ones(name, expected):
    """Old checkpoints name the class as it was called when they were written."""
    assert record_class(Anchored(), name) is expected
    assert record_class(Moored(), name) is expected


def test_a_name_that_is_taken_means_its_owner_now(monkeypatch):
    """Where a class takes a name that another one had, the name means the class that has it."""
    fresh = dataclass(frozen=True)(type("Centres", (Record,), {"__module__": __name__}))
    monkeypatch.setattr(sys.modules[__name__], "Centres", fresh, raising=False)
    assert record_class(Anchored(), "Centres") is fresh
    assert record_class(Anchored(), "Anchors") is Renamed


@pytest.mark.parametrize("name", ["Gone", "Upload", "Each", "spread", "__name__"])
def test_other_names_are_refused(name):
    """Not every name of a module is that of a state."""
    assert spread is not None  # a function of the same module as the common records
    with pytest.raises(CoterieError, match=f"a state '{name}' was named that anchored does not define"):
        record_class(Anchored(), name)


def test_an_old_checkpoint_is_read_under_the_new_name(tiny):
    """A run writes the class's new name; a checkpoint that has an old one is resumed from all the same."""
    sim = tiny.simulation(replace(Kept()))
    sim.round()
    tensors, meta = sim.snapshot()
    assert (meta["server"], meta["own"]) == ("Renamed", "Mine")
    again = tiny.simulation(replace(Kept()))
    again.restore(tensors, {**meta, "server": "Anchors", "own": "Own"})
    tiny.same(tiny.state(again), tiny.state(sim))
    assert again.snapshot()[1] == meta


@dataclass(frozen=True)
class Mine(Record):
    """A client's own row."""

    former: ClassVar[tuple[str, ...]] = ("Own",)

    row: Tensor


@dataclass(frozen=True)
class Kept(FedAvg):
    """FedAvg with records of this module on both sides."""

    def start(self, init):
        return Renamed(init.rows(1))

    def send(self, server, ids):
        return Model(server.rows[0])

    def join(self, cohort, payload):
        return Mine(payload.row.clone())

    def merge(self, server, up):
        return Renamed(server.rows + self.aggregate(up.update, up.share, up.layout))


@pytest.mark.parametrize(("method", "options", "said"), [
    ("ditto:personal_lr=0.1", {"schedule": "decay"}, "ditto: schedule=decay changes the run's learning rate alone; "
                                                     "personal_lr stays the same in every round."),
    ("perfedavg:alpha=0.1,beta=0.1", {"warmup": 1}, "perfedavg: warmup changes the run's learning rate alone; "
                                                    "alpha and beta stay the same in every round."),
    ("ditto:personal_lr=0.1", {}, None), ("ditto", {"schedule": "cosine"}, None),
])
def test_rates_of_a_method_that_no_schedule_reaches_are_said(tiny, method, options, said):
    """An own rate that is given is one number for all rounds; one that is not given is the run's, schedule and all."""
    sim = tiny.simulation(method, **options)
    assert Server.notes(sim.method, sim.layout, sim.training) == ([] if said is None else [said])
