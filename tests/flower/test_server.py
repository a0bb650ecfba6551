"""Flower's grid as a transport, with a grid of this process in place of the network."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import sites as toy
import torch

pytest.importorskip("flwr")

import httpx
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse, PushObjectResponse
from flwr.proto.runtime_pb2 import PushAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, iterate_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectPushError, pull_objects
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from coterie.errors import CoterieError
from coterie.flower import client, server
from coterie.flower.grid import UNTIL, LenientGrid
from coterie.flower.loopback import Loopback
from coterie.flower.message import Encoder, masked, parcels_of
from coterie.flower.plan import Plan
from coterie.flower.rounds import serve
from coterie.flower.server import GridTransport, Kept
from coterie.flower.site import Site
from coterie.flower.wire import BLAMED, Failure, Parcel
from coterie.running import checkpoint


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
            "accept": "any",
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


def refused_by_flower(code):
    request = httpx.Request("POST", "http://localhost")
    return httpx.HTTPStatusError("no", request=request, response=httpx.Response(code, request=request))


def test_an_answer_that_does_not_come_whole_holds_up_no_other(configs, monkeypatch):
    """Flower tries for hours to pull what was announced and is never sent; the server app stood still for as long. The
    three others have answered when the deadline comes, and the fourth is lost, which is no strike."""
    monkeypatch.setattr(server, "SLOW", 0.2)
    names, over = {config["name"]: node for node, config in configs.items()}, threading.Event()

    class Slow(Grid):
        stands = False

        def pull_messages(self, ids):
            if self.stands and self.held[ids[0]].metadata.dst_node_id == names["lyon"]:
                ends.append(UNTIL.at)
                over.wait(60)
                return []
            return super().pull_messages(ids)

    grid, ends = Slow(configs), []
    line = GridTransport(grid, poll=0.01)
    assert line.sites() == set(toy.NAMES)
    grid.stands, began = True, time.monotonic()
    found = line.ask({name: [server.PRESENT] for name in toy.NAMES}, 2, lambda got: False)
    took = time.monotonic() - began
    over.set()
    assert 2 <= took < 4
    assert {name: type(one) for name, one in found.items()} == {
        "berlin": list, "lyon": Failure, "oslo": list, "turin": list}
    assert (found["lyon"].cause, found["lyon"].cause in BLAMED) == ("lost", False)
    assert ends == [pytest.approx(began + 2, abs=0.5)]  # by then its thread gives up, too


@pytest.mark.parametrize("code", [500, 403])
def test_an_error_of_flower_about_one_message_is_that_sites(configs, code):
    """500: what a node announced made Flower's own walk fail, for one message; 403: the run itself is not wanted."""
    names = {config["name"]: node for node, config in configs.items()}

    class Failing(Grid):
        fails = False

        def pull_messages(self, ids):
            if self.fails and self.held[ids[0]].metadata.dst_node_id == names["lyon"]:
                raise refused_by_flower(code)
            return super().pull_messages(ids)

    grid = Failing(configs)
    line = GridTransport(grid, poll=0.01)
    assert line.sites() == set(toy.NAMES)
    grid.fails = True
    if code == 403:
        with pytest.raises(httpx.HTTPStatusError):
            line.ask({name: [server.PRESENT] for name in toy.NAMES}, 5, lambda got: False)
        return
    found = line.ask({name: [server.PRESENT] for name in toy.NAMES}, 5, lambda got: False)
    assert {name: type(one) for name, one in found.items()} == {
        "berlin": list, "lyon": Failure, "oslo": list, "turin": list}
    assert found["lyon"].cause == "lost"


def test_messages_that_flower_does_not_take_end_no_run(configs):
    """They are lost, and the next ones may pass."""

    class Failing(Grid):
        reason = None

        def push_messages(self, messages):
            if self.reason is not None:
                raise self.reason
            return super().push_messages(messages)

    grid = Failing(configs)
    line = GridTransport(grid, poll=0.01)
    assert line.sites() == set(toy.NAMES)
    for grid.reason in (refused_by_flower(500), ObjectPushError("a" * 64, 1, "s")):
        found = line.ask({"oslo": [server.PRESENT]}, 5, lambda got: False)
        assert found["oslo"].cause == "lost"
    grid.reason = None
    assert isinstance(line.ask({"oslo": [server.PRESENT]}, 5, lambda got: False)["oslo"], list)


