"""Flower's commands against a server of ours, over real processes: with ca.crt and the port, from another account of
the server's machine, with a stolen key of a site. What they would do to a plain SuperLink is shown beside it."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from local import free_port, wait

pytest.importorskip("flwr")

import httpx
from cryptography.hazmat.primitives import serialization
from flwr.cli.build import build_fab_from_files
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListNodesResponse,
    ListRunsRequest,
    ListRunsResponse,
    StartRunRequest,
    StartRunResponse,
)
from flwr.proto.fab_pb2 import Fab
from flwr.proto.fleet_pb2 import ActivateNodeRequest, ActivateNodeResponse, PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import Message, Metadata, ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.proto.recorddict_pb2 import RecordDict
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES

from coterie.flower import keys
from coterie.flower.calls import OPENING, Control, opening
from coterie.flower.keys import ClientKeys, ServerKeys
from coterie.flower.link import Locked
from coterie.flower.processes import Address, Process, SuperLink, environment, probe, supervise, tool

ROOT = Path(__file__).resolve().parents[2]
APPS = '''
import time
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server = ServerApp()
client = ClientApp()


@server.main()
def main(grid, context):
    """Ask whoever is there until the file `enough` appears; a line in `rounds` for each answer."""
    folder = Path(context.run_config["folder"])
    while not (folder / "enough").exists():
        asked = [Message(RecordDict({"c": ConfigRecord({})}), dst_node_id=i, message_type="query")
                 for i in grid.get_node_ids()]
        for reply in grid.send_and_receive(asked, timeout=20) if asked else ():
            with (folder / "rounds").open("a") as file:
                file.write(("error" if reply.has_error() else "answer") + "\\n")
        time.sleep(0.2)


@client.query()
def query(message, context):
    return Message(RecordDict({"c": ConfigRecord({})}), reply_to=message)
'''
CANARY = "import os\nopen(os.environ.get('CANARY', os.devnull), 'a').write(__name__ + '\\n')\n"
BUNDLE = {
    "pyproject.toml": '''[project]
name = "mine"
version = "1.0.0"
description = "x"
license = "Apache-2.0"
[tool.flwr.app]
publisher = "x"
[tool.flwr.app.components]
serverapp = "mine.apps:server"
clientapp = "mine.apps:client"
[tool.flwr.app.config]
folder = ""
''',
    "mine/__init__.py": CANARY,
    "mine/apps.py": CANARY + APPS,
}


def test_what_is_locked_opens_with_its_secret_alone():
    """Apps have tokens of their own; everything else needs the header, and all of it."""
    import asyncio

    passed, answered = [], []

    async def inner(scope, receive, send):
        passed.append(scope["path"])

    async def send(message):
        answered.append(message.get("status"))

    locked = Locked(inner, b"secret")
    good = (OPENING.encode(), opening(b"secret").encode())
    scopes = [("/v1/control/list-runs", good), ("/v1/control/list-runs", (b"x", b"y")), ("/docs", (b"x", b"y")),
              ("/v1/fleet/pull-messages", (good[0], good[1][:-1])), ("/v1/fleet/pull-messages", (good[0], b"secret")),
              ("/v1/runtime/pull-object", (b"x", b"y")), ("/v1/runtime", (b"x", b"y"))]
    for path, header in scopes:
        asyncio.run(locked({"type": "http", "path": path, "headers": [header]}, None, send))
    assert passed == ["/v1/control/list-runs", "/v1/runtime/pull-object"]
    assert [one for one in answered if one] == [404] * 5


# -- with Flower's processes ------------------------------------------------------------------------------------------


def lines(path):
    return path.read_text().split() if path.exists() else []


class Attacker:
    """Flower's own commands, with the CA's certificate and an address."""

    def __init__(self, place, address, ca):
        self.place, self.address, self.ca = place, address, ca
        (place / "flwr").mkdir(parents=True)
        secure = f'root-certificates = "{ca}"' if ca is not None else "insecure = true"
        (place / "flwr" / "config.toml").write_text(
            f'[superlink]\ndefault = "x"\n[superlink.x]\naddress = "{address}"\n{secure}\n')
        for name, text in BUNDLE.items():
            (place / "app" / name).parent.mkdir(parents=True, exist_ok=True)
            (place / "app" / name).write_text(text)

    def flwr(self, *words):
        """Whether a command succeeded, and all it said."""
        done = subprocess.run([tool("flwr"), *words, "--format", "json"], env=environment(self.place / "flwr"),
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
        try:
            success = bool(json.loads(done.stdout[done.stdout.index("{"):]).get("success"))
        except ValueError:
            success = False
        return success, done.stdout + done.stderr

    def commands(self, run="1"):
        """Everything that Why 1 names: list, register, submit, stop."""
        keys.make(self.place / "keys", ["localhost"], ["mallory"])
        return {
            "list runs": ("list", "x"),
            "list nodes": ("supernode", "list", "x"),
            "register": ("supernode", "register", str(self.place / "keys/server/nodes/mallory.pub"), "x"),
            "submit": ("run", str(self.place / "app"), "x"),
            "stop": ("stop", str(run), "x"),
        }


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """A server whose run asks its sites again and again, and one site, north; south's key is admitted, and stolen."""
    place = tmp_path_factory.mktemp("federation")
    keys.make(place / "keys", ["localhost"], ["north", "south"])
    (place / "modules").mkdir()
    (place / "modules" / "endless.py").write_text(APPS)
    canary = place / "canary"
    paths = os.pathsep.join((str(ROOT), str(place / "modules")))
    variables = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CANARY": str(canary)}
    address, said, stop = Address("127.0.0.1", free_port()), [], threading.Event()
    (place / "run").mkdir()
    with SuperLink(ServerKeys.read(place / "keys/server"), address, place / "link", variables, said.append) as link:
        link.start()
        link.admit()
        server = threading.Thread(target=link.run, args=({"folder": str(place / "run")}, "endless:server"))
        own = ClientKeys.read(place / "keys/clients/north")
        north = threading.Thread(
            target=supervise, args=(own, address, place / "north", {"name": "north"}, variables, stop),
            kwargs={"say": said.append, "app": "endless:client"})
        server.start()
        north.start()
        wait(lambda: "answer" in lines(place / "run" / "rounds"), 120, said)
        yield link, place
        (place / "run" / "enough").touch()
        stop.set()
        server.join(60)
        north.join(60)
    assert not canary.exists()


