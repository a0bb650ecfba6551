"""Flower's processes, started and supervised for an operator.

On the server there is a SuperLink on loopback (`link`), which carries the messages, before it the front that the world
reaches (`gate`), and the server app of one run; on every site a SuperNode, and a client app for each message. Apps are
processes of our own (`executor`): the code of a run's bundle is never executed, on either side. What was measured with
flwr 1.41, and is relied on here:

- A SuperLink without a database file forgets registered keys and runs when it ends. The SuperNodes are then answered
  401 and end with exit status 0. With `--database` keys, node ids and runs survive, and the SuperNodes come back by
  themselves, but the server app does not: its run is marked as failed, or stays "running" without a process. A key
  that was once unregistered can never be registered again there. So no database is used: after each start all keys
  are registered anew (`SuperLink.admit`) and the run is submitted anew (`operate`); the server app goes on from its own
  checkpoint, and the supervised sites come back. Node ids are new after that, names are not.
- A SuperNode ended by SIGTERM may come back at once. After SIGKILL its key is refused for up to 60 s: it ends with exit
  status 1 and "Exit Code: 305" in its log. An unknown key reads the same. `supervise` tries again until it is let in.
- A SuperNode whose CA did not sign the server's certificate ends likewise; `supervise` finds out before it starts one.
- A SuperNode tries again when it is answered 502, 503 or 504, and when a connection breaks.
- An app whose SuperNode or SuperLink ended waits for ever; `sweep` ends it.
"""

from __future__ import annotations

import ctypes
import ipaddress
import json
import os
import re
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from coterie.errors import CoterieError, tell, visible
from coterie.files import write_json
from coterie.flower import executor, missing
from coterie.flower.calls import OPENING, Control, Tasks, opening
from coterie.flower.executor import Order
from coterie.flower.gate import Entrance, Front, known_keys
from coterie.flower.keys import WARN_DAYS, ClientKeys, ServerKeys, certificate, names_of
from coterie.flower.policy import Gate

NODES = "nodes.json"
SECRET = "secret"
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
    tell(f"{time.strftime('%H:%M:%S')} {visible(line)}", stderr=True)


