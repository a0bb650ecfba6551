"""`coterie bench` as somebody runs it."""

import pytest
from commands import coterie


@pytest.mark.long
def test_bench_times_both_ways(tmp_path):
    """The small benchmark anybody can run: one line a method, with the ratio."""
    done = coterie("bench", "fedavg", "--clients", "5", "--set", "batch=100", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ratio" in done.stdout
    assert "fedavg" in done.stdout


@pytest.mark.long
def test_bench_says_what_it_cannot_compare(tmp_path):
    """A method with inner steps of its own has no published way here."""
    done = coterie("bench", "apfl", "--clients", "5", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "coterie: this method trains by steps of its own; the published way here is plain SGD.\n"