def unharmed(link, place):
    """Nothing was listed, registered, submitted, stopped or executed: one run, which goes on, and two nodes."""
    with Control(str(link._inner), link.keys.ca, link._secret) as control:
        runs = control.call("control/list-runs", ListRunsRequest(), ListRunsResponse).run_dict
        nodes = control.call("control/list-nodes", ListNodesRequest(), ListNodesResponse).nodes_info
    assert [run.status.status for run in runs.values()] == ["running"]
    assert {str(node.node_id) for node in nodes} == json.loads((link.home / "nodes.json").read_text()).keys()
    assert not (place / "canary").exists()
    before = len(lines(place / "run" / "rounds"))
    wait(lambda: lines(place / "run" / "rounds")[before:].count("answer") >= 1, 60, "the run does not go on")
    assert "error" not in lines(place / "run" / "rounds")
    return next(iter(runs))


@pytest.mark.flower
def test_commands_are_refused_to_whoever_has_the_ca_and_the_port(federation, tmp_path):
    """Flower's own `flwr`, at the address that the world reaches. The answers hold none of the SuperLink's words."""
    link, place = federation
    run = unharmed(link, place)
    attacker = Attacker(tmp_path, link.address, link.keys.ca)
    for what, words in attacker.commands(run).items():
        success, told = attacker.flwr(*words)
        assert not success, (what, told)
        assert what == "stop" or str(run) not in told  # the run's id, which nobody told the attacker
    unharmed(link, place)


@pytest.mark.flower
def test_commands_are_refused_to_other_users_of_the_servers_machine(federation, tmp_path):
    """Loopback is everybody's: they find the inner port, and there nothing answers without the secret's header."""
    link, place = federation
    run = unharmed(link, place)
    attacker = Attacker(tmp_path, link._inner, link.keys.ca)
    for what, words in attacker.commands(run).items():
        success, told = attacker.flwr(*words)
        assert not success, (what, told)
    assert (link.home / "flwr" / "secret").stat().st_mode & 0o777 == 0o600
    unharmed(link, place)


@pytest.mark.flower
@pytest.mark.parametrize("inner", [False, True], ids=["the front", "the inner port"])
def test_every_call_that_flower_knows_is_refused_without_a_key(federation, inner):
    """All of Flower's routes, with an empty and a long body: 404 for what is not of SuperNodes, 401 for what is; at the
    inner port the apps' own calls ask for a token instead."""
    link, place = federation
    base = f"https://{link._inner if inner else link.address}"
    with httpx.Client(verify=str(link.keys.ca), trust_env=False) as client:
        for _, path in [*PROTOBUF_REQUEST_TYPES, ("GET", "/docs"), ("GET", "/openapi.json"), ("GET", "/health"),
                        ("POST", "/v1/runtime/responses")]:
            for body in (b"", b"\x0a\x05hello" * 50):
                answer = client.post(base + path, content=body, headers={"content-type": "application/protobuf"})
                apps = inner and path.startswith("/v1/runtime/")
                fleet = not inner and path.startswith("/v1/fleet/") and "register" not in path
                expected = {401} if fleet else {400, 401, 403, 404, 422} if apps else {404}
                assert answer.status_code in expected, (path, answer.status_code, answer.text)
                if not apps:
                    assert answer.content == b"", path
    unharmed(link, place)


