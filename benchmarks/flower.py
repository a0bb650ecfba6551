"""Seconds a round across four sites: coterie beside a hand-written Flower app, in turns on one machine.

    python benchmarks/flower.py [--rounds 20] [--turns 3]

Both import torch, hold the same samples, train the same MLP for the same steps and average it. Each turn is one run of
either app on the same SuperLink, with SuperNodes of its own; the median over all rounds but each run's first counts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import tempfile
import threading
from pathlib import Path

import numpy as np

from coterie.data import load
from coterie.flower.job import Job, fresh_id
from coterie.flower.plan import Plan
from coterie.flower.policy import Policy
from coterie.flower.processes import CLIENT_APP, SERVER_APP, Address, SuperLink, supervise
from coterie.running.folder import Folder
from coterie.running.training import Training

SITES = ("east", "north", "south", "west")
BY_HAND = '''
import json, time
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

client = ClientApp()
server = ServerApp()


def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


@client.train()
def train(message, context):
    net = model()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    with np.load(context.node_config["data"]) as file:
        x, y = torch.from_numpy(file["x"]), torch.from_numpy(file["y"])
    held = int(0.25 * len(x))
    x, y = x[held:], y[held:]
    held = int(0.1 * len(x))
    x, y = x[held:], y[held:]
    loader = DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for images, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images), labels).backward()
        optimizer.step()
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"n": len(x)})})
    return Message(content, reply_to=message)


@server.main()
def main(grid, context):
    net, out = model(), Path(context.run_config["out"])
    while len(list(grid.get_node_ids())) < 4:
        time.sleep(0.5)
    for _ in range(int(context.run_config["rounds"])):
        began = time.perf_counter()
        arrays = ArrayRecord(net.state_dict())
        sent = [Message(RecordDict({"arrays": arrays, "config": ConfigRecord({"lr": 0.1})}), node, "train")
                for node in grid.get_node_ids()]
        waiting, replies = set(grid.push_messages(sent)), []
        while waiting:
            for reply in grid.pull_messages(list(waiting)):
                waiting.discard(reply.metadata.reply_to_message_id)
                replies.append(reply)
            if waiting:
                time.sleep(0.2)
        total = sum(reply.content["metrics"]["n"] for reply in replies)
        mean = {}
        for reply in replies:
            for name, t in reply.content["arrays"].to_torch_state_dict().items():
                mean[name] = mean.get(name, 0) + t * (reply.content["metrics"]["n"] / total)
        net.load_state_dict(mean)
        torch.save(net.state_dict(), out.with_suffix(".pt"))
        with out.open("a") as file:
            file.write(json.dumps(time.perf_counter() - began) + "\\n")
'''


def measure(rounds: int, turns: int, place: Path) -> dict[str, list[float]]:
    source = load("digits")
    owned = np.array_split(np.random.default_rng(0).permutation(len(source.x)), len(SITES))
    for name, part in zip(SITES, owned, strict=True):
        np.savez(place / f"{name}.npz", x=source.x.numpy()[part], y=source.y.numpy()[part])
    (place / "apps").mkdir()
    (place / "apps" / "by_hand.py").write_text(BY_HAND)
    root = Path(__file__).resolve().parents[1]
    paths = [str(root), str(place / "apps"), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = Address("127.0.0.1", free.getsockname()[1])
    quiet = lambda line: None  # noqa: E731
    link = SuperLink(None, address, place / "link", variables, quiet)
    seconds: dict[str, list[float]] = {"by hand": [], "coterie": []}

    def run(config: dict[str, str | int], server_app: str, client_app: str) -> None:
        """One run with four sites, which execute this client app."""
        stop = threading.Event()
        nodes = [threading.Thread(target=supervise, args=(
            None, address, place / "homes" / name,
            {"name": name, "data": str(place / f"{name}.npz"), "home": str(place / "homes" / name), "device": "cpu",
             "accept": "any"},
            variables, stop), kwargs={"say": quiet, "app": client_app}) for name in SITES]
        for node in nodes:
            node.start()
        try:
            if (status := link.run(config, server_app)) != "finished:completed":
                raise SystemExit(f"{server_app}: {status}; see {link.home}")
        finally:
            stop.set()
            for node in nodes:
                node.join(30)

    with link:
        link.start()
        link.admit()
        for turn in range(turns):
            out = place / f"hand{turn}"
            run({"rounds": rounds, "out": str(out)}, "by_hand:server", "by_hand:client")
            seconds["by hand"] += [json.loads(line) for line in out.read_text().splitlines()][1:]
            job = Job("fedavg", "mlp:hidden=128", (1, 8, 8), 10, 10,
                      Training(rounds=rounds, lr=0.1, batch=10, device="cpu"), experiment=fresh_id(), scores=False)
            folder = place / f"run{turn}"
            folder.mkdir()
            plan = Plan((job,), Policy(sites=4, minimum=4), folder=str(folder / "run"))
            plan.write(folder / "plan.json")
            run({"run": str(folder / "plan.json")}, SERVER_APP, CLIENT_APP)
            seconds["coterie"] += [one["seconds"] for one in Folder(folder / "run").rounds()][1:]
            hand, ours = (float(np.median(seconds[name])) for name in ("by hand", "coterie"))
            print(f"turn {turn + 1}: by hand {hand:.2f} s a round, coterie {ours:.2f} s: {ours / hand:.3f}", flush=True)
    return seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="coterie-flower-"))
    try:
        found = measure(given.rounds, given.turns, folder)
        hand, ours = (float(np.median(found[name])) for name in ("by hand", "coterie"))
        print(f"median of {len(found['coterie'])} rounds: by hand {hand:.2f} s, coterie {ours:.2f} s, "
              f"ratio {ours / hand:.3f}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
