"""Four sites with TLS and keys on this machine train FedFew on digits, while processes are killed.

    python tests/flower/kill_demo.py OUT

The first run loses a site in round 2 and the server app in round 4, the second one the SuperLink as well, each by
SIGKILL. Both must end. What the sites sent is inspected: nothing personal may be in it. The accuracies are shown beside
those of the stacked engine, where nothing was killed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from coterie.data import Federation, load, partition
from coterie.flower.job import Job
from coterie.flower.plan import Plan
from coterie.flower.site import site_at
from coterie.running import checkpoint
from coterie.running.folder import Folder
from coterie.running.simulation import Simulation

SITES = ("east", "north", "south", "west")
CONFIG = """method = "fedfew:models=3,normalise=true"
model = "mlp:hidden=64"
shape = [1, 8, 8]
classes = 10
[training]
rounds = {rounds}
lr = 0.1
epochs = 5
evaluate_every = 100
[policy]
sites = 4
minimum = 3
deadline = 60
"""
ROUNDS = 6
ALLOWED = {"update", "loss"}
"""What FedFew uploads: its clients' updates of the K models, and the K losses that decide the weights."""
KNOWN = {"protocol", "kind", "experiment", "method", "layout", "round", "site", "n", "scores", "format"}
console = Console(width=118, highlight=False)


