"""Columns that are probably no features: ids, dates, groups, and numbers that a stray word made into texts.

Nothing here is refused. What a first reading shows of a column is kept in `Signs`, and `notes` are the sentences.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from coterie.data.readers.pieces import Array, Places, names
from coterie.data.readers.tables.rows import parsed, with_comma

LONG = 64
"""Letters of a text up to which it is kept as it is, to be told from others."""
KEPT = 500_000
"""Different values that are remembered of all columns together; later rows of a longer table are not looked at."""
MARKS = 50
"""Different marks beside numbers that are counted."""
FEWEST = 20
"""Rows from which on their values, and not the name alone, tell what a column is."""
DATE = re.compile(
    r"(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2}))([ T]\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?.{0,6})?"
    r"|\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?"
)
THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?")
CODE = re.compile(r"\D{0,12}\d{2,}\D{0,4}")
MEASURED = re.compile(
    r"(?P<before>[<>≤≥~≈±]=?|[$€£¥])?\s*[+-]?\d+(?P<blank>([ '\u2019\u00a0\u202f]\d{3})*)([.,]\d+)?\s*"
    r"(?P<after>[%‰°$€£¥µμA-Za-z][A-Za-z0-9%/°²³µμ.*^-]{0,11})?"
)
"""A number with what is written before or after it: `12 mg`, `< 0.5`, `7 %`, `€12`, `1 234`."""
ID_WORDS = {"id", "ids", "uuid", "guid", "idx", "rowid", "mrn", "ssn", "identifier"}
ROW_NAMES = {"index", "row index", "row", "row number", "rownumber", "index level 0", "#"}
DATE_WORDS = {"date", "datetime", "timestamp", "dob"}
MISSING_CODES = (-1.0, -9.0, -99.0, -999.0, -9999.0, -99999.0, 999.0, 9999.0, 99999.0)
"""Numbers that files write for a missing one."""
REPEATED, FAR = 3, 10.0
"""Times that such a number occurs at least, and the deviations of the others that it lies from their mean."""
OWNERS = {
    "patient", "patients", "subject", "subjects", "person", "participant", "speaker", "lesion", "case", "animal",
    "family", "household", "user", "session", "slide", "donor", "writer", "author", "scan", "visit", "record",
    "recording", "episode", "admission", "pid",
}
"""Words for whom or what several rows may belong to."""


@dataclass
class Signs:
    """What the values of one column look like, row by row."""

    n: int = 0  # values seen, gaps left out
    distinct: set[object] | None = field(default_factory=set)  # None for numbers that are not whole
    room: int = KEPT
    runs: int = 0  # of equal values in neighbouring rows
    last: object = None
    step: float | None = None  # from one row to the next, where it is always the same
    counting: bool = True
    ends: Counter[float] = field(default_factory=Counter)  # how often missing codes are the least or largest number
    low: float = np.inf
    high: float = -np.inf
    dates: bool = True
    commas: bool = True  # every text is a number, with commas or points for decimals or thousands or a plain one
    comma: str = ""  # the first of them that is no plain one, and where it stands
    unread: str = ""  # the first of them that decimal=comma does not read, and where it stands
    codes: bool = True
    numbers: int = 0  # texts that are such numbers
    beside: Counter[str] = field(default_factory=Counter)  # what other numbers have beside them, and how many have it
    first: dict[str, str] = field(default_factory=dict)  # the first number that has it, and where it stands
    strange: str = ""  # the first text that is none, and where it stands

    def look(self, values: Array, places: Places) -> None:
        """Take in a column's values of further rows; missing ones are NaN or None."""
        if values.dtype.kind == "f":
            self._numbers(values[np.isfinite(values)])
        else:
            self._texts(values, places)

    def _numbers(self, values: Array) -> None:
        if not len(values):
            return
        self.low, self.high = min(self.low, float(values.min())), max(self.high, float(values.max()))
        for end in {float(values.min()), float(values.max())} & set(MISSING_CODES):
            self.ends[end] += int((values == end).sum())
        self.dates = self.codes = False
        if self.distinct is None:
            return
        if not (values == np.floor(values)).all():
            self.distinct, self.counting = None, False
            return
        if self._full(len(values)):
            return
        before = [self.last] if isinstance(self.last, float) else []  # a text, where the file before holds texts
        steps = np.diff(np.concatenate([before, values]))
        self.runs += int((steps != 0).sum()) + (not before)
        if len(steps) and self.counting:
            self.step = float(steps[0]) if self.step is None else self.step
            self.counting = bool(self.step != 0 and (steps == self.step).all())
        self.last = float(values[-1])
        self.distinct.update(np.unique(values).tolist())

    def _texts(self, values: Array, places: Places) -> None:
        self.counting = False
        for k, value in enumerate(values):
            if value is None:
                continue
            plain, comma = parsed(value) is not None, with_comma(value) is not None
            number = plain or comma or THOUSANDS.fullmatch(value) is not None
            self.numbers += number
            self.commas = self.commas and number
            here = f"'{value[:40]}', {places(k)}"
            if number and not plain and not self.comma:
                self.comma = here
            if number and not comma and ("." in value or "," in value) and not self.unread:
                self.unread = here
            if not number and not self.strange:
                self.strange = here
            if not number and (mark := _mark(value)) and (mark in self.beside or len(self.beside) < MARKS):
                self.beside[mark] += 1
                self.first.setdefault(mark, here)
            self.dates = self.dates and DATE.fullmatch(value) is not None
            self.codes = self.codes and CODE.fullmatch(value) is not None
            if self.distinct is not None and not self._full(1):
                kept = value if len(value) <= LONG else hash(value)  # long texts would take the file's size
                self.runs += kept != self.last
                self.last = kept
                self.distinct.add(kept)

    def _full(self, count: int) -> bool:
        """Whether there is no room for more values; otherwise they are counted."""
        full = self.distinct is not None and len(self.distinct) >= self.room
        self.n += 0 if full else count
        return full

    @property
    def different(self) -> int:
        return len(self.distinct or ())

    @property
    def mark(self) -> str:
        """What stands beside the numbers of a column, where at least half of its texts are such or plain numbers.

        One alone is a stray text, and so is a mark of fewer than half of the texts that are no plain numbers.
        """
        mark, count = max(self.beside.items(), key=lambda one: one[1], default=("", 0))
        most = count >= 2 and count >= 0.5 * (self.n - self.numbers)
        return mark if most and count + self.numbers >= 0.5 * self.n and not self.commas else ""

    @property
    def repeats(self) -> float:
        """Rows for each different value."""
        return self.n / self.different if self.different else 0.0


