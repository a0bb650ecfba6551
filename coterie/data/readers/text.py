"""Text as numbers: a simple tokenizer without a vocabulary, or the user's own."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

from coterie.errors import CoterieError, unknown

Tokenizer = Callable[[str], Sequence[int]]
WORDS = 32_000
LENGTH = 64
_WORD = re.compile(r"\w+|[^\w\s]")


def word_numbers(text: str, words: int = WORDS) -> list[int]:
    """Lower-case words and signs; each word's number is a hash from 1 to words - 1, the same on every machine."""
    return [1 + crc32(word.encode("utf-8", "replace")) % (words - 1) for word in _WORD.findall(text.lower())]


def character_numbers(text: str, words: int = WORDS) -> list[int]:
    """Each character's code, from 1 to words - 1."""
    return [1 + ord(sign) % (words - 1) for sign in text]


BUILT_IN = {"words": word_numbers, "characters": character_numbers}


def tokenizer_of(given: str | Tokenizer, words: int, length: int) -> Tokenizer:
    """A function text -> exactly `length` numbers below `words`: cut at the end, or filled up with 0.

    `given` is words, characters, file.py:function, or a function text -> numbers. No vocabulary is learned, so that
    every site numbers its words alike without seeing the others' texts.
    """
    if words < 2 or length < 1:
        raise CoterieError(f"words must be at least 2 and length at least 1, not {words} and {length}.")
    if isinstance(given, str):
        call: Callable[[str], Any] = _named(given, words)
    elif callable(given):
        call = given
    else:
        raise CoterieError(f"a tokenizer is words, characters, file.py:function or a function, not {given!r}.")

    def tokens(text: str) -> list[int]:
        try:
            found = [int(n) for n in call(text)]
        except Exception as error:
            raise CoterieError(f"the tokenizer {_title(given)} fails on '{text[:40]}': {error}") from error
        if found and not (min(found) >= 0 and max(found) < words):
            wrong = min(found) if min(found) < 0 else max(found)
            raise CoterieError(f"the tokenizer {_title(given)} gives the number {wrong}; with words={words} it must be "
                               f"from 0 to {words - 1}.")
        return (found + [0] * length)[:length]

    return tokens


def _named(given: str, words: int) -> Callable[[str], Any]:
    if given in BUILT_IN:
        return lambda text: BUILT_IN[given](text, words)
    file, colon, name = given.rpartition(":")
    if not colon or not file.endswith(".py"):
        raise unknown("tokenizer", given, [*BUILT_IN, "file.py:function"])
    path = Path(file)
    if not path.is_file():
        raise CoterieError(f"there is no file '{path}' to take the tokenizer {name} from.")
    spec = importlib.util.spec_from_file_location(f"coterie_tokenizer_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise CoterieError(f"'{path}' cannot be imported: {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise unknown(f"function in {path}", name, [n for n, v in vars(module).items() if callable(v)])
    chosen: Callable[[str], Any] = found
    return chosen


def _title(given: object) -> str:
    return given if isinstance(given, str) else str(getattr(given, "__name__", given))
