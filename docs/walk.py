"""Draws the walks of docs/architecture.md from the code: which modules a comparison and a Flower round go through.

    python docs/walk.py            # writes docs/walk-compare.svg, docs/walk-flower.svg and the lists of the page
    python docs/walk.py --check    # writes nothing; exit code 1 where packages call back, or the page is an older one

The program runs under `sys.setprofile`. A call from a function of one module to a function of another is a step of the
walk. Every such pair is shown where it first occurs; a return is shown where the walk goes on from an earlier module.
"""

from __future__ import annotations

import contextlib
import html
import io
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import coterie
from coterie import data
from coterie.running.training import Training

HERE = Path(__file__).parent
PAGE = HERE / "architecture.md"
ROOT = Path(coterie.__file__).parent
LANES = ("cli", "flower", "report", "serving", "running", "evaluation", "engine", "data", "registry", "methods",
         "aggregators", "metrics", "models", "optimizers", "privacy", "contract")
"""Packages from above to below, as imports go; those a walk does not touch are left out."""
WORDS = ("coterie", "errors", "streams", "files", "options", "memory", "trust")
"""What everything uses like a part of the language; these are no stations of a walk."""
CONTRACT = {"methods", "aggregators", "optimizers", "contract", "engine"}
"""Between these calls go both ways: a method asks its cohort, the cohort its engine, and the engine calls what the
method wrote for one client."""


@dataclass
class Walk:
    """Calls between modules, each pair once, in order."""

    steps: list[tuple[str, str]] = field(default_factory=list)  # (caller, called)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def between_packages(self) -> set[tuple[str, str]]:
        return {(package(a), package(b)) for a, b in self.counts if package(a) != package(b)}

    def back_and_forth(self) -> list[tuple[str, str]]:
        """Pairs of packages that call each other, apart from the contract."""
        pairs = self.between_packages()
        return sorted((a, b) for a, b in pairs if a < b and (b, a) in pairs and not {a, b} <= CONTRACT)


def package(module: str) -> str:
    return module.partition(".")[0]


