"""The front on loopback before a listener that writes down what reaches it; none of Flower's processes is started."""

from __future__ import annotations

import base64
import itertools
import socket
import ssl
import threading
import time
import tracemalloc
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from local import free_port

pytest.importorskip("flwr")

import uvicorn
from flwr.proto.fleet_pb2 import PullMessagesResponse, PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import Message, Metadata, ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes, sign_message

from coterie.errors import CoterieError
from coterie.flower import gate as front
from coterie.flower import keys
from coterie.flower.gate import SMALL, Doorway, Entrance, Front, Pace, checked_answer, party, summary
from coterie.flower.policy import Gate

NORTH, STRANGER = generate_key_pairs(), generate_key_pairs()
KNOWN = {public_key_to_bytes(NORTH[1]): "north"}
QUICK = Gate(head=0.4, idle=0.6, total=3)
CALM = Gate(head=10, idle=10, total=30)
"""For calls that are not about time: a busy machine may need longer than QUICK allows."""
PULL, ARRAY, ANSWER = (f"/v1/fleet/{name}" for name in ("pull-messages", "push-object", "push-messages"))


class Inside:
    """What stands in the SuperLink's place: counts bodies, keeps heads, answers as told."""

    def __init__(self):
        self.seen, self.sizes, self.cut, self.answer = [], [], 0, b"fine"
        self.port = free_port()
        config = uvicorn.Config(self, port=self.port, lifespan="off", log_level="critical")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    async def __call__(self, scope, receive, send):
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.cut += 1
                return
            size, more = size + len(message["body"]), message["more_body"]
        self.seen.append((scope["method"], scope["raw_path"].decode(), dict(scope["headers"])))
        self.sizes.append(size)
        pieces = [self.answer] if isinstance(self.answer, bytes) else self.answer
        await send({"type": "http.response.start", "status": 200, "headers": [(b"server-says", b"secret words")]})
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    def stop(self):
        self.server.should_exit = True
        self.thread.join()


@pytest.fixture(scope="module")
def inner():
    found = Inside()
    yield found
    found.stop()


@pytest.fixture
def inside(inner):
    inner.seen, inner.sizes, inner.cut, inner.answer = [], [], 0, b"fine"
    return inner


@pytest.fixture
def opened(inside):
    """A function that opens a front; all are closed in the end."""
    made = []

    def open_one(gate=CALM, body=1000, known=KNOWN, certificate=None, upstream=None):
        port = free_port()
        said = []
        entrance = Entrance("127.0.0.1", port, lambda: Front(gate, body, known), gate, certificate, said.append)
        made.append(entrance)
        entrance.open(upstream or f"http://127.0.0.1:{inside.port}", [(b"coterie-link", b"open")])
        return port, entrance._front

    yield open_one
    for one in made:
        one.close()


def signed(pair=NORTH, when=None, **changes):
    stamp = (when or datetime.now(UTC)).isoformat()
    found = {
        "flwr-public-key": base64.b64encode(public_key_to_bytes(pair[1])).decode(), "flwr-timestamp": stamp,
        "flwr-signature": base64.b64encode(sign_message(pair[0], stamp.encode())).decode(),
    }
    return {**found, **{key.replace("_", "-"): value for key, value in changes.items()}}


