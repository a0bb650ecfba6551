"""A comparison that several files look at."""

import pytest
from commands import SMALL, coterie


@pytest.fixture(scope="session")
def compared(tmp_path_factory):
    place = tmp_path_factory.mktemp("compared")
    done = coterie("compare", "fedper", "fedfew", *SMALL, "--rounds", 3, "--seeds", 2, "--out", "out", cwd=place)
    assert done.returncode == 0, done.stderr
    return place, done.stdout
