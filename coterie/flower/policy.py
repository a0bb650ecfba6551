"""How patient a server is with its sites."""

from __future__ import annotations

from dataclasses import dataclass

from coterie.errors import CoterieError, counted


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