@dataclass(frozen=True)
class Address:
    """Where something listens."""

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
    def loopback(self) -> bool:
        """Whether nobody but this machine reaches it."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

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
    """A command whose output goes to a log file, with `told` on its standard input.

    It gets no ctrl-C of the terminal: whoever started it ends it.

    On Linux it is also sent SIGTERM when the thread that started it ends, so that a killed supervisor leaves nothing.
    """

    def __init__(self, command: list[str], log: Path, variables: Mapping[str, str], told: str = "") -> None:
        self.log = log
        self._started_at = self._read = log.stat().st_size if log.exists() else 0
        with open(log, "ab") as file:
            self._process = subprocess.Popen(
                command, env=dict(variables), stdin=subprocess.PIPE if told else subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_end_with_parent,
            )
        if self._process.stdin is not None:
            with suppress(BrokenPipeError), self._process.stdin as line:
                line.write(told.encode())

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
    """A SuperLink on loopback, and the front at `address`. With keys: TLS, and only nodes of these keys. Use `with`.

    `home` holds its log, `nodes.json` (node id -> client name, as registered), and a folder for Flower's own files.
    `body` is the largest answer of a site in bytes.
    """

    def __init__(
        self, keys: ServerKeys | None, address: Address, home: Path, variables: Mapping[str, str] | None = None,
        say: Say = say, gate: Gate | None = None, body: int = 1 << 30,
    ) -> None:
        self.keys, self.address, self.home, self.say = keys, address, home, say
        self._gate, self._body = gate if gate is not None else Gate(), body
        self._ca = keys.ca if keys is not None else None
        self._variables = environment(home / "flwr", variables)
        self._process: Process | None = None
        self._entrance: Entrance | None = None
        self._inner = address  # until it is started
        self._secret = b""
        self._checked()

    def _checked(self) -> None:
        if self.keys is None:
            if not self.address.loopback:
                raise CoterieError(
                    f"without keys a server listens on loopback alone, and {self.address} can be reached by others; "
                    "use --listen 127.0.0.1:PORT, or make keys with `coterie keys`."
                )
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
        """Start it and wait until it answers; then the front lets sites through to it."""
        if self._entrance is None:
            self._entrance = self._front()
        flower = self.home / "flwr"
        flower.mkdir(parents=True, exist_ok=True)
        self._inner = Address("127.0.0.1", _free_port())
        self._secret = _fresh_secret(flower)
        command = [sys.executable, "-P", "-m", "coterie.flower.link", "--host", self._inner.host,
                   "--port", str(self._inner.port), "--isolation", "process",
                   "--superexec-auth-secret-file", str(flower / SECRET), "--disable-runtime-dependency-installation"]
        if self.keys is None:
            command.append("--insecure")
        else:
            command += ["--ssl-ca-certfile", str(self.keys.ca), "--ssl-certfile", str(self.keys.certificate),
                        "--ssl-keyfile", str(self.keys.key), "--enable-supernode-auth"]
        self._process = Process(command, self.home / "superlink.log", self._variables)
        end = time.monotonic() + timeout
        while (reason := probe(self._inner, self._ca)) is not None:
            if not self.alive or time.monotonic() > end:
                self.stop()
                raise CoterieError(f"the SuperLink did not start ({reason}); see {self.home / 'superlink.log'}.")
            time.sleep(0.2)
        scheme = "http" if self.keys is None else "https"
        self._entrance.open(f"{scheme}://{self._inner}", [(OPENING.encode(), opening(self._secret).encode())])
        self.say(f"the server listens on {self.address}" + ("" if self.keys is None else ", with TLS and node keys"))

    def _front(self) -> Entrance:
        known = None if self.keys is None else known_keys(self.keys.nodes)
        own = None if self.keys is None else (self.keys.certificate, self.keys.key)
        return Entrance(self.address.host, self.address.port, lambda: Front(self._gate, self._body, known, self._ca),
                        self._gate, own, self.say)

    def stop(self) -> None:
        """End it, the front and the server app."""
        if self._entrance is not None:
            self._entrance.close()
            self._entrance = None
        if self._process is not None:
            self._process.stop()
            sweep(self.home / "flwr")

    def admit(self) -> dict[str, str]:
        """Register every public key of the server's folder; node id -> client name, also written to `nodes.json`."""
        known: dict[str, str] = {}
        if self.keys is not None:
            with self._control() as control:
                known = {control.register(name, path): name for name, path in self.keys.nodes.items()}
            self.say(f"registered {len(known)} client keys: {', '.join(self.keys.nodes) or 'none'}")
        write_json(self.home / NODES, known)
        return known

    def run(self, config: Mapping[str, Setting], app: str = SERVER_APP) -> str:
        """Submit a run and do it here, by an installed app with these settings; its log is passed on.

        The run's status at its end, or `gone` when the SuperLink ended.
        """
        with self._control() as control, Tasks(str(self._inner), self._ca, self._secret) as tasks:
            run = control.submit()
            self.say(f"submitted run {run}")
            ca = None if self._ca is None else str(self._ca.resolve())
            order = Order("server", app, str(self._inner), self._token(tasks, run), ca, dict(config))
            worker = Process(executor.command(), self.home / "run.log", self._variables, order.text())
            try:
                while worker.alive and self.alive:
                    time.sleep(0.2)
                    self._pass_on(worker)
            finally:
                worker.stop()
            self._pass_on(worker)
            if not self.alive:
                return "gone"
            status = control.status(run)
            if not status.startswith("finished"):  # it was killed
                control.stop(run)
                return "finished:failed"
            return status

    def _token(self, tasks: Tasks, run: int) -> str:
        """The token of this run's task. Another run's, whoever submitted it, is refused and never done."""
        end = time.monotonic() + 60
        while time.monotonic() < end and self.alive:
            found = tasks.acquire("server")
            if found is None:
                time.sleep(0.1)
            elif found[0] == run:
                return found[1]
            else:
                self.say(f"warning: somebody else submitted run {found[0]}; it was refused")
                tasks.refuse(found[1], "not submitted by this server")
        raise CoterieError(f"the SuperLink does not give out run {run}; see {self.home / 'superlink.log'}.")

    def _control(self) -> Control:
        return Control(str(self._inner), self._ca, self._secret)

    def _pass_on(self, worker: Process) -> None:
        for line in worker.lines():
            if line.strip():
                self.say(line.rstrip())


