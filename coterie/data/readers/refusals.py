"""What is wrong with data, said in one error; and whatever a file's decoder raises as a sentence."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from coterie.errors import CoterieError, NoLabels, counted

UNPACKED, PACKED = 1 << 30, 500
"""A file may become so many bytes, or so many times its own size, whichever is more."""
EXAMPLES = 4
"""How many places a problem names; the others are counted."""
UNLABELLED, MINUS_ONE = "samples have no label", "samples have the label -1, which stands for none"
SPELLED = "clients appear in several spellings"
"""What skip=true does not leave out: it takes them as different clients."""


class Problems:
    """What is wrong with data: counted by kind and client, with the first few places."""

    def __init__(self) -> None:
        self._found: dict[str, _Kind] = {}
        self.totals: Counter[str] = Counter()
        self.remedies: list[str] = []  # further ways out than mending and leaving out

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, kind: str, where: str = "", client: object = None, why: str = "", count: int = 1) -> None:
        """`kind` begins with what is counted: 'files cannot be read', 'samples have no label'."""
        found = self._found.setdefault(kind, _Kind(Counter(), [], Counter()))
        found.count[kind] += count
        if client is not None:
            found.clients[str(client)] += count
        if (where or why) and len(found.places) < EXAMPLES:
            found.places.append(f"{where} ({why})" if where and why else where or why)
        else:
            found.count["more"] += 1 if where or why else 0

    def add_counted(self, kind: str, clients: Mapping[Any, int], places: Sequence[str] = ()) -> None:
        """The same for many at once: how many of each client, and where the first few of all are."""
        for client, count in clients.items():
            self.add(kind, client=client or None, count=count)
        found, total = self._found[kind], sum(clients.values())
        shown = list(places[: EXAMPLES - len(found.places)])
        found.places += shown
        found.count["more"] += total - len(shown) if found.places else 0

    def sentences(self) -> list[str]:
        return [found.sentence(kind, self.totals[kind.partition(" ")[0]]) for kind, found in self._found.items()]

    def error(self, text: str) -> CoterieError:
        """The error to raise; another one where labels are all that is missing."""
        return NoLabels(text) if self._found and self._found.keys() <= {UNLABELLED, MINUS_ONE} else CoterieError(text)

    def settle(self, skip: bool, name: str) -> tuple[str, ...]:
        """Raise one report; with `skip` return it instead."""
        if not self._found:
            return ()
        said = dict(zip(self._found, self.sentences(), strict=True))
        if skip:
            return tuple(f"{sentence}; they are taken as different clients" if kind == SPELLED else
                         f"left out: {sentence}" for kind, sentence in said.items())
        ways = [*self.remedies, *(["take such clients as different ones with skip=true"] if SPELLED in said else []),
                *(["leave it out with skip=true"] if said.keys() != {SPELLED} else [])]
        *most, last = dict.fromkeys(ways)
        raise self.error(f"{name} cannot be used as it is. {'; '.join(said.values())}. Mend this"
                         f"{''.join(f', {way}' for way in most)}, or {last}.")


ONE = {"have": "has", "appear": "appears", "lie": "lies", "belong": "belongs", "are": "is"}
"""The verbs of the sentences, where one thing is counted."""
_VERB = re.compile(rf"\b({'|'.join(ONE)})\b")


@dataclass
class _Kind:
    count: Counter[str]
    places: list[str]
    clients: Counter[str]

    def sentence(self, kind: str, total: int) -> str:
        many, (what, _, rest) = self.count[kind], kind.partition(" ")
        said = f"{many} of {counted(total, what[:-1])}" if total >= many else counted(many, what[:-1])
        said += f" {_VERB.sub(lambda found: ONE[found[0]], rest, count=1) if many == 1 else rest}"
        if self.clients:
            said += f" ({_listed([f'client {c}: {n}' for c, n in self.clients.items()], len(self.clients))})"
        return f"{said}: {_listed(self.places, len(self.places) + self.count['more'])}" if self.places else said


def _listed(items: Sequence[str], total: int) -> str:
    shown = list(items[:EXAMPLES])
    return ", ".join([*shown, f"and {total - len(shown)} more"] if total > len(shown) else shown)


@contextmanager
def reading(path: object, kind: str) -> Iterator[None]:
    """Whatever a file's decoder raises becomes a sentence: damaged bytes make libraries raise anything."""
    try:
        yield
    except CoterieError:
        raise
    except Exception as error:
        raise CoterieError(f"'{path}' cannot be read as {kind}: {reason(error)}") from error


def refuse_bomb(packed: int, unpacked: int) -> None:
    """Raise where few bytes say of themselves that they become very many: they would fill memory and disk for hours."""
    if unpacked > max(UNPACKED, PACKED * packed):
        raise ValueError(f"{packed} bytes would become {unpacked}, more than {PACKED} times as many")


def reason(error: BaseException) -> str:
    """An error of a file's library as the end of a sentence; of what `files` says, the end."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.object[error.start]:#04x} is not written in UTF-8; save the file as UTF-8"
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if type(error).__name__ == "UnidentifiedImageError":
        return "no image"
    if isinstance(error, CoterieError):
        return str(error).rpartition(": ")[2].removesuffix(".")
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 120 else text[:117] + "..."
