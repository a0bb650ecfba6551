"""Text as numbers: a simple tokenizer without a vocabulary, or the user's own."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

from coterie.data.readers.vocabulary import Vocabulary, names_file
from coterie.errors import CoterieError, counted, unknown
from coterie.files import in_file
from coterie.trust import code

Tokenizer = Callable[[str], Sequence[int]]
WORDS = 32_000
LENGTH = 64
_WORD = re.compile(r"\w+|[^\w\s]")
HELD = 0.95
"""Share of the texts that a length should hold; where it holds fewer, a note says how many were cut."""
UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+")
"""Letters of Thai, Lao, Burmese, Khmer, Japanese and Chinese, which have no blanks between words."""
PHRASE = 6
"""Such letters side by side, on average, from which on they are phrases and no words that somebody set apart."""
KEPT = 500_000
"""Different texts that are remembered, each as a number, to be told from others; later ones are not."""


def word_numbers(text: str, words: int = WORDS) -> list[int]:
    """Lower-case words and signs; each word's number is a hash from 1 to words - 1, the same on every machine."""
    return [1 + crc32(word.encode("utf-8", "replace")) % (words - 1) for word in _WORD.findall(text.lower())]


def character_numbers(text: str, words: int = WORDS) -> list[int]:
    """Each character's code, from 1 to words - 1."""
    return [1 + ord(sign) % (words - 1) for sign in text]


BUILT_IN = {"words": word_numbers, "characters": character_numbers}
RULES = {
    "words": r"lower-case words and signs, found by \w+|[^\w\s], each 1 + crc32(its UTF-8 bytes) % (words - 1)",
    "characters": "each character 1 + its Unicode number % (words - 1)",
}
"""What the built-in tokenizers do, for programs that must do the same."""