def operate(
    link: SuperLink, config: Mapping[str, Setting], app: str = SERVER_APP, tries: int = 3, quick: float = 120,
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
        try:
            status = link.run(config, app)
        except CoterieError:
            if link.alive:
                raise
            status = "gone"
        if status == "finished:completed":
            link.say("the run is complete")
            return
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
    say: Say = say, longest: float = 10, app: str = CLIENT_APP,
) -> None:
    """Keep a SuperNode running until `stop` is set or ctrl-C; its messages are answered by `app`, as installed here.

    A SuperNode that ends is started again after 1, 2, 4, ... at most `longest` seconds; being let in resets that. With
    `patience`, being out of the federation for so many seconds is a CoterieError. A server that the CA does not
    vouch for is one at once, unless the node has been in the federation before.
    """
    stop = stop if stop is not None else threading.Event()
    home.mkdir(parents=True, exist_ok=True)
    name = keys.name if keys is not None else "this site"
    if keys is None:
        if not address.loopback:
            raise CoterieError(f"without keys a site connects to loopback alone, not to {address}.")
        say("warning: without keys nothing is encrypted and nobody knows who is who; for tests on loopback only")
    node: Process | None = None
    joined, delay, last = False, 1.0, ""
    since = time.monotonic()
    try:
        while not stop.is_set():
            reason = _reach(address, keys, joined)
            if reason is None:
                told, inner = False, Address("127.0.0.1", _free_port())
                around = environment(home / "flwr", variables)
                secret = _fresh_secret(home / "flwr")
                node = Process(_node_command(keys, address, inner, home / "flwr" / SECRET, config or {}),
                               home / "supernode.log", around)
                with Tasks(str(inner), None, secret) as tasks:
                    workers: list[Process] = []
                    while node.alive and not stop.wait(0.1):
                        if not told and _LET_IN in node.said():
                            say(f"{name} is connected to {address}")
                            told, joined, delay, last = True, True, 1.0, ""
                        if told and (found := tasks.acquire("client")) is not None:
                            order = Order("client", app, str(inner), found[1])
                            workers = [*(one for one in workers if one.alive),
                                       Process(executor.command(), home / "app.log", around, order.text())]
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


def _node_command(
    keys: ClientKeys | None, address: Address, inner: Address, secret: Path, config: Mapping[str, Setting]
) -> list[str]:
    """A SuperNode that gives its tasks, at `inner`, to whoever has the secret, and executes nothing itself."""
    command = [tool("flower-supernode"), "--superlink", str(address), "--host", inner.host, "--port", str(inner.port),
               "--isolation", "process", "--superexec-auth-secret-file", str(secret)]
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


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _fresh_secret(folder: Path) -> bytes:
    """A new secret in `folder`, for this user's eyes only: whoever has it is given tasks to do."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    (folder / SECRET).unlink(missing_ok=True)
    made = secrets.token_hex(32).encode()
    with open(os.open(folder / SECRET, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(made)
    return made


def _value(value: Setting) -> str:
    """A value as TOML writes it; json's strings are TOML's basic strings."""
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
