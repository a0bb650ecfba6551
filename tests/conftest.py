"""A tiny federation, tiny models, and plain-PyTorch reference training that shares no code with the engine."""

from __future__ import annotations

import atexit
import copy
import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from by_hand import adapter_for
from hypothesis import settings
from torch import nn

from coterie import registry, streams
from coterie.contract.layout import adapters_of
from coterie.data import Federation
from coterie.models.lora import adapted
from coterie.running.simulation import Simulation
from coterie.running.together import Stack, alone
from coterie.running.training import Training

# What tests type is trusted in a list of their own, not in the user's.
TRUSTED = Path(tempfile.mkdtemp(prefix="coterie-tests-")) / "trusted"
os.environ["COTERIE_TRUSTED"] = str(TRUSTED)
atexit.register(shutil.rmtree, TRUSTED.parent, ignore_errors=True)

torch.set_num_threads(1)  # the tensors are tiny, and the tests run in parallel

# The machine is shared, so time says nothing; and a test that fails must fail again.
settings.register_profile("coterie", deadline=None, derandomize=True)
settings.load_profile("coterie")

SIZES = (7, 12, 1, 5)  # one client has a single sample; batches of 3 leave 1, 0, 1 and 2 samples over
FEATURES, CLASSES, WORDS = 4, 3, 11


class Dropped(nn.Module):
    """Two dropout layers, so that the number of the draw matters."""

    def __init__(self, dropout=nn.Dropout):
        super().__init__()
        self.one, self.two, self.head = nn.Linear(FEATURES, 6), nn.Linear(6, 5), nn.Linear(5, CLASSES)
        self.first, self.second = dropout(0.3), dropout(0.5)

    def forward(self, x):
        return self.head(self.second(torch.tanh(self.two(self.first(torch.tanh(self.one(x)))))))


class Words(nn.Module):
    """Token numbers -> mean of their embeddings -> scores."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 4), nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.head(self.embedding(x).mean(1))


def mlp():
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def linear():
    return nn.Linear(FEATURES, CLASSES)


def normed():
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, CLASSES))


def regression():
    return nn.Linear(FEATURES, 1)


MODELS = {"mlp": mlp, "linear": linear, "dropout": Dropped, "bn": normed, "words": Words, "regression": regression}
def over(method, model):
    """The model, with adapters where the method works on such and it has none."""
    chosen = registry.method(method) if isinstance(method, str) else method
    if not chosen.adapters:
        return model
    module = model if isinstance(model, nn.Module) else model()
    if adapters_of(module):
        return model
    words = [name for name, sub in module.named_modules() if isinstance(sub, nn.Embedding)]
    return adapted(model, f"{adapter_for(chosen)},targets={'+'.join(words) or 'all'}")


def federation(sizes=SIZES, val=(2, 3, 0, 1), test=(3, 4, 2, 5), kind="scores", seed=0, dtype=torch.float64, **options):
    """Clients of the given sizes; client i's labels and features lean on i, so that clients differ."""
    generator = torch.Generator().manual_seed(seed)

    def pair(client, n):
        if kind == "words":
            x = torch.randint(0, WORDS, (n, 6), generator=generator)
        else:
            x = torch.randn(n, FEATURES, generator=generator, dtype=dtype) + 0.3 * client
        if kind == "regression":
            return x, torch.randn(n, generator=generator, dtype=dtype) + client
        return x, (torch.randint(0, CLASSES, (n,), generator=generator) + client * (torch.arange(n) % 2)) % CLASSES

    def split(counts):
        return [pair(client, counts[client % len(counts)]) for client in range(len(sizes))]

    return Federation.from_splits(
        split(sizes), split(test), split(val), classes=0 if kind == "regression" else CLASSES, **options
    )


def simulation(method="fedavg", model="mlp", data=None, head=None, loss=None, choices=None, twin=None, **training):
    """A simulation in float64 on the CPU with batches of 3, unless told otherwise."""
    chosen = registry.method(method) if isinstance(method, str) else method
    kind = {"words": "words", "regression": "regression"}.get(model, "scores")
    options = {"batch": 3, "lr": 0.1, "precision": "float64", "device": "cpu", **training}
    factory = over(chosen, MODELS[model] if isinstance(model, str) else model)
    data = data if data is not None else federation(kind=kind)
    return Simulation(chosen, factory, data, Training(**options), head=head, loss=loss, choices=choices, twin=twin)


def cohort(sim, ids=None, pace=None):
    return sim.cohort(np.arange(sim.population) if ids is None else np.asarray(ids), pace)


def rows(sim, models=None, seed=1):
    """Different rows for every client (and model), near the initial one; buffers as they start."""
    lead = (sim.population,) if models is None else (sim.population, models)
    noise = torch.randn(*lead, sim.layout.size, generator=torch.Generator().manual_seed(seed), dtype=sim.dtype)
    return sim.layout.put(sim.init.row.expand_as(noise), "parameters", sim.layout.cut(0.3 * noise, "parameters"))


def state(sim):
    """A copy of everything that defines the state."""
    return {name: t.clone() for name, t in sim.snapshot()[0].items()}


def after(rounds, *args, **options):
    """The state after some rounds."""
    sim = simulation(*args, **options)
    for _ in range(rounds):
        sim.round()
    return state(sim)