class Link:
    """The SuperLink's part of one push: it takes no object of `gone` any more."""

    def __init__(self, gone):
        self.gone, self.taken = gone, []

    def PushMessages(self, request):  # noqa: N802
        trees = request.message_object_trees
        names = [tree.object_id for root in trees for tree in iterate_object_tree(root)]
        return PushAppMessagesResponse(message_ids=[root.object_id for root in trees], objects_to_push=names)

    def PushObject(self, request):  # noqa: N802
        if request.object_id in self.gone:
            return PushObjectResponse(stored=False)
        self.taken.append(request.object_id)
        return PushObjectResponse(stored=True)

    def PullObject(self, request):  # noqa: N802
        return PullObjectResponse(object_found=True)


def test_a_site_that_confirms_its_message_early_ends_no_push():
    """Flower deletes a message that its node has confirmed, and takes no more objects of it: the server app failed, and
    the third time the server gave up. Now the other sites' messages are pushed in full."""
    messages = [Message(Encoder().records([server.PRESENT]), node, "query") for node in (1, 2)]
    for message in messages:
        message.metadata.__dict__["_message_id"] = message.object_id
    theirs, others = (set(get_all_nested_objects(message)) for message in messages)
    grid = LenientGrid("localhost:1", True, token="t")
    grid._client = Link(theirs)
    grid.set_run(Run.create_empty(1))
    assert grid.push_messages(messages) == [message.object_id for message in messages]
    assert set(grid._client.taken) == others


def test_what_does_not_come_is_pulled_until_the_end_and_no_longer(monkeypatch):
    """Flower itself would try 500 times, ten seconds apart."""
    grid = LenientGrid("localhost:1", True, token="t")
    grid._client = Link(set())
    monkeypatch.setattr(UNTIL, "at", time.monotonic() + 0.5)
    pull = make_pull_object_fn_protobuf(grid._runtime_client.PullObject, grid.node, 1)
    began = time.monotonic()
    with pytest.raises(ObjectPullError, match="did not come in time"):
        pull_objects(["a" * 64], pull, initial_backoff=0.1)
    assert 0.5 < time.monotonic() - began < 5


def test_an_object_of_ever_so_many_parts_is_refused_before_they_are_listed():
    """60 MB of commas would be 60 million empty names."""
    class Full(Link):
        def PullObject(self, request):  # noqa: N802
            return PullObjectResponse(object_found=True, object_available=True, object_content=self.content)

    grid = LenientGrid("localhost:1", True, token="t")
    grid._client = Full(set())
    commas = b"," * (3 << 20)
    grid._client.content = b"ArrayChunk  9\0" + commas
    assert grid._runtime_client.PullObject(PullObjectRequest()).object_content.endswith(commas)
    grid._client.content = b"Array " + commas + b" 1\0x"
    with pytest.raises(CoterieError, match="names more parts than one may have"):
        grid._runtime_client.PullObject(PullObjectRequest())


