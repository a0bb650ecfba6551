"""How patient a server is with its sites, and how much its gate lets through."""

from __future__ import annotations

import re
from dataclasses import dataclass

from coterie.errors import CoterieError, counted

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(kB|MB|GB)")
_UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class Policy:
    """How patient the server is."""

    sites: int = 1
    """Sites that must be there before training begins; whoever is there then is the population."""
    deadline: float = 600.0
    """Seconds a round waits for answers."""
    minimum: int = 1
    """Answers without which a round is skipped (an aggregator may need more)."""
    target: int = 0
    """Answers after which a round goes on without waiting for the others; 0 waits for all who were asked."""
    wait: float = 3600.0
    """Seconds to wait for enough sites, at the beginning and before every round."""
    poll: float = 0.5
    """Seconds between looks at who is there."""

    def __post_init__(self) -> None:
        for name, lowest in (("sites", 1), ("minimum", 1), ("target", 0)):
            if getattr(self, name) < lowest:
                raise CoterieError(f"{name} must be at least {lowest}, not {getattr(self, name)}.")
        for name in ("deadline", "wait", "poll"):
            if not getattr(self, name) > 0:
                raise CoterieError(f"{name} must be a positive number of seconds, not {getattr(self, name)}.")
        if self.minimum > self.sites:
            raise CoterieError(f"minimum={self.minimum} answers cannot come from {counted(self.sites, 'site')}.")
        if self.target and self.target < self.minimum:
            raise CoterieError(f"target={self.target} is below minimum={self.minimum}.")


@dataclass(frozen=True)
class Gate:
    """What the server's front lets through to Flower. Who comes too fast waits; the rest is refused."""

    body: str = "auto"
    """The largest answer of a site, all its arrays together, e.g. `300 MB`; `auto` reckons it from the model."""
    rate: float = 200.0
    """Requests a second of one site; four times as many from one address."""
    connections: int = 1000
    """Connections at a time, those that have not yet spoken included."""
    per_address: int = 100
    """Connections at a time from one address."""
    head: float = 10.0
    """Seconds in which TLS is agreed on, and again the head of a request is complete."""
    idle: float = 60.0
    """Seconds in which nothing moves, after which a connection is closed."""
    total: float = 1800.0
    """Seconds that one request may take in all."""

    def __post_init__(self) -> None:
        for name in ("rate", "connections", "per_address", "head", "idle", "total"):
            if not 0 < getattr(self, name) < float("inf"):
                raise CoterieError(f"{name} of the gate must be a positive number, not {getattr(self, name)}.")
        if self.body != "auto" and not _SIZE.fullmatch(self.body):
            raise CoterieError(f"body of the gate is a size, e.g. \"300 MB\", or \"auto\", not {self.body!r}.")

    def largest(self, auto: int) -> int:
        """The largest answer in bytes; `auto` is what the model makes of it."""
        found = _SIZE.fullmatch(self.body)
        return int(float(found[1]) * _UNITS[found[2]]) if found else auto
