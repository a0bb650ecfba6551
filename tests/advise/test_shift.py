"""How unlike clients are, on data whose answer is known."""

import numpy as np
import pytest

from coterie.advise.shift import _silhouette, clusters, shift
from coterie.data import Federation


def federation(clients, **options):
    return Federation.from_clients(clients, val=0.0, test=0.0, **options)


def drawn(count, n, classes=4, seed=0):
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal((n, 5)).astype(np.float32), rng.integers(0, classes, n)) for _ in range(count)]


def test_equal_clients_show_what_chance_gives():
    """40 clients of 50 samples from one distribution; the formula for chance is the law of large numbers' answer."""
    found = shift(federation(drawn(40, 50)))
    assert found.label == pytest.approx(found.label_by_chance, rel=0.1)
    assert found.feature == pytest.approx(0, abs=0.01)


def test_clients_with_a_class_each_have_the_largest_label_distance():
    """Four equal clients with one class each: total variation to the pooled quarter shares is 3/4."""
    clients = [(x, np.full(len(y), i)) for i, (x, y) in enumerate(drawn(4, 30))]
    assert shift(federation(clients)).label == pytest.approx(0.75)


def test_a_shift_of_the_inputs_is_its_share_of_the_variance():
    """Variance 1 inside clients, and clients at -1 and +1: half of all variance lies between them."""
    clients = [(x + (1 if i % 2 else -1), y) for i, (x, y) in enumerate(drawn(10, 400))]
    found = shift(federation(clients))
    assert found.feature == pytest.approx(0.5, abs=0.02)
    assert found.label == pytest.approx(found.label_by_chance, abs=0.02)


def test_targets_and_tokens():
    """Targets with variance 1 around clients' means of -1 and 1: half. Tokens have no distances, so no number."""
    numbers = [(x, x[:, 0] + (1 if i % 2 else -1)) for i, (x, _) in enumerate(drawn(10, 400))]
    assert shift(federation(numbers)).label == pytest.approx(0.5, abs=0.03)
    tokens = [(np.arange(12).reshape(4, 3) % 5, np.array([0, 1, 0, 1])) for _ in range(3)]
    assert shift(federation(tokens)).feature is None


def test_groups_are_found_and_counted():
    rng = np.random.default_rng(1)
    centres = 3 * rng.standard_normal((3, 50))
    found = clusters(rng.standard_normal((24, 50)) + centres[np.arange(24) % 3])
    assert found.count == 3
    assert len({(i % 3, g) for i, g in enumerate(found.groups)}) == 3  # the very groups


@pytest.mark.parametrize("seed", range(10))
def test_one_cloud_is_not_taken_for_groups(seed):
    """Also a stretched one, which k-means cuts along its length."""
    rng = np.random.default_rng(seed)
    assert not clusters(rng.standard_normal((30, 40)) * np.linspace(3, 0.1, 40)).exist


def test_too_few_clients_or_equal_ones_have_no_groups():
    assert clusters(np.eye(4)).count == 1
    assert clusters(np.ones((12, 5))).count == 1


def test_the_silhouette_by_hand():
    """Points 0, 1 | 5: the first has a = 1, b = 5, the second a = 1, b = 4, the third is alone: (0.8 + 0.75) / 3."""
    points = np.array([0.0, 1.0, 5.0])
    apart = np.abs(points[:, None] - points[None])
    assert _silhouette(apart, np.array([0, 0, 1])) == pytest.approx((0.8 + 0.75) / 3)
