"""The server's front: all that the world reaches of a SuperLink.

The SuperLink listens on loopback and answers nobody without its secret (`link`). This front, an ASGI application on
uvicorn, ends TLS, knows the sites' public keys and passes on the twelve calls of SuperNodes, letter by letter the paths
below; whatever else is asked is answered 404 by the front itself. What it checks before a byte of a body is read:

- method, path, HTTP version, that the length of the body is said, and is not too long;
- the three headers by which a SuperNode signs: a key of the server's folder, a time of now, and the signature.

Flower then checks the same signature once more and that the node in the body is that key's. It does not check who a
*message* says it is from: a node could post one in the server's name, to another node. So an answer's envelope is read
here (`checked_answer`): one message, from the node that signs, to the server, in reply to something. Nor does it forget
what is no part of a message: arrays announced under an answer that it has already, or under another root, would stay
until the run ends. So a node has one answer to a message, and it announces arrays of its own message alone (`Taken`).
What an answer announces has the shape of coterie's answers, each object once (`objects_of`), and no object has other
parts than before (`Objects`): Flower keeps those that were announced first, and looks for these alone.

Bodies pass in pieces, in both directions, and are never held here; an answer's envelope, without arrays, is.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import json
import logging
import re
import socket
import ssl
import threading
import time
from base64 import b64decode
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

try:
    import httpx
    from flwr.common.constant import SUPERLINK_NODE_ID, SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
    from flwr.proto.fleet_pb2 import PullMessagesResponse, PushMessagesRequest, PushMessagesResponse
    from flwr.proto.message_pb2 import ObjectTree
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
    from flwr.supercore.error import ApiErrorCode
    from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature
    from google.protobuf.message import DecodeError
    from uvicorn import Config
    from uvicorn.protocols.http.h11_impl import H11Protocol
    from uvicorn.server import ServerState
except ImportError as reason:
    from coterie.flower import missing

    raise missing("flwr") from reason

from coterie.errors import CoterieError
from coterie.flower.keys import public_pem
from coterie.flower.policy import Gate

FLEET = "/v1/fleet/"
PASSED = frozenset({
    "activate-node", "deactivate-node", "send-node-heartbeat", "pull-messages", "push-messages", "get-run", "get-fab",
    "push-object", "pull-object", "confirm-message-received",
})
"""What a SuperNode with a key calls."""
UNKEYED = frozenset({"register-node", "unregister-node"})
"""What it calls besides where there are no keys: it makes one up and introduces itself."""
SMALL = 4 << 20
"""Bytes of a call that carries no array. An answer's envelope lists its arrays, about 70 bytes for each."""
OBJECTS, LEVELS = 1 << 14, 5
"""What an answer may announce in all, and how deep: a message, its content, records of that, their arrays, chunks."""
HEAD = 16 << 10
"""Bytes of a request's head."""
LONGEST = 10.0
"""Seconds that somebody who comes too fast is made to wait; who would have to wait longer is told to come later."""

_SIGNED = (FLEET_HTTP_PUBLIC_KEY_HEADER, TIMESTAMP_HEADER, FLEET_HTTP_SIGNATURE_HEADER)
_KEPT = frozenset(name.encode() for name in (
    "content-type", "accept", "flwr-package-name", "flwr-package-version", "flwr-component-name", *_SIGNED))
_TASK, _ANSWER, _ARRAY = (FLEET + name for name in ("pull-messages", "push-messages", "push-object"))
_NAME = re.compile(r"[0-9a-f]{64}")
_CLOSE = (b"connection", b"close")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Refused(Exception):  # noqa: N818 (it is an answer)
    """A request that is not passed on: the status it is answered with, the reason for the operator, and a body."""

    def __init__(self, status: int, why: str, body: bytes = b"") -> None:
        super().__init__(why)
        self.status, self.why, self.body = status, why, body


class Pace:
    """At most `rate` requests a second of each key, after a start of two seconds' worth at once."""

    def __init__(self, rate: float) -> None:
        self._each, self._ahead = 1 / rate, 2.0
        self._due: dict[str, float] = {}

    def wait(self, key: str, now: float) -> float | None:
        """Seconds until the key's next request may go on; None when that is too long, and it does not count."""
        if len(self._due) > 10_000:
            self._due = {one: due for one, due in self._due.items() if due > now}
        due = max(self._due.get(key, now), now) + self._each
        late = due - now - self._ahead
        if late > LONGEST:
            return None
        self._due[key] = due
        return max(late, 0.0)


