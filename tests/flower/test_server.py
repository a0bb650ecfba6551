"""Flower's grid as a transport, with a grid of this process in place of the network."""

from __future__ import annotations

import time

import numpy as np
import pytest
import sites as toy
import torch

pytest.importorskip("flwr")

from flwr.app import Context, Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from coterie.flower import client
from coterie.flower.loopback import Loopback
from coterie.flower.message import Encoder, parcels_of
from coterie.flower.plan import Plan
from coterie.flower.rounds import serve
from coterie.flower.server import GridTransport
from coterie.flower.site import Site
from coterie.flower.wire import Failure, Parcel


class Grid:
    """Nodes that answer with the client app when they are pulled; `fate(node, message)` may say otherwise."""

    def __init__(self, configs, fate=None):
        self.configs, self.fate, self.held = configs, fate or (lambda node, message: None), {}

    def get_node_ids(self):
        return list(self.configs)

    def push_messages(self, messages):
        for message in messages:
            message.metadata.__dict__["_message_id"] = message.object_id
            self.held[message.object_id] = message
        return [message.object_id for message in messages]

    def pull_messages(self, ids):
        found = []
        for one in ids:
            message = self.held[one]
            node = message.metadata.dst_node_id
            fate = self.fate(node, message)
            if isinstance(fate, Error):
                found.append(Message(fate, reply_to=message))
            elif fate is None:
                found.append(client.answer(message, Context(1, node, self.configs[node], RecordDict(), {})))
        return found


@pytest.fixture(autouse=True)
def identity(monkeypatch):
    """A Flower process knows its task; messages cannot be made without."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


@pytest.fixture
def configs(tmp_path):
    """Four nodes with files; numbers of nodes have nothing to do with names."""
    found = {}
    for node, (name, n) in enumerate(zip(reversed(toy.NAMES), (17, 24, 11, 20), strict=True), start=7):
        rng = np.random.default_rng(node)
        np.savez(tmp_path / f"{name}.npz", x=rng.standard_normal((n, 4)).astype(np.float32), y=rng.integers(0, 3, n))
        found[node] = {
            "name": name, "data": str(tmp_path / f"{name}.npz"), "home": str(tmp_path / "grid" / name), "device": "cpu",
        }
    return found


def test_records_carry_every_kind_of_tensor():
    parcels = [
        Parcel({"a": 1}, {"x": torch.randn(2, 3), "empty": torch.zeros(0, 4), "flag": torch.tensor([True, False])}),
        Parcel({"b": [None, "ü"]}),
        Parcel({}, {"x": torch.tensor(3.5, dtype=torch.float64), "n": torch.arange(4)[::2]}),
    ]
    back = parcels_of(Encoder().records(parcels))
    assert [parcel.meta for parcel in back] == [parcel.meta for parcel in parcels]
    for one, other in zip(parcels, back, strict=True):
        assert one.tensors.keys() == other.tensors.keys()
        for name, t in one.tensors.items():
            assert other.tensors[name].dtype == t.dtype
            assert torch.equal(other.tensors[name], t)


def test_the_apps_do_what_sites_in_this_process_do(configs, tmp_path):
    """The same jobs through Flower's messages and without them: the same bits."""
    jobs = [toy.job(toy.federation(), method, precision="float32") for method in ("fedavg", "ditto")]
    line = GridTransport(Grid(configs), poll=0.01)
    through_grid = serve(jobs, line, toy.POLICY)
    sites = [client.site_of({**one, "home": str(tmp_path / "plain" / one["name"])}) for one in configs.values()]
    plain = serve(jobs, Loopback(sites), toy.POLICY)
    for one, other in zip(through_grid, plain, strict=True):
        assert one.numbers == {"berlin": 0, "lyon": 1, "oslo": 2, "turin": 3}
        assert torch.equal(one.server.state.row, other.server.state.row)
    assert line.messages == 4 + 4 * 6  # who is there; introductions, three rounds, the end and the chosen models


def test_errors_of_flower_are_causes(configs):
    """lost, failed and hanging nodes in one round; berlin alone answers."""
    fates = {"lyon": Error(5, "node is gone"), "oslo": Error(2, "Traceback\nValueError: no"), "turin": "hangs"}
    names = {node: config["name"] for node, config in configs.items()}
    grid = Grid(configs)
    line = GridTransport(grid, poll=0.01)
    assert line.sites() == set(toy.NAMES)
    grid.fate = lambda node, message: fates.get(names[node])
    parcel = Parcel({"protocol": 1, "kind": "present"})
    found = line.ask({name: [parcel] for name in (*toy.NAMES, "zurich")}, 0.3, lambda got: False)
    assert found["berlin"][0].meta["site"] == "berlin"
    assert found["lyon"] == Failure("lost", "node is gone")
    assert found["oslo"] == Failure("failed", "ValueError: no")
    assert found["zurich"].cause == "absent"
    assert "turin" not in found
    first = line.ask({name: [parcel] for name in ("turin", "berlin")}, 30, lambda got: got == {"berlin"})
    assert list(first) == ["berlin"]  # enough, so the node that hangs is not waited for


def test_a_site_that_hangs_gives_up_when_the_server_has(configs, monkeypatch):
    """Otherwise its node could not take the next message."""
    monkeypatch.setattr(Site, "answer", lambda self, parcels: time.sleep(30))
    line = GridTransport(Grid(configs), poll=0.01)
    parcel = Parcel({"protocol": 1, "kind": "round", "deadline": 0.2})
    nodes = {config["name"]: node for node, config in configs.items()}
    line._names = {node: name for name, node in nodes.items()}
    began = time.monotonic()
    found = line.ask({"berlin": [parcel]}, 20, lambda got: False)
    assert found["berlin"][0].meta["error"] == "the site did not answer within 0.2 s."
    assert time.monotonic() - began < 10
    with pytest.raises(ZeroDivisionError):
        client.in_time(lambda: [1 // 0], 5)


def test_a_second_node_of_one_name_is_left_alone(configs):
    grid = Grid(dict(list(configs.items())[:1]))
    line = GridTransport(grid)
    (name,) = line.sites()
    (node,) = line._nodes().values()
    grid.configs[99] = grid.configs[node]
    assert line.sites() == {name}
    assert line._nodes() == {name: node}
    del grid.configs[node]  # the first one goes
    assert line.sites() == set()


def test_a_node_without_settings_says_what_it_lacks(configs):
    line = GridTransport(Grid({1: {"name": "berlin"}}))
    assert line.sites() == set()
    message = Message(Encoder().records([Parcel({"protocol": 1, "kind": "present"})]), 1, "query")
    message.metadata.__dict__["_message_id"] = message.object_id
    reply = client.answer(message, Context(1, 1, {"name": "berlin"}, RecordDict(), {}))
    assert "lacks data, home" in parcels_of(reply.content)[0].meta["error"]


def test_a_plan_is_the_same_after_it_was_written(tmp_path):
    plan = Plan((toy.job(toy.federation(), "fedavg"),), toy.POLICY, folder=str(tmp_path / "server"), linger=5.0)
    plan.write(tmp_path / "plan.json")
    assert Plan.read(tmp_path / "plan.json") == plan