class Cutter:
    """A function text -> exactly `length` numbers below `words`: cut at the end, or filled up with 0.

    `given` is words, characters, file.py:function, a function text -> numbers, or a tokenizer.json with its own
    vocabulary, whose special tokens stay where a text is cut. No vocabulary is learned, so that every site numbers its
    words alike without seeing the others' texts. What was cut is counted for `notes`.
    """

    def __init__(self, given: str | Tokenizer, words: int, length: int) -> None:
        if words < 2 or length < 1:
            raise CoterieError(f"words must be at least 2 and length at least 1, not {words} and {length}.")
        of_file = isinstance(given, str) and given not in BUILT_IN and names_file(given)
        self.vocabulary = Vocabulary(str(given)) if of_file else None
        if self.vocabulary is not None:
            if words not in (WORDS, self.vocabulary.words):
                raise CoterieError(f"the tokenizer {given} has {self.vocabulary.words} words, not words={words}; leave "
                                   "words= out.")
            self._call, words = self.vocabulary, self.vocabulary.words
        elif isinstance(given, str):
            self._call = _named(given, words)
        elif callable(given):
            self._call = given
        else:
            raise CoterieError(
                f"a tokenizer is words, characters, a tokenizer.json, file.py:function or a function, not {given!r}.")
        self.title, self.words, self.length = _title(given), words, length
        if self.vocabulary is not None:
            self.title = self.vocabulary.path.name  # where it lies is nobody else's business
        self._lengths: Counter[int] = Counter()  # how many texts have so many tokens
        self._unspaced = 0  # texts whose phrases became a word each
        self._texts: set[int] = set()
        self._samples: set[int] = set()

    _call: Callable[[str], Any]

    @property
    def mask(self) -> int | None:
        """The number that stands for a masked token; None where the tokenizer has none."""
        return None if self.vocabulary is None else self.vocabulary.mask

    @property
    def special(self) -> frozenset[int]:
        """The numbers of what is no word, such as [CLS]."""
        return frozenset() if self.vocabulary is None else self.vocabulary.special

    def numbers(self, text: str) -> list[int]:
        """All of a text's numbers, checked."""
        try:
            found = [int(n) for n in self._call(text)]
        except Exception as error:
            raise CoterieError(f"the tokenizer {self.title} fails on '{text[:40]}': {error}") from error
        if found and not (min(found) >= 0 and max(found) < self.words):
            wrong = min(found) if min(found) < 0 else max(found)
            raise CoterieError(f"the tokenizer {self.title} gives the number {wrong}; with words={self.words} it must "
                               f"be from 0 to {self.words - 1}.")
        return found

    def windows(self, text: str) -> list[list[int]]:
        """The whole text in pieces of `length + 1` numbers, the last one filled up with 0; each begins with the last
        number of the one before it, so that every number but the first follows one. None of fewer than two numbers."""
        found = self.numbers(text)
        starts = range(0, len(found) - 1, self.length)
        return [(found[k : k + self.length + 1] + [0] * self.length)[: self.length + 1] for k in starts]

    def __call__(self, text: str) -> list[int]:
        found = self.numbers(text)
        kept = found
        if self.vocabulary is not None and len(found) > self.length:
            kept = self.vocabulary.cut(text, self.length)
        tokens = (kept + [0] * self.length)[: self.length]
        self._lengths[len(found)] += 1
        if self.title == "words" and (runs := UNSPACED.findall(text)):
            self._unspaced += sum(map(len, runs)) >= PHRASE * len(runs)
        if len(self._texts) < KEPT:
            self._texts.add(hash(text))
            self._samples.add(hash(tuple(tokens)))
        return tokens

    def notes(self) -> list[str]:
        """Texts that were cut, texts without blanks between words, and different texts that became equal samples, where
        these are more than a few."""
        total, cut = self._lengths.total(), sum(n for size, n in self._lengths.items() if size > self.length)
        said = []
        if cut > (1 - HELD) * total:
            held, enough = 0, 0
            for enough in sorted(self._lengths):
                held += self._lengths[enough]
                if held >= HELD * total:
                    break
            said.append(f"{cut} of {counted(total, 'text')} {'is' if cut == 1 else 'are'} longer than "
                        f"length={self.length} and {'was' if cut == 1 else 'were'} cut; length={enough} holds "
                        f"{HELD:.0%} of them".replace("%", " %"))
        if self._unspaced > (1 - HELD) * total:
            said.append(f"{self._unspaced} of {counted(total, 'text')} {'has' if self._unspaced == 1 else 'have'} no "
                        "blanks between words, as Chinese, Japanese or Thai, so whole phrases became a word each; "
                        "tokenizer=characters reads such texts")
        texts, samples = len(self._texts), len(self._samples)
        if texts - samples > (1 - HELD) * texts:
            way = "a larger length= keeps more of each" if cut else f"tokenizer={self.title} tells no more of them"
            said.append(f"{texts} different texts became {counted(samples, 'different sample')}: {way}")
        return said

    def encoding(self) -> dict[str, Any]:
        """How texts become numbers, as a table's encoding says it."""
        rule = {"rule": f"{RULES[self.title]}; cut at length, or filled up with 0"} if self.title in RULES else {}
        own = {} if self.vocabulary is None else self.vocabulary.encoding()
        return {"tokenizer": self.title, "words": self.words, "length": self.length, **rule, **own}


def _named(given: str, words: int) -> Callable[[str], Any]:
    if given in BUILT_IN:
        return lambda text: BUILT_IN[given](text, words)
    file = in_file(given)
    if file is None or file[2]:
        raise unknown("tokenizer", given, [*BUILT_IN, "file.py:function", "tokenizer.json"])
    path, name = Path(file[0]), file[1]
    module = code.module(path, f"the tokenizer {name}")
    found = getattr(module, name, None)
    if not callable(found):
        raise unknown(f"function in {path}", name, [n for n, v in vars(module).items() if callable(v)])
    chosen: Callable[[str], Any] = found
    return chosen


def _title(given: object) -> str:
    return given if isinstance(given, str) else str(getattr(given, "__name__", given))
