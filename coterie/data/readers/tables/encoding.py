"""Columns as features and labels: numbers as they are or scaled, texts as one 0/1 feature each or as tokens."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from coterie.data.features import Feature
from coterie.data.labels import alike, are_targets, name_of, written
from coterie.data.readers.pieces import SPLIT_WORDS, Array, Piece, Source, class_list, collect, names
from coterie.data.readers.refusals import Problems
from coterie.data.readers.tables import suspicious
from coterie.data.readers.tables.columns import (
    CATEGORIES,
    Column,
    Learned,
    Roles,
    clients_of,
    columns_named,
    learn,
    role_of,
)
from coterie.data.readers.tables.rows import CLIENT, LABEL, SPLIT, Decimal, Reading, Rows, parsed, unlabelled
from coterie.data.readers.tables.schema import Encoding, read_schema, unit_of, without_labels, write_schema
from coterie.data.readers.text import RULES, Cutter, Tokenizer
from coterie.data.readers.token_tasks import TokenTask
from coterie.data.readers.vocabulary import require_same
from coterie.errors import CoterieError, NoLabels

LARGE = 10.0
"""Root mean square of a column from which on it is said that columns are not scaled."""
LARGE_TARGET = 100.0
"""Mean or deviation of a target from which on that is said of it: a last layer's bias goes further than weights."""


def encode(
    rows: Reading, name: str, problems: Problems, roles: Roles, *, scale: bool, fill: str | None,
    tokenizer: str | Tokenizer, words: int, length: int, classes: str | Sequence[str] | None, regression: bool | None,
    schema: str | Encoding | None, shape: str | None, skip: bool, task: str | None = None,
    clients: Sequence[str] = (), notes: Sequence[str] = (), decimal: Decimal = "auto",
) -> Source:
    """Learn the columns, then encode them."""
    followed = schema if isinstance(schema, dict) else read_schema(schema)
    task = task or (followed or {}).get("task")
    tokens = None if task is None else TokenTask(task)
    if tokens is not None:
        text = roles.text or roles.x or (followed or {}).get("text")
        if text is None:
            raise CoterieError(f"task={task} needs the column of the texts; name it with text=COLUMN.")
        roles, regression, classes = replace(roles, label=LABEL, text=text, x=None), True, None
    if tokens is not None or (followed is not None and followed.get("label") == LABEL):
        labelled = rows

        def rows(told: Problems | None) -> Iterator[Rows]:
            return map(unlabelled, labelled(told))

    table = learn(rows, roles, problems, None if followed is None else followed["columns"])
    if not table.rows:
        said = problems.sentences()
        raise CoterieError(f"{name} holds no rows" + (f": {'; '.join(said)}." if said else "."))
    regression = False if classes and not regression else regression
    by = "the run" if isinstance(schema, dict) else "the schema"  # whoever has no file of it never met the word
    encoder = _ColumnEncoder(name, table, roles, regression, followed, scale, fill, decimal, by)
    encoder.classes = class_list(classes) or encoder.classes
    cutter = Cutter(tokenizer, words, length)
    if encoder.text is not None:
        encoder.cut_by(cutter, followed, tokens)
    notes = [*notes, *encoder.report(problems, table.rows), *encoder.suspicions(table)]
    if isinstance(schema, str) and not os.path.exists(schema):
        write_schema(Path(schema), encoder.encoding())

    def pieces() -> Iterator[Piece]:
        for block in rows(None):
            piece = encoder.piece(block, cutter, problems, tokens)
            if piece is not None:
                yield piece

    source = collect(pieces(), name, problems, skip=skip, classes=encoder.classes,
                     regression=encoder.regression, shape=shape, clients=clients, notes=notes)
    names = None if source.classes is None else list(source.classes)
    source = replace(source, encoding={**encoder.encoding(), "classes": names}, notes=(*source.notes, *cutter.notes()),
                     features=encoder.features(table.rows, length))
    return source if tokens is None else tokens.finished(source, cutter)


