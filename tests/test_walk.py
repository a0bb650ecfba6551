"""docs/architecture.md shows the walks that the program takes now, and rooms do not call back."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.long
def test_rooms_call_down_and_the_page_shows_it():
    """Apart from the contract, two rooms that call each other would be a circle which imports alone do not show."""
    done = subprocess.run([sys.executable, "docs/walk.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
