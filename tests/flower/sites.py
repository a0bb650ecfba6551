"""Small sites and the same clients on the stacked engine, for the tests of the Flower engine."""

from __future__ import annotations

import torch
from by_hand import adapter_for

from coterie import registry
from coterie.data import Federation
from coterie.flower.job import Job
from coterie.flower.loopback import Loopback
from coterie.flower.policy import Policy
from coterie.flower.rounds import serve
from coterie.flower.site import Site
from coterie.flower.wire import Failure
from coterie.running.simulation import Simulation
from coterie.running.training import Training

__all__ = ["Failure"]
NAMES = ("berlin", "lyon", "oslo", "turin")  # sorted, so that both engines number them alike
SIZES = (7, 12, 1, 5)
VAL = (2, 3, 0, 1)
TEST = (3, 4, 2, 5)
CLASSES = 3
TRAINING = {"rounds": 3, "batch": 3, "lr": 0.1, "precision": "float64", "device": "cpu"}
POLICY = Policy(sites=4, deadline=30, wait=5, poll=0.01)


def pairs(counts, shape, seed):
    """Samples of each client; client i's features lean on i and its labels favour class i."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for i, n in enumerate(counts):
        x = torch.randn(n, *shape, generator=generator, dtype=torch.float64) + 0.3 * i
        found.append((x, (torch.randint(0, CLASSES, (n,), generator=generator) + i * (torch.arange(n) % 2)) % CLASSES))
    return found


def federation(shape=(4,), names=NAMES, sizes=SIZES, val=VAL, test=TEST, unseen=0):
    train, held, seen = pairs(sizes, shape, 0), pairs(val, shape, 1), pairs(test, shape, 2)
    data = Federation.from_splits(train, seen, held, classes=CLASSES, names=names)
    return data if not unseen else Federation(
        data.x, data.y, data.bounds, data.clients - unseen, data.classes, data.names, data.recipe
    )


def alone(data, i):
    """Client i as a federation of its own."""
    splits = [[data.client(i, split)] for split in ("train", "test", "val")]
    return Federation.from_splits(*splits, classes=data.classes, names=[data.names[i]])


def sites(data, home, only=None):
    return [
        Site(name, alone(data, i), home / name, "cpu", accept="any") for i, name in enumerate(data.names)
        if only is None or name in only
    ]


def job(data, method, model="mlp:hidden=5", experiment=None, **training):
    spelling = registry.spelling(registry.method(method))
    return Job.for_data(
        data, experiment=experiment or registry.method(method).name, method=spelling, model=model,
        training=Training(**{**TRAINING, **training}), adapter=adapter_for(method),
    )


def stacked(data, one, rounds=None):
    """The same experiment on the stacked engine, after its rounds."""
    sim = Simulation(one.chosen(), one.factory(), data, one.training, one.head)
    for _ in range(one.training.rounds if rounds is None else rounds):
        sim.round()
    return sim


def own_states(sim):
    return {name: t for name, t in sim.snapshot()[0].items() if not name.startswith("server.")}


def run(data, jobs, home, transport=None, **options):
    """The experiments over sites in this process."""
    line = transport or Loopback(sites(data, home))
    return serve(jobs, line, options.pop("policy", POLICY), **options), line
