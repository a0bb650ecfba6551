"""Errors are sentences for the person who made the mistake; counts and names in them read as people write them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches


class CoterieError(ValueError):
    """Bad input. The message says what was given, what was expected and what to do; the command line exits with 2."""


class NoLabels(CoterieError):  # noqa: N818 (named for what it says)
    """Samples without labels, and nothing else wrong with them: a newcomer may be served all the same."""


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
