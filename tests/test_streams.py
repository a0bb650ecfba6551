"""Counter-based randomness: a draw depends on its name only."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import vmap

from coterie import streams

MASK = (1 << 64) - 1
words = st.lists(st.one_of(st.integers(-(1 << 63), (1 << 64) - 1), st.text(max_size=5)), min_size=1, max_size=5)


def by_hand(*names):
    """The key in plain Python integers modulo 2^64: splitmix64's finaliser over 3 h + word + 2^64 / golden ratio."""
    h = 0
    for word in names:
        if isinstance(word, str):
            word = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "big")
        h = mixed(h * 3 + word + 0x9E3779B97F4A7C15 & MASK)
    return h - (1 << 64) if h >> 63 else h


def mixed(h):
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    h = (h ^ (h >> 27)) * 0x94D049BB133111EB & MASK
    return h ^ (h >> 31)


@given(words)
def test_keys_are_splitmix64_in_unbounded_integers(names):
    """A second implementation in Python integers; so signs, shifts and wrap-around are right."""
    assert streams.key(*names).item() == by_hand(*names)


def test_splitmix64_finaliser_reproduces_its_published_sequence():
    """Seed 0: the generator's first outputs are mix(n * golden), known as E220A8397B1DCDAF, 6E789E6AA1B965F4, ..."""
    golden = torch.arange(1, 4) * streams._GOLDEN
    found = [value & MASK for value in streams._mix(golden).tolist()]
    assert found == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@given(words, st.integers(0, 1 << 40))
def test_same_name_same_key_whatever_was_drawn_before(names, other):
    first = streams.key(*names)
    streams.uniform(streams.key(other), (5,))
    torch.rand(3)
    assert torch.equal(streams.key(*names), first)


def test_tensor_words_broadcast():
    """One call for many clients is the calls one by one, along any axes."""
    clients, steps = torch.tensor([3, 1, 4]), torch.tensor([[0], [7]])
    found = streams.key(5, clients, "train", steps)
    assert found.shape == (2, 3)
    for i, step in enumerate((0, 7)):
        for j, client in enumerate((3, 1, 4)):
            assert found[i, j] == streams.key(5, client, "train", step)


def test_order_and_number_of_words_matter():
    keys = [streams.key(*names).item() for names in ((1, 2), (2, 1), (1,), (1, 2, 0), (0, 1, 2), ("1", 2), ("a", "b"))]
    assert len(set(keys)) == len(keys)


def test_neighbouring_names_do_not_collide():
    """90 000 keys of (seed, client, round): the birthday bound for 64 bits is 2e-10."""
    grid = streams.key(torch.arange(30)[:, None, None], torch.arange(100)[:, None], torch.arange(30))
    assert grid.unique().numel() == 90_000


def test_integer_is_a_seed():
    """62 bits, not negative, so that NumPy and PyTorch take it."""
    drawn = [streams.integer("init", number) for number in range(200)]
    assert len(set(drawn)) == 200
    assert all(0 <= value < 1 << 62 for value in drawn)
    torch.Generator().manual_seed(max(drawn))


@pytest.mark.parametrize("name", [(0,), (1, "train"), (12345, 7, "dropout")])
def test_uniform_is_uniform(name):
    """10^5 draws: mean 1/2 and second moment 1/3 within 5 standard errors; chi-square of 100 cells 99 +- 5 sd."""
    n = 100_000
    u = streams.uniform(streams.key(*name), (n,), torch.float64)
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(u.mean().item() - 1 / 2) < 5 * 0.2887 / n**0.5
    assert abs(u.square().mean().item() - 1 / 3) < 5 * 0.2981 / n**0.5  # sd of U^2 is sqrt(1/5 - 1/9)
    cells = torch.histc(u, 100, 0, 1)
    chi_square = ((cells - n / 100).square() / (n / 100)).sum().item()
    assert abs(chi_square - 99) < 5 * (2 * 99) ** 0.5
    assert abs(torch.corrcoef(torch.stack([u[:-1], u[1:]]))[0, 1].item()) < 5 / n**0.5


def test_streams_are_independent():
    """First draws of 10^5 neighbouring keys are uniform too, and uncorrelated between rounds and purposes."""
    n = 100_000
    clients = torch.arange(n)

    def first(*rest):
        return vmap(lambda k: streams.uniform(k, (1,), torch.float64))(streams.key(0, clients, *rest))[:, 0]

    one, two, three = first(0, "train"), first(1, "train"), first(0, "noise")
    for u in (one, two, three):
        cells = torch.histc(u, 100, 0, 1)
        assert abs(((cells - n / 100).square() / (n / 100)).sum().item() - 99) < 5 * (2 * 99) ** 0.5
    correlations = torch.corrcoef(torch.stack([one, two, three]))
    assert (correlations - torch.eye(3)).abs().max() < 5 / n**0.5


def test_uniform_under_vmap_is_one_by_one():
    keys = streams.key("x", torch.arange(6))
    together = vmap(lambda k: streams.uniform(k, (2, 3)))(keys)
    for k, drawn in zip(keys, together):
        assert torch.equal(drawn, streams.uniform(k, (2, 3)))


def test_a_longer_draw_begins_with_the_shorter_one():
    """Masks of padded batches agree with those of true size on the samples they share."""
    key = streams.key(9)
    assert torch.equal(streams.uniform(key, (10, 4))[:3], streams.uniform(key, (3, 4)))


def test_the_same_bits_in_float32_and_float64():
    """24 bits are exact in both, so dropout masks do not depend on the precision."""
    key = streams.key(9)
    assert torch.equal(streams.uniform(key, (1000,)).double(), streams.uniform(key, (1000,), torch.float64))


@given(st.lists(st.text(max_size=8), max_size=5))
def test_integers_of_many_names_are_those_of_each(names):
    """The vector gives what `integer` gives name by name, so clients' streams stay what they are."""
    assert streams.integers("client", names).tolist() == [streams.integer("client", name) for name in names]
