"""How the process holds on to host memory, and how much memory is free."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # glibc's names for mallopt's first argument
OFF = "COTERIE_KEEP_MEMORY"


@cache
def keep_freed() -> bool:
    """Let freed blocks stay with the process instead of going back to the system; says whether that worked.

    A stack of rows is many megabytes. glibc maps and unmaps such a block each time a temporary is made, so that every
    step pays for fresh pages; kept blocks are used again at once. COTERIE_KEEP_MEMORY=0 leaves the allocator alone, as
    does any other C library than glibc.
    """
    if os.environ.get(OFF, "1") == "0" or not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    wanted = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_TOP_PAD, 1 << 26))
    return all(mallopt(name, value) == 1 for name, value in wanted)


def free(device: torch.device) -> int:
    """Bytes that can still be allocated on a device; on a CPU what the system, or the container, can spare."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    return min(_available(), _container())


def _available() -> int:
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        with suppress(AttributeError, ValueError, OSError):  # e.g. macOS says how much there is, not what is free
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        return 4 << 30


def _container() -> int:
    """What a container's limit leaves; file pages that the system can drop are not counted as used."""
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(limit - used + int(stat.get("inactive_file", 0)), 0)
    except (OSError, ValueError):  # no such limit ("max" is no number)
        return 1 << 62
