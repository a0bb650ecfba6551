"""Options as text and as values: the fields of a dataclass, `name:option=value,...`, and what the words mean."""

from __future__ import annotations

import dataclasses
import itertools
import math
import types
from collections.abc import Iterable, Mapping, Sized
from numbers import Integral, Real
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from coterie.errors import CoterieError, unknown
from coterie.files import FOLDER, in_file, in_folder

T = TypeVar("T")

_OPTIONS: dict[type[Any], dict[str, Any]] = {}  # resolving the hints of a class takes longer than all the rest
_RANGES: dict[type[Any], dict[str, Range]] = {}


# -- the values that a number may have --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range:
    """The values that an option may have, declared beside it: `tau: Annotated[float, Range(above=0)] = 0.5`.

    A bound that is not given does not bind. NaN is in no range, and infinity only in one that says `infinite`. A number
    other than 0 has a size from 1e-30 to 1e30: rows are float32, where what is smaller soon is 0, and what is larger
    infinite.
    """

    SIZES: ClassVar[tuple[float, float]] = (1e-30, 1e30)

    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None
    infinite: bool = False

    def __contains__(self, value: Any) -> bool:
        return (
            self.takes_size(value)
            and (self.above is None or value > self.above)
            and (self.at_least is None or value >= self.at_least)
            and (self.below is None or value < self.below)
            and (self.at_most is None or value <= self.at_most)
        )

    def takes_size(self, value: Any) -> bool:
        """Whether it can be reckoned with: 0, neither too small nor too large, or infinite where that is allowed."""
        least, most = self.SIZES
        return value == 0 or least <= abs(value) <= most or (self.infinite and abs(value) == math.inf)

    def __str__(self) -> str:
        """In words that follow `must be`: above 0, at least 1, from 0 to 1, at least 0 and below 1."""
        if self.at_least is not None and self.at_most is not None:
            return f"from {self.at_least:g} to {self.at_most:g}"
        bounds = {"above": self.above, "at least": self.at_least, "below": self.below, "at most": self.at_most}
        said = " and ".join(f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None)
        return said or "a number"


Positive = Annotated[float, Range(above=0)]
"""A number above 0: a temperature, a width, a step size."""
NonNegative = Annotated[float, Range(at_least=0)]
"""A number of at least 0: the strength of a term, which 0 switches off."""
Share = Annotated[float, Range(at_least=0, at_most=1)]
"""A number from 0 to 1: a share of a whole, a probability."""
BelowOne = Annotated[float, Range(at_least=0, below=1)]
"""A number of at least 0 and below 1: a share of the past."""
Count = Annotated[int, Range(at_least=1)]
"""A whole number of at least 1: clusters, steps, features."""
CountOrZero = Annotated[int, Range(at_least=0)]
"""A whole number of at least 0: rounds or epochs that may be left out."""


def ranges(cls: type[Any]) -> dict[str, Range]:
    """The options of a dataclass that have a range: name -> range."""
    if cls not in _RANGES:
        hints = get_type_hints(cls, include_extras=True)
        found = {name: _range_in(hints[name]) for name in options(cls)}
        _RANGES[cls] = {name: held for name, held in found.items() if held is not None}
    return _RANGES[cls]


def _range_in(hint: Any) -> Range | None:
    """The range in a hint: `Annotated[float, Range(...)]`, or one of the choices of a union."""
    if get_origin(hint) is Annotated:
        beside = [note for note in get_args(hint)[1:] if isinstance(note, Range)]
        return beside[0] if beside else _range_in(get_args(hint)[0])
    inner = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else ()
    return next((held for held in map(_range_in, inner) if held is not None), None)


def require_ranges(made: Any) -> None:
    """Raise unless the options of a dataclass are in their ranges; for `__post_init__`, so however it was made.

    What is neither a number nor text passes: it stands for the numbers of several runs that are computed together.
    """
    cls = type(made)
    for name, held in ranges(cls).items():
        value, hint = getattr(made, name), options(cls)[name]
        optional = type(None) in get_args(hint)
        if value is None and optional:
            continue
        what = f"{cls.name}'s {name}" if hasattr(cls, "name") else name
        number = int if int in (hint, *get_args(hint)) else float
        if isinstance(value, bool | str | None) or (number is int and not isinstance(value, Integral) and _real(value)):
            raise CoterieError(f"{what} must be {_article(number)}, not '{value}'.")
        if _real(value) and value not in held:
            said = f"{held}{' or none' if optional else ''}"
            if value == value and not held.takes_size(value):
                said += ", and of a size from {:g} to {:g}, with which float32 can reckon".format(*held.SIZES)
            raise CoterieError(f"{what} must be {said}, not {value}.")