class Demo:
    """A federation of commands, each the leader of a process group."""

    def __init__(self, out: Path, keys: Path, files: dict[str, Path]) -> None:
        self.out, self.keys, self.files = out, keys, files
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.run = out / "server"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.began = time.monotonic()

    def say(self, line: str) -> None:
        console.print(f"{time.monotonic() - self.began:6.1f} s  {line}")

    def command(self, name: str, *words: str) -> None:
        log = (self.out / f"{name}.log").open("ab")
        self.processes[name] = subprocess.Popen(
            [sys.executable, "-m", "coterie", *words], stdout=log, stderr=log, start_new_session=True
        )

    def server(self) -> None:
        self.command("server", "server", str(self.out / "server.toml"), "--out", str(self.run), "--listen",
                     self.address, "--keys", str(self.keys / "server"), "--keep-messages")

    def site(self, name: str) -> None:
        self.command(name, "client", "--server", self.address, "--data", str(self.files[name]), "--home",
                     str(self.out / "homes" / name), "--keys", str(self.keys / "clients" / name), "--device", "cpu",
                     "--accept", Plan.configured(self.out / "server.toml").jobs[0].digest)

    def status(self) -> dict[str, object]:
        try:
            found: dict[str, object] = json.loads((self.run / "status.json").read_text())
            return found
        except (OSError, json.JSONDecodeError):
            return {}

    def reach(self, done: Callable[[], bool], what: str, seconds: float = 400) -> None:
        end = time.monotonic() + seconds
        while not done():
            if self.processes["server"].poll() not in (None, 0) or time.monotonic() > end:
                tail = (self.out / "server.log").read_text()[-3000:]
                raise SystemExit(f"the server did not come to {what}:\n{tail}")
            time.sleep(0.1)

    def in_round(self, t: int) -> bool:
        return self.status().get("doing") == f"round {t} of {ROUNDS}" and bool(self.status().get("asked"))

    def play(self, kill_link: bool) -> None:
        """One run with its kills, to its end."""
        self.server()
        for name in SITES:
            self.site(name)
        self.reach(lambda: self.in_round(2), "round 2")
        pids = [self.processes["north"].pid, *_with(f"FLWR_HOME={self.out / 'homes' / 'north' / 'flwr'}")]
        for pid in pids:
            _kill(pid)
        self.say(f"round 2: site north killed ({len(pids)} processes)")
        time.sleep(2)
        self.site("north")
        self.say("site north started again; its key is refused until the server notices that the old process is gone")
        self.reach(lambda: self.in_round(4), "round 4")
        _kill(int(str(self.status()["pid"])))
        self.say("round 4: server app killed")
        if kill_link:
            self.reach(lambda: self.in_round(5), "round 5")
            home = self.run / "link" / "flwr"
            link = [pid for pid in _with(f"FLWR_HOME={home}") if "coterie.flower.link" in _line(pid)]
            for pid in link:
                _kill(pid)
            self.say(f"round 5: SuperLink killed ({len(link)} process)")
        self.reach(lambda: self.processes["server"].poll() == 0, "its end")
        self.say("the run is complete")

    def stop(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self.processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def _with(variable: str) -> list[int]:
    """The processes that have this in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if variable.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def _line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def inspect(demo: Demo, together: Federation) -> int:
    """Raise if a message holds anything but what the method uploads; how many messages there were.

    Samples are compared value by value: no row of any site's data may be in any tensor.
    """
    samples = {row.tobytes() for row in together.x.flatten(1).numpy()}
    width = together.x[0].numel()
    paths = sorted((demo.run / "messages").glob("*.safetensors"))
    for path in paths:
        tensors, meta = checkpoint.load(path)
        assert set(tensors) <= ALLOWED, f"{path} holds {sorted(tensors)}"
        assert set(meta) <= KNOWN, f"{path} says {sorted(meta)}"
        for t in tensors.values():
            flat = t.reshape(-1).numpy()
            windows = np.lib.stride_tricks.sliding_window_view(flat, width) if len(flat) >= width else []
            assert not any(window.tobytes() in samples for window in windows), f"{path} holds a sample"
    assert any(checkpoint.load(path)[0] for path in paths), "no message held an upload"
    return len(paths)


def stacked(job: Job, together: Federation) -> Simulation:
    simulation = Simulation(job.chosen(), job.factory(), together, job.training, job.head)
    for _ in range(job.training.rounds):
        simulation.round()
    return simulation


def main(out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    source = load("digits")
    owned = partition("dirichlet", source.y.numpy(), len(SITES), seed=0, alpha=0.5)
    files = {}
    for name, samples in zip(SITES, owned, strict=True):
        files[name] = out / f"{name}.npz"
        np.savez(files[name], x=source.x.numpy()[samples], y=source.y.numpy()[samples])
    made = [sys.executable, "-m", "coterie", "keys", str(out / "keys"), "--server", "127.0.0.1", "--clients", *SITES]
    subprocess.run(made, check=True)
    table = Table("run", "mean served", "worst", "mean adapted", "worst", "rounds", "messages", title_justify="left",
                  title="test accuracy in %")
    for number, (what, kill_link) in enumerate((("site and server app killed", False), ("SuperLink killed too", True))):
        place = out / f"run{number + 1}"
        place.mkdir()
        (place / "server.toml").write_text(CONFIG.format(rounds=ROUNDS))
        demo = Demo(place, out / "keys", files)
        console.print(f"\nrun {number + 1}: {what}")
        try:
            demo.play(kill_link)
        finally:
            demo.stop()
        job = Plan.read(demo.run / "plan.json").jobs[0]
        alone = [site_at(name, path, "unused").federation(job) for name, path in files.items()]
        splits = [[one.client(0, split) for one in alone] for split in ("train", "test", "val")]
        together = Federation.from_splits(*splits, classes=job.classes, names=SITES)
        if not number:
            table.add_row("stacked engine", *_percent(stacked(job, together).evaluate().stages), str(ROUNDS), "")
        messages = inspect(demo, together)
        folder = Folder(demo.run)
        answered = sum(1 for one in folder.rounds() if "skipped" not in one["report"])
        table.add_row(f"Flower, {what}", *_percent(folder.history()[-1].stages), str(answered), str(messages))
    console.print(table)
    console.print("every message held the updates and losses that FedFew uploads, counts and scores, and nothing else")


def _percent(stages: dict[str, object]) -> list[str]:
    found = []
    for stage in ("served", "adapted"):
        accuracy = 100 * stages[stage].test["accuracy"]  # type: ignore[attr-defined]
        found += [f"{accuracy.mean():.1f}", f"{accuracy.min():.1f}"]
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "demo-flower").resolve())
