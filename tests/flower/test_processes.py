"""Flower's real processes on loopback, with TLS and node keys; the quick tests start none of Flower's."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from local import free_port, wait

pytest.importorskip("flwr")

from coterie.errors import CoterieError
from coterie.flower import keys, processes
from coterie.flower.keys import ClientKeys, ServerKeys
from coterie.flower.processes import Address, Process, SuperLink, operate, probe, supervise

APPS = '''
import os, time
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server = ServerApp()
client = ClientApp()


@server.main()
def main(grid, context):
    """Ask every node for its name until `wanted` have answered in each of `rounds` rounds; a file tells how many."""
    folder = Path(context.run_config["folder"])
    (folder / "pid").write_text(str(os.getpid()))
    done = folder / "done"
    while (len(done.read_text().split()) if done.exists() else 0) < context.run_config["rounds"]:
        ids = list(grid.get_node_ids())
        if len(ids) < context.run_config["wanted"]:
            time.sleep(0.2)
            continue
        asked = [Message(RecordDict({"c": ConfigRecord({})}), dst_node_id=i, message_type="query") for i in ids]
        replies = [m for m in grid.send_and_receive(asked, timeout=30) if not m.has_error()]
        if len(replies) < context.run_config["wanted"]:
            continue
        seen = {str(m.metadata.src_node_id): str(m.content["c"]["name"]) for m in replies}
        (folder / "seen").write_text("\\n".join(f"{k} {v}" for k, v in seen.items()))
        with done.open("a") as file:
            file.write("round\\n")
    print("the server app says goodbye", flush=True)


@client.query()
def query(message, context):
    return Message(RecordDict({"c": ConfigRecord({"name": context.node_config["name"]})}), reply_to=message)
'''


def beside(modules):
    """The environment of processes that find these modules and the package under test."""
    root = Path(__file__).resolve().parents[2]
    return {"PYTHONPATH": os.pathsep.join((str(root), str(modules))), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "keys"
    keys.make(folder, ["localhost"], ["north", "south"])
    return folder


# -- without Flower ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("hub.org:8000", "hub.org", 8000), ("10.0.0.3:1", "10.0.0.3", 1), ("[::1]:80", "::1", 80)],
)
def test_addresses(text, host, port):
    found = Address.of(text)
    assert (found.host, found.port) == (host, port)
    assert str(found) == text


@pytest.mark.parametrize("text", ["hub.org", "hub.org:", ":8000", "hub.org:x", "hub.org:0", "x:70000", "http://x:80"])
def test_bad_addresses(text):
    with pytest.raises(CoterieError, match="expected HOST:PORT"):
        Address.of(text)


def test_what_listens_everywhere_is_reached_by_loopback():
    assert str(Address.of("0.0.0.0:8000").near) == "127.0.0.1:8000"
    assert str(Address.of("10.0.0.3:8000").near) == "10.0.0.3:8000"


@pytest.mark.parametrize(("text", "near"), [
    ("127.0.0.1:1", True), ("127.8.8.8:1", True), ("[::1]:1", True), ("localhost:1", True), ("0.0.0.0:1", False),
    ("[::]:1", False), ("10.0.0.3:1", False), ("localhost.example.org:1", False),
])
def test_loopback_is_what_nobody_else_reaches(text, near, tmp_path):
    assert Address.of(text).loopback is near
    if not near:
        with pytest.raises(CoterieError, match="a site connects to loopback alone"):
            supervise(None, Address.of(text), tmp_path, say=print)
        with pytest.raises(CoterieError, match="a server listens on loopback alone"):
            SuperLink(None, Address.of(text), tmp_path, say=print)


def test_a_secret_is_for_its_owner_and_new_each_time(tmp_path):
    found = [processes._fresh_secret(tmp_path / "flwr") for _ in range(2)]
    assert found[0] != found[1] == (tmp_path / "flwr" / "secret").read_bytes()
    assert (tmp_path / "flwr" / "secret").stat().st_mode & 0o777 == 0o600


def test_the_environment_is_quiet_and_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    found = processes.environment(tmp_path, {"MINE": "1"})
    assert found["FLWR_TELEMETRY_ENABLED"] == "0"  # whatever the operator's shell says
    assert found["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert found["FLWR_HOME"] == str(tmp_path)
    assert found["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] == "0.1"
    assert found["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert found["MINE"] == "1"
    assert "HTTPS_PROXY" not in found


def test_a_tool_that_is_absent_names_the_extra():
    with pytest.raises(CoterieError, match=r"pip install 'coterie\[flower\]'"):
        processes.tool("flower-there-is-no-such-thing")


def test_a_nodes_settings_are_toml(tmp_path):
    """Flower reads them as TOML, a space between two."""
    import tomllib

    values = {"path": 'a "b" \\ c\nü', "n": 3, "x": 1e-3, "yes": True}
    here = Address("127.0.0.1", 1)
    command = processes._node_command(None, here, here, tmp_path / "secret", {"path": values["path"]})
    assert tomllib.loads(command[command.index("--node-config") + 1]) == {"path": values["path"]}
    assert tomllib.loads("\n".join(f"{key} = {processes._value(one)}" for key, one in values.items())) == values


def test_a_process_is_ended_and_its_lines_are_read_once(tmp_path):
    program = "import sys, time; print('\\x1b[92mone\\x1b[0m'); print('two'); sys.stdout.flush(); time.sleep(60)"
    (tmp_path / "log").write_text("old\n")
    process = Process([sys.executable, "-c", program], tmp_path / "log", os.environ)
    wait(lambda: "two" in process.said(), 20, "no output")
    assert process.lines() == ["one", "two"]  # without the colour, and without what was there before
    assert process.lines() == []
    assert process.alive
    process.stop()
    assert process.code == -signal.SIGTERM


def test_a_process_that_ignores_sigterm_is_killed(tmp_path):
    program = "import signal, time; signal.signal(15, signal.SIG_IGN); print('x', flush=True); time.sleep(60)"
    process = Process([sys.executable, "-c", program], tmp_path / "log", os.environ)
    wait(lambda: "x" in process.said(), 20, "no output")
    process.stop(patience=0.2)
    assert process.code == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
def test_a_killed_supervisor_leaves_nothing_behind(tmp_path):
    program = (
        "import os, sys, time; from pathlib import Path; from coterie.flower.processes import Process\n"
        f"p = Process(['sleep', '60'], Path({str(tmp_path / 'log')!r}), os.environ); print(p.pid, flush=True)\n"
        "time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()

    def gone():
        stat = Path(f"/proc/{child}/stat")  # a zombie waits for its new parent only
        return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"

    wait(gone, 10, "the child is still there")


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found by /proc")
def test_what_outlived_its_node_is_ended(tmp_path):
    """Apps are known by the Flower folder in their environment; others stay."""
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    mine = Process(command, tmp_path / "mine", processes.environment(tmp_path / "flwr"))
    other = Process(command, tmp_path / "other", processes.environment(tmp_path / "flwr2"))
    wait(lambda: b"FLWR_HOME" in Path(f"/proc/{mine.pid}/environ").read_bytes(), 10, "not started")
    assert processes.sweep(tmp_path / "flwr") == 1
    wait(lambda: not mine.alive, 10, "it lives")
    assert other.alive
    other.stop()


def test_sigterm_is_a_keyboard_interrupt():
    with pytest.raises(KeyboardInterrupt), processes.stoppable():  # noqa: PT012 (the signal comes when it comes)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_site_whose_server_is_away_waits_and_gives_up_when_asked_to(made, tmp_path):
    lines = []
    with pytest.raises(CoterieError, match=r"north gave up after 1 s: no server answers at 127\.0\.0\.1"):
        supervise(ClientKeys.read(made / "clients/north"), Address("127.0.0.1", free_port()), tmp_path, patience=1,
                  say=lines.append)
    assert len(lines) == 1  # the same reason is told once, however often it was tried
    assert lines[0].endswith("trying again")


def test_a_certificate_for_another_host_is_refused_before_the_start(made, tmp_path):
    with pytest.raises(CoterieError, match=r"not for 10\.9\.9\.9"):
        SuperLink(ServerKeys.read(made / "server"), Address("10.9.9.9", 8000), tmp_path)


def test_a_port_in_use_is_a_sentence(made, tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        link = SuperLink(ServerKeys.read(made / "server"), Address("127.0.0.1", other.getsockname()[1]), tmp_path)
        with pytest.raises(CoterieError, match=r"cannot listen on .*: address already in use"):
            link.start()


# -- with Flower's processes ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def federation(made, tmp_path_factory):
    """A SuperLink that knows north only."""
    place = tmp_path_factory.mktemp("federation")
    (place / "modules").mkdir()
    (place / "modules" / "tiny_apps.py").write_text(APPS)
    known = ServerKeys.read(made / "server")
    known = ServerKeys(known.ca, known.certificate, known.key, {"north": known.nodes["north"]})
    variables = beside(place / "modules")
    with SuperLink(known, Address("127.0.0.1", free_port()), place / "link", variables) as link:
        link.start()
        link.admit()
        yield link, variables


class Site:
    """A supervised SuperNode in a thread, its lines kept."""

    def __init__(self, place, home, address, variables, **config):
        self.lines, self.stop, self.error = [], threading.Event(), None
        self.home = home
        self.arguments = (ClientKeys.read(place), address, home, config, variables, self.stop)
        self.thread = threading.Thread(target=self.run)

    def run(self):
        try:
            supervise(*self.arguments, say=self.lines.append, longest=3, app="tiny_apps:client")
        except CoterieError as error:
            self.error = error

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join(30)


@pytest.mark.flower
def test_an_unknown_key_is_refused(federation, made, tmp_path):
    """south has a good pair and the right CA, but its key was not registered."""
    link, variables = federation
    lines = []
    with pytest.raises(CoterieError, match="the server refuses the key: it is not registered there"):
        supervise(ClientKeys.read(made / "clients/south"), link.address, tmp_path, {}, variables, patience=1,
                  say=lines.append)
    assert any("refuses the key" in line for line in lines)
    assert "Exit Code: 305" in (tmp_path / "supernode.log").read_text()


@pytest.mark.flower
def test_a_wrong_ca_is_refused_by_the_site_and_by_flower_itself(federation, tmp_path):
    """The site has keys of another federation: it must not talk to this server at all."""
    link, variables = federation
    keys.make(tmp_path / "others", ["localhost"], ["north"])
    other = ClientKeys.read(tmp_path / "others/clients/north")
    with pytest.raises(CoterieError, match="is not trusted"):
        supervise(other, link.address, tmp_path / "home", {}, variables)
    assert not (tmp_path / "home/supernode.log").exists()  # no SuperNode was started
    processes._fresh_secret(tmp_path / "flwr")
    inner = Address("127.0.0.1", free_port())
    node = Process(processes._node_command(other, link.address, inner, tmp_path / "flwr" / processes.SECRET, {}),
                   tmp_path / "log", processes.environment(tmp_path / "flwr", variables))
    wait(lambda: not node.alive, 60, "the SuperNode did not end")
    assert "CERTIFICATE_VERIFY_FAILED" in node.said()
    assert node.code == 1


@pytest.mark.flower
def test_keys_are_registered_once_and_runs_need_the_ca(federation, made, tmp_path):
    link, _ = federation
    assert list(json.loads((link.home / "nodes.json").read_text()).values()) == ["north"]
    with pytest.raises(CoterieError, match="Public key already in use"):
        link.admit()
    assert probe(link.address, made / "clients/south/ca.crt") is None


@pytest.mark.flower
def test_a_run_survives_its_superlink_and_its_server_app(made, tmp_path):
    """Two kills, each after a round: the run still ends with its four rounds, and names belong to their keys."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "tiny_apps.py").write_text(APPS)
    variables = beside(tmp_path / "modules")
    address = Address("127.0.0.1", free_port())
    folder = tmp_path / "a folder"
    folder.mkdir()
    said = []
    link = SuperLink(ServerKeys.read(made / "server"), address, tmp_path / "link", variables, said.append)
    config = {"rounds": 4, "wanted": 2, "folder": str(folder)}
    failed = []

    def run():
        try:
            operate(link, config, "tiny_apps:server", tries=5)
        except CoterieError as error:
            failed.append(error)

    def rounds():
        return len((folder / "done").read_text().split()) if (folder / "done").exists() else 0

    north, south = (Site(made / "clients" / name, tmp_path / name, address, variables, name=f"site {name}")
                    for name in ("north", "south"))
    server = threading.Thread(target=run)
    with link, north, south:
        server.start()
        wait(lambda: rounds() >= 1 or failed, 120, said)
        assert failed == []
        os.kill(link.pid, signal.SIGKILL)
        wait(lambda: rounds() >= 2 or failed, 180, said)
        assert failed == []
        os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
        server.join(240)
        assert not server.is_alive(), said
    assert failed == []
    assert rounds() == 4
    assert "the SuperLink ended; starting again" in said
    assert "the server app ended (finished:failed); starting again" in said
    assert any("the server app says goodbye" in line for line in said)
    assert any("forgotten this node" in line for line in [*north.lines, *south.lines])
    assert north.lines[-1] == "north has left"
    seen = dict(line.split(" ", 1) for line in (folder / "seen").read_text().splitlines())
    known = json.loads((tmp_path / "link/nodes.json").read_text())
    assert {node: f"site {name}" for node, name in known.items()} == seen  # the key, not the node, says who it is


@pytest.mark.flower
def test_a_killed_node_comes_back_after_the_refusal_window(federation, made, tmp_path):
    link, variables = federation
    with Site(made / "clients/north", tmp_path, link.address, variables, name="x") as north:
        wait(lambda: "north is connected" in " ".join(north.lines), 60, north.lines)
        found = subprocess.run(["pgrep", "-f", f"flower-supernode --superlink {link.address}"], capture_output=True,
                               text=True).stdout.split()
        assert len(found) == 1
        os.kill(int(found[0]), signal.SIGKILL)
        wait(lambda: " ".join(north.lines).count("north is connected") == 2, 120, north.lines)
    assert any("the server refuses the key" in line for line in north.lines)
    assert north.lines[-1] == "north has left"