def head(path, headers, size=0, method="POST", version="HTTP/1.1"):
    lines = [f"{method} {path} {version}", "Host: x", *(f"{key}: {value}" for key, value in headers.items())]
    if size is not None:
        lines.append(f"Content-Length: {size}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def talk(port, data, wait=5.0):
    """Everything that is answered to these bytes until the other side closes or falls silent."""
    with socket.create_connection(("127.0.0.1", port), wait) as line:
        line.sendall(data)
        return listen(line, wait)


def listen(line, wait=5.0):
    line.settimeout(wait)
    found = b""
    try:
        while piece := line.recv(65536):
            found += piece
            if b"\r\n\r\n" in found and b"content-length: 0" in found.lower():
                break
            if found.endswith(b"0\r\n\r\n"):  # the last chunk
                break
    except (TimeoutError, ConnectionError):
        pass
    return found


def status(answered):
    return int(answered.split(b" ", 2)[1]) if answered else None


def call(port, path=PULL, body=b"", headers=None, **options):
    return talk(port, head(path, signed() if headers is None else headers, len(body), **options) + body)


# -- what passes ------------------------------------------------------------------------------------------------------


def test_a_signed_call_passes_as_it_is(opened, inside):
    """Path, body and signature arrive as sent and the opening is added; other headers stay outside, and the inner
    server's stay inside."""
    port, _ = opened()
    headers = {**signed(), "Content-Type": "application/protobuf", "Cookie": "x", "flwr-task-token": "t",
               "coterie-link": "forged", "X-Forwarded-For": "10.0.0.1", "flwr-superexec-signature": "s"}
    answered = call(port, PULL, b"a body", headers)
    assert status(answered) == 200
    assert b"fine" in answered
    assert b"secret words" not in answered
    ((method, path, arrived),) = inside.seen
    assert (method, path, inside.sizes) == ("POST", PULL, [6])
    assert {name: arrived[name.encode()].decode() for name in signed()} == {k: headers[k] for k in signed()}
    assert arrived[b"coterie-link"] == b"open"
    assert not {b"cookie", b"flwr-task-token", b"x-forwarded-for", b"flwr-superexec-signature"} & arrived.keys()


@pytest.mark.parametrize("name", sorted(front.PASSED - {"push-messages"}))
def test_every_call_of_a_supernode_passes(opened, inside, name):
    port, _ = opened()
    assert status(call(port, f"/v1/fleet/{name}")) == 200
    assert [path for _, path, _ in inside.seen] == [f"/v1/fleet/{name}"]


def test_the_list_is_flowers_own():
    """Whatever Flower's fleet router serves is in one of the two lists; a new call would show here."""
    from flwr.superlink.routers.fleet.router import router

    assert {route.path for route in router.routes} == {front.FLEET + name for name in front.PASSED | front.UNKEYED}


def test_nodes_register_themselves_only_where_there_are_no_keys(opened, inside):
    with_keys, _ = opened()
    without, _ = opened(known=None)
    assert status(call(with_keys, "/v1/fleet/register-node")) == 404
    assert status(call(without, "/v1/fleet/register-node", headers=signed(STRANGER))) == 200
    assert len(inside.seen) == 1


# -- what does not ----------------------------------------------------------------------------------------------------

TRICKS = [
    "/v1/control/list-runs", "/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/acquire-task",
    "/v1/runtime/pull-task-input", "/docs", "/openapi.json", "/health", "/", "*", "/v1/fleet/", "/v1/fleet",
    "/v1/fleet/../control/list-runs", "/v1/fleet/%2e%2e/control/list-runs", "/v1/fleet/..%2fcontrol/list-runs",
    "/v1/fleet/%2E%2E%2Fcontrol%2Flist-runs", "/v1/fleet/pull-messages/../../control/list-runs",
    "/v1/fleet/pull-messages/", "//v1/fleet/pull-messages", "/v1//fleet/pull-messages", "/./v1/fleet/pull-messages",
    "/v1/fleet/pull-messages?", "/v1/fleet/pull-messages?x=1", "/v1/fleet/pull-messages#x", "/v1/fleet/pull-messages;x",
    "/v1/fleet/pull%2Dmessages", "/v1%2ffleet/pull-messages", "/v1/fleet/pull-messages%00", "/V1/fleet/pull-messages",
    "/v1/fleet\\pull-messages", "/v1/fleet/register-node", "/v1/fleet/unregister-node",
    "http://127.0.0.1/v1/fleet/pull-messages", "https://x/v1/control/list-runs", "x:443",
]


@pytest.mark.parametrize("path", TRICKS)
def test_another_path_reaches_nobody(opened, inside, path):
    """With a good key, so that the path alone is why. `?` with nothing behind it is the path itself to HTTP."""
    port, _ = opened()
    answered = call(port, path)
    if path == PULL + "?":
        assert [seen for _, seen, _ in inside.seen] == [PULL]  # and nothing of the query travels on
        return
    assert status(answered) in (404, 400)
    assert b"secret words" not in answered
    assert inside.seen == []


CALLS = {
    "GET": lambda: head(PULL, signed(), 0, "GET"),
    "HEAD": lambda: head(PULL, signed(), 0, "HEAD"),
    "CONNECT": lambda: head("127.0.0.1:22", signed(), 0, "CONNECT"),
    "OPTIONS": lambda: head("*", signed(), 0, "OPTIONS"),
    "HTTP/1.0": lambda: head(PULL, signed(), 0, version="HTTP/1.0"),
    "websocket": lambda: head(PULL, {**signed(), "Connection": "Upgrade", "Upgrade": "websocket"}, 0),
    "h2c": lambda: head(PULL, {**signed(), "Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c"}, 0),
    "HTTP/2": lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "chunks": lambda: head(PULL, {**signed(), "Transfer-Encoding": "chunked"}, None) + b"3\r\nabc\r\n0\r\n\r\n",
    "chunks and a length": lambda: head(PULL, {**signed(), "Transfer-Encoding": "chunked"}, 3) + b"3\r\nabc\r\n",
    "a mangled encoding": lambda: head(PULL, {**signed(), "Transfer-Encoding": " xchunked"}, 3) + b"abc",
    "two lengths": lambda: head(PULL, {**signed(), "Content-length": "3"}, 4) + b"abcd",
    "no length": lambda: head(PULL, signed(), None),
    "a negative length": lambda: head(PULL, signed(), -1),
    "a length with a sign": lambda: head(PULL, signed(), "+3") + b"abc",
    "a length of 5,000 digits": lambda: head(PULL, signed(), "9" * 5000),
    "a folded header": lambda: head(PULL, {**signed(), "X": "a\r\n b", "Content-Length ": "3"}, 3) + b"abc",
    "lines without returns": lambda: head(PULL, signed(), 0).replace(b"\r\n", b"\n").replace(b"Host", b"Host\x00"),
    "no host": lambda: head(PULL, signed(), 0).replace(b"Host: x\r\n", b""),
    "a long head": lambda: head(PULL, {**signed(), "X": "x" * front.HEAD}, 0),
    "no HTTP": lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
}


@pytest.mark.parametrize("what", CALLS)
def test_what_is_no_plain_call_reaches_nobody(opened, inside, what):
    port, _ = opened()
    assert status(talk(port, CALLS[what](), 2)) in (400, 404, 411, 431, None)
    assert inside.seen == []


def test_a_second_request_behind_the_first_is_judged_by_itself(opened, inside):
    """What smuggling is about: the bytes after a body are a request of their own here and inside."""
    port, _ = opened()
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.sendall(head(PULL, signed(), 3) + b"abc" + head("/v1/control/list-runs", signed()))
        answered = b"".join(iter(lambda: line.recv(65536), b""))  # the front closes after what it refuses
    assert [path for _, path, _ in inside.seen] == [PULL]
    assert answered.count(b"HTTP/1.1 404") == 1


SIGNATURES = {
    "none": (lambda: {}, 401),
    "a stranger's": (lambda: signed(STRANGER), 401),
    "a stranger's with a known key": (lambda: signed(STRANGER, flwr_public_key=signed()["flwr-public-key"]), 401),
    "old": (lambda: signed(when=datetime.now(UTC) - timedelta(seconds=400)), 401),
    "of tomorrow": (lambda: signed(when=datetime.now(UTC) + timedelta(seconds=60)), 401),
    "no base64": (lambda: signed(flwr_signature="%%%"), 401),
    "empty": (lambda: signed(flwr_signature=""), 401),
    "no time": (lambda: signed(flwr_timestamp="yesterday"), 401),
    "a time without a zone": (lambda: signed(flwr_timestamp="2026-01-01T00:00:00"), 401),
    "5,000 digits": (lambda: signed(flwr_timestamp="9" * 5000), 401),
    "a header with a space": (lambda: {**signed(), "Flwr-Public-Key ": "x"}, 400),
    "two keys": (lambda: {**signed(), "FLWR-PUBLIC-KEY": signed(STRANGER)["flwr-public-key"]}, 401),
    "no ASCII": (lambda: signed(flwr_public_key="\xe9"), 401),
}


@pytest.mark.parametrize("what", SIGNATURES)
def test_who_does_not_sign_with_a_known_key_reaches_nobody(opened, inside, what):
    """Of two keys in one request neither counts; Flower and the front might read different ones."""
    headers, expected = SIGNATURES[what]
    port, _ = opened()
    assert status(call(port, headers=headers())) == expected
    assert inside.seen == []


def test_an_unknown_key_is_told_so_when_it_comes(opened, inside):
    """A SuperNode prints code 2004, and the site's supervisor makes a sentence of it."""
    port, _ = opened()
    answered = call(port, "/v1/fleet/activate-node", headers=signed(STRANGER))
    assert status(answered) == 412
    assert b'"code": 2004' in answered
    assert inside.seen == []


def answer_of(src=7, dst=1, reply="a" * 64, node=7, messages=1, own="b" * 64, root="b" * 64, arrays=()):
    says = Metadata(src_node_id=src, dst_node_id=dst, reply_to_message_id=reply, message_id=own)
    one, tree = Message(metadata=says), ObjectTree(object_id=root, children=[ObjectTree(object_id=a) for a in arrays])
    return PushMessagesRequest(node=Node(node_id=node), messages_list=[one] * messages,
                               message_object_trees=[tree] * messages).SerializeToString()


@pytest.mark.parametrize(("body", "expected"), [
    (answer_of(), 200),
    (answer_of(src=1, dst=8, reply=""), 403),  # an order to node 8, in the server's name: Flower itself takes it
    (answer_of(src=8), 403),
    (answer_of(dst=8), 403),
    (answer_of(dst=0), 403),
    (answer_of(reply=""), 403),
    (answer_of(root="c" * 64), 403),  # arrays that belong to no message are never deleted
    (answer_of(messages=0), 400),
    (answer_of(messages=2), 400),
    (b"\xff" * 20, 400),
    (b"", 400),
], ids=["an answer", "an order to another", "from another", "to another", "to nobody", "to no message",
        "with another's arrays", "none", "two",
        "no protobuf", "empty"])
def test_an_answer_is_one_message_of_its_sender_to_the_server(opened, inside, body, expected):
    port, _ = opened()
    assert status(call(port, ANSWER, body)) == expected
    assert len(inside.seen) == (expected == 200)


COUNT = itertools.count(1)


def name_of(number):
    return f"{number:064x}"


def tree_of(*children, name=None):
    return ObjectTree(object_id=name or name_of(next(COUNT)), children=children)


def with_tree(tree, reply="a" * 64):
    request = PushMessagesRequest.FromString(answer_of(reply=reply, own=tree.object_id, root=tree.object_id))
    request.message_object_trees[0].CopyFrom(tree)
    return request.SerializeToString()


def laughs(levels):
    """Each object has the one below it twice: 2^levels objects for whoever walks along the names."""
    node = tree_of()
    for _ in range(levels):
        node = tree_of(node, ObjectTree(object_id=node.object_id))
    return node


def chains():
    """Seventeen chains of ninety, each of which ends where the one before begins: one of 1530 along the names."""
    found, below = [], None
    for _ in range(17):
        node = tree_of(name=below)
        for _ in range(90):
            node = tree_of(node)
        below = node.object_id
        found.append(node)
    return tree_of(*found)


def own_root():
    """Its root is among its parts: Flower counts it as needed by itself and never deletes it."""
    return tree_of(tree_of(tree_of(ObjectTree(object_id=name_of(1 << 40)))), name=name_of(1 << 40))


def honest(arrays=3, chunks=2):
    return tree_of(tree_of(tree_of(*(tree_of(*(tree_of() for _ in range(chunks))) for _ in range(arrays))), tree_of()))


SHAPES = {
    "an upload": (lambda: honest(), 200), "an error": (lambda: tree_of(), 200),
    "no arrays": (lambda: tree_of(tree_of(tree_of())), 200), "laughs": (lambda: laughs(40), 403),
    "few laughs": (lambda: laughs(2), 403), "chains": (chains, 403), "its own root": (own_root, 403),
    "six deep": (lambda: tree_of(tree_of(tree_of(tree_of(tree_of(tree_of()))))), 403),
    "two contents": (lambda: tree_of(tree_of(), tree_of()), 403),
    "three records": (lambda: tree_of(tree_of(tree_of(), tree_of(), tree_of())), 403),
    "as many objects": (lambda: honest(1, front.OBJECTS - 5), 200),
    "one more object": (lambda: honest(1, front.OBJECTS - 4), 403),
    "no name": (lambda: tree_of(tree_of(name="B" * 64)), 403),
    "a short name": (lambda: tree_of(tree_of(name="b")), 403),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_an_answer_announces_what_coteries_answers_have_and_nothing_twice(opened, inside, shape):
    """A tree of 5 kB took 2.7 GB of the SuperLink, another one ended it, a third one was never deleted."""
    make, expected = SHAPES[shape]
    port, _ = opened()
    assert status(call(port, ANSWER, with_tree(make()))) == expected
    assert len(inside.seen) == (expected == 200)


def test_an_object_is_not_announced_again_with_other_parts(opened, inside):
    """Flower keeps the parts that were announced first: whoever announces another site's object before it does, with
    other parts, makes its answer unreadable; and parts below an object of a task would be kept until the run ends."""
    other = generate_key_pairs()
    port, _ = opened(known={**KNOWN, public_key_to_bytes(other[1]): "oslo"})
    task = honest()
    inside.answer = PullMessagesResponse(message_object_trees=[task]).SerializeToString()
    assert status(call(port, PULL)) == 200
    inside.answer = PushMessagesResponse(session_id="x", objects_to_push=["b" * 64]).SerializeToString()
    mine = honest()
    assert status(call(port, ANSWER, with_tree(mine))) == 200
    assert status(call(port, ANSWER, with_tree(mine))) == 200  # the same answer again, as after a broken connection
    array = mine.children[0].children[0].children[0].object_id
    theirs = tree_of(tree_of(tree_of(tree_of(tree_of(), name=array))))
    parts = tree_of(tree_of(tree_of(tree_of(tree_of(), name=task.children[0].children[0].children[0].object_id))))
    for headers in (signed(other), signed()):
        for tree in (theirs, parts):
            assert status(call(port, ANSWER, with_tree(tree, reply="c" * 64), headers)) == 403
    assert status(call(port, ANSWER, with_tree(honest(), reply="c" * 64), signed(other))) == 200


def test_what_flower_knows_is_remembered_in_bounded_memory():
    """The last of each node's: many objects of one node push out nobody else's."""
    objects = front.Objects()
    assert objects.add("north", {"a": 1}) == ["a"]
    assert objects.add("north", {"a": 1}) == []
    objects.add("oslo", {str(i): 1 for i in range(objects.KEPT + 10)})
    assert objects.fit({"a": 1, "9": 2})
    assert not objects.fit({"a": 2})
    assert not objects.fit({"10": 2})
    objects.drop("oslo", ["10"])
    assert objects.fit({"10": 2})


def test_a_deep_tree_of_an_answer_is_a_refusal():
    """Protobuf stops at 100 levels; whatever it says, the front answers."""
    deep = b""
    for _ in range(5000):
        deep = b"\x12" + _varint(len(deep)) + deep
    with pytest.raises(front.Refused):
        checked_answer(b"\x1a" + _varint(len(deep)) + deep)


def _varint(n):
    found = b""
    while n > 127:
        found, n = found + bytes([n & 127 | 128]), n >> 7
    return found + bytes([n])


# -- sizes ------------------------------------------------------------------------------------------------------------


def test_an_answer_has_so_many_bytes_in_all(opened, inside):
    """1000 for the arrays of one answer; the next one, when Flower has taken it, may have as many again."""
    port, refused = opened(body=1000)
    assert [status(call(port, ARRAY, bytes(size))) for size in (600, 400, 1)] == [200, 200, 413]
    assert inside.sizes == [600, 400]
    inside.answer = PushMessagesResponse(session_id="x").SerializeToString()
    assert status(call(port, ANSWER, answer_of())) == 200  # one that Flower does not take changes nothing
    assert status(call(port, ARRAY, bytes(1))) == 413
    inside.answer = PushMessagesResponse(session_id="x", objects_to_push=["b" * 64]).SerializeToString()
    assert status(call(port, ANSWER, answer_of())) == 200
    inside.answer = b"fine"
    assert [status(call(port, ARRAY, bytes(size))) for size in (1000, 1)] == [200, 413]
    assert any("an answer of north above 1000 bytes" in why for _, why in refused.refusals)


def test_there_is_one_answer_to_a_message(opened, inside):
    """Flower takes a second one by the name of the first and keeps what it announces until the run ends, unseen."""
    port, _ = opened(body=1000)
    inside.answer = PushMessagesResponse(session_id="x", objects_to_push=["b" * 64]).SerializeToString()
    first = answer_of(arrays=["d" * 64])
    assert status(call(port, ANSWER, first)) == 200
    assert status(call(port, ARRAY, bytes(1000))) == 200
    assert status(call(port, ANSWER, first)) == 200  # sent again, as after a broken connection: no further bytes
    assert status(call(port, ARRAY, bytes(1))) == 413
    for other in (answer_of(arrays=["e" * 64]), answer_of(own="c" * 64, root="c" * 64),
                  answer_of(reply="f" * 64, arrays=["e" * 64])):
        assert status(call(port, ANSWER, other)) == 409
    assert status(call(port, ARRAY, bytes(1))) == 413
    assert status(call(port, ANSWER, answer_of(reply="f" * 64, own="c" * 64, root="c" * 64))) == 200  # the next round
    assert status(call(port, ARRAY, bytes(1000))) == 200


def test_an_answer_that_flower_did_not_take_may_be_another_next_time(opened, inside):
    port, _ = opened(body=1000)
    inside.answer = PushMessagesResponse(session_id="x").SerializeToString()
    assert status(call(port, ANSWER, answer_of(arrays=["d" * 64]))) == 200
    inside.answer = PushMessagesResponse(session_id="x", objects_to_push=["b" * 64]).SerializeToString()
    assert status(call(port, ANSWER, answer_of(arrays=["e" * 64]))) == 200


def test_a_call_without_arrays_is_short(opened, inside):
    port, _ = opened(body=10 * SMALL)
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.sendall(head(PULL, signed(), SMALL + 1))
        for _ in range(SMALL // 65536):
            line.sendall(bytes(65536))
        line.sendall(b"x")
        assert status(listen(line)) == 413  # told after the last byte: a SuperNode reads nothing before
    assert inside.seen == []


def test_a_strangers_body_is_not_even_read(opened, inside):
    port, _ = opened(body=1 << 40)
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.sendall(head(ARRAY, signed(STRANGER), 1 << 39))
        assert status(listen(line)) == 401


def test_a_body_that_breaks_off_is_not_passed_on_as_whole(opened, inside):
    port, _ = opened(body=1000)
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.sendall(head(ARRAY, signed(), 900) + bytes(500))
        time.sleep(0.1)
    deadline = time.monotonic() + 3
    while not inside.cut and time.monotonic() < deadline:
        time.sleep(0.02)
    assert (inside.seen, inside.cut) == ([], 1)
    assert status(call(port, ARRAY, bytes(900))) == 200  # and what did not arrive is not counted


def test_large_bodies_pass_in_pieces(opened, inside):
    """64 MB each way; neither the front nor the listener of this test, in this same process, holds 8 MB of it."""
    port, _ = opened(Gate(), body=100 << 20)
    inside.answer = [bytes(1 << 16)] * 1024
    tracemalloc.start()
    try:
        with socket.create_connection(("127.0.0.1", port)) as line:
            line.sendall(head(ARRAY, signed(), 64 << 20))
            piece, received = bytes(1 << 16), 0
            for _ in range(1024):
                line.sendall(piece)
            line.settimeout(20)
            while received < 64 << 20:
                received += len(line.recv(1 << 16))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert inside.sizes == [64 << 20]
    assert peak < 8 << 20


# -- connections, time, pace ------------------------------------------------------------------------------------------


def closed_after(line, wait=5.0):
    """Seconds until the other side closes; None when it does not."""
    began = time.monotonic()
    line.settimeout(wait)
    try:
        while line.recv(65536):
            pass
    except TimeoutError:
        return None
    except ConnectionError:
        pass
    return time.monotonic() - began


@pytest.mark.parametrize("first", [b"", b"POST /v1", head(PULL, {}, 0)[:-2]],
                         ids=["nothing", "a start", "all but the end"])
def test_a_head_that_does_not_come_is_not_waited_for(opened, first):
    """0.4 s, and a quarter of that until somebody looks."""
    port, _ = opened(QUICK)
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.sendall(first)
        assert 0.3 < closed_after(line) < 1.5


def test_a_head_that_drips_is_not_waited_for(opened):
    """Slow loris: a byte now and then keeps nothing open."""
    port, _ = opened(QUICK)
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", port)) as line, pytest.raises(ConnectionError):  # noqa: PT012
        for byte in head(PULL, signed(), 0):
            line.sendall(bytes([byte]))
            time.sleep(0.05)
            assert time.monotonic() - began < 3
    assert time.monotonic() - began < 2


def test_a_body_that_stands_still_is_given_up(opened, inside):
    port, refused = opened(QUICK)
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.sendall(head(ARRAY, signed(), 900) + bytes(10))
        assert 0.4 < closed_after(line) < 2
    assert inside.seen == []
    assert any("stood still" in why for _, why in refused.refusals)


def test_a_body_that_drips_is_given_up_after_the_total(opened, inside):
    port, _ = opened(replace(QUICK, total=0.8))
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.sendall(head(ARRAY, signed(), 900))
        line.settimeout(0.1)
        while time.monotonic() - began < 4:
            try:
                line.sendall(b"x")
                if line.recv(100) is not None:
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
    assert 0.6 < time.monotonic() - began < 2.5
    assert inside.seen == []


def test_who_does_not_read_the_answer_is_given_up(opened, inside):
    port, refused = opened(QUICK)
    inside.answer = [bytes(1 << 16)] * 1024
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.sendall(head(PULL, signed(), 0))
        end = time.monotonic() + 4
        while not refused.refusals and time.monotonic() < end:
            time.sleep(0.05)
    assert [why for _, why in refused.refusals] == ["a connection that stood still"]


def test_a_kept_connection_serves_again_and_ends_when_idle(opened, inside):
    port, _ = opened(QUICK)
    with socket.create_connection(("127.0.0.1", port)) as line:
        for _ in range(3):
            line.sendall(head(PULL, signed(), 0))
            assert status(listen(line)) == 200
            time.sleep(0.3)
        assert closed_after(line) < 2
    assert len(inside.seen) == 3


def test_connections_are_counted_by_address_and_in_all(opened, inside):
    """The third of one address is closed at once; when one leaves there is room again."""
    gate = replace(QUICK, per_address=2, head=5, idle=5)
    port, refused = opened(gate)
    lines = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
    time.sleep(0.1)
    assert talk(port, head(PULL, signed(), 0)) == b""
    assert refused.refusals["127.0.0.1", "too many connections"] == 1
    lines.pop().close()
    time.sleep(0.2)
    assert status(call(port)) == 200
    lines.pop().close()
    doorway = Doorway(replace(gate, connections=3))
    assert [doorway.enter(who) for who in ("a", "a", "a", "b", "c")] == [True, True, False, True, False]
    doorway.leave("a")
    assert doorway.enter("c")


def test_one_machine_has_many_addresses_of_ipv6():
    assert party("2001:db8::1") == party("2001:db8::ffff:1") == "2001:db8::/64"
    assert party("fe80::1%eth0") == "fe80::/64"
    assert party("10.0.0.7") == "10.0.0.7"


def test_the_pace_of_a_key():
    """Two seconds' worth at once, then one request a tenth of a second; who would wait more than 10 s is refused."""
    pace = Pace(10)
    waits = [pace.wait("north", 100.0) for _ in range(200)]
    assert waits[:20] == pytest.approx([0.0] * 20)
    assert waits[20:25] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert waits.count(None) == 200 - 20 - 100
    assert pace.wait("south", 100.0) == 0.0
    assert pace.wait("north", 200.0) == 0.0


def test_who_comes_too_fast_waits(opened, inside):
    """12 requests at 4 a second: 8 at once, the ninth a quarter of a second later, the twelfth after a whole one."""
    port, _ = opened(Gate(rate=4))
    began = time.monotonic()
    assert [status(call(port)) for _ in range(12)] == [200] * 12
    assert 0.7 < time.monotonic() - began < 2.5


# -- both ends --------------------------------------------------------------------------------------------------------


def test_a_server_that_is_away_is_a_503_and_found_again(opened, inside, tmp_path):
    """A SuperNode tries again after a 503. The inner server comes back on another port."""
    port, refused = opened(upstream=f"http://127.0.0.1:{free_port()}")
    assert status(call(port)) == 503
    refused.upstream = (f"http://127.0.0.1:{inside.port}", [(b"coterie-link", b"open")])
    assert status(call(port)) == 200


def test_tls_and_nothing_else(opened, inside, tmp_path):
    """Who speaks no TLS, or none in time, is gone; a good call passes."""
    keys.make(tmp_path / "keys", ["localhost"], ["north"])
    own = tmp_path / "keys/server"
    port, _ = opened(QUICK, certificate=(own / "server.crt", own / "server.key"))
    assert talk(port, head(PULL, signed(), 0), 2) == b""
    with socket.create_connection(("127.0.0.1", port)) as silent:
        assert 0.2 < closed_after(silent) < 2
    context = ssl.create_default_context(cafile=own / "ca.crt")
    with socket.create_connection(("127.0.0.1", port)) as plain, context.wrap_socket(
        plain, server_hostname="localhost"
    ) as line:
        line.sendall(head(PULL, signed(), 0))
        assert status(listen(line)) == 200
    old = ssl.create_default_context(cafile=own / "ca.crt")
    old.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    old.maximum_version = ssl.TLSVersion.TLSv1_1
    with socket.create_connection(("127.0.0.1", port)) as plain, pytest.raises((ssl.SSLError, ConnectionError)):
        old.wrap_socket(plain, server_hostname="localhost")
    assert len(inside.seen) == 1


def test_the_operator_reads_what_was_refused():
    found = {("10.0.0.7", "an unknown key"): 3, ("10.0.0.8", "no call of a SuperNode"): 40, ("", "x"): 1}
    assert summary(found) == (
        "the gate refused: no call of a SuperNode (10.0.0.8): 40, an unknown key (10.0.0.7): 3, x: 1"
    )


def test_an_address_in_use_is_a_sentence():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(CoterieError, match=r"cannot listen on .*: address already in use"):
            Entrance("127.0.0.1", other.getsockname()[1], lambda: Front(Gate(), 1, None), Gate(), None, print)
