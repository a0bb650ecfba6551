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
def test_bench_times_methods_with_inner_steps_of_their_own(tmp_path):
    """The reference engine loops over a method's own steps too, so APFL reaches the same rows both ways."""
    done = coterie("bench", "apfl", "--clients", "5", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "apfl" in done.stdout
    assert "Both ways reached the same rows" in " ".join(done.stdout.split())
