"""Errors are sentences for the person who made the mistake; counts and names in them read as people write them.

Names were chosen by others, so what is printed of them is made visible here (`tell`, `say`) or by `report.screen`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches


class CoterieError(ValueError):
    """Bad input. The message says what was given, what was expected and what to do; the command line exits with 2."""


class NoLabels(CoterieError):  # noqa: N818 (named for what it says)
    """Samples without labels, and nothing else wrong with them: a newcomer may be served all the same."""


class NoMemory(CoterieError):  # noqa: N818 (named for what it says)
    """Memory ran out. `settings`, as for --set, take less; `anew` if they change results."""

    def __init__(self, message: str, settings: Sequence[str] = (), anew: bool = False) -> None:
        super().__init__(message)
        self.settings, self.anew = tuple(settings), anew


class Interrupted(Exception):  # noqa: N818 (not an error)
    """ctrl-C: the round was finished and the state saved."""


def unknown(
    kind: str, given: str, known: Iterable[str], other_words: Mapping[str, str] | None = None, listed: str = "",
    value: str = "...",
) -> CoterieError:
    """The error for a name that does not exist: it suggests the nearest one that does, else lists them all.

    `other_words` are words for known names that are not alike, without `_` and `-`; where no name will do, a clause
    that says what to write, with `{}` in place of the `value`. Where a list alone says too little, `listed` is the
    sentence that says where the names are explained.
    """
    names = sorted(known)
    meant = (other_words or {}).get(given.lower().replace("_", "").replace("-", ""), "")
    spelled = {name.lower(): name for name in names}
    alike = [spelled[name] for name in get_close_matches(given.lower(), spelled, n=1, cutoff=0.6)]
    near = [meant] if meant in names else alike
    if " " in meant:
        hint = f"{meant.replace('{}', value)}."
    else:
        hint = f"did you mean '{near[0]}'?" if near else "" if listed else f"known: {', '.join(names)}."
    return CoterieError(f"unknown {kind} '{given}'; {' '.join(filter(None, (hint, listed)))}")


def counted(count: int, noun: str, plural: str = "") -> str:
    """A count with its noun: `1 round`, `2 rounds`, `0 rounds`; `plural` where it is not made with an s."""
    return f"{count} {noun if count == 1 else plural or f'{noun}s'}"


STEERING = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)
"""Signs that nobody sees and that steer whoever shows them: controls, escapes, changes of direction, half signs."""


def visible(text: str, lines: bool = False) -> str:
    """A text that others wrote, for people to read: signs that would steer a terminal are written out, `\\x1b`.

    It stays in its line, so that no name can begin one; with `lines` line breaks and tabs are kept.
    """
    return STEERING.sub(lambda sign: sign[0] if lines and sign[0] in "\n\t" else ascii(sign[0])[1:-1], text)


def shortened(name: str, most: int) -> str:
    """A name that others chose, for a place of `most` letters: its beginning where it is longer."""
    seen = visible(name)
    return seen if len(seen) <= most else f"{seen[: most - 1].rstrip()}…"


def tell(text: str, end: str = "\n", stderr: bool = False) -> None:
    """Print lines as they are, of any width."""
    print(visible(text, lines=True), end=end, file=sys.stderr if stderr else sys.stdout, flush=True)


def say(notes: Iterable[str]) -> None:
    """What coterie has to say beside the output, a line each."""
    for note in notes:
        tell(f"coterie: {visible(note)}", stderr=True)
