"""A tokenizer with a vocabulary: the file tokenizer.json that comes with a pretrained model."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

from coterie.errors import CoterieError
from coterie.files import read_bytes
from coterie.models.pretrained.packages import TOKENIZERS, tokenizer_file

FILE = "tokenizer.json"
LIBRARY = "tokenizers from files need the package tokenizers; install it with: pip install \"coterie[text]\""
PADDING = ("[PAD]", "<pad>", "<PAD>", "[pad]", "<|pad|>", "<|padding|>")
MASKS = ("[MASK]", "<mask>", "<|mask|>")
MOST = 64 << 20
"""Bytes of a tokenizer's file, at most."""


def names_file(given: str) -> bool:
    """Whether a tokenizer's spelling is that of a file, of a folder with one, or of a pretrained model that has one."""
    return given in TOKENIZERS or given.endswith(".json") or Path(given).is_dir()


class Vocabulary:
    """A function text -> its numbers in a vocabulary of `words`, special tokens included, where 0 is padding.

    Where the file's own number 0 is another token, all numbers are one more than there: `shift` is 1.
    """

    def __init__(self, given: str) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise CoterieError(f"{LIBRARY}.") from error
        path = Path(given) / FILE if Path(given).is_dir() else Path(given)
        if given in TOKENIZERS:
            path = tokenizer_file(given)
        if not path.is_file():
            raise CoterieError(f"there is no tokenizer '{path}'; name the {FILE} that came with the model, or its "
                               "folder.")
        content = read_bytes(path, MOST)
        self.path, self.sha256 = path, sha256(content).hexdigest()
        self.shift = 0
        try:
            text = content.decode("utf-8")
            self._whole, self._short = Tokenizer.from_str(text), Tokenizer.from_str(text)
        except Exception as error:  # the package raises Exception itself
            raise CoterieError(f"'{path}' is no tokenizer: {str(error).partition(chr(10))[0]}.") from error
        for tokenizer in (self._whole, self._short):
            tokenizer.no_padding()
            tokenizer.no_truncation()
        padded = (Tokenizer.from_str(text).padding or {}).get("pad_id")
        self.shift = 0 if padded == 0 or self._whole.id_to_token(0) in PADDING else 1
        known = self._whole.get_vocab(with_added_tokens=True)
        self.words = max(known.values(), default=0) + 1 + self.shift
        added = self._whole.get_added_tokens_decoder()
        self.special = frozenset(n + self.shift for n, token in added.items() if token.special)
        masks = [known[name] + self.shift for name in MASKS if name in known]
        self.mask: int | None = masks[0] if masks else None

    def __call__(self, text: str) -> list[int]:
        return [number + self.shift for number in self._whole.encode(text).ids]

    def cut(self, text: str, length: int) -> list[int]:
        """At most so many numbers: the text's own end is cut off, and special tokens behind it stay."""
        self._short.enable_truncation(length)
        return [number + self.shift for number in self._short.encode(text).ids]

    def encoding(self) -> dict[str, Any]:
        """What tells this vocabulary from another one."""
        return {"sha256": self.sha256, **({"shift": self.shift} if self.shift else {})}


def require_same(told: dict[str, Any], own: dict[str, Any], by: str) -> None:
    """Raise where texts were numbered by another vocabulary than this one's."""
    before, now = told.get("sha256"), own.get("sha256")
    if before == now:
        return
    if before is None:
        raise CoterieError(f"texts are cut with tokenizer={told.get('tokenizer')} by {by}, and by a file of numbers "
                           f"here; say tokenizer={told.get('tokenizer')}.")
    here = f"one of sha256 {now[:12]}..." if now else f"{own.get('tokenizer')}"
    raise CoterieError(f"texts are numbered by a tokenizer file of sha256 {before[:12]}... by {by}, and by {here} "
                       "here, whose numbers mean other words; name the same file, tokenizer=PATH.")