def _real(value: Any) -> bool:
    return isinstance(value, Real)


def in_words(cls: type[Any], name: str) -> str:
    """The range of an option as its page lists it, empty where it has none: `a whole number, at least 1, or none`."""
    held, hint = ranges(cls).get(name), options(cls)[name]
    if held is None:
        return ""
    kinds = (hint, *get_args(hint))
    said = f"a whole number, {held}" if int in kinds else str(held)
    return f"{said}{', inf too' if held.infinite else ''}{', or none' if type(None) in kinds else ''}"


# -- how much is read --------------------------------------------------------------------------------------------------

LONGEST = 4000
"""Characters of a method, a model or another spelling, at most; they may stand in a file of anybody's."""
LONGEST_DATA = 64_000
"""Those of data, whose options may list many columns."""
MOST = 300
"""Entries of a list in a spelling, such as a model's layers or patterns of names, at most."""


def require_short(values: Mapping[str, Any], where: str, most: int = LONGEST) -> None:
    """Raise where one of these texts, or lists of texts, is longer than anybody means it to be."""
    for name, value in values.items():
        for text in value if isinstance(value, list | tuple) else [value]:
            if isinstance(text, str) and len(text) > most:
                raise CoterieError(f"{name} of {where} has {len(text)} characters; at most {most} are read.")


def require_few(entries: Sized, what: str) -> None:
    """Raise where a list in a spelling is longer than anybody means it to be."""
    if len(entries) > MOST:
        raise CoterieError(f"{what} has {len(entries)} entries; at most {MOST} are read.")


# -- names, types and text --------------------------------------------------------------------------------------------


def options(cls: type[Any]) -> dict[str, Any]:
    """The options of a dataclass: name -> type. A field that is none says so, `metadata={"option": False}`."""
    if cls not in _OPTIONS:
        hints = get_type_hints(cls)
        found = [f.name for f in dataclasses.fields(cls) if f.init and f.metadata.get("option", True)]
        _OPTIONS[cls] = {name: hints[name] for name in found}
    return _OPTIONS[cls]


