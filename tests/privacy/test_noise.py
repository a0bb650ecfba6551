"""The streams of noise: the same names give the same numbers, any other independent ones; what a secret must be."""

import base64
import math
import random
import string
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import kstest
from torch import nn

from coterie import registry
from coterie.contract.method import Uploads
from coterie.errors import CoterieError
from coterie.privacy.noise import NEW_SECRET, SECRET, Streams, quantiles, secret
from coterie.running.server import Server

GOOD = "6f1d2b8c94e07a35b1c8f02d7e6a49530c9d1b7f8a2e4c6d"


def unlike(first, *others):
    """Independent noise: |correlation| < 5 / sqrt(n), which fails with probability 6e-7."""
    return all(abs(float(torch.corrcoef(torch.stack([first, other]))[0, 1])) < 5 / math.sqrt(len(first))
               for other in others)


# -- streams -----------------------------------------------------------------------------------------------------------


def test_noise_of_a_seed(monkeypatch):
    """Without a secret: same seed, round and purpose, same noise, whatever it is added to and whichever run it is."""
    monkeypatch.delenv(SECRET, raising=False)
    n, one = 20_000, Streams.fresh(0)
    first = one.normal(3, "sum", n)
    assert torch.equal(first, Streams.fresh(0, "another experiment").normal(3, "sum", n, b"another sum"))
    assert torch.equal(first[:100], one.normal(3, "sum", 100))
    assert unlike(first, Streams(1).normal(3, "sum", n), one.normal(4, "sum", n), one.normal(3, "count", n))


def test_noise_of_a_secret(monkeypatch):
    """Every run has its own, by its nonce; in a run, seed, experiment, round, purpose and what it is added to count."""
    monkeypatch.delenv(SECRET, raising=False)
    n, plain = 20_000, Streams(0).normal(3, "sum", 20_000)
    monkeypatch.setenv(SECRET, GOOD)
    one, other = Streams.fresh(0, "here"), Streams.fresh(0, "here")
    assert one.nonce != other.nonce
    first = one.normal(3, "sum", n, b"7")
    assert torch.equal(first, Streams.of(0, one.record()).normal(3, "sum", n, b"7"))  # as after a restart
    assert unlike(first, plain, other.normal(3, "sum", n, b"7"), one.normal(4, "sum", n, b"7"),
                  one.normal(3, "count", n, b"7"), one.normal(3, "sum", n, b"8"))
    assert kstest(first.numpy(), "norm").pvalue > 1e-4


def test_the_rarest_bits_are_finite_noise():
    """All ones, which come once in 2^53 draws, were rounded to the quantile of 1; 8.2 is that of 1 - 2^-53."""
    ends = quantiles(np.array([0, 2**64 - 1, 2**63], dtype=np.uint64))
    assert ends.tolist() == pytest.approx([-8.29, 8.21, 0], abs=0.005)


def test_draws_of_who_takes_part(monkeypatch):
    """Uniform, by name alone, so that the order of clients does not matter, and others in every round and run."""
    monkeypatch.setenv(SECRET, GOOD)
    names = np.random.default_rng(0).integers(0, 2**62, 20_000)
    one, other = Streams.fresh(5), Streams.fresh(5)
    drawn = one.chance(names, 2, "participate")
    assert kstest(drawn, "uniform").pvalue > 1e-4
    assert np.array_equal(drawn[::-1], one.chance(names[::-1].copy(), 2, "participate"))
    assert unlike(*map(torch.from_numpy, (drawn, one.chance(names, 3, "participate"),
                                          other.chance(names, 2, "participate"), one.chance(names, 2, "else"))))