def test_an_answer_that_says_it_failed_is_not_enough(configs):
    """One answer is wanted: berlin's error comes at once, oslo's answer a second later, and it is waited for."""
    names, since = {node: config["name"] for node, config in configs.items()}, time.monotonic()
    grid = Grid(configs)
    line = GridTransport(grid, poll=0.01)
    assert line.sites() == set(toy.NAMES)
    grid.fate = lambda node, message: "later" if names[node] == "oslo" and time.monotonic() - since < 1 else None
    tasks = {"berlin": [Parcel({"protocol": 1, "kind": "round"})], "oslo": [server.PRESENT]}
    found = line.ask(tasks, 20, lambda got: len(got) >= 1)
    assert "error" in found["berlin"][0].meta
    assert found["oslo"][0].meta["site"] == "oslo"


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
    home = Path(configs[nodes["berlin"]]["home"])
    assert "did not answer within 0.2 s" in (home / "sent.jsonl").read_text()
    with pytest.raises(ZeroDivisionError):
        client.in_time(lambda: [1 // 0], 5)


def test_a_sites_own_limit_of_seconds_holds_whatever_the_server_says(configs, monkeypatch):
    """No deadline, or one of a year, would keep the site busy for ever."""
    monkeypatch.setattr(Site, "answer", lambda self, parcels: time.sleep(30))
    (config,) = [one for one in configs.values() if one["name"] == "berlin"]
    site = client.site_of({**config, "limit": "seconds=0.2"})
    for deadline in ({}, {"deadline": 3e7}, {"deadline": "never"}):
        (answer,) = client.answered(site, lambda said=deadline: [Parcel({"protocol": 1, "kind": "round", **said})])
        assert answer.meta["error"] == "the site did not answer within 0.2 s."


@pytest.mark.parametrize("content", [
    RecordDict(), RecordDict({"header": ConfigRecord({"parts": "[]"})}),
    RecordDict({"arrays": ArrayRecord({}), "header": ConfigRecord({"parts": "no json", "nonce": bytes(16)})}),
    RecordDict({"header": ConfigRecord({"parts": "{}", "nonce": bytes(16)})}),
    RecordDict({"arrays": ArrayRecord({"0:x": Array("f", (3,), "numpy.ndarray", masked(Array(np.zeros(3)).data))}),
                "header": ConfigRecord({"parts": "[]", "nonce": bytes(16)})}),
])
def test_a_message_that_cannot_be_read_is_answered_in_a_sentence(configs, content):
    """An error that reached Flower would leave the site unwritten, with whatever its text holds."""
    (config,) = [one for one in configs.values() if one["name"] == "berlin"]
    message = Message(content, 1, "query")
    message.metadata.__dict__["_message_id"] = message.object_id
    reply = client.answer(message, Context(1, 1, config, RecordDict(), {}))
    (answer,) = parcels_of(reply.content)
    assert answer.meta["cause"] == "refused"
    assert answer.meta["error"].startswith("the message")
    assert answer.meta["error"] in (Path(config["home"]) / "sent.jsonl").read_text()


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


@pytest.mark.parametrize(("meta", "kept"), [
    ({"n": 3, "format": 7}, {"n": 3, "format": 1}),  # the file's own format, whatever the site says
    ({"n": 3, "x": "é" * (1 << 20)}, {"letters": 6 * (1 << 20) + 17, "beginning": '{"n": 3, "x": "\\u00e9\\'}),
], ids=["format", "long"])
def test_kept_messages_can_be_read_whatever_their_headers_say(tmp_path, meta, kept):
    """Of a header that is longer than a file's may be, the beginning is kept: `é` is six letters there."""
    tensors = {"update": torch.ones(1, 3)}
    line = Kept(Answering({"oslo": [Parcel(meta, tensors)]}), tmp_path / "messages")
    assert line.ask({}, 1.0, bool).keys() == {"oslo"}
    (path,) = (tmp_path / "messages").iterdir()
    found, header = checkpoint.load(path)
    assert torch.equal(found["update"], tensors["update"])
    assert {name: value[:22] if isinstance(value, str) else value for name, value in header.items()} == {
        "format": 1, **kept}


def test_a_message_that_cannot_be_kept_is_said_and_ends_nothing(tmp_path, caplog):
    line = Kept(Answering({"oslo": [Parcel({"n": 3}, {})]}), tmp_path / "messages")
    (tmp_path / "messages").rmdir()
    assert line.ask({}, 1.0, bool).keys() == {"oslo"}
    assert "what oslo sent is not kept" in caplog.text


class Answering:
    """A line on which these answers come."""

    def __init__(self, answers):
        self.answers = answers

    def sites(self):
        return set(self.answers)

    def ask(self, messages, deadline, enough):
        return self.answers
