"""The one gate through which a user's Python files are run.

`mine.py:Mine` is a method in a file, `mymodel.py:Net` a model; losses, metrics, optimizers and tokenizers may lie in
files as well. A path that somebody types, or passes in Python, is trusted by that: the digest of the file's content
goes to the user's list (see `digests`). A path that stands in a run folder, a model file or a TOML file runs only where
the list holds the content's digest: every file that such a text could mean is asked for before (`require`), while it is
opened nothing else runs (`foreign`), and a path of it asks in this process from then on (`mark`). Runs keep copies of
the files by content, and go on with those.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Literal

from coterie import files
from coterie.errors import CoterieError
from coterie.trust import digests

Rule = Literal["typed", "trusted", "nothing"]
"""What runs: whatever is asked for, because somebody typed it; what the user's list holds; or nothing at all."""

FOLDER = "code"
"""Where a run keeps copies of the files it was made with: code/DIGEST/mine.py."""
MOST = 8 << 20
"""Bytes of a code file, at most."""
SHORT = 12
"""Characters of a digest that name the folder of a copy."""
MANY = 1000
"""Places in a spelling, at most, at which the path of a code file could begin."""
LONGEST = 4096
"""Characters of a path, at most: no system opens a longer one."""
_BEFORE = re.compile(r"[,=:(+]")
"""What may stand before a path in a spelling, as in `fedavg:server=lion.py:Lion`."""

_everywhere: list[Rule] = ["typed"]
_here: ContextVar[Rule | None] = ContextVar("_here", default=None)
_foreign: set[str] = set()
"""Paths that texts of somebody else's could mean, as they stand there and whole: these ask in Python, too."""
_copies: dict[str, tuple[str, str]] = {}
"""Copies that runs keep, by their whole paths: the path that the file had, and the digest it must have."""
_ran: dict[str, tuple[str, bytes]] = {}
"""What ran in this process, by the path that the file had: digest and content."""


# -- the rule that holds -----------------------------------------------------------------------------------------------


@contextmanager
def only_trusted() -> Iterator[None]:
    """In the whole process only what the user's list holds runs: the command line, which adds what was typed."""
    _everywhere.append("trusted")
    try:
        yield
    finally:
        _everywhere.pop()


@contextmanager
def nothing() -> Iterator[None]:
    """Here no file runs, trusted or not: for those who only read records."""
    with _under("nothing"):
        yield


@contextmanager
def foreign() -> Iterator[None]:
    """Here only what the user's list holds runs, in Python too: something that somebody else may have written is open.
    """
    with _under(_here.get() or "trusted"):
        yield


@contextmanager
def _under(rule: Rule) -> Iterator[None]:
    before = _here.set(rule)
    try:
        yield
    finally:
        _here.reset(before)


def runs_nothing() -> bool:
    """Whether no file may run here, so that spellings stay as they are."""
    return _rule() == "nothing"


def _rule() -> Rule:
    return _here.get() or _everywhere[-1]


# -- running a file ----------------------------------------------------------------------------------------------------


def module(path: Path, what: str) -> ModuleType:
    """Run the file and return it as a module; `what` says what is wanted of it, e.g. `the method Mine`.

    What runs is the content whose digest was looked up, never a compiled file that lies beside it.
    """
    if runs_nothing():
        raise CoterieError(f"{path} is not run here, so there is no {what.removeprefix('the ')}.")
    if not os.path.isfile(path):  # a path that no system takes is no file either
        raise CoterieError(f"there is no file '{path}' to take {what} from.")
    whole = str(path.resolve())
    content, digest = _read(path)
    source, expected = _copies.get(whole, (whole, digest))
    if digest != expected:
        raise CoterieError(f"{path} is not the copy that the run made of {source}.")
    copy, marked = whole in _copies, not _foreign.isdisjoint((whole, str(path)))
    if copy or marked or _rule() == "trusted":
        _require(digest, path, "a file that was opened" if marked else "")
    else:
        digests.add(digest, whole)
    _ran[source] = (digest, content)
    name = f"coterie_file_{path.stem}_{hashlib.sha256(f'{source} {digest}'.encode()).hexdigest()[:SHORT]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    found = importlib.util.module_from_spec(spec)
    found.__dict__["__coterie_file__"] = whole
    sys.modules[name] = found
    try:
        with _without_this_folder(copy):
            exec(compile(content, str(path), "exec", dont_inherit=True), found.__dict__)
    except Exception as reason:
        lacking = isinstance(reason, ModuleNotFoundError) and copy
        more = (f"; files beside {Path(source).name} are not copied into runs: put their folder into PYTHONPATH"
                if lacking else "")
        raise CoterieError(f"'{path}' cannot be imported: {type(reason).__name__}: {reason}{more}") from reason
    return found


