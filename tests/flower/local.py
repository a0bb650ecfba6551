"""For tests with real processes on this machine: ports that are free, and waiting for something to come."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable


def free_ports(count: int) -> list[int]:
    """Different ports of 127.0.0.1 that nobody listens on."""
    held = [socket.socket() for _ in range(count)]
    for one in held:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


def free_port() -> int:
    return free_ports(1)[0]


def wait(condition: Callable[[], object], seconds: float, what: object) -> None:
    """Until the condition holds; `what` is said if it does not within so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.1)