def module_of(code: CodeType) -> str | None:
    """The module of a function of coterie, without the leading word; None for what is no station."""
    if code.co_name == "<module>" or not code.co_filename.startswith(str(ROOT)):
        return None
    found = ".".join(Path(code.co_filename).relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return None if package(found) in WORDS or found == "__init__" else found


@contextlib.contextmanager
def traced() -> Iterator[Walk]:
    """The walk of what runs in the block."""
    walk, stack = Walk(), [""]
    names: dict[CodeType, str | None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "return"):
            return
        code = frame.f_code
        if code not in names:
            names[code] = module_of(code)
        here = names[code]
        if here is None:
            return
        if event == "return":
            if len(stack) > 1:
                stack.pop()
            return
        before = stack[-1]
        stack.append(here)
        # What PyTorch calls while a model runs is not called by the model.
        if here != before and before and package(before) != "models":
            if (before, here) not in walk.counts:
                walk.steps.append((before, here))
            walk.counts[before, here] += 1

    sys.setprofile(note)
    try:
        yield walk
    finally:
        sys.setprofile(None)


# -- the two programs --------------------------------------------------------------------------------------------------


def comparison() -> None:
    """`coterie compare fedfew --clients 20`, shortened to two rounds."""
    from coterie import cli

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        sys.argv = ["coterie", "compare", "fedfew", "--clients", "20", "--rounds", "2", "--out", f"{folder}/out",
                    "--set", "device=cpu"]
        with contextlib.suppress(SystemExit):
            cli.main()


def flower_round() -> None:
    """One round of an experiment across two sites: admission, the round, a model for both. Here both sides share a
    process, so that one trace sees them; the messages are packed and unpacked as on a network."""
    from coterie.flower.job import Job
    from coterie.flower.loopback import Loopback
    from coterie.flower.policy import Policy
    from coterie.flower.rounds import serve
    from coterie.flower.site import Site

    x, y = data.digits()
    both = [data.Federation.from_clients([(x[k:120:2], y[k:120:2])], classes=10, names=[name])
            for k, name in enumerate(("north", "south"))]
    job = Job.for_data(both[0], experiment="walk", method="fedfew:models=2", model="mlp",
                       training=Training(rounds=1, device="cpu"))
    with tempfile.TemporaryDirectory() as folder:
        sites = [Site(one.names[0], one, Path(folder) / one.names[0], "cpu", accept=job.digest) for one in both]
        serve([job], Loopback(sites), Policy(sites=2), Path(folder) / "server")


# -- lists and pictures ------------------------------------------------------------------------------------------------

WIDE, ROW, LEFT, TOP = 104, 19, 24, 46


def listed(walk: Walk) -> str:
    """The modules in order, one a line: what calls what, and `back in` where an earlier module goes on."""
    lines, path = [], [walk.steps[0][0]]
    lines.append(path[0])
    for caller, called in walk.steps:
        if caller != path[-1]:
            while path and path[-1] != caller:
                path.pop()
            path = path or [caller]
            lines.append(f"{'  ' * (len(path) - 1)}back in {caller}")
        path.append(called)
        lines.append(f"{'  ' * (len(path) - 1)}{called}")
    return "\n".join(lines)


def drawn(walk: Walk, title: str) -> str:
    """The same as a picture: a column for each package, time goes down, full lines are calls, dashed ones returns."""
    lanes = [lane for lane in LANES if any(package(m) == lane for step in walk.steps for m in step)]
    column = {lane: LEFT + WIDE * number + WIDE // 2 for number, lane in enumerate(lanes)}
    marks, lines = [], []
    y, where = TOP + ROW, {walk.steps[0][0]: TOP + ROW}
    marks.append(_mark(column[package(walk.steps[0][0])], y, walk.steps[0][0]))
    last = walk.steps[0][0]
    for caller, called in walk.steps:
        x1, x2 = column[package(caller)], column[package(called)]
        if caller != last and caller in where:
            lines.append(f'<path class="back" d="M{column[package(last)]} {y} H{x1}"/>')
        y += ROW
        up = lanes.index(package(called)) < lanes.index(package(caller))
        kind = "up" if up else "call"
        lines.append(f'<path class="{kind}" d="M{x1} {y - ROW} V{y} H{x2}"/>' if x1 != x2 else
                     f'<path class="{kind}" d="M{x1} {y - ROW} V{y}"/>')
        marks.append(_mark(x2, y, called))
        where[called], last = y, called
    width, height = 2 * LEFT + WIDE * len(lanes), y + 2 * ROW
    heads = "".join(f'<text class="lane" x="{x}" y="{TOP - 12}">{lane}</text>'
                    f'<path class="rail" d="M{x} {TOP} V{height - ROW}"/>' for lane, x in column.items())
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" aria-label="{html.escape(title)}"><style>{STYLE}</style>'
            f'<rect class="page" width="{width}" height="{height}"/>{heads}{"".join(lines)}'
            f'{"".join(marks)}</svg>\n')


STYLE = (
    "text{font:11px system-ui,sans-serif;text-anchor:middle;fill:#33404f}.lane{font-weight:600;font-size:13px}"
    "path{fill:none}.rail{stroke:#d8dee6}.call{stroke:#5b6b7d}.up{stroke:#d1495b;stroke-width:1.6}"
    ".back{stroke:#9aa7b5;stroke-dasharray:2 3}rect{fill:#fff;stroke:#5b6b7d}"
    ".page{stroke:none}"
)


def _mark(x: int, y: int, module: str) -> str:
    name = module.partition(".")[2] or module
    width = 8 + 6 * len(name)
    return (f'<rect x="{x - width // 2}" y="{y - 8}" width="{width}" height="16" rx="4"/>'
            f'<text x="{x}" y="{y + 4}">{html.escape(name)}</text>')


WALKS: dict[str, tuple[str, Callable[[], None]]] = {
    "compare": ("coterie compare fedfew --clients 20", comparison),
    "flower": ("a round across two sites", flower_round),
}


def made() -> tuple[dict[Path, str], list[str]]:
    """What the files should hold, and sentences about what calls back."""
    text, files, wrong = PAGE.read_text() if PAGE.exists() else "", {}, []
    for name, (title, program) in WALKS.items():
        program()  # once before, so that importing is no part of the walk
        with traced() as walk:
            program()
        wrong += [f"{title}: {a} and {b} call each other" for a, b in walk.back_and_forth()]
        files[HERE / f"walk-{name}.svg"] = drawn(walk, title)
        block = f"<!-- walk {name} -->\n```text\n{listed(walk)}\n```\n<!-- end -->"
        text = re.sub(rf"<!-- walk {name} -->.*?<!-- end -->", lambda _, b=block: b, text, flags=re.S)
    files[PAGE] = text
    return files, wrong


def main() -> None:
    files, wrong = made()
    if "--check" in sys.argv[1:]:
        wrong += [f"{path.name} is of an older version; run python docs/walk.py" for path, text in files.items()
                  if not path.exists() or path.read_text() != text]
    else:
        for path, text in files.items():
            path.write_text(text)
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
