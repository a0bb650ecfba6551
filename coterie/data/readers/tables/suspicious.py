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

LONG = 64
"""Letters of a text up to which it is kept as it is, to be told from others."""
KEPT = 500_000
"""Different values that are remembered of all columns together; later rows of a longer table are not looked at."""
FEWEST = 20
"""Rows from which on their values, and not the name alone, tell what a column is."""
DATE = re.compile(
    r"(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2}))([ T]\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?.{0,6})?"
    r"|\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?"
)
COMMA = re.compile(r"[+-]?(\d{1,3}(\.\d{3})+|\d+),\d+([eE][+-]?\d+)?")
THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?")
CODE = re.compile(r"\D{0,12}\d{2,}\D{0,4}")
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
    commas: bool = True  # every text is a number with a comma, for decimals or thousands, or a plain one
    comma: str = ""  # the first of them, and where it stands
    point: str = ""  # the first text that is a plain number with a point, and where it stands
    codes: bool = True
    numbers: int = 0  # texts that are numbers
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
            number = _is_number(value)
            self.numbers += number
            if self.commas and not number:
                self.commas = COMMA.fullmatch(value) is not None or THOUSANDS.fullmatch(value) is not None
                self.comma = self.comma or f"'{value[:40]}', {places(k)}"
            if number and "." in value and not self.point:
                self.point = f"'{value[:40]}', {places(k)}"
            if not number and not self.strange:
                self.strange = f"'{value[:40]}', {places(k)}"
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
    def repeats(self) -> float:
        """Rows for each different value."""
        return self.n / self.different if self.different else 0.0


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def words_of(column: str) -> list[str]:
    """A name's words in lower case: `patientId`, `patient_id` and `Patient ID` have the same two."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", column)]


def looks_like_id(column: str, signs: Signs, numeric: bool) -> str:
    """Why a column seems to number or name its rows; empty where it does not.

    Numbers that are not whole never do. Whole ones do by their name, if they count the rows up, if they are the numbers
    of a counter in another order, or if all of them are different and have as many digits, 4 at least. Texts do if
    nearly every row has its own.
    """
    if signs.distinct is None or not signs.n:
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
    if looks_like_date(column, signs, numeric):
        return False
    named = set(words_of(column))
    if named & (OWNERS | ID_WORDS) and signs.different >= signs.n / 100:
        return True
    blocks = signs.runs == signs.different and signs.repeats >= 2
    return not numeric and signs.different >= FEWEST and signs.repeats <= 20 and (signs.codes or blocks)


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
    mixed = [c for c in looked if not numeric[c] and found[c].numbers >= 0.5 * max(found[c].n, 1)
             and not found[c].commas and found[c].strange]
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


def missing_codes(column: str, signs: Signs, n: int, mean: float, squares: float) -> list[str]:
    """A note where numbers such as -999 stand at an end of the range, again and again and far from all others.

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
    return [f"column '{column}' holds {v:.0f} {ends[v]} times, far from its other values (about {mean:.3g}, deviation "
            f"{deviation:.3g}); if it stands for a missing value, leave these cells empty in the file and fill the "
            "gaps with fill=mean, or leave their rows out with skip=true" for v in far]


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