def test_a_runs_sampling_is_secret_and_a_plain_runs_is_not(monkeypatch, tiny):
    """Who takes part is hidden where the account counts on it; a run without privacy draws by its seed alone."""
    options = {"sampling": "poisson", "participation": 0.5, "data": tiny.federation(sizes=(2,) * 20)}

    def drawn(method):
        sim = tiny.simulation(method, **options)
        return [sim.selected(t).tolist() for t in range(3)]

    monkeypatch.delenv(SECRET, raising=False)
    plain = drawn("fedavg")
    assert drawn("fedavg+private") == plain
    monkeypatch.setenv(SECRET, GOOD)
    assert drawn("fedavg") == plain
    assert drawn("fedavg+private") != plain
    assert drawn("fedavg+private") != drawn("fedavg+private")


def test_a_copy_of_a_run_does_not_share_noise_with_it_on_another_sum(monkeypatch, tiny):
    """A folder that was copied and goes on twice has one nonce. With other clients' answers, or another sigma, the
    noise is independent; with the same answers it is the same, and nothing new is told.

    |(S + 1 z) - (S + 2 z)| would be |z|: 43 numbers of deviation 1. Without the binding to the sum both differences
    below were exactly what a client sent, or z.
    """
    monkeypatch.setenv(SECRET, GOOD)
    sim = tiny.simulation("fedavg+private:sigma=1")
    tensors, meta = sim.snapshot()
    updates = torch.randn(4, sim.layout.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 100

    def moved(clients, method="fedavg+private:sigma=1"):
        copy = Server.restored(registry.method(method), sim.init, sim.training, tensors, meta)
        n = torch.ones(clients, dtype=torch.int64)
        copy.merge(Uploads({"update": updates[:clients]}, torch.arange(clients), n, n / clients, 4, 0, sim.layout))
        return 4 * (copy.state.row - sim.server.state.row)

    assert torch.equal(moved(4), moved(4))
    missing = moved(4) - moved(3)
    assert float((missing - updates[3]).norm()) > 3  # of about sqrt(2 * 43) = 9.3
    sum_of_all = updates.sum(0)
    z, twice = moved(4) - sum_of_all, moved(4, "fedavg+private:sigma=2") - sum_of_all
    assert float((twice - 2 * z).norm()) > 3


# -- two runs with one secret ------------------------------------------------------------------------------------------


def test_two_runs_with_one_secret_do_not_give_a_client_away(monkeypatch, tiny):
    """Of two runs, one without client 0, the difference of the models is (u + sigma C (z - z')) / (q M), u its update.

    With shared noise, as in earlier versions, it was u / (q M): cosine 1. With independent noise <difference, u> less
    |u|^2, over sqrt(2) sigma C |u|, is a standard normal number T, exactly, and the cosine is T / sqrt(D) and the 0.006
    that sigma allows. 30 seeds: a cosine beyond 0.006 + 6 / sqrt(D) has probability 6e-8 in all, the mean of T beyond
    5 / sqrt(30) 6e-7, and Kolmogorov and Smirnov's p below 1e-4 one in ten thousand. The nonces are drawn here, so a
    pass stays a pass.
    """
    monkeypatch.setenv(SECRET, GOOD)
    draws = random.Random(0)
    monkeypatch.setattr("secrets.token_hex", lambda count: draws.randbytes(count).hex())
    wide = nn.Sequential(nn.Linear(4, 2000), nn.Tanh(), nn.Linear(2000, 3))
    sim = tiny.simulation("fedavg+private", lambda: wide)
    size = sim.layout.size
    updates = torch.randn(4, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    updates *= 0.9 / updates.norm(dim=1, keepdim=True)  # within the clip of 1
    missing, found, cosines = updates[0], [], []
    for seed in range(30):
        training = replace(sim.training, seed=seed)
        rows = []
        for ids in (torch.arange(4), torch.arange(1, 4)):
            server = Server(sim.method, sim.init, training)
            n = torch.ones_like(ids)
            server.merge(Uploads({"update": updates[ids]}, ids, n, n / len(ids), 4, 0, sim.layout))
            rows.append(server.state.row)
        difference = 4 * (rows[0] - rows[1])
        cosines.append(float(torch.nn.functional.cosine_similarity(difference, missing, dim=0)))
        found.append(float(difference @ missing - missing @ missing) / (math.sqrt(2) * 0.9))
    assert max(map(abs, cosines)) < 0.006 + 6 / math.sqrt(size)
    assert abs(np.mean(found)) < 5 / math.sqrt(30)
    assert kstest(found, "norm").pvalue > 1e-4


# -- secrets -----------------------------------------------------------------------------------------------------------

WEAK = {
    "": "has 0 characters", "x": "has 1 character,", "test": "has 4 characters, fewer than 22",
    "a text nobody knows": "has 19 characters, fewer than 32", "6f1d2b8c94e07a35b1c8f02d7e6a495": "has 31 characters",
    "a" * 64: "repeats itself", "deadbeef" * 8: "repeats itself", "0123456789abcdef" * 2: "repeats itself",
    "ab" * 20: "repeats itself", "aaaaaaaaaaaaaaaaaaaaaaaaA1!bcdefg": "repeats itself",
    "correct horse battery staple again": "has characters of too few kinds",
    "correcthorsebatterystaple": "has characters of too few kinds",
    "31415926535897932384626433832795": "has characters of too few kinds",
    "password-PASSWORD-1234-5678-abcd-EFGH": "holds the word 'password'",
    "My-Secret-4-our-9-hospitals-in-Rome": "holds the word 'secret'",
    "f00dcafe123456f00d99aa01b2c3d4e5": "holds the word '123456'",
}


@pytest.mark.parametrize(("text", "said"), WEAK.items())
def test_weak_secrets_are_refused_with_the_command_for_a_better_one(monkeypatch, text, said):
    monkeypatch.setenv(SECRET, text)
    with pytest.raises(CoterieError) as refused:
        secret()
    assert f"{SECRET} {said}" in str(refused.value)
    assert str(refused.value).endswith(NEW_SECRET)
    with pytest.raises(CoterieError, match="could be guessed"):
        Streams.fresh(0)


def test_random_secrets_are_taken(monkeypatch):
    """1,000 of each kind. Of 22 base64 letters one in a hundred has neither digit nor sign, (52 / 64)^22, and one may
    well ask for another; all others pass."""
    draw = random.Random(0)
    mixed = string.ascii_letters + string.digits + string.punctuation + " "

    def refused(make):
        count = 0
        for _ in range(1000):
            monkeypatch.setenv(SECRET, make())
            try:
                secret()
            except CoterieError:
                count += 1
        return count

    assert refused(lambda: draw.randbytes(16).hex()) == 0
    assert refused(lambda: draw.randbytes(32).hex()) == 0
    assert refused(lambda: base64.b64encode(draw.randbytes(32)).decode()) == 0
    assert refused(lambda: "".join(draw.choices(mixed, k=32))) == 0
    assert refused(lambda: base64.urlsafe_b64encode(draw.randbytes(16)).decode().rstrip("=")) < 30


def test_another_secret_is_refused(monkeypatch):
    """A run goes on with its own secret, seed and experiment. The record tells the secret to nobody."""
    monkeypatch.setenv(SECRET, GOOD)
    one = Streams.fresh(3, "here")
    assert GOOD not in repr(one)
    assert set(one.record()) == {"experiment", "nonce", "mark"}
    for other in (replace(one, seed=4), replace(one, experiment="there"), replace(one, nonce="00" * 16)):
        with pytest.raises(CoterieError, match="is not the secret that the run began with, or its seed or"):
            other.key()
    monkeypatch.setenv(SECRET, GOOD[::-1])
    with pytest.raises(CoterieError, match="is not the secret that the run began with"):
        one.normal(0, "sum", 5)
    monkeypatch.delenv(SECRET)
    with pytest.raises(CoterieError, match=f"made with the secret that it began with; set {SECRET}"):
        one.chance(np.arange(3), 0, "participate")
    unkeyed = Streams.fresh(3, "here")
    monkeypatch.setenv(SECRET, GOOD)
    with pytest.raises(CoterieError, match=f"began without a secret.*now {SECRET} is set; unset it"):
        unkeyed.normal(0, "sum", 5)