class Stolen:
    """Calls with the key of a site."""

    def __init__(self, folder, address, ca, headers=None):
        self.key = serialization.load_ssh_private_key((folder / "node.key").read_bytes(), None)
        self.public = public_key_to_bytes(self.key.public_key())
        self.headers = headers or {}
        self.http = httpx.Client(base_url=f"https://{address}", verify=str(ca), trust_env=False)

    def call(self, path, request):
        stamp = datetime.now(UTC).isoformat()
        return self.http.post(path, content=request.SerializeToString(), headers={
            "content-type": "application/protobuf", "flwr-public-key": base64.b64encode(self.public).decode(),
            "flwr-timestamp": stamp, **self.headers,
            "flwr-signature": base64.b64encode(sign_message(self.key, stamp.encode())).decode()})


def forged(run, node, victim):
    """A message in the server's name to another node."""
    says = Metadata(run_id=run, message_id="c" * 64, src_node_id=1, dst_node_id=victim, ttl=60, message_type="query",
                    created_at=time.time())
    return PushMessagesRequest(
        node=Node(node_id=node), messages_list=[Message(metadata=says, content=RecordDict())],
        message_object_trees=[ObjectTree(object_id="c" * 64)])


@pytest.mark.flower
def test_a_stolen_key_takes_part_as_its_site_and_no_more(federation):
    """south's key opens the fleet's calls as south: no command, no call as north, no message in the server's name.

    The last one is Flower's own gap: its SuperLink, asked directly, takes the message."""
    link, place = federation
    run = unharmed(link, place)
    node = {name: int(one) for one, name in json.loads((link.home / "nodes.json").read_text()).items()}
    thief = Stolen(place / "keys/clients/south", link.address, link.keys.ca)
    joined = thief.call("/v1/fleet/activate-node", ActivateNodeRequest(public_key=thief.public, heartbeat_interval=30))
    assert ActivateNodeResponse.FromString(joined.content).node_id == node["south"]
    for (_, path), kind in PROTOBUF_REQUEST_TYPES.items():
        if not path.startswith("/v1/fleet/") or path.endswith("register-node"):
            assert thief.call(path, kind()).status_code == 404, path
        elif "activate" not in path:
            request = kind()
            if hasattr(request, "node"):
                request.node.node_id = node["north"]
            else:
                request.node_id = node["north"]
            assert thief.call(path, request).status_code in (400, 401, 403), path
    other = public_key_to_bytes(
        serialization.load_ssh_public_key((place / "keys/server/nodes/north.pub").read_bytes()))
    taken = thief.call("/v1/fleet/activate-node", ActivateNodeRequest(public_key=other, heartbeat_interval=30))
    assert taken.status_code == 401
    order = forged(run, node["south"], node["south"])  # to itself, so that the test harms nobody
    assert thief.call("/v1/fleet/push-messages", order).status_code == 403
    inside = Stolen(place / "keys/clients/south", link._inner, link.keys.ca, {OPENING: opening(link._secret)})
    accepted = inside.call("/v1/fleet/push-messages", order)
    assert list(PushMessagesResponse.FromString(accepted.content).objects_to_push) == ["c" * 64]
    unharmed(link, place)


@pytest.mark.flower
def test_even_a_submitted_run_is_not_executed(tmp_path):
    """Somebody got hold of the secret and submitted a run: its task is given back undone, ours is done.

    A plain SuperLink obeys the same commands and executes the same bundle: the attack is a real one."""
    keys.make(tmp_path / "keys", ["localhost"], ["north"])
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "endless.py").write_text(APPS)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "enough").touch()
    paths, canary = os.pathsep.join((str(ROOT), str(tmp_path / "modules"))), tmp_path / "canary"
    variables = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CANARY": str(canary)}
    said = []
    link = SuperLink(None, Address("127.0.0.1", free_port()), tmp_path / "link", variables, said.append)
    with link:
        link.start()
        with Control(str(link._inner), None, link._secret) as control:
            bundle, _ = build_fab_from_files({name: text.encode() for name, text in BUNDLE.items()})
            asked = StartRunRequest(fab=Fab(content=bundle))
            theirs = control.call("control/start-run", asked, StartRunResponse).run_id
            assert link.run({"folder": str(tmp_path / "run")}, "endless:server") == "finished:completed"
            assert control.status(theirs) == "finished:failed"
    assert f"warning: somebody else submitted run {theirs}; it was refused" in said
    assert not canary.exists()
    address = Address("127.0.0.1", free_port())
    plain = Process([tool("flower-superlink"), "--insecure", "--host", address.host, "--port", str(address.port),
                     "--disable-runtime-dependency-installation"], tmp_path / "plain.log",
                    environment(tmp_path / "plain", variables))
    try:
        wait(lambda: probe(address, None) is None, 60, "no SuperLink")
        attacker = Attacker(tmp_path / "attacker", address, None)
        for what, words in attacker.commands().items():
            success, told = attacker.flwr(*words)
            assert success or what == "stop", (what, told)  # there is no run 1
        wait(canary.exists, 60, "the attack is none")
    finally:
        plain.stop()
