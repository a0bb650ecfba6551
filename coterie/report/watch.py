"""A live view of a run: the report's page on 127.0.0.1, which asks for fresh data while the run goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from coterie.errors import CoterieError
from coterie.report.contents import gather
from coterie.report.page import page
from coterie.running.experiment import EXPERIMENT
from coterie.running.folder import inside

FRESH_SECONDS = 2.0
"""How long gathered data are served before the files are read again."""

WAITING = """<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="2">
<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,"><title>coterie watch</title>
<body style="font:16px/1.5 system-ui,sans-serif;margin:3rem;color-scheme:light dark">
<p>Waiting for the first evaluation …</p></body></html>"""


class Watcher:
    """Reads the run's files when asked, at most every few seconds; several browsers may ask at once."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self._lock, self._read = Lock(), float("-inf")
        self._data: dict[str, Any] | None = None

    def data(self) -> dict[str, Any] | None:
        """What the report shows of the files as they are; None before the first evaluation."""
        with self._lock:
            if time.monotonic() - self._read > FRESH_SECONDS:
                try:
                    self._data = {**gather(self.paths), "live": True}
                except CoterieError:
                    if self._data is None and not all(_begun(path) for path in self.paths):
                        raise
                self._read = time.monotonic()
            return self._data


def _begun(path: Path) -> bool:
    """Whether a run was begun there, even if there is nothing to show of it yet."""
    return (path / EXPERIMENT).is_file() or bool(inside(path))


def server(paths: Sequence[Path], port: int = 0) -> ThreadingHTTPServer:
    """A server on 127.0.0.1, on a free port where none is given; `serve_forever` runs it."""
    watcher = Watcher(paths)
    watcher.data()  # a wrong path is said at once, not in the browser

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.partition("?")[0]
            if name not in ("/", "/data.json"):
                self.send_error(404)
                return
            try:
                data = watcher.data()
            except CoterieError as reason:
                self.send_error(500, str(reason))
                return
            if name == "/":
                self._answer(WAITING if data is None else page(data), "text/html")
            else:
                self._answer(json.dumps(data, allow_nan=False), "application/json")

        def _answer(self, text: str, kind: str) -> None:
            body = text.encode()
            tag = f'"{sha256(body).hexdigest()[:16]}"'
            same = self.headers.get("If-None-Match") == tag
            self.send_response(304 if same else 200)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", "0" if same else str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("ETag", tag)
            self.end_headers()
            if not same:
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing: the terminal belongs to the user."""

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except (OSError, OverflowError) as reason:
        why = getattr(reason, "strerror", None) or reason
        raise CoterieError(f"port {port} cannot be used: {why}; choose another with --port.") from reason
