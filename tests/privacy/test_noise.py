"""The streams of noise: the same words give the same numbers, any other word independent ones, and a secret counts."""

import math

import torch

from coterie.privacy.noise import SECRET, normal


def test_noise_streams():
    """Same seed, round and purpose: same noise. Any other word: independent noise (|correlation| < 5 / sqrt(n))."""
    n = 20_000
    first = normal(0, 3, "sum", n)
    assert torch.equal(first, normal(0, 3, "sum", n))
    assert torch.equal(first[:100], normal(0, 3, "sum", 100))
    for other in (normal(1, 3, "sum", n), normal(0, 4, "sum", n), normal(0, 3, "count", n)):
        assert abs(float(torch.corrcoef(torch.stack([first, other]))[0, 1])) < 5 / math.sqrt(n)


def test_a_secret_joins_the_seed(monkeypatch, tiny):
    """Noise and sampling then follow the secret too; two seeds still differ."""
    open_noise = normal(0, 0, "sum", 5)
    options = {"sampling": "poisson", "participation": 0.5, "data": tiny.federation(sizes=(2,) * 20)}
    drawn = [tiny.simulation(**options).selected(t).tolist() for t in range(3)]
    monkeypatch.setenv(SECRET, "long and random")
    assert not torch.equal(normal(0, 0, "sum", 5), open_noise)
    assert not torch.equal(normal(0, 0, "sum", 5), normal(1, 0, "sum", 5))
    assert [tiny.simulation(**options).selected(t).tolist() for t in range(3)] != drawn
