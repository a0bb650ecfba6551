"""How the process holds on to host memory, how much memory is free, and tensors that lie in files."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.errors import CoterieError, NoMemory

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # glibc's names for mallopt's first argument
OFF = "COTERIE_KEEP_MEMORY"
BLOCK = 1 << 19
"""Values that are read, moved or converted at a time where the data may be larger than memory."""


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
    return min(_available(), _container(), _limits())


@contextmanager
def at_most(more: int) -> Iterator[None]:
    """Within it the process can take so many bytes more of host memory; beyond that memory has run out (`exhausted`).

    For what others ask to be built. Systems without such a limit for a process do without it.
    """
    try:
        import resource

        used = int(_own()["VmData"].split()[0]) << 10
        before = resource.getrlimit(resource.RLIMIT_DATA)
    except (ImportError, OSError, KeyError, ValueError):
        yield
        return
    most = used + more if before[0] == resource.RLIM_INFINITY else min(used + more, before[0])
    resource.setrlimit(resource.RLIMIT_DATA, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def exhausted(reason: BaseException) -> bool:
    """Whether an error says that memory has run out, the host's or a GPU's."""
    if isinstance(reason, NoMemory):
        return not reason.settings  # else it says already what to try
    if isinstance(reason, MemoryError | torch.OutOfMemoryError):
        return True
    words = str(reason).lower()
    told = any(f"{start} memory" in words for start in ("not enough", "cannot allocate", "can't allocate"))
    return isinstance(reason, RuntimeError | OSError) and told


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


def _limits() -> int:
    """What the limits of this process (ulimit -d, ulimit -v) leave."""
    try:
        import resource

        lines = _own()
        left = [1 << 62]
        for limit, used in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
            allowed = resource.getrlimit(limit)[0]
            if allowed != resource.RLIM_INFINITY:
                left.append(max(allowed - (int(lines[used].split()[0]) << 10), 0))
        return min(left)
    except (ImportError, OSError, KeyError, ValueError):  # a system without such limits
        return 1 << 62


def _own() -> dict[str, str]:
    """What the system says of this process."""
    return dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())


# -- tensors in files --------------------------------------------------------------------------------------------------


def mapped(shape: tuple[int, ...], dtype: torch.dtype, what: str) -> Tensor:
    """Memory in a file of the temporary folder (TMPDIR). The file has no name any more, so it goes with the tensor."""
    size = prod(shape) * dtype.itemsize
    handle, path = tempfile.mkstemp(prefix="coterie-")
    try:
        _reserve(handle, size)
        return torch.from_file(path, shared=True, size=prod(shape), dtype=dtype).view(shape)
    except OSError as reason:
        raise no_room(what, size, reason) from reason
    finally:
        os.close(handle)
        with suppress(OSError):  # a system that does not unlink open files keeps it until the folder is emptied
            os.unlink(path)


def is_mapped(t: Tensor) -> bool:
    """Whether a tensor lies in a file."""
    return t.device.type == "cpu" and t.untyped_storage().filename is not None


def through(fn: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    """`fn(t)`, for a function of single rows of `t [N, ...]`: block by block into a file when `t` lies in a file."""
    if not is_mapped(t) or not len(t):
        return fn(t)
    like, rows = fn(t[:1]), max(1, BLOCK // max(t[0].numel(), 1))
    if like.data_ptr() == t.data_ptr():  # a view
        return fn(t)
    out = mapped((len(t), *like.shape[1:]), like.dtype, "the samples")
    for first in range(0, len(t), rows):
        out[first : first + rows] = fn(t[first : first + rows])
    return out


def taken(x: Tensor, rows: Tensor) -> Tensor:
    """`x[rows]`; a tensor that lies in a file is copied into another file, block by block."""
    if not is_mapped(x):
        return x[rows]
    out, size = mapped((len(rows), *x.shape[1:]), x.dtype, "the samples"), max(1, BLOCK // max(x[0].numel(), 1))
    for first in range(0, len(rows), size):
        torch.index_select(x, 0, rows[first : first + size], out=out[first : first + size])
    return out


def no_room(what: str, size: int, reason: OSError) -> CoterieError:
    return CoterieError(
        f"{what} need {size / 1e9:.1f} GB in {tempfile.gettempdir()}, which could not be had ({reason.strerror}); set "
        "TMPDIR to a folder on a larger disk."
    )


def _reserve(handle: int, size: int) -> None:
    """Take the room now: a full disk found out later would kill the process."""
    reserve: Any = getattr(os, "posix_fallocate", None)
    if reserve is not None:
        reserve(handle, 0, size)
    else:
        os.truncate(handle, size)