def _mark(text: str) -> str:
    """What is written beside the one number that a text holds; empty where the text is something else."""
    found = MEASURED.fullmatch(text.strip()) if len(text) <= LONG else None
    if found is None:
        return ""
    return found["after"] or found["before"] or ("blanks for thousands" if found["blank"] else "")


def words_of(column: str) -> list[str]:
    """A name's words in lower case: `patientId`, `patient_id` and `Patient ID` have the same two."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", column)]


def looks_like_id(column: str, signs: Signs, numeric: bool) -> str:
    """Why a column seems to number or name its rows; empty where it does not.

    Numbers that are not whole never do. Whole ones do by their name, if they count the rows up, if they are the numbers
    of a counter in another order, or if all of them are different and have as many digits, 4 at least. Texts do if
    nearly every row has its own.
    """
    if signs.distinct is None or not signs.n or signs.mark:
        return ""
    n, different = signs.n, signs.different
    plain = " ".join(column.lower().replace("_", " ").split())
    own = different == n and n >= FEWEST
    if numeric:
        if ID_WORDS & set(words_of(column)) or plain in ROW_NAMES or plain.startswith("unnamed"):
            return "by its name"
        if own and signs.counting:
            return "it counts the rows"
        if own and signs.high - signs.low < 1.5 * n:
            return "every row has its own number"
        if own and n >= 50 and signs.low >= 1000 and len(f"{signs.low:.0f}") == len(f"{signs.high:.0f}"):
            return "every row has its own number"
        return ""
    if n >= 10 and different >= 0.9 * n:
        return "nearly every row has its own text"
    return "by its name" if ID_WORDS & set(words_of(column)) and different > FEWEST else ""


def looks_like_date(column: str, signs: Signs, numeric: bool) -> bool:
    """Texts that are dates or times; whole numbers that are yyyymmdd, seconds or milliseconds since 1970; or a name."""
    if not numeric:
        return signs.dates and bool(signs.n)
    if signs.distinct is None or not signs.n:
        return False
    if DATE_WORDS & set(words_of(column)):
        return True
    if signs.n < FEWEST:
        return False
    if signs.low >= 19_000_101 and signs.high <= 21_001_231:
        return all(1 <= int(v) // 100 % 100 <= 12 and 1 <= int(v) % 100 <= 31  # type: ignore[call-overload]
                   for v in signs.distinct)
    return any(9.4e8 * unit <= signs.low and signs.high <= 2.1e9 * unit for unit in (1, 1000))


def looks_like_group(column: str, signs: Signs, numeric: bool, clients: int) -> bool:
    """A column that says whose rows these are: more different values than clients, most of them several times.

    Its name says so (patient, lesion, speaker, ... or an id with repeats); or its texts are codes, or lie together as
    blocks of rows, and there are too many for an ordinary category.
    """
    if signs.distinct is None or signs.n < FEWEST or signs.repeats < 1.2 or signs.different <= max(clients, 4):
        return False
    if looks_like_date(column, signs, numeric) or signs.mark:
        return False
    named = set(words_of(column))
    if named & (OWNERS | ID_WORDS) and signs.different >= signs.n / 100:
        return True
    blocks = signs.runs == signs.different and signs.repeats >= 2
    return not numeric and signs.different >= FEWEST and signs.repeats <= 20 and (signs.codes or blocks)


def marked_numbers(signs: Signs) -> str:
    """What a column of numbers with a mark beside them holds, in words."""
    mark = signs.mark
    return f"numbers with {mark if ' ' in mark else repr(mark) + ' beside them'} ({signs.first[mark]})"


def notes(
    found: Mapping[str, Signs], numeric: Mapping[str, bool], features: Sequence[str], chosen: Iterable[str],
    others: Iterable[str], clients: int, grouped: bool,
) -> list[str]:
    """Sentences on the columns that became `features`, those that the user chose by name left out.

    Groups are looked for among the `others` too: a column that is left out still says whose rows these are.
    """
    said, chosen = [], set(chosen)
    looked = [c for c in features if c not in chosen]
    groups = [] if grouped else [c for c in (*features, *others)
                                 if looks_like_group(c, found[c], numeric[c], clients)]
    said += group_notes(groups, found)
    dates = [c for c in looked if looks_like_date(c, found[c], numeric[c])]
    if dates:
        said.append(f"{_several(dates)} to hold dates or times, taken as ordinary features; leave out what a model "
                    f"should not know: ignore={','.join(dates)}")
    ids = {c: looks_like_id(c, found[c], numeric[c]) for c in looked if c not in dates and c not in groups}
    ids = {c: why for c, why in ids.items() if why}
    if ids:
        why = ", ".join(f"'{c}': {reason}" for c, reason in list(ids.items())[:4])
        now = "is a feature now; leave it out" if len(ids) == 1 else "are features now; leave them out"
        said.append(f"{_several(list(ids))} to be {'an id' if len(ids) == 1 else 'ids'} rather than measurements "
                    f"({why}), and {now}: ignore={','.join(ids)}")
    marked = [c for c in looked if not numeric[c] and found[c].mark and c not in dates]
    for column in marked[:4]:
        said.append(f"column '{column}' holds {marked_numbers(found[column])}, so each of its "
                    f"{found[column].different} different values became a category; write the numbers alone to have "
                    "them read as numbers")
    mixed = [c for c in looked if not numeric[c] and found[c].numbers >= 0.5 * max(found[c].n, 1)
             and not found[c].commas and found[c].strange and c not in marked]
    for column in mixed[:4]:
        said.append(f"column '{column}' holds numbers and also other texts ({found[column].strange}), so each of its "
                    f"{found[column].different} values became a category; mend the file, or write NA for what is "
                    "missing")
    return said


def group_notes(groups: Sequence[str], found: Mapping[str, Signs]) -> list[str]:
    """What to type for columns that look like groups."""
    if not groups:
        return []
    one = groups[0]
    return [f"{_several(groups)} to say whose rows these are ({found[one].different} different values in "
            f"{found[one].n} rows of '{one}'): rows of one may be trained and tested on, so scores come out too high; "
            f"group={one} keeps them on one side of the split"]


def missing_codes(column: str, signs: Signs, n: int, mean: float, squares: float, way: str) -> list[str]:
    """A note where numbers such as -999 stand at an end of the range, again and again and far from all others.

    `way` is what to do with cells that are empty.

    `n`, `mean` and `squares`, the sum of squared distances to the mean, are of the whole column. Without c numbers v:
    n' = n - c, mean' = (n mean - c v) / n', squares' = squares - c (v - mean)^2 n / n'.
    """
    ends = {v: c for v, c in signs.ends.items() if v in (signs.low, signs.high) and c >= REPEATED}
    for v, c in ends.items():
        if n - c < FEWEST:
            return []
        squares -= c * (v - mean) ** 2 * n / (n - c)
        mean, n = (n * mean - c * v) / (n - c), n - c
    deviation = math.sqrt(max(squares, 0.0) / n) if ends else 0.0
    far = [v for v in ends if deviation > 0 and abs(v - mean) > FAR * deviation]
    return [f"perhaps missing: column '{column}' holds {v:.0f} {ends[v]} times, far from its other values (about "
            f"{mean:.3g}, deviation {deviation:.3g}); if it stands for a missing value, leave these cells empty in the "
            f"file{way}" for v in far]


def unused_groups(columns: Mapping[str, Array], clients: int) -> list[str]:
    """The same for whole columns that were not taken for anything: numbers, or texts of which None is missing."""
    found = {name: Signs() for name in columns}
    for name, values in columns.items():
        plain = values.astype(np.float64) if values.dtype.kind in "biuf" else names(
            [None if v is None else v if isinstance(v, str) else str(v) for v in values.tolist()])
        found[name].look(plain, Places(name, "row", np.arange(len(values))))
    like = [name for name, values in columns.items()
            if looks_like_group(name, found[name], values.dtype.kind in "biuf", clients)]
    return group_notes(like, found)


def _several(columns: Sequence[str]) -> str:
    if len(columns) == 1:
        return f"column '{columns[0]}' seems"
    shown = ", ".join(f"'{c}'" for c in columns[:6])
    return f"columns {shown}{f' and {len(columns) - 6} more' if len(columns) > 6 else ''} seem"
