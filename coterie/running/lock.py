"""One writer at a time: a lock on a run folder, with its owner and time for people to read.

The lock itself is `flock`, which ends with the process, however it ends; the file says who holds it.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

from coterie import files
from coterie.errors import CoterieError, say

FILE = "lock.json"
"""In the folder while somebody writes to it."""


class Lock:
    """Held from its making until `release`; raises where somebody else holds it, or where a link leads out of it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self._handle: int | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            files.refuse_links(folder)
            self._handle = _locked(self.path)
            self._taken_over(_said(self._handle))
            owner = {"pid": os.getpid(), "host": platform.node(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, (json.dumps(owner) + "\n").encode(), 0)
        except OSError as reason:
            self.release()
            raise CoterieError(f"the run folder {folder} cannot be written: {reason.strerror}.") from reason
        except CoterieError:
            self._close()
            raise

    def release(self) -> None:
        """Let go of it, and leave no file behind."""
        try:
            if self._handle is not None:
                self.path.unlink(missing_ok=True)
        finally:
            self._close()

    def _close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    def _taken_over(self, before: dict[str, Any]) -> None:
        """Say whose lock it was, where a process of this machine ended without a word; refuse one of another machine.

        There `flock` may not reach.
        """
        if not before or before.get("pid") == os.getpid():
            return
        if before.get("host") != platform.node():
            raise CoterieError(f"{self.path.parent} is being written by {_owner(before)}, as {self.path} says. If that "
                               f"has ended, remove {self.path}.")
        say([f"{self.path.parent} was being written by {_owner(before)}, which has ended; its lock is taken over."])


def _locked(path: Path) -> int:
    """A handle on the file that lies there, locked; raises where somebody else has it."""
    while True:
        handle = files.own(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as reason:
            before = _said(handle)
            os.close(handle)
            if not isinstance(reason, BlockingIOError):
                raise
            said = f"{path.parent} is being written by {_owner(before)}; wait for it, or stop it."
            raise CoterieError(said) from None
        if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
            return handle
        os.close(handle)  # its owner removed it just now


def _said(handle: int) -> dict[str, Any]:
    """What the lock's file says, if anything."""
    try:
        found = json.loads(os.pread(handle, 4096, 0))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _owner(said: dict[str, Any]) -> str:
    """The process in words; the file may be anybody's."""
    pid, host, since = (str(said.get(name, "?"))[:64] for name in ("pid", "host", "since"))
    text = f"process {pid} on {host} since {since}"
    return "".join(c if c.isprintable() else "?" for c in text)