def side_by_side(specs, model="mlp", rounds=2, seeds=(0, 1), most=1000, **options):
    """States and last evaluations of every method with every seed: of runs alone, then of one stack; and the stack."""

    def working(sim):
        for _ in range(rounds):
            yield from sim.rounding()
        scores = yield from sim.evaluating()
        return state(sim), scores

    def built(shared):
        sims = []
        for spec in specs:
            for seed in seeds:
                twin = sims[0] if sims and shared else None
                sims.append(simulation(spec, model, seed=seed, twin=twin, **options))
        return sims

    stack = Stack(most)
    return [alone(working(sim)) for sim in built(False)], stack.run([working(sim) for sim in built(True)]), stack


def agree(apart, joined, tolerance=1e-12):
    """States and scores of runs alone and joined."""
    for (one, scores), (other, theirs) in zip(apart, joined, strict=True):
        close(one, other, tolerance)
        assert scores.stages.keys() == theirs.stages.keys()
        for stage, mine in scores.stages.items():
            np.testing.assert_array_equal(mine.steps, theirs.stages[stage].steps)
            for here, there in ((mine.test, theirs.stages[stage].test), (mine.val, theirs.stages[stage].val)):
                assert here.keys() == there.keys()
                for name, values in here.items():
                    np.testing.assert_allclose(values, there[name], rtol=1e-9)


def seen_clients(sim):
    """The ids of the clients whose `local` ran in each round, caught on their way in."""
    caught = []
    original = type(sim.method).local

    class Spy(type(sim.method)):
        name = "spy"

        def local(self, cohort, payload, mine):
            caught.append(cohort.ids.tolist())
            return original(self, cohort, payload, mine)

    object.__setattr__(sim.method, "__class__", Spy)
    return caught


def close(a, b, tolerance=1e-12):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance)


def same(a, b):
    """Bit for bit."""
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


# -- the reference: one nn.Module, one client, torch.optim.SGD --------------------------------------------------------


class Masked(nn.Module):
    """Dropout with the mask it is handed."""

    def __init__(self, p):
        super().__init__()
        self.p, self.mask = p, None

    def forward(self, x):
        return x * self.mask[: len(x)] / (1 - self.p)


def stream(sim, client, purpose="train", number=0, copy=0):
    """The key of a client's batches, from the definition: (seed, client, round, purpose), stream, copy."""
    name = streams.integer("client", sim.federation.names[client])
    return streams.key(streams.key(sim.training.seed, name, sim.rounds_done, purpose), number, copy)


def shuffled(key, n, epoch):
    """A pass over n samples: sorted by 40 bits of a hash of (key, pass, sample)."""
    bits = [int(streams.key(streams.key(key, epoch), number)) & ((1 << 40) - 1) for number in range(n)]
    return sorted(range(n), key=lambda number: bits[number])


def batches(key, n, batch, steps):
    """The sample numbers of each of the first `steps` batches, incomplete ones kept; 0 is the full batch in order."""
    found, epoch = [], 0
    while len(found) < steps:
        order = shuffled(key, n, epoch) if batch else list(range(n))
        width = batch or n
        found += [order[first : first + width] for first in range(0, n, width)]
        epoch += 1
    return found[:steps]


def sgd(sim, client, row, steps, lr=None, key=None, part="all", correct=None, objective=None, split="train",
        optimizer=torch.optim.SGD, clip=None):
    """One client with torch.optim (plain SGD) on the actual module: the row, and (loss, samples) before each step."""
    key = stream(sim, client) if key is None else key
    module = sim.layout.load(copy.deepcopy(sim.init.module).double(), row)
    if isinstance(module, Dropped):
        module.first, module.second = Masked(0.3), Masked(0.5)
    names = {entry.name for entry in sim.layout.within(part) if entry.trainable}
    tensors = dict(module.named_parameters())
    optimizer = optimizer([tensors[name] for name in names], lr=sim.training.lr if lr is None else lr)
    x, y = sim.federation.client(client, split)
    x = x.double() if x.is_floating_point() else x
    losses = []
    for step, chosen in enumerate(batches(key, len(x), sim.training.batch, steps)):
        module.train()
        for sub in module.modules():
            if isinstance(sub, nn.modules.batchnorm._BatchNorm) and len(chosen) == 1:
                sub.eval()  # a single sample has no variance: the running statistics are used and stay
            if isinstance(sub, Masked):
                number = 1 if sub is module.first else 2
                width = 6 if sub is module.first else 5
                noise = streams.key(streams.key(key, step), number)
                sub.mask = (streams.uniform(noise, (len(chosen), width)) >= sub.p).double()
        if objective is not None:
            loss = objective(module, x[chosen], y[chosen])
        elif sim.federation.classes:
            loss = nn.functional.cross_entropy(module(x[chosen]), y[chosen])
        else:
            loss = (module(x[chosen])[:, 0] - y[chosen].double()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if correct is not None:
            for name in names:
                tensors[name].grad = correct(name, tensors[name].grad, tensors[name].detach())
        if clip is not None:
            nn.utils.clip_grad_norm_([tensors[name] for name in names], clip)
        optimizer.step()
        losses.append((loss.item(), len(chosen)))
    return sim.layout.row(module, torch.float64), losses


def steps_of(n, batch, epochs=1):
    return epochs * (-(-n // batch) if batch else 1)


@pytest.fixture(scope="session")
def tiny():
    """Everything above by name."""
    return SimpleNamespace(**{name: value for name, value in globals().items() if not name.startswith("_")})