class _ColumnEncoder:
    """How each column is encoded; `by` is what the schema that is followed is called."""

    def __init__(
        self, name: str, table: Learned, roles: Roles, regression: bool | None, schema: Encoding | None,
        scale: bool, fill: str | None, decimal: Decimal = "auto", by: str = "the schema",
    ) -> None:
        self.found = found = table.columns
        self.by, self.follows = by, schema is not None
        self.decimal, self.roles = decimal, roles
        told = (schema or {}).get("label")
        self.label = role_of(roles.label, told or "label", found)
        if self.label is None and told is not None:
            raise without_labels(name, told)
        if self.label is None:
            listed = ", ".join(c for c in found if not c.startswith("\0"))
            raise NoLabels(f"{name} has no column 'label'; say which it is: label=NAME (there are {listed}).")
        self.client = role_of(roles.client, (schema or {}).get("client") or "client", found, CLIENT)
        self.split = role_of(roles.split, "split", found, SPLIT)
        self.text = role_of(roles.text, (schema or {}).get("text") or "\0", found)
        if self.text is None and (schema or {}).get("text") is not None:
            raise CoterieError(f"{name} has no column '{(schema or {})['text']}', whose text {by} needs; add it.")
        self.tokens: Encoding = {}  # how texts become numbers
        self.group = role_of(roles.group, (schema or {}).get("group") or "\0", found)
        if self.group is not None and self.group in (self.label, self.client, self.split):
            raise CoterieError(f"column '{self.group}' is the label, the client or the split already, so it cannot be "
                               "the group as well; name another column.")
        wanted = columns_named(roles.x, found)
        ignored = columns_named(roles.ignore, dict.fromkeys([*found, *sorted(table.seen)]))
        self.chosen, self.ignored = wanted, ignored
        taken = (self.label, self.client, self.split, CLIENT, SPLIT, self.group)
        self.columns = wanted or [c for c in found if c not in taken and c not in ignored]
        self.classes: list[str] | None = None
        told_so = (schema or {}).get("regression", False if (schema or {}).get("classes") else None)
        self.regression = told_so if regression is None else regression
        label = found[self.label]
        self._require_points(self.label)
        if label.shape:
            raise CoterieError(f"column '{self.label}' holds {list(label.shape)} values a row, so it is no label.")
        self.targets = label.numeric and are_targets(label.decimal, regression=self.regression)
        self.arrays = [c for c in self.columns if found[c].shape]
        if self.text is not None:
            self.columns = [self.text]
            if found[self.text].numeric:
                raise CoterieError(f"column '{self.text}' holds numbers, so it is no text.")
        elif self.arrays and len(self.columns) > 1:
            raise CoterieError(f"column '{self.arrays[0]}' holds arrays; take it alone with x={self.arrays[0]}.")
        self.categories: dict[str, list[str] | None] = {}
        self.followed = schema is not None
        if schema is not None:
            self._follow(schema, name)
        elif self.text is None:
            self._settle()
        if both := [c for c in self.columns if c in ignored]:
            by = "x" if wanted else "text" if self.text is not None else by
            raise CoterieError(f"column '{both[0]}' is taken by {by} and left out by ignore; name it in one of them.")
        if not self.columns:
            raise CoterieError(f"{name} has no columns left for features.")
        self.scale, self.fill = self._scale(schema, scale), self._fill(schema, fill)
        if schema is None:
            self.constant = [column for column in self.scale or () if not self.found[column].deviation] or None
        else:
            self.constant = schema.get("constant") or None

    def _numbers(self) -> list[str]:
        """The columns that are one number a row."""
        return [] if self.text is not None else [
            c for c in self.columns if self.categories.get(c) is None and not self.found[c].shape
        ]

    def _scale(self, schema: Encoding | None, wanted: bool) -> dict[str, list[float]] | None:
        """{column: [mean, deviation]}, that of the schema where there is one; a constant column is only centred.

        The label is among them where it is a number to predict.
        """
        if schema is not None:
            return schema.get("scale")
        numbers = [*self._numbers(), *([str(self.label)] if self.targets else [])]
        made = {c: [self.found[c].mean, self.found[c].deviation or 1.0] for c in numbers} if wanted else None
        for column, pair in (made or {}).items():
            if not all(map(math.isfinite, pair)):
                raise CoterieError(f"column '{column}' holds numbers too large to be scaled.")
        return made

    def _fill(self, schema: Encoding | None, wanted: str | None) -> dict[str, float] | None:
        """{column: what stands for a missing number}; a missing text is none of the categories."""
        if wanted is None:
            return schema.get("fill") if schema is not None else None
        if wanted == "mean":
            if self.arrays:
                raise CoterieError(f"fill=mean is for columns of numbers, and '{self.arrays[0]}' holds arrays.")
            known = (schema or {}).get("scale") or {}
            empty = [c for c in self._numbers() if c not in known and not self.found[c].n]
            if empty and schema is not None:  # others' data have the column, so it is not to be left out
                raise CoterieError(f"column '{empty[0]}' is empty, so it has no mean, and {self.by} says none; say "
                                   "what to fill in, fill=NUMBER.")
            return {c: float(known[c][0] if c in known else self.found[c].mean) for c in self._numbers()}
        number = parsed(wanted)
        if number is None or not math.isfinite(number):
            raise CoterieError(f"fill must be a number or mean, not '{wanted}'.")
        return dict.fromkeys(self.columns, number)

    def encoding(self) -> Encoding:
        label = self.found[str(self.label)]
        classes = None if self.targets or label.numeric or not label.categories else sorted(label.categories)
        client = None if self.client == CLIENT else self.client
        made: Encoding = {
            "columns": self.categories, "label": self.label, "client": client, "classes": self.classes or classes,
            "regression": self.targets,
        }
        more = (("scale", self.scale), ("constant", self.constant), ("fill", self.fill), ("group", self.group))
        return made | {k: v for k, v in more if v is not None} | self.tokens

    def cut_by(self, cutter: Cutter, schema: Encoding | None, task: TokenTask | None = None) -> None:
        """Texts are cut so; another way than that of the schema that is followed is refused."""
        asked = {} if task is None else {"task": task.name}
        self.tokens = {"text": self.text, **cutter.encoding(), **asked}
        if schema is not None and "tokenizer" in schema:
            require_same(schema, self.tokens, self.by)
        for option in ("tokenizer", "words", "length", "task"):
            told, given = (schema or {}).get(option), self.tokens.get(option)
            own = option == "tokenizer" and told not in RULES  # somebody's function, which may lie elsewhere here
            if told is not None and told != given and not own:
                raise CoterieError(f"texts are cut with {option}={told} by {self.by}, and with {option}={given} here; "
                                   f"say {option}={told}.")

    def _require_points(self, column: str) -> None:
        """Refuse numbers with a decimal comma, and others among such: as texts they would be categories unsaid."""
        known = self.found[column]
        signs = known.signs
        if known.numeric or not signs.commas:
            return
        if self.decimal == "comma" and signs.unread:
            way = "" if column == self.label else f", or leave the column out with ignore={column}"
            if self.follows:
                way += "; decimal=auto reads a file whose points are decimals, unlike those it follows"
            raise CoterieError(
                f"column '{column}' holds a number that decimal=comma cannot read ({signs.unread}): in all files, "
                f"write decimals with a comma and thousands without a sign, so for 1.234 either 1,234 or 1234{way}."
            )
        if self.decimal == "auto" and signs.comma and known.decimal:
            raise CoterieError(
                f"column '{column}' holds numbers with a comma in one file ({signs.comma}) and with a decimal point in "
                "others: write all files alike, as decimal=comma is for all of them, and take commas that mark "
                "thousands out."
            )
        if self.decimal == "auto" and signs.comma:
            raise CoterieError(
                f"column '{column}' holds numbers with a comma or points for thousands ({signs.comma}): decimal=comma "
                "reads 3,5 as 3.5 and 1.234.567 as 1234567, decimal=point takes them as texts, and commas that mark "
                "thousands must be taken out of the file."
            )

    def _settle(self) -> None:
        for column in self.columns:
            known = self.found[column]
            self._require_points(column)
            if not known.numeric and known.categories is None:
                some = f"e.g. {known.signs.strange}" if known.signs.strange else "as text"
                raise CoterieError(
                    f"column '{column}' holds neither numbers nor at most {CATEGORIES} different texts "
                    f"({some}){_kind(column, known)}; leave it out with ignore={column}, or take it as "
                    f"text={column}{_quoted(column)}."
                )
            self.categories[column] = None if known.numeric else sorted(known.categories or ())

    def _follow(self, schema: Encoding, name: str) -> None:
        self.classes = schema["classes"]
        if self.text is not None:
            return
        self.columns, self.categories = list(schema["columns"]), dict(schema["columns"])
        for column in self.columns:
            if column not in self.found:
                filled = "are filled in as there" if schema.get("fill") else (
                    "fill=mean fills in" if schema.get("scale") else "fill=NUMBER fills in")
                raise CoterieError(f"{name} has no column '{column}', which {self.by}'s data have: add it, with empty "
                                   f"cells where nothing is known, which {filled}.")
            if self.categories[column] is None and not self.found[column].numeric:
                self._require_points(column)
                raise CoterieError(f"column '{column}' of {name} must hold numbers, as {self.by} says; it holds "
                                   f"{self.found[column].signs.strange or self.found[column].signs.comma}.")

    def report(self, problems: Problems, total: int) -> list[str]:
        """Missing values, by column and client; a note instead where they are filled in, or where scales differ."""
        notes = []
        large = {c: self.found[c].size for c in self._numbers() if self.found[c].size > LARGE}
        target = self.found[str(self.label)] if self.targets else None
        if target is not None and max(abs(target.mean), target.deviation) > LARGE_TARGET and self.scale is None:
            large = {str(self.label): target.size, **large}
        if large and self.scale is None:
            first = sorted(large, key=lambda c: (c != self.label, -large[c]))[:3]
            some = ", ".join(f"'{c}' ({'the target, ' if c == self.label else ''}about {large[c]:.3g})" for c in first)
            notes.append(f"columns hold large numbers, taken as they are: {some}; models train badly on these, and "
                         "scale=true brings every column to mean 0 and deviation 1"
                         + ("; scores stay in the target's own unit" if str(self.label) in large else ""))
        for column, usual in ((self.label, "label"), (self.client, "client"), (self.split, "split")):
            if column in self.ignored and getattr(self.roles, usual) is None:
                notes.append(f"column '{column}' is left out of the features by ignore, and it is the {usual} still, "
                             "by its name; call it otherwise in the file if it is not")
        notes += self._spelled()
        problems.totals["rows"] = total
        for column in dict.fromkeys([*self.columns, self.client, self.split, self.group]):
            if column is None or not (missing := self.found[column].missing):
                continue
            title = column.lstrip("\0")
            role = column in (self.client, self.split, self.group)
            if not role and self.fill is not None and self.text is None:
                what = f"{self.fill.get(column, 0):g}" if self.categories.get(column) is None else "no category"
                empty = missing.total() == total and not self.followed  # a schema's columns cannot be left out
                way = f"; it is empty, and ignore={column} leaves it out" if empty else ""
                notes.append(f"filled in: column '{title}' lacked {missing.total()} of {total} values ({what}){way}")
                continue
            if not role and self.text is None and missing.total() == total and not self.followed:
                problems.remedies.append(f"leave the empty column out with ignore={column}")
            elif not role and self.text is None:
                problems.remedies.append("fill the gaps with fill=mean")
            problems.add_counted(f"rows have no value in column '{title}'", dict(missing), self.found[column].gaps)
        return notes

    def _spelled(self) -> list[str]:
        """Notes on categories that differ in case or blanks alone, and on a class -1."""
        notes = []
        for column, words in ({} if self.text is not None else self.categories).items():
            if pairs := [" and ".join(f"'{word}'" for word in each) for each in alike(words or ())]:
                notes.append(f"values of column '{column}' that differ in case or blanks alone are different "
                             f"categories: {'; '.join(pairs[:4])}; write them alike if they are one")
        labels = set() if self.targets else self.found[str(self.label)].categories or set()
        others = labels - {"-1"}
        # -1 and 1 alone are a usual way to write two classes
        if "-1" in labels and others != {"1"} and others and all(word.isdecimal() for word in others):
            notes.append(f"the labels in column '{self.label}' are -1 and whole numbers from 0 on, and -1 is taken as "
                         "a class of its own; is -1 'no label'? Leave these cells empty then, and skip=true leaves "
                         "their rows out")
        return notes

    def suspicions(self, table: Learned) -> list[str]:
        """Notes on codes for missing numbers, and, where no schema decides what is read, on columns that are probably
        no features and on groups."""
        if self.followed:
            return self._codes()
        columns = [c for c in self.columns if self.text is None and not self.found[c].shape]
        taken = {self.label, self.client, self.split, self.group, *self.columns}
        others = [c for c in self.found if c not in taken and not c.startswith("\0") and not self.found[c].shape]
        said = suspicious.notes(
            {c: known.signs for c, known in self.found.items()}, {c: known.numeric for c, known in self.found.items()},
            columns, self.chosen, others, table.clients, self.group is not None or self.split is not None,
        )
        return said + self._codes()

    def _codes(self) -> list[str]:
        """Notes on numbers that may stand for missing ones."""
        said, out = [], "leave their rows out with skip=true"
        way = f" and fill the gaps with fill=mean, or {out}" if self.fill is None else ", and they are filled in"
        for column in self._numbers():
            known = self.found[column]
            said += suspicious.missing_codes(column, known.signs, known.n, known.mean, known.squares, way)
        if self.targets:  # nobody fills in what is to be predicted
            known = self.found[str(self.label)]
            said += suspicious.missing_codes(
                str(self.label), known.signs, known.n, known.mean, known.squares, f" and {out}")
        return said

    def features(self, total: int, length: int) -> tuple[Feature, ...]:
        """The columns that are x, in their order."""
        made = []
        for column in self.columns:
            known = self.found[column]
            missing = known.missing.total() / total
            if self.text is not None:
                made.append(Feature(column, "text", length, missing=missing))
            elif known.shape:
                size = "x".join(map(str, known.shape))
                made.append(Feature(column, f"array {size}", math.prod(known.shape), missing=missing))
            elif (words := self.categories.get(column)) is not None:
                made.append(Feature(column, "category", len(words), categories=len(words), missing=missing))
            else:
                low, high = (known.signs.low, known.signs.high) if known.n else (None, None)
                kind = "number" if known.decimal else "whole number"
                made.append(Feature(column, kind, 1, low, high, missing=missing))
        return tuple(made)

    def piece(
        self, block: Rows, cutter: Cutter, problems: Problems, task: TokenTask | None = None
    ) -> Piece | None:
        good = np.ones(len(block), dtype=bool)
        for column in dict.fromkeys([*self.columns, self.client, self.split, self.group]):
            if column is None or (self.fill is not None and self.text is None and column in self.columns
                                  and column != self.group):
                continue
            values = block.columns[column]
            good &= ~np.isnan(values).reshape(len(values), -1).any(1) if values.dtype.kind == "f" else np.array(
                [value is not None for value in values], dtype=bool)
        self._known(block, good, problems)
        self._finite(block, good, problems)
        split = self._split(block, good, problems) if self.split is not None else None
        kept = {column: values[good] for column, values in block.columns.items()}
        n = int(good.sum())
        if not n:
            return None
        client = None
        if self.client is not None:
            client = names(clients_of(Rows(block.places, {self.client: kept[self.client]}), self.client))
        group = None if self.group is None else names(
            clients_of(Rows(block.places, {self.group: kept[self.group]}), self.group))
        split, places = None if split is None else split[good], block.places.only(good)
        labels = self._labels(kept[str(self.label)])
        if task is None:
            return Piece(self._features(kept, cutter), labels, block.where, client, split, group, places)
        x, of = task.samples(kept[str(self.text)].tolist(), cutter)
        if not len(of):
            return None
        client, split, group = (None if each is None else each[of] for each in (client, split, group))
        return Piece(x, labels[of], block.where, client, split, group, places.only(of))

    def _finite(self, block: Rows, good: Array, problems: Problems) -> None:
        """Strike rows with a number that is infinite, or too large for float32."""
        label = [str(self.label)] if self.found[str(self.label)].numeric else []
        for column in (*self._numbers(), *label):
            with np.errstate(over="ignore"):
                huge = np.isinf(self._scaled(column, block.columns[column]).astype(np.float32)) & good
            for k in np.flatnonzero(huge).tolist():
                good[k] = False
                problems.add(f"rows have an infinite value in column '{column}'", block.places(k),
                             why=f"{block.columns[column][k]:g}")

    def _scaled(self, column: str, values: Array) -> Array:
        mean, deviation = (self.scale or {}).get(column, (0.0, 1.0))
        return (values - mean) / deviation

    def _known(self, block: Rows, good: Array, problems: Problems) -> None:
        """Strike rows with a category that a schema lacks."""
        for column, known in self.categories.items():
            if known is None or not self.followed:
                continue
            for k, word in enumerate(_words(block.columns[column])):
                if good[k] and word is not None and word not in known:
                    good[k] = False
                    problems.add(f"rows have a value in column '{column}' that {self.by} lacks",
                                 block.places(k), why=f"'{word}'")

    def _split(self, block: Rows, good: Array, problems: Problems) -> Array:
        said = clients_of(block, self.split)
        words = [word.lower() for word in said]
        for k in np.flatnonzero(good).tolist():
            if words[k] not in SPLIT_WORDS:
                good[k] = False
                problems.add("rows have a split other than train, val and test", block.places(k), why=f"'{said[k]}'")
        return np.array([SPLIT_WORDS.get(word, 0) for word in words], dtype=np.int8)

    def _labels(self, values: Array) -> Array:
        if values.dtype.kind != "f":
            return values
        if self.targets:
            return values if unit_of(self.encoding()) is not None else values.astype(np.float32)
        return names([None if np.isnan(v) else name_of(v) for v in values])

    def _features(self, kept: Mapping[str, Array], cutter: Cutter) -> Array:
        if self.text is not None:
            return np.array([cutter(text) for text in kept[self.text]], dtype=np.int64)
        if self.arrays:
            column = self.columns[0]
            values = kept[column] if self.fill is None else _filled(kept[column], self.fill.get(column, 0.0))
            return values.astype(np.float32)
        parts: list[Array] = []
        for column in self.columns:
            values, known = kept[column], self.categories[column]
            if known is None:
                values = values if self.fill is None else _filled(values, self.fill.get(column, 0.0))
                parts.append(self._scaled(column, values).astype(np.float32)[:, None])
                continue
            place = {word: k for k, word in enumerate(known)}
            one = np.zeros((len(values), len(known)), dtype=np.float32)
            for row, word in enumerate(_words(values)):
                if word is not None:
                    one[row, place[word]] = 1
            parts.append(one)
        return np.concatenate(parts, 1)


def _filled(values: Array, number: float) -> Array:
    return np.where(np.isnan(values), number, values)


def _quoted(column: str) -> str:
    return " (in quotes on a command line: --data 'FILE:...')" if " " in column else ""


def _words(values: Array) -> list[str | None]:
    if values.dtype.kind == "f":
        return [None if np.isnan(v) else written(v) for v in values]
    return list(values)


def _kind(column: str, known: Column) -> str:
    """What a column of many texts probably is, as a part of a sentence."""
    if suspicious.looks_like_date(column, known.signs, known.numeric):
        return ", which seem to be dates"
    if known.signs.mark:
        return f", which are {suspicious.marked_numbers(known.signs)}: write the numbers alone to have them read"
    if suspicious.looks_like_group(column, known.signs, known.numeric, 0):
        return f", which seem to say whose rows these are: group={column} keeps those of one on one side of a split"
    return ""