def _read(path: Path) -> tuple[bytes, str]:
    content = files.read_bytes(path, MOST)
    return content, hashlib.sha256(content).hexdigest()


def _require(digest: str, path: Path | str, where: str = "") -> None:
    if digests.trusted(digest):
        return
    why = f" ({digests.trouble()})" if digests.trouble() else ""
    named = f"{where} names the code file {path}" if where else f"the code file {path} was not typed"
    raise CoterieError(
        f"{named}, sha256 {digest}, which you have not trusted{why}; nothing of it was run. Read it, then allow it "
        "with --trust (trust=True in Python)."
    )


@contextmanager
def _without_this_folder(copy: bool) -> Iterator[None]:
    """A run's copy does not take its neighbours from wherever one happens to stand; PYTHONPATH is somebody's word."""
    before, asked = list(sys.path), os.environ.get("PYTHONPATH", "").split(os.pathsep)
    here = os.getcwd()
    if copy:
        sys.path[:] = [p for p in before if p in asked or os.path.realpath(p or here) != os.path.realpath(here)]
    try:
        yield
    finally:
        if copy:
            sys.path[:] = before


# -- spellings that name files -----------------------------------------------------------------------------------------


def named(text: str, folder: Path | None = None) -> list[str]:
    """The paths of code files in a spelling, as they stand there.

    A path ends at `.py:` and begins at the first place at which a file is found, seen from a folder; where none is, at
    the nearest place that a path may begin at.
    """
    base = folder or Path()
    return [next((p for p in paths if os.path.isfile(base / p)), paths[-1]) for paths in _possible(text)]


def _possible(text: str) -> list[list[str]]:
    """Of each code file in a spelling every path that it could have, the longest first, whoever cuts the text.

    A path ends at `.py:` (see `files.in_file`) and begins where the text does, or at a sign at which one is cut.
    """
    found, seen, count = [], 0, 0
    while (ending := text.find(files.CODE, seen)) >= 0:
        first, end = max(seen, ending - LONGEST), ending + len(files.CODE) - 1
        starts = [first, *(one.end() for one in _BEFORE.finditer(text, first, ending))]
        found.append([text[start:end] for start in starts])
        seen, count = end, count + len(starts)
        if count > MANY:
            raise CoterieError(f"'{text[:40]}...' is no spelling: there are more than {MANY} places in it at which the "
                               "path of a code file could begin.")
    return found


def absolute(text: str, folder: Path | None = None) -> str:
    """The spelling with whole paths of its files, seen from a folder, so that it means the same from anywhere."""
    base = Path() if folder is None else folder
    return _exchanged(text, {path: os.path.realpath(base / path) for path in named(text, base) if "\0" not in path})


def original(text: str) -> str:
    """The spelling with the paths that files had in place of those of runs' copies."""
    return _exchanged(text, {copy: source for copy, (source, _) in _copies.items()}) if ".py:" in text else text


def _exchanged(text: str, paths: Mapping[str, str]) -> str:
    if not paths:
        return text
    several = "|".join(re.escape(path) for path in sorted(paths, key=len, reverse=True))
    return re.sub(rf"(?:^|(?<=[,=:(+]))({several})(?=:)", lambda found: paths[found[1]], text)


# -- what is trusted ---------------------------------------------------------------------------------------------------


def typed(*texts: str | None) -> None:
    """Trust the files that somebody's own words name; a file that is not there is said to be so by whoever wants it."""
    for path in _there(name for text in texts if text for name in named(text)):
        digests.add(_read(path)[1], str(path.resolve()))


def require(texts: Iterable[str], where: str, trust: bool = False) -> None:
    """Raise where a spelling that stands in `where` could mean a file that is there and not trusted; or `trust` it now.
    """
    for path in _there(mark(texts)):
        digest = _read(path)[1]
        if trust:
            digests.add(digest, str(path.resolve()))
        _require(digest, path, where)


