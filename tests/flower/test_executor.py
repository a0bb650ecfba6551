"""Tasks are done by what is installed. A hostile server's bundle, over real processes, executes nothing at a site."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
from local import free_port, wait

pytest.importorskip("flwr")

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from coterie.errors import CoterieError
from coterie.flower import client, server
from coterie.flower.executor import Order, command, installed
from coterie.flower.processes import CLIENT_APP, SERVER_APP, Address, Process, environment, probe, supervise, tool

ROOT = Path(__file__).resolve().parents[2]
CANARY = "import os\nopen(os.environ.get('CANARY', os.devnull), 'a').write(__name__ + '\\n')\n"
SERVER = '''
import time
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    """Send every node a message until both have answered; what they said goes to a file."""
    place = Path(context.run_config["place"])
    while not (place / "enough").exists():
        ids = list(grid.get_node_ids())
        asked = [Message(RecordDict({"c": ConfigRecord({})}), dst_node_id=i, message_type="query") for i in ids]
        for reply in grid.send_and_receive(asked, timeout=30) if asked else ():
            said = reply.error.reason if reply.has_error() else str(dict(reply.content))
            with (place / "replies").open("a") as file:
                file.write(said.replace("\\n", " ") + "\\n")
        time.sleep(0.5)
'''
CLIENT = '''
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query()
def query(message, context):
    return Message(RecordDict({"c": ConfigRecord({"hacked": context.node_config["name"]})}), reply_to=message)
'''
PYPROJECT = '''[project]
name = "coterie-run"
version = "1.0.0"
description = "x"
license = "Apache-2.0"
[tool.flwr.app]
publisher = "coterie"
[tool.flwr.app.components]
serverapp = "hostile:app"
clientapp = "coterie.flower.client:app"
[tool.flwr.app.config]
place = "{place}"
'''
SHADOWS = ("coterie/__init__.py", "coterie/flower/__init__.py", "coterie/flower/client.py", "sitecustomize.py",
           "coterie/flower/executor.py", "usercustomize.py", "torch.py", "numpy.py")
"""What the bundle puts in the place of what is installed; each writes the canary when it is imported."""


def test_an_app_is_what_is_installed():
    assert installed(CLIENT_APP, ClientApp) is client.app
    assert installed(SERVER_APP, ServerApp) is server.app
    for name in (SERVER_APP, "coterie.flower.client:nothing", "coterie.flower.client", "json:loads"):
        with pytest.raises(CoterieError, match="is no ClientApp of Flower"):
            installed(name, ClientApp)


def test_the_current_folder_is_not_on_the_path_of_a_task(tmp_path):
    """Python would put it there, and import whatever lies in it; an order that is none ends the process by itself."""
    (tmp_path / "httpx.py").write_text(CANARY)
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "CANARY": str(tmp_path / "canary")}
    for words, appears in ((command(), False), ([word for word in command() if word != "-P"], True)):
        done = subprocess.run(words, cwd=tmp_path, env=variables, input="{}\n", capture_output=True, text=True)
        assert done.returncode != 0
        assert (tmp_path / "canary").exists() == appears, done.stderr


def test_the_token_is_not_among_the_arguments():
    order = Order("client", CLIENT_APP, "127.0.0.1:1", "the token")
    assert not any("token" in word for word in command())
    assert '"token": "the token"' in order.text()


@pytest.mark.flower
def test_a_hostile_servers_bundle_executes_nothing_at_a_site(tmp_path):
    """A plain SuperLink with a run whose bundle shadows coterie's own client. A plain SuperNode beside the site
    executes it, so the attack is a real one; the site answers with coterie's client, which knows no such message."""
    app, place = tmp_path / "app", tmp_path / "replies"
    place.mkdir()
    for name in SHADOWS:
        (app / name).parent.mkdir(parents=True, exist_ok=True)
        (app / name).write_text(CANARY + (CLIENT if name.endswith("client.py") else ""))
    (app / "hostile.py").write_text(SERVER)
    (app / "pyproject.toml").write_text(PYPROJECT.format(place=place))
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "data.npz", x=rng.standard_normal((24, 4)).astype(np.float32), y=rng.integers(0, 3, 24))
    address, stop, said = Address("127.0.0.1", free_port()), threading.Event(), []
    home = tmp_path / "flwr"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "x"\n[superlink.x]\naddress = "{address}"\ninsecure = true\n')
    link = Process([tool("flower-superlink"), "--insecure", "--host", address.host, "--port", str(address.port),
                    "--disable-runtime-dependency-installation"], tmp_path / "link.log", environment(home))
    plain = site = None
    canaries = {name: tmp_path / f"canary-{name}" for name in ("plain", "site")}

    def variables(name):
        return {"OMP_NUM_THREADS": "1", "CANARY": str(canaries[name]), "PYTHONPATH": str(ROOT)}

    try:
        wait(lambda: probe(address, None) is None, 60, "no SuperLink")
        config = {"name": "north", "data": str(tmp_path / "data.npz"), "home": str(tmp_path / "north"), "device": "cpu",
                  "accept": "any"}
        site = threading.Thread(target=supervise, args=(
            None, address, tmp_path / "north", config, variables("site"), stop), kwargs={"say": said.append})
        site.start()
        plain = Process([tool("flower-supernode"), "--insecure", "--superlink", str(address), "--host", "127.0.0.1",
                         "--port", str(free_port()), "--node-config", 'name="plain"'], tmp_path / "plain.log",
                        environment(tmp_path / "plain", variables("plain")))
        done = subprocess.run([tool("flwr"), "run", str(app), "x", "--format", "json"], env=environment(home),
                              cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
        assert '"success": true' in done.stdout, done.stdout + done.stderr

        def replies():
            return (place / "replies").read_text() if (place / "replies").exists() else ""

        def ours():
            return [line for line in replies().splitlines() if "coterie" in line.lower() or "north" in line]

        wait(lambda: "hacked" in replies() and ours(), 150, (said, replies))
        assert "'hacked': 'plain'" in replies()
        assert "'hacked': 'north'" not in replies()
        assert "coterie.flower.client" in canaries["plain"].read_text()
        assert not canaries["site"].exists()
        assert list((tmp_path / "north").rglob("*.py")) == []  # nothing was unpacked either
    finally:
        (place / "enough").touch()
        stop.set()
        if site is not None:
            site.join(60)
        for process in (plain, link):
            if process is not None:
                process.stop()
    assert not canaries["site"].exists()
