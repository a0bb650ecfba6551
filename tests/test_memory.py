"""Freed host memory is kept, and the environment can say otherwise. In processes of their own: it cannot be undone."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource
import torch
from coterie.memory import keep_freed
print(keep_freed())
def make(): return torch.ones(16 << 20)  # 64 MB, above any threshold of glibc's own
make()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(40): make()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**environment: str) -> tuple[bool, int]:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1", **environment})
    kept, count = done.stdout.split()
    return kept == "True", int(count)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_blocks_are_used_again_unless_switched_off() -> None:
    """Forty blocks of 64 MB: fresh pages each time when off (at least a fault per 2 MB), for the first few when on."""
    kept, on = faults()
    left_alone, off = faults(COTERIE_KEEP_MEMORY="0")
    assert (kept, left_alone) == (True, False)
    assert off >= 40 * 32
    assert on <= off / 4
