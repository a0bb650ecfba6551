"""The report: one HTML file that needs nothing else, and the same figures as PNG and SVG in a folder beside it."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from coterie import files as into
from coterie.errors import CoterieError, visible
from coterie.report.contents import gather
from coterie.report.figures import draw
from coterie.running.folder import consistent

SCRIPTS = (
    "state", "dom", "numbers", "chart", "focus", "answer", "table", "clients", "spread", "convergence", "newcomers",
    "classes", "confusion", "few", "conflicts", "size", "reproduce", "card", "controls", "watch", "start",
)
"""The files of the page's program, in the order in which they run; they share one scope."""


def write(paths: Sequence[Path], out: Path) -> tuple[Path, Path]:
    """Write the page of these runs or comparisons to `out`; returns it and the folder of figures."""
    if out.is_dir():
        raise CoterieError(f"{out} is a folder; name the file to write, such as {out / 'report.html'}.")
    data = gather(paths)
    with consistent(paths):
        text = page(data)
    folder = out.with_name(f"{out.stem}-figures")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        into.write_text(out, text)
        into.make_folder(folder)
        with consistent(paths):
            draw(data, folder)
    except OSError as reason:
        raise CoterieError(f"the report {out} cannot be written: {reason.strerror}.") from reason
    return out, folder


def page(data: dict[str, Any]) -> str:
    """The whole page as text: template, style and program, which are files in the folder `web`, and the data."""
    web = files("coterie.report") / "web"
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")  # no tag can end the script
    parts = {
        "TITLE": html.escape(visible(f"coterie report: {data['title']}")), "CSS": (web / "page.css").read_text("utf-8"),
        "JS": program(), "DATA": text,
    }
    return re.sub("%(TITLE|CSS|JS|DATA)%", lambda found: parts[found[1]], (web / "page.html").read_text("utf-8"))


def program() -> str:
    """All scripts as one, inside a function, so that their names are theirs alone."""
    web = files("coterie.report") / "web"
    scripts = "\n".join((web / f"{name}.js").read_text("utf-8") for name in SCRIPTS)
    return f'"use strict";\n(() => {{\n{scripts}}})();'
