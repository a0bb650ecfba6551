"""The frozen prefix: where it ends, that it is exact, that it is refused where it is not, and what it takes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from coterie import memory
from coterie.contract.patterns import partly
from coterie.engine import prefix
from coterie.models.lora import adapted


class Plain(nn.Module):
    """Functions between layers, a branch that comes together again, and dropout before what may train."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 5)
        self.drop, self.fc = nn.Dropout(0.3), nn.Linear(5, 3)

    def body(self, x):
        z = F.relu(self.a(x))
        return self.drop(z + torch.tanh(self.b(z)))

    def forward(self, x):
        return self.fc(torch.tanh(self.c(self.body(x))))


class Skipping(Plain):
    """The rest of the model looks at the samples again."""

    def forward(self, x):
        return super().forward(x) + x[:, :1]


class Wide(Plain):
    """The rest needs two tensors of the body: the last one they both come from is the output of a."""

    def body(self, x):
        z = F.relu(self.a(x))
        return torch.cat([self.drop(z)[:, :3], self.b(z)[:, :3]], 1)


class Mixing(Plain):
    """Features are centred over the batch: a sample's depend on the others."""

    def body(self, x):
        z = self.a(x)
        return self.b(z - z.mean(0))


class Moody(Plain):
    """What it does depends on the mode."""

    def body(self, x):
        return F.dropout(self.b(F.relu(self.a(x))), 0.4, self.training)


class Asking(Plain):
    """Asks the data, so that it cannot be traced; whole layers are seen all the same."""

    def forward(self, x):
        z = self.b(self.a(x))
        if len(x) > 100_000:
            z = z + 1
        return self.fc(self.c(z))


class Deciding(Plain):
    """Whether large samples are halved is decided on the way, which a few samples may not show."""

    def forward(self, x):
        z = self.a(x)
        if x.abs().max() > 2:
            z = z / 2
        return self.fc(self.c(self.b(z)))


class Asking_and_skipping(Asking):  # noqa: N801
    def forward(self, x):
        return super().forward(x) * (1 + x.mean(1, keepdim=True))


class Drawing(Plain):
    """Noise from PyTorch's own generator."""

    def body(self, x):
        z = self.b(self.a(x))
        return z + torch.randn_like(z)


class Tied(Plain):
    """Two frozen layers with one weight."""

    def __init__(self):
        super().__init__()
        del self.fc
        self.d, self.fc = nn.Linear(6, 6), nn.Linear(5, 3)  # the last one is the head
        self.d.weight = self.b.weight

    def body(self, x):
        return self.d(self.b(self.a(x)))


CASES = [
    (Plain, "fc", "b"),
    (Plain, "c+fc", "b"),
    (Plain, "b+fc", "a"),
    (Plain, "a+fc", None),
    (Skipping, "fc", None),
    (Wide, "fc", "a"),
    (Mixing, "fc", "a"),  # by the order of calls: what mixes samples is left to the rest
    (Moody, "fc", "a"),  # likewise: the graphs of training and evaluation differ
    (Asking, "fc", "c"),
    (Asking, "c+fc", "b"),
    (Deciding, "fc", None),
    (Asking_and_skipping, "fc", None),
    (Drawing, "fc", None),  # its answers cannot be compared
    (Tied, "fc", "c"),
]
CANNOT_BE_STACKED = (Drawing, Deciding)


@pytest.mark.parametrize(("engine", "model", "train", "until"), [
    (engine, *case) for case in CASES for engine in ("stack", "loop")
    if engine == "loop" or case[0] not in CANNOT_BE_STACKED
])
def test_where_it_ends_and_that_it_changes_nothing(tiny, engine, model, train, until):
    chosen = partly(model, train=train)
    states = []
    for options in ({}, {"prefix": "off"}):
        sim = tiny.simulation("fedavg", chosen, engine=engine, **options)
        assert sim.choices.get("prefix", {}).get("until") == (None if options else until)
        for _ in range(2):
            sim.round()
        sim.evaluate()
        states.append(tiny.state(sim))
    tiny.close(*states, 1e-9)