def current(cls: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values under the names that options have now; two names of one option are refused.

    A class says in `FORMER` what became of a name: another name, or `name=text` with `{}` in place of the value.
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        known = name if name in options(cls) else dict(getattr(cls, "FORMER", ())).get(name, name)
        now, is_text, text = known.partition("=")
        if now in found:
            raise CoterieError(f"{now} is given twice, once under another name: {', '.join(values)}.")
        found[now] = text.format(spelled(value)) if is_text else value
    return found


def build(cls: type[T], values: Mapping[str, Any], kind: str) -> T:
    """The dataclass with these values, text converted to each option's type; unknown names suggest the nearest.

    A class may say what others call its options, `OTHER_WORDS`, what they were called before, `FORMER` (see `current`),
    and where they are explained, `LISTED`.
    """
    known, values = options(cls), current(cls, values)
    for name in values:
        if name not in known:
            raise unknown(
                f"option of {kind}", name, known, getattr(cls, "OTHER_WORDS", None), getattr(cls, "LISTED", ""),
                spelled(values[name]),
            )
    return cls(**{name: convert(value, known[name], f"{kind}'s {name}") for name, value in values.items()})


def convert(value: Any, hint: Any, what: str) -> Any:
    """A value, possibly text from the command line, as the type an option wants."""
    origin = get_origin(hint)
    if origin is Literal:
        if value not in get_args(hint):
            raise unknown(f"value of {what}", str(value), (str(choice) for choice in get_args(hint)))
        return value
    if origin in (Union, types.UnionType):
        if value is None or (isinstance(value, str) and value.lower() == "none"):
            return None
        return convert(value, next(h for h in get_args(hint) if h is not type(None)), what)
    if origin is tuple:
        items = pieces(value) if isinstance(value, str) else value
        if not isinstance(items, list | tuple):
            raise CoterieError(f"{what} must be a list, not '{value}'.")
        return tuple(convert(item, get_args(hint)[0], f"an entry of {what}") for item in items)
    try:
        if hint is bool:
            return _truth(value)
        if hint is int and not isinstance(value, bool):
            number = int(value)
            if float(value) == number:
                return number
            raise ValueError
        if hint is float and not isinstance(value, bool):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        raise CoterieError(f"{what} must be {_article(hint)}, not '{value}'.") from None
    if hint is str and not isinstance(value, str):
        raise CoterieError(f"{what} must be text, not '{value}'.")
    if hint in (bool, int, float) and isinstance(value, bool) and hint is not bool:
        raise CoterieError(f"{what} must be {_article(hint)}, not '{value}'.")
    return value


def spelled(value: Any) -> str:
    """A value as the command line spells it: true, false and none in lower case, several with commas between."""
    if isinstance(value, tuple):
        return ",".join(map(spelled, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _truth(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).lower() in ("true", "yes", "on", "1"):
        return True
    if str(value).lower() in ("false", "no", "off", "0"):
        return False
    raise ValueError


def _article(hint: Any) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false"}.get(hint, str(hint))


def pieces(text: str, separator: str = ",") -> list[str]:
    """The text cut at a separator, but not inside parentheses: `a=1,b=f(c=2,d=3)` has two pieces; empty ones go."""
    cuts, depth = [-1], 0
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == separator and depth <= 0:
            cuts.append(at)
    return [text[a + 1 : b] for a, b in itertools.pairwise([*cuts, len(text)]) if b > a + 1]


def parse_call(text: str) -> tuple[str, dict[str, str]]:
    """`name(option=value,...)` -> the name and the values as text; `name` alone has none."""
    name, opened, rest = text.strip().partition("(")
    if opened and not rest.endswith(")"):
        raise CoterieError(f"'{text}' opens a parenthesis that nothing closes; write name(option=value,...).")
    if not name or ")" in name or ")" in rest[:-1]:
        raise CoterieError(f"'{text}' is not of the form name(option=value,...).")
    return name.strip(), split_options(rest.removesuffix(")"), text)


def split_options(rest: str, text: str, lists: Iterable[str] = ()) -> dict[str, str]:
    """`key=value,key=value` -> the values as text; a value may hold commas itself, such as hidden=64,32.

    A key that stands twice is refused, unless it is one of `lists`: those add up, so `a=1,a=2` is `a=1,2`.
    """
    found: dict[str, str] = {}
    for item in pieces(rest):
        key, equals, value = item.partition("=")
        if not equals and found:
            last = next(reversed(found))
            found[last] += f",{item}"
        elif not equals:
            raise CoterieError(f"'{item}' in '{text}' is no option; write option=value,option=value.")
        else:
            added(found, key.strip(), value.strip(), text, lists)
    return found


def added(found: dict[str, str], key: str, value: str, where: str, lists: Iterable[str] = ()) -> None:
    """Take in one more option: the values of `lists` add up, and any other that is given twice is refused."""
    if key in found and key not in lists:
        raise CoterieError(f"{key} is given twice in '{where}', {found[key]} and {value}; give it once.")
    # The value moves to the end, where further words behind a comma belong to it.
    found[key] = f"{found.pop(key)},{value}" if key in found else value


def parse_options(text: str) -> tuple[str, dict[str, Any]]:
    """`name:key=value,key=value` -> name and values as numbers where they look like numbers.

    The name of something in a file holds a colon itself, `file.py:Name:key=value`, and so does that of a folder,
    `hf:PATH:key=value`.
    """
    if file := in_file(text):
        name, rest = f"{file[0]}:{file[1]}", file[2]
    elif folder := in_folder(text):
        name, rest = f"{FOLDER}{folder[0]}", folder[1]
    else:
        name, _, rest = text.partition(":")
    found = split_options(rest, text)
    return name, {key: _plain(value) for key, value in found.items()}


def _plain(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
