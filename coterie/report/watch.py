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

from coterie.errors import CoterieError, visible
from coterie.report.contents import evaluated, gather
from coterie.report.page import page
from coterie.running.experiment import EXPERIMENT
from coterie.running.folder import consistent, inside

FRESH_SECONDS = 2.0
"""How long gathered data are served before the files are read again."""

HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""What this machine calls itself."""

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


def _ours(hosts: Sequence[str], port: int) -> bool:
    """Whether a browser asks by a name of this machine: a foreign page can make its own name mean 127.0.0.1."""
    ends = (f":{port}", "") if port == 80 else (f":{port}",)
    return len(hosts) == 1 and hosts[0].lower() in [f"{name}{end}" for name in HOSTS for end in ends]


def _served(name: str, data: dict[str, Any] | None) -> tuple[str, str]:
    """The page, or its data alone, and of which kind that is."""
    if name == "/":
        return WAITING if data is None else page(data), "text/html"
    return json.dumps(data, allow_nan=False), "application/json"


def server(paths: Sequence[Path], port: int = 0) -> ThreadingHTTPServer:
    """A server on 127.0.0.1, on a free port where none is given; `serve_forever` runs it."""
    watcher = Watcher(paths)
    if watcher.data() is None and any(evaluated(folder) for path in paths for folder in inside(path)):
        gather(paths)  # a wrong path and damaged records are said at once, not in the browser

    class Handler(BaseHTTPRequestHandler):
        timeout = 30  # seconds without a word, after which a connection is closed

        def do_GET(self) -> None:
            if not _ours(self.headers.get_all("Host") or (), self.connection.getsockname()[1]):
                self._refuse(421, "this page is served to 127.0.0.1 and localhost alone")
                return
            name = self.path.partition("?")[0]
            if name not in ("/", "/data.json"):
                self._refuse(404, "there are / and /data.json")
                return
            try:
                data = watcher.data()
                with consistent(watcher.paths):
                    text, kind = _served(name, data)
            except CoterieError as reason:
                self._refuse(500, visible(str(reason)))
                return
            self._answer(text, kind)

        do_HEAD = do_GET  # noqa: N815 (the name in http.server)

        def _answer(self, text: str, kind: str) -> None:
            body = text.encode()
            tag = f'"{sha256(body).hexdigest()[:16]}"'
            if self.headers.get("If-None-Match") == tag:
                self._send(304, b"", kind, tag)
            else:
                self._send(200, body, kind, tag)

        def _refuse(self, code: int, why: str) -> None:
            self._send(code, f"coterie watch: {why}\n".encode(), "text/plain")

        def _send(self, code: int, body: bytes, kind: str, tag: str | None = None) -> None:
            self.send_response(code)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            if tag is not None:
                self.send_header("ETag", tag)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing: the terminal belongs to the user."""

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except (OSError, OverflowError) as reason:
        why = getattr(reason, "strerror", None) or reason
        raise CoterieError(f"port {port} cannot be used: {why}; choose another with --port.") from reason