def test_the_rest_of_a_chain_is_a_chain(tiny):
    """Over a frozen layer plain training is differentiated by hand again."""
    model = partly(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)),
                   freeze="0")
    direct, plain = tiny.simulation("fedavg", model, engine="direct"), tiny.simulation("fedavg", model, engine="loop")
    assert direct.choices["direct"]
    for sim in (direct, plain):
        for _ in range(2):
            sim.round()
    tiny.close(tiny.state(direct), tiny.state(plain), 1e-9)


class Silent(nn.Module):
    """A branch from the samples past a frozen layer whose last factor starts at 0, as an adapter's does."""

    def __init__(self, layer):
        super().__init__()
        self.base, self.gain = layer, nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.base(x) + self.gain * x


def test_what_shows_nothing_at_the_start_is_seen(tiny):
    """The frozen layer has as many outputs as inputs, so that its output can be taken for the samples; where B is 0
    both give the same scores, and another gradient of B."""

    def square():
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))

    for model in (lambda: adapted(square, "lora:rank=2")(), lambda: silent(square())):
        sims = [tiny.simulation("fedavg", model, engine=engine) for engine in ("stack", "loop", "reference")]
        for sim in sims:
            assert "prefix" not in sim.choices
            sim.round()
        for sim in sims[:2]:
            tiny.close(tiny.state(sim), tiny.state(sims[2]), 1e-12)


def silent(module):
    module.requires_grad_(False)
    module[2].requires_grad_(True)
    module[0] = Silent(module[0])
    return module


def test_samples_stay_what_they_are(tiny):
    sim = tiny.simulation("fedavg", partly(Plain, train="fc"))
    engine = sim.engine
    assert engine.pending == len(engine.x) * 6 * 8
    (raw, _), *_ = engine.samples(torch.arange(2).numpy(), "train")
    assert torch.equal(raw, sim.federation.client(0, "train")[0])
    (taken, _), *_ = engine.samples(torch.arange(2).numpy(), "train", raw=False)
    a, b = (layer.double() for layer in (sim.init.module.a, sim.init.module.b))
    z = F.relu(a(raw))
    torch.testing.assert_close(taken, z + torch.tanh(b(z)), rtol=1e-12, atol=1e-12)
    assert engine.pending == 0


def test_the_model_of_a_client_takes_samples(tiny):
    """What is handed out is the whole model: its losses on raw samples are those of the evaluation."""
    sim = tiny.simulation("fedavg", partly(Plain, train="fc"))
    sim.round()
    assert "prefix" in sim.choices
    loss = sim.evaluate().stages["served"].test["loss"][0]
    module = sim.layout.load(sim.init.module.double(), sim.row(0)).eval()
    x, y = sim.federation.client(0, "test")
    assert float(F.cross_entropy(module(x), y).detach()) == pytest.approx(loss, rel=1e-12)


def test_what_does_not_fit_is_computed_in_every_step(tiny, monkeypatch):
    """45 samples x 6 numbers x 8 bytes are 2160; they need twice as much free memory."""
    model = partly(Plain, train="fc")
    kept = tiny.simulation("fedavg", model)
    assert kept.choices["prefix"] == {"until": "b", "samples": 45, "numbers": 6, "bytes": 2160}
    assert kept.choices["notes"] == [
        "the outputs of the frozen layers up to 'b' are computed once and kept: 45 samples x 6 numbers, 0.0 MB "
        "(prefix=off computes them in every step instead)"
    ]
    monkeypatch.setattr(memory, "free", lambda device: 4319)
    sim = tiny.simulation("fedavg", model, wave=4)
    assert "prefix" not in sim.choices
    assert "would take 0.00 GB" in sim.choices["notes"][0]
    for one in (kept, sim):
        one.round()
    tiny.close(tiny.state(sim), tiny.state(kept), 1e-9)
    # A run that goes on computes as it did, so that its bits are the same.
    again = tiny.simulation("fedavg", model, choices=kept.choices, wave=4)
    assert "prefix" in again.choices
    monkeypatch.setattr(memory, "free", lambda device: 1 << 40)
    assert "prefix" not in tiny.simulation("fedavg", model, choices=sim.choices).choices


def test_plans():
    plan = prefix.PrefixPlan("body", 10, 3, 120, 240)
    assert plan.fits
    assert not prefix.PrefixPlan("body", 10, 3, 121, 241).fits