def mark(texts: Iterable[str]) -> list[str]:
    """The paths that spellings of somebody else's could mean; from now on these run only where their content is
    trusted, whoever asks and whatever has been put there since."""
    every = [path for text in texts for paths in _possible(text) for cut in paths for path in (cut, cut.strip())]
    for path in every:
        _foreign.update((str(Path(path)), os.path.realpath(path)) if "\0" not in path else ())
    return every


def _there(paths: Iterable[str]) -> list[Path]:
    return [Path(path) for path in dict.fromkeys(paths) if os.path.isfile(path)]


def require_same(texts: Iterable[str], known: object, where: str) -> None:
    """Raise where a file that a spelling in `where` names is not the one it was, by a table of digests."""
    for path in _there(mark(texts)):
        if isinstance(known, Mapping) and known.get(str(path), _read(path)[1]) != _read(path)[1]:
            raise CoterieError(f"{path} has changed since {where} was written; nothing of it was run.")


# -- copies in a run folder --------------------------------------------------------------------------------------------


def keep(folder: Path, texts: Iterable[str]) -> dict[str, str]:
    """Copy the files that these spellings name into a run's folder; their paths and digests, to be written down.

    The content is the one that ran in this process, also where the file has been changed since.
    """
    found = _contents(texts)
    for source, (digest, content) in found.items():
        copy = _copy(folder, source, digest)
        files.make_folder(folder / FOLDER)
        files.make_folder(copy.parent)
        files.write_bytes(copy, content)
    return {source: digest for source, (digest, _) in found.items()}


def table(texts: Iterable[str]) -> dict[str, str]:
    """The files that these spellings name, each with the digest of its content."""
    return {source: digest for source, (digest, _) in _contents(texts).items()}


def _contents(texts: Iterable[str]) -> dict[str, tuple[str, bytes]]:
    found = {}
    for path in (path for text in texts for path in named(text)):
        whole = str(Path(path).resolve())
        source = _copies.get(whole, (whole, ""))[0]
        if source in _ran:
            found[source] = _ran[source]
        elif Path(source).is_file():
            content, digest = _read(Path(source))
            found[source] = (digest, content)
    return found


def _copy(folder: Path, source: str, digest: str) -> Path:
    """Where a run's copy lies; the record does not say, so that it cannot name another place."""
    return folder / FOLDER / digest[:SHORT] / Path(source).name


class Copies:
    """The code files that a run's record names, and the copies that take their places."""

    def __init__(self, folder: Path, table: object, former: Mapping[str, tuple[str, str]] | None = None) -> None:
        """`table` is what `keep` gave. `former` has copies of earlier versions: path -> file in the folder, digest."""
        known = dict(table) if isinstance(table, Mapping) else None
        if table is not None and (known is None or not all(_is_entry(*item) for item in known.items())):
            raise CoterieError(f"{folder} is damaged: what it says of its code files is no list of digests.")
        self.folder, self.notes = folder, list[str]()
        self._paths: dict[str, str] = {}
        entries = {source: (_copy(folder, source, digest), digest) for source, digest in (known or {}).items()}
        entries |= {source: (folder / name, digest) for source, (name, digest) in (former or {}).items()}
        self._entries = entries

    def trust(self) -> None:
        """Trust every copy."""
        for source, (copy, digest) in self._entries.items():
            if copy.is_file() and _read(copy)[1] == digest:
                digests.add(digest, source)

    def take(self) -> None:
        """Let the copies take their places, and note where a file is not what it was."""
        for source, (copy, digest) in self._entries.items():
            there = Path(source).is_file()
            same = there and _read(Path(source))[1] == digest
            what = "has changed since the run began" if there else "is gone"
            if copy.is_file() and _read(copy)[1] == digest:
                whole = str(copy.resolve())
                _copies[whole] = (source, digest)
                self._paths[source] = whole
                self.notes += [] if same else [f"{source} {what}; the run goes on with its copy {copy}."]
            elif not same:
                raise CoterieError(f"{source} {what}, and {copy} is not the copy the run made of it.")

    def spelled(self, text: str) -> str:
        """The spelling with copies in place of the files."""
        return _exchanged(text, self._paths)


def _is_entry(source: object, digest: object) -> bool:
    whole = isinstance(source, str) and source.endswith(".py") and Path(source).is_absolute()
    return whole and isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest) is not None
