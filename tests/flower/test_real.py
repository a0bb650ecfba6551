"""Every method across real processes: a SuperLink and four SuperNodes on loopback, beside the stacked engine.

A message costs seconds on Flower, so all methods travel together. `make test-flower` runs this.
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
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import sites as toy
import torch
from local import free_ports

from coterie import registry
from coterie.data import Federation
from coterie.flower.policy import Policy
from coterie.flower.site import site_at
from coterie.running import checkpoint

pytestmark = pytest.mark.flower
METHODS = sorted(registry.methods())
APP = """[project]
name = "coterie-app"
version = "0.1.0"
[tool.flwr.app]
publisher = "coterie"
[tool.flwr.app.components]
serverapp = "coterie.flower.server:app"
clientapp = "coterie.flower.client:app"
[tool.flwr.app.config]
run = ""
"""


class Loop:
    """A SuperLink and SuperNodes of this test, each the leader of a process group that `stop` ends."""

    def __init__(self, folder, data):
        self.folder, self.processes = folder, {}
        self.ports = free_ports(1 + len(data))
        root = str(Path(toy.__file__).resolve().parents[2])
        self.environment = {
            **os.environ, "FLWR_HOME": str(folder / "flwr"), "FLWR_TELEMETRY_ENABLED": "0", "OMP_NUM_THREADS": "1",
            "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1", "PYTHONPATH": root,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        (folder / "flwr").mkdir(parents=True)
        (folder / "flwr" / "config.toml").write_text(
            f'[superlink]\ndefault = "loop"\n[superlink.loop]\naddress = "127.0.0.1:{self.ports[0]}"\ninsecure = true\n'
        )
        (folder / "app").mkdir()
        (folder / "app" / "pyproject.toml").write_text(APP)
        self.start("superlink", "flower-superlink", "--host", "127.0.0.1", "--port", str(self.ports[0]),
                   "--disable-runtime-dependency-installation")
        self.await_port(self.ports[0])
        for port, (name, path) in zip(self.ports[1:], data.items(), strict=True):
            config = f'name="{name}" data="{path}" home="{folder / "homes" / name}" device="cpu" accept="any"'
            self.start(name, "flower-supernode", "--superlink", f"127.0.0.1:{self.ports[0]}", "--port", str(port),
                       "--node-config", config)

    def start(self, name, command, *arguments):
        log = (self.folder / f"{name}.log").open("w")
        self.processes[name] = subprocess.Popen(
            [shutil.which(command, path=self.environment["PATH"]), "--insecure", *arguments], stdout=log, stderr=log,
            env=self.environment, start_new_session=True,
        )

    def await_port(self, port, seconds=60):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.2)
        raise AssertionError((self.folder / "superlink.log").read_text()[-2000:])

    def run(self, plan, seconds):
        """Submit the plan and wait until the run is over; what it logged."""
        config = f'run="{plan}"'
        submitted = subprocess.run(
            [shutil.which("flwr", path=self.environment["PATH"]), "run", str(self.folder / "app"), "loop", "--stream",
             "-c", config],
            env=self.environment, capture_output=True, text=True, timeout=seconds, check=False,
        )
        return submitted.stdout + submitted.stderr

    def stop(self):
        for process in reversed(self.processes.values()):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        for pid in self.left():  # app processes are in groups of their own
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def left(self):
        """Processes that still run with this test's Flower home."""
        mine = f"FLWR_HOME={self.environment['FLWR_HOME']}".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if mine in path.read_bytes().split(b"\0"):
                    yield int(path.parent.name)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Each site's samples in a file of its own."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    found = {}
    for i, (name, n) in enumerate(zip(toy.NAMES, (17, 24, 11, 20), strict=True)):
        x = rng.standard_normal((n, 4)) + 0.3 * i
        found[name] = folder / f"{name}.npz"
        np.savez(found[name], x=x.astype(np.float32), y=(rng.integers(0, toy.CLASSES, n) + i * (np.arange(n) % 2)) % 3)
    return found


@pytest.fixture(scope="module")
def ran(tmp_path_factory, files):
    """All methods, three rounds, over real processes: the jobs and the folder."""
    from coterie.flower.plan import Plan

    folder = tmp_path_factory.mktemp("real")
    shape = Federation.from_clients([(np.zeros((3, 4), np.float32), np.arange(3))], classes=toy.CLASSES)
    jobs = tuple(toy.job(shape, method, precision="float32", evaluate_every=100) for method in METHODS)
    policy = Policy(sites=4, deadline=240, wait=240, minimum=4, poll=0.1)
    Plan(jobs, policy, folder=str(folder / "server")).write(folder / "plan.json")
    loop = Loop(folder, files)
    start = time.monotonic()
    try:
        said = loop.run(folder / "plan.json", 900)
    finally:
        loop.stop()
    print(f"{len(jobs)} methods in {time.monotonic() - start:.0f} s")
    finished = [(folder / "server" / job.experiment / "result.json").exists() for job in jobs]
    assert all(finished), said[-3000:]
    return jobs, folder


@pytest.fixture(scope="module")
def together(files):
    """The sites' clients as one federation: every site's own split, put side by side."""
    shape = Federation.from_clients([(np.zeros((3, 4), np.float32), np.arange(3))], classes=toy.CLASSES)
    job = toy.job(shape, "fedavg")
    alone = [site_at(name, path, "unused").federation(job) for name, path in files.items()]
    splits = [[one.client(0, split) for one in alone] for split in ("train", "test", "val")]
    return Federation.from_splits(*splits, classes=toy.CLASSES, names=list(files))


@pytest.mark.parametrize("method", METHODS)
def test_rows_are_those_of_the_stacked_engine(ran, together, method):
    """Both engines draw the same batches from the same names and compute in float32, so rows agree to 1e-5."""
    jobs, folder = ran
    job = next(job for job in jobs if job.experiment == method)
    sim = toy.stacked(together, job)
    tensors, meta = checkpoint.load(folder / "server" / method / "checkpoint.safetensors")
    assert meta["round"] == 3
    assert list(meta["numbers"]) == list(toy.NAMES)
    expected = {f"server.{name}": t for name, t in sim.server.state.tensors().items()}
    assert tensors.keys() == expected.keys()
    for name, t in expected.items():
        torch.testing.assert_close(tensors[name], t, rtol=1e-5, atol=1e-5)
    for i, name in enumerate(toy.NAMES):
        home = folder / "homes" / name / method
        held, _ = checkpoint.load(home / "state.safetensors")
        for key, t in sim.own.tensors().items():
            torch.testing.assert_close(held[f"after.{key}"], t[i : i + 1], rtol=1e-5, atol=1e-5)
        model, _ = checkpoint.load(home / "model.safetensors")
        facts = json.loads((home / "model.json").read_text())
        used = toy.stacked(together, job, facts["round"])  # the round chosen on validation data
        for key, t in used.layout.views(used.row(i)).items():
            torch.testing.assert_close(model[key], t, rtol=1e-5, atol=1e-5)
        assert facts["layout"]["digest"] == sim.layout.digest