class Doorway:
    """Who is inside: connections in all and by address, from the moment they are accepted."""

    def __init__(self, gate: Gate) -> None:
        self._gate, self._inside = gate, Counter[str]()

    def enter(self, address: str) -> bool:
        if self._inside.total() >= self._gate.connections or self._inside[address] >= self._gate.per_address:
            return False
        self._inside[address] += 1
        return True

    def leave(self, address: str) -> None:
        self._inside[address] -= 1
        self._inside += Counter()  # drops the zeros


def party(host: str) -> str:
    """Whom an address belongs to: itself, or with IPv6 its /64, of which one machine has all."""
    try:
        found = ipaddress.ip_address(host.split("%")[0])
    except ValueError:
        return host
    return str(ipaddress.ip_network((found, 64), strict=False)) if found.version == 6 else str(found)


def known_keys(nodes: Mapping[str, Path]) -> dict[bytes, str]:
    """Public key, as SuperNodes send it -> the site's name."""
    return {public_pem(path): name for name, path in nodes.items()}


class Taken:
    """The last answers of one node that Flower has taken, each with all that it announced."""

    KEPT = 4096

    def __init__(self) -> None:
        self._by_id: dict[str, bytes] = {}  # message answered, and answer -> the whole of the answer, hashed

    def add(self, answer: Answer) -> bool:
        """Whether it is a new one; the same once more is not. Raises Refused for another one of the same name."""
        known = [self._by_id[name] for name in answer.names if name in self._by_id]
        if any(whole != answer.whole for whole in known):
            raise Refused(409, "a second answer to one message")
        self._by_id |= dict.fromkeys(answer.names, answer.whole)
        while len(self._by_id) > self.KEPT:
            del self._by_id[next(iter(self._by_id))]
        return not known

    def drop(self, answer: Answer) -> None:
        """It was not taken after all."""
        for name in answer.names:
            self._by_id.pop(name, None)


class Objects:
    """The parts of the last objects that each node's answers announced, and of those of tasks (of no node)."""

    KEPT = 2 * OBJECTS

    def __init__(self) -> None:
        self._of = defaultdict[str, dict[str, int]](dict)

    def add(self, node: str, parts: Mapping[str, int]) -> list[str]:
        """The names that are new."""
        held = self._of[node]
        new = [name for name in parts if name not in held]
        held.update(parts)
        while len(held) > self.KEPT:
            del held[next(iter(held))]
        return new

    def drop(self, node: str, names: Iterable[str]) -> None:
        for name in names:
            self._of[node].pop(name, None)

    def fit(self, parts: Mapping[str, int]) -> bool:
        """Whether each of these has the parts that anybody has said it has."""
        return all(held.get(name, one) == one for held in self._of.values() for name, one in parts.items())


class Answer(NamedTuple):
    """An answer's envelope: the message that it answers, its own name, a hash of these and of what it announces, and
    the objects that it announces, each with a hash of the names of its parts."""

    names: tuple[str, str]
    whole: bytes
    objects: Mapping[str, int]


def checked_answer(body: bytes) -> Answer:
    """What is announced, if this is one answer to the server from the node that brings it; raises Refused otherwise."""
    try:
        request = PushMessagesRequest.FromString(body)
    except (DecodeError, RecursionError) as reason:
        raise Refused(400, "an answer that cannot be read") from reason
    if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
        raise Refused(400, "not one answer but another number")
    says = request.messages_list[0].metadata
    if says.src_node_id != request.node.node_id:
        raise Refused(403, "a message in another's name")
    if says.dst_node_id != SUPERLINK_NODE_ID or not says.reply_to_message_id:
        raise Refused(403, "a message that is no answer to the server")
    tree = request.message_object_trees[0]
    if tree.object_id != says.message_id or says.message_id == says.reply_to_message_id:
        raise Refused(403, "an answer that announces another message's arrays")
    names, objects = (says.reply_to_message_id, says.message_id), objects_of(tree)
    announced = tree.SerializeToString(deterministic=True)
    return Answer(names, hashlib.sha256("\0".join(names).encode() + b"\0" + announced).digest(), objects)


