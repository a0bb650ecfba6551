"""How the process holds on to host memory."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache

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
