"""Flower's processes, started and supervised for an operator.

On the server there is a SuperLink, which carries the messages, and inside it the server app of one run; on every site a
SuperNode, which starts a client app for each message. What was measured with flwr 1.41, and is relied on here:

- A SuperLink without a database file forgets registered keys and runs when it ends. The SuperNodes are then answered
  401 and end with exit status 0. With `--database` keys, node ids and runs survive, and the SuperNodes come back by
  themselves, but the server app does not: its run is marked as failed, or stays "running" without a process. A key
  that was once unregistered can never be registered again there. So no database is used: after each start all keys
  are registered anew (`SuperLink.admit`) and the run is submitted anew (`operate`); the server app goes on from its own
  checkpoint, and the supervised sites come back. Node ids are new after that, names are not.
- A killed server app: its run is marked as failed ("no heartbeat") within about a minute.
- A SuperNode ended by SIGTERM may come back at once. After SIGKILL its key is refused for up to 60 s: it ends with exit
  status 1 and "Exit Code: 305" in its log. An unknown key reads the same. `supervise` tries again until it is let in.
- A SuperNode whose CA did not sign the server's certificate ends likewise; `supervise` finds out before it starts one.
- `flwr ... --format json` exits with 0 on failure too; the answer's "success" counts.
- The tools find each other by PATH, and SuperLink and SuperNode end their helper processes when they are killed. The
  app of a message that was being answered outlives them, waiting for ever; `sweep` ends it.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from coterie.errors import CoterieError
from coterie.files import write_json
from coterie.flower import missing
from coterie.flower.keys import WARN_DAYS, ClientKeys, ServerKeys, certificate, names_of

CONNECTION = "coterie"
NODES = "nodes.json"
SERVER_APP = "coterie.flower.server:app"
CLIENT_APP = "coterie.flower.client:app"

Say = Callable[[str], None]
Setting = str | int | float | bool

_LET_IN = "SuperNode ID: "  # what a SuperNode writes once the server has accepted it
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_WILD = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def say(line: str) -> None:
    """One line with the time, on standard error."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Address:
    """Where a SuperLink listens."""

    host: str
    port: int

    @classmethod
    def of(cls, text: str) -> Address:
        """From `HOST:PORT`; an IPv6 address stands in brackets."""
        host, colon, port = text.rpartition(":")
        if not colon or not host or "/" in host or not port.isdigit() or not 0 < int(port) < 65536:
            raise CoterieError(f"'{text}' is no address; expected HOST:PORT, e.g. hub.example.org:8000.")
        return cls(host.strip("[]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def near(self) -> Address:
        """How a process on the same machine reaches it."""
        return Address(_WILD.get(self.host, self.host), self.port)


# -- one process ------------------------------------------------------------------------------------------------------


def tool(name: str) -> str:
    """The path of one of Flower's commands, beside this Python or on PATH."""
    found = shutil.which(name, path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))
    if found is None:
        raise missing("flwr")
    return found


def environment(home: Path, variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment, with telemetry and update check off, short polling and a Flower folder of its own.

    Proxy settings are left out: Flower would send even the calls inside a machine there.
    """
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    fixed = {"FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "PATH": path}
    inherited = {name: value for name, value in os.environ.items() if name.lower() not in _PROXIES}
    return {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1", **inherited, **fixed, **(variables or {})}


class Process:
    """A command whose output goes to a log file. It gets no ctrl-C of the terminal: whoever started it ends it.

    On Linux it is also sent SIGTERM when the thread that started it ends, so that a killed supervisor leaves nothing.
    """

    def __init__(self, command: list[str], log: Path, variables: Mapping[str, str]) -> None:
        self.log = log
        self._started_at = self._read = log.stat().st_size if log.exists() else 0
        with open(log, "ab") as file:
            self._process = subprocess.Popen(
                command, env=dict(variables), stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True, preexec_fn=_end_with_parent,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def code(self) -> int | None:
        """The exit status, None while it runs."""
        return self._process.poll()

    def said(self) -> str:
        """All it has written."""
        return self._bytes(self._started_at).decode(errors="replace")

    def lines(self) -> list[str]:
        """The whole lines it has written since the last call, without colours."""
        fresh = self._bytes(self._read)
        whole = fresh[: fresh.rfind(b"\n") + 1]
        self._read += len(whole)
        return _COLOUR.sub("", whole.decode(errors="replace")).splitlines()

    def stop(self, patience: float = 10) -> None:
        """SIGTERM, and SIGKILL when that does not help in time."""
        if self.alive:
            self._process.terminate()
            try:
                self._process.wait(patience)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()

    def _bytes(self, start: int) -> bytes:
        with open(self.log, "rb") as file:
            file.seek(start)
            return file.read()


def sweep(flower: Path) -> int:
    """End what still runs with this Flower folder (Linux only): apps that outlived the process they belonged to."""
    mine, ended = f"FLWR_HOME={flower}".encode(), 0
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mine in path.read_bytes().split(b"\0") and int(path.parent.name) != os.getpid():
                os.kill(int(path.parent.name), signal.SIGKILL)
                ended += 1
    return ended


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def _end_with_parent() -> None:
    if _LIBC is not None:
        _LIBC.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM, which service managers send, becomes what ctrl-C is: a KeyboardInterrupt, and a clean end."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def probe(address: Address, ca: Path | None, timeout: float = 5) -> str | None:
    """None when a server with a certificate of the CA (any server, without one) answers there; otherwise why not.

    A certificate that is not trusted is a CoterieError: waiting does not cure it.
    """
    try:
        with socket.create_connection((address.host, address.port), timeout) as plain:
            if ca is not None:
                with ssl.create_default_context(cafile=ca).wrap_socket(plain, server_hostname=address.host):
                    pass
    except ssl.SSLCertVerificationError as reason:
        raise CoterieError(
            f"the server at {address} is not trusted: {reason.verify_message}; compare its certificate with {ca}."
        ) from reason
    except ssl.SSLError as reason:
        return f"what answers at {address} does not speak TLS properly ({reason.reason or reason})"
    except OSError as reason:
        return f"no server answers at {address} ({(reason.strerror or str(reason)).lower()})"
    return None


# -- the server's side ------------------------------------------------------------------------------------------------


class SuperLink:
    """A SuperLink and what is asked of it. With keys: TLS, and only nodes whose keys are registered. Use `with`.

    `home` holds its log, `nodes.json` (node id -> client name, as registered), and a folder for Flower's own files.
    """

    def __init__(
        self, keys: ServerKeys | None, address: Address, home: Path, variables: Mapping[str, str] | None = None,
        say: Say = say,
    ) -> None:
        self.keys, self.address, self.home, self.say = keys, address, home, say
        self._variables = environment(home / "flwr", variables)
        self._process: Process | None = None
        self._checked()

    def _checked(self) -> None:
        if self.keys is None:
            self.say("warning: without keys nothing is encrypted and any node takes part; for tests on loopback only")
            return
        names = names_of(certificate(self.keys.certificate))
        if self.address.near.host not in names:
            raise CoterieError(
                f"the server's certificate is for {', '.join(names)}, not for {self.address.near.host}; "
                f"`coterie keys DIR --renew server --server {self.address.near.host},...` makes one that is."
            )
        if self.keys.days_left < WARN_DAYS:
            self.say(f"warning: the server's certificate ends in {self.keys.days_left} days; `coterie keys` renews it")

    def __enter__(self) -> SuperLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.alive

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self, timeout: float = 60) -> None:
        """Start it and wait until it answers."""
        command = [tool("flower-superlink"), "--host", self.address.host, "--port", str(self.address.port),
                   "--disable-runtime-dependency-installation"]
        connection = {"address": str(self.address.near)}
        if self.keys is None:
            command.append("--insecure")
            settings = f"{_toml(connection)}insecure = true\n"
        else:
            command += ["--ssl-ca-certfile", str(self.keys.ca), "--ssl-certfile", str(self.keys.certificate),
                        "--ssl-keyfile", str(self.keys.key), "--enable-supernode-auth"]
            settings = _toml({**connection, "root-certificates": str(self.keys.ca.resolve())})
        _free(self.address)
        flower = self.home / "flwr"
        flower.mkdir(parents=True, exist_ok=True)
        (flower / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n{settings}'
        )
        self._process = Process(command, self.home / "superlink.log", self._variables)
        end = time.monotonic() + timeout
        while (reason := probe(self.address.near, self.keys.ca if self.keys is not None else None)) is not None:
            if not self.alive or time.monotonic() > end:
                self.stop()
                raise CoterieError(f"the SuperLink did not start ({reason}); see {self.home / 'superlink.log'}.")
            time.sleep(0.2)
        self.say(f"the SuperLink listens on {self.address}" + ("" if self.keys is None else ", with TLS and node keys"))

    def stop(self) -> None:
        """End it and the server app in it."""
        if self._process is not None:
            self._process.stop()
            sweep(self.home / "flwr")

    def admit(self) -> dict[str, str]:
        """Register every public key of the server's folder; node id -> client name, also written to `nodes.json`."""
        known: dict[str, str] = {}
        if self.keys is not None:
            with ThreadPoolExecutor(4) as pool:
                answers = pool.map(lambda entry: self._register(*entry), self.keys.nodes.items())
                known = dict(zip(answers, self.keys.nodes))
            self.say(f"registered {len(known)} client keys: {', '.join(self.keys.nodes) or 'none'}")
        write_json(self.home / NODES, known)
        return known

    def _register(self, name: str, path: Path) -> str:
        return str(self.ask("supernode", "register", str(path), CONNECTION, "--name", name)["node-id"])

    def submit(
        self, config: Mapping[str, Setting], server_app: str = SERVER_APP, client_app: str = CLIENT_APP
    ) -> str:
        """Submit a run whose apps are found in installed packages; its id. The configuration goes to every node."""
        app = self.home / "app"
        app.mkdir(parents=True, exist_ok=True)
        (app / "pyproject.toml").write_text(
            _toml({"name": "coterie-run", "version": "1.0.0", "description": "a coterie run"}, "project")
            + 'license = "Apache-2.0"\n\n' + _toml({"publisher": "coterie"}, "tool.flwr.app")
            + "\n" + _toml({"serverapp": server_app, "clientapp": client_app}, "tool.flwr.app.components")
            + "\n" + _toml(config, "tool.flwr.app.config")
        )
        run = str(self.ask("run", str(app), CONNECTION)["run-id"])
        self.say(f"submitted run {run}")
        return run

    def status(self, run: str) -> str:
        """`pending`, `starting`, `running`, `finished:completed`, `finished:failed` or `finished:stopped`."""
        for found in self.ask("list", CONNECTION)["runs"]:
            if str(found["run-id"]) == run:
                return str(found["status"])
        return "unknown"

    def watch(self, run: str) -> str:
        """Pass on the server app's log until the run ends; its status, or `gone` when the SuperLink ended."""
        while self.alive:
            command = [tool("flwr"), "log", run, CONNECTION, "--stream"]
            stream = Process(command, self.home / "run.log", self._variables)
            try:
                while stream.alive and self.alive:
                    time.sleep(0.2)
                    self._pass_on(stream)
            finally:
                stream.stop()
            self._pass_on(stream)
            try:
                status = self.status(run) if self.alive else "gone"
            except CoterieError:
                continue
            if status.startswith("finished") or status in ("gone", "unknown"):
                return status
            time.sleep(2)
        return "gone"

    def _pass_on(self, stream: Process) -> None:
        for line in stream.lines():
            if line.strip():
                self.say(line.rstrip())

    def ask(self, *words: str) -> dict[str, Any]:
        """One `flwr` command, its answer as a dict; a refusal is a CoterieError with Flower's own words."""
        command = [tool("flwr"), *words, "--format", "json"]
        done = subprocess.run(command, env=self._variables, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              start_new_session=True)
        try:
            answer = json.loads(done.stdout[done.stdout.index("{"):])
        except ValueError:
            answer = {"error-message": done.stderr or done.stdout or f"exit status {done.returncode}"}
        if not answer.get("success"):
            words_of_it = " ".join(_COLOUR.sub("", str(answer.get("error-message", ""))).split())[-400:]
            raise CoterieError(f"`flwr {' '.join(words[:2])}` failed: {words_of_it}")
        return dict(answer)


def operate(
    link: SuperLink, config: Mapping[str, Setting], server_app: str = SERVER_APP, client_app: str = CLIENT_APP,
    tries: int = 3, quick: float = 120,
) -> None:
    """Run the server app to its end. When it or the SuperLink is killed, both are restored and the app resumes.

    Gives up after `tries` failures in a row that each came within `quick` seconds.
    """
    failures = 0
    while True:
        began = time.monotonic()
        if not link.alive:
            link.start()
            link.admit()
        status = link.watch(link.submit(config, server_app, client_app))
        if status == "finished:completed":
            link.say("the run is complete")
            return
        if status == "finished:stopped":
            raise CoterieError("the run was stopped by a Flower command.")
        failures = failures + 1 if time.monotonic() - began < quick else 1
        what = "the SuperLink ended" if status == "gone" else f"the server app ended ({status})"
        if failures >= tries:
            raise CoterieError(f"{what}, {failures} times in a row; see the logs in {link.home}.")
        link.say(f"{what}; starting again")
        time.sleep(1)


# -- a site's side ----------------------------------------------------------------------------------------------------


def supervise(
    keys: ClientKeys | None, address: Address, home: Path, config: Mapping[str, Setting] | None = None,
    variables: Mapping[str, str] | None = None, stop: threading.Event | None = None, patience: float | None = None,
    say: Say = say, longest: float = 10,
) -> None:
    """Keep a SuperNode running until `stop` is set or ctrl-C.

    A SuperNode that ends is started again after 1, 2, 4, ... at most `longest` seconds; being let in resets that. With
    `patience`, being out of the federation for so many seconds is a CoterieError. A server that the CA does not
    vouch for is one at once, unless the node has been in the federation before.
    """
    stop = stop if stop is not None else threading.Event()
    home.mkdir(parents=True, exist_ok=True)
    name = keys.name if keys is not None else "this site"
    if keys is None:
        say("warning: without keys nothing is encrypted and nobody knows who is who; for tests on loopback only")
    node: Process | None = None
    joined, delay, last = False, 1.0, ""
    since = time.monotonic()
    try:
        while not stop.is_set():
            reason = _reach(address, keys, joined)
            if reason is None:
                told = False
                node = Process(_node_command(keys, address, config or {}), home / "supernode.log",
                               environment(home / "flwr", variables))
                while node.alive and not stop.wait(0.2):
                    if not told and _LET_IN in node.said():
                        say(f"{name} is connected to {address}")
                        told, joined, delay, last = True, True, 1.0, ""
                if stop.is_set():
                    break
                sweep(home / "flwr")
                since = time.monotonic() if told else since
                reason = _why(node, home)
            if reason != last:
                say(f"{name}: {reason}; trying again")
                last = reason
            if patience is not None and time.monotonic() - since > patience:
                raise CoterieError(f"{name} gave up after {patience:g} s: {reason}.")
            stop.wait(delay)
            delay = min(2 * delay, longest)
    finally:
        if node is not None:
            node.stop()
            sweep(home / "flwr")
            say(f"{name} has left")


def _reach(address: Address, keys: ClientKeys | None, joined: bool) -> str | None:
    try:
        return probe(address, keys.ca if keys is not None else None)
    except CoterieError as reason:
        if not joined:
            raise
        return str(reason).removesuffix(".")


def _node_command(keys: ClientKeys | None, address: Address, config: Mapping[str, Setting]) -> list[str]:
    with socket.socket() as free:  # the port on which the node's own client apps reach it
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [tool("flower-supernode"), "--superlink", str(address), "--host", "127.0.0.1", "--port", str(port)]
    if keys is None:
        command.append("--insecure")
    else:
        command += ["--root-certificates", str(keys.ca), "--auth-supernode-private-key", str(keys.key)]
    if config:
        command += ["--node-config", " ".join(f"{key}={_value(value)}" for key, value in config.items())]
    return command


def _why(node: Process, home: Path) -> str:
    """Why a SuperNode ended, in a sentence."""
    text = node.said()
    if "code: 2004" in text:
        return ("the server refuses the key: it is not registered there, or was in use less than a minute ago by a "
                "process that was killed")
    if node.code == 0:
        return "the server has forgotten this node, as after a restart"
    if "Exit Code: 305" in text:
        return f"the connection failed; see {home / 'supernode.log'}"
    return f"the SuperNode ended with exit status {node.code}; see {home / 'supernode.log'}"


# -- small things -----------------------------------------------------------------------------------------------------


def _free(address: Address) -> None:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((address.host, address.port))
        except OSError as reason:
            cause = (reason.strerror or str(reason)).lower()
            raise CoterieError(f"cannot listen on {address}: {cause}.") from reason


def _value(value: Setting) -> str:
    """A value as TOML writes it; json's strings are TOML's basic strings."""
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _toml(values: Mapping[str, Setting], table: str = "") -> str:
    head = f"[{table}]\n" if table else ""
    return head + "".join(f"{key} = {_value(value)}\n" for key, value in values.items())