def objects_of(tree: ObjectTree) -> dict[str, int]:
    """What an answer announces; raises Refused unless it has the shape of coterie's answers and names nothing twice.

    Flower walks along names: what names one object twice can become endless there, or stay for ever.
    """
    found: dict[str, int] = {}
    level, most = [tree], 1
    for depth in range(LEVELS):
        if len(level) > most:
            raise Refused(403, "an answer that announces more than one may have")
        before = len(found)
        found |= map(_parts, level)
        if len(found) != before + len(level):
            raise Refused(403, "an answer that announces an object twice")
        level = [child for node in level for child in node.children]
        most = depth + 1 if depth < 2 else OBJECTS - len(found)  # a message has one content, and that two records
    if level:
        raise Refused(403, "an answer that announces deeper parts than there are")
    if not all(_NAME.fullmatch(name) for name in found):
        raise Refused(403, "an answer that announces what is no object")
    return found


def _parts(tree: ObjectTree) -> tuple[str, int]:
    return tree.object_id, hash(tuple(child.object_id for child in tree.children))


def _all_parts(tree: ObjectTree) -> Iterator[tuple[str, int]]:
    yield _parts(tree)
    for child in tree.children:
        yield from _all_parts(child)


class Front:
    """The ASGI application. `known` holds the keys that may take part, None lets every key pass (for trials).

    `upstream` is where the SuperLink listens at present (it may be started anew), with the header that opens it.
    """

    def __init__(
        self, gate: Gate, body: int, known: Mapping[bytes, str] | None, ca: Path | None = None,
    ) -> None:
        self.gate, self.body, self.known = gate, body, known
        self.upstream: tuple[str, list[tuple[bytes, bytes]]] = ("", [])
        self.refusals = Counter[tuple[str, str]]()
        self._paths = {FLEET + name for name in (PASSED if known is not None else PASSED | UNKEYED)}
        self._nodes, self._addresses = Pace(gate.rate), Pace(4 * gate.rate)
        self._spent = Counter[str]()  # bytes of arrays since a node's last answer was taken
        self._answers = defaultdict[str, Taken](Taken)
        self._objects = Objects()
        patience = httpx.Timeout(gate.idle, connect=5)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
        verify = ssl.create_default_context(cafile=ca) if ca is not None else False
        self._client = httpx.AsyncClient(verify=verify, trust_env=False, timeout=patience, limits=limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        address = party(scope["client"][0]) if scope.get("client") else ""
        begun = False

        async def sending(message: MutableMapping[str, Any]) -> None:
            nonlocal begun
            begun = True
            await send(message)
            _moved(scope)

        try:
            async with asyncio.timeout(self.gate.total):
                await self._pass(scope, address, receive, sending)
        except Refused as refused:
            self.refusals[address, refused.why] += 1
            await _answer(send, refused.status, refused.body)
        except (httpx.HTTPError, TimeoutError, ConnectionError) as reason:
            if begun:
                raise  # the server closes the connection: the other side sees that something is missing
            if not isinstance(reason, ConnectionError):  # the visitor's own hanging up is no news
                self.refusals["", "the SuperLink did not answer"] += 1
                await _answer(send, 503)

    async def close(self) -> None:
        await self._client.aclose()

    async def _pass(self, scope: Scope, address: str, receive: Receive, send: Send) -> None:
        path = self._path(scope)
        await self._hold(self._addresses, address, "too many requests from one address")
        node, size = self._node(path, scope["headers"]), self._size(scope["headers"])
        await self._hold(self._nodes, node, "too many requests of one site")
        body, paid = _body(receive, size), size if path == _ARRAY else 0
        if self._spent[node] + paid > self.body:
            await _gone(body)  # a SuperNode reads no answer before it has sent all
            raise Refused(413, f"an answer of {node if self.known is not None else 'a site'} above {self.body} bytes")
        if not paid and size > SMALL:
            await _gone(body)
            raise Refused(413, "a call that is too long")
        if path == _ANSWER:
            await self._pass_answer(node, scope, size, b"".join([piece async for piece in body]), send)
            return
        self._spent[node] += paid
        try:
            await self._forward(path, scope["headers"], size, body, send, self._handed if path == _TASK else None)
        except BaseException:
            self._spent[node] -= paid  # it will be sent again
            raise

    async def _pass_answer(self, node: str, scope: Scope, size: int, whole: bytes, send: Send) -> None:
        """An answer's envelope; when Flower has taken a new one, its arrays come."""
        answer, taken = checked_answer(whole), False

        def look(found: bytes) -> None:
            nonlocal taken
            with suppress(DecodeError):
                taken = bool(PushMessagesResponse.FromString(found).objects_to_push)

        fresh = self._answers[node].add(answer)
        if fresh and not self._objects.fit(answer.objects):
            self._answers[node].drop(answer)
            raise Refused(403, "an answer that announces an object with other parts")
        new = self._objects.add(node, answer.objects)
        try:
            await self._forward(_ANSWER, scope["headers"], size, _pieces([whole]), send, look)
        finally:
            if fresh and not taken:
                self._answers[node].drop(answer)
                self._objects.drop(node, new)
        if fresh and taken:
            self._spent[node] = 0

    def _handed(self, found: bytes) -> None:
        """A task is handed out: its objects are the server's."""
        with suppress(DecodeError):
            for tree in PullMessagesResponse.FromString(found).message_object_trees:
                self._objects.add("", dict(_all_parts(tree)))

    async def _forward(
        self, path: str, headers: Iterable[tuple[bytes, bytes]], size: int, body: AsyncIterator[bytes], send: Send,
        look: Callable[[bytes], None] | None = None,
    ) -> None:
        """Pass a request on and its answer back; `look` sees what a successful one was answered before its end leaves,
        so it is for calls whose answers carry no array."""
        url, opening = self.upstream
        passed = [(key, value) for key, value in headers if key in _KEPT]
        passed += [(b"content-length", str(size).encode()), (b"accept-encoding", b"identity"), *opening]
        request = self._client.build_request("POST", url + path, headers=passed, content=body)
        response = await self._client.send(request, stream=True)
        answered, last = bytearray(), b""
        try:
            kept = [(key, value) for key, value in response.headers.raw
                    if key.lower() in (b"content-type", b"content-length")]
            await send({"type": "http.response.start", "status": response.status_code, "headers": kept})
            async for piece in response.aiter_raw():
                if look is not None:
                    answered += piece
                await send({"type": "http.response.body", "body": last, "more_body": True})
                last = piece
            if look is not None and response.status_code == 200:
                look(bytes(answered))
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            await response.aclose()

    def _path(self, scope: Scope) -> str:
        """The path, which must be one of ours as it stands on the wire: nothing is decoded or tidied up."""
        path = bytes(scope["raw_path"]).decode("latin-1")
        if scope["method"] != "POST" or path not in self._paths or scope["query_string"]:
            raise Refused(404, "no call of a SuperNode")
        headers = [key for key, _ in scope["headers"]]
        if scope["http_version"] != "1.1" or b"transfer-encoding" in headers or b"upgrade" in headers:
            raise Refused(404, "no call of a SuperNode")
        if sum(len(key) + len(value) for key, value in scope["headers"]) > HEAD:
            raise Refused(431, "a head that is too long")
        return path

    def _node(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Who signs: the site's name, without keys the key itself. Raises Refused where nobody known does."""
        found = [[value.decode("latin-1") for key, value in headers if key == name.encode()] for name in _SIGNED]
        try:
            (shown,), (signed_at,), (signature,) = found
            key = b64decode(shown, validate=True)
            if self.known is None:
                return shown
            age = (datetime.now(UTC) - datetime.fromisoformat(signed_at)).total_seconds()
            if key in self.known and -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE:
                if verify_signature(bytes_to_public_key(key), signed_at.encode(), b64decode(signature, validate=True)):
                    return self.known[key]
                raise Refused(401, "a wrong signature")
        except (ValueError, TypeError, OverflowError) as reason:
            raise Refused(401, "no signature of a SuperNode") from reason
        if key in self.known:
            raise Refused(401, f"{self.known[key]} signs with a time that is {abs(age):.0f} s off")
        if path == FLEET + "activate-node":  # in Flower's words, by which a SuperNode says what is wrong
            told = {"code": int(ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED), "detail": "The key is not registered."}
            raise Refused(412, "an unknown key", json.dumps(told).encode())
        raise Refused(401, "an unknown key")

    def _size(self, headers: Iterable[tuple[bytes, bytes]]) -> int:
        """The length of the body; h11 sees to it that it is as said."""
        found = [value for key, value in headers if key == b"content-length"]
        if len(found) != 1 or not found[0].isdigit() or len(found[0]) > 15:
            raise Refused(411, "a body without a length")
        return int(found[0])

    async def _hold(self, pace: Pace, key: str, why: str) -> None:
        wait = pace.wait(key, time.monotonic())
        if wait is None:
            raise Refused(503, why)
        if wait:
            await asyncio.sleep(wait)


async def _body(receive: Receive, size: int) -> AsyncIterator[bytes]:
    """A request's body in pieces. Who goes away before its end is a ConnectionError, so that nothing is passed on."""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the visitor went away")
        more = message.get("more_body", False)
        if piece := message.get("body", b""):
            size -= len(piece)
            if size < 0:
                raise ConnectionError("the body is longer than was said")
            yield piece


async def _pieces(found: Iterable[bytes]) -> AsyncIterator[bytes]:
    for piece in found:
        yield piece


async def _gone(body: AsyncIterator[bytes]) -> None:
    async for _ in body:
        pass


async def _answer(send: Send, status: int, body: bytes = b"") -> None:
    """An answer of the front's own; the connection ends with it, whatever else the visitor has sent."""
    headers = [(b"content-length", str(len(body)).encode()), _CLOSE]
    headers += [(b"content-type", b"application/json")] if body else []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _moved(scope: Scope) -> None:
    visit = scope.get("state", {}).get("visit")
    if visit is not None:
        visit.moved = time.monotonic()


# -- listening --------------------------------------------------------------------------------------------------------

_SILENT = logging.getLogger("coterie.gate")
_SILENT.addHandler(logging.NullHandler())
_SILENT.propagate = False  # what strangers send is counted and told in a line a minute, not logged one by one


class Visit(H11Protocol):
    """One connection: counted at the door, closed when it stands still or does not say what it wants."""

    def __init__(
        self, config: Config, state: ServerState, came: Callable[[Visit], None], left: Callable[[Visit], None]
    ) -> None:
        super().__init__(config, state, {})
        self.app_state = {"visit": self}
        self.logger, self.access_log = _SILENT, False
        self._came, self._left = came, left
        self.moved = self._since = time.monotonic()
        self._speaks = True  # a head is due: at first, and once its first byte has come

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._came(self)

    def data_received(self, data: bytes) -> None:
        self.moved = time.monotonic()
        waited = self._waits
        super().data_received(data)
        if not self._waits or not waited:
            self._speaks, self._since = False, self.moved
        elif not self._speaks:
            self._speaks, self._since = True, self.moved

    def resume_writing(self) -> None:
        self.moved = time.monotonic()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._left(self)

    @property
    def _waits(self) -> bool:
        """No request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def overdue(self, gate: Gate, now: float) -> bool:
        if self._waits and self._speaks:
            return now - self._since > gate.head
        return now - self.moved > gate.idle


class Entrance:
    """The front on its address, in a thread of its own. The address is taken when this is made, used from `open` on."""

    def __init__(
        self, host: str, port: int, front: Callable[[], Front], gate: Gate, certificate: tuple[Path, Path] | None,
        say: Callable[[str], None],
    ) -> None:
        self._gate, self._make, self._say = gate, front, say
        self._context = None
        if certificate is not None:
            self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self._context.load_cert_chain(*certificate)
        self._where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._listeners = _bound(self._where, host, port)
        self._doorway = Doorway(gate)
        self._visits: set[Visit] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gate", daemon=True)
        self._thread.start()
        self._front = self._done(self._begin())
        self._tasks: list[asyncio.Task[None]] = []

    def open(self, upstream: str, opening: list[tuple[bytes, bytes]]) -> None:
        """Let visitors through to the SuperLink at this URL, with these headers; again, when it was started anew."""
        self._front.upstream = (upstream, opening)
        if not self._tasks:
            try:
                self._done(self._listen())
            except OSError as reason:
                raise _cannot_listen(self._where, reason) from reason

    def close(self) -> None:
        """End all connections and leave the address."""
        if self._loop.is_closed():
            return
        self._done(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _done(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _begin(self) -> Front:
        front = self._make()
        self._config = Config(front, http=Visit, ws="none", lifespan="off", log_config=None, access_log=False,
                              server_header=False, date_header=False, proxy_headers=False,
                              h11_max_incomplete_event_size=HEAD, timeout_keep_alive=int(self._gate.idle) + 1)
        self._config.load()
        self._state = ServerState()
        return front

    async def _listen(self) -> None:
        for listener in self._listeners:
            listener.listen(256)
            listener.setblocking(False)
            self._tasks.append(self._loop.create_task(self._accept(listener)))
        self._tasks.append(self._loop.create_task(self._look()))

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        for listener in self._listeners:
            listener.close()
        for visit in list(self._visits):
            visit.transport.abort()
        for work in list(self._state.tasks):
            work.cancel()
        await asyncio.gather(*self._state.tasks, return_exceptions=True)
        await self._front.close()

    async def _accept(self, listener: socket.socket) -> None:
        welcomes: set[asyncio.Task[None]] = set()
        while True:
            try:
                visitor, peer = await self._loop.sock_accept(listener)
            except OSError:  # no file left, or the visitor is gone already
                await asyncio.sleep(0.1)
                continue
            address = party(peer[0])
            if not self._doorway.enter(address):
                self._front.refusals[address, "too many connections"] += 1
                visitor.close()
                continue
            welcome = self._loop.create_task(self._welcome(visitor, address))
            welcomes.add(welcome)
            welcome.add_done_callback(welcomes.discard)

    async def _welcome(self, visitor: socket.socket, address: str) -> None:
        """TLS, and then uvicorn's protocol. Whoever came in leaves by its `connection_lost`, the others here."""
        inside = False

        def came(visit: Visit) -> None:
            nonlocal inside
            inside = True
            self._visits.add(visit)

        def left(visit: Visit) -> None:
            self._visits.discard(visit)
            self._doorway.leave(address)

        patience = None if self._context is None else self._gate.head
        try:
            await self._loop.connect_accepted_socket(
                lambda: Visit(self._config, self._state, came, left), visitor, ssl=self._context,
                ssl_handshake_timeout=patience)
        except (OSError, TimeoutError):  # no TLS, or not in time
            self._front.refusals[address, "no TLS"] += 1
        finally:
            if not inside:
                visitor.close()
                self._doorway.leave(address)

    async def _look(self) -> None:
        """Close what is overdue, and tell the operator what was refused, a line a minute."""
        told, every = time.monotonic(), min(1.0, self._gate.head / 4, self._gate.idle / 4)
        while True:
            await asyncio.sleep(every)
            now = time.monotonic()
            for visit in [visit for visit in self._visits if visit.overdue(self._gate, now)]:
                address = party(visit.client[0]) if visit.client else ""
                self._front.refusals[address, "a connection that stood still"] += 1
                visit.transport.abort()
            if now - told > 60 and self._front.refusals:
                told = now
                self._say(summary(self._front.refusals))
                self._front.refusals.clear()


def summary(refusals: Mapping[tuple[str, str], int]) -> str:
    """What was refused, the most frequent first, in a line."""
    most = sorted(refusals.items(), key=lambda entry: -entry[1])
    words = [f"{why}{f' ({address})' if address else ''}: {count}" for (address, why), count in most[:5]]
    rest = sum(count for _, count in most[5:])
    return "the gate refused: " + ", ".join([*words, *([f"others: {rest}"] if rest else [])])


def _bound(where: str, host: str, port: int) -> list[socket.socket]:
    """Sockets bound to all addresses that a host name stands for; they do not listen yet."""
    found: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            one = socket.socket(family, kind, protocol)
            found.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind(address)
    except OSError as reason:
        for one in found:
            one.close()
        raise _cannot_listen(where, reason) from reason
    return found


def _cannot_listen(where: str, reason: OSError) -> CoterieError:
    return CoterieError(f"cannot listen on {where}: {(reason.strerror or str(reason)).lower()}.")
