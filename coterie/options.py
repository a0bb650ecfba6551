"""Options as text and as values: the fields of a dataclass, `name:option=value,...`, and what the words mean."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from coterie.errors import CoterieError, unknown
from coterie.files import IN_FILE

T = TypeVar("T")

_OPTIONS: dict[type[Any], dict[str, Any]] = {}  # resolving the hints of a class takes longer than all the rest


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
    found, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == separator and depth <= 0:
            found.append("")
        else:
            found[-1] += letter
    return [piece for piece in found if piece]


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

    The name of something in a file holds a colon itself: `file.py:Name:key=value`.
    """
    file = IN_FILE.match(text)
    name, _, rest = text.partition(":") if file is None else (f"{file[1]}:{file[2]}", ":", file[3] or "")
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
